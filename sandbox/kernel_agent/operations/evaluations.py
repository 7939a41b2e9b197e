"""The record of a call, evaluated: exactly, in the inputs' own dtypes, and at inputs close by.

In comes a recording (oracle.py makes it) and what the case asks; out come gradients by the name of the input.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import draw, vary
from ..errors import Unusable
from ..forward import Forward
from ..torch_tl.handles import EXACT, NATIVE, KernelError
from ..torch_tl.kinks import Crossed, Kinks
from ..torch_tl.maxima import Maxima
from ..torch_tl.record import Recorder, Ref
from ..torch_tl.replay import Replay
from . import budget

FEW_ELEMENTS = 32
ILL_UNITS = 16  # in the last place, of the norm: so far off is eager PyTorch where terms cancel
NEARBY_ELEMENTS = 1 << 16  # of all inputs: larger cases do not hang on one rounding error, and cost more
NEARBY_DRAWS = 6
NEARBY_REACH = 64.0  # units in the last place: other rounding errors, the same conditions
CLOSER_DRAWS = 8  # where a gradient is off by little, of any size,
CLOSER_BYTES = 2 << 30  # but not more than fit into so much


@dataclass
class Recording:
    """One real call: its bound arguments, classified outputs, and the tape with names for both."""

    bound: dict[str, Any]
    wanted: dict[str, Ref]
    outputs: list[draw.Output]
    refs: dict[int, Ref]
    recorder: Recorder

    @property
    def differentiable(self) -> list[draw.Output]:
        return [output for output in self.outputs if output.differentiable]


class Evaluations:
    """Those of one case: a shape, a seed and an upstream."""

    def __init__(self, fwd: Forward, case: dict[str, Any], limits: Mapping[str, Any] | None = None) -> None:
        self.fwd = fwd
        self.limits = limits or {}
        self.seed = case["seed"]
        self.upstream = case["upstream"]
        self.varied = vary.Varied.of(case)
        self.masked = False  # see differentiate(),
        self.past = False  # see native(),
        self.holds = False  # and in differentiate(): maxima are constants in the inputs' own dtypes
        self._drawn: dict[tuple[Any, ...], torch.Tensor | None] = {}

    def refuse(self, why: str) -> Unusable:
        return Unusable("inputs_refused", why, self.fwd.path, self.fwd.stub_line)

    def differentiate(self, recording: Recording) -> tuple[Replay, Kinks, dict[str, torch.Tensor]]:
        """The exact evaluation, what it compared, and its gradients.

        NaN in a gradient of finite outputs may come of lanes that a mask discards; then this and all further
        evaluations of the case leave those out. Maxima of which it finds that they are only subtracted are
        constants from then on.
        """
        exact, kinks, gradients = self.evaluate(recording)
        if not self.ends_finite(exact, recording) or not any(
            bool(grad.isnan().any()) for grad in gradients.values()
        ):
            return exact, kinks, gradients
        exact.release()
        if "masked" in self.varied.values.values():  # 0 times an infinite input, as require_fair() has it
            raise self.refuse("a gradient is NaN")
        self.masked = True
        return self.evaluate(recording)

    def native(
        self, recording: Recording, exact: Mapping[str, torch.Tensor]
    ) -> tuple[Replay, dict[str, torch.Tensor]]:
        """The evaluation in the inputs' own dtypes, and its gradients.

        These may be NaN where float64 has numbers: of `x / (1 + exp(-x))` below -88 the exponential is
        infinite, what arrives at it zero, and eager PyTorch multiplies. A backward has to have a number there
        all the same, and what rounding errors it may have is said by an evaluation, and all further ones of
        this case, that leaves such products out (Masked), as differentiate() has it.
        """
        replay = self.replay(recording, NATIVE)
        found = self.gradients(replay, recording)
        lost = any(bool((grad.isnan() & exact[name].isfinite()).any()) for name, grad in found.items())
        if not lost or self.masked or not self.ends_finite(replay, recording):
            return replay, found
        replay.release()
        self.past = True
        replay = self.replay(recording, NATIVE)
        return replay, self.gradients(replay, recording)

    @staticmethod
    def ends_finite(replay: Replay, recording: Recording) -> bool:
        return all(bool(replay.value(ref).isfinite().all()) for ref in recording.refs.values())

    def evaluate(self, recording: Recording) -> tuple[Replay, Kinks, dict[str, torch.Tensor]]:
        kinks, maxima = Kinks(), Maxima()
        exact = self.replay(recording, EXACT, kinks=kinks, maxima=maxima)
        gradients = self.gradients(exact, recording)
        self.holds = maxima.are_subtracted(self.upstream_norm(recording))
        return exact, kinks, gradients

    def replay(
        self,
        recording: Recording,
        precision: str,
        jitter: int | Sequence[int] | None = None,
        reach: float = 1,
        kinks: Kinks | None = None,
        maxima: Maxima | None = None,
    ) -> Replay:
        """The record evaluated. The first time of a small call of a GPU is a trial on the CPU.

        Its seconds are this thread's, on a processor: neither a busy machine nor one that stops this process
        while others time kernels decides whether a shape is checked as it is."""
        tape = recording.recorder.tape
        if precision == NATIVE and self.holds:
            maxima = Maxima(held=True)
        place = budget.place(tape)
        masked = self.masked or (self.past and precision == NATIVE)
        replay = Replay(tape, precision, place, self.fwd.path, jitter, reach, masked, kinks, maxima)
        if replay.memory.device != tape.device and replay.memory.checked:
            replay.memory.watch = budget.trial()
        seconds = self.limits.get("seconds")
        if seconds is not None and replay.memory.checked:
            replay.memory.until = time.thread_time() + float(seconds)
        try:
            replay.run()
        except budget.Wide:
            replay.release()
            tape.wide = True
            if kinks is not None:
                kinks.forget()
            return self.replay(recording, precision, jitter, reach, kinks, maxima)
        return replay

    def nearby(self, recording: Recording, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Exact and same-dtype gradients at inputs close by, for gradients that hang on few elements.

        The error of eager PyTorch on one element is one draw of its rounding: it may be zero by luck where
        terms cancel, and would then set a standard that no honest kernel keeps.
        """
        size = sum(value.numel() for value in draw.grad_inputs(self.fwd, recording.bound).values())
        few = [name for name in recording.wanted if size <= NEARBY_ELEMENTS and hangs_on_few(name, found)]
        return self.draws(recording, few, range(NEARBY_DRAWS))

    def look_closer(self, recording: Recording) -> dict[str, torch.Tensor]:
        """More of the same of every gradient, of any size, where one was found to be off by little."""
        exact, kinks, gradients = self.differentiate(recording)
        exact.release()
        size = sum(grad.numel() for grad in gradients.values())
        room = CLOSER_BYTES // max(1, size * (2 * torch.float64.itemsize + torch.float32.itemsize))
        draws = min(CLOSER_DRAWS, max(1, room))
        which = range(NEARBY_DRAWS, NEARBY_DRAWS + draws)
        made = self.draws(recording, list(gradients), which)
        for at, place in enumerate(which):
            moved = self.moved_by_a_unit(recording, kinks, self.seed + 1 + place)
            made |= {f"moved/{at}/{name}": grad for name, grad in self.gradients(moved, recording).items()}
            moved.release()
        return made

    def moved_by_a_unit(self, recording: Recording, kinks: Kinks, seed: int) -> Replay:
        """The exact evaluation at inputs moved by up to one unit in their last place, and beyond kinks that
        are as close as that. Of few inputs that cancel one draw may move all alike, and so nothing."""
        return self.replay(recording, EXACT, seed, kinks=Crossed(kinks, unit_of(recording)))

    def draws(self, recording: Recording, names: list[str], which: range) -> dict[str, torch.Tensor]:
        """Exact and same-dtype gradients of `names` at inputs close by, `near/<k>` and `near_base/<k>`."""
        made: dict[str, torch.Tensor] = {}
        seeds = [self.seed + 1 + place for place in which] if names else []
        for part, precision in (("near", EXACT), ("near_base", NATIVE)) if seeds else ():
            for at, gradients in enumerate(self.moved(recording, precision, seeds)):
                for name in names:
                    dtype = torch.float64 if precision == EXACT else recording.wanted[name].dtype
                    made[f"{part}/{at}/{name}"] = gradients[name].to(dtype)
        return made

    def moved(
        self, recording: Recording, precision: str, seeds: list[int]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """The gradients at inputs close by, for each seed. Of small calls all are evaluated at once, which
        takes hardly longer than one of them, and where that cannot be, as the rest: one after another."""
        together = len(seeds) * budget.evaluation_bytes(recording.recorder.tape) <= budget.SMALL
        if together:
            with contextlib.suppress(KernelError):
                replay = self.replay(recording, precision, seeds, NEARBY_REACH)
                found = replay.each_gradients(self.pairs(recording), recording.wanted)
                replay.release()
                yield from found
                return
        for seed in seeds:
            replay = self.replay(recording, precision, seed, NEARBY_REACH)
            gradients = self.gradients(replay, recording)
            replay.release()
            yield gradients

    def gradients(
        self, replay: Replay, recording: Recording, upstreams: Mapping[int, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """The gradients of an evaluation, for the case's upstreams or others."""
        return replay.gradients(self.pairs(recording, upstreams), recording.wanted)

    def pairs(
        self, recording: Recording, upstreams: Mapping[int, torch.Tensor] | None = None
    ) -> list[tuple[Ref, torch.Tensor]]:
        """Outputs and what arrives at them: the case's upstreams, or others."""
        drawn = self.upstreams(recording.differentiable) if upstreams is None else upstreams
        return [(recording.refs[at], value) for at, value in drawn.items()]

    def upstreams(self, outputs: list[draw.Output]) -> dict[int, torch.Tensor]:
        """Upstream gradient by index of the output; an output without one is left out.

        Each is drawn once a case: every evaluation of the record takes the same one, and none of them writes
        to it.
        """
        drawn = [self.upstream_of(o.value, at, len(outputs), o.index) for at, o in enumerate(outputs)]
        return {o.index: value for o, value in zip(outputs, drawn, strict=True) if value is not None}

    def upstream_norm(self, recording: Recording) -> float:
        drawn = self.upstreams(recording.differentiable).values()
        return math.sqrt(sum(float(value.double().norm()) ** 2 for value in drawn))

    def upstream_of(self, value: torch.Tensor, at: int, count: int, index: int) -> torch.Tensor | None:
        key = (tuple(value.shape), value.dtype, value.device, at, count, index)
        if key not in self._drawn:
            asked = self.upstream
            layout = self.varied.layouts.get(vary.upstream_name(index))
            self._drawn[key] = draw.upstream(asked["kind"], asked["seed"], layout, *key[:-1])
        return self._drawn[key]


def hangs_on_few(name: str, made: Mapping[str, torch.Tensor]) -> bool:
    """Whether few elements decide how far off a gradient is: it has no more, or eager PyTorch rounds it badly
    and few are its norm (of a norm over one column, the rows nearest to zero) or all that eager PyTorch is
    off by (of angles in a chain, those where three atoms lie nearly on a line)."""
    exact, base = made[f"grad/{name}"], made[f"base/{name}"]
    if exact.numel() <= FEW_ELEMENTS:
        return True
    off = base.double() - exact
    if not bool(off.norm() > ILL_UNITS * torch.finfo(base.dtype).eps * exact.norm()):
        return False
    return few_are_its_norm(exact) or few_are_its_norm(off)


def few_are_its_norm(tensor: torch.Tensor) -> bool:
    squares = tensor.square()
    return bool(squares.sum().square() <= FEW_ELEMENTS * squares.square().sum())


def unit_of(recording: Recording) -> float:
    """The largest unit in the last place of an input, relative to it."""
    return max(torch.finfo(ref.dtype).eps for ref in recording.wanted.values())
