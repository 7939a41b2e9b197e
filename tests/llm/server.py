#!/usr/bin/env python3
"""A scripted OpenAI-compatible endpoint on loopback, for tests that need a model without having one.

    server.py --script FILE [--port-file FILE] [--log FILE] [--key KEY] [--tls PEM] [--repeat] [--seconds 120]

It prints its port on the first line of standard output (and writes it to --port-file), and exits by itself
after --seconds. A script is JSON lines; each is one step and answers one chat request, in order; `--repeat`
keeps answering with the last. Requests that come at once come in no order: steps with "when" find theirs. A
line with a "comment" is for people, and skipped.

    {"text": "..."}                  an answer; {"text_file": "answer.md"} reads it, relative to the script
    {"tool": "submit_patch", "arguments": {...}}     a tool call, perhaps with text; arguments may be a string
    {"status": 429, "headers": {"Retry-After": "0"}} an error; "error" is its message, or an object, its body
    {"fault": "..."}                 one of FAULTS below

Every step may also have
    "expect": ["substring", ...]   each must occur in the request, else the answer is 400 and the log says so
    "reject": ["substring", ...]     none may occur, but in the diff of an idea that was rolled back
    "when": ["substring", ...]       the step is for the first request that has all of these
    "delay": seconds                 before the first byte
    "together": N                    none before N requests are open at once, or 30 seconds have passed
    "usage": {...} | null            token counts (default 100 in, 20 out)
    "content_type": "..."            instead of the right one
    "finish_reason": "..."           default "stop", or "tool_calls"

With --tls it speaks https, with the key and certificate in PEM. With --key, requests without that bearer
token get 401. GET /v1/models lists one model; GET /state says how many steps are left, how many requests were
open at the same time at most, and which expectations failed; PUT /script replaces the steps and forgets what
went before. --log gets one JSON object per request, without its headers: a key that is found there came in a
body.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULTS = {
    "cut": "the connection drops in the middle of the answer",
    "unfinished": "the stream ends in good order, but with neither a finish reason nor [DONE]",
    "bad_json": "the answer is not JSON",
    "huge": "50 MB of text",
    "refusal": "the model refuses",
    "empty": "an answer without text and calls",
    "endless": "text that never stops",
    "loop": "a few words, over and over without end",
    "comments": "a stream that only ever sends comments",
    "no_sse": "the text as one JSON body although a stream was asked for",
    "late_cut": "the connection drops between the finish reason and [DONE]",
    "no_newline": "the stream ends after its last event's data, without the newlines and [DONE]",
    "linger": "a complete stream, but the connection stays open",
    "slow": "one piece of text, then silence",
    "silent": "the request is read and never answered",
    "drop": "the request is read and the connection closed",
    "page": "a web page instead of an answer",
}
# Faults, or none, with a whole message in them. A request without a stream gets it as one body.
COMPLETE = (None, "refusal", "empty", "linger", "late_cut", "no_newline", "no_sse")
CHUNK = 64  # characters of text in one chunk
HUGE = 50_000_000

Step = dict[str, Any]


class Script:
    """The steps still to come, and what went wrong so far."""

    def __init__(self, path: Path, repeat: bool, log: Path | None) -> None:
        self.folder = path.parent
        self.repeat = repeat
        self.log_path = log
        self.lock = threading.Condition()
        self.load(path.read_text())

    def load(self, text: str) -> None:
        lines: list[Step] = [json.loads(line) for line in text.splitlines() if line.strip()]
        steps = [step for step in lines if "comment" not in step]
        for step in steps:
            if step.get("fault", "cut") not in FAULTS:
                raise ValueError(f"unknown fault {step['fault']!r}")
        with self.lock:
            self.steps = steps
            self.requests = self.open = self.most_open = 0
            self.failures: list[str] = []

    def next(self, said: str) -> Step | None:
        with self.lock:
            fitting = (i for i, step in enumerate(self.steps) if all(w in said for w in step.get("when", [])))
            found = next(fitting, None)
            if found is None:
                return None
            return self.steps[found] if self.repeat and len(self.steps) == 1 else self.steps.pop(found)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A request is open for as long."""
        with self.lock:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            self.lock.notify_all()
        try:
            yield
        finally:
            with self.lock:
                self.open -= 1

    def wait_for(self, together: int) -> None:
        with self.lock:
            self.lock.wait_for(lambda: self.most_open >= together, 30)

    def record(self, path: str, authorized: bool, body: str, failed: list[str]) -> None:
        with self.lock:
            self.requests += 1
            self.failures += [f"request {self.requests}: {why}" for why in failed]
            if self.log_path:
                entry = {
                    "request": self.requests,
                    "path": path,
                    "authorized": authorized,
                    "body": body,
                    "failed": failed,
                }
                with self.log_path.open("a") as log:
                    log.write(json.dumps(entry) + "\n")

    def state(self) -> dict[str, Any]:
        with self.lock:
            return {
                "requests": self.requests,
                "most_open": self.most_open,
                "left": len(self.steps),
                "failures": self.failures,
            }


def texts_of(request: Any) -> str:
    """The decoded contents of all messages, one after another."""
    messages = request.get("messages", []) if isinstance(request, dict) else []
    return "\n".join(str(message.get("content", "")) for message in messages)


def unmet(step: Step, request: Any, body: str) -> list[str]:
    """What the step demands of the request and does not find, as sentences."""
    everything = texts_of(request) + "\n" + body
    missing = [f"missing: {want}" for want in step.get("expect", []) if want not in everything]
    said = without_lost_ideas(texts_of(request), "\n") + without_lost_ideas(body, "\\n")
    return missing + [f"not allowed: {bad}" for bad in step.get("reject", []) if bad in said]


def without_lost_ideas(text: str, newline: str) -> str:
    """Without the diffs of ideas that were rolled back: what they added is shown, and is nowhere else."""
    lines = text.split(newline)
    return newline.join(line for line in lines if not line.startswith(("      +", "      -")))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script
    key: str | None

    def handle(self) -> None:
        with contextlib.suppress(
            ConnectionError
        ):  # the client had enough, which several faults are meant to cause
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    # ---- sending

    def send_body(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self.send_body(status, json.dumps(value).encode(), headers=headers)

    def send_error_body(self, status: int, message: str) -> None:
        self.send_json(status, {"error": {"message": message, "type": "scripted", "code": None}})

    def start_stream(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_piece(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()

    def send_event(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        self.send_piece(f"data: {text}\n\n".encode())

    def send_delta(self, delta: dict[str, Any], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        self.send_event(
            {"id": "s", "object": "chat.completion.chunk", "model": "scripted", "choices": [choice]}
        )

    def hang_up(self) -> None:
        self.close_connection = True

    # ---- answers

    def message_of(self, step: Step) -> dict[str, Any]:
        text = step.get("text", "")
        if "text_file" in step:
            text = (self.script.folder / step["text_file"]).read_text()
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if "tool" in step:
            given = step.get("arguments", {})
            arguments = given if isinstance(given, str) else json.dumps(given)
            function = {"name": step["tool"], "arguments": arguments}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        if step.get("fault") == "refusal":
            message["refusal"] = "I cannot help with that."
        return message

    @staticmethod
    def usage_of(step: Step) -> dict[str, int] | None:
        usage: dict[str, int] | None = step.get("usage", {"prompt_tokens": 100, "completion_tokens": 20})
        return usage

    @staticmethod
    def finish_of(step: Step) -> str:
        return str(step.get("finish_reason", "tool_calls" if "tool" in step else "stop"))

    def answer_whole(self, step: Step) -> None:
        choice = {"index": 0, "message": self.message_of(step), "finish_reason": self.finish_of(step)}
        body: Step = {"id": "s", "object": "chat.completion", "model": "scripted", "choices": [choice]}
        if self.usage_of(step):
            body["usage"] = self.usage_of(step)
        self.send_body(200, json.dumps(body).encode(), step.get("content_type", "application/json"))

    def send_message(self, message: dict[str, Any]) -> None:
        """The message as deltas: text in chunks, then the call's name, then its arguments in chunks."""
        self.send_delta({"role": "assistant", "content": ""})
        for at in range(0, len(message["content"]), CHUNK):
            self.send_delta({"content": message["content"][at : at + CHUNK]})
        if "refusal" in message:
            self.send_delta({"refusal": message["refusal"]})
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            first = {
                "index": 0,
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": ""},
            }
            self.send_delta({"tool_calls": [first]})
            for at in range(0, len(arguments), CHUNK):
                self.send_delta(
                    {"tool_calls": [{"index": 0, "function": {"arguments": arguments[at : at + CHUNK]}}]}
                )

    def answer_stream(self, step: Step) -> None:
        self.start_stream(*([step["content_type"]] if "content_type" in step else []))
        self.send_message(self.message_of(step))
        if step.get("fault") == "no_newline":
            last = {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_of(step)}]}
            self.send_piece(b"data: " + json.dumps(last).encode())
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_delta({}, self.finish_of(step))
        if step.get("fault") == "late_cut":
            self.hang_up()
            return
        if self.usage_of(step):
            self.send_event({"id": "s", "model": "scripted", "choices": [], "usage": self.usage_of(step)})
        self.send_event("[DONE]")
        if step.get("fault") == "linger":
            time.sleep(step.get("seconds", 60))
            self.hang_up()
        else:
            self.wfile.write(b"0\r\n\r\n")

    def break_stream(self, step: Step) -> None:
        """The faults that begin like a good stream."""
        fault = step["fault"]
        self.start_stream()
        self.send_delta({"role": "assistant", "content": "half an "})
        if fault == "unfinished":
            self.wfile.write(b"0\r\n\r\n")
        elif fault == "bad_json":
            self.send_event('{"choices": [{"index": 0, "delta": {"content": ')
            self.send_event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        elif fault == "huge":
            for start in range(0, HUGE, 100_000):
                self.send_delta({"content": " ".join(map(str, range(start, start + 20_000)))[:100_000]})
        elif fault == "slow":
            time.sleep(step.get("seconds", 60))
        elif fault in ("endless", "loop", "comments"):
            for number in itertools.count():
                if fault != "comments":
                    self.send_delta({"content": f"{number} " if fault == "endless" else "on and "})
                else:
                    self.send_piece(b": ping\n\n")
                time.sleep(step.get("interval", 0.01))
        self.hang_up()

    def break_whole(self, step: Step) -> None:
        """The same faults for a request without a stream."""
        fault = step["fault"]
        if fault == "huge":
            self.answer_whole({"text": "x" * HUGE})
            return
        body = b'{"choices": [{"index": 0, "message": {"content": "half an '
        if fault in ("bad_json", "unfinished"):
            self.send_body(200, body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "100000000")
        self.end_headers()
        self.wfile.write(body)
        while fault in ("endless", "loop", "comments"):
            self.wfile.write(b" ")
            time.sleep(step.get("interval", 0.01))
        if fault == "slow":
            time.sleep(step.get("seconds", 60))
        self.hang_up()

    def answer(self, step: Step, stream: bool) -> None:
        fault = step.get("fault")
        self.script.wait_for(step.get("together", 0))
        time.sleep(step.get("delay", 0))
        if "status" in step:
            error = step.get("error", "scripted error")
            body = (
                error
                if isinstance(error, dict)
                else {"error": {"message": error, "type": "scripted", "code": None}}
            )
            self.send_json(step["status"], body, step.get("headers"))
        elif fault == "silent":
            time.sleep(step.get("seconds", 60))
            self.hang_up()
        elif fault == "drop":
            self.hang_up()
        elif fault == "page":
            self.send_body(200, b"<html><body>Welcome</body></html>", "text/html")
        elif fault in COMPLETE and stream and fault != "no_sse":
            self.answer_stream(step)
        elif fault in COMPLETE:
            self.answer_whole(step)
        elif stream:
            self.break_stream(step)
        else:
            self.break_whole(step)

    # ---- requests

    def do_GET(self) -> None:
        if self.path == "/state":
            self.send_json(200, self.script.state())
        elif self.path == "/v1/models" and not self.has_key():
            self.send_wrong_key()
        elif self.path == "/v1/models":
            self.send_json(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})
        else:
            self.send_error_body(404, f"no such page: {self.path}")

    def has_key(self) -> bool:
        return not self.key or self.headers.get("Authorization", "") == f"Bearer {self.key}"

    def send_wrong_key(self) -> None:
        """Like endpoints that repeat the key they were given."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.send_error_body(401, f"Incorrect API key provided: {given}.")

    def read_body(self) -> str:
        return self.rfile.read(int(self.headers.get("Content-Length", 0))).decode(errors="replace")

    def do_PUT(self) -> None:
        self.script.load(self.read_body())
        self.send_json(200, self.script.state())

    def do_POST(self) -> None:
        body = self.read_body()
        given = self.headers.get("Authorization", "")
        known = self.path == "/v1/chat/completions"
        if not self.has_key():
            self.script.record(self.path, False, body, [])
            self.send_wrong_key()
            return
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        step = self.script.next(texts_of(request)) if known else None
        failed = unmet(step, request, body) if step else ["the script has no more steps"] if known else []
        self.script.record(self.path, bool(given), body, failed)
        if not known:
            self.send_error_body(404, f"no such page: {self.path}")
        elif request is None or step is None or failed:
            self.send_error_body(400, "; ".join(failed) or "the request is not JSON")
        else:
            with self.script.counted():
                self.answer(step, bool(request.get("stream")))


def main() -> None:
    parser = argparse.ArgumentParser(description="a scripted OpenAI-compatible endpoint on loopback")
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--key")
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--repeat", action="store_true")
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()

    Handler.script = Script(options.script, options.repeat, options.log)
    Handler.key = options.key
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    if options.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    timer = threading.Timer(options.seconds, os._exit, (0,))
    timer.daemon = True
    timer.start()
    port = str(server.server_address[1])
    if options.port_file:
        beside = options.port_file.with_name(options.port_file.name + ".new")
        beside.write_text(port)
        beside.rename(options.port_file)
    print(port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
