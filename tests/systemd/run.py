#!/usr/bin/env python3
"""scripts/kernel-agent.service under a systemd of its own: one that systemd-nspawn boots over a copy-on-write
view of this machine, with a network that reaches nothing. `make install` puts the program there.

    run.py --build build [--seconds 600] [--out F.json]

Where that is not possible (no systemd-nspawn, not root, no overlay file system) it says so, and its exit code
is 0. Else 0 where everything in `driver.py` held.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("systemd-nspawn", "systemd-analyze", "systemd-sysusers")
PRIVATE = "KA_SYSTEMD_PRIVATE"  # set in the process that has mounts of its own

TARGET = """[Unit]
Description=kernel-agent, and what looks at it
Requires=basic.target
After=basic.target
AllowIsolate=yes
"""

DRIVER = """[Unit]
DefaultDependencies=no
After=basic.target
OnSuccess=poweroff.target
OnFailure=poweroff.target

[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/usr/bin/python3 {driver} /ka-test
"""

# Sooner than the unit's own, to be seen within a test. Everything else is as it is installed.
DROP_IN = """[Service]
WatchdogSec=6
RestartSec=1
"""


def why_not() -> str | None:
    """Why it cannot be tried here."""
    missing = [name for name in NEEDS if not shutil.which(name)]
    if missing:
        return f"{missing[0]} is not installed (apt-get install systemd systemd-container)"
    if os.geteuid() != 0:
        return "only root may boot a container"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "this kernel has no overlay file system"
    return None


def call(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)


def view(folder: Path) -> Path:
    """A root like this machine's, whose changes are in memory and go with our mounts."""
    changes, merged = folder / "changes", folder / "root"
    changes.mkdir()
    merged.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", changes)
    for name in ("upper", "work"):
        (changes / name).mkdir()
    layers = f"lowerdir=/,upperdir={changes}/upper,workdir={changes}/work"
    call("mount", "-t", "overlay", "overlay", "-o", layers, merged)
    return merged


def let_through(root: Path, python: Path) -> None:
    """The service's user may find this interpreter, wherever its owner has it: in our view alone."""
    for path in (python, python.resolve()):
        for above in path.parents:
            here = root / above.relative_to("/")
            if not here.is_symlink():
                here.chmod(here.stat().st_mode | 0o011)


def furnish(root: Path, build: Path) -> None:
    """The program as `make install` leaves it, its configuration, and what looks at it."""
    shutil.rmtree(root / "usr/local/share/kernel-agent", ignore_errors=True)
    call("make", "-C", ROOT, "install", f"DESTDIR={root}", "PREFIX=/usr/local", f"BUILD={build}")
    call("systemd-sysusers", f"--root={root}", root / "usr/local/lib/sysusers.d/kernel-agent.conf")
    units = root / "etc/systemd/system"
    (units / "kernel-agent.service.d").mkdir(parents=True, exist_ok=True)
    (units / "kernel-agent.service.d/test.conf").write_text(DROP_IN)
    (units / "ka-test.target").write_text(TARGET + "Wants=ka-test.service\n")
    (units / "ka-test.service").write_text(DRIVER.format(driver="/ka-test/driver.py"))
    config = root / "etc/kernel-agent/config"
    config.parent.mkdir(exist_ok=True)
    python = (ROOT / ".venv/bin/python").absolute()
    let_through(root, python)
    config.write_text(f'jobs = 1\nno_optimise = true\npython = "{python}"\n')
    (root / "ka-test").mkdir()
    shutil.copy(Path(__file__).with_name("driver.py"), root / "ka-test/driver.py")
    shutil.copy(ROOT / "examples/softmax.py", root / "ka-test/softmax.py")
    call("chmod", "-R", "a+rX", root / "ka-test")


def boot(root: Path, seconds: float) -> str:
    """What its console said. Its end is the driver's."""
    command = ["systemd-nspawn", "-D", str(root), "--boot", "--quiet", "--register=no", "--keep-unit"]
    command += ["--private-network", "--machine=ka-test", "systemd.unit=ka-test.target"]
    # Its own filter, which a machine's systemd has not; and control groups that units may be given.
    env = {**os.environ, "SYSTEMD_SECCOMP": "0", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        return f"{(late.stdout or b'').decode(errors='replace')}\nnot within {seconds:.0f} s"
    return done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")


def inside(build: Path, seconds: float, out: Path | None) -> int:
    with tempfile.TemporaryDirectory(prefix="ka-systemd-") as name:
        folder = Path(name)
        root = view(folder)
        try:
            furnish(root, build)
            console = boot(root, seconds)
            found = root / "ka-test/found.json"
            if not found.exists():
                print(console, file=sys.stderr)
                print("systemd: the driver left nothing", file=sys.stderr)
                return 1
            result = json.loads(found.read_text())
        finally:
            for place in (root, folder / "changes"):
                subprocess.run(["umount", str(place)], check=False)
    for name, one in result["checks"].items():
        print(f"{'ok' if one['ok'] else 'WRONG'}  {name}: {one['found']}")
    if out:
        out.write_text(json.dumps({"checks": result["checks"]}, indent=1) + "\n")
    wrong = sum(not one["ok"] for one in result["checks"].values())
    if wrong:
        print(result["journal"], file=sys.stderr)
    print(f"systemd: {len(result['checks'])} checks, {wrong} wrong")
    return 1 if wrong or not result["complete"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if reason := why_not():
        print(f"systemd: skipped: {reason}")
        return 0
    if not os.environ.get(PRIVATE):
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        return subprocess.run(command, env={**os.environ, PRIVATE: "1"}, check=False).returncode
    return inside(args.build.resolve(), args.seconds, args.out)


if __name__ == "__main__":
    sys.exit(main())
