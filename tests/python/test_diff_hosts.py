"""Host code around launches as libraries write it: functions in between, names for several vendors' cards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft

LIBRARY = """import torch
import triton
import triton.language as tl

card = torch.cuda


@triton.jit
def program_id(axis: tl.constexpr):
    return tl.program_id(axis)
"""
FORWARD = """import torch
import triton
import triton.language as tl
from hosts_library import card
from kernel_agent import autodiff

SWEEP = [{"M": 8192, "N": 100000}]  # too long for a row in one block


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    top = -float("inf")
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * N + start + cols, mask=start + cols < N, other=-float("inf"))
        top = tl.maximum(top, tl.max(x, axis=0))
    total = 0.0
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * N + start + cols, mask=start + cols < N, other=-float("inf"))
        total += tl.sum(tl.exp(x - top), axis=0)
    for start in range(0, N, BLOCK):
        at = x_ptr + row * N + start + cols
        x = tl.load(at, mask=start + cols < N, other=-float("inf"))
        tl.store(y_ptr + row * N + start + cols, tl.exp(x - top) / total, mask=start + cols < N)


def launched(x, y):
    with card.device(x.device):
        softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
    return y


def unasked(x):
    return launched(x, x)


def between(x):
    if x.shape[0] == 0:
        return torch.empty_like(x)
    return launched(x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format))


@autodiff(inputs_require_grad=(0,))
def softmax(x):
    return between(x)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hosts_library", raising=False)


@pytest.mark.usefixtures("library")
def test_function_between_stub_and_launch__is_copied_too(write: Callable[[str], Path]) -> None:
    file = write(FORWARD)
    result = draft(file, {"M": 5, "N": 20})
    text = result["backward"]
    assert "return between_autograd(x)" in text and "return launched_autograd(" in text
    assert "unasked" not in text
    assert "with torch.cuda.device(x.device):" in text and "card" not in text
    assert_right(file, result, [({"M": 5, "N": 20}, "normal"), ({"M": 2, "N": 33}, "normal")])


@pytest.mark.usefixtures("library")
def test_kernel_that_uses_a_library__is_not_copied_to_save_something(write: Callable[[str], Path]) -> None:
    """No kernel of the backward part may use it."""
    text = (ROOT / "examples/layer_norm.py").read_text()
    saves = draft(write(text), {"M": 9, "N": 100})["backward"]
    assert "_saving" in saves
    of_library = text.replace("import triton\n", "import triton\nimport hosts_library as lib\n", 1)
    of_library = of_library.replace("row = tl.program_id(0)", "row = lib.program_id(0)")
    file = write(of_library)
    result = draft(file, {"M": 9, "N": 100})
    assert "_saving" not in result["backward"] and "lib." not in result["backward"]
    assert_right(file, result, [({"M": 9, "N": 100}, "normal"), ({"M": 2, "N": 1}, "normal")])


HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], device=device, dtype=dtype)


"""
EXPANDED = (
    HEAD
    + """@triton.jit
def biased_kernel(x_ptr, b_ptr, y_ptr, M, N, stride_bm, stride_bn, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * N + cols, mask=mask, other=0.0)
    b = tl.load(b_ptr + rows * stride_bm + cols * stride_bn, mask=mask, other=0.0)
    tl.store(y_ptr + rows * N + cols, x * tl.exp(b), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def biased(x, bias):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    bias = bias.{expand}
    grid = (triton.cdiv(M, 2), triton.cdiv(N, 16))
    biased_kernel[grid](x, bias, y, M, N, bias.stride(0), bias.stride(1), ROWS=2, BLOCK=16)
    return y
"""
)


@pytest.mark.parametrize("expand", ["expand(M, -1)", "broadcast_to(x.shape)", "expand_as(x)"])
def test_tensor_that_the_host_expands__has_a_gradient(expand: str, write: Callable[[str], Path]) -> None:
    file = write(EXPANDED.replace("{expand}", expand))
    result = draft(file, {"M": 5, "N": 20})
    assert f"bias = own(bias.{expand})" in result["backward"]
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 20), (4, 33), (1, 1))])


METHOD = (
    HEAD
    + """@triton.jit
def norm_kernel(x_ptr, w_ptr, y_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    y = x / tl.sqrt(tl.sum(x * x, axis=0) / N + eps) * w
    tl.store(y_ptr + row * N + cols, y, mask=cols < N)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps=1e-2):
        x = x.contiguous()
        M, N = x.shape
        y = torch.empty_like(x)
        ctx.BLOCK = triton.next_power_of_2(N)
        norm_kernel[(M,)](x, w, y, N, eps, BLOCK=ctx.BLOCK)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x, w)
        return y

    @staticmethod
    def backward(ctx, dy):
        raise NotImplementedError


normed = _Norm.apply


@autodiff(inputs_require_grad=(0, 1))
def norm(x, w):
    if x.shape[0] == 1:
        return {call}(x, w)
    return {call}(
        x, w,
        0.02,
    )
"""
)


@pytest.mark.parametrize("call", ["_Norm.apply", "normed"])
def test_forward_of_a_function__is_copied_as_a_function(call: str, write: Callable[[str], Path]) -> None:
    file = write(METHOD.replace("{call}", call))
    result = draft(file, {"M": 5, "N": 20})
    text = result["backward"]
    assert "def Norm_forward_autograd(ctx, x, w, eps=1e-2):" in text
    assert text.count("return Norm_forward_autograd(") == 2 and text.count("Unsaved(), x, w") == 2
    assert "ctx_BLOCK = triton" in text and "ctx.BLOCK" not in text
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 20), (3, 33), (1, 7))])


def test_function_with_the_name_of_a_method_s_copy__is_no_other(write: Callable[[str], Path]) -> None:
    body = METHOD.replace("{call}", "_Norm.apply")
    launch = "        norm_kernel[(M,)](x, w, y, N, eps, BLOCK=ctx.BLOCK)\n"
    helper = """def Norm_forward(x, w, y, eps, BLOCK):
    norm_kernel[(x.shape[0],)](x, w, y, x.shape[1], eps, BLOCK=BLOCK)


class _Norm"""
    assert launch in body
    body = body.replace(launch, "        Norm_forward(x, w, y, eps, ctx.BLOCK)\n").replace(
        "class _Norm", helper
    )
    file = write(body)
    result = draft(file, {"M": 5, "N": 20})
    assert "def Norm_forward__autograd(ctx, x, w, eps=1e-2):" in result["backward"]
    assert "    Norm_forward_autograd(x, w, y, eps, ctx_BLOCK)\n" in result["backward"]
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 20), (1, 7))])


def test_expanded_input_that_the_stub_returns__stays_a_view_of_it(write: Callable[[str], Path]) -> None:
    """A copy would be right in value, and no view of the input: who launches it is told what to do."""
    source = EXPANDED.replace("{expand}", "expand(M, -1)")
    beside = source.replace("bias = bias.expand(M, -1)", "wide, bias = bias[None].expand(1, -1), bias")
    beside = beside.replace("bias.stride(0), bias.stride(1)", "0, 1").replace("return y", "return y, wide")
    assert "own(bias[None]" not in draft(write(beside), {"M": 5, "N": 20})["backward"]
    file = write(source.replace("return y", "return y, bias"), "launched.py")
    result = draft(file, {"M": 5, "N": 20})
    with pytest.raises(AssertionError, match=r"shares memory between its elements: pass \.contiguous\(\)"):
        assert_right(file, result, [({"M": 5, "N": 20}, "normal")])


LEFT_OUT = (
    EXPANDED.partition("@triton.jit")[0]
    + """@triton.jit
def scaled_kernel(x_ptr, s_ptr, y_ptr, total, HAS_S: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    if HAS_S:
        x *= tl.load(s_ptr + at, mask=at < total, other=0.0)
    tl.store(y_ptr + at, tl.sin(x), mask=at < total)


@triton.jit
def halve_kernel(x_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 0.5 * tl.load(x_ptr + at, mask=at < total, other=0.0), mask=at < total)


@autodiff(inputs_require_grad=(0,))
def scaled(x, bias):
    y, z = torch.empty_like(x), torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 16),)
    scaled_kernel[grid](x, None, y, x.numel(), HAS_S=False, BLOCK=16)
    s = y if x.shape[0] > 3 else None
    scaled_kernel[grid](x, s, z, x.numel(), HAS_S=s is not None, BLOCK=16)
    halve_kernel[grid](y, x.numel(), BLOCK=16)
    return y, z
"""
)


def test_input_that_is_overwritten_later__may_be_left_out(write: Callable[[str], Path]) -> None:
    file = write(LEFT_OUT)
    result = draft(file, {"M": 5, "N": 20})
    assert "None if s_ptr is None else s_ptr.clone()" in result["backward"]
    assert_right(file, result, [({"M": m, "N": 20}, "normal") for m in (5, 2)])
