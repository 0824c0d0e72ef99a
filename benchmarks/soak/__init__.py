"""A soak run: random calls of the ops against the recurrence in float64, for minutes or hours.

`python -m benchmarks.soak --minutes 60 --seed 0` prints how many cases a minute it runs and writes
the first failure as a Python file that shows it again. With `--interpret` the kernels run on a CPU;
one of few cores needs `XLA_FLAGS=--xla_force_host_platform_device_count=4` for their warpgroups.
"""

from benchmarks.soak.cases import Call, Case, Numbers
from benchmarks.soak.run import reproduce

__all__ = ["Call", "Case", "Numbers", "reproduce"]
