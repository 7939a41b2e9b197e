"""Arguments that are a number in one call and a tensor in another; outputs that hold something in some calls;
arguments that a helper gets from its caller."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diff_support import ROOT, assert_right, draft, pair_text

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 9, "tensor": False}, {"M": 2, "N": 16, "tensor": True}]


@triton.jit
def shift_kernel(x, table, y, offset, N, BLOCK: tl.constexpr, IS_TENSOR: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    if not IS_TENSOR:
        at = c + offset
    else:
        at = c + tl.load(offset + row)
    ok = (c < N) & (at >= 0)
    value = tl.load(x + row * N + c, mask=ok, other=0.0)
    value *= value * tl.load(table + at, mask=ok, other=0.0)
    tl.store(y + row * N + c, value, mask=c < N)


@autodiff(inputs_require_grad=(0,))
def shift(x, table, offset):
    y = torch.empty_like(x)
    M, N = x.shape
    tensor = isinstance(offset, torch.Tensor)
    shift_kernel[(M,)](x, table, y, offset, N, BLOCK=triton.next_power_of_2(N), IS_TENSOR=tensor)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    offset = torch.arange(M, device=device) if dims["tensor"] else 2
    return *(torch.randn(s, device=device, dtype=dtype) for s in ((M, N), (N + M + 2,))), offset
"""


@pytest.mark.parametrize("tensor", [False, True])
def test_argument__a_number_or_a_tensor__is_either_in_the_backward(
    tensor: bool, write: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write(SOURCE)
    result = draft(file, {"M": 3, "N": 9, "tensor": tensor})
    shapes = [{"M": m, "N": n, "tensor": t} for m, n in ((3, 9), (1, 4)) for t in (False, True)]
    assert_right(file, result, [(dims, "normal") for dims in shapes])
    pair = tmp_path / "either_pair.py"
    pair.write_text(pair_text(SOURCE, result["backward"]))
    spec = importlib.util.spec_from_file_location("either_pair", pair)
    assert spec is not None and spec.loader is not None
    module = sys.modules["either_pair"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(NotImplementedError, match="its gradient is not known"):
        module.shift_autograd(
            torch.randn(2, 4, requires_grad=True), torch.ones(9), torch.ones(2, requires_grad=True)
        )


HELD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 8, "more": 0}, {"M": 3, "N": 8, "more": 3}]


@triton.jit
def sin_kernel(x, y, stride, n, BLOCK: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(y + row * stride + c, tl.sin(tl.load(x + row * stride + c, mask=c < n, other=0.0)), mask=c < n)


def launched(x, table, n):
    y = torch.empty_like(x)
    if n < x.shape[1]:
        y[:, n:].copy_(x[:, n:])
    sin_kernel[(x.shape[0],)](x, y, x.stride(0), n, BLOCK=triton.next_power_of_2(n))
    return y


@autodiff(inputs_require_grad=(0,))
def part(x, table, more):
    return launched(x, table, x.shape[1] - more)


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"] + dims["more"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], device=device, dtype=dtype), dims["more"]
"""


def test_output_that_holds_something_in_another_size__is_traced_with_it(write: Callable[[str], Path]) -> None:
    file = write(HELD)
    sizes = [{"M": 3, "N": 8, "more": 0}, {"M": 3, "N": 8, "more": 3}]
    case = {"dims": sizes[0], "seed": 1, "others": sizes[1:]}
    assert_right(file, draft(file, sizes[0], case=case), [(dims, "normal") for dims in sizes])


def test_size_without_elements__has_no_memory_that_others_share(write: Callable[[str], Path]) -> None:
    """A hidden shape may have none; its launch is another where a block is as wide as a row."""
    file = write(HELD)
    sizes = [{"M": 3, "N": 8, "more": 0}, {"M": 0, "N": 40, "more": 0}, {"M": 3, "N": 8, "more": 3}]
    case = {"dims": sizes[0], "seed": 1, "others": sizes[1:]}
    assert_right(file, draft(file, sizes[0], case=case), [(sizes[0], "normal"), (sizes[2], "normal")])


def test_constant_argument_of_a_helper__has_no_gradient(write: Callable[[str], Path]) -> None:
    """Also where the helper assigns it anew; but not where the module hands the helper on."""
    table = "    table = table.contiguous()\n    y = torch.empty_like(x)\n"
    kernel = [
        ("x, y, stride, n", "x, table, y, stride, n"),
        ("(x, y, x.stride(0)", "(x, table, y, x.stride(0)"),
        ("other=0.0)), mask", "other=0.0)) * tl.load(table + c, mask=c < n, other=0.0), mask"),
        ("    y = torch.empty_like(x)\n", table),
    ]
    source = HELD
    for old, new in kernel:
        assert old in source
        source = source.replace(old, new)
    dims = {"M": 3, "N": 8, "more": 0}
    assert "d_table" not in draft(write(source), dims)["backward"]
    stub = "    return launched(x, table, x.shape[1] - more)\n"
    assert stub in source
    for ways in ("x, table = (t.contiguous() for t in (x, table))", "x, table = x.contiguous(), table * 2"):
        unpacked = source.replace(stub, f"    {ways}\n{stub}")
        assert "d_table" not in draft(write(unpacked), dims)["backward"], ways
    chosen = source.replace(stub, f"    x, table = (t if t.shape else x for t in (x, table))\n{stub}")
    assert "d_table" in draft(write(chosen), dims)["backward"]
    handed = source.replace("@autodiff", "KNOWN = {'launched': launched}\n\n\n@autodiff")
    assert "d_table" in draft(write(handed), dims)["backward"]


def test_published_file_with_both__is_right_whatever_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests/published"))
    file = ROOT / "tests/published/rotary.py"
    from kernel_agent import forward

    sizes = [shape.dims for shape in forward.load(file).sweep]
    case = {"dims": sizes[2], "seed": 1, "others": sizes[:2] + sizes[3:]}
    assert_right(file, draft(file, sizes[2], case=case), [(dims, "normal") for dims in sizes])
