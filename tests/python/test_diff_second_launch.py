"""Several writes to one gradient: what is proven disjoint is stored first, the rest is added by a second
launch."""

from __future__ import annotations

from pathlib import Path

from diff_support import ROOT, assert_right, draft

FILE = ROOT / "examples/cross_entropy.py"
SHAPES = [{"M": 9, "V": 4999}, {"M": 3, "V": 7}, {"M": 2, "V": 4096}]
LOSS = "running_max + tl.log(running_sum) - x_target"


def changed(folder: Path, loss: str) -> Path:
    source = FILE.read_text()
    assert LOSS in source
    file = folder / "changed.py"
    file.write_text(source.replace(LOSS, loss))
    return file


def test_element_under_a_mask__is_added_by_a_second_launch(tmp_path: Path) -> None:
    text = FILE.read_text()
    load = "tl.load(logits_ptr + target).to(tl.float32)"
    assert load in text
    file = tmp_path / "masked.py"
    file.write_text(
        text.replace(load, "tl.load(logits_ptr + target, mask=target < V, other=0.0).to(tl.float32)")
    )
    result = draft(file, SHAPES[0])
    main, after = result["backward"].split("def cross_entropy_kernel_bwd_after(")
    assert "tl.store(d_logits_ptr" in main and "atomic_add" not in main
    assert after.count("tl.atomic_add(d_logits_ptr") == 1
    assert main.count("[grid](") == 0 and after.index("_bwd[grid]") < after.index("_bwd_after[grid]")
    assert (result["report"]["atomics"], result["report"]["atomics_naive"]) == (1, 2)
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_late_write__that_needs_a_loop_stays_where_it_is(tmp_path: Path) -> None:
    file = changed(tmp_path, f"({LOSS}) * x_target")
    end = "\n\n\n@autodiff"  # after which no variable has what the loop found
    file.write_text(file.read_text().replace(end, f"\n    running_max, running_sum = 0.0, 0.0{end}", 1))
    result = draft(file, SHAPES[1])
    assert "_after" not in result["backward"]
    assert result["report"]["atomics"] == 2
    assert_right(file, result, [(SHAPES[1], "normal")])


def test_two_blocks__only_one_of_them_is_stored_first(tmp_path: Path) -> None:
    """Both writes are disjoint in themselves, and they meet: the second has to add, alone in its launch."""
    source = (ROOT / "examples/swiglu.py").read_text()
    load = "    up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)\n"
    assert load in source
    again = "    back = tl.load(gate_ptr + n_elements - 1 - offs, mask=mask, other=0.0)\n"
    file = tmp_path / "both.py"
    file.write_text(source.replace(load, load + again).replace("silu(gate) * up", "silu(gate) * up * back"))
    result = draft(file, {"B": 2, "T": 3, "F": 700})
    main, after = result["backward"].split("def swiglu_kernel_bwd_after(")
    assert "tl.store(d_gate_ptr" in main and result["report"]["atomics"] == 0
    assert "atomic_add" not in after and after.count("tl.load(d_gate_ptr") == 1
    assert_right(file, result, [({"B": 2, "T": 3, "F": f}, "normal") for f in (700, 1)])


SHIFT = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 3, "T": 6, "D": 20}]


@triton.jit
def shift_kernel(x, y, T, D: tl.constexpr, BD: tl.constexpr):
    i_t, i_b = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BD)
    mask = cols < D
    base = (i_b * T + i_t) * D + cols
    b_x = tl.load(x + base, mask=mask)
    if i_t == 0:
        tl.store(y + base, b_x * b_x, mask=mask)
    else:
        before = tl.load(x + base - BACK, mask=mask)
        tl.store(y + base, before * b_x, mask=mask)


@autodiff(inputs_require_grad=(0,))
def shift(x):
    x = x.contiguous()
    B, T, D = x.shape
    y = torch.empty_like(x)
    shift_kernel[(T, B)](x, y, T, D, BD=triton.next_power_of_2(D))
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["T"], dims["D"], device=device, dtype=dtype),)
"""
SHIFTED = [{"B": 3, "T": 6, "D": 20}, {"B": 1, "T": 1, "D": 33}, {"B": 2, "T": 5, "D": 1}]


def test_row_and_its_neighbour__are_written_in_two_launches_without_atomics(tmp_path: Path) -> None:
    file = tmp_path / "shift.py"
    file.write_text(SHIFT.replace("BACK", "D"))
    result = draft(file, SHIFTED[0])
    assert "atomic_add" not in result["backward"] and result["report"]["atomics"] == 0
    main, after = result["backward"].split("def shift_kernel_bwd_after(")
    assert "tl.load(d_x" not in main and after.count("tl.store(d_x") == after.count("tl.load(d_x") == 1
    assert_right(file, result, [(dims, "normal") for dims in SHIFTED])
    half = draft(file, SHIFTED[0], dtype="float16")["backward"]
    assert "gradient_of(x, accumulate=True" in half  # a sum, though of two


def test_neighbour_that_several_rows_share__is_added_atomically(tmp_path: Path) -> None:
    """The last row of the batch before, for every row: the late write is not disjoint."""
    file = tmp_path / "shift.py"
    file.write_text(SHIFT.replace("BACK", "i_t * D"))
    result = draft(file, SHIFTED[0])
    assert result["report"]["atomics"] == 1
    assert_right(file, result, [(dims, "normal") for dims in SHIFTED])
