"""The service: runs are taken on, put in order, ended, and refused where they must be."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable

import pytest
from conftest import Agent
from files import SMALL
from service import ASKS, Service, answer, asked, variant
from service import serve as serve  # a fixture

TOKEN = "0123456789abcdef-token"


def test_run_is_taken_on_and_verified(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve("--no-optimise")
    assert service.ask("GET", "/healthz").doc == {"status": "ok"}
    assert service.ask("GET", "/readyz").status == 200
    run = service.submit(SMALL, name="square.py", priority=3, options={"topk": 2, "min_sim": 0.5})
    assert (run["state"], run["name"], run["priority"]) == ("queued", "square.py", 3)
    assert run["options"] == {"topk": "2", "min-sim": "0.5"}
    assert service.ask("GET", f"/v1/runs/{run['id']}/result").status == 404
    ended = service.wait(run["id"])
    assert (ended["state"], ended["verdict"], ended["exit_code"]) == ("done", "verified", 0), ended
    result = service.ask("GET", f"/v1/runs/{run['id']}/result").doc
    assert result["verdict"] == "verified" and result["stub"] == "square"
    pair = service.ask("GET", f"/v1/runs/{run['id']}/pair").body.decode()
    assert "def square_autograd(" in pair.split("# ---- backward ----")[1]
    listed = service.ask("GET", "/v1/runs").doc
    assert listed == {"runs": [ended], "total": 1}
    assert service.ask("GET", "/v1/runs?state=queued").doc == {"runs": [], "total": 0}
    metrics = service.ask("GET", "/metrics").body.decode().splitlines()
    assert {
        'kernel_agent_runs{state="done"} 1',
        'kernel_agent_verdicts{verdict="verified"} 1',
        "kernel_agent_child_failures 0",
        "kernel_agent_jail_failures 0",
        "kernel_agent_gpu_seconds 0.000",
        "kernel_agent_oldest_queued_seconds 0",
    } <= set(metrics)
    assert service.ask("DELETE", f"/v1/runs/{run['id']}").status == 204
    assert service.ask("GET", f"/v1/runs/{run['id']}").status == 404
    assert not (agent.folder / "state" / "runs" / run["id"]).exists()
    assert service.end() == 0


def test_unusable_file_ends_with_its_reason(serve: Callable[..., Service]) -> None:
    service = serve("--no-optimise")
    ended = service.wait(service.submit("x = 1\n")["id"])
    assert (ended["state"], ended["verdict"], ended["exit_code"]) == ("done", "unusable", 3)
    assert "autodiff" in ended["reason"]


def test_same_file_with_same_options_is_one_run(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    first = service.submit(SMALL)
    again = service.ask("POST", "/v1/runs", {"source": SMALL, "name": "other.py"})
    assert (again.status, again.doc["id"]) == (200, first["id"])
    other = service.submit(SMALL, options={"topk": 2})
    forced = service.submit(SMALL, force=True)
    assert len({first["id"], other["id"], forced["id"]}) == 3
    # A run that was cancelled is no answer to the next one who asks.
    for run in (first, other, forced):
        assert service.ask("POST", f"/v1/runs/{run['id']}/cancel").doc["state"] == "cancelled"
    assert service.submit(SMALL)["id"] not in {first["id"], other["id"], forced["id"]}


def test_same_file_from_many_at_once_is_one_run(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    replies = []

    def ask() -> None:
        replies.append(service.ask("POST", "/v1/runs", {"source": SMALL}))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({reply.doc["id"] for reply in replies}) == 1
    assert sorted(reply.status for reply in replies) == [200] * 19 + [202]


def test_higher_priorities_go_first(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    first = service.submit(variant(0))["id"]
    asked(agent, 1)
    low, high, second = (
        service.submit(variant(i), priority=p)["id"] for i, p in enumerate((-5, 7, 7), start=1)
    )
    started = []
    for run in (first, high, second, low):
        started.append(service.wait(run, "running")["started"])
        assert service.ask("POST", f"/v1/runs/{run}/cancel").status == 200
    assert started == sorted(started)


def test_cancelled_runs_are_over_and_can_be_tried_again(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    running, queued = service.submit(variant(0))["id"], service.submit(variant(1))["id"]
    asked(agent, 1)
    assert service.ask("DELETE", f"/v1/runs/{running}").code == "conflict"
    assert service.ask("POST", f"/v1/runs/{running}/retry").code == "conflict"
    for run in (queued, running):
        assert service.ask("POST", f"/v1/runs/{run}/cancel").doc["state"] == "cancelled"
        assert service.ask("POST", f"/v1/runs/{run}/cancel").code == "conflict"
    assert service.folders(queued) == []
    reply = service.ask("POST", f"/v1/runs/{queued}/retry")
    assert (reply.status, reply.doc["attempt"]) == (202, 2)
    asked(agent, 2)
    answer(agent, 2)
    assert service.wait(queued)["verdict"] == "verified"
    assert service.run(running)["state"] == "cancelled"
    service.kill()
    service.start()
    assert service.run(running)["state"] == "cancelled"
    assert service.run(queued)["verdict"] == "verified"


def test_what_clients_may_not_ask_for_is_refused(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve("--max-tokens", "1000", "--max-iters", "4")
    for options, word in (
        ({"out": "/tmp"}, "out"),
        ({"path": "/etc"}, "path"),
        ({"prompts": "/etc"}, "prompts"),
        ({"require-sandbox": "none"}, "require-sandbox"),
        ({"python": "/bin/sh"}, "python"),
        ({"backend": "mailbox:/tmp"}, "backend"),
        ({"backend": "openai"}, "endpoint"),
        ({"topk": 0}, "topk"),
        ({"topk": "many"}, "topk"),
        ({"sweep": "some"}, "sweep"),
        ({"target": "../x"}, "target"),
        ({"max-tokens": 0}, "max-tokens"),
        ({"max-tokens": 2000}, "max-tokens"),
        ({"max-iters": 5}, "max-iters"),
    ):
        reply = service.ask("POST", "/v1/runs", {"source": SMALL, "options": options})
        assert (reply.status, reply.code) == (400, "invalid"), (options, reply.body)
        assert word in reply.doc["error"]["message"], reply.body
    assert service.ask("GET", "/v1/runs").doc["total"] == 0
    assert list((agent.folder / "state" / "runs").glob("*")) == []


def test_requests_that_are_wrong_are_refused(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    run = service.submit(SMALL)["id"]
    for method, path, status in (
        ("GET", "/v1/runs/../../etc/passwd", 404),
        ("GET", "/v1/runs/..%2f..%2fetc%2fpasswd", 404),
        ("GET", f"/v1/runs/{run}%00", 404),
        ("GET", f"/v1/runs/{run}/", 404),
        ("GET", f"/v1/runs/{run.upper()}x", 404),
        ("GET", f"/v1/runs/{'0' * 16}", 404),
        ("GET", "/v1/runs?limit=0", 400),
        ("GET", "/v1/runs?limit=1e3", 400),
        ("GET", "/v1/runs?state=lost", 400),
        ("PUT", "/v1/runs", 405),
        ("POST", "/healthz", 405),
        ("POST", f"/v1/runs/{'0' * 16}/cancel", 404),
        ("POST", "/v1/runs", 400),
    ):
        reply = service.ask(method, path)
        assert reply.status == status, (method, path, reply.body)
        assert reply.doc["error"]["request_id"] == reply.headers["x-request-id"]
    large = service.raw(b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048577\r\n\r\n")
    assert large.startswith(b"HTTP/1.1 413 ") and b"too_large" in large
    chunked = (
        b"POST /v1/runs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    assert service.raw(chunked).startswith(b"HTTP/1.1 411 ")
    for bad in (b"\x00\xff / HTTP/1.1\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"G" * 100_000):
        assert not service.raw(bad).startswith(b"HTTP/1.1 2")
    first = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    said = service.raw(first + b"GET /v1/runs/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert said.count(b"HTTP/1.1 200") == 1 and said.count(b"HTTP/1.1 404") == 1
    assert service.run(run)["state"] == "running"


def test_token_is_wanted_everywhere_but_for_health(agent: Agent, serve: Callable[..., Service]) -> None:
    token = agent.folder / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    service = serve("--address", "127.0.0.1:0", "--token-file", str(token), *ASKS)
    assert service.address.startswith("127.0.0.1:")
    assert service.ask("GET", "/healthz").status == 200
    body = {"source": SMALL}
    for method, path in (("GET", "/readyz"), ("GET", "/v1/runs"), ("POST", "/v1/runs"), ("GET", "/x")):
        for wrong in ("", TOKEN[:-1], TOKEN + "x", "x"):
            reply = service.ask(method, path, body if method == "POST" else None, token=wrong)
            assert (reply.status, reply.code) == (401, "unauthorized")
            assert reply.headers["www-authenticate"] == "Bearer"
    assert service.ask("GET", "/v1/runs", token=TOKEN).doc["total"] == 0
    assert service.ask("POST", "/v1/runs", body, token=TOKEN).status == 202
    service.kill()
    assert TOKEN not in "".join(service.log)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--address", "127.0.0.1:0"), "--token-file FILE is missing"),
        (("--address", "0.0.0.0:0", "--token-file", "token"), "is not this machine"),
        (("--address", "nowhere", "--token-file", "token"), "neither unix:PATH nor"),
        (("--address", "unix:" + "x" * 200), "a socket's path has"),
        (("--address", "127.0.0.1:0", "--token-file", "short"), "at least 16 characters"),
        (("--address", "127.0.0.1:0", "--token-file", "nothing"), "nothing"),
    ],
)
def test_service_that_would_be_open_does_not_begin(agent: Agent, options: tuple[str, ...], text: str) -> None:
    (agent.folder / "token").write_text(TOKEN)
    (agent.folder / "short").write_text("secret")
    ended = agent("serve", "--state", "state", *options)
    assert ended.code == 2 and text in ended.err, ended.err


def test_socket_and_state_are_this_users_alone(agent: Agent, serve: Callable[..., Service]) -> None:
    serve(*ASKS)
    state = agent.folder / "state"
    assert state.stat().st_mode & 0o777 in (0o700, 0o755)
    assert (state / "socket").stat().st_mode & 0o777 == 0o600


def test_two_services_do_not_share_a_folder(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    second = agent("serve", "--state", "state")
    assert second.code == 2
    assert f"another service has this state folder (process {service.process.pid})" in second.err
    assert service.ask("GET", "/readyz").status == 200
    service.kill()
    service.start()
    assert service.ask("GET", "/readyz").status == 200


def test_damaged_ledger_is_moved_aside_and_told(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    run = service.submit(SMALL)["id"]
    service.kill()
    state = agent.folder / "state"
    (state / "ledger.db").write_bytes(b"no database" * 1000)
    (state / "ledger.db-wal").unlink(missing_ok=True)
    service.start()
    assert service.ask("GET", "/v1/runs").doc["total"] == 0
    aside = list(state.glob("ledger.db.damaged-*"))
    assert len(aside) == 1 and any(str(aside[0]) in line for line in service.log)
    assert (state / "runs" / run / "forward.py").read_text() == SMALL
    assert service.submit(SMALL)["id"] != run


def test_name_of_another_site_gets_nothing_where_there_is_no_token(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    for host, status in (("localhost", 200), ("127.0.0.1:80", 200), ("evil.example", 403), ("", 403)):
        said = service.raw(f"GET /v1/runs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert said.startswith(f"HTTP/1.1 {status} ".encode()), (host, said)
        assert (b"wrong_host" in said) == (status == 403)


def test_client_is_whom_the_last_proxy_names(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS, "--rate", "1")

    def ask(number: int, proxy: int) -> int:
        forwarded = f"X-Forwarded-For: 10.0.0.{number}\r\nX-Forwarded-For: 10.0.{number}.1, 10.9.9.{proxy}"
        said = service.raw(
            f"GET /readyz HTTP/1.1\r\nHost: localhost\r\n{forwarded}\r\nConnection: close\r\n\r\n".encode()
        )
        return int(said.split()[1])

    statuses = [ask(0, 7)]
    while statuses[-1] == 200 and len(statuses) < 1000:  # whatever the client itself says
        statuses.append(ask(len(statuses) % 250, 7))
    assert statuses[-1] == 429
    assert ask(0, 8) == 200


def mutated(request: bytes, rng: random.Random) -> bytes:
    """With a few bytes changed, left out or doubled, or a piece of it alone."""
    data = bytearray(request)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 9)]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 400)] * rng.randint(1, 20)
        else:
            data[at:at] = rng.choice([b"\r\n", b"\0", b"%00", b"../", b"{", b'"', b"9" * 30, b"\xff\xfe"])
        data = data or bytearray(b"x")
    return bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.2 else data)


def test_requests_of_any_bytes_end_no_service(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS, "--rate", "0")
    run = service.submit("x = 1\n")["id"]
    body = json.dumps({"source": "x = 2\n", "options": {"topk": 2}, "priority": 1}).encode()
    head = b"Host: localhost\r\nConnection: close\r\n"
    requests = [
        b"POST /v1/runs HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body),
        *(
            b"%s HTTP/1.1\r\n%s\r\n" % (line.encode(), head)
            for line in (
                f"GET /v1/runs/{run}",
                f"GET /v1/runs/{run}/pair",
                f"DELETE /v1/runs/{run[:-1]}0",
                "GET /v1/runs?state=queued&limit=3",
                "GET /v1/store/search?words=softmax&topk=2",
                "GET /metrics",
            )
        ),
    ]
    rng = random.Random(15)
    for _ in range(300):
        said = service.raw(mutated(rng.choice(requests), rng))
        assert not said or said.startswith(b"HTTP/1.1 "), said[:200]
    assert service.ask("GET", "/healthz").status == 200 and service.process.poll() is None
    assert not any("HTTP/1.1 500" in line for line in service.log)
