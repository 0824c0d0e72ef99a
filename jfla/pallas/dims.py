"""The shape of a call in whole chunks, from its inputs and options: what schedules depend on."""

from typing import NamedTuple

from jfla.packing import num_aligned_chunks
from jfla.types import CHUNK, Inputs, Options


class Dims(NamedTuple):
    """The shape of a call in whole chunks."""

    batch: int
    heads: int  # HV
    n_chunks: int
    value_dim: int
    key_dim: int
    segments: int | None = None  # packed into every row and scanned side by side
    # rows are packed without a number of segments, or their last chunk is not whole
    has_partial_chunks: bool = False
    may_be_padded: bool = False  # every row from another token on
    # each packed segment has a state of its own going in or coming out
    has_segment_states: bool = False

    @property
    def are_chains(self) -> bool:
        """Whether every row of heads is one chain of chunks, padding behind it, and all chains are of one length."""
        if self.segments is None:
            return True
        return self.segments == 1 and (self.batch == 1 or not self.may_be_padded)

    @property
    def sequences(self) -> int:
        """States, each of which is a chain of chunks."""
        return self.batch * self.heads * (self.segments or 1)

    @property
    def num_chunks(self) -> int:
        return self.batch * self.heads * self.n_chunks

    def as_segments(self) -> "Dims":
        """With every row as one packed segment."""
        n_chunks = num_aligned_chunks(self.n_chunks * CHUNK, 1)
        return self._replace(n_chunks=n_chunks, segments=1, has_partial_chunks=False)

    @property
    def may_be_one_chain(self) -> bool:
        """Whether packed segments may be scanned as one: no state goes in or out, and there is one row."""
        one_row = self.segments is not None and self.batch == 1
        return one_row and not self.has_segment_states

    def as_one_chain(self) -> "Dims":
        """With all packed segments in one chain of chunks."""
        return self._replace(segments=1)

    def as_copied(self) -> "Dims":
        """With all chunks whole, as copies have them."""
        return self._replace(has_partial_chunks=False)


def dims_of(inputs: Inputs, options: Options | None = None) -> Dims:
    """Of a call; time is rounded up to whole chunks, of every segment where a chunked call aligns them."""
    batch, time, heads, value_dim = inputs.v.shape
    segments = (
        options.num_segments
        if options is not None and options.aligned_segments
        else None
    )
    n_chunks = num_aligned_chunks(time, segments or 0)
    return Dims(
        batch,
        heads,
        n_chunks,
        value_dim,
        key_dim=inputs.q.shape[-1],
        segments=segments,
        has_partial_chunks=segments is None and _has_partial_chunks(inputs, options),
        may_be_padded=inputs.segment_ids is not None,
        has_segment_states=options is not None and options.per_segment_state,
    )


def _has_partial_chunks(inputs: Inputs, options: Options | None) -> bool:
    """Whether a row may be read as one segment, and has chunks that are not whole: its last one, or padding."""
    if options is None or options.sequence_axis is not None:
        return False
    if options.chunks_per_state is not None:
        return False
    return inputs.segment_ids is not None or inputs.v.shape[1] % CHUNK != 0
