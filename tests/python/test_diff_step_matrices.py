"""Tiles of an adjoint that products of several gradients take, stored once as a matrix."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of
from kernel_agent.differentiate.schedule import product_tiles, step_matrices

LOSS = "dataset/loss/fused_linear_ce_two_owner_recompute.py"
TWICE = "dataset/loss/info_nce_clip_symmetric.py"
SQUARE = "dataset/loss/siglip_pairwise_sigmoid.py"
NESTED = "dataset/loss/retrieval_inbatch_hard_negatives.py"
BACKWARDS = "dataset/loss/supcon_label_mask.py"
GATHERED = "dataset/loss/sampled_softmax_gathered_rows.py"
LINEAR = "dataset/matmul_epilogue/linear_relu_mask_from_output.py"
ATTENTION = "dataset/attention/sigmoid_attn_no_normaliser.py"

MATRIX = {"matrix": 1}
# Of each: several blocks and some rows, one and a row, less than one, whole ones; rows that are not aligned.
SIZES = {
    LOSS: [
        {"M": m, "D": d, "V": v}
        for m, d, v in ((37, 24, 150), (33, 20, 65), (5, 100, 33), (129, 9, 31), (64, 16, 64))
    ],
    TWICE: [{"M": m, "D": d} for m, d in ((45, 32), (33, 20), (5, 150), (129, 7), (64, 16))],
    SQUARE: [{"M": m, "D": d} for m, d in ((45, 32), (33, 20), (5, 150), (129, 7), (64, 16))],
    NESTED: [{"M": m, "H": h, "D": d} for m, h, d in ((17, 3, 40), (33, 2, 20), (5, 1, 150), (16, 4, 7))],
}


@pytest.fixture
def forward(tmp_path: Path) -> Callable[..., Path]:
    """The forward of a pair, with edits."""

    def make(pair: str, *edits: tuple[str, str]) -> Path:
        source = (ROOT / pair).read_text().partition(MARKER)[0]
        return edits_of(source, tmp_path / Path(pair).name)(*edits)

    return make


def kernel(result: dict, name: str) -> str:
    """The text of one generated kernel, but for comments."""
    text = re.search(rf"^def {name}\(.*?(?=^@|^def |^class )", result["backward"], re.M | re.S)[0]
    return re.sub(r"#.*", "", text)


def offered(result: dict) -> list[dict]:
    return [config for config in result["report"]["configs"] if "matrix" in config]


@pytest.mark.parametrize("pair", SIZES)
@pytest.mark.parametrize("blocks", [{}, {"BLOCK": 16}, {"BLOCK": 64}, {"BLOCK": 128}])
def test_tiles_in_a_matrix__give_the_same_gradients(forward, pair: str, blocks: dict) -> None:
    file, sizes = forward(pair), SIZES[pair]
    result = draft(file, sizes[0], config=blocks | MATRIX)
    assert "tl.store(matrix_d" in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in sizes])


def test_main_kernel__has_one_product_and_each_owner_another(forward) -> None:
    """It has no sums of whole rows either."""
    result = draft(forward(TWICE), SIZES[TWICE][0], config=MATRIX)
    main, other, own = (kernel(result, f"lse_kernel_bwd{end}") for end in ("", "_other", "_own"))
    assert main.count("dot(") == 1 and "d_own" not in main
    assert "tl.store(matrix_d_tile + matrix_d_tile_offs" in main
    for owner in (other, own):
        assert owner.count("dot(") == 1 and "tl.exp" not in owner and "matrix_d" in owner
    plain = draft(forward(TWICE), SIZES[TWICE][0])
    main, other = (kernel(plain, f"lse_kernel_bwd{end}") for end in ("", "_other"))
    assert main.count("dot(") == other.count("dot(") == 2 and "d_own" in main


def test_owners__have_wide_tiles_of_their_own_where_those_are_enough(forward) -> None:
    """Some lanes of a row each, and shorter steps, whatever blocks the main kernel has; eight warps and the
    stages that Triton takes."""
    half, dims = {"dtype": "float16"}, {"M": 8192, "D": 512}
    result = draft(
        forward(TWICE), dims, config={"BLOCK": 64, "num_warps": 4, "num_stages": 2, **MATRIX}, **half
    )
    for name in ("other", "own"):
        owner = kernel(result, f"lse_kernel_bwd_{name}")
        assert "tl.zeros([128, 128], tl.float32)" in owner and "64):\n" in owner
        called = re.search(rf"lse_kernel_bwd_{name}\[.*?\n        \)", result["backward"], re.S)[0]
        assert "num_warps=8," in called and "num_stages" not in called
    assert (
        "triton.cdiv(min(grid[0] * BLOCK, M), 128) * triton.cdiv(min(BLOCK_D, D), 128)" in result["backward"]
    )


def test_tiles_of_owners__are_for_the_largest_call_of_the_sweep(forward) -> None:
    """Whichever is traced, of the smallest of which wide ones would be few."""
    config = {"BLOCK": 64, **MATRIX}
    for edits, size in (((), 128), ((('{"M": 8192, "D": 512}, {"M": 16384, "D": 256}, ', ""),), 64)):
        result = draft(forward(TWICE, *edits), {"M": 500, "D": 320}, config=config, dtype="float16")
        assert f"tl.zeros([{size}, {size}], tl.float32)" in kernel(result, "lse_kernel_bwd_own")
        warps = {64: 4, 128: 8}[size]
        assert result["backward"].count(f"num_warps={warps}") == 4  # two launches, each with two owners
        assert all(len(line) <= 110 for line in result["backward"].splitlines() if '"""' not in line)


@pytest.mark.parametrize("pair, name", [(LOSS, "linear_ce"), (TWICE, "lse"), (NESTED, "inbatch")])
@pytest.mark.parametrize("shares", [None, 8])
def test_steps_of_the_main_kernel__are_shared_out(forward, pair: str, name: str, shares: int | None) -> None:
    """There are programs enough whatever the rows are; what they add atomically, they add in parts."""
    file, sizes = forward(pair), SIZES[pair]
    asked = MATRIX if shares is None else {"shares": shares, **MATRIX}
    result = draft(file, sizes[0], config=asked)
    assert f"{name}_kernel_bwd[(grid[0], splits)](" in result["backward"]
    assert f"splits = max({shares or 512} // max(grid[0], 1), 1)" in result["backward"]
    assert "range(tl.program_id(1) * BLOCK, " in kernel(result, f"{name}_kernel_bwd")
    assert_right(file, result, [(dims, "normal") for dims in sizes])


@pytest.mark.parametrize("pair, z, total", [(LOSS, "z", "z_target"), (NESTED, "s", "right")])
def test_tiles_that_hang_on_earlier_steps__are_stored_by_one_program(forward, pair, z, total) -> None:
    """The products are no longer of what the loop carries; its steps cannot be shared out."""
    zeros = f"    {total} = tl.zeros([BLOCK]"
    counted = f"        {z} = {z} * (1 + 0.1 * step[:, None])\n        step += 1.0\n        {total} += "
    edits = (
        (zeros, f"    step = tl.zeros([BLOCK], dtype=tl.float32)\n{zeros}"),
        (f"        {total} += ", counted),
    )
    file, sizes = forward(pair, *edits), SIZES[pair]
    assert draft(file, sizes[0])["report"]["atomics"] > 0
    result = draft(file, sizes[0], config=MATRIX)
    assert result["report"]["atomics"] == 0 and "splits" not in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in sizes])


@pytest.mark.parametrize("pair", SIZES)
def test_wide_tiles__give_the_same_gradients(forward, monkeypatch, pair: str) -> None:
    monkeypatch.setattr(product_tiles, "PROGRAMS", 1)
    file, sizes = forward(pair), SIZES[pair]
    result = draft(file, sizes[0], config=MATRIX)
    assert "tl.zeros([128, 128], tl.float32)" in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in sizes])


def test_matrix__holds_what_each_product_takes_and_is_reported(forward) -> None:
    result = draft(forward(TWICE), SIZES[TWICE][0], dtype="float16", config=MATRIX)
    assert "dtype=torch.promote_types(" in re.sub(r"\s", "", result["backward"])
    told = "`matrix_d_tile`: stored once for products of several gradients: 8.00 KiB of scratch"
    assert f": {told}" in result["backward"]
    assert told in [line["reason"] for line in result["report"]["lines"]]


def test_loops_around_products__are_tiles_of_the_owners(forward) -> None:
    """Without the matrix both gradients are added to atomically, as their value comes out of a loop."""
    file, dims = forward(NESTED), SIZES[NESTED][0]
    assert draft(file, dims)["report"]["atomics"] == 2
    result = draft(file, dims, config=MATRIX)
    assert result["report"]["atomics"] == 0 and "atomic" not in kernel(result, "inbatch_kernel_bwd_c")


def test_tile_of_a_program__is_stored_once_for_both_sides(forward) -> None:
    """Without the matrix it is stored for each of them, in the programs' blocks."""
    file, dims = forward(SQUARE), SIZES[SQUARE][0]
    plain, result = draft(file, dims), draft(file, dims, config=MATRIX)
    assert kernel(plain, "pair_kernel_bwd").count("tl.store(") == 2
    assert kernel(result, "pair_kernel_bwd").count("tl.store(") == 1
    assert "matrix_d_q" in kernel(result, "pair_kernel_bwd_a") and "matrix_d_q" in kernel(
        result, "pair_kernel_bwd_b"
    )
    assert offered(plain) == [MATRIX]


def test_tuner__is_offered_the_matrix_with_blocks_that_fit_without_sums(forward) -> None:
    """First where rows are wide, without atomic adds beside it, in what rows of all of SWEEP leave room for;
    else last."""
    half = {"dtype": "float16"}
    narrow = {"BLOCK": 64, "num_warps": 8, "num_stages": 2, **MATRIX}
    for dims in ({"M": 8192, "D": 512}, {"M": 16384, "D": 256}, {"M": 8192, "D": 128}):  # SWEEP has 512
        report = draft(forward(TWICE), dims, **half)["report"]
        assert report["configs"][:2] == [narrow, MATRIX] and report["alternatives"] == ["owner"]
    last = {"BLOCK": 128, "num_warps": 8, **MATRIX}
    configs = draft(forward(LOSS), {"M": 4096, "D": 128, "V": 65536}, **half)["report"]["configs"]
    assert configs[-1] == last and len(configs) <= 8 and not any("matrix" in c for c in configs[:-1])
    assert offered(draft(forward(NESTED), SIZES[NESTED][0])) == [MATRIX]


def test_matrix_beyond_the_bound__is_not_offered(forward, monkeypatch) -> None:
    file, dims = forward(TWICE), {"M": 64, "D": 16}
    monkeypatch.setattr(step_matrices, "MOST", 64 * 64 * 4)
    assert offered(draft(file, dims))
    monkeypatch.setattr(step_matrices, "MOST", 64 * 64 * 4 - 1)
    assert not offered(draft(file, dims))


@pytest.mark.parametrize(
    "pair, edits, dims",
    [
        (LOSS, [("inputs_require_grad=(0, 1)", "inputs_require_grad=(0,)")], SIZES[LOSS][0]),
        (BACKWARDS, [], {"M": 33, "D": 20}),
        (GATHERED, [], {"M": 37, "S": 33, "V": 90, "D": 20}),
        (LINEAR, [], {"M": 33, "K": 20, "N": 40}),
        (ATTENTION, [], {"B": 1, "H": 2, "N": 33, "D": 16}),
    ],
    ids=[
        "one gradient",
        "a loop that runs backwards",
        "rows that data names",
        "tiles of own",
        "tiles of several programs",
    ],
)
def test_others__are_neither_offered_a_matrix_nor_changed_by_it(forward, pair, edits, dims) -> None:
    file = forward(pair, *edits)
    plain, asked = draft(file, dims), draft(file, dims, config=MATRIX)
    assert not offered(plain) and asked["backward"] == plain["backward"]
