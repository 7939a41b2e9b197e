"""Operation ceilings: what the device gives at most, and what each shape asks of it at least.

Runs in a process that never sees a candidate, before the one that times it: floors are nothing that a
candidate's process could have told. Samples go to the daemon as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import draw
from ..errors import Unusable, wrap
from ..forward import Forward, load
from . import budget
from .device_clock import Gpu
from .traffic import bytes_of
from .turns import Turns

PASSES = ("fwd", "bwd", "both")
_SAMPLES = 20


def run(
    request: dict[str, Any], scratch: Path, gpu: Gpu | None = None, turns: Turns | None = None
) -> dict[str, Any]:
    """The result of docs/protocol.md's op ceilings."""
    turns = turns or Turns.of(request)
    gpu = gpu or Gpu(request["device"], scratch)
    found = {"device": gpu.describe(), **_most(gpu, draw.dtype_of(request["ceiling_dtype"]), turns)}
    target = request.get("target") or "sm_90"
    fwd = load(request["file"], gpu.mode, target, str(gpu.device), function=request.get("function"))
    cases = []
    for case in request["cases"]:
        try:
            made: dict[str, Any] = {"ok": True, **_needs(fwd, case, request.get("dtype"))}
        except (Exception, SystemExit) as exc:  # noqa: BLE001 (one case fails, the others go on)
            error = wrap("stub_raised", "", exc, [fwd.path])
            error.out_of_memory = budget.out_of_memory(exc) is not None
            made = {"ok": False, "error": error.to_dict()}
        budget.release(str(gpu.device))
        cases.append({"id": case["id"], **made})
    return {**found, "cases": cases}


def of_one(fwd: Forward, gpu: Gpu, case: dict[str, Any], dtype: str | None, turns: Turns) -> dict[str, Any]:
    """What the device gives and one shape asks of it, for who is told where a time goes. In a process that
    has a candidate's code: nothing is judged by it."""
    needs = _needs(fwd, case, dtype)
    ceiling = draw.dtype_of(dtype) if dtype else fwd.dtype
    found = {"device": gpu.describe(), **_most(gpu, ceiling, turns, products=bool(needs["flops"]))}
    return {**found, **needs}


_Way = tuple[dict[str, Any], Callable[[], object]]  # what one call does, and the call


def _most(gpu: Gpu, dtype: torch.dtype | None, turns: Turns, products: bool = True) -> dict[str, Any]:
    """What a copy and a product take. The libraries are loaded before the GPU is had alone."""
    with _tf32():
        ways = {"copy": _copy(gpu), "matmul": _matmul(gpu, dtype) if products else None}
        with turns.alone():
            gpu.settle()
            return {name: _sampled(gpu, way) for name, way in ways.items()}


def _sampled(gpu: Gpu, way: _Way | None) -> dict[str, Any] | None:
    if way is None:
        return None
    does, call = way
    return {**does, "ms": [gpu.time(call)[1] for _ in range(_SAMPLES)]}


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """Products of float32 in TF32, as kernels have them."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _copy(gpu: Gpu) -> _Way:
    """One tensor copied to another: bytes read and written."""
    size = gpu.copy_bytes
    source = torch.ones(size, dtype=torch.uint8, device=gpu.device)
    target = torch.empty_like(source)

    def copy() -> object:
        return target.copy_(source)

    gpu.warm(copy)
    return {"bytes": 2 * size}, copy


def _matmul(gpu: Gpu, dtype: torch.dtype | None) -> _Way | None:
    """Two square matrices. None where torch multiplies no such dtype."""
    dtype = dtype or torch.float32
    order = gpu.matmul_order(dtype)

    def multiply() -> object:
        return a @ b

    try:
        a, b = (torch.ones(order, order, dtype=dtype, device=gpu.device) for _ in range(2))
        gpu.warm(multiply)
    except torch.OutOfMemoryError:  # others have it: it is asked for once more
        raise
    except RuntimeError:
        return None
    return {"flops": 2 * order**3, "dtype": draw.dtype_name(dtype)}, multiply


def _needs(fwd: Forward, case: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Bytes of a pass, its inputs and results once each; of its results alone; and operations, where the file
    counts them."""
    args, kwargs = draw.make_inputs(fwd, case["dims"], case["seed"], dtype=dtype)
    bound = draw.bind(fwd, args, kwargs)
    outputs = draw.differentiable_outputs(fwd.call(args, kwargs), bound)
    inputs = sum(bytes_of(tensor) for tensor in draw.tensors_in(bound))
    made = sum(bytes_of(output.value) for output in outputs if output.kind == "tensor")
    upstream = sum(bytes_of(output.value) for output in outputs if output.differentiable)
    wanted = draw.grad_inputs(fwd, bound)
    grads = sum(tensor.numel() * tensor.element_size() for tensor in wanted.values())
    return {
        "bytes": {"fwd": inputs + made, "bwd": inputs + upstream + grads, "both": inputs + made + grads},
        "least_bytes": {"fwd": made, "bwd": grads, "both": made + grads},
        "flops": {name: _flops(fwd, case["dims"], name) for name in PASSES} if fwd.flops else None,
    }


def _flops(fwd: Forward, dims: dict[str, Any], which: str) -> float:
    assert fwd.flops is not None
    try:
        return float(fwd.flops(fwd.as_written(dims), which))
    except Exception as exc:
        raise Unusable("make_args_raised", f"flops(dims, {which!r}) raised {exc}", fwd.path) from exc
