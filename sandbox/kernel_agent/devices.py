"""What a user's file hears when it asks about a GPU on a machine that has none: answers for a named target.

Answers are given to the user's files and to libraries that they use; torch and Triton themselves keep hearing
the truth. Each answer is recorded with the line of the user's that led to it. A tensor says that it is on
`cuda:0`, and `device="cuda"` means the CPU. What cannot be answered (timings, measured memory, CUDA graphs)
raises `Unusable("needs_gpu")` and names the line.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

from .errors import Unusable

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_HEAR_THE_TRUTH = (  # where their files are
    _PACKAGE,
    *(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, triton)),
)


@dataclass(frozen=True)
class Card:
    """Figures of a typical card of one architecture, from its public data sheet."""

    name: str
    processors: int
    shared: int  # bytes of shared memory that one block may opt in to
    shared_per_processor: int
    threads_per_processor: int
    l2: int
    memory: int  # bytes
    memory_clock: int  # kHz
    memory_bus: int  # bits
    clock: int  # kHz


_CUDA = "12.8"  # torch.version.cuda of a build without it

# Answered where kernels are interpreted to be judged: a program that stays resident then takes several turns.
FEW_PROCESSORS = 4

_GB = 10**9
_CARDS = {
    75: Card("NVIDIA T4", 40, 65536, 65536, 1024, 4 << 20, 16 * _GB, 5001000, 256, 1590000),
    80: Card("NVIDIA A100-SXM4-80GB", 108, 166912, 167936, 2048, 40 << 20, 80 * _GB, 1593000, 5120, 1410000),
    86: Card("NVIDIA A10", 72, 101376, 102400, 1536, 6 << 20, 24 * _GB, 6251000, 384, 1695000),
    89: Card("NVIDIA L40S", 142, 101376, 102400, 1536, 96 << 20, 48 * _GB, 9001000, 384, 2520000),
    90: Card("NVIDIA H100 80GB HBM3", 132, 232448, 233472, 2048, 50 << 20, 80 * _GB, 2619000, 5120, 1980000),
    100: Card("NVIDIA B200", 148, 232448, 233472, 2048, 126 << 20, 180 * _GB, 3996000, 8192, 1965000),
    120: Card(
        "NVIDIA GeForce RTX 5090", 170, 101376, 102400, 1536, 96 << 20, 32 * _GB, 14001000, 512, 2407000
    ),
}


@dataclass(frozen=True)
class Target:
    """A GPU by its architecture: `sm_90` is capability 90. `processors` stands in for the number that its
    card has."""

    capability: int
    processors: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        digits = text.removeprefix("sm_").rstrip("a")
        if not digits.isdigit() or not 50 <= int(digits) <= 200:
            raise ValueError(f"a target looks like sm_90, not {text!r}")
        return cls(int(digits))

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"

    @property
    def triton(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    @property
    def card(self) -> Card:
        """The card of this architecture, or of the newest known one before it."""
        known = [capability for capability in _CARDS if capability <= self.capability]
        card = _CARDS[max(known, default=min(_CARDS))]
        return card if self.processors is None else replace(card, processors=self.processors)


@dataclass(frozen=True)
class _StandingIn:
    """What an attribute of a module of torch's is while the user's code runs, in place of `original`."""

    module: types.ModuleType
    name: str
    original: Any
    replacement: Any


@dataclass
class Answers:
    """The answers that one file has had."""

    root: str  # folder of the user's file
    target: Target
    given: list[dict[str, Any]] = field(default_factory=list)
    standing_in: list[_StandingIn] = field(default_factory=list, repr=False, compare=False)  # as made last

    def from_user(self, frame: types.FrameType | None) -> bool:
        if frame is None:
            return False
        file = frame.f_code.co_filename
        if "site-packages" in file or file.startswith(_PACKAGE):
            return False
        return file.startswith(self.root.rstrip(os.sep) + os.sep)

    def are_for(self, frame: types.FrameType) -> bool:
        """Whether who asks has these answers: the user's files and the libraries that they use, but for those
        whose own work hangs on what is really there."""
        return not frame.f_code.co_filename.startswith(_HEAR_THE_TRUTH)

    def note(self, frame: types.FrameType | None, asked: str, answer: object) -> None:
        entry = {"line": frame.f_lineno if frame else None, "asked": asked, "answer": str(answer)}
        if entry not in self.given:
            self.given.append(entry)


_active: list[Answers] = []


def _user_frame(answers: Answers) -> types.FrameType | None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not answers.from_user(frame):
        frame = frame.f_back
    return frame


def record(asked: str, answer: object) -> None:
    """Note an answer given on behalf of the file that is being run, with the line that led to it."""
    if _active:
        _active[-1].note(_user_frame(_active[-1]), asked, answer)


def current_target() -> GPUTarget:
    """The target of the file that is being run."""
    return (_active[-1].target if _active else Target(90)).triton


def _needs_gpu(what: str) -> Unusable:
    frame = _user_frame(_active[-1]) if _active else None
    return Unusable(
        "needs_gpu",
        f"{what}; there is no GPU here, and nothing honest can be answered in its place",
        frame.f_code.co_filename if frame else None,
        frame.f_lineno if frame else None,
        remedy="run on a machine with a GPU, or keep this line out of the stub and of the module's top level",
    )


@contextlib.contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Give `answers` to the user's code that runs inside."""
    from triton.runtime import driver

    before = driver._active
    made = answers.standing_in
    if not made or any(getattr(one.module, one.name, None) is not one.original for one in made):
        found = list(_replacements(answers))
        made = [_StandingIn(module, name, getattr(module, name), new) for module, name, new in found]
        answers.standing_in = made
    _active.append(answers)
    try:
        driver._active = Driver(answers)
        for one in made:
            setattr(one.module, one.name, one.replacement)
        with _CudaMeansCpu(answers):
            yield
    finally:
        for one in reversed(made):
            setattr(one.module, one.name, one.original)
        driver._active = before
        _active.pop()


class _Stream:
    """The only stream there is; work on it is done when it was asked for."""

    cuda_stream = 0
    stream_id = 0

    def synchronize(self) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, other: object) -> None: ...
    def query(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


def _properties(target: Target) -> types.SimpleNamespace:
    card = target.card
    return types.SimpleNamespace(
        name=card.name,
        major=target.capability // 10,
        minor=target.capability % 10,
        total_memory=card.memory,
        multi_processor_count=card.processors,
        max_threads_per_multi_processor=card.threads_per_processor,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=card.shared,
        shared_memory_per_multiprocessor=card.shared_per_processor,
        regs_per_multiprocessor=65536,
        warp_size=32,
        L2_cache_size=card.l2,
        is_integrated=0,
        gcnArchName="",
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_context(*args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext()


def _cuda_answers(target: Target) -> dict[str, Callable[..., Any]]:
    """torch.cuda functions and what they answer."""
    memory = target.card.memory
    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": target.capability >= 80,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": target.card.name,
        "get_device_capability": divmod(target.capability, 10),
        "get_device_properties": _properties(target),
        "get_arch_list": [target.name],
        "mem_get_info": (memory, memory),
    }
    answers: dict[str, Callable[..., Any]] = {
        name: lambda *args, value=value, **kwargs: value for name, value in values.items()
    }
    for name in ("current_stream", "default_stream", "Stream"):
        answers[name] = lambda *args, **kwargs: _Stream()
    for name in ("device", "device_of", "stream"):
        answers[name] = _no_context
    for name in ("init", "synchronize", "empty_cache", "set_device", "set_stream", "ipc_collect"):
        answers[name] = _nothing
    return answers


def _cuda(*args: Any, **kwargs: Any) -> types.ModuleType:
    return torch.cuda


def _accelerator_answers() -> dict[str, Callable[..., Any]]:
    """torch.accelerator functions and what they answer."""
    values = {
        "is_available": True,
        "device_count": 1,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 0,
        "current_device_idx": 0,
    }
    answers: dict[str, Callable[..., Any]] = {
        name: lambda *args, value=value, **kwargs: value for name, value in values.items()
    }
    return answers | {
        **dict.fromkeys(("synchronize", "set_device_index", "set_device_idx", "set_stream"), _nothing),
        "current_stream": lambda *args, **kwargs: _Stream(),
        "device_index": _no_context,
    }


# torch.cuda functions that only a GPU can answer.
_MEASURED = (
    "Event", "CUDAGraph", "graph", "make_graphed_callables", "memory_allocated", "max_memory_allocated",
    "memory_reserved", "max_memory_reserved", "memory_stats", "memory_summary", "memory_snapshot",
    "utilization", "temperature", "power_draw", "clock_rate", "reset_peak_memory_stats",
)  # fmt: skip


def _replacements(answers: Answers) -> Iterator[tuple[Any, str, Any]]:
    for name, answer in _cuda_answers(answers.target).items():
        if hasattr(torch.cuda, name):
            yield (
                torch.cuda,
                name,
                _answered(answers, f"torch.cuda.{name}", getattr(torch.cuda, name), answer),
            )
    for name in _MEASURED:
        if hasattr(torch.cuda, name):
            yield torch.cuda, name, _refused(answers, f"torch.cuda.{name}", getattr(torch.cuda, name))
    if torch.version.cuda is None:
        version = torch.__version__.partition("+")[0]
        yield torch.version, "cuda", _CUDA
        yield torch, "__version__", type(torch.__version__)(f"{version}+cu{_CUDA.replace('.', '')}")
    for name, answer in (("set_default_device", _nothing), ("get_device_module", _cuda)):
        yield torch, name, _answered(answers, f"torch.{name}", getattr(torch, name), answer)
    for name, answer in _accelerator_answers().items():
        if hasattr(torch.accelerator, name):
            original = getattr(torch.accelerator, name)
            yield torch.accelerator, name, _answered(answers, f"torch.accelerator.{name}", original, answer)


def _answered(
    answers: Answers, asked: str, original: Callable[..., Any], answer: Callable[..., Any]
) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        if not answers.are_for(_asking()):
            return original(*args, **kwargs)
        value = answer(*args, **kwargs)
        shown = (
            type(value).__name__.lstrip("_")
            if isinstance(value, (_Stream, contextlib.nullcontext))
            else value
        )
        answers.note(_user_frame(answers), asked, "done" if value is None else shown)
        return value

    return _standing_in(original, ask)


def _refused(answers: Answers, asked: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        if not answers.are_for(_asking()):
            return original(*args, **kwargs)
        raise _needs_gpu(f"{asked} measures or drives a GPU")

    return _standing_in(original, ask)


def _standing_in(original: Callable[..., Any], ask: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a function, or for a class: that stays one, of which libraries make types as they are
    imported, `torch.cuda.CUDAGraph | None`, and others."""
    if not isinstance(original, type):
        return ask

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return ask(*args, **kwargs)

    def is_one(cls: Any, value: Any) -> bool:
        return isinstance(value, original)

    methods = {"__call__": call, "__instancecheck__": is_one}
    asked = type(f"Asked{original.__name__}", (type(original),), methods)
    made: Callable[..., Any] = asked(original.__name__, (original,), {"__doc__": original.__doc__})
    return made


def _asking() -> types.FrameType:
    """The frame that asks: the first that is not of this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


class Driver:
    """Stands in for Triton's active driver."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.utils = _Utils(answers)

    def _say(self, asked: str, value: Any) -> Any:
        frame = sys._getframe(2)
        if self._answers.from_user(frame):
            self._answers.note(frame, f"triton.runtime.driver.active.{asked}", value)
        return value

    def get_current_target(self) -> GPUTarget:
        return self._say("get_current_target", self._answers.target.triton)

    def get_active_torch_device(self) -> torch.device:
        return self._say("get_active_torch_device", torch.device("cuda", 0))

    def get_device_interface(self) -> Any:
        return self._say("get_device_interface", torch.cuda)

    def get_current_device(self) -> int:
        return self._say("get_current_device", 0)

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return self._say("get_device_capability", divmod(self._answers.target.capability, 10))

    def get_current_stream(self, device: int = 0) -> int:
        return self._say("get_current_stream", 0)

    def set_current_device(self, device: int) -> None: ...

    @staticmethod
    def is_active() -> bool:
        return True

    def get_benchmarker(self) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise _needs_gpu("a benchmark measures a GPU")

        return refuse

    def get_empty_cache_for_benchmark(self) -> Any:
        raise _needs_gpu("a benchmark measures a GPU")


class _Utils:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def get_device_properties(self, device: int = 0) -> dict[str, int]:
        card = self._answers.target.card
        properties = {
            "max_shared_mem": card.shared,
            "max_num_regs": 65536,
            "multiprocessor_count": card.processors,
            "warpSize": 32,
            "sm_clock_rate": card.clock,
            "mem_clock_rate": card.memory_clock,
            "mem_bus_width": card.memory_bus,
        }
        frame = sys._getframe(1)
        if self._answers.from_user(frame):
            self._answers.note(frame, "triton.runtime.driver.active.utils.get_device_properties", properties)
        return properties


def _getter(name: str) -> Any:
    """What a torch function mode is called with when a property of a tensor is read."""
    return getattr(torch.Tensor, name).__get__


_ANSWERED_PROPERTIES: dict[Any, tuple[str, Any]] = {
    _getter("device"): ("Tensor.device", torch.device("cuda", 0)),
    _getter("is_cuda"): ("Tensor.is_cuda", True),
    _getter("is_cpu"): ("Tensor.is_cpu", False),
    torch.Tensor.get_device: ("Tensor.get_device", 0),
}
_TEXTS = (torch.Tensor.__repr__, torch.Tensor.__format__)
_TEXT_AFTER_DEVICE = re.compile(r"(, [a-z_]+=.*)?\)\Z", re.DOTALL)
_DETACHING = (torch.Tensor.detach, torch.detach, _getter("data"))


class NoteDetached(TorchFunctionMode):
    """Marks tensors that the user's code detaches: as outputs they pass through the backward untouched."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _DETACHING and type(result) is torch.Tensor:
            result._kernel_agent_detached = True  # type: ignore[attr-defined]
        return result


@contextlib.contextmanager
def noting_marks() -> Iterator[None]:
    """Inside, what an autograd function marks as not differentiable counts as detached: it is whoever wrote
    the forward that says so."""
    context = torch.autograd.function.FunctionCtx
    own = context.mark_non_differentiable

    def mark(ctx: Any, *outputs: torch.Tensor) -> None:
        for output in outputs:
            output._kernel_agent_detached = True  # type: ignore[attr-defined]
        own(ctx, *outputs)

    context.mark_non_differentiable = mark  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        context.mark_non_differentiable = own  # type: ignore[method-assign]


def was_detached(tensor: torch.Tensor) -> bool:
    """Whether the user's code made this tensor with detach() or .data, under NoteDetached, or marked it."""
    return getattr(tensor, "_kernel_agent_detached", False)


class _CudaMeansCpu(TorchFunctionMode):
    """Torch calls of the user's code: CUDA becomes the CPU, questions about a device are answered."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        answer = _ANSWERED_PROPERTIES.get(func)
        if answer is not None:
            if not self._answers.are_for(frame):
                return func(*args, **kwargs)
            self._answers.note(_user_frame(self._answers), *answer)
            return answer[1]
        if func in _TEXTS:
            return self._text(func(*args, **kwargs))
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return self._type(func(*args))
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            self._note("Tensor.cuda()")
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*(self._host(arg) for arg in args), **self._host_options(kwargs))

    def _text(self, text: str) -> str:
        """A tensor's, with the device that stands in the text of one on a GPU."""
        rest = _TEXT_AFTER_DEVICE.search(text)
        if rest is None or _user_frame(self._answers) is None:
            return text
        self._note("text of a tensor")
        return f"{text[: rest.start()]}, device='cuda:0'{text[rest.start() :]}"

    def _type(self, name: str) -> str:
        """A tensor's, as on a GPU: `torch.cuda.FloatTensor`."""
        if _user_frame(self._answers) is None:
            return name
        self._note("Tensor.type()")
        return name.replace("torch.", "torch.cuda.", 1)

    def _host(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            self._note(f'device "{value}"')
            return "cpu"
        return value

    def _host_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = {key: self._host(value) for key, value in kwargs.items()}
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if isinstance(options.get("device"), int) and not isinstance(options["device"], bool):
            self._note(f"device {options['device']}")
            options["device"] = "cpu"
        return options

    def _note(self, asked: str) -> None:
        frame = _user_frame(self._answers)
        if frame is not None:
            self._answers.note(frame, asked, "cpu")


def gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], upstreams: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad, unused inputs allowed and the graph kept, inside of the torch function modes that
    are on: that one runs the backward outside of them, so that a device would be asked for there that is
    not."""
    engine = torch.autograd.Variable._execution_engine
    return engine.run_backward(  # type: ignore[no-any-return]
        tuple(outputs), tuple(upstreams), True, False, tuple(inputs), True, accumulate_grad=False
    )
