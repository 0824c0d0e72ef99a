"""DeltaLM: a decoder-only language model of delta-rule layers, with full attention at the positions one names."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, overload

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jfla._types import Implementation, SegmentIds
from jfla.nn._sharding import BATCH, EMBED, VOCAB, annotated, constrain, refuse_explicit
from jfla.nn.attention import AttentionCache, CausalAttention
from jfla.nn.generate import generate
from jfla.nn.layers import Projection, SwiGLU, rms_norm
from jfla.nn.mixer import DeltaCache, GatedDeltaNet, KimiDeltaAttention

Tokens = Int[Array, "B T"]
Logits = Float[Array, "B T vocab"]
Cache = tuple[DeltaCache | AttentionCache, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaLMConfig:
    """The shape of a `DeltaLM`.

    **Fields:**

    - `vocab_size`, `hidden_size`, `num_layers`.
    - `op`: "kda" or "gdn".
    - `num_heads`, `head_dim`: query and key heads and their length. `num_value_heads`, `value_head_dim`: the same by
      default. `conv_size`, `allow_neg_eigval`, and for KDA `lower_bound` and `output_gate_bias`: as in the layers.
    - `intermediate_size`: of the SwiGLU; by default 2/3 `mlp_ratio` `hidden_size`, rounded up to a multiple of 64.
    - `attention_layers`: positions (from 0) that are causal softmax attention instead, with `attention_heads`
      (`num_heads` by default) of `attention_kv_heads` (the same by default) and rotary base `rope_theta`.
    - `norm_eps`; `tie_embeddings`: the head is the embedding.
    - `dtype` of the computation, `param_dtype` of the parameters, `implementation` of the op.
    - `remat`: True recomputes each block in the backward, a policy of `jax.checkpoint_policies` what it does not save;
      the op's residuals have names that start with `jfla_`.

    **Raises:** `ValueError` for an unknown op, or an attention layer that does not exist.

    >>> config = DeltaLMConfig(vocab_size=256, hidden_size=128, num_layers=2, num_heads=2, head_dim=32)
    >>> print(config.intermediate_size)
    384
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    op: Literal["kda", "gdn"] = "kda"
    num_value_heads: int | None = None
    value_head_dim: int | None = None
    conv_size: int = 4
    allow_neg_eigval: bool = False
    lower_bound: float | None = None
    output_gate_bias: bool = False
    mlp_ratio: float = 4.0
    intermediate_size: int | None = None
    attention_layers: tuple[int, ...] = ()
    attention_heads: int | None = None
    attention_kv_heads: int | None = None
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    implementation: Implementation | None = None
    remat: bool | Callable[..., Any] = False

    def __post_init__(self):
        if self.op not in ("kda", "gdn"):
            raise ValueError(f'op must be "kda" or "gdn", got {self.op!r}')
        if self.op == "gdn" and (self.lower_bound is not None or self.output_gate_bias):
            raise ValueError('lower_bound and output_gate_bias must be left out with op="gdn": they are KDA\'s')
        outside = [layer for layer in self.attention_layers if not 0 <= layer < self.num_layers]
        if outside:
            raise ValueError(f"attention_layers must be in 0 .. {self.num_layers - 1}, got {outside}")
        if self.intermediate_size is None:
            size = -(-int(self.mlp_ratio * self.hidden_size * 2 / 3) // 64) * 64
            object.__setattr__(self, "intermediate_size", size)

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


def _mixer(config: DeltaLMConfig, layer: int, rngs: nnx.Rngs) -> KimiDeltaAttention | GatedDeltaNet | CausalAttention:
    if layer in config.attention_layers:
        return CausalAttention(
            config.hidden_size,
            config.attention_heads or config.num_heads,
            num_kv_heads=config.attention_kv_heads,
            rope_theta=config.rope_theta,
            rngs=rngs,
            **config.dtypes,
        )
    shared: Any = {
        "num_value_heads": config.num_value_heads, "value_head_dim": config.value_head_dim,
        "conv_size": config.conv_size, "norm_eps": config.norm_eps, "allow_neg_eigval": config.allow_neg_eigval,
        "implementation": config.implementation, "rngs": rngs,
    }  # fmt: skip
    sizes = config.hidden_size, config.num_heads, config.head_dim
    if config.op == "gdn":
        return GatedDeltaNet(*sizes, **shared, **config.dtypes)
    gate = {"lower_bound": config.lower_bound, "output_gate_bias": config.output_gate_bias}
    return KimiDeltaAttention(*sizes, **gate, **shared, **config.dtypes)


class _Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DeltaLMConfig, layer: int, rngs: nnx.Rngs):
        assert config.intermediate_size is not None  # the configuration fills it in
        self.mixer_norm = rms_norm(config.hidden_size, config.norm_eps, rngs=rngs, **config.dtypes)
        self.mixer = _mixer(config, layer, rngs)
        self.mlp_norm = rms_norm(config.hidden_size, config.norm_eps, rngs=rngs, **config.dtypes)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, rngs=rngs, **config.dtypes)

    def __call__(self, x: Float[Array, "B T D"], segment_ids: SegmentIds | None, cache: Any) -> tuple[Array, Any]:
        y, cache = self.mixer.mix(self.mixer_norm(x), segment_ids, cache)
        x = constrain(x + y, (BATCH, None, None))
        return constrain(x + self.mlp(self.mlp_norm(x)), (BATCH, None, None)), cache


class DeltaLM(nnx.Module):
    """Embedding, pre-norm blocks of a delta-rule layer (or attention) and a SwiGLU, RMSNorm, head.

        x <- x + mixer(RMSNorm(x));   x <- x + mlp(RMSNorm(x));   logits = RMSNorm(x) W

    **Call:** `model(tokens, segment_ids=None, cache=None)` with tokens `[B, T]` gives float32 logits
    `[B, T, vocab_size]`; with a cache from `init_cache` (or from the call before) it gives `(logits, cache)`. Packed
    sequences and padding are told by `segment_ids` as in the layers, with and without a cache.

    **Meshes:** parameters carry the axis names "embed", "heads", "mlp" and "vocab", activations "batch". Where rules
    say what they stand for, the model is made, trained and sampled in that layout; the mesh's axes must be `Auto`:

        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        rules = (("batch", "data"), ("heads", "model"), ("mlp", "model"), ("vocab", "model"), ("embed", None))
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            model = DeltaLM(config, rngs=nnx.Rngs(0))

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> config = jfla.nn.DeltaLMConfig(vocab_size=16, hidden_size=32, num_layers=1, num_heads=2, head_dim=16)
    >>> model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    >>> tokens = jax.numpy.array([[1, 2, 3]])
    >>> print(model(tokens).shape, model.generate(tokens, 4, key=jax.random.key(0)).shape)
    (1, 3, 16) (1, 4)
    """

    def __init__(self, config: DeltaLMConfig, *, rngs: nnx.Rngs):
        self.config = config
        table = annotated(nnx.initializers.normal(0.02), (VOCAB, EMBED))
        # Looked up in the dtype of the parameters: gradients of a row that many tokens share are added up in that.
        self.embed = nnx.Embed(
            config.vocab_size, config.hidden_size, embedding_init=table, rngs=rngs, param_dtype=config.param_dtype
        )
        self.blocks = nnx.List([_Block(config, layer, rngs) for layer in range(config.num_layers)])
        self.norm = rms_norm(config.hidden_size, config.norm_eps, rngs=rngs, **config.dtypes)
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            sizes = (config.hidden_size,), (config.vocab_size,), (EMBED, VOCAB)
            self.head = Projection(*sizes, rngs=rngs, **config.dtypes)

    @overload
    def __call__(self, tokens: Tokens, segment_ids: SegmentIds | None = None, cache: None = None) -> Logits: ...
    @overload
    def __call__(
        self, tokens: Tokens, segment_ids: SegmentIds | None = None, *, cache: Cache
    ) -> tuple[Logits, Cache]: ...
    def __call__(self, tokens, segment_ids=None, cache=None):
        x, new_cache = self.hidden(tokens, segment_ids, cache)
        return self.logits(x) if cache is None else (self.logits(x), new_cache)

    def hidden(
        self, tokens: Tokens, segment_ids: SegmentIds | None = None, cache: Cache | None = None
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """What the head reads, and the cache (None without one)."""
        refuse_explicit("tokens", tokens)
        x = constrain(self.embed(tokens).astype(self.config.dtype), (BATCH, None, None))
        if cache is not None:
            new_cache = []
            for block, layer_cache in zip(self.blocks, cache, strict=True):
                x, layer_cache = block(x, segment_ids, layer_cache)
                new_cache.append(layer_cache)
            return self.norm(x), tuple(new_cache)
        run = _Block.__call__
        if self.config.remat is not False:
            run = nnx.remat(run, policy=None if self.config.remat is True else self.config.remat)
        for block in self.blocks:
            x, _ = run(block, x, segment_ids, None)
        return self.norm(x), None

    def logits(self, x: Float[Array, "B T D"]) -> Logits:
        """The head: logits in float32."""
        if self.head is not None:
            return self.head(x, result=jnp.float32)
        table = self.embed.embedding[...].astype(x.dtype)
        return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)

    def init_cache(self, batch: int, max_len: int) -> Cache:
        """One cache per layer. Only the attention layers take up room for `max_len` tokens."""
        mixers = (block.mixer for block in self.blocks)
        return tuple(
            mixer.init_cache(batch, max_len) if isinstance(mixer, CausalAttention) else mixer.init_cache(batch)
            for mixer in mixers
        )

    def generate(
        self,
        prompt: Tokens,
        length: int,
        *,
        key: PRNGKeyArray,
        temperature: float = 1.0,
        top_k: int | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> Int[Array, "B length"]:
        """Samples `length` tokens behind each prompt: one pass over the prompts, then a compiled loop.

        **Arguments:** `prompt` `[B, T]`; `temperature` divides the logits, 0 takes the largest; `top_k` keeps that many
        largest logits; `segment_ids` `[B, T]`, 1 on tokens and 0 on the padding behind shorter prompts.

        **Returns:** the new tokens, `[B, length]`. The same key gives the same tokens.

        **Raises:** `ValueError` for a length below 1, a negative temperature or a `top_k` outside 1 .. vocab_size.
        """
        return generate(self, prompt, length, key, temperature, top_k, segment_ids)
