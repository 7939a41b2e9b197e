"""Operation candidate: runs a pair's `<stub>_autograd` and its backward, and writes what came out.

Nothing here judges: this process has run the candidate's code. It draws inputs and upstream gradients from
the seeds it was given, writes outputs and gradients as raw tensors, and reports what it saw (launches, torch
operations, modified tensors, shared memory), for the daemon to decide on. Memory that the candidate allocates
arrives poisoned, so that an element which no kernel wrote shows as NaN.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import devices, draw, tensors, vary, witness
from ..errors import Unusable, wrap
from ..flow import Flow, unseen
from ..formulas import engine_may
from ..forward import Forward, launch_intercept, load
from ..guards import Guards
from ..launches import configuration, try_every_configuration
from ..layout import overlap, repeats
from ..source import backward_starts
from ..watching import NOT_THE_CANDIDATES, Computed, Hanging, Launches, Poison, Watch
from . import budget
from .questions import QUESTIONS, Graph, same_value
from .traffic import Counter

_MOST_TOLD = 20  # sentences of a list
# How autograd's engine says it.
_SHAPE = re.compile(
    r"invalid gradient at index (\d+) - got (\[.*?\]) but expected shape compatible with (\[.*?\])"
)


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op candidate. Errors of one case do not end the others, unless they
    leave the GPU unusable: those that follow are not run, and say so."""
    device = request.get("device") or "cpu"
    mode = "cuda" if device.startswith("cuda") else "interpret"
    target = request.get("target") or "sm_90"
    fwd = load(
        request["file"],
        mode,
        target,
        device,
        processors=devices.FEW_PROCESSORS,
        function=request.get("function"),
    )
    entry = entry_of(fwd, request.get("entry"))
    try_every_configuration()
    cases = []
    known: dict[str, StubCall] = {}
    lost = ""
    for case in request["cases"]:
        started = time.monotonic()
        try:
            if lost:
                raise Unusable("candidate_raised", lost)
            result = _run_case(fwd, entry, case, request, scratch, known)
            budget.release(device)
        except (Exception, SystemExit) as exc:  # noqa: BLE001 (one case fails, the others go on)
            result = {"ok": False, "file": None, "error": _error(exc, fwd).to_dict()}
            if not lost and budget.is_lost(device):
                lost = f"not run: a case of {json.dumps(case['dims'])} before it left the GPU unusable"
        cases.append(
            {"id": case["id"], "ok": True, **result, "seconds": round(time.monotonic() - started, 6)}
        )
    return {"entry": entry.__name__, "cases": cases}


def hold_against(result: dict[str, Any], record: witness.Record, request: dict[str, Any]) -> None:
    """Torch operations that are in the record and not in the candidate's own report are added to that; a case
    of which the record says nothing has none left, which counts like a confession."""
    stubs: dict[str, dict[str, int]] = {}
    asked = {case["id"]: case for case in request["cases"]}
    reports = result.get("cases")
    for report in reports if isinstance(reports, list) else []:
        if not isinstance(report, dict) or report.get("id") not in asked or not report.get("ok"):
            continue
        at = report["id"]
        key = _alike(asked[at])
        stub = record.operations(f"{at} stub")
        stub = stubs.setdefault(key, stub or {}) if stub is None else stub
        stubs[key] = stub
        forward = record.operations(f"{at} forward")
        backward = record.operations(f"{at} backward", engine_may(stub))
        if backward is None and report.get("launches_backward") == 0:
            backward = {}  # nothing was differentiated
        more = forward and {name: n - stub.get(name, 0) for name, n in forward.items()}
        _add(report, "torch_ops_forward", more if forward else forward)
        _add(report, "torch_ops_backward", backward)


def _add(report: dict[str, Any], key: str, found: dict[str, int] | None) -> None:
    own = report.pop(key, None)
    if found is not None and isinstance(own, dict):
        names = sorted(own.keys() | {name for name, n in found.items() if n > 0})
        report[key] = {name: max(own.get(name, 0), found.get(name, 0)) for name in names}


def _alike(case: dict[str, Any]) -> str:
    """Cases in which the plain stub does the same, whatever the values."""
    layouts = {name: kind for name, kind in (case.get("layouts") or {}).items() if not vary.is_upstream(name)}
    return json.dumps([case["dims"], layouts, case.get("scalar")], sort_keys=True)


def _error(exc: BaseException, fwd: Forward) -> Unusable:
    """What ended a case, with the line; of memory that ran out, whose it was."""
    full = budget.out_of_memory(exc)
    error = wrap("candidate_raised", "", exc, [fwd.path])
    shape = _SHAPE.search(str(exc))
    if shape is not None:
        at, got, wanted = shape.groups()
        error.message = (
            f"the backward returns a gradient of the wrong shape: value {int(at) + 1} of its return is "
            f"{got}, and the input is {wanted}"
        )
    if full is not None:
        error.message = f"{full}: {error.message}"
        error.remedy = "allocate less: a backward has to fit beside its inputs, outputs and gradients"
    error.out_of_memory = full is not None or budget.driver_failed(exc)  # to be tried again, alone
    error.out_of_resources = budget.out_of_resources(exc)
    return error


def _run_case(
    fwd: Forward,
    entry: Callable[..., Any],
    case: dict[str, Any],
    request: dict[str, Any],
    scratch: Path,
    known: dict[str, StubCall],
) -> dict[str, Any]:
    """One case. The interpreter is slow: what the plain stub returns is taken from an earlier case of the
    same dimensions and layouts of inputs, and found out anew when the entry does not fit it (shapes and
    integers may depend on the data), or where the stub computes by torch: then values say what it may do."""
    key = _alike(case)
    plain = bool(request.get("plain"))
    if fwd.mode != "interpret":
        return Case(fwd, entry, case, request.get("dtype"), plain).run(scratch)
    if key in known and not known[key].values:
        try:
            return Case(fwd, entry, case, request.get("dtype"), plain, known[key]).run(scratch)
        except Unusable as error:
            if error.kind != "candidate_shape":
                raise
    made = Case(fwd, entry, case, request.get("dtype"), plain)
    try:
        return made.run(scratch)
    finally:
        if made.stub is not None:
            known[key] = made.stub


def entry_of(fwd: Forward, name: str | None) -> Callable[..., Any]:
    """The pair's entry function. Raises Unusable where there is none, or it has not the stub's parameters."""
    name = name or fwd.entry_name
    if name == fwd.stub_name:
        return fwd.stub  # a module that people wrote themselves: what is called is stub and entry in one
    entry = getattr(fwd.module, name, None)
    if not callable(entry):
        raise Unusable(
            "candidate_raised",
            f"the pair defines no function {name}",
            fwd.path,
            remedy=f"define {name} with the signature of {fwd.stub_name}",
        )
    names = list(inspect.signature(entry).parameters)
    if names != [p.name for p in fwd.params]:
        raise Unusable(
            "candidate_raised",
            f"{name}({', '.join(names)}) does not have the parameters of {fwd.stub_name}"
            f"({', '.join(p.name for p in fwd.params)})",
            fwd.path,
            entry.__code__.co_firstlineno if hasattr(entry, "__code__") else None,
        )
    for own, plain in zip(inspect.signature(entry).parameters.values(), fwd.params, strict=True):
        if type(own.default) is not type(plain.default) or not same_value(own.default, plain.default):
            raise Unusable(
                "candidate_raised",
                f"{name}() has {_default(own)} where {fwd.stub_name}() has {_default(plain)}",
                fwd.path,
                entry.__code__.co_firstlineno if hasattr(entry, "__code__") else None,
                remedy="give every parameter the stub's default",
            )
    return entry


def _default(parameter: inspect.Parameter) -> str:
    return (
        f"{parameter.name}={parameter.default!r}"[:120]
        if parameter.default is not parameter.empty
        else (f"no default for {parameter.name}")
    )


def nesting(value: Any) -> str:
    """Tuples, lists and dicts of a return value, with a dot for each leaf: `(.(..))`."""
    if isinstance(value, (tuple, list)):
        return "(" + "".join(nesting(item) for item in value) + ")"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{nesting(item)}" for key, item in value.items()) + "}"
    return "."


def _meaning(output: draw.Output) -> str:
    """What an output is to its user, apart from a tensor's values: "tensor", "input", or the value itself."""
    if isinstance(output.value, torch.Tensor) or output.kind not in ("none", "int"):
        return output.kind
    return repr(output.value)


@dataclass(frozen=True)
class StubCall:
    """What the plain stub does: outputs as classified, inputs that it modifies, nesting of its return value,
    torch operations. Of tensors there is shape, dtype and device, and no memory."""

    outputs: list[draw.Output]
    modified: set[str]
    nesting: str
    operations: dict[str, int]
    values: list[Computed]
    differentiated: frozenset[str]  # of the operations, those that hang on what wants gradients


class Case:
    """One shape, seed and upstream."""

    def __init__(
        self,
        fwd: Forward,
        entry: Callable[..., Any],
        case: dict[str, Any],
        dtype: str | None,
        plain: bool = False,
        stub: StubCall | None = None,
    ) -> None:
        """`plain` leaves fresh memory as it is, for a tool that watches it. `stub`: what is known of the
        plain stub here."""
        self.stub = stub
        self.fwd = fwd
        self.entry = entry
        self.id = int(case["id"])
        self.dims: dict[str, Any] = case["dims"]
        self.seed: int = case["seed"]
        self.upstream: dict[str, Any] = case["upstream"]
        self.varied = vary.Varied.of(case)
        self.scalar: dict[str, Any] | None = case.get("scalar")
        self.needs: list[str] | None = case.get("needs")
        self.asked = {name: case[name] for name in QUESTIONS if case.get(name)}
        self.facts = bool(case.get("facts"))
        self.dtype = dtype
        self.guards = Guards()
        self.memory: str = case.get("memory") or "nan"
        self.flow = Flow() if fwd.mode == "interpret" else None
        self.poison = Poison(None if plain else self.guards, plain, self.flow, self.memory)
        self.poison.differentiates = Case.backward.__code__
        self.launches = Launches(fwd.path, backward_starts(fwd.source), self.flow, case.get("order"))
        self.saved: list[torch.Tensor] = []
        self.asking = False  # questions that come after the backward
        self.told: dict[str, Any] = {}  # what questions add to the result
        self.scales = False

    def run(self, scratch: Path) -> dict[str, Any]:
        self.stub = self.stub or self.call_stub()
        self.poison.stub_operations = self.stub.differentiated
        expected, allowed = self.stub.outputs, self.stub.modified
        self.scales = self.may_scale()
        if self.flow is not None:
            self.flow.scales = self.scales
        arguments, leaves = self.arguments()
        forward_facts, backward_facts = Counter(enabled=self.facts), Counter(enabled=self.facts)
        inputs = Watch()
        for name, tensor in _named_inputs(arguments.arguments):
            inputs.add(name, tensor)
        with self.fwd.active(), launch_intercept(self.launches), self.poison:
            with unseen(self.poison.note, NOT_THE_CANDIDATES):
                if self.scalar is not None:
                    self.usual_call()
                with forward_facts, self.saving(), self.counting("forward"):
                    returned = self.entry(*arguments.args, **arguments.kwargs)
                outputs = self.outputs(returned, arguments.arguments, expected)
                modified = inputs.modified()
                changed = [name for name in modified if name not in allowed]
                later = self.watch_saved(outputs, inputs.from_here(modified))
                upstreams = self.upstreams(expected, outputs, self.upstream["seed"])
                for index, value in upstreams.items():
                    later.add(f"upstream/{index}", value)
                with backward_facts:
                    grads = self.backward("backward", outputs, leaves, upstreams)
                self.asking = True
                untraced = [
                    name
                    for name, grad in grads.items()
                    if self.flow and not self.flow.traced(grad) and bool(grad.any())
                ]
            changed += [name for name in later.modified() if name not in changed]
            changed += self.guards.broken()
            graph = Graph(arguments, outputs, leaves, expected, upstreams, grads)
            made = graph.outputs_as("out")
            keep = self.varied.judged() or torch.clone
            made |= {f"grad/{name}": keep(grad) for name, grad in grads.items()}
            aliases = self.aliases(grads, outputs, arguments.arguments, upstreams)
            same = self.same(grads)
            aliases = [found for found in aliases if found not in same]
            self.launches.phase = "again"  # also what the stub launches when a question needs it
            for question, asked in self.asked.items():
                made |= QUESTIONS[question](self, graph, asked)
        file = f"case-{self.id}.safetensors"
        tensors.save(scratch / file, made)
        result = {
            "file": file,
            "outputs": [_describe(output) for output in outputs],
            "none": [name for name in leaves if name not in grads],
            "modified": changed,
            "launches_forward": self.launches.counts["forward"],
            "launches_backward": self.launches.counts["backward"],
            "torch_ops_forward": self.own_operations(),
            "torch_ops_backward": dict(sorted(self.poison.counts["backward"].items())),
            "saved_bytes": self.saved_bytes(arguments.arguments),
            "aliases": aliases,
            "same": same,
            "prepared": self.prepared(grads, [tensor for _, tensor in _named_inputs(arguments.arguments)]),
            "kernels": list(self.launches.kernels)[:_MOST_TOLD],
            "launched": list(self.launches.own),
            # Compiled, nobody sees who accesses what.
            "races": list(self.launches.races)[:_MOST_TOLD] if self.flow else None,
            "untraced": untraced if self.flow else None,
            "ordered_by_atomics": list(self.launches.ordered)[:_MOST_TOLD],
            **self.told,
        }
        if self.facts:
            result["facts"] = {"forward": forward_facts.to_dict(), "backward": backward_facts.to_dict()}
        return result

    def may_scale(self) -> bool:
        """Whether the backward of a module that people wrote themselves may do no more than scale what the
        forward made: every upstream is one number."""
        assert self.stub is not None
        wanted = [o.value for o in self.stub.outputs if o.differentiable]
        return bool(self.fwd.functions and wanted) and all(value.numel() == 1 for value in wanted)

    def same(self, grads: dict[str, torch.Tensor]) -> list[str]:
        """Gradients that are one tensor, returned for two inputs, as torch's own sum does: autograd copies it
        where it keeps both."""

        def place(grad: torch.Tensor) -> tuple[Any, ...]:
            return grad.data_ptr(), grad.shape, grad.stride(), grad.dtype

        names = [name for name, grad in grads.items() if grad.numel()]
        return [
            f"grad/{name}=grad/{other}"
            for at, name in enumerate(names)
            for other in names[:at]
            if place(grads[name]) == place(grads[other])
        ]

    def prepared(self, grads: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> list[str]:
        """Where the forward may make gradients: those that are a multiple of something that it kept, which no
        kernel wrote, and which is no multiple of an input."""
        if self.flow is None or not self.flow.scales:
            return []
        kept = [
            tensor for tensor in self.saved if tensor.is_floating_point() and not self.flow.is_made(tensor)
        ]
        kept = [t for t in kept if not any(proportional(t, other) for other in inputs)]
        return [name for name, grad in grads.items() if any(proportional(grad, tensor) for tensor in kept)]

    def inputs_drawn(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return draw.make_inputs(
            self.fwd, self.dims, self.seed, dtype=self.dtype, varied=self.varied, scalar=self.scalar
        )

    def call_stub(self) -> StubCall:
        """The plain stub on these inputs."""
        args, kwargs = self.inputs_drawn()
        bound = draw.bind(self.fwd, args, kwargs)
        watch = Watch()
        for name, tensor in _named_inputs(bound):
            watch.add(name, tensor)
        hanging = self.poison.hanging = self.launches.hanging = Hanging(
            draw.grad_inputs(self.fwd, bound).values()
        )
        with launch_intercept(self.launches), self.poison, self.counting("stub"):
            returned = self.fwd.call(args, kwargs)
        self.poison.hanging = self.launches.hanging = None
        self.launches.counts["forward"] = 0
        self.guards.reset()
        outputs = [_without_values(output) for output in draw.differentiable_outputs(returned, bound)]
        done, values = dict(self.poison.counts["stub"]), self.poison.values["stub"]
        differentiated = frozenset(hanging.operations)
        return StubCall(outputs, set(watch.modified()), nesting(returned), done, values, differentiated)

    @contextlib.contextmanager
    def counting(self, phase: str) -> Iterator[None]:
        """Torch operations inside count for `phase`, here and in the record of another process."""
        witness.mark(f"{self.id} {phase}")
        self.poison.counting = phase
        try:
            yield
        finally:
            self.poison.counting = None
            witness.mark(None)

    def arguments(self) -> tuple[inspect.BoundArguments, dict[str, torch.Tensor]]:
        """The call's arguments, with leaves in place of the inputs that want gradients."""
        args, kwargs = self.inputs_drawn()
        wanted = draw.grad_inputs(self.fwd, draw.bind(self.fwd, args, kwargs))
        if self.needs is not None:
            unknown = [name for name in self.needs if name not in wanted]
            if unknown:
                raise Unusable(
                    "internal", f"needs names {unknown[0]!r}, which is no differentiable input here"
                )
            wanted = {name: wanted[name] for name in self.needs}
        bound = self.fwd.signature.bind(*args, **kwargs)
        others = list(draw.flatten(tuple(bound.arguments.values())))
        leaves = {
            name: self.placed(value, others).detach().requires_grad_() for name, value in wanted.items()
        }
        bound.arguments.update(leaves)
        return bound, leaves

    def placed(self, value: torch.Tensor, inputs: list[Any]) -> torch.Tensor:
        """An input with a storage to itself, at an address as a GPU's allocator gives it: an address must not
        tell a check from use."""
        storage = value.untyped_storage()
        sharing = [
            other
            for other in inputs
            if isinstance(other, torch.Tensor) and other.untyped_storage().data_ptr() == storage.data_ptr()
        ]
        whole = storage.nbytes() == value.numel() * value.element_size() and not repeats(value)
        return self.guards.allocate(value) if whole and len(sharing) == 1 and not value.is_cuda else value

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Collect the tensors that autograd keeps for the backward. Where there are hooks it does not look
        whether they were changed since: that is done here, until questions begin to change inputs."""

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
            self.saved.append(tensor.detach())
            return tensor, tensor._version

        def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
            tensor, version = packed
            if tensor._version != version and not self.asking:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that the backward needs was changed in place "
                    "after it was saved, which autograd does not allow"
                )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def watch_saved(self, outputs: list[draw.Output], watch: Watch) -> Watch:
        """Add everything that was kept for the backward to a watch on the inputs."""
        self.saved += _kept_on_nodes(outputs)
        inputs = watch.tensors()
        own = [t for t in self.saved if not any(overlap(t, other) for _, other in inputs)]
        for at, tensor in enumerate(own):
            watch.add(f"saved/{at}", tensor)
        return watch

    def outputs(self, returned: Any, bound: dict[str, Any], expected: list[draw.Output]) -> list[draw.Output]:
        """The entry's outputs, differentiable where the plain stub's are. Raises
        Unusable("candidate_shape")."""
        outputs = draw.differentiable_outputs(returned, bound)
        if len(outputs) != len(expected):
            raise Unusable(
                "candidate_shape",
                f"{self.entry.__name__}() returns {len(outputs)} values where {self.fwd.stub_name}() returns "
                f"{len(expected)}",
                self.fwd.path,
            )
        assert self.stub is not None
        if nesting(returned) != self.stub.nesting:
            raise Unusable(
                "candidate_shape",
                f"{self.entry.__name__}() nests its return value as {nesting(returned)}, the stub as "
                f"{self.stub.nesting}",
                self.fwd.path,
            )
        for output, plain in zip(outputs, expected, strict=True):
            if plain.kind == "tensor":
                _require_plain(f"output {output.index}", output.value, self.fwd.path)
            if _meaning(output) != _meaning(plain):
                raise Unusable(
                    "candidate_shape",
                    f"output {output.index} is {_meaning(output)}, but the stub returns {_meaning(plain)}",
                    self.fwd.path,
                )
        return [
            draw.Output(output.index, output.value, output.kind, plain.differentiable)
            for output, plain in zip(outputs, expected, strict=True)
        ]

    def other(self, told: dict[str, Any]) -> Case:
        """Another case in this one's place: what it allocates and launches is watched here too."""
        made = Case(self.fwd, self.entry, told, self.dtype)
        made.guards, made.poison, made.launches = self.guards, self.poison, self.launches
        made.stub = self.stub if told["dims"] == self.dims else made.stub_anew()
        return made

    def usual_call(self) -> None:
        """The same with the usual numbers, before this one with others: what a module keeps by shape, say, is
        of that call then."""
        phase = self.launches.phase
        case = {"id": self.id, "dims": self.dims, "seed": self.seed, "upstream": self.upstream}
        usual = self.other(case)
        usual.again("usual", usual.call(*usual.arguments()))
        self.launches.phase = phase
        self.guards.reset()

    def stub_anew(self) -> StubCall:
        """What the plain stub does, found out in the middle of a case, whose record stays as it is."""
        case = {
            "id": self.id,
            "dims": self.dims,
            "seed": self.seed,
            "upstream": self.upstream,
            "scalar": self.scalar,
        }
        return Case(self.fwd, self.entry, case, self.dtype).call_stub()

    def call(
        self, arguments: inspect.BoundArguments, leaves: dict[str, torch.Tensor], phase: str = "again"
    ) -> Graph:
        """One more call of the entry, and upstreams for it."""
        assert self.stub is not None
        self.launches.phase = phase
        returned = self.entry(*arguments.args, **arguments.kwargs)
        try:
            outputs = self.outputs(returned, arguments.arguments, self.stub.outputs)
            upstreams = self.upstreams(self.stub.outputs, outputs, self.upstream["seed"])
        except Unusable:  # the same dimensions, and yet other shapes or integers: they hang on the data
            self.stub = self.stub_anew()
            outputs = self.outputs(returned, arguments.arguments, self.stub.outputs)
            upstreams = self.upstreams(self.stub.outputs, outputs, self.upstream["seed"])
        return Graph(arguments, outputs, leaves, self.stub.outputs, upstreams, {})

    def again(self, part: str, graph: Graph, phase: str = "again") -> dict[str, torch.Tensor]:
        """Copies of what one more backward over the graph gives, as tensors of `part`."""
        grads = self.backward(phase, graph.outputs, graph.leaves, graph.upstreams)
        return {f"{part}/{name}": grad.clone() for name, grad in grads.items()}

    def upstreams(
        self, expected: list[draw.Output], outputs: list[draw.Output], seed: int
    ) -> dict[int, torch.Tensor]:
        """Upstream gradients by output index. They have the shape and dtype of the plain stub's outputs."""
        differentiable = [output for output in expected if output.differentiable]
        made = {}
        for at, plain in enumerate(differentiable):
            value = draw.upstream(
                self.upstream["kind"],
                seed,
                self.varied.layouts.get(vary.upstream_name(plain.index)),
                plain.value.shape,
                plain.value.dtype,
                plain.value.device,
                at,
                len(differentiable),
            )
            got = outputs[plain.index].value
            if (tuple(got.shape), got.dtype) != (tuple(plain.value.shape), plain.value.dtype):
                raise Unusable(
                    "candidate_shape",
                    f"output {plain.index} is {draw.dtype_name(got.dtype)}{list(got.shape)}, but the stub "
                    "returns "
                    f"{plain.dtype}{plain.shape}",
                    self.fwd.path,
                )
            if value is not None and got.requires_grad:
                made[plain.index] = value
        if self.flow is not None:
            self.flow.begins(made.values())
        return made

    def backward(
        self,
        phase: str,
        outputs: list[draw.Output],
        leaves: dict[str, torch.Tensor],
        upstreams: dict[int, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Gradients by name; those that came back as None are missing."""
        if not upstreams or not leaves:
            return {}
        self.launches.phase = phase
        counted = self.counting("backward") if phase == "backward" else contextlib.nullcontext()
        with counted, configuration(0 if self.facts else self.id):
            grads = devices.gradients(
                [outputs[index].value for index in upstreams], list(leaves.values()), list(upstreams.values())
            )
        if self.fwd.mode == "cuda":
            torch.cuda.synchronize()
        named = {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
        for name, grad in named.items():
            _require_plain(f"the gradient of {name}", grad, self.fwd.path)
        return named

    def own_operations(self) -> dict[str, int]:
        """Operations of the entry's forward beyond those of the stub, by how many more they are. One that
        makes something else than the stub's of that name is no operation of the stub."""
        assert self.stub is not None
        stub = self.stub.operations
        more = {name: n - stub.get(name, 0) for name, n in sorted(self.poison.counts["forward"].items())}
        left = list(self.stub.values)
        others: dict[str, int] = {}
        for made in self.poison.values["forward"]:
            same = next((value for value in left if made.is_like(value)), None)
            if same is not None:
                left.remove(same)
            else:
                others[made.name] = others.get(made.name, 0) + 1
        return {name: n for name in more if (n := max(more[name], others.get(name, 0))) > 0}

    def saved_bytes(self, bound: dict[str, Any]) -> int:
        """Bytes kept alive for the backward, beyond the inputs."""
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.saved}
        for tensor in draw.tensors_in(bound):
            sizes.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(sizes.values())

    def aliases(
        self,
        grads: dict[str, torch.Tensor],
        outputs: list[draw.Output],
        bound: dict[str, Any],
        upstreams: dict[int, torch.Tensor],
    ) -> list[str]:
        """Gradients that share memory with inputs, upstream gradients, outputs or each other:
        `grad/x=upstream/0`."""
        others = [
            *_named_inputs(bound),
            *((f"upstream/{index}", value) for index, value in upstreams.items()),
        ]
        others += [(f"out/{o.index}", o.value) for o in outputs if isinstance(o.value, torch.Tensor)]
        found = []
        for name, grad in grads.items():
            found += [f"grad/{name}={other}" for other, tensor in others if overlap(grad, tensor)]
            others.append((f"grad/{name}", grad))
        return found


def _named_inputs(bound: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among the arguments: `x`, or `xs[1]` inside a container."""
    for name, value in bound.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            for at, tensor in enumerate(draw.tensors_in(value)):
                yield f"{name}[{at}]", tensor


def proportional(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one is the other times a number, and not the same everywhere."""
    if a.numel() != b.numel() or a.numel() < 2 or not (a.is_floating_point() and b.is_floating_point()):
        return False
    x, y = (t.detach().double().reshape(-1) for t in (a, b))
    product = x.norm() * y.norm()
    if not bool(product.isfinite()) or float(product) == 0 or bool((y == y[0]).all()):
        return False
    return float((x @ y).abs() / product) > 1 - 1e-5


def _require_plain(what: str, value: Any, path: str) -> None:
    if type(value) is not torch.Tensor:
        raise Unusable("candidate_shape", f"{what} is a {type(value).__name__}, not a torch.Tensor", path)


def _kept_on_nodes(outputs: list[draw.Output]) -> list[torch.Tensor]:
    """Tensors that a torch.autograd.Function keeps as attributes of its context."""
    todo = [output.value.grad_fn for output in outputs if isinstance(output.value, torch.Tensor)]
    seen: set[int] = set()
    kept = []
    while todo and len(seen) < 1000:
        node = todo.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        kept += [tensor.detach() for tensor in draw.tensors_in(getattr(node, "__dict__", {}))]
        todo += [following for following, _ in node.next_functions]
    return kept


def _without_values(output: draw.Output) -> draw.Output:
    if not isinstance(output.value, torch.Tensor):
        return output
    shape, one = output.value.shape, torch.empty((), dtype=output.value.dtype, device=output.value.device)
    return replace(output, value=one.expand(shape))


def _describe(output: draw.Output) -> dict[str, Any]:
    entry = output.to_dict()
    if output.kind == "int":
        entry["value"] = output.value
    return entry
