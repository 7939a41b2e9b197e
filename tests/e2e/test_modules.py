"""Modules beside a forward file: copied into the run, read there, differentiated with it."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

import pytest
from conftest import Agent

FORWARD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from helpers import blocks
from parts import squared


@triton.jit
def square_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, squared(x), mask=at < n)


@autodiff(inputs_require_grad=(0,))
def square(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    square_kernel[(blocks(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)
    return y


SWEEP = [{"M": 4, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
"""
HELPERS = "import triton\n\n\ndef blocks(n, block):\n    return triton.cdiv(n, block)\n"
PARTS = "from .functions import squared\n"
FUNCTIONS = """import triton
import triton.language as language
from triton.language.extra.libdevice import tanh as bounded

GAIN: language.constexpr = language.constexpr(3.0)


@triton.jit
def scaled(x):
    return x * GAIN


@triton.jit
def squared(x):
    return scaled(x) * language.sigmoid(x) + bounded(x) + language.exp(x)
"""


def written(folder: Path) -> Path:
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").write_text(PARTS)
    (folder / "parts" / "functions.py").write_text(FUNCTIONS)
    (folder / "helpers.py").write_text(HELPERS)
    file = folder / "square.py"
    file.write_text(FORWARD)
    return file


def test_modules_beside_the_file_are_imported_and_differentiated(agent: Agent, tmp_path: Path) -> None:
    result = agent("--file-path", written(tmp_path), "--backend", "none", "--no-optimise", "--json")
    assert result.code == 0, result.err
    assert result.result["verdict"] == "verified"
    folder = agent.run_dirs()[0]
    copies = folder / "modules"
    assert (copies / "helpers.py").read_text() == HELPERS
    assert (copies / "parts" / "functions.py").read_text() == FUNCTIONS
    (tmp_path / "helpers.py").write_text("raise RuntimeError\n")  # later runs of the pair have the copies
    assert agent("verify", folder).code == 0


def test_inspect_and_differentiate_find_them_too(agent: Agent, tmp_path: Path) -> None:
    file = written(tmp_path)
    for command in ("inspect", "differentiate"):
        result = agent(command, file)
        assert result.code == 0, result.err


def test_too_many_modules_are_told_with_the_limit_and_a_remedy(agent: Agent, tmp_path: Path) -> None:
    file = written(tmp_path)
    for number in range(501):
        (tmp_path / "parts" / f"module{number}.py").touch()
    for command in (["--file-path", file, "--backend", "none"], ["inspect", file]):
        result = agent(*command)
        assert result.code == 3
        assert "more than 500 modules" in result.err
        assert "in a package of its own" in result.err


def test_module_that_is_missing_is_named_with_its_line(agent: Agent, tmp_path: Path) -> None:
    file = written(tmp_path)
    (tmp_path / "helpers.py").unlink()
    result = agent("inspect", file)
    assert result.code == 3
    assert (
        "square.py:5: the file cannot be imported: ModuleNotFoundError: No module named 'helpers'"
        in result.err
    )


RELATIVE = FORWARD.replace("from helpers import", "from ..helpers import").replace(
    "from parts import", "from ..parts import"
)


def in_a_package(folder: Path) -> Path:
    """lib/ops/square.py, which imports lib/helpers.py and lib/parts/ relatively."""
    lib = folder / "lib"
    (lib / "ops").mkdir(parents=True)
    written(lib).unlink()
    (lib / "__init__.py").write_text("")
    (lib / "ops" / "__init__.py").write_text("from .square import square\n")
    file = lib / "ops" / "square.py"
    file.write_text(RELATIVE)
    return file


def test_relative_imports_of_a_package_are_followed(agent: Agent, tmp_path: Path) -> None:
    file = in_a_package(tmp_path)
    result = agent("--file-path", file, "--backend", "none", "--no-optimise", "--json")
    assert result.code == 0, result.err
    assert result.result["verdict"] == "verified"
    assert (agent.run_dirs()[0] / "modules" / "lib" / "parts" / "functions.py").read_text() == FUNCTIONS
    assert agent("verify", agent.run_dirs()[0]).code == 0
    assert agent("differentiate", file).code == 0


GATES = """import triton
from triton import language as lang
from triton.language.extra.libdevice import tanh as bounded

LIMIT = lang.constexpr(4.0)


@triton.jit
def squash(x):
    return lang.where(x > LIMIT, LIMIT, x) * 1.5


@triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["n_cols"])})
@triton.jit
def gate_kernel(x_ptr, g_ptr, y_ptr, n_cols, BLOCK: lang.constexpr):
    row = lang.program_id(0)
    cols = lang.arange(0, BLOCK)
    mask = cols < n_cols
    x = lang.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0)
    g = lang.load(g_ptr + cols, mask=mask, other=0.0)
    y = x * lang.sigmoid(squash(x) * g) + bounded(g)
    lang.store(y_ptr + row * n_cols + cols, y - lang.sum(y, axis=0) / n_cols, mask=mask)
"""
GATED = """import torch
from gates import gate_kernel
from kernel_agent import autodiff


@autodiff(inputs_require_grad=(0, 1))
def gate(x, g):
    x = x.contiguous()
    y = torch.empty_like(x)
    gate_kernel[(x.shape[0],)](x, g, y, x.shape[1])
    return y


SWEEP = [{"M": 4, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    given = dict(device=device, dtype=dtype)
    return torch.randn(dims["M"], dims["N"], **given), torch.randn(dims["N"], **given)
"""


def gated(folder: Path, gates: str) -> Path:
    (folder / "gates.py").write_text(gates)
    file = folder / "gate.py"
    file.write_text(GATED)
    return file


def pair_of(agent: Agent, file: Path) -> str:
    """The verified pair of a file, by the differentiator alone."""
    result = agent("--file-path", file, "--backend", "none", "--no-optimise", "--json")
    assert (result.code, result.result["verdict"]) == (0, "verified"), result.err
    return Path(result.result["pair"]).read_text()


def test_kernel_of_a_module_is_differentiated_in_a_file_without_triton(agent: Agent, tmp_path: Path) -> None:
    pair = pair_of(agent, gated(tmp_path, GATES))
    assert "import triton\nimport triton.language as tl\n" in pair
    assert "# - lines are those of gates.py" in pair


def test_what_a_kernel_of_a_module_is_refused_for_names_both_files(agent: Agent, tmp_path: Path) -> None:
    sorts = GATES.replace("squash(x) * g", "lang.sort(x) * g")
    result = agent("differentiate", gated(tmp_path, sorts))
    line = 1 + sorts[: sorts.index("lang.sort")].count("\n")
    assert result.code == 3
    assert f"gate.py:10:0: gates.py:{line}: sorting networks have no adjoint here" in result.err


def test_heuristic_of_a_module_is_asked_by_the_backward_too(agent: Agent, tmp_path: Path) -> None:
    rule = "def width(given):\n    return triton.next_power_of_2(given['n_cols'])\n\n\n"
    gates = GATES.replace('lambda given: triton.next_power_of_2(given["n_cols"])', "width")
    assert gates != GATES
    pair = pair_of(agent, gated(tmp_path, gates.replace("LIMIT =", f"{rule}LIMIT =")))
    assert 'gate_kernel.values["BLOCK"](dict(n_cols=n_cols))' in pair


UTILS = """\
import contextlib
import functools

import torch
import triton


def input_guard(fn=None, *, dense=True):
    def decorator(fn):
        @functools.wraps(fn)
        def wrapper(ctx, *args, **kwargs):
            args = [a.contiguous() if dense and isinstance(a, torch.Tensor) else a for a in args]
            first = next((a for a in args if isinstance(a, torch.Tensor)), None)
            with device_of(first):
                return fn(ctx, *args, **kwargs)

        return wrapper

    return decorator if fn is None else decorator(fn)


def device_of(tensor):
    return torch.cuda.device(tensor.device.index) if tensor.is_cuda else contextlib.nullcontext()
"""
HANDWRITTEN = Path(__file__).parent / "handwritten" / "rms_norm.py"


@pytest.mark.parametrize(
    ("imported", "decorator"),
    [
        ("from ..utils import calculate_settings, input_guard\n", "input_guard"),
        ("from .. import utils\nfrom ..utils import calculate_settings\n", "utils.input_guard(dense=True)"),
    ],
)
def test_decorators_of_a_package_around_both_directions(
    agent: Agent, tmp_path: Path, imported: str, decorator: str
) -> None:
    head, rest = HANDWRITTEN.read_text().split("def ensure_contiguous(fn):")
    _, settings, rest = rest.partition("def calculate_settings(n):")
    body, rest = rest.split("@triton.jit", 1)
    ops = tmp_path / "lib" / "ops"
    ops.mkdir(parents=True)
    for folder in (ops.parent, ops):
        (folder / "__init__.py").write_text("")
    utils = ops.parent / "utils.py"
    utils.write_text(f"{UTILS}\n\n{settings}{body}")
    file = ops / "norm.py"
    rest = rest.replace("    @ensure_contiguous\n", f"    @{decorator}\n")
    file.write_text(f"{head}{imported}\n\n@triton.jit{rest}")
    result = agent("check", file, "--json")
    assert (result.code, result.result["verdict"]) == (0, "verified"), result.err
    plain = "                return fn(ctx, *args, **kwargs)\n"
    computing = (
        "                made = fn(ctx, *args, **kwargs)\n"
        "                return [torch.mul(g, 1) for g in made] if isinstance(made, tuple) else made\n"
    )
    assert utils.read_text().count(plain) == 1
    utils.write_text(utils.read_text().replace(plain, computing))
    result = agent("check", file, "--json")
    assert (result.code, result.result["verdict"]) == (4, "not_verified"), result.err
    assert "input_guard of utils.py, line 16: uses torch.mul" in result.out + result.err


def test_folders_of_the_path_are_looked_in(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "kernels").mkdir()
    file = written(tmp_path / "shared").rename(tmp_path / "kernels" / "square.py")
    assert "No module named 'helpers'" in agent("inspect", file).err
    assert agent("inspect", file, "--path", tmp_path / "shared").code == 0
    wrong = agent("inspect", file, "--path", tmp_path / "nowhere")
    assert (wrong.code, "there is no such folder" in wrong.err) == (3, True)


def environment(folder: Path, pth: str, **files: str) -> Path:
    """The interpreter of a virtual environment with this one's packages, and what `pip install -e` leaves."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (site / "__editable__.mine.pth").write_text(pth)
    for name, text in files.items():
        (site / f"{name}.py").write_text(text)
    return folder / "bin" / "python"


FINDER = """import sys

MAPPING = {{"helpers": "{0}/helpers", "parts": "{0}/parts"}}


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None


sys.meta_path.append(Finder)
"""


@pytest.mark.parametrize("way", ["folder", "finder", "links"])
def test_packages_installed_for_editing_are_found(way: str, agent: Agent, tmp_path: Path) -> None:
    """`pip install -e` adds their folder to the path, or a finder that knows their folders, or, if it is to
    be strict, a folder of links to their files."""
    source = tmp_path / "project" / "src"
    source.mkdir(parents=True)
    file = written(source).rename(tmp_path / "square.py")
    (source / "helpers").mkdir()
    (source / "helpers.py").rename(source / "helpers" / "__init__.py")
    tree = tmp_path / "project" / "build" / "__editable__.mine-0.1-py3-none-any"
    for module in source.rglob("*.py") if way == "links" else ():
        link = tree / module.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(module)
    pth = {"folder": f"{source}\n", "finder": "import mine_finder\n", "links": f"{tree}\n"}[way]
    python = environment(tmp_path / "venv", pth, mine_finder=FINDER.format(source))
    result = agent("inspect", file, "--python", python)
    assert result.code == 0, result.err
    assert "square" in result.out
    (source / "helpers").rename(source / "other")
    result = agent("inspect", file, "--python", python)
    assert result.code == 3 and "No module named 'helpers'" in result.err, result.err


def test_batch_repeats_a_file_whose_module_has_changed(agent: Agent, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    written(folder)
    command = ["batch", folder, "--backend", "none", "--no-optimise", "--json"]
    assert agent(*command).code == 0
    assert len(agent.run_dirs()) == 1
    assert agent(*command).code == 0
    assert len(agent.run_dirs()) == 1
    (folder / "helpers.py").write_text(HELPERS + "\n\nUNUSED = 1\n")
    assert agent(*command).code == 0
    assert len(agent.run_dirs()) == 2


def test_resume_tells_that_a_module_has_changed(agent: Agent, tmp_path: Path) -> None:
    file = written(tmp_path)
    waiting = ["--file-path", file, "--backend", "mailbox:box", "--no-wait", "--draft", "llm"]
    assert agent(*waiting).code == 75
    (tmp_path / "helpers.py").write_text(HELPERS + "\n\nUNUSED = 1\n")
    result = agent("--file-path", file, "--resume", "--backend", "mailbox:box", "--no-wait")
    assert result.code == 2
    assert "a module that" in result.err
    assert "start a fresh run" in result.err


LIBRARY = (
    FORWARD.split("@autodiff")[0].replace("from kernel_agent import autodiff\n", "")
    + """

COUNT = 0


def launched(x):
    global COUNT
    COUNT += 1
    y = torch.empty_like(x)
    square_kernel[(blocks(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)
    return y
"""
)
STUB = """import torch
from kernel_agent import autodiff
from library import launched


@autodiff(inputs_require_grad=(0,))
def square(x):
    return launched(x.contiguous())
"""


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    """A stub whose launcher stays in its module: it sets a global name there."""
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "parts.py").write_text(PARTS.replace(".functions", "functions"))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "library.py").write_text(LIBRARY)
    file = tmp_path / "stub.py"
    file.write_text(STUB + "\n\nSWEEP" + FORWARD.split("\n\nSWEEP")[1])
    return file


REFUSES, AGREES = "the differentiator refuses line 7: library.py:", "forward and oracle agree"


def test_launcher_that_stays_in_its_module__ends_a_run_before_preflight_does(
    agent: Agent, refused: Path
) -> None:
    result = agent("--file-path", refused)
    assert result.code == 4, result.err
    assert REFUSES in result.err and AGREES not in result.err
    assert "launched from another file: launched sets COUNT of its module" in result.err


def test_launcher_that_stays_in_its_module__is_told_before_a_model_is_asked(
    agent: Agent, refused: Path
) -> None:
    result = agent("--file-path", refused, "--backend", "mailbox:box", "--no-wait")
    assert result.code == 75, result.err
    assert 0 < result.err.index(REFUSES) < result.err.index(AGREES)
