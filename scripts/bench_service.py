#!/usr/bin/env python3
"""The service with a thousand runs in its queue: what a client waits for, and what it takes.

    bench_service.py --build build [--runs 1000] [--out bench/results/service.json]

Submits them as fast as one client can, and as eight can; asks for single runs and for the list while checks
run (the differentiator's drafts, in the jail); and reads the service's memory before, during and after.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from files import FORWARD  # noqa: E402

CLIENTS = 8


class Service:
    """One process, its socket, and what is asked of it."""

    def __init__(self, build: Path, folder: Path) -> None:
        self.folder = folder
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KA_", "OPENAI_", "XDG_"))}
        env |= {"HOME": str(folder), "KA_SHARE": str(ROOT), "KA_STORE": str(build / "pairs.db")}
        command = [build / "kernel-agent", "serve", "--state", folder / "state", "--rate", "0", "--jobs", "1"]
        command += ["--backend", "none", "--no-optimise", "--quiet"]
        self.process = subprocess.Popen([str(word) for word in command], env=env, cwd=folder)
        while True:
            with contextlib.suppress(OSError):
                if self.ask(self.connect(), "GET", "/readyz")[0] == 200:
                    return
            if self.process.poll() is not None:
                raise SystemExit("the service did not begin")
            time.sleep(0.05)

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.folder / "state" / "socket"))
        return connection

    @staticmethod
    def ask(
        connection: http.client.HTTPConnection, method: str, path: str, doc: object = None
    ) -> tuple[int, Any]:
        connection.request(method, path, body=None if doc is None else json.dumps(doc).encode())
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    def submit(self, connection: http.client.HTTPConnection, number: int) -> str:
        status, run = self.ask(connection, "POST", "/v1/runs", {"source": f"{FORWARD}\n# {number}\n"})
        if status != 202:
            raise SystemExit(f"submission {number}: {status} {run}")
        return str(run["id"])

    def resident_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return round(int(line.split()[1]) / 1024, 1)


def submit_all(service: Service, count: int) -> tuple[dict[str, float], list[str]]:
    """Half by one client, half by several at once: runs a second."""
    half = count // 2
    connection = service.connect()
    began = time.perf_counter()
    ids = [service.submit(connection, number) for number in range(half)]
    alone = half / (time.perf_counter() - began)
    numbers = iter(range(half, count))
    lock = threading.Lock()

    def client() -> None:
        own = service.connect()
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            run = service.submit(own, number)
            with lock:
                ids.append(run)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = (count - half) / (time.perf_counter() - began)
    return {"one_client": round(alone, 1), f"{CLIENTS}_clients": round(together, 1)}, ids


def milliseconds(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

    return {"requests": len(ordered), "p50": at(0.5), "p99": at(0.99), "most": at(1)}


def ask_for(service: Service, paths: list[str], seconds: float) -> tuple[dict[str, float], float]:
    """Latencies of one client that asks in turn, and the service's largest memory meanwhile."""
    connection, times, most = service.connect(), [], 0.0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        status, _ = service.ask(connection, "GET", paths[len(times) % len(paths)])
        times.append(time.perf_counter() - began)
        if status != 200:
            raise SystemExit(f"{paths[len(times) % len(paths)]}: {status}")
        most = max(most, service.resident_mb())
        time.sleep(0.005)
    return milliseconds(times), most


def measure(build: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    service = Service(build, folder)
    try:
        before = service.resident_mb()
        rates, ids = submit_all(service, options.runs)
        status, most = ask_for(service, [f"/v1/runs/{run}" for run in ids], options.seconds)
        listed, more = ask_for(service, ["/v1/runs?limit=100"], options.seconds / 3)
        _, doc = service.ask(service.connect(), "GET", "/v1/runs?limit=1")
        states = {
            state: service.ask(service.connect(), "GET", f"/v1/runs?limit=1&state={state}")[1]["total"]
            for state in ("queued", "running", "done", "failed")
        }
        after = service.resident_mb()
    finally:
        service.process.terminate()
        code = service.process.wait()
    return {
        "machine": f"{os.cpu_count()} processors, {platform.machine()}",
        "load": round(os.getloadavg()[0], 1),
        "runs": doc["total"],
        "states_at_the_end": states,
        "submitted_per_second": rates,
        "status_ms": status,
        "list_of_100_ms": listed,
        "resident_mb": {"before": before, "most": max(most, more), "after": after},
        "exit_code": code,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="the service with many runs in its queue")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kernel-agent-bench-") as folder:
        result = measure(options.build.resolve(), Path(folder), options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    good = result["resident_mb"]["most"] < 100 and result["runs"] == options.runs and result["exit_code"] == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
