"""Cases that say nothing about what they try: a GPU without room for them, one that a case before them left
unusable. There is no GPU here: see fake_card.py."""

from __future__ import annotations

import fcntl
import json
import os
import sys

import fake_card
from conftest import CASE, Agent, change_operation
from files import SMALL

OPTIONS = ("--device", "cuda", "--gpus", "0", "--backend", "none", "--no-optimise", "--json")

FULL = """
        if (Path(__file__).parent / "crowded").exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")
"""


def test_case_that_found_no_room__waits_until_other_programs_are_through(agent: Agent) -> None:
    fake_card.install(agent)
    crowded = change_operation(agent.folder / "share", "oracle.py", CASE, FULL + CASE).parent / "crowded"
    crowded.touch()
    (agent.folder / "square.py").write_text(SMALL)
    locks = agent.folder / "runtime"
    with (locks / f"kernel-agent-gpu-{os.getuid()}-0.lock").open("w+") as other:
        fcntl.lockf(other, fcntl.LOCK_SH)
        run = agent.start("--file-path", "square.py", *OPTIONS, "--python", sys.executable)
        assert run.stderr
        told = iter(run.stderr.readline, "")
        assert any("once more, alone: the GPU had no room for them" in line for line in told)
        assert any("waiting for what others check on the GPU" in line for line in told)
        crowded.unlink()
        fcntl.lockf(other, fcntl.LOCK_UN)
        out, err = run.communicate()
    assert run.returncode == 0, err
    assert json.loads(out)["shapes"]["required"] == 1


ILLEGAL = """
        if self.dims["N"] == 1:
            budget.LOST = True
        if getattr(budget, "LOST", False):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""
IS_LOST = "    try:\n        if device.startswith"


def test_cases_behind_one_that_breaks_the_gpu__are_asked_of_another_child(agent: Agent) -> None:
    fake_card.install(agent)
    change_operation(agent.folder / "share", "oracle.py", CASE, ILLEGAL + CASE)
    change_operation(
        agent.folder / "share",
        "budget.py",
        IS_LOST,
        '    if globals().get("LOST"):\n        return True\n' + IS_LOST,
    )
    (agent.folder / "square.py").write_text(SMALL)
    done = agent("--file-path", "square.py", *OPTIONS, "--python", sys.executable)
    assert done.code == 0, done.err
    left_out = done.result["oracles"]["sizes"]
    assert list(left_out) == ["N = 1"] and "illegal memory access" in left_out["N = 1"]
    again = [child.get("part") for child in done.result["children"]]
    assert "after one that left the GPU unusable" in again
    assert done.result["shapes"]["hidden"] > 8


NO_ROOM = """
            if self.dims["N"] == 24:
                self.without_room = "the GPU ran out of memory in reference()"
                return {}, None
"""
GRADIENTS = "            try:\n                grads = vector_jacobian(weighted"
SQUARE = "\n\ndef reference(x):\n    return x * x\n"


def test_reference_without_room_at_the_users_size__agrees_at_others(agent: Agent) -> None:
    fake_card.install(agent)
    change_operation(agent.folder / "share", "oracle.py", GRADIENTS, NO_ROOM + GRADIENTS)
    (agent.folder / "square.py").write_text(SMALL + SQUARE)
    done = agent("--file-path", "square.py", *OPTIONS, "--python", sys.executable)
    assert done.code == 0, done.err
    assert done.result["oracles"]["reference"] == "agree"
    assert "no second opinion" not in done.err


BYTES = "    return result | self.store(scratch, made)\n"


def test_results_beyond_the_machines_memory__are_asked_for_a_case_at_a_time(agent: Agent) -> None:
    fake_card.install(agent)
    more = BYTES.replace("self.store(scratch, made)", 'self.store(scratch, made) | {"bytes": 1 << 60}')
    change_operation(agent.folder / "share", "oracle.py", BYTES, more)
    (agent.folder / "square.py").write_text(SMALL)
    done = agent("--file-path", "square.py", *OPTIONS, "--python", sys.executable)
    assert done.code == 0, done.err
    cases = [child["cases"] for child in done.result["children"] if child["op"] == "candidate"]
    assert len(cases) > 30 and set(cases) == {1}
