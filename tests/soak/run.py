#!/usr/bin/env python3
"""The service for minutes, with everything around it failing: no run may be lost, done twice or end wrongly.

    run.py --build build [--runs 300] [--kill-every 30] [--deadline 8] [--out F.json]

The scripted endpoint answers 5% of its requests with HTTP 500, cuts 5% in the middle, and 2% of the
candidates hang until their child's deadline. Every tenth file cannot be used. The service is killed
(SIGKILL) every so often until two thirds of the runs have ended; the last third is one life of the process,
in which its memory and descriptors are watched. On a machine so slow that no run comes to its end in a
life, the next life is twice as long: a check that is interrupted begins anew. A minute before --seconds are
over what has not ended is cancelled, and the rest is judged. Exit code 0: all is as it must be; the figures
go to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from files import SMALL, SMALL_BACKWARD, fenced  # noqa: E402

HANGS = SMALL_BACKWARD.replace("dy = dy.contiguous()", "while True:\n            pass")
SHARES = {"error_500": 0.05, "cut": 0.05, "hangs": 0.02}
GROWTH_MB = 12.0  # of resident memory in the last life
GROWTH_FDS = 8
LAST_S = 60.0  # for the end, where not all runs have come to theirs


def steps(count: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The endpoint's answers, faults spread among them, at least one of each kind."""
    right = {"text": fenced(SMALL_BACKWARD)}
    faults: dict[str, dict[str, Any]] = {
        "error_500": {"status": 500, "headers": {"Retry-After": "0"}},
        "cut": {"fault": "cut"},
        "hangs": {"text": fenced(HANGS)},
    }
    counts = {kind: max(1, round(count * share)) for kind, share in SHARES.items()}
    chosen = [faults[kind] for kind, number in counts.items() for _ in range(number)]
    chosen += [right] * (count - len(chosen))
    random.Random(seed).shuffle(chosen)
    return [*chosen, right], counts


def source(number: int) -> tuple[str, str]:
    """A file of its own, and the verdict that it must come to."""
    if number % 10 == 5:
        return SMALL.replace("SWEEP =", "NO_SWEEP =") + f"\n# {number}\n", "unusable"
    return f"{SMALL}\n# {number}\n", "verified"


class Soak:
    """The endpoint, the service, and what is seen of it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.until = time.monotonic() + options.seconds
        self.kills = 0
        self.samples: list[tuple[float, int]] = []  # megabytes, descriptors: of this life
        self.problems: list[str] = []
        self.sessions: set[int] = set()
        self.cancelled: set[str] = set()  # for want of time
        self.log = (folder / "service.log").open("w")
        (folder / "tmp").mkdir()
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("KA_", "OPENAI_", "XDG_"))},
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "KA_SHARE": str(ROOT),
            "KA_STORE": str(options.build / "pairs.db"),
        }

    def start_endpoint(self) -> dict[str, int]:
        script, port = self.folder / "script.jsonl", self.folder / "port"
        answers, counts = steps(self.options.runs, self.options.seed)
        script.write_text("".join(json.dumps(step) + "\n" for step in answers))
        server = [sys.executable, ROOT / "tests/llm/server.py", "--repeat", "--script", script]
        server += ["--port-file", port, "--seconds", self.options.seconds + 60]
        self.endpoint = subprocess.Popen([str(word) for word in server], stdout=subprocess.DEVNULL)
        while not port.exists():
            self.pause()
        self.url = f"http://127.0.0.1:{port.read_text()}/v1"
        return counts

    def pause(self, seconds: float = 0.05) -> None:
        if time.monotonic() > self.until:
            raise TimeoutError(f"not over after {self.options.seconds} seconds")
        time.sleep(seconds)

    def start(self) -> None:
        command = [self.options.build / "kernel-agent", "serve", "--state", self.folder / "state"]
        command += ["--base-url", self.url, "--draft", "llm", "--no-optimise", "--no-lessons"]
        command += ["--jobs", 2, "--deadline", self.options.deadline]
        self.samples = []
        self.service = subprocess.Popen(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.env,
            stderr=self.log,
            start_new_session=True,
        )
        self.sessions.add(self.service.pid)
        while True:
            with contextlib.suppress(OSError):
                if self.ask("GET", "/readyz")[0] == 200:
                    return
            if self.service.poll() is not None:
                raise RuntimeError(
                    "the service ended by itself:\n" + (self.folder / "service.log").read_text()
                )
            self.pause()

    def kill(self) -> None:
        self.service.kill()
        self.service.wait()
        self.kills += 1

    def ask(self, method: str, path: str, doc: object = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(60)
        connection.sock.connect(str(self.folder / "state" / "socket"))
        with contextlib.closing(connection):
            connection.request(method, path, body=None if doc is None else json.dumps(doc).encode())
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())

    def count_ended(self) -> int:
        if self.service.poll() is not None:
            raise RuntimeError("the service ended by itself")
        self.sample()
        doc = self.ask("GET", "/v1/runs?limit=1000")[1]
        if doc["total"] != self.options.runs:
            raise RuntimeError(f"{doc['total']} runs of {self.options.runs} are there")
        return sum(run["state"] not in ("queued", "running") for run in doc["runs"])

    def sample(self) -> None:
        status = Path(f"/proc/{self.service.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        fds = len(list(Path(f"/proc/{self.service.pid}/fd").iterdir()))
        self.samples.append((int(resident.split()[1]) / 1024, fds))

    def submit(self) -> dict[str, str]:
        expected = {}
        for number in range(self.options.runs):
            text, verdict = source(number)
            status, run = self.ask("POST", "/v1/runs", {"source": text, "name": f"f{number}.py"})
            if status != 202:
                raise RuntimeError(f"submission {number}: {status} {run}")
            expected[run["id"]] = verdict
        return expected

    def cut_short(self) -> None:
        """Cancel what has not ended."""
        for run in self.ask("GET", "/v1/runs?limit=1000")[1]["runs"]:
            if run["state"] in ("queued", "running"):
                status, _ = self.ask("POST", f"/v1/runs/{run['id']}/cancel", {})
                if status == 200:  # else it has just ended
                    self.cancelled.add(run["id"])
        while self.count_ended() < self.options.runs:
            self.pause(0.5)

    def work(self) -> None:
        """Until all runs have ended, or the time is nearly over."""
        next_kill = time.monotonic()  # the first one at once: its runs have just begun
        before, life = -1, self.options.kill_every
        while (ended := self.count_ended()) < self.options.runs:
            self.pause(0.5)
            if time.monotonic() > self.until - LAST_S:
                self.cut_short()
                return
            if ended * 3 < self.options.runs * 2 and time.monotonic() >= next_kill:
                self.kill()
                self.start()
                life = self.options.kill_every if ended > before else 2 * life
                before = ended
                next_kill = time.monotonic() + life

    def check(self, expected: dict[str, str]) -> None:
        listed = {run["id"]: run for run in self.ask("GET", "/v1/runs?limit=1000")[1]["runs"]}
        for wrong in set(listed) ^ set(expected):
            self.problems.append(f"{wrong}: {'lost' if wrong in expected else 'nobody submitted it'}")
        for run_id, verdict in expected.items():
            run = listed.get(run_id, {})
            if run_id in self.cancelled and run.get("state") == "cancelled":
                continue
            if (run.get("state"), run.get("verdict")) != ("done", verdict):
                self.problems.append(f"{run_id}: wanted {verdict}: {run}")
            results = (self.folder / "state" / "runs" / run_id).glob("*/*/result.json")
            verdicts = [json.loads(path.read_text())["verdict"] for path in results]
            if verdicts.count(verdict) != 1:
                self.problems.append(f"{run_id}: results: {verdicts}")

    def leftovers(self) -> list[int]:
        """Processes of any of the services, all of which have ended."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) in self.sessions and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found

    def growth(self) -> dict[str, float]:
        """From the first to the last fifth of the samples of this life, medians."""
        fifth = max(1, len(self.samples) // 5)
        first, last = self.samples[fifth : 2 * fifth] or self.samples[:1], self.samples[-fifth:]

        def middle(part: list[tuple[float, int]], which: int) -> float:
            return sorted(sample[which] for sample in part)[len(part) // 2]

        grown = {
            "resident_mb": round(max(sample[0] for sample in self.samples), 1),
            "resident_growth_mb": round(middle(last, 0) - middle(first, 0), 1),
            "descriptors": max(sample[1] for sample in self.samples),
            "descriptors_growth": middle(last, 1) - middle(first, 1),
        }
        if grown["resident_growth_mb"] > GROWTH_MB or grown["descriptors_growth"] > GROWTH_FDS:
            self.problems.append(f"it grows: {grown}")
        return grown

    def end(self) -> None:
        """The service in good order; then nothing of it may be left."""
        self.service.terminate()
        code = self.service.wait(60)
        if code:
            self.problems.append(f"exit code {code} at its end")
        deadline = time.monotonic() + 30
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.problems += [f"process {pid} is left" for pid in self.leftovers()]

    def stop(self) -> None:
        for process in (getattr(self, "service", None), getattr(self, "endpoint", None)):
            if process and process.poll() is None:
                process.kill()
                process.wait()
        self.log.close()


def soak(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    it = Soak(folder, options)
    try:
        faults = it.start_endpoint()
        it.start()
        expected = it.submit()
        it.work()
        it.check(expected)
        grown = it.growth()
        it.end()
        scratch = len(list((folder / "tmp").iterdir()))
    except (TimeoutError, RuntimeError) as error:
        return {"problems": [str(error)], "kills": it.kills}
    finally:
        it.stop()
    return {
        "runs": options.runs,
        "unusable": list(expected.values()).count("unusable"),
        "cancelled": len(it.cancelled),
        "kills": it.kills,
        "faults": faults,
        "seconds": round(time.monotonic() - began, 1),
        "last_life": grown,
        "scratch_left": scratch,
        "problems": it.problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="the service under faults, for minutes")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--kill-every", type=float, default=30)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--deadline", type=int, default=8, help="seconds for a child; a hung one takes them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.build = options.build.resolve()
    folder = Path(tempfile.mkdtemp(prefix="kernel-agent-soak-"))
    result = soak(folder, options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if result["problems"]:
        print(f"its folder and log: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
