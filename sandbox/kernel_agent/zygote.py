"""Imports torch and triton once, then forks a jailed child a request: `-m kernel_agent.zygote FD LIBRARY`.

FD is a SOCK_SEQPACKET socket to the daemon, LIBRARY is libka_jail.so, which puts the layers on in the child.

    daemon -> zygote   "twin"   before all else, with a descriptor: the channel of a process like this one
                       id NUL option NUL option ... "--" NUL python   with descriptors: stdout, stderr, report
                                                                      and, where it is not empty, stdin
    zygote -> daemon   "ready"
                       "started ID PID"    with a pidfd: deadlines are the daemon's, not ours
                       "ended ID STATUS"   the wait status, once the child and all below it are gone
                       "refused ID WHY"    no child: the daemon runs this request without us

The twin is forked before any child and serves its own channel, so that imports are paid for once. What it
forks has no parent in common with what we fork but for a process that had seen no request.

The zygote executes nothing but this package, holds no secret (a fork copies heap and environment) and has one
thread, no CUDA and, its twin aside, no child that it does not wait for. It refuses work once its source files
changed or its memory grew.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import select
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

_MESSAGE_MAX = 1 << 18
_TWIN = b"twin"
_IDLE_MS = 20
_GROWTH_MAX_KB = 512 * 1024
_OWN = "kernel_agent.child"  # the first of this package
_PRELOADED = (
    "numpy", "numpy.random", "random", "tempfile", "torch", "torch.autograd",
    "torch._subclasses.schema_check_mode",  # at the first dispatch mode
    "triton", "triton.language", "triton.runtime.interpreter", _OWN, "kernel_agent.compiled",
    "kernel_agent.modes",
    "kernel_agent.operations.inspect", "kernel_agent.operations.oracle", "kernel_agent.operations.candidate",
    "kernel_agent.operations.scan", "kernel_agent.operations.facts", "kernel_agent.operations.sanitize",
    "kernel_agent.differentiate.operation",
)  # fmt: skip
# Where kernels are launched, their graphs captured and their launches looked at without memory: 490 modules,
# two seconds where an installation has none of them compiled.
_PRELOADED_ON_GPU = (
    "torch.fx.experimental.symbolic_shapes", "torch.utils._device", "kernel_agent.operations.benchmark",
)  # fmt: skip


def _sources(folder: str = str(Path(__file__).parent)) -> list[tuple[str, int]]:
    """Every source file of this package and when it was written. Asked before each fork: a scan of folders is
    a third of a walk."""
    found: list[tuple[str, int]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                found.append((entry.path, entry.stat().st_mtime_ns))
            elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                found += _sources(entry.path)
    return sorted(found)


def _resident_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def _unfit() -> str | None:
    """Why this process must not be forked: threads do not survive a fork, a CUDA context does not either."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads"
    if "/dev/nvidia" in Path("/proc/self/maps").read_text():
        return "a GPU device is mapped"
    return None


def _keep_bytecode(module: str) -> None:
    """Where nobody may write to an installation, its modules are often not compiled, and importing torch
    takes seconds longer, this package a quarter of a second. From here on they are kept in the user's cache
    then; an installation that has them is left alone."""
    folder, spec = os.environ.get("KA_BYTECODE"), importlib.util.find_spec(module)
    if folder and spec is not None and spec.cached and not os.path.exists(spec.cached):
        sys.pycache_prefix = folder
        sys.dont_write_bytecode = False


def _preload() -> None:
    """Import what children need, and what torch imports only when it is first used: in some versions its
    compiler at the first dispatch mode, a second in every child."""
    _keep_bytecode("torch")
    for name in _PRELOADED + (_PRELOADED_ON_GPU if os.environ.get("KA_GPU") else ()):
        try:
            if name == _OWN:
                _keep_bytecode(name)
            elif name == _PRELOADED_ON_GPU[0]:
                _keep_bytecode("sympy")
            importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if exc.name is None or not exc.name.startswith(("kernel_agent.", "torch._")):
                # An operation may be missing from this installation, or what is torch's own; torch may not.
                raise
    modes = sys.modules.get("kernel_agent.modes")
    if modes is not None:  # part of this installation
        torch = sys.modules["torch"]
        with modes.Idle(), torch.autograd.graph.saved_tensors_hooks(lambda held: held, lambda held: held):
            torch.ones(1)


def _warm() -> str | None:
    """Import it all, and leave it alone: why this process must not be forked, if it must not."""
    gc.disable()  # what is imported stays: looking for garbage in it takes a fifth of the start
    _preload()
    gc.freeze()  # collections in the children leave the shared pages alone
    gc.enable()
    return _unfit()


def _warm_compiler() -> None:
    """Where kernels are launched every child hashes Triton's library of 400 MB, unless its parent has."""
    with contextlib.suppress(Exception):  # only a saving, and private to Triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.cache import triton_key

        triton_key()
        make_backend(GPUTarget("cuda", 90, 32)).hash()


@dataclass
class Zygote:
    channel: socket.socket
    library: ctypes.CDLL
    children: dict[int, tuple[int, str]] = field(default_factory=dict)  # pidfd -> (pid, request id)
    sources: list[tuple[str, int]] = field(default_factory=_sources)
    resident_kb: int = field(default_factory=_resident_kb)
    asked: bool = False  # was there a request?

    def serve(self) -> None:
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        self.channel.send(b"ready")
        idle_ms = _IDLE_MS if os.path.exists("/dev/nvidiactl") else None
        while True:
            events = poller.poll(idle_ms)
            if not events:
                _warm_compiler()
                idle_ms = None
            for fd, _ in events:
                if fd != self.channel.fileno():
                    poller.unregister(fd)
                    self._reap(fd)
                    continue
                message, fds, _, _ = socket.recv_fds(self.channel, _MESSAGE_MAX, 4)
                if not message:
                    return  # the daemon is gone; our children die with us
                if message == _TWIN:
                    self._fork_twin(fds[0])
                    continue
                pidfd = self._start(message, fds)
                if pidfd is not None:
                    poller.register(pidfd, select.POLLIN)

    def _fork_twin(self, fd: int) -> None:
        """Another one of us, which lives no longer than we do. The twin never returns. Raises RuntimeError
        once there was a request: what was forked then has something in common with it."""
        if self.asked:
            raise RuntimeError("a twin is forked before the first request")
        parent = os.getpid()
        if os.fork():
            os.close(fd)
            return
        self.channel.close()
        code = self.library.ka_jail_zygote_begin()
        if code == 0 and os.getppid() == parent:
            Zygote(_channel(fd), self.library, sources=self.sources).serve()
        os._exit(1 if code else 0)

    def _start(self, message: bytes, fds: list[int]) -> int | None:
        self.asked = True
        request, *options = message.split(b"\0")
        name = request.decode("ascii")
        try:
            why = self._worn() or _unfit()
            if why or len(fds) not in (3, 4):
                self._say(f"refused {name} {why or 'descriptors are missing'}")
                return None
            return self._fork(name, options, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _worn(self) -> str | None:
        if _sources() != self.sources:
            return "source files changed"
        if _resident_kb() > self.resident_kb + _GROWTH_MAX_KB:
            return "memory grew"
        return None

    def _fork(self, name: str, options: list[bytes], fds: list[int]) -> int | None:
        code = self.library.ka_jail_zygote_unshare()
        if code:
            self._say(f"refused {name} unshare: {os.strerror(-code)}")
            return None
        try:
            pid = os.fork()  # not clone: the atfork handlers of the libraries have to run
        except OSError as exc:
            self.library.ka_jail_zygote_back()
            self._say(f"refused {name} fork: {exc.strerror}")
            return None
        if pid == 0:
            _become_child(self.library, options, fds)
        code = self.library.ka_jail_zygote_back()
        if code:
            raise OSError(-code, "cannot return to the own pid namespace")
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = (pid, name)
        self._say(f"started {name} {pid}", pidfd)
        return pidfd

    def _reap(self, pidfd: int) -> None:
        pid, name = self.children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        self._say(f"ended {name} {status}")

    def _say(self, text: str, fd: int | None = None) -> None:
        if fd is None:
            self.channel.send(text.encode())
        else:
            socket.send_fds(self.channel, [text.encode()], [fd])


def _become_child(library: ctypes.CDLL, options: list[bytes], fds: list[int]) -> None:
    """Never returns: layers first, then one request."""
    code = 114
    try:
        stdin = fds[3] if len(fds) > 3 else os.open(os.devnull, os.O_RDONLY)
        for target, fd in enumerate((stdin, fds[0], fds[1])):
            os.dup2(fd, target)
        arguments = [b"ka-jail", b"--result-fd", str(fds[2]).encode(), *options]
        argv = (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None)
        code = library.ka_jail_enter(len(arguments), argv)
        if code == 0:
            code = 1
            code = _work(library)
    except BaseException as exc:  # noqa: BLE001 (nothing may unwind into the zygote's loop)
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _work(library: ctypes.CDLL) -> int:
    _take_environment(library)
    _reseed()
    from . import child

    scratch = os.getcwd()
    sys.argv = ["kernel_agent.child", scratch]
    return child.main(sys.argv)


def _take_environment(library: ctypes.CDLL) -> None:
    import tempfile

    import torch

    os.environ.clear()
    index = 0
    while (text := library.ka_jail_env(index)) is not None:
        name, _, value = os.fsdecode(text).partition("=")
        os.environ[name] = value
        index += 1
    tempfile.tempdir = None  # found again from TMPDIR
    sys.pycache_prefix = None  # the zygote's own, which no child may reach
    sys.dont_write_bytecode = True
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))


def _reseed() -> None:
    """Children of one zygote would otherwise draw the same numbers."""
    import random

    import numpy as np
    import torch

    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch.default_generator.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)  # CUDA seeds itself


def _channel(fd: int) -> socket.socket:
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    return channel


def _load(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.ka_jail_env.restype = ctypes.c_char_p
    library.ka_jail_env.argtypes = [ctypes.c_int]
    library.ka_jail_enter.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def main(argv: list[str]) -> int:
    if len(argv) != 3:
        print("usage: python -m kernel_agent.zygote FD LIBRARY", file=sys.stderr)
        return 2
    library = _load(argv[2])
    code = library.ka_jail_zygote_begin()
    if code:
        print(f"zygote: {os.strerror(-code)}", file=sys.stderr)
        return 1
    why = _warm()
    if why:
        print(f"zygote: cannot be forked: {why}", file=sys.stderr)
        return 1
    Zygote(_channel(int(argv[1])), library).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
