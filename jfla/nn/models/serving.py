"""Continuous batching over a pool of states: requests that come and go -> their greedy tokens, and times."""

import collections
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jfla.nn.layers.delta_mixer import DeltaCache
from jfla.nn.models.delta_lm import DeltaLM
from jfla.pool import IDLE
from jfla.types import CHUNK


@dataclasses.dataclass
class Request:
    """A prompt and what became of it.

    **Fields:** `prompt` and `tokens`, those generated so far; `length`, how many are wanted; `submitted`, `first` and
    `last`, when the request came and when its first and last token did, in seconds of `time.perf_counter`, None before;
    `slot`, that of its state while it runs, else None.
    """

    prompt: tuple[int, ...]
    length: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    submitted: float = 0.0
    first: float | None = None
    last: float | None = None
    slot: int | None = None

    @property
    def finished(self) -> bool:
        """Whether all tokens are there."""
        return self.last is not None


class Server:
    """Serves a `DeltaLM` of delta-rule layers to any number of requests, `num_slots` of them at a time.

    A request waits until a slot is free. Prompts are prefilled packed, one behind the other in one row, and leave a
    state each; all running requests then get a token in one call. States and the inputs of the convolutions lie in
    pools that are written in place, so that a request costs the same memory whatever its length.

    **Arguments:** `model`; `num_slots`; `prefill_tokens`, the most tokens of prompts in one call (a longer prompt is
    alone in its call); `state_dtype`, float32 or bfloat16; `end`, a token that ends a request before its length.

    **Raises:** `ValueError` for a model with attention layers, and for a request without a prompt or a length.

    >>> import jax, jfla.nn
    >>> from flax import nnx
    >>> sizes = {"vocab_size": 16, "hidden_size": 32, "num_layers": 1}
    >>> config = jfla.nn.DeltaLMConfig(**sizes, num_heads=2, head_dim=16)
    >>> server = jfla.nn.Server(jfla.nn.DeltaLM(config, rngs=nnx.Rngs(0)), num_slots=2)
    >>> requests = [server.submit(prompt, 4) for prompt in ([1, 2, 3], [4], [5, 6])]
    >>> server.run()
    >>> print([len(request.tokens) for request in requests])
    [4, 4, 4]
    """

    def __init__(
        self,
        model: DeltaLM,
        *,
        num_slots: int = 8,
        prefill_tokens: int = 512,
        state_dtype: DTypeLike = jnp.float32,
        end: int | None = None,
    ):
        if num_slots < 1 or prefill_tokens < 1:
            raise ValueError(
                f"num_slots and prefill_tokens must be at least 1, got {num_slots}, {prefill_tokens}"
            )
        cache = model.init_cache(num_slots, 1)
        layers = [layer for layer in cache if isinstance(layer, DeltaCache)]
        if len(layers) < len(cache):
            raise ValueError(
                "model must have delta-rule layers alone, got one with attention"
            )
        self.num_slots = num_slots
        self.prefill_tokens = prefill_tokens
        self.end = end
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: dict[int, Request] = {}
        self._graph, self._parameters = nnx.split(model)
        self._pools = tuple(
            (layer.state.astype(state_dtype), layer.tails) for layer in layers
        )

    def submit(self, prompt: Sequence[int], length: int) -> Request:
        """Queues a request for `length` tokens behind a prompt; `step` and `run` fill it in."""
        if len(prompt) == 0:
            raise ValueError("prompt must have at least one token, got none")
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        request = Request(
            tuple(map(int, prompt)), length, submitted=time.perf_counter()
        )
        self.waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def run(self) -> None:
        """Steps until every request is finished."""
        while self.busy:
            self.step()

    def step(self) -> None:
        """Prefills the prompts that there are slots and room for, or else gives every running request a token."""
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        elif self.running:
            self._decode()

    def _admit(self) -> list[Request]:
        """The next requests, each with a slot that was free."""
        free = [slot for slot in range(self.num_slots) if slot not in self.running]
        admitted: list[Request] = []
        tokens = 0
        while self.waiting and free:
            tokens += len(self.waiting[0].prompt)
            if admitted and tokens > self.prefill_tokens:
                break
            request = self.waiting.popleft()
            request.slot = free.pop(0)
            self.running[request.slot] = request
            admitted.append(request)
        return admitted

    def _prefill(self, requests: list[Request]) -> None:
        total = sum(len(request.prompt) for request in requests)
        tokens = np.zeros((1, _bucket(total, CHUNK)), np.int32)
        ids = np.zeros_like(tokens)
        slots = np.full((1, self.num_slots), IDLE, np.int32)
        last = np.zeros(self.num_slots, np.int32)
        start = 0
        for i, request in enumerate(requests):
            stop = start + len(request.prompt)
            tokens[0, start:stop] = request.prompt
            ids[0, start:stop] = i + 1
            slots[0, i] = _slot(request)
            last[i] = stop - 1
            start = stop
        chosen, self._pools = _prefill(
            self._graph, self._parameters, self._pools, tokens, ids, slots, last
        )
        self._take(requests, chosen)

    def _decode(self) -> None:
        requests = list(self.running.values())
        rows = min(_bucket(len(requests), 1), self.num_slots)
        tokens = np.zeros((rows, 1), np.int32)
        slots = np.full(rows, IDLE, np.int32)
        for row, request in enumerate(requests):
            tokens[row] = request.tokens[-1]
            slots[row] = _slot(request)
        chosen, self._pools = _decode(
            self._graph, self._parameters, self._pools, tokens, slots
        )
        self._take(requests, chosen)

    def _take(self, requests: list[Request], chosen: Array) -> None:
        """Hands every request its token, and takes the slot from those that have all."""
        tokens = np.asarray(chosen)
        now = time.perf_counter()
        for request, token in zip(requests, tokens):
            request.tokens.append(int(token))
            if request.first is None:
                request.first = now
            if len(request.tokens) == request.length or token == self.end:
                request.last = now
                del self.running[_slot(request)]
                request.slot = None


def _slot(request: Request) -> int:
    assert request.slot is not None  # it runs
    return request.slot


def _bucket(number: int, smallest: int) -> int:
    """The next power of two times `smallest`: few shapes, few compilations."""
    size = smallest
    while size < number:
        size *= 2
    return size


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="pools")
def _prefill(
    graph: Any,
    parameters: Any,
    pools: Any,
    tokens: Array,
    segment_ids: Array,
    slots: Array,
    last: Array,
) -> tuple[Array, Any]:
    """The first token of every packed prompt, and the pools with their states."""
    model = nnx.merge(graph, parameters)
    x, cache = model.hidden(tokens, segment_ids, _with_slots(pools, slots))
    chosen = jnp.argmax(model.logits(x[:, last])[0], axis=-1)
    return chosen, _without_slots(cache)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="pools")
def _decode(
    graph: Any,
    parameters: Any,
    pools: Any,
    tokens: Array,
    slots: Array,
) -> tuple[Array, Any]:
    """The next token of every row, and the pools."""
    model = nnx.merge(graph, parameters)
    x, cache = model.hidden(tokens, None, _with_slots(pools, slots))
    chosen = jnp.argmax(model.logits(x)[:, 0], axis=-1)
    return chosen, _without_slots(cache)


def _with_slots(pools: Any, slots: Array) -> tuple[DeltaCache, ...]:
    return tuple(DeltaCache(state, tails, slots) for state, tails in pools)


def _without_slots(cache: Any) -> Any:
    return tuple((layer.state, layer.tails) for layer in cache)
