"""Evaluate one kernel launch: all programs together; those that part in a loop or a branch meet again behind
it (parting.py), or are evaluated apart, or one by one in order."""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import triton.language as tl

from kernel_agent.source import words
from kernel_agent.torch_tl.handles import Diverged, KernelError, NeedsOrder, Pointer
from kernel_agent.torch_tl.instrument import rewritten
from kernel_agent.torch_tl.memory import Cell, Memory
from kernel_agent.torch_tl.runtime import Runtime

# Programs that are evaluated together. On a GPU the operations of many take hardly longer than those of few.
MOST_TOGETHER = {"cpu": 1 << 10, "cuda": 1 << 12}
SIGNED_OR_NOT = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("u", "")]
TYPES = {
    **{
        getattr(torch, name): getattr(tl, name)
        for name in (*SIGNED_OR_NOT, *words("float16 bfloat16 float32 float64"))
    },
    torch.bool: tl.int1,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2fnuz: tl.float8e5b16,
    torch.float8_e4m3fnuz: tl.float8e4b8,
}


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument: a cell and the address of the tensor's first element. `element` differs from the
    cell's dtype when the launch reinterprets the pointer."""

    cell: Cell
    address: int
    dtype: torch.dtype
    detached: bool = False


@dataclass(frozen=True)
class DescriptorArg:
    """A host-side tensor descriptor."""

    base: TensorArg
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    padding: str = "zero"


@dataclass
class Launch:
    """A kernel (the plain Python function under @triton.jit), its grid and its arguments by parameter name.
    Arguments are TensorArg, DescriptorArg, numbers, None, dtypes, strings, functions or tuples of those."""

    function: Callable[..., Any]
    grid: Sequence[int]
    args: dict[str, Any]
    name: str = field(default="")

    def __post_init__(self) -> None:
        self.name = self.name or self.function.__name__
        self.grid = (*map(int, self.grid), 1, 1)[:3]


def run_launch(launch: Launch, memory: Memory, one_by_one: bool = False) -> bool:
    """Evaluate `launch` on `memory`. True when the programs had to be evaluated one by one, which an
    evaluation that does not look for conflicts has to be told. Raises KernelError."""
    count = math.prod(launch.grid)
    programs = torch.arange(count * memory.copies, dtype=torch.int32, device=memory.device)
    if not count:
        return False  # as Triton's own launcher
    memory.where = lambda: place_of(launch)
    if not one_by_one:
        try:
            most = MOST_TOGETHER[programs.device.type]
            if len(programs) > most:
                memory.require_single("a launch of more programs than are evaluated together")
            groups = programs.split(most)
            _run_ordered(launch, memory, list(groups), ordered=False)
            return False
        except NeedsOrder:
            memory.undo_launch()
    one_of_each = programs.reshape(memory.copies, count).unbind(1)
    _run_ordered(launch, memory, list(one_of_each), ordered=True)
    return True


def _run_ordered(launch: Launch, memory: Memory, groups: list[torch.Tensor], ordered: bool) -> None:
    count = sum(group.numel() for group in groups)
    memory.begin_launch(count, ordered)
    runtime = Runtime(memory)
    runtime.builder.grid = tuple(launch.grid)
    kernel = rewritten(launch.function, runtime)
    bound: dict[str, Any] = {}
    pending = groups[::-1]
    while pending:
        group = pending.pop()
        memory.begin_group(group)
        if not bound or memory.copies > 1:
            bound = _bind(launch, runtime)
        try:
            kernel(**bound)
        except Diverged as split:
            memory.undo_group()
            keys = memory.keys_of_group(split.keys)
            pending.extend(reversed([group[keys == key] for key in keys.unique()]))
        except NeedsOrder:
            raise
        except KernelError as error:
            _locate(error, launch)
            raise
        except Exception as error:
            located = KernelError(f"{launch.name}: {type(error).__name__}: {error}", kind="stub_raised")
            _locate(located, launch, error)
            raise located from error
    memory.end_launch()


def _bind(launch: Launch, runtime: Runtime) -> dict[str, Any]:
    """Kernel parameters as values of the runtime, for the programs in memory where there are copies of each:
    constexpr parameters stay Python values."""
    bound = {}
    for name, parameter in inspect.signature(launch.function).parameters.items():
        if name not in launch.args and parameter.default is inspect.Parameter.empty:
            raise KernelError(f"{launch.name}: no argument for {name}", kind="stub_raised")
        value = tl.core._unwrap_if_constexpr(launch.args.get(name, parameter.default))
        constant = "constexpr" in str(parameter.annotation)
        bound[name] = value if constant else _runtime_value(value, name, runtime)
    return bound


def _runtime_value(value: Any, name: str, runtime: Runtime) -> Any:
    value = tl.core._unwrap_if_constexpr(value)
    if isinstance(value, (tuple, list)):
        items = [_runtime_value(item, f"{name}[{at}]", runtime) for at, item in enumerate(value)]
        return type(value)(*items) if hasattr(type(value), "_fields") else tl.tuple(items)
    if isinstance(value, TensorArg):
        element = TYPES.get(value.dtype)
        if element is None:
            raise KernelError(f"{name}: {value.dtype} is not supported")
        address = _address(value, runtime.memory)
        pointer = Pointer(address, element, value.cell, name, value.detached)
        return tl.tensor(pointer, tl.pointer_type(element))
    if isinstance(value, DescriptorArg):
        base = _runtime_value(value.base, name, runtime)
        sizes = (list(given) for given in (value.shape, value.strides, value.block_shape))
        return runtime.semantic.make_tensor_descriptor(base, *sizes, value.padding)
    if isinstance(value, (bool, int, float)):
        return runtime.semantic.to_tensor(value)
    return value


def _address(value: TensorArg, memory: Memory) -> torch.Tensor:
    """One for all programs, or for each that of its own copy."""
    if memory.copies == 1:
        return torch.tensor([value.address], dtype=torch.int64, device=memory.device)
    apart = value.cell.numel // memory.copies * value.cell.itemsize
    copy = memory.programs.to(torch.int64) // (memory.launch_programs // memory.copies)
    return copy * apart + value.address


def place_of(launch: Launch) -> str:
    """The kernel and, while it runs, the innermost line of its file: its own, or one of its helpers'."""
    file = launch.function.__code__.co_filename
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return launch.name if frame is None else f"{launch.name}, line {frame.f_lineno}"


def _locate(error: KernelError, launch: Launch, cause: Exception | None = None) -> None:
    """Give an error the innermost place in the user's file that it passed."""
    file = launch.function.__code__.co_filename
    frames = traceback.extract_tb((cause or error).__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    error.file = error.file or file
    error.line = error.line or (lines[-1] if lines else None)
