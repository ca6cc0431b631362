"""Parts of tensors that are cut along their elements: their boxes are the part, no more and no less."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from duoka.parallel.flat_shard import FlatShard, boxes_of

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def cuts(draw):
    shape = draw(SHAPES)
    count = math.prod(shape)
    start = draw(st.integers(0, count))
    return shape, start, draw(st.integers(start, count))


@given(cuts())
def test_boxes_are_the_elements_in_their_order(cut):
    shape, start, stop = cut
    numbers = torch.arange(math.prod(shape)).view(shape)
    found = []
    for offset, size in boxes_of(shape, start, stop):
        assert len(offset) == len(size) == len(shape)
        found += (
            numbers[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))].flatten().tolist()
        )
    assert found == list(range(start, stop))


@given(cuts())
def test_values_written_into_boxes_are_in_the_part(cut):
    shape, start, stop = cut
    live = torch.zeros(stop - start)
    part = FlatShard(live, torch.Size(shape), start)
    assert part.shape == shape and part.detach() is not None
    whole = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    for chunk, (offset, values) in zip(part.__create_chunk_list__(), part.boxes(), strict=True):
        assert tuple(chunk.offsets) == offset and chunk.sizes == values.shape
        values.copy_(whole[tuple(slice(at, at + n) for at, n in zip(offset, values.shape, strict=True))])
    assert live.tolist() == whole.flatten()[start:stop].tolist()
