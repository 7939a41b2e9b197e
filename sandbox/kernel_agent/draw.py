"""Inputs and upstream gradients from seeds: the same bytes for one seed and device in every process.

The CPU and a GPU draw different numbers, and so may two models of GPU: candidate and oracle of one case run
on the same one.

Also what a call means: arguments by name, and which outputs are differentiated.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import devices, vary
from .errors import Unusable, describe, wrap
from .forward import Forward


@dataclass(frozen=True)
class Output:
    """One entry of the stub's flattened return value. `kind` is tensor, none, int, input or other."""

    index: int
    value: Any
    kind: str
    differentiable: bool

    @property
    def shape(self) -> list[int] | None:
        return list(self.value.shape) if isinstance(self.value, torch.Tensor) else None

    @property
    def dtype(self) -> str | None:
        return dtype_name(self.value.dtype) if isinstance(self.value, torch.Tensor) else None

    def to_dict(self) -> dict[str, Any]:
        """The entry of `outputs` in docs/protocol.md."""
        return {
            "index": self.index,
            "kind": self.kind,
            "shape": self.shape,
            "dtype": self.dtype,
            "differentiable": self.differentiable,
        }


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """`"float32"` as a dtype; None stays None. ValueError for anything else."""
    if name is None or isinstance(name, torch.dtype):
        return name
    value = getattr(torch, name, None)
    if isinstance(value, torch.dtype):
        return value
    raise ValueError(f"{name!r} is not a dtype")


def make_inputs(
    fwd: Forward,
    dims: Mapping[str, Any],
    seed: int,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    varied: vary.Varied | None = None,
    plain: bool = False,
    scalar: Mapping[str, Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the stub, drawn by the file's make_args after seeding torch, numpy
    and random.

    `dtype` None means make_args' own default, except that bfloat16 becomes float32 on the CPU. `varied`:
    which inputs are of another kind than make_args makes them; with `plain` only their values are. `scalar`
    ({"name", "way"}) gives an argument that is a number or a flag another value, as nearby() makes it and
    tables follow() it, or the only tensor of indices, as rearranged() does. Inputs that want gradients do not
    require them yet.
    Raises Unusable (make_args_raised, make_args_type).
    """
    device = device or fwd.device
    wanted = dtype_of(dtype)
    demote = wanted is None and device == "cpu"
    if demote and fwd.dtype == torch.bfloat16:
        wanted = torch.float32
    fwd.ensure_setup()
    _seed_all(seed, fwd.mode == "cuda")
    try:
        with fwd.active():
            made = fwd.make_args(fwd.as_written(dims), **_accepted(fwd, device, wanted))
    except (Exception, SystemExit) as exc:
        if fwd.borrowed:
            raise _not_for_it(fwd, f"make_args({dict(dims)}) raised {describe(exc)}") from exc
        raise wrap("make_args_raised", f"make_args({dict(dims)}) raised ", exc, [fwd.path]) from exc
    args, kwargs = _normalise(fwd, made)
    if demote:
        args, kwargs = _without_bf16(args), _without_bf16(kwargs)
    bound = bind(fwd, args, kwargs)
    if not varied and scalar is None:
        return args, kwargs
    arguments = fwd.signature.bind(*args, **kwargs)
    if varied:
        wanted_first = grad_inputs(fwd, bound)
        others = {name: value for name, value in bound.items() if isinstance(value, torch.Tensor)}
        arguments.arguments.update(varied.inputs(wanted_first | others, plain))
    if scalar is not None:
        value = bound[scalar["name"]]
        tables = [v for v in bound.values() if isinstance(v, torch.Tensor) and _is_table(v)]
        if len(tables) == 1 and tables[0] is value and scalar["way"] < 2:
            other: Any = rearranged(scalar["name"], value, scalar["way"])
        else:  # several may have to fit each other
            other = nearby(scalar["name"], value, scalar["way"])
        for parameter in fwd.params:  # apply takes no names
            if parameter.name == scalar["name"] or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
                break
            arguments.arguments.setdefault(parameter.name, bound[parameter.name])
        arguments.arguments[scalar["name"]] = other
        if isinstance(value, int) and value < 0:
            index = commonest_index(tables, value) if scalar["way"] == 0 else None
            if index is not None:
                arguments.arguments[scalar["name"]] = other = index
            follow(arguments.arguments, value, other)
    return arguments.args, arguments.kwargs


def commonest_index(tables: Iterable[torch.Tensor], value: int) -> int | None:
    """An index of the tables in which a number stands for no index: to leave out what is negative is not to
    leave out what equals it. None where it stands in none."""
    found = [table for table in tables if table.dtype != torch.bool and bool((table == value).any())]
    indices = torch.cat([table[table >= 0].reshape(-1) for table in found]) if found else torch.empty(0)
    return int(indices.mode().values) if indices.numel() else None


def follow(arguments: dict[str, Any], value: int, other: int) -> None:
    """Let tables follow a number below zero that occurs in them: what stands for no index, as an ignore_index
    does, is told by both. As an index it would reach out of its row."""
    for name, table in arguments.items():
        if isinstance(table, torch.Tensor) and _is_table(table) and table.dtype != torch.bool:
            hit = table == value
            if bool(hit.any()):
                arguments[name] = table.masked_fill(hit, other)


def nearby(name: str, value: Any, way: int) -> Any:
    """Another value of an argument that is a number or a flag; of integers there are three ways, of most
    other numbers two: a larger one, and one much smaller. Raises Unusable("inputs_refused")."""
    others: list[Any] = []
    if isinstance(value, bool):
        others = [not value]
    elif isinstance(value, int):
        others = [v for v in (value + 1, 2 * value, value // 2) if v != value]
    elif (
        isinstance(value, float) and abs(value) < 0.01
    ):  # one that guards against zero shows where it is large
        others = [0.25]
    elif isinstance(value, float):
        nearer = value / 2 + (0.25 if value != 0.5 else 0.125)  # 0 < value < 1
        others = [nearer if 0 < value < 1 else 1.5 * value, value / 16]
    if way < len(others):
        return others[way]
    if isinstance(value, torch.Tensor) or (way and others):
        raise Unusable("inputs_refused", f"{name} is a tensor" if not others else f"{name} has no such value")
    raise Unusable("inputs_refused", f"{name} is {value!r}, no number and no flag"[:200])


def _is_table(tensor: torch.Tensor) -> bool:
    """Indices, boundaries, masks."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def rearranged(name: str, table: torch.Tensor, way: int) -> torch.Tensor:
    """Other indices that are as good as these: make_args may well make the same ones for a shape each time.

    What increases still does, from the same first to the same last, the first way with most of it in the last
    step; of the rest the first axis begins elsewhere. What occurs once still does.
    Raises Unusable("inputs_refused") where that changes nothing.
    """
    increases = table.dim() == 1 and table.dtype != torch.bool and bool((table.diff() >= 0).all())
    other = table.roll(1, 0) if table.dim() else table
    if increases:
        inner = max(table.numel() - 2, 0)
        first, last, drawn = int(table[:1].sum()), int(table[-1:].sum()), random.Random(inner)
        most = first + (last - first) // (4 if way == 0 else 1)
        if bool((table.diff() > 0).all()):
            found = drawn.sample(range(first + 1, min(last, max(most, first + 1 + inner))), inner)
        else:
            found = [drawn.randint(first, most) for _ in range(inner)]
        other = table.new_tensor([first, *sorted(found), last]) if inner else table
    if torch.equal(other, table):
        raise Unusable("inputs_refused", f"{name} is a tensor that has no other such values")
    return other


def _seed_all(seed: int, on_gpu: bool) -> None:
    # The first notes for each kind of device who asked, which takes long.
    seed_torch = torch.manual_seed if on_gpu else torch.default_generator.manual_seed
    seed_torch(seed & 0x7FFFFFFFFFFFFFFF)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _accepted(fwd: Forward, device: str, dtype: torch.dtype | None) -> dict[str, Any]:
    """`device` and `dtype` as far as make_args takes them."""
    parameters = inspect.signature(fwd.make_args).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    options: dict[str, Any] = {}
    if anything or "device" in parameters:
        options["device"] = device
    if dtype is not None and (anything or "dtype" in parameters):
        takes_text = "dtype" in parameters and isinstance(parameters["dtype"].default, str)
        options["dtype"] = dtype_name(dtype) if takes_text else dtype
    return options


def _normalise(fwd: Forward, made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(made, torch.Tensor):
        return (made,), {}
    if isinstance(made, dict):
        return (), dict(made)
    if not isinstance(made, (tuple, list)):
        raise Unusable(
            "make_args_type",
            f"make_args returns the stub's arguments or (args, kwargs), not {type(made).__name__}",
            fwd.path,
            _line_of(fwd.make_args),
        )
    if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return tuple(made[0]), dict(made[1])
    return tuple(made), {}


def _without_bf16(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if isinstance(value, dict):
        return {key: _without_bf16(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_without_bf16(item) for item in value)
    return value


def _line_of(function: Any) -> int | None:
    code = getattr(function, "__code__", None)
    return code.co_firstlineno if code is not None else None


def _not_for_it(fwd: Forward, why: str) -> Unusable:
    """The module's make_args is for other functions than this."""
    return Unusable(
        "make_args_missing",
        f"not checked: no make_args for it: {why}",
        fwd.path,
        fwd.stub_line,
        remedy=f"add make_args_{fwd.stub_name}(dims, device=..., dtype=...)",
    )


def bind(fwd: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter of the stub by name, defaults filled in. Raises Unusable("make_args_type")."""
    try:
        bound = fwd.signature.bind(*args, **kwargs)
    except TypeError as exc:
        if fwd.borrowed:
            what = f"what make_args returns does not fit {fwd.stub_name}(): {exc}"
            raise _not_for_it(fwd, what) from exc
        raise Unusable(
            "make_args_type",
            f"what make_args returns does not fit {fwd.stub_name}(): {exc}",
            fwd.path,
            _line_of(fwd.make_args),
        ) from exc
    bound.apply_defaults()
    return dict(bound.arguments)


def grad_inputs(fwd: Forward, bound: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of this call that want gradients: named by the decorator, and floating tensors here."""
    return {
        name: bound[name]
        for name in fwd.grads
        if isinstance(bound[name], torch.Tensor) and bound[name].is_floating_point()
    }


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def flatten(value: Any) -> list[Any]:
    """A return value as a flat list: nested tuples, lists and dicts (by insertion) are opened."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in flatten(item)]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in flatten(item)]
    return [value]


def differentiable_outputs(outputs: Any, args: Any) -> list[Output]:
    """The flattened return value of the stub, each entry classified.

    `args` is anything that holds the inputs (bound arguments, or (args, kwargs)). An output that shares
    memory with an input passes through, one that was detached or is not floating is not differentiated; the
    rest is.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args) if tensor.numel()}
    return [_classify(index, value, storages) for index, value in enumerate(flatten(outputs))]


def _classify(index: int, value: Any, inputs: set[int]) -> Output:
    if value is None:
        return Output(index, value, "none", False)
    if isinstance(value, torch.Tensor):
        if value.numel() and value.untyped_storage().data_ptr() in inputs:
            return Output(index, value, "input", False)
        return Output(index, value, "tensor", value.is_floating_point() and not devices.was_detached(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Output(index, value, "int", False)
    return Output(index, value, "other", False)


def _normal(seed: int, index: int, shape: Sequence[int], device: str | torch.device) -> torch.Tensor:
    """Standard normal values that depend on seed, index, shape and the kind of device only: of float64 on the
    CPU, on a GPU of float32, from the counters of its own generator."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(
        (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) % (1 << 63)
    )
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=device)


@dataclass(frozen=True)
class Wanted:
    """What the upstream gradient of differentiable output `index` of `count` has to be."""

    seed: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str | torch.device
    index: int
    count: int


def _plain(wanted: Wanted) -> torch.Tensor:
    return _normal(wanted.seed, wanted.index, wanted.shape, wanted.device).to(wanted.dtype)


def _onehot(wanted: Wanted) -> torch.Tensor:
    hot = torch.zeros(wanted.shape, dtype=wanted.dtype, device=wanted.device)
    if hot.numel():
        at = random.Random(f"{wanted.seed}/{wanted.index}").randrange(hot.numel())
        hot.view(-1)[at] = 1.0
    return hot


def _ones(wanted: Wanted) -> torch.Tensor:
    return torch.ones(wanted.shape, dtype=wanted.dtype, device=wanted.device)


def _none_one(wanted: Wanted) -> torch.Tensor | None:
    """None for one of several outputs, as where only the others are used."""
    left_out = wanted.count > 1 and wanted.index == wanted.seed % wanted.count
    return None if left_out else _plain(wanted)


def _only_one(wanted: Wanted) -> torch.Tensor | None:
    """None for all of several outputs but one."""
    used = wanted.count < 2 or wanted.index == wanted.seed % wanted.count
    return _plain(wanted) if used else None


# The kinds of upstream gradients.
UPSTREAMS: dict[str, Callable[[Wanted], torch.Tensor | None]] = {
    "normal": _plain,
    "onehot": _onehot,
    "ones": _ones,
    "none_one": _none_one,
    "only_one": _only_one,
}
UPSTREAM_KINDS = tuple(UPSTREAMS)


def upstream(
    kind: str,
    seed: int,
    layout: str | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | torch.device,
    index: int,
    count: int,
) -> torch.Tensor | None:
    """The upstream gradient of differentiable output `index` of `count`, or None where `none_one` leaves it
    out.

    Values depend on kind, seed, layout, index, shape, dtype and the kind of device, on which they are drawn:
    nothing of the size of an output is made on the CPU for a GPU.
    """
    if kind not in UPSTREAMS:
        raise ValueError(f"upstream kind {kind!r} is none of {', '.join(UPSTREAMS)}")
    made = UPSTREAMS[kind](Wanted(seed, tuple(shape), dtype, device, index, count))
    return None if made is None else vary.laid_out(made, layout)
