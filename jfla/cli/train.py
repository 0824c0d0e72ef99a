"""Trains a language model: a jitted update, and checkpoints from which a run goes on."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array, Float

from jfla.cli import data
from jfla.nn import DeltaLM, DeltaLMConfig
from jfla.types import Implementation

_WARMUP_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the numbers of a run, which can be continued only under the same settings."""

    op: Literal["kda", "gdn"] = "kda"
    seed: int = 0
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    head_dim: int = 32
    rows: int = 16
    time: int = 128
    learning_rate: float = 4e-3

    def model(self, implementation: Implementation | None) -> DeltaLM:
        """A new model."""
        config = DeltaLMConfig(
            vocab_size=data.VOCAB,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            op=self.op,
            implementation=implementation,
        )
        return DeltaLM(config, rngs=nnx.Rngs(self.seed))


@functools.cache
def adamw(
    learning_rate: float, steps: int, warmup_steps: int = _WARMUP_STEPS
) -> optax.GradientTransformation:
    """AdamW with warmup, cosine decay over `steps` and clipped gradients.

    The same object for the same arguments: an update that is compiled serves every such run.
    """
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=max(steps, warmup_steps + 1),
        end_value=learning_rate / 20,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.98, weight_decay=0.01),
    )


class Metrics(NamedTuple):
    """Means over the scored positions.

    **Fields:** `bits`, cross-entropy in bits per token; `accuracy`, how often the likeliest token
    is right.
    """

    bits: Float[Array, ""]
    accuracy: Float[Array, ""]


Curves = dict[str, list[float]]  # one list per field of Metrics, one entry per step


def metrics(model: DeltaLM, batch: data.Batch) -> Metrics:
    """Metrics of one batch."""
    tokens = jnp.asarray(batch.tokens)
    target = tokens[:, 1:]
    packed = batch.segment_ids is not None
    logits = model(tokens[:, :-1], jnp.asarray(batch.segment_ids) if packed else None)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    right = jnp.argmax(logits, axis=-1) == target

    def mean(x: Array) -> Array:
        return jnp.mean(x, where=batch.scored, dtype=jnp.float32)

    return Metrics(bits=mean(nats / jnp.log(2)), accuracy=mean(right))


@nnx.jit
def update(model: DeltaLM, optimizer: nnx.Optimizer, batch: data.Batch) -> Metrics:
    """One step of the optimizer, over the parameters that it was made for."""

    def loss(model: DeltaLM) -> tuple[Float[Array, ""], Metrics]:
        result = metrics(model, batch)
        return result.bits, result

    trained = nnx.DiffState(0, optimizer.wrt)
    (_, result), grads = nnx.value_and_grad(loss, argnums=trained, has_aux=True)(model)
    optimizer.update(model, grads)
    return result


def evaluate(model: DeltaLM, dataset: data.Batches, num_batches: int) -> Metrics:
    """Mean metrics over the first batches of a data set."""
    results = [_evaluate(model, dataset.batch(i)) for i in range(num_batches)]
    return Metrics(*(jnp.mean(jnp.stack(values)) for values in zip(*results)))


_evaluate = nnx.jit(metrics)


@functools.partial(nnx.jit, static_argnums=(0, 1, 2))
def create(
    settings: Settings, steps: int, implementation: Implementation | None
) -> tuple[DeltaLM, nnx.Optimizer[DeltaLM]]:
    """The demo's model and optimizer, drawn by one compiled program."""
    model = settings.model(implementation)
    optimizer = adamw(settings.learning_rate, steps)
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


class Run:
    """A model in training and its place on disk.

    Checkpoints are `folder/<step>`; each is written under another name and moved when it is whole,
    so that a kill at any time leaves the one before. They hold the parameters that are trained, the
    optimizer and the curves: data of step i depend on i alone, so a run that was killed and
    continued ends with the bits of one that was not. Under a mesh every process writes what its
    devices hold, and a run goes on under another mesh, or in another number of processes, where
    sums in another order change the last bits.
    """

    def __init__(
        self,
        model: DeltaLM,
        optimizer: nnx.Optimizer[DeltaLM],
        steps: int,
        folder: pathlib.Path,
    ):
        self.steps = steps
        self.model = model
        self.optimizer = optimizer
        self.curves: Curves = {name: [] for name in Metrics._fields}
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, cleanup_tmp_directories=True
        )
        self._checkpoints = ocp.CheckpointManager(folder.absolute(), options=options)
        saved = self._checkpoints.latest_step()
        if saved is not None:
            self._restore(saved)

    @property
    def step(self) -> int:
        """Steps done so far."""
        return len(self.curves["bits"])

    def train(self, dataset: data.Batches, save_every: int) -> Iterator[Metrics]:
        """Does the steps that are left and yields the metrics of each."""
        while self.step < self.steps:
            result = update(self.model, self.optimizer, dataset.batch(self.step))
            for name, value in result._asdict().items():
                self.curves[name].append(float(value))
            if self.step % save_every == 0 or self.step == self.steps:
                self._save()
            yield result
        self._checkpoints.wait_until_finished()

    def close(self) -> None:
        """Waits until what is being written is on disk."""
        self._checkpoints.close()

    def _state(self) -> nnx.State:
        trained = nnx.Any(self.optimizer.wrt, nnx.OptState)
        return nnx.state((self.model, self.optimizer), trained)

    def _save(self) -> None:
        # A copy: it is written in the background, while the next steps add to the lists.
        curves = {name: [*values] for name, values in self.curves.items()}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(nnx.to_pure_dict(self._state())),
            curves=ocp.args.JsonSave(curves),
        )
        self._checkpoints.save(self.step, args=items, force=True)

    def _restore(self, step: int) -> None:
        state = self._state()
        saved = nnx.to_pure_dict(state)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, saved)
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract),
            curves=ocp.args.JsonRestore(),
        )
        restored = self._checkpoints.restore(step, args=items)
        nnx.replace_by_pure_dict(state, restored["state"])
        nnx.update((self.model, self.optimizer), state)
        self.curves = restored["curves"]
