"""Several endpoints: who is asked, what `doctor` says of them, and where keys go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conftest import Agent, Endpoint
from files import SMALL, SMALL_BACKWARD

NOBODY = "http://127.0.0.1:1/v1"


def test_doctor__endpoints__say_which_models_they_have(
    agent: Agent, endpoint: Callable[..., Endpoint], tmp_path: Path
) -> None:
    model = endpoint([], "--key", "right")
    (tmp_path / "key").write_text("right\n")
    (tmp_path / "wrong").write_text("secret-of-mine\n")
    urls = f"{model.url},{model.url},{NOBODY},nonsense"
    options = ["--base-url", urls, "--api-key-file", f"{tmp_path}/key,{tmp_path}/wrong"]
    done = agent("doctor", "--json", *options, "--model", "scripted")
    right, wrong, nobody, nonsense = done.result["endpoints"]
    assert (right["models"], right["has_model"], right["why"]) == (["scripted"], True, None)
    assert wrong["models"] is None and wrong["has_model"] is None and "401" in wrong["why"]
    assert nobody["why"] and not nobody["key"]
    assert "must look like" in nonsense["why"]
    assert "secret-of-mine" not in done.out
    text = agent(
        "doctor", "--base-url", model.url, "--api-key-file", tmp_path / "key", "--model", "other"
    ).out
    assert (
        f"endpoint   {model.url} (with a key)\n  models    1: scripted\n  --model   other: not listed\n"
        in text
    )


def test_doctor__nothing_to_ask__says_so(agent: Agent) -> None:
    assert "endpoint   none" in agent("doctor").out
    assert agent("doctor", "--json").result["endpoints"] is None


def test_run__first_endpoint_is_gone__the_next_is_asked_and_named(
    agent: Agent, endpoint: Callable[..., Endpoint]
) -> None:
    (agent.folder / "forward.py").write_text(SMALL)
    model = endpoint([{"text": f"<think>\nwell\n</think>\n```python\n{SMALL_BACKWARD}```\n"}])
    options = ["--base-url", NOBODY, "--base-url", model.url, "--draft", "llm", "--no-optimise", "--json"]
    done = agent("--file-path", "forward.py", *options)
    assert done.code == 0, done.err
    assert f"question 1: {NOBODY}: " in done.err and f"asking {model.url}" in done.err
    journal = (agent.run_dirs()[0] / "run.jsonl").read_text()
    assert f'"endpoint":"{model.url}"' in journal
