"""Runs with a model behind real HTTP: drafts, fixes, patches, roll-backs, and every way an endpoint can
fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent, Ended, Endpoint
from files import BACKWARD, ENOUGH, FORWARD, MEND, PATCH, RAISES, WRONG, fenced

KEY = "sk-secret-0123456789abcdef"
Start = Callable[..., Endpoint]


@pytest.fixture
def forward(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    return path


def run(agent: Agent, forward: Path, url: str, *more: str, env: dict[str, str] | None = None) -> Any:
    return agent("--file-path", forward, "--base-url", url, "--draft", "llm", "--json", *more, env=env)


def events(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    lines = (Path(result["run_dir"]) / "run.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_draft_fix_by_patch_then_verified(agent: Agent, forward: Path, endpoint: Start) -> None:
    model = endpoint(
        [
            {"text": fenced(WRONG), "expect": ["scale_autograd", "tl.load(x_ptr"]},
            {"tool": "submit_patch", "arguments": {"patch": PATCH}, "expect": ["w"]},
        ]
    )
    done = run(agent, forward, model.url, "--no-optimise")
    assert done.code == 0, done.err
    result = done.result
    assert result["verdict"] == "verified" and result["attempts"] == 2 and result["snapshots"] == 2
    assert {gradient["name"] for gradient in result["gradients"]} == {"x", "w"}
    assert all(gradient["error"] < 1e-5 for gradient in result["gradients"])
    assert result["shapes"]["passed"] == result["shapes"]["required"] == 2
    assert result["shapes"]["hidden"] >= 4 and result["shapes"]["hidden_passed"] == result["shapes"]["hidden"]
    assert result["llm"]["requests"] == 2 and result["llm"]["tokens_in"] == 200
    pair = Path(result["pair"]).read_text()
    assert "kernel_agent" not in pair.replace("marks the stub for kernel-agent", "")
    assert "# ---- backward ----" in pair and "range(0, M)" in pair
    verdicts = events(result, "verdict")
    assert [verdict["verdict"]["verified"] for verdict in verdicts] == [False, True]
    traced = [event["what"] for event in events(result, "llm_trace")]
    assert traced == ["request", "answer"] * 2
    assert len(events(result, "prompt")) == len(events(result, "answer")) == 2
    assert (Path(result["run_dir"]) / "report.md").read_text().startswith("#")
    again = agent("verify", result["run_dir"], "--json")
    assert again.code == 0 and again.result["verdict"] == "verified", again.err


def test_hidden_shapes_and_seeds_are_not_in_prompts(agent: Agent, forward: Path, endpoint: Start) -> None:
    model = endpoint([{"text": fenced(WRONG)}, ENOUGH])
    done = run(agent, forward, model.url, "--no-optimise")
    assert done.code == 5, done.err
    hidden = [
        shape["dims"] for shape in events(done.result, "preflight")[0]["shapes"] if shape["class"] == "hidden"
    ]
    assert hidden
    prompts = "\n".join(
        str(message["content"])
        for request in model.requests()
        for message in json.loads(request["body"])["messages"]
    )
    for dims in hidden:
        for text in (json.dumps(dims), ", ".join(f"{name}={size}" for name, size in dims.items())):
            assert not re.search(re.escape(text) + r"(?!\d)", prompts), text


def test_patch_that_does_not_apply_is_told_and_asked_again(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    bad = MEND.replace("M, N = x.shape", "M, N = y.shape")
    model = endpoint(
        [
            {"text": fenced(RAISES)},
            {"tool": "submit_patch", "arguments": {"patch": bad}},
            {"tool": "submit_patch", "arguments": {"patch": MEND}, "expect": ["M, N = y.shape"]},
        ]
    )
    done = run(agent, forward, model.url, "--no-optimise")
    assert done.code == 0, done.err
    assert done.result["attempts"] == 2 and len(events(done.result, "bad_answer")) == 1


def test_print__shows_the_finished_backward_below_the_summary(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    url = endpoint([{"text": fenced(BACKWARD)}], "--repeat").url
    done = agent("--file-path", forward, "--base-url", url, "--draft", "llm", "--no-optimise", "--print")
    assert done.code == 0, done.err
    summary, _, printed = done.out.partition("\n\n@triton.jit\n")
    assert "verified on cpu" in summary and "  run:    " in summary.splitlines()[-1]
    assert "@triton.jit\n" + printed == BACKWARD.strip() + "\n"


def test_optimisation_that_breaks_the_gradient_is_rolled_back(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    repair = WRONG.replace("range(0, 1)", "range(0, 2)")
    model = endpoint([{"text": fenced(text)} for text in (BACKWARD, WRONG, repair, WRONG, repair)])
    done = run(agent, forward, model.url, "--patience-perf", "2")
    assert done.code == 0, done.err
    assert done.result["rollbacks"] == 2 and done.result["attempts"] == 5
    # Draft and optimise turns are shown the differentiator's work: its mathematics, its decisions, the menu
    # of schedules.
    drafting, optimising = (json.dumps(request) for request in model.requests()[:2])
    assert "A mechanical draft" in drafting and "scale_kernel_bwd" in drafting
    for asked in (drafting, optimising):
        assert "schedule of the draft: " in asked and "schedules that are also provable" in asked
        assert "gradient of w_ptr" in asked and "private partial sums and a second kernel" in asked
    # The second move and its repair are the first ones again: they have their verdicts, without a check.
    assert "byte for byte" in done.err
    # (A check has one scan; its cases are dealt out to several children.)
    assert [event["op"] for event in events(done.result, "child")].count("scan") == 3
    assert [event["verdict"]["verified"] for event in events(done.result, "verdict")] == [True] + 4 * [False]
    assert "range(0, M)" in Path(done.result["pair"]).read_text()


def test_never_right_ends_with_the_best_and_its_errors(agent: Agent, forward: Path, endpoint: Start) -> None:
    model = endpoint([{"text": fenced(WRONG)}], "--repeat")
    done = run(agent, forward, model.url, "--max-iters", "1")
    assert done.code == 4, done.err
    assert done.result["verdict"] == "not_verified" and done.result["pair"] is None
    assert "w" in done.result["failures"]
    assert Path(done.result["best"]).exists()


def test_passing_faults_are_survived(agent: Agent, forward: Path, endpoint: Start) -> None:
    """One before each of several answers, of which the last alone is right."""
    faults = [
        {"fault": "cut"},
        {"fault": "bad_json"},
        {"fault": "empty"},
        {"status": 500},
        {"status": 429, "headers": {"Retry-After": "0"}},
    ]
    answers = [RAISES.replace("contigous", f"contigous_{number}") for number in range(1, len(faults))]
    steps = [
        step
        for fault, text in zip(faults, [*answers, BACKWARD], strict=True)
        for step in (fault, {"text": fenced(text)})
    ]
    model = endpoint(steps)
    done = run(agent, forward, model.url, "--no-optimise")
    assert done.code == 0 and done.result["attempts"] == len(faults), done.err
    assert len(model.requests()) == len(steps)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"status": 401, "error": "bad key"}, ["bad key"]),
        ({"status": 404, "error": "no such model"}, ["no such model"]),
        ({"fault": "huge"}, []),
        ({"fault": "endless"}, []),
    ],
    ids=str,
)
def test_lasting_faults_end_with_code_5(
    agent: Agent, forward: Path, endpoint: Start, step: dict[str, Any], words: list[str]
) -> None:
    model = endpoint([step], "--repeat")
    done = run(agent, forward, model.url, "--llm-timeout", "2")
    assert done.code == 5, done.err
    for word in words:
        assert word in done.result["error"]["message"]


@pytest.mark.parametrize(
    "step", [{"fault": "refusal"}, {"text": "I would rather talk about the weather."}], ids=str
)
def test_answers_without_code_are_given_up_after_some(
    agent: Agent, forward: Path, endpoint: Start, step: dict[str, Any]
) -> None:
    model = endpoint([step], "--repeat")
    done = run(agent, forward, model.url)
    assert done.code == 4, done.err
    assert done.result["attempts"] == 0 and done.result["llm"]["requests"] >= 2


def test_endpoint_that_is_down(agent: Agent, forward: Path) -> None:
    done = run(agent, forward, "http://127.0.0.1:9/v1", "--llm-timeout", "3")
    assert done.code == 5, done.err
    assert "127.0.0.1:9" in done.result["error"]["message"]


def test_the_key_is_nowhere_but_in_the_request(agent: Agent, forward: Path, endpoint: Start) -> None:
    echo = fenced(RAISES) + f"\nAnd your key is {KEY}.\n"
    model = endpoint([{"text": echo}, {"text": fenced(BACKWARD)}], "--key", KEY)
    done = run(agent, forward, model.url, "--no-optimise", env={"OPENAI_API_KEY": KEY})
    assert done.code == 0, done.err
    assert KEY not in done.err and KEY not in done.out
    for path in Path(done.result["run_dir"]).rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in model.log.read_text()


def test_wrong_key(agent: Agent, forward: Path, endpoint: Start) -> None:
    model = endpoint([{"text": fenced(BACKWARD)}], "--key", KEY)
    key = agent.folder / "key"
    key.write_text("sk-another-key-9876543210\n")
    done = run(agent, forward, model.url, "--api-key-file", str(key))
    assert done.code == 5 and "401" in done.result["error"]["message"], done.err


def test_no_model_name_is_usage(agent: Agent, forward: Path) -> None:
    done = run(agent, forward, "http://127.0.0.1:9/v1", "--model", "")
    assert done.code == 2 and "--model" in done.err and "/v1/models" in done.err


def test_as_many_questions_at_a_time_as_jobs(agent: Agent, endpoint: Start) -> None:
    kernels = agent.folder / "kernels"
    kernels.mkdir()
    for i in range(4):
        (kernels / f"scale_{i}.py").write_text(FORWARD)
    # Held back until all wait for their answer: a client that takes fewer at a time would refuse the others.
    model = endpoint([{"status": 401, "together": 4}], "--repeat")
    options = ("--jobs", "4", "--base-url", model.url, "--draft", "llm", "--json")
    done = agent("batch", kernels, *options)
    assert {item["exit_code"] for item in done.result["files"]} == {5}, done.err
    assert len(model.requests()) == model.state()["most_open"] == 4


@pytest.mark.parametrize("off", [False, True])
def test_retrieval_can_be_turned_off(agent: Agent, forward: Path, endpoint: Start, off: bool) -> None:
    model = endpoint([{"status": 401}], "--repeat")
    (agent.folder / "config").write_text(f"no_retrieval = {str(off).lower()}\nmin_sim = -1\n")
    options = ["--config", str(agent.folder / "config")]
    if off:
        options += ["--store", "not-even-there.db"]
    done = run(agent, forward, model.url, *options)
    assert done.code == 5, done.err
    assert bool(done.result["retrieved"]) != off
    assert ("--no-retrieval" in done.err) == off
    asked = json.dumps(model.requests())
    assert all(pair["id"] in asked for pair in done.result["retrieved"])


def test_nothing_similar_enough__the_nearest_pair_is_shown_as_what_it_is(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    model = endpoint([{"status": 401}], "--repeat")
    done = run(agent, forward, model.url, "--min-sim", "0.99")
    assert done.code == 5, done.err
    (pair,) = done.result["retrieved"]
    (asked,) = (json.loads(request["body"])["messages"][1]["content"] for request in model.requests())
    assert f"### {pair['id']} (similarity {pair['similarity']:.2f}: the nearest there is, and not" in asked
    shown = asked.partition("# Similar pairs")[2]
    assert "Backward schedule" in shown and "op: " not in shown  # the docstring


def test_exception__is_told_by_the_lines_that_were_shown_and_without_a_path(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    raises = BACKWARD.replace("        dw += dy * x", "        dw += dy * x + row.to(tl.float32)")
    model = endpoint([{"text": fenced(raises)}, ENOUGH])
    done = run(agent, forward, model.url, "--no-optimise")
    assert done.code == 5, done.err
    _, asked = (json.loads(request["body"])["messages"][1]["content"] for request in model.requests())
    line = next(i for i, text in enumerate(raises.splitlines(), 1) if "row.to" in text)
    assert f"{line:4}|         dw += dy * x + row.to(tl.float32)" in asked  # the text as it is shown
    required, hidden = asked.partition("On a hidden shape")[::2]
    told = "raised: AttributeError: 'int' object has no attribute 'to'\n"
    assert told in required and f"  line {line} of the backward part, in scale_dw_kernel:\n" in required
    assert f"raised: AttributeError at line {line} of the backward part, `dw += dy * x + row" in hidden
    assert "never returned" not in asked
    assert "the gradient of w in the one case in which it was compared" not in asked
    assert str(agent.folder) not in asked and str(Path(done.result["run_dir"]).name) not in asked


def test_model_that_sees_nothing_left_to_gain__ends_the_run(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    end = {"text": "Every tile is read once. Nothing is left to gain.", "expect": ["Nothing is left to gain"]}
    model = endpoint([{"text": fenced(BACKWARD)}, end])
    done = run(agent, forward, model.url)
    assert done.code == 0, done.err
    assert done.result["verdict"] == "verified" and done.result["llm"]["requests"] == 2
    assert not events(done.result, "bad_answer") and "sees nothing left to gain" in done.err


def test_lost_idea__is_in_the_next_question_as_a_short_diff(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    commented = BACKWARD.replace("    dw = tl.zeros", "    # in registers\n    dw = tl.zeros")
    end = {"text": "Nothing is left to gain."}
    model = endpoint([{"text": fenced(text)} for text in (BACKWARD, WRONG, commented)] + [end])
    done = run(agent, forward, model.url)
    assert done.code == 0, done.err
    asked = [json.loads(request["body"])["messages"][1]["content"] for request in model.requests()]
    lost = "      -    for row in range(0, M):\n      +    for row in range(0, 1):\n"
    assert lost not in asked[1] and lost in asked[2] + "\n"
    line = asked[2].partition("# Tried so far")[2].partition(lost)[0].splitlines()[-2]
    assert "not verified" in line and "the gradient of w is wrong" in line
    # A change of comments alone is not checked again, and no gain.
    assert "is, but for its comments, candidate 1 of before: not checked again" in done.err
    assert [event["op"] for event in events(done.result, "child")].count("scan") == 2
    assert [event["verdict"]["verified"] for event in events(done.result, "verdict")] == [True, False, True]


def children_from(result: dict[str, Any], turn: int) -> list[str]:
    """The operations of the children that judged the answer of a turn, in the order in which they ended."""
    lines = map(json.loads, (Path(result["run_dir"]) / "run.jsonl").read_text().splitlines())
    turns: list[list[str]] = [[]]
    for event in lines:
        if event["event"] == "answer":
            turns.append([])
        elif event["event"] == "child":
            turns[-1].append(event["op"])
    return turns[turn]


def test_answer_that_the_target_does_not_compile__is_told_before_a_case_is_run(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    added = "    tl.store(dx_ptr"
    loop = f"    for step in range(2):\n        if step == 1:\n            continue\n    {added}"
    assert added in BACKWARD
    model = endpoint(
        [
            {"text": fenced(BACKWARD.replace(added, loop, 1))},
            {"text": fenced(BACKWARD), "expect": ["does not compile", "`continue`"]},
        ]
    )
    done = run(agent, forward, model.url, "--no-optimise")
    assert done.code == 0, done.err
    assert "candidate" not in children_from(done.result, 1) and "candidate" in children_from(done.result, 2)


def raised(code: str) -> str:
    """The backward, its own backward beginning with `code`."""
    head = "    def backward(ctx, dy):\n"
    assert head in BACKWARD
    return BACKWARD.replace(head, f"{head}        {code}\n", 1)


def told_wrong(done: Ended) -> list[str]:
    """What each question of a fix turn says to be wrong."""
    asked = [
        event["messages"][-1]["content"] for event in events(done.result, "prompt") if event["phase"] == "fix"
    ]
    return [text.partition("# What is wrong")[2].partition("# Tried so far")[0] for text in asked]


def answered(agent: Agent, forward: Path, endpoint: Start, *texts: str) -> Ended:
    """A run whose model answers with these and then with what is right."""
    model = endpoint([{"text": fenced(text)} for text in (*texts, BACKWARD)])
    done = run(agent, forward, model.url, "--no-optimise")
    assert done.code == 0 and done.result["attempts"] == len(texts) + 1, done.err
    assert "candidate" in children_from(done.result, len(texts) + 1)
    return done


def test_answer_that_raises_in_every_call__is_told_after_the_first(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    codes = ["raise RuntimeError('not written yet')", "dy = contigous(dy)", "scale_dx_kernel[(1,)](dy)"]
    done = answered(agent, forward, endpoint, *map(raised, codes))
    for turn, (code, wrong) in enumerate(zip(codes, told_wrong(done), strict=True), start=1):
        assert "candidate" not in children_from(done.result, turn)
        assert wrong.count("raised: ") == 1 and "On shape" not in wrong and code in wrong, wrong


def test_answer_that_only_cases_show_to_raise__is_told_once_or_with_the_sizes(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    line = "    tl.store(dx_ptr + row * N + cols, dy * w, mask=mask)\n"
    assert line in BACKWARD
    launched = BACKWARD.replace(line, f"    w = w if N == 0 else tl.zeroes([BLOCK], tl.float32)\n{line}", 1)
    launched = launched.replace("if ctx.needs_input_grad[0]:", "if dx is None:")
    everywhere = {
        "assert dy.dim() == 7": raised("assert dy.dim() == 7"),
        "dy = dy.to(dtyp=dy.dtype)": raised("dy = dy.to(dtyp=dy.dtype)"),
        "zeroes": launched,  # raises where it is launched, which it is not on a shape without elements
    }
    some = raised("dy = contigous(dy) if dy.shape[1] == 24 else dy")
    done = answered(agent, forward, endpoint, *everywhere.values(), some)
    for turn in range(1, len(everywhere) + 2):
        assert "candidate" in children_from(done.result, turn), "only the cases can show that"
    *everywhere_told, some_told = told_wrong(done)
    for code, wrong in zip(everywhere, everywhere_told, strict=True):
        assert wrong.count("raised: ") == 1 and "On shape" not in wrong and code in wrong, wrong
    (event,) = events(done.result, "preflight")
    assert any(0 in shape["dims"].values() for shape in event["shapes"]), "no shape without a launch"
    assert 'On shape {"M": 4, "N": 24}' in some_told, some_told
    assert 'Nothing fails on shape {"M": 3, "N": 33}' in some_told, some_told
