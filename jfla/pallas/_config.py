"""Tile sizes, from a table keyed by op, K and V and from the shape of the call: nothing is tuned at run time."""

from jfla.pallas import prepare_gdn
from jfla.pallas._walk import WalkConfig

SUPPORTED_DIMS = (64, 128, 256)
MULTIPROCESSORS = 132
SHORTEST_PART, MOST_PARTS = 16, 16  # chunks; parts of time
DECODE_TOKENS = 8  # of one call: its programs keep all of them in shared memory


def prepare_gdn_config(key_dim: int) -> prepare_gdn.PrepareConfig:
    return prepare_gdn.PrepareConfig(workers=3 if key_dim <= 128 else 2, programs=MULTIPROCESSORS)


def scan_config(key_dim: int, value_dim: int, sequences: int) -> WalkConfig:
    """V is split over programs while that gives idle multiprocessors something to do, and where K leaves no memory."""
    split = sequences * (value_dim // 64) <= MULTIPROCESSORS or key_dim > 128
    return WalkConfig(v_block=64 if split else min(value_dim, 128), stages=2)


def decode_v_block(value_dim: int, states: int) -> int:
    """Columns of a state that one program holds: fewer while that gives idle multiprocessors something to do."""
    return 32 if states * (value_dim // 64) < 2 * MULTIPROCESSORS else 64


def scan_parts(key_dim: int, value_dim: int, sequences: int, n_chunks: int) -> int:
    """Parts of time that are walked side by side: 1, unless most multiprocessors would be idle for long.

    Finding where the parts begin takes a walk over each in two forms, so there is nothing to gain below three.
    """
    programs = sequences * (value_dim // 64)
    parts = min(MULTIPROCESSORS // (2 * programs), n_chunks // SHORTEST_PART, MOST_PARTS)
    return parts if parts >= 3 and key_dim == value_dim else 1
