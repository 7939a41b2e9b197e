"""What the generated text says: decisions above each kernel, `# SCHEDULE:` where a better schedule was not
proven, names, comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diff_support import ROOT, draft
from kernel_agent import forward

KERNELS = ROOT / "tests/python/kernels"


def drafted(file: Path, schedule: str | None = None) -> dict:
    loaded = forward.load(file)
    return draft(file, (loaded.sweep_cpu or loaded.sweep)[0].dims, schedule=schedule)


# kernel: kind of the failed proof, and what the reason must name
STUCK = {
    "embedding": ("data-dependent index", "`token` of line 14"),
    "moe": ("data-dependent index", "of line"),
    "grouped_gemm": ("carried state", "what the loop carries"),
}


def test_rewritten_buffer__leaves_other_gradients_to_their_owners() -> None:
    assert drafted(KERNELS / "in_place.py")["report"]["atomics"] == 0


@pytest.mark.parametrize("name", sorted(STUCK))
def test_schedule__a_kept_atomic_says_why_and_what_an_expert_would_try(tmp_path: Path, name: str) -> None:
    kind, names = STUCK[name]
    file = KERNELS / f"{name}.py"
    if name == "grouped_gemm":  # whose programs walk the queue the other way round
        text, file = (ROOT / "examples/grouped_gemm.py").read_text(), tmp_path / "grouped_gemm.py"
        file.write_text(text.replace("tile = tl.program_id(0)", "tile = NUM_PROGRAMS - 1 - tl.program_id(0)"))
    result = drafted(file)
    assert result["report"]["atomics"] > 0
    lines = [line for line in result["report"]["lines"] if line["class"] == "schedule"]
    assert len(lines) == result["report"]["atomics"]
    assert any(line["proof"] == kind and names in line["reason"] for line in lines), lines
    text = result["backward"]
    assert text.count("# SCHEDULE:") == text.count("tl.atomic_add(")
    assert kind in " ".join(text.split("# SCHEDULE:")[1].replace("#", "").split())


def test_schedule__proven_stores_have_none() -> None:
    for name in ("softmax", "matmul", "attention"):
        result = drafted(ROOT / f"examples/{name}.py")
        assert "SCHEDULE" not in result["backward"]
        assert not [line for line in result["report"]["lines"] if line["class"] == "schedule"]


def test_header__has_tape_line_ties_and_strides(tmp_path: Path) -> None:
    text = drafted(ROOT / "examples/attention.py")["backward"]
    head = text.split("# indices")[0]
    assert re.search(r"# - tape: 0 B \(naive [0-9.]+ [KMG]iB\) · atomics kept 0 of 3 · refused 0", head)
    assert "maximum cancels" in head
    assert "disjoint((stride_b" in head.replace("\n    #   ", " ")
    assert "second operand" not in head  # the running maximum is detached: no tie is ever resolved
    assert text.count("# assumptions and decisions") == len(re.findall(r"^def \w+_bwd", text, re.MULTILINE))


def test_header__states_the_tie_rule_where_one_is_used(tmp_path: Path) -> None:
    source = (ROOT / "examples/swiglu.py").read_text().replace("silu(gate) * up", "tl.maximum(gate, up)")
    file = tmp_path / "tie.py"
    file.write_text(source)
    assert "a tie of maximum gives the gradient to the second operand" in drafted(file)["backward"]


def test_names__say_what_a_value_is() -> None:
    text = drafted(ROOT / "examples/softmax.py")["backward"]
    assert {"x_offs", "mask", "d_y", "y", "d_x"} <= set(re.findall(r"^    (\w+) = ", text, re.MULTILINE))
    assert not re.search(r"\bt(_\d+)? = ", text)


def test_comments__every_adjoint_names_its_forward_line() -> None:
    text = drafted(ROOT / "examples/layer_norm.py")["backward"]
    kernels = text.split("def laid_out")[0].splitlines()
    for at, line in enumerate(kernels):
        if re.match(r"\s+d_[a-z]\w* = (?!0\.0|tl\.zeros)", line):
            assert "  # " in line or kernels[at - 1].lstrip().startswith("# line "), line


def test_loops__carry_nothing_that_their_body_does_not_need(tmp_path: Path) -> None:
    """The sum of squares needs its own loop; the reverse loop beside it needs no copy."""
    file = tmp_path / "layer_norm.py"
    file.write_text((ROOT / "examples/layer_norm.py").read_text().replace('"N": 16384', '"N": 65536'))
    text = drafted(file)["backward"]
    assert text.count("squares += centred * centred") == 1


def test_entry__inputs_that_want_gradients__come_to_have_memory_of_their_own() -> None:
    text = drafted(ROOT / "examples/softmax.py")["backward"]
    entry = text.split("def softmax_autograd(")[1]
    assert entry.index("x = own(x)") < entry.index(".apply(") and "def own(" in text
