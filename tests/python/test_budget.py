"""What a case takes, and how memory that ran out is told."""

from __future__ import annotations

import gc
import itertools
import time
import weakref

import pytest
import torch
from kernel_agent import forward
from kernel_agent.errors import Unusable, wrap
from kernel_agent.operations import budget, candidate, evaluations, oracle
from sources import SCALE, SCALE_PAIR

GPU_FULL = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
    "9.50 GiB is free. "
    "Process 1 has 69.00 GiB memory in use."
)
GPU_TOLD = "the GPU ran out of memory, 20.00 GiB asked for, 9.50 GiB free"
CASE = {"id": 0, "dims": {"N": 3000}, "seed": 1, "upstream": {"kind": "normal", "seed": 2}}


def ask(path, scratch, **fields):
    return oracle.run({"file": str(path), "device": "cpu", "cases": [CASE]} | fields, scratch)["cases"][0]


@pytest.mark.parametrize("reference", ["", "\n\ndef reference(x, factor=2.0):\n    return x * factor\n"])
def test_file__has_the_size_that_was_foretold(reference, write, tmp_path, monkeypatch):
    foretold = []
    right = budget.require
    monkeypatch.setattr(
        budget, "require", lambda needed, *rest: foretold.append(needed) or right(needed, *rest)
    )
    case = ask(write(SCALE + reference), tmp_path)
    assert case["ok"], case
    size = (tmp_path / case["file"]).stat().st_size
    assert foretold[0]["case_bytes"] <= size < foretold[0]["case_bytes"] + 4096
    assert size == pytest.approx(3000 * (4 + 8 + 4 + 8 + 4 + 8 + (16 if reference else 0)), abs=4096)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"case_bytes": 50_000}, "needs 105.5 KiB for its tensors' file, and there are 48.8 KiB"),
        ({"device_bytes": 5000}, "float64 in the machine's memory, and there are 4.9 KiB"),
        ({"case_bytes": 10, "device_bytes": None}, "and there are 10 bytes"),
    ],
)
def test_case__over_its_budget__is_too_large_before_it_is_evaluated(
    limits, said, write, tmp_path, monkeypatch
):
    monkeypatch.delattr(evaluations.Evaluations, "replay")
    error = ask(write(SCALE), tmp_path, budget=limits)["error"]
    assert error["kind"] == "too_large" and said in error["message"], error
    assert "required: False" in error["remedy"]
    assert list(tmp_path.glob("case-*")) == []


@pytest.mark.parametrize("limits", [None, {}, {"case_bytes": 1 << 20, "device_bytes": 1 << 20}])
def test_case__within_its_budget__is_evaluated(limits, write, tmp_path):
    assert ask(write(SCALE), tmp_path, budget=limits)["ok"]


def test_case__that_takes_longer_than_it_may__is_too_large(write, tmp_path):
    entry = ask(write(SCALE), tmp_path, budget={"seconds": -1})
    assert entry["error"]["kind"] == "too_large" and "takes too long" in entry["error"]["message"]
    assert ask(write(SCALE), tmp_path, budget={"seconds": 600})["ok"]


def test_case__of_a_process_that_was_stopped_for_longer__is_evaluated(write, tmp_path, monkeypatch):
    """Its seconds are a processor's: others may time kernels meanwhile, or the machine be busy."""
    clock = itertools.count(0, 1000)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert ask(write(SCALE), tmp_path, budget={"seconds": 600})["ok"]


def test_case_on_a_gpu__is_held_to_what_is_free_there(monkeypatch):
    """Stands in for CUDA."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 20)
    monkeypatch.setattr(budget, "SMALL", 20)
    there = torch.device("cuda")
    budget.require({"case_bytes": 1 << 40, "device_bytes": 20}, {"device_bytes": 20}, there, "f.py")
    budget.require({"case_bytes": 1 << 40, "device_bytes": 130}, {}, there, "f.py")
    for limits in ({}, {"device_bytes": 1 << 40}):
        with pytest.raises(Unusable, match="GPU's memory, and there are 130 bytes") as full:
            budget.require({"case_bytes": 1, "device_bytes": 131}, limits, there, "f.py")
        assert full.value.out_of_memory, "others may have it: to be tried again, alone"
    with pytest.raises(Unusable, match="there are 10 bytes") as limited:
        budget.require({"case_bytes": 1, "device_bytes": 131}, {"device_bytes": 10}, there, "f.py")
    assert not limited.value.out_of_memory


@pytest.mark.parametrize(("held", "left", "emptied"), [(1 << 28, 50, 1), (1 << 28, 500, 0), (1 << 20, 50, 0)])
def test_release__gives_back_only_where_little_is_left(held, left, emptied, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (left, 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    budget.release("cuda")
    assert len(calls) == emptied
    monkeypatch.delattr(torch.cuda, "mem_get_info")
    budget.release("cpu")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError(GPU_FULL), GPU_TOLD),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "the GPU ran out of memory"),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 "
                "bytes."
            ),
            "the machine ran out of memory, 2.0 MiB asked for",
        ),
        (MemoryError(), "the machine ran out of memory"),
        (wrap("stub_raised", "scale() raised ", torch.OutOfMemoryError(GPU_FULL), []), GPU_TOLD),
        (ValueError("out of memory"), None),
    ],
)
def test_out_of_memory__is_told_with_what_was_asked_and_free(error, told):
    assert budget.out_of_memory(error) == told


def test_oracle__out_of_memory_in_the_stub__is_too_large(write, tmp_path):
    source = SCALE.replace(
        "    y = torch.empty_like(x)\n", f"    raise torch.OutOfMemoryError({GPU_FULL!r})\n"
    )
    assert source != SCALE
    error = ask(write(source), tmp_path)["error"]
    assert (
        error["kind"] == "too_large" and GPU_TOLD in error["message"] and "required: False" in error["remedy"]
    )


def test_error__of_memory_that_ran_out__is_marked_for_a_second_try(write, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")

    monkeypatch.setattr(oracle.Case, "replay", full)
    assert ask(write(SCALE), tmp_path)["error"]["out_of_memory"] is True


def test_oracle__out_of_memory_in_the_evaluation__is_too_large(write, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(GPU_FULL)

    monkeypatch.setattr(oracle.Replay, "run", full)
    error = ask(write(SCALE), tmp_path)["error"]
    assert error["kind"] == "too_large" and GPU_TOLD in error["message"]


def test_candidate__out_of_memory__is_its_own_and_named_with_the_line(write, tmp_path):
    source = SCALE_PAIR.replace("return d_x, None", f"raise torch.OutOfMemoryError({GPU_FULL!r})")
    path = write(source)
    request = {"file": str(path), "device": "cpu", "cases": [CASE]}
    error = candidate.run(request, tmp_path)["cases"][0]["error"]
    assert error["kind"] == "candidate_raised" and error["message"].startswith(GPU_TOLD)
    assert "OutOfMemoryError" in source.splitlines()[error["line"] - 1]


@pytest.mark.parametrize(("text", "again"), [("unknown error", True), ("an illegal memory access", None)])
def test_candidate__error_of_the_driver_that_says_nothing__is_tried_again(write, tmp_path, text, again):
    source = SCALE_PAIR.replace("return d_x, None", f"raise RuntimeError('CUDA error: {text}')")
    request = {"file": str(write(source)), "device": "cpu", "cases": [CASE]}
    error = candidate.run(request, tmp_path)["cases"][0]["error"]
    assert error["kind"] == "candidate_raised" and error.get("out_of_memory") is again


def test_candidate__kernel_too_large_for_the_gpu__is_marked(write, tmp_path):
    source = SCALE_PAIR.replace("return d_x, None", "raise OutOfResources(294912, 232448, 'shared memory')")
    path = write("from triton.runtime.errors import OutOfResources\n" + source)
    request = {"file": str(path), "device": "cpu", "cases": [CASE]}
    error = candidate.run(request, tmp_path)["cases"][0]["error"]
    assert error["out_of_resources"] is True and "232448" in error["message"]


def test_memory__of_a_released_evaluation__is_free_without_a_collection(write, monkeypatch):
    """Of its results nothing keeps the graph that they came from."""
    fwd = forward.load(write(SCALE))
    gc.disable()
    try:
        case = oracle.Case(fwd, CASE, None)
        recording = case.record(None)
        replay = case.replay(recording, "exact")
        made = [replay.value(ref).detach().clone() for ref in recording.refs.values()]
        made += case.gradients(replay, recording).values()
        held = [
            weakref.ref(value) for value in (*replay.leaves.values(), *(c.flat for c in replay.memory.cells))
        ]
        held += [weakref.ref(read.index) for read in replay.memory.reads]
        replay.release()
        assert len(held) > 2 and not [ref() for ref in held if ref() is not None]
        assert all(value.numel() == 3000 for value in made)
    finally:
        gc.enable()


def test_case__lets_go_of_each_evaluation_before_the_next(write, tmp_path, monkeypatch):
    events = []
    start, end = oracle.Replay.run, oracle.Replay.release
    monkeypatch.setattr(oracle.Replay, "run", lambda one: events.append("run") or start(one))
    monkeypatch.setattr(oracle.Replay, "release", lambda one: events.append("release") or end(one))
    assert ask(write(SCALE), tmp_path)["ok"]
    assert events == ["run", "release"] * 3


def test_readable__numbers_have_units():
    assert [budget.readable(n) for n in (12, 2048, 5 << 30)] == ["12 bytes", "2.0 KiB", "5.0 GiB"]
