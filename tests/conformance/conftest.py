"""Keeps pytest from importing what needs PyTorch and a checkout of Flash Linear Attention."""

collect_ignore = ["fla_adapter.py", "fla_plugin.py", "run_fla.py"]
