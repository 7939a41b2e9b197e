"""Where gradients come from, as far as launches and torch operations show."""

from __future__ import annotations

import pytest
import torch
from kernel_agent.flow import Flow, unseen
from torch.utils._python_dispatch import TorchDispatchMode


class Followed(TorchDispatchMode):
    """Follows what is done inside; `names` are those of operations that only kernels may do."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow, self.names = flow, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = self.flow.operation(func, args, kwargs or {}, result)
        if name is not None:
            self.names.append(name)
        return result


def start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_flow__gradient__is_traced_through_kernels_and_copies():
    flow, up, made, other = Flow(), torch.randn(8), torch.empty(8), torch.empty(8)
    flow.begins([up])
    assert not flow.traced(made) and not flow.traced(up)
    flow.launched([up, made, other], {start(up)}, {start(made)})
    assert flow.traced(made) and not flow.traced(other)
    with Followed(flow):
        copy = torch.stack([made.view(2, 4), made.view(2, 4)]).sum(0)
        other[2:4] = copy[0, :2]
        fresh = torch.empty_like(made)
    assert flow.traced(copy) and flow.traced(other) and not flow.traced(fresh)


def test_flow__launch_that_reads_no_upstream__traces_nothing():
    flow, up, x, made = Flow(), torch.randn(8), torch.randn(8), torch.empty(8)
    flow.begins([up])
    flow.launched([up, x, made], {start(x)}, {start(made)})
    assert not flow.traced(made)
    with Followed(flow):
        copied = up.clone()
    assert not flow.traced(copied), "no kernel wrote it"
    flow.launched([copied, made], {start(copied)}, {start(made)})
    assert flow.traced(made)


def test_flow__gradient_of_a_forwards_launch__is_traced_through_scalings_alone():
    flow, loss, made, torchs = Flow(), torch.ones(()), torch.ones(8), torch.ones(8)
    flow.forward([loss, made, torchs], {start(loss), start(made)})
    assert not flow.traced(made), "a pair's forward makes no gradient"
    flow.scales = True
    with Followed(flow):
        kept = made.detach().clone()
        flow.begins([up := torch.tensor(2.0)])
        scaled, halved = kept * up, (kept * 0.5).sum(0)
        others = [torchs * up, kept - up, kept * torchs, kept.exp()]
    assert flow.traced(kept) and flow.traced(scaled) and flow.traced(halved)
    assert not any(flow.traced(other) for other in others)


def test_flow__what_torch_writes_over_a_forwards_launch__is_the_kernels_no_more():
    flow, made, other = Flow(), torch.ones(8), torch.ones(8)
    flow.scales = True
    for write in (lambda: made.copy_(other), lambda: made.add_(1), lambda: made[:2].zero_()):
        flow.forward([made], {start(made)})
        assert flow.is_made(made)
        with Followed(flow):
            write()
        assert not flow.is_made(made)
    flow.forward([made], {start(made)})
    with Followed(flow):
        made.mul_(0.5)
        other.copy_(made)
    assert flow.is_made(made) and flow.is_made(other)


def test_flow__launch_behind_addresses__makes_no_claim():
    flow = Flow()
    flow.launched([], None, set())
    assert flow.traced(torch.ones(3))


def test_flow__integers_that_come_from_the_upstream__are_for_kernels_alone():
    flow, up, words, lengths = Flow(), torch.randn(8), torch.zeros(8, dtype=torch.int64), torch.arange(8)
    flow.begins([up])
    flow.launched([up, words], {start(up)}, {start(words)})
    with Followed(flow) as seen:
        lengths.cumsum(0).mul(2).tolist()
    assert seen.names == []
    with Followed(flow) as seen:
        (words * lengths).sum()
        int(words[0])
    assert seen.names == ["aten::mul", "aten::sum", "aten::select", "aten::_local_scalar_dense"]


def test_flow__bits_of_numbers__are_named_whatever_they_come_from():
    with Followed(Flow()) as seen:
        torch.randn(4).view(torch.int32)
        torch.zeros(4, dtype=torch.int32).view(torch.float32)
        torch.zeros(4, dtype=torch.int32).view(torch.uint8)
        torch.randn(4).view(2, 2)
    assert seen.names == ["aten::view of float32 as int32", "aten::view of int32 as float32"]


def test_unseen__methods_without_a_dispatcher__are_noted_and_put_back():
    noted = []
    before = torch.Tensor.map_
    with unseen(lambda name, tensor: noted.append(name), ()):
        torch.ones(2).map_(torch.ones(2), lambda a, b: a + b)
        torch.ones(2).apply_(lambda a: a)
        torch.ones(2).tolist()
    assert noted == ["Tensor.map_", "Tensor.apply_", "Tensor.tolist"]
    with unseen(lambda name, tensor: noted.append(name), (__file__,)):
        torch.ones(2).tolist()
    assert len(noted) == 3 and torch.Tensor.map_ is before


def from_a_kernel(flow: Flow, *shape: int) -> torch.Tensor:
    made = torch.randn(shape)
    flow.launched([up := torch.randn(2), made], {start(up)}, set())
    flow.begins([up])
    flow.launched([up, made], {start(up)}, {start(made)})
    return made


def filled_twice(made: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(2, *made.shape)
    buffer[0].copy_(made)
    buffer[1] = made.clone()
    return buffer.sum(0)


PRODUCTS = {
    "expanded": lambda made: made.expand(3, 4, 6).sum(0),
    "expanded and copied": lambda made: made.expand(3, 4, 6).contiguous().sum(0),
    "repeated": lambda made: made.repeat(2, 1).view(2, 4, 6).sum(0),
    "stacked": lambda made: torch.stack((made, made.clone())).sum(0),
    "joined": lambda made: torch.cat((made.t(), made.t())).view(2, 6, 4).sum(0),
    "picked": lambda made: made[:, torch.tensor([0, 0, 1])].sum(1),
    "filled": filled_twice,
    "overlapping windows": lambda made: made.unfold(1, 2, 1).sum((1, 2)),
    "all of it": lambda made: torch.stack((made, made)).sum(),
    "sums of the same": lambda made: torch.stack((made.sum(0), made.flip(0).sum(0))).sum(0),
}
SUMS = {
    "partial results": lambda made: made.sum(0),
    "of the same once each": lambda made: made.expand(3, 4, 6).sum(1),
    "parts joined": lambda made: torch.cat((made[2:], made[:2])).sum(0),
    "interleaved": lambda made: torch.stack((made[:, ::2], made[:, 1::2])).sum((0, 2)),
    "padding": lambda made: torch.nn.functional.pad(made, (3, 3)).sum(1),
    "step by step": lambda made: made.sum(0).sum(0),
    "negative axes": lambda made: made.sum((-1, -2)),
    "of nothing": lambda made: made[:0].sum(0),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_flow__sum_that_adds_a_number_several_times__is_named(kind):
    flow = Flow()
    made = from_a_kernel(flow, 4, 6)
    with Followed(flow) as seen:
        PRODUCTS[kind](made)
    assert "aten::sum of one number several times" in seen.names


@pytest.mark.parametrize("kind", SUMS)
def test_flow__sum_of_different_numbers__is_not(kind):
    flow = Flow()
    made = from_a_kernel(flow, 4, 6)
    with Followed(flow) as seen:
        SUMS[kind](made)
    assert not [name for name in seen.names if " of " in name]


def test_flow__sum_of_what_a_later_launch_wrote__is_of_other_numbers():
    flow, buffer = Flow(), torch.empty(2, 6)
    made = from_a_kernel(flow, 6)
    with Followed(flow) as seen:
        buffer[0].copy_(made)
        flow.launched([made], {start(made)}, {start(made)})
        buffer[1].copy_(made)
        buffer.sum(0)
    assert not [name for name in seen.names if " of " in name]


def test_flow__expanded_upstream__is_summed_as_often_as_it_has_a_number():
    flow, up = Flow(), torch.randn(6).expand(4, 6)
    flow.begins([up])
    with Followed(flow) as seen:
        up.sum(0)
        up.contiguous().sum(0)
    assert not [name for name in seen.names if " of " in name]
    with Followed(flow) as seen:
        up.expand(2, 4, 6).sum((0, 1))
    assert "aten::sum of one number several times" in seen.names


def test_flow__gradient_that_the_host_makes_narrower__may_not_become_wider_again():
    flow = Flow()
    made = from_a_kernel(flow, 4, 6)
    with Followed(flow) as seen:
        half = made.to(torch.float16)
        torch.empty(4, 6, dtype=torch.float16).copy_(made.sum(0))
        made.to(torch.float64).to(torch.float32)
    assert not [name for name in seen.names if "rounded" in name]
    for widen in (
        lambda: half.float(),
        lambda: half.clone().t().to(torch.float32),
        lambda: half.sum(0, dtype=torch.float32),
        lambda: torch.empty(4, 6).copy_(half),
    ):
        with Followed(flow) as seen:
            widen()
        assert "of what the host rounded to float16" in seen.names[-1]
    flow.launched([half], {start(half)}, {start(half)})
    with Followed(flow) as seen:
        half.float()
    assert seen.names == ["aten::_to_copy"], "a kernel wrote it in half"


def test_flow__tensors_without_elements__have_nothing_in_common():
    flow, up = Flow(), torch.empty(0, 3)
    flow.begins([up])
    with Followed(flow) as seen:
        torch.argsort(torch.empty(0, dtype=torch.int64))
        torch.empty(0).mul(2)
    assert seen.names == []
