"""Operations ceilings and bench without a GPU: a fake of one, whose clock counts launches."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from fake_gpu import Gpu as FakeGpu
from kernel_agent.operations import benchmark, ceilings, limit
from kernel_agent.operations.turns import Turns
from sources import SCALE_PAIR

REFERENCE = """

SEEN = []


def reference(x, factor=2.0):
    SEEN.append(float(x.detach().sum()))
    return x * factor


# ---- backward ----"""
PAIR = SCALE_PAIR.replace("\n\n# ---- backward ----", REFERENCE)
CASES = [{"id": 0, "dims": {"N": 40}, "seed": 5}]


def run(path, scratch, gpu=None, **fields):
    request = {"file": str(path), "device": "cuda", "cases": CASES, "seconds": 0, **fields}
    (case,) = benchmark.run(request, scratch, gpu or FakeGpu())["cases"]
    return case


def by_name(case):
    assert case["ok"], case
    return {subject["name"]: subject for subject in case["subjects"]}


def test_all__each_pass_alone_and_as_a_graph__as_often_as_there_are_rounds(write, tmp_path):
    case = run(write(PAIR), tmp_path)
    found = by_name(case)
    assert case["rounds"] == benchmark.ROUNDS_LEAST
    assert list(found) == ["ours", "eager", "compile", "baseline"]
    launched = {"fwd": 0.11, "bwd": 0.11, "both": 0.21}
    for which, ms in launched.items():
        for how in ("alone", "graph"):
            assert found["ours"]["times"][which][how] == [pytest.approx(ms)] * case["rounds"]
            assert found["eager"]["times"][which][how] == [0.01] * case["rounds"]
            assert found["compile"]["times"][which][how] == [0.01] * case["rounds"]
    assert found["baseline"] == {"name": "baseline", "missing": "the file has no baseline()"}


def test_race__without_shapes__times_none(write, tmp_path):
    request = {"file": str(write(PAIR)), "device": "cuda", "cases": [], "seconds": 0, "rival": None}
    assert benchmark.run(request, tmp_path, FakeGpu(), Turns(0))["cases"] == []  # it asks for no turn


def test_race__asked_for_kernels__has_their_times_and_what_the_largest_shape_needs(write, tmp_path):
    cases = [{"id": 0, "dims": {"N": 20}, "seed": 5}, {"id": 1, "dims": {"N": 40}, "seed": 6}]
    request = {"file": str(write(PAIR)), "device": "cuda", "cases": cases, "seconds": 0, "rival": None}
    made = benchmark.run({**request, "kernels": True}, tmp_path, FakeGpu())
    small, large = (case["subjects"][0] for case in made["cases"])
    assert "kernels" not in small
    rows = [(row["pass"], row["name"], row["launches"]) for row in large["kernels"]]
    assert rows == [("fwd", "scale_kernel", 1), ("bwd", "scale_bwd_kernel", 1)], rows
    assert all(row["ms"] == pytest.approx(0.1) for row in large["kernels"])
    assert made["roof"]["bytes"]["fwd"] == 2 * 40 * 4 and len(made["roof"]["copy"]["ms"]) > 3
    assert made["roof"]["matmul"] is None  # the file counts no operations
    assert "roof" not in benchmark.run(request, tmp_path, FakeGpu())


def test_race__without_room_for_what_a_copy_takes__has_times_all_the_same(write, tmp_path):
    class Full(FakeGpu):
        def describe(self):
            raise torch.OutOfMemoryError("full")

    request = {"file": str(write(PAIR)), "device": "cuda", "cases": CASES, "seconds": 0, "rival": None}
    made = benchmark.run({**request, "kernels": True}, tmp_path, Full())
    assert made["cases"][0]["ok"] and "roof" not in made


def test_race__whose_kernels_cannot_be_timed_by_themselves__has_its_times(write, tmp_path):
    class WithoutMarks(FakeGpu):
        def mark(self):
            raise RuntimeError("no events here")

    request = {"file": str(write(PAIR)), "device": "cuda", "cases": CASES, "seconds": 0, "rival": None}
    (case,) = benchmark.run({**request, "kernels": True}, tmp_path, WithoutMarks())["cases"]
    (ours,) = case["subjects"]
    assert case["ok"] and ours["times"]["bwd"]["alone"] and "kernels" not in ours


def test_inputs__of_each_call__are_new_and_the_same_for_all(write, tmp_path, monkeypatch):
    modules = []
    honest = benchmark.load
    monkeypatch.setattr(benchmark, "load", lambda *a, **k: modules.append(honest(*a, **k)) or modules[0])
    found = by_name(run(write(PAIR), tmp_path, passes=["fwd"]))
    assert set(found["ours"]["times"]) == {"fwd"}
    seen = modules[0].module.SEEN
    rounds = benchmark.ROUNDS_LEAST
    of_rounds = seen[-4 * rounds - 2 : -2]  # eager and compiled, alone and as graphs; then the comparison
    for at in range(rounds):
        values = of_rounds[4 * at : 4 * at + 4]
        assert len({round(value, 4) for value in values}) == 1, values
    assert len({round(value, 4) for value in of_rounds}) == rounds


def test_passes__only_one__leaves_the_others_out(write, tmp_path):
    found = by_name(run(write(PAIR), tmp_path, passes=["bwd"]))
    for name in ("ours", "eager"):
        assert set(found[name]["times"]) == {"bwd"} and set(found[name]["times"]["bwd"]) == {"alone", "graph"}


def test_rival__another_pair_of_the_forward__takes_turns_with_ours_alone(write, tmp_path):
    marker = "        d_x = torch.empty_like(d_y)\n"
    again = "        scale_bwd_kernel[(1,)](d_y, torch.empty_like(d_y), 0.0, 1, BLOCK=16)\n"
    rival = write(PAIR.replace(marker, marker + again), "rival.py")
    found = by_name(run(write(PAIR), tmp_path, rival=str(rival), passes=["both"]))
    assert list(found) == ["ours", "rival"]
    ours, other = (found[name]["times"]["both"]["graph"] for name in ("ours", "rival"))
    assert len(ours) == len(other) and other[0] == pytest.approx(ours[0] + 0.1)


def test_rival__null__times_ours_alone_and_calls_nobody_else(write, tmp_path):
    loud = PAIR.replace("    SEEN.append(", "    raise SystemExit  # SEEN.append(")
    assert loud != PAIR
    found = by_name(run(write(loud), tmp_path, rival=None, passes=["both"], seconds=10, rounds=9))
    assert list(found) == ["ours"] and len(found["ours"]["times"]["both"]["graph"]) >= 9


def test_graph__that_cannot_be_captured__says_why_and_plain_calls_go_on(write, tmp_path):
    found = by_name(run(write(PAIR), tmp_path, FakeGpu(refuses="scale_autograd")))
    assert "not permitted when stream is capturing" in found["ours"]["no_graph"]
    assert set(found["ours"]["times"]["bwd"]) == {"alone"}
    assert set(found["eager"]["times"]["bwd"]) == {"alone", "graph"} and found["eager"]["no_graph"] is None


def test_reference__missing_or_raising__is_said_and_ours_is_timed(write, tmp_path):
    without = by_name(run(write(SCALE_PAIR), tmp_path))
    assert without["eager"]["missing"] == without["compile"]["missing"] == "the file has no reference()"
    assert without["ours"]["difference"] is None and without["ours"]["times"]["bwd"]["alone"]
    raising = PAIR.replace("return x * factor", "raise ValueError('no such op')")
    found = by_name(run(write(raising), tmp_path))
    assert "no such op" in found["eager"]["missing"] and found["ours"]["times"]["bwd"]["alone"]


def test_baseline__of_the_file__takes_its_turn(write, tmp_path):
    baseline = "\n\ndef baseline():\n    return lambda x, factor=2.0: x * factor\n\n\n# ---- backward ----"
    found = by_name(run(write(PAIR.replace("\n\n# ---- backward ----", baseline)), tmp_path))
    assert found["baseline"]["times"]["both"]["graph"] == [0.01] * benchmark.ROUNDS_LEAST
    assert found["baseline"]["difference"] == 0.0


def test_gradients__after_timing__are_held_against_eager(write, tmp_path):
    assert by_name(run(write(PAIR), tmp_path))["ours"]["difference"] == pytest.approx(0, abs=1e-6)
    wrong = PAIR.replace("d_y * factor", "d_y * factor * 1.5")
    assert by_name(run(write(wrong), tmp_path))["ours"]["difference"] == pytest.approx(0.5, rel=1e-4)


def test_memory__that_runs_out_after_timing__takes_no_time_away(write, tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(benchmark.Bench, "gradients", full)
    found = by_name(run(write(PAIR), tmp_path))
    assert found["ours"]["times"]["bwd"]["graph"] and found["ours"]["difference"] is None


def test_outputs__that_ours_does_not_differentiate__have_no_upstream_anywhere(write, tmp_path):
    source = PAIR.replace("return x * factor", "return x * factor, x * 3")
    source = source.replace("    return Scale.apply(x, factor)", "    return Scale.apply(x, factor), None")
    found = by_name(run(write(source), tmp_path))
    assert found["ours"]["difference"] == pytest.approx(0, abs=1e-6)


def test_ours__that_raises__fails_the_case_with_its_line(write, tmp_path):
    path = write(PAIR.replace("d_y = d_y.contiguous()", "raise RuntimeError('no such launch')"))
    case = run(path, tmp_path)
    assert not case["ok"] and "no such launch" in case["error"]["message"]
    assert case["error"]["line"] == path.read_text().split("raise RuntimeError")[0].count("\n") + 1


def test_work__that_goes_on_after_the_call__is_told(write, tmp_path):
    found = by_name(run(write(PAIR), tmp_path, FakeGpu(late=7.0)))
    assert found["ours"]["late"] == [7.0] * 6 * benchmark.ROUNDS_LEAST


def test_memory__saved_is_what_stays_beyond_the_outputs(write, tmp_path):
    found = by_name(run(write(PAIR), tmp_path))
    assert found["ours"]["saved_bytes"] == 1000 - 4 * 40  # the fake gives each forward 1000 bytes
    assert found["ours"]["peak_bytes"] == 4000


def test_rounds__end_with_the_seconds_and_never_past_the_most(write, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "ROUNDS_MOST", 9)
    assert run(write(SCALE_PAIR), tmp_path, seconds=1000)["rounds"] == 9
    monkeypatch.setattr(benchmark, "VALUES_MOST", 8 * 48)
    assert run(write(SCALE_PAIR), tmp_path, seconds=1000)["rounds"] == 8
    monkeypatch.setattr(benchmark, "VALUES_MOST", 48)
    assert run(write(SCALE_PAIR), tmp_path, seconds=1000)["rounds"] == benchmark.ROUNDS_LEAST


def test_rounds__that_take_many_times_the_seconds__are_given_up_but_for_the_least(write, tmp_path):
    assert run(write(SCALE_PAIR), tmp_path, seconds=0, rounds=40)["rounds"] == benchmark.ROUNDS_LEAST
    assert run(write(SCALE_PAIR), tmp_path, seconds=10, rounds=40)["rounds"] >= 40
    assert run(write(SCALE_PAIR), tmp_path, seconds=0, rounds=3)["rounds"] == 3


class Slow(FakeGpu):
    """Whatever the reference of the file is asked for takes its time, on a clock that stands still else."""

    now = 0.0

    def time(self, call):
        asked = getattr(call.__self__, "call", call.__self__)  # a graph's
        if asked.function.__name__ == "reference":
            self.now += 0.05
        return super().time(call)


def test_peer__that_takes_all_the_seconds__has_fewer_turns_than_ours(write, tmp_path, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(benchmark, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(monotonic=lambda: slow.now))
    found = by_name(run(write(PAIR), tmp_path, slow))
    turns = {name: len(one["times"]["bwd"]["alone"]) for name, one in found.items() if "times" in one}
    assert turns == {
        "ours": benchmark.ROUNDS_LEAST,
        "eager": benchmark.SLOW_ROUNDS,
        "compile": benchmark.ROUNDS_LEAST,
    }


def test_ours__slow_as_it_may_be__has_every_turn(write, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "SLOW_SECONDS", 0.0)
    found = by_name(run(write(PAIR), tmp_path))
    assert len(found["ours"]["times"]["bwd"]["alone"]) == benchmark.ROUNDS_LEAST
    assert len(found["eager"]["times"]["bwd"]["alone"]) == benchmark.SLOW_ROUNDS


class Sulking(FakeGpu):
    """Raises once more when it is first asked for anything after a capture that failed."""

    failed = False

    def capture(self, call, pool):
        self.failed = self.refuses == call.__self__.function.__name__
        return super().capture(call, pool)

    def release(self):
        failed, self.failed = self.failed, False
        if failed:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_graph__whose_failure_is_told_twice__leaves_the_plain_calls(write, tmp_path):
    found = by_name(run(write(PAIR), tmp_path, Sulking(refuses="scale_autograd")))
    assert "not permitted when stream is capturing" in found["ours"]["no_graph"]
    assert set(found["ours"]["times"]["bwd"]) == {"alone"}


class Endless(FakeGpu):
    def compile(self, function):
        def compiled(*args, **kwargs):
            while True:
                time.sleep(0.01)

        return compiled


def test_compile__that_takes_without_end__is_missing_and_the_others_are_timed(write, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "COMPILE_SECONDS", 0.2)
    found = by_name(run(write(PAIR), tmp_path, Endless()))
    assert found["compile"]["missing"] == "compiling it took more than 0.2 s"
    assert all(found[name]["times"]["bwd"]["alone"] for name in ("ours", "eager"))


def test_compile__that_took_too_long_once__is_not_asked_for_other_shapes(write, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "COMPILE_SECONDS", 0.2)
    request = {
        "file": str(write(PAIR)),
        "device": "cuda",
        "cases": [*CASES, {**CASES[0], "id": 1}],
        "seconds": 0,
    }
    first, second = map(by_name, benchmark.run(request, tmp_path, Endless())["cases"])
    assert "took more than" in first["compile"]["missing"]
    assert second["compile"]["missing"] == "it took more than 0.2 s for a shape before"
    assert second["eager"]["times"]["bwd"]["alone"]


class Stubborn(FakeGpu):
    """Takes the end of its time for an error of something else, once or for good."""

    def __init__(self, ends):
        super().__init__()
        self.ends, self.told = ends, 0

    def compile(self, function):
        def compiled(*args, **kwargs):
            while True:
                try:
                    time.sleep(5)
                except TimeoutError as exc:
                    self.told += 1
                    if self.told == 2 or self.ends:
                        raise RuntimeError("backend raised") from exc

        return compiled


@pytest.mark.parametrize("ends", [True, False])
def test_compile__that_makes_another_error_of_its_end__is_told_again(write, tmp_path, monkeypatch, ends):
    monkeypatch.setattr(benchmark, "COMPILE_SECONDS", 0.1)
    monkeypatch.setattr(limit, "AGAIN_SECONDS", 0.1)
    gpu = Stubborn(ends)
    request = {"file": str(write(PAIR)), "device": "cuda", "cases": [*CASES, {**CASES[0], "id": 1}]}
    first, second = map(by_name, benchmark.run({**request, "seconds": 0}, tmp_path, gpu)["cases"])
    assert first["compile"]["missing"] == "compiling it took more than 0.1 s"
    assert second["compile"]["missing"] == "it took more than 0.1 s for a shape before"
    assert gpu.told == (1 if ends else 2)


def needs(path, scratch, **fields):
    request = {"file": str(path), "device": "cuda", "cases": CASES, "ceiling_dtype": "float32", **fields}
    return ceilings.run(request, scratch, FakeGpu())


def test_ceilings__count_bytes_once_each(write, tmp_path):
    found = needs(write(PAIR), tmp_path)
    (case,) = found["cases"]
    assert case["bytes"] == {"fwd": 320, "bwd": 480, "both": 480} and case["flops"] is None
    assert case["least_bytes"] == {"fwd": 160, "bwd": 160, "both": 320}
    assert found["copy"]["bytes"] == 2 << 14 and len(found["copy"]["ms"]) == 20
    assert found["matmul"]["flops"] == 2 * 8**3 and found["matmul"]["dtype"] == "float32"
    assert found["device"]["name"] == "fake"


def test_ceilings__flops_of_the_file__by_pass(write, tmp_path):
    counted = "\n\ndef flops(dims, mode):\n    return dims['N'] * {'fwd': 1, 'bwd': 2}.get(mode, 3)\n"
    (case,) = needs(write(PAIR + counted), tmp_path)["cases"]
    assert case["flops"] == {"fwd": 40.0, "bwd": 80.0, "both": 120.0}


def test_ceilings__shape_that_the_forward_does_not_take__fails_alone(write, tmp_path):
    cases = [{"id": 0, "dims": {"M": 1}, "seed": 1}, {"id": 1, "dims": {"N": 8}, "seed": 1}]
    found = needs(write(PAIR), tmp_path, cases=cases)["cases"]
    assert [case["ok"] for case in found] == [False, True]
    assert "raised KeyError" in found[0]["error"]["message"]


def test_autotuner__of_what_is_timed__measures_as_for_its_user(write, tmp_path):
    run(write(SCALE_PAIR), tmp_path)

    @triton.autotune([triton.Config({}), triton.Config({}, num_warps=8)], key=[])
    @triton.jit
    def kernel(x_ptr):
        pass

    tuner: Any = kernel
    asked = []
    tuner.nargs = {}
    tuner.do_bench = lambda call, quantiles: asked.append(quantiles) or [3.0, 2.0, 4.0]
    assert tuner._bench(config=tuner.configs[0]) == [3.0, 2.0, 4.0] and len(asked) == 1


def test_capture__begins_when_nothing_of_the_calls_before_is_left(write, tmp_path):
    left = []

    class Gpu(FakeGpu):
        def capture(self, call, pool):
            if call.__name__ == "forward":
                left.append(len(call.__self__.outputs))
            return call

    run(write(PAIR), tmp_path, Gpu())
    assert left == [0] * 3
