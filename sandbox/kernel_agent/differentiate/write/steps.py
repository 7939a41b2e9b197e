"""The host's side of each generated launch: its grid, what it allocates before it and adds up after it."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..ir.nodes import Node, real
from ..ir.spelling import gradient_name
from ..ir.values import is_named
from ..read import block_sizes, trace
from ..reverse import checkpoints, forward_values
from ..reverse.sweep import writes
from ..schedule import own_tiles
from ..schedule.kept_values import Spill
from ..schedule.operands import Operand
from ..schedule.owner import Owner, OwnerKernel
from ..schedule.partials import Partials
from ..schedule.scattered import Scattered
from ..schedule.shared_loops import Shared
from ..schedule.step_matrices import StepMatrix
from .emit import Emitted
from .line_breaks import tuple_text
from .section import FunctionText, Part, Step

FILLED = 128  # programs with a wide tile each that give all of a GPU something to do
SHARES = 512  # programs that a kernel with few has, where they share its loop or its sums


def program_count(site: trace.Site) -> str:
    return " * ".join(f"grid[{i}]" for i in range(len(site.launch.grid)))


def tape_step(text: FunctionText, step: Step, buffers: list[forward_values.Buffer]) -> None:
    """Allocate the scratch of a launch: a slice for each program, as long as the longest loop."""
    if not buffers:
        return
    lengths = ", ".join(dict.fromkeys(text.expr(b.trips) for b in buffers))
    step.setup.append(f"tape_steps = max({lengths}, 1)")
    step.asks_programs = "grid" in lengths  # the longest of none, or a length split among none
    if any(b.slots != forward_values.STEPS for b in buffers):
        step.setup.append(f"{checkpoints.SEGMENT} = int(tape_steps**0.5) + 1")
        step.setup.append(f"{checkpoints.CHECKPOINTS} = tape_steps // {checkpoints.SEGMENT} + 2")
    for name in (forward_values.STEPS, checkpoints.SEGMENT, checkpoints.CHECKPOINTS):
        step.extra[name] = name
    for b in buffers:
        scratch(text, step, b, f"{program_count(text.site)} * {b.slots} * {text.expr(b.numel, 11)}")


def kept_step(text: FunctionText, step: Step, spill: Spill) -> None:
    """Allocate what the main kernel keeps of every program of the forward."""
    if spill.matrix is not None:
        scratch(text, step, spill, " * ".join(text.expr(n, 11) for n in spill.matrix.lengths))
    else:
        scratch(text, step, spill, f"{program_count(text.site)} * {text.expr(spill.numel, 11)}")


def matrix_step(text: FunctionText, step: Step, made: StepMatrix) -> None:
    """Allocate a matrix that the main kernel stores, of elements that hold what each product takes."""
    types = list(dict.fromkeys(_element(text, dtype) for dtype in made.types))
    dtype = functools.reduce(lambda a, b: f"torch.promote_types({a}, {b})", types)
    size = " * ".join(text.expr(n, 11) for n in (made.index.height, made.index.width))
    step.setup.append(f"{made.name} = torch.empty({size}, dtype={dtype}, device={text.device()})")
    step.extra[made.name] = made.name


def scratch(text: FunctionText, step: Step, buffer: forward_values.Buffer | Spill, size: str) -> None:
    """Allocate so many elements."""
    dtype = _dtype(text, buffer)
    made = f"torch.empty({size}, dtype={dtype}, device={text.device()})"
    like = buffer.like if isinstance(buffer, Spill) else None
    if like is None:
        step.setup.append(f"{buffer.name} = {made}")
    else:
        step.setup += [f"{buffer.name} = {like.name}", f"if {dtype} != {_dtype(text, like)}:"]
        step.setup.append(f"    {buffer.name} = {made}")
    step.extra[buffer.name] = buffer.name


def _dtype(text: FunctionText, buffer: forward_values.Buffer | Spill) -> str:
    return _element(text, buffer.dtype)


def _element(text: FunctionText, dtype: str) -> str:
    """What the host calls a type."""
    if is_named(dtype):
        return f"torch.{'float64' if real(dtype) == 'float64' else 'float32'}"
    if dtype.startswith("$"):  # that of a tensor's elements
        return f"{text.value(dtype.split(':')[1])}.dtype"
    return f"torch.{'bool' if dtype == 'int1' else dtype}"


def partials_step(text: FunctionText, part: Part, emitted: Emitted, fused: Partials, programs: int) -> Step:
    """The launch of a strip-mined kernel: a few programs along the first walked axis, else one."""
    grid = [f"grid[{axis}]" for axis in range(len(text.site.launch.grid))]
    walked = " * ".join(grid[axis] for axis in fused.axes)
    beside = " * ".join(one for axis, one in enumerate(grid) if axis not in fused.axes)
    for axis in fused.axes:
        grid[axis] = "programs" if axis == fused.axes[0] else "1"
    step = Step(emitted, tuple_text(grid))
    share = f"max({programs} // {f'({beside})' if '*' in beside else beside}, 1)" if beside else programs
    step.setup.append(f"programs = min({walked}, {share})")
    pass_extra(step, fused.optional)
    for base, others in fused.bases.items():
        rows = " * ".join(["programs", *(f"grid[{axis}]" for axis in others)])
        private_rows(text, part, step, base, rows, fused.covers.get(base))
    return step


def clear_step(one: Scattered, emitted: Emitted) -> Step:
    """The launch that clears the sums before what adds to them."""
    return Step(emitted, "grid", only=one.few)


def round_step(one: Scattered, emitted: Emitted) -> Step:
    """The launch that rounds the sums into a gradient, after what adds to them."""
    d = gradient_name(one.base)
    setup = [f"{one.sums}, {d} = {d}, gradient_of({one.base})"]
    return Step(emitted, "grid", {one.sums: one.sums}, setup, only=one.few)


def shared_step(
    text: FunctionText, part: Part, shared: Shared, shares: int, emit: Callable[[list], Emitted]
) -> Step:
    """The launch of a kernel with a share of its loop for each program of one axis more."""
    with shared.walked() as effects:
        emitted = emit(effects)
    axes = [f"grid[{axis}]" for axis in range(shared.axis)]
    step = Step(emitted, tuple_text([*axes, "splits"]))
    pass_extra(step)
    step.setup.append(f"splits = max({shares} // max({' * '.join(axes)}, 1), 1)")
    for base in shared.bases:
        covers = [write.covers for write in shared.writes if write.base.attrs["name"] == base]
        private_rows(text, part, step, base, "splits", covers[0] if len(covers) == 1 else None)
    return step


def private_rows(
    text: FunctionText, part: Part, step: Step, base: str, rows: str, covers: Node | None
) -> None:
    """Allocate `rows` copies of a gradient before a launch, which writes `covers` elements of each, and add
    them up after it."""
    d = gradient_name(base)
    part.split.add(base)
    text.saved[base] = None
    whole = f", written={text.expr(covers)}" if covers is not None else ""
    step.setup.append(f"{d} = gradient_of({base}, accumulate=True, copies={rows}{whole})")
    step.sums.append((d, base))


def pass_extra(step: Step, optional: bool = False) -> None:
    """Host expressions of the parameters that generated kernels have beside the forward's."""
    for name in step.emitted.extra:
        if name.startswith("grid_"):
            step.extra[name] = f"grid[{name[5:]}]"
        elif name.startswith("span_"):
            d = gradient_name(name[5:])
            step.extra[name] = f"0 if {d} is None else {d}.stride(0)" if optional else f"{d}.stride(0)"
        else:
            step.extra[name] = name


class TilesApart:
    """Which tiles the launches of owner kernels have, one after the other: their own, where those are enough
    to give a GPU something to do, or those of all."""

    def __init__(
        self, text: FunctionText, owner: Owner, of_all: block_sizes.Grid | block_sizes.Queued
    ) -> None:
        self.text, self.owner, self.of_all = text, owner, of_all
        self.changed = False  # whether a launch so far may have others than those of all

    def before(self, made: OwnerKernel) -> list[str]:
        """The lines before a launch; what is kept for it by tiles may only be there in some branches."""
        read = [*made.effects, *(effect for one in made.operands for effect in one.effects)]
        flags, sizes, asked = self.owner.spills.flags(read), self.of_all.sizes, []
        if None not in flags:
            sizes = own_tiles.apart(self.of_all, made.effects, made.grid, self.owner.g)
            asked = [self.text.unless(region) for region in flags if region is not None]
            shared = made.split or made.entries is not None
            count = None if shared else self.text.tiles.programs(self.of_all, sizes, made.grid)
            asked += [] if count is None else [f"{count} >= {FILLED}"]
        lines = self.text.tiles.of_step(self.of_all, sizes, asked, self.changed)
        self.changed |= sizes != self.of_all.sizes
        return lines


def operand_step(text: FunctionText, emitted: Emitted, one: Operand) -> Step:
    """The launch that computes an operand in front of the owner kernel that takes it."""
    count = " * ".join(text.expr(n, 11) for n in one.counts)
    step = Step(emitted, f"({count},)")
    scratch(text, step, one.kept, f"{count} * {text.expr(one.kept.numel, 11)}")
    pass_extra(step)
    return step


def owner_step(
    text: FunctionText, part: Part, emitted: Emitted, made: OwnerKernel, owner: Owner, splits: int, runs: int
) -> Step:
    """The launch of an owner kernel: its grid from the forward's sizes, partial sums added up afterwards.
    `splits`: programs that share such a sum; `runs`: those that walk entries of a table."""
    step = Step(emitted, tuple_text([text.expr(count) for count in made.grid]), warps=made.warps)
    pass_extra(step, made.optional)

    def ask(bad: str, wanted: str) -> None:
        said = wanted.replace('"', "'")
        step.setup.extend([f"if {bad}:", f'    raise ValueError("{said} in the backward")'])

    for whole, each in dict.fromkeys(owner.divisible):
        bad = f"{text.expr(whole, 10)} % {text.expr(each, 11)}"
        ask(bad, f"{text.expr(whole)} must be a multiple of {text.expr(each)}")
    for one, other in made.equal:
        ask(f"{text.expr(one, 6)} != {text.expr(other, 6)}", f"{text.expr(one)} must be {text.expr(other)}")
    for factor in made.positive:
        ask(f"{text.expr(factor, 6)} < 1", f"{text.expr(factor)} must be positive")
    for name, least in made.ordered.items():
        first = "" if least is None else f", {least}"
        order = f"order_{name} = order_of({text.value(name)}{first})"
        step.setup += [order] * all(order not in one.setup for one in part.steps)
    if made.entries is not None:
        owned = " * ".join(text.expr(n, 11) for n in made.grid if n.attrs.get("name") != "splits")
        count = f"triton.cdiv({runs}, max({owned}, 1))" if owned else str(runs)
        step.setup.append(f"splits = min({text.expr(made.entries)}, {count})")
    if made.split:
        most = f"{text.expr(owner.summed(made))}, {splits}"
        if made.few:  # as many copies of whole tiles, but no more programs than are worth it
            tiles = [text.expr(n, 11) for n in made.grid if n.attrs.get("name") != "splits"]
            most += f", max({SHARES} // max({' * '.join(tiles)}, 1), 1)" if tiles else ""
        step.setup.append(f"splits = min({most})")
        covers = {write.base.attrs["name"]: write.covers for write in writes(made.effects)}
        for base in made.bases:
            private_rows(text, part, step, base, "splits", covers[base])
    return step
