"""The trusted side of the verdict (op oracle): expected outputs and gradients from the forward file alone.

For each case the stub runs once for real (Triton's interpreter, or compiled on a GPU) and is recorded. The
record is then evaluated in float64, which gives the expected outputs and, through torch.autograd, the
expected gradients; and once more in the inputs' own dtypes, which gives the error that an honest
implementation in that precision has. A `reference` in the file and finite differences of the real forward are
second opinions. No candidate code is ever seen here.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import devices, draw, forward, layout, tensors, vary
from ..errors import Unusable, describe, filtered_traceback
from ..forward import Forward
from ..torch_tl.handles import EXACT, NATIVE, KernelError
from ..torch_tl.record import Recorder
from ..torch_tl.replay import Replay, vector_jacobian
from . import budget
from .evaluations import Evaluations, Recording, unit_of
from .finite_differences import finite_differences
from .passed_on import passed_on, without_kernels
from .ties import settled

TF32_SEEN = 3e-5  # norm-relative: float32 alone leaves less, TF32 some 5e-4
FINE = 1e-6  # a unit in the last place: float32 has a finer one
CHAOS = 0.01  # of an output's norm, by which a move of inputs by such a unit moves it
KINK = 1e-3  # of a gradient's norm: it moves by less where inputs move by a part in 1e10,
NOISE = 1e-6  # or by so much of the upstream's, where it is zero
LARGER = 256  # times the upstream, as backwards in float16 are asked (agent/core/kinds.c, "powers")


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The operation: one entry per case; a case that fails carries its error and does not stop the others."""
    device = request.get("device") or "cpu"
    mode = "cuda" if device == "cuda" else "interpret"
    target = request.get("target") or "sm_90"
    fwd = forward.load(
        request["file"],
        mode,
        target,
        device,
        processors=devices.FEW_PROCESSORS,
        function=request.get("function"),
    )
    taken: dict[str, str] = {}
    unfair: dict[str, str] = {}
    cases: list[dict[str, Any]] = []
    lost = ""
    for case in request["cases"]:
        if lost:
            cases.append({"id": case["id"], "ok": False, "error": _not_run(lost).to_dict()})
            continue
        cases.append(_guarded(fwd, request, case, scratch, taken, unfair))
        if not cases[-1]["ok"] and budget.is_lost(fwd.device):
            lost = f"not run: a case of {json.dumps(case['dims'])} before it left the GPU unusable"
    return {"ok": True, "cases": cases}


def _not_run(why: str) -> Unusable:
    error = Unusable("stub_raised", why)
    error.not_run = True
    return error


def _guarded(
    fwd: Forward,
    request: dict[str, Any],
    case: dict[str, Any],
    scratch: Path,
    taken: dict[str, str],
    unfair: dict[str, str],
) -> dict[str, Any]:
    started, worked = time.monotonic(), _worked()
    result: dict[str, Any] = {"id": case["id"], "ok": True}
    try:
        made = Case(fwd, case, request.get("dtype"), request.get("budget"))
        made.taken = taken
        result |= made.run(scratch, request.get("fd") or False)
    except Exception as error:  # noqa: BLE001 (a case must not take the others down)
        found = _error(error, fwd)
        result |= {"ok": False, "error": found.to_dict()}
        if not budget.is_lost(fwd.device):
            result |= blame(fwd, request, case, found, unfair)
    budget.release(fwd.device)
    result["seconds"] = round(time.monotonic() - started, 6)
    result["processor_seconds"] = round(_worked() - worked, 6)
    return result


def _worked() -> float:
    """Seconds of a processor that this process and what it started worked, the kernel's work left out: on a
    GPU that is the driver's, and hangs on who else is there."""
    times = os.times()
    return times.user + times.children_user


def blame(
    fwd: Forward, request: dict[str, Any], case: dict[str, Any], found: Unusable, unfair: dict[str, str]
) -> dict[str, dict[str, str]]:
    """Which choices for single inputs the forward does not take even alone, and why. Choices of which none
    is to blame are refused together. `unfair`: what was found for these dimensions, "" where one is taken."""
    choices = vary.Varied.of(case).alone()
    if not choices or found.kind == "too_large":
        return {}
    if len(choices) == 1:
        return {"blame": {choices[0][0]: found.message}}
    why: dict[str, str] = {}
    for words, varied in choices:
        key = json.dumps([case["dims"], case.get("scalar"), words], sort_keys=True)
        if key not in unfair:
            unfair[key] = why_unfair(fwd, request, case, varied)
        if unfair[key]:
            why[words] = unfair[key]
    return {"blame": why}


def why_unfair(fwd: Forward, request: dict[str, Any], case: dict[str, Any], varied: vary.Varied) -> str:
    try:
        single = case | {"layouts": varied.layouts, "values": varied.values}
        Case(fwd, single, request.get("dtype"), request.get("budget")).require_fair()
    except Exception as error:  # noqa: BLE001 (as of a case)
        return _error(error, fwd).message
    return ""


def _error(error: Exception, fwd: Forward) -> Unusable:
    """What ended a case, as a finding. Memory that ran out is one about the shape, wherever it happened."""
    full = budget.out_of_memory(error)
    if full is not None:
        made = Unusable("too_large", f"{full}, with this shape in float64", fwd.path, remedy=budget.REMEDY)
        made.out_of_memory = True
        return made
    if isinstance(error, Unusable):
        return error
    if isinstance(error, KernelError):
        return _kernel_error(error, fwd)
    internal = Unusable("internal", f"oracle: {describe(error)}")
    internal.traceback = filtered_traceback(
        error, [str(path) for path in Path(__file__).parents[1].rglob("*.py")]
    )
    return internal


def _kernel_error(error: KernelError, fwd: Forward) -> Unusable:
    made = Unusable(error.kind, error.message, error.file or fwd.path, error.line, None, error.remedy)
    made.traceback = filtered_traceback(error.__cause__ or error, [fwd.path])
    return made


class Case(Evaluations):
    """One shape, seed and upstream."""

    def __init__(
        self,
        fwd: Forward,
        case: dict[str, Any],
        dtype: str | None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(fwd, case, limits)
        self.id = int(case["id"])
        self.dims = case["dims"]
        self.scalar: dict[str, Any] | None = case.get("scalar")
        self.closer = bool(case.get("closer"))
        self.dtype = dtype
        self.without_room = ""  # why the reference has no gradients here, where the GPU has no room for them
        self.taken: dict[str, str] = {}  # why a layout alone is not, "" where it is: found out once a process

    def run(self, scratch: Path, fd: bool | str) -> dict[str, Any]:
        if fd == "only":
            return {"fd": finite_differences(self), "unasked": self.unasked()}
        recording = self.record(self.dtype)
        self.require_taken(recording)
        self.require_room(recording)
        if self.closer:
            return self.store(scratch, self.look_closer(recording))
        made = {f"fwd/{output.index}": output.value for output in recording.outputs if is_tensor(output)}
        exact, kinks, gradients = self.differentiate(recording)
        made |= {f"out/{at}": exact.value(ref).detach().double() for at, ref in recording.refs.items()}
        made |= {f"grad/{name}": grad for name, grad in gradients.items()}
        result = self.describe(recording, exact)
        if self.scalar is not None:
            result["unheard"] = self.is_unheard(recording)
        exact.release()
        result["free"], parts = self.free(recording, gradients)
        made |= {f"passed/{name}": values for name, values in parts.items()}
        moved = self.moved_by_a_unit(recording, kinks, self.seed)
        self.require_settled(recording, moved, made)
        made |= {f"jitter/{name}": grad for name, grad in self.gradients(moved, recording).items()}
        moved.release()
        native, own = self.native(recording, gradients)
        made |= {f"base_out/{at}": native.value(ref).detach() for at, ref in recording.refs.items()}
        for name, grad in own.items():
            made[f"base/{name}"] = grad.to(recording.wanted[name].dtype)
        if native.memory.in_tf32:
            result["tf32"] = tf32_seen(made)
        native.release()
        result["overflows"] = self.overflowing(recording)
        self.require_finite({name: part for name, part in made.items() if not name.startswith("passed/")})
        self.require_in_range(gradients, recording)
        self.require_unique(recording, gradients)
        made |= self.nearby(recording, made)
        if self.fwd.reference is not None:
            budget.release(self.fwd.device)
            extra, problem = self.reference(recording)
            made |= self.without_ties(recording, gradients, extra)
            if problem:
                result["reference_error"] = problem
            if self.without_room:
                result["reference_without_room"] = self.without_room
        if fd:
            result["fd"] = finite_differences(self)
        return result | self.store(scratch, made)

    def store(self, scratch: Path, made: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The case's file, of what is judged of each gradient."""
        judged = self.varied.judged()
        if judged:
            made = {name: judged(v) if is_gradient(name) else v for name, v in made.items()}
        file = f"case-{self.id}.safetensors"
        tensors.save(scratch / file, {name: storable(tensor) for name, tensor in made.items()})
        return {"file": file, "bytes": (scratch / file).stat().st_size}

    def require_fair(self) -> None:
        """Raises what run() would raise of a case of this kind."""
        recording = self.record(self.dtype)
        self.require_taken(recording)
        gradients: dict[str, torch.Tensor] = {}
        for precision in (EXACT, NATIVE) if self.varied.values or self.varied.equals() else ():
            if precision == NATIVE:
                replay, found = self.native(recording, gradients)
            else:
                replay = self.replay(recording, precision)
                found = self.gradients(replay, recording)
            self.require_finite({f"the gradient of {name}": grad for name, grad in found.items()})
            self.require_in_range(found, recording)
            gradients = gradients or found
            replay.release()
        if gradients:
            self.require_unique(recording, gradients)

    # ---- the real call

    def arguments(self, dtype: str | None) -> dict[str, Any]:
        """The stub's arguments by name. Inputs that want gradients get memory of their own, where they share
        it. They lie in rows, whatever their layouts in this case."""
        bound = self.drawn(dtype, plain=True)
        return bound | unshared(draw.grad_inputs(self.fwd, bound))

    def drawn(self, dtype: str | None, plain: bool) -> dict[str, Any]:
        args, kwargs = draw.make_inputs(
            self.fwd, self.dims, self.seed, dtype=dtype, varied=self.varied, plain=plain, scalar=self.scalar
        )
        return draw.bind(self.fwd, args, kwargs)

    def record(self, dtype: str | None) -> Recording:
        bound = self.arguments(dtype)
        wanted = draw.grad_inputs(self.fwd, bound)
        if not wanted:
            raise Unusable(
                "stub_args", "no input that wants a gradient is a floating tensor here", self.fwd.path
            )
        recorder = Recorder(self.fwd.path, list(wanted.values()))
        names = {name: recorder.ref(tensor) for name, tensor in wanted.items()}
        before = {name: tensor.detach().clone() for name, tensor in wanted.items()}
        with recorder, forward.launch_intercept(recorder.on_launch):
            returned = self.call(bound)
        self.require_kept(wanted, before)
        recorder.note_frozen(value for value in bound.values() if isinstance(value, torch.Tensor))
        outputs = draw.differentiable_outputs(returned, bound)
        refs = {output.index: recorder.ref(output.value) for output in outputs if is_tensor(output)}
        recording = Recording(bound, names, outputs, refs, recorder)
        if not recording.differentiable:
            raise Unusable(
                "no_outputs",
                f"{self.fwd.stub_name}() returns no floating tensor that it made",
                self.fwd.path,
                self.fwd.stub_line,
                remedy="return the tensors that the kernels write",
            )
        return recording

    def require_kept(self, wanted: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> None:
        """Raises Unusable("stub_args") where the stub overwrites an input that wants a gradient. Its caller
        goes on with the new values, and no upstream gradient of those is ever drawn."""
        for name, tensor in wanted.items():
            if not torch.equal(tensors.raw_bytes(tensor.detach()), tensors.raw_bytes(before[name])):
                raise Unusable(
                    "stub_args",
                    f"{self.fwd.stub_name}() overwrites {name}, which wants a gradient: nothing that is "
                    "computed from its new values could be compared",
                    self.fwd.path,
                    self.fwd.stub_line,
                    remedy="write to a new tensor and return that",
                )

    def call(self, bound: Mapping[str, Any]) -> Any:
        args, kwargs = positional(self.fwd, bound)
        return self.fwd.call(args, kwargs)

    def require_room(self, recording: Recording) -> None:
        """Raises Unusable("too_large") where evaluation or file are larger than the request's budget."""
        wanted = list(draw.grad_inputs(self.fwd, recording.bound).values())
        outputs = [output.value for output in recording.outputs if is_tensor(output)]
        differentiable = sum(output.value.numel() for output in recording.differentiable)
        with_reference = self.fwd.reference is not None
        needed = {
            "case_bytes": budget.file_bytes(outputs, wanted, differentiable, with_reference),
            "device_bytes": budget.evaluation_bytes(recording.recorder.tape),
        }
        budget.require(needed, self.limits, wanted[0].device, self.fwd.path)

    def unasked(self) -> dict[str, str]:
        """Floating inputs of which no gradient is checked though an output hangs on them, and why not."""
        said = (
            "no position names it" if forward.is_decorated(self.fwd) else "the backward returns None for it"
        )
        bound = self.arguments(self.dtype)
        found = {}
        for name, value in bound.items():
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            if floating and name not in self.fwd.grads and self.hangs_on(name):
                found[name] = said
        return found

    def hangs_on(self, name: str) -> bool:
        """Whether an output of the real forward is another one with other values of an input."""
        made = []
        for factor, shift in ((1.0, 0.0), (1.25, 0.125)):
            bound = self.arguments(self.dtype)
            bound[name] = bound[name] * factor + shift
            try:
                made.append(draw.flatten(self.call(bound)))
            except Unusable:
                return True  # it matters enough to be refused
        tensors_of = [[v for v in values if isinstance(v, torch.Tensor)] for values in made]
        return not all(torch.equal(a, b) for a, b in zip(*tensors_of, strict=False) if a.is_floating_point())

    # ---- whether other inputs are fair

    def require_taken(self, recording: Recording) -> None:
        """Raises Unusable unless the real forward makes of these inputs what it makes of the same values in
        row-major order, and of other values no NaN.

        A forward that ignores strides computes another function here, of which oracle and forward have the
        same idea. Outputs that take over the inputs' strides are not fair either: in use the upstream
        gradient would have them too.
        """
        self.require_finite({f"output {o.index}": o.value for o in recording.outputs if is_tensor(o)})
        if all(map(vary.is_upstream, self.varied.layouts)):
            return
        self.require_each_taken()
        self.require_same_function([output.value for output in recording.outputs if is_tensor(output)])

    def is_unheard(self, recording: Recording) -> bool:
        """Whether a whole number that has another value here is nothing to the outputs. It may be a size,
        which has that one value beside these tensors: a group norm that is told its channels, and takes 7
        for 6."""
        assert self.scalar is not None
        value = recording.bound[self.scalar["name"]]
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        usual = copy.copy(self)
        usual.scalar = None
        made = usual.outputs_of(usual.arguments(self.dtype))
        found = [output.value for output in recording.outputs if is_tensor(output)]
        return len(made) == len(found) and all(map(same_values, made, found))

    def require_each_taken(self) -> None:
        """The same of each layout alone, among usual values: where others are constant, say, a forward that
        reads the wrong elements may be right by luck."""
        for words, varied in self.varied.alone():
            if not varied.layouts:
                continue
            key = f"{json.dumps(self.dims, sort_keys=True)} {words}"
            if key not in self.taken:
                self.taken[key] = self.why_not(varied)
            if self.taken[key]:
                raise self.refuse(self.taken[key])

    def why_not(self, varied: vary.Varied) -> str:
        alone = copy.copy(self)
        alone.varied = varied
        try:
            alone.require_same_function(alone.outputs_of(alone.drawn(self.dtype, plain=True)))
        except Unusable as error:
            return error.message
        return ""

    def outputs_of(self, bound: Mapping[str, Any]) -> list[torch.Tensor]:
        found = draw.differentiable_outputs(self.call(bound), bound)
        return [output.value for output in found if is_tensor(output)]

    def require_same_function(self, wanted: list[torch.Tensor]) -> None:
        self.require_same_rows(wanted)
        made = self.outputs_of(self.drawn(self.dtype, plain=False))
        if len(made) != len(wanted) or not all(map(same_values, made, wanted)):
            raise self.refuse("the forward is wrong for them")
        if any(steps(one) != steps(other) for one, other in zip(made, wanted, strict=True)):
            raise self.refuse("the outputs take over their strides")

    def require_same_rows(self, wanted: list[torch.Tensor]) -> None:
        """What changes the shapes of inputs leaves the values of the outputs, in whatever shapes."""
        varied = self.varied.in_own_shapes()
        if varied == self.varied:
            return
        own = copy.copy(self)
        own.varied = varied
        made = own.outputs_of(own.drawn(self.dtype, plain=True))
        if len(made) != len(wanted) or not all(
            same_values(one.reshape(-1), other.reshape(-1)) for one, other in zip(made, wanted, strict=True)
        ):
            raise self.refuse("the forward is wrong for them")

    def require_finite(self, made: Mapping[str, torch.Tensor]) -> None:
        """Raises Unusable where the function of other values overflows, or its gradient, or the gradient that
        eager PyTorch has of it."""
        kinds = [vary.VALUES[kind] for kind in self.varied.values.values()]
        for name, value in made.items() if kinds else ():
            if not value.is_floating_point():
                continue
            if bool(value.isnan().any()):
                raise self.refuse(f"{name} is NaN")
            if all(kind.finite for kind in kinds) and not bool(value.isfinite().all()):
                raise self.refuse(f"{name} is not finite")

    def require_settled(self, recording: Recording, moved: Replay, made: Mapping[str, torch.Tensor]) -> None:
        """Raises Unusable where rounding of other values in float32 decides what comes out, as of a
        recurrence whose weights are all alike: no two forwards agree. What jumps is settled where it is."""
        if not self.varied.values or unit_of(recording) > FINE:
            return
        off = self.moves(recording, moved, made)
        if not off:
            return
        closer = self.replay(recording, EXACT, self.seed, reach=0)
        jumps = self.moves(recording, closer, made)
        closer.release()
        for at in off:
            if 10 * jumps.get(at, 0.0) < off[at]:
                raise self.refuse(f"rounding of these inputs decides what output {at} is")

    def moves(
        self, recording: Recording, moved: Replay, made: Mapping[str, torch.Tensor]
    ) -> dict[int, float]:
        """How far each output moves with the inputs, norm-relative, where that is far."""
        found = {}
        for at, ref in recording.refs.items():
            out, other = made[f"out/{at}"], moved.value(ref).detach().double()
            off = float(torch.linalg.vector_norm(other - out) / torch.linalg.vector_norm(out))
            if math.isfinite(off) and off > CHAOS:
                found[at] = off
        return found

    def require_in_range(self, gradients: Mapping[str, torch.Tensor], recording: Recording) -> None:
        """Raises Unusable where a gradient of other values is too large for the dtype of its input. In an
        iteration that has not converged, rounding decides what overflows."""
        for name, grad in gradients.items() if self.varied.values else ():
            own = grad.to(recording.wanted[name].dtype)
            if bool((grad.isfinite() & own.isinf()).any()):
                raise self.refuse(
                    f"the gradient of {name} is beyond the range of {draw.dtype_name(own.dtype)}"
                )

    def require_unique(self, recording: Recording, gradients: Mapping[str, torch.Tensor]) -> None:
        """Raises Unusable where elements are equal, or zero, and the gradient hangs on that: there is a kink,
        at which any gradient between those of its sides is right."""
        if not self.varied.equals():
            return
        moved = self.replay(recording, EXACT, jitter=self.seed, reach=0)
        beside = self.gradients(moved, recording)
        moved.release()
        judged = self.varied.judged() or torch.clone
        noise = NOISE * self.upstream_norm(recording)
        for name, grad in gradients.items():
            if bool((judged(grad) - judged(beside[name])).norm() > KINK * grad.norm() + noise):
                raise self.refuse(f"the gradient of {name} is not unique where elements are equal or zero")

    def free(
        self, recording: Recording, gradients: Mapping[str, torch.Tensor]
    ) -> tuple[list[str], dict[str, torch.Tensor]]:
        """Names of gradients that no kernel has to compute, and of others the part that none has to."""
        free = without_kernels(recording.recorder.tape, recording.wanted)
        parts: dict[str, torch.Tensor] = {}
        drawn = list(self.upstreams(recording.differentiable).values())
        for name in [name for name in gradients if name not in free]:
            part = passed_on(gradients[name], recording.wanted[name].dtype, drawn)
            if part is not None:
                parts[name] = part
        whole = [name for name, part in parts.items() if not bool(part.isnan().any())]
        zero = [name for name, grad in gradients.items() if not bool(grad.any())]
        free = [name for name in gradients if name in {*free, *whole, *zero}]
        return free, {name: part for name, part in parts.items() if name not in whole}

    def overflowing(self, recording: Recording) -> list[str]:
        """Names of gradients in float16 that eager PyTorch has no number for where the upstream is larger:
        what lies in between ends its range. Of plain cases, of which the same is asked of a backward."""
        names = [name for name, ref in recording.wanted.items() if ref.dtype == torch.float16]
        if not names or self.varied.layouts or self.varied.values or self.upstream["kind"] != "normal":
            return []
        native = self.replay(recording, NATIVE)
        drawn = self.upstreams(recording.differentiable)
        found = self.gradients(native, recording, {at: LARGER * value for at, value in drawn.items()})
        native.release()
        return [name for name in names if not bool(found[name].to(torch.float16).isfinite().all())]

    def describe(self, recording: Recording, exact: Replay) -> dict[str, Any]:
        counts = exact.memory.counts
        inputs = [
            {
                "name": name,
                "shape": list(value.shape),
                "dtype": draw.dtype_name(value.dtype),
                "grad": name in recording.wanted,
            }
            for name, value in recording.bound.items()
            if isinstance(value, torch.Tensor)
        ]
        facts = {
            "launches": recording.recorder.tape.launches,
            "programs": recording.recorder.tape.programs,
            "bytes_read": counts.bytes_read,
            "bytes_written": counts.bytes_written,
            "atomics": counts.atomics,
            "races": counts.races,
            "undefined_lanes": counts.undefined,
        }
        outputs = [output.to_dict() for output in recording.outputs]
        return {"inputs": inputs, "outputs": outputs, "grads": list(recording.wanted), "facts": facts}

    # ---- second opinions

    def reference(self, recording: Recording) -> tuple[dict[str, torch.Tensor], str | None]:
        """Outputs and gradients of the user's `reference` in float64; a sentence when it cannot be used."""
        assert self.fwd.reference is not None
        bound = self.arguments(self.dtype)
        bound = {name: in_float64(value) for name, value in bound.items()}
        leaves = {name: bound[name].requires_grad_() for name in recording.wanted}
        args, kwargs = positional(self.fwd, bound)
        try:
            with self.fwd.active():
                outputs = draw.flatten(self.fwd.reference(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (the user's code: report it and go on without)
            return {}, f"reference() raised {describe(error)}"
        wanted = self.upstreams(recording.differentiable)
        for output in recording.differentiable:
            got = outputs[output.index] if output.index < len(outputs) else None
            if not isinstance(got, torch.Tensor) or got.shape != output.value.shape:
                shape = list(got.shape) if isinstance(got, torch.Tensor) else got
                return (
                    {},
                    f"reference() gives {shape} for output {output.index}, the stub "
                    f"{list(output.value.shape)}",
                )
        pairs = [(outputs[at], upstream) for at, upstream in wanted.items() if outputs[at].requires_grad]
        made = {
            f"ref_out/{output.index}": outputs[output.index].detach().double()
            for output in recording.differentiable
        }
        grads: list[torch.Tensor | None] = [None] * len(leaves)
        if pairs:
            weighted = [(value, upstream.to(value.dtype)) for value, upstream in pairs]
            try:
                grads = vector_jacobian(weighted, list(leaves.values()), masked=True)
            except torch.OutOfMemoryError as error:  # it may take more than the record, tile by tile
                self.without_room = f"{budget.out_of_memory(error)}, in reference() in float64"
                return {}, None
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            made[f"ref_grad/{name}"] = torch.zeros_like(leaf) if grad is None else grad
        return made, None

    def without_ties(
        self, recording: Recording, exact: Mapping[str, torch.Tensor], found: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the reference gives, but for gradients that a choice between equal elements decides. The
        reference was called where the inputs are; of a small call of a GPU the record is evaluated on the
        CPU."""

        def moved(draw: int) -> dict[str, torch.Tensor]:
            replay = self.replay(recording, EXACT, jitter=self.seed + draw, reach=0)
            gradients = self.gradients(replay, recording)
            replay.release()
            return gradients

        given = {
            name: found[key].to(exact[name].device) for name in exact if (key := f"ref_grad/{name}") in found
        }
        return found | {f"ref_grad/{name}": grad for name, grad in settled(exact, given, moved).items()}


def tf32_seen(made: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what products in TF32 made less exact than float32: "grad/x", "out/0"."""
    seen = []
    for name, base in made.items():
        kind, _, of = name.partition("/")
        exact = made.get({"base": f"grad/{of}", "base_out": f"out/{of}"}.get(kind, ""))
        if exact is None or base.dtype != torch.float32:
            continue
        off = torch.linalg.vector_norm(base.double() - exact)
        if bool(off > TF32_SEEN * torch.linalg.vector_norm(exact)):
            seen.append(f"{'grad' if kind == 'base' else 'out'}/{of}")
    return seen


def is_gradient(name: str) -> bool:
    """Whether a tensor of the case's file is a gradient of an input, and not an output."""
    return not name.startswith(("fwd/", "out/", "base_out/", "ref_out/"))


def is_tensor(output: draw.Output) -> bool:
    return isinstance(output.value, torch.Tensor)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality but for rounding: reading the wrong elements is never close."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    wide = other.double()
    size = float(wide[wide.isfinite()].square().mean().sqrt()) if wide.isfinite().any() else 0.0
    return torch.allclose(one.double(), wide, rtol=1e-2, atol=1e-3 * size, equal_nan=True)


def steps(tensor: torch.Tensor) -> list[int]:
    """The strides that are ever taken."""
    return [stride for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]


def positional(fwd: Forward, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bound arguments as the signature wants to be called."""
    arguments = fwd.signature.bind_partial()
    arguments.arguments.update(bound)
    return arguments.args, arguments.kwargs


def unshared(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs, where an element that two of them share (or one holds twice) was copied, so that each has
    its own gradient."""
    own: list[torch.Tensor] = []
    made = {}
    for name, tensor in inputs.items():
        shared = layout.repeats(tensor) or any(layout.overlap(tensor, other) for other in own)
        made[name] = tensor.clone() if shared else tensor
        own += [] if shared else [tensor]
    return made


def in_float64(value: Any) -> Any:
    """Floating tensors (in tuples and lists too) copied to float64, floating dtypes as float64."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().clone() if value.is_floating_point() else value
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if type(value) in (tuple, list):
        return type(value)(in_float64(item) for item in value)
    return value


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """A dtype that the file format has a name for."""
    wide = tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)
    return tensor.detach().to(torch.int64) if wide else tensor.detach()
