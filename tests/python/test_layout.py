"""Where elements lie in memory, told from strides: held against the list of all addresses."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_agent import layout

AXES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.uint8])
BUFFER = torch.zeros(1024, dtype=torch.uint8)


def view(axes, offset, dtype):
    """A tensor on the shared buffer, its offset in elements."""
    return BUFFER.view(dtype).as_strided([n for n, _ in axes], [s for _, s in axes], offset)


def places(tensor):
    """The bytes of every element, one entry an element."""
    size = tensor.element_size()
    steps = [range(0, n * s, s) if s else [0] * n for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    starts = [tensor.data_ptr() + size * sum(at) for at in itertools.product(*steps)]
    return [range(start, start + size) for start in starts]


def taken(tensor):
    return set(itertools.chain.from_iterable(places(tensor)))


@settings(max_examples=300, deadline=None)
@given(AXES, DTYPES)
def test_repeats__any_strides__is_what_the_addresses_say(axes, dtype):
    tensor = view(axes, 3, dtype)
    assert layout.repeats(tensor) == (len(taken(tensor)) < tensor.numel() * tensor.element_size())


@settings(max_examples=300, deadline=None)
@given(AXES, AXES, st.integers(0, 12), st.integers(0, 12), DTYPES, DTYPES)
def test_overlap__any_two_views__is_what_the_addresses_say(a, b, at, other_at, dtype, other):
    one, two = view(a, at, dtype), view(b, other_at, other)
    assert layout.overlap(one, two) == bool(taken(one) & taken(two))


def test_overlap__slices_of_one_buffer__share_memory_only_where_elements_do():
    packed = torch.zeros(4, 3, 5)
    assert not layout.overlap(packed[:, 0], packed[:, 1])
    assert not layout.overlap(packed[:2], packed[2:])
    assert layout.overlap(packed[:, 0], packed[:, :2])
    assert layout.overlap(packed, packed[3, 2, 4:])
    assert layout.overlap(packed[0, 0, :1].expand(6), packed)
    assert not layout.overlap(packed, torch.zeros(4, 3, 5)) and not layout.overlap(packed, packed[:0])


def test_overlap__other_memory__is_none():
    assert not layout.overlap(torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(6, 8)[:, :5],
        torch.zeros(4, 3, 5).permute(2, 0, 1),
        torch.zeros(3, 1).expand(3, 7),
        torch.zeros(4, 4),
        torch.zeros(()),
        torch.zeros(0, 3),
    ],
)
def test_repeats__usual_layouts__are_told_from_the_strides_alone(tensor, monkeypatch):
    monkeypatch.delattr(layout, "_map_of")
    layout.repeats(tensor)


def test_overlap__usual_pairs__are_told_from_the_strides_alone(monkeypatch):
    monkeypatch.delattr(layout, "_map_of")
    x = torch.zeros(6, 8)
    assert (
        layout.overlap(x, x[1:, 2:5])
        and layout.overlap(x[:, 4:], x)
        and layout.overlap(x, x.t())
        and layout.overlap(x[1:], x[:3])
    )
    assert not layout.overlap(x[:3], x[3:])
