"""The documentation: the equations of docs/math.md against the definition; every example runs."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfla

DOCS = pathlib.Path(__file__).parents[1] / "docs"
C, K, V = 8, 3, 4
SCALE = K**-0.5


def draw(op):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, C, K))
    v, do = rng.standard_normal((2, C, V))
    g = -rng.gamma(1.0, size=(C, K if op == "kda" else 1))
    beta = rng.uniform(0.2, 1.0, C)
    state, dstate = rng.standard_normal((2, K, V))
    return (q, k, v, g, beta, state), (do, dstate)


def equation_1(q, k, v, g, beta, state):
    """The definition, for one head without batch."""
    g = g[None, :, None]
    arrays = [x[None, :, None] for x in (q, k, v)] + [
        g if g.shape[-1] == K else g[..., 0],
        beta[None, :, None],
    ]
    op = (
        jfla.reference.recurrent_kda
        if g.shape[-1] == K
        else jfla.reference.recurrent_gdn
    )
    out = op(*arrays, initial_state=state[None, None], return_final_state=True)
    assert out.final_state is not None
    return out.output[0, :, 0], out.final_state[0, 0]


def spans(first, last):
    """[C, C] of 0 and 1: row n is 1 on the tokens from first[n] to last[n], both included."""
    m = np.arange(C)
    return (
        (m >= np.asarray(first)[:, None]) & (m <= np.asarray(last)[:, None])
    ).astype(float)


def one_chunk(q, k, v, g, beta, state):
    """Equations (2) to (8)."""
    x = {
        "q": q,
        "k": k,
        "v": v,
        "g": np.broadcast_to(g, (C, K)),
        "beta": beta,
        "S": state,
    }
    token = np.arange(C)
    # [i, j, m]
    between = np.array([spans(np.arange(1, C + 1), np.full(C, i)) for i in range(C)])
    x["D"] = np.exp(np.einsum("ijm,md->ijd", between, x["g"])) * np.tri(C)[..., None]
    x["eps"] = np.exp(spans(np.zeros(C), token) @ x["g"])
    x["eta"] = np.exp(spans(token + 1, np.full(C, C)) @ x["g"])
    x["gamma"] = np.exp(x["g"].sum(0))[:, None]
    x["q_hat"] = SCALE * q * x["eps"]
    x["k_hat"] = k * x["eps"]
    x["k_check"] = k * x["eta"]
    x["a_qk"] = SCALE * np.einsum("id,jd,ijd->ij", q, k, x["D"])
    x["M"] = np.tril(np.einsum("id,jd,ijd->ij", k, k, x["D"]), -1)
    x["a_inv"] = np.linalg.inv(np.diag(1 / beta) + x["M"])
    x["v_new"] = x["a_inv"] @ (v - x["k_hat"] @ state)
    x["o"] = x["q_hat"] @ state + x["a_qk"] @ x["v_new"]
    x["S_out"] = x["gamma"] * state + x["k_check"].T @ x["v_new"]
    return x


def gradients(x, do, ds_out):
    """Equations (12) to (16), in the order of the definition's arguments."""
    dv_new = x["a_qk"].T @ do + x["k_check"] @ ds_out
    dv = x["a_inv"].T @ dv_new
    ds = x["gamma"] * ds_out + x["q_hat"].T @ do - x["k_hat"].T @ dv
    w_q = np.tril(do @ x["v_new"].T)
    w_k = -np.tril(dv @ x["v_new"].T, -1)
    dbeta = np.sum(dv * x["v_new"], axis=1) / x["beta"] ** 2

    q, k, w = SCALE * x["q"], x["k"], np.diag(w_q)[:, None]
    w_q = np.tril(w_q, -1)
    dq_in = x["eps"] * (do @ x["S"].T)
    dk_in = -x["eps"] * (dv @ x["S"].T)
    dk_out = x["eta"] * (x["v_new"] @ ds_out.T)
    dq_late = np.einsum("ij,ijd,jd->id", w_q, x["D"], k)
    dk_late = np.einsum("ij,ijd,jd->id", w_k, x["D"], k)
    dk_early = np.einsum("ij,ijd,id->jd", w_q, x["D"], q) + np.einsum(
        "ij,ijd,id->jd", w_k, x["D"], k
    )
    dq = dq_in + dq_late + w * k
    dk = dk_in + dk_out + dk_late + dk_early + w * q

    z_in = q * dq_in + k * dk_in
    z_out = k * dk_out
    pairs = (
        x["D"] * (w_q[..., None] * q[:, None] + w_k[..., None] * k[:, None]) * k[None]
    )
    dg = np.stack([
        x["gamma"][:, 0] * np.sum(x["S"] * ds_out, axis=1)
        + z_in[m:].sum(0)
        + z_out[:m].sum(0)
        + pairs[m:, :m].sum((0, 1))
        for m in range(C)
    ])  # fmt: skip
    z = q * dq_late + k * dk_late - k * dk_early
    from_one_anchor = np.cumsum(z[::-1], axis=0)[::-1]  # equation (17)
    np.testing.assert_allclose(
        from_one_anchor, [pairs[m:, :m].sum((0, 1)) for m in range(C)], atol=1e-12
    )
    return SCALE * dq, dk, dv, dg, dbeta, ds


@pytest.mark.parametrize("op", ["kda", "gdn"])
def test_the_equations_are_the_definition(op):
    primals, cotangents = draw(op)
    x = one_chunk(*primals)
    with jax.enable_x64(True):
        (o, s_out), adjoint = jax.vjp(equation_1, *map(jnp.asarray, primals))
        want = adjoint(tuple(map(jnp.asarray, cotangents)))
        np.testing.assert_allclose(x["o"], o, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(x["S_out"], s_out, rtol=1e-11, atol=1e-12)
        for name, dx, ref in zip(
            ["q", "k", "v", "g", "beta", "state"], gradients(x, *cotangents), want
        ):
            if name == "g" and op == "gdn":
                dx = dx.sum(1, keepdims=True)
            np.testing.assert_allclose(dx, ref, rtol=1e-10, atol=1e-11, err_msg=name)


def test_time_composes():
    """Equations (9) and (10); and (11), whose blocks are those of (5)."""
    (q, k, v, g, beta, state), _ = draw("kda")
    maps = []
    for values in (v, v[::-1]):
        x = one_chunk(q, k, values, g, beta, state)
        r = np.diag(x["gamma"][:, 0]) - x["k_check"].T @ x["a_inv"] @ x["k_hat"]
        maps.append((r, x["k_check"].T @ x["a_inv"] @ values))
    (r1, c1), (r2, c2) = maps
    first = one_chunk(q, k, v, g, beta, state)["S_out"]
    both = one_chunk(q, k, v[::-1], g, beta, first)["S_out"]
    np.testing.assert_allclose(r1 @ state + c1, first, atol=1e-12)
    np.testing.assert_allclose(r2 @ r1 @ state + r2 @ c1 + c2, both, atol=1e-12)

    unit = np.eye(C) + np.diag(beta) @ one_chunk(q, k, v, g, beta, state)["M"]
    inverse, half = np.linalg.inv(unit), C // 2
    early, late = inverse[:half, :half], inverse[half:, half:]
    np.testing.assert_allclose(
        inverse[half:, :half], -late @ unit[half:, :half] @ early, atol=1e-12
    )


def test_every_equation_has_its_number_and_anchor():
    text = (DOCS / "math.md").read_text()
    numbers = [int(n) for n in re.findall(r"\\tag\{(\d+)\}", text)]
    assert numbers == list(range(1, 19))
    assert [int(n) for n in re.findall(r'id="eq-(\d+)"', text)] == numbers


def test_code_cites_equations_that_exist():
    known = set(re.findall(r"\\tag\{(\d+)\}", (DOCS / "math.md").read_text()))
    for path in (DOCS.parent / "jfla").rglob("*.py"):
        for cited in re.findall(
            r"math\.md,\s+equations?\s+([^;.:]*)", path.read_text()
        ):
            assert set(re.findall(r"\d+", cited)) <= known, (path, cited)


def test_files_that_the_documentation_names_exist():
    for page in DOCS.rglob("*.md"):
        for name in re.findall(
            r"`((?:jfla|tests|docs|notebooks)/[\w./]+)`", page.read_text()
        ):
            assert (DOCS.parent / name).exists(), (page.name, name)


@pytest.mark.parametrize("page", ["index.md", "usage.md"])
def test_examples_run_and_print_what_they_say(page, capsys):
    blocks = re.findall(
        r"^```python\n(.*?)^```",
        (DOCS / page).read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
    names: dict[str, object] = {}
    said = []
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), names)
        said += re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.MULTILINE)
    printed = capsys.readouterr().out.splitlines()
    assert len(said) == len(printed) > 0
    for comment, line in zip(said, printed):
        assert comment.startswith(line), (comment, line)
