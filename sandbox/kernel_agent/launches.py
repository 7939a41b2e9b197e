"""Every `kernel[grid](...)` of a process: recorded, replaced, interpreted or really launched.

Triton nests launchers (autotuner, heuristics, jitted function). Only the innermost one is observed: by then
the autotuner has chosen a configuration and the heuristics have added their values. How a launch is finally
executed is one setting of the process:

    "interpret"  on the CPU, by interpret.py
    "compile"    not at all (for recording launches only)
    "cuda"       by Triton on the GPU
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelInterface

from . import accesses, devices, interpret
from .source import words
from .specialised import Compiler, Warmed

MODES = ("interpret", "compile", "cuda")

# Launch options of the CUDA backend with the defaults that compiled kernels get.
OPTION_DEFAULTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}
_OTHER_OPTIONS = words(
    """maxnreg ptx_version ptx_options ir_override enable_fp_fusion enable_reflect_ftz launch_cooperative_grid
    launch_pdl extern_libs debug sanitize_overflow arch instrumentation_mode warmup allow_fp8e4nv
    max_num_imprecise_acc_default"""
)


@dataclass
class Launch:
    """One launch with everything resolved. `run()` executes it (through outer handlers, if any)."""

    fn: types.FunctionType  # the kernel as the user wrote it
    kernel: JITFunction
    grid: tuple[int, ...]  # evaluated, 1 to 3 entries
    args: dict[str, Any]  # every parameter by name: tensors, numbers, constexprs, defaults
    constexprs: tuple[str, ...]  # names among `args`
    num_warps: int
    num_stages: int
    num_ctas: int
    options: dict[str, Any]  # other launch options that were given
    config: dict[str, Any] | None  # what the autotuner chose, None without one
    heuristics: dict[str, Any]  # what heuristics computed
    keywords: tuple[str, ...]  # parameters and options passed by name, by the call or by those two
    site: tuple[str, int]  # file and line of the launching code
    _execute: Callable[[], Any] = field(repr=False)

    @property
    def name(self) -> str:
        return self.fn.__name__

    @property
    def globals(self) -> dict[str, Any]:
        """The globals of the module that defines the kernel (helpers, constants)."""
        return self.fn.__globals__

    @property
    def programs(self) -> int:
        count = 1
        for extent in self.grid:
            count *= extent
        return count

    def run(self) -> Any:
        return self._execute()


class Kept:
    """What a launch returns. Libraries keep it, as the compiled kernel that it is, and launch it again by
    `kept[grid](*args)`, past everything around the kernel: here it is a launch like any other then."""

    __slots__ = ("_again", "_compiled")

    def __init__(self, again: Callable[..., Any], compiled: Any) -> None:
        """`compiled`: on a GPU, unless a handler kept the launch from running."""
        self._again, self._compiled = again, compiled

    def __getattr__(self, name: str) -> Any:
        if name in Kept.__slots__:  # of one that is being copied
            raise AttributeError(name)
        return getattr(self._compiled, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args: self._again(grid, args)


def _again(
    first: Launch, positional: int, around: _Around | None = None
) -> Callable[[Any, tuple[Any, ...]], Any]:
    """The same launch once more, of a grid and of every parameter in order, or every one that is no
    constexpr. `positional`: how many arguments had no keyword. `around` it: what is now, unless given."""
    tuners, heuristics = around or _around()

    def launch(grid: Any, args: tuple[Any, ...]) -> Any:
        written = len(first.grid)  # a compiled kernel takes three extents
        if isinstance(grid, tuple) and all(extent == 1 for extent in grid[written:]):
            grid = grid[:written]
        names = list(first.args)
        asked = names if len(args) == len(names) else [n for n in names if n not in first.constexprs]
        if len(args) != len(asked):
            wanted = f"{len(asked)} arguments, or {len(names)} with its constexprs"
            raise TypeError(f"{first.name}, launched once more, takes {wanted}, not {len(args)}")
        values = first.args | dict(zip(asked, args, strict=True))
        options = first.options | {key: getattr(first, key) for key in OPTION_DEFAULTS}
        named = {key: (values | options)[key] for key in first.keywords}
        before = _state.tuners, _state.heuristics
        _state.tuners, _state.heuristics = tuners, heuristics
        try:
            placed = [values[name] for name in names[:positional]]
            return first.kernel.run(*placed, grid=grid, warmup=False, **named)
        finally:
            _state.tuners, _state.heuristics = before

    return launch


def _unseen(
    kernel: JITFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grid: Any,
    originals: _Originals,
    compiled: Any,
) -> Kept:
    """What a launch on a GPU returns of which nobody is told. Who keeps it may launch it when somebody is."""
    around = _around()
    written = 1 if callable(grid) else len(grid)
    args = tuple(None if isinstance(value, torch.Tensor) else value for value in args)  # they are given anew
    kwargs = {name: None if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}

    def launch(grid: Any, given: tuple[Any, ...]) -> Any:
        if _state.benchmarking or not _state.handlers:
            return compiled[grid](*given)
        first = _resolve(kernel, args, kwargs, (1,) * written, originals)
        return _again(first, len(args), around)(grid, given)

    return Kept(launch, compiled)


Handler = Callable[[Launch], Any]
_Around = tuple[list[Autotuner], list[dict[str, Any]]]


def _around() -> _Around:
    """The autotuners and heuristics that a launch is made by."""
    return list(_state.tuners), list(_state.heuristics)


@dataclass
class _State:
    mode: str = "interpret"
    handlers: list[Handler] = field(default_factory=list)
    tuners: list[Autotuner] = field(default_factory=list)  # around the launch that is being made
    heuristics: list[dict[str, Any]] = field(default_factory=list)
    benchmarking: int = 0  # launches made by an autotuner's benchmark are nobody's business
    turn: int = 0  # which configuration an autotuner takes, of those left by its pruning
    every: bool = False  # on a GPU, the first time it chooses, an autotuner runs every configuration
    measured: bool = False  # on a GPU, an autotuner chooses as it does for its user
    tuned: set[Autotuner] = field(default_factory=set)  # those that did
    choices: dict[Any, dict[Any, Config]] = field(default_factory=dict)  # theirs: share_choices()


_state = _State()


def set_mode(mode: str) -> None:
    """How launches of this process are executed from now on."""
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    _install()
    _state.mode = mode


@contextlib.contextmanager
def launch_intercept(handler: Handler) -> Iterator[None]:
    """Inside, `handler(launch)` is called in place of each launch; it decides whether to call `launch.run()`.

    Nested handlers stack: the innermost is called first and its `run()` goes to the next one out.
    """
    _install()
    _state.handlers.append(handler)
    try:
        yield
    finally:
        _state.handlers.remove(handler)


@contextlib.contextmanager
def configuration(turn: int) -> Iterator[None]:
    """Inside, without a GPU, autotuners take another configuration each `turn`: on a GPU it is the clock that
    chooses, so that each has to be right."""
    before, _state.turn = _state.turn, turn
    try:
        yield
    finally:
        _state.turn = before


def try_every_configuration() -> None:
    """On a GPU, from now on in this process: see _Trials."""
    _state.every = True


def tune_by_the_clock() -> None:
    """On a GPU, from now on in this process, autotuners measure every configuration at length and take the
    fastest, as they do for their users: for who is to be timed."""
    _state.measured = True


def share_choices(tuner: Autotuner) -> None:
    """Autotuners of one kernel's text with the same configurations choose once: of two pairs that are timed
    beside each other the forward is the same, and a choice that the clock leaves open would be a difference
    between them that neither has made."""
    fn = jit_function(tuner)
    if tuner.__dict__.get("_kernel_agent_shares") or fn is None or tuner.cache:
        return
    tuner.__dict__["_kernel_agent_shares"] = True
    if any(config.pre_hook is not None for config in tuner.configs):  # a function of its own module
        return
    which = (fn.cache_key, tuple(map(str, tuner.configs)), tuple(tuner.keys))
    tuner.cache = _state.choices.setdefault(which, tuner.cache)


def tuned() -> bool:
    """Whether autotuners have measured by the clock, and not since they were told to do so anew."""
    return bool(_state.tuned)


@contextlib.contextmanager
def tuning_anew() -> Iterator[None]:
    """Inside, those measure again, and what they choose then stays: they were not alone on the GPU before.
    Their kernels are compiled."""
    for tuner in _state.tuned:
        tuner.cache.clear()
    try:
        yield
    finally:
        _state.tuned = set()


def benchmarking() -> bool:
    """Whether an autotuner is measuring now: what it does with torch is not the user's code."""
    return _state.benchmarking > 0


def is_launcher(kernel: Any) -> bool:
    """Whether something launches a kernel that it holds as `fn`: Triton's own, or what libraries put around
    it to remember launches."""
    if isinstance(kernel, (JITFunction, InterpretedFunction)) or not isinstance(kernel, KernelInterface):
        return False
    return isinstance(getattr(kernel, "fn", None), KernelInterface)


def jit_function(kernel: Any) -> JITFunction | None:
    """The jitted function inside any nesting of launchers, or None when `kernel` is none."""
    while is_launcher(kernel):
        kernel = kernel.fn
    if isinstance(kernel, InterpretedFunction):
        return _as_compiled(kernel)
    return kernel if isinstance(kernel, JITFunction) else None


def _as_compiled(kernel: InterpretedFunction) -> JITFunction:
    made = kernel.__dict__.get("_kernel_agent_jit")
    if made is None:
        made = kernel.__dict__["_kernel_agent_jit"] = JITFunction(kernel.fn, **kernel.kwargs)
    return made


def _install() -> None:
    """Put the hooks below into Triton's launchers; they leave GPU launches without handlers as they were."""
    if getattr(JITFunction.run, "_kernel_agent", False):
        return
    originals = _Originals(
        JITFunction.run, JITFunction.__call__, Autotuner.run, Autotuner._bench, Heuristics.run
    )

    def jit_run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        real = _state.mode == "cuda"
        if real and (warmup or _state.benchmarking or not _state.handlers):
            compiled = originals.jit_run(self, *args, grid=grid, warmup=warmup, **kwargs)
            timed = warmup or _state.measured  # that costs nothing more than it costs its user
            return compiled if timed else _unseen(self, args, kwargs, grid, originals, compiled)
        if warmup:
            return _warmed(_resolve(self, args, kwargs, (1,), None))
        launch = _resolve(self, args, kwargs, grid, originals if real else None)
        again = _again(launch, len(args))
        return Kept(again, _through(launch, len(_state.handlers) - 1))

    def jit_call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        if accesses.running():
            return interpret.call_helper(self, args, kwargs)
        return originals.jit_call(self, *args, **kwargs)

    def autotuner_run(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if _state.mode != "cuda":
            return _untimed(self, args, kwargs)
        _begin(self)
        with _inside(self):
            return originals.autotuner_run(self, *args, **kwargs)

    def autotuner_bench(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if _state.measured:
            _state.tuned.add(self)
            return originals.autotuner_bench(self, *args, **kwargs)
        if _state.mode != "cuda":  # of a class of its own, which has another run()
            return _unmeasured(self, kwargs["config"])
        trials = _trials_of(self)
        if trials.settled:
            return NOT_TRIED
        self.__dict__["do_bench"] = _briefly  # in place of some hundred runs
        _state.benchmarking += 1
        try:
            return trials.note(originals.autotuner_bench(self, *args, **kwargs))
        finally:
            _state.benchmarking -= 1

    def heuristics_run(self: Heuristics, *args: Any, **kwargs: Any) -> Any:
        computed: dict[str, Any] = {}
        for name, rule in self.values.items():
            computed[name] = kwargs[name] = rule({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        _state.heuristics.append(computed)
        try:
            return self.fn.run(*args, **kwargs)
        finally:
            _state.heuristics.pop()

    def interpreted_run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return jit_run(_as_compiled(self), *args, grid=grid, warmup=warmup, **kwargs)

    def interpreted_call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        return interpret.call_helper(_as_compiled(self), args, kwargs)

    def init_subclass(cls: type[Autotuner], **kwargs: Any) -> None:
        super(Autotuner, cls).__init_subclass__(**kwargs)
        own = cls.__dict__.get("run")
        if own is not None:  # it chooses in its own way; what it chose is told all the same
            cls.run = _told(own)

    jit_run._kernel_agent = True  # type: ignore[attr-defined]
    JITFunction.run = jit_run
    JITFunction.__call__ = jit_call
    Autotuner.run = autotuner_run
    Autotuner._bench = torch.no_grad()(autotuner_bench)  # what trials restore is no part of a caller's graph
    Autotuner.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    Heuristics.run = heuristics_run
    InterpretedFunction.run = interpreted_run
    InterpretedFunction.__call__ = interpreted_call


@dataclass(frozen=True)
class _Originals:
    jit_run: Callable[..., Any]
    jit_call: Callable[..., Any]
    autotuner_run: Callable[..., Any]
    autotuner_bench: Callable[..., Any]
    heuristics_run: Callable[..., Any]


NOT_TRIED = [float("inf")] * 3  # the quantiles of a configuration that does not run


@dataclass
class _Trials:
    """How much an autotuner tries on a GPU. It is the clock that chooses there, so that every configuration
    has to be right; but each is compiled, for each key anew, in every process. Every one is run where
    try_every_configuration() was called, the first time that the tuner chooses; otherwise the first that fits
    the GPU is taken."""

    chosen: int = 0  # so many times a configuration was chosen before
    fits: bool = False  # one did, this time

    def begin(self) -> None:
        self.chosen += self.fits
        self.fits = False

    @property
    def settled(self) -> bool:
        return self.fits and (self.chosen > 0 or not _state.every)

    def note(self, timings: Any) -> Any:
        self.fits = self.fits or timings[0] != NOT_TRIED[0]
        return timings


def _begin(tuner: Autotuner) -> None:
    """On a GPU, before a launch, which may need a choice."""
    if _state.measured:
        share_choices(tuner)
    _trials_of(tuner).begin()


def _trials_of(tuner: Autotuner) -> _Trials:
    made: _Trials = tuner.__dict__.setdefault("_kernel_agent_trials", _Trials())
    return made


def _briefly(call: Callable[[], Any], **_: Any) -> list[float]:
    """In place of Triton's benchmark: one run that compiles, and one against the clock, in milliseconds."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return [1e3 * (time.perf_counter() - started)] * 3


def _untimed(tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without a GPU nothing is timed: of the configurations that the user's own pruning leaves the first is
    bound, or the one whose turn it is."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        left = list(tuner.prune_configs(kwargs))
        before = _left_before(tuner, {**tuner.nargs, **kwargs}, left)
        left = before if _state.turn % 2 == 1 else left
        config: Config = left[_state.turn % len(left)]
        if len(tuner.configs) > 1 and _state.turn == 0:
            devices.record("autotune benchmark", f"first of {len(tuner.configs)} configurations: {config}")
        conflicts = kwargs.keys() & config.kwargs.keys()
        if conflicts:
            raise ValueError(f"conflicting meta-parameters: {', '.join(sorted(conflicts))}")
        tuner.best_config = config
        if len(tuner.configs) > 1 and _state.turn % 2 == 1:
            _clear(tuner)
        if config.pre_hook is not None:
            config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
        with _inside(tuner):
            return tuner.fn.run(*args, **kwargs, **config.all_kwargs())
    finally:
        tuner.nargs = None


def _left_before(tuner: Autotuner, given: dict[str, Any], left: list[Config]) -> list[Config]:
    """What pruning left whenever the tuner had these values of its keys: what was chosen the first time is
    taken again, whatever pruning would leave now."""
    values = [given[name] for name in tuner.keys if name in given]
    key = (*values, *(str(value.dtype) for value in given.values() if isinstance(value, torch.Tensor)))
    seen: list[tuple[Any, list[Config]]] = tuner.__dict__.setdefault("_kernel_agent_left", [])
    known = next((configs for other, configs in seen if other == key), None)
    if known is None:
        known = []
        seen.append((key, known))
    known += [config for config in left if all(config is not one for one in known)]
    return known


def _clear(tuner: Autotuner) -> None:
    """As before the first run of a key that counts, when the trials are over: what is named in reset_to_zero
    is zero then, whoever has written it. Later runs leave it."""
    for name in getattr(tuner, "reset_to_zero", ()):
        value = tuner.nargs.get(name)
        if isinstance(value, torch.Tensor):
            value.zero_()


def _unmeasured(tuner: Autotuner, config: Config) -> list[float]:
    """Without a GPU: the tuner's first configuration is the fastest, or the one whose turn it is, and others
    the slower the further from it they are."""
    devices.record("autotune benchmark", f"nearest to number {_state.turn} of {len(tuner.configs)}")
    at = next((at for at, one in enumerate(tuner.configs) if one is config), len(tuner.configs))
    return [1.0 + abs(at - _state.turn)] * 3


def _told(run: Callable[..., Any]) -> Callable[..., Any]:
    """The run() of a class of autotuners, during which it is known whose configuration a launch has."""

    @functools.wraps(run)
    def told(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        with _inside(self):
            return run(self, *args, **kwargs)

    return told


@contextlib.contextmanager
def _inside(tuner: Autotuner) -> Iterator[None]:
    if tuner in _state.tuners:
        yield
        return
    _state.tuners.append(tuner)
    try:
        yield
    finally:
        _state.tuners.pop()


def _warmed(launch: Launch) -> Any:
    """What kernel.warmup(...) gives without a GPU: the kernel for the target, to ask for registers."""
    warmed = Warmed(launch, Compiler(devices.current_target()))
    devices.record(f"{launch.name}.warmup", warmed)
    return warmed


def _resolve(
    kernel: JITFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    grid: Any,
    originals: _Originals | None,
) -> Launch:
    """Bind the arguments and evaluate the grid of one launch."""
    names = kernel.signature.parameters
    options = {key: value for key, value in kwargs.items() if key not in names}
    for key in options if originals is None else ():
        if key not in OPTION_DEFAULTS and key not in _OTHER_OPTIONS:
            raise KeyError(f"Keyword argument {key} was specified but unrecognised")
    bound = kernel.signature.bind(*args, **{key: value for key, value in kwargs.items() if key in names})
    bound.apply_defaults()
    resolved = _grid(grid, dict(bound.arguments))

    def execute() -> Any:
        if originals is not None:
            return originals.jit_run(kernel, *args, grid=resolved, warmup=False, **kwargs)
        for hook in kernel.pre_run_hooks:
            hook(*args, **kwargs)
        if _state.mode == "interpret":
            interpret.run(kernel, resolved, bound.arguments)
        return None

    return Launch(
        fn=kernel.fn,
        kernel=kernel,
        grid=resolved,
        args=dict(bound.arguments),
        constexprs=tuple(p.name for p in kernel.params if p.is_constexpr),
        # A parameter may be called num_stages as well: a keyword of that name then means both, as in Triton.
        **{key: kwargs.get(key, default) for key, default in OPTION_DEFAULTS.items()},
        options={key: value for key, value in options.items() if key not in OPTION_DEFAULTS},
        config=_merged(tuner.best_config.kwargs for tuner in _state.tuners) if _state.tuners else None,
        heuristics=_merged(_state.heuristics),
        keywords=tuple(kwargs),
        site=_site(),
        _execute=execute,
    )


def _merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def _through(launch: Launch, depth: int) -> Any:
    """Call handler `depth`; its `run()` goes to the next one out, and from the last one to the execution."""
    if depth < 0:
        return launch._execute()
    return _state.handlers[depth](replace(launch, _execute=lambda: _through(launch, depth - 1)))


def _grid(grid: Any, args: dict[str, Any]) -> tuple[int, ...]:
    extents = grid(args) if callable(grid) else grid
    if isinstance(extents, int):
        raise TypeError(f"grid must be a tuple, not the integer {extents}")
    resolved = tuple(int(extent) for extent in extents)
    if not 1 <= len(resolved) <= 3:
        raise ValueError(f"grid must have 1 to 3 dimensions, not {len(resolved)}")
    if any(extent < 0 for extent in resolved):
        raise ValueError(f"grid {resolved} has a negative dimension")
    return resolved


def _site() -> tuple[str, int]:
    """The innermost frame outside Triton, this package, and launchers of other people's around a kernel."""
    frame: types.FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        method = frame.f_code.co_varnames[:1] == ("self",)
        if method and is_launcher(frame.f_locals.get("self")):
            found = None
        elif found is None and not name.startswith(("triton.", "kernel_agent.")):
            found = frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return found or ("", 0)
