"""What hostile code tries inside the jail. Each attempt is a function that returns True once it got out.

Runs as `python attempts.py NAME CONTEXT` (JSON), inside the jail or, as a control, with the layer removed that stops it. Imports
the standard library only. An OSError means that the attempt was refused; `Unavailable` that this kernel lacks the thing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Unavailable(Exception):
    """This machine has nothing to attack here."""


@dataclass(frozen=True)
class Attempt:
    run: Callable[[dict[str, Any]], bool]
    stopped_by: str  # the layers that have to be removed for it to succeed; "jail": all of it
    root: bool = False  # succeeds for root alone, where the machine lets root
    options: tuple[str, ...] = ()  # of ka-jail
    after: str = ""  # what run.py looks at afterwards: "process", "killed", "peer"


ATTEMPTS: dict[str, Attempt] = {}


def attempt(stopped_by: str, **more: Any) -> Callable[[Callable[[dict[str, Any]], bool]], Callable]:
    def register(function: Callable[[dict[str, Any]], bool]) -> Callable:
        ATTEMPTS[function.__name__] = Attempt(function, stopped_by, **more)
        return function

    return register


libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
X86 = platform.machine() == "x86_64"


def syscall(number: int, *arguments: Any) -> int:
    values = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *values)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def permitted(call: Callable[[], Any]) -> bool:
    """The call reached the kernel: it worked, or failed for another reason than being refused."""
    try:
        call()
    except OSError as exc:
        return exc.errno not in (errno.EPERM, errno.ENOSYS, errno.EACCES, errno.EAFNOSUPPORT)
    return True


def x86(number: int) -> int:
    if not X86:
        raise Unavailable("numbers are those of x86-64")
    return number


# ---- files ----


def reads(path: str, c: dict[str, Any]) -> bool:
    with open(path) as file:
        return c["token"] in file.read()


@attempt("landlock+mount")
def read_a_key(c):
    return reads(c["key"], c)


@attempt("landlock+mount")
def list_a_folder(c):
    return "key" in os.listdir(c["victim"])


@attempt("landlock+mount")
def read_through_dot_dot(c):
    return reads(os.path.join(os.getcwd(), "..", "victim", "key"), c)


@attempt("landlock+mount")
def read_through_a_link(c):
    os.symlink(c["key"], "link")
    return reads("link", c)


@attempt("landlock+mount")
def read_through_proc_root(c):
    return reads("/proc/self/root" + c["key"], c)


@attempt("landlock+mount")
def read_by_reopening_a_descriptor(c):
    fd = os.open(c["key"], os.O_PATH)
    return reads(f"/proc/self/fd/{fd}", c)


@attempt("landlock+mount")
def read_relative_to_a_descriptor(c):
    folder = os.open(c["victim"], os.O_PATH)
    return c["token"] in os.read(os.open("key", os.O_RDONLY, dir_fd=folder), 100).decode()


@attempt("landlock+mount")
def read_another_checks_scratch(c):
    return reads(os.path.join(c["other"], "result.json"), c)


@attempt("landlock+mount", root=True)
def read_the_shadow_file(c):
    return ":" in open("/etc/shadow").read()


@attempt("landlock+mount")
def execute_a_foreign_program(c):
    return os.spawnv(os.P_WAIT, os.path.join(c["victim"], "program"), ["program"]) == 42


@attempt("landlock+mount")
def write_a_file(c):
    with open(c["key"], "a") as file:
        file.write("x")
    return True


@attempt("landlock+mount")
def create_a_file(c):
    open(os.path.join(c["victim"], "created"), "x").close()
    return True


@attempt("landlock+mount")
def truncate_a_file(c):
    os.truncate(os.path.join(c["victim"], "spare"), 0)
    return True


@attempt("landlock+mount")
def rename_a_file(c):
    os.rename(os.path.join(c["victim"], "spare"), os.path.join(c["victim"], "moved"))
    return True


@attempt("landlock+mount")
def remove_a_file(c):
    os.unlink(os.path.join(c["victim"], "spare"))
    return True


@attempt("landlock+mount")
def link_a_file(c):
    os.link(c["key"], os.path.join(c["victim"], "linked"))
    return True


@attempt("landlock+mount")
def link_a_file_into_the_scratch(c):
    os.link(c["key"], "linked")
    return True


@attempt("landlock+mount")
def make_a_folder(c):
    os.mkdir(os.path.join(c["victim"], "folder"))
    return True


@attempt("landlock+mount")
def make_a_fifo(c):
    os.mkfifo(os.path.join(c["victim"], "fifo"))
    return True


@attempt("landlock+mount")
def make_a_link_outside(c):
    os.symlink("/etc", os.path.join(c["victim"], "symlink"))
    return True


@attempt("landlock+mount", root=True)
def write_the_system(c):
    open("/usr/ka-escape", "x").close()
    os.unlink("/usr/ka-escape")
    return True


@attempt("landlock+mount")
def write_to_the_shared_tmp(c):
    path = f"/tmp/ka-escape-{os.getpid()}"
    open(path, "x").close()
    os.unlink(path)
    return True


@attempt("landlock+mount", root=True)
def open_a_kernel_setting(c):
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
    return True


@attempt("mount+seccomp")
def change_a_mode(c):
    os.chmod(c["key"], 0o644)
    return True


@attempt("mount+seccomp")
def change_an_owner(c):
    os.chown(c["key"], os.getuid(), os.getgid())
    return True


@attempt("mount+seccomp")
def change_a_time(c):
    os.utime(c["key"], (0, 0))
    return True


@attempt("mount+seccomp")
def set_an_attribute(c):
    try:
        os.setxattr(c["key"], "user.ka", b"x")
    except OSError as exc:
        if exc.errno == errno.ENOTSUP:
            raise Unavailable("no attributes here") from exc
        raise
    return True


@attempt("caps+landlock+mount", root=True)
def make_a_device(c):
    os.mknod("disk", 0o600 | 0o020000, os.makedev(1, 11))
    os.close(os.open("disk", os.O_RDONLY | os.O_NONBLOCK))
    return True


@attempt("landlock+mount", root=True)
def open_a_device(c):
    for name in ("/dev/kmsg", "/dev/mem", "/dev/vda", "/dev/sda", "/dev/fuse", "/dev/loop-control"):
        if permitted(
            lambda name=name: os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
        ) and os.path.exists(name):
            return True
    raise Unavailable("no device to open")


@attempt("seccomp")
def watch_a_folder(c):
    """Landlock lets a folder be watched that cannot be listed: names of the files that come and go."""
    watch = syscall(x86(294), 0)  # inotify_init1
    return syscall(x86(254), watch, c["victim"].encode(), 0x100) >= 0


@attempt("landlock+mount", root=True)
def leave_the_control_group(c):
    for path in ("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs"):
        if os.path.exists(path):
            with open(path, "w") as file:
                file.write("0")
            return True
    raise Unavailable("no control groups here")


@attempt("pid+landlock+caps+mount", root=True)
def open_the_memory_of_the_init(c):
    parent = os.getppid() or 1
    if parent == os.getpid():
        raise Unavailable("the first process itself")
    try:
        os.close(os.open(f"/proc/{parent}/mem", os.O_RDWR))
    except PermissionError as exc:
        if os.geteuid() != 0:
            raise Unavailable("for root alone, even without a jail") from exc
        raise
    return True


@attempt("seccomp")
def take_a_file_handle(c):
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
    mount = ctypes.c_int()
    call = x86(303)
    return permitted(lambda: syscall(call, -100, c["key"].encode(), handle, ctypes.byref(mount), 0))


# ---- the shared cache: a folder that the jail lets this process read ----


@attempt("landlock+mount")
def cache_overwrite_an_entry(c):
    with open(c["entry"], "r+b") as file:
        file.write(b"evil")
    return True


@attempt("landlock+mount")
def cache_empty_an_entry(c):
    os.truncate(c["entry"], 0)
    return True


@attempt("landlock+mount")
def cache_remove_an_entry(c):
    os.unlink(c["entry"])
    return True


@attempt("landlock+mount")
def cache_plant_an_entry(c):
    with open(os.path.join(c["cache"], "planted"), "xb") as file:
        file.write(b"evil")
    return True


@attempt("landlock+mount")
def cache_rename_over_an_entry(c):
    with open("evil", "wb") as file:
        file.write(b"evil")
    try:
        os.rename("evil", c["entry"])
    except OSError as exc:
        if exc.errno != errno.EXDEV:
            raise
        os.rename(
            c["entry"], os.path.join(c["cache"], "planted")
        )  # another file system: within the cache then
    return True


@attempt("landlock+mount")
def cache_link_to_own_file(c):
    os.symlink(os.path.abspath("evil"), os.path.join(c["cache"], "planted"))
    return True


@attempt("landlock+mount")
def cache_write_through_a_hard_link(c):
    os.link(c["entry"], "mine")
    with open("mine", "r+b") as file:
        file.write(b"evil")
    return True


@attempt("landlock+mount")
def cache_reopen_an_entry_for_writing(c):
    fd = os.open(c["entry"], os.O_RDONLY)
    os.write(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), b"evil")
    return True


@attempt("mount+seccomp")
def cache_open_the_folder_to_all(c):
    os.chmod(c["cache"], 0o777)
    return True


@attempt("mount+seccomp")
def cache_flag_an_entry(c):
    """FS_IOC_SETFLAGS takes a descriptor that is open for reading, and Landlock knows no ioctl of plain files."""
    fd = os.open(c["entry"], os.O_RDONLY)
    flags = bytearray(8)
    try:
        fcntl.ioctl(fd, 0x80086601, flags)
        fcntl.ioctl(fd, 0x40086602, struct.pack("Q", struct.unpack("Q", flags)[0] ^ 0x40))  # not to be dumped
    except OSError as exc:
        if exc.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            raise Unavailable("no flags on this file system") from exc
        raise
    return True


@attempt("seccomp")
def cache_lease_an_entry(c):
    """Whoever opens a leased file for writing waits for the holder."""
    fcntl.fcntl(os.open(c["entry"], os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return True


# ---- secrets ----


@attempt("jail")
def secret_in_the_environment(c):
    return any(c["token"] in value for value in os.environ.values())


@attempt("pid+landlock+caps+mount+net")
def secret_in_the_environment_of_the_daemon(c):
    with open(f"/proc/{c['peer']}/environ", "rb") as file:
        return c["token"].encode() in file.read()


@attempt("jail")
def secret_in_an_inherited_descriptor(c):
    for fd in range(3, 256):
        try:
            if c["token"].encode() in os.pread(fd, 4096, 0):
                return True
        except OSError:
            pass
    return False


@attempt("jail")
def secret_in_own_memory(c):
    wanted = c["token"][:16].encode() + c["token"][16:].encode()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            if "[stack]" not in line or "r" not in rights:
                continue
            low, high = (int(part, 16) for part in span.split("-"))
            memory.seek(low)
            data = memory.read(high - low)
            at = data.find(b"KA_TEST_SECRET=")
            return at >= 0 and wanted in data[at : at + 200]
    return False


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
    """Fork a process that sleeps under the marker's name. Returns once it runs, or died: a pipe closes on its exec."""
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


def main() -> int:
    name, context = sys.argv[1], json.loads(sys.argv[2])
    try:
        escaped = ATTEMPTS[name].run(context)
    except Unavailable as exc:
        print(f"UNAVAILABLE {exc}")
    except (OSError, MemoryError) as exc:
        print(f"REFUSED {exc}")
    else:
        print("ESCAPED" if escaped else "REFUSED nothing found")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
