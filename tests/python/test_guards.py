"""Guard bands around allocations, and how a candidate's case reports a write into one."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from kernel_agent import watching
from kernel_agent.guards import BAND, Guards
from kernel_agent.operations import candidate
from sources import SCALE_PAIR


def write_beside(tensor: torch.Tensor, offset: int) -> None:
    """A float at the element `offset` elements from the tensor's first, as a kernel without bounds would."""
    ctypes.c_float.from_address(tensor.data_ptr() + 4 * offset).value = 3.0


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
    write_beside(made, offset)
    assert guards.broken() == ["memory beside float32[24]"]
    guards.reset()
    assert guards.broken() == []


def test_guards__of_several_allocations__name_those_that_are_hurt():
    guards = Guards()
    made = [guards.allocate(torch.empty(extent)) for extent in (3, 5, 7, 9)]
    write_beside(made[1], 5)
    write_beside(made[3], -1)
    assert guards.broken() == ["memory beside float32[5]", "memory beside float32[9]"]


def test_guards__empty_tensor__is_left_as_it_is():
    like = torch.empty(0, 4)
    assert Guards().allocate(like) is like


def test_poison__with_guards__poisons_and_surrounds_what_is_allocated():
    guards = Guards()
    with watching.Poison(guards):
        made = torch.empty(3, 4)
        zeros = torch.zeros(3)
    assert made.isnan().all() and guards.broken() == []
    write_beside(made, 12)
    assert guards.broken() == ["memory beside float32[3x4]"]
    assert (zeros == 0).all()


def test_guards__storages_on_the_cpu__end_with_their_tensors_and_lie_apart():
    guards = Guards()
    made = sorted((guards.allocate(torch.empty(5)) for _ in range(20)), key=torch.Tensor.data_ptr)
    assert all(t.untyped_storage().nbytes() == 20 and t.storage_offset() == 0 for t in made)
    for one, other in itertools.pairwise(made):
        assert other.data_ptr() - one.data_ptr() >= 20 + BAND


POINTERS = """
@triton.jit
def scale_bwd_kernel(d_y_ptr, d_x_ptr, factor, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d_y = tl.load(d_y_ptr + offsets, mask=offsets < n)
    d_x = tl.load(d_x_ptr).to(tl.pointer_type(tl.float32))
    tl.store(d_x + offsets, d_y * factor, mask=offsets < n + PAST)
"""


@pytest.mark.parametrize(("past", "modified"), [(0, []), (3, ["memory beside float32[8]"])])
def test_candidate__store_through_a_table_of_addresses__is_seen_by_the_bands(past, modified, write, tmp_path):
    first = SCALE_PAIR.index("@triton.jit\ndef scale_bwd_kernel")
    last = SCALE_PAIR.index("class Scale(")
    source = SCALE_PAIR[:first] + POINTERS.replace("PAST", str(past)) + "\n\n" + SCALE_PAIR[last:]
    source = source.replace("(d_y, d_x, ctx", "(d_y, torch.tensor([d_x.data_ptr()]), ctx")
    case = {"id": 0, "dims": {"N": 8}, "seed": 1, "upstream": {"kind": "normal", "seed": 2}}
    request = {"file": str(write(source)), "device": "cpu", "cases": [case]}
    (result,) = candidate.run(request, tmp_path)["cases"]
    assert result["ok"], result
    assert result["modified"] == modified


def test_poison__with_guards__on_the_cpu__gradients_of_parts_are_put_together_inside_the_bands():
    """On a GPU, where bands are made otherwise, `in_place` of scripts/gpu.py's matrix shows it."""
    guards = Guards()
    x = torch.randn(4, 20, requires_grad=True)
    with watching.Poison(guards, plain=True):
        y = torch.zeros_like(x) + x
        y[:, 0] += 1.0
        made = torch.empty_like(x)
        y.sum().backward()
    assert made.storage_offset() == 0
    assert guards.broken() == []
    assert torch.equal(x.grad, torch.ones_like(x))
