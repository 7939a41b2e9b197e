"""A package in which children take the CPU where they are told cuda, with a clock that counts launches."""

from __future__ import annotations

import shutil

from conftest import ROOT, Agent, copied_share

READ = 'request = json.loads((scratch / "request.json").read_text())\n'
ON_CPU = """
        if request.get("device") == "cuda":
            print(f"card {os.environ.get('CUDA_VISIBLE_DEVICES')}", file=sys.stderr)
            request["device"] = "cpu"
"""
ROUNDS = "ROUNDS_LEAST, ROUNDS_MOST = 7, 100\n"  # of a clock that always says the same


def install(agent: Agent) -> None:
    """From now on `agent` runs that package, and its locks are its own."""
    share = copied_share(agent.folder / "share")
    package = share / "sandbox" / "kernel_agent"
    shutil.copy(ROOT / "tests" / "python" / "fake_gpu.py", package / "operations" / "device_clock.py")
    bench = package / "operations" / "benchmark.py"
    assert ROUNDS in bench.read_text()
    bench.write_text(bench.read_text().replace(ROUNDS, "ROUNDS_LEAST, ROUNDS_MOST = 7, 7\n"))
    child = package / "child.py"
    child.write_text(child.read_text().replace(READ, READ + ON_CPU))
    assert ON_CPU in child.read_text()
    runtime = agent.folder / "runtime"
    runtime.mkdir(mode=0o700)
    agent.env |= {"KA_SHARE": str(share), "XDG_RUNTIME_DIR": str(runtime)}
    agent.env.pop("CUDA_VISIBLE_DEVICES", None)
