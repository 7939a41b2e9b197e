"""What an attempt is, the list of them, and how they call the kernel. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
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


def reads(path: str, c: dict[str, Any]) -> bool:
    with open(path) as file:
        return c["token"] in file.read()
