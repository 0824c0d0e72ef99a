"""A block of a language model: a mixer and an MLP with their norms, made as a `LayerSpec` says."""

from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jfla.nn.layers.attention import AttentionCache, CausalAttention
from jfla.nn.layers.delta_mixer import DeltaCache, DeltaMixer
from jfla.nn.layers.gdn import GatedDeltaNet
from jfla.nn.layers.kda import KimiDeltaAttention
from jfla.nn.layers.latent_attention import LatentAttention, LatentCache
from jfla.nn.layers.mixer import Hidden
from jfla.nn.layers.moe import MixtureOfExperts, MoEOptions
from jfla.nn.layers.norms import RMSNorm
from jfla.nn.layers.projections import DTypes, SwiGLU
from jfla.nn.models.config import (
    AttentionSpec,
    GDNSpec,
    KDASpec,
    LatentSpec,
    LayerSpec,
    MixerSpec,
)
from jfla.nn.sharding import BATCH, TIME, constrain
from jfla.types import Implementation, SegmentIds

LayerCache = DeltaCache | AttentionCache | LatentCache
LayerMixer = DeltaMixer | CausalAttention | LatentAttention

_DELTA_RULE: dict[type, type[DeltaMixer]] = {
    GDNSpec: GatedDeltaNet,
    KDASpec: KimiDeltaAttention,
}
_ATTENTION: dict[type, type[CausalAttention] | type[LatentAttention]] = {
    AttentionSpec: CausalAttention,
    LatentSpec: LatentAttention,
}


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); with `norm_after` x + norm(mixer(x)) and so on."""

    def __init__(
        self,
        hidden_size: int,
        spec: LayerSpec,
        *,
        norm_eps: float,
        zero_centered_norms: bool,
        implementation: Implementation | None,
        rngs: nnx.Rngs,
        dtypes: DTypes,
    ):
        norms: Any = {"zero_centered": zero_centered_norms, **dtypes}
        self.mixer_norm = RMSNorm((hidden_size,), norm_eps, rngs=rngs, **norms)
        self.mixer = _mixer(hidden_size, spec.mixer, implementation, rngs, dtypes)
        self.mlp_norm = RMSNorm((hidden_size,), norm_eps, rngs=rngs, **norms)
        moe = isinstance(spec.mlp, MoEOptions)
        kind: Any = MixtureOfExperts if moe else SwiGLU
        self.mlp = kind(hidden_size, spec.mlp, rngs=rngs, **dtypes)
        self.norm_after = spec.norm_after

    def __call__(
        self, x: Hidden, segment_ids: SegmentIds | None, cache: Any
    ) -> tuple[Hidden, LayerCache | None]:
        if self.norm_after:
            y, cache = self.mixer.mix(x, segment_ids, cache)
            x = _mixed(x + self.mixer_norm(y))
            y = self.mlp_norm(self.mlp(x))
        else:
            y, cache = self.mixer.mix(self.mixer_norm(x), segment_ids, cache)
            x = _mixed(x + y)
            y = self.mlp(self.mlp_norm(x))
        return constrain(x + y, (BATCH, TIME, None)), cache

    def init_cache(self, batch: int, max_len: int) -> LayerCache:
        """The mixer's cache before the first token."""
        if isinstance(self.mixer, DeltaMixer):
            return self.mixer.init_cache(batch)
        return self.mixer.init_cache(batch, max_len)


def _mixed(x: Hidden) -> Hidden:
    """What the mixer leaves, under the name that a checkpoint policy looks for."""
    return checkpoint_name(constrain(x, (BATCH, TIME, None)), "jfla_mixed")


def _mixer(
    hidden_size: int,
    spec: MixerSpec,
    implementation: Implementation | None,
    rngs: nnx.Rngs,
    dtypes: DTypes,
) -> LayerMixer:
    if type(spec) in _DELTA_RULE:
        make: Any = _DELTA_RULE[type(spec)]
        arguments = {**vars(spec), "implementation": implementation}
    else:
        make = _ATTENTION[type(spec)]
        arguments = vars(spec)
    return make(hidden_size, rngs=rngs, **arguments, **dtypes)
