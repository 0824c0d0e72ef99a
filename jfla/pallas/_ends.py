"""What the scans leave of every chunk for the gradients, and what the gradients leave."""

from typing import Any, NamedTuple

PART = 128  # of K, and for KDA of V: what one program takes


class Ends(NamedTuple):
    """What the scans left: the states and their cotangents at a chunk's two ends, and what passed between."""

    states: Any  # [B, HV, N, V, K] bf16, S^T at the chunk's start
    dends: Any  # the same of dS, at its end
    v_new: Any  # [B, T, HV, V] bf16
    do: Any
    dv: Any


class Gradients(NamedTuple):
    """Per value head. dg [B, T, HV, K] (KDA) or [B, HV, N, C]; dv . v_new [B, HV, N, C].

    dq, dk [B, T, HV, K], for KDA as many times as there are parts of V, which lie like value heads of one group. Of q
    and k as the caller passed them; or under qk_norm, where there are parts of K, of what they are after it.
    """

    dq: Any
    dk: Any
    dg: Any
    written: Any
