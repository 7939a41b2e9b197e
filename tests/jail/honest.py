"""Work that an honest candidate does, and that the jail must let through. `python honest.py NAME`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path


def compile_and_load() -> bool:
    if not (shutil.which("gcc") or shutil.which("cc")):
        return True
    Path("answer.c").write_text("int answer(void) { return 42; }\n")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", "answer.so", "answer.c"], check=True)
    return ctypes.CDLL(os.path.abspath("answer.so")).answer() == 42


def run_what_was_compiled() -> bool:
    if not shutil.which("gcc"):
        return True
    Path("main.c").write_text("int main(void) { return 42; }\n")
    subprocess.run(["gcc", "-o", "main", "main.c"], check=True)
    return subprocess.run(["./main"], check=False).returncode == 42


def pool_of_processes() -> bool:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(abs, [-1, 2]) == [1, 2]


def pool_of_threads() -> bool:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return sum(pool.map(lambda x: x * x, range(100))) == 328350


def child_in_a_new_session() -> bool:
    return subprocess.run(["/bin/sh", "-c", "exit 3"], check=False, start_new_session=True).returncode == 3


def asyncio_with_a_child() -> bool:
    async def main() -> int:
        process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 4")
        return await process.wait()

    return asyncio.run(main()) == 4


def name_a_thread() -> bool:
    return ctypes.CDLL(None).prctl(15, b"honest", 0, 0, 0) == 0


def comes_after_the_daemon() -> bool:
    """At least the jail's niceness, and whoever starts it has less or as much."""
    return os.getpriority(os.PRIO_PROCESS, 0) >= 5


def temporary_files() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        path.write_text("x")
        path.chmod(0o755)
        os.utime(path, (1, 1))
        path.rename(Path(folder, "b"))
        return Path(folder, "b").stat().st_mtime == 1


def abort_is_seen() -> bool:
    pid = os.fork()
    if pid == 0:
        os.abort()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 0


def shared_memory() -> bool:
    value = multiprocessing.get_context("fork").Value("i", 0)
    process = multiprocessing.get_context("fork").Process(target=lambda: setattr(value, "value", 7))
    process.start()
    process.join()
    return value.value == 7


def event_between_threads() -> bool:
    event = threading.Event()
    threading.Thread(target=event.set).start()
    return event.wait(5)


def gradient_check() -> bool:
    import torch

    torch.set_num_threads(2)
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(lambda t: (t @ t).sin().sum(), (x,))


def triton_in_the_interpreter() -> bool:
    os.environ["TRITON_INTERPRET"] = "1"
    Path("kernel.py").write_text(
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def double(x, n, B: tl.constexpr):\n"
        "    i = tl.arange(0, B)\n"
        "    tl.store(x + i, 2 * tl.load(x + i, i < n), i < n)\n"
        "def run():\n"
        "    x = torch.arange(5.0)\n"
        "    double[(1,)](x, 5, 8)\n"
        "    return x.tolist()\n"
    )
    sys.path.insert(0, os.getcwd())
    import kernel  # type: ignore[import-not-found]

    return kernel.run() == [0.0, 2.0, 4.0, 6.0, 8.0]


def cuda() -> bool:
    import torch

    if not os.path.exists("/dev/nvidiactl") or not torch.cuda.is_available():
        return not os.path.exists("/dev/nvidiactl")
    x = torch.ones(1024, pin_memory=True).to("cuda", non_blocking=True)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    y = (x * 2).sum()
    end.record()
    torch.cuda.synchronize()
    return y.item() == 2048 and start.elapsed_time(end) >= 0


def triton_on_the_gpu() -> bool:
    if not os.path.exists("/dev/nvidiactl"):
        return True
    Path("gpu_kernel.py").write_text(
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\n"
        "def double(x, n, B: tl.constexpr):\n"
        "    i = tl.arange(0, B)\n"
        "    tl.store(x + i, 2 * tl.load(x + i, i < n), i < n)\n"
        "def run():\n"
        "    x = torch.arange(5.0, device='cuda')\n"
        "    double[(1,)](x, 5, 8)\n"
        "    return x.tolist()\n"
    )
    sys.path.insert(0, os.getcwd())
    import gpu_kernel  # type: ignore[import-not-found]

    return gpu_kernel.run() == [0.0, 2.0, 4.0, 6.0, 8.0]


# Without these layers the filter refuses what the work needs: docs/jail.md.
NEEDS = {
    "run_what_was_compiled": "mount",
    "pool_of_processes": "mount",
    "temporary_files": "mount",
    "shared_memory": "mount",
    "child_in_a_new_session": "pid",
}


def talk_over_a_socket() -> bool:
    """Not of everybody: with --local-sockets."""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("\0watched")
        server.listen()
        client.connect("\0watched")
        accepted, _ = server.accept()
        with accepted:
            return client.send(b"x") == 1 and accepted.recv(1) == b"x"


HONEST = (
    compile_and_load,
    run_what_was_compiled,
    pool_of_processes,
    pool_of_threads,
    child_in_a_new_session,
    asyncio_with_a_child,
    name_a_thread,
    comes_after_the_daemon,
    temporary_files,
    abort_is_seen,
    shared_memory,
    event_between_threads,
    gradient_check,
    triton_in_the_interpreter,
    cuda,
    triton_on_the_gpu,
)


if __name__ == "__main__":
    wanted = {function.__name__: function for function in (*HONEST, talk_over_a_socket)}[sys.argv[1]]
    print("WORKED" if wanted() else "FAILED", flush=True)
