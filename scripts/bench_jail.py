"""How long a check takes to get going: cold, warm, and what the layers cost. `python scripts/bench_jail.py [--json]`.

Cold: ka-jail starts an interpreter that imports torch and triton. Warm: a zygote forks the same interpreter. Both do no work
and are timed until the process tree is gone. The layers' cost is the difference to the same path without them, measured in
turns so that both see the same machine. Ratios travel between machines; milliseconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = "limits+caps+mount+net+landlock+seccomp"  # a zygote's child is always in a pid namespace


class Bench:
    def __init__(self, jail: Path, folder: Path) -> None:
        self.jail, self.folder, self.count = jail, folder, 0
        self.package = folder / "package"
        kernel_agent = self.package / "kernel_agent"
        kernel_agent.mkdir(parents=True)
        (kernel_agent / "__init__.py").touch()
        (kernel_agent / "child.py").write_text("def main(argv):\n    return 0\n")
        source = ROOT / "sandbox" / "kernel_agent" / "zygote.py"
        (kernel_agent / "zygote.py").write_text(source.read_text())

    def scratch(self) -> str:
        self.count += 1
        path = self.folder / f"scratch-{self.count}"
        path.mkdir(mode=0o700)
        return str(path)

    def start_zygote(self) -> float:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = str(theirs.fileno())
        command = [self.jail, "--zygote", "--scratch", self.folder, "--result-fd", fd]
        command += ["--env", f"PYTHONPATH={self.package}", "--", sys.executable, "-m", "kernel_agent.zygote"]
        command += [fd, self.jail.with_name("libka_jail.so")]
        begin = time.perf_counter()
        self.zygote = subprocess.Popen([str(part) for part in command], pass_fds=(theirs.fileno(),))
        theirs.close()
        if self.channel.recv(1000) != b"ready":
            raise SystemExit("the zygote did not start")
        return (time.perf_counter() - begin) * 1e3

    def stop(self) -> None:
        self.channel.close()
        self.zygote.wait()

    def warm(self, *options: str) -> float:
        words = [str(self.count), "--require", "none", *options, "--scratch", self.scratch()]
        words += ["--ro", str(self.package), "--", sys.executable]
        ours, theirs = socket.socketpair()
        null = os.open(os.devnull, os.O_WRONLY)
        begin = time.perf_counter()
        message = b"\0".join(word.encode() for word in words)
        socket.send_fds(self.channel, [message], [null, null, theirs.fileno()])
        theirs.close()
        _, fds, _, _ = socket.recv_fds(self.channel, 1000, 1)
        ended = self.channel.recv(1000).decode().split()
        taken = (time.perf_counter() - begin) * 1e3
        if ended[0] != "ended" or ended[2] != "0":
            raise SystemExit(f"a child failed: {ended}")
        for fd in (null, *fds):
            os.close(fd)
        ours.close()
        return taken

    def cold(self, *options: str) -> float:
        command = [str(self.jail), "--require", "none", *options, "--scratch", self.scratch(), "--"]
        return timed([*command, sys.executable, "-c", "import torch, triton"])

    def empty(self, *options: str) -> float:
        command = [
            str(self.jail),
            "--require",
            "none",
            *options,
            "--scratch",
            self.scratch(),
            "--",
            "/bin/true",
        ]
        return timed(command)


def timed(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True)
    return (time.perf_counter() - begin) * 1e3


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"n": len(ordered), "p50_ms": round(statistics.median(ordered), 2), "p99_ms": round(p99, 2)}


def in_turns(count: int, **runs: Callable[[], float]) -> dict[str, dict[str, float]]:
    values: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            values[name].append(run())
    return {name: summary(found) for name, found in values.items()}


def measure(bench: Bench, cold: int, warm: int) -> dict[str, object]:
    imports = [sys.executable, "-c", "import torch, triton"]
    result: dict[str, object] = dict(in_turns(cold, bare=lambda: timed(imports), cold=bench.cold))
    result["zygote_start_ms"] = round(bench.start_zygote(), 1)
    try:
        bench.warm()
        result |= in_turns(
            warm,
            warm=bench.warm,
            warm_without_layers=lambda: bench.warm("--without", LAYERS),
            warm_without_network_namespace=lambda: bench.warm("--without", "net"),
        )
    finally:
        bench.stop()
    result |= in_turns(
        warm, jail_of_nothing=bench.empty, jail_without_layers=lambda: bench.empty("--without", "all")
    )
    return result | ratios(result)


def ratios(result: dict[str, object]) -> dict[str, float]:
    def of(name: str, key: str) -> float:
        entry = result[name]
        assert isinstance(entry, dict)
        return entry[key]

    return {
        "cold_over_warm_p50": round(of("cold", "p50_ms") / of("warm", "p50_ms"), 1),
        "cold_over_warm_p99": round(of("cold", "p99_ms") / of("warm", "p99_ms"), 1),
        "layers_ms_p50": round(of("warm", "p50_ms") - of("warm_without_layers", "p50_ms"), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jail", type=Path, default=ROOT / "build" / "ka-jail")
    parser.add_argument("--cold", type=int, default=5, help="cold starts")
    parser.add_argument("--warm", type=int, default=100, help="warm starts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ka-bench-") as folder:
        result = measure(Bench(options.jail.resolve(), Path(folder)), options.cold, options.warm)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"{name:32} p50 {value['p50_ms']:9.2f} ms   p99 {value['p99_ms']:9.2f} ms   n {value['n']}")
        else:
            print(f"{name:32} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
