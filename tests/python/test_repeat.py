"""What is written down of Triton's semantic layer changes no bit of what the stand-in computes, nor of its
gradients."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

import triton.language as tl
from kernel_agent.torch_tl import EXACT, NATIVE, Memory, reductions, repeat
from kernel_agent.torch_tl.handles import Constant, Diverged, Handle
from kernel_agent.torch_tl.repeat import Repeats, repeats_of
from kernel_agent.torch_tl.runtime import Runtime
from test_torch_tl import Evaluation, compile_kernel

LOOP = """\
@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(n):
        x = tl.load(x_ptr + t * BLOCK + at, mask=at < BLOCK - t, other=0.5)
        {body}
    tl.store(y_ptr + at, total)
"""
BODIES = {
    "arithmetic": "total = total * 0.5 + x / (1.0 + x * x) - t",
    "integers": "total += x * ((at // (t + 1)) % 3 - (at << 1)).to(tl.float32)",
    "signs of zero": "u = tl.where(1 / (x * x * 0.0) > 0, x, 0.0); total += u + tl.where(1 / (x * x "
    "* -0.0) > 0, x, -x)",
    "comparisons": "total = tl.where((x > 0.1) & (at != t), total + x, -total)",
    "functions": "total += tl.exp(-tl.abs(x)) + tl.sigmoid(x) + tl.minimum(x, 0.3)",
    "half precision": "total += (x.to(tl.float16) * 1.1).to(tl.float32)",
    "sum and maximum": "total += x / tl.sum(tl.exp(x - tl.max(x, axis=0)), axis=0)",
    "scan": "total += tl.cumsum(x, axis=0)",
    "first maximum": "total += x * tl.argmax(x, axis=0)",
    "another combination": "total += x * tl.reduce(x, 0, product)",
    "shapes": "total += tl.sum(tl.trans(x[:, None] * x[None, :]), axis=1)",
    "product of matrices": "m = x[:, None] * x[None, :]; total += tl.sum(tl.dot(m, m.T), axis=1)",
    "random numbers": "total += x * tl.randn(t, at)",
    "split": "a, b = tl.split(tl.reshape(x, [BLOCK // 2, 2])); total += tl.interleave(a, b * 2)",
    "block pointer": "p = tl.make_block_ptr(x_ptr, (BLOCK,), (1,), (t,), (BLOCK,), (0,)); "
    "total += tl.load(p, boundary_check=(0,)) * x",
    "branch": "total += x if t > 1 else -x",
}


def evaluated(body: str, precision: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What LOOP stores, and its gradient."""
    kernel = compile_kernel(LOOP.format(body=body), folder)
    x = torch.randn(6 * 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    run = Evaluation(precision, x_ptr=x, y_ptr=torch.zeros(16))
    run.launch(kernel, n=6, BLOCK=16)
    y = run["y_ptr"]
    (grad,) = torch.autograd.grad(y, run.leaves["x_ptr"], torch.linspace(-1, 1, 16).to(y.dtype))
    return y.detach(), grad


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: Any) -> None:
    monkeypatch.setattr(repeat, "_repeats", {})


def _plainly(self: Any, semantic: Any, which: Any, plain: Any, args: Any, kwargs: Any = None) -> Any:
    return plain(which, args, kwargs or {})


@pytest.mark.parametrize("precision", [EXACT, NATIVE])
@pytest.mark.parametrize("name", BODIES)
def test_loop__repeated__has_the_bits_of_the_semantic_layer(
    name: str, precision: str, tmp_path: Path, monkeypatch: Any
) -> None:
    repeated = [evaluated(BODIES[name], precision, tmp_path) for _ in range(2)]
    monkeypatch.setattr(Repeats, "ask", _plainly)
    y, grad = evaluated(BODIES[name], precision, tmp_path)
    for again in repeated:
        assert torch.equal(again[0].view(torch.uint8), y.view(torch.uint8))
        assert torch.equal(again[1].view(torch.uint8), grad.view(torch.uint8))


def test_loop__asks_the_semantic_layer_twice_for_each_operation(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[str] = []
    plain = Runtime._binary

    def counted(self: Any, name: str, sides: Any, kwargs: Any) -> Any:
        asked.append(name)
        return plain(self, name, sides, kwargs)

    monkeypatch.setattr(Runtime, "_binary", counted)
    evaluated("total = total * 0.25 + (x % 7)", EXACT, tmp_path)
    assert asked.count("mod") == 2


def test_operand_given_twice__is_another_operation_than_two_operands(tmp_path: Path) -> None:
    body = "a = x * x; c = x * x; b = x * total; total += a - b + x"
    expected = torch.zeros(16, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(6 * 16, generator=generator).double().reshape(6, 16)
    for t in range(6):
        x = torch.where(torch.arange(16) < 16 - t, values[t], 0.5)
        expected = expected + (x * x - x * expected + x)
    torch.testing.assert_close(evaluated(body, EXACT, tmp_path)[0], expected)


def test_number__that_the_loop_variable_also_has__stays_that_number(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """\
@triton.jit
def kernel(y_ptr, n):
    total = 0
    for t in range(n):
        total = total * 10 + (t + 1)
    tl.store(y_ptr, total)
""",
        tmp_path,
    )
    run = Evaluation(EXACT, y_ptr=torch.zeros(1, dtype=torch.int32))
    run.launch(kernel, n=6)
    assert run["y_ptr"].tolist() == [123456]


def test_grid_and_program__are_asked_of_each_launch(tmp_path: Path) -> None:
    kernel = compile_kernel(
        """\
@triton.jit
def kernel(y_ptr):
    tl.store(y_ptr + tl.program_id(0), tl.program_id(0) * 100 + tl.num_programs(0))
""",
        tmp_path,
    )
    for programs in (2, 3, 4, 5):
        run = Evaluation(EXACT, y_ptr=torch.zeros(programs, dtype=torch.int32))
        run.launch(kernel, grid=(programs,))
        assert run["y_ptr"].tolist() == [100 * at + programs for at in range(programs)]


def blocks(*values: float) -> tl.tensor:
    return tl.tensor(Handle(torch.tensor([values])), tl.block_type(tl.float32, [len(values)]))


def test_operation_that_raises__leaves_nothing_half_written() -> None:
    runtime = Runtime(Memory(NATIVE))
    fails = [False, True, False, False]

    def plain(which: str, args: Any, kwargs: Any) -> Any:
        total = args[0].__add__(args[1], _semantic=runtime.semantic)
        if fails.pop(0):
            raise Diverged(torch.zeros(1))
        return total

    def ask() -> Any:
        return runtime.repeats.ask(runtime.semantic, "sum", plain, (blocks(1, 2), blocks(3, 4)))

    ask()
    with pytest.raises(Diverged):
        ask()
    assert runtime.semantic.builder is runtime.builder
    assert runtime.repeats.recorder is None
    assert [ask().handle.data.tolist() for _ in range(3)] == [[[4, 6]]] * 3
    assert fails == [False]  # written down by the third, repeated by the others


def test_operation_that_looks_at_elements__is_evaluated_each_time() -> None:
    runtime = Runtime(Memory(NATIVE))

    def plain(which: str, args: Any, kwargs: Any) -> Any:
        positive = runtime.truth(runtime.compare("gt", args[0], 0.0))
        return args[0] if positive else args[0].__neg__(_semantic=runtime.semantic)

    found = []
    for value in (1.0, 2.0, -3.0, 4.0, -5.0):
        scalar = tl.tensor(Handle(torch.tensor([value])), tl.float32)
        found.append(runtime.repeats.ask(runtime.semantic, "size", plain, (scalar,)).handle.data.item())
    assert found == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_precisions__share_nothing() -> None:
    assert repeats_of(Memory(EXACT)) is repeats_of(Memory(EXACT))
    assert repeats_of(Memory(EXACT)) is not repeats_of(Memory(NATIVE))


def _waits(self: Any) -> None:
    raise AssertionError("a wait for the device")


def test_number_of_the_launch__decides_a_loop_without_asking_the_device(
    tmp_path: Path, monkeypatch: Any
) -> None:
    kernel = compile_kernel(LOOP.format(body="total += x"), tmp_path)
    x = torch.randn(6 * 16)
    run = Evaluation(EXACT, x_ptr=x, y_ptr=torch.zeros(16))
    monkeypatch.setattr(torch.Tensor, "item", _waits)
    run.launch(kernel, n=6, BLOCK=16)


def test_atomic_without_a_mask__does_not_ask_the_device(monkeypatch: Any) -> None:
    runtime = Runtime(Memory(NATIVE))
    masks: list[Any] = []
    keep = lambda update, ptr, value, mask: masks.append(mask)
    monkeypatch.setattr(runtime.memory, "atomic", keep)
    monkeypatch.setattr(torch.Tensor, "__bool__", _waits)
    for data, value in ((torch.ones(1, dtype=torch.bool), True), (torch.zeros(1, dtype=torch.bool), False)):
        mask = Constant(data, value)
        runtime.builder.atomic("add", SimpleNamespace(), Handle(torch.ones(1)), mask)
    assert masks[0] is None
    assert masks[1] is not None


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("row", "value", "index"),
    [
        ([1.0, 3.0, 3.0], 3.0, 1),
        ([NAN, 2.0, 2.0], 2.0, 1),
        ([NAN, -INF, -INF], -INF, 1),
        ([-INF, NAN, -INF], -INF, 0),
        ([-0.0, 0.0, NAN], 0.0, 0),
        ([NAN, NAN, NAN], NAN, 0),
        ([4, 7, 7], 7, 1),
    ],
)
def test_extreme__takes_the_first_of_equal_numbers_and_a_nan_last(
    row: list[float], value: float, index: int
) -> None:
    for sign, largest in ((1, True), (-1, False)):
        got, at = reductions.extreme(sign * torch.tensor([row]), 1, largest)
        assert at.tolist() == [index]
        torch.testing.assert_close(got, sign * torch.tensor([value], dtype=got.dtype), equal_nan=True)
