"""Outputs of a half type: what they hold rounded, and how far they reach."""

from __future__ import annotations

import shutil
from pathlib import Path

from conftest import ROOT, Agent
from files import FORWARD, WRONG

MADE = "    ast.parse(draft.text)\n"
ROUGH = """\
    if not (request.get("config") or {}).get("exact"):
        assert not request.get("schedule"), "the tuner asks for what is read back"
        assert draft.text.count("d_x = d * w") == 1
        draft.rounded, draft.text = True, draft.text.replace("d_x = d * w", "d_x = d * w + 1")
"""


def rough(agent: Agent) -> Path:
    """From now on each draft says that it reads back what is rounded, and is wrong, unless it is to be exact."""
    share = agent.folder / "share"
    shutil.copytree(ROOT / "sandbox", share / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "prompts", share / "prompts")
    drafts = share / "sandbox/kernel_agent/differentiate/operation.py"
    assert drafts.read_text().count(MADE) == 1
    drafts.write_text(drafts.read_text().replace(MADE, ROUGH + MADE))
    agent.env |= {"KA_SHARE": str(share)}
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    return forward


def test_draft_that_fails__is_made_once_more__and_the_tuner_goes_on_from_that(agent: Agent) -> None:
    done = agent("--file-path", rough(agent), "--backend", "none", "--no-retrieval", "--json")
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert "draft: differentiator, with nothing read back rounded" in done.err, done.err
    assert "draft candidate 1: " in done.err and "draft candidate 2: " in done.err, done.err
    assert "optimise: schedule: " in done.err and "could not be built" not in done.err, done.err
    assert "d * w + 1" not in Path(done.result["pair"]).read_text()


def test_wrong_backward_that_is_checked__has_no_other_draft(agent: Agent) -> None:
    pair = agent.folder / "pair.py"
    pair.write_text(FORWARD + "\n\n# ---- backward ----\n\n" + WRONG)
    done = agent("check", pair, "--json")
    assert done.code == 4 and done.result["verdict"] == "not_verified", done.err
    assert done.result["attempts"] == 1 and "draft:" not in done.err, done.err


def test_float16_output_of_float32_inputs__has_a_loss_scale_that_float16_holds(agent: Agent) -> None:
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD.replace("torch.empty_like(x)", "torch.empty_like(x, dtype=torch.float16)"))
    done = agent("--file-path", forward, "--backend", "none", "--no-retrieval", "--no-optimise", "--json")
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
