"""Asking for the GPU alone, with a socket whose other end a test holds; and what is done inside a turn."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import triton
from fake_gpu import Gpu as FakeGpu
from kernel_agent import launches
from kernel_agent.errors import Unusable
from kernel_agent.operations import benchmark, ceilings
from kernel_agent.operations.turns import Turns
from sources import SANDBOX, SCALE_PAIR
from test_benchmark import CASES, PAIR


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_turn__is_asked_for_waited_for_and_given_back(ends):
    ours, theirs = ends
    turns = Turns(ours.fileno())
    seen = []

    def daemon():
        seen.append(theirs.recv(1))
        time.sleep(0.05)
        seen.append("granted")
        theirs.send(b"!")

    other = threading.Thread(target=daemon)
    other.start()
    with turns.alone():
        seen.append("timing")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    other.join()
    assert seen == [b"?", "granted", "timing"] and theirs.recv(9) == b"."


def test_turn__whose_block_raises__is_given_back(ends):
    ours, theirs = ends
    theirs.send(b"!")
    with pytest.raises(ValueError, match="inside"), Turns(ours.fileno()).alone():
        raise ValueError("inside")
    assert theirs.recv(9) == b"?."


@pytest.mark.parametrize("answer", [b"", b"x"])
def test_turn__that_is_refused__times_nothing(ends, answer):
    ours, theirs = ends
    theirs.send(answer)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(Unusable, match="no turn"), Turns(ours.fileno()).alone():
        raise AssertionError("it is timed")


def test_turns__nobody_to_ask__are_everybodys():
    turns = Turns.of({"op": "bench"})
    with turns.alone():
        assert not turns.shared


TAKEN = """
import os, subprocess, sys
from kernel_agent.operations.turns import Turns
turns = Turns.of({"turns": True})
assert sys.stdin.read() == ""                                   # the user's code has an empty one
assert subprocess.run(["sh", "-c", f"true <&{turns.channel}"], close_fds=False,
                      stderr=subprocess.DEVNULL).returncode     # and what it starts cannot ask
with turns.alone():
    print("alone")
"""


def test_channel__is_taken_off_standard_input(ends):
    ours, theirs = ends
    theirs.send(b"!")
    env = {**os.environ, "PYTHONPATH": str(SANDBOX)}
    made = subprocess.run(
        [sys.executable, "-c", TAKEN], stdin=ours, env=env, capture_output=True, check=False
    )
    assert made.stdout == b"alone\n", made.stderr
    assert theirs.recv(9) == b"?."


class Told(Turns):
    """Notes what happens to it and to the GPU, in one list."""

    def __init__(self):
        super().__init__(0)
        self.log = []

    @contextlib.contextmanager
    def alone(self):
        self.log.append("alone")
        yield
        self.log.append("through")


class Watched(FakeGpu):
    def __init__(self, log, **fields):
        super().__init__(**fields)
        self.log = log

    def note(self, what):
        if self.log[-1:] != [what]:
            self.log.append(what)

    def warm(self, call):
        self.note("warm")
        super().warm(call)

    def capture(self, call, pool):
        self.note("capture")
        return super().capture(call, pool)

    def peak(self, call):
        self.note("memory")
        return super().peak(call)

    def settle(self):
        self.note("settle")

    def time(self, call):
        self.note("time")
        return super().time(call)


def bench(path, scratch, turns, **fields):
    request = {"file": str(path), "device": "cuda", "cases": CASES, "seconds": 0, **fields}
    return benchmark.run(request, scratch, Watched(turns.log), turns)["cases"]


TWO = [*CASES, {"id": 1, "dims": {"N": 24}, "seed": 6}]
READY = ["warm", "memory", "capture"]
TIMED = ["settle", "time"]


def test_bench__has_a_turn_a_shape_and_compiles_before_it(write, tmp_path):
    turns = Told()
    cases = bench(write(SCALE_PAIR), tmp_path, turns, cases=TWO)
    assert all(case["ok"] for case in cases)
    assert turns.log == 2 * [*READY, "alone", *TIMED, "through"]


def test_race__has_one_turn_for_all_shapes(write, tmp_path):
    turns = Told()
    path = write(SCALE_PAIR)
    cases = bench(path, tmp_path, turns, cases=TWO, rival=str(path))
    assert [case["id"] for case in cases] == [0, 1] and all(case["ok"] for case in cases)
    ready = ["warm", "memory", "capture", "memory", "capture", "memory", "capture", "memory", "capture"]
    assert turns.log == [*ready, "alone", *TIMED, *TIMED, "through"]


def test_race__of_which_one_shape_fails__times_the_other(write, tmp_path):
    turns = Told()
    cases = [{"id": 7, "dims": {"M": 1}, "seed": 1}, TWO[1]]
    failed, timed = bench(write(SCALE_PAIR), tmp_path, turns, cases=cases, rival=None)
    assert (failed["id"], failed["ok"], timed["id"], timed["ok"]) == (7, False, 1, True)
    assert turns.log == [*READY, "alone", *TIMED, "through"]


@pytest.mark.parametrize("method", ["warm", "peak", "capture"])
def test_race__whose_shapes_together_are_too_much__has_a_turn_for_what_was(write, tmp_path, method):
    turns = Told()
    gpu = Watched(turns.log)
    honest, calls = getattr(gpu, method), []

    def full(*given):
        calls.append(given)
        if len(calls) == 3:  # the second shape is there, too
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(*given)

    setattr(gpu, method, full)
    request = {"file": str(write(SCALE_PAIR)), "device": "cuda", "cases": [*TWO, {**TWO[1], "id": 2}]}
    cases = benchmark.run(request | {"seconds": 0, "rival": None}, tmp_path, gpu, turns)["cases"]
    assert [(case["id"], case["ok"]) for case in cases] == [(0, True), (1, True), (2, True)]
    assert all(case["subjects"][0]["no_graph"] is None for case in cases)
    assert turns.log.count("alone") == 2


def test_bench__that_has_nothing_to_time__asks_for_nothing(write, tmp_path):
    turns = Told()
    (case,) = bench(write(SCALE_PAIR), tmp_path, turns, cases=[{"id": 0, "dims": {"M": 1}, "seed": 1}])
    assert not case["ok"] and turns.log == []


def test_peer__whose_memory_runs_out_beside_others__says_so(write, tmp_path, monkeypatch):
    raising = PAIR.replace("return x * factor", "raise torch.OutOfMemoryError('CUDA out of memory')")
    (case,) = bench(write(raising), tmp_path, Told())
    found = {subject["name"]: subject.get("out_of_memory") for subject in case["subjects"]}
    assert found == {"ours": None, "eager": True, "compile": True, "baseline": None}
    monkeypatch.setattr(FakeGpu, "crowded", lambda self: False)  # it would run out without the others too
    (case,) = bench(write(raising), tmp_path, Told())
    assert not any(subject.get("out_of_memory") for subject in case["subjects"])


@pytest.mark.parametrize("crowded", [True, False])
def test_ours__whose_memory_runs_out__may_have_what_others_hold(write, tmp_path, monkeypatch, crowded):
    monkeypatch.setattr(FakeGpu, "crowded", lambda self: crowded)
    raising = PAIR.replace("d_y = d_y.contiguous()", "raise torch.OutOfMemoryError('CUDA out of memory')")
    (case,) = bench(write(raising), tmp_path, Told())
    assert case["error"]["message"].startswith("the GPU ran out of memory")
    assert bool(case["error"].get("out_of_memory")) == crowded


def test_ceilings__are_sampled_in_one_turn_and_warm_before_it(write, tmp_path):
    turns = Told()
    request = {"file": str(write(SCALE_PAIR)), "device": "cuda", "cases": CASES, "ceiling_dtype": "float32"}
    found = ceilings.run(request, tmp_path, Watched(turns.log), turns)
    assert len(found["copy"]["ms"]) == len(found["matmul"]["ms"]) == 20
    assert turns.log == ["warm", "alone", "settle", "time", "through"]


def test_autotuner__that_measured_beside_others__measures_again_alone(write, tmp_path, monkeypatch):
    @triton.autotune([triton.Config({}), triton.Config({}, num_warps=8)], key=[])
    @triton.jit
    def kernel(x_ptr):
        pass

    kernel.nargs, kernel.asked = {}, False
    kernel.do_bench = lambda call, quantiles: [1.0, 1.0, 1.0]
    turns = Told()
    monkeypatch.setattr(benchmark, "load", measuring(benchmark.load, kernel))
    (case,) = bench(write(SCALE_PAIR), tmp_path, turns)
    assert case["ok"]
    again = ["alone", "settle", "warm", "through"]
    assert turns.log == ["warm", *again, "memory", "capture", "alone", *TIMED, "through"]
    assert kernel.cache == {} and not launches.tuned()


def measuring(load, kernel):
    """The file's entry, as if its first call had launched what an autotuner measures."""

    def loaded(*args, **fields):
        fwd = load(*args, **fields)
        honest = fwd.module.scale_autograd

        @functools.wraps(honest)
        def entry(*args, **fields):
            if not kernel.asked:
                kernel.asked = True
                kernel._bench(config=kernel.configs[0])
                kernel.cache["key"] = kernel.configs[0]
            return honest(*args, **fields)

        fwd.module.scale_autograd = entry
        return fwd

    return loaded


LIMITED = """
import time
from kernel_agent.operations.limit import Limit
began = time.monotonic()
print("begun", flush=True)
try:
    with Limit(0.8, "it"):
        while True:
            time.sleep(0.01)
except TimeoutError as exc:
    print(exc, time.monotonic() - began)
"""


def test_limit__of_what_is_stopped_meanwhile__goes_on_later():
    env = {**os.environ, "PYTHONPATH": str(SANDBOX)}
    with subprocess.Popen([sys.executable, "-c", LIMITED], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(process.pid, signal.SIGCONT)
        said, _, seconds = process.stdout.read().decode().rpartition(" ")
    assert said == "it took more than 0.8 s" and float(seconds) > 2.4
