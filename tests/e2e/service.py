"""A running `kernel-agent serve`, and requests to it over its socket or port."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent
from files import SMALL, SMALL_BACKWARD, fenced

ASKS = ("--backend", "mailbox:box", "--draft", "llm", "--no-optimise", "--jobs", "1")


@dataclass
class Reply:
    """What one request was answered."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def doc(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.body)
        return said

    @property
    def code(self) -> str:
        return str(self.doc["error"]["code"])


class Service:
    """One process of the service, with its state below the agent's folder."""

    def __init__(self, agent: Agent, *options: str) -> None:
        self.agent = agent
        self.options = options
        self.log: list[str] = []
        self.process: subprocess.Popen[str]
        self.address = ""
        self.start()

    def start(self) -> None:
        self.log = []
        self.process = self.agent.start("serve", "--state", "state", *self.options)
        listening = threading.Event()
        threading.Thread(target=self._read, args=(self.process, self.log, listening), daemon=True).start()
        listening.wait()
        assert self.address, "".join(self.log)

    def _read(self, process: subprocess.Popen[str], log: list[str], listening: threading.Event) -> None:
        self.address = ""
        assert process.stderr
        for line in process.stderr:
            log.append(line)
            if "listening on " in line:
                self.address = line.split("listening on ")[1].split(",")[0]
                listening.set()
        listening.set()

    def connect(self) -> socket.socket:
        if self.address.startswith("unix:"):
            made = socket.socket(socket.AF_UNIX)
            made.connect(self.address.removeprefix("unix:"))
            return made
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)))

    def ask(
        self, method: str, path: str, doc: object = None, *, body: bytes | None = None, token: str = ""
    ) -> Reply:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = self.connect()
        if doc is not None:
            body = json.dumps(doc).encode()
        connection.request(
            method, path, body=body, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        reply = connection.getresponse()
        said = Reply(reply.status, reply.read(), {k.lower(): v for k, v in reply.getheaders()})
        connection.close()
        return said

    def raw(self, data: bytes) -> bytes:
        """What the service says to these bytes, to the end of the connection, or until it is cut off."""
        said = b""
        with self.connect() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(65536):
                said += piece
        return said

    def submit(self, source: str, **more: object) -> dict[str, Any]:
        reply = self.ask("POST", "/v1/runs", {"source": source, **more})
        assert reply.status == 202, reply.body
        return reply.doc

    def run(self, run_id: str) -> dict[str, Any]:
        reply = self.ask("GET", f"/v1/runs/{run_id}")
        assert reply.status == 200, reply.body
        return reply.doc

    def wait(self, run_id: str, *states: str) -> dict[str, Any]:
        """The run, once it is in one of these states (without: once it has ended)."""
        while True:
            run = self.run(run_id)
            if run["state"] in (states or ("done", "failed", "cancelled")):
                return run
            time.sleep(0.02)

    def folders(self, run_id: str) -> list[Path]:
        """The run folders that were made for it."""
        found = (self.agent.folder / "state" / "runs" / run_id).glob("*/*/run.db")
        return sorted(path.parent for path in found)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """The exit code, asked for by SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


def variant(number: int, of: str = SMALL) -> str:
    """Another file, as far as its content goes."""
    return f"{of}\n# {number}\n"


@pytest.fixture
def serve(agent: Agent) -> Iterator[Callable[..., Service]]:
    """serve(*options) starts a service; all of them are ended with the test."""
    started: list[Service] = []

    def start(*options: str) -> Service:
        started.append(Service(agent, *options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()


def answer(agent: Agent, count: int = 1) -> None:
    """Answer so many questions in the mailbox, with the right backward."""
    done = 0
    while done < count:
        for request in (agent.folder / "box").glob("*.request.md"):
            reply = Path(str(request).replace(".request.", ".answer."))
            if not reply.exists():
                reply.write_text(fenced(SMALL_BACKWARD))
                done += 1
        time.sleep(0.02)


def asked(agent: Agent, count: int) -> None:
    """Wait for so many questions."""
    while len(list((agent.folder / "box").glob("*.request.md"))) < count:
        time.sleep(0.02)
