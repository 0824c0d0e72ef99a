"""Policies of `DeltaLMConfig.remat`: what of a block is kept for its backward; all else is computed again.

Every policy keeps the block's input. By what else is kept, and what the backward then computes again:

| `remat` | kept of a block | computed again |
|---|---|---|
| `False` | all that its backward reads | the sums of convolutions and norms |
| `save_op_and_mlp` | the op's results, the mixer's sum, the MLP's gate and up | norms, projections, convolutions |
| `save_op` | the op's results | these and the MLP, not the op |
| `True` | nothing | everything, the op too |

The op's results are its output and what its own backward needs, two matrices of 64 x 64 per chunk and head. On a Hopper
GPU these are also some numbers a token for a scalar gate, and where sequences are long or many a state every 8 to 32
chunks. In layers of attention and mixtures of experts nothing has a name, and both policies compute these again.

>>> import jax, jfla.nn
>>> from flax import nnx
>>> sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "head_dim": 16}
>>> config = jfla.nn.DeltaLMConfig(**sizes, remat=jfla.nn.remat_policies.save_op)
>>> model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
>>> tokens = jax.numpy.array([[1, 2, 3]])
>>> loss = lambda model: jfla.nn.next_token_loss(model(tokens), tokens)
>>> print(nnx.grad(loss)(model).head.kernel.shape)
(32, 16)
"""

import jax

_OP = (
    "jfla_output",
    "jfla_a_qk",
    "jfla_inverse",
    "jfla_states",
    "jfla_state_map",
    "jfla_entering_state",
)
_MLP = ("jfla_mixed", "jfla_mlp")

save_op = jax.checkpoint_policies.save_only_these_names(*_OP)
save_op_and_mlp = jax.checkpoint_policies.save_only_these_names(*_OP, *_MLP)
