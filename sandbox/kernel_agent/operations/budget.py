"""What a case of the oracle takes, known before it is evaluated, and how running out of memory is told.

The file of a case has a size that follows from the record of its call. Memory is estimated from below: what
surely does not fit is refused with numbers, what may fit is tried, and may still run out.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from ..errors import Unusable, readable
from ..torch_tl.handles import KernelError
from ..torch_tl.record import Constant, Operation, Tape

# float64 numbers that an evaluation with its graph holds for each floating element of the call's storages: 10
# were measured where a kernel reads every element once, 55 for a product of small matrices.
EVALUATION = 8
# Bytes, by the same estimate, up to which an evaluation stays on the CPU: there its operations, hundreds in a
# loop, are shorter than the launches of a kernel, and wait for no other process on the GPU.
SMALL = 1 << 26
# There for good, if after so many seconds an operation has taken no longer than this on average.
TRIAL, NARROW = 0.25, 5e-4
LOW = 0.1  # of a GPU's memory
HELD = 1 << 28  # bytes of it that are worth giving back
REMEDY = "make the shape smaller, or mark it required: False"
_GPU_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_GPU_FREE = re.compile(r"of which ([\d.]+ \w+) is free")
_CPU_ASKED = re.compile(r"tried to allocate (\d+) bytes|allocate ([\d.]+ \w+) for an array")


def file_bytes(
    outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], differentiable: int, reference: bool
) -> int:
    """Bytes of tensors in the case's file. `inputs` are those that want gradients, `differentiable` how many
    elements the outputs have that are differentiated."""
    made = sum(value.numel() * (2 * value.element_size() + 8) for value in outputs)
    wanted = list(inputs)
    made += sum(value.numel() * (value.element_size() + 16) for value in wanted)
    if reference:
        made += 8 * (differentiable + sum(value.numel() for value in wanted))
    return made


def evaluation_bytes(tape: Tape) -> int:
    """Bytes that an evaluation in float64 takes at least, gradients included."""
    dtypes: dict[int, torch.dtype] = {}
    for entry in tape.entries:
        if isinstance(entry, Constant):
            dtypes[entry.key] = entry.dtype
        elif isinstance(entry, Operation):
            dtypes |= {ref.key: ref.dtype for ref in entry.outputs if ref is not None}
    total = 0
    for key, storage in tape.alive.items():
        dtype = dtypes.get(key, torch.uint8)
        floating = dtype.is_floating_point
        total += storage.nbytes() // dtype.itemsize * (8 * EVALUATION if floating else dtype.itemsize)
    return total


class Wide(KernelError):
    """The operations of an evaluation on the CPU are wider than its tensors: they are for the GPU."""


def place(tape: Tape) -> torch.device:
    """Where to evaluate a call."""
    small = not tape.wide and evaluation_bytes(tape) <= SMALL
    return torch.device("cpu") if small else tape.device


def trial() -> Callable[[], None]:
    """To be called before each operation of an evaluation: raises Wide once they turn out to be wide."""
    started, operations = time.monotonic(), 0

    def watch() -> None:
        nonlocal operations
        operations += 1
        passed = time.monotonic() - started
        if passed > max(TRIAL, NARROW * operations):
            raise Wide("operations are wide")

    return watch


def require(needed: Mapping[str, int], budget: Mapping[str, Any], device: torch.device, file: str) -> None:
    """Raises Unusable("too_large") where a case needs more than there is. Both mappings have `case_bytes`, of
    its file, and `device_bytes`, of memory on `device`; of the budget either may be missing: then what is
    free on a GPU is the limit; others share that, and it is worth a second try."""
    left = None
    there = {name: int(budget[name]) for name in needed if budget.get(name) is not None}
    if device.type == "cuda" and needed.get("device_bytes", 0) > SMALL:  # the driver answers one at a time
        left = free(device)
        there["device_bytes"] = min(there.get("device_bytes", left), left)
    memory = "GPU" if device.type == "cuda" else "machine"
    what = {"case_bytes": "its tensors' file", "device_bytes": f"float64 in the {memory}'s memory"}
    for name, bytes_there in there.items():
        if needed[name] > bytes_there:
            least = "at least " if name == "device_bytes" else ""
            message = f"this shape needs {least}{readable(needed[name])} for {what[name]}"
            there_are = f", and there are {readable(bytes_there)}"
            error = Unusable("too_large", message + there_are, file, remedy=REMEDY)
            error.out_of_memory = name == "device_bytes" and bytes_there == left
            raise error


def free(device: torch.device) -> int:
    """Bytes of a GPU that this process can still have, those in the allocator's cache included."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def release(device: str) -> None:
    """Between cases: what a GPU's allocator keeps is given back where little is left."""
    if not device.startswith("cuda") or torch.cuda.memory_reserved() < HELD:
        return
    left, total = torch.cuda.mem_get_info()
    if left < LOW * total:
        gc.collect()
        torch.cuda.empty_cache()


def is_lost(device: str) -> bool:
    """Whether nothing can be done on a GPU any more in this process, as after an access out of bounds."""
    try:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def out_of_memory(error: BaseException) -> str | None:
    """A sentence on whose memory ran out, what was asked for and what was free; None for any other error."""
    for cause in _causes(error):
        text = str(cause)
        if isinstance(cause, torch.OutOfMemoryError) or ("CUDA" in text and "out of memory" in text):
            return _sentence("the GPU ran out of memory", _GPU_ASKED.search(text), _GPU_FREE.search(text))
        if isinstance(cause, MemoryError) or "DefaultCPUAllocator" in text:
            asked = _CPU_ASKED.search(text)
            return _sentence("the machine ran out of memory", asked, None)
    return None


def driver_failed(error: BaseException) -> bool:
    """Has the driver failed without saying at what (cudaErrorUnknown, 999), as it does with many processes on
    a GPU? What a kernel does wrong has errors of its own."""
    return any("CUDA error: unknown error" in str(cause) for cause in _causes(error))


def out_of_resources(error: BaseException) -> bool:
    """Does a kernel want more shared memory, tensor memory or threads than the GPU gives one program?"""
    return any(isinstance(cause, OutOfResources) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _sentence(what: str, asked: re.Match[str] | None, there: re.Match[str] | None) -> str:
    if asked is not None:
        size = next(group for group in asked.groups() if group)
        what += f", {readable(int(size)) if size.isdigit() else size} asked for"
    return what if there is None else f"{what}, {there.group(1)} free"
