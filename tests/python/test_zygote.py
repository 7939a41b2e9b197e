"""The warm interpreter: what its children find imported, and when it refuses to be forked. tests/jail forks
it below the jail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from kernel_agent import zygote
from sources import SANDBOX, SCALE, SCALE_PAIR

CASE = {"id": 0, "dims": {"N": 8}, "seed": 1, "upstream": {"kind": "normal", "seed": 2}}
REQUESTS = [
    ("inspect", SCALE, {}),
    ("oracle", SCALE, {"cases": [CASE], "fd": True}),
    ("candidate", SCALE_PAIR, {"cases": [CASE | {"twice": True, "noop": True, "linear": [1.0, 2.0]}]}),
    ("scan", SCALE_PAIR, {}),
    ("facts", SCALE_PAIR, {"cases": [CASE], "compile": True}),
    ("differentiate", SCALE, {"case": CASE, "schedule": None, "config": None}),
    ("compile", SCALE, {"source": None}),
    ("sanitize", SCALE_PAIR, {"sanitizer": "/bin/true", "cases": [], "tools": []}),
]
# One process, as a zygote is: imports, then a fork for each request.
PROGRAM = """
import json, os, sys
from kernel_agent import zygote
zygote._preload()
state = {"unfit": zygote._unfit(), "cuda": sys.modules["torch"].cuda.is_initialized(), "new": {}, "ok": {}}
state["compiler"] = "torch._dynamo" in sys.modules
for scratch in sys.argv[1:]:
    reading, writing = os.pipe()
    if os.fork() == 0:
        before = set(sys.modules)
        from kernel_agent import child
        child.main(["child", scratch])
        made = [name for name in set(sys.modules) - before if not name.startswith("kernel_agent_user")]
        os.write(writing, json.dumps(sorted(made)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as found:
        name = os.path.basename(scratch)
        state["new"][name] = json.load(found)
    os.wait()
    with open(scratch + "/result.json") as result:
        state["ok"][name] = json.load(result)["ok"]
print(json.dumps(state))
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """What PROGRAM saw."""
    return seen_by(tmp_path_factory.mktemp("zygote"), REQUESTS)


def seen_by(folder, requests, **variables):
    scratches = []
    for op, source, fields in requests:
        scratch = folder / op
        scratch.mkdir()
        (folder / f"{op}.py").write_text(source)
        request = {
            "op": op,
            "nonce": "0",
            "file": str(folder / f"{op}.py"),
            "device": "cpu",
            "target": "sm_90",
        }
        (scratch / "request.json").write_text(json.dumps(request | {"dtype": None} | fields))
        scratches.append(str(scratch))
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **one, "PYTHONPATH": str(SANDBOX), **variables}
    command = [sys.executable, "-c", PROGRAM, *scratches]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_preloaded_process__has_one_thread_and_no_gpu(state):
    assert state["unfit"] is None and state["cuda"] is False


def test_preloaded_process__has_not_imported_torchs_compiler(state):
    """More than a second of processor time, which dispatch modes cost that are not ours (modes.py)."""
    assert state["compiler"] is False


@pytest.mark.parametrize("op", [op for op, _, _ in REQUESTS])
def test_child_of_a_zygote__imports_nothing_more(op, state):
    assert state["ok"][op]
    assert state["new"][op] == []


def test_child_of_a_zygote_on_a_gpu__imports_nothing_more_for_launches_without_memory(tmp_path):
    pair = SCALE_PAIR.replace("torch.randn(", "0.5 * torch.randn(")  # by a function in Python, without memory
    assert pair != SCALE_PAIR
    requests = [("facts", pair, {"cases": [], "compile": True, "real": [{"N": 64}]})]
    state = seen_by(tmp_path, requests, KA_GPU="1")
    assert (state["unfit"], state["cuda"], state["compiler"]) == (None, False, False)
    assert state["ok"]["facts"] and state["new"]["facts"] == []


@pytest.fixture
def package(tmp_path):
    """A copy of the package's folders with a file in each."""
    shutil.copytree(
        Path(zygote.__file__).parent, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path / "package"


def test_sources__edited_added_or_removed__are_others(package):
    def seen():
        return zygote._sources(str(package))

    first = seen()
    assert len(first) == len(list(package.rglob("*.py"))) and seen() == first
    os.utime(package / "torch_tl" / "memory.py", (1, 1))  # older, as another commit's may be
    edited = seen()
    (package / "differentiate" / "new.py").touch()
    added = seen()
    (package / "operations" / "scan.py").unlink()
    assert first != edited != added != seen()


def test_sources__bytecode__is_none(package):
    first = zygote._sources(str(package))
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "scan.cpython-311.pyc").touch()
    assert zygote._sources(str(package)) == first


@pytest.mark.parametrize("compiled", [True, False])
def test_bytecode__is_kept_only_where_the_installation_has_none(
    compiled: bool, tmp_path, monkeypatch
) -> None:
    there = tmp_path / "torch.pyc"
    if compiled:
        there.touch()
    spec = types.SimpleNamespace(cached=str(there))
    monkeypatch.setattr(zygote.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("KA_BYTECODE", str(tmp_path / "kept"))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    zygote._keep_bytecode("torch")
    assert sys.pycache_prefix == (None if compiled else str(tmp_path / "kept"))
    assert sys.dont_write_bytecode is compiled


def test_bytecode_of_this_package__is_kept_where_it_has_none__and_not_that_of_others(
    package, tmp_path
) -> None:
    """Written by one process and read by the next; torch has its own."""
    program = (
        "import sys; from kernel_agent import zygote; zygote._preload(); "
        "print(sys.pycache_prefix, sys.dont_write_bytecode)"
    )
    (tmp_path / "package").rename(tmp_path / "kernel_agent")
    kept = tmp_path / "kept"
    given = {"PYTHONPATH": str(tmp_path), "KA_BYTECODE": str(kept), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(kept), "False"]
    names = {path.name.partition(".")[0] for path in kept.rglob("*.pyc")}
    assert {"child", "candidate", "rules"} <= names
    assert not list(kept.rglob("torch/__init__.*"))


def test_warming__looks_for_no_garbage_and_leaves_nothing_for_collections_to_look_at() -> None:
    program = (
        "import gc; from kernel_agent import zygote; seen = []; gc.collect(); "
        "gc.callbacks.append(lambda phase, info: seen.append(phase)); "
        "why = zygote._warm(); made = [[] for _ in range(100)]; "
        "print(why, len(seen), gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    given = {**one, "PYTHONPATH": str(SANDBOX)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "0", "True", "True"]


def test_twin__after_a_request__is_not_forked(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    said: list[str] = []
    one = zygote.Zygote(types.SimpleNamespace(), types.SimpleNamespace())
    monkeypatch.setattr(one, "_say", lambda text, fd=None: said.append(text))
    one._start(b"7", [])
    assert said and said[0].startswith("refused 7")
    with pytest.raises(RuntimeError, match="before the first request"):
        one._fork_twin(-1)
