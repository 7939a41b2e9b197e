"""Batches: which files they take, that two at once share the work, and what they say of it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent
from files import SMALL
from service import asked, variant

ALONE = ("--backend", "none", "--no-optimise", "--json")


@pytest.fixture
def kernels(agent: Agent) -> Path:
    folder = agent.folder / "kernels"
    folder.mkdir()
    for number in range(3):
        (folder / f"k{number}.py").write_text(variant(number, SMALL))
    return folder


def outcomes(doc: dict[str, Any]) -> dict[str, str]:
    return {Path(item["file"]).name: item["outcome"] for item in doc["files"]}


def test_two_batches_at_once_run_each_file_once(agent: Agent, kernels: Path) -> None:
    asks = (*ALONE, "--jobs", "2")
    both = [agent.start("batch", kernels, *asks) for _ in range(2)]
    docs = [json.loads(process.communicate()[0]) for process in both]
    assert len(agent.run_dirs()) == 3
    for name in ("k0.py", "k1.py", "k2.py"):
        said = [outcomes(doc)[name] for doc in docs]
        assert "verified" in said and said.count("verified") == 1, said
        assert set(said) <= {"verified", "unchanged", "error"}
    # What either of them verified is known to the next.
    assert set(outcomes(agent("batch", kernels, *asks).result).values()) == {"unchanged"}
    assert list((agent.folder / "generated" / ".batch").iterdir()) == []


def test_file_that_another_process_is_about_to_begin_is_left_to_it(agent: Agent, kernels: Path) -> None:
    asks = ("--backend", "mailbox:box", "--draft", "llm", "--no-optimise", "--no-wait", "--json")
    claims = agent.folder / "generated" / ".batch"
    claims.mkdir(parents=True)
    name = hashlib.sha256(str(kernels / "k1.py").encode()).hexdigest()[:32]
    with (claims / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # and no run of it yet
        done = agent("batch", kernels, *asks)
    found = {Path(item["file"]).name: item for item in done.result["files"]}
    assert [found[name]["outcome"] for name in ("k0.py", "k1.py", "k2.py")] == ["waiting", "error", "waiting"]
    assert "another process works on" in found["k1.py"]["reason"] and len(agent.run_dirs()) == 2
    assert agent("batch", kernels, *asks).code == 75 and len(agent.run_dirs()) == 3


def test_file_that_another_batch_works_on_is_left_to_it(agent: Agent, kernels: Path) -> None:
    asks = ("--backend", "mailbox:box", "--draft", "llm", "--no-optimise", "--json")
    first = agent.start("batch", kernels, *asks, "--jobs", "1")
    asked(agent, 1)
    second = agent("batch", kernels, *asks, "--no-wait")
    found = {Path(item["file"]).name: item for item in second.result["files"]}
    assert found["k0.py"]["outcome"] == "error" and "another process works on" in found["k0.py"]["reason"]
    assert found["k1.py"]["outcome"] == found["k2.py"]["outcome"] == "waiting"
    assert found["k0.py"]["exit_code"] == 2 and len(agent.run_dirs()) == 3
    first.kill()
    first.communicate()


def test_run_that_cannot_be_read_is_not_begun_anew(agent: Agent, kernels: Path) -> None:
    for name in ("k1.py", "k2.py"):
        (kernels / name).unlink()
    asks = ("--backend", "mailbox:box", "--draft", "llm", "--no-optimise", "--no-wait", "--json")
    assert agent("batch", kernels, *asks).code == 75
    (run,) = agent.run_dirs()
    journal = run / "run.jsonl"
    journal.rename(run / "kept")
    journal.mkdir()
    refused = agent("batch", kernels, *asks)
    assert refused.code == 2 and "run.jsonl" in refused.result["files"][0]["reason"], refused
    assert len(agent.run_dirs()) == 1
    journal.rmdir()
    (run / "kept").rename(journal)
    (kernels / "k0.py").write_text(variant(7))  # of another text a fresh run is begun
    again = agent("batch", kernels, *asks)
    assert again.code == 75 and "begun anew" in again.err and len(agent.run_dirs()) == 2


def test_junit_and_json_say_the_same(agent: Agent, kernels: Path) -> None:
    (kernels / "k1.py").write_text(
        SMALL.replace("    y = torch", "    raise ValueError('<never>')\n    y = torch")
    )
    (kernels / "notes.py").write_text("x = 1\n")  # no forward file
    done = agent("batch", kernels, *ALONE, "--junit", "first.xml", "--jobs", "2")
    assert outcomes(done.result) == {"k0.py": "verified", "k1.py": "unusable", "k2.py": "verified"}
    assert done.code == 3 and done.result["seconds"] > 0
    assert re.search(r"batch: 3 of 3 files, 1 failed, 0 at work; took \d+ s", done.err), done.err
    assert re.search(r"batch: [12] of 3 files, [01] failed, [12] at work; about \d+ (s|min) left", done.err)
    suites = {Path(s.attrib["name"]).name: s for s in ET.parse(agent.folder / "first.xml").getroot()}
    assert {name: (s.attrib["failures"], s.attrib["errors"]) for name, s in suites.items()} == {
        "k0.py": ("0", "0"),
        "k1.py": ("0", "1"),
        "k2.py": ("0", "0"),
    }
    again = agent("batch", kernels, *ALONE, "--junit", "second.xml")
    assert outcomes(again.result) == {"k0.py": "unchanged", "k1.py": "unusable", "k2.py": "unchanged"}
    suites = {Path(s.attrib["name"]).name: s for s in ET.parse(agent.folder / "second.xml").getroot()}
    assert [suites[name].attrib["skipped"] for name in ("k0.py", "k1.py", "k2.py")] == ["1", "0", "1"]


def test_parts_are_all_files_and_each_once(agent: Agent, kernels: Path) -> None:
    for path in kernels.iterdir():
        path.write_text(path.read_text().replace("SWEEP = [", "SWEEP = []\nNOT = ["))  # ends early
    taken: list[str] = []
    for part in ("1/2", "2/2"):
        done = agent("batch", kernels, *ALONE, "--part", part)
        taken += outcomes(done.result)
        assert done.result["part"] == part
    assert sorted(taken) == ["k0.py", "k1.py", "k2.py"]
    for wrong in ("0/2", "3/2", "1", "1/2/3", "a/b"):
        refused = agent("batch", kernels, "--part", wrong)
        assert refused.code == 2 and "--part" in refused.err


def git(folder: Path, *words: str) -> None:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t.t", "-C", str(folder), *words]
    subprocess.run(command, check=True, capture_output=True)


def test_only_what_changed_since_a_revision_is_taken(agent: Agent, kernels: Path) -> None:
    for path in kernels.iterdir():
        path.write_text(path.read_text().replace("SWEEP = [", "SWEEP = []\nNOT = ["))  # ends early
    (kernels / "helper.py").write_text("SIZE = 3\n")
    (kernels / "uses.py").write_text("from helper import SIZE\n" + (kernels / "k0.py").read_text())
    git(kernels, "init", "-q")
    git(kernels, "add", ".")
    git(kernels, "commit", "-q", "-m", "first")

    def taken() -> list[str]:
        return sorted(outcomes(agent("batch", kernels, *ALONE, "--changed-since", "HEAD").result))

    assert taken() == []
    (kernels / "k1.py").write_text((kernels / "k1.py").read_text() + "# more\n")
    (kernels / "new.py").write_text((kernels / "k2.py").read_text() + "# new\n")
    assert taken() == ["k1.py", "new.py"]
    (kernels / "helper.py").write_text("SIZE = 4\n")
    assert taken() == ["k1.py", "new.py", "uses.py"]
    for wrong in ("nowhere", "-p", ""):
        refused = agent("batch", kernels, "--changed-since", wrong)
        assert refused.code == 2 and "--changed-since" in refused.err, refused.err
