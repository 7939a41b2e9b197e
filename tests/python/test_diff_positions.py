"""Positions counted anew: split sums, digits that an address leaves out, lanes that share an element."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft, errors
from kernel_agent import forward

KERNELS = ROOT / "tests/python/kernels"
BIAS = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"B": 3, "C": 5, "HW": 7}}]


@triton.jit
def bias_kernel(x_ptr, b_ptr, y_ptr, numel, c, hw, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    b = tl.load(b_ptr + {channel}, mask=mask, other=0.0)
    tl.store(y_ptr + at, x * tl.exp(b) + b * {more}, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def bias(x, b):
    numel, c = x.numel(), b.shape[0]
    y = torch.empty_like(x)
    bias_kernel[(triton.cdiv(numel, 32),)](x, b, y, numel, c, x.shape[{hw}], BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["C"], dims["HW"]) if {hw} == 2 else (dims["B"], dims["HW"], dims["C"])
    return torch.randn(shape, device=device, dtype=dtype), torch.randn(dims["C"], device=device, dtype=dtype)
"""
CHANNELS = {  # address of the bias, axis of the inner size
    "channels_first": ("at // hw % c", 2),
    "channels_last": ("at % c", 1),
}
SHAPES = [
    {"B": 3, "C": 5, "HW": 7},
    {"B": 1, "C": 1, "HW": 1},
    {"B": 2, "C": 3, "HW": 70},
    {"B": 1, "C": 64, "HW": 2},
    {"B": 5, "C": 33, "HW": 1},
]


def write(folder: Path, name: str, more: str = "1.0") -> Path:
    channel, hw = CHANNELS[name]
    file = folder / "bias.py"
    file.write_text(BIAS.format(channel=channel, hw=hw, more=more))
    return file


@pytest.mark.parametrize("name", sorted(CHANNELS))
def test_bias__digits_that_its_address_leaves_out_are_summed(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, name)
    result = draft(file, SHAPES[0])
    assert result["report"]["atomics"] == 0
    lines = [line for line in result["report"]["lines"] if line["class"] == "owner"]
    assert [line["proof"].startswith("position counted anew") for line in lines] == [True]
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_bias__a_program_apart_from_its_position_stays_atomic(tmp_path: Path) -> None:
    file = write(tmp_path, "channels_first", "tl.program_id(0)")
    result = draft(file, SHAPES[0])
    assert result["report"]["atomics"] == 1
    assert "apart from the position" in result["backward"].replace("\n", " ").replace(" #   ", " ")
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_group_norm__few_elements_of_a_channel_are_walked_by_a_loop() -> None:
    file = KERNELS / "group_norm.py"
    dims = {"B": 2, "C": 6, "G": 3, "H": 10}
    result = draft(file, dims)
    assert result["report"]["atomics"] == 0 and "for tap in range(h)" in result["backward"]
    assert_right(file, result, [(shape, "normal") for shape in (dims, {**dims, "H": 33, "G": 2})])


def test_group_norm__a_channel_has_an_owner_and_statistics_are_kept() -> None:
    """The program of a channel reads its rows once; means come from the kernel that computes them anyway."""
    file = KERNELS / "group_norm.py"
    dims = {"B": 2, "C": 6, "G": 3, "H": 40}
    result = draft(file, dims)
    assert result["report"]["atomics"] == 0
    owner = result["backward"].split("def group_norm_kernel_bwd_w(")[1].split("\n@triton.jit")[0]
    assert len(re.findall(r"tl.load\(x_ptr", owner)) == 1
    shapes = [
        dims,
        {**dims, "H": 1, "G": 1},
        {**dims, "G": 6},
        {**dims, "G": 1, "H": 33},
        {**dims, "B": 1, "C": 1, "G": 1},
    ]
    assert_right(file, result, [(shape, "normal") for shape in shapes])


def test_upsample__every_copy_of_an_element_is_walked_by_its_owner(tmp_path: Path) -> None:
    """Digits between those of the address are left out: an output's place inside its input's square."""
    file = tmp_path / "forward.py"
    pair = ROOT / "dataset/image_interp/upsample_nearest_integer_scale.py"
    file.write_text(pair.read_text().split("# ---- backward ----")[0])
    shapes = [
        {"N": 2, "C": 3, "Y": 5, "X": 7, "s": 3},
        {"N": 1, "C": 1, "Y": 16, "X": 9, "s": 2},
        {"N": 1, "C": 2, "Y": 3, "X": 1, "s": 1},
    ]
    result = draft(file, shapes[0])
    assert result["report"]["atomics"] == 0
    assert_right(file, result, [(shape, "normal") for shape in shapes])


def test_split_k__tiles_are_counted_through_programs_and_steps() -> None:
    file = KERNELS / "split_k.py"
    dims = forward.load(file).sweep[0].dims
    result = draft(file, dims)
    assert result["report"]["atomics"] == 0
    assert 'raise ValueError("grid[2] must be SPLIT in the backward")' in result["backward"]
    shapes = [dims, {"M": 17, "N": 5, "K": 33}, {"M": 1, "N": 1, "K": 1}, {"M": 16, "N": 16, "K": 100}]
    assert_right(file, result, [(shape, "normal") for shape in shapes])


def test_split_k__another_number_of_programs_is_refused_by_the_host(tmp_path: Path) -> None:
    """Two programs that step over three blocks: the forward leaves blocks out, and no owner may add them."""
    source = (KERNELS / "split_k.py").read_text().replace("SPLIT=3,", "SPLIT=2,")
    file = tmp_path / "split.py"
    file.write_text(source)
    dims = {"M": 16, "N": 24, "K": 64}
    with pytest.raises(AssertionError, match="must be SPLIT"):
        errors(file, draft(file, dims)["backward"], [(dims, "normal")])


def test_what_took_a_loop_in_parts_of_a_program__leaves_one_gradient_to_atomic_adds(tmp_path: Path) -> None:
    """The weight's: the statistics that it takes are those of a row that the owner's channels are a part of.
    The bias has an owner all the same."""
    pair = ROOT / "dataset/norm/group_norm_nchw_group_owner.py"
    file = tmp_path / pair.name
    file.write_text(pair.read_text().partition("# ---- backward ----")[0])
    dims = {"N": 3, "C": 8, "g": 2, "HW": 2050}
    result = draft(file, dims)
    assert result["report"]["atomics"] == 1 and "group_norm_kernel_bwd_b" in result["backward"]
    lines = [line["reason"] for line in result["report"]["lines"]]
    assert any("hangs on parts of a program's number" in reason for reason in lines)
    cases = [(dims, "normal"), ({"N": 2, "C": 6, "g": 3, "HW": 37}, "normal")]
    assert_right(file, result, cases, 1e-4)
