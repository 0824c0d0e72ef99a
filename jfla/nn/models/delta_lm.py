"""DeltaLM: a decoder-only language model of delta-rule layers and, where asked for, attention."""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, overload

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jfla.nn.layers.mixer import Hidden
from jfla.nn.layers.norms import RMSNorm
from jfla.nn.layers.projections import DTypes, Projection
from jfla.nn.models.block import Block, LayerCache
from jfla.nn.models.config import (
    AttentionSpec,
    GDNSpec,
    KDASpec,
    LayerSpec,
    MixerSpec,
    ModelConfig,
)
from jfla.nn.models.generate import generate, sampling, stream
from jfla.nn.sharding import (
    BATCH,
    EMBED,
    TIME,
    VOCAB,
    annotated,
    constrain,
    refuse_explicit,
)
from jfla.types import Implementation, SegmentIds

Tokens = Int[Array, "B T"]
Logits = Float[Array, "B T vocab"]
Cache = tuple[LayerCache, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaLMConfig:
    """The shape of a `DeltaLM`.

    **Fields:**

    - `vocab_size`, `hidden_size`, `num_layers`.
    - `op`: "kda" or "gdn".
    - `num_heads`, `head_dim`: query and key heads and their length. `num_value_heads`,
      `value_head_dim`: the same by default. `conv_size`, `allow_neg_eigval`, and for KDA
      `lower_bound` and `output_gate_bias`: as in the layers.
    - `intermediate_size`: of the SwiGLU; by default 2/3 `mlp_ratio` `hidden_size`, rounded up to a
      multiple of 64.
    - `attention_layers`: positions (from 0) that are causal softmax attention instead, with
      `attention_heads` (`num_heads` by default) of `attention_kv_heads` (the same by default) and
      rotary base `rope_theta`.
    - `norm_eps`; `tie_embeddings`: the head is the embedding.
    - `dtype` of the computation, `param_dtype` of the parameters, `implementation` of the op.
    - `remat`: True recomputes each block in the backward, one of `jfla.nn.remat_policies`, or any
      policy of `jax.checkpoint_policies`, what it does not save.

    **Raises:** `ValueError` for an unknown op, or an attention layer that does not exist.

    >>> sizes = {"vocab_size": 256, "hidden_size": 128, "num_layers": 2}
    >>> config = DeltaLMConfig(**sizes, num_heads=2, head_dim=32)
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
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation | None = None
    remat: bool | Callable[..., Any] = False

    def __post_init__(self):
        if self.op not in ("kda", "gdn"):
            raise ValueError(f'op must be "kda" or "gdn", got {self.op!r}')
        if self.op == "gdn" and (self.lower_bound is not None or self.output_gate_bias):
            raise ValueError(
                'lower_bound and output_gate_bias must be left out with op="gdn": they are KDA\'s'
            )
        outside = [
            layer for layer in self.attention_layers if not 0 <= layer < self.num_layers
        ]
        if outside:
            last = self.num_layers - 1
            raise ValueError(f"attention_layers must be in 0 .. {last}, got {outside}")
        if self.intermediate_size is None:
            size = -(-int(self.mlp_ratio * self.hidden_size * 2 / 3) // 64) * 64
            object.__setattr__(self, "intermediate_size", size)

    @property
    def dtypes(self) -> DTypes:
        """Of the computation and of the parameters."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The blocks one by one."""
        assert self.intermediate_size is not None  # filled in above
        mixers = [self._mixer(layer) for layer in range(self.num_layers)]
        return tuple(
            LayerSpec(mixer=mixer, mlp=self.intermediate_size) for mixer in mixers
        )

    @property
    def zero_centered_norms(self) -> bool:
        """Scales are stored as they multiply."""
        return False

    def _mixer(self, layer: int) -> MixerSpec:
        if layer in self.attention_layers:
            return AttentionSpec(
                num_heads=self.attention_heads or self.num_heads,
                num_kv_heads=self.attention_kv_heads,
                rope_theta=self.rope_theta,
            )
        shared: dict[str, Any] = {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "num_value_heads": self.num_value_heads,
            "value_head_dim": self.value_head_dim,
            "conv_size": self.conv_size,
            "norm_eps": self.norm_eps,
            "allow_neg_eigval": self.allow_neg_eigval,
        }
        if self.op == "gdn":
            return GDNSpec(**shared)
        bias = self.output_gate_bias
        return KDASpec(**shared, lower_bound=self.lower_bound, output_gate_bias=bias)


class DeltaLM(nnx.Module):
    """Embedding, blocks of a delta-rule layer (or attention) and an MLP, RMSNorm, head.

        x <- x + mixer(RMSNorm(x));   x <- x + mlp(RMSNorm(x));   logits = RMSNorm(x) W

    `config` is a `DeltaLMConfig`, or a `ModelConfig` that describes every layer by itself:
    published models, by `load_hf` and `from_config`, are also this.

    **Call:** `model(tokens, segment_ids=None, cache=None)` with tokens `[B, T]` gives float32
    logits `[B, T, vocab_size]`; with a cache from `init_cache` (or from the call before) it gives
    `(logits, cache)`. Packed sequences and padding are told by `segment_ids` as in the layers, with
    and without a cache.

    **Meshes:** parameters carry the axis names "embed", "heads", "mlp" and "vocab", activations
    "batch" and "time". Where rules say what they stand for, the model is made, trained and sampled
    in that layout: by time each device has a stretch of every sequence, and layers hand on what the
    next stretch needs. The mesh's axes must be `Auto`:

        auto = (jax.sharding.AxisType.Auto,) * 3
        mesh = jax.make_mesh((2, 2, 2), ("data", "sequence", "model"), axis_types=auto)
        rules = (("heads", "model"), ("mlp", "model"), ("vocab", "model"), ("embed", None))
        rules += (("batch", "data"), ("time", "sequence"))
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            model = DeltaLM(config, rngs=nnx.Rngs(0))

    **Raises:** `ValueError` for sizes that do not fit, and for arrays over explicit mesh axes.

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
    >>> config = jfla.nn.DeltaLMConfig(**sizes, num_heads=2, head_dim=16)
    >>> model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    >>> tokens = jax.numpy.array([[1, 2, 3]])
    >>> print(model(tokens).shape, model.generate(tokens, 4, key=jax.random.key(0)).shape)
    (1, 3, 16) (1, 4)
    """

    def __init__(self, config: DeltaLMConfig | ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        # Looked up in the dtype of the parameters: gradients of a row that many tokens share are
        # added up in that.
        self.embed = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            embedding_init=annotated(nnx.initializers.normal(0.02), (VOCAB, EMBED)),
            rngs=rngs,
            param_dtype=config.param_dtype,
        )
        norms: Any = {
            "norm_eps": config.norm_eps,
            "zero_centered_norms": config.zero_centered_norms,
        }
        blocks = []
        for spec in config.layers:
            block = Block(
                config.hidden_size,
                spec,
                implementation=config.implementation,
                rngs=rngs,
                dtypes=config.dtypes,
                **norms,
            )
            blocks.append(block)
        self.blocks = nnx.List(blocks)
        self.norm = RMSNorm(
            (config.hidden_size,),
            config.norm_eps,
            zero_centered=config.zero_centered_norms,
            rngs=rngs,
            **config.dtypes,
        )
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            hidden = (config.hidden_size,)
            vocab = (config.vocab_size,)
            self.head = Projection(
                hidden, vocab, (EMBED, VOCAB), rngs=rngs, **config.dtypes
            )

    @overload
    def __call__(
        self, tokens: Tokens, segment_ids: SegmentIds | None = None, cache: None = None
    ) -> Logits: ...
    @overload
    def __call__(
        self, tokens: Tokens, segment_ids: SegmentIds | None = None, *, cache: Cache
    ) -> tuple[Logits, Cache]: ...
    def __call__(self, tokens, segment_ids=None, cache=None):
        x, new_cache = self.hidden(tokens, segment_ids, cache)
        logits = self.logits(x)
        return logits if cache is None else (logits, new_cache)

    def hidden(
        self,
        tokens: Tokens,
        segment_ids: SegmentIds | None = None,
        cache: Cache | None = None,
    ) -> tuple[Hidden, Cache | None]:
        """What the head reads, and the cache (None without one)."""
        x = self._embedded(tokens)
        if cache is None:
            *_, x = [x, *self._without_cache(x, segment_ids)]
            return self.norm(x), None
        new_cache = []
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            x, layer_cache = block(x, segment_ids, layer_cache)
            new_cache.append(layer_cache)
        return self.norm(x), tuple(new_cache)

    def hidden_states(
        self, tokens: Tokens, segment_ids: SegmentIds | None = None
    ) -> list[Float[Array, "B T D"]]:
        """The embeddings, what leaves each block, and what the head reads: num_layers + 2 arrays."""
        x = self._embedded(tokens)
        states = [x, *self._without_cache(x, segment_ids)]
        return [*states, self.norm(states[-1])]

    def _embedded(self, tokens: Tokens) -> Hidden:
        refuse_explicit("tokens", tokens)
        x = self.embed(tokens).astype(self.config.dtype)
        return constrain(x, (BATCH, TIME, None))

    def _without_cache(
        self, x: Hidden, segment_ids: SegmentIds | None
    ) -> Iterator[Hidden]:
        """What leaves each block."""
        remat = self.config.remat
        apply = Block.__call__
        if remat is not False:
            apply = nnx.remat(apply, policy=None if remat is True else remat)
        for block in self.blocks:
            x, _ = apply(block, x, segment_ids, None)
            yield x

    def logits(self, x: Hidden) -> Logits:
        """The head: logits in float32."""
        if self.head is not None:
            return self.head(x, result=jnp.float32)
        table = self.embed.embedding[...].astype(x.dtype)
        return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)

    def init_cache(self, batch: int, max_len: int) -> Cache:
        """One cache per layer. Only attention layers take up room for `max_len` tokens."""
        return tuple(block.init_cache(batch, max_len) for block in self.blocks)

    def generate(
        self,
        prompt: Tokens,
        length: int,
        *,
        key: PRNGKeyArray,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Collection[int] = (),
        segment_ids: SegmentIds | None = None,
    ) -> Int[Array, "B length"]:
        """Samples `length` tokens behind each prompt: one pass over them, then a compiled loop.

        **Arguments:** `prompt` `[B, T]`; `temperature` divides the logits, 0 takes the largest;
        `top_k` keeps that many largest logits, `top_p` of these the fewest largest that have so
        much of the probability together; a row that has chosen one of `stop_tokens` repeats it, and
        the loop ends when all have; `segment_ids` `[B, T]`, 1 on tokens and 0 on the padding behind
        shorter prompts.

        **Returns:** the new tokens, `[B, length]`. The same key gives the same tokens.

        **Raises:** `ValueError` for a length below 1, a negative temperature, a `top_k` outside
        1 .. vocab_size, a `top_p` outside 0 .. 1, and stop tokens that are no tokens.
        """
        how = sampling(self.config.vocab_size, temperature, top_k, top_p, stop_tokens)
        return generate(self, prompt, length, key, how, segment_ids)

    def stream(
        self,
        prompt: Tokens,
        length: int,
        *,
        key: PRNGKeyArray,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Collection[int] = (),
        segment_ids: SegmentIds | None = None,
    ) -> Iterator[Int[Array, " B"]]:
        """Samples as `generate` does, and yields each token `[B]` when it is there.

        Every token is a call of a compiled step, begun before the one before it is read, where
        `generate` has one compiled loop.

        **Arguments:** those of `generate`.

        **Returns:** an iterator of at most `length` tokens; it ends when every row has stopped.

        **Raises:** as `generate`, at the call.

        >>> import jax, jfla.nn
        >>> from flax import nnx
        >>> sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
        >>> config = jfla.nn.DeltaLMConfig(**sizes, num_heads=2, head_dim=16)
        >>> model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
        >>> prompt = jax.numpy.array([[1, 2, 3]])
        >>> print(len([int(token[0]) for token in model.stream(prompt, 4, key=jax.random.key(0))]))
        4
        """
        how = sampling(self.config.vocab_size, temperature, top_k, top_p, stop_tokens)
        return stream(self, prompt, length, key, how, segment_ids)
