"""Flax NNX layers of the delta-rule family, a language model of them, and their published weights.

In Flax Linen, `flax.nnx.bridge` turns a layer into a Linen module:

>>> import jax, jfla.nn
>>> from flax import nnx
>>> layer = nnx.bridge.to_linen(jfla.nn.GatedDeltaNet, 32, num_heads=2, head_dim=16)
>>> x = jax.numpy.ones((1, 5, 32))
>>> print(layer.apply(layer.init(jax.random.key(0), x), x).shape)
(1, 5, 32)
"""

from jfla.nn import remat_policies as remat_policies
from jfla.nn.layers.attention import AttentionCache as AttentionCache
from jfla.nn.layers.attention import CausalAttention as CausalAttention
from jfla.nn.layers.delta_mixer import DeltaCache as DeltaCache
from jfla.nn.layers.gdn import GatedDeltaNet as GatedDeltaNet
from jfla.nn.layers.kda import KimiDeltaAttention as KimiDeltaAttention
from jfla.nn.layers.latent_attention import LatentAttention as LatentAttention
from jfla.nn.layers.latent_attention import LatentCache as LatentCache
from jfla.nn.layers.lora import add_lora as add_lora
from jfla.nn.layers.lora import merge_lora as merge_lora
from jfla.nn.layers.moe import MixtureOfExperts as MixtureOfExperts
from jfla.nn.layers.moe import MoEOptions as MoEOptions
from jfla.nn.models.config import ModelConfig as ModelConfig
from jfla.nn.models.delta_lm import DeltaLM as DeltaLM
from jfla.nn.models.delta_lm import DeltaLMConfig as DeltaLMConfig
from jfla.nn.models.loss import next_token_loss as next_token_loss
from jfla.nn.models.serving import Request as Request
from jfla.nn.models.serving import Server as Server
from jfla.nn.weights.fla_config import fla_config as fla_config
from jfla.nn.weights.hf import from_config as from_config
from jfla.nn.weights.hf import hf_config as hf_config
from jfla.nn.weights.hf import load_hf as load_hf
from jfla.nn.weights.hf import save_hf as save_hf
from jfla.nn.weights.load import load_mixer as load_mixer
from jfla.nn.weights.load import save_fla as save_fla
