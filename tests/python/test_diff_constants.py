"""Small integers that a backward kernel is compiled for: which are, how loops over them are written, and that
any value is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of, errors, pair_text
from kernel_agent import compiled
from kernel_agent.differentiate.offers import offer_constants
from kernel_agent.differentiate.pipeline import Draft
from kernel_agent.differentiate.schedule import tuning
from kernel_agent.operations import facts

HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


"""
POOL = (
    HEAD
    + """@triton.jit
def pool_kernel(x_ptr, y_ptr, n_out, Y, X, OY, OX, k, stride, pad, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    plane = o // (OY * OX)
    y0 = o // OX % OY * stride - pad
    x0 = o % OX * stride - pad
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(k):
        for j in range(k):
            y, x = y0 + i, x0 + j
            mask = (o < n_out) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
            acc += tl.load(x_ptr + (plane * Y + y) * X + x, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + o, acc, mask=o < n_out)


@autodiff(inputs_require_grad=(0,))
def pool(x, k, stride):
    N, Y, X = x.shape
    pad = k // 2
    OY, OX = (Y + 2 * pad - k) // stride + 1, (X + 2 * pad - k) // stride + 1
    y = torch.empty((N, OY, OX), device=x.device, dtype=x.dtype)
    pool_kernel[(triton.cdiv(y.numel(), 32),)](x, y, y.numel(), Y, X, OY, OX, k, stride, pad, BLOCK=32)
    return y


SWEEP = [{"N": 3, "Y": 41, "X": 50, "k": 3, "s": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["N"], dims["Y"], dims["X"], device=device, dtype=dtype), dims["k"], dims["s"]
"""
)
DIMS = {"N": 3, "Y": 41, "X": 50, "k": 3, "s": 2}
SIZES = [
    DIMS,
    {"N": 2, "Y": 11, "X": 7, "k": 5, "s": 2},
    {"N": 1, "Y": 8, "X": 13, "k": 2, "s": 3},
    {"N": 2, "Y": 6, "X": 5, "k": 3, "s": 1},
    {"N": 1, "Y": 10, "X": 10, "k": 1, "s": 4},
    {"N": 1, "Y": 23, "X": 21, "k": 19, "s": 17},
    {"N": 1, "Y": 0, "X": 4, "k": 2, "s": 2},
]
CASES = [(dims, "normal") for dims in SIZES]
CONSTANTS = {"constants": 1}


@pytest.fixture
def pool(tmp_path: Path):
    return edits_of(POOL, tmp_path / "pool.py")


def kernels(file: Path, backward: str, dims: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels of the backward as Triton's front end takes them for a GPU."""
    pair = file.with_name(f"{file.stem}_pair.py")
    pair.write_text(pair_text(file.read_text(), backward))
    case = {"id": 0, "dims": dims, "seed": 3, "upstream": {"kind": "normal", "seed": 4}}
    compiled.use(None)
    found = facts.run({"file": str(pair), "target": "sm_90", "compile": True, "cases": [case]}, file.parent)
    compiled.leave(file.parent)
    return [kernel for case in found["cases"] for kernel in case["kernels"]]


def assert_compiles(file: Path, backward: str, dims: dict[str, Any]) -> None:
    made = kernels(file, backward, dims)
    wrong = [kernel["error"] for kernel in made if "error" in kernel]
    assert made and not wrong, f"{wrong}\n{backward}"


def asked(file: Path, dims: dict[str, Any] = DIMS, **options: Any) -> str:
    return draft(file, dims, config=CONSTANTS, **options)["backward"]


def offered(result: dict[str, Any]) -> bool:
    return any(config.get("constants") for config in result["report"]["configs"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_window__is_compiled_for_its_size_and_stride(pool, dtype: str) -> None:
    file = pool()
    plain, result = draft(file, DIMS, dtype=dtype), draft(file, DIMS, dtype=dtype, config=CONSTANTS)
    text = result["backward"]
    assert offered(plain) and not offered(result)
    assert "_const" not in plain["backward"]
    assert "k_const: tl.constexpr, stride_const: tl.constexpr" in re.sub(r"\s+", " ", text)
    assert "X_const" not in text and "OY_const" not in text and "pad_const" not in text
    assert "k_const=k, stride_const=stride" in re.sub(r"\s+", " ", text)
    loop = "for nth_{0}_const in tl.static_range((k_const + stride_const - 1) // stride_const):"
    assert loop.format("i") in text and loop.format("j") in text
    assert_right(file, result, CASES, 1e-5 if dtype == "float32" else 2e-3, dtype)
    for dims in SIZES[:5]:
        assert_compiles(file, text, dims)


def test_numbers_of_the_launch__are_tensors_in_the_kernel(pool) -> None:
    """As Python's, a quotient below zero would be rounded otherwise."""
    file = pool(("- pad\n    x0", "- pad + (k - 10) // stride + 4\n    x0"))
    dims = {**DIMS, "s": 4}
    assert int((3 - 10) / 4) != (3 - 10) // 4
    text = asked(file, dims)
    assert "tl.zeros([], tl.int32) + k_const" in text
    assert_right(file, {"backward": text}, [(dims, "normal"), ({**dims, "k": 4, "s": 3}, "normal")])


def test_more_steps_than_are_worth_it__stay_a_loop(pool) -> None:
    file, dims = pool(), {**DIMS, "k": 7, "s": 1}
    text = asked(file, dims)
    assert "for nth_i in range(tl.cdiv(k, stride)):" in text and "for nth_j_const in tl.static_range" in text
    assert_right(file, {"backward": text}, CASES)
    assert_compiles(file, text, dims)
    few = asked(file, {**DIMS, "k": 5, "s": 1})
    assert "for nth_i_const in" in few and "for nth_j_const in" in few
    other = asked(file, case={"dims": DIMS, "seed": 1, "others": [{**DIMS, "k": 16, "s": 1}]})
    assert "for nth_i in range" in other and "for nth_j_const in tl.static_range" in other
    assert_right(file, {"backward": other}, CASES)


def test_what_grows_in_another_known_call__is_no_constant(pool) -> None:
    file = pool()
    for more, names in (
        ({"k": 17}, ["stride"]),
        ({"k": 9, "s": 20}, []),
        ({"k": 16, "s": 16}, ["k", "stride"]),
    ):
        case = {"dims": DIMS, "seed": 1, "others": [DIMS, {**DIMS, "Y": 60, "X": 70, **more}]}
        result = draft(file, DIMS, case=case)
        assert offered(result) == bool(names)
        text = asked(file, case=case)
        assert [name for name in ("k", "stride") if f"{name}_const" in text] == names
        assert names or text == result["backward"]


def test_a_length__is_no_constant(pool) -> None:
    """By what SWEEP has of its name, or, of one that has none, where not all of SWEEP is known."""
    small = {"N": 2, "Y": 9, "X": 12, "k": 4, "s": 1}
    file = pool()
    text = asked(file, small)
    assert "X_const" not in text and "OX_const" not in text and "k_const" in text
    known = pool(
        ('[{"N": 3, "Y": 41, "X": 50, "k": 3, "s": 2}]', '[{"N": 2, "Y": 9, "X": 12, "k": 4, "s": 1}]')
    )
    assert "X_const" in asked(known, small)  # small in every call there is
    alike = pool(('"s": 2}]', '"s": 2}, {"N": 64, "Y": 41, "X": 50, "k": 3, "s": 2}]'))
    assert "k_const" in asked(alike)  # which was N as well
    both = pool(('"s": 2}]', '"s": 2}, {"N": 2, "Y": 9, "X": 12, "k": 99, "s": 1}]'))
    assert "k_const" not in asked(both, small)


def test_ones__are_left_to_triton(pool) -> None:
    file, dims = pool(), {**DIMS, "k": 1, "s": 1}
    assert not offered(draft(file, dims)) and "_const" not in asked(file, dims)
    assert offered(draft(file, {**dims, "k": 3}))


def test_a_truth__is_no_constant(pool) -> None:
    file = pool(
        ("OX, k, stride, pad, BLOCK:", "OX, k, stride, pad, odd, BLOCK:"),
        ("mask = (o < n_out)", "mask = (o < n_out) & (o * odd < n_out)"),
        ("stride, pad, BLOCK=32", "stride, pad, k % 2 == 1, BLOCK=32"),
    )
    text = asked(file)
    assert "odd * " in text and "odd_const" not in text and "k_const" in text
    assert_right(file, {"backward": text}, [CASES[0], CASES[1], CASES[3]])


def test_a_fraction_in_another_call__is_no_constant(pool) -> None:
    file = pool(
        ("OX, k, stride, pad, BLOCK:", "OX, k, stride, pad, some, BLOCK:"),
        ("mask = (o < n_out)", "mask = (o < n_out) & (o * some < n_out * some)"),
        ("stride, pad, BLOCK=32", "stride, pad, 2 if k < 4 else 2.0, BLOCK=32"),
    )
    assert "some_const" in asked(file)
    case = {"dims": DIMS, "seed": 1, "others": [DIMS, {**DIMS, "k": 5}]}
    text = asked(file, case=case)
    assert "some_const" not in text and "k_const" in text
    assert_right(file, {"backward": text}, CASES[:3])


EITHER = (
    HEAD
    + """@triton.jit
def spread_kernel(x, table, y, step, N, BLOCK: tl.constexpr, IS_TENSOR: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, BLOCK)
    if not IS_TENSOR:
        at = c * step
    else:
        at = c * tl.load(step + row)
    ok = (c < N) & (at >= 0)
    value = tl.load(x + row * N + c, mask=ok, other=0.0)
    value *= value * tl.load(table + at, mask=ok, other=0.0)
    tl.store(y + row * N + c, value, mask=c < N)


@autodiff(inputs_require_grad=(0,))
def spread(x, table, step):
    y = torch.empty_like(x)
    M, N = x.shape
    tensor = isinstance(step, torch.Tensor)
    spread_kernel[(M,)](x, table, y, step, N, BLOCK=triton.next_power_of_2(N), IS_TENSOR=tensor)
    return y


SWEEP = [{"M": 3, "N": 29, "tensor": False}, {"M": 2, "N": 36, "tensor": True}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    step = torch.arange(M, device=device) if dims["tensor"] else 2
    return *(torch.randn(s, device=device, dtype=dtype) for s in ((M, N), (N * (M + 2),))), step
"""
)


def test_a_number_that_may_be_a_tensor__is_no_constant(tmp_path) -> None:
    dims = {"M": 3, "N": 29, "tensor": False}
    shapes = [(dims, "normal"), ({**dims, "N": 4}, "normal"), ({**dims, "tensor": True}, "normal")]
    case = {"dims": dims, "seed": 1, "others": [dims, {**dims, "M": 2, "N": 36}]}
    file = edits_of(EITHER, tmp_path / "spread.py")(('"N": 36, "tensor": True', '"N": 36, "tensor": False'))
    text = asked(file, dims, case=case)
    assert "step" in text and "step_const" not in text
    assert_right(file, {"backward": text}, shapes)
    simple = (
        ("    if not IS_TENSOR:\n        at", "    at"),
        ("    else:\n        at = c * tl.load(step + row)\n", ""),
    )
    file = edits_of(EITHER, tmp_path / "spread.py")(
        *simple, ('"N": 36, "tensor": True', '"N": 36, "tensor": False')
    )
    assert "step_const" in asked(file, dims, case=case)


RECURRENCE = (
    HEAD
    + """@triton.jit
def steps_kernel(x_ptr, w_ptr, y_ptr, n, k, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    h = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    for i in range(k):
        w = tl.load(w_ptr + i * n + cols, mask=mask, other=0.0).to(tl.float32)
        h = tl.sin(h * w) + 0.1 * i
    tl.store(y_ptr + cols, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def steps(x, w):
    y = torch.empty_like(x)
    k, n = w.shape
    steps_kernel[(triton.cdiv(n, 16),)](x, w, y, n, k, BLOCK=16)
    return y


SWEEP = [{"n": 37, "k": 4}]


def make_args(dims, device="cuda", dtype=torch.float32):
    sizes = (dims["n"],), (dims["k"], dims["n"])
    return tuple(torch.randn(size, device=device, dtype=dtype) for size in sizes)
"""
)
BOUNDS = {
    "all": ("range(k)", "range(k)", "tl.static_range(k_const - 1, -1, -1)"),
    "from one": ("range(k)", "range(1, k)", "tl.static_range(k_const - 1, 1 - 1, -1)"),
    "half": ("range(k)", "range(k // 2)", "tl.static_range(k_const // 2 - 1, -1, -1)"),
    "to a number": ("range(k)", "range(k - 2, 4)", "tl.static_range(4 - 1, k_const - 2 - 1, -1)"),
}
TAPED = [({"n": 37, "k": k}, "normal") for k in (4, 0, 1, 2, 3, 7)]


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_a_loop_that_goes_backwards__counts_down(tmp_path, bounds: tuple[str, str, str]) -> None:
    file = edits_of(RECURRENCE, tmp_path / "steps.py")(bounds[:2])
    dims = {"n": 37, "k": 4}
    text = asked(file, dims)
    assert bounds[2] in text.replace("\n", "") and "in range(" not in text.partition("class ")[0], text
    cases = [case for case in TAPED if case[0]["k"] >= 2] if "k - 2" in bounds[1] else TAPED
    cases = [case for case in cases if case[0]["k"] >= 4] if "4)" in bounds[1] else cases
    assert_right(file, {"backward": text}, cases)
    assert_compiles(file, text, dims)


GIVEN = (("n, k, BLOCK: tl", "n, k, g, BLOCK: tl"), ("n, k, BLOCK=16", "n, k, 3, BLOCK=16"))
ONCE = (
    "mask=mask, other=0.0).to(tl.float32)\n    for",
    "mask=mask).to(tl.float32) + 0.1 * (tl.program_id(0) // g)\n    for",
)
EACH = ("i * n + cols", "i // g * n + cols")


def test_what_divides_once_for_a_program__is_no_constant(tmp_path) -> None:
    make, dims = edits_of(RECURRENCE, tmp_path / "steps.py"), {"n": 37, "k": 4}
    for edit, found in ((ONCE, False), (EACH, True)):
        file = make(*GIVEN, edit)
        text = asked(file, dims)
        assert "k_const" in text and ("g_const" in text) == found
        assert_right(file, {"backward": text}, TAPED)


def test_a_loop_that_begins_where_a_program_does__is_not_known(tmp_path) -> None:
    file = edits_of(RECURRENCE, tmp_path / "steps.py")(("range(k)", "range(tl.program_id(0) % 2, k)"))
    result = draft(file, {"n": 37, "k": 4})
    assert not offered(result) and asked(file, {"n": 37, "k": 4}) == result["backward"]


def test_steps_of_two__stay_a_loop_backwards(tmp_path) -> None:
    file = edits_of(RECURRENCE, tmp_path / "steps.py")(("range(k)", "range(0, k, 2)"))
    text = asked(file, {"n": 37, "k": 4})
    assert "for i_const in tl.static_range(0, k_const, 2):" not in text
    assert_right(file, {"backward": text}, TAPED)


NUMBERS = (
    HEAD
    + """@triton.jit
def moment_kernel(x_ptr, y_ptr, n, k, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    total = 0.0
    for i in range(k):
        x = tl.load(x_ptr + (row * k + i) * n + cols, mask=cols < n, other=0.0).to(tl.float32)
        total += tl.sum(x * x, axis=0)
    root = tl.sqrt(total + 1.0)
    for j in range(k):
        x = tl.load(x_ptr + (row * k + j) * n + cols, mask=cols < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + (row * k + j) * n + cols, x / root, mask=cols < n)


@autodiff(inputs_require_grad=(0,))
def moment(x):
    y = torch.empty_like(x)
    rows, k, n = x.shape
    moment_kernel[(rows,)](x, y, n, k, BLOCK=64)
    return y


SWEEP = [{"rows": 5, "k": 3, "n": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["rows"], dims["k"], dims["n"], device=device, dtype=dtype),)
"""
)


def test_sums_of_numbers__begin_as_tensors(tmp_path) -> None:
    """Of a loop Triton makes that; a Python number would take a half's type."""
    file = edits_of(NUMBERS, tmp_path / "moment.py")()
    dims = {"rows": 5, "k": 3, "n": 37}
    text = asked(file, dims)
    assert "= tl.full([], 0.0, tl.float32)" in text and text.count("in tl.static_range(k_const):") >= 2
    assert_right(file, {"backward": text}, [({**dims, "k": k}, "normal") for k in (3, 1, 8)])
    assert_compiles(file, text, dims)


SHAPES = (
    HEAD
    + """@triton.jit
def shapes_kernel(x_ptr, w_ptr, y_ptr, n, k, m, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(k):
        at = (i * 2 + tl.arange(0, 2)[:, None]) * n + cols[None, :]
        t = tl.load(x_ptr + at, mask=cols[None, :] < n, other=0.0).to(tl.float32)
        s = tl.exp(t * 0.5)
        acc += tl.sum(s * t, axis=0)
    for j in range(m):
        at = j * n + cols
        t = tl.load(w_ptr + at, mask=cols < n, other=0.0).to(tl.float32)
        s = tl.exp(t * 0.5)
        acc += s * t
    tl.store(y_ptr + cols, acc, mask=cols < n)


@autodiff(inputs_require_grad=(0, 1))
def shapes(x, w):
    k, _, n = x.shape
    y = torch.empty(n, device=x.device, dtype=x.dtype)
    shapes_kernel[(triton.cdiv(n, 16),)](x, w, y, n, k, w.shape[0], BLOCK=16)
    return y


SWEEP = [{"n": 37, "k": 3, "m": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    sizes = (dims["k"], 2, dims["n"]), (dims["m"], dims["n"])
    return tuple(torch.randn(size, device=device, dtype=dtype) for size in sizes)
"""
)


@pytest.mark.parametrize("first", ["k", "m"])
def test_names_of_an_unrolled_loop__are_no_other_loops(tmp_path, first: str) -> None:
    """They stay when it has ended, and a loop behind it would be taken to carry them, in another shape."""
    begin, middle, end = (SHAPES.index(at) for at in ("    for i", "    for j", "    tl.store"))
    turned = SHAPES[:begin] + SHAPES[middle:end] + SHAPES[begin:middle] + SHAPES[end:]
    file = edits_of(SHAPES if first == "k" else turned, tmp_path / "shapes.py")()
    dims = {"n": 37, "k": 3, "m": 20}
    text = asked(file, dims)
    assert "in tl.static_range(k_const):" in text and "in range(m):" in text
    assert_right(file, {"backward": text}, [(dims, "normal"), ({"n": 16, "k": 9, "m": 2}, "normal")])
    assert_compiles(file, text, dims)


PRODUCTS = (
    HEAD
    + """@triton.jit
def experts_kernel(x_ptr, w_ptr, y_ptr, n, k, D: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, D)
    mask = (rows < n)[:, None]
    acc = tl.zeros([BLOCK, D], dtype=tl.float32)
    for i in range(k):
        x = tl.load(x_ptr + (rows[:, None] * k + i) * D + cols[None, :], mask=mask, other=0.0)
        w = tl.load(w_ptr + (i * D + cols[:, None]) * D + cols[None, :])
        acc += tl.dot(x, w, input_precision="ieee")
    tl.store(y_ptr + rows[:, None] * D + cols[None, :], acc, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def experts(x, w):
    n, k, D = x.shape
    y = torch.empty((n, D), device=x.device, dtype=x.dtype)
    experts_kernel[(triton.cdiv(n, 16),)](x, w, y, n, k, D=D, BLOCK=16)
    return y


SWEEP = [{"n": 37, "k": 3, "D": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    sizes = (dims["n"], dims["k"], dims["D"]), (dims["k"], dims["D"], dims["D"])
    return tuple(torch.randn(size, device=device, dtype=dtype) for size in sizes)
"""
)


def test_products_of_matrices__stay_in_a_loop(tmp_path) -> None:
    file = edits_of(PRODUCTS, tmp_path / "experts.py")()
    dims = {"n": 37, "k": 3, "D": 16}
    for schedule in ("owner", "atomic"):
        text = asked(file, dims, schedule=schedule)
        loops = [part for part in text.split("static_range")[1:] if "tl.dot(" in part.partition("\n\n")[0]]
        assert "k_const" in text and not loops, text
        assert_right(file, {"backward": text}, [({**dims, "k": k}, "normal") for k in (3, 1, 6)])
        assert_compiles(file, text, dims)


def test_other_options__go_with_it(pool) -> None:
    file = pool()
    for config in ({"num_warps": 2, **CONSTANTS}, {"exact": 1, **CONSTANTS}):
        text = draft(file, DIMS, config=config)["backward"]
        assert "static_range" in text
        assert_right(file, {"backward": text}, CASES)
    for schedule in ("owner", "partials", "atomic"):
        text = draft(file, DIMS, config=CONSTANTS, schedule=schedule)["backward"]
        assert "k_const" in text
        assert_right(file, {"backward": text}, CASES)


def test_a_name_that_is_taken__is_not_taken_twice(pool) -> None:
    file = pool(
        ("OX, k, stride, pad, BLOCK:", "OX, k, stride, pad, k_const, BLOCK:"),
        ("tl.store(y_ptr + o, acc,", "tl.store(y_ptr + o, acc * k_const,"),
        ("stride, pad, BLOCK=32", "stride, pad, 1.5, BLOCK=32"),
    )
    text = asked(file)
    assert "stride_const: tl.constexpr" in text and "k_const: tl.constexpr" not in text
    assert_right(file, {"backward": text}, CASES[:3])


def test_the_default_draft__has_the_same_gradients(pool) -> None:
    file = pool()
    plain, text = draft(file, DIMS)["backward"], asked(file)
    assert errors(file, plain, CASES) == errors(file, text, CASES)


def test_it_is_offered_behind_blocks__and_before_warps() -> None:
    """With the blocks that were fastest: an upsampling had gained more by wider ones than by this."""
    warps = [{"num_warps": n} for n in (1, 2, 8)]
    wide = [{"BLOCK": 64, "apart": 1}, {"BLOCK": 32}]
    for before, after in (
        ([], [CONSTANTS]),
        (warps, [CONSTANTS, *warps]),
        ([*wide, *warps], [*wide, CONSTANTS, *warps]),
        ([{"matrix": 1}, {"saved": 1}], [{"matrix": 1}, {"saved": 1}, CONSTANTS]),
    ):
        made = Draft("", "", configs=list(before))
        offer_constants(made)
        assert made.configs == after
        offer_constants(made)
        assert made.configs == after
    full = [{"BLOCK": n} for n in range(tuning.MOST - 1)]
    made = Draft("", "", configs=[*full, {"num_warps": 2}])
    offer_constants(made)
    assert made.configs == [*full, CONSTANTS]


def test_a_step_that_has_no_name__gets_one(tmp_path) -> None:
    """No kernel may name what two underscores begin."""
    pair = ROOT / "dataset/moe_grouped_gemm/moe_topk_softmax_renorm_router.py"
    file = edits_of(pair.read_text().partition(MARKER)[0], tmp_path / pair.name)()
    result = draft(file, {"T": 37, "E": 12, "k": 2}, config={"constants": 1})
    assert "for i_const in tl.static_range(" in result["backward"]
    assert not re.search(r"\b__", result["backward"])
    assert_right(file, result, [({"T": 5, "E": 40, "k": 6}, "normal")])
