"""Programs that walk a queue of tiles: whoever owns one of a gradient sums over the tiles that reach it."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft, edits_of, errors
from kernel_agent.differentiate.schedule import aligned_rows
from kernel_agent.differentiate.write import steps

FORWARD = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"ROWS": [5, 0, 33, 17], "N": 20, "K": 24, "P": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    rows, n, k = dims["ROWS"], dims["N"], dims["K"]
    x = torch.randn(sum(rows) + 2, k, device=device, dtype=dtype)  # two rows are of no group
    w = torch.randn(len(rows), k, n, device=device, dtype=dtype)
    ends = torch.tensor(rows, device=device, dtype=torch.int32).cumsum(0).int()
    return x, w, ends, dims["P"]


@triton.jit
def tiles_kernel(
    x_ptr, w_ptr, ends_ptr, y_ptr, G, N, K,
    PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    first = 0
    begin = 0
    for g in range(G):
        end = tl.load(ends_ptr + g)
        last = first + tl.cdiv(end - begin, BM) * tiles_n
        while tile < last:
            local = tile - first
            rows = begin + (local // tiles_n) * BM + tl.arange(0, BM)
            cols = (local % tiles_n) * BN + tl.arange(0, BN)
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for start in range(0, K, BK):
                inner = start + tl.arange(0, BK)
                x = tl.load(
                    x_ptr + rows[:, None] * K + inner[None, :],
                    mask=(rows[:, None] < end) & (inner[None, :] < K), other=0.0,
                )
                at = (g * K + inner[:, None]) * N + cols[None, :]
                w = tl.load(w_ptr + at, mask=(inner[:, None] < K) & (cols[None, :] < N), other=0.0)
                acc = tl.dot(x, w, acc, input_precision="ieee")
            tl.store(
                y_ptr + rows[:, None] * N + cols[None, :], acc,
                mask=(rows[:, None] < end) & (cols[None, :] < N),
            )
            tile += PROGRAMS
        first = last
        begin = end


@autodiff(inputs_require_grad=(0, 1))
def tiles(x, w, ends, programs):
    G, K, N = w.shape
    y = torch.zeros((x.shape[0], N), device=x.device, dtype=x.dtype)
    tiles_kernel[(programs,)](x, w, ends, y, G, N, K, PROGRAMS=programs, BM=16, BN=16, BK=16)
    return y
"""
DIMS = {"ROWS": [5, 0, 33, 17], "N": 20, "K": 24, "P": 3}
CASES = [
    ({"ROWS": rows, "N": n, "K": k, "P": p}, "normal")
    for rows, n, k, p in (
        ([5, 0, 33, 17], 20, 24, 3),
        ([0, 0, 40], 17, 16, 2),  # the first are empty
        ([7, 0], 5, 3, 1),
        ([50], 33, 40, 4),  # one group
        ([3, 1, 2], 4, 20, 40),  # more programs than tiles
        ([0, 0], 4, 5, 2),  # nothing at all
    )
]


@pytest.fixture(autouse=True)
def any_rows_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that those of small products have tiles of the backward's own."""
    monkeypatch.setattr(aligned_rows, "ALIGNED", 1)


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(FORWARD, tmp_path / "tiles.py")


def test_tiles_of_both_gradients__have_owners(changed) -> None:
    file = changed()
    result = draft(file, DIMS)
    assert (result["report"]["atomics"], result["report"]["atomics_naive"]) == (0, 2)
    text = " ".join(result["backward"].split())
    assert "tl.atomic_add" not in text
    assert "walked(grid[0], PROGRAMS)" in text and text.count("= order_of(ends_ptr, 0)") == 1
    assert "tiles_kernel_bwd_w[(triton.cdiv(K, BK), triton.cdiv(N, BN), G)](" in text
    assert "tiles_kernel_bwd_x[(2 * grid[0],)](" in text
    assert ".item()" not in text and "bool(" not in text and "longest" not in text  # nobody waits
    assert "one program owns a tile of d_x, summed over `tile_n`" in text
    assert "one program owns a tile of d_w, summed over `tile_m`" in text
    assert "gradient_of(w_ptr, written=G * K * N)" in text
    assert_right(file, result, CASES)


def test_example__has_no_atomics() -> None:
    file = ROOT / "examples/grouped_gemm.py"
    result = draft(file, {"G": 3, "M": 100, "N": 70, "K": 40})
    assert result["report"]["atomics"] == 0
    sizes = [{"G": g, "M": m, "N": n, "K": k} for g, m, n, k in ((3, 100, 70, 40), (1, 65, 64, 33))]
    assert_right(file, result, [(dims, "normal") for dims in sizes])


SAME = {
    "a loop over a range": [
        ("while tile < last:", "for t in range(tile, last, PROGRAMS):"),
        ("local = tile - first", "local = t - first"),
        ("            tile += PROGRAMS\n", ""),
        ("first = last\n", "tile += tl.maximum(tl.cdiv(last - tile, PROGRAMS), 0) * PROGRAMS\n        first = last\n"),
    ],
    "as many as there are programs": [("tile += PROGRAMS", "tile += tl.num_programs(0)")],
    "where a group begins is carried": [
        ("        last = first +", "        first = last\n        last = first +"),
        ("    first = 0\n", "    last = 0\n"),
        ("        first = last\n        begin = end\n", "        begin = end\n"),
    ],
    "tiles of this group asked for": [("while tile < last:", "while tile >= first and tile < last:")],
    "columns first": [
        ("last = first +", "tiles_m = tl.cdiv(end - begin, BM)\n        last = first +"),
        ("tl.cdiv(end - begin, BM) * tiles_n", "tiles_m * tiles_n"),
        ("(local // tiles_n) * BM", "(local % tiles_m) * BM"),
        ("(local % tiles_n) * BN", "(local // tiles_m) * BN"),
    ],
    "each group from its first tile on": [
        ("        last = first + tl", "        tile = tl.program_id(0)\n        last = tl"),
        ("local = tile - first", "local = tile"),
        ("        first = last\n", ""),
        ("    first = 0\n", ""),
    ],
    "ends in 64 bits": [("tl.load(ends_ptr + g)", "tl.load(ends_ptr + g).to(tl.int64)")],
    "a program's number in 64 bits": [("tl.program_id(0)", "tl.program_id(0).to(tl.int64)")],
    "groups known when compiled": [
        ("y_ptr, G, N, K,\n    PROGRAMS", "y_ptr, N, K,\n    G: tl.constexpr, PROGRAMS"),
        ("ends, y, G, N, K, PROGRAMS", "ends, y, N, K, G=G, PROGRAMS"),
        ("in range(G)", "in tl.static_range(G)"),
    ],
    "an activation, of what is stored": [("            tl.store(\n", "            acc = tl.sigmoid(acc)\n            tl.store(\n")],
    "what a tile is decides": [
        ("            acc = tl.zeros", "            scale = 1.0\n            if local % tiles_n == g:\n                scale = 2.0\n            acc = tl.zeros"),
        ("            tl.store(\n", "            acc = acc * scale\n            tl.store(\n"),
    ],
    "both ends of a group loaded": [
        ("end = tl.load(ends_ptr + g)\n", "begin = tl.load(ends_ptr + g)\n        end = tl.load(ends_ptr + g + 1)\n"),
        ("        begin = end\n", ""),
        ("    begin = 0\n", ""),
        ("    ends = torch.tensor(rows,", "    ends = torch.tensor([0, *rows],"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_other_ways_to_walk__are_the_same(changed, name: str) -> None:
    file = changed(*SAME[name])
    result = draft(file, DIMS)
    assert result["report"]["atomics"] == 0, result["report"]["lines"]
    assert_right(file, result, CASES)


BIAS = [
    (
        "    return x, w,",
        "    b = torch.randn(len(rows), n, device=device, dtype=dtype)\n    return x, w, b,",
    ),
    ("w_ptr, ends_ptr,", "w_ptr, b_ptr, ends_ptr,"),
    ("def tiles(x, w,", "def tiles(x, w, b,"),
    ("(x, w, ends, y, G", "(x, w, b, ends, y, G"),
    ("grad=(0, 1)", "grad=(0, 1, 2)"),
]


def test_gradient_without_products__has_owners_too(changed) -> None:
    added = "acc += tl.load(b_ptr + g * N + cols, mask=cols < N, other=0.0)[None, :]"
    file = changed(*BIAS, ("            tl.store(\n", f"            {added}\n            tl.store(\n"))
    result = draft(file, DIMS)
    assert result["report"]["atomics"] == 0
    assert_right(file, result, CASES)


def test_gradient_of_a_group_as_a_whole__stays_with_the_programs_that_walk(changed) -> None:
    file = changed(
        *BIAS,
        ("        end = tl.load(ends_ptr + g)\n", "        end = tl.load(ends_ptr + g)\n        scale = tl.load(b_ptr + g)\n"),
        ("            tl.store(\n", "            acc = acc * scale\n            tl.store(\n"),
    )  # fmt: skip
    result = draft(file, DIMS)
    assert (result["report"]["atomics"], result["report"]["atomics_naive"]) == (1, 3)
    assert "tl.atomic_add(d_b_ptr" in result["backward"]
    assert_right(file, result, CASES)


def test_programs_along_another_axis__are_summed_over(changed) -> None:
    """Two inputs share the weights; their rows are not known to be apart, so that those stay atomic."""
    file = changed(
        ("sum(rows) + 2, k,", "2, sum(rows) + 2, k,"),
        ("    first = 0\n", "    first = 0\n    x_ptr += tl.program_id(1) * stride\n    y_ptr += tl.program_id(1) * (stride // K * N)\n"),
        ("y_ptr, G, N, K,\n", "y_ptr, G, N, K, stride,\n"),
        ("(x.shape[0], N)", "(2, x.shape[1], N)"),
        ("[(programs,)](x, w, ends, y, G, N, K,", "[(programs, 2)](x, w, ends, y, G, N, K, x.stride(0),"),
    )  # fmt: skip
    result = draft(file, DIMS)
    assert result["report"]["atomics"] == 1 and "tl.atomic_add(d_x_ptr" in result["backward"]
    assert_right(file, result, CASES)


NOT = {
    "steps of another number": [("PROGRAMS=programs,", "PROGRAMS=2 * programs,")],
    "more programs than steps": [("tiles_kernel[(programs,)]", "tiles_kernel[(2 * programs,)]")],
    "pairs of programs": [("tile = tl.program_id(0)", "tile = tl.program_id(0) // 2")],
    "tiles left out": [("PROGRAMS=programs,", "PROGRAMS=programs + 1,")],
    "a group begins before the last one ends": [("        first = last\n", "        first = last - 1\n")],
    "the first tile is not the program's": [("tile = tl.program_id(0)", "tile = tl.program_id(0) + 1")],
    "the first group begins later": [("    first = 0\n", "    first = 1\n")],
    "a program leaves groups out": [("for g in range(G)", "for g in range(tl.program_id(0) % 2, G)")],
}  # fmt: skip


WHOLE = ("steps of another number", "tiles left out", "the first tile is not the program's")


@pytest.mark.parametrize("name", NOT)
def test_what_is_no_queue__is_added_atomically(changed, name: str) -> None:
    file = changed(*NOT[name])
    result = draft(file, DIMS)
    assert result["report"]["atomics"] == 2
    assert "walked(" not in result["backward"]
    if name in WHOLE:  # in others programs store one tile twice
        assert_right(file, result, [case for case in CASES if sum(case[0]["ROWS"])])


def test_ends_that_fall__have_no_gradient(changed) -> None:
    """Groups after the one that has less than no rows are not computed: NaN in place of what is not known."""
    file = changed(
        ("    return x, w, ends,", "    ends = ends[torch.tensor(dims.get('ORDER', range(len(rows))))]\n    return x, w, ends,")
    )  # fmt: skip
    result = draft(file, DIMS)
    assert result["report"]["atomics"] == 0
    fallen = [({**DIMS, "ORDER": order}, "normal") for order in ([0, 2, 1, 3], [0, 1, 2, 3])]
    for wrong, right in errors(file, result["backward"], fallen).values():
        assert wrong != wrong and right < 1e-5
    below = changed(("    begin = 0\n", "    begin = 3\n"))
    result = draft(below, DIMS)
    assert "= order_of(ends_ptr, 3)" in result["backward"]
    for wrong, right in errors(
        below, result["backward"], [({**DIMS, "ROWS": [2, 9]}, "normal"), (DIMS, "normal")]
    ).values():
        assert wrong != wrong and right < 1e-5


def test_tiles_that_a_call_leaves_out__are_refused(changed) -> None:
    file = changed(("PROGRAMS=programs,", "PROGRAMS=max(programs, 2),"))
    result = draft(file, DIMS)
    assert result["report"]["atomics"] == 0
    with pytest.raises(AssertionError, match="some are left out"):
        errors(file, result["backward"], [({**DIMS, "P": 1}, "normal")])


BRANCH = "if local % tiles_n == 0:\n                acc = acc * 2"
OWN = {"BM": 32, "BN": 64, "BK": 16}


def test_blocks__may_be_the_backwards_own(changed) -> None:
    file = changed()
    wide = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
    offered = draft(file, DIMS, dtype="float16")["report"]["configs"]
    assert offered[:2] == [{**wide, "apart": 1}, {**wide, "apart": 0}]
    for config in (OWN, {"BM": 16, "BN": 32, "BK": 64}):
        result = draft(file, DIMS, config=config)
        values = ", ".join(map(str, config.values()))
        assert f"BM, BN, BK = {values}  # blocks of the backward's own" in result["backward"]
        assert result["report"]["atomics"] == 0
        assert_right(file, result, CASES)


@pytest.mark.parametrize(
    "edit",
    [
        ("mask=(rows[:, None] < end) & (cols[", "mask=(rows[:, None] < end - 1) & (cols["),
        ("            tl.store(\n", "            acc = acc * BN\n            tl.store(\n"),
        ("            tl.store(\n", "            acc = acc * (local % tiles_n)\n            tl.store(\n"),
        ("            tl.store(\n", f"            {BRANCH}\n            tl.store(\n"),
        ("            tl.store(\n", "            acc = tl.trans(acc)\n            tl.store(\n"),
    ],
    ids=[
        "rows of another end", "a block's size", "a tile's number", "a branch by a tile's number",
        "tiles turned around",
    ],
)  # fmt: skip
def test_blocks_that_results_hang_on__stay(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    assert not any("BM" in config for config in draft(file, DIMS)["report"]["configs"])
    result = draft(file, DIMS, config=OWN)
    assert "of the backward's own" not in result["backward"]
    assert_right(file, result, CASES[:1])


PERSISTENT = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 70, "N": 50, "K": 40, "P": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    m, n, k = (dims[name] for name in ("M", "N", "K"))
    return *(torch.randn(s, device=device, dtype=dtype) for s in ((m, k), (k, n))), dims["P"]


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    in_group = GROUP * tiles_n
    for tile in range(tl.program_id(0), tiles_m * tiles_n, P):
        first_m = (tile // in_group) * GROUP
        height = min(tiles_m - first_m, GROUP)
        row = first_m + (tile % in_group) % height
        column = (tile % in_group) // height
        rows = row * BM + tl.arange(0, BM)
        cols = column * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            inner = k + tl.arange(0, BK)
            a_mask = (rows[:, None] < M) & (inner[None, :] < K)
            b_mask = (inner[:, None] < K) & (cols[None, :] < N)
            a = tl.load(a_ptr + rows[:, None] * K + inner[None, :], mask=a_mask, other=0.0)
            b = tl.load(b_ptr + inner[:, None] * N + cols[None, :], mask=b_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        c_mask = (rows[:, None] < M) & (cols[None, :] < N)
        tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=c_mask)


@autodiff(inputs_require_grad=(0, 1))
def product(a, b, programs):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = (min(programs, triton.cdiv(M, 16) * triton.cdiv(N, 16)),)
    product_kernel[grid](a, b, c, M, N, K, P=programs, BM=16, BN=16, BK=16, GROUP=2)
    return c
"""
SWIZZLE = PERSISTENT[PERSISTENT.index("        first_m =") : PERSISTENT.index("        rows = row")]
PRODUCTS = [
    ({"M": m, "N": n, "K": k, "P": p}, "normal")
    for m, n, k, p in ((70, 50, 40, 3), (17, 3, 20, 9), (80, 33, 5, 2))
]


@pytest.fixture
def persistent(tmp_path: Path):
    return edits_of(PERSISTENT, tmp_path / "product.py")


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("config", [None, OWN])
def test_a_queue_without_groups(persistent, swizzled: bool, config: dict[str, int] | None) -> None:
    rows = "        row = tile // tiles_n\n        column = tile % tiles_n\n"
    file = persistent(*[] if swizzled else [(SWIZZLE, rows)])
    result = draft(file, {"M": 70, "N": 50, "K": 40, "P": 3}, config=config)
    assert result["report"]["atomics"] == 0
    assert ("BM, BN, BK = 32, 64, 16  # blocks of the backward's own" in result["backward"]) == bool(config)
    assert_right(file, result, PRODUCTS)


def test_blocks_of_each_kernel_that_owns_tiles__are_wide_where_the_host_knows_the_axis(
    changed, persistent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a group end where data says, and those of a matrix where an argument does."""
    config = {**OWN, "apart": 1}
    monkeypatch.setattr(steps, "FILLED", 2)
    sizes = {
        changed: (DIMS, "128, 64, 128", "64, 256, 128", CASES),
        persistent: ({"M": 70, "N": 50, "K": 40, "P": 3}, "256, 64, 128", "64, 256, 128", PRODUCTS),
    }
    for made, (dims, of_rows, of_columns, cases) in sizes.items():
        file = made()
        result = draft(file, dims, config=config, dtype="float16")
        for values in (of_rows, of_columns):
            assert f"BM, BN, BK = {values}\n" in result["backward"].replace(
                "  # tiles of this kernel's own", ""
            )
        assert result["report"]["atomics"] == 0
        assert_right(file, result, cases)


def test_fewer_programs_than_tiles__are_refused_in_the_forwards_tiles(persistent) -> None:
    """Tiles that the forward leaves out have no gradient, whatever tiles the backward has."""
    file = persistent(("grid = (min(programs, ", "grid = (min(programs - (M == 80), "))
    result = draft(file, {"M": 70, "N": 50, "K": 40, "P": 3}, config={"BM": 128, "BN": 128, "BK": 16})
    assert "walked(*ctx.queue)" in result["backward"]
    with pytest.raises(AssertionError, match="some are left out"):
        errors(file, result["backward"], PRODUCTS[2:])


def test_programs_that_still_walk__keep_the_forwards_tiles(persistent) -> None:
    file = persistent()
    result = draft(file, {"M": 70, "N": 50, "K": 40, "P": 3}, config=OWN, schedule="atomic")
    assert result["report"]["atomics"] == 2
    assert "of the backward's own" not in result["backward"]
    assert_right(file, result, PRODUCTS)
