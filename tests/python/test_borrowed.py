"""The scan of backwards with copies of a library's launchers: what is the launcher's own passes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from kernel_agent.operations import scan
from kernel_agent.operations.elsewhere import Elsewhere

OPS = """import torch
import triton
from .shared import settings
from . import shared

if torch.cuda.is_available():
    LONGEST = 65536
else:
    LONGEST = 4096


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def scale_bwd_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    pass


def scale(x):
    y = torch.empty_like(x)
    assert x.numel() < LONGEST
    z = torch.softmax(x, -1)
    scale_kernel[(settings(x.numel()),)](z, y, x.numel(), BLOCK=shared.BLOCK)
    return y


def scale_bwd(x):
    scale_bwd_kernel[(settings(x.numel()),)](x, x, x.numel(), BLOCK=shared.BLOCK)
    return x


def plain(x):
    return torch.tanh(x)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scale(x)


apply_scale = Scale.apply
"""
SHARED = """BLOCK = 16


def settings(n):
    return -(-n // BLOCK)


def other(n):
    return n
"""
PAIR = """import torch
import triton
import triton.language as tl
{imports}

def autodiff(inputs_require_grad=()):
    return lambda stub: stub


@autodiff(inputs_require_grad=(0,))
def stub(x):
    return {call}


# ---- backward ----

import lib.ops as _ops
from lib.ops import scale_kernel, settings
import lib.shared as _shared


@triton.jit
def scale_kernel_bwd(d_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(d_ptr + at, tl.load(d_ptr + at, mask=at < n, other=0.0), mask=at < n)


class Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grid, x, y, n, BLOCK):
        scale_kernel[grid](x, y, n, BLOCK=BLOCK)
        return y

    @staticmethod
    def backward(ctx, d_y):
        scale_kernel_bwd[(1,)](d_y, d_y.numel(), BLOCK=16)
        return None, d_y, None, None, None


def scale_autograd(x):
    y = torch.empty_like(x)
    assert x.numel() < _ops.LONGEST
    z = torch.softmax(x, -1)
    Launch.apply((settings(x.numel()),), z, y, x.numel(), _shared.BLOCK)
    return y


def stub_autograd(x):
    return scale_autograd(x)
"""
PLAIN = ("from lib.ops import scale", "scale(x)")


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    folder.mkdir()
    for name, text in {
        "__init__": "from .ops import scale as exported\n",
        "ops": OPS,
        "shared": SHARED,
    }.items():
        (folder / f"{name}.py").write_text(text)
    return tmp_path


def rejected(lib: Path, *edits: tuple[str, str], stub: tuple[str, str] = PLAIN) -> list[str]:
    text = PAIR.format(imports=stub[0], call=stub[1])
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    found = scan.scan(text, ast.parse(text), None, Elsewhere(lib, ""))["findings"]
    return [f"{one['rule']}: {one['message']}" for one in found if one["severity"] == "reject"]


@pytest.mark.parametrize(
    "stub",
    [
        PLAIN,
        ("from lib import exported", "exported(x)"),
        ("import lib.ops", "lib.ops.scale(x)"),
        ("from lib import ops", "ops.scale(x)"),
        ("from lib.ops import Scale", "Scale.apply(x)"),
        ("from lib.ops import apply_scale", "apply_scale(x)"),
    ],
)
def test_copy_of_a_launcher__passes(stub: tuple[str, str], lib: Path) -> None:
    assert rejected(lib, stub=stub) == []


def test_installed_library__is_found_on_the_path(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAIR.format(imports=PLAIN[0], call=PLAIN[1])
    assert any(one["severity"] == "reject" for one in scan.scan(text, ast.parse(text))["findings"])
    monkeypatch.syspath_prepend(str(lib))
    assert not any(one["severity"] == "reject" for one in scan.scan(text, ast.parse(text))["findings"])


IMPORT = "import lib.shared as _shared"
FORWARD = "    z = torch.softmax(x, -1)\n    Launch"
BACKWARD = "        scale_kernel_bwd[(1,)]"


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        # What the stub does not reach, or what launches nothing.
        (("from lib.ops import scale\n", "from lib.ops import plain as scale\n"), "import"),
        ((IMPORT, f"from lib.ops import scale_bwd\n{IMPORT}"), "import"),
        ((IMPORT, f"import lib.more as _more\n{IMPORT}"), "import"),
        ((IMPORT, f"from lib.shared import other\n{IMPORT}"), "import"),
        ((IMPORT, f"from lib.ops import *\n{IMPORT}"), "import"),
        ((FORWARD, FORWARD.replace("x, -1)", "x, -1)\n    _ops.scale_bwd(x)")), "import"),
        ((FORWARD, FORWARD.replace("x, -1)", "x, -1)\n    _ops.plain(x)")), "import"),
        ((FORWARD, FORWARD.replace("x, -1)", "x, -1)\n    _shared.other(x)")), "import"),
        # Other torch operations than the launcher's.
        ((FORWARD, FORWARD.replace("torch.softmax(x, -1)", "torch.tanh(x)")), "torch_math"),
        # In a backward nothing of them is the forward's.
        ((BACKWARD, f"        d_y = torch.softmax(d_y, -1)\n{BACKWARD}"), "torch_math"),
        ((BACKWARD, f"        n = settings(3)\n{BACKWARD}"), "import"),
        ((BACKWARD, f"        n = _ops.LONGEST\n{BACKWARD}"), "import"),
        ((BACKWARD, f"        _ops.scale_bwd(d_y)\n{BACKWARD}"), "import"),
        ((BACKWARD, f"        scale_kernel[(1,)](d_y, d_y, 1, BLOCK=16)\n{BACKWARD}"), "import"),
        # Nor may anything be set there.
        ((FORWARD, FORWARD.replace("x, -1)", "x, -1)\n    _ops.LONGEST = 1")), "patch"),
    ],
)  # fmt: skip
def test_what_is_no_launcher_s_own__is_rejected(edit: tuple[str, str], rule: str, lib: Path) -> None:
    assert any(one.startswith(f"{rule}: ") for one in rejected(lib, edit)), rejected(lib, edit)


def test_function_that_launches_nothing__lends_no_operations(lib: Path) -> None:
    """The stub calls it too, by its name, and there is no copy of it."""
    edit = (FORWARD, FORWARD.replace("torch.softmax(x, -1)", "torch.tanh(x)"))
    found = rejected(lib, edit, stub=("from lib.ops import plain, scale", "scale(plain(x))"))
    assert any(one.startswith("torch_math: ") for one in found)
