"""Mixture of experts: a router, experts of which each token takes a few, and a shared one."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jfla.nn.layers.projections import DTypes, Projection, SwiGLU
from jfla.nn.sharding import EMBED, MLP, Axes, partitioned

Rows = Float[Array, "M D"]
Chosen = Int[Array, "M k"]
Weights = Float[Array, "M k"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """Sizes of a mixture of experts, and how its router scores and weighs them.

    **Fields:**

    - `num_experts` of `intermediate_size`, of which each token takes `experts_per_token`.
    - `score`: "softmax" over all experts, or "sigmoid" of each. `renormalize`: the weights of the
      chosen are divided by their sum; `weight_scale` multiplies them then.
    - `correction_bias`: experts are chosen by score plus a bias each, weighed without it.
    - `num_groups`, `groups_per_token`: experts come in groups, and only those of the groups with
      the largest sums of their two best scores can be chosen.
    - `shared_size` of an expert that every token takes (None: none), multiplied by
      sigmoid(x w) if `shared_gate`.

    **Raises:** `ValueError` for numbers that do not fit together.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    weight_scale: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    shared_size: int | None = None
    shared_gate: bool = False

    def __post_init__(self):
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(
                f'score must be "softmax" or "sigmoid", got {self.score!r}'
            )
        if not 1 <= self.groups_per_token <= self.num_groups:
            raise ValueError(
                f"groups_per_token must be in 1 .. {self.num_groups}, got {self.groups_per_token}"
            )
        if self.num_groups > 1 and self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}"
            )
        reachable = self.num_experts // self.num_groups * self.groups_per_token
        if not 1 <= self.experts_per_token <= reachable:
            raise ValueError(
                f"experts_per_token must be in 1 .. {reachable}, got {self.experts_per_token}"
            )


class ExpertProjection(nnx.Module):
    """y = x W_e, one matrix for each expert: the kernel is [E, in, out]."""

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        axes: Axes,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        initializer = nnx.initializers.lecun_normal(batch_axis=(0,))
        shape = (experts, inputs, outputs)
        self.kernel = partitioned(initializer, (None, *axes), rngs, shape, param_dtype)
        self.dtype = dtype

    def of_sorted(
        self, rows: Float[Array, "M in"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "M out"]:
        """Rows that stand in the order of their experts, of which each has so many."""
        kernel = self.kernel[...].astype(self.dtype)
        return lax.ragged_dot(
            rows.astype(self.dtype),
            kernel,
            group_sizes,
            preferred_element_type=self.dtype,
        )

    def of_each(
        self, rows: Float[Array, "M in"], experts: Int[Array, " M"]
    ) -> Float[Array, "M out"]:
        """Rows in any order, each with its expert's matrix: for so few that no expert has many."""
        kernel = self.kernel[...][experts].astype(self.dtype)
        return jnp.einsum(
            "mi,mio->mo",
            rows.astype(self.dtype),
            kernel,
            preferred_element_type=self.dtype,
        )


class MixtureOfExperts(nnx.Module):
    """y = sum over the chosen experts e of w_e SwiGLU_e(x), plus the shared expert.

    No token is dropped. The router works in float32.

    **Arguments:** `hidden_size`; `options`, a `MoEOptions`; `dtype` of the computation,
    `param_dtype` of the parameters.

    Reference: Shazeer et al. (arXiv:1701.06538); Dai et al., DeepSeekMoE (arXiv:2401.06066).

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> options = jfla.nn.MoEOptions(num_experts=4, experts_per_token=2, intermediate_size=8)
    >>> layer = jfla.nn.MixtureOfExperts(16, options, rngs=nnx.Rngs(0))
    >>> print(layer(jax.random.normal(jax.random.key(0), (2, 5, 16))).shape)
    (2, 5, 16)
    """

    def __init__(
        self,
        hidden_size: int,
        options: MoEOptions,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dtypes: DTypes = {"dtype": dtype, "param_dtype": param_dtype}
        experts = options.num_experts
        inner = options.intermediate_size
        inward = (hidden_size, inner, (EMBED, MLP))
        outward = (inner, hidden_size, (MLP, EMBED))
        self.router = Projection(
            (hidden_size,),
            (experts,),
            (EMBED, None),
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.correction = nnx.data(None)
        if options.correction_bias:
            zeros = nnx.initializers.zeros
            self.correction = partitioned(zeros, (None,), rngs, (experts,), jnp.float32)
        self.gate_proj = ExpertProjection(experts, *inward, rngs=rngs, **dtypes)
        self.up_proj = ExpertProjection(experts, *inward, rngs=rngs, **dtypes)
        self.down_proj = ExpertProjection(experts, *outward, rngs=rngs, **dtypes)
        self.shared = nnx.data(None)
        self.shared_gate = nnx.data(None)
        if options.shared_size is not None:
            self.shared = SwiGLU(hidden_size, options.shared_size, rngs=rngs, **dtypes)
        if options.shared_gate:
            self.shared_gate = Projection(
                (hidden_size,), (1,), (EMBED, None), rngs=rngs, **dtypes
            )
        self.options = options

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        rows = x.reshape(-1, x.shape[-1])
        experts, weights = self.route(rows)
        # Where most experts have no row, reading the matrices of the chosen alone is less work.
        few = experts.size <= self.options.num_experts
        apply = self._each if few else self._sorted
        y = apply(rows, experts)
        y = jnp.sum(y.astype(jnp.float32) * weights[:, :, None], axis=1)
        y = y.astype(x.dtype).reshape(x.shape)
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return y + shared

    def route(self, rows: Rows) -> tuple[Chosen, Weights]:
        """The experts of each row, and their weights, in float32."""
        options = self.options
        logits = self.router(rows)
        softmax = options.score == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
        _, experts = lax.top_k(self._eligible(scores), options.experts_per_token)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if options.renormalize:
            # Sigmoids may all be 0.
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return experts, weights * options.weight_scale

    def _eligible(self, scores: Float[Array, "M E"]) -> Float[Array, "M E"]:
        """What experts are chosen by: -inf outside of the row's best groups."""
        options = self.options
        if self.correction is not None:
            scores = scores + self.correction[...][None]
        if options.num_groups == options.groups_per_token:
            return scores
        grouped = scores.reshape(scores.shape[0], options.num_groups, -1)
        best, _ = lax.top_k(grouped, min(2, grouped.shape[-1]))
        _, groups = lax.top_k(jnp.sum(best, axis=-1), options.groups_per_token)
        taken = jnp.any(
            groups[:, :, None] == jnp.arange(options.num_groups)[None, None], axis=1
        )
        return jnp.where(taken[:, :, None], grouped, -jnp.inf).reshape(scores.shape)

    def _each(self, rows: Rows, experts: Chosen) -> Float[Array, "M k D"]:
        flat = experts.reshape(-1)
        repeated = jnp.repeat(rows, experts.shape[1], axis=0)
        inner = jax.nn.silu(self.gate_proj.of_each(repeated, flat))
        y = self.down_proj.of_each(inner * self.up_proj.of_each(repeated, flat), flat)
        return y.reshape(*experts.shape, -1)

    def _sorted(self, rows: Rows, experts: Chosen) -> Float[Array, "M k D"]:
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        repeated = rows[order // experts.shape[1]]
        sizes = jnp.bincount(flat, length=self.options.num_experts).astype(jnp.int32)
        inner = jax.nn.silu(self.gate_proj.of_sorted(repeated, sizes))
        y = self.down_proj.of_sorted(
            inner * self.up_proj.of_sorted(repeated, sizes), sizes
        )
        return y[jnp.argsort(order)].reshape(*experts.shape, -1)
