"""Private partial sums: one strip-mined kernel that reads its inputs once, rows that a second kernel adds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft, errors
from kernel_agent.differentiate.write import helpers

SOURCE = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"B": 3, "M": 5, "N": 21}}]


@triton.jit
def kernel(x_ptr, w_ptr, b_ptr, y_ptr, len_ptr, M, N, BLOCK: tl.constexpr):
    batch = tl.program_id(0)
    row = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    at = (batch * M + row) * N + cols
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
{body}


@autodiff(inputs_require_grad=(0, 1, 2))
def stub(x, w, b):
    B, M, N = x.shape
    y = torch.zeros_like(x)
    lens = torch.arange(B, device=x.device, dtype=torch.int32) + N - B
    kernel[(B, M)](x, w, b, y, lens, M, N, BLOCK=triton.next_power_of_2(N))
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    B, M, N = dims["B"], dims["M"], dims["N"]
    x = torch.randn(B, M, N, device=device, dtype=dtype)
    return x, torch.randn({w}, device=device, dtype=dtype), torch.randn({w}, device=device, dtype=dtype)
"""
LOAD = (
    "    w = tl.load(w_ptr + {at}, mask=mask, other=0.0)\n    b = tl.load(b_ptr + {at}, mask=mask, "
    "other=0.0)\n"
)
STORE = "    tl.store(y_ptr + at, x * w * x + b, mask=mask)"
CASES = {  # body, shape of w, fused
    "both_axes": (LOAD.format(at="cols") + STORE, "N", True),
    "inner_axis": (LOAD.format(at="batch * N + cols") + STORE, "B, N", True),
    "outer_axis": (LOAD.format(at="row * N + cols") + STORE, "M, N", True),
    "row_sums": (
        LOAD.format(at="cols") + "    s = tl.sum(x * w, axis=0)\n    tl.store(y_ptr + at, s * x + b, mask=mask)", "N", True,
    ),
    "masked_rows": (
        LOAD.format(at="cols") + "    w = tl.where(row < 2, w, 1.0)\n" + STORE, "N", True,
    ),
    "different_axes": (
        "    w = tl.load(w_ptr + cols, mask=mask, other=0.0)\n    b = tl.load(b_ptr + batch * N + cols, mask=mask, other=0.0)\n" + STORE, "B, N", True,
    ),
    "scalar": ("    w = tl.load(w_ptr)\n    b = tl.load(b_ptr + row * N + cols, mask=mask, other=0.0)\n" + STORE, "M, N", True),
    "branch_of_a_constant": (
        LOAD.format(at="cols") + "    y = x * w\n    if BLOCK < 4096:\n        if BLOCK > 2:\n            y += b\n    tl.store(y_ptr + at, y, mask=mask)", "N", True,
    ),
    "branch_that_alone_has_sums": (
        "    y = x * x\n    if BLOCK > 2:\n        w = tl.load(w_ptr + cols, mask=mask, other=0.0)\n        b = tl.load(b_ptr + cols, mask=mask, other=0.0)\n        y = y * w + b\n    tl.store(y_ptr + at, y, mask=mask)", "N", True,
    ),
    "branch_that_alone_defines": (
        "    if BLOCK < 64:\n        w = tl.load(w_ptr + cols, mask=mask, other=0.0)\n        b = tl.load(b_ptr + cols, mask=mask, other=0.0)\n"
        "    if BLOCK > 2:\n        if BLOCK < 64:\n            w = w * 2.0\n"
        "    y = x * x\n    if BLOCK < 64:\n        y = y * w + b\n    tl.store(y_ptr + at, y, mask=mask)", "N", False,
    ),
    "loop": (
        LOAD.format(at="cols") + "    for i in range(3):\n        x = x * w + b\n    tl.store(y_ptr + at, x, mask=mask)", "N", False,
    ),
    "lanes_that_differ": (
        "    mask = cols < tl.load(len_ptr + batch)\n" + LOAD.format(at="cols") + STORE, "N", False,
    ),
    "several": (
        "    w = tl.load(w_ptr + cols, mask=mask, other=0.0)\n    b = tl.load(w_ptr + N - 1 - cols, mask=mask, other=0.0)\n" + STORE, "N", False,
    ),
}  # fmt: skip


def write(folder: Path, name: str) -> Path:
    body, w, _ = CASES[name]
    file = folder / f"{name}.py"
    file.write_text(SOURCE.format(body=body, w=w))
    return file


@pytest.mark.parametrize("programs", [2, 256])
@pytest.mark.parametrize("name", sorted(CASES))
def test_partials__are_right_and_fused_only_where_sums_fit(name: str, programs: int, tmp_path: Path) -> None:
    file = write(tmp_path, name)
    result = draft(file, {"B": 3, "M": 5, "N": 21}, config={"programs": programs})
    fused = [line for line in result["report"]["lines"] if line["class"] == "partials"]
    assert bool(fused) == CASES[name][2]
    shapes = [{"B": 3, "M": 5, "N": 21}, {"B": 1, "M": 1, "N": 1}, {"B": 2, "M": 7, "N": 64}]
    assert_right(file, result, [(dims, "normal") for dims in shapes])
    if fused:
        text = result["backward"]
        assert result["report"]["atomics"] == 0
        one = {"inner_axis": (1, 0), "different_axes": (1, 0), "outer_axis": (0, 1), "scalar": (0, 1)}
        walked, other = one.get(name, (None, None))
        share = f"grid[{walked}], max({programs} // grid[{other}], 1)"
        assert f"programs = min({f'grid[0] * grid[1], {programs}' if walked is None else share})" in text
        assert (
            len(re.findall(r"= tl.load\(x_ptr", re.sub(r"#.*", "", text))) == 1
        )  # every gradient from one reading of the inputs
        assert "sum_partials[" in text


def test_partials__one_kernel_reads_inputs_once() -> None:
    """RMS norm: the strip-mined kernel beside the owner kernel, which reads x and dy again."""
    file = ROOT / "examples/rms_norm.py"
    dims = {"B": 2, "T": 3, "N": 45}
    fused, owner = (draft(file, dims, schedule=name)["backward"] for name in ("partials", "owner"))
    assert fused.count("rms_norm_kernel_bwd") < owner.count("rms_norm_kernel_bwd")
    assert "_bwd_w[" in owner and "_bwd_w[" not in fused
    for text in (fused, owner):
        assert max(e for values in errors(file, text, [(dims, "normal")]).values() for e in values) < 1e-5


@pytest.mark.parametrize("schedule", ["partials", "owner"])
def test_partials__of_two_gradients__are_added_up_in_one_launch(schedule: str) -> None:
    file = ROOT / "examples/layer_norm.py"
    dims = {"M": 5, "N": 70}
    result = draft(file, dims, schedule=schedule)
    text = result["backward"]
    assert "d_w_ptr, d_b_ptr = summed_both(d_w_ptr, w_ptr, d_b_ptr, b_ptr)" in text
    assert text.count("= summed(") == 0
    assert_right(file, result, [(dims, "normal"), ({"M": 1, "N": 3}, "normal")])


def test_partials__rows_of_an_absent_gradient_are_none() -> None:
    space: dict = {}
    import torch
    import triton
    import triton.language as tl

    source = helpers.SUMMED.replace("@triton.jit", "")
    exec(source, {"torch": torch, "triton": triton, "tl": tl}, space)  # noqa: S102
    assert space["summed"](None, None) is None
