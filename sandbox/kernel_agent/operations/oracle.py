"""The trusted side of the verdict (op oracle): expected outputs and gradients from the forward file alone.

For each case the stub runs once for real (Triton's interpreter, or compiled on a GPU) and is recorded. The
record is then evaluated in float64, which gives the expected outputs and, through torch.autograd, the
expected gradients; and once more in the inputs' own dtypes, which gives the error that an honest
implementation in that precision has. A `reference` in the file and finite differences of the real forward are
second opinions. No candidate code is ever seen here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import devices, draw, forward, layout, tensors
from ..errors import Unusable, describe, filtered_traceback
from ..forward import Forward
from ..torch_tl.handles import EXACT, NATIVE, KernelError
from ..torch_tl.record import Recorder, Ref
from ..torch_tl.replay import Replay, vector_jacobian
from . import budget
from .finite_differences import finite_differences

FEW_ELEMENTS = 32
NEARBY_ELEMENTS = 1 << 16  # of all inputs: larger cases do not hang on one rounding error, and cost more
NEARBY_DRAWS = 6
NEARBY_REACH = 64.0  # units in the last place: other rounding errors, the same conditions


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The operation: one entry per case; a case that fails carries its error and does not stop the others."""
    device = request.get("device") or "cpu"
    mode = "cuda" if device == "cuda" else "interpret"
    target = request.get("target") or "sm_90"
    fwd = forward.load(request["file"], mode, target, device, processors=devices.FEW_PROCESSORS)
    cases = [_guarded(fwd, request, case, scratch) for case in request["cases"]]
    return {"ok": True, "cases": cases}


def _guarded(fwd: Forward, request: dict[str, Any], case: dict[str, Any], scratch: Path) -> dict[str, Any]:
    started = time.monotonic()
    result: dict[str, Any] = {"id": case["id"], "ok": True}
    try:
        made = Case(fwd, case, request.get("dtype"), request.get("budget"))
        result |= made.run(scratch, request.get("fd") or False)
    except Exception as error:  # noqa: BLE001 (a case must not take the others down)
        result |= {"ok": False, "error": _error(error, fwd).to_dict()}
    budget.release(fwd.device)
    result["seconds"] = round(time.monotonic() - started, 6)
    return result


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


class Case:
    """One shape, seed and upstream."""

    def __init__(
        self,
        fwd: Forward,
        case: dict[str, Any],
        dtype: str | None,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        self.fwd = fwd
        self.limits = limits or {}
        self.id = int(case["id"])
        self.dims = case["dims"]
        self.seed = case["seed"]
        self.upstream = case["upstream"]
        self.inputs: str | None = case.get("inputs")
        self.masked = False  # see differentiate()
        self.dtype = dtype
        self._drawn: dict[tuple[Any, ...], torch.Tensor | None] = {}

    def run(self, scratch: Path, fd: bool | str) -> dict[str, Any]:
        if fd == "only":
            return {"fd": finite_differences(self)}
        recording = self.record(self.dtype)
        kind = draw.INPUTS.get(self.inputs or "")
        if kind:
            self.require_rows(recording, kind)
        if kind and kind.same_values:
            self.require_same_function(recording)
        self.require_room(recording)
        made = {f"fwd/{output.index}": output.value for output in recording.outputs if is_tensor(output)}
        exact, gradients = self.differentiate(recording)
        made |= {f"out/{at}": exact.value(ref).detach().double() for at, ref in recording.refs.items()}
        made |= {f"grad/{name}": grad for name, grad in gradients.items()}
        result = self.describe(recording, exact)
        exact.release()
        moved = self.replay(recording, EXACT, jitter=self.seed)
        made |= {f"jitter/{name}": grad for name, grad in self.gradients(moved, recording).items()}
        moved.release()
        native = self.replay(recording, NATIVE)
        made |= {f"base_out/{at}": native.value(ref).detach() for at, ref in recording.refs.items()}
        for name, grad in self.gradients(native, recording).items():
            made[f"base/{name}"] = grad.to(recording.wanted[name].dtype)
        native.release()
        if kind and kind.finite:
            self.require_finite(made)
        made |= self.nearby(recording)
        if self.fwd.reference is not None:
            extra, problem = self.reference(recording)
            made |= extra
            if problem:
                result["reference_error"] = problem
        if fd:
            result["fd"] = finite_differences(self)
        if kind and kind.judged:
            made = {name: kind.judged(v) if is_gradient(name) else v for name, v in made.items()}
        file = f"case-{self.id}.safetensors"
        tensors.save(scratch / file, {name: storable(tensor) for name, tensor in made.items()})
        return result | {"file": file}

    # ---- the real call

    def arguments(self, dtype: str | None, plain: bool = False) -> dict[str, Any]:
        """The stub's arguments by name. Inputs that want gradients get memory of their own, where they share
        it. `plain`: as make_args makes them, whatever the kind of the inputs."""
        kind = None if plain else self.inputs
        args, kwargs = draw.make_inputs(self.fwd, self.dims, self.seed, dtype=dtype, kind=kind)
        bound = draw.bind(self.fwd, args, kwargs)
        return bound | unshared(draw.grad_inputs(self.fwd, bound))

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

    # ---- whether other inputs are fair

    def refuse(self, why: str) -> Unusable:
        return Unusable("inputs_refused", f"{self.inputs} inputs: {why}", self.fwd.path, self.fwd.stub_line)

    def require_rows(self, recording: Recording, kind: draw.InputKind) -> None:
        if not any(map(kind.can, draw.grad_inputs(self.fwd, recording.bound).values())):
            raise self.refuse(f"no input that wants a gradient has {kind.rows}")

    def require_same_function(self, recording: Recording) -> None:
        """Raises Unusable unless the real forward makes of these inputs what it makes of the same values in
        row-major order.

        A forward that ignores strides computes another function here, of which oracle and forward have the
        same idea. Outputs that take over the inputs' strides are not fair either: in use the upstream
        gradient would have them too.
        """
        bound = self.arguments(self.dtype, plain=True)
        plain = draw.differentiable_outputs(self.call(bound), bound)
        made = [output.value for output in recording.outputs if is_tensor(output)]
        wanted = [output.value for output in plain if is_tensor(output)]
        if len(made) != len(wanted) or not all(map(same_values, made, wanted)):
            raise self.refuse("the forward is wrong for them")
        if any(one.stride() != other.stride() for one, other in zip(made, wanted, strict=True)):
            raise self.refuse("the outputs take over their strides")

    def require_finite(self, made: Mapping[str, torch.Tensor]) -> None:
        """Raises Unusable where the function overflows, or the gradient that eager PyTorch has of it."""
        judged = {name: value for name, value in made.items() if value.is_floating_point()}
        odd = [name for name, value in judged.items() if not bool(value.isfinite().all())]
        if odd:
            raise self.refuse(f"{odd[0]} is not finite")

    # ---- the record, evaluated

    def differentiate(self, recording: Recording) -> tuple[Replay, dict[str, torch.Tensor]]:
        """The exact evaluation and its gradients.

        NaN in a gradient of finite outputs may come of lanes that a mask discards; then this and all further
        evaluations of the case leave those out.
        """
        exact = self.replay(recording, EXACT)
        gradients = self.gradients(exact, recording)
        finite = all(bool(exact.value(ref).isfinite().all()) for ref in recording.refs.values())
        if not finite or not any(bool(grad.isnan().any()) for grad in gradients.values()):
            return exact, gradients
        exact.release()
        self.masked = True
        exact = self.replay(recording, EXACT)
        return exact, self.gradients(exact, recording)

    def replay(
        self, recording: Recording, precision: str, jitter: int | None = None, reach: float = 1
    ) -> Replay:
        device = next(iter(draw.grad_inputs(self.fwd, recording.bound).values())).device
        replay = Replay(recording.recorder.tape, precision, device, self.fwd.path, jitter, reach, self.masked)
        seconds = self.limits.get("seconds")
        if seconds is not None and replay.memory.checked:
            replay.memory.until = time.monotonic() + float(seconds)
        replay.run()
        return replay

    def nearby(self, recording: Recording) -> dict[str, torch.Tensor]:
        """Exact and same-dtype gradients at inputs close by, for gradients of few elements.

        The error of eager PyTorch on one element is one draw of its rounding: it may be zero by luck where
        terms cancel, and would then set a standard that no honest kernel keeps.
        """
        few = [name for name, ref in recording.wanted.items() if math.prod(ref.size) <= FEW_ELEMENTS]
        size = sum(value.numel() for value in draw.grad_inputs(self.fwd, recording.bound).values())
        made: dict[str, torch.Tensor] = {}
        if not few or size > NEARBY_ELEMENTS:
            return made
        for at in range(NEARBY_DRAWS):
            for part, precision in (("near", EXACT), ("near_base", NATIVE)):
                moved = self.replay(recording, precision, self.seed + 1 + at, NEARBY_REACH)
                gradients = self.gradients(moved, recording)
                moved.release()
                for name in few:
                    dtype = torch.float64 if precision == EXACT else recording.wanted[name].dtype
                    made[f"{part}/{at}/{name}"] = gradients[name].to(dtype)
        return made

    def gradients(self, replay: Replay, recording: Recording) -> dict[str, torch.Tensor]:
        pairs = [
            (recording.refs[at], upstream)
            for at, upstream in self.upstreams(recording.differentiable).items()
        ]
        return replay.gradients(pairs, recording.wanted)

    def upstreams(self, outputs: list[draw.Output]) -> dict[int, torch.Tensor]:
        """Upstream gradient by index of the output; an output without one is left out.

        Each is drawn once a case: every evaluation of the record takes the same one, and none of them writes
        to it.
        """
        drawn = [self.upstream_of(output.value, at, len(outputs)) for at, output in enumerate(outputs)]
        return {o.index: value for o, value in zip(outputs, drawn, strict=True) if value is not None}

    def upstream_of(self, value: torch.Tensor, at: int, count: int) -> torch.Tensor | None:
        key = (tuple(value.shape), value.dtype, value.device, at, count)
        if key not in self._drawn:
            asked = self.upstream
            self._drawn[key] = draw.upstream(asked["kind"], asked["seed"], asked.get("scale"), *key)
        return self._drawn[key]

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
            grads = vector_jacobian(weighted, list(leaves.values()), masked=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            made[f"ref_grad/{name}"] = torch.zeros_like(leaf) if grad is None else grad
        return made, None


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
