"""Operands of an owner kernel's products that a kernel in front of it computes once."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of, errors
from kernel_agent.differentiate.schedule import aligned_rows, operands
from test_diff_own_tiles import few_programs_are_enough

__all__ = ["few_programs_are_enough"]

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def linear_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w_offs = n[None, :] * K + k[:, None]
        w = tl.load(w_ptr + w_offs, mask=(n[None, :] < N) & (k[:, None] < K), other=0)
        acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
    s = tl.load(s_ptr + n, mask=n < N, other=0.0)
    y = acc * s[None, :]
    y_mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=y_mask)


@autodiff(inputs_require_grad=(0,))
def linear(x, w, s):
    M, K = x.shape
    N = w.shape[0]
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    linear_kernel[grid](x, w, s, y, M, N, K, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)
    return y


SWEEP = [{"M": 33, "N": 40, "K": 48}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    w = torch.randint(-127, 128, (dims["N"], dims["K"]), device=device, dtype=torch.int8)
    return x, w, torch.rand(dims["N"], device=device, dtype=dtype) / 127
"""
DIMS = {"M": 33, "N": 40, "K": 48}
CASES = [(DIMS, "normal"), ({"M": 70, "N": 9, "K": 130}, "normal"), ({"M": 64, "N": 96, "K": 64}, "normal")]
TILES = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32, "apart": 1}
OPERANDS = {**TILES, "operands": 1}
OWNER = "def linear_kernel_bwd_x("
# Weights that want a gradient, as many bits as the activations have.
LEARNED = (
    ("(0,)", "(0, 1)"),
    ("w = torch.randint(-127, 128, (dims[\"N\"], dims[\"K\"]), device=device, dtype=torch.int8)",
     "w = torch.randn(dims[\"N\"], dims[\"K\"], device=device, dtype=dtype)"),
)  # fmt: skip


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(FORWARD, tmp_path / "linear.py")


def kernel(backward: str, head: str) -> str:
    return backward.split(head)[1].split("\n\n\n")[0]


def offers(result: dict) -> list[dict]:
    return [config for config in result["report"]["configs"] if config.get("operands")]


@pytest.mark.parametrize("config", [{"operands": 1}, OPERANDS], ids=["tiles of the forward", "own tiles"])
def test_scaled_upstream_and_integer_weights__are_computed_once(changed, config: dict) -> None:
    file = changed()
    result = draft(file, DIMS, config=config)
    owner = kernel(result["backward"], OWNER)
    assert "tl.load(operand_d_acc + " in owner and "tl.load(operand_w + " in owner
    assert "s_ptr" not in owner and "w_ptr" not in owner and "d_y_ptr" not in owner
    assert_right(file, result, CASES)


def test_tiles_of_an_operand__are_those_of_the_kernel_that_takes_it(changed) -> None:
    """The wide ones are chosen before both."""
    host = draft(changed(), DIMS, config=OPERANDS)["backward"].split("def backward(")[1]
    chosen = host.index("# tiles of this kernel's own")
    first = host.index("linear_kernel_bwd_x_operand_d_acc[")
    assert chosen < first < host.index("linear_kernel_bwd_x[")
    assert "of this kernel's own" not in host[first:]


def test_operand__lies_as_its_load_does(changed) -> None:
    """The columns of these weights are beside each other in memory."""
    backward = draft(changed(), DIMS, config=OPERANDS)["backward"]
    assert "lanes[:, None] + lanes_2[None, :] * BLOCK_K" in kernel(backward, "_operand_w(")
    assert "lanes[:, None] * BLOCK_N + lanes_2[None, :]" in kernel(backward, "_operand_d_acc(")


def test_operand__is_kept_in_the_type_of_the_product(changed) -> None:
    file = changed()
    backward = draft(file, DIMS, config=OPERANDS)["backward"]
    assert backward.count("dtype=x_ptr.dtype") == 2
    found = errors(file, backward, CASES, "float16")
    assert all(error <= 2e-3 for of_all in found.values() for error in of_all), found


def test_scratch__is_said(changed) -> None:
    result = draft(changed(), DIMS, config=OPERANDS)
    said = "`d_acc`, `w`: computed once, in front of its products: 16.00 KiB of scratch"
    assert said in result["backward"].replace("\n    #   ", " ")
    assert [line["class"] for line in result["report"]["lines"]].count("operand") == 2


def test_plain_loads__stay_with_the_product(changed) -> None:
    """Also where they are converted to a type of as many bits: the scaled upstream alone is computed once."""
    file = changed(*LEARNED)
    backward = draft(file, DIMS, config=OPERANDS)["backward"]
    assert "operand_d" in kernel(backward, OWNER) and "operand_w" not in backward
    assert "operand_x" not in backward and "operand_d" in kernel(backward, "def linear_kernel_bwd_w(")
    assert_right(file, {"backward": backward}, CASES)


def test_operand_of_a_type_that_a_parameter_names__stays_with_the_product(changed) -> None:
    """The host does not know it."""
    file = changed(
        ("BLOCK_K: tl.constexpr,\n", "BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,\n"),
        ("tl.dot(x, w.to(x.dtype)", "tl.dot(x.to(DTYPE), w.to(DTYPE)"),
        ("BLOCK_K=16)", "BLOCK_K=16, DTYPE=tl.float32)"),
    )
    result = draft(file, DIMS, config=OPERANDS)
    assert "operand_" not in result["backward"] and not offers(result)
    assert_right(file, result, CASES)


def test_nothing_to_compute_once__is_not_offered(changed) -> None:
    file = changed(*LEARNED, ("y = acc * s[None, :]", "y = acc"))
    result = draft(file, DIMS)
    assert not offers(result)
    assert draft(file, DIMS, config={"operands": 1})["backward"] == result["backward"]


def test_offers__come_with_tiles_of_each_kernels_own_and_first(changed) -> None:
    apart, operands, *others = draft(changed(), DIMS, dtype="float16")["report"]["configs"]
    assert apart["apart"] == 1 and operands == {**apart, "operands": 1}
    assert not any(config.get("apart") for config in others)


def test_operands__are_offered_beside_tiles_that_the_forward_saves(changed) -> None:
    """First of all but tiles of each kernel's own: with both, the backward has one product alone."""
    file = changed(("(0,)", "(0, 2)"))
    report = draft(file, DIMS, dtype="float16")["report"]
    apart, both, saved, operands, *_ = report["configs"]
    assert (saved, operands) == ({**apart, "saved": 1}, {**apart, "operands": 1})
    assert both == {**saved, "operands": 1}
    result = draft(file, DIMS, config={**OPERANDS, "saved": 1})
    main = kernel(result["backward"], "def linear_kernel_bwd(").split("# reverse")[0]
    assert "tl.dot(" not in main and "saved_acc" in main and "operand_w" in result["backward"]
    assert_right(file, result, CASES)


def test_rows_of_operands__are_aligned_whatever_the_lengths_are(
    changed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What products load as it is has to be, still."""
    monkeypatch.setattr(aligned_rows, "ALIGNED", 16)
    file = changed()
    half = partial(draft, dims=DIMS, dtype="float16")
    plain, prepared = (half(file, config=config)["backward"] for config in (TILES, OPERANDS))
    assert "N % 16 == 0" in plain and "K % 16 == 0" in plain
    assert " % 16 == 0" not in prepared and "ctx.tiles = grid[0] == " in prepared
    assert_right(file, {"backward": prepared}, CASES)
    learned = half(changed(*LEARNED), config=OPERANDS)["backward"]
    assert "K % 16 == 0" in learned and "N % 16 == 0" not in learned


BRANCH = (
    '        acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")\n',
    "        if start < M:\n"
    '            acc += tl.dot(x, w.to(x.dtype), input_precision="ieee")\n',
)  # fmt: skip
FEWER = ("range(0, K, BLOCK_K)", "range(0, (tl.program_id(0) + 1) * BLOCK_M, BLOCK_K)")
NOT_ALL = {"a step that a branch leaves out": BRANCH, "steps that some programs leave out": FEWER}
# Activations that are whole numbers, and weights that want a gradient.
INTEGER_ROWS = (
    ("(0,)", "(1,)"),
    ("dtype=x.dtype)", "dtype=w.dtype)"),
    ("tl.dot(x, w.to(x.dtype)", "tl.dot(x.to(w.dtype), w"),
    ("x = torch.randn(", "w = torch.randn("),
    ('(dims["M"], dims["K"], device', '(dims["N"], dims["K"], device'),
    ("w = torch.randint(", "x = torch.randint("),
    ('(dims["N"], dims["K"]), device', '(dims["M"], dims["K"]), device'),
)


@pytest.mark.parametrize("edit", NOT_ALL.values(), ids=NOT_ALL)
def test_tiles_that_no_call_need_reach__are_not_computed(changed, edit: tuple[str, str]) -> None:
    """What nobody loads might not be there."""
    file = changed(edit)
    result = draft(file, DIMS, config={"operands": 1})
    assert "operand_w" not in result["backward"]
    assert ("operand_d_acc" in result["backward"]) == (edit is FEWER)  # that every program has
    assert_right(file, result, CASES)


def test_tiles_of_programs_that_do_not_reach_the_owned_one__are_not_computed(changed) -> None:
    result = draft(changed(*INTEGER_ROWS), DIMS, config={"operands": 1})
    assert "operand_x" in result["backward"]
    file = changed(*INTEGER_ROWS, FEWER)
    result = draft(file, DIMS, config={"operands": 1})
    assert "operand_x" not in result["backward"]
    assert_right(file, result, CASES)


def test_operand_that_is_larger_than_what_is_loaded__is_not_kept(changed) -> None:
    """Of a row and a column a whole matrix would be made."""
    file = changed(
        ("w_ptr + w_offs, mask=(n[None, :] < N) & (k[:, None] < K)", "w_ptr + n * K, mask=n < N"),
        ("w.to(x.dtype)", "(w[None, :] * (k[:, None] + 1) % 7).to(x.dtype)"),
        ("n[None, :] * K + k[:, None]", "n"),
    )
    result = draft(file, DIMS, config={"operands": 1})
    assert set(re.findall(r"operand_\w+ = torch", result["backward"])) == {"operand_d_acc = torch"}
    assert_right(file, result, CASES)


def test_operand_of_two_products__is_loaded_once(changed) -> None:
    """By its own name: that of its memory is taken."""
    dot = 'acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")\n'
    half = dot.replace("w.to(x.dtype)", "(w.to(tl.float32) * 0.5).to(x.dtype)")
    file = changed((dot, f"{dot}        {half}"))
    result = draft(file, DIMS, config=OPERANDS)
    owner = kernel(result["backward"], OWNER)
    assert owner.count("d_acc = tl.load(operand_d_acc + ") == 1 and owner.count("tl.load(operand_") == 3
    assert_right(file, result, CASES)


LOADED = "w = tl.load(w_ptr + w_offs, mask=(n[None, :] < N) & (k[:, None] < K), other=0)"
CALL = "linear_kernel[grid](x, w, s, y, M, N, K, "
COSINES = (
    ("M, N, K,\n", "M, N, K, TURNED: tl.constexpr,\n"),
    (CALL, f"{CALL}TURNED=False, "),
    (
        LOADED,
        """if TURNED:
            p, q = n[None, :] + 1, k[:, None]
        else:
            p, q = k[:, None] + 1, n[None, :]
        w = tl.cos((p * q % 97).to(tl.float32) * 0.06)""",
    ),
)


@pytest.mark.parametrize("flag", ["False", "True"])
def test_table_of_cosines__is_computed_once_though_nothing_is_loaded_for_it(changed, flag: str) -> None:
    file = changed(*COSINES, ("TURNED=False", f"TURNED={flag}"))
    result = draft(file, DIMS, config=OPERANDS)
    backward = result["backward"]
    assert "tl.cos(" in kernel(backward, "def linear_kernel_bwd_x_operand_w(")
    assert "if TURNED:" in kernel(backward, "def linear_kernel_bwd_x_operand_w(")
    assert "tl.cos(" not in kernel(backward, OWNER)
    assert_right(file, result, CASES)


def test_table_that_takes_no_function__is_made_in_each_step(changed) -> None:
    plain = COSINES[-1][1].replace(
        "tl.cos((p * q % 97).to(tl.float32) * 0.06)", "(p * q % 97).to(tl.float32)"
    )
    result = draft(changed(*COSINES[:-1], (LOADED, plain)), DIMS, config=OPERANDS)
    assert "% 97" in kernel(result["backward"], OWNER)


def test_table_without_room__is_made_in_each_step(changed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "MOST", 1 << 10)
    assert "tl.cos(" in kernel(draft(changed(*COSINES), DIMS, config=OPERANDS)["backward"], OWNER)
