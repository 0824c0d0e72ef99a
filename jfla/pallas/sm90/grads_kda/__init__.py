"""The gradient kernel of KDA: `kernel.grads_kda`; dq, dk and dg are derived in `dqkg.py`."""
