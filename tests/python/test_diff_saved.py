"""Statistics that took a loop: a copy of the forward saves them, and the backward runs that loop no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft, edits_of

ATTENTION = ROOT / "examples/attention.py"
FORWARD = '''
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def spread_kernel(x_ptr, y_ptr, N, scale=1.0, BLOCK: tl.constexpr = 256):
    """Each row less its mean, by its deviation."""
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0), axis=0)
    mean = total / N
    squares = 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        squares += tl.sum(tl.where(cols < N, (x - mean) * (x - mean), 0.0), axis=0)
    rstd = scale / tl.sqrt(squares / N + 0.1)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row * N + cols + start * 0, (x - mean) * rstd, mask=cols < N)  # ends here


@autodiff(inputs_require_grad=(0,))
def spread(x):
    y = torch.empty_like(x)
    spread_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=256)
    return y


SWEEP = [{"M": 8192, "N": 100000}]  # too long for a row in one block


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
'''
TUNED = (  # blocks that the forward chooses, and the backward does not know
    (
        "@triton.jit",
        "@triton.autotune([triton.Config({'BLOCK': b}) for b in (128, 256, 32)], key=['N'])\n@triton.jit",
    ),
    (", BLOCK=256)\n    return", ")\n    return"),
)
SHAPES = [({"M": 5, "N": 37}, "normal"), ({"M": 2, "N": 9001}, "slice"), ({"M": 1, "N": 1}, "normal")]


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(FORWARD, tmp_path / "spread.py")


def saved(backward: str) -> list[str]:
    """The variables that the copy of the forward saves."""
    lines = [
        line for line in backward.splitlines() if line.endswith(" = torch.empty(") or "torch.empty(" in line
    ]
    return sorted(
        line.split()[0].removeprefix("saved_") for line in lines if line.strip().startswith("saved_")
    )


def test_attention__runs_over_the_keys_once_for_queries_and_once_for_keys() -> None:
    result = draft(ATTENTION, {"B": 1, "H": 2, "N": 65, "D": 16, "causal": True})
    backward = result["backward"]
    assert saved(backward) == ["row_max", "row_sum"]
    assert "correction" not in backward.split("def attention_kernel_saving")[0]
    assert result["report"]["atomics"] == 0
    cases = [
        ({"B": 2, "H": 3, "N": 130, "D": 24, "causal": True}, "normal"),
        ({"B": 1, "H": 2, "N": 33, "D": 16, "causal": False}, "slice"),
    ]
    assert_right(ATTENTION, result, cases)


def test_return_before_the_loop__saves_what_is_known_where_the_kernel_ends() -> None:
    file = ROOT / "examples/cross_entropy.py"
    result = draft(file, {"M": 9, "V": 4999})
    assert saved(result["backward"]) == ["running_max", "running_sum"]
    assert_right(file, result, [({"M": 9, "V": 4999}, "normal"), ({"M": 3, "V": 7}, "normal")])


@pytest.mark.parametrize("end", ["# ends here\n    return", "; return  # ends here"])
def test_return_as_the_last_statement__comes_after_what_is_saved(end: str, changed) -> None:
    file = changed(("# ends here", end if end[0] == "#" else "\n    mean += 0" + end))
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"])
    assert_right(file, result, SHAPES)


def test_deviation_of_a_row__is_saved_in_place_of_what_it_is_made_of(changed) -> None:
    file = changed()
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"]) == ["mean", "rstd", "squares"]
    long_rows = result["backward"].split("def spread_kernel_bwd(")[1].split("@triton.jit")[0]
    assert long_rows.count("for start in range") == 3
    assert "def spread_kernel_saving(" in result["backward"] and "scale=1.0" in result["backward"]
    assert_right(file, result, SHAPES)


@pytest.mark.parametrize(
    "edits",
    {
        "a name that means something else at the end": [("# ends here", "\n    mean = 1.0\n    total = 2.0")],
        "what asks for the size of a tuned block": [
            *TUNED,
            ("    mean = total / N\n", "    mean = tl.where(BLOCK > 0, total / N, 0.0)\n"),
        ],
    }.values(),
)
def test_what_no_variable_holds_for_certain__is_computed_again(changed, edits) -> None:
    file = changed(*edits)
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"]) == []
    assert_right(file, result, SHAPES)


def test_grid_that_is_a_function__is_asked_before_memory_is_made(changed) -> None:
    file = changed(("[(x.shape[0],)]", "[lambda meta: (x.shape[0] + 0 * meta['BLOCK'],)]"))
    result = draft(file, SHAPES[1][0])
    text = result["backward"]
    assert saved(text) and text.index("grid = grid(") < text.index("torch.empty(grid[0]")
    assert_right(file, result, SHAPES)


def test_name_that_is_taken__is_not_overwritten(changed) -> None:
    file = changed(
        ("    row = tl.program_id(0)\n", "    row = tl.program_id(0)\n    saved_mean = 3.0\n"),
        ("(x - mean) * rstd,", "(x - mean) * rstd * saved_mean / 3.0,"),
    )
    result = draft(file, SHAPES[1][0])
    assert "saved_mean_ = torch.empty(" in result["backward"]
    assert_right(file, result, SHAPES)


def test_name_that_only_a_branch_gives__is_no_variable_to_save(changed) -> None:
    file = changed(
        (
            "    mean = total / N\n",
            "    if N > 0:\n        mean = total / N\n    else:\n        mean = 0.0\n",
        ),
    )
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"]) == ["rstd", "squares", "total"]
    assert_right(file, result, SHAPES)


def test_tuned_rows_of_blocks__are_saved_whatever_block_the_forward_chooses(changed) -> None:
    file = changed(*TUNED)
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"]) == ["mean", "rstd", "squares"]
    copy = result["backward"].split("def spread_kernel_saving(")
    assert copy[0].rstrip().endswith("@triton.jit") and "@triton.autotune(" in copy[0]
    assert_right(file, result, SHAPES)


@pytest.fixture
def attention(tmp_path: Path):
    """Attention with an autotuner that has these (BLOCK_M, BLOCK_N), and further edits."""

    def make(blocks: tuple[tuple[int, int], ...], *edits: tuple[str, str]) -> Path:
        listed = ", ".join(f'triton.Config({{"BLOCK_M": {m}, "BLOCK_N": {n}}})' for m, n in blocks)
        tuner = f'@triton.autotune([{listed}], key=["N"])\n'
        tuned = [
            ("@triton.jit", f"{tuner}@triton.jit"),
            ("    BLOCK_M, BLOCK_N = 64, 32\n", ""),
            ("(triton.cdiv(N, BLOCK_M), B * H)", 'lambda meta: (triton.cdiv(N, meta["BLOCK_M"]), B * H)'),
            ("BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, ", ""),
            ("        num_warps=4, num_stages=2,\n", ""),
        ]
        text = ATTENTION.read_text()
        for old, new in (*tuned, *edits):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        file = tmp_path / "tuned.py"
        file.write_text(text)
        return file

    return make


TRACED = {"B": 1, "H": 2, "N": 65, "D": 16, "causal": True}
RAGGED = [
    ({"B": 2, "H": 3, "N": n, "D": 16, "causal": causal}, "normal")
    for n, causal in ((130, True), (33, False), (70, True), (129, False))
]


def test_rows_that_the_forward_shares_out_by_other_blocks__are_found_by_their_number(attention) -> None:
    file = attention(((32, 64), (128, 32), (64, 16)))
    result = draft(file, TRACED)
    assert saved(result["backward"]) == ["row_max", "row_sum"]
    assert "for c in" not in result["backward"]  # each of them has whole blocks of 32
    assert_right(file, result, RAGGED)


def test_blocks_that_the_backwards_do_not_divide__are_none_of_the_copys(attention) -> None:
    file = attention(((64, 32), (32, 64), (128, 32)))
    result = draft(file, TRACED)
    assert saved(result["backward"]) == ["row_max", "row_sum"]
    assert 'if c.kwargs["BLOCK_M"] % 64 == 0]' in result["backward"]
    assert_right(file, result, RAGGED)


@pytest.mark.parametrize(
    "edits",
    {
        "a loop that ends before what its mask lets through": [
            ("tl.minimum(start_m + BLOCK_M, N)", "tl.minimum(start_m + BLOCK_M - 16, N)")
        ],
        "rows of a grid that says not how many": [
            ('(triton.cdiv(N, meta["BLOCK_M"]), B', '((N + meta["BLOCK_M"] - 1) // meta["BLOCK_M"], B')
        ],
        "a maximum of a block": [
            ("row_max = new_max", "row_max = tl.zeros_like(new_max) + tl.max(new_max, 0)")
        ],
    }.values(),
)
def test_what_may_hang_on_the_blocks__is_not_saved_by_a_tuned_forward(attention, edits) -> None:
    result = draft(attention(((64, 32), (128, 64)), *edits), TRACED)
    assert saved(result["backward"]) == []


def test_heuristics__are_asked_before_what_they_size(changed) -> None:
    file = changed(
        (
            "@triton.jit",
            '@triton.heuristics({"BLOCK": lambda args: 128 if args["N"] < 100 else 256})\n@triton.jit',
        ),
        (", BLOCK=256)\n    return", ")\n    return"),
    )
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"]) == ["mean", "rstd", "squares"]
    assert_right(file, result, SHAPES)


def test_sums_over_a_row__are_saved_where_a_program_walks_rows() -> None:
    file = ROOT / "examples/layer_norm.py"
    result = draft(file, {"M": 9, "N": 100})
    assert saved(result["backward"]) == ["mean", "rstd"]
    lines = result["backward"].split("@triton.jit")[1].splitlines()
    walked = "\n".join(line.split("#")[0] for line in lines)
    assert "tl.range(" in walked and walked.count("tl.sum(") == 2 and "tl.sqrt" not in walked
    assert_right(file, result, [({"M": 300, "N": 33}, "normal"), ({"M": 2, "N": 1}, "normal")])


def test_number_that_a_block_is_divided_by__is_inverted_once() -> None:
    file = ROOT / "examples/softmax.py"
    result = draft(file, {"M": 9, "N": 100})
    assert saved(result["backward"]) == []  # each program has one row: nothing waits for its sums
    assert "    y = e * (1.0 / tl.sum(e, axis=0))\n" in result["backward"]
    assert "    d_x = (d_y - tl.sum(d_y * y, axis=0)) * y  # " in result["backward"]
    assert_right(file, result, [({"M": 5, "N": 33}, "normal"), ({"M": 2, "N": 1}, "normal")])


def test_quotient_that_is_compared__is_what_the_forward_had(tmp_path: Path) -> None:
    """Its rounding decides which branch was taken."""
    forward = (ROOT / "examples/softmax.py").read_text()
    assert forward.count(", y, mask=mask)") == 1
    file = tmp_path / "softmax.py"
    file.write_text(forward.replace(", y, mask=mask)", ", tl.where(y > 0.01, y * y, y), mask=mask)"))
    result = draft(file, {"M": 9, "N": 100})
    assert "    y = e / e_sum\n" in result["backward"]
    assert_right(file, result, [({"M": 5, "N": 33}, "normal"), ({"M": 2, "N": 1}, "normal")])


DROPOUT = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 100}]


@triton.jit
def keeps(seed, offs, p):
    return tl.rand(seed, offs) >= p


@triton.jit
def dropout_kernel(x_ptr, p_ptr, y_ptr, n, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    p = tl.load(p_ptr)
    tl.store(y_ptr + offs, tl.where(keeps(seed, offs, 0.25), x * x, 0.0), mask=offs < n)


@autodiff(inputs_require_grad=(0,))
def dropout(x, p):
    y = torch.empty_like(x)
    dropout_kernel[(triton.cdiv(x.numel(), 32),)](x, p, y, x.numel(), 7, BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["N"], device=device, dtype=dtype), torch.full((1,), 0.25, device=device)
"""
KEPT = "keeps(seed, offs, 0.25)"
LENGTHS = [({"N": 100}, "normal"), ({"N": 32}, "normal"), ({"N": 1}, "normal")]


@pytest.mark.parametrize("named", [False, True], ids=["in a statement", "in a variable"])
def test_random_choice__may_be_saved_by_the_forward(named: bool, tmp_path: Path) -> None:
    changed = edits_of(DROPOUT, tmp_path / "dropout.py")
    kept = [(KEPT, "kept"), ("    p = tl.load(p_ptr)\n", f"    p = tl.load(p_ptr)\n    kept = {KEPT}\n")]
    file = changed(*kept) if named else changed()
    plain, asked = (draft(file, {"N": 100}, config=config) for config in (None, {"saved": 1}))
    assert {"saved": 1} in plain["report"]["configs"] and saved(plain["backward"]) == []
    assert saved(asked["backward"]) == ["kept" if named else "keeps"]
    assert "dtype=torch.bool" in asked["backward"]
    head, _, body = asked["backward"].partition("def dropout_kernel_saving")[0].partition("# assumptions")
    assert "seed" not in head + body.partition("# indices")[2]
    for result in (plain, asked):
        assert_right(file, result, LENGTHS)


@pytest.mark.parametrize(
    "edits",
    [
        [(KEPT, "keeps(seed, offs, p)")],
        [(KEPT, "keeps(seed, offs, tl.load(p_ptr))")],
        [
            ("    tl.store(", "    for turn in tl.static_range(2):\n        tl.store("),
            (KEPT, "keeps(seed + turn, offs, 0.25)"),
            ("tl.store(y_ptr + offs", "tl.store(y_ptr + turn * n + offs"),
            ("y = torch.empty_like(x)", "y = torch.empty_like(torch.cat([x, x]))"),
        ],
    ],
    ids=["by what was loaded", "by what is loaded", "names of another turn"],
)
def test_random_choice__that_the_end_of_the_kernel_may_not_repeat__is_drawn_again(edits, tmp_path) -> None:
    file = edits_of(DROPOUT, tmp_path / "dropout.py")(*edits)
    result = draft(file, {"N": 100}, config={"saved": 1})
    assert saved(result["backward"]) == []
    assert_right(file, result, LENGTHS)
