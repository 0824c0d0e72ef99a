"""Bytes that a call must move and floating-point operations of the chunked algorithm.

Bytes: every input read once, every output written once; nothing for intermediates. q, k, v, o, do,
dq, dk, dv have 2 bytes, beta, its gradient and states have 4, g and its gradient 4 as decays and 2 in a model's call.

    forward   q k v g beta -> o, final state (without one when packed)
    backward  q k v g beta do -> dq dk dv dg dbeta
    decode    q k v g beta S -> o S
    scan+output  decayed q, k, k of value heads (GDN: q k g) v, a_qk and a_inv (64 x 64 a chunk)
                 -> o, final state

Operations, a multiply and an add counting as two. Per chunk of C = 64 tokens and value head, whole
64 x 64 tiles:

    forward   A_qk, L: 4 C^2 K;  inverse: C^3 / 3;  k S, q S, new S: 6 C K V
              X (...), A_qk v_new: 4 C^2 V
    backward  A_qk, L, k S, X (...), new S again: 4 C^2 K + C^3 / 3 + 4 C K V + 2 C^2 V
              do v_new^T, A_qk^T do, dX, X^T dv_new: 8 C^2 V;  X^T dX X^T: 4 C^3
              with S or dS: dv_new, dS (2), dq, dk, dw: 12 C K V;  dX, X^T dw, dq, dk (3): 12 C^2 K
    scan+output  6 C K V + 4 C^2 V
    decode    per head: decay, k^T S, the write, q^T S: 7 K V

"forward+backward" is the sum of both. "scan" does less arithmetic than this and is held to the same
numbers.
"""

from typing import NamedTuple

from benchmarks.internals import CHUNK
from benchmarks.shapes import Op, Pass, Shape


class Cost(NamedTuple):
    """What one call must do at least."""

    bytes: int
    flops: float

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


def cost(op: Op, name: Pass, shape: Shape, g_bytes: int = 4) -> Cost:
    """Bytes and operations of one pass over one shape, with so many bytes a number of g.

    >>> cost("gdn", "decode", Shape(1, 1, 1)).flops
    114688.0
    >>> [cost(op, "scan+output", Shape(1, 64, 1)).bytes for op in ("kda", "gdn")]
    [163840, 147712]
    """
    if name == "forward+backward":
        parts = [cost(op, part, shape, g_bytes) for part in ("forward", "backward")]
        return parts[0] + parts[1]
    tokens = shape.batch * shape.time
    dim = shape.dim
    gate_dim = dim if op == "kda" else 1
    qk = 2 * tokens * shape.heads * dim * 2
    v = tokens * shape.value_heads * dim * 2
    gates = tokens * shape.value_heads * (gate_dim * g_bytes + 4)
    state = 0 if shape.packing else shape.batch * shape.value_heads * dim * dim * 4
    if name == "decode":
        flops = 7.0 * shape.batch * shape.value_heads * dim * dim
        return Cost(qk + 2 * v + gates + 2 * state, flops)
    chunks = shape.batch * shape.value_heads * -(-shape.time // CHUNK)
    c2k = CHUNK * CHUNK * dim
    ckv = CHUNK * dim * dim
    c3 = CHUNK**3
    if name == "scan+output":
        # With one decay per token q and k are read as they are.
        keys = qk + tokens * shape.value_heads * 4
        if op == "kda":
            keys = 3 * tokens * shape.value_heads * dim * 2
        squares = chunks * 2 * CHUNK * CHUNK * 2
        flops = chunks * (4 * c2k + 6 * ckv)
        return Cost(keys + squares + 2 * v + state, flops)
    if name == "forward":
        flops = chunks * (8 * c2k + 6 * ckv + c3 / 3)
        return Cost(qk + 2 * v + gates + state, flops)
    flops = chunks * (26 * c2k + 16 * ckv + c3 * 13 / 3)
    return Cost(2 * qk + 3 * v + 2 * gates, flops)
