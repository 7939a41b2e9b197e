"""Attempts to leave by the network or by a system call."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import struct
from typing import Any

from registry import ATTEMPTS, Attempt, Unavailable, attempt, libc, permitted, syscall, x86

# ---- network ----


@attempt("seccomp+net+landlock")
def tcp(c):
    socket.create_connection(("127.0.0.1", c["tcp"]), timeout=2).close()
    return True


@attempt("seccomp+net+landlock")
def tcp_fast_open(c):
    with socket.socket() as s:
        s.sendto(b"x", 0x20000000, ("127.0.0.1", c["tcp"]))
    return True


@attempt("seccomp+net+landlock")
def tcp_listen(c):
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        return s.getsockname()[1] > 0


@attempt("seccomp+net")
def udp(c):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        return s.sendto(c["token"].encode(), ("127.0.0.1", c["udp"])) > 0


@attempt("seccomp")
def udp_socket_alone(c):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    return True


@attempt("seccomp")
def unix_path(c):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(c["unix"])
    return True


@attempt("seccomp+net+landlock")
def unix_abstract(c):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\0" + c["abstract"])
    return True


@attempt("seccomp")
def unix_datagram(c):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        return s.sendto(b"x", c["datagram"]) == 1


@attempt("seccomp")
def unix_datagram_of_a_pair(c):
    a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return a.sendmsg([b"x"], [], 0, c["datagram"]) == 1


@attempt("seccomp")
def unix_raw_pair_is_a_datagram(c):
    a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)
    return a.sendmsg([b"x"], [], 0, c["datagram"]) == 1


def opens_family(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> bool:
    try:
        socket.socket(family, kind, protocol).close()
    except OSError as exc:
        if exc.errno in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT):
            raise Unavailable("no such family") from exc
        raise
    return True


@attempt("seccomp")
def vsock(c):
    return opens_family(40)


@attempt("seccomp")
def netlink(c):
    return opens_family(socket.AF_NETLINK, socket.SOCK_RAW)


@attempt("seccomp")
def kernel_crypto(c):
    return opens_family(38, socket.SOCK_SEQPACKET)


@attempt("seccomp+caps", root=True)
def raw_packets(c):
    return opens_family(socket.AF_PACKET, socket.SOCK_RAW)


@attempt("seccomp")
def tipc_pair(c):
    try:
        a, _ = socket.socketpair(30, socket.SOCK_SEQPACKET)
    except OSError as exc:
        if exc.errno == errno.EAFNOSUPPORT:
            raise Unavailable("no such family") from exc
        raise
    return a.fileno() >= 0


# ---- system calls ----

CLONE_NEWUSER = 0x10000000


def refused(name: str, stopped_by: str, number: int | None, *arguments: Any, **more: Any) -> None:
    def run(c: dict[str, Any]) -> bool:
        assert number is not None
        return permitted(lambda: syscall(x86(number), *arguments))

    ATTEMPTS[name] = Attempt(run, stopped_by, **more)


def zeros(size: int) -> ctypes.Array:
    return ctypes.create_string_buffer(size)


refused("call_ptrace", "seccomp", 101, 0, 0, 0, 0)
refused("call_process_vm_readv", "seccomp", 310, os.getpid(), 0, 0, 0, 0, 0)
refused("call_kcmp", "seccomp", 312, os.getpid(), os.getpid(), 0, 0, 0)
refused("call_unshare", "seccomp", 272, 0)
refused("call_setns", "seccomp", 308, -1, 0)
refused("call_keyctl", "seccomp", 250, 0, -3, 0)
refused("call_add_key", "seccomp", 248, b"user", b"ka", b"x", 1, -3)
refused("call_io_uring", "seccomp", 425, 0, zeros(256))
refused("call_io_uring_with_a_high_word", "seccomp", 425, 1 << 32, zeros(256))
refused("call_shmget", "seccomp", 29, 0, 4096, 0o1600)
refused("call_semget", "seccomp", 64, 0, 1, 0o1600)
refused("call_msgget", "seccomp", 68, 0, 0o1600)
refused("call_mq_open", "seccomp", 240, b"ka", 0, 0, 0)
refused("call_personality", "seccomp", 135, 0x0400000)
refused("call_clone3", "seccomp", 435, zeros(64), 0)
refused("call_modify_ldt", "seccomp", 154, 0, zeros(64), 64)
refused("call_accept", "seccomp", 43, -1, 0, 0)
refused("call_migrate_pages", "seccomp", 256, 0, 0, 0, 0)
refused("call_mount", "seccomp+caps", 165, b"x", b"/nowhere", b"tmpfs", 0, 0, root=True)
refused("call_fsopen", "seccomp+caps", 430, b"tmpfs", 0, root=True)
refused("call_chroot", "seccomp+caps", 161, b".", root=True)
refused("call_pivot_root", "seccomp+caps", 155, b"/nowhere", b"/nowhere", root=True)
refused("call_bpf", "seccomp+caps", 321, 0, zeros(128), 128, root=True)
refused("call_sethostname", "seccomp+caps", 170, b"ka", 2, root=True)
refused("call_swapon", "seccomp+caps", 167, b"/nowhere", 0, root=True)
refused("call_clock_settime", "seccomp+caps", 227, 0, b"\xff" * 16, root=True)
refused("call_quotactl", "seccomp", 179, 0x800001 << 8, 0, 0, 0)
refused("call_kill_everybody", "seccomp", 62, -1, 0)
refused("call_kill_everybody_with_a_high_word", "seccomp", 62, (1 << 33) | 0xFFFFFFFF, 0)
refused("call_prctl_parent_death", "seccomp", 157, 1, 0, 0, 0, 0)
refused("call_prctl_parent_death_with_a_high_word", "seccomp", 157, (1 << 32) | 1, 0, 0, 0, 0)
refused("call_seccomp", "seccomp", 317, 2, 0, zeros(8))
refused("ioctl_sti", "seccomp", 16, 0, 0x5412, b"x")
refused("ioctl_sti_with_a_high_word", "seccomp", 16, 0, (1 << 32) | 0x5412, b"x")
refused("ioctl_linux", "seccomp", 16, 0, 0x541C, b"\x02")
refused("ioctl_setd", "seccomp", 16, 0, 0x5423, zeros(4))


@attempt("seccomp")
def call_prlimit_on_init(c):
    return permitted(lambda: syscall(x86(302), os.getppid() or 1, 7, 0, zeros(16)))


def make_user_namespace(*call: Any) -> int:
    try:
        return syscall(*call)
    except OSError as exc:
        if exc.errno == errno.ENOSPC:
            raise Unavailable("no user namespaces here") from exc
        raise


@attempt("seccomp")
def clone_with_a_user_namespace(c):
    pid = make_user_namespace(x86(56), CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


@attempt("seccomp")
def clone3_with_a_user_namespace(c):
    arguments = ctypes.create_string_buffer(
        struct.pack("8Q", CLONE_NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64
    )
    pid = make_user_namespace(x86(435), arguments, 64)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def exists(number: int, *arguments: Any) -> bool:
    try:
        syscall(number, *arguments)
    except OSError as exc:
        if exc.errno == errno.ENOSYS:
            raise Unavailable("not in this kernel") from exc
        return exc.errno != errno.EPERM
    return True


@attempt("seccomp+caps", root=True)
def call_init_module(c):
    return exists(x86(175), 0, 0, b"")


@attempt("seccomp")
def call_userfaultfd(c):
    return exists(x86(323), 1)


@attempt("seccomp")
def call_memfd_secret(c):
    return exists(447, 0)


@attempt("seccomp")
def call_newer_than_the_review(c):
    return exists(462, 0, 0, 0)  # mseal of nothing


@attempt("seccomp")
def call_pidfd_getfd(c):
    return permitted(lambda: os.close(syscall(438, os.pidfd_open(os.getpid()), 0, 0)))


def run_code(code: bytes) -> int:
    area = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
    area.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(area)))()


@attempt("seccomp")
def call_by_interrupt_80(c):
    x86(0)
    value = run_code(
        bytes.fromhex("53b814000000cd805bc3")
    )  # push rbx; mov eax, 20 (getpid); int 0x80; pop; ret
    if value == -errno.ENOSYS or value & 0xFFFFFFFF == 0xFFFFFFFF - errno.ENOSYS + 1:
        raise Unavailable("no 32-bit calls in this kernel")
    return value & 0xFFFFFFFF == os.getpid()


@attempt("seccomp")
def call_x32(c):
    return exists(x86(0x40000000 | 39))


@attempt("seccomp+caps+landlock", root=True)
def undo_read_only(c):
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(32 | 4096), None) != 0:  # remount, bind: not read-only
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return True
