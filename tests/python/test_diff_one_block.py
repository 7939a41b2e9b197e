"""One block for rows and columns alike: the backward may have a smaller or a larger one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of, errors
from kernel_agent.differentiate.schedule import aligned_rows
from kernel_agent.differentiate.write import steps

LOSS = "dataset/loss/fused_linear_ce_two_owner_recompute.py"
TWICE = "dataset/loss/info_nce_clip_symmetric.py"
PACKED = "dataset/quantised_ste/int4_packed_groupwise_linear.py"
OWN = "of the backward's own"

TRACED = {"M": 37, "D": 24, "V": 150}
# In float32 the forward's blocks have 32 rows: two of them, one and a row, less than one, whole ones.
RAGGED = [
    ({"M": m, "D": 24, "V": v}, "normal") for m, v in ((37, 150), (33, 65), (5, 33), (129, 31), (64, 64))
]
PAIRS = [({"M": m, "D": d}, "normal") for m, d in ((45, 32), (33, 20), (5, 16), (129, 16), (64, 16))]


@pytest.fixture
def forward(tmp_path: Path) -> Callable[..., Path]:
    """The forward of a pair, with edits."""

    def make(pair: str, *edits: tuple[str, str]) -> Path:
        source = (ROOT / pair).read_text().partition(MARKER)[0]
        return edits_of(source, tmp_path / Path(pair).name)(*edits)

    return make


ASKING = {"matrix", "turned", "logsumexp", "unmasked"}


def offered(result: dict, at: str = "BLOCK") -> list[dict]:
    """The configurations for the tuner with a parameter; but for those that ask for something else."""
    return [c for c in result["report"]["configs"] if at in {*c, ""} and not ASKING & c.keys()]


@pytest.mark.parametrize("block", [16, 64, 128])
def test_smaller_and_larger_blocks__give_the_same_gradients(forward, block: int) -> None:
    file = forward(LOSS)
    result = draft(file, TRACED, config={"BLOCK": block, "num_warps": 8})
    assert f"if {block} % BLOCK == 0 and M <= grid[0] * BLOCK:" in result["backward"]
    assert f"(triton.cdiv(grid[0] * BLOCK, {block}) * ({block} // BLOCK),)" in result["backward"]
    assert f"grid, BLOCK = (grid[0] * BLOCK // {block},), {block}" in result["backward"]
    assert result["report"]["atomics"] == 0 and "saved_total" in result["backward"]
    assert_right(file, result, RAGGED)


def test_larger_blocks__have_as_many_programs_of_the_copy_as_they_need(forward) -> None:
    """The copy has them before it saves anything; what saves nothing has no more than the user launches."""
    made = draft(forward(LOSS), TRACED, config={"BLOCK": 128})["backward"]
    rounded, launched = made.index("triton.cdiv(grid[0] * BLOCK, 128)"), made.index("_saving[grid](")
    assert rounded < made.index("saved_m = torch.empty(grid[0] * BLOCK") < launched
    plain = draft(forward(LOSS, *PLAIN), TRACED, config={"BLOCK": 128})["backward"]
    assert "_saving" not in plain and plain.index("linear_ce_kernel[grid](") < plain.index(
        "triton.cdiv(grid[0]"
    )


# No statistics: a sum of squares of what the target's logit would be compared with.
PLAIN = (
    ("        z = tl.where(v[None, :] < V, z, -float(\"inf\"))\n", ""),
    ("        m_new = tl.maximum(m, tl.max(z, axis=1))\n", ""),
    ("        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new[:, None]), axis=1)\n", ""),
    ("        m = m_new\n", "        total += tl.sum(z * z, axis=1)\n"),
    ("lse = m + tl.log(total)", "lse = total"),
)  # fmt: skip


@pytest.mark.parametrize("block", [16, 128])
def test_larger_blocks_where_nothing_is_saved__give_the_same_gradients(forward, block: int) -> None:
    file = forward(LOSS, *PLAIN)
    result = draft(file, TRACED, config={"BLOCK": block})
    assert OWN in result["backward"]
    assert_right(file, result, RAGGED)


def test_grid_that_is_a_function__is_asked_before_there_are_more_programs(forward) -> None:
    written = '(triton.cdiv(M, tiles["BLOCK"]),)'
    file = forward(LOSS, (written, f"lambda meta: {written.replace('tiles', 'meta')}"))
    made = draft(file, TRACED, config={"BLOCK": 128})["backward"]
    asked, more = made.index("grid = grid(dict("), made.index("grid = (triton.cdiv(grid[0] * BLOCK, 128)")
    assert asked < more < made.index("_saving[grid](")
    assert_right(file, {"backward": made}, RAGGED)


@pytest.mark.parametrize(
    "config", [{"BLOCK": 64, "shares": 8}, {"BLOCK": 128, "num_warps": 8, "shares": 512}]
)
def test_loop_with_own_blocks__may_be_shared(forward, config: dict) -> None:
    file = forward(LOSS)
    result = draft(file, TRACED, config=config)
    assert OWN in result["backward"] and f"splits = max({config['shares']} //" in result["backward"]
    assert_right(file, result, RAGGED)


@pytest.mark.parametrize("config", [{"BLOCK": 16}, {"BLOCK": 128}, {"BLOCK": 64, "shares": 8}])
def test_kernel_that_is_launched_twice__has_them_in_both(forward, config: dict) -> None:
    file = forward(TWICE)
    result = draft(file, PAIRS[0][0], config=config)
    assert result["backward"].count("# blocks of the backward's own") == 2
    assert ("splits = max(8 //" in result["backward"]) == ("shares" in config)
    assert_right(file, result, PAIRS)


@pytest.mark.parametrize(
    "config",
    [{"BLOCK_M": 16, "BLOCK_N": 16}, {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}],
)
def test_tiles_of_one_block_with_a_loop_over_groups__have_them(
    forward, config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned_rows, "ALIGNED", 1)
    file = forward(PACKED)
    cases = [({"M": m, "groups": 3, "size": 24, "N": n}, "normal") for m, n in ((70, 45), (33, 65), (5, 130))]
    result = draft(file, cases[0][0], config=config)
    assert OWN in result["backward"] and result["report"]["atomics"] == 0
    assert_right(file, result, cases)


def test_kernels_of_tiles_with_a_loop_over_groups__may_have_tiles_of_their_own(
    forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widest along the axis of the output that each owns, beside the block of a group, which stays."""
    monkeypatch.setattr(steps, "FILLED", 1)
    file = forward(PACKED)
    cases = [
        ({"M": m, "groups": 2, "size": 32, "N": n}, "normal") for m, n in ((70, 48), (300, 288), (70, 45))
    ]
    wide = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
    configs = draft(file, cases[0][0], dtype="float16")["report"]["configs"]
    assert configs[:2] == [{**wide, "apart": 1}, {**wide, "apart": 1, "operands": 1}]
    assert {**wide, "apart": 0} in configs
    result = draft(file, cases[0][0], config={**wide, "apart": 1}, dtype="float16")
    of_x, of_scales = result["backward"].split("linear_kernel_bwd_x[")
    assert "grid, BLOCK_M, BLOCK_N = (triton.cdiv(M, 256), triton.cdiv(N, 64)), 256, 64\n" in of_x
    assert "grid, BLOCK_M, BLOCK_N = (triton.cdiv(M, 64), triton.cdiv(N, 256)), 64, 256\n" in of_scales
    assert_right(file, result, cases)


def test_tuner__is_offered_large_blocks_first_that_fit(forward) -> None:
    """Sums of whole rows in registers; blocks of rows and of columns in shared memory, of fewer stages."""
    small, large = ({"M": m, "D": 128, "V": 20000} for m in (1021, 4096))
    half = {"dtype": "float16"}
    first = {"BLOCK": 128, "num_warps": 8}
    configs = offered(draft(forward(LOSS), small, **half), "")
    assert configs[:3] == [{"shares": 512}, first, {"BLOCK": 32, "num_warps": 4}] and len(configs) <= 8
    single = {**first, "num_stages": 1}
    configs = offered(draft(forward(LOSS), large))
    assert configs[:2] == [single, {**single, "shares": 512}] and {"BLOCK": 64, "num_warps": 4} in configs
    file = forward(TWICE)
    assert offered(draft(file, {"M": 8192, "D": 256}, **half)) == [{"BLOCK": 64, "num_warps": 8}]
    many = {"BLOCK": 64, "num_warps": 16, "num_stages": 2}  # eight hold no sums of rows so long
    assert offered(draft(file, {"M": 8192, "D": 512}, **half)) == [many]


def test_call_with_rows_that_no_program_has__keeps_the_forwards_blocks(forward) -> None:
    """Those have no gradient there: programs with larger blocks would reach them."""
    edits = (
        ('(triton.cdiv(M, tiles["BLOCK"]),)', '(triton.cdiv(M, tiles["BLOCK"]) - (M > 100),)'),
        ("loss = torch.empty(M,", "loss = torch.zeros(M,"),
        ("lse = torch.empty_like(loss)", "lse = torch.zeros_like(loss)"),
    )
    file = forward(LOSS, *edits)
    result = draft(file, TRACED, config={"BLOCK": 128})
    assert OWN in result["backward"]
    assert_right(file, result, [({"M": m, "D": 24, "V": 50}, "normal") for m in (129, 105, 165)])


def test_call_whose_blocks_are_larger__has_the_backwards_smaller_ones(forward) -> None:
    edit = ("else 32 if BLOCK_D <= 64 else 16", "else 32 if x.shape[0] < 40 else 128")
    file = forward(LOSS, edit)
    result = draft(file, TRACED, config={"BLOCK": 64})
    assert_right(file, result, RAGGED)


def test_statistics_of_rows_that_do_not_exist__are_what_the_forward_has_there(forward) -> None:
    """With zero for them sums over rows would be no number: log(0) * 0."""
    file = forward(LOSS, ("lse - z_target", "lse * lse - z_target"))
    backward = draft(file, TRACED, config={"BLOCK": 128})["backward"]
    assert_right(file, {"backward": backward}, RAGGED)
    spoiled, count = re.subn(
        r"(tl\.store\(saved_(?:m|total) \+ .*), (m|total)\)", r"\1, tl.where(rows < M, \2, 0.0))", backward
    )
    assert count == 2
    assert not all(error < 1 for of_all in errors(file, spoiled, RAGGED[:1]).values() for error in of_all)


TARGET = "target = tl.load(target_ptr + rows, mask=rows < M, other=0)"
STORED = "tl.store(lse_ptr + rows, lse, mask=rows < M)"
SUMMED = "tl.where(v[None, :] == target[:, None], z, 0.0)"
NEVER = {
    "a block's size as a number": (STORED, STORED.replace(" lse,", " lse * BLOCK,")),
    "the number of programs": (STORED, STORED.replace(" lse,", " lse * tl.num_programs(0),")),
    "the number of a program": (STORED, STORED.replace(" lse,", " lse * tl.program_id(0),")),
    "places in the block": (STORED, STORED.replace(" lse,", " lse * tl.arange(0, BLOCK),")),
    "a loop that ends early": ("range(0, V, BLOCK)", "range(0, V - 7, BLOCK)"),
    "a loop that begins late": ("range(0, V, BLOCK)", "range(tl.program_id(0) * BLOCK, V, BLOCK)"),
    "a sum beyond the last column": (SUMMED, "tl.where(v[None, :] == target[:, None], z + 1, 0.0)"),
    "a sum that each step halves": ("        m = m_new\n", "        m = m_new\n        z_target *= 0.5\n"),
    "columns by their step": (SUMMED, SUMMED.replace("z, 0.0", "z * start, 0.0")),
}


@pytest.mark.parametrize("edit", NEVER.values(), ids=NEVER)
def test_what_hangs_on_the_block__keeps_it(forward, edit: tuple[str, str]) -> None:
    file = forward(LOSS, edit)
    assert not offered(draft(file, TRACED))
    for block in (16, 64):
        assert OWN not in draft(file, TRACED, config={"BLOCK": block})["backward"]


def test_what_each_program_adds__keeps_the_programs(forward) -> None:
    """Their number is a factor of the gradient."""
    file = forward(
        LOSS,
        ("target_ptr, loss_ptr, lse_ptr, M,", "target_ptr, loss_ptr, lse_ptr, more_ptr, M,"),
        ("w, target, loss, lse, M,", "w, target, loss, lse, more, M,"),
        (STORED, f"{STORED}\n    tl.atomic_add(more_ptr, tl.load(w_ptr).to(tl.float32))"),
        ("lse = torch.empty_like(loss)", "lse, more = torch.empty_like(loss), torch.zeros_like(loss[:1])"),
        ("    return loss, lse\n", "    return loss + more, lse\n"),
    )  # fmt: skip
    assert not offered(draft(file, TRACED))
    result = draft(file, TRACED, config={"BLOCK": 16})
    assert OWN not in result["backward"]
    assert_right(file, result, RAGGED[:2])


BELOW = "v[None, :] < V"  # in what the logits are masked with
SMALLER = {
    "rows that are read without a mask": (TARGET, "target = tl.load(target_ptr + rows)"),
    "rows that are read beside a mask": (TARGET, TARGET.replace("rows < M", "rows <= M")),
    "rows that are masked by another length": (TARGET, TARGET.replace("rows < M", "rows < V")),
    "what is read for nothing": (TARGET, f"{TARGET}\n    unused = tl.load(x_ptr + rows)"),
    "rows as numbers": (STORED, STORED.replace(" lse,", " lse * rows,")),
    "rows as powers": (STORED, STORED.replace(" lse,", " tl.exp(lse * rows.to(tl.float32)),")),
    "an angle that has no number": (STORED, STORED.replace(" lse,", " lse * tl.cos(1.0 / (rows - 90)),")),
    "rows by another number": (STORED, STORED.replace(" lse,", " tl.where(rows < 40, lse, 0.0),")),
    "columns near a row": (BELOW, f"({BELOW}) & (v[None, :] > rows[:, None] - 24)"),
    "columns up to a row, of another length": (BELOW, f"({BELOW}) & (v[None, :] <= rows[:, None])"),
}  # fmt: skip


@pytest.mark.parametrize("edit", SMALLER.values(), ids=SMALLER)
def test_rows_beyond_the_last_that_may_do_something__are_no_more_than_the_forwards(
    forward, edit: tuple[str, str]
) -> None:
    """Blocks are smaller there, or divide the rows of the call as they are: 64 of 37."""
    file = forward(LOSS, edit)
    assert all(config["BLOCK"] <= 64 for config in offered(draft(file, TRACED)))
    assert OWN not in draft(file, TRACED, config={"BLOCK": 128})["backward"]
    result = draft(file, TRACED, config={"BLOCK": 16})
    assert OWN in result["backward"] and "cdiv(grid[0]" not in result["backward"]


# As many columns as rows: `v < M` leaves none that a row from M on might not see.
SQUARE = (
    ("w, target, loss, lse, M, V, D,", "w, target, loss, lse, M, D,"),
    ("lse_ptr, M, V, D,", "lse_ptr, M, D,"),
    ("range(0, V, BLOCK)", "range(0, M, BLOCK)"),
    ("load_tile(w_ptr, v, d, V, D)", "load_tile(w_ptr, v, d, M, D)"),
)
ALIKE = {
    "but its own column": (BELOW, "(v[None, :] < M) & (v[None, :] != rows[:, None])"),
    "columns up to a row": (BELOW, "(v[None, :] < M) & (v[None, :] <= rows[:, None])"),
    "columns up to a row, and one": (BELOW, "(v[None, :] < M) & (rows[:, None] + 2 > v[None, :])"),
    "all but the first row": (BELOW, "(v[None, :] < M) & ((rows[:, None] == 0) | (rows[:, None] > 0))"),
    "random numbers of a row": ("lse - z_target", "lse - z_target * (tl.rand(5, rows) > 0.5).to(tl.float32)"),
    "an angle of a row": (
        f"tl.where({BELOW}, z,",
        "tl.where(v[None, :] < M, z * tl.cos(rows * 0.1)[:, None],",
    ),
    "a column of its own in what is masked": (
        f"tl.where({BELOW}, z,",
        "tl.where(v[None, :] < M, z - tl.where(v[None, :] == rows[:, None], 1.0, 0.0),",
    ),
}


@pytest.mark.parametrize("edit", ALIKE.values(), ids=ALIKE)
def test_rows_beyond_the_last_that_see_every_column__may_be_more(forward, edit: tuple[str, str]) -> None:
    others = () if BELOW in edit[0] else ((BELOW, "v[None, :] < M"),)
    file = forward(LOSS, *SQUARE, *others, edit)
    cases = [({"M": m, "D": 24, "V": m}, "normal") for m in (37, 65, 5, 64)]
    result = draft(file, cases[0][0], config={"BLOCK": 128})
    assert OWN in result["backward"] and "triton.cdiv(grid[0] * BLOCK, 128)" in result["backward"]
    assert_right(file, result, cases)


@pytest.mark.parametrize(
    "columns",
    [
        "(v[None, :] < M) & (v[None, :] < rows[:, None] - 1)",  # the last one is none of the first such row's
        "(v[None, :] < M + 1) & (v[None, :] != rows[:, None])",
        "(v[None, :] < M) | (v[None, :] == rows[:, None])",
        "(v[None, :] < M) & (tl.rand(5, rows * 2)[:, None] > 0.5)",
        "(v[None, :] < M) & (total / tl.rand(5, rows * 2) > 0.5)[:, None]",
    ],
)
def test_rows_beyond_the_last_that_see_other_columns__are_no_more(forward, columns: str) -> None:
    result = draft(
        forward(LOSS, *SQUARE, (BELOW, columns)), {"M": 37, "D": 24, "V": 37}, config={"BLOCK": 64}
    )
    assert "cdiv(grid[0]" not in result["backward"]
