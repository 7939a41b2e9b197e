"""The static scan: dishonest backwards are named with their line, honest ones pass."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from kernel_agent import errors
from kernel_agent.operations import scan
from kernel_agent.operations.elsewhere import Elsewhere
from sources import SCALE, SCALE_BACKWARD, SCALE_PAIR

LAUNCH = (
    "        scale_bwd_kernel[(triton.cdiv(d_y.numel(), 16),)](d_y, d_x, ctx.factor, d_y.numel(), BLOCK=16)\n"
)


# What honest backwards import and define.
HONEST = """
import contextlib
import enum
import functools
import itertools
import math
import operator
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import torch as t
import torch.nn.functional as F
import triton.language as tl
from torch import zeros_like as like
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Config:
    block: int
    warps: int = 4


class Kind(enum.Enum):
    ROWS = 1


class Plain:
    def __init__(self, rows):
        self.rows = rows
"""


def findings(source):
    return scan.scan(source, ast.parse(source))["findings"]


def notes_of(source, words):
    return [f["message"] for f in findings(source) if f["severity"] == "note" and words in f["message"]]


def rejected(source):
    return {
        (f["rule"], source.splitlines()[f["line"] - 1].strip())
        for f in findings(source)
        if f["severity"] == "reject"
    }


def test_honest_pair__has_no_findings_and_an_entry():
    result = scan.scan(SCALE_PAIR, ast.parse(SCALE_PAIR))
    assert [finding["severity"] for finding in result["findings"]] == ["note"]
    assert result == {
        "findings": result["findings"],
        "entry": "scale_autograd",
        "kernels": ["scale_kernel", "scale_bwd_kernel"],
        "launches": ["scale_bwd_kernel"],
    }


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("torch_math", "d_x = torch.matmul(d_y, w)"),
        ("torch_math", "d_x = d_y.mm(w)"),
        ("torch_math", "d_x = d_y @ w"),
        ("torch_math", "d_x = torch.nn.functional.softmax(d_y, dim=-1)"),
        ("torch_math", "d_x = d_y.softmax(-1)"),
        ("torch_math", "d_x = torch.einsum('i,i->', d_y, d_y)"),
        ("torch_math", "d_x = torch.ops.aten.mm(d_y, w)"),
        ("torch_math", "d_x.scatter_add_(0, index, d_y)"),
        ("autograd", "d_x = torch.autograd.grad(y, x, d_y)"),
        ("autograd", "y.backward(d_y)"),
        ("autograd", "d_x = torch.func.vjp(f, x)"),
        ("autograd", "f = torch.compile(g)"),
        ("autograd", "with torch.enable_grad(): pass"),
        ("forbidden", "exec('d_x = d_y')"),
        ("forbidden", "open('/etc/passwd')"),
        ("forbidden", "getattr(torch, 'mat' + 'mul')"),
        ("forbidden", "d_x = d_y.__matmul__(w)"),
        ("forbidden", "torch.__dict__['matmul'](d_y, w)"),
        ("import", "import os"),
        ("import", "from ctypes import CDLL"),
        ("import", "import numpy as np"),
        ("import", "from operator import attrgetter"),
        ("import", "import typing; typing.get_type_hints(d_y)"),
        ("torch_math", "import torch as t; t.matmul(d_y, w)"),
        ("torch_math", "from torch import matmul as mm"),
        ("torch_math", "m = torch.matmul"),
        ("torch_math", "import torch.nn.functional as F; F.gelu(d_y)"),
        ("forbidden", "t = torch"),
        ("forbidden", "t, one = torch, 1"),
        ("torch_math", "f = lambda g=torch.mul: g"),
        ("torch_math", "table = {'mul': torch.mul}"),
        ("torch_math", "kept = torch.library.Library('aten', 'IMPL')"),
        ("forbidden", "import torch as t; [t for t in ()]; t.overrides"),
        ("forbidden", "frame = walk.gi_frame"),
        ("forbidden", "frame = frame.f_back"),
        ("forbidden", "match walk:\n            case object(gi_frame=frame): pass"),
        ("forbidden", "getattr(ctx, 'gi_' + 'frame')"),
        ("forbidden", "getattr(walk, 'gi_frame', None)"),
        ("forbidden", "look = getattr"),
        ("forbidden", "__builtins__['open']"),
        ("forbidden", "bases = type('T', (torch.Tensor,), {})"),
        ("forbidden", "d_y._backward_hooks"),
        ("autograd", "d_x = x.grad_fn(d_y)"),
        ("autograd", "Scale.setup_context(torch.Tensor, (), d_y)"),
        ("torch_math", "d_x.map_(d_y, max)"),
        ("redefined", "global scale_kernel; scale_kernel = None"),
        ("forbidden", "half = d_y.is_leaf"),
        ("forbidden", "first = x.grad is None"),
        ("forbidden", "half = x.is_shared()"),
        ("forbidden", "recorded = torch.is_grad_enabled()"),
    ],
)
def test_dishonest_line__in_the_backward__is_rejected(rule, line):
    source = SCALE_PAIR.replace(LAUNCH, LAUNCH + f"        {line}\n")
    assert rule in {found for found, text in rejected(source) if text in line or found == "redefined"}


@pytest.mark.parametrize(
    "line",
    [
        "partial = torch.empty((4, 8), device=d_y.device, dtype=torch.float32)",
        "d_x = partial.sum(0).to(d_y.dtype).view(-1)",
        "d_y = d_y.contiguous() if d_y.stride(-1) != 1 else d_y",
        "d_x = torch.zeros_like(d_y).reshape(4, 2).transpose(0, 1)",
        "scale = math.sqrt(8) * math.exp(2)",
        "block = triton.next_power_of_2(8)",
        "if ctx.needs_input_grad[0]: pass",
        "grid = lambda meta: (triton.cdiv(8, meta['BLOCK']),)",
        "exp2 = torch.finfo(torch.float32).max",
        "x, w = ctx.saved_tensors",
        "launch = functools.partial(dict, BLOCK=16)",
        "count = functools.reduce(operator.mul, d_y.shape, 1)",
        "for i, j in itertools.product(range(2), range(2)): pass",
        "window = getattr(ctx, 'window', None)",
        "known = hasattr(ctx, 'window')",
        "dtype = getattr(torch, 'float8_e4m3fn', None)",
        "lanes = Config(block=16, warps=4).block",
        "with contextlib.nullcontext(): pass",
        "shape: typing.Optional[Sequence[int]] = d_y.shape",
        "kind = Kind.ROWS",
        "size = torch.float32.itemsize",
        "many = torch.cuda.get_device_properties(0).multi_processor_count",
        "ctx._kept = 1; kept = ctx._kept",
        "same = t.zeros_like(d_y) if ctx is None else like(d_y)",
        "descriptor = TensorDescriptor(d_y, [4], [1], [4])",
        "ok = isinstance(d_y, torch.Tensor) and d_y.dtype in (torch.float16, tl.float16)",
        "inner = [torch for torch in range(3)]",
        "ctx.grad = d_y; grad = ctx.grad",
    ],
)
def test_honest_line__in_the_backward__passes(line):
    source = SCALE_PAIR.replace(LAUNCH, LAUNCH + f"        {line}\n")
    assert rejected(source.replace("# ---- backward ----", "# ---- backward ----\n" + HONEST)) == set()


@pytest.mark.parametrize(
    "definition",
    [
        "class Late:\n    def __del__(self): pass",
        "class Late:\n    __iter__ = None",
        "class Late(torch.Tensor): pass",
        "class Late(metaclass=type): pass",
        "class Late:\n    def put(self): self.x = 1",
        "class Late:\n    @staticmethod\n    def __init__(kernel): kernel.x = 1",
        "class Late(torch.autograd.Function):\n    @staticmethod\n    def put(kernel): kernel.x = 1",
        "async def late(): pass",
        "triton = Late",
    ],
)
def test_definition__that_runs_or_changes_what_others_rely_on__is_rejected(definition):
    assert rejected(SCALE_PAIR + f"\n\n{definition}\n") != set()


def test_kernel_body__maths_of_triton__passes():
    source = SCALE_PAIR.replace(
        "    tl.store(d_x_ptr + offsets, d_y * factor, mask=mask)",
        "    d_y = tl.exp(tl.dot(d_y, d_y).sum(0)).sigmoid()\n    tl.store(d_x_ptr + offsets, d_y, "
        "mask=mask)",
    )
    assert rejected(source) == set()


def test_parameter_called_input__passes_but_the_builtin_does_not():
    assert (
        rejected(
            SCALE_PAIR.replace("ctx, x, factor", "ctx, input, factor").replace("scale(x,", "scale(input,")
        )
        == set()
    )
    assert rejected(SCALE_PAIR.replace(LAUNCH, LAUNCH + "        input()\n")) == {("forbidden", "input()")}


def test_forward_part__may_do_what_it_likes():
    source = SCALE_PAIR.replace(
        "    y = torch.empty_like(x)\n", "    y = torch.empty_like(x)\n    torch.matmul(x, x)\n"
    )
    assert rejected(source) == set()


def test_try_around_a_launch__is_rejected():
    tried = f"        try:\n    {LAUNCH}        except Exception:\n            d_x = d_y\n"
    assert rejected(SCALE_PAIR.replace(LAUNCH, tried)) == {("try", "try:")}


def test_backward_without_a_launch__is_rejected_also_through_helpers():
    assert ("no_launch", "def backward(ctx, d_y):") in rejected(SCALE_PAIR.replace(LAUNCH, ""))
    helper = "\n\ndef helper(d_y, d_x):\n    scale_bwd_kernel[(1,)](d_y, d_x, 1.0, 1, BLOCK=16)\n"
    assert rejected(SCALE_PAIR.replace(LAUNCH, "        helper(d_y, d_x)\n") + helper) == set()


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (SCALE, "entry"),
        (SCALE, "function"),
        (SCALE_PAIR.replace("def scale_autograd", "def scale_grad"), "entry"),
        (SCALE_PAIR.replace("class Scale(torch.autograd.Function)", "class Scale"), "function"),
        (SCALE_PAIR.replace("def backward(", "def backwards("), "function"),
    ],
)
def test_missing_structure__is_rejected(source, rule):
    assert rule in {f["rule"] for f in findings(source) if f["severity"] == "reject"}


def test_file_without_marker__is_scanned_whole_and_warned_about():
    source = SCALE_PAIR.replace("# ---- backward ----", "")
    assert [f["rule"] for f in findings(source) if f["severity"] != "note"] == ["marker"]


@pytest.mark.parametrize(
    ("said", "noted"),
    [
        ("", True),
        (', None, "ieee"', False),
        (", None, 'tf32'", True),
        (", None, None, False", False),
        (", input_precision=None", True),
        (", input_precision='tf32x3'", False),
        (", allow_tf32=True", True),
        (", input_precision=PRECISION", False),
    ],
)
def test_product__in_tf32_by_name_place_or_default__has_a_note(said, noted):
    body = f"    x = tl.load(d_y_ptr, mask=mask, other=0.0)\n    b = tl.dot(x, x{said})\n"
    text = SCALE_PAIR.replace(
        "def scale_bwd_kernel(", f"def other(d_y_ptr, mask):\n{body}\n\n@triton.jit\ndef scale_bwd_kernel("
    )
    assert any("TF32" in message for message in notes_of(text, "kernel other")) is noted


def test_kernel__that_leaves_something_to_the_machine__has_a_note_of_each_kind():
    body = "    a = tl.load(d_y_ptr, mask=mask)\n    b = tl.dot(a, tl.load(d_y_ptr, mask=mask))\n"
    body += "    c = tl.dot(a, b, input_precision='ieee') + tl.load(d_y_ptr, mask=mask, other=0.0)\n"
    text = SCALE_PAIR.replace(
        "def scale_bwd_kernel(", f"def other(d_y_ptr, mask):\n{body}\n\n@triton.jit\ndef scale_bwd_kernel("
    )
    notes = notes_of(text, "kernel other")
    assert ["other=" in message for message in notes] == [True, False] and "TF32" in notes[1]
    said = text.replace(
        "b = tl.dot(a, tl.load(d_y_ptr, mask=mask))", "b = tl.dot(a, a, input_precision='tf32')"
    )
    assert "TF32" in notes_of(said, "kernel other")[1]


TUNED = """@triton.autotune(configs={configs}, key=["n"]{more})
@triton.jit
def tuned(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    to = sum_ptr + tl.program_id(0) * 2
    tl.atomic_add(to + 1, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK))))


"""
TWO = "[triton.Config({'BLOCK': 16}), triton.Config({'BLOCK': 32})]"


@pytest.mark.parametrize(
    ("configs", "more", "found"),
    [
        (TWO, "", True),
        ("[triton.Config({'BLOCK': b}) for b in (16, 32)]", ", reset_to_zero=['x_ptr']", True),
        (TWO, ", reset_to_zero=['sum_ptr']", False),
        (TWO, ", restore_value=['sum_ptr']", False),
        (TWO, ", pre_hook=clear", False),
        ("[triton.Config({'BLOCK': 16})]", "", False),
    ],
)
def test_tuned_kernel__that_adds_to_what_no_trial_clears__is_rejected(configs, more, found):
    text = TUNED.replace("{configs}", configs).replace("{more}", more)
    source = SCALE_PAIR.replace(
        "@triton.jit\ndef scale_bwd_kernel(", f"{text}@triton.jit\ndef scale_bwd_kernel("
    )
    assert ("autotune" in {rule for rule, _ in rejected(source)}) == found


SETTINGS = [
    "torch.is_autocast_enabled()", "torch.compiler.is_compiling()", "torch.get_float32_matmul_precision()",
    "torch.backends.cuda.matmul.allow_tf32",
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_of_torch__that_no_case_changes__is_rejected(setting):
    source = SCALE_PAIR.replace(LAUNCH, LAUNCH + f"        wide = {setting}\n")
    assert {rule for rule, _ in rejected(source)} == {"forbidden"}
    by_hand = source.replace("# ---- backward ----", "")
    assert ["no case" in message for message in notes_of(by_hand, "asks for")] == [True]


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_of_torch__that_the_stub_asks_for_itself__is_asked_in_the_forward_only(setting):
    asks = f"    wide = {setting}\n"
    source = SCALE_PAIR
    for line in ("    y = torch.empty_like(x)\n", "        ctx.factor = factor\n"):
        assert line in source
        source = source.replace(line, (asks if "empty" in line else "    " + asks) + line)
    assert rejected(source) == set()
    backward = source.replace(LAUNCH, LAUNCH + f"        wide = {setting}\n")
    assert {rule for rule, _ in rejected(backward)} == {"forbidden"}


def test_operation__in_a_child__executes_nothing(run_op, write):
    bomb = write(SCALE + "raise SystemExit('executed')\n" + SCALE_BACKWARD)
    ran = run_op("scan", bomb)
    assert ran.result["ok"] and ran.result["entry"] == "scale_autograd"


def test_operation__file_that_does_not_parse__is_syntax(write, tmp_path):
    with pytest.raises(errors.Unusable) as caught:
        scan.run({"file": str(write("def f(:\n"))}, tmp_path)
    assert (caught.value.kind, caught.value.line) == ("syntax", 1)


OWN = SCALE_PAIR.replace("# ---- backward ----", "")


def test_own_module__values_got_at_import__are_its_own():
    text = "import logging\nimport os\n" + OWN.replace(LAUNCH, LAUNCH + "        log.info(MANY)\n")
    text += "\n\nlog = logging.getLogger(__name__)\nMANY = int(os.environ.get('MANY', 4))\n"
    assert rejected(text) == set()


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("torch_math", "blend = torch.mul"),
        ("torch_math", "blend = {'mul': torch.mul}"),
        ("torch_math", "blend = lambda a: a.softmax(-1)"),
        ("patch", "blend = sys.modules"),
        ("forbidden", "blend = eval('torch.mul')"),
    ],
)
def test_own_module__what_its_backward_names__is_scanned_too(rule, named):
    text = "import sys\n" + OWN.replace(LAUNCH, LAUNCH + "        blend\n") + f"\n\n{named}\n"
    assert (rule, named) in rejected(text)


@pytest.mark.parametrize(
    "line",
    [
        "torch.equal = max",
        "setattr(torch, 'equal', max)",
        "vars(torch)['equal'] = max",
        "sys.modules['torch'] = None",
        "exec('pass')",
        "frame = sys._getframe()",
        "code = max.__globals__",
        "del torch.equal",
        "importlib.reload(torch)",
    ],
)
def test_own_module__that_patches_what_runs_beside_it__is_rejected(line):
    text = "import importlib\nimport sys\n" + OWN + f"\n\n{line}\n"
    assert ("patch", line) in rejected(text)


def test_own_module__settings_and_tests__pass():
    text = "import sys, os\n" + OWN + "\n\ntorch.backends.cuda.matmul.allow_tf32 = False\n"
    text += "os.environ['A'] = 'b'\nsys.path.insert(0, '.')\n\nif __name__ == '__main__':\n    sys.exit(0)\n"
    assert rejected(text) == set()


DECORATED = """import contextlib
import functools


def guard(fn):
    WRAPS
    def wrapper(ctx, *args):
        return fn(ctx, *args)

    return wrapper


@contextlib.contextmanager
def on_device(tensor):
    YIELD


"""


def decorated(wraps="@functools.wraps(fn)", body="yield"):
    """The module with a decorator around its backward, and its launch inside a context manager."""
    text = OWN.replace("    def backward(", "    @guard\n    def backward(")
    text = text.replace(LAUNCH, "        with on_device(d_y):\n    " + LAUNCH)
    head, rest = text.split("@triton.jit", 1)
    return head + DECORATED.replace("WRAPS", wraps).replace("YIELD", body) + "@triton.jit" + rest


FINALLY = "try:\n        yield\n    finally:\n        "


@pytest.mark.parametrize("wraps", ["", "@functools.wraps(fn)"])
@pytest.mark.parametrize("body", ["yield", FINALLY + "pass"])
def test_own_module__decorators_and_context_managers__pass(wraps, body):
    assert rejected(decorated(wraps, body)) == set()


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("import", decorated("@functools.wraps(fn, updated=())")),
        ("import", decorated("@functools.wraps(fn.__self__)")),
        ("import", decorated(body="functools.wraps(guard)(on_device)\n    yield")),
        ("import", decorated(body="copy = functools.wraps\n    yield")),
        ("import", decorated(body="contextlib.suppress(Exception)\n    yield")),
        ("forbidden", decorated("@functools.wraps(torch)")),
        ("try", decorated(body="try:\n        yield\n    except Exception:\n        pass")),
        ("try", decorated(body=FINALLY + "return")),
    ],
)
def test_own_module__decorators_that_could_do_more__are_rejected(rule, source):
    assert rule in {found for found, _ in rejected(source)}


def test_pair__decorators_stay_on_the_list_of_names():
    source = decorated().replace("class Scale", "# ---- backward ----\nclass Scale", 1)
    head, rest = source.split("def guard(fn)", 1)
    source = head + "# ---- backward ----\n\n\ndef guard(fn)" + rest.replace("# ---- backward ----\n", "")
    assert {"import"} <= {rule for rule, _ in rejected(source)}


OTHER = """

class Other(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, d_y):
        return torch.mul(d_y, 2)


def other(x):
    return Other.apply(x)
"""


def test_own_module__one_of_several_functions__is_scanned_alone():
    plain = OWN.replace("@autodiff(inputs_require_grad=(0,))\n", "") + OTHER
    assert "@autodiff" not in plain
    alone, both = (scan.scan(plain, ast.parse(plain), name) for name in ("Scale", "other"))
    assert not [f for f in alone["findings"] if f["severity"] == "reject"]
    assert {f["rule"] for f in both["findings"] if f["severity"] == "reject"} == {"torch_math", "no_launch"}
    assert (alone["entry"], both["entry"]) == ("scale_autograd", "other")
    calls = plain.replace(LAUNCH, LAUNCH + "        other(d_y)\n")
    found = scan.scan(calls, ast.parse(calls), "Scale")["findings"]
    assert "torch_math" in {f["rule"] for f in found if f["severity"] == "reject"}


def test_own_module__backward_that_only_scales__is_judged_when_it_runs():
    assert rejected(OWN.replace(LAUNCH, "        d_x = d_y * ctx.factor\n")) == set()
    assert ("no_launch", "def backward(ctx, d_y):") in rejected(SCALE_PAIR.replace(LAUNCH, ""))


HELPED = SCALE_PAIR.replace("triton.cdiv(x.numel(), 16)", "helpers.blocks(x.numel())").replace(
    "import triton\n", "import triton\nimport helpers\n", 1
)
WRITTEN_OUT = """    y = torch.empty_like(x)
    Scale.launch((helpers.blocks(x.numel()),))
"""


def test_module_of_the_users__is_named_where_the_stub_names_it__and_not_in_the_backward():
    entry = HELPED.index("def scale_autograd")
    body = HELPED.index("\n", entry) + 1
    assert not rejected(HELPED[:body] + WRITTEN_OUT + HELPED[body:])
    other = WRITTEN_OUT.replace("helpers.blocks(", "helpers.gradient(")
    assert {rule for rule, _ in rejected(HELPED[:body] + other + HELPED[body:])} == {"import"}
    in_backward = HELPED.replace("d_y = d_y.contiguous()", "d_y = helpers.blocks(d_y)")
    assert rejected(in_backward) == {("import", "d_y = helpers.blocks(d_y)")}


def test_heuristics_of_an_imported_kernel__are_asked_in_the_forward_where_the_stub_launches_it():
    launched = SCALE_PAIR.replace("    scale_kernel[", "    kernels.scale[").replace(
        "import triton\n", "import triton\nimport kernels\n", 1
    )
    assert launched.count("    kernels.scale[") == 1
    rule = "kernels.scale.fn.values['BLOCK'](dict(n=x.numel()))"
    saved = "        ctx.factor = factor\n"
    assert launched.count(saved) == 1
    assert not rejected(launched.replace(saved, f"{saved}        ctx.block = {rule}\n"))
    other = rule.replace("kernels.scale", "kernels.other")
    assert rejected(launched.replace(saved, f"{saved}        ctx.block = {other}\n"))
    changed = "kernels.scale.fn.values['BLOCK'] = len"
    assert rejected(launched.replace(saved, f"{saved}        {changed}\n"))
    in_backward = "d_y = d_y.contiguous()"
    assert rejected(launched.replace(in_backward, f"{in_backward}; {rule.replace('x.', 'd_y.')}"))


GLOBAL = """
BLOCK, calls = 16, 0


def block_of(x):
    global BLOCK, calls
    calls += 1
    if x.numel() < 16:
        BLOCK = 8
    return BLOCK


# ---- backward ----


def NAME(x):
    global BLOCK, calls
    calls += 1
    if x.numel() < 16:
        BLOCK = 8
    return BLOCK
"""


@pytest.mark.parametrize(
    ("copy", "right"),
    [
        ({}, True),
        ({"NAME": "block_of_2"}, False),
        ({"BLOCK = 8\n": "BLOCK = 4\n"}, False),
        ({"calls += 1\n": "calls += 2\n"}, False),
        ({"BLOCK = 8\n": "(BLOCK := 8)\n"}, False),
        ({"BLOCK = 8\n": "BLOCK = 8\n    for calls in (1, 2): pass\n"}, False),
        ({"global BLOCK, calls\n": "global BLOCK, calls, scale\n"}, False),
    ],
)
def test_copy_of_a_host_function__gives_global_names_what_it_gives_them(copy, right):
    before, after = GLOBAL.split("# ---- backward ----")
    for old, new in ({"NAME": "block_of_autograd"} | copy).items():
        assert after.count(old) == 1
        after = after.replace(old, new)
    forward, backward = SCALE_PAIR.split("# ---- backward ----")
    found = rejected(f"{forward}{before}# ---- backward ----{after}{backward}")
    assert ({rule for rule, _ in found} == set()) == right
    assert right or "redefined" in {rule for rule, _ in found}


BY_HAND = (Path(__file__).parents[1] / "e2e" / "handwritten" / "alias.py").read_text()
GUARDS = """
import functools
import torch
from .inner import again, doubled

def guard(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*settled(args))
    return wrapper

def settled(args):
    return [a.contiguous() if isinstance(a, torch.Tensor) else a for a in args]

def computes(fn):
    return lambda *args: [halved(g) for g in fn(*args)]

def halved(g):
    return torch.mul(g, 0.5)

def patches(fn):
    torch.mul = fn
    return fn

def frames(fn):
    return fn.__globals__["guard"](fn)
"""
INNER = """
import torch

def again(fn):
    return fn

def doubled(fn):
    return lambda *args: torch.add(fn(*args), 0)
"""


@pytest.mark.parametrize(
    ("imported", "decorator", "found"),
    [
        ("from ..guards import guard", "guard", None),
        ("from .. import guards as own", "own.guard", None),
        ("import lib.guards", "lib.guards.guard", None),
        ("from lib.guards import again", "again", None),
        ("from ..guards import computes", "computes", ("torch_math", "computes of guards.py, line 19: ")),
        ("from lib.guards import doubled", "doubled", ("torch_math", "doubled of inner.py, line 8: ")),
        ("from ..guards import patches", "patches", ("patch", "patches of guards.py, line 22: ")),
        ("from ..guards import frames", "frames", ("forbidden", "frames of guards.py, line 26: ")),
        ("from ..guards import missing", "missing", ("import", "uses ..guards.missing")),
        ("from ...guards import guard", "guard", ("import", "uses ...guards.guard")),
        ("from sklearn import guard", "guard", ("import", "uses sklearn.guard")),
    ],
)
def test_decorator_of_another_module__is_read_there(tmp_path, imported, decorator, found):
    (tmp_path / "lib" / "ops").mkdir(parents=True)
    (tmp_path / "lib" / "guards.py").write_text(GUARDS)
    (tmp_path / "lib" / "inner.py").write_text(INNER)
    source = BY_HAND.replace("import torch\n", f"import torch\n{imported}\n", 1)
    source = source.replace("    def backward(", f"    @{decorator}\n    def backward(", 1)
    seen = scan.scan(source, ast.parse(source), None, Elsewhere(tmp_path, "lib.ops"))["findings"]
    told = [(f["rule"], f["message"]) for f in seen if f["severity"] == "reject"]
    if found is None:
        assert told == []
    else:
        assert any(rule == found[0] and found[1] in message for rule, message in told), told
