"""Launchers that a stub makes itself: they get a name at the top level, or the launch is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent import errors

TUNER = 'triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"])'
RULE = 'triton.heuristics({"BLOCK": lambda args: 16 if args["n"] < 64 else 32})'
SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 40}]


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, n, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + c, mask=c < n, other=0.0)
        w = tl.load(w_ptr + c, mask=c < n, other=0.0)
        tl.store(y_ptr + row * n + c, tl.exp(x) * w, mask=c < n)


KERNELS = {"scale": scale_kernel}


def get():
    return scale_kernel


@autodiff(inputs_require_grad=(0, 1))
def scaled(x, w):
    x = x.contiguous()
    y = torch.empty_like(x)
    m, n = x.shape
    LAUNCH
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], device=device, dtype=dtype)
"""
LAUNCHES = {
    "autotuned": f"tuned = {TUNER}(scale_kernel)\n    tuned[(m,)](x, w, y, n)",
    "ruled": f"tuned = {RULE}(scale_kernel)\n    tuned[(m,)](x, w, y, n)",
    "in place": f"{RULE}(scale_kernel)[(m,)](x, w, y, n)",
    "another name": "run = scale_kernel\n    run[(m,)](x, w, y, n, BLOCK=16)",
    "of a table": 'run = KERNELS["scale"]\n    run[(m,)](x, w, y, n, BLOCK=16)',
    "name of something else": f"get = {RULE}(scale_kernel)\n    get[(m,)](x, w, y, n)",
}
REFUSED = {
    "hangs on the call": "wide = 16 if n < 64 else 32\n"
    '    tuned = triton.autotune(configs=[triton.Config({"BLOCK": wide})], key=["n"])(scale_kernel)\n'
    "    tuned[(m,)](x, w, y, n)",
    "one of two": "run = scale_kernel if m > 3 else KERNELS\n    run[(m,)](x, w, y, n, BLOCK=16)",
    "assigned twice": f"run = scale_kernel\n    run = {RULE}(run)\n    run[(m,)](x, w, y, n)",
    "returned": "get()[(m,)](x, w, y, n, BLOCK=16)",
}
DIMS = [{"M": 5, "N": 40}, {"M": 3, "N": 70}]


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_launcher__made_in_the_stub__has_a_name(name: str, write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace("LAUNCH", LAUNCHES[name]))
    result = draft(file, DIMS[0])
    assert_right(file, result, [(dims, "normal") for dims in DIMS])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_launcher__that_a_call_computes__is_refused(name: str, write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace("LAUNCH", REFUSED[name]))
    with pytest.raises(errors.Unusable, match="must have a name at the top level") as refused:
        draft(file, DIMS[0])
    assert refused.value.line and "[(m,)]" in file.read_text().splitlines()[refused.value.line - 1]


def test_launcher__of_two_stubs__is_defined_once(write: Callable[[str], Path]) -> None:
    launch = LAUNCHES["autotuned"]
    helper = f"def helped(x, w, y, m, n):\n    {launch}\n\n\n@autodiff"
    source = SOURCE.replace(
        "LAUNCH", f"z = torch.empty_like(y)\n    helped(x, w, z, m, n)\n    {launch}\n    y = y + z"
    )
    file = write(source.replace("@autodiff", helper))
    result = draft(file, DIMS[0])
    assert result["backward"].count("\ntuned = ") + result["backward"].startswith("tuned = ") == 1
    assert_right(file, result, [(dims, "normal") for dims in DIMS])


def test_call_of_a_grid__is_told_how_to_be_written(write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace("LAUNCH", "run = scale_kernel[(m,)]\n    run(x, w, y, n, BLOCK=16)"))
    with pytest.raises(errors.Unusable, match="cannot be found") as refused:
        draft(file, DIMS[0])
    assert refused.value.remedy == "Write scale_kernel[grid](...) there."
