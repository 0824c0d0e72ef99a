"""Flax NNX layers of the delta-rule family, a language model made of them, and their published weights."""

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
