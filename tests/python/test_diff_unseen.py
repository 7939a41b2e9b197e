"""A launch that no traced size makes raises in a draft, or the draft is refused: never is it made there
without its gradient, whatever it is reached by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft, pair_text
from kernel_agent.errors import Unusable
from kernel_agent.operations import candidate

HEAD = """import functools
import operator
import types

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"n": 33}, {"n": 50}]


def make_args(dims, device="cpu", dtype=torch.float32):
    n = dims["n"]
    return (torch.randn(n, device=device, dtype=dtype), torch.randn(n, device=device, dtype=dtype))


@triton.jit
def product(x, w, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + o, mask=o < n, other=0.0)
    b = tl.load(w + o, mask=o < n, other=0.0)
    tl.store(y + o, a * b, mask=o < n)


@triton.jit
def squared(x, w, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + o, mask=o < n, other=0.0)
    b = tl.load(w + o, mask=o < n, other=0.0)
    tl.store(y + o, a * a * b, mask=o < n)


def launch(x, w, y):
    squared[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)


class Bound:
    def __init__(self):
        self.kernel = squared

    def go(self, x, w, y):
        self.kernel[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)


class Named:
    def go(self, x, w, y):
        squared[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)


class Alone:
    @staticmethod
    def go(x, w, y):
        squared[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)


class Through:
    @property
    def kernel(self):
        return squared

    @property
    def go(self):
        return lambda x, w, y: squared[(4,)](x, w, y, x.numel(), B=16)


class Calling:
    def go(self, x, w, y):
        launch(x, w, y)


class Given:
    def __init__(self, kernel):
        self.kernel = kernel

    def go(self, x, w, y):
        self.kernel[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)


class Foreign:
    def go(self, other, x, w, y):
        other.kernel[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)


class Wrapped:
    def __init__(self):
        self.table = {"a": [Named()]}

    def go(self, x, w, y):
        self.table["a"][0].go(x, w, y)


class Slots:
    __slots__ = ("kernel",)

    def __init__(self, kernel):
        self.kernel = kernel

    def go(self, x, w, y):
        self.kernel[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.op = Named()

    def forward(self, x, w, y):
        self.op.go(x, w, y)


class Harmless:
    TABLE = {"double": lambda t: t * 2}

    def __init__(self):
        self.names = ["double"]

    def double(self, t):
        return self.TABLE[self.names[0]](t)


class SquaredFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        y = torch.empty_like(x)
        squared[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)
        return y

    @staticmethod
    def backward(ctx, d_y):
        squared[(1,)](d_y, d_y, d_y, 1, B=16)
        return d_y, d_y


BOUND_TO, NAMED, ALONE, THROUGH, CALLING = Bound(), Named(), Alone(), Through(), Calling()
GIVEN, FOREIGN, WRAPPED, MODULE, HARMLESS = Given(squared), Foreign(), Wrapped(), Module(), Harmless()
SLOTS, HOLDER, SPACE = Slots(squared), types.SimpleNamespace(kernel=squared), types.SimpleNamespace(go=launch)
LIBRARYS = torch.nn.ModuleList([Module()])
BOUND = squared[(4,)]
PART = functools.partial(squared[(4,)], B=16)
HANDED = functools.partial(launch)
KERNELS = {"squared": squared}
LAUNCHERS = [launch]
METHOD = NAMED.go
NESTED = types.SimpleNamespace(inner={"a": (launch,)})
LAMBDA = lambda x, w, y: squared[(4,)](x, w, y, x.numel(), B=16)  # noqa: E731


def closed_over(kernel):
    def go(x, w, y):
        kernel[(4,)](x, w, y, x.numel(), B=16)

    return go


CLOSED = closed_over(squared)


def around(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def closed_in(function):
    def inner(*args):
        return function(*args)

    return inner


HELD = closed_in(lambda x, w, y: squared[(4,)](x, w, y, x.numel(), B=16))
CACHED = functools.lru_cache(lambda: squared)
CALLED_ONCE = functools.lru_cache(lambda x, w, y: squared[(4,)](x, w, y, x.numel(), B=16))
DEFAULT = lambda x, w, y, kernel=squared: kernel[(4,)](x, w, y, x.numel(), B=16)  # noqa: E731


@around
def decorated(x, w, y):
    squared[(4,)](x, w, y, x.numel(), B=16)


DECORATED = [decorated]


@functools.lru_cache
def kept(name):
    return KERNELS[name]


def taking(kernel, x, w, y):
    kernel[(4,)](x, w, y, x.numel(), B=16)


def through_global(x, w, y):
    K[(4,)](x, w, y, x.numel(), B=16)  # noqa: F821


def plain(t):
    return t * 2


@around
def decorated_plain(t):
    return t * 2


@autodiff(inputs_require_grad=(0, 1))
def stub(x, w):
    y, z = torch.empty_like(x), torch.empty_like(x)
    product[(triton.cdiv(x.numel(), 16),)](x, w, z, x.numel(), B=16)
    if x.numel() > LIMIT:
        WAY
        return y + z
    return z
"""

GRID = "[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), B=16)"
WAYS = [
    f"k = squared; k = [k][0]; k{GRID}",
    f"k = squared; more = k; more{GRID}",
    "k = squared; k.run(x, w, y, x.numel(), B=16, grid=(4,), warmup=False)",
    "k = KERNELS['squared']; operator.itemgetter((4,))(k)(x, w, y, x.numel(), B=16)",
    "global K; K = squared; through_global(x, w, y)",
    f"k = squared if w.numel() else product; k{GRID}",
    f"(squared if w.numel() else product){GRID}",
    f"BOUND_TO.kernel{GRID}",
    f"THROUGH.kernel{GRID}",
    f"getattr(BOUND_TO, 'kernel'){GRID}",
    f"CACHED(){GRID}",
    f"kept('squared'){GRID}",
    "go = squared[(4,)]; go(x, w, y, x.numel(), B=16)",
    "BOUND(x, w, y, x.numel(), B=16)",
    "PART(x, w, y, x.numel())",
    "functools.partial(squared[(4,)], B=16)(x, w, y, x.numel())",
    "squared.run(x, w, y, x.numel(), B=16, grid=(4,), warmup=False)",
    "run = squared.run; run(x, w, y, x.numel(), B=16, grid=(4,), warmup=False)",
    "BOUND_TO.go(x, w, y)",
    "NAMED.go(x, w, y)",
    "CALLING.go(x, w, y)",
    "ALONE.go(x, w, y)",
    "Alone.go(x, w, y)",
    "Named().go(x, w, y)",
    "GIVEN.go(x, w, y)",
    "FOREIGN.go(BOUND_TO, x, w, y)",
    "WRAPPED.go(x, w, y)",
    "LIBRARYS[0](x, w, y)",
    "HELD(x, w, y)",
    "SLOTS.go(x, w, y)",
    "SPACE.go(x, w, y)",
    f"HOLDER.kernel{GRID}",
    "operator.itemgetter((4,))(squared)(x, w, y, x.numel(), B=16)",
    "THROUGH.go(x, w, y)",
    "CALLED_ONCE(x, w, y)",
    "hides = lambda NAMED: 0; NAMED.go(x, w, y)",
    "DEFAULT(x, w, y)",
    "DECORATED[0](x, w, y)",
    "vars(NAMED)['go'](x, w, y) if vars(NAMED) else Named.go(NAMED, x, w, y)",
    "METHOD(x, w, y)",
    "MODULE(x, w, y)",
    "LAMBDA(x, w, y)",
    "CLOSED(x, w, y)",
    "HANDED(x, w, y)",
    "NESTED.inner['a'][0](x, w, y)",
    "taking(squared, x, w, y)",
    "LAUNCHERS[0](x, w, y)",
    "go = launch; go(x, w, y)",
    "list(map(launch, [x], [w], [y]))",
    "apply = SquaredFunction.apply; y = apply(x, w)",
    "y = SquaredFunction.forward(None, x, w)",
    "(lambda k: k[(4,)](x, w, y, x.numel(), B=16))(squared)",
    "y = (lambda launch: torch.empty_like(x))(0); (launch, 0)[0](x, w, y)",
]

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(way: str, limit: int = 60) -> Path:
        file = tmp_path / "stub.py"
        file.write_text(HEAD.replace("LIMIT", str(limit)).replace("WAY", way))
        return file

    return make


def lines_of(file: Path, text: str) -> list[int]:
    return [at for at, line in enumerate(file.read_text().splitlines(), 1) if text in line]


@pytest.mark.parametrize("way", WAYS)
def test_way_to_a_launch_that_no_draft_follows__in_a_branch_that_no_size_takes__is_refused(made, way):
    file = made(way)
    with pytest.raises(Unusable) as told:
        draft(file, {"n": 33}, others=[{"n": 50}])
    stands = {
        "kept": "return KERNELS",
        "global": "    K[(4,)](x",
        "taking": "kernel[(4,)](x, w, y, x.numel(), B=16)",
    }
    helper = next((text for name, text in stands.items() if way.startswith(name)), f"        {way}")
    assert told.value.line in lines_of(file, helper), str(told.value)
    assert "launch" in str(told.value)


AGAIN = [
    "LAUNCHERS[0](x, w, y)",
    "CALLING.go(x, w, y)",
    "go = launch; go(x, w, y)",
    "HANDED(x, w, y)",
    "list(map(launch, [x], [w], [y]))",
    "NESTED.inner['a'][0](x, w, y)",
]


@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("limit", [60, 0])
def test_function_that_launches_and_is_called_by_its_name__is_not_to_be_reached_otherwise_too(
    made, way, limit
):
    file = made(way, limit)
    text = file.read_text()
    file.write_text(
        text.replace("    if x.numel() >", "    launch(x, w, y)\n    z = z + y\n    if x.numel() >")
    )
    with pytest.raises(Unusable, match="launch"):
        draft(file, {"n": 33}, others=[{"n": 50}])


@pytest.mark.parametrize("way", WAYS)
def test_way_to_a_launch_that_no_draft_follows__in_every_call__is_refused(made, way):
    with pytest.raises(Unusable) as told:
        draft(made(way, 0), {"n": 33})
    assert "launch" in str(told.value)


UP = {"kind": "normal", "seed": 3}
NAMED = [
    f"k = squared; k{GRID}",
    f"k = KERNELS['squared']; k{GRID}",
    f"squared{GRID}",
    f"KERNELS['squared']{GRID}",
    "launch(x, w, y)",
    "y = SquaredFunction.apply(x, w)",
]


@pytest.mark.parametrize("way", NAMED)
def test_launch_by_a_name__in_a_branch_that_no_size_takes__raises_in_the_draft(made, way, tmp_path):
    file = made(way)
    result = draft(file, {"n": 33})
    assert_right(file, result, [({"n": 33}, "normal"), ({"n": 17}, "normal")])
    assert "untraced(" in result["backward"]
    pair = tmp_path / "pair.py"
    pair.write_text(pair_text(file.read_text(), result["backward"]))
    found = candidate.run(
        {"op": "candidate", "nonce": "n", "file": str(pair), "device": "cpu", "target": "sm_90"}
        | {
            "dtype": "float32",
            "cases": [{"id": 0, "dims": {"n": 70}, "seed": 1, "needs": None, "upstream": UP}],
        },
        tmp_path,
    )
    assert "launches" in str(found["cases"][0]["error"]) and not found["cases"][0]["ok"]


@pytest.mark.parametrize("way", NAMED)
def test_launch_by_a_name__in_every_call__has_its_gradient(made, way):
    file = made(way, 0)
    result = draft(file, {"n": 33})
    assert_right(file, result, [({"n": 33}, "normal"), ({"n": 17}, "normal"), ({"n": 64}, "normal")])


HARMLESS = [
    "y = HARMLESS.double(x)",
    "y = decorated_plain(x)",
    "fn = plain; y = fn(x)",
    "y = x * len(squared.arg_names)",
    "y = functools.partial(torch.mul, x)(w)",
    "y = (lambda t: t * 2)(x)",
]


@pytest.mark.parametrize("way", HARMLESS)
def test_names_that_lead_to_no_launch__change_nothing(made, way):
    file = made(way, 40)
    assert_right(file, draft(file, {"n": 33}), [({"n": 33}, "normal"), ({"n": 50}, "normal")])


LIBRARY = """
import triton
import triton.language as tl

COUNT = 0


@triton.jit
def cubed(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + o, mask=o < n, other=0.0)
    tl.store(y + o, a * a * a, mask=o < n)


def counted(x, w, y):
    global COUNT
    COUNT += 1
    cubed[(4,)](x, y, x.numel(), B=16)


def plain(x, w, y):
    cubed[(4,)](x, y, x.numel(), B=16)


def without(x, w, y):
    global COUNT
    COUNT += 1
"""


@pytest.mark.parametrize(("name", "taken"), [("counted", False), ("plain", True), ("without", True)])
def test_launcher_that_stays_in_its_module__in_a_branch_that_no_size_takes__is_refused(
    made, tmp_path, monkeypatch, name, taken
):
    module = f"library_of_{name}"
    (tmp_path / f"{module}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    file = made(f"{name}(x, w, y)")
    file.write_text(
        file.read_text().replace("import types\n", f"import types\nfrom {module} import {name}\n")
    )
    if taken:
        assert_right(file, draft(file, {"n": 33}), [({"n": 33}, "normal")])
        return
    with pytest.raises(Unusable, match=f"{name} of {module}.py may launch") as told:
        draft(file, {"n": 33})
    assert told.value.line in lines_of(file, f"        {name}(")
