"""The shared cache of compiled kernels: used by the next check, and out of reach for what a check runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import PYTHON, ROOT, Agent, copied_share

sys.path.insert(0, str(ROOT / "tests" / "attacks"))
import suite


@pytest.fixture
def pair(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(suite.pair("scale_atomics", suite.control("scale_atomics")))
    return path


def counts(hits: int, misses: int) -> dict[str, int]:
    return {"hits": hits, "misses": misses, "failed": 0, "dropped": 0}


def kernels(measured: dict[str, Any]) -> list[dict[str, Any]]:
    return [kernel for case in measured["cases"] for kernel in case["kernels"]]


def entries(agent: Agent) -> dict[str, str]:
    return {
        path.name: path.read_text() for path in agent.folder.glob(".cache/kernel-agent/compiled/*/*.json")
    }


def check(agent: Agent, pair: Path, *options: str, share: Path | None = None) -> dict[str, Any]:
    """What is measured of the pair, of which `compile` says where it came from."""
    env = {"KA_SHARE": str(share)} if share else {}
    done = agent("check", pair, "--quiet", "--json", "--python", PYTHON, *options, env=env)
    assert done.code == 0, done.err
    return done.result["measured"]


def test_second_check__other_process_and_other_file__compiles_only_what_has_changed(agent: Agent, pair: Path):
    cold = check(agent, pair)
    misses = cold["compile"]["misses"]
    assert misses > 0 and cold["compile"] == counts(0, misses)
    moved = agent.folder / "moved.py"
    moved.write_text("# the same kernels, a line further down\n" + pair.read_text())
    warm = check(agent, moved)
    assert warm["compile"] == counts(misses, 0)
    assert kernels(warm) == kernels(cold) and all(kernel["registers"] > 0 for kernel in kernels(cold))
    text = pair.read_text()
    pair.write_text(
        text.replace("tl.atomic_add(ds_ptr, tl.sum(dy * x))", "tl.atomic_add(ds_ptr, tl.sum(dy * x + 0 * x))")
    )
    assert pair.read_text() != text
    found = check(agent, pair)["compile"]
    assert found["hits"] > 0 and found["misses"] > 0


def test_no_compile_cache__leaves_no_file_and_uses_none(agent: Agent, pair: Path):
    first = check(agent, pair, "--no-compile-cache")["compile"]
    assert first["misses"] > 0 and not (agent.folder / ".cache").exists()
    assert check(agent, pair, "--no-compile-cache")["compile"] == first


def test_folder_that_others_can_write__is_not_used(agent: Agent, pair: Path):
    root = agent.folder / ".cache" / "kernel-agent" / "compiled"
    root.mkdir(parents=True)
    root.chmod(0o777)
    assert check(agent, pair)["compile"]["misses"] > 0 and not list(root.iterdir())


def test_compiler_that_dies_of_a_kernel__refuses_it(agent: Agent, pair: Path, tmp_path: Path):
    """As Triton's does where an assertion of its own fails."""
    share = copied_share(tmp_path / "share")
    (share / "dataset").symlink_to(ROOT / "dataset")
    module = share / "sandbox" / "kernel_agent" / "compiled.py"
    start = "def _build_kernel(source: Source, folder: Path) -> dict[str, Any]:\n"
    text = module.read_text()
    assert start in text
    module.write_text(text.replace(start, start + '    __import__("os").abort()\n'))
    done = agent("check", pair, "--quiet", "--json", "--python", PYTHON, env={"KA_SHARE": str(share)})
    assert done.code == 4, done.err
    assert "does not compile: Triton's compiler was ended by signal 6" in done.result["failures"]


# ---- a check that is hostile through and through: its whole Python is the attacker's

HOSTILE = """
def _run(request, scratch, honest=_run):
    result = honest(request, scratch)
    return _poison(request, scratch, result) if request["op"] == "facts" else result


def _poison(request, scratch, result):
    folder, keys, done = Path(request["compiled"]), result["cache"]["wanted"], []
    facts = {"registers": 1, "spills": 0, "shared": 0, "instructions": 1}
    forged = {"facts": facts, "metadata": {}, "asm": {}}

    def attempt(name, action):
        try:
            action()
            done.append(name)
        except OSError:
            pass

    for key in keys:
        (scratch / "evil.json").write_text(json.dumps(forged))
        entry = folder / f"{key}.json"
        attempt("write", lambda: entry.write_text(json.dumps(forged)))
        attempt("link", lambda: os.link(scratch / "evil.json", entry))
        attempt("symlink", lambda: os.symlink(scratch / "evil.json", entry))
        attempt("rename", lambda: os.replace(scratch / "evil.json", entry))
        private = Path(os.environ["TRITON_CACHE_DIR"]) / key
        private.mkdir(parents=True)
        (private / "kernel.json").write_text(json.dumps(forged))
        (scratch / f"{key}.json").write_text(json.dumps(forged))
    attempt("folder", lambda: (folder / "sub").mkdir())
    attempt("mode", lambda: folder.chmod(0o777))
    for kernel in (kernel for case in result["cases"] for kernel in case["kernels"]):
        kernel |= forged["facts"] | {"ok": True}
    result["wrong"] = _wrong_keys(scratch, keys, json.dumps(forged)) if WRONG_KEYS else []
    return result | {"sabotage": done, "facts": forged["facts"]}


def _wrong_keys(scratch, keys, forged):
    own = (scratch / f"compile-{keys[0]}.json").read_text()
    while len(keys) < 6:
        keys.append("%064x" % len(keys))
        (scratch / f"compile-{keys[-1]}.json").write_text(own)
    files = [scratch / f"compile-{key}.json" for key in keys]
    texts = [file.read_text() for file in files]
    files[0].write_text(texts[1])  # the source of another kernel
    files[1].write_text(texts[1] + " ")
    files[2].write_text(forged)
    files[3].rename(scratch / "real")
    files[3].symlink_to(scratch / "real")
    os.link(files[4], scratch / "second")
    for file in files[5:]:
        file.unlink()
    keys += ["../../" + "a" * 58, "A" * 64, "f" * 64, 7, None]
    return keys


if __name__"""


@pytest.fixture
def hostile(agent: Agent, request: pytest.FixtureRequest) -> Path:
    share = copied_share(agent.folder / "share")
    child = share / "sandbox" / "kernel_agent" / "child.py"
    code = HOSTILE.replace("WRONG_KEYS", str(request.param))
    child.write_text(child.read_text().replace("if __name__", code, 1))
    return share


@pytest.mark.parametrize("hostile", [True], indirect=True)
def test_poisoned_check__whose_sources_are_not_what_their_keys_say__leaves_nothing(
    agent: Agent, pair: Path, hostile: Path
):
    measured = check(agent, pair, share=hostile)
    assert measured["sabotage"] == [], "something in the shared folder could be changed"
    assert measured["compile"]["dropped"] == len(measured["wrong"]) and measured["compile"]["misses"] == 0
    assert not any(kernel["ok"] for kernel in kernels(measured)), "no number of the child itself is believed"
    assert not entries(agent)
    honest = check(agent, pair)
    assert honest["compile"]["hits"] == 0 and honest["compile"]["misses"] > 0
    assert all(kernel["ok"] and kernel["registers"] > 1 for kernel in kernels(honest))


@pytest.mark.parametrize("hostile", [False], indirect=True)
def test_poisoned_check__with_sources_that_are_what_they_say__gets_only_what_they_compile_to(
    agent: Agent, pair: Path, hostile: Path
):
    cold, kept = check(agent, pair), entries(agent)
    shutil.rmtree(agent.folder / ".cache")
    measured = check(agent, pair, share=hostile)
    assert measured["sabotage"] == [] and measured["compile"]["misses"] == cold["compile"]["misses"]
    assert entries(agent) == kept
    assert [kernel["registers"] for kernel in kernels(measured)] == [
        kernel["registers"] for kernel in kernels(cold)
    ]
