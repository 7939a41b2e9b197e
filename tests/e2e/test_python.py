"""Which Python is taken, what is said about it, and that the jail can read it wherever it lies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from conftest import BUILD, ROOT, Agent

FORWARD = ROOT / "examples" / "softmax.py"
REAL = ROOT / ".venv" / "bin" / "python"
SYSTEM = Path("/usr/bin/python3")
FULL = {"python": "3.12.1", "torch": "2.99.0", "triton": "3.99.0", "numpy": "2.0.0"}
BARE = {**FULL, "torch": None, "triton": None}


def fake(path: Path, versions: dict[str, str | None]) -> Path:
    """A launcher that answers the question as if it had these versions, and notes what it was given."""
    usable = versions == {**FULL, "torch": versions["torch"]} and versions["torch"]
    answer = json.dumps({"executable": str(REAL if usable else path), **versions})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\nenv > {path}.env\necho \"$@\" > {path}.args\necho noise\necho '{answer}'\necho noise\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def agent(agent: Agent) -> Agent:
    """No Python is named."""
    del agent.env["KA_PYTHON"]
    return agent


@pytest.fixture
def bare_share(tmp_path: Path) -> dict[str, str]:
    """An installation without a .venv, and a PATH without any Python."""
    share = tmp_path / "share"
    share.mkdir()
    for name in ("sandbox", "prompts"):
        (share / name).symlink_to(ROOT / name)
    (tmp_path / "no-python").mkdir()
    return {"KA_SHARE": str(share), "PATH": str(tmp_path / "no-python")}


def system_has_torch() -> bool:
    script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return SYSTEM.exists() and subprocess.run([SYSTEM, "-I", "-c", script], check=False).returncode == 0


def said(err: str) -> list[str]:
    return [line.split("python: ", 1)[1] for line in err.splitlines() if "python: " in line]


def test_search__activated_environments_then_path__first_with_torch_and_triton_is_used(
    agent: Agent, tmp_path: Path
):
    fake(tmp_path / "venv" / "bin" / "python", BARE)
    fake(tmp_path / "conda" / "bin" / "python", FULL)
    fake(tmp_path / "bin" / "python3", {**FULL, "torch": "2.98.0"})
    env = {
        "VIRTUAL_ENV": str(tmp_path / "venv"),
        "CONDA_PREFIX": str(tmp_path / "conda"),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }
    done = agent("inspect", FORWARD, env=env)
    assert done.code == 0, done.err
    assert said(done.err) == [f"{REAL} ($CONDA_PREFIX), torch 2.99.0, triton 3.99.0"]
    assert not (tmp_path / "bin" / "python3.env").exists()  # not asked any more
    done = agent("inspect", "no-file.py", env={**env, "CONDA_PREFIX": ""})
    assert said(done.err) == [f"{REAL} (PATH), torch 2.98.0, triton 3.99.0"]


def test_search__nothing_given__is_the_environment_of_the_installation(agent: Agent, tmp_path: Path):
    done = agent("inspect", "no-file.py", env={"PATH": str(tmp_path), "VIRTUAL_ENV": "", "CONDA_PREFIX": ""})
    assert f"{REAL} (the .venv of this installation), torch " in said(done.err)[0]


def test_search__question__comes_with_no_key_and_ignores_the_working_folder(agent: Agent, tmp_path: Path):
    python = fake(tmp_path / "venv" / "bin" / "python", FULL)
    for name in ("json", "re", "torch", "importlib"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    env = {"OPENAI_API_KEY": "sk-secret", "KA_API_KEY_FILE": "x", "PYTHONPATH": str(tmp_path)}
    agent("inspect", "no-file.py", env={**env, "VIRTUAL_ENV": str(tmp_path / "venv")})
    given = Path(f"{python}.env").read_text()
    assert "secret" not in given and "KA_" not in given and "PYTHONPATH" not in given
    assert f"VIRTUAL_ENV={tmp_path}/venv\n" in given
    done = agent("doctor", "--json", env={"PYTHONPATH": str(tmp_path), "VIRTUAL_ENV": str(REAL.parents[1])})
    assert done.result["pythons"][0]["torch"], done.out
    assert not (tmp_path / "executed").exists()


@pytest.mark.skipif(system_has_torch(), reason="the system's Python has torch")
def test_search__none_found__lists_what_was_tried_and_what_to_do(
    agent: Agent, tmp_path: Path, bare_share: dict[str, str]
):
    fake(tmp_path / "venv" / "bin" / "python", BARE)
    fake(tmp_path / "bin" / "python", {**FULL, "torch": "2.1.0"})
    env = {**bare_share, "VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": str(tmp_path / "bin")}
    done = agent("inspect", FORWARD, env=env)
    assert done.code == 2
    assert f"{tmp_path}/venv/bin/python ($VIRTUAL_ENV): lacks torch, Triton" in done.err
    assert f"{tmp_path}/bin/python (PATH): lacks torch 2.6 (it is 2.1.0)" in done.err
    assert "pip install torch" in done.err and "--python" in done.err


def test_named__lacks_triton__says_so_and_names_another(agent: Agent, tmp_path: Path):
    python = fake(tmp_path / "mine" / "python", {**FULL, "triton": None})
    done = agent("inspect", FORWARD, "--python", python)
    assert done.code == 2
    assert f"{python}: it lacks Triton; " in done.err and f"--python {REAL}" in done.err


def test_named__alone_is_asked(agent: Agent, tmp_path: Path):
    fake(tmp_path / "venv" / "bin" / "python", FULL)
    done = agent("inspect", "no-file.py", "--python", REAL, env={"VIRTUAL_ENV": str(tmp_path / "venv")})
    assert f"{REAL} (--python), torch " in done.err
    assert not list(tmp_path.glob("venv/bin/*.env"))
    done = agent("inspect", FORWARD, "--python", os.path.relpath(REAL, agent.folder))
    assert done.code == 0, done.err


def test_doctor__lists_all_that_were_found(agent: Agent, tmp_path: Path):
    bare = fake(tmp_path / "venv" / "bin" / "python", {**BARE, "executable": str(tmp_path / "elsewhere")})
    old = fake(tmp_path / "conda" / "bin" / "python", {**FULL, "triton": "2.1", "executable": "?"})
    env = {"VIRTUAL_ENV": str(tmp_path / "venv"), "CONDA_PREFIX": str(tmp_path / "conda")}
    done = agent("doctor", "--json", "--python", REAL, env=env)
    first, second, third, *_ = done.result["pythons"]
    assert done.result["python"] == first["path"] == str(REAL)
    assert first["chosen"] and first["usable"] and first["lacks"] is None and first["source"] == "--python"
    for name in ("torch", "triton", "numpy"):
        assert first[name] == metadata.version(name)  # pytest runs in the same environment
    assert second["found_at"] == str(bare) and not second["usable"] and not second["chosen"]
    assert second["lacks"] == "torch, Triton" and second["source"] == "$VIRTUAL_ENV"
    assert (
        third["path"] == str(old) and third["lacks"] == "Triton 3.2 (it is 2.1)" and third["triton"] == "2.1"
    )
    text = agent("doctor", "--python", REAL, env=env).out
    assert f"python     {REAL} (--python) 3." in text
    assert f"found     {old} ($CONDA_PREFIX): lacks Triton 3.2 (it is 2.1)" in text


def test_doctor__machine__is_told_with_its_limits(agent: Agent):
    machine = agent("doctor", "--json", "--python", REAL).result["machine"]
    assert 0 < machine["memory_bytes"] <= machine["host_memory_bytes"]
    assert 1 <= machine["cpus"] <= machine["host_cpus"]
    command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *agent.command("doctor", "--python", REAL)]
    done = subprocess.run(command, env=agent.env, capture_output=True, text=True, check=False)
    others = f" (affinity or a control group's quota; the machine has {os.cpu_count()})"
    assert f"processors 1{others if os.cpu_count() != 1 else ''}\n" in done.stdout


@pytest.fixture(scope="module")
def miniconda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Python below somebody's home."""
    if not SYSTEM.exists():
        pytest.skip("there is no /usr/bin/python3 to copy")
    script = (
        "import os, sys, sysconfig; print(os.path.realpath(sys.executable), sysconfig.get_path('stdlib'))"
    )
    asked = subprocess.run([SYSTEM, "-I", "-c", script], capture_output=True, text=True, check=True)
    program, library = map(Path, asked.stdout.split())
    home = tmp_path_factory.mktemp("home")
    root = home / "miniconda3"
    (root / "bin").mkdir(parents=True)
    shutil.copy(program, root / "bin" / program.name)
    (root / "bin" / "python").symlink_to(program.name)
    left_out = shutil.ignore_patterns(
        "site-packages", "dist-packages", "test", "__pycache__", "idlelib", "config-*", "sitecustomize.py"
    )
    shutil.copytree(library, root / "lib" / library.name, ignore=left_out)
    (root / "lib" / library.name / "only_here.py").write_text("")
    for name in ("linked", "copied"):
        (home / name / "bin").mkdir(parents=True)
        (home / name / "pyvenv.cfg").write_text(f"home = {root}/bin\n")
    (home / "linked" / "bin" / "python").symlink_to(root / "bin" / "python")
    shutil.copy(program, home / "copied" / "bin" / "python")
    (home / "tools" / "bin").mkdir(parents=True)
    (home / "tools" / "bin" / "python").symlink_to(root / "bin" / "python")
    home.chmod(0o700)
    return home


@pytest.mark.parametrize("options", [[], ["--without", "landlock"], ["--without", "mount"]], ids=str)
@pytest.mark.parametrize("name", ["miniconda3", "linked", "copied", "tools"])
def test_jail__interpreter_in_a_home__is_readable_with_its_library(
    miniconda: Path, tmp_path: Path, name: str, options: list[str]
):
    (tmp_path / "key").write_text("secret")
    (miniconda / "key").write_text("secret")
    script = f"import only_here, os, sys; print(sys.prefix, os.access({str(miniconda / 'key')!r}, os.R_OK))\n"
    script += f"try:\n    open({str(miniconda / 'key')!r}).read()\nexcept OSError:\n    print('unreadable')\n"
    command = [BUILD / "ka-jail", "--scratch", tmp_path, "--require", "landlock", *options, "--"]
    if "landlock" in options:
        command[4] = "none"
    done = subprocess.run(
        [*command, miniconda / name / "bin" / "python", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    prefix = miniconda / ("miniconda3" if name == "tools" else name)
    assert done.stdout.startswith(str(prefix)) and "unreadable" in done.stdout
