"""The service while what is below and around it fails: it says so, loses nothing, and goes on when that is
over."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
from conftest import Agent, Endpoint
from faults import Faults
from faults import faults as faults  # a fixture
from faults import preloaded as preloaded  # a fixture
from files import SMALL, SMALL_BACKWARD, fenced
from service import ASKS, Service, answer, asked, variant
from service import serve as serve  # a fixture

CANCEL = b"POST /v1/runs/%s/cancel HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(("fault", "code"), [("full", "disk_full"), ("read_only", "read_only")])
def test_disk_that_takes_nothing_is_told_and_gone_on_with(
    agent: Agent, faults: Faults, serve: Callable[..., Service], fault: str, code: str
) -> None:
    service = serve(*ASKS)
    running, queued = (service.submit(variant(number))["id"] for number in range(2))
    asked(agent, 1)
    getattr(faults, fault)()
    refused = service.ask("POST", "/v1/runs", {"source": variant(2)})
    assert (refused.status, refused.code) == (507, code), refused.body
    kept = service.ask("POST", f"/v1/runs/{queued}/cancel")
    assert (kept.status, kept.code) == (507, code), kept.body
    assert service.run(queued)["state"] == "queued" and service.ask("GET", "/v1/runs").doc["total"] == 2
    answer(agent)  # it cannot be kept
    while not any("its folder could not be written" in line for line in service.log):
        time.sleep(0.02)
    assert service.run(running)["state"] in ("queued", "running")
    faults.mend()
    assert service.submit(variant(2))["state"] == "queued"
    answer(agent, 2)
    for run in (running, queued):
        ended = service.wait(run)
        assert (ended["verdict"], ended["attempt"]) == ("verified", 1), ended


def test_service_does_not_begin_on_a_read_only_folder(
    agent: Agent, faults: Faults, serve: Callable[..., Service]
) -> None:
    serve(*ASKS).end()
    faults.read_only()
    ended = agent("serve", "--state", "state", *ASKS)
    assert ended.code == 2 and "Read-only file system" in ended.err, ended.err


def test_clock_that_jumps_delays_and_drops_nothing(
    agent: Agent, faults: Faults, serve: Callable[..., Service], endpoint: Callable[..., Endpoint]
) -> None:
    down = {"status": 503, "error": "not now", "headers": {"Retry-After": "0"}}
    model = endpoint([down] * 6 + [{"text": fenced(SMALL_BACKWARD)}], "--repeat")
    service = serve("--base-url", model.url, "--draft", "llm", "--no-optimise")
    run = service.submit(SMALL)["id"]
    while service.run(run)["attempt"] == 1:
        time.sleep(0.02)
    faults.clock(-40 * 86400)  # it was to wait until then
    ended = service.wait(run)
    assert ended["verdict"] == "verified", ended
    faults.clock(400 * 86400)
    later = service.wait(service.submit(variant(1))["id"])
    assert later["verdict"] == "verified" and later["submitted"] > ended["submitted"]
    faults.clock(0)
    again = service.submit(variant(2))["id"]
    assert service.wait(again)["verdict"] == "verified"
    service.kill()
    service.start()
    newest_first = [one["id"] for one in service.ask("GET", "/v1/runs").doc["runs"]]
    assert newest_first == [again, later["id"], run]


def test_endpoint_that_is_down_is_waited_for(
    serve: Callable[..., Service], endpoint: Callable[..., Endpoint]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    service = serve("--base-url", f"http://127.0.0.1:{port}/v1", "--draft", "llm", "--no-optimise")
    run = service.submit(SMALL)["id"]
    while (waiting := service.run(run))["attempt"] == 1:
        time.sleep(0.05)
    assert waiting["state"] == "queued" and waiting["reason"], waiting
    endpoint([{"text": fenced(SMALL_BACKWARD)}], "--repeat", "--port", str(port))
    ended = service.wait(run)
    assert ended["verdict"] == "verified" and ended["attempt"] > 1, ended


def test_ten_thousand_streams_past_the_limit_are_refused_each(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS, "--rate", "0")
    request = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    refused = 0
    with contextlib.ExitStack() as stack:
        for number in range(10_000):
            sock = stack.enter_context(service.connect())
            sock.sendall(request)
            said = sock.recv(4096)
            if said.startswith(b"HTTP/1.1 200 "):
                assert number < 128
                continue
            refused += 1
            assert said.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 5" in said, said
            sock.close()
            if number % 1000 == 0:
                assert service.ask("GET", "/healthz").status == 200
        assert refused == 10_000 - 128
    service.wait(service.submit("x = 1\n")["id"])


def test_what_was_acknowledged_is_there_after_a_loss_of_power(
    faults: Faults, serve: Callable[..., Service]
) -> None:
    faults.record()
    service = serve(*ASKS)
    taken: list[str] = []
    cancelled: list[str] = []
    numbers = iter(range(100_000))

    def submit() -> None:
        with contextlib.suppress(OSError, ValueError):  # the service is gone
            while True:
                number = next(numbers)
                run = service.submit(variant(number))["id"]
                taken.append(run)
                if number % 3 == 0 and service.ask("POST", f"/v1/runs/{run}/cancel").status == 200:
                    cancelled.append(run)

    for _ in range(5):
        threads = [threading.Thread(target=submit) for _ in range(4)]
        before = len(taken)
        for thread in threads:
            thread.start()
        while len(taken) < before + random.randint(3, 30) or not cancelled:
            time.sleep(0.001)
        service.kill()
        for thread in threads:
            thread.join()
        faults.lose_power()
        service.start()
        for run in taken:
            found = service.run(run)
            assert found["state"] == "cancelled" or run not in cancelled, found
            source = service.agent.folder / "state" / "runs" / run / "forward.py"
            assert source.read_text().startswith(SMALL)
    assert not any("damaged" in line for line in service.log)


def test_run_ends_rightly_after_a_loss_of_power(faults: Faults, serve: Callable[..., Service]) -> None:
    faults.record()
    service = serve("--no-optimise")
    run = service.submit(SMALL)["id"]
    for _ in range(3):
        service.wait(run, "running", "done")
        time.sleep(random.uniform(0.2, 2))
        service.kill()
        faults.lose_power()
        service.start()
    ended = service.wait(run)
    assert (ended["state"], ended["verdict"], ended["attempt"]) == ("done", "verified", 1), ended
    service.kill()
    faults.lose_power()
    service.start()
    assert service.run(run) == ended
    assert service.ask("GET", f"/v1/runs/{run}/result").doc["verdict"] == "verified"
    assert service.ask("GET", f"/v1/runs/{run}/pair").status == 200


def test_watched_file_is_taken_on_once_there_is_room(
    agent: Agent, faults: Faults, serve: Callable[..., Service]
) -> None:
    kernels = agent.folder / "kernels"
    kernels.mkdir()
    service = serve(*ASKS, "--watch", str(kernels))
    faults.full()
    (kernels / "scale.py").write_text(SMALL)
    while not any("scale.py is not taken on" in line for line in service.log):
        time.sleep(0.05)
    assert service.ask("GET", "/v1/runs").doc["total"] == 0
    faults.mend()
    while service.ask("GET", "/v1/runs").doc["total"] == 0:
        time.sleep(0.05)


def test_disk_that_stalls_holds_up_what_waits_for_it_and_nothing_else(
    agent: Agent, faults: Faults, serve: Callable[..., Service]
) -> None:
    service = serve(*ASKS)
    service.submit(variant(0))
    asked(agent, 1)
    faults.stall()
    answered = threading.Event()

    def submit() -> None:
        with contextlib.suppress(OSError, ValueError, AssertionError):  # the service is gone
            service.submit(variant(1))
        answered.set()

    threading.Thread(target=submit, daemon=True).start()
    while "kernel_agent_runs" not in service.ask("GET", "/metrics").body.decode():
        time.sleep(0.02)
    assert service.ask("GET", "/v1/runs").doc["total"] == 1 and not answered.is_set()
    faults.mend()
    answered.wait()
    assert service.ask("GET", "/v1/runs").doc["total"] == 2


def test_second_signal_ends_a_service_that_cannot_drain(
    agent: Agent, faults: Faults, serve: Callable[..., Service]
) -> None:
    service = serve(*ASKS)
    run = service.submit(variant(0))["id"]
    asked(agent, 1)
    faults.stall()
    threading.Thread(target=lambda: service.raw(CANCEL % run.encode()), daemon=True).start()
    while service.run(run)["state"] != "cancelled":  # which the disk is to be told
        time.sleep(0.02)
    service.process.send_signal(signal.SIGINT)
    while not any("ending; " in line for line in service.log):
        time.sleep(0.02)
    assert service.process.poll() is None
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait() == 130
