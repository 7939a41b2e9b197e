#!/usr/bin/env python3
"""scripts/slurm against a cluster of this machine alone: slurmctld and slurmd of the distribution, started
here with their files in a folder that does not stay, and ended again.

    run.py --build build [--parts 3] [--seconds 900] [--report F.md]

Where Slurm is not installed it says so, and its exit code is 0. Else 0 where every file came to the outcome
that it must have, and a second submission found nothing left to do.
"""

from __future__ import annotations

import argparse
import json
import os
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
from files import BACKWARD, FORWARD, fenced  # noqa: E402

FILES = 5
UNUSABLE = "k3.py"
NEEDS = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo")
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


class Cluster:
    """One controller and one node, both this machine."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.until = time.monotonic() + seconds
        self.started: list[subprocess.Popen[bytes]] = []
        self.config = folder / "slurm.conf"
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "KA_"))},
            "SLURM_CONF": str(self.config),
            "HOME": str(folder),
        }

    def write_config(self) -> None:
        host = socket.gethostname().split(".")[0]
        user = os.environ.get("USER") or "root"
        lines = {
            "ClusterName": "here",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/none",
            "CredType": "cred/none",
            "SlurmctldPort": free_port(),
            "SlurmdPort": free_port(),
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd.pid",
            "SlurmctldLogFile": self.folder / "slurmctld.log",
            "SlurmdLogFile": self.folder / "slurmd.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "ReturnToService": 2,
            "MinJobAge": 3600,
            "SwitchType": "switch/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
        }
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        text += f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN\n"
        text += f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n"
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self.config.write_text(text)

    def start(self) -> None:
        self.write_config()
        for program in ("slurmctld", "slurmd"):
            command = [str(shutil.which(program)), "-D", "-f", str(self.config)]
            log = (self.folder / f"{program}.out").open("wb")
            self.started.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))
        while "idle" not in self.ask("sinfo", "-h", "-o", "%t", may_fail=True):
            self.pause()
            for process in self.started:
                if process.poll() is not None:
                    logs = "".join(path.read_text() for path in self.folder.glob("slurm*.log"))
                    raise RuntimeError(f"{process.args}: it ended\n{logs[-3000:]}")

    def pause(self) -> None:
        if time.monotonic() > self.until:
            raise TimeoutError("it takes too long")
        time.sleep(0.5)

    def ask(self, *words: str, may_fail: bool = False, **more: str) -> str:
        done = subprocess.run(
            words, env={**self.env, **more}, capture_output=True, text=True, check=False, cwd=self.folder
        )
        if done.returncode and not may_fail:
            raise RuntimeError(f"{words[0]}: {done.stderr}")
        return done.stdout

    def jobs(self) -> list[dict[str, str]]:
        lines = self.ask("scontrol", "-o", "show", "job").splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def wait(self, job: str) -> dict[str, str]:
        while True:
            (found,) = [one for one in self.jobs() if one.get("JobId") == job]
            if found["JobState"] in OVER:
                return found
            self.pause()

    def end(self) -> None:
        for process in reversed(self.started):
            process.terminate()
        for process in self.started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def write_kernels(folder: Path) -> dict[str, str]:
    """Files, and what each must come to."""
    folder.mkdir()
    for number in range(FILES):
        (folder / f"k{number}.py").write_text(f"{FORWARD}\n# {number}\n")
    broken = FORWARD.replace("    M, N = x.shape", "    raise ValueError('never')\n    M, N = x.shape")
    (folder / UNUSABLE).write_text(broken)
    return {f"k{n}.py": "unusable" if f"k{n}.py" == UNUSABLE else "verified" for n in range(FILES)}


def start(cluster: Cluster, options: argparse.Namespace, *words: str) -> str:
    """The number of the job that merges."""
    program = {"KERNEL_AGENT": str(options.build / "kernel-agent"), "KA_SHARE": str(ROOT)}
    command = [str(ROOT / "scripts/slurm/submit.sh"), *words, "--no-optimise", "--jobs", "1"]
    return cluster.ask(*command, **program).strip().splitlines()[-1]


def submit(cluster: Cluster, options: argparse.Namespace) -> tuple[dict[str, Any], str, str]:
    """Summary, the state of the job that merges, and what it printed."""
    words = ["kernels", str(options.parts), "--out", "shared", "--backend", "none"]
    merged = cluster.wait(start(cluster, options, *words))
    out = cluster.folder / "shared"
    summary = json.loads((out / "summary.json").read_text())
    return summary, merged["JobState"], (out / "summary.log").read_text()


def cut_off(cluster: Cluster, options: argparse.Namespace) -> list[str]:
    """A task that is told that its time is over keeps what it has, and the next one goes on with it."""
    folder, out, box = (cluster.folder / name for name in ("asked", "cut", "box"))
    folder.mkdir()
    (folder / "k.py").write_text(FORWARD)
    words = ["asked", "1", "--out", "cut", "--backend", f"mailbox:{box}", "--draft", "llm"]
    merging = start(cluster, options, *words)
    while not list(box.glob("*.request.md")):
        cluster.pause()
    (task,) = [job for job in cluster.jobs() if job["JobState"] == "RUNNING"]
    cluster.ask("scancel", "--batch", "--signal=TERM", task["JobId"])
    cluster.wait(merging)
    problems = []
    if (code := json.loads((out / "summary.json").read_text())["exit_code"]) != 130:
        problems.append(f"a task that was cut off: exit code {code}")
    (request,) = box.glob("*.request.md")
    Path(str(request).replace(".request.", ".answer.")).write_text(fenced(BACKWARD))
    cluster.wait(start(cluster, options, *words))
    found = outcomes(json.loads((out / "summary.json").read_text()))
    runs = list(out.glob("*/run.db"))
    if found != {"k.py": "verified"} or len(runs) != 1:
        problems.append(f"gone on with: {found} in {len(runs)} runs")
    return problems


def outcomes(summary: dict[str, Any]) -> dict[str, str]:
    return {Path(entry["file"]).name: entry["outcome"] for entry in summary["files"]}


def try_it(cluster: Cluster, options: argparse.Namespace) -> tuple[list[str], str]:
    """Problems, and a report."""
    expected = write_kernels(cluster.folder / "kernels")
    summary, state, printed = submit(cluster, options)
    problems = []
    if outcomes(summary) != expected or summary["missing_parts"]:
        problems.append(f"the first submission: {outcomes(summary)}, missing {summary['missing_parts']}")
    if state != "FAILED" or summary["exit_code"] != 3:
        problems.append(f"a file cannot be used, and the job is {state} with {summary['exit_code']}")
    array = [
        f"{job['ArrayJobId']}_{job['ArrayTaskId']}: {job['JobState']}"
        for job in cluster.jobs()
        if "ArrayTaskId" in job
    ]
    (cluster.folder / "kernels" / UNUSABLE).unlink()
    again, state, printed_again = submit(cluster, options)
    if set(outcomes(again).values()) != {"unchanged"} or state != "COMPLETED":
        problems.append(f"the second submission: {outcomes(again)}, {state}")
    problems += cut_off(cluster, options)
    version = cluster.ask("sinfo", "--version").strip()
    report = "\n\n".join(
        [
            f"{version}, one node, {options.parts} tasks.",
            "Tasks of the first submission:\n\n    " + "\n    ".join(sorted(array)),
            "The job that merges printed:\n\n    " + "\n    ".join(shown(printed, cluster)),
            f"The same again, without {UNUSABLE}:\n\n    " + "\n    ".join(shown(printed_again, cluster)),
        ]
    )
    return problems, report


def shown(text: str, cluster: Cluster) -> list[str]:
    """Its lines, with nothing of this machine in them."""
    width = len(str(cluster.folder)) + 1
    lines = text.strip().splitlines()
    return [line.replace(f"{cluster.folder}/", "").replace("file" + " " * width, "file", 1) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description="scripts/slurm, tried on this machine")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    options.build = options.build.resolve()
    missing = [name for name in NEEDS if not shutil.which(name)]
    if missing:
        print(f"skipped: {', '.join(missing)} not installed (slurmctld, slurmd, slurm-client)")
        return 0
    with tempfile.TemporaryDirectory(prefix="kernel-agent-slurm-") as folder:
        cluster = Cluster(Path(folder), options.seconds)
        try:
            cluster.start()
            problems, report = try_it(cluster, options)
        finally:
            cluster.end()
    print(report)
    if options.report:
        options.report.write_text(report + "\n")
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
