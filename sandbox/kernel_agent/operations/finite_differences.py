"""Finite differences of the real Triton forward: a second opinion that needs no reference.

Along a random direction v, `<gradient, v>` must be the slope of L = sum(upstream * output). The forward runs
in float64 where it takes it, else in float32. How exactly it then computes is measured, not guessed: its
outputs are compared with the float64 evaluation of the same record. The step follows from that (a central
difference is best at the cube root of the relative rounding error), and so does the uncertainty of each
slope. A slope that is not certain says so and proves nothing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from .. import draw
from ..torch_tl.handles import EXACT
from ..torch_tl.record import Ref, Tape
from ..torch_tl.replay import Replay

if TYPE_CHECKING:
    from .oracle import Case, Recording

# Each but the first has an upstream of its own, which differs in its signs. A part that the oracle's gradient
# lacks may be next to nothing for one upstream, along every direction: that of a number that the host makes
# of an input is sum(upstream * what it scales) times the number's own slope.
DIRECTIONS = 4
DTYPES = ("float64", "float32", None)  # widest first; None is the file's own
# Of the best step by theory. Smaller ones are tried while the slopes differ by more than AGREE: across a kink
# (maximum, relu) the error shrinks with the step, where rounding reigns it grows, and either may be small at
# two of them by luck. Steps below FINE, which only a forward in float64 has, cross few kinks.
STEPS = (1.0, 0.5, 0.2, 0.05)
# Where those do not agree in float64, something inside rounds to float32 that the oracle rounds as well, as a
# number that the stub hands to a kernel: then larger ones do.
COARSE = (100.0, 50.0, 20.0)
AGREE = 1e-3
FINE = 1e-3
# The slopes ahead and behind: between them lies what the step curves, and shrinks with it. What stays this
# share of itself while steps shrink by half or more is a kink in the very middle, as where values are equal
# of which the largest is taken: there no slope is the gradient's.
STAYS = 0.75
# Of what lies between the slopes at small steps, larger ones have less than this share where a value inside
# is rounded.
LOWER = 0.5
_SEED = 0x5EED


@dataclass
class Slope:
    """One direction at one step. The analytic slope is along the way that the rounded inputs really went."""

    step: float
    analytic: float
    numeric: float
    noise: float  # what rounding in the two evaluations can make of `numeric`
    bend: float  # half of what lies between the slopes ahead and behind
    spread: float = math.inf  # how far the slopes at other steps are apart

    def to_dict(self) -> dict[str, float | None]:
        told = ("step", "analytic", "numeric", "noise", "spread")
        values = {key: getattr(self, key) for key in told}
        return {key: value if math.isfinite(value) else None for key, value in values.items()}


def finite_differences(case: Case) -> dict[str, Any]:
    """The member `fd` of docs/protocol.md for one case."""
    recording, exact, dtype = _widest(case)
    if detaches(recording.recorder.tape):
        return {"dtype": None, "slopes": {}, "skipped": "the stub detaches a value on the way to its outputs"}
    slopes: dict[str, list[dict[str, float | None]]] = {name: [] for name in recording.wanted}
    for number in range(DIRECTIONS):
        forward = _Forward(case, recording, dtype, number)
        gradients = forward.gradients(exact)
        noise, size = forward.rounding(exact)
        exact.release()
        best = (max(noise, torch.finfo(torch.float64).eps * size) / size) ** (1 / 3) if size else 1e-4
        for name, found in slopes.items():
            found.append(_directional(forward, name, gradients[name], best, noise).to_dict())
        if number + 1 < DIRECTIONS:
            exact = case.replay(recording, EXACT)
    return {"dtype": draw.dtype_name(forward.dtype), "slopes": slopes, "skipped": None}


def detaches(tape: Tape) -> bool:
    """Whether some value is used detached: intent leaves its derivative out, and a difference cannot."""
    used = [(getattr(entry, "args", None), getattr(entry, "kwargs", None)) for entry in tape.entries]
    return any(isinstance(leaf, Ref) and leaf.detached for leaf in tree_leaves(used))


def _widest(case: Case) -> tuple[Recording, Replay, str | None]:
    """The call in the widest dtype that the file takes, and its evaluation.

    A kernel that names the type behind a pointer runs in any other as well, and reads nonsense: only the
    evaluation notices.
    """
    for dtype in DTYPES[:-1]:
        try:
            recording = case.record(dtype)
            return recording, case.replay(recording, EXACT), dtype
        except Exception:  # noqa: BLE001 (a forward need not take a dtype that it was not written for)
            continue
    recording = case.record(case.dtype)
    return recording, case.replay(recording, EXACT), case.dtype


class _Forward:
    """The stub as a function of one input, everything else as drawn, for direction `number`."""

    def __init__(self, case: Case, recording: Recording, dtype: str | None, number: int) -> None:
        self.case = case
        self.recording = recording
        self.asked = dtype
        self.dtype = min((ref.dtype for ref in recording.wanted.values()), key=lambda dtype: dtype.itemsize)
        self.seed = (_SEED + case.seed * DIRECTIONS + number) % (1 << 63)
        self.upstreams = case.upstreams(recording.differentiable)
        if number:
            self.upstreams = {at: self._signed(at, upstream) for at, upstream in self.upstreams.items()}

    def _signed(self, at: int, upstream: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self.seed + at) % (1 << 63))
        signs = 1 - 2 * torch.randint(0, 2, upstream.shape, generator=generator)
        return upstream * signs.to(upstream)

    def gradients(self, exact: Replay) -> dict[str, torch.Tensor]:
        """The oracle's, where the forward runs: a small call is evaluated elsewhere."""
        found = self.case.gradients(exact, self.recording, self.upstreams)
        there = self.recording.recorder.tape.device
        return {name: grad.to(there) for name, grad in found.items()}

    def rounding(self, exact: Any) -> tuple[float, float]:
        """How far L is off by rounding, and how large its terms are."""
        wrong = right = 0.0
        for output in self.recording.differentiable:
            if output.index not in self.upstreams:
                continue
            upstream = self.upstreams[output.index].double()
            want = exact.value(self.recording.refs[output.index]).detach().to(upstream)
            wrong += float((upstream * (output.value.double() - want)).square().sum())
            right += float((upstream * want).square().sum())
        return math.sqrt(wrong), math.sqrt(right)

    def arguments(self, name: str, offset: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
        """Fresh arguments with `offset` added to one of them, and what that one then is."""
        bound = self.case.arguments(self.asked)
        with torch.no_grad():
            bound[name].copy_((bound[name].double() + offset).to(bound[name].dtype))
        return bound, bound[name].detach().double().clone()

    @functools.cached_property
    def middle(self) -> float:
        return self.loss(self.case.arguments(self.asked))

    def loss(self, bound: dict[str, Any]) -> float:
        outputs = draw.flatten(self.case.call(bound))
        return sum(float((u.double() * outputs[at].double()).sum()) for at, u in self.upstreams.items())


def is_kink(tried: list[Slope]) -> bool:
    """Whether slopes of steps that shrink are of a function with a kink where they start."""
    first, last = tried[0], tried[-1]
    seen = AGREE * max(abs(last.numeric), abs(last.analytic)) + 4 * last.noise
    return last.step < first.step and last.bend > max(seen, STAYS * first.bend)


def is_rounded(fine: list[Slope], coarse: list[Slope]) -> bool:
    """Whether what looks like a kink at small steps are the stairs of a value that something inside rounds:
    at larger steps they are lower, and a kink is as sharp as ever."""
    return max(one.bend for one in coarse) < LOWER * max(one.bend for one in fine)


def _directional(forward: _Forward, name: str, gradient: torch.Tensor, best: float, noise: float) -> Slope:
    """The slope along one direction, and how far it can be trusted."""
    centre = forward.case.arguments(forward.asked)[name].double()
    generator = torch.Generator(centre.device).manual_seed(forward.seed)
    direction = torch.randn(centre.shape, generator=generator, dtype=torch.float64, device=centre.device)
    scale = float(centre.square().mean().sqrt()) if centre.numel() else 1.0

    def slope(step: float) -> Slope:
        ahead, high = forward.arguments(name, step * direction)
        more = forward.loss(ahead)
        behind, low = forward.arguments(name, -step * direction)
        less = forward.loss(behind)
        analytic = float((gradient.double() * (high - low)).sum()) / (2 * step)
        bend = abs(more - 2 * forward.middle + less) / (2 * step)
        return Slope(step, analytic, (more - less) / (2 * step), noise / step, bend)

    def family(factors: tuple[float, ...], enough: int) -> list[Slope]:
        tried: list[Slope] = []
        for factor in factors:
            tried.append(slope(factor * best * (scale or 1.0)))
            if len(tried) >= enough and _spread(tried) <= AGREE * abs(tried[-1].numeric):
                break
        return tried

    fine = family(STEPS, 2 if best < FINE else 3)
    kink = is_kink(fine)
    found = _trusted(fine, kink)
    if best >= FINE or found.spread <= AGREE * abs(found.numeric):
        return found
    coarse = family(COARSE, len(COARSE))
    larger = _trusted(coarse, is_kink(coarse) or (kink and not is_rounded(fine, coarse)))
    return larger if larger.spread < found.spread else found


def _spread(tried: list[Slope]) -> float:
    values = [one.numeric for one in tried]
    return max(values) - min(values)


def _trusted(tried: list[Slope], kink: bool) -> Slope:
    """The one in the middle, as far as the others agree with it: not at all where they are of a kink. What
    still lies between the slopes ahead and behind at the last step may be one of several kinks, next to the
    middle: there the gradient is the slope of one side."""
    middle = tried[len(tried) // 2]
    middle.spread = math.inf if kink else _spread(tried) + tried[-1].bend
    return middle
