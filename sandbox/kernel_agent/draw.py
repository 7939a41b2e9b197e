"""Inputs and upstream gradients from seeds: the same bytes for one seed and device in every process.

The CPU and a GPU draw different numbers, and so may two models of GPU: candidate and oracle of one case run
on the same one.

Also what a call means: arguments by name, and which outputs are differentiated.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import devices
from .errors import Unusable, wrap
from .forward import Forward

ROW_PADDING = 3  # elements: no power of two, so that no block hides it
MIXED = (1e2, 1e-2)  # the exponential of the larger overflows where it is not shifted; float16 holds both


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
    kind: str | None = None,
    scalar: Mapping[str, Any] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the stub, drawn by the file's make_args after seeding torch, numpy
    and random.

    `dtype` None means make_args' own default, except that bfloat16 becomes float32 on the CPU. `kind` is one
    of INPUTS, or None for the inputs as make_args makes them. `scalar` ({"name", "way"}) gives an argument
    that is a number or a flag another value, as nearby() makes it. Inputs that want gradients do not require
    them yet. Raises Unusable (make_args_raised, make_args_type).
    """
    device = device or fwd.device
    wanted = dtype_of(dtype)
    demote = wanted is None and device == "cpu"
    if demote and fwd.dtype == torch.bfloat16:
        wanted = torch.float32
    fwd.ensure_setup()
    _seed_all(seed)
    try:
        with fwd.active():
            made = fwd.make_args(dict(dims), **_accepted(fwd, device, wanted))
    except (Exception, SystemExit) as exc:
        raise wrap("make_args_raised", f"make_args({dict(dims)}) raised ", exc, [fwd.path]) from exc
    args, kwargs = _normalise(fwd, made)
    if demote:
        args, kwargs = _without_bf16(args), _without_bf16(kwargs)
    bound = bind(fwd, args, kwargs)
    if kind is None and scalar is None:
        return args, kwargs
    arguments = fwd.signature.bind(*args, **kwargs)
    if kind is not None:
        arguments.arguments.update(_of_kind(kind, grad_inputs(fwd, bound)))
    if scalar is not None:
        arguments.arguments[scalar["name"]] = nearby(scalar["name"], bound[scalar["name"]], scalar["way"])
    return arguments.args, arguments.kwargs


def _of_kind(kind: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs that have other strides or magnitudes then."""
    if kind not in INPUTS:
        raise ValueError(f"inputs {kind!r} are none of {', '.join(INPUTS)}")
    how = INPUTS[kind]
    names = [name for name, tensor in inputs.items() if how.can(tensor)]
    return {name: how.change(inputs[name]) for name in (names[:1] if how.one_only else names)}


def nearby(name: str, value: Any, way: int) -> Any:
    """Another value of an argument that is a number or a flag; of integers there are three ways. Raises
    Unusable("inputs_refused")."""
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
        others = [value / 2 + 0.25 if 0 < value < 1 else 1.5 * value]
    if way < len(others):
        return others[way]
    if isinstance(value, torch.Tensor) or (way and others):
        raise Unusable("inputs_refused", f"{name} is a tensor" if not others else f"{name} has no such value")
    raise Unusable("inputs_refused", f"{name} is {value!r}, no number and no flag"[:200])


def has_rows(tensor: torch.Tensor) -> bool:
    """Whether there are two rows to tell apart: vectors and scalars stay as they are in every kind."""
    return tensor.dim() >= 2 and tensor.shape[:-1].numel() >= 2


def _padded(values: torch.Tensor) -> torch.Tensor:
    """The same values, the rows further apart in memory. Between them is NaN, which nobody may read."""
    *outer, columns = values.shape
    wide = values.new_full((*outer, columns + ROW_PADDING), torch.nan)
    wide[..., :columns] = values
    return wide[..., :columns]


def _strided(values: torch.Tensor) -> torch.Tensor:
    """The same values, spread out in memory with the axes in another order."""
    if values.dim() == 0:
        return values
    if values.dim() == 1:
        spread = values.new_zeros(2 * values.numel())
        spread[::2] = values
        return spread[::2]
    order = list(reversed(range(values.dim())))
    return values.permute(order).contiguous().permute(order)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Every other row large, the rest small."""
    rows = values.shape[:-1].numel()
    large = (torch.arange(rows, device=values.device) % 2 == 0).reshape(*values.shape[:-1], 1)
    return torch.where(large, values * MIXED[0], values * MIXED[1])


def may_tie(tensor: torch.Tensor) -> bool:
    """Whether its rows hold two elements that can be equal and a third that is not."""
    return tensor.dim() >= 1 and tensor.shape[-1] >= 3 and tensor.numel() > 0


def _tied(values: torch.Tensor) -> torch.Tensor:
    """Each row's greatest value stands first and last, in two blocks if there are two. No value is new."""
    tied = values.clone()
    greatest = values.argmax(-1, keepdim=True)
    tied.scatter_(-1, greatest, values[..., :1])
    tied[..., :1] = tied[..., -1:] = values.gather(-1, greatest)
    return tied


def fold_ties(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of a tied input, the last element of each row added to the first: how an upstream gradient
    is shared out between equal values is a convention, but together they have just one share."""
    if not may_tie(gradient):
        return gradient.clone()
    folded = gradient.to(torch.float64, copy=True)
    folded[..., 0] += folded[..., -1]
    folded[..., -1] = 0
    return folded.to(gradient.dtype)


@dataclass(frozen=True)
class InputKind:
    """Inputs other than make_args draws: what is done to each, and where that is fair (oracle.py)."""

    change: Callable[[torch.Tensor], torch.Tensor]
    can: Callable[[torch.Tensor], bool] = has_rows  # what leaves the others as they are
    rows: str = "two rows"  # that an input must have
    one_only: bool = False  # of the inputs that want gradients only the first is changed
    same_values: bool = False  # so the forward must make the same of them
    finite: bool = False  # fair where all that is made of them is finite
    judged: Callable[[torch.Tensor], torch.Tensor] | None = None  # what of a gradient, if not all of it


# The kinds of inputs. Of magnitudes only one input's are mixed: those of two multiply, and no precision is
# left to tell right from wrong.
INPUTS = {
    "strided": InputKind(_padded, same_values=True),
    "transposed": InputKind(_strided, same_values=True),
    "mixed": InputKind(_mixed, one_only=True, finite=True),
    "tied": InputKind(_tied, may_tie, "rows of three elements", judged=fold_ties),
}
INPUT_KINDS = tuple(INPUTS)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
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


def bind(fwd: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter of the stub by name, defaults filled in. Raises Unusable("make_args_type")."""
    try:
        bound = fwd.signature.bind(*args, **kwargs)
    except TypeError as exc:
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
    scale: float | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str | torch.device
    index: int
    count: int

    def normal(self, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Normal values, before they are cast to the dtype."""
        return _normal(self.seed, self.index, self.shape if shape is None else shape, self.device)


def _plain(wanted: Wanted) -> torch.Tensor:
    return wanted.normal().to(wanted.dtype)


def _onehot(wanted: Wanted) -> torch.Tensor:
    hot = torch.zeros(wanted.shape, dtype=wanted.dtype, device=wanted.device)
    if hot.numel():
        at = random.Random(f"{wanted.seed}/{wanted.index}").randrange(hot.numel())
        hot.view(-1)[at] = 1.0
    return hot


def _ones(wanted: Wanted) -> torch.Tensor:
    return torch.ones(wanted.shape, dtype=wanted.dtype, device=wanted.device)


def _scaled(wanted: Wanted) -> torch.Tensor:
    values = wanted.normal()
    if wanted.scale is not None:
        values *= wanted.scale
    return values.to(wanted.dtype)


def _noncontiguous(wanted: Wanted) -> torch.Tensor:
    """The values of `normal` with other strides."""
    return _strided(_plain(wanted))


def _expanded(wanted: Wanted) -> torch.Tensor:
    """Stride 0 along the first axis longer than 1."""
    shape = wanted.shape
    axis = next((i for i, extent in enumerate(shape) if extent > 1), None)
    small = shape if axis is None else (*shape[:axis], 1, *shape[axis + 1 :])
    return wanted.normal(small).to(wanted.dtype).expand(shape)


def _slice(wanted: Wanted) -> torch.Tensor:
    """The values of `normal` as the latter half of a tensor whose last axis is twice as long: so torch.cat's
    backward hands them out. What stands beside one has the other sign and is larger."""
    values = _plain(wanted)
    if values.dim() == 0:
        return values
    beside = torch.where(values < 0, 1 - values, -1 - values)
    return torch.cat((beside, values), dim=-1)[..., values.shape[-1] :]


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
    "scaled": _scaled,
    "noncontiguous": _noncontiguous,
    "expanded": _expanded,
    "slice": _slice,
    "none_one": _none_one,
    "only_one": _only_one,
}
UPSTREAM_KINDS = tuple(UPSTREAMS)


def upstream(
    kind: str,
    seed: int,
    scale: float | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | torch.device,
    index: int,
    count: int,
) -> torch.Tensor | None:
    """The upstream gradient of differentiable output `index` of `count`, or None where `none_one` leaves it
    out.

    Values depend on kind, seed, scale, index, shape, dtype and the kind of device, on which they are drawn:
    nothing of the size of an output is made on the CPU for a GPU.
    """
    if kind not in UPSTREAMS:
        raise ValueError(f"upstream kind {kind!r} is none of {', '.join(UPSTREAMS)}")
    return UPSTREAMS[kind](Wanted(seed, scale, tuple(shape), dtype, device, index, count))
