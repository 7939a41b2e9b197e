"""Launches that stand in functions of other modules: a library's own launchers, called by the stub."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diff_support import assert_right, draft, pair_text
from kernel_agent.errors import Unusable
from kernel_agent.operations import scan
from kernel_agent.operations.elsewhere import Elsewhere

Made = Callable[..., Path]

UTILS = '''"""What the modules of the package share."""

import functools
import torch
import triton

LIMIT = 4096
CHOSEN = {"warps": 4}
FLIPPED = False


def flip(to):
    global FLIPPED
    FLIPPED = to


def settings(n):
    if n > LIMIT:
        raise RuntimeError(f"{n} is more than {LIMIT}")
    return triton.next_power_of_2(n), CHOSEN["warps"]


def guarded(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        args = [2.0 * a.contiguous() if isinstance(a, torch.Tensor) else a for a in args]
        return function(*args, **kwargs)

    return inner


def nameless(function):
    def inner(*args):
        return function(*[a.contiguous() if isinstance(a, torch.Tensor) else a for a in args])

    return inner
'''
OPS = '''"""y = x^2 w, row by row: a launcher with helpers of its module and of others."""

from typing import Optional

import torch
import triton
import triton.language as tl

from .utils import guarded, settings
from . import utils

OFFSET = 1.0


def rows_of(x):
    return x.reshape(-1, x.shape[-1])


@triton.jit
def squared(x):
    return x * x


@triton.jit
def _scaled_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, stride, n, offset, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + row * n + cols, squared(x) * (w + offset), mask=cols < n)
    tl.store(rstd_ptr + row, 1.0)


def scaled_forward(x: torch.Tensor, w: Optional[torch.Tensor], eps: float = 0.0) -> tuple:
    """More than the stub needs is returned."""
    shape = x.shape
    x = rows_of(x)
    y, rstd = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    BLOCK, num_warps = settings(x.shape[1])
    with torch.cuda.device(x.device) if x.is_cuda else utils.nothing():
        _scaled_kernel[(x.shape[0],)](
            x, w, y, rstd, x.stride(0), x.shape[1], OFFSET, BLOCK=BLOCK, num_warps=num_warps
        )
    return y.view(*shape), rstd, BLOCK
'''
SECOND = """import torch
import triton
import triton.language as T


def settings(n):
    return triton.cdiv(n, 16)


@triton.jit
def _scaled_kernel(x_ptr, y_ptr, n, BLOCK: T.constexpr):
    at = T.program_id(0) * BLOCK + T.arange(0, BLOCK)
    x = T.load(x_ptr + at, mask=at < n, other=0.0)
    T.store(y_ptr + at, T.exp(-x * x), mask=at < n)


def bell(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    _scaled_kernel[(settings(x.numel()),)](x, y, x.numel(), BLOCK=16)
    return y
"""
HEAD = """import torch
import triton
from kernel_agent import autodiff
{imports}

SWEEP = [{{"M": 5, "N": 20}}, {{"M": 3, "N": 37}}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], device=device, dtype=dtype)


@autodiff(inputs_require_grad=(0, 1))
def stub(x, w):
"""
DIMS = {"M": 5, "N": 20}
CASES = [(DIMS, "normal"), ({"M": 3, "N": 37}, "normal"), ({"M": 1, "N": 1}, "normal")]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Writes the package `adopted_lib`, with other modules or edits, and puts it on the path."""

    def made(**files: str) -> Path:
        folder = tmp_path / "adopted_lib"
        folder.mkdir()
        texts = {"__init__": "", "utils": UTILS, "ops": OPS, "second": SECOND} | files
        texts["utils"] += "\n\nfrom contextlib import nullcontext as nothing\n"
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
        return folder

    monkeypatch.syspath_prepend(str(tmp_path))
    yield made
    for name in [n for n in sys.modules if n.partition(".")[0] == "adopted_lib"]:
        del sys.modules[name]


def stub(imports: str, body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return HEAD.format(imports=imports) + lines


def rejected(file: Path, backward: str) -> list[str]:
    """What the scan rejects of the pair."""
    text = pair_text(file.read_text(), backward)
    found = scan.scan(text, ast.parse(text), None, Elsewhere(file.parent, ""))["findings"]
    return [f"{one['line']}: {one['message']}" for one in found if one["severity"] == "reject"]


def assert_drafted(file: Path, **options: Any) -> str:
    """A draft is made, is right, and is let through; its text."""
    result = draft(file, DIMS, others=[{"M": 3, "N": 37}], **options)
    assert_right(file, result, CASES)
    assert rejected(file, result["backward"]) == []
    assert all(len(line) <= 110 for line in result["backward"].split("\n\n")[0].splitlines())
    return str(result["backward"])


def refused(file: Path) -> Unusable:
    with pytest.raises(Unusable) as caught:
        draft(file, DIMS, others=[{"M": 3, "N": 37}])
    assert caught.value.kind == "unsupported_op"
    return caught.value


CALLED = {
    "by its name": ("from adopted_lib.ops import scaled_forward", "return scaled_forward(x, w)[0]"),
    "by another name": ("from adopted_lib.ops import scaled_forward as run", "return run(x, w)[0]"),
    "of a module": ("from adopted_lib import ops", "y, *_ = ops.scaled_forward(x, w)\nreturn y"),
    "of a package": ("import adopted_lib.ops", "return adopted_lib.ops.scaled_forward(x, w, eps=1.0)[0]"),
    "by two names": (
        "from adopted_lib import ops\nfrom adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0] + ops.scaled_forward(x, 2 * w)[0]",
    ),
}


@pytest.mark.parametrize("way", CALLED)
def test_launcher_of_a_library__is_copied(way: str, package: Made, write: Callable[[str], Path]) -> None:
    package()
    text = assert_drafted(write(stub(*CALLED[way])))
    assert "_forward_autograd(" in text or "run_autograd(" in text
    assert "rows_of(x)" in text and "rows_of_autograd" not in text  # what launches nothing stays a name
    assert "Optional" not in text and "-> tuple" not in text
    assert "_ops.OFFSET" in text  # data is the module's own


def test_names__of_two_modules_and_of_the_user__do_not_meet(
    package: Made, write: Callable[[str], Path]
) -> None:
    package()
    imports = "from adopted_lib import ops, second\n\n\ndef rows_of(x):\n    return x.t()\n\n\n"
    imports += "OFFSET = 7.0\nBLOCK = 3\nutils = None"
    body = "y = ops.scaled_forward(second.bell(x), w)[0]\nreturn rows_of(y) * OFFSET"
    text = assert_drafted(write(stub(imports, body)))
    assert "settings as settings_" in text and "_scaled_kernel as _scaled_kernel_" in text
    assert "rows_of as rows_of_" in text and "utils as utils_" in text
    assert "return rows_of(y) * OFFSET" in text


def test_launcher_that_calls_another_module_s__has_copies_of_both(
    package: Made, write: Callable[[str], Path]
) -> None:
    both = """from . import second
from .ops import scaled_forward as inner

def both(x, w, *, twice=False):
    y, rstd, _ = inner(second.bell(x), w)
    return second.bell(y) if twice else y
"""
    package(both=both)
    text = assert_drafted(write(stub("from adopted_lib.both import both", "return both(x, w, twice=True)")))
    assert "scaled_forward_autograd(bell_autograd(x), w)" in text
    assert text.count("def bell_autograd(") == 1


def test_decorator__keeps_its_effect(package: Made, write: Callable[[str], Path]) -> None:
    """It doubles what the launcher gets; torch's, that nothing is recorded, is left out."""
    decorated = OPS.replace("def scaled_forward", "@torch.no_grad()\n@guarded\ndef scaled_forward")
    package(ops=decorated)
    text = assert_drafted(
        write(stub("from adopted_lib.ops import scaled_forward", "return scaled_forward(x, w)[0]"))
    )
    assert "@guarded\ndef scaled_forward_autograd(" in text and "no_grad" not in text


def test_decorator_without_wraps__is_found_by_the_name(package: Made, write: Callable[[str], Path]) -> None:
    package(ops=OPS.replace("def scaled_forward", "@utils.nameless\ndef scaled_forward"))
    text = assert_drafted(
        write(stub("from adopted_lib.ops import scaled_forward", "return scaled_forward(x, w)[0]"))
    )
    assert "@utils.nameless\ndef scaled_forward_autograd(" in text


def test_module_that_its_package_hides__is_imported_from(package: Made, write: Callable[[str], Path]) -> None:
    """`adopted_lib.bell` is a function there, and a module for who imports from it."""
    package(bell=SECOND, __init__="from .bell import bell\n")
    text = assert_drafted(write(stub("from adopted_lib import bell", "return bell(x) * w")))
    assert "from adopted_lib.bell import _scaled_kernel, settings" in text


FUNCTION = """

class Scaled(torch.autograd.Function):
    @staticmethod
    @guarded
    def forward(ctx, x, w):
        y, rstd, ctx.block = scaled_forward(x, w)
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx, d_y):
        raise NotImplementedError


scaled = Scaled.apply
"""
GUARDED = FUNCTION.replace("    @guarded\n", "")


@pytest.mark.parametrize(
    ("imports", "body"),
    [
        ("from adopted_lib.ops import Scaled", "return Scaled.apply(x, w)"),
        ("from adopted_lib import ops", "return ops.Scaled.apply(x, w)"),
        ("from adopted_lib.ops import scaled", "return scaled(x, w)"),
    ],
)
def test_function_of_a_library__has_its_forward_copied(
    imports: str, body: str, package: Made, write: Callable[[str], Path]
) -> None:
    package(ops=OPS + GUARDED)
    text = assert_drafted(write(stub(imports, body)))
    assert "def Scaled_forward_autograd(" in text and "Unsaved()" in text


WRITTEN = """import torch
import triton
import triton.language as tl
from typing import Tuple
from functools import partial

from . import kernels, utils
from .utils import settings, nothing as torch_gpu_device

_all_cards = torch.cuda.device_count()


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    dtype: "torch.dtype" = torch.float32,
    inplace: bool=False,
) -> Tuple[
    torch.Tensor,
    torch.Tensor,
]:
    assert x.shape[-1] <= utils.LIMIT, (
        f"too long: {utils.LIMIT} ü {x.shape[-1]:{'>'}3}"
        f"and {kernels.LIMIT!r}"
    )
    kept: Tuple[int, ...] = tuple(x.shape)
    out = torch.empty(kept, dtype=dtype, device=x.device)  # ü, and then what is launched
    cards = torch.cuda.device_count() if torch.cuda.is_available() else _all_cards
    BLOCK, _ = settings(x.shape[-1])

    def grid(meta: dict) -> Tuple[int]:
        return (triton.cdiv(x.numel() // x.shape[-1], meta["ROWS"]),)

    with torch_gpu_device(x.device if cards > 1 else None):
        kernels.rows_kernel[grid](x.contiguous(), w, out, x.numel() // x.shape[-1], x.shape[-1],
                                  BLOCK=BLOCK)
    return (out, w)
"""
KERNELS = """import triton
import triton.language as tl

LIMIT = 12


@triton.autotune([triton.Config({"ROWS": 2}), triton.Config({"ROWS": 4})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def rows_kernel(x, w, out, m, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < m) if EVEN else (rows < m) & (cols < n)
    a = tl.load(x + rows * n + cols, mask=mask, other=0.0)
    b = tl.load(w + cols, mask=cols < n, other=0.0)
    tl.store(out + rows * n + cols, tl.sin(a) * b, mask=mask)
"""


def test_text_of_a_launcher__is_kept_but_for_names(package: Made, write: Callable[[str], Path]) -> None:
    package(written=WRITTEN, kernels=KERNELS)
    text = assert_drafted(write(stub("from adopted_lib.written import launch", "return launch(x, w)[0]")))
    assert "# ü, and then what is launched" in text and "Tuple[" not in text.replace("kept: Tuple[", "")
    assert "from adopted_lib.kernels import rows_kernel" in text


def test_stub_of_the_package_itself__imports_from_the_top(
    package: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = package() / "stub.py"
    file.write_text(stub("from .ops import scaled_forward", "return scaled_forward(x, w)[0]"))
    (tmp_path / ".package").write_text("adopted_lib")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    result = draft(file, DIMS)
    assert "from adopted_lib.ops import _scaled_kernel" in result["backward"]
    text = pair_text(file.read_text(), result["backward"])
    found = scan.scan(text, ast.parse(text), None, Elsewhere(tmp_path, "adopted_lib"))["findings"]
    assert not [one for one in found if one["severity"] == "reject"]
    assert_right(file, result, CASES)


def test_launcher_that_raises__is_told_at_its_line(package: Made, write: Callable[[str], Path]) -> None:
    package(ops=OPS.replace("    shape = x.shape\n", "    shape = x.shape[7]\n"))
    with pytest.raises(Unusable) as caught:
        draft(write(stub(*CALLED["by its name"])), DIMS)
    line = OPS.splitlines().index("    shape = x.shape") + 1
    assert f"ops.py:{line}" in str(caught.value)


def test_data_that_is_set_anew__is_the_module_s(package: Made, write: Callable[[str], Path]) -> None:
    """What the copies read is what the launcher reads, whenever it is set."""
    flipped = OPS.replace("OFFSET, BLOCK=", "2.0 if utils.FLIPPED else 0.0, BLOCK=")
    flipped = flipped.replace("from .utils import", "from .utils import flip, FLIPPED,")
    package(ops=flipped)
    imports = "from adopted_lib.ops import flip, scaled_forward"
    text = assert_drafted(
        write(stub(imports, "flip(True)\ny = scaled_forward(x, w)[0]\nflip(False)\nreturn y"))
    )
    assert "utils.FLIPPED" in text


def test_function_that_is_set_anew__is_the_module_s(package: Made, write: Callable[[str], Path]) -> None:
    anew = OPS.replace("    x = rows_of(x)\n", "    x = rows_of(x) if utils.LIMIT else again(x)\n")
    anew += (
        "\n\nagain = rows_of\n\n\ndef set_again(to):\n    global again, rows_of\n    again = rows_of = to\n"
    )
    package(ops=anew)
    text = assert_drafted(
        write(stub("from adopted_lib.ops import scaled_forward", "return scaled_forward(x, w)[0]"))
    )
    assert "_ops.rows_of(x) if utils.LIMIT else _ops.again(x)" in text


def test_data_of_a_module_that_its_package_hides__is_refused(
    package: Made, write: Callable[[str], Path]
) -> None:
    """Imported from there it would be what it was at import."""
    package(
        bell=SECOND.replace("BLOCK=16", "BLOCK=SIZE") + "\n\nSIZE = 16\n", __init__="from .bell import bell\n"
    )
    error = refused(write(stub("from adopted_lib import bell", "return bell(x) * w")))
    assert "SIZE of adopted_lib.bell cannot be reached" in str(error)


def test_method_of_the_user_s__calls_a_launcher_by_its_name(
    package: Made, write: Callable[[str], Path]
) -> None:
    package()
    own = """class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return CALL(x, w)[0]

    @staticmethod
    def backward(ctx, d_y):
        raise NotImplementedError
"""
    imports = "from adopted_lib import ops\nfrom adopted_lib.ops import scaled_forward\n\n\n"
    assert_drafted(write(stub(imports + own.replace("CALL", "scaled_forward"), "return Own.apply(x, w)")))
    error = refused(
        write(stub(imports + own.replace("CALL", "ops.scaled_forward"), "return Own.apply(x, w)"))
    )
    assert "by another name" in str(error)


def test_launch_that_no_size_makes__names_the_module_s_line(
    package: Made, write: Callable[[str], Path]
) -> None:
    package()
    body = (
        "from_rows = x.shape[0] > 1000\nreturn second.bell(x) if from_rows else ops.scaled_forward(x, w)[0]"
    )
    file = write(stub("from adopted_lib import ops, second", body))
    text = assert_drafted(file)
    line = (
        SECOND.splitlines().index("    _scaled_kernel[(settings(x.numel()),)](x, y, x.numel(), BLOCK=16)") + 1
    )
    assert f'"{line} of second.py"' in text
    report = draft(file, DIMS)["report"]["lines"]
    assert any(f"second.py:{line}: no size" in one["reason"] for one in report if one["class"] == "launch")


def test_refusal_in_a_launcher__names_its_line(package: Made, write: Callable[[str], Path]) -> None:
    package(ops=OPS.replace("squared(x) * (w", "tl.sort(x) * (w"))
    file = write(stub("from adopted_lib.ops import scaled_forward", "return scaled_forward(x, w)[0]"))
    error = refused(file)
    assert error.file == str(file) and "ops.py:" in str(error)
    package_line = next(i for i, line in enumerate(OPS.splitlines(), 1) if "squared(x) * (w" in line)
    assert f"ops.py:{package_line}" in str(error)


SET_UP = """

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        y = torch.empty_like(x)
        _scaled_kernel[(x.shape[0],)](x, w, y, y, x.stride(0), x.shape[1], 1.0, BLOCK=64)
        return y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, d_y):
        raise NotImplementedError
"""
LEFT = {
    "a kernel that is an argument": (
        OPS + "\n\ndef run(kernel, x, w):\n    y = torch.empty_like(x)\n"
        "    kernel[(x.shape[0],)](x, w, y, y, x.stride(0), x.shape[1], 1.0, BLOCK=64)\n    return y\n",
        "from adopted_lib import ops",
        "return ops.run(ops._scaled_kernel, x, w)",
        "must have a name",
    ),
    "handed on as a value": (
        OPS + "\n\ndef both(f, x, w):\n    return f(x, w)[0]\n",
        "from adopted_lib import ops",
        "return ops.both(ops.scaled_forward, x, w) + ops.scaled_forward(x, w)[0]",
        "handed on as a value",
    ),
    "sets a name of its module": (
        OPS.replace('    """More than the stub needs is returned."""', "    global OFFSET\n    OFFSET = 1.0"),
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "sets OFFSET of its module",
    ),
    "a default that is made": (
        OPS.replace("eps: float = 0.0", "kept={}"),
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "has a default that is made",
    ),
    "a method": (
        OPS + "\n\nclass Norm:\n    def __call__(self, x, w):\n        y = torch.empty_like(x)\n"
        "        _scaled_kernel[(x.shape[0],)](x, w, y, y, x.stride(0), x.shape[1], 1.0, BLOCK=64)\n"
        "        return y\n\n\nnorm = Norm()\n",
        "from adopted_lib.ops import norm",
        "return norm(x, w)",
        "is launched from another file",
    ),
    "bound twice": (
        OPS + "\n\nbefore = scaled_forward\n\n\ndef scaled_forward(x, w):\n    return before(x, w)\n",
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "is launched from another file",
    ),
    "another in its place": (
        OPS + "\n\nglobals()['scaled_forward'] = guarded(scaled_forward)\n",
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "scaled_forward is not what its text makes",
    ),
    "a builtin that the user's file has too": (
        OPS.replace("x.shape[1], OFFSET", "max(x.shape[1], 1), OFFSET"),
        "from adopted_lib.ops import scaled_forward\n\n\ndef max(a, b):\n    return 0",
        "return scaled_forward(x, w)[0]",
        "`max` has another meaning in the user's file",
    ),
    "a variable of its own by a module's name": (
        OPS.replace("shape = x.shape\n", "shape, late = x.shape, lambda OFFSET: OFFSET\n"),
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "`OFFSET` is a variable of scaled_forward and a name of its module",
    ),
    "its module's names as a table": (
        OPS.replace("x.shape[1], OFFSET", "x.shape[1], globals()['OFFSET']"),
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "scaled_forward uses globals",
    ),
    "its module's own name": (
        OPS.replace("x.shape[1], OFFSET", "x.shape[1], 1.0 if __name__ == 'adopted_lib.ops' else 2.0"),
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "scaled_forward uses __name__",
    ),
    "a kernel that is set anew": (
        OPS + "\n\ndef tune(to):\n    global _scaled_kernel\n    _scaled_kernel = to\n",
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "_scaled_kernel is set anew",
    ),
    "a context that is set up elsewhere": (
        OPS + SET_UP,
        "from adopted_lib.ops import Scaled",
        "return Scaled.apply(x, w)",
        "Scaled is more than a forward and a backward",
    ),
    "an import within": (
        OPS.replace("    shape = x.shape\n", "    from .utils import LIMIT\n\n    shape = x.shape\n"),
        "from adopted_lib.ops import scaled_forward",
        "return scaled_forward(x, w)[0]",
        "imports from its package",
    ),
}


@pytest.mark.parametrize("what", sorted(LEFT))
def test_what_is_not_the_same_elsewhere__is_refused(
    what: str, package: Made, write: Callable[[str], Path]
) -> None:
    ops, imports, body, message = LEFT[what]
    package(ops=ops)
    file = write(stub(imports, body))
    error = refused(file)
    assert message in str(error)
    launches = [i for i, line in enumerate(ops.splitlines(), 1) if "[(x.shape[0],)](" in line]
    assert any(f"ops.py:{line}: " in str(error) for line in launches)
    assert error.file == str(file) and error.remedy


UNNAMED = {
    "a method": (
        "class Norm:\n    def __call__(self, x, w):\n        return scaled_forward(x, w)[0]\n",
        "return Norm()(x, w) + scaled_forward(x, w)[0]",
        "code outside of the top level's functions",
    ),
    "a variable": (
        "def norm(x, w):\n    return scaled_forward(x, w)[0]\n",
        "run = norm\nreturn run(x, w) + norm(x, 2 * w)",
        "stub()",
    ),
    "a table": (
        "def norm(x, w):\n    return scaled_forward(x, w)[0]\n\n\nTABLE = {'norm': norm}\n",
        "return TABLE['norm'](x, w) + norm(x, 2 * w)",
        "stub()",
    ),
}


@pytest.mark.parametrize("what", UNNAMED)
def test_way_to_a_launcher_that_no_copy_takes__is_refused(
    what: str, package: Made, write: Callable[[str], Path]
) -> None:
    """Copies of functions call each other by their names: what does otherwise would have no gradient."""
    above, body, message = UNNAMED[what]
    package()
    error = refused(write(stub(f"from adopted_lib.ops import scaled_forward\n\n\n{above}", body)))
    assert message in str(error) and "calls no function by its name" in str(error) and error.remedy


def test_way_through_a_lambda_or_a_decorator__is_one_by_name(
    package: Made, write: Callable[[str], Path]
) -> None:
    package(ops=OPS + "\n\ndef applied(f, x):\n    return f(x)\n")
    imports = (
        "from adopted_lib import ops\n\n\ndef twice(f):\n    def inner(x, w):\n        return f(2 * x, w)\n\n"
    )
    imports += "    return inner\n\n\n@twice\ndef norm(x, w):\n    return ops.scaled_forward(x, w)[0]\n"
    assert_drafted(write(stub(imports, "return ops.applied(lambda t: norm(t, w), x)")))


IN_ITS_PLACE = "\n\nglobals()['scaled_forward'] = utils.nameless(scaled_forward)\n"
ONCE = """

made = set()


def once(function):
    if function.__name__ in made:
        raise KeyError(function.__name__)
    made.add(function.__name__)
    return function
"""


@pytest.mark.parametrize(
    ("utils", "ops", "message"),
    [
        (
            UTILS,
            OPS.replace("def scaled_f", "@guarded\ndef scaled_f") + IN_ITS_PLACE,
            "not what its text makes",
        ),
        (UTILS + ONCE, OPS.replace("def scaled_f", "@utils.once\ndef scaled_f"), "cannot stand in this file"),
    ],
)
def test_decorated_launcher_that_cannot_be_made_again__is_refused(
    utils: str, ops: str, message: str, package: Made, write: Callable[[str], Path]
) -> None:
    package(utils=utils, ops=ops)
    error = refused(write(stub(*CALLED["by its name"])))
    assert message in str(error) and error.remedy


def test_user_s_module__is_as_before(package: Made, write: Callable[[str], Path]) -> None:
    from kernel_agent import forward
    from kernel_agent.differentiate.pipeline import differentiate

    package()
    file = write(stub(*CALLED["by two names"]))
    fwd = forward.load(file)
    before = dict(vars(fwd.module))
    one = differentiate(fwd, DIMS, 1)
    after = dict(vars(fwd.module))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert differentiate(fwd, DIMS, 1).text == one.text
