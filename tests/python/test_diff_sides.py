"""Flags: each side has kernels of its own where the proofs of gradient addresses hold on one of them only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent.differentiate import plans
from kernel_agent.differentiate.ir.graph import Graph
from kernel_agent.differentiate.schedule import flags

HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "T": 21, "H": 2, "packed": False, "first": True}]
"""
KERNEL = '''

{decorators}@triton.jit
def kernel(x, w, y, cu, T, H: tl.constexpr, BT: tl.constexpr, FIRST: tl.constexpr{flags}):
    """A row is a token of a head; the heads stand first, or the tokens; sequences are packed, or not."""
    i_t, i_b, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if {condition}:
        start = tl.load(cu + i_b).to(tl.int32)
        length = tl.load(cu + i_b + 1).to(tl.int32) - start
    else:
        start, length = i_b * T, T
    t = i_t * BT + tl.arange(0, BT)
    if FIRST:
        at = start * H + i_h * length + t
    else:
        at = (start + t) * H + i_h
    v = tl.load(x + at, mask=t < length, other=0.0)
    scale = 1.0
    if {condition}:
        scale = tl.load(w + i_h)
    tl.store(y + at, tl.exp(v) * scale, mask=t < length)


@autodiff(inputs_require_grad=(0, 1))
def stub(x, w, cu=None, first=True):
    x = x.contiguous()
    y = torch.empty_like(x)
    B, T, H = (x.shape[0], x.shape[2], x.shape[1]) if first else x.shape
    if cu is not None:
        B = len(cu) - 1
    kernel[(triton.cdiv(T, 8), B, H)](x, w, y, cu, T, H=H, BT=8, FIRST=first{given})
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, H = dims["B"], dims["T"], dims["H"]
    shape = (B, H, T) if dims["first"] else (B, T, H)
    x, w = torch.randn(*shape, device=device, dtype=dtype), torch.randn(H, device=device, dtype=dtype)
    cu = torch.tensor([0, T // 3, T], device=device) if dims["packed"] else None
    return (x, w), {{"cu": cu, "first": dims["first"]}}
'''
RULE = '@triton.heuristics({"IS_VARLEN": lambda args: args["cu"] is not None})\n'
FLAGS = {  # how a kernel knows that sequences are packed
    "heuristic": {"decorators": RULE, "flags": ", IS_VARLEN: tl.constexpr", "condition": "IS_VARLEN"},
    "constexpr": {
        "flags": ", IS_VARLEN: tl.constexpr",
        "condition": "IS_VARLEN",
        "given": ", IS_VARLEN=cu is not None",
    },
    "word": {
        "flags": ", MODE: tl.constexpr",
        "condition": 'MODE == "packed"',
        "given": ', MODE="packed" if cu is not None else "plain"',
    },
    "pointer": {"condition": "cu is not None"},
    "negated": {
        "flags": ", PLAIN: tl.constexpr",
        "condition": "not PLAIN",
        "given": ", PLAIN=cu is None",
    },
}
DIMS = [
    {"B": 2, "T": 21, "H": 2, "packed": False, "first": True},
    {"B": 1, "T": 30, "H": 3, "packed": True, "first": False},
    {"B": 1, "T": 18, "H": 1, "packed": True, "first": True},
    {"B": 3, "T": 8, "H": 2, "packed": False, "first": False},
]


def file_of(write: Callable[[str], Path], name: str) -> Path:
    parts = {"decorators": "", "flags": "", "given": "", **FLAGS[name]}
    return write(HEAD + KERNEL.format(**parts))


def kernels_of(text: str) -> dict[str, str]:
    """The generated kernels by their names."""
    found = text.split("@triton.jit\ndef ")[1:]
    return {kernel.split("(")[0]: kernel.split("\n\n\n")[0] for kernel in found}


@pytest.mark.parametrize("traced", [0, 1])
@pytest.mark.parametrize("name", sorted(FLAGS))
def test_flag__plain_side_stores_and_the_other_adds(
    name: str, traced: int, write: Callable[[str], Path]
) -> None:
    """Whichever side the traced call takes; what only one side reads has a gradient of zeros on the other."""
    file = file_of(write, name)
    result = draft(file, DIMS[traced])
    kernels = {k: text for k, text in kernels_of(result["backward"]).items() if "_bwd" in k}
    data = {k for k, text in kernels.items() if "tl.load(cu" in text}
    assert data and any("atomic_add(d_x" in kernels[k] for k in data)
    assert not any("atomic_add" in kernels[k] for k in set(kernels) - data)
    assert any("tl.store(d_x" in kernels[k] for k in set(kernels) - data)
    assert result["report"]["atomics"] == 0  # packed, one store where the tokens stand first
    assert "gradient_of(x, accumulate=True)" in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in DIMS])


def test_flags__of_two_one_alone_proves_nothing(write: Callable[[str], Path]) -> None:
    """Heads first or tokens first: each layout is proven, and both where no sequence is packed."""
    text = draft(file_of(write, "constexpr"), DIMS[0])["backward"]
    names = [name for name in kernels_of(text) if "_bwd" in name]
    assert {n for n in names if "without_varlen" in n} >= {
        "kernel_bwd_without_varlen_with_first",
        "kernel_bwd_without_varlen_without_first",
    }
    assert text.count("if IS_VARLEN:\n") == 1 + sum("if IS_VARLEN" in k for k in kernels_of(text).values())


def test_flag__that_helps_no_proof__leaves_one_kernel(write: Callable[[str], Path]) -> None:
    """Rows are gathered with and without the flag: two kernels would add atomically as the one does."""
    source = file_of(write, "constexpr").read_text()
    gathered = source.replace(
        "start, length = i_b * T, T", "start, length = tl.load(cu + i_b).to(tl.int32), T"
    ).replace("length = tl.load(cu + i_b + 1).to(tl.int32) - start", "length = T")
    assert gathered != source
    gathered = gathered.replace("IS_VARLEN=cu is not None", "IS_VARLEN=not first")
    file = write(gathered)
    result = draft(file, DIMS[2])
    assert [n for n in kernels_of(result["backward"]) if "_bwd" in n and "with" in n] == []
    assert result["report"]["atomics"] > 0


def test_half_precision__plain_side_needs_no_wider_buffer(write: Callable[[str], Path]) -> None:
    text = draft(file_of(write, "constexpr"), DIMS[0], dtype="float16")["backward"]
    plain = text[text.index("    def backward") :].rsplit("\n        else:", 1)[1]
    assert "d_x = gradient_of(x" in plain and "accumulate" not in plain


NEGATIVE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 9, "step": 8}]


@triton.jit
def window_kernel(x_ptr, y_ptr, stride, W: tl.constexpr):
    at = tl.program_id(0)
    total = 0.0
    for i in range(LOW, 1):
        x = tl.load(x_ptr + at * stride + (i + W - 1))
        total += x * x
    tl.store(y_ptr + at, total)


@autodiff(inputs_require_grad=(0,))
def window(x, step=2):
    x = x.contiguous()
    n = (x.numel() - 4) // step + 1
    y = torch.empty(n, device=x.device, dtype=x.dtype)
    window_kernel[(n,)](x, y, step, W=4)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(4 * dims["N"], device=device, dtype=dtype),), {"step": dims["step"]}
"""


@pytest.mark.parametrize("low", ["-3", "1 - W", "-W + 1", "at - at - W + 1"])
def test_loop_from_below_zero__reaches_as_far_as_it_has_steps(low: str, write: Callable[[str], Path]) -> None:
    """Windows that overlap are refused by the host's check, or added atomically; they never race."""
    file = write(NEGATIVE.replace("LOW", low))
    result = draft(file, {"N": 9, "step": 8})
    assert_right(file, result, [({"N": 9, "step": step}, "normal") for step in (8, 4)])
    if "disjoint((" in result["backward"]:
        with pytest.raises(AssertionError, match="overlaps itself"):
            assert_right(file, result, [({"N": 9, "step": 2}, "normal")])
    else:
        assert_right(file, result, [({"N": 9, "step": 2}, "normal")])
    overlapping = draft(file, {"N": 9, "step": 2})
    assert_right(file, overlapping, [({"N": 9, "step": step}, "normal") for step in (2, 3)])


SIX = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 24, "M": 9}]


@triton.jit
def pick_kernel(x_ptr, at_ptr, y_ptr, n, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
                D: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    lane = tl.program_id(0) * 8 + tl.arange(0, 8)
    at = tl.load(at_ptr + lane, mask=lane < n, other=0)
    if A:
        at += 1
    if B:
        at += 2
    if C:
        at += 1
    if D:
        at += 2
    if E:
        at += 1
    if F:
        at += 1
    x = tl.load(x_ptr + at, mask=lane < n, other=0.0)
    tl.store(y_ptr + lane, x * x, mask=lane < n)


@autodiff(inputs_require_grad=(0,))
def pick(x, at, a=True, b=False, c=True, d=False, e=True, f=False):
    x, at = x.contiguous(), at.contiguous()
    y = torch.empty(at.shape, device=x.device, dtype=x.dtype)
    pick_kernel[(triton.cdiv(at.numel(), 8),)](x, at, y, at.numel(), A=a, B=b, C=c, D=d, E=e, F=f)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    at = torch.randint(0, dims["N"] - 8, (dims["M"],), device=device)
    return torch.randn(dims["N"], device=device, dtype=dtype), at
"""


def test_flags__of_which_none_helps__cost_few_schedules(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six flags have 12 answers and 60 pairs of answers; where all are known, nothing is proven either."""
    made = []
    side = plans._of_side
    monkeypatch.setattr(plans, "_of_side", lambda site, facts: made.append(facts) or side(site, facts))
    file = write(SIX)
    result = draft(file, {"N": 24, "M": 9})
    assert result["report"]["atomics"] == 1
    assert 0 < len(made) <= 8
    assert_right(file, result, [({"N": 24, "M": 9}, "normal")])


@pytest.mark.parametrize("count", range(1, 10))
def test_flags_together__have_every_pair_of_answers(count: int) -> None:
    graph = Graph()
    asked = [graph.param(f"flag{i}") for i in range(count)]
    rows = [dict(row) for row in flags.together(asked, 2)]
    for one, two in combinations(asked, 2):
        assert len({(row[one], row[two]) for row in rows}) == 4
    for few in (rows, [dict(row) for row in flags.together(asked, 1)]):
        assert all({row[one] for row in few} == {True, False} for one in asked)
