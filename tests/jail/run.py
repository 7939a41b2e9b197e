"""The escape suite: `python tests/jail/run.py [--jail build/ka-jail] [NAME...]`.

Every attempt of attempts_*.py runs twice: below all layers, where it must be refused, and as a control
without the layers that stop it, where it must succeed; a control that fails proves nothing about the jail and
fails the suite. The layers that were really on are asserted in both. An attempt that this kernel or this user
cannot make at all, not even without a jail, is counted as not applicable, by name. Afterwards: honest work
(honest.py) that must run, what happens when layers are missing, and a thousand checks in a row that leave
nothing behind. Standard library only; no GPU is needed, one is used.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from attempts import ATTEMPTS, Attempt
from honest import HONEST, NEEDS
from warm import Zygote, warm_attempts

HERE = Path(__file__).resolve().parent
LAYERS = ("limits", "caps", "pid", "mount", "net", "landlock", "seccomp", "cgroup")
TOKEN = os.urandom(16).hex()
LIMIT_S = 120
PATIENCE_S = 10
NEED_TORCH = ("gradient_check", "triton_in_the_interpreter", "cuda", "triton_on_the_gpu")


@dataclass
class Outcome:
    text: str  # last line of the attempt
    code: int
    layers: dict[str, bool] = field(default_factory=dict)
    stderr: str = ""
    left: bool = False  # a process outlived the jail

    @property
    def escaped(self) -> bool:
        return self.text.startswith("ESCAPED") or self.left


class World:
    """What there is to attack outside: files, sockets, a process, shared memory."""

    def __init__(self, jail: Path) -> None:
        self.jail = jail
        self.base = Path(tempfile.mkdtemp(prefix="ka-escape-", dir=os.environ.get("KA_TEST_BASE")))
        self.victim, self.other = self.base / "victim", self.base / "other"
        self.scratch, self.cache = self.base / "scratch", self.base / "cache"
        self.sockets: list[socket.socket] = []
        self.context: dict[str, Any] = {
            "token": TOKEN,
            "victim": str(self.victim),
            "key": str(self.victim / "key"),
            "other": str(self.other),
            "cache": str(self.cache),
            "entry": str(self.cache / "entry"),
            "daemon": os.getpid(),
            "marker": f"ka-marker-{TOKEN[:12]}",
            "shm": f"ka-{TOKEN[:12]}",
        }
        os.environ["KA_TEST_SECRET"] = TOKEN
        self._files()
        self._listeners()
        self._peer()
        self._shared_memory()

    def _files(self) -> None:
        for folder in (self.victim, self.other, self.cache):
            folder.mkdir(mode=0o700)
        (self.victim / "key").write_text(TOKEN)
        (self.other / "result.json").write_text(TOKEN)
        (self.victim / "program").write_text("#!/bin/sh\nexit 42\n")
        (self.victim / "program").chmod(0o755)
        self.refresh()

    def refresh(self) -> None:
        """Undo what a successful control did."""
        for name in ("created", "moved", "linked", "folder", "fifo", "symlink", "remounted"):
            path = self.victim / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        (self.victim / "spare").write_text("spare")
        shutil.rmtree(self.cache)
        self.cache.mkdir(mode=0o700)
        (self.cache / "entry").write_text("good")
        (self.victim / "key").chmod(0o600)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(mode=0o700)

    def _listeners(self) -> None:
        for name, family, kind, address in (
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("unix", socket.AF_UNIX, socket.SOCK_STREAM, str(self.base / "stream")),
            ("datagram", socket.AF_UNIX, socket.SOCK_DGRAM, str(self.base / "datagram")),
            ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, f"\0ka-{TOKEN[:12]}"),
        ):
            server = socket.socket(family, kind)
            server.bind(address)
            if kind == socket.SOCK_STREAM:
                server.listen(64)
            self.sockets.append(server)
            bound = server.getsockname()
            self.context[name] = bound[1] if family == socket.AF_INET else address
        self.context["abstract"] = f"ka-{TOKEN[:12]}"

    def _peer(self) -> None:
        program = (
            "import ctypes, time\nsecret = ctypes.create_string_buffer(64)\n"
            "print(ctypes.addressof(secret), flush=True)\ntime.sleep(3600)\n"
        )
        self.peer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert self.peer.stdout
        self.context["peer"] = self.peer.pid
        self.context["peer_address"] = int(self.peer.stdout.readline())

    def _shared_memory(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.context["sysv"] = key = int.from_bytes(os.urandom(3), "little") + 1
        self.sysv = self.libc.shmget(key, 4096, 0o1600)
        Path("/dev/shm", self.context["shm"]).write_text(TOKEN)

    def close(self) -> None:
        self.peer.kill()
        self.peer.wait()
        for server in self.sockets:
            server.close()
        self.libc.shmctl(self.sysv, 0, None)
        Path("/dev/shm", self.context["shm"]).unlink()
        shutil.rmtree(self.base)

    # ---- one run ----

    def run(
        self, script: str, arguments: list[str], options: list[str], after: str = "", control: bool = False
    ) -> Outcome:
        self.refresh()
        read_end, write_end = os.pipe()
        secret = os.open(self.context["key"], os.O_RDONLY)
        os.set_inheritable(secret, True)
        command = [
            str(self.jail),
            "--scratch",
            str(self.scratch),
            "--result-fd",
            str(write_end),
            "--ro",
            str(HERE),
            "--ro",
            str(self.cache),
        ]
        command += [*options, "--", sys.executable, str(HERE / script), *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(write_end, secret)
        )
        os.close(write_end)
        os.close(secret)
        outcome = self._finish(process, after)
        with os.fdopen(read_end) as report:
            line = report.readline()
        outcome.layers = json.loads(line)["layers"] if line else {}
        outcome.left = self.is_hurt(after, control)
        return outcome

    def bare(self, name: str) -> Outcome:
        """The attempt with no jail at all."""
        self.refresh()
        secret = os.open(self.context["key"], os.O_RDONLY)
        os.set_inheritable(secret, True)
        process = subprocess.Popen(
            [sys.executable, str(HERE / "attempts.py"), name, json.dumps(self.context)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.scratch,
            pass_fds=(secret,),
        )
        os.close(secret)
        return self._finish(process, "")

    def _finish(self, process: subprocess.Popen[str], after: str) -> Outcome:
        if after == "killed":
            assert process.stdout
            process.stdout.readline()
            process.kill()
            process.wait()
            return Outcome("REFUSED killed", process.returncode)
        if after == "process":  # what it leaves behind holds the pipes
            return Outcome("REFUSED ended", process.wait(LIMIT_S))
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        lines = [line for line in out.splitlines() if line.strip()]
        return Outcome(lines[-1] if lines else "", process.returncode, stderr=err)

    def is_hurt(self, after: str, control: bool) -> bool:
        """What an attempt is after, besides what it says: a process that is left, or a peer that is not.

        Dying takes a while on a busy machine: what should be dead is given time to die, and in a control what
        should be alive the time to die of its own."""
        if after == "peer":
            return self._peer_died(PATIENCE_S if control else 1)
        if not after:
            return False
        if control:
            time.sleep(1)
        return self.has_survivors(0 if control else PATIENCE_S)

    def _peer_died(self, patience: float) -> bool:
        try:
            self.peer.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            return False
        self._peer()
        return True

    def has_survivors(self, patience: float) -> bool:
        """Processes with our marker that are left after a while; ended here, by number."""
        deadline = time.monotonic() + patience
        while (found := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)

    def _marked(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.context["marker"].encode() in (
                    entry / "cmdline"
                ).read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


# ---- the suite ----


@dataclass
class Tally:
    escapes: list[str] = field(default_factory=list)
    weak: list[str] = field(default_factory=list)  # controls that did not escape
    absent: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seen: Counter = field(default_factory=Counter)

    def check(self, good: bool, what: str) -> None:
        self.seen["checks"] += 1
        if not good:
            self.failures.append(what)
            print(f"  FAILED   {what}")


def machine_layers(world: World) -> dict[str, bool]:
    outcome = world.run("honest.py", ["name_a_thread"], ["--require", "none"])
    if outcome.text != "WORKED":
        raise SystemExit(f"the jail does not start here: {outcome}")
    return outcome.layers


def options_without(layers: str) -> list[str]:
    return ["--require", "none", "--without", layers]


def can_be_stopped(attempt: Attempt, given: dict[str, bool]) -> bool:
    return attempt.stopped_by == "jail" or any(given[layer] for layer in attempt.stopped_by.split("+"))


def attempt_once(world: World, name: str, attempt: Attempt, given: dict[str, bool], tally: Tally) -> None:
    arguments = [name, json.dumps(world.context)]
    needed = [] if attempt.stopped_by == "jail" else attempt.stopped_by.split("+")
    if not can_be_stopped(attempt, given):
        tally.absent.append(f"{name} (no {attempt.stopped_by} here)")
        return
    full = world.run("attempts.py", arguments, ["--require", "none", *attempt.options], attempt.after)
    tally.seen["attempts"] += 1
    if full.layers != given:
        tally.failures.append(f"{name}: layers {full.layers}")
    if full.escaped:
        tally.escapes.append(name)
        print(f"  ESCAPED  {name}")
        return
    if not needed:
        control = world.bare(name)
    else:
        options = [*options_without(attempt.stopped_by), *attempt.options]
        control = world.run("attempts.py", arguments, options, attempt.after, control=True)
        wanted = {layer: given[layer] and layer not in needed for layer in LAYERS}
        if control.layers and control.layers != wanted:
            tally.failures.append(f"{name}: control ran with {control.layers}")
    if control.escaped:
        tally.seen["controls"] += 1
    elif control.text.startswith("UNAVAILABLE"):
        tally.absent.append(f"{name} ({control.text})")
    elif attempt.root and not world.bare(name).escaped:  # a container's root, or no root
        tally.absent.append(f"{name} (refused here without a jail too)")
    else:
        tally.weak.append(name)
        print(f"  WEAK     {name}: the control was refused too: {control.text} {control.stderr[-300:]}")


def honest_work(world: World, given: dict[str, bool], tally: Tally) -> None:
    gpu = os.path.exists("/dev/nvidiactl")
    for function in HONEST:
        name = function.__name__
        if name in NEED_TORCH and not _has_torch():
            tally.absent.append(f"honest {name} (no torch)")
            continue
        if name in NEEDS and not given[NEEDS[name]]:
            tally.absent.append(f"honest {name} (no {NEEDS[name]} here)")
            continue
        outcome = world.run("honest.py", [name], ["--profile", "gpu" if gpu else "cpu", "--nproc", "4096"])
        tally.check(outcome.text == "WORKED", f"honest {name}: {outcome.text} {outcome.stderr[-500:]}")


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def below_a_zygote(world: World, given: dict[str, bool], tally: Tally) -> None:
    """Every attempt again, in a child of a zygote; and what only such a child could try."""
    if not _has_torch() or not world.jail.with_name("libka_jail.so").exists() or not given["pid"]:
        tally.absent.append("everything below a zygote (it needs torch, libka_jail.so and pid namespaces)")
        return
    with Zygote(world) as zygote:
        for name, attempt in ATTEMPTS.items():
            if not can_be_stopped(attempt, given):
                continue
            outcome = zygote.run(name, list(attempt.options), attempt.after)
            tally.seen["attempts"] += 1
            tally.check(
                not outcome.layers or outcome.layers == given, f"zygote, {name}: layers {outcome.layers}"
            )
            if outcome.escaped:
                tally.escapes.append(f"zygote, {name}")
                print(f"  ESCAPED  below a zygote: {name}")
        warm_attempts(zygote, tally)


def gpu_profile(world: World, given: dict[str, bool], tally: Tally) -> None:
    """The profile for a GPU opens sockets and parts of /proc: what must stay closed all the same."""
    names = (
        "unix_path",
        "unix_abstract",
        "unix_datagram",
        "unix_datagram_of_a_pair",
        "tcp",
        "tcp_listen",
        "udp",
    )
    names += ("vsock", "netlink", "open_a_kernel_setting", "read_a_key", "write_a_file", "call_accept")
    names += ("open_the_memory_of_the_init", "watch_a_folder", "cache_plant_an_entry", "cache_lease_an_entry")
    for name in names:
        outcome = world.run("attempts.py", [name, json.dumps(world.context)], ["--profile", "gpu"])
        tally.check(outcome.code == 0 and not outcome.escaped, f"gpu profile: {name}: {outcome.text}")
    local_sockets(world, given, tally)


def local_sockets(world: World, given: dict[str, bool], tally: Tally) -> None:
    """A tool may connect to what it watches, inside. Outwards nothing is open, and without a network of its
    own nothing at all."""
    options = ["--profile", "gpu", "--local-sockets"]
    for name in ("unix_abstract", "unix_datagram", "tcp", "tcp_listen", "udp", "vsock", "netlink"):
        outcome = world.run("attempts.py", [name, json.dumps(world.context)], options)
        tally.check(outcome.code == 0 and not outcome.escaped, f"local sockets: {name}: {outcome.text}")
    if not given["net"] or not given["mount"]:
        tally.absent.append("honest talk_over_a_socket (no own network and mounts)")
        return
    outcome = world.run("honest.py", ["talk_over_a_socket"], options)
    tally.check(outcome.text == "WORKED", f"local sockets: talk_over_a_socket: {outcome.stderr[-500:]}")
    for without in ("net", "mount"):
        outcome = world.run(
            "honest.py", ["talk_over_a_socket"], [*options, "--require", "none", "--without", without]
        )
        tally.check(outcome.text != "WORKED", f"local sockets open without the layer {without}")


def degraded(world: World, given: dict[str, bool], tally: Tally) -> None:
    """Fewer layers: still safe where it can be, and refused where it cannot."""
    context = json.dumps(world.context)
    no_namespaces = "pid+mount+net"
    for name in (
        "read_a_key",
        "write_a_file",
        "change_a_mode",
        "tcp",
        "daemon_by_double_fork",
        "outlive_the_supervisor",
    ):
        outcome = world.run(
            "attempts.py", [name, context], ["--without", no_namespaces], ATTEMPTS[name].after
        )
        tally.check(not outcome.escaped, f"without namespaces: {name} escaped")
    for name in ("write_a_file", "change_a_mode", "tcp", "kill_a_peer", "read_a_key", "read_the_shadow_file"):
        outcome = world.run("attempts.py", [name, context], ["--without", "landlock"])
        tally.check(not outcome.escaped, f"without Landlock: {name} escaped")
    for missing in ("seccomp", "limits", "caps", "landlock+mount"):
        outcome = world.run("honest.py", ["name_a_thread"], ["--without", missing])
        tally.check(outcome.code == 112 and outcome.text == "", f"without {missing} something ran: {outcome}")
    for layer in LAYERS:
        outcome = world.run("honest.py", ["name_a_thread"], ["--without", layer, "--require", layer])
        tally.check(
            outcome.code == 112 and outcome.text == "", f"--require {layer} let something run: {outcome}"
        )
    outcome = world.run("honest.py", ["name_a_thread"], ["--require", "full"])
    full = all(given[layer] for layer in LAYERS if layer != "cgroup")
    tally.check((outcome.code == 0) == full, f"--require full: {outcome}")


def nothing_left(world: World, tally: Tally, count: int) -> None:
    """Processes, files, mounts and control groups after many checks, some of them killed at a random
    moment."""
    started: set[str] = set()  # others on this machine have jails too
    older = _groups()  # what somebody killed before may bear a number that comes again
    before = _census(world, started, older)
    for i in range(count):
        world.refresh()
        process = subprocess.Popen(
            [
                str(world.jail),
                "--scratch",
                str(world.scratch),
                "--",
                "/bin/sh",
                "-c",
                "echo x > f; sleep 0 & exit 3",
            ],
            stderr=subprocess.DEVNULL,
        )
        started.add(str(process.pid))
        if i % 4 == 3:
            time.sleep((i % 40) / 2000)
            process.kill()
            process.wait()
        else:
            tally.check(process.wait() == 3, f"check {i} ended with {process.returncode}")
    deadline = time.monotonic() + PATIENCE_S
    _sweep(world)
    while (after := _census(world, started, older)) != before and time.monotonic() < deadline:
        time.sleep(0.05)
        _sweep(world)  # a group whose processes were still dying refused the last one
    tally.check(after == before, f"{count} checks left {after} where there was {before}")


def _sweep(world: World) -> None:
    """Any jail removes the groups of those that are gone."""
    world.refresh()
    subprocess.run([str(world.jail), "--scratch", str(world.scratch), "--", "/bin/true"], check=True)


def _groups() -> set[Path]:
    return set(Path("/sys/fs/cgroup").rglob("kernel-agent-*"))


def _census(world: World, started: set[str], older: set[Path]) -> dict[str, Any]:
    groups = sum(path.name.split("-")[2] in started for path in _groups() - older)
    processes = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            processes += (
                entry.name.isdigit() and str(world.scratch).encode() in (entry / "cmdline").read_bytes()
            )
    files = sorted(str(path) for path in world.base.rglob("*") if not stat.S_ISSOCK(path.lstat().st_mode))
    mounts = Path("/proc/self/mountinfo").read_text().count(str(world.base))
    return {
        "groups": groups,
        "processes": processes,
        "files": files,
        "mounts": mounts,
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jail", type=Path, default=HERE.parents[1] / "build" / "ka-jail")
    parser.add_argument("--checks", type=int, default=1000, help="checks in a row at the end")
    parser.add_argument("names", nargs="*", help="only these attempts")
    options = parser.parse_args()
    tally, world = Tally(), World(options.jail.resolve())
    try:
        given = machine_layers(world)
        print("layers here: " + " ".join(layer if on else f"no-{layer}" for layer, on in given.items()))
        for name in options.names or ATTEMPTS:
            attempt_once(world, name, ATTEMPTS[name], given, tally)
        if not options.names:
            below_a_zygote(world, given, tally)
            honest_work(world, given, tally)
            gpu_profile(world, given, tally)
            degraded(world, given, tally)
            nothing_left(world, tally, options.checks)
    finally:
        world.close()
    for name in tally.absent:
        print(f"  absent   {name}")
    print(
        f"{tally.seen['attempts']} attempts, {len(tally.escapes)} escapes, {tally.seen['controls']} "
        "controls escaped, "
        f"{len(tally.weak)} did not, {len(tally.absent)} not applicable here; "
        f"{tally.seen['checks']} other checks, {len(tally.failures)} failed"
    )
    for failure in tally.failures:
        print(f"  {failure}")
    return 1 if tally.escapes or tally.weak or tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
