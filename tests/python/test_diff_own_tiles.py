"""Tiles of the backward's own: where nothing that a product of matrices stores hangs on its blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of, errors
from kernel_agent.differentiate.schedule import aligned_rows
from kernel_agent.differentiate.write import steps

MATMUL = ROOT / "examples/matmul.py"
TRACED = {"M": 70, "N": 45, "K": 50, "leaky": True}
RAGGED = [({"M": 130, "N": 33, "K": 70, "leaky": leaky}, "normal") for leaky in (True, False)]
OWN = {"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_K": 16}
CHOSEN = "of the backward's own"

SWIZZLED = """    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    first_m = (pid // tiles_in_group) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    pid_m = first_m + (pid % tiles_in_group) % group_m
    pid_n = (pid % tiles_in_group) // group_m
"""
GRID = 'triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"])'
TWO_AXES = (
    ("    pid = tl.program_id(0)\n", "    pid_m, pid_n = tl.program_id(0), tl.program_id(1)\n"),
    (SWIZZLED, ""),
    (GRID, GRID.replace(" *", ",")),
)
ROWS_OF_A = "mask=(offs_m[:, None] < M) & (offs_k[None, :] < k_left)"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(MATMUL.read_text(), tmp_path / "matmul.py", once=False)


@pytest.fixture(autouse=True)
def few_programs_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """For wide tiles of a kernel's own, so that small matrices have them; of any rows."""
    monkeypatch.setattr(steps, "FILLED", 1)
    monkeypatch.setattr(aligned_rows, "ALIGNED", 1)


def offered(result: dict) -> list[dict]:
    return [config for config in result["report"]["configs"] if "BLOCK_M" in config]


@pytest.mark.parametrize("sizes", [(32, 128, 16), (128, 16, 64), (64, 64, 64)])
def test_other_tiles_of_swizzled_programs__give_the_same_gradients(sizes: tuple[int, int, int]) -> None:
    result = draft(MATMUL, TRACED, config=dict(zip(OWN, sizes, strict=True)))
    count = f"triton.cdiv(M, {sizes[0]}) * triton.cdiv(N, {sizes[1]})"
    assert (
        f"if grid[0] == {GRID.replace('meta[', '').replace(']', '')}".replace('"', "") in result["backward"]
    )
    assert f"({count},), {', '.join(map(str, sizes))}" in result["backward"].replace("\n", "")
    assert result["report"]["atomics"] == 0
    assert_right(MATMUL, result, RAGGED)


def test_other_tiles_of_programs_along_two_axes__give_the_same_gradients(changed) -> None:
    file = changed(*TWO_AXES)
    result = draft(file, TRACED, config=OWN)
    assert "grid[0] == triton.cdiv(M, BLOCK_M) and grid[1] == triton.cdiv(N, BLOCK_N)" in result["backward"]
    assert_right(file, result, RAGGED)


ROW_BY_ROW = (
    (SWIZZLED, "    pid_m, pid_n = pid // tl.cdiv(N, BLOCK_N), pid % tl.cdiv(N, BLOCK_N)\n"),
)  # fmt: skip


def test_other_tiles_of_programs_row_by_row__give_the_same_gradients(changed) -> None:
    file = changed(*ROW_BY_ROW)
    result = draft(file, TRACED, config=OWN)
    assert CHOSEN in result["backward"]
    assert_right(file, result, RAGGED)


def test_rows_of_programs_by_another_length_than_the_masks__have_no_tiles(changed) -> None:
    ((old, new),) = ROW_BY_ROW
    file = changed((old, new.replace("cdiv(N,", "cdiv(K,")), (GRID, GRID.replace("N,", "K,")))
    dims = {"M": 70, "N": 45, "K": 45, "leaky": True}
    assert not offered(draft(file, dims))


@pytest.mark.parametrize(("dtype", "summed"), [("float16", 64), ("float32", 32)])
def test_tuner__is_offered_wide_tiles_with_stages(changed, dtype: str, summed: int) -> None:
    """As many stages have room for half of the sum in float32."""
    expected = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": summed, "num_warps": 8, "num_stages": 3}
    for file in (MATMUL, changed(*TWO_AXES)):
        apart, saved, *others = offered(draft(file, TRACED, dtype=dtype))
        assert (apart, saved) == ({**expected, "apart": 1}, {**expected, "apart": 1, "saved": 1})
        assert others[0] == {**expected, "apart": 0}
        assert all(config["apart"] == 0 for config in others)


def test_forward_with_the_likeliest_tiles__is_offered_wide_ones_for_each_kernel_too(changed) -> None:
    """Wide tiles are for sums over other axes than the forward's, whatever tiles that has."""
    file = changed(("BLOCK_M=64, BLOCK_N=64, BLOCK_K=32", "BLOCK_M=128, BLOCK_N=128, BLOCK_K=64"))
    first, *others = offered(draft(file, TRACED, dtype="float16"))
    assert first == {
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
        "num_warps": 8,
        "num_stages": 3,
        "apart": 1,
    }
    assert {**first, "apart": 0} not in others
    result = draft(file, TRACED, config=first, dtype="float16")
    assert result["backward"].count("# tiles of this kernel's own") == 2
    assert_right(file, result, [*RAGGED, *WIDE])


def test_call_of_other_programs_than_its_tiles__keeps_the_forwards_blocks(changed) -> None:
    """Rows that have no program stay zero there, and so do their gradients."""
    file = changed(
        *TWO_AXES,
        ('triton.cdiv(M, meta["BLOCK_M"]),', "triton.cdiv(M, 64) - (M > 100),"),
        ("c = torch.empty((M, N)", "c = torch.zeros((M, N)"),
    )
    result = draft(file, TRACED, config=OWN)
    assert CHOSEN in result["backward"]
    assert_right(file, result, RAGGED)


def test_traced_call_of_other_programs__has_no_tiles(changed) -> None:
    file = changed(*TWO_AXES, ('triton.cdiv(M, meta["BLOCK_M"]),', "triton.cdiv(M, 64) + 1,"))
    result = draft(file, TRACED)
    assert not offered(result)
    assert_right(file, result, RAGGED)


STORED = "acc.to(c_ptr.dtype.element_ty)"
WIDE = [({"M": 70, "N": 300, "K": 270, "leaky": leaky}, "normal") for leaky in (True, False)]


@pytest.mark.parametrize(("dtype", "wide", "summed"), [("float16", 256, 64), ("float32", 128, 32)])
@pytest.mark.parametrize("swizzled", [True, False])
def test_kernels_of_a_gradient_each__may_have_tiles_of_their_own(
    changed, swizzled: bool, dtype: str, wide: int, summed: int
) -> None:
    """Widest along the axis of the output that it owns, narrow along what it sums over."""
    file = changed() if swizzled else changed(*TWO_AXES)
    backward = draft(file, TRACED, config={**OWN, "apart": 1}, dtype=dtype)["backward"]
    axes = (
        "(triton.cdiv(M, {}) * triton.cdiv(N, {}),)"
        if swizzled
        else "(triton.cdiv(M, {}), triton.cdiv(N, {}))"
    )
    of_a, of_b = backward.split("matmul_kernel_bwd_a[")[0], backward.split("matmul_kernel_bwd_a[")[1]
    assert f"grid, BLOCK_M, BLOCK_N, BLOCK_K = {axes.format(wide, summed)}, {wide}, {summed}, 128" in of_a
    assert f"grid, BLOCK_M, BLOCK_N, BLOCK_K = {axes.format(summed, wide)}, {summed}, {wide}, 128" in of_b
    for text, length in ((of_a, "M"), (of_b, "N")):
        assert f"if ctx.tiles and triton.cdiv(K, 128) * triton.cdiv({length}, {wide}) >= 1:  # tiles" in text
    assert_right(file, {"backward": backward}, [*RAGGED, *WIDE])


def test_kernels_with_few_wide_tiles__have_the_tiles_of_all(changed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of A has one wide tile, and that of B two: what the first had ends before the second."""
    monkeypatch.setattr(steps, "FILLED", 2)
    file = changed()
    backward = draft(file, TRACED, config={**OWN, "apart": 1})["backward"]
    again = "(triton.cdiv(M, 32) * triton.cdiv(N, 128),), 32, 128, 16"
    assert f"elif ctx.tiles:\n            grid, BLOCK_M, BLOCK_N, BLOCK_K = {again}" in backward
    sizes = [(70, 300, 120), (300, 70, 120), (70, 33, 270)]
    assert_right(
        file,
        {"backward": backward},
        [({"M": m, "N": n, "K": k, "leaky": False}, "normal") for m, n, k in sizes],
    )


def test_kernels_with_tiles_of_their_own__in_a_call_of_other_programs__have_the_forwards(changed) -> None:
    file = changed(
        *TWO_AXES,
        ('triton.cdiv(M, meta["BLOCK_M"]),', "triton.cdiv(M, 64) - (M > 100),"),
        ("c = torch.empty((M, N)", "c = torch.zeros((M, N)"),
    )
    result = draft(file, TRACED, config={**OWN, "apart": 1})
    assert "ctx.tiles = grid[0] == " in result["backward"]
    assert_right(file, result, RAGGED)


@pytest.mark.parametrize("axes", [(), TWO_AXES], ids=["swizzled", "two axes"])
def test_adjoint_that_took_a_loop__is_kept_as_a_matrix_for_kernels_with_tiles_of_their_own(
    changed, axes: tuple[tuple[str, str], ...]
) -> None:
    file = changed(*axes, (STORED, "tl.where(acc > 0, acc, 0.1 * acc).to(c_ptr.dtype.element_ty)"))
    of_all, apart = (draft(file, TRACED, config={**OWN, "apart": n})["backward"] for n in (0, 1))
    assert "spill_d = torch.empty(M * N, " in apart and "spill_d = torch.empty(M * N, " not in of_all
    assert apart.count("# tiles of this kernel's own") == 2
    for backward in (of_all, apart):
        assert_right(file, {"backward": backward}, [*RAGGED, *WIDE])


SCALED = (
    ("a_ptr, b_ptr, c_ptr,", "a_ptr, b_ptr, s_ptr, c_ptr,"),
    ("    if ACT", "    acc *= tl.load(s_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]\n    if ACT"),
    ("a, b, activation=None", "a, b, s, activation=None"),
    ("        a, b, c,\n", "        a, b, s, c,\n"),
    ("c = a @ b\n", "c = a @ b * s\n"),
    ("inputs_require_grad=(0, 1)", "inputs_require_grad=(0, 1, 2)"),
    ("return (a, b), {", "return (a, b, torch.randn(dims['N'], device=device, dtype=dtype)), {"),
)


def test_kernels_that_sums_of_tiles_are_kept_for__have_the_tiles_of_all(changed) -> None:
    file = changed(*SCALED)
    result = draft(file, TRACED, config={**OWN, "apart": 1})
    host = result["backward"].split("def backward(")[1]
    assert host.count("# tiles of this kernel's own") == 2
    tiles = "(triton.cdiv(M, 32) * triton.cdiv(N, 128),), 32, 128, 16\n"
    before = host[host.index("matmul_kernel_bwd_b[") : host.index("matmul_kernel_bwd_s[")]
    assert before.endswith(f"if ctx.tiles:\n            grid, BLOCK_M, BLOCK_N, BLOCK_K = {tiles}        ")
    assert_right(file, result, [*RAGGED, *WIDE])


LISTED = """@triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 4}, num_warps=4),
        triton.Config({"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 64, "GROUP_M": 8}, num_warps=2),
    ],
    key=["M", "N", "K"],
)
"""
AUTOTUNED = (
    ("@triton.jit\ndef matmul_kernel(", f"{LISTED}@triton.jit\ndef matmul_kernel("),
    ("        BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8,\n", ""),
    ("        num_warps=4, num_stages=3,\n", ""),
)


def test_autotuned_kernel__has_tiles_of_the_backwards_own_beside_those_listed(changed) -> None:
    file = changed(*AUTOTUNED)
    result = draft(file, TRACED)
    apart, together, listed = [config for config in offered(result) if "saved" not in config][:3]
    assert (apart["apart"], together["apart"]) == (1, 0) and "GROUP_M" in listed
    for config in (apart, together, {**OWN, "apart": 1}):
        result = draft(file, TRACED, config=config)
        forward, backward = result["backward"].split("def backward(")
        assert 'BLOCK_M = MATMUL_KERNEL_CONFIG["BLOCK_M"]' in forward and CHOSEN in forward
        assert 'CONFIG["BLOCK' not in backward and 'GROUP_M=MATMUL_KERNEL_CONFIG["GROUP_M"]' in backward
        assert ("# tiles of this kernel's own" in backward) == bool(config["apart"])
        assert_right(file, result, [*RAGGED, *WIDE])
    assert CHOSEN not in draft(file, TRACED, config=listed)["backward"]


def test_autotuned_kernel__in_a_call_of_other_programs__has_a_configuration_of_the_list(changed) -> None:
    file = changed(
        *AUTOTUNED,
        *TWO_AXES,
        ('triton.cdiv(M, meta["BLOCK_M"]),', 'triton.cdiv(M, meta["BLOCK_M"]) - (M > 100),'),
        ("c = torch.empty((M, N)", "c = torch.zeros((M, N)"),
    )
    result = draft(file, TRACED, config={**OWN, "apart": 1})
    assert CHOSEN in result["backward"]
    assert_right(file, result, RAGGED)


HANGS = {
    "rows that are read without a mask": (ROWS_OF_A, "mask=offs_k[None, :] < k_left"),
    "a sum whose last block is not masked": (ROWS_OF_A, "mask=offs_m[:, None] < M"),
    "rows below another length each time": (ROWS_OF_A, ROWS_OF_A.replace("< M", "< K + M - K - 1")),
    "a block's size as a number": (STORED, "(acc * BLOCK_N).to(c_ptr.dtype.element_ty)"),
    "the number of programs": (STORED, "(acc * tl.num_programs(0)).to(c_ptr.dtype.element_ty)"),
    "the number of a tile": (STORED, "(acc * pid_m).to(c_ptr.dtype.element_ty)"),
    "the number of a row": (STORED, "(acc * offs_m[:, None]).to(c_ptr.dtype.element_ty)"),
    "a place in the block": (STORED, "(acc * tl.arange(0, BLOCK_M)[:, None]).to(c_ptr.dtype.element_ty)"),
    "a sum that each step halves": ("        a_ptrs += BLOCK_K * stride_ak\n", "        acc *= 0.5\n        a_ptrs += BLOCK_K * stride_ak\n"),
}  # fmt: skip


@pytest.mark.parametrize("edit", HANGS.values(), ids=HANGS)
def test_what_hangs_on_the_blocks__keeps_them(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    assert not offered(draft(file, TRACED))
    assert CHOSEN not in draft(file, TRACED, config=OWN)["backward"]


def test_block_that_the_loop_hangs_on__stays_while_those_of_the_output_change(changed) -> None:
    file = changed(("range(tl.cdiv(K, BLOCK_K))", "range(tl.cdiv(K, BLOCK_K) - 1)"))
    first, *_ = offered(draft(file, TRACED))
    assert set(first) == {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "apart"}
    assert "grid, BLOCK_M, BLOCK_N = " in draft(file, TRACED, config=OWN)["backward"]


def test_value_that_took_a_loop_by_a_flag_alone__is_kept_for_that_side() -> None:
    result = draft(MATMUL, TRACED)
    first, after = result["backward"].split("def matmul_kernel_bwd_a(")
    assert first.index('if ACTIVATION == "leaky_relu":') < first.index("spill_d + spill_offs")
    loaded = after.index("spill_d + spill_offs")
    assert after.index('if ACTIVATION == "leaky_relu":') < loaded < after.index("else:")
    assert_right(MATMUL, result, RAGGED)


def test_value_for_products_alone__is_kept_in_the_type_of_the_elements() -> None:
    """Those of the call: the draft was traced in another type."""
    result = draft(MATMUL, TRACED)
    assert "dtype=b_ptr.dtype" in result["backward"] and "dtype=a_ptr.dtype" in result["backward"]
    found = errors(MATMUL, result["backward"], RAGGED, "float16")
    assert all(error <= 2e-3 for of_all in found.values() for error in of_all), found


def test_value_for_products_with_two_tensors__is_kept_once_where_those_are_of_one_type() -> None:
    backward = draft(MATMUL, TRACED)["backward"]
    assert (
        "spill_d_ = spill_d\n        if a_ptr.dtype != b_ptr.dtype:\n            spill_d_ = torch.empty("
        in backward
    )


def test_value_that_is_summed_too__is_rounded_for_the_products_alone(changed) -> None:
    """d_bias sums numbers as they were computed, a tile in each program."""
    file = changed(
        ("    a_ptr, b_ptr, c_ptr,\n    M,", "    a_ptr, b_ptr, c_ptr, bias_ptr,\n    M,"),
        (
            '    if ACTIVATION == "leaky_relu":',
            "    acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]\n"
            '    if ACTIVATION == "leaky_relu":',
        ),
        ("inputs_require_grad=(0, 1)", "inputs_require_grad=(0, 1, 2)"),
        ("def matmul(a, b, activation=None)", "def matmul(a, b, bias, activation=None)"),
        ("        a, b, c,\n        M, N, K,", "        a, b, c, bias,\n        M, N, K,"),
        (
            "    return (a, b), {",
            "    bias = torch.randn(dims['N'], device=device, dtype=dtype)\n    return (a, b, bias), {",
        ),
        (
            "def reference(a, b, activation=None):\n    c = a @ b",
            "def reference(a, b, bias, activation=None):\n    c = a @ b + bias",
        ),
    )
    result = draft(file, TRACED)
    backward = result["backward"]
    assert "spill_d__ = torch.empty(grid[0] * BLOCK_N, dtype=torch.float32" in backward
    assert "(BLOCK_M * BLOCK_N), dtype=b_ptr.dtype" in backward and backward.count("torch.float32, dev") == 1
    assert re.search(r"tl\.store\(spill_d__ \+ .*, tl\.sum\(\w+, axis=0\)\)", backward)
    assert_right(file, result, RAGGED)


def test_adjoint_that_a_branch_wants_too__is_kept_so_that_all_kernels_can_read_it(changed) -> None:
    """What owns the branch's tiles reads it program by program, and has the tiles of all."""
    text = MATMUL.read_text()
    loop = text[text.index("    acc = tl.zeros(") : text.index("    if ACTIVATION")]
    again = "    if K > 0:\n" + "".join(f"    {line}\n" for line in loop.strip("\n").splitlines())
    again = again.replace("        acc = tl.zeros", "        acc += tl.zeros")
    pointers = text[text.index("    a_ptrs = ") : text.index("\n    acc = tl.zeros(")]
    file = changed(
        (loop, loop + pointers + again), (STORED, f"tl.where(acc > 0, acc, 0.1 * acc).{STORED[4:]}")
    )
    result = draft(file, TRACED, config={**OWN, "apart": 1})
    assert CHOSEN in result["backward"]
    assert_right(file, result, [*RAGGED, *WIDE])


def test_gradients_whose_names_differ_by_a_capital__have_a_kernel_each(changed) -> None:
    """The owners of a and A: a name is not used twice."""
    file = changed(("b_ptr", "A_ptr"))
    result = draft(file, TRACED)
    assert (
        "def matmul_kernel_bwd_a(" in result["backward"] and "def matmul_kernel_bwd_a_(" in result["backward"]
    )
    assert_right(file, result, RAGGED)


def test_product_of_rows_that_lie_as_they_are_multiplied__has_wide_columns(tmp_path: Path) -> None:
    """Of x W^T, W (N, K), the gradient of x sums over rows of W."""
    file = tmp_path / "linear.py"
    pair = (ROOT / "dataset/matmul_epilogue/linear_bias_db_in_dw_kernel.py").read_text()
    file.write_text(pair.partition(MARKER)[0].rstrip() + "\n")
    traced = {"M": 128, "K": 64, "N": 64}
    config = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3, "apart": 1}
    result = draft(file, traced, config=config, dtype="bfloat16")
    chosen = re.findall(r"BLOCK_M, BLOCK_N, BLOCK_K = .*, (\d+), (\d+), (\d+)\n", result["backward"])
    assert chosen[1:3] == [("128", "64", "256"), ("64", "256", "128")]
    dims = [{"M": 70, "K": 300, "N": 33}, {"M": 130, "K": 270, "N": 260}]
    assert_right(file, draft(file, traced, config=config), [(one, "normal") for one in dims])
