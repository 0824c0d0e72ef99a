"""Flags between kernels side by side, in interpret mode, which runs one CTA after the other and so has none."""

from typing import Any, NamedTuple

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.mgpu import overlap


class Recorded(NamedTuple):
    """What was traced of flags, by their shapes; None where a kernel runs alone."""

    signals: list[Any]
    waits: list[Any]  # with the number of writers


def record_flags(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A kernel does all that it does for flags but to set them and to wait: stores end, and barriers are met."""
    recorded = Recorded([], [])

    def signal(self: overlap.ReadyFlags, _: Any) -> None:
        recorded.signals.append(self.flags_gmem)
        plgpu.wait_smem_to_gmem(0)

    def wait(self: overlap.ReadyFlags, _: Any) -> None:
        recorded.waits.append((self.flags_gmem, self.lead.num_writers))

    monkeypatch.setattr(overlap, "allocate_flags", lambda shape: shape)
    monkeypatch.setattr(overlap.ReadyFlags, "signal", signal)
    monkeypatch.setattr(overlap.ReadyFlags, "wait", wait)
    return recorded
