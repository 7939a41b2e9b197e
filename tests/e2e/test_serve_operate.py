"""The service as those who run it see it: settings read again, systemd, logs, old runs that go."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Agent
from faults import Faults
from faults import faults as faults  # a fixture
from faults import preloaded as preloaded  # a fixture
from files import SMALL
from service import ASKS, Service, answer, asked, variant
from service import serve as serve  # a fixture

TOKEN = "0123456789abcdef-token"


def said(service: Service, text: str) -> None:
    """Wait until the log has it."""
    while not any(text in line for line in service.log):
        assert service.process.poll() is None, "".join(service.log)
        time.sleep(0.02)


def test_hangup_reads_settings_and_token_again(agent: Agent, serve: Callable[..., Service]) -> None:
    config, token = agent.folder / "config", agent.folder / "token"
    config.write_text('jobs = 1\nbackend = "mailbox:box"\nrate = 50\n')
    token.write_text(TOKEN)
    token.chmod(0o600)
    service = serve(
        "--config", "config", "--address", "127.0.0.1:0", "--token-file", "token", "--draft", "llm"
    )
    for number in range(3):
        service.ask("POST", "/v1/runs", {"source": variant(number)}, token=TOKEN)
    asked(agent, 1)
    config.write_text('jobs = 2\nbackend = "mailbox:box"\nmax_iters = 3\nchildren = 1\n')
    token.write_text(TOKEN + "-new")
    service.process.send_signal(signal.SIGHUP)
    said(service, "the settings were read again")
    said(service, "these changes count from the next start on: --children")
    asked(agent, 2)  # the second of two at a time
    assert service.ask("GET", "/v1/runs", token=TOKEN).status == 401
    assert service.ask("GET", "/v1/machine", token=TOKEN + "-new").doc["jobs"] == 2
    more = {"source": variant(9), "options": {"max-iters": 4}}
    assert service.ask("POST", "/v1/runs", more, token=TOKEN + "-new").status == 400
    config.write_text("jobs = none\n")
    service.process.send_signal(signal.SIGHUP)
    said(service, "the settings stay as they are: ")
    assert service.ask("GET", "/v1/machine", token=TOKEN + "-new").doc["jobs"] == 2
    assert service.end() == 0


def test_systemd_is_told_of_start_reload_and_end(agent: Agent, serve: Callable[..., Service]) -> None:
    path = agent.folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        agent.env |= {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000"}
        service = serve(*ASKS)

        def next_but(skipped: str) -> str:
            while (text := listening.recv(4096).decode()) == skipped:
                pass
            return text

        assert next_but("WATCHDOG=1") == "READY=1"
        assert [listening.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        service.process.send_signal(signal.SIGHUP)
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", next_but("WATCHDOG=1"))
        assert next_but("WATCHDOG=1") == "READY=1"
        service.process.send_signal(signal.SIGTERM)
        assert next_but("WATCHDOG=1") == "STOPPING=1"
        assert service.process.wait() == 0


@pytest.mark.parametrize("form", ["json", "journal"])
def test_log_is_for_machines_where_it_is_asked_for(
    agent: Agent, serve: Callable[..., Service], form: str
) -> None:
    service = serve(*ASKS, "--log-format", form)
    service.wait(service.submit("x = 1\n")["id"])
    assert service.end() == 0
    if form == "json":
        lines = [json.loads(line) for line in service.log]
        assert {"info", "warn"} <= {line["level"] for line in lines}
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z", line["time"]) for line in lines)
        assert any("exit code 3" in line["message"] for line in lines if line["level"] == "warn")
    else:
        assert all(re.match(r"<[3467]>\S", line) for line in service.log), service.log
        assert any(line.startswith("<4>") and "exit code 3" in line for line in service.log)


def test_log_goes_to_the_journal_where_stderr_is_one(agent: Agent) -> None:
    done = agent("serve", "--state", "/proc/none", env={"JOURNAL_STREAM": "1:2"})
    assert not done.err.startswith("<")


def test_runs_that_ended_long_ago_go(agent: Agent, faults: Faults, serve: Callable[..., Service]) -> None:
    faults.clock(-3 * 86400)
    service = serve(*ASKS)
    old = service.submit("x = 1\n")["id"]
    service.wait(old)
    waits = service.submit(SMALL)["id"]
    asked(agent, 1)
    service.kill()
    faults.clock(0)
    service.options = (*ASKS, "--keep-days", "2")
    service.start()
    young = service.submit("x = 2\n")["id"]
    while (agent.folder / "state" / "runs" / old).exists():
        time.sleep(0.02)
    assert service.ask("GET", f"/v1/runs/{old}").status == 404
    assert service.run(waits)["state"] == "running" and service.run(young)["state"] == "queued"


def test_all_but_the_newest_runs_go(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve("--jobs", "1")
    runs = [service.submit(f"x = {number}\n")["id"] for number in range(4)]
    for run in runs:
        service.wait(run)
    service.end()
    service.options = ("--jobs", "1", "--keep-runs", "2")
    service.start()
    while service.ask("GET", "/v1/runs").doc["total"] != 2:
        time.sleep(0.02)
    assert [run["id"] for run in service.ask("GET", "/v1/runs").doc["runs"]] == runs[:1:-1]


def test_logs_of_a_run_are_shown_and_followed(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    run = service.submit(SMALL)["id"]
    asked(agent, 1)
    now = agent("logs", run, "--state", "state")
    assert now.code == 0 and "queued -> inspect" in now.out and "end " not in now.out
    assert not re.search(r"-> done", now.out)
    following = agent.start("logs", run, "--state", "state", "--follow", "--json")
    answer(agent)
    out, err = following.communicate()
    assert following.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    ended = service.run(run)
    assert lines[-1] == ended and ended["verdict"] == "verified"
    journal = (Path(ended["folder"]) / "run.jsonl").read_text().splitlines()
    assert lines[:-1] == [json.loads(line) for line in journal]
    whole = agent("logs", run, "--state", "state").out.splitlines()
    assert re.match(r"\d\d:\d\d:\d\d  end +done", whole[-1]) and "verified" in whole[-1], whole[-1]
    nobody = agent("logs", "0" * 16, "--state", "state")
    assert nobody.code == 2 and "there is no such run" in nobody.err


def test_files_below_a_watched_folder_become_runs_and_again_when_they_change(
    agent: Agent, serve: Callable[..., Service]
) -> None:
    kernels = agent.folder / "kernels"
    (kernels / "deep").mkdir(parents=True)
    (kernels / "notes.py").write_text("x = 1\n")
    (kernels / "deep" / "scale.py").write_text(variant(1))
    service = serve(*ASKS, "--watch", str(kernels))

    def runs() -> list[tuple[str, str]]:
        listed = service.ask("GET", "/v1/runs").doc["runs"]
        return [(run["name"], run["state"]) for run in reversed(listed)]

    def wait_for(wanted: list[tuple[str, str]]) -> None:
        while runs() != wanted:
            time.sleep(0.05)

    wait_for([("scale.py", "running")])
    (kernels / "other.py").write_text(variant(2))
    wait_for([("scale.py", "running"), ("other.py", "queued")])
    (kernels / "other.py").write_text(variant(3))  # what was queued of it is of no use any more
    wait_for([("scale.py", "running"), ("other.py", "cancelled"), ("other.py", "queued")])
    service.end()
    service.start()
    said(service, "--watch: other.py is the run")
    wait_for([("scale.py", "running"), ("other.py", "cancelled"), ("other.py", "queued")])
    missing = agent("serve", "--state", "elsewhere", "--watch", "nowhere")
    assert missing.code == 2 and "nowhere" in missing.err
