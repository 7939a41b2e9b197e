"""Drafts that are made once more; outputs of a half type."""

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
LARGE = """\
    if (request.get("config") or {}).get("num_stages") != 1:
        assert not request.get("schedule"), "the tuner asks for what does not fit"
        head, first, rest = draft.text.partition("        grid, N, BLOCK = ctx.launch\\n")
        draft.text = head + '        raise ValueError("it does not fit")\\n' + first + rest
"""
FULL = "error.out_of_resources = budget.out_of_resources(exc)"


def changed(agent: Agent, edits: dict[str, tuple[str, str]]) -> Path:
    """A forward for a program whose package has other text in some files."""
    share = agent.folder / "share"
    shutil.copytree(ROOT / "sandbox", share / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "prompts", share / "prompts")
    for name, (old, new) in edits.items():
        file = share / "sandbox/kernel_agent" / name
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, new))
    agent.env |= {"KA_SHARE": str(share)}
    forward = agent.folder / "scale.py"
    forward.write_text(FORWARD)
    return forward


def test_draft_that_reads_back_what_is_rounded_and_fails__is_made_once_more(agent: Agent) -> None:
    """And the tuner goes on from that."""
    forward = changed(agent, {"differentiate/operation.py": (MADE, ROUGH + MADE)})
    done = agent("--file-path", forward, "--backend", "none", "--no-retrieval", "--json")
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert "draft: differentiator, once more, with nothing read back rounded\n" in done.err, done.err
    assert "draft candidate 1: " in done.err and "draft candidate 2: " in done.err, done.err
    assert "optimise: schedule: " in done.err and "could not be built" not in done.err, done.err
    assert "d * w + 1" not in Path(done.result["pair"]).read_text()


def test_draft_that_wants_more_than_a_program_gets__is_made_once_more(agent: Agent) -> None:
    """With one stage a loop; once only, whatever comes of it."""
    edits = {
        "differentiate/operation.py": (MADE, LARGE + MADE),
        "operations/candidate.py": (FULL, f'{FULL} or "does not fit" in str(exc)'),
    }
    done = agent("--file-path", changed(agent, edits), "--backend", "none", "--no-retrieval", "--json")
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert "draft: differentiator, once more, with one stage a loop\n" in done.err, done.err
    assert "optimise: schedule: " in done.err and "could not be built" not in done.err, done.err
    assert "num_stages=1" in Path(done.result["pair"]).read_text()
    drafts = agent.folder / "share/sandbox/kernel_agent/differentiate/operation.py"
    drafts.write_text(drafts.read_text().replace('.get("num_stages") != 1', '.get("num_stages") != 0'))
    again = agent("--file-path", agent.folder / "scale.py", "--backend", "none", "--no-retrieval", "--json")
    assert again.code == 4 and again.err.count("draft: differentiator, once more") == 1, again.err


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
