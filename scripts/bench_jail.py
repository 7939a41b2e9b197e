"""How long a check takes to get going: cold, warm, what the layers cost, and what a compiled kernel saves
that is in the shared cache. `python scripts/bench_jail.py [--json] [--out FILE]`.

Cold: ka-jail starts an interpreter that imports torch and triton. Warm: a zygote forks the same interpreter.
Both do no work and are timed until the process tree is gone. The layers' cost is the difference to the same
path without them, measured in turns so that both see the same machine. The kernel is compiled for sm_90 in a
warm child, anew and with the cache in turns; on a machine with a GPU it is also launched. Ratios travel
between machines; milliseconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded

ROOT = Path(__file__).resolve().parents[1]
SANDBOX = ROOT / "sandbox"
CHILD = """
import runpy
from pathlib import Path
def main(argv):
    if Path("case.py").exists():
        runpy.run_path("case.py")
    return 0
"""
# A kernel of some size, so that the front end's share is that of a real one.
CASE = """
import sys
from pathlib import Path
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from kernel_agent import compiled

@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=0.0)
    mean = tl.sum(x, 0) / n
    centred = tl.where(cols < n, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / n + eps)
    w = tl.load(w_ptr + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + row * n + cols, centred * rstd * w, mask=cols < n)

compiled.use({shared!r})
compiled.install()
if {launch!r}:
    x, w = torch.ones(64, 1000, device="cuda"), torch.ones(1000, device="cuda")
    layer_norm_kernel[(64,)](x, w, torch.empty_like(x), 1000, 1e-5, BLOCK=1024)
    torch.cuda.synchronize()
else:
    pointers = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), "*fp32")
    signature = pointers | dict(n="i32", eps="fp32", BLOCK="constexpr")
    source = ASTSource(layer_norm_kernel, signature, dict(BLOCK=1024))
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    compiled.obtain(compiled.lower(source, backend, target, backend.parse_options(dict())))
compiled.leave(Path.cwd())
"""
PASSED = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
LAYERS = "limits+caps+mount+net+landlock+seccomp"  # a zygote's child is always in a pid namespace


class Bench:
    def __init__(self, jail: Path, folder: Path) -> None:
        self.jail, self.folder, self.count = jail, folder, 0
        self.package = folder / "package"
        kernel_agent = self.package / "kernel_agent"
        shutil.copytree(SANDBOX / "kernel_agent", kernel_agent, ignore=shutil.ignore_patterns("__pycache__"))
        (kernel_agent / "child.py").write_text(CHILD)
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.left: int | None = None  # scratch of the last warm child

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

    def compile(self, cached: bool, launch: bool = False) -> float:
        """A warm child that compiles a kernel, or finds it compiled; and launches it on a GPU."""
        profile = ["--profile", "gpu" if launch else "cpu", "--ro", str(self.cache)]
        return self.warm(
            *profile, case=CASE.format(shared=str(self.cache) if cached else None, launch=launch)
        )

    def fill_cache(self, launch: bool) -> None:
        """What the daemon does after a first check: its sources are compiled elsewhere and put where the next
        one looks."""
        self.compile(cached=True, launch=launch)
        for name in os.listdir(self.left):
            if name.startswith("compile-"):
                with open(os.open(name, os.O_RDONLY, dir_fd=self.left)) as file:
                    entry = compiled_elsewhere(file.read())
                (self.cache / name.removeprefix("compile-")).write_text(entry)

    def warm(self, *options: str, case: str | None = None) -> float:
        scratch = self.scratch()
        if case is not None:
            Path(scratch, "case.py").write_text(case)
        words = [str(self.count), "--require", "none", *options, "--scratch", scratch]
        words += ["--ro", str(self.package)]
        words += [f"--env={name}={os.environ[name]}" for name in PASSED if name in os.environ]
        words += ["--env", f"PYTHONPATH={self.package}", "--", sys.executable]
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
        _, left, _, _ = socket.recv_fds(ours, 4096, 1)
        os.close(self.left) if self.left is not None else None
        self.left = left[0] if left else None
        for fd in (null, *fds):
            os.close(fd)
        ours.close()
        return taken

    def jailed(self, command: list[str], *options: str) -> float:
        jail = [str(self.jail), "--require", "none", *options, "--scratch", self.scratch(), "--"]
        return timed([*jail, *command])

    def cold(self) -> float:
        return self.jailed([sys.executable, "-c", "import torch, triton"])

    def empty(self, *options: str) -> float:
        return self.jailed(["/bin/true"], *options)


def compiled_elsewhere(source: str) -> str:
    program = "import json, sys; from kernel_agent import compiled; from pathlib import Path\n"
    program += "print(json.dumps(compiled.run({'source': sys.stdin.read()}, Path('.'))))"
    environment = {**os.environ, "PYTHONPATH": str(SANDBOX)}
    return subprocess.check_output([sys.executable, "-c", program], input=source, env=environment, text=True)


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


def machine() -> dict[str, object]:
    made = bounded.machine() | {"load_before": round(os.getloadavg()[0], 1)}
    for name in ("torch", "triton"):
        made[name] = next((found.version for found in distributions(name=name)), "none")
    return made


def compiling(bench: Bench, count: int) -> dict[str, object]:
    bench.fill_cache(launch=False)
    anew, cached = partial(bench.compile, cached=False), partial(bench.compile, cached=True)
    found: dict[str, object] = dict(in_turns(count, compile_anew=anew, compile_cached=cached))
    if not os.path.exists("/dev/nvidiactl"):
        return found | dict.fromkeys(("launch_anew", "launch_cached"), "not measured: no GPU")
    bench.fill_cache(launch=True)
    anew, cached = partial(anew, launch=True), partial(cached, launch=True)
    return found | in_turns(count, launch_anew=anew, launch_cached=cached)


def measure(bench: Bench, cold: int, warm: int, compiles: int) -> dict[str, object]:
    imports = [sys.executable, "-c", "import torch, triton"]
    result: dict[str, object] = {"machine": machine()}
    result |= in_turns(cold, bare=lambda: timed(imports), cold=bench.cold)
    result["zygote_start_ms"] = round(bench.start_zygote(), 1)
    try:
        bench.warm()
        result |= in_turns(
            warm,
            warm=bench.warm,
            warm_without_layers=partial(bench.warm, "--without", LAYERS),
            warm_without_network_namespace=partial(bench.warm, "--without", "net"),
        )
        result |= compiling(bench, compiles)
    finally:
        bench.stop()
    bare = partial(bench.empty, "--without", "all")
    result |= in_turns(warm, jail_of_nothing=bench.empty, jail_without_layers=bare)
    return result | ratios(result)


def ratios(result: dict[str, object]) -> dict[str, float]:
    def of(name: str, key: str) -> float:
        entry = result[name]
        assert isinstance(entry, dict)
        return entry[key]

    return {
        "cold_over_warm_p50": round(of("cold", "p50_ms") / of("warm", "p50_ms"), 1),
        "cold_over_warm_p99": round(of("cold", "p99_ms") / of("warm", "p99_ms"), 1),
        "compile_anew_over_cached_p50": round(
            of("compile_anew", "p50_ms") / of("compile_cached", "p50_ms"), 1
        ),
        "layers_ms_p50": round(of("warm", "p50_ms") - of("warm_without_layers", "p50_ms"), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jail", type=Path, default=ROOT / "build" / "ka-jail")
    parser.add_argument("--cold", type=int, default=5, help="cold starts")
    parser.add_argument("--warm", type=int, default=100, help="warm starts")
    parser.add_argument("--compiles", type=int, default=10, help="kernels compiled, and found compiled")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ka-bench-") as folder:
        bench = Bench(options.jail.resolve(), Path(folder))
        result = measure(bench, options.cold, options.warm, options.compiles)
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    for name, value in result.items():
        if isinstance(value, dict) and "p50_ms" in value:
            print(f"{name:32} p50 {value['p50_ms']:9.2f} ms   p99 {value['p99_ms']:9.2f} ms   n {value['n']}")
        else:
            print(f"{name:32} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
