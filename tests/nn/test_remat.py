"""Rematerialisation policies: what of a block they keep, that the op is not run again, and that no gradient changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jfla
import jfla.nn
from jfla.nn import remat_policies

OPS = pytest.mark.parametrize(
    "op", [pytest.param("kda", marks=pytest.mark.slow), "gdn"]
)
ROWS, TIME, HIDDEN, HEADS, DIM, MLP = 2, 128, 32, 2, 64, 64
CHUNKS = TIME // 64
PAIRS = f"bf16[{CHUNKS},{ROWS},{HEADS},64,64]"
OUTPUT = f"bf16[{ROWS},{TIME},{HEADS},{DIM}]"
OF_OP = [PAIRS, PAIRS, OUTPUT]
OF_GDN_ROWS = [f"f32[{CHUNKS},{ROWS},{HEADS},{n},64]" for n in (3, 4)]
OF_MLP = [f"bf16[{ROWS},{TIME},{HIDDEN}]", *[f"bf16[{ROWS},{TIME},{MLP}]"] * 2]
POLICIES = {
    "save_op": (remat_policies.save_op, OF_OP),
    "save_op_and_mlp": (remat_policies.save_op_and_mlp, OF_OP + OF_MLP),
    "nothing": (jax.checkpoint_policies.nothing_saveable, []),
}


def model_of(op, head_dim=DIM, **options):
    sizes = {
        "vocab_size": 16,
        "hidden_size": HIDDEN,
        "num_layers": 1,
        "num_heads": HEADS,
    }
    config = jfla.nn.DeltaLMConfig(
        **sizes, head_dim=head_dim, intermediate_size=MLP, op=op, **options
    )
    return jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))


def block_of(op):
    """A block as a function of (parameters, x), and these."""
    graph, state = nnx.split(model_of(op, dtype=jnp.bfloat16).blocks[0])
    x = jax.random.normal(jax.random.key(1), (ROWS, TIME, HIDDEN), jnp.bfloat16)
    return lambda state, x: nnx.merge(graph, state)(x, None, None)[0], state, x


@OPS
@pytest.mark.parametrize("name", POLICIES)
def test_a_block_keeps_its_input_and_what_the_policy_says(op, name, capsys):
    policy, expected = POLICIES[name]
    block, state, x = block_of(op)
    with jfla.pallas.compiling_for("9.0"):
        jax.ad_checkpoint.print_saved_residuals(
            jax.checkpoint(block, policy=policy), state, x
        )
    lines = capsys.readouterr().out.splitlines()
    kept = [line.split()[0] for line in lines if "from the argument" not in line]
    of_rows = OF_GDN_ROWS if op == "gdn" and name != "nothing" else []
    assert sorted(kept) == sorted(expected + of_rows)


@OPS
def test_the_op_is_run_again_only_where_nothing_is_kept(op):
    def runs(policy) -> int:
        block, state, x = block_of(op)
        loss = lambda state, x: jnp.sum(
            jax.checkpoint(block, policy=policy)(state, x), dtype="f4"
        )
        with jfla.pallas.compiling_for("9.0"):
            text = str(jax.make_jaxpr(jax.grad(loss))(state, x))
        return text.count("opaque_forward")

    once = runs(remat_policies.save_op)
    assert once > 0
    assert runs(jax.checkpoint_policies.nothing_saveable) == 2 * once


@OPS
def test_policies_change_no_gradient(op):
    tokens = jax.random.randint(jax.random.key(2), (ROWS, 70), 0, 16)

    def gradient(remat):
        graph, state = nnx.split(model_of(op, head_dim=8, remat=remat))
        loss = lambda state: jfla.nn.next_token_loss(
            nnx.merge(graph, state)(tokens), tokens
        )
        options = {"xla_backend_optimization_level": 3}
        return jax.jit(jax.grad(loss), compiler_options=options)(state)

    plain = jax.tree.leaves(gradient(False))
    for remat in (remat_policies.save_op, remat_policies.save_op_and_mlp):
        for a, b in zip(plain, jax.tree.leaves(gradient(remat)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
