"""The benchmark's clock, with events, streams and graphs of torch.cuda that write down what is asked of
them."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch
from kernel_agent.errors import Unusable
from kernel_agent.operations import device_clock


class Event:
    made = 0

    def __init__(self, log, enable_timing=False):
        assert enable_timing
        Event.made += 1
        self.log, self.name = log, f"event {Event.made}"

    def record(self):
        self.log.append(f"record {self.name}")

    def synchronize(self):
        self.log.append(f"wait for {self.name}")

    def elapsed_time(self, other):
        return {"event 1": 1.0, "event 2": 5.5}[other.name] - {"event 1": 1.0, "event 2": 5.5}[self.name]


class Stream:
    def __init__(self, log, name="side"):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Lines:
    def __init__(self, log):
        self.log = log

    def fill_(self, value):
        self.log.append("flush")


@pytest.fixture
def log(monkeypatch):
    """torch.cuda of a card with 1,000 bytes of L2."""
    said: list[str] = []
    Event.made = 0
    card = SimpleNamespace(name="card", major=9, minor=0, L2_cache_size=1000, total_memory=1 << 30)
    main = Stream(said, "main")

    @contextlib.contextmanager
    def within(what):
        said.append(f"begin {what}")
        yield
        said.append(f"end {what}")

    class Graph:
        def replay(self):
            said.append("replay")

    for name, value in {
        "is_available": lambda: True,
        "get_device_properties": lambda device: card,
        "Event": lambda **options: Event(said, **options),
        "Stream": lambda: Stream(said),
        "current_stream": lambda: main,
        "stream": lambda stream: within(stream.name),
        "synchronize": lambda: said.append("device"),
        "CUDAGraph": Graph,
        "graph": lambda graph, pool: within(f"capture in {pool}"),
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 350,
        "reset_peak_memory_stats": lambda device: said.append("reset"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return said


@pytest.fixture
def clock(log, tmp_path):
    made = device_clock.Gpu("cpu", tmp_path)
    assert made._lines.numel() == 2 * 1000
    made._lines = Lines(log)
    return made


def test_time__flushes_then_brackets_the_call_alone_and_waits_for_the_device(clock, log):
    made, ms, late = clock.time(lambda: log.append("call") or "made")
    assert (made, ms) == ("made", 4.5) and late >= 0
    assert log == ["flush", "record event 1", "call", "record event 2", "wait for event 2", "device"]


def test_capture__records_one_call_and_gives_its_replay(clock, log):
    replay = clock.capture(lambda: log.append("call"), "pool")
    assert log == ["begin capture in pool", "call", "end capture in pool"]
    replay()
    assert log[-1] == "replay"


@pytest.mark.parametrize("name", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"])
def test_capture__that_fails__raises_its_cause_and_is_over(clock, log, monkeypatch, name):
    """As torch does it: leaving the broken capture raises too, and gives back neither stream nor memory nor
    random numbers."""

    class Broken:
        def __init__(self, graph, pool):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *exc):
            raise RuntimeError("a previous error during capture")

    def copies():
        raise RuntimeError("not permitted when stream is capturing")

    def end(device, pool):
        log.append(f"end {device} {pool}")
        raise RuntimeError("not recording to it")

    class Generator:
        def clone_state(self):
            return "a copy of its state"

        def graphsafe_set_state(self, state):
            log.append(f"random numbers go on with {state}")
            raise RuntimeError("not while something else is captured")

    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    monkeypatch.setattr(torch._C, name, end, raising=False)
    monkeypatch.setattr(torch.cuda, "graph", Broken)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: log.append(f"back to {stream.name}"))
    with pytest.raises(RuntimeError, match="not permitted"):
        clock.capture(copies, "pool")
    assert log == ["back to main", "end 0 pool", "random numbers go on with a copy of its state"]


def test_warm__calls_beside_the_stream_in_use__and_joins_it_again(clock, log):
    clock.warm(lambda: log.append("call"))
    inside = ["begin side", *["call"] * 3, "end side"]
    assert log == ["side waits for main", *inside, "main waits for side", "device"]


def test_warm__of_a_call_that_takes_long__is_once(clock, log, monkeypatch):
    monkeypatch.setattr(device_clock, "WARM_SECONDS", -1.0)
    clock.warm(lambda: log.append("call"))
    assert log.count("call") == 1


def test_peak__is_what_a_call_adds(clock, log):
    assert clock.peak(lambda: log.append("call")) == 250
    assert log == ["device", "reset", "call", "device"]


def test_compile__is_for_one_shape_and_stays_in_the_scratch(clock, monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.update(options) or function)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    config = importlib.import_module("torch._inductor.config")
    functorch = importlib.import_module("torch._functorch.config")
    # Of monkeypatch's own setattr these modules would be left without the settings.
    before = config.patch(compile_threads=8), functorch.patch(force_non_lazy_backward_lowering=False)
    with before[0], before[1]:
        assert clock.compile(len) is len and given == {"dynamic": False}
        assert device_clock.os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
        assert config.compile_threads == 1
        assert functorch.force_non_lazy_backward_lowering is True


def test_l2__that_torch_does_not_tell__is_taken_to_be_large(log, monkeypatch, tmp_path):
    card = SimpleNamespace(name="old", major=7, minor=0, total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    made = device_clock.Gpu("cpu", tmp_path)
    assert made.l2 == 128 << 20 and made._lines.numel() == 256 << 20


def test_machine__without_a_gpu__is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unusable, match="torch finds no GPU") as raised:
        device_clock.Gpu("cuda", tmp_path)
    assert raised.value.kind == "needs_gpu"


@pytest.mark.parametrize(("free", "own", "crowded"), [(100, 850, False), (100, 750, True), (850, 0, True)])
def test_memory__that_others_hold__is_told_from_our_own(log, monkeypatch, tmp_path, free, own, crowded):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own)
    assert device_clock.Gpu("cpu", tmp_path).crowded() == crowded
