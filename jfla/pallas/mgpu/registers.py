"""Registers of a CTA, which a launch gives to all warpgroups alike and setmaxnreg moves from some to others.

A warpgroup that raises its limit waits until its CTA has that many registers to spare. Where the limits of all
warpgroups together exceed what the launch gave, it waits for ever.
"""

from typing import NamedTuple

from jax.experimental.pallas import mosaic_gpu as plgpu

SM_REGISTERS = 512  # of each of the 128 threads that one warpgroup would be on its own
STEP = 8  # limits are multiples of it
FEWEST = 24


class RegisterLimits(NamedTuple):
    """Registers of a thread, by the role of its warpgroup, after `take_registers`."""

    consumer: int
    producer: int

    def of(self, num_consumers: int) -> tuple[int, ...]:
        """Of every warpgroup of a kernel with one producer."""
        return (*[self.consumer] * num_consumers, self.producer)


def take_registers(limit: int) -> None:
    """In a consumer: raises the warpgroup's limit."""
    plgpu.set_max_registers(limit, action="increase")


def leave_registers(limit: int = FEWEST) -> None:
    """In a producer, or a warpgroup with nothing to do: lowers its limit."""
    plgpu.set_max_registers(limit, action="decrease")


def check_registers(name: str, limits: tuple[int, ...], num_warpgroups: int) -> None:
    """Refuses a kernel whose warpgroups would wait for each other's registers; those without a limit leave theirs."""
    launched = SM_REGISTERS // num_warpgroups // STEP * STEP
    idle = num_warpgroups - len(limits)
    wanted = sum(limits) + idle * FEWEST
    if wanted > launched * num_warpgroups:
        raise ValueError(
            f"the warpgroups of {name} want {limits} registers a thread and {idle} more {FEWEST}, {wanted} together, "
            f"but a launch of {num_warpgroups} warpgroups has {launched} for each: one would wait for ever"
        )
