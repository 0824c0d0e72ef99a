"""Low-rank updates beside the projections of a model's blocks: added, trained alone, merged into the weights."""

import math
from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jfla.nn.layers.projections import Projection

# A router chooses by small differences of its logits; it stays as it was trained.
_LEFT_ALONE = ("router",)


class LoRAProjection(nnx.Module):
    """y = x W (+ b) + scale x A B: a `Projection` and an `nnx.LoRA` beside it."""

    def __init__(self, base: Projection, rank: int, scale: float, *, rngs: nnx.Rngs):
        inputs, outputs = matrix_shape(base)
        self.base = base
        self.lora = nnx.LoRA(inputs, rank, outputs, dtype=base.dtype, rngs=rngs)
        self.scale = scale

    def __call__(
        self, x: Float[Array, "*batch_and_inputs"], result: DTypeLike | None = None
    ) -> Float[Array, "*batch_and_outputs"]:
        """`result` is the dtype of the accumulated result, the layer's own by default."""
        y = self.base(x, result)
        rows = x.reshape(*x.shape[: x.ndim - self.base.inputs], -1)
        update = self.scale * self.lora(rows)
        return y + update.astype(y.dtype).reshape(y.shape)

    @property
    def kernel(self) -> Float[Array, "*inputs_and_outputs"]:
        """W + scale A B, rounded once to the dtype of W."""
        kernel = self.base.kernel[...]
        a = self.lora.lora_a[...]
        b = self.lora.lora_b[...]
        update = self.scale * jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
        return (kernel + update.reshape(kernel.shape)).astype(kernel.dtype)


def matrix_shape(projection: Projection) -> tuple[int, int]:
    """Of the kernel as one matrix: inputs, outputs."""
    shape = projection.kernel.shape
    return math.prod(shape[: projection.inputs]), math.prod(shape[projection.inputs :])


def add_lora(
    model: nnx.Module, rank: int, *, scale: float = 2.0, rngs: nnx.Rngs
) -> int:
    """Adds an update of low rank to the projections of a model, which then computes as before.

        y = x W + scale x A B,   A [in, rank] drawn, B [rank, out] zero, both float32

    It goes to every projection in mixers and MLPs that has more parameters than its update, but to
    no router, no experts (one matrix each), and not to the head. What is trained then is
    `nnx.LoRAParam`: `nnx.Optimizer(model, optimizer, wrt=nnx.LoRAParam)`, and gradients by
    `nnx.DiffState(0, nnx.LoRAParam)`. `merge_lora` comes before `save_hf`.

    **Arguments:** `model`, changed in place; `rank`; `scale`, often called alpha / rank; `rngs`, of A.

    **Returns:** the number of projections that got one.

    **Raises:** `ValueError` for a rank below 1, one at which no projection gets an update, and a
    model that has updates.

    Reference: Hu et al., LoRA (arXiv:2106.09685).

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
    >>> config = jfla.nn.DeltaLMConfig(**sizes, num_heads=2, head_dim=16, op="gdn")
    >>> model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    >>> jfla.nn.add_lora(model, 4, rngs=nnx.Rngs(1))
    8
    >>> sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    3200
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if any(_children(model, LoRAProjection)):
        raise ValueError(
            "model must have no updates of low rank, got one that has: merge_lora"
        )
    chosen = []
    for parent, name, projection in _children(model, Projection):
        inputs, outputs = matrix_shape(projection)
        if name not in _LEFT_ALONE and rank * (inputs + outputs) < inputs * outputs:
            chosen.append((parent, name, projection))
    if not chosen:
        raise ValueError(
            f"rank must be so small that an update is smaller than W, got {rank}"
        )
    for parent, name, projection in chosen:
        setattr(parent, name, LoRAProjection(projection, rank, scale, rngs=rngs))
    return len(chosen)


def merge_lora(model: nnx.Module) -> None:
    """Adds every update of `add_lora` to its weights, W + scale A B, and takes it away.

    **Arguments:** `model`, changed in place; without updates it stays as it is.

    >>> import jfla.nn
    >>> from flax import nnx
    >>> sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
    >>> config = jfla.nn.DeltaLMConfig(**sizes, num_heads=2, head_dim=16, op="gdn")
    >>> model = jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0))
    >>> count = jfla.nn.add_lora(model, 4, rngs=nnx.Rngs(1))
    >>> jfla.nn.merge_lora(model)
    >>> len(nnx.state(model, nnx.LoRAParam))
    0
    """
    for parent, name, projection in list(_children(model, LoRAProjection)):
        projection.base.kernel.set_value(projection.kernel)
        setattr(parent, name, projection.base)


def _children[Layer: nnx.Module](
    model: nnx.Module, kind: type[Layer]
) -> Iterator[tuple[nnx.Module, str, Layer]]:
    """(parent, name, layer) of every layer of a kind inside the blocks."""
    for path, parent in nnx.iter_modules(model):
        if "blocks" not in path:
            continue
        for name, child in vars(parent).items():
            # A Projection inside a LoRAProjection is not the model's own.
            if isinstance(child, kind) and not isinstance(parent, LoRAProjection):
                yield parent, name, child
