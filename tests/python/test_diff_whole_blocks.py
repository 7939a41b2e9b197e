"""Kernels without masks in blocks that lie wholly inside: what is proven of a mask, where it is offered, and
that gradients are right for every length."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of, pair_text
from kernel_agent import compiled
from kernel_agent.differentiate.write import whole_blocks
from kernel_agent.operations import facts

HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


"""
FLAT = (
    HEAD
    + """@triton.jit
def cube_kernel(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=2.0)
    w = tl.load(w_ptr + offs, mask=mask, other=3.0)
    tl.store(y_ptr + offs, x * x * w, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def cube(x, w):
    y = torch.empty_like(x)
    cube_kernel[(triton.cdiv(x.numel(), 32),)](x, w, y, x.numel(), BLOCK=32)
    return y


SWEEP = [{"N": 101}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))
"""
)
ROWS = (
    HEAD
    + """@triton.jit
def scale_kernel(x_ptr, block_ptr, y_ptr, M, N, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None] * stride + cols[None, :]
    w = tl.load(block_ptr + cols, mask=cols < N, other=0.0)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    tl.store(y_ptr + offs, x * x * w[None, :], mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def scale(x, w):
    M, N = x.shape
    stride = triton.cdiv(N, 16) * 16
    wide = torch.nn.functional.pad(x, (0, stride - N))
    y = torch.empty_like(wide)
    grid = (triton.cdiv(M, 4), triton.cdiv(N, 16))
    scale_kernel[grid](wide, w, y, M, N, stride, ROWS=4, BLOCK=16)
    return y[:, :N]


SWEEP = [{"M": 9, "N": 53}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], device=device, dtype=dtype)
"""
)
DIMS, WIDE = {"N": 101}, {"M": 9, "N": 53}
ASKED = {"whole": 1}
LENGTHS = (1, 31, 32, 33, 96, 101, 0)


@pytest.fixture
def flat(tmp_path: Path):
    return edits_of(FLAT, tmp_path / "flat.py")


@pytest.fixture
def rows(tmp_path: Path):
    return edits_of(ROWS, tmp_path / "rows.py")


def cases(*sizes: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    return [(one, "normal") for one in sizes]


def offered(file: Path, dims: dict[str, Any] = DIMS, **options: Any) -> bool:
    return ASKED in draft(file, dims, **options)["report"]["configs"]


def assert_plain(file: Path, dims: dict[str, Any] = DIMS, **options: Any) -> None:
    """Nothing is offered, and what is asked for all the same changes nothing."""
    plain = draft(file, dims, **options)
    assert ASKED not in plain["report"]["configs"]
    assert draft(file, dims, config=ASKED, **options)["backward"] == plain["backward"]


def machine_texts(file: Path, backward: str, dims: dict[str, Any], dtype: str) -> list[str]:
    """What the kernels of the backward are compiled to for a GPU."""
    pair = file.with_name(f"{file.stem}_pair.py")
    pair.write_text(pair_text(file.read_text(), backward))
    case = {"id": 0, "dims": dims, "seed": 3, "upstream": {"kind": "normal", "seed": 4}}
    request = {"file": str(pair), "target": "sm_90", "compile": True, "cases": [case], "dtype": dtype}
    folder = file.parent / f"compiled_{dtype}"
    folder.mkdir(exist_ok=True)
    compiled.use(str(folder))  # that is empty: what is not there is noted
    found = facts.run(request, file.parent)
    compiled.leave(folder)
    compiled.use(None)
    kernels = found["cases"][0]["kernels"]
    assert not [kernel["error"] for kernel in kernels if "error" in kernel]
    wanted = [compiled.Source.parse(one.read_text()) for one in folder.glob("compile-*.json")]
    built = [compiled.build(one)["asm"]["ptx"] for one in wanted if "_bwd" in one.text]
    return [text if isinstance(text, str) else json.dumps(text) for text in built]


def test_a_length__asks_for_the_last_lane_of_a_block(flat) -> None:
    plain, asked = draft(flat(), DIMS), draft(flat(), DIMS, config=ASKED)
    text = asked["backward"]
    assert ASKED in plain["report"]["configs"] and "WHOLE" not in plain["backward"]
    assert ASKED not in asked["report"]["configs"]
    assert "mask = tl.full([BLOCK], True, tl.int1) if WHOLE else offs < n" in text
    assert "if tl.program_id(0) * BLOCK + (BLOCK - 1) < n:" in text
    called = re.findall(r"cube_kernel_bwd_block\((.*), WHOLE=(True|False)\)", text)
    assert [whole for _, whole in called] == ["True", "False"] and called[0][0] == called[1][0]
    assert text.count("tl.load(") == plain["backward"].count("tl.load(")  # the body stands there once
    kernels = text[: text.index("\n\n\ndef ")]
    assert "def cube_kernel_bwd(" in kernels and max(map(len, kernels.splitlines())) <= 110


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients__are_right_for_every_length(flat, dtype: str) -> None:
    result = draft(flat(), DIMS, config=ASKED, dtype=dtype)
    bound = 1e-5 if dtype == "float32" else 2e-3
    assert_right(flat(), result, cases(*({"N": n} for n in LENGTHS)), bound, dtype)


def test_a_whole_block__is_loaded_and_stored_16_bytes_at_once(flat) -> None:
    edits = ("BLOCK=32", "BLOCK=1024"), ("x.numel(), 32)", "x.numel(), 1024)")
    dims = {"N": 4099}
    for dtype, wide in (("bfloat16", "b32"), ("float32", "b32")):
        file = flat(*edits)
        texts = {}
        for name, config in (("plain", None), ("whole", ASKED)):
            backward = draft(file, dims, config=config, dtype=dtype)["backward"]
            named = file.with_name(f"{name}.py")
            named.write_text(file.read_text())
            texts[name] = "".join(machine_texts(named, backward, dims, dtype))
            for one in named.parent.glob("compiled_*/*"):
                one.unlink()
        for access in (f"ld.global.v4.{wide}", f"st.global.v4.{wide}"):
            assert access in texts["whole"] and access not in texts["plain"]


def test_two_axes__are_asked_together(rows) -> None:
    text = draft(rows(), WIDE, config=ASKED, schedule="atomic")["backward"]
    across, down = "tl.program_id(1) * BLOCK + (BLOCK - 1) < N", "tl.program_id(0) * ROWS + (ROWS - 1) < M"
    assert f"if ({across}) & ({down}):" in text or f"if ({down}) & ({across}):" in text
    result = {"backward": text}
    sizes = [{"M": m, "N": n} for m, n in ((9, 53), (1, 1), (4, 16), (5, 16), (4, 17), (8, 31), (3, 33))]
    assert_right(rows(), result, cases(*sizes))


@pytest.mark.parametrize("schedule", ["owner", "partials"])
def test_the_kernel_of_a_block__has_a_name_of_its_own(rows, schedule: str) -> None:
    result = draft(rows(), WIDE, config=ASKED, schedule=schedule)
    names = re.findall(r"^def (\w+)\(", result["backward"], re.M)
    assert len(names) == len(set(names))
    sizes = [{"M": m, "N": n} for m, n in ((9, 53), (1, 1), (4, 16), (5, 17), (7, 31))]
    assert_right(rows(), result, cases(*sizes))


def test_an_owner_called_block__does_not_take_the_name(rows) -> None:
    text = draft(rows(), WIDE, config=ASKED, schedule="owner")["backward"]
    assert "def scale_kernel_bwd_block(" in text and "def scale_kernel_bwd_block_(" in text


def test_a_parameter_called_whole__keeps_its_name(flat) -> None:
    file = flat(
        ("y_ptr, n, BLOCK: tl.constexpr", "y_ptr, n, WHOLE, BLOCK: tl.constexpr"),
        ("x * x * w", "x * x * w * WHOLE"),
        ("x.numel(), BLOCK=32", "x.numel(), 0.5, BLOCK=32"),
    )
    result = draft(file, DIMS, config=ASKED)
    assert "if WHOLE_2 else offs < n" in result["backward"]
    assert_right(file, result, cases(*({"N": n} for n in LENGTHS)))


INDEX = "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)"
# What x is loaded at, and with which mask.
KEPT = {
    "part of a block": ("tl.program_id(0) * (BLOCK - 2) + tl.arange(0, BLOCK)", "at < n"),
    "half of a block": ("tl.program_id(0) * 16 + tl.arange(0, 32)", "at < n"),
    "behind the first element": (f"{INDEX} + 1", "at < n"),
    "behind the first of a block": ("(tl.program_id(0) * BLOCK + 1) + tl.arange(0, BLOCK)", "at < n"),
    "lanes from one": ("tl.program_id(0) * 2 * BLOCK + tl.arange(BLOCK, 2 * BLOCK)", "at < n"),
    "half of the lanes": ("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) // 2", "at < n"),
    "lanes in turn": ("tl.program_id(0) * BLOCK - tl.arange(0, BLOCK) + BLOCK", "at < n"),
    "lanes twice": ("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + tl.arange(0, BLOCK)", "at < n"),
    "a factor": (f"({INDEX}) * 2", "at < n"),
    "a bound of its own": (INDEX, "at < n - tl.arange(0, BLOCK)"),
    "a lower bound": (INDEX, "(at < n) & (at >= 2)"),
    "another mask": (INDEX, "(at < n) & (at != 7)"),
    "at most": (INDEX, "at <= n - 1"),
    "one block": ("tl.arange(0, BLOCK)", "at < n"),
    "a start of data": (f"{INDEX} + tl.load(x_ptr).to(tl.int32) // 1000 * BLOCK", "at < n"),
    "narrow numbers": ("(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int8)", "at < n"),
    "numbers without a sign": ("(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)", "at < n"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_one_lane_does_not_answer_for__keeps_every_mask(flat, name: str) -> None:
    index, mask = KEPT[name]
    old = "x = tl.load(x_ptr + offs, mask=mask, other=2.0)"
    file = flat((old, f"at = {index}\n    x = tl.load(x_ptr + at, mask={mask}, other=2.0)"))
    assert_plain(file, schedule="atomic")


def test_a_mask_of_neither_neighbours_nor_all_accesses__gets_no_offer(flat) -> None:
    apart = ("    mask = offs < n", "    mask = offs < n\n    offs = offs * 2")
    twice = ("y = torch.empty_like(x)", "x, w = x.repeat(2), w.repeat(2)\n    y = torch.empty_like(x)")
    half = ("x, w, y, x.numel(), BLOCK=32)", "x, w, y, x.numel() // 2, BLOCK=32)")
    assert_plain(flat(apart, twice, half))


@pytest.mark.parametrize(
    "dims, whole",
    [(101, True), (33, True), (31, False), (96, False), (112, False), (40, True)],
)
def test_it_is_offered__where_a_block_is_whole_and_the_length_no_multiple_of_16(flat, dims, whole) -> None:
    assert offered(flat(), {"N": dims}) is whole


def test_it_is_offered__for_another_size_of_the_sweep(flat) -> None:
    file = flat(('SWEEP = [{"N": 101}]', 'SWEEP = [{"N": 96}, {"N": 101}]'))
    assert offered(file, {"N": 96}, case={"dims": {"N": 96}, "seed": 1, "others": [{"N": 101}]})
    assert not offered(file, {"N": 96})


def test_rows_that_are_not_aligned__get_no_offer(rows) -> None:
    assert offered(rows(), WIDE, schedule="atomic")
    file = rows(("triton.cdiv(N, 16) * 16", "N"))
    assert not offered(file, WIDE, schedule="atomic")


def test_a_small_vector_beside_a_matrix__is_not_what_it_is_offered_for(rows) -> None:
    assert_plain(rows(("triton.cdiv(N, 16) * 16", "N + 1")), WIDE, schedule="atomic")


def test_less_than_half_of_what_a_kernel_loads_and_stores__gets_no_offer(flat) -> None:
    fewer = ("w, y, x.numel(), BLOCK=32)", "w, y, x.numel() - 1, BLOCK=32)")
    shifted = [(f"{name}_ptr + offs", f"{name}_ptr + 1 + offs") for name in "xy"]
    zeros = ("torch.empty_like(x)", "torch.zeros_like(x)")
    assert_plain(flat(fewer, zeros, *shifted))  # x and its gradient, and y's
    assert offered(flat(fewer, zeros, shifted[1]))


def test_a_mask_in_a_branch__gradients_are_right(flat) -> None:
    body = FLAT[FLAT.index("    offs = ") : FLAT.index("\n\n\n@autodiff")]
    inside = "    if n > 40:\n" + "".join(f"    {line}\n" for line in body.splitlines())
    file = flat((body, inside.rstrip()), ("torch.empty_like(x)", "torch.zeros_like(x)"))
    result = draft(file, DIMS, config=ASKED)
    assert_right(file, result, cases(*({"N": n} for n in LENGTHS)))


def test_a_kernel_with_a_product_of_matrices__keeps_its_masks(flat) -> None:
    square = "tl.reshape(x, (16, 16))"
    product = f'tl.dot({square}, {square}, input_precision="ieee")'
    edits = (
        ("    w = tl.load", f"    x = tl.reshape({product}, (BLOCK,))\n    w = tl.load"),
        ("BLOCK=32", "BLOCK=256"),
        ("x.numel(), 32)", "x.numel(), 256)"),
    )
    assert_plain(flat(*edits), {"N": 301})
    assert offered(flat(*edits[1:]), {"N": 301})


def test_a_large_kernel__keeps_its_masks(flat) -> None:
    sums = "    x = x * tl.sin(x + w)\n" * (whole_blocks.MOST // 8)
    store = "    tl.store(y_ptr"
    assert_plain(flat((store, sums + store)))
    assert offered(flat((store, "    x = x * tl.sin(x + w)\n" * 3 + store)))


@pytest.mark.parametrize("wider, whole", [("0", False), ("-x.shape[1] % 16", True)])
def test_what_a_loop_loads__counts_alone(flat, wider: str, whole: bool) -> None:
    load = "tl.load(x_ptr + offs, mask=mask, other=2.0)"
    sums = f"tl.zeros([BLOCK], tl.float32)\n    for i in range(k):\n        x += {load}"
    file = flat(
        ("y_ptr, n, BLOCK", "y_ptr, n, k, step, BLOCK"),
        (load, sums.replace("offs", "i * step + offs")),
        ("y, x.numel(), BLOCK=32", "y, w.numel(), x.shape[0], x.stride(0), BLOCK=32"),
        ("x.numel(), 32)", "w.numel(), 32)"),
        (
            "y = torch.empty_like(x)",
            f"x = torch.nn.functional.pad(x, (0, {wider}))\n    y = torch.empty_like(w)",
        ),
        ("return tuple(", "x, w = tuple("),
        ("range(2))\n", "range(2))\n    return torch.stack((x, w, x + w)), w\n"),
    )
    assert offered(file) is whole
    assert_right(file, draft(file, DIMS, config=ASKED), cases(*({"N": n} for n in LENGTHS)))
    if not whole:
        assert_plain(file)


def test_a_length_of_constants__is_asked_with_them(flat) -> None:
    file = flat(
        ("y_ptr, n, BLOCK", "y_ptr, n, k, BLOCK"),
        ("offs < n", "offs < n * k"),
        ("x_ptr + offs", "x_ptr + offs // k"),
        ("y, x.numel(), BLOCK=32", "y, x.numel(), 3, BLOCK=32"),
        ("x.numel(), 32)", "w.numel(), 32)"),
        ("y = torch.empty_like(x)", "y = torch.empty_like(w)"),
        ("return tuple(", "x, w = tuple("),
        ("range(2))\n", "range(2))\n    return x, torch.cat((x, w, w))\n"),
    )
    assert offered(file)
    result = draft(file, DIMS, config={**ASKED, "constants": 1})
    kernel = result["backward"].split("def cube_kernel_bwd(")[1].split("\n\n\n")[0]
    assert "k_const: tl.constexpr" in kernel and "k = tl.zeros([], tl.int32) + k_const\n    if " in kernel
    assert_right(file, result, cases(*({"N": n} for n in LENGTHS)))


@pytest.mark.parametrize(
    "start",
    [
        "tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "tl.arange(0, BLOCK) + BLOCK * tl.program_id(0)",
        "tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)",
        "(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)",
        "(tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)",
        "BLOCK * tl.num_programs(0) - (tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)",
        "tl.program_id(0) * 32 + tl.arange(0, 32)",
        "(tl.program_id(0) // 2 * 2 + tl.program_id(0) % 2) * BLOCK + tl.arange(0, BLOCK)",
    ],
)
def test_however_a_block_starts__gradients_are_right(flat, start: str) -> None:
    file = flat(("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", start))
    assert offered(file)
    result = draft(file, DIMS, config=ASKED)
    assert "WHOLE" in result["backward"]
    assert_right(file, result, cases(*({"N": n} for n in LENGTHS)))


DATASET = (
    "activation_glu/gelu_erf_recompute",
    "dropout_sampling/dropout_philox_seed_replay",
)


@pytest.mark.parametrize("name", DATASET)
@pytest.mark.parametrize("config", [{}, {"num_warps": 8}, {"constants": 1}])
def test_dataset__gradients_are_right_together_with_other_choices(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    file = tmp_path / "forward.py"
    file.write_text((ROOT / "dataset" / f"{name}.py").read_text().split(MARKER)[0])
    plain = draft(file, {"N": 3 * 1024 + 5})
    configs = plain["report"]["configs"]
    blocks = next((one for one in configs if one.keys() == {"BLOCK"}), {})
    warps = min(at for at, one in enumerate(configs) if one.keys() == {"num_warps"})
    assert configs.index(blocks if blocks else ASKED) <= configs.index(ASKED) < warps
    result = draft(file, {"N": 3 * 1024 + 5}, config={**config, **blocks, **ASKED})
    assert "WHOLE" in result["backward"]
    assert_right(file, result, cases(*({"N": n} for n in (1, 1023, 1024, 1025, 3 * 1024 + 5))))
