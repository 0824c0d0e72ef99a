"""Tile sizes, from a table keyed by op, K and V and from the shape of the call: nothing is tuned at run time."""

from jfla.pallas import prepare_gdn
from jfla.pallas._walk import WalkConfig

SUPPORTED_DIMS = (64, 128, 256)
MULTIPROCESSORS = 132
SHORTEST_PART, MOST_PARTS = 16, 16  # chunks; parts of time
DECODE_TOKENS = 8  # of one call: its programs keep all of them in shared memory


def prepare_gdn_config(key_dim: int, programs: int) -> prepare_gdn.PrepareConfig:
    return prepare_gdn.PrepareConfig(workers=4 if key_dim <= 128 else 2, programs=programs)


def v_blocks(key_dim: int, value_dim: int) -> tuple[int, int]:
    """The fewest and the most columns of V that one program walks: with K = 256, 64 fill its memory."""
    return 64, 64 if key_dim > 128 else min(value_dim, 128)


def scan_config(key_dim: int, value_dim: int, sequences: int) -> WalkConfig:
    """V is split over programs while that gives idle multiprocessors something to do."""
    split = sequences * (value_dim // 64) <= MULTIPROCESSORS
    return WalkConfig(v_blocks(key_dim, value_dim)[0 if split else 1])


# Microseconds, measured with K = V = 128: of a warpgroup (GDN) or program (KDA) for preparing a chunk, alone or beside
# a scan; of a scan for a chunk.
_PREPARE_US = {"kda": (5.6, 7.2), "gdn": (11.0, 10.8)}
_SCAN_US = {64: 1.25, 128: 1.7}


def beside_config(op: str, key_dim: int, value_dim: int, sequences: int, n_chunks: int) -> tuple[WalkConfig, int]:
    """How the forward scans, and how many programs prepare beside the scan; 0: all is prepared before.

    Beside pays while the scan leaves many multiprocessors idle, unless time is split into parts or all chunks are
    prepared in one go anyway. The scan then ends a round of preparing after the last round.
    """
    config, total = scan_config(key_dim, value_dim, sequences), sequences * n_chunks
    if scan_parts(key_dim, value_dim, sequences, n_chunks) > 1 or total <= MULTIPROCESSORS:
        return config, 0
    workers = prepare_gdn_config(key_dim, 1).workers if op == "gdn" else 1
    rounds = lambda programs: -(-total // (programs * workers))
    alone_us, beside_us = _PREPARE_US[op]
    choices = [(rounds(MULTIPROCESSORS) * alone_us + n_chunks * _SCAN_US[config.v_block], config, 0)]
    for v_block in set(v_blocks(key_dim, value_dim)):
        spare, scan_us = MULTIPROCESSORS - sequences * (value_dim // v_block), n_chunks * _SCAN_US[v_block]
        if spare > 0:
            longest = max(rounds(spare) * beside_us + scan_us / rounds(spare), scan_us)
            choices.append((longest, WalkConfig(v_block), spare))
    return min(choices)[1:]


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


STRETCHES, SHORTEST_STRETCH, LARGE = 4, 32, 256 * 2**20  # chunks; bytes


def stretches(op: str, key_dim: int, value_dim: int, sequences: int, n_chunks: int) -> int:
    """Stretches of time that GDN's backward takes one after the other, so that only the states of one are in memory.

    0: all at once, where the states are few, or stretches would be short, each of which fills the GPU anew, or time is
    split into parts that are walked side by side; or with K = 256, for which the scans have no register left.
    """
    states = sequences * n_chunks * key_dim * value_dim * 2 * 2  # bf16, of both ends
    if op != "gdn" or states < LARGE or n_chunks % STRETCHES or n_chunks < STRETCHES * SHORTEST_STRETCH:
        return 0
    return STRETCHES if key_dim <= 128 and scan_parts(key_dim, value_dim, sequences, n_chunks) == 1 else 0
