"""Runs in the container as root: starts, watches, reloads, kills and stops the service by systemctl, and
writes what it saw into found.json. run.py says how it gets here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

UNIT = "kernel-agent.service"
AS_USER = ("runuser", "-u", "kernel-agent", "--")
STATE = ("--state", "/var/lib/kernel-agent")
SECONDS = 120.0  # until what does not happen is given up
SHOWN = "Result", "ActiveState", "MainPID", "NRestarts", "ExecMainStatus", "Type", "WatchdogUSec"


class Checks:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, dict[str, Any]] = {}
        self.complete = False

    def add(self, name: str, ok: bool, found: object) -> None:
        self.made[name] = {"ok": bool(ok), "found": found}
        self.write()

    def write(self) -> None:
        journal = call("journalctl", "-b", "-o", "cat", "-u", UNIT).stdout
        found = {"checks": self.made, "complete": self.complete, "journal": journal}
        (self.folder / "found.json").write_text(json.dumps(found))


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def show() -> dict[str, str]:
    lines = call("systemctl", "show", UNIT, "-p", ",".join(SHOWN)).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


def until(test: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if found := test():
            return found
        time.sleep(0.2)
    return None


def ask(path: str, *more: str) -> dict[str, Any]:
    """A request to the socket, as the service's user."""
    command = (
        "curl",
        "-s",
        "--unix-socket",
        "/var/lib/kernel-agent/socket",
        f"http://localhost{path}",
        *more,
    )
    said = call(*AS_USER, *command).stdout
    return dict(json.loads(said)) if said.startswith("{") else {}


def submit(text: str, number: int) -> str:
    file = Path(f"/tmp/file{number}.py")
    file.write_text(f"{text}\n# {number}\n")
    file.chmod(0o644)
    said = call(*AS_USER, "kernel-agent", "submit", str(file), "--json", *STATE)
    return str(json.loads(said.stdout)["id"]) if said.returncode == 0 else said.stderr


def ended(run: str) -> dict[str, Any] | None:
    found = ask(f"/v1/runs/{run}")
    return found if found.get("state") in ("done", "failed", "cancelled") else None


def at_work(run: str) -> bool:
    """Has a child of the run begun to check?"""
    events = ask(f"/v1/runs/{run}")
    log = call(*AS_USER, "kernel-agent", "logs", run, *STATE).stdout
    return events.get("state") == "running" and "child" in log


def check_start(checks: Checks) -> None:
    verify = call("systemd-analyze", "verify", "--man=yes", UNIT)
    checks.add(
        "systemd-analyze verify", verify.returncode == 0 and UNIT not in verify.stderr, verify.stderr.strip()
    )
    score = call("systemd-analyze", "security", UNIT, "--no-pager").stdout.strip().splitlines()
    began = time.monotonic()
    started = call("systemctl", "start", UNIT)
    took = time.monotonic() - began
    now = show()
    ready = call(*AS_USER, "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket",
                 "/var/lib/kernel-agent/socket", "http://localhost/readyz").stdout  # fmt: skip
    checks.add("start waits for READY=1, and requests are answered then",
               started.returncode == 0 and now["ActiveState"] == "active" and now["Type"] == "notify"
               and ready == "200", {"seconds": round(took, 1), "readyz": ready, **now})  # fmt: skip
    checks.add("systemd-analyze security", True, score[-1] if score else "")


def check_jail(checks: Checks, text: str) -> None:
    """The unit takes nothing from the jail: it has the layers that this user has outside."""
    inside = ask("/v1/machine").get("sandbox", {})
    doctor = call(*AS_USER, "kernel-agent", "doctor", "--json", "--config", "/etc/kernel-agent/config").stdout
    outside = json.loads(doctor)["layers"] if doctor.startswith("{") else {}
    on = {name for name, is_on in (inside.get("layers") or {}).items() if is_on}
    without = {name for name, is_on in (outside.get("layers") or {}).items() if is_on}
    checks.add("the jail has no layer less than without the unit", on and on >= without,
               {"level": inside.get("level"), "layers": inside.get("layers"), "why": inside.get("why"),
                "outside": outside.get("layers")})  # fmt: skip
    group = Path(f"/proc/{show()['MainPID']}/cgroup").read_text().splitlines()[-1]
    checks.add("the service leaves its control group to the jail", group.endswith(f"{UNIT}/service"), group)
    run = submit(text, 0)
    found = until(lambda: ended(run)) or {"id": run}
    checks.add("a run is verified in the jail under the unit", found.get("verdict") == "verified",
               {k: found.get(k) for k in ("id", "state", "verdict", "exit_code", "reason")})  # fmt: skip


def watchdog_time() -> int:
    said = call("systemctl", "show", UNIT, "-p", "WatchdogTimestampMonotonic", "--value").stdout.strip()
    return int(said or 0)


def check_watchdog(checks: Checks) -> None:
    first = watchdog_time()
    second = until(lambda: watchdog_time() > first and watchdog_time())
    third = until(lambda: second and watchdog_time() > second and watchdog_time())
    checks.add("the watchdog is answered", first and third, [first, second, third])
    before = show()
    call("kill", "-STOP", before["MainPID"])
    until(lambda: show()["NRestarts"] != before["NRestarts"] and show()["ActiveState"] == "active")
    after = show()
    log = call("journalctl", "-b", "-o", "cat", "_PID=1").stdout
    checks.add("a loop that hangs is ended by the watchdog, and begun anew",
               "Watchdog timeout" in log and after["ActiveState"] == "active"
               and after["MainPID"] != before["MainPID"], after)  # fmt: skip


def check_reload(checks: Checks) -> None:
    config = Path("/etc/kernel-agent/config")
    config.write_text(config.read_text().replace("jobs = 1", "jobs = 2"))
    pid = show()["MainPID"]
    reloaded = call("systemctl", "reload", UNIT)
    jobs = until(lambda: ask("/v1/machine").get("jobs") == 2 and 2)
    now = show()
    checks.add("reload reads the settings again, in the same process",
               reloaded.returncode == 0 and jobs == 2 and now["MainPID"] == pid
               and now["ActiveState"] == "active", {"jobs": jobs, **now})  # fmt: skip


def check_kill(checks: Checks, text: str) -> None:
    run = submit(text, 1)
    busy = until(lambda: at_work(run))
    before = show()
    call("kill", "-KILL", before["MainPID"])
    until(lambda: show()["NRestarts"] != before["NRestarts"] and show()["ActiveState"] == "active")
    found = until(lambda: ended(run)) or {}
    checks.add("a run whose service was killed goes on in the one that systemd begins",
               busy and found.get("verdict") == "verified" and found.get("starts") == 2,
               {k: found.get(k) for k in ("state", "verdict", "starts")})  # fmt: skip


def check_stop(checks: Checks, text: str) -> None:
    run = submit(text, 2)
    busy = until(lambda: at_work(run))
    began = time.monotonic()
    stopped = call("systemctl", "stop", UNIT)
    took, now = time.monotonic() - began, show()
    left = call("pgrep", "-u", "kernel-agent").stdout.split()
    checks.add("stop ends a service at work in order, and nothing of it is left",
               busy and stopped.returncode == 0 and now["Result"] == "success" and now["ExecMainStatus"] == "0"
               and not left, {"seconds": round(took, 1), "left": left, **now})  # fmt: skip
    call("systemctl", "start", UNIT)
    found = until(lambda: ended(run)) or {}
    checks.add("what it was at goes on with the next start", found.get("verdict") == "verified",
               {k: found.get(k) for k in ("state", "verdict", "starts", "attempt")})  # fmt: skip
    call("systemctl", "stop", UNIT)


def main(folder: Path) -> int:
    checks = Checks(folder)
    text = (folder / "softmax.py").read_text()
    try:
        check_start(checks)
        check_jail(checks, text)
        check_watchdog(checks)
        check_reload(checks)
        check_kill(checks, text)
        check_stop(checks, text)
    except Exception:  # noqa: BLE001 (what is written is all that comes out of here)
        checks.add("the checks themselves", False, traceback.format_exc())
    checks.complete = True
    checks.write()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
