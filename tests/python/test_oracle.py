"""The oracle: expected outputs and gradients from a forward file alone, checked against references and finite
differences."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

from kernel_agent import draw, forward, tensors
from kernel_agent.operations import budget, evaluations, oracle
from kernel_agent.torch_tl.builder import Builder
from kernel_agent.torch_tl.kinks import Kinks
from kernel_agent.torch_tl.memory import Memory
from kernel_agent.torch_tl.record import Tape
from kernel_agent.torch_tl.repeat import repeats_of
from oracle_support import HEAD, KERNELS, relative, run_case, stub


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernel__forward_gradient_and_reference_agree(path: Path, tmp_path: Path) -> None:
    for shape in forward.load(path).sweep:
        case, found = run_case(path, tmp_path, dims=shape.dims)
        assert case["ok"], case.get("error")
        assert "reference_error" not in case
        floor = 2e-3 if any(i["dtype"] == "float16" for i in case["inputs"]) else 1e-5
        for output in (o for o in case["outputs"] if o["kind"] != "none"):
            index = output["index"]
            assert relative(found[f"fwd/{index}"], found[f"out/{index}"]) < floor
            assert relative(found[f"base_out/{index}"], found[f"out/{index}"]) < floor
        for name in case["grads"]:
            assert found[f"grad/{name}"].dtype == torch.float64
            assert relative(found[f"base/{name}"], found[f"grad/{name}"]) < floor
            if f"ref_grad/{name}" in found:
                assert relative(found[f"grad/{name}"], found[f"ref_grad/{name}"]) < 2e-6
        assert case["facts"]["races"] == []


def test_result__has_every_field_of_the_protocol(
    write: Callable[..., Path], run_op: Callable[..., Any]
) -> None:
    path = stub(write, "return square(x)")
    case = {"id": 3, "dims": {"N": 40}, "seed": 11, "upstream": {"kind": "normal", "seed": 12}}
    ran = run_op("oracle", path, cases=[case], fd=True)
    assert ran.result["ok"], ran.output
    (made,) = ran.result["cases"]
    assert made["file"] == "case-3.safetensors"
    assert made["bytes"] == (ran.scratch / made["file"]).stat().st_size
    assert made["inputs"] == [{"name": "x", "shape": [40], "dtype": "float32", "grad": True}]
    assert made["outputs"] == [
        {"index": 0, "kind": "tensor", "shape": [40], "dtype": "float32", "differentiable": True}
    ]
    assert (made["grads"], made["free"]) == (["x"], [])
    facts = {"launches": 1, "programs": 3, "bytes_read": 160, "bytes_written": 160, "atomics": 0, "races": []}
    masked = made["facts"].pop("undefined_lanes")
    assert len(masked) == 1 and "square_kernel" in masked[0] and "x_ptr" in masked[0]
    assert made["facts"] == facts
    assert (made["fd"]["dtype"], made["fd"]["skipped"]) == ("float64", None)
    (*_, slope) = made["fd"]["slopes"]["x"]
    assert set(slope) == {"analytic", "numeric", "step", "spread", "noise"}
    found = tensors.load(ran.scratch / made["file"])
    assert set(found) == {"fwd/0", "out/0", "base_out/0", "grad/x", "base/x", "jitter/x"}
    assert found["fwd/0"].dtype == found["base/x"].dtype == torch.float32
    moved = (found["jitter/x"] - found["grad/x"]).norm() / found["grad/x"].norm()
    assert 0 < moved < 4 * torch.finfo(torch.float32).eps


def test_gradient_of_few_elements__is_made_at_inputs_close_by_too(
    write: Callable[..., Path], run_op: Callable[..., Any]
) -> None:
    path = stub(write, "return square(x)")
    case = {"id": 0, "dims": {"N": 3}, "seed": 11, "upstream": {"kind": "normal", "seed": 12}}
    ran = run_op("oracle", path, cases=[case])
    found = tensors.load(ran.scratch / ran.result["cases"][0]["file"])
    near = [found[f"near/{at}/x"] for at in range(6)]
    base = [found[f"near_base/{at}/x"] for at in range(6)]
    eps = torch.finfo(torch.float32).eps
    for exact, rounded in zip(near, base, strict=True):
        assert exact.dtype == torch.float64 and rounded.dtype == torch.float32
        assert 0 < relative(exact, found["grad/x"]) < 256 * eps  # elsewhere, but not far
        assert relative(rounded, exact) < 2 * eps  # both at the same inputs, which float32 holds
    assert len({tuple(exact.tolist()) for exact in near}) == 6


def test_closer__gives_draws_of_large_gradients_in_which_frozen_inputs_move_too(write, tmp_path):
    """y = w * x: the gradient of x is w times the upstream, and nothing but w can move it."""
    source = HEAD.replace("return (torch.randn(", "return (torch.randn(dims['N'], dtype=dtype), torch.randn(")
    body = (
        "y = torch.empty_like(x)\n"
        "mul_kernel[(triton.cdiv(x.numel(), 1024),)](x, w, y, x.numel(), BLOCK=1024)\nreturn y"
    )
    kernel = (
        "@triton.jit\ndef mul_kernel(x_ptr, w_ptr, y_ptr, n, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    w = tl.load(w_ptr + at, mask=at < n)\n"
        "    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * w, mask=at < n)\n\n\n"
    )
    lines = "\n".join("    " + line for line in body.splitlines())
    file = write(source + kernel + f"@autodiff(inputs_require_grad=(0,))\ndef stub(x, w):\n{lines}\n")
    dims = {"N": evaluations.NEARBY_ELEMENTS + 5}
    _, plain = run_case(file, tmp_path, dims=dims)
    case, found = run_case(file, tmp_path, dims=dims, closer=True)
    assert not any(name.startswith("near") for name in plain), "of large gradients only when it is asked for"
    assert case["ok"] and set(found) == {
        f"{part}/{at}/x" for part in ("near", "near_base", "moved") for at in range(evaluations.CLOSER_DRAWS)
    }
    for at in range(evaluations.CLOSER_DRAWS):
        assert torch.equal(found[f"moved/{at}/x"], plain["grad/x"]), (
            "what wants no gradient stays where it is"
        )
    draws = [found[f"near/{at}/x"] for at in range(evaluations.CLOSER_DRAWS)]
    for at, near in enumerate(draws):
        off = relative(near, plain["grad/x"])
        assert 1e-7 < off < 64 * 2**-23 and not any(torch.equal(near, other) for other in draws[:at])
        assert relative(found[f"near_base/{at}/x"], near) < 1e-7


def test_closer__moves_inputs_by_a_unit_each_time_anew(write, tmp_path):
    """y = x * x: the gradient moves with x, by at most the unit that x moves by."""
    path = stub(write, "return square(x)")
    case, found = run_case(path, tmp_path, dims={"N": 5}, closer=True)
    exact = run_case(path, tmp_path, dims={"N": 5})[1]["grad/x"]
    draws = [found[f"moved/{at}/x"] for at in range(evaluations.CLOSER_DRAWS)]
    assert case["ok"] and len({tuple(draw.tolist()) for draw in draws}) > 4
    assert all(((draw - exact).abs() <= 2**-22 * exact.abs()).all() for draw in draws)


# What is computed in lanes that tl.where then discards, and the derivative elsewhere.
DISCARDED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "root of negative numbers": ("tl.where(x > 0, tl.sqrt(x), 0.0)", lambda x: 0.5 / x.sqrt()),
    "reciprocal root": ("tl.where(x > 0, 1 / tl.sqrt(tl.maximum(x, 0.0)), x * 0)", lambda x: -0.5 * x**-1.5),
    "entropy": ("tl.where(x > 0, x * tl.log(tl.maximum(x, 0.0)), 0.0)", lambda x: x.log() + 1),
    "quotient": ("tl.where(x > 0, (x - 1) / tl.where(x > 0, x, 0.0), 0.0)", lambda x: x**-2),
    "overflow": (
        "tl.where(x > 0, x, 0.0) + tl.where(x > 0, tl.exp(-10000 * x), 0.0) * 0.0",
        torch.ones_like,
    ),
}


@pytest.mark.parametrize("name", DISCARDED)
def test_discarded_lanes__have_no_part_in_the_gradient(
    name: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    text, derivative = DISCARDED[name]
    path = stub(write, "return square(x)")
    path.write_text(path.read_text().replace("at, x * x, mask", f"at, {text}, mask"))
    case, found = run_case(path, tmp_path)
    assert case["ok"], case.get("error")
    fwd = forward.load(path)
    made = oracle.Case(fwd, {"id": 0, "dims": {"N": 24}, "seed": 5, "upstream": {}}, None)
    x = made.arguments(None)["x"].double()
    upstream = draw.upstream("normal", 9, None, (24,), torch.float32, "cpu", 0, 1)
    assert upstream is not None
    right = torch.where(x > 0, derivative(x.abs()) * upstream, 0.0)
    for part in ("grad", "jitter", "base"):
        assert relative(found[f"{part}/x"], right) < 1e-5


# Host programs around the kernel, and what they compute.
HOSTS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "view and transpose": ("return square(x).view(4, -1).t()", lambda x: (x * x).view(4, -1).t()),
    "slices": ("y = square(x)\nreturn y[::2] * 3, y[1:5]", lambda x: ((x * x)[::2] * 3, (x * x)[1:5])),
    "slice of the input": ("return square(x[4:20].contiguous())", lambda x: x[4:20] ** 2),
    "assignment to a slice": (
        "y = torch.zeros_like(x)\ny[2:10] = square(x)[:8]\nreturn y + 1",
        lambda x: torch.nn.functional.pad((x * x)[:8], (2, x.numel() - 10)) + 1,
    ),
    "out argument": ("y = torch.empty_like(x)\ntorch.mul(square(x), x, out=y)\nreturn y", lambda x: x**3),
    "in place": ("y = square(x)\ny.add_(x).mul_(2)\nreturn y", lambda x: 2 * (x * x + x)),
    "in place on the input": (
        "keep = x.clone()\nx.mul_(0.5)\ny = square(x)\nx.copy_(keep)\nreturn y",
        lambda x: (x * 0.5) ** 2,
    ),
    "reduction": ("return square(x).view(3, -1).sum(0)", lambda x: (x * x).view(3, -1).sum(0)),
    "repeated use": ("y = square(x)\nreturn square(y) + y", lambda x: x**4 + x * x),
    "detached factor": (
        "y = square(x)\nreturn y * y.detach()",
        lambda x: x * x * (x * x).detach(),
    ),
    "no_grad": ("with torch.no_grad():\n    y = square(x) * 2\nreturn y", lambda x: 2 * x * x),
    "inference_mode": (
        "with torch.inference_mode():\n    y = square(x) * 2\n    y[3:] += x[3:]\n    return y",
        lambda x: 2 * x * x + torch.cat([torch.zeros(3), x[3:]]),
    ),
    "autograd function": (
        "class Square(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, a):\n"
        + "        ctx.save_for_backward(a)\n        return square(a)\nreturn Square.apply(x) + x",
        lambda x: x * x + x,
    ),
    "strided input and output": (
        "y = torch.empty(2 * x.numel(), device=x.device)[::2]\ny.copy_(square(x))\nreturn y",
        lambda x: x * x,
    ),
    "cast and back": ("return square(x).to(torch.float64).float() * 2", lambda x: 2 * x * x),
    "half constant": (
        "return square(x) * torch.full((24,), 0.1, dtype=torch.float16)",
        lambda x: x * x * float(torch.tensor(0.1).half()),
    ),
    "concatenation": ("return torch.cat([square(x), x])", lambda x: torch.cat([x * x, x])),
    "index": (
        "i = torch.arange(5, device=x.device)\nreturn square(x)[i.flip(0)]",
        lambda x: (x * x)[:5].flip(0),
    ),
    "data-dependent size": (
        "m = x > 0\nreturn square(x[m])",
        lambda x: x[x > 0] ** 2,
    ),
    "host control flow": ("y = square(x)\nreturn y * 2 if y.sum().item() > 0 else y", lambda x: 2 * x * x),
    "softmax": ("return torch.softmax(square(x), 0)", lambda x: torch.softmax(x * x, 0)),
    "dictionary": ('return {"a": square(x), "b": [None, 3]}', lambda x: x * x),
}  # fmt: skip


# Host programs, and what the oracle says of x: that no kernel has to compute its gradient, or how many of its
# 24 elements pass.
PASSING: dict[str, tuple[str, bool, int | None]] = {
    "a residual beside a kernel": ("return square(torch.ones_like(x)) + x", True, None),
    "torch alone": ("return square(torch.ones_like(x)) * x.exp()", True, None),
    "torch, and a kernel behind it": ("return square(x * 2)", False, None),
    "a residual around a kernel": ("return square(x) + x", False, None),
    "detached": ("return square(x).detach() + x", True, None),
    "a part": ("return torch.cat([square(x[:10].contiguous()), x[10:]])", False, 14),
    "a part, in another order": ("return torch.cat([square(x[10:].contiguous()), x[:10]])", False, None),
    "less than chance makes": ("return torch.cat([square(x[:23].contiguous()), x[23:]])", False, None),
}


@pytest.mark.parametrize("name", PASSING)
def test_gradient_that_no_kernel_has_to_compute__is_named(
    name: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    body, free, passed = PASSING[name]
    case, found = run_case(stub(write, body), tmp_path)
    assert case["ok"], case.get("error")
    assert case["free"] == (["x"] if free else [])
    part = found.get("passed/x")
    assert (None if part is None else int(part.isfinite().sum())) == passed
    if part is not None:
        assert torch.equal(part[part.isfinite()].double(), found["grad/x"][part.isfinite()])


@pytest.mark.parametrize("name", HOSTS)
def test_host_program__is_followed(name: str, write: Callable[..., Path], tmp_path: Path) -> None:
    body, expected = HOSTS[name]
    path = stub(write, body)
    case, found = run_case(path, tmp_path)
    assert case["ok"], case.get("error")
    fwd = forward.load(path)
    x = oracle.Case(fwd, {"id": 0, "dims": fwd.sweep[0].dims, "seed": 5, "upstream": {}}, None).arguments(
        None
    )["x"]
    x = x.double().requires_grad_()
    right = expected(x)
    right = right if isinstance(right, tuple) else (right,)
    upstreams = oracle.Case(
        fwd, {"id": 0, "dims": {}, "seed": 5, "upstream": {"kind": "normal", "seed": 9}}, None
    )
    outputs = [
        oracle.draw.Output(i, t.float(), "tensor", True)
        for i, t in enumerate(right)
        if isinstance(t, torch.Tensor)
    ]
    given = upstreams.upstreams(outputs)
    for index, value in enumerate(right):
        assert relative(found[f"out/{index}"], value.detach()) < 1e-12
    (grad,) = torch.autograd.grad(list(right), x, [given[i].double() for i in range(len(right))])
    assert relative(found["grad/x"], grad) < 1e-12
    assert relative(found["base/x"], grad) < 1e-5


def test_random_host_operation__keeps_the_values_of_the_real_call(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    case, found = run_case(stub(write, "return square(x) * torch.rand_like(x)"), tmp_path)
    assert case["ok"], case.get("error")
    assert relative(found["fwd/0"], found["out/0"]) < 1e-6


@pytest.mark.parametrize("layout", [None, "expanded", "stacked"])
@pytest.mark.parametrize("kind", ["normal", "onehot", "ones", "none_one"])
def test_upstream__is_applied_as_drawn(
    kind: str, layout: str | None, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = stub(write, "y = square(x)\nreturn y, y * 2")
    layouts = {"upstream/1": layout} if layout else {}
    case, found = run_case(path, tmp_path, upstream={"kind": kind, "seed": 4}, layouts=layouts)
    assert case["ok"], case.get("error")
    given = [
        oracle.draw.upstream(kind, 4, layout if at else None, (24,), torch.float32, "cpu", at, 2)
        for at in (0, 1)
    ]
    total = sum((1 + index) * u.double() for index, u in enumerate(given) if u is not None)
    fwd = forward.load(path)
    x = oracle.Case(fwd, {"id": 0, "dims": {"N": 24}, "seed": 5, "upstream": {}}, None).arguments(None)["x"]
    assert relative(found["grad/x"], 2 * x.double() * total) < 1e-12


def test_random_slice__cuts_only_its_own_gradient(write: Callable[..., Path], tmp_path: Path) -> None:
    path = stub(write, "y = square(x)\ny[:3].normal_()\nreturn y")
    case, found = run_case(path, tmp_path, upstream={"kind": "ones", "seed": 0})
    assert case["ok"], case.get("error")
    assert relative(found["fwd/0"], found["out/0"]) < 1e-6
    assert [value != 0 for value in found["grad/x"].tolist()] == [False] * 3 + [True] * 21


def test_half_inputs__stay_half_for_the_stub_and_are_exact_for_the_oracle(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    body = "assert x.dtype == torch.float16 and type(x) is torch.Tensor\nreturn square(x)"
    path = stub(write, body)
    case, found = run_case(path, tmp_path, dtype="float16")
    assert case["ok"], case.get("error")
    assert found["fwd/0"].dtype == found["base_out/0"].dtype == found["base/x"].dtype == torch.float16
    x = torch.sqrt(found["out/0"])
    assert torch.equal(x.half().double() ** 2, found["out/0"]), "the exact square of a half"
    assert 1e-6 < relative(found["base_out/0"], found["out/0"]) < 1e-3


def test_two_inputs_in_one_memory__get_separate_gradients(write: Callable[..., Path], tmp_path: Path) -> None:
    source = HEAD.replace(
        'return (torch.randn(dims["N"], device=device, dtype=dtype),)',
        'x = torch.randn(dims["N"], device=device, dtype=dtype)\n'
        '    return x, x, torch.ones(1, device=device, dtype=dtype).expand(dims["N"])',
    )
    source += (
        "@autodiff(inputs_require_grad=(0, 1, 2))\ndef stub(a, b, c):\n    return square(a) * 3 + b + c * c\n"
    )
    case, found = run_case(write(source), tmp_path, upstream={"kind": "ones", "seed": 0})
    assert case["ok"], case.get("error")
    assert found["grad/b"].tolist() == [1.0] * 24
    assert found["grad/a"].abs().min() > 0
    assert found["grad/c"].tolist() == [2.0] * 24


def test_bad_kernel__fails_its_case_with_the_line_and_not_the_others(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    before = (
        "@triton.jit\ndef bad_kernel(x_ptr, y_ptr, n):\n    at = tl.arange(0, 32)\n"
        "    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n).to(tl.int32, bitcast=True), mask=at < "
        "n)\n\n\n"
    )
    body = "y = torch.empty(x.shape, dtype=torch.int32, device=x.device)\nif x.numel() > 24:\n"
    body += "    bad_kernel[(1,)](x, y, x.numel())\nreturn square(x)"
    path = stub(write, body, before=before)
    cases = [
        {"id": i, "dims": {"N": n}, "seed": 1, "upstream": {"kind": "ones", "seed": 0}}
        for i, n in enumerate((30, 8))
    ]
    bad, good = oracle.run({"file": str(path), "cases": cases}, tmp_path)["cases"]
    assert good["ok"] and not bad["ok"]
    error = bad["error"]
    line = path.read_text().splitlines().index("    at = tl.arange(0, 32)") + 2
    assert (error["kind"], error["file"], error["line"]) == ("unsupported_op", str(path), line)
    assert "bit cast" in error["message"] and error["remedy"] and "bitcast=True" in error["traceback"]


def test_race_of_the_forward__is_a_fact(write: Callable[..., Path], tmp_path: Path) -> None:
    before = (
        "@triton.jit\ndef racing_kernel(x_ptr, y_ptr):\n    tl.store(y_ptr, tl.load(x_ptr + "
        "tl.program_id(0)))\n\n\n"
    )
    body = "y = torch.zeros(1, device=x.device)\nracing_kernel[(4,)](x, y)\nreturn y"
    path = stub(write, body, before=before)
    case, found = run_case(path, tmp_path, upstream={"kind": "ones", "seed": 0})
    (race,) = case["facts"]["races"]
    line = path.read_text().splitlines().index("def racing_kernel(x_ptr, y_ptr):") + 2
    assert race.startswith(f"racing_kernel, line {line}:") and "y_ptr" in race
    assert found["grad/x"].tolist() == [0.0] * 3 + [1.0] + [0.0] * 20, "the last program wins"


def test_memory_that_nobody_wrote__shows_as_nan(write: Callable[..., Path], tmp_path: Path) -> None:
    body = "y = torch.empty(30, device=x.device)\nsquare_kernel[(2,)](x, y, 24, BLOCK=16)\nreturn y"
    _, found = run_case(stub(write, body), tmp_path)
    assert found["out/0"].isnan().tolist() == [False] * 24 + [True] * 6


WRONG = {
    "raises": ("raise RuntimeError('no')", "reference() raised RuntimeError: no"),
    "other shape": ("return x[:3]", "reference() gives [3]"),
    "nothing": ("return None", "reference() gives None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_reference_that_cannot_be_used__is_reported_and_left_out(
    name: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    body, sentence = WRONG[name]
    path = stub(write, "return square(x)")
    path.write_text(path.read_text() + f"\n\ndef reference(x):\n    {body}\n")
    case, found = run_case(path, tmp_path)
    assert case["ok"] and sentence in case["reference_error"]
    assert not any(key.startswith("ref_") for key in found)


def test_wrong_reference__differs_from_the_oracle(write: Callable[..., Path], tmp_path: Path) -> None:
    path = stub(write, "return square(x)")
    path.write_text(path.read_text() + "\n\ndef reference(x):\n    return 1.5 * x * x\n")
    _, found = run_case(path, tmp_path)
    assert relative(found["ref_out/0"], found["out/0"]) > 0.4
    assert relative(found["ref_grad/x"], found["grad/x"]) > 0.4


GREATEST = """\
@triton.jit
def greatest_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + at, mask=at < N, other=-float("inf"))
    first = tl.argmax(x, axis=0)
    tl.store(y_ptr + row, tl.sum(tl.where(at == first, x, 0.0), axis=0))


"""
TIED = """

def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(2000, 32, device=device, dtype=dtype)
    x[ROWS, 5] = x[ROWS, 20] = 9.0
    return (x,)


def reference(x):
    return x.flip(-1).max(-1).valuesFACTOR
"""


@pytest.mark.parametrize(
    ("rows", "factor", "agree"),
    [("3:4", "", True), ("3:9", "", False), ("3:4", " + 0.001 * x[:, 3] * (torch.arange(2000) == 7)", False)],
    ids=["one row", "more rows than chance has", "and something else"],
)
def test_reference_that_chooses_another_of_equal_elements__agrees(
    rows: str, factor: str, agree: bool, write: Callable[..., Path], tmp_path: Path
) -> None:
    body = """y = torch.empty(x.shape[0], device=x.device, dtype=x.dtype)
greatest_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=32)
return y"""
    path = stub(write, body, before=GREATEST)
    path.write_text(path.read_text() + TIED.replace("ROWS", rows).replace("FACTOR", factor))
    _, found = run_case(path, tmp_path)
    assert torch.equal(found["grad/x"], found["ref_grad/x"]) == agree
    assert found["grad/x"][3, 5] != 0 and found["grad/x"][3, 20] == 0


@pytest.mark.parametrize(
    ("body", "dtype", "named"),
    [
        ("return square(x * 2**-4) * 2**8", "float16", ["x"]),
        ("return square(x * 2**-4) * 2**8", "float32", []),
        ("return square(x)", "float16", []),
    ],
)
def test_gradient_that_overflows_in_between_of_a_larger_upstream__is_named(
    body, dtype, named, write, tmp_path
):
    """It is 2 x u, and 256 u on its way."""
    case, found = run_case(stub(write, body), tmp_path, dtype=dtype)
    assert case["ok"], case["error"]
    assert case["overflows"] == named
    assert found["base/x"].isfinite().all()


def test_reference_whose_gradients_find_no_room__is_no_failure(write, tmp_path, monkeypatch):
    path = stub(write, "return square(x)")
    path.write_text(path.read_text() + "\n\ndef reference(x):\n    return x * x\n")

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")

    monkeypatch.setattr(oracle, "vector_jacobian", full)
    case, found = run_case(path, tmp_path)
    assert case["ok"], case["error"]
    assert "ran out of memory, 16.00 GiB asked for, in reference()" in case["reference_without_room"]
    assert "reference_error" not in case
    assert "ref_grad/x" not in found and "grad/x" in found


class OnTheGpu(torch.Tensor):
    """Stands in for a tensor of another device: it can be moved here, and nothing else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.to:
            raise RuntimeError("Expected all tensors to be on the same device")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})).as_subclass(torch.Tensor)


def test_reference_on_a_gpu__beside_an_evaluation_on_the_cpu__is_compared(write, tmp_path, monkeypatch):
    path = stub(write, "return square(x)")
    path.write_text(path.read_text() + "\n\ndef reference(x):\n    return x * x\n")
    called = oracle.Case.reference

    def there(self, recording):
        made, problem = called(self, recording)
        moved = {n: t.as_subclass(OnTheGpu) if n.startswith("ref_grad/") else t for n, t in made.items()}
        return moved, problem

    monkeypatch.setattr(oracle.Case, "reference", there)
    _, found = run_case(path, tmp_path)
    assert torch.allclose(found["ref_grad/x"], found["grad/x"])


UNUSABLE = {
    "integers only": ("return square(x).to(torch.int32)", "no_outputs"),
    "the input itself": ("square(x)\nreturn x", "no_outputs"),
    "exception": ("return square(x).view(7)", "stub_raised"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_stub_that_cannot_be_differentiated__is_refused(
    name: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    body, kind = UNUSABLE[name]
    case, _ = run_case(stub(write, body), tmp_path)
    assert not case["ok"] and case["error"]["kind"] == kind


@pytest.mark.parametrize(
    ("largest", "error", "few"),
    [(1.0, 1e-4, False), (100.0, 1e-4, True), (100.0, 1e-7, False)],
    ids=["all alike", "one decides", "one decides, and is right"],
)
def test_gradient_that_few_of_its_elements_decide__is_made_at_inputs_close_by_too(largest, error, few):
    """Of a norm over one column nearly all cancels: what is left is that of the rows nearest to zero."""
    exact = torch.ones(1000, dtype=torch.float64)
    exact[7] = largest
    made = {"grad/x": exact, "base/x": (exact * (1 + error)).float()}
    assert evaluations.hangs_on_few("x", made) == few
    small = {name: value[:30] for name, value in made.items()}
    assert evaluations.hangs_on_few("x", small)


@pytest.mark.parametrize(("off", "few"), [(20, True), (500, False)])
def test_gradient_that_eager_has_wrong_in_few_elements__is_made_at_inputs_close_by_too(off, few):
    """All of one size, and of one draw of eager PyTorch's rounding a few are off by what the next is not."""
    exact = torch.ones(1000, dtype=torch.float64)
    base = exact.float()
    base[:off] += 0.1
    assert evaluations.hangs_on_few("x", {"grad/x": exact, "base/x": base}) == few


def test_upstream__is_drawn_once_a_case_and_never_written(write, tmp_path, monkeypatch):
    drawn = []
    right = oracle.draw.upstream

    def draw_and_keep(*asked):
        made = right(*asked)
        drawn.append((asked[3:], made, made.clone()))
        return made

    monkeypatch.setattr(oracle.draw, "upstream", draw_and_keep)
    path = stub(write, "y = square(x)\nreturn y, y * 2")
    path.write_text(path.read_text() + "\n\ndef reference(x):\n    return x * x, 2 * x * x\n")
    case, found = run_case(path, tmp_path, fd=True)
    assert case["ok"] and "ref_grad/x" in found and case["fd"]["slopes"]["x"]
    assert (
        len(drawn) == len({str(asked) for asked, _, _ in drawn}) == 4
    )  # two outputs, in float32 and in float64 for fd
    assert all(torch.equal(made, before) for _, made, before in drawn)


def test_small_call_of_a_gpu__is_evaluated_on_the_cpu(write, tmp_path):
    """Stands in for CUDA: a record that says that it is of a GPU."""
    body = (
        "z = torch.zeros(x.shape, device=x.device)\nz[:4] = x.to(x.device)[:4] * 3\n"
        "z.copy_(torch.ones_like(z) + z)\nreturn square(z) + x"
    )
    fwd = forward.load(stub(write, body))
    made = oracle.Case(
        fwd, {"id": 0, "dims": {"N": 24}, "seed": 5, "upstream": {"kind": "normal", "seed": 9}}, None
    )
    recording = made.record(None)
    tape = recording.recorder.tape
    here = made.gradients(made.replay(recording, "exact"), recording)
    tape.device = torch.device("cuda")
    assert budget.place(tape) == torch.device("cpu")
    there = made.gradients(made.replay(recording, "exact"), recording)
    assert torch.equal(here["x"], there["x"]) and bool((here["x"] != 1).any())


def test_large_call__is_evaluated_where_it_ran(monkeypatch):
    tape = Tape(torch.device("cuda"))
    monkeypatch.setattr(budget, "evaluation_bytes", lambda tape: budget.SMALL + 1)
    assert budget.place(tape) == torch.device("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products__are_tf32_where_the_call_was_compiled(device):
    """The precision of a product hangs on where the call ran, not on where it is evaluated."""
    builder = Builder(Memory("native", "cpu", compiled=device == "cuda"))
    wanted = "tf32" if device == "cuda" else "ieee"
    assert builder.options.default_dot_input_precision == wanted
    assert repeats_of(builder.memory) is not repeats_of(
        Memory("native", "cpu", compiled=not builder.memory.compiled)
    )


def test_tf32_seen__names_what_is_less_exact_than_float32():
    exact = {"grad/x": torch.ones(4).double(), "grad/b": torch.ones(4).double(), "out/0": torch.ones(4)}
    base = {"base/x": torch.ones(4) + 1e-4, "base/b": torch.ones(4) + 1e-7, "base_out/0": torch.ones(4)}
    assert oracle.tf32_seen(exact | base) == ["grad/x"]
    half = {"base/x": torch.full((4,), 1 + 2**-10).half()}
    assert oracle.tf32_seen(exact | half) == []


def test_wide_call_of_a_gpu__goes_back_there(write, monkeypatch):
    """Stands in for CUDA: both places are this one, and the record says that it is of a GPU."""
    fwd = forward.load(stub(write, "return square(torch.where(x > 0, x, -x))"))
    made = oracle.Case(
        fwd, {"id": 0, "dims": {"N": 24}, "seed": 5, "upstream": {"kind": "normal", "seed": 9}}, None
    )
    recording = made.record(None)
    tape = recording.recorder.tape
    tape.device = torch.device("cuda")
    placed = []
    monkeypatch.setattr(budget, "place", lambda tape: placed.append(tape.wide) or torch.device("cpu"))
    monkeypatch.setattr(budget, "trial", lambda: budget_trial(wide=not tape.wide))
    kinks = Kinks()
    found = made.gradients(made.replay(recording, "exact", kinks=kinks), recording)["x"]
    assert placed == [False, True]
    x = recording.bound["x"].double()
    upstream = made.upstreams(recording.differentiable)[0].double()
    assert torch.allclose(found, 2 * x * upstream)
    again = Kinks()
    made.replay(made.record(None), "exact", kinks=again)
    assert len(kinks.kept) == len(again.kept), "what the first attempt had compared is forgotten"


def budget_trial(wide: bool) -> Callable[[], None]:
    """Raises at the third operation."""
    left = iter(range(2))

    def watch() -> None:
        if wide and next(left, None) is None:
            raise budget.Wide("wide")

    return watch


@pytest.mark.parametrize(
    ("seconds", "operations", "wide"), [(0.2, 1, False), (0.3, 1, True), (3, 9000, False)]
)
def test_trial__is_over_when_operations_take_long(seconds, operations, wide, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(budget.time, "monotonic", lambda: now[0])
    watch = budget.trial()
    raised = False
    for _ in range(operations):
        now[0] += seconds / operations
        try:
            watch()
        except budget.Wide:
            raised = True
    assert raised == wide
