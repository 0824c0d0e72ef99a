"""What a layer that mixes tokens is to its caller: hidden states, and a cache of its own kind, to hidden states."""

from typing import overload

from flax import nnx
from jaxtyping import Array, Float

from jfla.types import SegmentIds

Hidden = Float[Array, "B T D"]


class Mixer[Cache](nnx.Module):
    """A layer that is called with a cache where tokens come a few at a time, and returns the next one then."""

    @overload
    def __call__(
        self, x: Hidden, segment_ids: SegmentIds | None = None, cache: None = None
    ) -> Hidden: ...
    @overload
    def __call__(
        self, x: Hidden, segment_ids: SegmentIds | None = None, *, cache: Cache
    ) -> tuple[Hidden, Cache]: ...
    def __call__(self, x, segment_ids=None, cache=None):
        y, new_cache = self.mix(x, segment_ids, cache)
        return y if cache is None else (y, new_cache)

    def mix(
        self, x: Hidden, segment_ids: SegmentIds | None, cache: Cache | None
    ) -> tuple[Hidden, Cache | None]:
        """The layer, always as (output, cache or None)."""
        raise NotImplementedError
