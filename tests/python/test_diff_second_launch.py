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


def test_cross_entropy__stores_blocks_and_adds_one_element_a_row() -> None:
    result = draft(FILE, SHAPES[0])
    main, after = result["backward"].split("def cross_entropy_kernel_bwd_after(")
    assert "tl.store(d_logits_ptr" in main and "atomic_add" not in main
    assert after.count("tl.atomic_add(d_logits_ptr") == 1
    assert main.count("[grid](") == 0 and after.index("_bwd[grid]") < after.index("_bwd_after[grid]")
    assert (result["report"]["atomics"], result["report"]["atomics_naive"]) == (1, 2)
    assert_right(FILE, result, [(dims, "normal") for dims in SHAPES])


def test_late_write__that_needs_a_loop_stays_where_it_is(tmp_path: Path) -> None:
    file = changed(tmp_path, f"({LOSS}) * x_target")
    result = draft(file, SHAPES[1])
    assert "_after" not in result["backward"]
    assert result["report"]["atomics"] == 2
    assert_right(file, result, [(SHAPES[1], "normal")])


def test_two_blocks__only_one_of_them_is_stored_first(tmp_path: Path) -> None:
    """Both writes are disjoint in themselves, and they meet: the second has to add."""
    source = (ROOT / "examples/swiglu.py").read_text()
    load = "    up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)\n"
    assert load in source
    again = "    back = tl.load(gate_ptr + n_elements - 1 - offs, mask=mask, other=0.0)\n"
    file = tmp_path / "both.py"
    file.write_text(source.replace(load, load + again).replace("silu(gate) * up", "silu(gate) * up * back"))
    result = draft(file, {"B": 2, "T": 3, "F": 700})
    assert result["backward"].count("tl.atomic_add(d_gate_ptr") == 1
    assert_right(file, result, [({"B": 2, "T": 3, "F": f}, "normal") for f in (700, 1)])
