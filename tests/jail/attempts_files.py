"""Attempts at what lies in files: the user's, other checks', the shared cache, secrets."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

from registry import Unavailable, attempt, permitted, reads, syscall, x86

# ---- files ----


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
    """FS_IOC_SETFLAGS takes a descriptor that is open for reading, and Landlock knows no ioctl of plain
    files."""
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
