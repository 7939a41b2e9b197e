"""Operation bench: how long a pair's forward and backward take, beside others that compute the same.

    ours        the entry of the file
    eager       its reference(), differentiated by autograd
    compile     torch.compile of that
    baseline    what its baseline() returns, a function with the stub's parameters

or, where the request has a member "rival", none of those but

    rival       the entry of the file that it names; null: nobody, ours alone is timed

All are called in one process, in turn, on inputs drawn anew for each call. While this compiles others are at
work on the GPU: it is had alone for what the clock says only, the rounds and what autotuners measure. Nothing
here judges: samples go to the daemon as they are. This process has run the candidate's code, which could
change all that it says (docs/protocol.md has what the daemon can still tell).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import draw
from ..errors import Unusable, describe, wrap
from ..forward import Forward, load
from ..launches import tune_by_the_clock, tuned, tuning_anew
from . import budget, ceilings
from .candidate import entry_of
from .ceilings import PASSES
from .device_clock import Gpu
from .kernel_times import kernel_times
from .limit import Limit
from .turns import Turns

# Unless more are asked for; the median of fewer than six has no interval at 95 %.
ROUNDS_LEAST, ROUNDS_MOST = 7, 100
VALUES_MOST = 400_000  # in a result, of all cases: the daemon takes no more than half a million
COMPILE_SECONDS = 60  # for torch.compile of one shape: it unrolls loops over time without end
# Of a peer that alone takes all the seconds, and so many at least: a loop over rows in Python, say.
SLOW_ROUNDS, SLOW_SECONDS = 3, 1.0
_PATIENCE = 5  # times the seconds: after so many the rounds asked for are given up, but for the least
MEASURED = ("ours", "rival")  # what a verdict on speed is about: in every round
_VALUES_A_ROUND = 48  # four subjects, three passes, two ways; and what went on behind each
Samples = dict[str, dict[str, list[float]]]  # by pass, then "alone" or "graph": milliseconds


def run(
    request: dict[str, Any], scratch: Path, gpu: Gpu | None = None, turns: Turns | None = None
) -> dict[str, Any]:
    """The result of docs/protocol.md's op bench. Errors of one case do not end the others."""
    turns = turns or Turns.of(request)
    gpu = gpu or Gpu(request["device"], scratch)
    target = request.get("target") or "sm_90"
    fwd = load(request["file"], gpu.mode, target, str(gpu.device), function=request.get("function"))
    tune_by_the_clock()
    entry = entry_of(fwd, request.get("entry"))
    rival = None
    if request.get("rival"):
        other = load(request["rival"], gpu.mode, target, str(gpu.device), function=request.get("function"))
        rival = entry_of(other, None)
    asked = request["cases"]
    passes = request.get("passes") or PASSES
    races = "rival" in request
    count = max(1, len(asked))
    pace = Pace(
        request["seconds"] / count,
        request.get("rounds") or ROUNDS_LEAST,
        min(ROUNDS_MOST, VALUES_MOST // _VALUES_A_ROUND // count),
    )
    # A race is over in seconds, and waiting for a turn takes one: all its shapes have the same.
    together = races and turns.shared
    waiting = [list(range(len(asked)))] if together and asked else [[at] for at in range(len(asked))]
    cases: list[dict[str, Any]] = [{} for _ in asked]
    roof = (
        roof_of(fwd, gpu, asked[-1], request.get("dtype"), turns)
        if asked and request.get("kernels")
        else None
    )
    compiles = True  # until that took too long
    while waiting:
        batch = waiting.pop(0)
        benches = [Bench(fwd, gpu, asked[at], passes, request.get("dtype")) for at in batch]
        for bench in benches:
            with bench.failing():
                bench.warm(beside(entry, rival) if races else subjects_of(fwd, entry, gpu, compiles))
            compiles = compiles and not any(subject.endless for subject in bench.subjects)
        benches[-1].kernels_too = roof is not None and batch[-1] == len(asked) - 1
        for at, bench, made in zip(batch, benches, take_turns(benches, turns, pace), strict=True):
            cases[at] = made
            if len(batch) > 1 and bench.ran_out():  # beside the other shapes
                waiting.append([at])
        del bench, benches
        gpu.release()  # also the memory of graphs
    return {"entry": entry.__name__, "cases": cases, **({"roof": roof} if roof else {})}


def roof_of(
    fwd: Forward, gpu: Gpu, case: dict[str, Any], dtype: str | None, turns: Turns
) -> dict[str, Any] | None:
    """None where there is no room for it, or the forward fails by itself: that is told elsewhere."""
    try:
        return ceilings.of_one(fwd, gpu, case, dtype, turns)
    except Exception:  # noqa: BLE001
        return None
    finally:
        gpu.release()


@dataclass
class Pace:
    """Of one shape: for how many seconds rounds go on, how many there are at least, and at most."""

    seconds: float
    least: int
    most: int


def take_turns(benches: list[Bench], turns: Turns, pace: Pace) -> list[dict[str, Any]]:
    """Shapes whose subjects were called, timed in one turn: results, in their order. What autotuners chose
    while others were at work is measured again in a turn before."""
    if turns.shared and tuned():
        with turns.alone(), tuning_anew():
            for bench in benches:
                with bench.failing():
                    bench.call_again()
    for bench in benches:
        with bench.failing():
            bench.capture()
    if any(bench.error is None for bench in benches):
        with turns.alone():
            for bench in benches:
                with bench.failing():
                    bench.time_all(pace)
                    bench.time_kernels()
    return [bench.result() for bench in benches]


@dataclass
class Subject:
    """One of those that are timed; `missing` is why it is not."""

    name: str
    function: Callable[..., Any] | None
    missing: str | None = None
    endless: bool = False  # it took too long to compile
    full: bool = False  # what it is missing, or has no graph, for is memory of the device
    crowded: bool = False  # of which others held a good part
    spent: float = 0.0  # seconds of its turns
    call: Call | None = None  # the first one
    graphs: Graphs | None = None
    no_graph: str | None = None
    times: Samples = field(default_factory=dict)
    late: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    peak_bytes: int = 0
    difference: float | None = None
    kernels: list[dict[str, Any]] | None = None

    def to_dict(self) -> dict[str, Any]:
        if self.function is None:
            return {"name": self.name, "missing": self.missing, **self._memory()}
        return {
            "name": self.name,
            "no_graph": self.no_graph,
            "times": self.times,
            "late": self.late,
            "saved_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
            "difference": self.difference,
            **({"kernels": self.kernels} if self.kernels is not None else {}),
            **self._memory(),
        }

    def _memory(self) -> dict[str, bool]:
        return {"out_of_memory": True} if self.full and self.crowded else {}


def subjects_of(fwd: Forward, entry: Callable[..., Any], gpu: Gpu, compiles: bool = True) -> list[Subject]:
    """In the order in which they take turns; `compiles`: whether torch.compile is one of them."""
    reference = fwd.reference
    without = None if reference else "the file has no reference()"
    slow = None if compiles else f"it took more than {COMPILE_SECONDS} s for a shape before"
    baseline, problem = _baseline(fwd)
    return [
        Subject("ours", entry),
        Subject("eager", reference, without),
        Subject("compile", gpu.compile(reference) if reference and compiles else None, without or slow),
        Subject("baseline", baseline, problem),
    ]


def beside(entry: Callable[..., Any], rival: Callable[..., Any] | None) -> list[Subject]:
    """The file's entry, and another pair's where there is one."""
    return [Subject("ours", entry)] + ([Subject("rival", rival)] if rival else [])


def _baseline(fwd: Forward) -> tuple[Callable[..., Any] | None, str | None]:
    make = getattr(fwd.module, "baseline", None)
    if not callable(make):
        return None, "the file has no baseline()"
    try:
        made = make()
    except Exception as exc:  # noqa: BLE001 (a library that is not there, say)
        return None, f"baseline() raised {describe(exc)}"
    return (made, None) if callable(made) else (None, "baseline() returns nothing that could be called")


class Call:
    """One subject on inputs of its own: the same values for the same seed."""

    def __init__(
        self,
        fwd: Forward,
        function: Callable[..., Any],
        dims: dict[str, Any],
        seed: int,
        dtype: str | None,
        asked: list[int] | None,
    ) -> None:
        """`asked`: which outputs have an upstream; None: all that have a gradient."""
        args, kwargs = draw.make_inputs(fwd, dims, seed, dtype=dtype)
        wanted = draw.grad_inputs(fwd, draw.bind(fwd, args, kwargs))
        self.function = function
        self.seed = seed
        self.arguments = fwd.signature.bind(*args, **kwargs)
        self.leaves = {name: value.detach().requires_grad_() for name, value in wanted.items()}
        self.arguments.arguments.update(self.leaves)
        self.asked = asked
        self.differentiable: list[int] = []
        self.outputs: list[torch.Tensor] = []
        self.upstreams: list[torch.Tensor] = []

    def forward(self) -> None:
        returned = draw.flatten(self.function(*self.arguments.args, **self.arguments.kwargs))
        found = [at for at, v in enumerate(returned) if isinstance(v, torch.Tensor) and v.requires_grad]
        self.differentiable = [at for at in found if self.asked is None or at in self.asked]
        self.outputs = [returned[at] for at in self.differentiable]
        if not self.outputs:
            raise Unusable("no_outputs", "no output of the call has a gradient")

    def draw_upstreams(self, seed: int) -> list[torch.Tensor]:
        """Of the outputs that the call has now."""
        count = len(self.outputs)
        made = [
            draw.upstream("normal", seed, None, o.shape, o.dtype, o.device, at, count)
            for at, o in enumerate(self.outputs)
        ]
        return [value for value in made if value is not None]

    def backward(self) -> tuple[torch.Tensor | None, ...]:
        leaves = list(self.leaves.values())
        return torch.autograd.grad(self.outputs, leaves, self.upstreams, allow_unused=True)

    def both(self) -> None:
        self.forward()
        self.backward()

    def tensors(self) -> Iterator[torch.Tensor]:
        """What a graph reads."""
        yield from draw.tensors_in(self.arguments.arguments)
        yield from self.upstreams


class Graphs:
    """A call's forward and backward as CUDA graphs: always replayed in this order, on the same tensors, whose
    values change between."""

    def __init__(self, gpu: Gpu, call: Call) -> None:
        pool = gpu.pool()
        self.gpu = gpu
        self.call = call
        # What is left of the calls before keeps autograd's nodes of the leaves, and those their stream: the
        # backward would wait for it, which no capture may.
        call.outputs = []
        self.forward = gpu.capture(call.forward, pool)
        self.backward = gpu.capture(call.backward, pool)

    def both(self) -> None:
        self.forward()
        self.backward()

    @torch.no_grad()
    def refill(self, fresh: Call) -> None:
        """Other values where the sizes are the same; what overlaps itself keeps its own."""
        fresh.upstreams = self.call.draw_upstreams(fresh.seed)
        for old, new in zip(self.call.tensors(), fresh.tensors(), strict=False):
            if old.shape == new.shape and all(old.stride()):
                old.copy_(new)


class Bench:
    """One shape: warm(), capture(), time_all() and result(), in this order. Inside failing() what raises is
    the shape's error, after which nothing more is done for it."""

    def __init__(
        self, fwd: Forward, gpu: Gpu, case: dict[str, Any], passes: Sequence[str], dtype: str | None
    ) -> None:
        self.fwd = fwd
        self.gpu = gpu
        self.id: Any = case["id"]
        self.dims: dict[str, Any] = case["dims"]
        self.seed: int = case["seed"]
        self.passes = [name for name in PASSES if name in passes]
        self.dtype = dtype
        self.asked: list[int] | None = None  # outputs that ours differentiates: of the others no more
        self.subjects: list[Subject] = []
        self.rounds = 0
        self.error: Unusable | None = None
        self.full = False  # its cause is memory of the device
        self.kernels_too = False

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as exc:  # noqa: BLE001 (one case fails, the others go on)
            self.error = self.error or self.why(exc)
            self.subjects = []

    def why(self, exc: BaseException) -> Unusable:
        error = wrap("candidate_raised", "", exc, [self.fwd.path])
        full = budget.out_of_memory(exc)
        if full is not None:
            self.full, error.message = True, f"{full}: {error.message}"
        error.out_of_memory = self.full and self.gpu.crowded()
        return error

    def timed(self) -> list[Subject]:
        return [subject for subject in self.subjects if subject.function is not None]

    def warm(self, subjects: list[Subject]) -> None:
        """Everything is compiled and tuned; what that takes is nobody's time. Whoever cannot be called is
        missing, unless it is ours."""
        self.subjects = subjects
        for subject in self.timed():
            limit = Limit(COMPILE_SECONDS if subject.name == "compile" else 0, "compiling it")
            with self.missing(subject, limit), limit:
                call = self.call(subject, self.seed)
                call.forward()
                if subject.name == "ours":
                    self.asked = call.differentiable
                call.upstreams = call.draw_upstreams(self.seed)
                self.gpu.warm(call.both)
                call.outputs = []
                subject.call = call

    def call_again(self) -> None:
        """Autotuners have forgotten what they chose, and everything is compiled."""
        self.gpu.settle()
        for subject in self.timed():
            with self.missing(subject):
                assert subject.call is not None
                self.gpu.warm(subject.call.both)
                subject.call.outputs = []

    def capture(self) -> None:
        """Graphs, where there can be such, and what memory a step takes."""
        for subject in self.timed():
            with self.missing(subject):
                self.measure_memory(subject)
            if subject.function is None:
                continue
            assert subject.call is not None
            try:
                subject.graphs = Graphs(self.gpu, subject.call)
            except Exception as exc:  # noqa: BLE001 (whatever it is, the plain calls are timed)
                subject.no_graph = describe(exc)
                self.note_memory(subject, exc)
                with contextlib.suppress(
                    RuntimeError
                ):  # what is still wrong of the capture says so once more
                    self.gpu.release()

    @contextlib.contextmanager
    def missing(self, subject: Subject, limit: Limit | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            if subject.name == "ours":
                raise
            subject.endless = limit is not None and limit.over
            why = limit.told if limit and limit.over else f"it raised {describe(exc)}"
            self.note_memory(subject, exc)
            subject.function, subject.missing, subject.call = None, why, None

    def note_memory(self, subject: Subject, exc: Exception) -> None:
        subject.full = budget.out_of_memory(exc) is not None
        subject.crowded = subject.full and self.gpu.crowded()

    def ran_out(self) -> bool:
        """Whether memory was missing for the shape, or for one of its subjects."""
        return self.full or any(subject.full for subject in self.subjects)

    def time_all(self, pace: Pace) -> None:
        """Rounds, in each of which all have their turn: as many as `pace` has at least, or fewer where they
        take several times its seconds; and on until those are over, or there were the most. Slow peers have
        fewer turns."""
        if self.error is not None:
            return
        timed = self.timed()
        self.gpu.settle()
        began = time.monotonic()
        while True:
            spent = time.monotonic() - began
            enough = pace.least if spent < _PATIENCE * pace.seconds else min(pace.least, ROUNDS_LEAST)
            if self.rounds >= enough and (self.rounds >= pace.most or spent >= pace.seconds):
                break
            self.rounds += 1
            for subject in timed:
                often = subject.name in MEASURED or subject.spent < max(pace.seconds, SLOW_SECONDS)
                if often or self.rounds <= SLOW_ROUNDS:
                    self.turn(subject, self.seed + self.rounds)

    def time_kernels(self) -> None:
        """Of ours, each by itself, where that is wanted: told beside the times, which it cannot undo."""
        ours = next((subject for subject in self.timed() if subject.name == "ours"), None)
        if self.error is not None or ours is None or not self.kernels_too:
            return
        with contextlib.suppress(Exception):
            ours.kernels = kernel_times(self.gpu, self.call(ours, self.seed), self.seed)

    def result(self) -> dict[str, Any]:
        """What all is timed for; gradients are compared now."""
        with self.failing(), contextlib.suppress(torch.OutOfMemoryError):  # several sets may be too many
            self.compare(self.timed())
        if self.error is not None:
            return {"id": self.id, "ok": False, "error": self.error.to_dict()}
        subjects = [subject.to_dict() for subject in self.subjects]
        return {"id": self.id, "ok": True, "rounds": self.rounds, "subjects": subjects}

    def call(self, subject: Subject, seed: int) -> Call:
        assert subject.function is not None
        return Call(self.fwd, subject.function, self.dims, seed, self.dtype, self.asked)

    def measure_memory(self, subject: Subject) -> None:
        """What is kept for the backward beyond inputs and outputs, and the most that a step allocates."""
        call = self.call(subject, self.seed)
        call.forward()
        call.upstreams = call.draw_upstreams(self.seed)
        call.backward()  # once in this stream: libraries keep what they allocate here
        call.outputs = []
        self.gpu.release()
        before = self.gpu.allocated()
        call.forward()
        outputs = {o.untyped_storage().data_ptr(): o.untyped_storage().nbytes() for o in call.outputs}
        subject.saved_bytes = max(0, self.gpu.allocated() - before - sum(outputs.values()))
        call.outputs = []
        subject.peak_bytes = self.gpu.peak(call.both)

    def turn(self, subject: Subject, seed: int) -> None:
        """One time of each pass, of plain calls and of graphs."""
        began = time.monotonic()
        self.sample(subject, seed)
        subject.spent += time.monotonic() - began

    def sample(self, subject: Subject, seed: int) -> None:
        call = self.call(subject, seed)
        self.time(subject, "fwd", "alone", call.forward)
        call.upstreams = call.draw_upstreams(seed)
        self.time(subject, "bwd", "alone", call.backward)
        if "both" in self.passes:
            again = self.call(subject, seed)
            again.upstreams = call.upstreams
            self.time(subject, "both", "alone", again.both)
        graphs = subject.graphs
        if graphs is None:
            return
        graphs.refill(self.call(subject, seed))
        self.time(subject, "fwd", "graph", graphs.forward)
        self.time(subject, "bwd", "graph", graphs.backward)
        if "both" in self.passes:
            self.time(subject, "both", "graph", graphs.both)

    def time(self, subject: Subject, which: str, how: str, call: Callable[[], object]) -> None:
        """A pass that nobody asks for still has to run where another needs it."""
        if which not in self.passes:
            if which == "fwd":
                call()
            return
        _, ms, late = self.gpu.time(call)
        subject.times.setdefault(which, {}).setdefault(how, []).append(ms)
        subject.late.append(late)

    def compare(self, subjects: list[Subject]) -> None:
        """Once all is timed: how far each one's gradients are from those of eager PyTorch, by their norms."""
        eager = next((s for s in subjects if s.name == "eager"), None)
        if eager is None:
            return
        expected = self.gradients(eager)
        for subject in (one for one in subjects if one is not eager):
            subject.difference = max(
                (_difference(*both) for both in zip(self.gradients(subject), expected, strict=True)),
                default=0.0,
            )

    def gradients(self, subject: Subject) -> list[torch.Tensor]:
        """On the same inputs for each subject; what has no gradient has zeros."""
        call = self.call(subject, self.seed)
        call.forward()
        call.upstreams = call.draw_upstreams(self.seed)
        leaves = call.leaves.values()
        found = zip(call.backward(), leaves, strict=True)
        return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in found]


def _difference(grad: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; 0 for equal ones. At most 1e9, also where
    something is not finite."""
    if grad.shape != expected.shape:
        return 1e9
    norm = float(torch.linalg.vector_norm(expected.float()))
    gap = float(torch.linalg.vector_norm(grad.float() - expected.float()))
    if gap == 0.0:
        return 0.0
    ratio = gap / norm if norm else 1e9
    return ratio if ratio < 1e9 else 1e9
