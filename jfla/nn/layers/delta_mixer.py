"""What the delta-rule layers share: projections, convolutions, the op, the gated norm, the cache.

`kda.py` and `gdn.py` add the gates.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from jfla.gates import Gate, log_decay, write_strength
from jfla.nn.layers.convolution import ShortConvolution, Tail
from jfla.nn.layers.mixer import Hidden, Mixer
from jfla.nn.layers.norms import Activation, GatedRMSNorm
from jfla.nn.layers.pooled import mix_pooled
from jfla.nn.layers.projections import DTypes, Projection
from jfla.nn.sharding import EMBED, HEADS, delta_rule, refuse_explicit
from jfla.packing import starts
from jfla.types import DeltaRuleOutput, Implementation, SegmentIds

# Up to this many tokens with a cache go through the recurrence one by one; longer calls fill a
# chunk.
RECURRENT_TOKENS = 8
# exp(-1000) is exactly 0 in float32 and float64: a decay that empties the state, within the gates
# that every implementation promises to take.
_RESET = -1000.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaCache:
    """What a delta-rule layer remembers of earlier tokens, in a size that does not grow with them.

    **Fields:** `state` `[B, HV, K, V]` float32; `tails`, the last W - 1 inputs of the q, k and v
    convolutions, `[B, W - 1, H, K]` twice and `[B, W - 1, HV, V]`; `slots`, None, or the places
    that a call's rows (`[B]`) or its packed prompts (`[1, S]`) have in the others, which are then
    pools `[P, ..]`: -1 is an idle row.

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> layer = jfla.nn.GatedDeltaNet(32, num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    >>> y, cache = layer(jax.numpy.ones((1, 5, 32)), cache=layer.init_cache(1))
    >>> print(cache.state.shape, [tail.shape for tail in cache.tails])
    (1, 2, 16, 16) [(1, 3, 2, 16), (1, 3, 2, 16), (1, 3, 2, 16)]
    """

    state: Float[Array, "B HV K V"]
    tails: tuple[Tail, ...]
    slots: Int[Array, " B"] | Int[Array, "1 S"] | None = None


class MixerOptions(TypedDict, total=False):
    """What both layers take besides their sizes."""

    num_value_heads: int | None
    value_head_dim: int | None
    conv_size: int
    norm_eps: float
    allow_neg_eigval: bool
    dtype: DTypeLike
    param_dtype: DTypeLike
    implementation: Implementation | None


_SHARED_DOC = """
    **Arguments:**

    - `hidden_size`: D, the last axis of input and output.
    - `num_heads`, `head_dim`: H and K, query and key heads and their length.
    - `num_value_heads`: HV, a multiple of H; H by default. `value_head_dim`: V; K by default.
    - `conv_size`: W, the kernel length of the three causal depthwise convolutions (4).
    - `norm_eps`: epsilon of the gated RMSNorm on the output.
    - `allow_neg_eigval`: writes with 2 sigmoid instead of sigmoid, so that a transition can have
      negative eigenvalues.
    - `dtype`: of the computation; `param_dtype`: of the parameters. `a_log` and `dt_bias` stay
      float32, as does the state.
    - `implementation`: None, "pallas" or "xla", handed to the op.

    **Call:** `layer(x, segment_ids=None, cache=None)` with x `[B, T, D]` gives y `[B, T, D]`; with
    a cache from `init_cache` (or from the call before) it gives `(y, cache)`.

    - `segment_ids` `[B, T]`: packed sequences, numbered from 1 and not decreasing along T, 0 on
      padding at the end. Convolutions and state start anew where the id changes; the output on
      padding is 0.
    - With a cache, a row's first token continues the sequence that the cache holds, whatever its
      id; where the id changes inside the row a new sequence begins, and the cache that comes back
      holds the row's last sequence, after its last real token. So prompts of different lengths are
      padded at the end with id 0, and the step after goes on from each row's own last token. A call
      leaves the cache that it is given as it was: to drop drafted tokens, call again with that
      cache and id 0 behind the accepted ones.

    **Raises:** `ValueError` for sizes that do not fit.

    Every parameter carries logical axis names ("embed", "heads"); see
    `flax.nnx.logical_axis_rules`. Under a mesh whose rules name "batch", "time" and "heads", each
    device runs the op on its own rows, stretch of time and heads. Both H and HV must then be
    multiples of the heads' mesh axis; what another does not divide is whole on every device.
"""


def documented[Layer: type](layer: Layer) -> Layer:
    """Writes what the layers share into the docstring of one, in the place of `{options}`."""
    shared = f"\n{inspect.cleandoc(_SHARED_DOC)}\n"
    layer.__doc__ = inspect.cleandoc(layer.__doc__ or "").replace("{options}", shared)
    return layer


class DeltaMixer(Mixer[DeltaCache]):
    """Everything but the op and the gates."""

    _activation: Activation

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        num_value_heads: int | None = None,
        value_head_dim: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        allow_neg_eigval: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_value_heads = num_heads if num_value_heads is None else num_value_heads
        self.value_head_dim = head_dim if value_head_dim is None else value_head_dim
        self.beta_max = 2.0 if allow_neg_eigval else 1.0
        self.implementation: Implementation | None = implementation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self._check_sizes(conv_size)

        dtypes = self.dtypes
        hidden = (hidden_size,)
        key = (num_heads, head_dim)
        value = (self.num_value_heads, self.value_head_dim)
        by_head = (EMBED, HEADS, None)
        self.q_proj = Projection(hidden, key, by_head, rngs=rngs, **dtypes)
        self.k_proj = Projection(hidden, key, by_head, rngs=rngs, **dtypes)
        self.v_proj = Projection(hidden, value, by_head, rngs=rngs, **dtypes)
        self.q_conv = ShortConvolution(conv_size, *key, rngs=rngs, **dtypes)
        self.k_conv = ShortConvolution(conv_size, *key, rngs=rngs, **dtypes)
        self.v_conv = ShortConvolution(conv_size, *value, rngs=rngs, **dtypes)
        self.b_proj = Projection(hidden, value[:1], (EMBED, HEADS), rngs=rngs, **dtypes)
        self.o_norm = GatedRMSNorm(
            self.value_head_dim,
            self._activation,
            epsilon=norm_eps,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.o_proj = Projection(
            value, hidden, (HEADS, None, EMBED), rngs=rngs, **dtypes
        )

    def _check_sizes(self, conv_size: int) -> None:
        sizes = {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "num_value_heads": self.num_value_heads,
            "value_head_dim": self.value_head_dim,
            "conv_size": conv_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.num_value_heads % self.num_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} must be a multiple of "
                f"num_heads={self.num_heads}"
            )

    @property
    def dtypes(self) -> DTypes:
        """Of the computation and of the parameters."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    def _op(self, recurrent: bool) -> Callable[..., DeltaRuleOutput]:
        """The op, in its recurrent or its chunked form."""
        raise NotImplementedError

    def _decay_input(self, x: Hidden) -> Float[Array, "B T HV *K"]:
        """What goes into the gate."""
        raise NotImplementedError

    def _output_gate(self, x: Hidden) -> Float[Array, "B T HV V"]:
        """What the gated norm multiplies with, before its activation."""
        raise NotImplementedError

    def _gate(self) -> Gate:
        """The gate that makes log decays of `_decay_input`."""
        raise NotImplementedError

    def init_cache(self, batch: int) -> DeltaCache:
        """The cache before the first token of `batch` sequences."""
        shape = (batch, self.num_value_heads, self.head_dim, self.value_head_dim)
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        tails = tuple(convolution.init_tail(batch) for convolution in convolutions)
        return DeltaCache(jnp.zeros(shape, jnp.float32), tails)

    def mix(
        self, x: Hidden, segment_ids: SegmentIds | None, cache: DeltaCache | None
    ) -> tuple[Hidden, DeltaCache | None]:
        refuse_explicit("x", x)
        if cache is not None and cache.slots is not None:
            return mix_pooled(self, x, segment_ids, cache)
        q_tail, k_tail, v_tail = (None, None, None) if cache is None else cache.tails
        q, q_tail = self.q_conv(self.q_proj(x), segment_ids, q_tail)
        k, k_tail = self.k_conv(self.k_proj(x), segment_ids, k_tail)
        v, v_tail = self.v_conv(self.v_proj(x), segment_ids, v_tail)
        arrays = (q, k, v, self._decay_input(x), self.b_proj(x))
        state = None if cache is None else cache.state
        o, new_state = self._delta_rule(arrays, segment_ids, state)
        o = checkpoint_name(o, "jfla_output")
        y = self.o_proj(self.o_norm(o, self._output_gate(x)))
        if new_state is None:
            return y, None
        return y, DeltaCache(new_state, (q_tail, k_tail, v_tail))

    def _delta_rule(
        self,
        arrays: tuple[Array, ...],
        segment_ids: SegmentIds | None,
        state: Float[Array, "B HV K V"] | None,
    ) -> DeltaRuleOutput:
        """The op on q, k, v, the gate's input and the logits of beta."""
        recurrent = state is not None and arrays[0].shape[1] <= RECURRENT_TOKENS
        op = functools.partial(
            self._op(recurrent),
            qk_norm=True,
            return_final_state=state is not None,
            implementation=self.implementation,
        )
        gate = self._gate()
        if state is None or segment_ids is None:
            op = functools.partial(op, beta_max=self.beta_max)
            return delta_rule(
                op, arrays, gate, state, segment_ids, split_time=not recurrent
            )
        # The op keeps a state per segment; here one goes in at the front and one comes out at the
        # back, so the segments' borders become decays that empty the state.
        q, k, v, decay_input, logits = arrays
        g = log_decay(decay_input.reshape(*logits.shape, -1), gate).reshape(
            decay_input.shape
        )
        beta = write_strength(logits, self.beta_max)
        g, beta = _with_borders(g, beta, segment_ids)
        arrays = (q, k, v, g, beta)
        out = delta_rule(op, arrays, None, state, None, split_time=not recurrent)
        return out._replace(output=_zero_unless(segment_ids > 0, out.output))


def _with_borders(
    g: Float[Array, "B T HV *K"], beta: Float[Array, "B T HV"], segment_ids: SegmentIds
) -> tuple[Float[Array, "B T HV *K"], Float[Array, "B T HV"]]:
    """Decays and write strengths that empty the state before a segment and keep it on padding."""
    g = jnp.where(_per_token(starts(segment_ids), g), _RESET, g)
    real = segment_ids > 0
    return _zero_unless(real, g), _zero_unless(real, beta)


def _zero_unless(
    keep: Bool[Array, "B T"], x: Float[Array, "B T *rest"]
) -> Float[Array, "B T *rest"]:
    return jnp.where(_per_token(keep, x), x, 0)


def _per_token(
    mask: Bool[Array, "B T"], x: Shaped[Array, "B T *rest"]
) -> Bool[Array, "B T *ones"]:
    """The mask with as many axes as x."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - 2))
