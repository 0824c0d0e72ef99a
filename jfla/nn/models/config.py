"""What a language model is made of: the kind and sizes of every layer, and what they share."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jfla.nn.layers.attention import QKNorm
from jfla.nn.layers.moe import MoEOptions
from jfla.nn.layers.projections import DTypes
from jfla.types import Implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class GDNSpec:
    """A `GatedDeltaNet`: the fields are its arguments."""

    num_heads: int
    head_dim: int
    num_value_heads: int | None = None
    value_head_dim: int | None = None
    conv_size: int = 4
    norm_eps: float = 1e-5
    allow_neg_eigval: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDASpec(GDNSpec):
    """A `KimiDeltaAttention`: the fields are its arguments."""

    lower_bound: float | None = None
    output_gate_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """A `CausalAttention`: the fields are its arguments."""

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = 10000.0
    rotary_dims: int | None = None
    qk_norm: QKNorm | None = None
    norm_eps: float = 1e-6
    zero_centered_norms: bool = False
    output_gate: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """A `LatentAttention`: the fields are its arguments."""

    num_heads: int
    latent_dim: int
    key_dim: int
    shared_dim: int
    value_dim: int
    norm_eps: float = 1e-6


MixerSpec = GDNSpec | KDASpec | AttentionSpec | LatentSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A block: its mixer, its MLP, and where its norms stand.

    **Fields:** `mixer`; `mlp`, the inner size of a SwiGLU or a `MoEOptions`; `norm_after`: the
    norms stand behind mixer and MLP, x + norm(mixer(x)), not before them, x + mixer(norm(x)).
    """

    mixer: MixerSpec
    mlp: int | MoEOptions
    norm_after: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A `DeltaLM` layer by layer, as `hf_config` reads it of a published model.

    **Fields:**

    - `vocab_size`, `hidden_size`; `layers`, a `LayerSpec` each.
    - `norm_eps` of the norms in and behind the blocks; `zero_centered_norms`: their scale is stored
      as its distance from 1.
    - `tie_embeddings`: the head is the embedding.
    - `dtype`, `param_dtype`, `implementation`, `remat`: as in `DeltaLMConfig`.
    - `published`: the text of the `config.json` that this was read from; `stored_dtypes`: names of
      tensors that their checkpoint holds in another dtype than that says, with that dtype.

    >>> import jfla.nn
    >>> from jfla.nn.models.config import AttentionSpec, GDNSpec, LayerSpec
    >>> linear = LayerSpec(mixer=GDNSpec(num_heads=2, head_dim=16), mlp=64)
    >>> full = LayerSpec(mixer=AttentionSpec(num_heads=2, qk_norm="head"), mlp=64)
    >>> layers = (linear, linear, full)
    >>> config = jfla.nn.ModelConfig(vocab_size=16, hidden_size=32, layers=layers)
    >>> print(config.num_layers)
    3
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float = 1e-6
    zero_centered_norms: bool = False
    tie_embeddings: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation | None = None
    remat: bool | Callable[..., Any] = False
    published: str = dataclasses.field(default="", repr=False)
    stored_dtypes: tuple[tuple[str, str], ...] = dataclasses.field(
        default=(), repr=False
    )

    @property
    def model_type(self) -> str:
        """The family's name in the settings that this was read from."""
        if not self.published:
            raise ValueError(
                "config must be read from the settings of a family (hf_config), "
                "got one made by hand"
            )
        return json.loads(self.published)["model_type"]

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return len(self.layers)

    @property
    def dtypes(self) -> DTypes:
        """Of the computation and of the parameters."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}
