"""What a case may ask of a candidate beyond its gradients: one function for each question of
agent/core/kinds.c, which leaves tensors for the daemon to compare (agent/run/judge.c)."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .. import draw
from ..errors import Unusable
from ..layout import repeats
from ..watching import same_bytes

if TYPE_CHECKING:
    from .candidate import Case


@dataclass(frozen=True)
class Graph:
    """A call of the entry: its outputs and the plain stub's, the leaves, upstreams for them, and the first
    gradients as they were handed out."""

    arguments: inspect.BoundArguments
    outputs: list[draw.Output]
    leaves: dict[str, torch.Tensor]
    expected: list[draw.Output]
    upstreams: dict[int, torch.Tensor]
    grads: dict[str, torch.Tensor]

    def outputs_as(self, part: str) -> dict[str, torch.Tensor]:
        """Copies of the outputs as they are now, as tensors of `part`."""
        values = {f"{part}/{output.index}": output.value for output in self.outputs}
        return {n: v.detach().clone() for n, v in values.items() if isinstance(v, torch.Tensor)}


def _twice(case: Case, graph: Graph, _: bool) -> dict[str, torch.Tensor]:
    return case.again("again", graph)


def _repeats(case: Case, graph: Graph, times: int) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for at in range(times):
        made |= case.again(f"repeat{at}", graph)
    return made


SUMS = (-1.0, 1.0, 2.0, 4.0)  # a*u + b*w in units of u: with a = 3, b = 2 neither w nor the sum is rounded


def _linear(case: Case, graph: Graph, factors: list[float]) -> dict[str, torch.Tensor]:
    """Gradients for another upstream w (`other/`), and for a*u + b*w (`sum/`).

    Elements of w are small multiples of those of u, each by chance: a sum that was rounded to bfloat16 would
    be off by more than gradients in float32 may be.
    """
    a, b = factors
    drawn = case.upstreams(graph.expected, graph.outputs, case.upstream["seed"] + 1)
    others, sums = {}, {}
    for index, value in graph.upstreams.items():
        by_chance = torch.bucketize(drawn[index].float(), value.new_tensor((-0.67, 0.0, 0.67)).float())
        times = value.new_tensor(SUMS)[by_chance]
        sums[index], others[index] = times * value, (times - a) / b * value
    made = case.again("other", replace(graph, upstreams=others))
    return made | case.again("sum", replace(graph, upstreams=sums))


def _spoilt(case: Case, graph: Graph, _: bool) -> dict[str, torch.Tensor]:
    """Gradients for the upstream times NaN, and times infinity: a loss scale that was too large shows so."""
    made: dict[str, torch.Tensor] = {}
    for at, factor in enumerate((torch.nan, torch.inf)):
        scaled = {index: value * factor for index, value in graph.upstreams.items()}
        made |= case.again(f"spoilt{at}", replace(graph, upstreams=scaled))
    return made


def _powers(case: Case, graph: Graph, factors: list[float]) -> dict[str, torch.Tensor]:
    """Gradients for the upstream times each of some powers of two."""
    made: dict[str, torch.Tensor] = {}
    for at, factor in enumerate(factors):
        scaled = {index: value * factor for index, value in graph.upstreams.items()}
        made |= case.again(f"power{at}", replace(graph, upstreams=scaled))
    return made


def _noop(case: Case, graph: Graph, _: bool) -> dict[str, torch.Tensor]:
    """With every launch of the backward turned into nothing; of the forward too, where that may make the
    gradients."""
    if case.scales:
        graph = case.call(*case.arguments(), phase="noop")
    return case.again("noop", graph, phase="noop")


def _beside(case: Case, graph: Graph, told: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Another graph is made while this one is alive, then both are differentiated in either order."""
    other = case.other(told)
    arguments, leaves = other.arguments()
    unnamed = {
        name: value.detach().requires_grad_()
        for name, value in arguments.arguments.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in case.fwd.grads
    }
    arguments.arguments.update(unnamed)
    second = other.call(_without_defaults(case, arguments), leaves)
    returned = other.backward("again", second.outputs, unnamed, second.upstreams) if unnamed else {}
    own = _stubs_own(case, arguments, unnamed, second.upstreams) if returned else {}
    case.told["unnamed"] = [n for n, grad in returned.items() if n not in own or not _is_near(grad, own[n])]
    made = other.again("beside", second) | second.outputs_as("beside_out")
    _wear(other, arguments, leaves)
    return made | case.again("held", graph) | other.again("after", second)


def _stubs_own(
    case: Case,
    arguments: inspect.BoundArguments,
    wanted: dict[str, torch.Tensor],
    upstreams: dict[int, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Gradients that the plain stub hands out itself, by the torch operations around its kernels. Of a module
    that people wrote themselves the stub is what is checked."""
    if case.fwd.functions:
        return {}
    outputs = draw.flatten(case.fwd.call(arguments.args, arguments.kwargs))
    hanging = {at: up for at, up in upstreams.items() if getattr(outputs[at], "requires_grad", False)}
    if not hanging:
        return {}
    grads = torch.autograd.grad(
        [outputs[at] for at in hanging], list(wanted.values()), list(hanging.values()), allow_unused=True
    )
    return {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(b.abs().max())))


WORN, WEAR_SECONDS, WEAR_BYTES = 20, 0.5, 1 << 30


def _wear(case: Case, arguments: inspect.BoundArguments, leaves: dict[str, torch.Tensor]) -> None:
    """More calls of that shape, forward and backward: of buffers that are used in turn, each comes round
    again."""
    until, most = time.process_time() + WEAR_SECONDS, case.guards.bytes_held() + WEAR_BYTES
    for _ in range(WORN):
        case.again("worn", case.call(arguments, leaves))
        if time.process_time() > until or case.guards.bytes_held() > most:
            break


def _kept(case: Case, graph: Graph, __: bool) -> dict[str, torch.Tensor]:
    """What the case has returned, never copied until now, when other calls have been made, and the graph was
    differentiated for another upstream; the same of another graph of these inputs, where that has changed."""
    plain = case.call(graph.arguments, graph.leaves)  # without hooks, so that saved tensors are the inputs
    grads = case.backward("again", plain.outputs, plain.leaves, plain.upstreams)
    before = {name: grad.clone() for name, grad in grads.items()}
    doubled = {index: 2 * value for index, value in graph.upstreams.items()}
    for one in (graph, graph, plain, case.call(graph.arguments, graph.leaves)):
        case.again("doubled", replace(one, upstreams=doubled))
    made = {f"kept/{name}": grad.clone() for name, grad in graph.grads.items()}
    changed = [name for name, grad in grads.items() if not same_bytes(grad, before[name])]
    made |= {f"kept/{name}": grads[name].clone() for name in changed}
    return made | graph.outputs_as("kept_out")


def _quiet(case: Case, _: Graph, __: bool) -> dict[str, torch.Tensor]:
    """Outputs where nothing is recorded, and where no input wants a gradient."""
    with torch.no_grad():
        quiet = case.call(*case.arguments())
    arguments, leaves = case.arguments()
    arguments.arguments.update({name: leaf.detach() for name, leaf in leaves.items()})
    return quiet.outputs_as("quiet_out") | case.call(arguments, {}).outputs_as("unwanted_out")


def _stepped(case: Case, graph: Graph, told: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Another case's values written into this one's inputs, as an optimizer does, and a call with them."""
    other = case.other(told)
    case.again(
        "before", case.call(graph.arguments, graph.leaves)
    )  # now without hooks, which give other tensors
    stepped = other.call(*_refilled(graph.arguments, *other.arguments()))
    return other.again("stepped", stepped) | stepped.outputs_as("stepped_out")


def _stale(case: Case, graph: Graph, told: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same, and one input or output after the other is changed between forward and backward: what is kept
    where autograd does not count versions shows where nothing else was changed."""
    other = case.other(told)
    made, refused = dict[str, torch.Tensor](), []
    own = case.arguments()[0].arguments
    for name in [name for name, value in graph.arguments.arguments.items() if _is_tensor(value)]:
        stepped = other.call(*_refilled(graph.arguments, *other.arguments()))
        try:
            changed = graph.arguments.arguments[name]
            if not _refill(changed, _unlike(changed, own[name])):
                raise Unusable("internal", "not to be changed in place")
            made |= other.again(f"stale.{name}", stepped)
        except Exception:  # noqa: BLE001 (to refuse is right, by the count of versions or by a check of one's own)
            refused.append(name)
    for index, plain in enumerate(graph.expected):
        stepped = other.call(*other.arguments())
        try:
            changed = stepped.outputs[index].value
            if not plain.differentiable or not _refill(changed, _unlike(changed, changed)):
                raise Unusable("internal", "not to be changed in place")
            made |= other.again(f"stale.out/{index}", stepped)
        except Exception:  # noqa: BLE001 (as above)
            refused.append(f"out/{index}")
    case.told["stale_refused"] = refused
    return made


CALLS, LAUNCHED_EVERY, CALL_SECONDS = 352, 16, 1.0


def _calls(case: Case, graph: Graph, told: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Many calls of the cheapest case, and then this one's again. Most of them launch nothing, which is what
    the interpreter would spend its time on, unless the host code needs what the kernels make."""
    small = case.other(told)
    arguments, leaves = small.arguments()
    one = small.call(arguments, leaves)
    idle = "noop"
    until = time.process_time() + CALL_SECONDS
    for number in range(CALLS):
        phase = case.launches.phase = idle if number % LAUNCHED_EVERY else "again"
        try:
            values = draw.flatten(small.entry(*arguments.args, **arguments.kwargs))
            outputs = [replace(o, value=v) for o, v in zip(one.outputs, values, strict=True)]
            small.backward(phase, outputs, leaves, one.upstreams)
        except Exception:
            if phase == "again":
                raise
            idle = "again"
        case.guards.reset()
        case.told["calls"] = number + 1
        if time.process_time() > until:
            break
    return case.again("worn", case.call(*case.arguments()))


# What a case may ask beyond its gradients, in the order in which it is done over one graph.
QUESTIONS: dict[str, Callable[[Case, Graph, Any], dict[str, torch.Tensor]]] = {
    "twice": _twice,
    "repeats": _repeats,
    "linear": _linear,
    "powers": _powers,
    "spoilt": _spoilt,
    "beside": _beside,
    "kept": _kept,
    "quiet": _quiet,
    "stepped": _stepped,
    "stale": _stale,
    "calls": _calls,
    "noop": _noop,
}


def _without_defaults(case: Case, arguments: inspect.BoundArguments) -> inspect.BoundArguments:
    """The same call, where what equals the stub's default is left to the entry's own. Of an `apply`, which
    takes no names, no argument that stands before one that is given."""
    owner = getattr(case.entry, "__self__", None)
    by_place = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    for parameter in reversed(case.fwd.params):
        given = arguments.arguments.get(parameter.name)
        if parameter.name not in arguments.arguments:
            continue  # **options of which none was given
        if type(given) is type(parameter.default) and same_value(given, parameter.default):
            del arguments.arguments[parameter.name]
        elif by_place:
            break
    return arguments


def same_value(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 (values of the user's, which need not be comparable)
        return False


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _refill(old: Any, new: torch.Tensor) -> bool:
    """Whether the values could be written into a tensor that is there."""
    if (old.shape, old.dtype) != (new.shape, new.dtype) or repeats(old):
        return False
    with torch.no_grad():
        old.copy_(new)
    return True


def _unlike(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Other values than those that are there: a table of a shape is the same in each case."""
    same = old.is_floating_point() and (old.shape, old.dtype) == (new.shape, new.dtype) and old.equal(new)
    return new / 2 + 1 if same else new


def _refilled(
    into: inspect.BoundArguments, arguments: inspect.BoundArguments, leaves: dict[str, torch.Tensor]
) -> tuple[inspect.BoundArguments, dict[str, torch.Tensor]]:
    """The same call with the tensors of `into`, whose values are changed in place; not those whose shape
    hangs on the data."""
    for name, new in arguments.arguments.items():
        old = into.arguments.get(name)
        if old is not None and _is_tensor(new) and _is_tensor(old) and _refill(old, new):
            arguments.arguments[name] = old
            if name in leaves:
                leaves[name] = old
    return arguments, leaves
