"""Numbers of every step that the forward's copy tapes, so that the backward does not run the loop again."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 5, "E": 40, "K": 3}, {"T": 3, "E": 21, "K": 6}]


@triton.jit
def place_of(left):
    return tl.argmax(left, axis=0)


@triton.jit
def greatest_kernel(z_ptr, g_ptr, w_ptr, E, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * E + lanes, mask=lanes < E, other=-1e30).to(tl.float32)
    left = z
    for j in range(K):
        place = tl.argmax(left, axis=0)
        tl.store(w_ptr + row * K + j, tl.exp(tl.max(left, axis=0) * tl.max(left, axis=0) * 0.1))
        left = tl.where(lanes == place, -1e30, left)


@autodiff(inputs_require_grad=(0, 1))
def greatest(z, g, k):
    z, g = z.contiguous(), g.contiguous()
    T, E = z.shape
    w = torch.empty((T, k), device=z.device, dtype=z.dtype)
    greatest_kernel[(T,)](z, g, w, E, k, BLOCK=triton.next_power_of_2(E))
    return w


def make_args(dims, device="cuda", dtype=torch.float32):
    z = torch.randn(dims["T"], dims["E"], device=device, dtype=dtype)
    return z, torch.rand(dims["E"], device=device, dtype=dtype) + 0.5, dims["K"]
"""
DIMS = [
    {"T": 5, "E": 40, "K": 3},
    {"T": 3, "E": 21, "K": 6},
    {"T": 2, "E": 7, "K": 1},
    {"T": 1, "E": 5, "K": 5},
]
STORED = "tl.store(w_ptr + row * K + j, tl.exp(tl.max(left, axis=0) * tl.max(left, axis=0) * 0.1))"
PLACE = "place = tl.argmax(left, axis=0)"
NEXT = "left = tl.where(lanes == place, -1e30, left)"
LOOP = f"    for j in range(K):\n        {PLACE}\n        {STORED}\n        {NEXT}\n"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(SOURCE, tmp_path / "greatest.py")


def kernels(result: dict) -> tuple[str, str]:
    """The main kernel of the backward, and the forward's copy, "" where there is none."""
    main, _, rest = result["backward"].partition("\ndef laid_out")[0].partition("_saving(")
    return main, rest


def taped(result: dict) -> list[str]:
    """The tapes that the forward's copy stores."""
    lines = (line.strip() for line in kernels(result)[1].splitlines())
    return sorted(
        line.split()[0].removeprefix("tl.store(") for line in lines if line.startswith("tl.store(tape_")
    )


def is_saved(result: dict) -> bool:
    main, copy = kernels(result)
    assert ("tl.store(tape_" in main) is not ("tl.store(tape_" in copy), main + copy
    return not ("tl.store(tape_" in main or "debug_barrier" in main)


def check(file: Path, saved: bool, dims: list[dict] = DIMS, **options) -> dict:
    result = draft(file, dims[0], **options)
    assert is_saved(result) is saved, result["backward"]
    assert_right(file, result, [(one, layout) for one in dims for layout in ("normal", "slice")])
    return result


def test_numbers__are_stored_in_each_step_of_the_forward(changed) -> None:
    result = check(changed(), True)
    main, _ = kernels(result)
    assert taped(result) == ["tape_left_max", "tape_place"]
    assert (
        main.count(" in range(K)") == 1
        and "argmax" not in main
        and "z_ptr +" not in main.replace("d_z_ptr", "")
    )
    assert result["report"]["tape_bytes"] == DIMS[0]["T"] * DIMS[0]["K"] * 8
    reasons = [line["reason"] for line in result["report"]["lines"] if line["class"] == "saved"]
    assert len(reasons) == 1 and "`left`" in reasons[0] and "the forward saves a tape of those" in reasons[0]
    assert not [line for line in result["report"]["lines"] if line["class"] == "tape"]


def test_lines__are_no_longer_than_others(changed) -> None:
    _, copy = kernels(check(changed(), True))
    own = [line for line in copy.splitlines() if "tape_" in line]
    assert own and max(map(len, own)) <= 110


DATASET = {
    "moe_grouped_gemm/moe_topk_softmax_renorm_router": (
        [{"T": 37, "E": 12, "k": 2}, {"T": 5, "E": 33, "k": 7}],
        3,
        ["tape_left_max", "tape_winner"],
    ),
    "moe_grouped_gemm/moe_sigmoid_bias_router": (
        [{"T": 30, "E": 16, "K": 4}, {"T": 7, "E": 21, "K": 3}],
        1,
        ["tape_first"],
    ),
    "moe_grouped_gemm/moe_router_linear_sparse_backward": (
        [{"T": 37, "D": 40, "E": 11, "K": 3}, {"T": 5, "D": 70, "E": 20, "K": 2}],
        2,
        ["tape_first"],
    ),
    "linalg_solver/mvn_log_density_from_factor": (
        [{"B": 7, "n": 12}, {"B": 3, "n": 33}],
        1,
        ["tape_value"],
    ),
}


@pytest.mark.parametrize(
    ("name", "dims", "loops", "buffers"), [(name, *rest) for name, rest in DATASET.items()], ids=DATASET
)
def test_forwards_of_the_dataset__leave_the_backward_no_loop_to_run_again(
    tmp_path: Path, name: str, dims: list[dict], loops: int, buffers: list[str]
) -> None:
    file = tmp_path / "f.py"
    file.write_text((ROOT / f"dataset/{name}.py").read_text().split(MARKER)[0])
    result = check(file, True, dims)
    main = kernels(result)[0].split("@triton.jit\ndef router_kernel_bwd_")[0]
    assert taped(result) == buffers
    assert main.count("\n    for ") == loops and "tl.max(left" not in main


def test_numbers_as_many_as_the_tensors__are_not_kept(tmp_path: Path) -> None:
    """Rows of a factor: of every step one, as many as the matrix has."""
    file = tmp_path / "f.py"
    file.write_text((ROOT / "dataset/linalg_solver/cholesky_small_batch.py").read_text().split(MARKER)[0])
    result = draft(file, {"Bt": 7, "n": 12})
    assert not is_saved(result)


@pytest.mark.parametrize(("k", "saved"), [(13, True), (14, False)])
def test_bytes__are_half_of_those_of_the_launch_at_most(changed, k: int, saved: bool) -> None:
    """8 a step, of 4 for each of 40 elements of a row and each of k results."""
    assert is_saved(draft(changed(), {"T": 1000, "E": 40, "K": k})) is saved


def deeper(text: str) -> str:
    """Lines of a kernel, one block further in."""
    return "".join(f"    {line}\n" for line in text.splitlines())


TWICE = ("torch.empty((T, k)", "torch.zeros((T, 2 * k)")
# Each number is stored a second time, in the scale of all.
LEAVES = [
    TWICE,
    ("    left = z\n", "    left = z\n    slot = tl.arange(0, 8)\n    kept = tl.zeros([8], tl.float32)\n"),
    (STORED, f"{STORED.replace('K + j', '2 * K + j')}\n        kept = tl.where(slot == j, tl.sin(tl.max(left, axis=0)), kept)"),
    (NEXT, f"{NEXT}\n    tl.store(w_ptr + row * 2 * K + K + slot, kept * kept * tl.sum(kept, axis=0), mask=slot < K)"),
]  # fmt: skip
APART = {
    "a loop in a branch": [(LOOP, "    if E > 3:\n" + deeper(LOOP))],
    "a loop in a loop": [
        TWICE,
        ("    left = z\n", ""),
        (LOOP, "    for turn in range(2):\n        left = z + turn\n" + deeper(LOOP).replace("K + j", "2 * K + turn * K + j")),
    ],
    "a loop that begins at one": [("range(K)", "range(1, K + 1)"), ("row * K + j,", "row * K + j - 1,")],
    "a loop that goes down": [("range(K)", "range(K - 1, -1, -1)")],
    "a loop by twos": [("range(K)", "range(0, 2 * K, 2)"), ("row * K + j,", "row * K + j // 2,")],
    "a while loop": [
        ("for j in range(K):", "j = 0\n    while j < K:"),
        (NEXT, f"{NEXT}\n        j += 1"),
    ],
    "a step of its own at the end": [
        ("torch.empty((T, k)", "torch.empty((T, k + 1)"),
        ("row * K + j,", "row * (K + 1) + j,"),
        (NEXT, f"{NEXT}\n        if j == K - 1:\n            tl.store(w_ptr + row * (K + 1) + K, tl.sum(tl.sin(left), axis=0))"),
    ],
    "a condition": [(PLACE, "place = tl.argmax(left, axis=0) if BLOCK > 2 else 0")],
    "a statement in a branch": [(STORED, f"if j < 30000:\n            {STORED}")],
    "two statements in a line": [(PLACE, f"{PLACE}; other = row + 1")],
    "a variable that the loop changes": [(NEXT, f"{NEXT}\n        j = j + 1")],
    "a name of its own": [(PLACE, f"{PLACE}\n        tape_steps = 1")],
    "a maximum and its place in one call": [(PLACE, "m, place = tl.max(left, axis=0, return_indices=True)")],
    "a carry that is taped whole": [
        ("    left = z\n", "    left = z\n    sums = z * 0.0\n"),
        (NEXT, f"{NEXT}\n        sums = sums * sums * 0.1 + tl.exp(left * 0.1)"),
        ("* 0.1))\n", "* 0.1) + tl.sum(tl.sin(sums), axis=0))\n"),
    ],
    "what the loop leaves, in no variable at the end": [*LEAVES, ("mask=slot < K)", "mask=slot < K)\n    kept = kept * 2.0")],
    "blocks that the forward chooses": [
        ("@triton.jit\ndef greatest", "@triton.autotune([triton.Config({'BLOCK': b}) for b in (64, 128)], key=['E'])\n@triton.jit\ndef greatest"),
        (", BLOCK=triton.next_power_of_2(E)", ""),
    ],
}  # fmt: skip


@pytest.mark.parametrize("edits", APART.values(), ids=APART)
def test_what_the_copy_cannot_store_in_each_step__is_taped_by_the_backward(edits: list, changed) -> None:
    check(changed(*edits), False)


# A block of two axes that the loop leaves, and a row of it that is saved as well.
BLOCK_LEFT = [
    TWICE,
    ("    left = z\n", "    left = z\n    s = tl.arange(0, 8)\n    a = tl.zeros([8, 1], tl.float32)\n    a_rows = tl.zeros([8], tl.float32)\n"),
    (STORED, f"{STORED.replace('K + j', '2 * K + j')}\n        m = tl.sin(tl.max(left, axis=0))\n        a = tl.where(s[:, None] == j, m, a)\n        a_rows = tl.where(s == j, m * 2.0, a_rows)"),
    (NEXT, f"{NEXT}\n    tl.store(w_ptr + row * 2 * K + K + s, a_rows * a_rows * tl.sum(tl.sum(a * a, axis=0), axis=0), mask=s < K)"),
]  # fmt: skip
SAVED = {
    "a helper": [(PLACE, "place = place_of(left)")],
    "a range from zero": [("range(K)", "range(0, K, 1)")],
    "no variable": [(f"{PLACE}\n        ", ""), ("lanes == place", "lanes == tl.argmax(left, axis=0)")],
    "a statement of several lines": [(PLACE, "place = tl.argmax(\n            left,  # of the rest\n            axis=0,\n        )")],
    "a place of another type": [(PLACE, "place = tl.argmax(left, axis=0).to(tl.int64)")],
    "a docstring and a return": [
        ("    row = tl.program_id(0)", '    \"\"\"The greatest.\"\"\"\n    row = tl.program_id(0)'),
        (NEXT, f"{NEXT}\n    return"),
    ],
    "two axes of programs": [
        ("greatest_kernel[(T,)]", "greatest_kernel[(1 + T // 3, 3)]"),
        ("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0).to(tl.int64) * 3 + tl.program_id(1)"),
        ("mask=lanes < E", "mask=(lanes < E) & (row < T)"),
        ("axis=0) * 0.1))\n", "axis=0) * 0.1), mask=row < T)\n"),
        ("E, K, BLOCK: tl", "T, E, K, BLOCK: tl"),
        ("w, E, k,", "w, T, E, k,"),
    ],
    "names that are taken": [(PLACE, f"{PLACE}\n        tape_place, tape_at = 1, 2")],
    "a name that makes one of ours": [(PLACE, PLACE.replace("place", "at")), ("lanes == place", "lanes == at")],
    "another": [(PLACE, PLACE.replace("place", "steps")), ("lanes == place", "lanes == steps")],
    "a loop that is unrolled": [("E, K, BLOCK: tl", "E, K: tl.constexpr, BLOCK: tl"), ("range(K)", "tl.static_range(K)")],
    "rows of a block beside a buffer of that name": BLOCK_LEFT,
    "a loop for nothing before it": [("    left = z\n", "    left = z\n    for j in range(K):\n        row += 0\n")],
    "what the loop leaves": LEAVES,
    "a gradient that is summed over rows": [
        (
            "other=-1e30).to(tl.float32)",
            "other=-1e30).to(tl.float32) * tl.load(g_ptr + lanes, mask=lanes < E, other=1.0)",
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("edits", SAVED.values(), ids=SAVED)
def test_what_it_can_store__is_read_by_the_backward(edits: list, changed) -> None:
    check(changed(*edits), True)


TWO = [
    TWICE,
    ("row * K + j,", "row * 2 * K + j,"),
    (
        NEXT,
        f"{NEXT}\n    left = z\n    for i in range(K):\n        m = tl.max(left, axis=0)\n"
        "        tl.store(w_ptr + row * 2 * K + K + i, tl.sin(m) * m)\n"
        "        left = tl.where(lanes == tl.argmax(left, axis=0), -1e30, left)",
    ),
]
OTHER = {
    "another start": ("left = z\n", "left = z * tl.where(lanes % 2 == 0, -1.0, 1.0)\n"),
    "another next step": ("-1e30, left)", "-2.0, left)"),
    "another number": ("m = tl.max(left, axis=0)", "m = tl.sum(tl.where(lanes == tl.argmax(left, axis=0), left, 0.0), axis=0)"),
    "fewer steps": ("for i in range(K)", "for i in range(K - 1)"),
}  # fmt: skip


def test_loops_that_do_the_same__have_one_tape(changed) -> None:
    result = check(changed(*TWO), True)
    assert len(taped(result)) == 2
    assert result["report"]["tape_bytes"] == DIMS[0]["T"] * DIMS[0]["K"] * 8


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_loops_that_differ__have_tapes_of_their_own(other: tuple[str, str], changed) -> None:
    (old, new), (text, another) = TWO[-1], other
    first, second = new.split("    left = z\n")
    second = f"    left = z\n{second}"
    assert second.count(text) == 1
    edits = [*TWO[:-1], (old, first + second.replace(text, another))]
    assert len(taped(check(changed(*edits), True))) > 2


def test_steps_that_are_data__are_as_many_as_the_longest_has(changed) -> None:
    file = changed(
        ("w_ptr, E, K, BLOCK: tl", "w_ptr, n_ptr, E, K, BLOCK: tl"),
        ("range(K)", "range(tl.load(n_ptr + row))"),
        ("greatest(z, g, k):", "greatest(z, g, k, n):"),
        ("g, w, E, k", "g, w, n, E, k"),
        ("torch.empty((T, k)", "torch.zeros((T, k)"),
        (' + 0.5, dims["K"]', ' + 0.5, dims["K"], torch.arange(dims["T"], device=device, dtype=torch.int32) % dims["K"] + 1'),
    )  # fmt: skip
    result = check(file, True)
    forward = "".join(result["backward"].split("def backward(")[0].split())
    assert "tape_steps=" in forward and "1if0ingridelsemax(longest(grid" in forward, forward


@pytest.mark.parametrize("traced", ["float32", "float64"])
def test_tape__has_the_type_of_the_call(traced: str, changed) -> None:
    file = changed((".to(tl.float32)", ""))
    result = draft(file, DIMS[0], dtype=traced)
    assert is_saved(result)
    assert f"dtype=torch.promote_types(z_ptr.dtype, torch.{traced})" in result["backward"]
    cases = [(one, "normal") for one in DIMS]
    assert_right(file, result, cases)
    assert_right(file, result, cases, 1e-13 if traced == "float64" else 1e-5, "float64")


def test_blocks_of_the_backward__are_other_programs(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    name = "moe_grouped_gemm/moe_router_linear_sparse_backward"
    file.write_text((ROOT / f"dataset/{name}.py").read_text().split(MARKER)[0])
    dims = [{"T": 37, "D": 40, "E": 11, "K": 3}, {"T": 200, "D": 70, "E": 20, "K": 2}]
    check(file, False, dims, config={"BLOCK_T": 64, "BLOCK_D": 64, "num_warps": 4})


def test_flag__has_the_tapes_of_each_side_in_its_own_kernel(changed) -> None:
    file = changed(
        ("K, BLOCK: tl.constexpr", "K, n_ptr, FIRST: tl.constexpr, BLOCK: tl.constexpr"),
        (
            "    lanes = tl.arange(0, BLOCK)\n",
            "    lanes = tl.arange(0, BLOCK)\n    at = row\n    if FIRST:\n        at = tl.load(n_ptr + row)\n",
        ),
        ("z_ptr + row * E", "z_ptr + at * E"),
        ("greatest(z, g, k):", "greatest(z, g, k, n):"),
        ("g, w, E, k, ", "g, w, E, k, n, FIRST=n is not None, "),
        (
            ' + 0.5, dims["K"]',
            ' + 0.5, dims["K"], torch.zeros(dims["T"], device=device, dtype=torch.int64) if dims["T"] > 2 else None',
        ),
    )  # fmt: skip
    check(file, False)
