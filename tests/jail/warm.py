"""The same attempts in children of a zygote, and those that only such a child can make. Used by run.py.

The zygote is the real one (kernel_agent/zygote.py) with a child module that runs one attempt.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from run import Outcome, Tally, World

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "sandbox" / "kernel_agent"
LIMIT_S = 120

CHILD = """
import json, sys
def main(argv):
    sys.path.insert(0, {here!r})
    request = json.load(open("request.json"))
    if request["code"]:
        exec(request["code"], {{}})
        return 0
    import attempts
    sys.argv = ["attempts.py", request["name"], json.dumps(request["context"])]
    return attempts.main()
"""


class Zygote:
    def __init__(self, world: World) -> None:
        self.world = world
        self.count = 0
        package = world.base / "package"
        (package / "kernel_agent").mkdir(parents=True)
        (package / "kernel_agent" / "__init__.py").touch()
        (package / "kernel_agent" / "child.py").write_text(CHILD.format(here=str(HERE)))
        shutil.copy(PACKAGE / "zygote.py", package / "kernel_agent")
        self.package = package

    def __enter__(self) -> Self:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        jail, fd = self.world.jail, str(theirs.fileno())
        command = [jail, "--zygote", "--scratch", self.world.base, "--mem-mb", "450", "--scratch-mb", "64"]
        command += ["--nproc", "64", "--result-fd", fd, "--env", f"PYTHONPATH={self.package}", "--"]
        command += [sys.executable, "-m", "kernel_agent.zygote", fd, jail.with_name("libka_jail.so")]
        self.process = subprocess.Popen([str(part) for part in command], pass_fds=(theirs.fileno(),))
        theirs.close()
        self.channel.settimeout(LIMIT_S)
        assert self.channel.recv(1000) == b"ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()
        self.process.wait()
        shutil.rmtree(self.package)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, name: str, options: list[str], after: str = "", code: str = "") -> Outcome:
        from run import Outcome

        world = self.world
        world.refresh()
        request = {"name": name, "context": world.context, "code": code}
        (world.scratch / "request.json").write_text(json.dumps(request))
        self.count += 1
        words = [str(self.count), "--require", "none", "--scratch", str(world.scratch), "--ro", str(HERE)]
        words += ["--ro", str(self.package), "--ro", str(world.cache), *options, "--", sys.executable]
        out, err = os.pipe(), os.pipe()
        ours, theirs = socket.socketpair()
        socket.send_fds(
            self.channel, [b"\0".join(word.encode() for word in words)], [out[1], err[1], theirs.fileno()]
        )
        for fd in (out[1], err[1]):
            os.close(fd)
        theirs.close()
        text, fds, _, _ = socket.recv_fds(self.channel, 1000, 1)
        if not text.startswith(b"started"):
            raise RuntimeError(f"zygote: {text!r}")
        output = self._wait(fds[0], out[0], after)
        ended = self.channel.recv(1000).decode().split()
        report, scratch, _, _ = socket.recv_fds(ours, 4096, 1)
        for fd in (*fds, *scratch, err[0]):
            os.close(fd)
        ours.close()
        lines = [line for line in output.splitlines() if line.strip()]
        layers = json.loads(report)["layers"] if report else {}
        return Outcome(
            lines[-1] if lines else "",
            int(ended[2]),
            layers,
            left=world.is_hurt(after, control=False),
        )

    def _wait(self, pidfd: int, out: int, after: str) -> str:
        """Read what it prints until it ends, or kill it at the line READY or at the limit."""
        text = b""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            ready, _, _ = select.select([out], [], [], 1)
            if ready:
                part = os.read(out, 65536)
                text += part
                if not part or (after == "killed" and b"READY" in text):
                    break
        if after == "killed" or time.monotonic() >= deadline:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            text = b"REFUSED killed"
        os.close(out)
        return text.decode(errors="replace")


POISON = (
    "import builtins, json, os; builtins.poison = 1; json.loads = None; os.environ['POISON'] = '1'; "
    "print('DONE')"
)
SEE_POISON = (
    "import builtins, json, os\n"
    "print('ESCAPED' if hasattr(builtins, 'poison') or json.loads is None or 'POISON' in os.environ else "
    "'CLEAN')"
)
SOCKETS = (
    "import os, socket\n"
    "found = []\n"
    "for fd in range(3, 1024):\n"
    "    try:\n"
    "        s = socket.socket(fileno=fd)\n"
    "        found.append(fd)\n"
    "        s.send(b'ended 1 0')\n"
    "    except OSError:\n"
    "        pass\n"
    "print('ESCAPED' if found else 'CLEAN')"
)
DESCRIPTORS = (
    "import os\nopen_ = [f for f in os.listdir('/proc/self/fd') if int(f) > 2]\n"
    "print('CLEAN' if len(open_) == 1 else f'ESCAPED {open_}')"  # the one that lists
)
DRAW = "import random, torch, numpy; print(random.random(), torch.rand(1).item(), numpy.random.rand())"
PARENT = "import os\nprint('CLEAN' if os.getppid() == 0 and os.getpid() == 1 else 'ESCAPED')"
ABORT = "import os; os.abort()"
SECRET = (
    "import os\n"
    "parts = ({first!r}, {second!r})\n"
    "with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:\n"
    "    for line in list(maps):\n"
    "        if '[heap]' in line or '[stack]' in line:\n"
    "            low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
    "            memory.seek(low)\n"
    "            data = memory.read(high - low)\n"
    "            if b'KA_TEST_SECRET=' + parts[0].encode() + parts[1].encode() in data:\n"
    "                print('ESCAPED')\n"
    "                break\n"
    "    else:\n"
    "        print('CLEAN')\n"
)


def warm_attempts(zygote: Zygote, tally: Tally) -> None:
    def code(text: str) -> Any:
        return zygote.run("", [], code=text)

    token = zygote.world.context["token"]
    tally.check(code(POISON).text == "DONE", "zygote: the poison ran")
    cases = {
        "poison of an earlier check": SEE_POISON,
        "the control socket": SOCKETS,
        "a descriptor that was left open": DESCRIPTORS,
        "the zygote as a parent": PARENT,
        "a secret of the daemon in the heap": SECRET.format(first=token[:16], second=token[16:]),
    }
    for what, text in cases.items():
        outcome = code(text)
        tally.seen["attempts"] += 1
        tally.check(outcome.text == "CLEAN", f"zygote: {what}: {outcome.text}")
        if outcome.escaped:
            tally.escapes.append(f"zygote, {what}")
    drawn = {code(DRAW).text for _ in range(3)}
    tally.check(len(drawn) == 3, f"zygote: children draw the same numbers: {drawn}")
    tally.check(code(ABORT).code == 134 << 8, "zygote: abort() ends the first process of a namespace")
    tally.check(zygote.alive, "zygote: still alive after everything")
    before = len(os.listdir(f"/proc/{zygote.process.pid}/fd")) if os.geteuid() == 0 else 0
    for _ in range(100):
        code("pass")
    after = len(os.listdir(f"/proc/{zygote.process.pid}/fd")) if os.geteuid() == 0 else 0
    tally.check(before == after, f"zygote: {after - before} descriptors leaked in 100 checks")
