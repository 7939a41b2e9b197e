"""What the tuner may ask for: every configuration that a report offers gives a right backward, and changes
what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft
from kernel_agent.differentiate.schedule import owner, tuning

RECURRENCE = ROOT / "examples/linear_recurrence.py"
DIMS = {"B": 2, "T": 4, "D": 130, "gate": True, "h0": True}


def test_menu__offers_warps_and_the_forwards_own_list() -> None:
    configs = draft(RECURRENCE, DIMS)["report"]["configs"]
    assert {"BLOCK_D": 128, "num_warps": 4, "num_stages": 3} in configs
    assert all(config.get("BLOCK_D") != 64 for config in configs)  # what the draft has
    assert {"num_warps": 4} in configs


def test_menu__offers_no_block_size_that_something_may_hang_on() -> None:
    configs = draft(ROOT / "examples/softmax.py", {"M": 3, "N": 37})["report"]["configs"]
    assert configs
    assert {key for config in configs for key in config} <= {"num_warps", "saved", "outputs"}
    assert {"saved": 1} in configs and {"outputs": 1} in configs, "rows' numbers, or the row: both are timed"


def test_menu__begins_with_tiles_of_each_kernels_own_for_products() -> None:
    """A tuner often has the time for three: not for atomic adds, nor for sums that are shared out."""
    dims = {"M": 70, "N": 50, "K": 45, "leaky": True}
    report = draft(ROOT / "examples/matmul.py", dims, dtype="float16")["report"]
    apart = [bool(config.get("apart")) for config in report["configs"]]
    assert apart[0] and apart == sorted(apart, reverse=True) and {"splits": 128} in report["configs"]
    assert report["alternatives"] == ["owner"]
    assert draft(RECURRENCE, DIMS)["report"]["alternatives"] == ["owner", "atomic"]


def test_offer__that_is_not_early_stands_before_warps_alone() -> None:
    blocks = [{"BLOCK": 32 * n, "num_warps": 4} for n in range(1, tuning.MOST + 1)]
    for known, at in (([*blocks[:2], {"num_warps": 2}], 2), (blocks, tuning.MOST - 1)):
        configs = [*known]
        tuning.offer(configs, {"operands": 1}, early=False)
        assert configs[at] == {"operands": 1} and len(configs) <= tuning.MOST


@pytest.mark.parametrize(("columns", "offered"), [(37, [1, 2, 8]), (1000, [2, 8])])
def test_menu__offers_no_more_warps_than_small_blocks_have_work_for(columns: int, offered: list[int]) -> None:
    configs = draft(ROOT / "examples/softmax.py", {"M": 3, "N": columns})["report"]["configs"]
    assert [config["num_warps"] for config in configs if config.keys() == {"num_warps"}] == offered


def test_menu__offers_stages_only_where_products_can_be_pipelined() -> None:
    softmax = draft(ROOT / "examples/softmax.py", {"M": 3, "N": 37})["report"]["configs"]
    matmul = draft(ROOT / "examples/matmul.py", {"M": 70, "N": 50, "K": 45, "leaky": True})["report"][
        "configs"
    ]
    assert not any("num_stages" in config for config in softmax)
    assert any("num_stages" in config for config in matmul)


@pytest.mark.parametrize("block", [64, 128, 256])
def test_config__of_the_forwards_list_is_bound(block: int) -> None:
    result = draft(RECURRENCE, DIMS, config={"BLOCK_D": block, "num_warps": 8, "num_stages": 2})
    text = result["backward"]
    assert f'LINEAR_RECURRENCE_KERNEL_CONFIG = {{"BLOCK_D": {block}}}' in text
    assert "num_warps=8" in text and "num_stages=2" in text
    assert_right(RECURRENCE, result, [(DIMS, "normal")])


def test_config__with_another_block_size_is_ignored() -> None:
    text = draft(RECURRENCE, DIMS, config={"BLOCK_D": 32})["backward"]
    assert 'LINEAR_RECURRENCE_KERNEL_CONFIG = {"BLOCK_D": 64}' in text


@pytest.mark.parametrize("splits", [2, 128])
def test_splits__few_tiles_with_a_long_sum_of_products_are_shared(splits: int) -> None:
    """A weight gradient of a convolution as a matrix product: few tiles, a sum over all output positions."""
    file = ROOT / "tests/python/kernels/implicit_gemm_conv.py"
    dims = {"B": 2, "C": 3, "O": 5, "H": 9, "W": 8}
    plain = draft(file, dims)
    assert {"splits": 128} in plain["report"]["configs"] and "splits" not in plain["backward"]
    shared = draft(file, dims, config={"splits": splits})
    assert shared["report"]["atomics"] == 0
    assert f"splits=min(grid[0],{splits},max(512//max(" in "".join(shared["backward"].split())
    assert "d_w_ptr = summed(" in shared["backward"] and "d_x_ptr = summed(" not in shared["backward"]
    for result in (plain, shared):
        assert_right(file, result, [(shape, "normal") for shape in (dims, {**dims, "H": 3, "W": 3, "B": 1})])


@pytest.mark.parametrize(("long", "shared"), [(2, True), (99, False)])
def test_splits__a_sum_over_very_many_programs_is_shared_at_once(
    long: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LONG", long)
    file = ROOT / "tests/python/kernels/implicit_gemm_conv.py"
    dims = {"B": 2, "C": 3, "O": 5, "H": 9, "W": 8}
    result = draft(file, dims)
    assert ("splits=min(grid[0],128,max(512//max(" in "".join(result["backward"].split())) == shared
    assert ({"splits": 128} in result["report"]["configs"]) != shared
    assert_right(file, result, [(dims, "normal")])


@pytest.mark.parametrize("empty", [{"K": 0}, {"N": 0}, {"M": 0, "K": 0}])
def test_splits__of_a_gradient_without_elements(empty: dict[str, int], write: Callable[[str], Path]) -> None:
    pair = ROOT / "dataset/quantised_ste/int8_weight_only_linear.py"
    file, dims = write(pair.read_text().partition("# ---- backward ----")[0]), {"M": 33, "K": 48, "N": 40}
    result = draft(file, dims, config={"splits": 4})
    assert "d_x_ptr = summed(" in result["backward"]
    assert_right(file, result, [({**dims, **empty}, "normal")])


TALL = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 70}]


@triton.jit
def tall_kernel(x_ptr, w_ptr, y_ptr, M, BLOCK: tl.constexpr):
    rows, cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 16)
    offs = rows[:, None] * 16 + cols[None, :]
    x = tl.load(x_ptr + offs, mask=rows[:, None] < M, other=0.0)
    w = tl.load(w_ptr + cols[:, None] * 16 + cols[None, :])
    tl.store(y_ptr + offs, tl.dot(x, w, input_precision="ieee"), mask=rows[:, None] < M)


@autodiff(inputs_require_grad=(0, 1))
def tall(x, w):
    y = torch.empty_like(x)
    tall_kernel[(triton.cdiv(x.shape[0], 16),)](x, w, y, x.shape[0], BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(rows, 16, device=device, dtype=dtype) for rows in (dims["M"], 16))
"""


@pytest.mark.parametrize("schedule", ["owner", "partials"])
def test_splits__of_the_one_tile_that_there_is(schedule: str, write: Callable[[str], Path]) -> None:
    file = write(TALL)
    result = draft(file, {"M": 70}, schedule=schedule, config={"splits": 3})
    assert ("splits = min(grid[0], 3)" in result["backward"]) == (schedule == "owner")
    assert_right(file, result, [({"M": m}, "normal") for m in (70, 16, 3)])


SCALED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)


@triton.jit
def scaled_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, 3.0 * tl.load(x_ptr + i, mask=i < N, other=0.0), mask=i < N)


@autodiff(inputs_require_grad=(0,))
def scaled(x):
    y = torch.empty_like(x)
    scaled_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16, num_stages=STAGES)
    return y
"""


@pytest.mark.parametrize(
    ("stages", "kept"), [("1", True), ("2 if x.is_contiguous() else 1", True), ("4", False)]
)
def test_backward__has_as_few_stages_as_the_forward(
    stages: str, kept: bool, write: Callable[[str], Path]
) -> None:
    """More may not fit where the forward's launch says that they do not; its own more are its own affair."""
    file = write(SCALED.replace("STAGES", stages))
    result = draft(file, {"N": 37})
    launch = result["backward"].partition("scaled_kernel_bwd[grid](")[2].partition("return")[0]
    assert ("num_stages=num_stages" in launch) == kept, launch
    assert "num_stages=3" in draft(file, {"N": 37}, config={"num_stages": 3})["backward"]
    assert_right(file, result, [({"N": 37}, "normal")])
