"""Attempts to take all of a resource, to stay behind, and to reach other processes."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from registry import attempt, libc, permitted, reads, syscall, x86

# ---- resources ----

MB = 1 << 20
SMALL = ("--mem-mb", "256", "--scratch-mb", "64", "--nproc", "64", "--fsize-mb", "32")


def fill(area: mmap.mmap, size: int) -> bool:
    for at in range(0, size, 4096):
        area[at] = 1
    return True


@attempt("limits+cgroup", options=SMALL)
def memory_private(c):
    return fill(mmap.mmap(-1, 600 * MB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 600 * MB)


@attempt("limits+cgroup", options=SMALL)
def memory_of_the_heap(c):
    return len(bytearray(b"x") * (600 * MB)) == 600 * MB


@attempt("cgroup", options=SMALL)
def memory_shared(c):
    return fill(mmap.mmap(-1, 600 * MB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS), 600 * MB)


@attempt("cgroup+limits", options=SMALL)
def memory_of_a_memfd(c):
    fd = os.memfd_create("bomb")
    os.ftruncate(fd, 600 * MB)
    return fill(mmap.mmap(fd, 600 * MB), 600 * MB)


@attempt("cgroup", options=SMALL)
def memory_summed_over_the_tree(c):
    ready, go = os.pipe(), os.pipe()
    for _ in range(4):
        if os.fork() == 0:
            fill(mmap.mmap(-1, 150 * MB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 150 * MB)
            os.write(ready[1], b"x")
            os.close(ready[1])
            os.read(go[0], 1)
            os._exit(0)
    os.close(ready[1])
    got = 0
    while got < 4 and os.read(ready[0], 1):
        got += 1
    os.write(go[1], b"xxxx")
    return got == 4


@attempt("cgroup+pid+limits", options=SMALL)
def forks(c):
    go = os.pipe()
    try:
        for _ in range(400):
            if os.fork() == 0:
                os.read(go[0], 1)
                os._exit(0)
    finally:
        os.close(go[1])
    return True


@attempt("cgroup+pid+limits", options=SMALL)
def threads(c):
    done = threading.Event()
    threading.stack_size(65536)
    started = []
    try:
        for _ in range(400):
            started.append(threading.Thread(target=done.wait))
            started[-1].start()
    except RuntimeError:
        return False
    finally:
        done.set()
    return True


@attempt("mount", options=SMALL)
def disk(c):
    block = b"x" * MB
    for i in range(12):
        with open(f"fill{i}", "wb") as file:
            file.writelines(block for _ in range(20))
    return True


@attempt("mount")
def inodes(c):
    for i in range(66000):
        os.close(os.open(f"n{i}", os.O_CREAT | os.O_WRONLY))
    return True


@attempt("limits+mount+cgroup", options=SMALL)
def one_huge_file(c):
    with open("huge", "wb") as file:
        file.writelines(b"x" * MB for _ in range(40))
    return True


@attempt("limits")
def descriptors(c):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept = [os.dup(0) for _ in range(2000)]
    return len(kept) == 2000


@attempt("limits", options=("--cpu-s", "1"))
def processor_time(c):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    end = time.process_time() + 3
    while time.process_time() < end:
        pass
    return True


@attempt("limits")
def raise_a_limit_again(c):
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
    return True


# ---- lifetime: run.py looks for a process that is left ----


def leave_behind(c: dict[str, Any], prepare: Callable[[], Any]) -> None:
    """Fork a process that sleeps under the marker's name. Returns once it runs, or died: a pipe closes on its
    exec."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        prepare()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(20)", c["marker"]])
    os.close(write_end)
    os.read(read_end, 1)
    os.close(read_end)


@attempt("pid+seccomp", after="process")
def daemon_by_double_fork(c):
    if os.fork() == 0:
        os.setsid()
        leave_behind(c, lambda: None)
        os._exit(0)
    os.wait()
    return False


@attempt("pid+seccomp", after="process")
def process_in_another_group(c):
    leave_behind(c, lambda: os.setpgid(0, 0))
    return False


def orphan() -> None:
    if permitted(os.setsid):
        libc.prctl(1, 0, 0, 0, 0)


@attempt("pid+seccomp", after="killed")
def outlive_the_supervisor(c):
    libc.prctl(1, 0, 0, 0, 0)
    leave_behind(c, orphan)
    print("READY", flush=True)
    time.sleep(20)
    return False


@attempt("pid+seccomp", after="killed")
def ignore_every_signal(c):
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    leave_behind(c, orphan)
    print("READY", flush=True)
    time.sleep(20)
    return False


# ---- peers: a process of the same user outside ----


@attempt("pid+landlock")
def kill_a_peer(c):
    os.kill(c["peer"], 0)
    return True


@attempt("pid+landlock")
def tgkill_a_peer(c):
    syscall(x86(234), c["peer"], c["peer"], 0)
    return True


@attempt("pid+landlock")
def pidfd_signal_a_peer(c):
    signal.pidfd_send_signal(os.pidfd_open(c["peer"]), 0)
    return True


@attempt("pid+landlock", after="peer")
def kill_a_peer_as_the_owner_of_a_file(c):
    """A pipe that becomes readable sends a signal of our choice to its owner."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(read_end, fcntl.F_SETOWN, c["peer"])
    fcntl.fcntl(read_end, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_ASYNC)
    os.write(write_end, b"x")
    return False


@attempt("pid+caps+seccomp")
def slow_a_peer_down(c):
    now = os.getpriority(os.PRIO_PROCESS, c["peer"])
    os.setpriority(os.PRIO_PROCESS, c["peer"], min(now + 1, 19))
    return True


@attempt("pid+caps+seccomp")
def pin_a_peer(c):
    os.sched_setaffinity(c["peer"], os.sched_getaffinity(0))
    return True


@attempt("pid+seccomp")
def limit_a_peer(c):
    resource.prlimit(c["peer"], resource.RLIMIT_CORE)
    return True


@attempt("pid+seccomp+landlock+caps+net+mount")
def trace_a_peer(c):
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(0x4206, c["peer"], 0, 0) != 0:  # seize
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return True


@attempt("pid+seccomp+landlock+caps+net+mount")
def read_the_memory_of_a_peer(c):
    buffer = ctypes.create_string_buffer(8)
    local = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(buffer), 8), 16)
    remote = ctypes.create_string_buffer(struct.pack("QQ", c["peer_address"], 8), 16)
    return syscall(x86(310), c["peer"], local, 1, remote, 1, 0) == 8


@attempt("pid+landlock+mount")
def see_the_command_line_of_a_peer(c):
    return bool(open(f"/proc/{c['peer']}/cmdline").read())


@attempt("mount+landlock")
def read_shared_memory_of_a_peer(c):
    return reads("/dev/shm/" + c["shm"], c)


@attempt("mount+seccomp")
def attach_system_v_memory_of_a_peer(c):
    return syscall(x86(29), c["sysv"], 0, 0) >= 0


@attempt("landlock+mount")
def lock_a_file_of_a_peer(c):
    with open(c["key"]) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True
