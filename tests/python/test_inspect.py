"""Operation inspect."""

from __future__ import annotations

import pytest
from kernel_agent import errors
from kernel_agent.operations import inspect as op
from sources import SCALE

RICH = """\
import torch
import triton
import triton.language as tl
from triton.language import cdiv as ceil_div
from kernel_agent import autodiff

DEVICE = triton.runtime.driver.active.get_active_torch_device()
SWEEP = [{"M": 8, "N": 16}, {"dims": {"M": 9, "N": 5}, "required": False}]
SWEEP_CPU = [{"M": 2, "N": 3}]


def setup():
    raise RuntimeError("inspect runs nothing")


def flops(dims, mode):
    return 0


@triton.jit
def square(x):
    return tl.exp2(x) * x


@triton.autotune(configs=[triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})], key=["n"])
@triton.heuristics({"EVEN": lambda args: True})
@triton.jit
def rich_kernel(x_ptr, n, EVEN: tl.constexpr, BLOCK: tl.constexpr = 8):
    steps = ceil_div(n, BLOCK)
    for i in tl.range(0, steps):
        x = square(tl.load(x_ptr + tl.arange(0, BLOCK))).to(tl.float32)
        tl.store(x_ptr, x.sum(0))


@autodiff(inputs_require_grad=(2, 0))
def rich(x: torch.Tensor, n: int, w, *, eps: "float" = 1e-5):
    rich_kernel[(1,)](x, n)
    return x


def make_args(dims, device="cuda", dtype=torch.bfloat16):
    raise RuntimeError("inspect runs nothing")
"""


@pytest.fixture
def rich(write, tmp_path):
    return op.run({"file": str(write(RICH)), "target": "sm_80"}, tmp_path)


def test_stub__parameters_and_gradients__are_described(rich):
    assert (
        rich["stub"]["name"] == "rich"
        and rich["stub"]["line"] == RICH[: RICH.index("def rich(")].count("\n") + 1
    )
    assert rich["stub"]["params"] == [
        {"name": "x", "kind": "positional", "default": None, "annotation": "torch.Tensor", "grad": True},
        {"name": "n", "kind": "positional", "default": None, "annotation": "int", "grad": False},
        {"name": "w", "kind": "positional", "default": None, "annotation": None, "grad": True},
        {"name": "eps", "kind": "keyword", "default": "1e-05", "annotation": "float", "grad": False},
    ]
    assert rich["grads"] == ["x", "w"]


def test_kernels__launchers_and_helpers__are_told_apart(rich):
    square, kernel = rich["kernels"]
    assert (square["name"], square["helper"], square["autotuned"]) == ("square", True, False)
    assert kernel["line"] == RICH[: RICH.index("def rich_kernel")].count("\n") + 1
    assert (kernel["autotuned"], kernel["heuristics"], kernel["helper"]) == (True, True, False)
    assert kernel["params"] == ["x_ptr", "n", "EVEN", "BLOCK"] and kernel["constexpr"] == ["EVEN", "BLOCK"]


def test_operations__functions_methods_and_aliases__are_listed(rich):
    assert rich["ops"] == ["arange", "cdiv", "exp2", "load", "range", "store", "sum", "to"]


def test_declarations__sweeps_flags_dtype_and_answers(rich):
    assert rich["sweep"] == [
        {"dims": {"M": 8, "N": 16}, "required": True},
        {"dims": {"M": 9, "N": 5}, "required": False},
    ]
    assert rich["sweep_cpu"] == [{"dims": {"M": 2, "N": 3}, "required": True}]
    assert rich["has"] == {"setup": True, "flops": True, "reference": False}
    assert rich["dtype"] == "bfloat16"
    (answer,) = rich["device_answers"]
    assert (answer["line"], answer["answer"]) == (7, "cuda:0") and "get_active_torch_device" in answer[
        "asked"
    ]


def test_plain_file__in_a_child__answers_in_the_protocols_shape(run_op, write):
    ran = run_op("inspect", write(SCALE))
    assert ran.code == 0 and ran.result["ok"], ran.output
    assert ran.result["sweep_cpu"] is None and ran.result["dtype"] == "float32"
    assert set(ran.result["versions"]) == {"python", "torch", "triton", "numpy"}
    assert ran.result["ops"] == ["arange", "load", "program_id", "store"]


MODULE = """
import functools

import torch
import triton


def guard(fn):
    def wrapper(ctx, *args):
        return fn(ctx, *args)

    return wrapper


class First(torch.autograd.Function):
    @staticmethod
    @guard
    def forward(ctx, x, w, eps=1e-6, limits=(1, 2)):
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, dy, None, None


class Second(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


second = Second.apply
other_name = Second.apply


def third(x, scale=2.0):
    return Second.apply(x * scale)


def test_second():
    return Second.apply(torch.ones(1))


def bench():
    second(torch.ones(1))


SWEEP = [{"N": 4}]
SWEEP_third = [{"M": 5}]


def make_args_third(dims, device="cuda", dtype=torch.float32):
    return (torch.ones(dims["M"], device=device, dtype=dtype),)
"""


def of_module(write, tmp_path, text=MODULE, **request):
    return op.run({"file": str(write(text)), "target": "sm_80", **request}, tmp_path)


def test_module__its_functions__are_listed_and_the_first_with_arguments_is_meant(write, tmp_path):
    found = of_module(write, tmp_path)
    assert found["functions"] == ["First", "second", "third"]
    assert (found["stub"]["name"], found["sweep"][0]["dims"]) == ("third", {"M": 5})


def test_module__forward_behind_a_plain_decorator__has_its_parameters_as_they_are_written(write, tmp_path):
    text = MODULE + '\n\ndef make_args(dims, device="cuda", dtype=torch.float32): ...\n'
    found = of_module(write, tmp_path, text, function="First")
    assert [(p["name"], p["default"], p["grad"]) for p in found["stub"]["params"]] == [
        ("x", None, True),
        ("w", None, True),
        ("eps", "1e-06", False),
        ("limits", "(1, 2)", False),
    ]
    assert found["sweep"][0]["dims"] == {"N": 4}
    assert of_module(write, tmp_path, text, function="Second")["stub"]["name"] == "second"


@pytest.mark.parametrize(("name", "kind"), [("fourth", "no_stub"), ("second", "make_args_missing")])
def test_module__function_that_is_not_there_or_has_no_arguments__is_said(write, tmp_path, name, kind):
    with pytest.raises(errors.Unusable) as caught:
        of_module(write, tmp_path, function=name)
    assert caught.value.kind == kind
    assert ("First, second, third" if kind == "no_stub" else "make_args_second") in caught.value.message
