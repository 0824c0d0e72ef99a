"""jfla: the delta-rule linear-attention family, Kimi Delta Attention and Gated DeltaNet, for JAX."""

from jfla import pallas as pallas
from jfla import reference as reference
from jfla.api import chunk_gdn as chunk_gdn
from jfla.api import chunk_kda as chunk_kda
from jfla.api import recurrent_gdn as recurrent_gdn
from jfla.api import recurrent_kda as recurrent_kda
from jfla.dispatch import Choice as Choice
from jfla.dispatch import explain as explain
from jfla.gates import SigmoidGate as SigmoidGate
from jfla.gates import SoftplusGate as SoftplusGate
from jfla.packing import segment_ids_from_cu_seqlens as segment_ids_from_cu_seqlens
from jfla.pool import accept as accept
from jfla.types import DeltaRuleOutput as DeltaRuleOutput

__version__ = "0.1.0"
