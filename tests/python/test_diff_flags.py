"""Names that a flag of the kernel gives different values: block pointers, blocks of two shapes, two stores,
optional outputs; and functions of Triton under the name that a module beside the file gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent import errors

HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 21, "H": 3, "first": True}]


@triton.jit
def flag_kernel(x, y, z, T, H: tl.constexpr, BT: tl.constexpr, FIRST: tl.constexpr):
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    o_t = i_t * BT + tl.arange(0, BT)
"""
TAIL = """

@autodiff(inputs_require_grad=(0,))
def flag(x, first):
    H, T = x.shape if first else x.shape[::-1]
    y = torch.empty_like(x)
    z = torch.empty_like(x) if first else None
    flag_kernel[(triton.cdiv(T, 16), H)](x, y, z, T, H=H, BT=16, FIRST=first)
    return y, z


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["H"], dims["T"]) if dims["first"] else (dims["T"], dims["H"])
    return torch.randn(shape, device=device, dtype=dtype), dims["first"]
"""
POINTER = """
    if FIRST:
        p_x = tl.make_block_ptr(x + i_h * T, (T,), (1,), (i_t * BT,), (BT,), (0,))
        p_y = tl.make_block_ptr(y + i_h * T, (T,), (1,), (i_t * BT,), (BT,), (0,))
    else:
        p_x = tl.make_block_ptr(x + i_h, (T,), (H,), (i_t * BT,), (BT,), (0,))
        p_y = tl.make_block_ptr(y + i_h, (T,), (H,), (i_t * BT,), (BT,), (0,))
    b = tl.load(p_x, boundary_check=(0,))
    tl.store(p_y, tl.exp(b), boundary_check=(0,))
    if FIRST:
        tl.store(z + i_h * T + o_t, b * b, mask=o_t < T)
"""
REMADE = """
    s = 1 if FIRST else H
    f = T if FIRST else 1
    p = tl.make_block_ptr(x + i_h * f, (T,), (s,), (i_t * BT,), (BT,), (0,))
    total = tl.zeros([BT], dtype=tl.float32)
    for i in range(2):
        total += tl.exp(tl.load(p, boundary_check=(0,)))
        p = tl.make_block_ptr(x + i_h * f + s, (T - 1,), (s,), (i_t * BT,), (BT,), (0,))
    tl.store(y + i_h * f + o_t * s, total, mask=o_t < T)
    if FIRST:
        tl.store(z + i_h * T + o_t, total, mask=o_t < T)
"""
SHAPES = """
    if FIRST:
        mask = o_t < T
        at = i_h * T + o_t
    else:
        mask = (o_t < T)[:, None] & (tl.arange(0, 1) < 1)[None, :]
        mask = tl.broadcast_to(mask, (BT, 2))
        at = (o_t * H + i_h)[:, None] + tl.zeros((BT, 2), tl.int32)
    if FIRST:
        b = tl.load(x + at, mask=mask, other=0.0)
        tl.store(y + at, b * b * b, mask=mask)
        tl.store(z + at, b, mask=mask)
    else:
        b = tl.sum(tl.load(x + at, mask=mask, other=0.0), axis=1)
        tl.store(y + o_t * H + i_h, b * b, mask=o_t < T)
"""
TWICE = """
    at = i_h * T + o_t if FIRST else o_t * H + i_h
    b = tl.load(x + at, mask=o_t < T, other=0.0)
    if FIRST == 1:
        tl.store(y + at, b * b, mask=o_t < T)
        tl.store(z + at, b, mask=o_t < T)
    if FIRST != 1:
        tl.store(y + at, tl.exp(b), mask=o_t < T)
"""
HANDED_ON = """
    wide = tl.arange(0, 2)
    at = i_h * T + o_t if FIRST else o_t * H + i_h
    at2 = at[:, None] + wide[None, :] * 0
    b = tl.load(x + at, mask=o_t < T, other=0.0)
    b2 = tl.load(x + at2, mask=(o_t < T)[:, None], other=0.0)
    if FIRST:
        c = b
    else:
        c = b2
    total = cubed(b, c, FIRST=FIRST)
    tl.store(y + at, total, mask=o_t < T)
    if FIRST:
        tl.store(z + at, b, mask=o_t < T)
"""
HELPERS = """
@triton.jit
def cubed(b, c, FIRST: tl.constexpr):
    if FIRST:
        return b * squared(c)
    else:
        return b * tl.sum(squared(c), axis=1)


@triton.jit
def squared(c):
    return c * c


@triton.jit
def biased(b, bias):
    if bias is not None:
        b = b * bias
    return b if bias is None else b + bias
"""
LEFT_OUT = """
    at = i_h * T + o_t if FIRST else o_t * H + i_h
    b = tl.load(x + at, mask=o_t < T, other=0.0)
    if z is not None:
        bias = tl.exp(tl.load(x + at, mask=o_t < T, other=0.0))
    else:
        bias = None
    tl.store(y + at, biased(b, bias), mask=o_t < T)
    if FIRST:
        tl.store(z + at, b, mask=o_t < T)
"""


def written(folder: Path, body: str, head: str = HEAD) -> Path:
    file = folder / "flag.py"
    file.write_text(head + body + TAIL)
    return file


@pytest.mark.parametrize(
    "body",
    [POINTER, REMADE, SHAPES, TWICE, HANDED_ON, LEFT_OUT],
    ids=["pointer", "remade", "shapes", "twice", "handed on", "left out"],
)
@pytest.mark.parametrize("first", [True, False])
def test_flag__gradient_is_right_whichever_was_traced(tmp_path: Path, body: str, first: bool) -> None:
    file = written(tmp_path, body, HEAD.replace("@triton.jit", HELPERS.lstrip() + "\n\n@triton.jit"))
    result = draft(file, {"T": 21, "H": 3, "first": first})
    cases = [({"T": 18, "H": 2, "first": False}, "normal"), ({"T": 21, "H": 3, "first": True}, "normal")]
    assert_right(file, result, cases)


def test_two_branches_of_one_flag__one_program_owns_each_element(tmp_path: Path) -> None:
    result = draft(written(tmp_path, TWICE), {"T": 21, "H": 3, "first": True})
    assert result["report"]["tape_bytes"] == 0


def test_block_of_two_shapes_that_is_used_without_the_flag__is_refused(tmp_path: Path) -> None:
    body = (
        SHAPES.split("    if FIRST:\n        b =")[0]
        + "    tl.store(y + at, tl.load(x + at, mask=mask), mask=mask)\n"
    )
    with pytest.raises(errors.Unusable) as caught:
        draft(written(tmp_path, body), {"T": 21, "H": 3, "first": True})
    assert "another shape in each of the two branches" in str(caught.value)


def test_function_that_another_module_names__is_spelled_as_triton_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flag_ops.py").write_text("import triton.language as tl\n\nexp = tl.exp\n")
    head = HEAD.replace("from kernel_agent", "from flag_ops import exp\nfrom kernel_agent")
    body = POINTER.replace("tl.exp(", "exp(")
    result = draft(written(tmp_path, body, head), {"T": 21, "H": 3, "first": True})
    assert "tl.exp(tl.load(" in result["backward"] or "tl.exp(b)" in result["backward"]
