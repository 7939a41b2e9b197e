"""What the service says of its store and its machine, and how many requests it takes."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable

import pytest
from conftest import Agent, Endpoint
from files import FORWARD
from service import ASKS, Service
from service import serve as serve  # a fixture

TOKEN = "0123456789abcdef-token"
SECRET = "sk-test-0123456789abcdef"


def search(service: Service, **arguments: object) -> dict[str, object]:
    reply = service.ask("GET", f"/v1/store/search?{urllib.parse.urlencode(arguments)}")
    assert reply.status == 200, reply.body
    return reply.doc


def test_store_is_searched_as_on_the_command_line(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    told = json.loads(agent("store", "search", path, "--topk", "3", "--min-sim", "0.1", "--json").out)
    found = search(service, query=FORWARD, topk=3, **{"min-sim": 0.1})
    assert len(told["hits"]) == 3 and found["excluded"] == told["excluded"]
    hits = found["hits"]
    assert isinstance(hits, list)
    for hit, line in zip(hits, told["hits"], strict=True):
        assert hit["similarity"] == pytest.approx(line["similarity"])
        assert {name: hit[name] for name in line if name != "similarity"} | {
            "similarity": line["similarity"]
        } == line
        assert "def " in hit["backward"] and hit["math"]
    run = service.submit(FORWARD)["id"]
    assert search(service, run=run, topk=3, **{"min-sim": 0.1}) == found


def test_store_is_searched_by_words(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    hits = search(service, words=" SoftMax  row ", topk=2)["hits"]
    assert isinstance(hits, list) and len(hits) == 2
    assert all("softmax" in hit["id"] and "row" in hit["id"] for hit in hits)
    assert hits[0]["similarity"] is None and "def " in hits[0]["backward"]
    assert search(service, words="no-such-thing")["hits"] == []


def test_search_for_nothing_is_refused(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    for arguments in (
        "",
        "query=x&words=y",
        "words=",
        "words=%20",
        "words=%00",
        "words=%ff",
        "words=%",
        "query=1",
        "run=0123456789abcdef",
        "run=..%2f..%2fetc%2fpasswd",
        "run=../../../etc/passwd",
        "words=x&topk=0",
        "words=x&topk=1025",
        "words=x&min-sim=2",
        "words=x&min-sim=nan",
    ):
        reply = service.ask("GET", f"/v1/store/search?{arguments}")
        assert (reply.status, reply.code) == (400, "invalid"), (arguments, reply.body)


def test_service_without_a_store_says_so(serve: Callable[..., Service]) -> None:
    reply = serve(*ASKS, "--no-retrieval").ask("GET", "/v1/store/search?words=softmax")
    assert (reply.status, reply.code) == (404, "not_found") and "store" in reply.doc["error"]["message"]


def test_machine_tells_no_secret(
    agent: Agent, serve: Callable[..., Service], endpoint: Callable[..., Endpoint]
) -> None:
    agent.env["OPENAI_API_KEY"] = SECRET
    url = endpoint([]).url.replace("://", f"://user:{SECRET}@")
    reply = serve("--base-url", url, "--model", "a-model").ask("GET", "/v1/machine")
    assert reply.status == 200 and SECRET.encode() not in reply.body
    said = reply.doc
    assert said["endpoint"]["model"] == "a-model" and len(said["endpoint"]["urls"]) == 1
    doctor = json.loads(agent("doctor", "--json").out)
    assert said["sandbox"]["level"] == doctor["sandbox"]
    assert (
        said["sandbox"]["layers"] == doctor["layers"]["layers"] and said["sandbox"]["lost"] == doctor["lost"]
    )
    assert said["python"]["path"] == doctor["python"] and len(said["gpus"]) == doctor["gpus"]
    assert f"kernel-agent {said['version']}\n" == agent("--version").out
    assert said["pairs"] > 0 and said["cpus"] >= 1 and said["memory_bytes"] > 0


def test_too_many_requests_are_told_when_to_go_on(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS, "--rate", "1")
    replies = [service.ask("GET", "/readyz")]
    while replies[-1].status == 200 and len(replies) < 1000:
        replies.append(service.ask("GET", "/readyz"))
    assert len(replies) > 4 and (replies[-1].status, replies[-1].code) == (429, "too_many_requests")
    assert int(replies[-1].headers["retry-after"]) >= 1
    assert service.ask("GET", "/healthz").status == 200
    assert service.ask("GET", "/").status == 200


def test_guessing_the_token_keeps_nobody_from_asking(agent: Agent, serve: Callable[..., Service]) -> None:
    token = agent.folder / "token"
    token.write_text(TOKEN)
    service = serve(*ASKS, "--address", "127.0.0.1:0", "--token-file", str(token), "--rate", "1")
    statuses = [service.ask("GET", "/readyz", token="x" * 20).status]
    while statuses[-1] == 401 and len(statuses) < 1000:
        statuses.append(service.ask("GET", "/readyz", token="x" * 20).status)
    assert statuses[-1] == 429
    assert service.ask("GET", "/readyz", token=TOKEN).status == 200


def test_page_of_another_site_is_refused(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    for origin, status in (("http://localhost", 200), ("http://elsewhere", 403), ("null", 403)):
        head = f"GET /v1/runs HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\nConnection: close"
        said = service.raw(f"{head}\r\n\r\n".encode())
        assert said.startswith(f"HTTP/1.1 {status} ".encode()), said
