"""On a GPU times decide: a move that is slower is rolled back, one that is faster is kept. There is no GPU
here: the clock of tests/python/fake_gpu.py counts launches."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_card
import pytest
from conftest import Agent, Endpoint
from files import BACKWARD, FORWARD, fenced

ONCE = "            scale_dx_kernel[(M,)](dy, w, dx, N, BLOCK=triton.next_power_of_2(N))\n"
NOTHING = "            scale_dx_kernel[(1,)](dy, w, torch.empty_like(dx), min(dx.numel(), 1), BLOCK=16)\n"
OPTIONS = ("--device", "cuda", "--python", sys.executable, "--draft", "llm", "--no-retrieval", "--no-lessons")


def launching(more: int) -> str:
    """The same gradients with so many launches more than they take."""
    assert ONCE in BACKWARD
    return BACKWARD.replace(ONCE, ONCE + NOTHING * more)


@pytest.fixture(autouse=True)
def card(agent: Agent) -> None:
    fake_card.install(agent)


def run(
    agent: Agent, endpoint: Callable[..., Endpoint], answers: list[str]
) -> tuple[Any, list[dict[str, Any]]]:
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    model = endpoint([{"text": text} for text in answers])
    done = agent("--file-path", forward, "--base-url", model.url, "--json", *OPTIONS)
    journal = Path(done.result["run_dir"], "run.jsonl").read_text().splitlines()
    return done, [event for event in map(json.loads, journal) if event["event"] == "race"]


def test_moves__by_their_times(agent: Agent, endpoint: Callable[..., Endpoint]) -> None:
    answers = [fenced(launching(1)), fenced(launching(2)), fenced(launching(0)), "Nothing is left to gain."]
    done, races = run(agent, endpoint, answers)
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    draft, slower, faster = races
    assert "ratio" not in draft and draft["ms"] == pytest.approx(0.41) and draft["way"] == "graph"
    assert [shape["dims"] for shape in draft["shapes"]] == [{"M": 4, "N": 24}, {"M": 3, "N": 33}]
    assert slower["ratio"] == pytest.approx(0.51 / 0.41) and faster["ratio"] == pytest.approx(0.31 / 0.41)
    assert "1.244 of the best's time (1.244 to 1.244): no gain" in done.err, done.err
    assert done.result["rollbacks"] == 1 and done.result["ms"] == pytest.approx(0.31)
    assert done.result["modelled_cost"] is None
    # Where the time goes is told of the best, and of what was rolled back.
    assert [kernel["launches"] for kernel in slower["kernels"] if kernel["name"] == "scale_dx_kernel"] == [3]
    report = Path(done.result["run_dir"], "report.md").read_text()
    assert "Each kernel by itself, in plain calls on M=3, N=33: `scale_kernel` (forward) 0.1 ms;" in report
    assert "are the least." in report
    third = json.dumps(json.loads((agent.folder / "llm-0.log").read_text().splitlines()[2]))
    assert "rolled back; its kernels: `scale_kernel` (forward) 0.1 ms; " in third
    assert NOTHING not in Path(done.result["pair"]).read_text()


def tuned(agent: Agent) -> Any:
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    done = agent(
        "--file-path", forward, "--backend", "none", "--json", "--device", "cuda", "--python", sys.executable
    )
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    return done


def test_variants_of_the_tuner__are_timed__and_the_fastest_is_checked_once_none_is_left(agent: Agent) -> None:
    done = tuned(agent)
    tried = done.err.count("optimise: schedule: ")
    assert tried > 2 and done.err.count("of the best's time") == tried + 1, done.err
    first, last = done.err.index("optimise: schedule: "), done.err.rindex("optimise: schedule: ")
    assert first < done.err.index("0.677 of the best's time") < last < done.err.index("check candidate 2")
    assert "check candidate 3" not in done.err and done.result["ms"] == pytest.approx(0.21)
    assert "modelled cost" not in done.err
    journal = [json.loads(line) for line in (Path(done.result["run_dir"]) / "run.jsonl").open()]
    events = [event["event"] for event in journal]
    assert events.count("compile") > tried, "each variant's kernels, and the draft's"
    notes = [event["note"] for event in journal if event["event"] == "variant"]
    assert len(notes) == tried and all(f"optimise: {note}\n" in done.err for note in notes), notes
    assert events[events.index("variant") :].index("race") > 0, "a race is of the variant before it"


MADE = "    ast.parse(draft.text)\n"
WRONG = """\
    if (request.get("config") or {}).get("num_warps") == 2:  # no launch: faster than all others, and wrong
        head, _, rest = draft.text.partition("        scale_kernel_bwd[grid](")
        draft.text = head + "        d_w_ptr.add_(1)\\n" + rest.partition(")\\n")[2]
"""


def test_fastest_variant__that_fails_its_check__leaves_the_one_before_it(agent: Agent) -> None:
    drafts = agent.folder / "share/sandbox/kernel_agent/differentiate/operation.py"
    assert drafts.read_text().count(MADE) == 1
    drafts.write_text(drafts.read_text().replace(MADE, WRONG + MADE))
    done = tuned(agent)
    assert "check candidate 3" in done.err and "check candidate 4" not in done.err, done.err
    assert re.search("optimise candidate 2: .* not verified", done.err), done.err
    assert done.result["ms"] == pytest.approx(0.21) and done.result["rollbacks"] == 1
    assert "d_w_ptr.add_(1)" not in Path(done.result["pair"]).read_text()


SAID = """\
    result["seconds"] = round(time.monotonic() - started, 6)
"""
TAKES_LONG = """\
    if result["op"] == "oracle":
        time.sleep(3)
        result["context_seconds"] = 1e300  # no more than the process was there is believed
"""


def test_contexts_that_take_long__are_shared_by_more_cases(agent: Agent) -> None:
    child = agent.folder / "share/sandbox/kernel_agent/child.py"
    source = child.read_text()
    assert source.count(SAID) == 1
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    command = ("--file-path", forward, "--backend", "none", "--no-optimise", "--device", "cuda", "--json")
    counts = []
    for more in ("", TAKES_LONG):
        child.write_text(source.replace(SAID, SAID + more))
        done = agent(*command, "--children", "12", "--python", sys.executable)
        assert done.code == 0, done.err
        parts = [str(made.get("part", "")) for made in done.result["children"]]
        counts.append(sum(part.startswith("hidden shapes") for part in parts))
    assert 1 < counts[1] < counts[0], counts


def test_move__that_cannot_be_timed__is_no_gain(agent: Agent, endpoint: Callable[..., Endpoint]) -> None:
    clock = agent.folder / "share/sandbox/kernel_agent/operations/device_clock.py"
    clock.write_text(clock.read_text().replace("        call()\n\n    def pool", BROKEN + "\n\n    def pool"))
    assert BROKEN in clock.read_text()
    done, races = run(
        agent, endpoint, [fenced(launching(1)), fenced(launching(0)), "Nothing is left to gain."]
    )
    assert done.code == 0 and len(races) == 1 and done.result["rollbacks"] == 1, done.err
    assert "not timed: " in done.err and "out of launches" in done.err, done.err
    report = Path(done.result["run_dir"], "report.md").read_text()
    assert re.search(r"verified, not timed \(.*out of launches.*\)", report), report
    assert NOTHING in Path(done.result["pair"]).read_text()


# Whoever comes with a rival is not called.
BROKEN = """        call()
        import json, os
        if json.load(open(os.path.join(os.environ["HOME"], "request.json"))).get("rival"):
            raise RuntimeError("out of launches")"""


SETTLES = """\
    def settle(self):
        pass
"""
FULL = """\
    def settle(self):
        raise torch.OutOfMemoryError("CUDA out of memory")
"""


def test_memory_that_runs_out_beside_stopped_children__is_waited_for_once(
    agent: Agent, endpoint: Callable[..., Endpoint]
) -> None:
    clock = agent.folder / "share" / "sandbox" / "kernel_agent" / "operations" / "device_clock.py"
    assert SETTLES in clock.read_text()
    clock.write_text(clock.read_text().replace(SETTLES, FULL))
    done, races = run(agent, endpoint, [fenced(BACKWARD), "Nothing is left to gain."])
    assert done.code == 0 and done.result["verdict"] == "verified" and not races, done.err
    assert done.err.count("once more, when others are through: the GPU's memory had run out") == 1, done.err
    assert "not timed: it cannot be timed: the GPU ran out of memory" in done.err, done.err
    journal = Path(done.result["run_dir"], "run.jsonl").read_text().splitlines()
    (told,) = [event for event in map(json.loads, journal) if event["event"] == "not timed"]
    assert "the GPU ran out of memory" in told["why"]


ASKS = '    case = request["case"]\n'
NO_ROOM = """\
    import torch
    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except RuntimeError as full:
        raise errors.Unusable("make_args_raised", "make_args raised") from full
"""


def test_memory_that_runs_out_in_an_operation_of_its_own__is_waited_for_once(agent: Agent) -> None:
    drafts = agent.folder / "share/sandbox/kernel_agent/differentiate/operation.py"
    assert drafts.read_text().count(ASKS) == 1
    drafts.write_text(drafts.read_text().replace(ASKS, NO_ROOM + ASKS))
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    options = (
        "--device",
        "cuda",
        "--python",
        sys.executable,
        "--backend",
        "none",
        "--no-retrieval",
        "--json",
    )
    done = agent("--file-path", forward, *options)
    assert done.code == 4 and done.result["verdict"] == "not_verified", done.err
    assert done.err.count("once more, when others are through: the GPU's memory had run out") == 1, done.err
    journal = Path(done.result["run_dir"], "run.jsonl").read_text().splitlines()
    ran = [event for event in map(json.loads, journal) if event.get("op") == "differentiate"]
    assert len(ran) == 2, ran


MADE = "    ast.parse(draft.text)\n"
GUARDED = "    try:\n        made = Case(fwd, case, "
OTHERS_HAVE_IT = """\
    judges = "seconds" not in (request.get("budget") or {})  # preflight's has some
    if judges and case["dims"] == {"M": 4, "N": 24}:
        full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 MiB")
        return result | {"ok": False, "error": _error(full, fwd).to_dict()}
"""


def test_draft_of_which_nothing_is_said_for_others_have_the_memory__is_checked_once_more(
    agent: Agent,
) -> None:
    """As it is, and not another one: nothing spoke against it."""
    oracle = agent.folder / "share/sandbox/kernel_agent/operations/oracle.py"
    assert oracle.read_text().count(GUARDED) == 1
    oracle.write_text(oracle.read_text().replace(GUARDED, OTHERS_HAVE_IT + GUARDED))
    drafts = agent.folder / "share/sandbox/kernel_agent/differentiate/operation.py"
    assert drafts.read_text().count(MADE) == 1
    drafts.write_text(drafts.read_text().replace(MADE, "    draft.rounded = True  # no reason here\n" + MADE))
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    options = ("--device", "cuda", "--python", sys.executable, "--backend", "none", "--json")
    done = agent("--file-path", forward, *options)
    assert done.code == 4 and done.result["verdict"] == "not_verified", done.err
    assert done.err.count("draft: differentiator, once more: others had the GPU's memory\n") == 1, done.err
    journal = Path(done.result["run_dir"], "run.jsonl").read_text().splitlines()
    first, second = (event for event in map(json.loads, journal) if event["event"] == "candidate")
    assert first["backward"] == second["backward"]
    assert "the GPU ran out of memory" in json.dumps(done.result["shapes"]["skipped"])


LARGE = {"M": 64, "N": 24}


def with_a_large_shape(agent: Agent, patches: dict[str, tuple[str, str]]) -> tuple[Any, list[dict[str, Any]]]:
    """A run of which the oracle's memory ends before the sweep's largest shape; `patches`: of other files."""
    package = agent.folder / "share" / "sandbox" / "kernel_agent" / "operations"
    short = (
        "    left = None\n",
        '    budget, left = {**budget, "device_bytes": 8 * EVALUATION * 1000}, None\n',
    )
    for name, (old, new) in {"budget.py": short, **patches}.items():
        text = (package / name).read_text()
        assert text.count(old) == 1
        (package / name).write_text(text.replace(old, new))
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD.replace("SWEEP = [", f"SWEEP = [{LARGE}, "))
    options = ("--backend", "none", "--json", "--device", "cuda", "--python", sys.executable)
    done = agent("--file-path", forward, *options)
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    journal = Path(done.result["run_dir"], "run.jsonl").read_text().splitlines()
    return done, [event for event in map(json.loads, journal) if event["event"] == "race"]


def test_a_shape_that_is_checked_smaller__is_timed_as_it_is(agent: Agent) -> None:
    done, races = with_a_large_shape(agent, {})
    assert [one["dims"] for one in done.result["shapes"]["skipped"]] == [LARGE]
    assert len(races) > 1
    for race in races:
        assert [shape["dims"] for shape in race["shapes"]] == [{"M": 4, "N": 24}, {"M": 3, "N": 33}, LARGE]


def test_such_a_shape__that_cannot_be_timed_either__is_left_out_of_all_races(agent: Agent) -> None:
    full = (
        "            made = call()\n",
        "            made = call()\n"
        "            if any(launch.grid[0] > 60 for launch in launches):\n"
        '                raise torch.OutOfMemoryError("out of memory")\n',
    )
    done, races = with_a_large_shape(agent, {"device_clock.py": full})
    assert len(races) > 1 and done.err.count("a shape is left out of what is timed") == 1, done.err
    for race in races:
        assert [shape["dims"] for shape in race["shapes"]] == [{"M": 4, "N": 24}, {"M": 3, "N": 33}]
