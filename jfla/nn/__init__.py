"""Flax NNX layers of the delta-rule family, a language model made of them, and their published weights.

In Flax Linen, `flax.nnx.bridge` turns a layer into a Linen module:

>>> import jax, jfla.nn
>>> from flax import nnx
>>> layer = nnx.bridge.to_linen(jfla.nn.GatedDeltaNet, 32, num_heads=2, head_dim=16)
>>> x = jax.numpy.ones((1, 5, 32))
>>> print(layer.apply(layer.init(jax.random.key(0), x), x).shape)
(1, 5, 32)
"""

from jfla.nn.attention import AttentionCache as AttentionCache
from jfla.nn.attention import CausalAttention as CausalAttention
from jfla.nn.hf import fla_config as fla_config
from jfla.nn.hf import load_hf as load_hf
from jfla.nn.hf import load_mixer as load_mixer
from jfla.nn.hf import save_fla as save_fla
from jfla.nn.loss import next_token_loss as next_token_loss
from jfla.nn.mixer import DeltaCache as DeltaCache
from jfla.nn.mixer import GatedDeltaNet as GatedDeltaNet
from jfla.nn.mixer import KimiDeltaAttention as KimiDeltaAttention
from jfla.nn.model import DeltaLM as DeltaLM
from jfla.nn.model import DeltaLMConfig as DeltaLMConfig
