"""Questions about what a module runs on pass the scan; what stands next to them does not."""

from __future__ import annotations

import ast

import pytest
from kernel_agent.operations import scan
from kernel_agent.operations.elsewhere import Elsewhere
from sources import SCALE_PAIR

MARKER = "# ---- backward ----"
OWN = SCALE_PAIR.replace(MARKER, "")
BACKWARD = "        d_x = torch.empty_like(d_y)\n"


def rejected(source, folder=None):
    elsewhere = Elsewhere(folder, "") if folder is not None else None
    found = scan.scan(source, ast.parse(source), None, elsewhere)["findings"]
    return {f["message"] for f in found if f["severity"] == "reject"}


def asking(lines, imports="", own=True):
    """The module (or pair) whose backward has the lines."""
    text = OWN if own else SCALE_PAIR
    assert BACKWARD in text
    lines = "".join(f"        {line}\n" for line in lines.splitlines())
    return (f"{imports}\n" + text).replace(BACKWARD, lines + BACKWARD)


DRIVER = "triton.runtime.driver.active.utils"
DEVICES = [
    "torch.xpu.is_available()",
    "torch.xpu.get_device_properties(d_y.device).gpu_subslice_count",
    "torch.xpu.device_count() + torch.xpu.current_device()",
    "triton.runtime.driver.active.get_current_target().backend",
    f"{DRIVER}.get_device_properties(0)",
]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("line", DEVICES)
def test_question_of_a_device__passes(line, own):
    assert rejected(asking(line, own=own)) == set()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "line",
    [
        "torch.xpu",
        "torch.xpu.memory",
        "torch.xpu.Stream()",
        "torch.xpu.empty_cache()",
        "torch.xpu.set_device(0)",
        "torch.xpu.synchronize()",
        "torch.xpu._lazy_init()",
        "triton.runtime.driver",
        "triton.runtime.driver.active",
        "triton.runtime.driver.set_active(None)",
        "triton.runtime.driver.active.launcher_cls",
        DRIVER,
        f"{DRIVER}.load_binary",
    ],
)
def test_what_stands_beside_a_question_of_a_device__is_rejected(line, own):
    assert rejected(asking(line, own=own))


HELD = [
    (f"utils = {DRIVER}\nutils.get_device_properties(0)", True),
    ("active = triton.runtime.driver.active\nactive.get_current_target()", True),
    (f"utils = {DRIVER}\nutils.load_binary", False),
    (f"utils = {DRIVER}\nutils", False),
    (f"utils = {DRIVER}\nprint(utils)", False),
    (f"utils = {DRIVER}\nwith utils: pass", False),
    (f"utils = {DRIVER}\ngetattr(utils, 'load_binary')", False),
    (f"utils = {DRIVER}\nutils.get_device_properties = max", False),
    (f"utils = {DRIVER}\nutils = [utils.get_device_properties]", False),
    (f"global utils\nutils = {DRIVER}\nutils.get_device_properties(0)", False),
    (f"f = lambda utils: 0\nutils = {DRIVER}\nutils.get_device_properties(0)", False),
    (f"utils = more = {DRIVER}\nutils.get_device_properties(0)", False),
    (f"(utils := {DRIVER}).get_device_properties(0)", False),
    ("active = triton.runtime.driver.active\nactive.utils", False),
    ("active = triton.runtime.driver.active\nactive.launcher_cls", False),
]


@pytest.mark.parametrize(("lines", "passes"), HELD)
def test_name_for_a_driver__passes_where_nothing_but_answers_is_read(lines, passes):
    assert (rejected(asking(lines)) == set()) == passes
    assert rejected(asking(lines, own=False))  # a pair writes it out


IMPORTS = """import importlib
import importlib.metadata
import importlib.util
import packaging.version
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec as spec
from packaging.version import InvalidVersion, Version, parse
"""
CAUGHT = "try:\n    version = importlib.metadata.version('a')\nexcept {}:\n    version = '0'"
INSTALLED = [
    ("importlib.metadata.version('triton-rocm')", True),
    ("Version(torch.__version__) >= Version('2.4.0')", True),
    ("parse(triton.__version__) < packaging.version.parse('3.0')", True),
    ("parse(importlib.metadata.version('triton')).release", True),
    ("importlib.util.find_spec('transformers') is not None", True),
    ("spec('transformers') is None", True),
    (CAUGHT.format("PackageNotFoundError"), True),
    (CAUGHT.format("(ValueError, importlib.metadata.PackageNotFoundError, InvalidVersion)"), True),
    ("importlib.import_module('triton')", False),
    ("importlib", False),
    ("importlib.metadata", False),
    ("importlib.metadata.version", False),
    ("importlib.metadata.version(d_y)", False),
    ("importlib.metadata.version(distribution_name='triton')", False),
    ("importlib.metadata.files('triton')", False),
    ("importlib.metadata.distribution('triton')", False),
    ("importlib.metadata.sys.modules", False),
    ("importlib.util.sys", False),
    ("importlib.util.module_from_spec(None)", False),
    ("importlib.util.find_spec('transformers')", False),
    ("importlib.util.find_spec('transformers').loader", False),
    ("importlib.util.find_spec('transformers.utils') is None", False),
    ("importlib.util.find_spec('a', 'b') is None", False),
    ("importlib.util.find_spec(d_y) is None", False),
    ("spec('transformers') == None", False),
    ("(found := spec('transformers')) is None", False),
    ("Version", False),
    ("Version(*[torch.__version__])", False),
    ("packaging.version.re", False),
    ("packaging.version", False),
    ("PackageNotFoundError", False),
    (CAUGHT.format("importlib.metadata.sys"), False),
]


@pytest.mark.parametrize(("lines", "passes"), INSTALLED)
def test_question_about_packages__of_an_own_module__passes_as_a_whole_only(lines, passes):
    assert (rejected(asking(lines, IMPORTS)) == set()) == passes
    assert rejected(asking(lines, IMPORTS, own=False).replace(MARKER, "")) or passes
    pair = asking(lines, own=False).replace(MARKER, f"{MARKER}\n{IMPORTS}")
    assert rejected(pair)


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("import importlib.util", True),
        ("import packaging.version", True),
        ("from packaging.version import Version", True),
        ("import importlib", False),
        ("import packaging", False),
        ("from importlib import import_module", False),
        ("from importlib.util import module_from_spec", False),
        ("import transformers.utils", False),
    ],
)
def test_import_inside_a_backward__for_questions__passes(line, passes):
    assert (rejected(asking(line)) == set()) == passes


NPU = "from transformers.utils import is_torch_npu_available\nis_torch_npu_available()"


def test_question_of_a_library__passes_where_it_is_the_library_that_answers(tmp_path):
    assert rejected(asking(NPU), tmp_path) == set()
    assert rejected(asking(NPU[:-2]), tmp_path)
    assert rejected(asking(NPU.replace("npu", "many")), tmp_path)
    assert rejected(asking(NPU + ".more"), tmp_path) == set()  # of True or False
    twice = "from other import is_torch_npu_available\n"
    assert rejected(asking(NPU, twice), tmp_path)


@pytest.mark.parametrize("file", ["transformers.py", "transformers/utils.py"])
def test_question_of_a_library__whose_name_a_module_of_the_users_has__is_rejected(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("is_torch_npu_available = max\n")
    taken, asked = NPU.splitlines()
    assert rejected(asking(taken), tmp_path)
    assert rejected(asking(asked, taken), tmp_path)


UTILS = """import importlib

import torch
import triton


def device():
    return "xpu" if torch.xpu.is_available() else "npu" if npu() else "cpu"


def npu():
    try:
        from transformers.utils import is_torch_npu_available

        return is_torch_npu_available()
    except Exception:
        return False


def cores(default=20):
    try:
        utils = triton.runtime.driver.active.utils
        return int(utils.get_device_properties(0).get("num_vectorcore", default))
    except Exception:
        return default


def version(name):
    return importlib.import_module(name).version
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("device()", ""),
        ("cores()", ""),
        ("version('a')", "version of utils.py, line 29: uses importlib.import_module"),
    ],
)
def test_function_of_another_module__may_ask_too(tmp_path, line, found):
    (tmp_path / "utils.py").write_text(UTILS)
    told = rejected(asking(line, "from utils import cores, device, version"), tmp_path)
    assert any(found in message for message in told) if found else told == set(), told
