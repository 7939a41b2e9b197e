"""Reverse loops of linear recurrences that are walked in tiles of steps, by a scan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from diff_support import ROOT, assert_right, draft, edits_of, pair_text
from kernel_agent import compiled, draw, specialised
from kernel_agent.differentiate.ir.graph import Graph
from kernel_agent.differentiate.ir.nodes import Node
from kernel_agent.differentiate.ir.ranges import at_most_one
from kernel_agent.forward import load
from kernel_agent.launches import launch_intercept

EXAMPLE = ROOT / "examples/linear_recurrence.py"
SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "T": 21, "D": 9}]


@triton.jit
def kernel(x_ptr, a_ptr, w_ptr, h_ptr, T, D, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    h = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        offs = (b * T + t) * D + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0)
        a = tl.load(a_ptr + offs, mask=mask, other=0.0)
        h = tl.sigmoid(a) * h + w * x
        tl.store(h_ptr + offs, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def stub(x, a, w):
    x, a = x.contiguous(), a.contiguous()
    B, T, D = x.shape
    h = torch.empty_like(x)
    kernel[(triton.cdiv(D, 8), B)](x, a, w.contiguous(), h, T, D, True, BLOCK=8)
    return h


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D = dims["B"], dims["T"], dims["D"]
    x, a = (torch.randn(B, T, D, device=device, dtype=dtype) for _ in range(2))
    return (x, a, torch.randn(D, device=device, dtype=dtype)), {}
"""
DIMS = {"B": 2, "T": 21, "D": 9}
STEP = "        h = tl.sigmoid(a) * h + w * x\n"
STORE = "        tl.store(h_ptr + offs, h, mask=mask)\n"
RANGE = "    for t in range(T):\n"
TILE = 8
LENGTHS = (0, 1, 7, 8, 9, 21)
SAID = f"{TILE} steps at a time, by a scan"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(SOURCE, tmp_path / "recurrence.py")


def scanned(file: Path, dims: dict = DIMS, tile: int = TILE, **options) -> dict:
    return draft(file, dims, config={"scan": tile}, **options)


def kernels(result: dict) -> str:
    return result["backward"].split("\nclass ")[0].split("\ndef ")[0]


def cases(*lengths: int, **more) -> list[tuple[dict, str]]:
    return [({**DIMS, "T": n, **more}, layout) for n in lengths for layout in ("normal", "transposed")]


# what is offered


def test_recurrence__is_offered_tiles_first__and_is_drafted_step_by_step() -> None:
    dims = {"B": 2, "T": 40, "D": 70, "gate": True, "h0": True}
    plain = draft(EXAMPLE, dims)
    assert plain["report"]["configs"][:2] == [{"scan": 64}, {"scan": 64, "num_warps": 8}]
    assert "for back in range(T):" in plain["backward"] and "scan(" not in plain["backward"]
    made = draft(EXAMPLE, dims, config={"scan": 64})
    assert "for first in range(0, T, 64):" in made["backward"]
    assert not any("scan" in config for config in made["report"]["configs"])


@pytest.mark.parametrize(("block", "steps"), [(128, 32), (256, 16), (512, None)])
def test_wider_blocks__have_fewer_steps_in_a_tile(changed, block: int, steps: int | None) -> None:
    file = changed(("cdiv(D, 8)", f"cdiv(D, {block})"), ("BLOCK=8", f"BLOCK={block}"))
    found = [c["scan"] for c in draft(file, DIMS)["report"]["configs"] if "scan" in c]
    assert found == ([steps, steps] if steps else [])


def test_asking_what_is_offered__leaves_the_draft_alone(changed, monkeypatch) -> None:
    from kernel_agent.differentiate.schedule import step_tiles

    file = changed((STEP, "        h = tl.sigmoid(a) * h + w * x * tl.sum(tl.arange(0, 16), 0)\n"))
    asked = draft(file, DIMS)["backward"]
    monkeypatch.setattr(step_tiles, "offers", lambda *_: [])
    assert draft(file, DIMS)["backward"] == asked


# what comes of it


@pytest.mark.parametrize(("gate", "h0"), [(True, True), (False, True), (True, False), (False, False)])
def test_example__in_tiles__has_the_gradients_of_steps(gate: bool, h0: bool) -> None:
    dims = {"B": 2, "T": 40, "D": 70, "gate": gate, "h0": h0}
    result = draft(EXAMPLE, dims, config={"scan": 16})
    assert "16 steps at a time" in result["backward"] and "associative_scan" in result["backward"]
    lengths = (0, 1, 15, 16, 17, 40)
    assert_right(EXAMPLE, result, [({**dims, "T": n, "D": 37}, "normal") for n in lengths])


def test_tile_longer_than_the_loop(changed) -> None:
    assert_right(changed(), scanned(changed(), tile=64), cases(3, 21))


RIGHT = {
    "gates of data": (),
    "a constant factor": ((STEP, "        h = 0.9 * h + w * x\n"),),
    "a sum of all before": ((STEP, "        h = h + w * x * tl.sigmoid(a)\n"),),
    "the factor is masked": ((STEP, "        h = tl.where(a > 0, h, 0.0) * 0.8 + w * x\n"),),
    "the sign changes": ((STEP, "        h = w * x - h * tl.sigmoid(a)\n"),),
    "two of its parts are a difference": (
        (STEP, "        h = tl.sigmoid(a) * h - 0.5 * h * tl.sigmoid(x) + w * x\n"),
    ),
    "it is divided": ((STEP, "        h = h / (1.0 + tl.exp(a)) + w * x\n"),),
    "a flag chooses": ((STEP, "        if FLAG:\n            a = tl.sigmoid(a)\n        h = a * h + w * x\n"),),
    "the forward is not linear": ((STEP, "        h = tl.sigmoid(a * h) + w * x\n"),),
    "it is a square, which is not stored": ((STEP, "        h = 0.2 * tl.sigmoid(a) * tl.sin(h * h) + 0.3 * w * x\n"), ("offs, h, mask", "offs, h * 2, mask")),
    "another first step": ((RANGE, "    for t in range(1, T):\n"), ("    h = torch.empty", "    h = torch.zeros")),
    "a factor that varies with the step": ((STEP, "        h = h * (1.0 / (t + 2)) + w * x * tl.sigmoid(a)\n"),),
    "two recurrences, one of the other": (
        (STEP, "        g = 0.5 * g + tl.sigmoid(a) * x\n        h = tl.sigmoid(a) * h + w * g\n"),
        (RANGE, "    g = tl.zeros([BLOCK], dtype=tl.float32)\n" + RANGE),
    ),
    "what is read out is summed over channels": (
        (STORE, "        tl.store(h_ptr + (b * T + t) * D + tl.program_id(0), tl.sum(h * x, 0))\n"),
        ("torch.empty_like", "torch.zeros_like"),
        ("cdiv(D, 8)", "cdiv(D, 16)"),
        ("BLOCK=8", "BLOCK=16"),
    ),
    "a step adds to what others add to": (
        ("tl.load(a_ptr + offs, mask", "tl.load(a_ptr + (b * T + t) // 4 * D + cols, mask"),
    ),
    "a flag has all steps add to one place": (
        (STEP, STEP + "        if FLAG:\n            h += tl.load(a_ptr + cols, mask=mask, other=0.0)\n"),
    ),
    "a number is carried": (
        (STEP, "        s = 0.5 * s + tl.sum(w * x, 0)\n        h = tl.sigmoid(a) * s\n"),
        (RANGE, "    s = 0.0\n" + RANGE),
    ),
    "all add to one place": (("tl.load(a_ptr + offs, mask=mask, other=0.0)", "tl.load(a_ptr)"),),
    "a block of two axes": (
        ("    w = tl.load(w_ptr + cols, mask=mask, other=0.0)", "    n = tl.arange(0, 4)\n    w = tl.load(w_ptr + cols, mask=mask, other=0.0)"),
        ("tl.zeros([BLOCK], ", "tl.zeros([BLOCK, 4], "),
        (STEP, "        h = tl.sigmoid(a)[:, None] * h * (1.0 / (1.0 + n[None, :])) + (w * x)[:, None]\n"),
        (STORE, "        tl.store(h_ptr + offs, tl.sum(h * h, 1), mask=mask)\n"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", RIGHT)
def test_gradients_are_right__where(what: str, changed) -> None:
    file = changed(*RIGHT[what])
    result = scanned(file)
    assert SAID in result["backward"], result["backward"]
    assert "for back" not in result["backward"]
    known = [n for n in LENGTHS if n or not what.endswith("add to one place")]  # which has none then
    assert_right(file, result, cases(*known))


def test_loop_around_it(changed, tmp_path: Path) -> None:
    """A program walks two sequences, one after the other."""
    text = SOURCE
    body = text[text.index(RANGE) : text.index("\n\n@autodiff")]
    around = (
        "    for r in range(2):\n        b = tl.program_id(1) * 2 + r\n"
        "        h = tl.zeros([BLOCK], dtype=tl.float32)\n"
    )
    text = text.replace(body, around + "".join("    " + line for line in body.splitlines(True)))
    file = tmp_path / "around.py"
    file.write_text(text.replace("cdiv(D, 8), B)", "cdiv(D, 8), B // 2)"))
    result = scanned(file)
    assert SAID in result["backward"], result["backward"]
    assert_right(file, result, cases(*LENGTHS))


def test_float64(changed) -> None:
    file = changed((", dtype=tl.float32)", ", dtype=tl.float64)"))
    result = scanned(file, dtype="float64")
    assert SAID in result["backward"]
    assert_right(file, result, cases(9, 21), bound=1e-12, dtype="float64")


def test_every_schedule(changed) -> None:
    for schedule in ("atomic", "owner"):
        result = scanned(changed(), schedule=schedule)
        assert SAID in result["backward"]
        assert_right(changed(), result, cases(9, 21))


# factors that may be greater than one

RAW = (STEP, "        h = a * h + w * x\n")


def test_factors_that_are_known__are_scanned_without_asking(changed) -> None:
    assert "linear_steps" not in scanned(changed())["backward"]
    assert "linear_steps" in scanned(changed(RAW))["backward"]


def test_factors_that_are_not__have_right_gradients(changed) -> None:
    file = changed(RAW)
    assert_right(file, scanned(file), cases(*LENGTHS))


@pytest.mark.parametrize("beyond", [1e3, 0.025])
def test_products_of_factors_that_no_float_holds__are_taken_step_by_step(
    changed, tmp_path: Path, beyond: float
) -> None:
    """Of 32 factors of 1,000 a product is infinite, also where what it multiplies is 0; of as many of 1/40
    it is lost, and comes back where as many of 40 follow."""
    file = changed(RAW)
    pair = tmp_path / "pair.py"
    pair.write_text(pair_text(file.read_text(), scanned(file, tile=64)["backward"]))
    module = load(str(pair), "interpret", "sm_90", "cpu").module
    T = 64
    a = torch.ones(1, T, 1)
    a[:, 1:33] = 1 / beyond
    a[:, 33:] = beyond
    a[:, 40] = 0.0 if beyond > 1 else beyond
    up = torch.zeros(1, T, 1)
    up[:, 5] = 1.0
    if beyond < 1:
        up[:, -1] = 1e30
    x, w = torch.full((1, T, 1), 1e-30), torch.ones(1)
    given = [t.clone().requires_grad_() for t in (x, a, w)]
    module.stub_autograd(*given).backward(up)
    d, expected = 0.0, torch.zeros(T, dtype=torch.float64)
    for t in reversed(range(T)):
        d = up[0, t, 0].double() + (d * a[0, t + 1, 0].double() if t + 1 < T else 0.0)
        expected[t] = d
    found = given[0].grad[0, :, 0].double()
    held = (expected == 0) | (expected.abs() > 1e-36)  # what float32 holds
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[held], expected[held], rtol=1e-4, atol=0)


# what stays as it is

STAYS = {
    "two are carried into each other": (
        (STEP, "        g, h = 0.5 * g - 0.3 * h, 0.5 * h + 0.3 * g + w * x * a\n"),
        (RANGE, "    g = tl.zeros([BLOCK], dtype=tl.float32)\n" + RANGE),
    ),
    "a factor may be infinite where it takes a zero": (
        *RIGHT["a block of two axes"][:2],
        (STEP, "        h = tl.sigmoid(a)[:, None] * h / (1.0 + n[None, :]) + (w * x)[:, None]\n"),
        RIGHT["a block of two axes"][3],
    ),
    "lanes are exchanged": ((STEP, "        h = tl.flip(h, 0) * tl.sigmoid(a) + w * x\n"),),
    "lanes are scanned": ((STEP, "        h = h * tl.sigmoid(a) + tl.cumsum(w * x, 0)\n"),),
    "random numbers": ((STEP, "        h = h * tl.rand(t, cols) + w * x * tl.sigmoid(a)\n"),),
    "a step asks for its number": (
        (STEP, "        if t % 3 == 1:\n            h = tl.sigmoid(a) * h\n        h += w * x\n"),
    ),
    "there is a loop inside": (
        (STEP, STEP + "        for k in range(2):\n            h = h + 0.1 * tl.load(x_ptr + offs - k * 0, mask=mask, other=0.0)\n"),
    ),
    "steps are wider": ((RANGE, "    for t in range(0, T, 2):\n"), ("    h = torch.empty", "    h = torch.zeros")),
}  # fmt: skip


@pytest.mark.parametrize("why", STAYS)
def test_loop_stays__where(why: str, changed) -> None:
    file = changed(*STAYS[why])
    plain = draft(file, DIMS)
    assert not any("scan" in config for config in plain["report"]["configs"])
    result = scanned(file)
    assert "by a scan" not in result["backward"]
    assert kernels(result) == kernels(plain)
    assert_right(file, result, cases(9))


@pytest.mark.parametrize("tile", [1, 3, 12])
def test_tile_that_is_no_power_of_two__is_none(changed, tile: int) -> None:
    assert "by a scan" not in scanned(changed(), tile=tile)["backward"]


def test_what_is_overwritten__stays(changed) -> None:
    file = changed(
        ("tl.store(h_ptr + offs", "tl.store(x_ptr + offs"),
        ("    x, a = x.contiguous(), a.contiguous()", "    x, a = x.clone(), a.contiguous()"),
        ("    return h\n", "    return x\n"),
    )
    assert "by a scan" not in scanned(file)["backward"]


# compiled


def compiled_ptx(file: Path, folder: Path, dims: dict, stub: str, **options) -> str:
    """PTX for sm_90 of the main kernel of a draft."""
    made = draft(file, dims, **options)
    pair = folder / "pair.py"
    pair.write_text(pair_text(file.read_text(), made["backward"]))
    fwd = load(str(pair))
    args, rest = draw.make_inputs(fwd, dims, 0, dtype="float32")
    launches: list = []
    with launch_intercept(lambda launch: (launches.append(launch), launch.run())):
        args = [arg.requires_grad_() if arg is not None else None for arg in args]
        getattr(fwd.module, f"{stub}_autograd")(*args, **rest).sum().backward()
    compiler = specialised.Compiler(fwd.target.triton)
    launch = next(one for one in launches if re.search(r"_bwd$", one.name))
    kernel, options = compiler.specialise(launch)
    source = compiled.lower(kernel, compiler.backend, compiler.target, options)
    assert source is not None
    return str(compiled.build(source)["asm"]["ptx"])


@pytest.mark.parametrize(
    "what",
    [
        "gates of data",
        "a block of two axes",
        "what is read out is summed over channels",
        "all add to one place",
        None,
    ],
)
def test_it_compiles(what: str | None, changed, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    file = changed(*(RIGHT[what] if what else (RAW,)))
    assert ".entry kernel_bwd" in compiled_ptx(file, tmp_path, DIMS, "stub", config={"scan": 16})


def test_example_compiles__with_all_it_is_offered(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    dims = {"B": 1, "T": 20, "D": 70, "gate": True, "h0": True}
    config = {"scan": 64, "num_warps": 8}
    ptx = compiled_ptx(EXAMPLE, tmp_path, dims, "linear_recurrence", config=config)
    assert "shfl.sync" in ptx


# bounds


class Values:
    def __init__(self) -> None:
        self.g = Graph()
        self.x = self.g.fresh("load", {}, "float32", (), self.g.top)

    def call(self, name: str, value: Node) -> Node:
        return self.g.call(name, value)

    def softplus(self) -> Node:
        return self.call("log", self.g.add(self.g.number(1), self.call("exp", self.x)))


SMALL = {
    "a sigmoid": lambda v: v.call("sigmoid", v.x),
    "one less a sigmoid": lambda v: v.g.sub(v.g.number(1), v.call("sigmoid", v.x)),
    "a product of such": lambda v: v.g.mul(v.call("tanh", v.x), v.call("sigmoid", v.x)),
    "a decay by a softplus": lambda v: v.call("exp", v.g.neg(v.softplus())),
    "a decay by a rate": lambda v: v.call("exp", v.g.mul(v.g.neg(v.call("exp", v.x)), v.softplus())),
    "either": lambda v: v.g.where(v.g.compare("<", v.x, v.g.number(0)), v.call("sigmoid", v.x), v.g.number(-1)),
}  # fmt: skip
LARGE = {
    "what is loaded": lambda v: v.x,
    "an exponential": lambda v: v.call("exp", v.x),
    "a growth by a softplus": lambda v: v.call("exp", v.softplus()),
    "a sum of two": lambda v: v.g.add(v.call("sigmoid", v.x), v.call("tanh", v.x)),
    "one less a tanh": lambda v: v.g.sub(v.g.number(1), v.call("tanh", v.x)),
    "a number": lambda v: v.g.number(1.5),
    "a number below": lambda v: v.g.number(-1.5),
    "either, of which one is": lambda v: v.g.where(v.g.compare("<", v.x, v.g.number(0)), v.call("sigmoid", v.x), v.x),
    "a quotient": lambda v: v.g.div(v.call("sigmoid", v.x), v.call("exp", v.x)),
}  # fmt: skip


@pytest.mark.parametrize("what", [*SMALL, *LARGE])
def test_factor__is_known_to_be_one_at_most(what: str) -> None:
    made = (SMALL | LARGE)[what](Values())
    assert at_most_one(made) == (what in SMALL)
