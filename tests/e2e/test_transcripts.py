"""Recorded answers of a model, played back over HTTP: the same questions are asked, each holds the facts that
were needed to answer it, and the run takes the same course."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Agent, Endpoint

sys.path[:0] = [str(ROOT / "tests" / "llm"), str(ROOT / "scripts")]
import prompt_eval  # noqa: E402
from facts import facts_of, missing  # noqa: E402

TRANSCRIPTS = ROOT / "tests" / "llm" / "transcripts"


@dataclass
class Course:
    """What must have happened: a line for each candidate and each unusable answer, and what is left at the
    end."""

    steps: list[str]
    rollbacks: int
    has: str  # in the finished pair
    lacks: str = "no candidate has this"  # only in candidates that were not kept
    # Other inputs, so often: a candidate that the model gave subtracts what is nearly equal, and now and then
    # rounding rejects it, rightly.
    draws: int = 1


def at_once(has: str) -> Course:
    """The first answer is verified, and the run was not to optimise."""
    return Course(["draft: verified"], rollbacks=0, has=has)


COURSES = {
    "linear_recurrence_fix": Course(
        [
            "draft: not verified",
            "fix: verified",
            "optimise: verified",
            "optimise: verified",
            "optimise: verified",
        ],
        rollbacks=1,
        has="tl.store(dgate_ptr + offs, g * (cur - a * prev) * (1 - s), mask=mask)",
        draws=3,
        lacks="ctx.save_for_backward(decay, gate, h0, h)",
    ),
    "layer_norm_optimise": Course(
        [
            "draft: not verified",
            "fix: verified",
            "optimise: verified",
            "optimise: verified",
            "optimise: verified",
            "optimise: verified",
            "optimise: verified",
            "optimise: verified",
        ],
        rollbacks=3,
        has="the row in registers; dw, db: partials_then_reduce, one partial row a program",
        lacks="layer_norm_bwd_reduce_kernel",
    ),
    "linear_recurrence_unusable": Course(
        [
            "draft: not verified",
            "fix: verified",
            "unusable: There is no code in the answer",
            "optimise: verified",
            "optimise: verified",
        ],
        rollbacks=2,
        has="prev = tl.load(h_ptr + offs - D, mask=mask & (t > 0), other=0.0)",
        lacks="if i < T - 1:",
    ),
    "soft_align": Course(
        ["draft: not verified", "fix: verified"],
        rollbacks=0,
        has="e_d / total",
        lacks="tl.exp(tl.where(both, best_d - r, 0.0) / gamma)",
    ),
    "sink_attention": Course(
        ["draft: not verified", "fix: verified"],
        rollbacks=0,
        has="for h in range(h0, tl.minimum(h0 + G, H)):",
        lacks="for head in range(G):",
    ),
    "welford_norm": Course(
        [
            "draft: verified",
            "optimise: verified",
            "optimise: verified",
        ],
        rollbacks=1,
        has="dweight, dbias: swap_owner, one program a channel",
        lacks="for image in range(part, N, G):",
    ),
    "sparsemax_gate": Course(
        ["draft: verified", "optimise: verified"],
        rollbacks=0,
        has="for row in range(tl.program_id(0).to(tl.int64), M, G):",
        lacks="tl.atomic_add(dv_ptr + cols, dy * p, mask=mask)",
    ),
    "rank_pooling": at_once("rank += tl.sum((before & there[None, :]).to(tl.int32), axis=1)"),
    "kepler": at_once("d_mean = (d_anomaly + d_dist * ecc * sin) / (1.0 - ecc * cos)"),
    "cumulative_logsumexp": at_once("dx, dscale: reverse_scan by chunk_state_pass"),
    "segment_max": at_once("def segment_max_count("),
    "softplus_gate": at_once("slope = tl.where(z > 0.0, 1.0, tl.where(z < 0.0, e, 0.0)) / (1.0 + e)"),
    "poly_loss": at_once("def poly_loss_bwd_weight("),
    "causal_conv": at_once("dx: gather_transpose, one owner a tile of x"),
    "learned_rope": at_once("dfreq += s * gain * (dy2 * out1 - dy1 * out2)"),
    "resample": at_once("inside = (pos > 0.0) & (pos < L - 1.0)"),
    "delta_rule": at_once("dstate = dstate * a"),
}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(journal: list[dict[str, Any]]) -> list[str]:
    """The journal in the words of Course.steps."""
    steps, phase = [], ""
    for event in journal:
        if event["event"] == "prompt":
            phase = event["phase"]
        elif event["event"] == "verdict":
            steps.append(f"{phase}: {'' if event['verdict']['verified'] else 'not '}verified")
        elif event["event"] == "bad_answer":
            steps.append("unusable: " + event["problem"].partition(":")[0].partition(".")[0])
    return steps


def test_every_transcript_has_a_course() -> None:
    assert {path.stem for path in TRANSCRIPTS.glob("*.jsonl")} == set(COURSES)


@pytest.mark.parametrize("name", COURSES)
def test_transcript_takes_its_course(agent: Agent, endpoint: Callable[..., Endpoint], name: str) -> None:
    head, *answers = read_lines(TRANSCRIPTS / f"{name}.jsonl")
    forward = agent.folder / f"{head['name']}.py"
    forward.write_text(head["forward"])
    for _ in range(COURSES[name].draws):
        model = endpoint(answers)
        done = agent("--file-path", forward, "--base-url", model.url, "--json", *head["options"])
        failed = [request["failed"] for request in model.requests()]
        if failed == [[]] * len(answers):
            break
    assert failed == [[]] * len(answers), done.err
    assert list(missing(facts_of(name), prompt_eval.questions_of(model.log))) == []
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    course = COURSES[name]
    assert steps_of(read_lines(Path(done.result["run_dir"]) / "run.jsonl")) == course.steps
    assert done.result["rollbacks"] == course.rollbacks
    assert done.result["attempts"] == sum(not step.startswith("unusable") for step in course.steps)
    pair = Path(done.result["pair"]).read_text()
    assert course.has in pair and course.lacks not in pair
