"""Guard bands around allocations, and how a candidate's case reports a write into one."""

from __future__ import annotations

import pytest
import torch
from kernel_agent import candidate
from kernel_agent.guards import BAND, Guards


def outside(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The element `offset` elements from the tensor's first, wherever that is."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int8, torch.bool])
def test_guards__allocation__looks_like_the_one_it_replaces(dtype):
    like = torch.empty(5, 7, dtype=dtype).t()
    made = Guards().allocate(like)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert made.data_ptr() % 16 == 0


@pytest.mark.parametrize("offset", [-1, -BAND // 4, 24, 24 + BAND // 4])
def test_guards__write_beside_an_allocation__is_found(offset):
    guards = Guards()
    made = guards.allocate(torch.empty(24))
    made.fill_(1.0)
    assert guards.broken() == []
    outside(made, offset).fill_(3.0)
    assert guards.broken() == ["memory beside float32[24]"]
    guards.reset()
    assert guards.broken() == []


def test_guards__empty_tensor__is_left_as_it_is():
    like = torch.empty(0, 4)
    assert Guards().allocate(like) is like


def test_poison__with_guards__poisons_and_surrounds_what_is_allocated():
    guards = Guards()
    with candidate.Poison(guards):
        made = torch.empty(3, 4)
        zeros = torch.zeros(3)
    assert made.isnan().all() and guards.broken() == []
    outside(made, 12).fill_(0.0)
    assert guards.broken() == ["memory beside float32[3x4]"]
    assert (zeros == 0).all()
