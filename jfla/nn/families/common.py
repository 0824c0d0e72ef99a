"""What families of published models have in common: kinds of layers, rotary settings, tables."""

from typing import Any

from jfla.nn.families.settings import Settings
from jfla.nn.weights.name_maps import MLP, NameMap, table
from jfla.nn.weights.torch_layouts import StoredTensor, TensorTable, nested

LINEAR = "linear_attention"
FULL = "full_attention"


def layer_kinds(settings: Settings) -> list[str]:
    """LINEAR or FULL for every layer: `layer_types`, or every n-th by `full_attention_interval`."""
    interval = settings.size("full_attention_interval", 4)
    numbers = range(1, settings.layers() + 1)
    default = [LINEAR if number % interval else FULL for number in numbers]
    return settings.names("layer_types", (LINEAR, FULL), default)


def rotary(settings: Settings, head_dim: int, partial: float = 1.0) -> dict[str, Any]:
    """`rope_theta` and `rotary_dims` of an `AttentionSpec`, as both forms of the settings say it."""
    settings.only("rope_scaling", None)
    scaling = settings.part("rope_parameters")
    scaling.only("rope_type", "default")
    source = scaling if "rope_theta" in scaling.values else settings
    if source.values.get("rope_theta", 0) is None:
        return {"rope_theta": None}
    theta = source.number("rope_theta")
    source = scaling if "partial_rotary_factor" in scaling.values else settings
    dims = int(head_dim * source.number("partial_rotary_factor", partial))
    if dims % 2 or not 0 < dims <= head_dim:
        settings.complain(
            f"partial_rotary_factor must make an even part of head_dim = {head_dim}, got {dims}"
        )
    return {"rope_theta": theta, "rotary_dims": dims}


def whole_model(
    root: str, blocks: list[TensorTable], *, head: str = "lm_head.weight"
) -> TensorTable:
    """The tensors of a model whose embedding, layers and final norm stand under `root`."""
    names: NameMap = {
        f"{root}embed_tokens.weight": "embed.embedding",
        f"{root}norm.weight": "norm.scale",
        head: "head.kernel",
    }
    tensors = table(names)
    for number, block in enumerate(blocks):
        tensors += nested(block, f"{root}layers.{number}.", f"blocks.{number}.")
    return tensors


def mlp_table(where: str) -> TensorTable:
    """A SwiGLU of a block."""
    return nested(table(MLP), f"{where}.", "mlp.")


def expert_table(where: str, num_experts: int, names: dict[str, str]) -> TensorTable:
    """Experts one by one: `names` tells what each of the three projections is called."""
    tensors = []
    for projection, name in names.items():
        experts = tuple(f"{where}.{e}.{name}.weight" for e in range(num_experts))
        tensors.append(StoredTensor(experts, (f"mlp.{projection}_proj.kernel",)))
    return tensors
