"""Kernel jfla_grads_gdn: q, k, what the scans left of a chunk to dq, dk, dg and dbeta, for GDN.

`kernel.py` has the launch and the roles of the warpgroups, `smem.py` what they share, `dqkg.py` the
math.
"""
