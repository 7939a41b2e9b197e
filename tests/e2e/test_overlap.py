"""What runs beside what: cases dealt out to children, the oracle ahead of the candidate, a second try for a
child that died."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CASE, Agent, Ended, Endpoint, change_operation, copied_share
from files import BACKWARD, FORWARD, WRONG, fenced

MARKER = "\n# ---- backward ----\n"


def children(done: Ended, operation: str) -> list[dict[str, Any]]:
    return [child for child in done.result["children"] if child["op"] == operation]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    agent = Agent(tmp_path_factory.mktemp("overlap"))
    pair = agent.folder / "scale.py"
    pair.write_text(FORWARD + MARKER + BACKWARD)
    done = agent("check", pair, "--children", "3", "--json")
    assert done.code == 0, done.err
    return done


def test_cases_are_dealt_out_to_several_children(checked: Ended) -> None:
    parts = children(checked, "candidate")
    assert len(parts) == 3
    first = parts[0]["cases"] + parts[1]["cases"] + parts[2]["cases"]
    assert all(part["cases"] for part in parts) and first > 12
    assert all(child["warm"] for child in parts)


def test_parts_of_preflight_run_beside_each_other(checked: Ended) -> None:
    labels = {str(child.get("part", "")).split(",")[0] for child in children(checked, "oracle")}
    assert {"sweep", "hidden shapes", "kinds of inputs"} <= labels
    hidden = [c for c in children(checked, "oracle") if str(c.get("part", "")).startswith("hidden")]
    sweep = [c for c in children(checked, "oracle") if str(c.get("part", "")).startswith("sweep")]
    assert min(c["start"] for c in hidden) >= max(c["end"] for c in sweep), (
        "hidden shapes follow from the sweep"
    )


def test_what_preflight_computed_serves_the_first_check(checked: Ended) -> None:
    asked = sum(child["cases"] for child in children(checked, "candidate"))
    anew = [child for child in children(checked, "oracle") if str(child.get("part", "")).count(",") == 0]
    computed = sum(child["cases"] for child in anew if " of " in str(child.get("part", "")))
    shapes = checked.result["shapes"]
    oracles, kinds = checked.result["oracles"], checked.result["checked"]["kinds"]
    served = shapes["required"] + shapes["hidden"] + len(oracles["inputs"]["kept"])
    served += len(oracles.get("scalars", {}).get("varied", []))
    alike = sum(kind["cases"] for kind in kinds if "only " in kind["name"])  # the answer of a plain case
    assert served > 8 and computed == asked - served - alike


def test_the_draft_is_made_during_preflight__and_the_report_shows_when_each_child_ran(agent: Agent) -> None:
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    done = agent("--file-path", forward, "--backend", "none", "--no-optimise", "--json")
    assert done.code == 0, done.err
    [draft] = children(done, "differentiate")
    assert draft["start"] < max(child["end"] for child in children(done, "oracle"))
    folder = Path(done.result["run_dir"])
    assert "<svg" in (folder / "report.html").read_text()
    assert "oracle" in (folder / "report.md").read_text()
    assert done.result["loop_blocked_ms"] >= 0


def test_a_child_that_dies_by_a_signal__is_tried_once_more_and_counted(agent: Agent) -> None:
    dies = FORWARD.replace(
        "    x = torch.randn(dims", "    import os\n    os.kill(os.getpid(), 6)\n    x = torch.randn(dims"
    )
    pair = agent.folder / "scale.py"
    pair.write_text(dies + MARKER + BACKWARD)
    done = agent("check", pair, "--json", "--sweep", '[{"M": 4, "N": 24}]')
    assert done.code == 3, done.err
    assert "signal 6" in done.result["error"]["message"]
    died = [child for child in children(done, "oracle") if child["status"] == "died"]
    assert len(died) == 2 and done.result["retries"] == 1


def test_an_oracle_that_dies_in_a_check__is_the_runs_error_and_no_verdict(agent: Agent) -> None:
    dies = '        if self.upstream["kind"] == "ones":\n            import os\n            os.abort()\n'
    change_operation(copied_share(agent.folder / "share"), "oracle.py", CASE, dies + CASE)
    pair = agent.folder / "scale.py"
    pair.write_text(FORWARD + MARKER + BACKWARD)
    done = agent("check", pair, "--json", env={"KA_SHARE": str(agent.folder / "share")})
    assert done.code == 1, done.err
    assert done.result["error"]["kind"] == "died" and "signal 6" in done.result["error"]["message"]
    assert "does not belong" not in done.err


def test_the_oracle_works_while_the_model_thinks(agent: Agent, endpoint: Callable[..., Endpoint]) -> None:
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    model = endpoint([{"text": fenced(WRONG)}, {"text": fenced(BACKWARD), "delay": 2}])
    done = agent("--file-path", forward, "--base-url", model.url, "--draft", "llm", "--no-optimise", "--json")
    assert done.code == 0, done.err
    first, second = (child for child in children(done, "scan"))
    ahead = [child for child in children(done, "oracle") if first["end"] < child["start"] < second["start"]]
    assert sum(child["cases"] for child in ahead) > 12, "the oracle waited for the candidate"
