"""Sources of kernels and the shared cache of what they compile to, without a GPU."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import triton
from kernel_agent import child, compiled, forward, specialised
from kernel_agent.errors import Unusable
from kernel_agent.launches import launch_intercept
from sources import SCALE_PAIR
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend


@pytest.fixture(autouse=True)
def nothing_shared(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "private"))
    compiled.use(None)
    yield
    compiled.use(None)


@pytest.fixture
def unpatched():
    """install() changes Triton for good: undone, for the tests that follow."""
    backend = type(make_backend(specialised.GPUTarget("cuda", 90, 32)))
    from triton.runtime import build

    before = backend.add_stages, build._build
    yield
    backend.add_stages, build._build = before


def first_launch(path, n=40):
    """The compiler and the first launch of a pair's entry."""
    from kernel_agent import draw

    fwd = forward.load(path)
    args, kwargs = draw.make_inputs(fwd, {"N": n}, 0)
    seen = []
    with launch_intercept(lambda launch: (seen.append(launch), launch.run())):
        fwd.call(args, kwargs)
    return specialised.Compiler(fwd.target.triton), seen[0]


def lowered(path, **how):
    compiler, launch = first_launch(path, **how)
    kernel, options = compiler.specialise(launch)
    return compiled.lower(kernel, compiler.backend, compiler.target, options), compiler, kernel, options


def test_source__same_kernel_elsewhere__has_the_same_key(write):
    one, *_ = lowered(write(SCALE_PAIR))
    two, *_ = lowered(write("# another line\n\n" + SCALE_PAIR, "elsewhere.py"))
    assert one.key == two.key


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * factor", "x * factor * 2"),
        ("[grid]", "[grid]"),
        ("BLOCK=16", "BLOCK=32"),
        ("num_warps=4", "num_warps=8"),
    ],
)
def test_source__another_kernel__has_another_key(write, old, new):
    changed = SCALE_PAIR.replace("BLOCK=16", "BLOCK=16, num_warps=4")
    one, *_ = lowered(write(changed))
    two, *_ = lowered(write(changed.replace(old, new), "other.py"))
    assert (one.key == two.key) == (old == new)


def test_build__from_the_source__is_what_triton_compiles_from_the_python(write):
    source, compiler, kernel, options = lowered(write(SCALE_PAIR))
    entry = compiled.build(source)
    whole = triton.compile(kernel, target=compiler.target, options=options.__dict__)
    assert entry["facts"] == compiled.binary_facts(whole.asm["cubin"], whole.metadata.shared)
    assert entry["metadata"]["name"] == whole.metadata.name and entry["asm"]["ttgir"]
    assert compiled.build(source) == entry, "the same source gives the same bytes"


@pytest.mark.parametrize("capability", [75, 90, 120])
def test_instructions__of_a_binary__are_those_that_the_disassembler_shows(write, capability):
    *_, kernel, options = lowered(write(SCALE_PAIR))
    target = GPUTarget("cuda", capability, 32)
    options = make_backend(target).parse_options(vars(options) | {"arch": f"sm{capability}"})
    cubin = triton.compile(kernel, target=target, options=options.__dict__).asm["cubin"]
    (file := write("", "kernel.cubin")).write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", file]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(\S+)", listing, re.MULTILINE)
    assert "NOP;" in lines
    shown = len(lines) - lines.count("NOP;")
    assert compiled.binary_facts(cubin, 0)["instructions"] == shown > 10


def test_installed__entry_in_the_cache__is_loaded_instead_of_compiled(write, tmp_path, unpatched):
    source, compiler, kernel, options = lowered(write(SCALE_PAIR))
    entry = compiled.build(source)
    entry["asm"]["ptx"] = "// from the cache"
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / f"{source.key}.json").write_text(json.dumps(entry, default=vars))
    compiled.use(str(tmp_path / "shared"))
    compiled.install()
    got = triton.compile(kernel, target=compiler.target, options=options.__dict__)
    assert got.asm["ptx"] == "// from the cache"
    assert got.asm["cubin"] == compiled._unpacked(entry["asm"]["cubin"])
    assert got.metadata.shared == 0 and compiled.leave(tmp_path) == {"hits": 1, "wanted": []}


def test_installed__nothing_in_the_cache__compiles_and_asks_for_it(write, tmp_path, unpatched):
    source, compiler, kernel, options = lowered(write(SCALE_PAIR))
    compiled.use(str(tmp_path))
    compiled.install()
    got = triton.compile(kernel, target=compiler.target, options=options.__dict__)
    assert ".visible .entry" in got.asm["ptx"]
    assert compiled.leave(tmp_path) == {"hits": 0, "wanted": [source.key]}
    assert (tmp_path / f"compile-{source.key}.json").read_text() == source.canonical()


def test_damaged_entry__is_no_hit(write, tmp_path):
    source, *_ = lowered(write(SCALE_PAIR))
    compiled.use(str(tmp_path))
    (tmp_path / f"{source.key}.json").write_text('{"facts": {"regis')
    assert compiled.find(source) is None and compiled._shared.noted


@pytest.mark.parametrize(
    "option",
    [
        {"ptx_options": "-v"},
        {"extern_libs": {"libdevice": "/tmp/evil.bc"}},
        {"ir_override": "/tmp/evil.ttgir"},
    ],
)
def test_option_that_names_a_file_or_a_flag__is_not_shared(write, option):
    compiler, launch = first_launch(write(SCALE_PAIR))
    if next(iter(option)) not in vars(compiler.backend.parse_options({})):
        pytest.skip("not an option of this Triton")
    kernel, options = compiler.specialise(launch)
    other = compiler.backend.parse_options({**vars(options), **option})
    assert compiled.lower(kernel, compiler.backend, compiler.target, options) is not None
    assert compiled.lower(kernel, compiler.backend, compiler.target, other) is None


@pytest.mark.parametrize(
    "change",
    [
        {"options": [["ptx_options", "--help"]]},
        {"options": [["num_warps", [4]]]},
        {"format": 0},
        {"kind": 5, "extra": 1},
        {"text": ["a"]},
    ],
)
def test_op_compile__source_that_this_program_would_not_write__is_refused(write, tmp_path, change):
    source, *_ = lowered(write(SCALE_PAIR))
    text = json.dumps(json.loads(source.canonical()) | change, sort_keys=True)
    with pytest.raises(Unusable, match="not a source"):
        compiled.run({"source": text}, tmp_path)


def test_op_compile__ir_that_is_none__is_an_error_of_the_kernel(tmp_path):
    source = compiled.Source("kernel", "module { nonsense }", ("cuda", 90, 32))
    with pytest.raises(Unusable, match="does not compile"):
        compiled.run({"source": source.canonical()}, tmp_path)


MODULE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", "", -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""


def test_launcher__built_once_from_its_c__is_loaded_by_the_next(tmp_path, monkeypatch, unpatched):
    from triton.runtime.build import compile_module_from_src

    compiled.use(str(tmp_path))
    compiled.install()
    try:
        compile_module_from_src(MODULE, "__triton_launcher", [], [], [])
    except (subprocess.CalledProcessError, RuntimeError):
        pytest.skip("no C compiler with Python's headers here")
    (key,) = compiled.leave(tmp_path)["wanted"]
    entry = compiled.run({"source": (tmp_path / f"compile-{key}.json").read_text()}, tmp_path)
    (tmp_path / f"{key}.json").write_text(json.dumps(entry))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    monkeypatch.setenv("CC", "/bin/false")
    compiled.use(str(tmp_path))
    assert compile_module_from_src(MODULE, "__triton_launcher", [], [], []).answer() == 42


def test_module_that_triton_does_not_build__is_refused(tmp_path):
    source = compiled.Source("module", "int x;", name="../other")
    with pytest.raises(Unusable, match="no module of Triton"):
        compiled.run({"source": source.canonical()}, tmp_path)


@pytest.mark.parametrize("newer", [False, True])
def test_stages__whether_or_not_the_backend_asks_for_a_language__are_found(newer):
    class Old:
        def add_stages(self, stages, options):
            stages["ttir"] = options

    class New:
        def add_stages(self, stages, options, language):
            stages["ttir"] = options

    assert compiled._stages(New() if newer else Old(), 7) == {"ttir": 7}


def test_child__that_asks_for_a_compiled_kernel__says_what_it_missed_and_then_what_it_found(
    run_op, write, tmp_path
):
    from test_facts import CASE, OCCUPANCY

    path, shared = write(OCCUPANCY), tmp_path / "shared"
    shared.mkdir()
    fields = {"cases": [CASE], "fd": False, "compiled": str(shared)}
    first = run_op("oracle", path, **fields)
    assert first.result["ok"] and first.result["cache"]["hits"] == 0, first.output
    (key,) = first.result["cache"]["wanted"]
    source = (first.scratch / f"compile-{key}.json").read_text()
    (shared / f"{key}.json").write_text(json.dumps(compiled.run({"source": source}, tmp_path)))
    second = run_op("oracle", path, **fields)
    assert (
        second.result["ok"] and second.result["cache"]["wanted"] == [] and second.result["cache"]["hits"] > 0
    )
    assert not list(second.scratch.glob("compile-*"))


@pytest.mark.parametrize("op", ["bench", "candidate", "differentiate", "facts", "oracle"])
def test_child__that_launches_kernels__asks_for_what_is_not_compiled(op, tmp_path, monkeypatch):
    def launching(request, scratch):
        compiled.note(compiled.Source("kernel", "module {}", ("cuda", 90, 32)))
        return {}

    monkeypatch.setattr(child, "_operation", lambda request: launching)
    result = child._run({"op": op}, tmp_path)
    (key,) = result["cache"]["wanted"]
    assert (tmp_path / f"compile-{key}.json").exists()


def test_op_compile__compiler_that_cannot_be_run__is_no_finding_about_the_kernel(tmp_path, monkeypatch):
    def build(source: compiled.Source) -> None:
        raise PermissionError(13, "Permission denied", "/opt/triton/bin/ptxas")

    monkeypatch.setattr(compiled, "build", build)
    source = compiled.Source("kernel", "module {}", ("cuda", 90, 32))
    with pytest.raises(Unusable, match="the compiler cannot be run") as raised:
        compiled.run({"source": source.canonical()}, tmp_path)
    assert raised.value.kind == "internal"
