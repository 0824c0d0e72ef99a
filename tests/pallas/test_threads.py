"""Interpret mode refuses a kernel that has more warpgroups than JAX has threads on this CPU."""

import os
import subprocess
import sys

FEW_THREADS = """
import jax, jax.numpy as jnp, jfla
x, beta = jnp.ones((1, 64, 1, 128), jnp.bfloat16), jnp.ones((1, 64, 1), jnp.bfloat16)
with jfla.pallas.interpret():
    arguments = dict(qk_norm=True, implementation="pallas")
    print(jfla.recurrent_kda(*(a[:, :1] for a in (x, x, x, -x, beta)), **arguments).output.shape, flush=True)
    for run, g in ((jfla.chunk_kda, -x), (jfla.chunk_gdn, -beta)):
        try:
            run(x, x, x, g, beta, **arguments)
        except RuntimeError as error:
            print(error)
"""


def test_a_kernel_with_more_warpgroups_than_threads_is_refused():
    """In a process of its own: this one has a thread for each of its eight devices."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "2", "XLA_FLAGS": ""}
    run = subprocess.run(
        [sys.executable, "-c", FEW_THREADS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    recurrent, kda, gdn = run.stdout.splitlines()
    assert recurrent == "(1, 1, 1, 128)"
    assert "each of the 3 warpgroups" in kda
    assert "each of the 4 warpgroups" in gdn
    for refused in (kda, gdn):
        assert (
            "JAX has 2 on this CPU; set XLA_FLAGS=--xla_force_host_platform_device_count=4"
            in refused
        )
