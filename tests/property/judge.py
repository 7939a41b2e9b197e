"""One program through the differentiator, the candidate and the oracle, judged by the verdict's rule
(docs/protocol.md, compare.h)."""

from __future__ import annotations

import math
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diff_support import draft, pair_text
from kernel_agent import tensors
from kernel_agent.errors import Unusable
from kernel_agent.operations import candidate, evaluations, oracle

FACTOR = 2.0
FLOOR = {"float32": 1e-5, "float16": 1e-3}  # share of the norm
OFF = {
    "float32": (1e-3, 1e-5),
    "float16": (1e-2, 1e-3),
}  # tolerance of an element, share of elements beyond it
MOVED_MAX = 0.01  # the most that sensitivity to rounding is believed
ZERO_SHARE = 100.0  # floors of the upstream's norm that rounding may leave where the gradient is zero
FEW, SLIGHT, REPEATS = (
    64,
    4e-3,
    3,
)  # such an error is judged again with other inputs and upstreams, and must fail again
INSIDE = 32  # times what rounding of the inputs moves, rounding of what is made of them may: sin(sin(900 x))
KINDS = ("normal", "none_one", "onehot")
LAYOUTS = (None, "stacked", "expanded", "slice", "spanned")
# What docs/differentiator.md says that a call raises which the traced ones do not speak for.
UNTRACED = "no size in SWEEP did when this was written"
RAISED = (
    UNTRACED,
    "that this launch takes has no backward",
    "an expanded tensor shares memory between its elements",
    "of a gradient overlaps itself",
    "has to be overwritten as a whole",
    "holds differentiable values, as in no call that was traced",
    "the backward is made for a launch that unpacks",
    "would write the same rows",
    "was changed in place after it was saved, which autograd does not allow",  # by torch: so would eager
)


@dataclass
class Outcome:
    """`right`, `wrong`, `refused`, `raised` (right, but for sizes where the backward says that it has none),
    `crashed`, `vague` (rounding decides the gradient), `unusable` (the program itself)."""

    state: str
    reason: str = ""
    kind: str = ""  # of a wrong one: "raised", or "gradient x"
    backward: str = ""
    report: dict[str, Any] | None = None
    slight: bool = (
        False  # a few elements, a little off: it may be rounding in sums of upstream gradients that cancel
    )

    @property
    def bad(self) -> bool:
        return self.state in ("wrong", "crashed")


def judge(
    source: str,
    sweep: list[dict[str, Any]],
    seed: int,
    schedule: str | None = None,
    others: bool = False,
    config: dict[str, int] | None = None,
) -> Outcome:
    """Differentiate on the first shape (with `others`, what the rest of the sweep launches is traced too),
    compare on all. `config`: a tuner's."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(source)
        try:
            case = {"dims": sweep[0], "seed": 1, "others": sweep[1:] if others else []}
            made = draft(file, sweep[0], schedule=schedule, dtype=None, case=case, config=config)
        except Unusable as error:
            state = "refused" if error.kind == "unsupported_op" else "unusable"
            return Outcome(state, f"{error} (line {error.line})")
        except Exception as error:  # noqa: BLE001 (a crash of the differentiator is a finding)
            kind, made = f"{type(error).__name__}: {error}", None
            reason = traceback.format_exc(limit=-3)
        cases = _cases(sweep, seed)
        if made is None:
            problem = _expected(Path(folder), file, cases)
            return (
                Outcome("unusable", problem) if isinstance(problem, str) else Outcome("crashed", reason, kind)
            )
        outcome = _compare(Path(folder), file, source, made["backward"], cases)
        if outcome.state == "raised" and others and UNTRACED in outcome.reason:
            outcome = Outcome("wrong", outcome.reason, "raised")
        if outcome.slight and all(
            _compare(Path(folder), file, source, made["backward"], _cases(sweep, other)).state == "right"
            for other in range(seed + 1000, seed + 1000 + REPEATS)
        ):
            outcome = Outcome("vague", "vague: a little off for one upstream only")
        outcome.backward, outcome.report = made["backward"], made["report"]
        return outcome


def _cases(sweep: list[dict[str, int]], seed: int) -> list[dict[str, Any]]:
    """One case a shape, with a kind of upstream each."""
    return [
        {
            "id": i,
            "dims": dims,
            "seed": seed + i,
            "upstream": {"kind": KINDS[(seed + i) % len(KINDS)], "seed": 40 + seed + i},
            "layouts": {"upstream/0": layout} if (layout := LAYOUTS[(seed + i) % len(LAYOUTS)]) else {},
        }
        for i, dims in enumerate(sweep)
    ]


# A little off is judged again on other inputs below, which says more than draws of rounding around these, and
# costs less.
evaluations.NEARBY_DRAWS = 0
COMMON = {"nonce": "n", "device": "cpu", "target": "sm_90", "dtype": None}


def _expected(scratch: Path, file: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
    """The oracle's cases, or why the program cannot be used."""
    want = oracle.run({"op": "oracle", "file": str(file), "fd": False, "cases": cases, **COMMON}, scratch)
    for case in want["cases"]:
        if not case["ok"]:
            return f"oracle: {case['error']['message']}"
        Path(scratch / case["file"]).rename(scratch / f"want-{case['id']}")
    return want["cases"]


def _compare(scratch: Path, file: Path, source: str, backward: str, cases: list[dict[str, Any]]) -> Outcome:
    pair = scratch / "program_pair.py"
    pair.write_text(pair_text(source, backward))
    want = _expected(scratch, file, cases)
    if isinstance(want, str):
        return Outcome("unusable", want)
    try:
        got = candidate.run({"op": "candidate", "file": str(pair), "cases": cases, **COMMON}, scratch)
    except Unusable as error:
        return Outcome("wrong", f"the pair cannot be used: {error}", "raised")
    vague = raised = ""
    for case in got["cases"]:
        if not case["ok"]:
            reason = f"case {case['id']}: {case['error']['message']} (line {case['error']['line']})"
            if not any(text in reason for text in RAISED):
                return Outcome("wrong", reason, "raised")
            raised = raised or reason
            continue
        expected = tensors.load(scratch / f"want-{case['id']}")
        found = tensors.load(scratch / case["file"])
        grads = want[case["id"]]["grads"]
        for index in (name[4:] for name in expected if name.startswith("out/")):
            problem = _problem(
                expected[f"fwd/{index}"], expected[f"out/{index}"], expected[f"base_out/{index}"], None, 0.0
            )
            if problem.startswith("wrong"):
                return Outcome("unusable", f"the oracle's forward differs: {problem}")
        norm = math.sqrt(sum(t.numel() for n, t in expected.items() if n.startswith("out/")))
        for name in grads:
            problem = _problem(
                found.get(f"grad/{name}"),
                expected[f"grad/{name}"],
                expected[f"base/{name}"],
                expected[f"jitter/{name}"],
                norm,
                _nearby(expected, name),
            )
            if problem.startswith("wrong"):
                slight = "slightly" in problem
                reason = f"gradient of {name}, case {cases[case['id']]}: {problem}"
                return Outcome("wrong", reason, f"gradient {name}", slight=slight)
            vague = vague or problem
    if raised and not vague:
        return Outcome("raised", raised)
    return Outcome("vague", vague) if vague else Outcome("right")


def _problem(
    got: torch.Tensor | None,
    want: torch.Tensor,
    base: torch.Tensor,
    moved: torch.Tensor | None,
    norm: float,
    nearby: float = 0.0,
) -> str:
    """Empty where `got` is right; "wrong: ..." or "vague: ..." otherwise."""
    kind = str(base.dtype).removeprefix("torch.")
    floor, (tolerance, share) = FLOOR[kind], OFF[kind]
    if not want.isfinite().all() or not base.isfinite().all():
        return "vague: the expected values are not finite"
    if got is None:
        return "wrong: missing" if want.any() else ""
    if got.shape != want.shape or got.dtype != base.dtype:
        return f"wrong: {tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {base.dtype}"
    got, base = got.double(), base.double()
    if not got.isfinite().all():
        return f"wrong: {(~got.isfinite()).sum().item()} elements are not finite"
    size = want.norm().item()
    if size == 0:
        most = max(FACTOR * base.norm().item(), ZERO_SHARE * floor * norm)
        return "" if got.norm().item() <= most else f"wrong: norm {got.norm().item():.1e} instead of zero"
    error, eager = ((t - want).norm().item() / size for t in (got, base))
    eager = max(eager, nearby)
    shaken = 0.0 if moved is None else (moved - want).norm().item() / size
    limit = FACTOR * eager + floor + FACTOR * min(shaken, MOVED_MAX)
    if error <= limit and _few_off(got, want, base, moved, tolerance, share):
        return "vague: eager PyTorch errs by half of the gradient" if eager >= 0.5 else ""
    if not shaken <= MOVED_MAX or eager > MOVED_MAX:
        return f"vague: rounding moves the gradient by {max(shaken, eager):.1e}"
    slightly = want.numel() <= FEW and error <= SLIGHT
    if slightly and error <= INSIDE * max(shaken, eager):
        return f"vague: a few elements, which rounding inside the kernel moves by {error:.1e}"
    how = "slightly: " if slightly else ""
    return f"wrong: {how}error {error:.2e}, limit {limit:.2e} (eager {eager:.1e}, jitter {shaken:.1e})"


def _nearby(expected: dict[str, torch.Tensor], name: str) -> float:
    """The largest error of eager PyTorch at inputs close by, where the oracle looked: gradients of few
    elements may be right by luck."""
    most = 0.0
    for key, want in expected.items():
        if key.startswith("near/") and key.endswith(f"/{name}") and want.any():
            base = expected[key.replace("near/", "near_base/", 1)]
            most = max(most, ((base.double() - want).norm() / want.norm()).item())
    return most


def _few_off(
    got: torch.Tensor,
    want: torch.Tensor,
    base: torch.Tensor,
    moved: torch.Tensor | None,
    tolerance: float,
    share: float,
) -> bool:
    near = tolerance * (want[want != 0].square().mean().sqrt() + want.abs())

    def off(values: torch.Tensor | None) -> int:
        return 0 if values is None else int(((values - want).abs() > near).sum())

    return off(got) <= FACTOR * max(off(base), off(moved)) + share * want.numel()
