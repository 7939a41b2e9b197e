"""The text around the kernels: one Function per launch, and `<stub>_autograd`.

A launch becomes one `torch.autograd.Function`: its forward makes the user's launch, its backward the
generated ones. `<stub>_autograd` is the stub itself with every launch replaced by `.apply`, so that torch
differentiates the torch operations between launches and nothing is assumed about shapes, views or the number
of launches.
"""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...source import tree_nodes
from ..ir import counts
from ..ir.nodes import Node, Region, Store, nodes_in, real, walk
from ..ir.refusal import Refusal
from ..ir.spelling import INFIX, call_name, choice, gradient_name, upstream_name
from ..ir.values import is_static
from ..prove.packed import Asked, AtMost, Distinct, Ordered, Walked
from ..read.block_sizes import Grid, Queued, Tiles
from ..read.trace import TILES, Site, grid_written
from ..reverse.forward_values import STEPS
from ..schedule.saved import Saved
from ..schedule.saved_numbers import trips_of
from ..schedule.scattered import Scattered
from ..schedule.whole_rows import WARPS, Rows
from .chosen_tiles import ChosenTiles, has_few_stages
from .emit import Emitted
from .line_breaks import WIDTH, break_line, broken, indented, tuple_text, wrap

OWN_GRID = "forward_grid"


@dataclass
class Step:
    """One launch of a generated kernel: its grid, and the host expressions of its extra parameters."""

    emitted: Emitted
    grid: str
    extra: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    sums: list[tuple[str, str]] = field(default_factory=list)  # partial sums, and what they are gradients of
    only: str = ""  # the host's name for whether it is made; "": always
    warps: int | None = None  # others than all have; then it has the stages that Triton takes, too
    asks_programs: bool = False  # `setup` only makes sense where there are programs


@dataclass
class Part:
    """The launches that make the gradients: all of them, or those of one side of a flag."""

    accumulated: set[str]  # gradients that are added to
    checks: list[str]  # what the host asks of strides
    steps: list[Step] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)  # how many elements of a gradient are written
    split: set[str] = field(default_factory=set)  # gradients that a step allocates itself, as partial sums
    copies: dict[str, str] = field(default_factory=dict)  # gradients that may be another tensor, and which
    scattered: list[Scattered] = field(default_factory=list)
    rows: Rows | None = None  # a block is a whole row here

    @property
    def gradients(self) -> list[str]:
        return list(dict.fromkeys(n for s in self.steps for n in s.emitted.gradients))

    def parts(self) -> list[Part]:
        return [self]


@dataclass
class Choice:
    """What is done where a flag holds, and where it does not."""

    flag: Node
    one: Part | Choice
    other: Part | Choice

    def parts(self) -> list[Part]:
        return self.one.parts() + self.other.parts()


class FunctionText:
    """Writes the Function of one launch."""

    def __init__(self, site: Site, inplace: set[str]) -> None:
        self.site, self.inplace = site, inplace
        self.saved: dict[str, None] = {}
        self.kept: dict[str, None] = {}
        self.behind: dict[str, None] = {}  # tables whose tensors are saved
        self.saving: dict[str, Saved] = {}  # what a copy of the forward kernel saves, by buffer
        self.launched = site.kernel_name
        self.queue = ""  # what is asked of programs that walk one, where the backward's blocks are its own
        self.tiles = ChosenTiles(self)

    def value(self, param: str) -> str:
        """The backward's expression for a parameter of the forward kernel; it is saved by the forward."""
        site, arg = self.site, self.site.args[param]
        if arg.kind == "pointer" and param in site.given_names and param not in site.kernel.either:
            self.saved[param] = None
            if param in site.tables:
                self.behind[param] = None  # their memory has to stay
            return param
        apart = [name for names in self.named_apart.values() for name in names]
        if param in site.given_names or param in site.launch.heuristics or param in apart:
            self.kept[param] = None
            return param
        if site.launch.config and param in site.launch.config:
            return f'{config_name(site)}["{param}"]'
        if param in site.uses.of:  # a block's name for an axis whose size stays
            return self.value(site.uses.of[param])
        return repr(arg.value)

    @property
    def tiles_name(self) -> str:
        """A variable of the host, by another name where the kernel's parameters have this one."""
        name = TILES
        while name in self.site.params:
            name += "_"
        return name

    @property
    def named_apart(self) -> dict[str, list[str]]:
        """Blocks that the backward has others of, and that the forward has by another name, or an autotuner
        chooses: by what they are there."""
        own, chosen = self.site.blocks, self.site.launch.config or {}
        found: dict[str, list[str]] = {}
        for name in own.sizes if isinstance(own, Grid) else ():
            block = self.site.uses.of.get(name, name)
            text = f'{config_name(self.site)}["{block}"]' if block in chosen else block
            if text != name:
                found.setdefault(text, []).append(name)
        return found

    def step(self, step: Step, rows: Rows | None, copies: Mapping[str, str]) -> list[str]:
        """The lines that make one launch; it writes to no gradient that is one of `copies`."""
        emitted = step.emitted
        args = self.site.args
        constexprs = [n for n in emitted.params if args[n].kind == "constexpr"]
        compiled = emitted.constants
        values = [self.value(n) for n in emitted.params if n not in constexprs and n not in compiled]
        up = [upstream_name(n, self.inplace) for n in emitted.upstream]
        grads = {n: d for n in emitted.gradients if (d := gradient_name(n)) not in up}
        values += [
            *up,
            *(f"None if {d} is {copies[n]} else {d}" if n in copies else d for n, d in grads.items()),
        ]
        handed = [STEPS] * (STEPS in emitted.extra and STEPS not in step.extra)  # as the copy has it
        self.kept |= dict.fromkeys(handed)
        values += [n if n in (*self.saving, *handed) else step.extra[n] for n in emitted.extra]
        values += [f"{n}={self.value(n)}" for n in constexprs]
        values += [f"{own}={self.value(n)}" for n, own in compiled.items()]
        options = self.options(rows) if step.warps is None else {"num_warps": step.warps}
        values += [f"{name}={value}" for name, value in options.items()]
        setup, grid = step.setup, step.grid
        if len(grid) > 50:
            alone = grid.endswith(",)")
            tiles = self.tiles_name
            setup = [*setup, f"{tiles} = {grid[1:-2] if alone else grid}"]
            grid = f"({tiles},)" if alone else tiles
        lines = [*setup, f"{emitted.name}[{grid}]({', '.join(values)})", *_summed(step.sums)]
        lines = [part for line in lines for part in break_line(line, WIDTH - 8)]
        alone = not (step.setup or emitted.extra)  # it makes nothing else
        if alone and grads and all(n in copies for n in grads):
            asked = " or ".join(f"{d} is not {copies[n]}" for n, d in grads.items())
            lines = [f"if {asked}:", *indented(lines)]
        return [f"if {step.only}:", *indented(lines)] if step.only else lines

    def options(self, rows: Rows | None) -> dict[str, object]:
        """Warps and stages of a generated launch, where those are not what Triton takes."""
        site, own = self.site, self.tiles.options
        found: dict[str, object] = {}
        if rows is not None and not site.warps:
            found["num_warps"] = WARPS
        elif site.warps:
            found["num_warps"] = site.launch.num_warps
        elif "num_warps" in site.given_names:
            found["num_warps"] = "num_warps"
        if site.stages is not None:
            found["num_stages"] = site.stages
        elif has_few_stages(site):  # more may not fit
            found["num_stages"] = "num_stages"
        found |= {name: name for name in own}
        self.kept |= {name: None for name, value in found.items() if value == name}
        return found

    def check(self, layout: list[tuple[Node, Node | None]], optional: str | None = None) -> str:
        """Of a gradient's layout: any is right where a call leaves out what is `optional`."""
        extents = ["None" if e is None else self.expr(e) for _, e in layout]
        if optional is not None:
            extents[0] = f"0 if {self.value(optional)} is None else {extents[0]}"
        pairs = [f"({self.expr(s)}, {e})" for (s, _), e in zip(layout, extents, strict=True)]
        return f"disjoint({', '.join(pairs)})"

    def device(self) -> str:
        """Where the tensors of the launch are."""
        site = self.site
        pointers = [n for n, a in site.args.items() if a.kind == "pointer" and not a.none]
        return f"{self.value(next(n for n in pointers if n in site.given_names))}.device"

    def asked(self, facts: list[Asked]) -> list[str]:
        """What the host asks of tensors, and of the launch."""
        of_launch = [f"at_most(grid, {f.axis}, {self.expr(f.count)})" for f in facts if isinstance(f, AtMost)]
        of_launch += [self.walked(f) for f in facts if isinstance(f, Walked)]
        known = [f"ordered({self.value(f.name)})" for f in facts if isinstance(f, Ordered)]
        for fact in (f for f in facts if isinstance(f, Distinct)):
            known.append(f"distinct({self.value(fact.name)}, {fact.width}, grid[{fact.axis}])")
        asked = f"sequences_apart({', '.join(dict.fromkeys(known))})"
        return [asked] * bool(known) + of_launch

    def walked(self, fact: Walked) -> str:
        """What the host asks of programs that walk a queue: of the forward's tiles, whatever the backward
        has."""
        own = isinstance(self.site.blocks, Queued)
        asking = self.only_asking() if own else self
        values = [f"grid[{fact.axis}]", *(asking.expr(n) for n in (fact.step, fact.tiles) if n is not None)]
        if not own:
            return f"walked({', '.join(values)})"
        self.queue = tuple_text(values)
        return "walked(*ctx.queue)"

    def only_asking(self) -> FunctionText:
        """For text of the forward: what it names is not kept for the backward."""
        asking = copy.copy(self)
        asking.saved, asking.behind, asking.kept = {}, {}, {}
        return asking

    def expr(self, node: Node, prec: int = 0) -> str:
        """A uniform value on the host."""
        if node.op == "const":
            return repr(node.value)
        if node.op in ("param", "constexpr"):  # also a pointer: its tensor
            name = node.attrs["name"]
            return self.value(name) if name in self.site.args else name
        if node.op == "npid":
            return f"grid[{node.attrs['axis']}]"
        if node.op == "cast":
            whole = node.args[0].is_float and not node.is_float
            return f"int({self.expr(node.args[0])})" if whole else self.expr(node.args[0], prec)
        if node.op in ("neg", "invert"):
            return f"{'-' if node.op == 'neg' else '~'}{self.expr(node.args[0], 11)}"
        if node.op in ("select", "where", "ifout"):
            cond, a, b = choice(node)
            if a is None or b is None:  # made, and used, in one branch only
                return self.expr(a or b, prec)  # type: ignore[arg-type]
            text = f"{self.expr(a, 1)} if {self.expr(cond, 1)} else {self.expr(b)}"
            return f"({text})" if prec else text
        if node.op == "compare":
            text = f" {node.attrs['cmp']} ".join(self.expr(arg, 5) for arg in node.args)
            return text if prec < 5 else f"({text})"
        if node.op in ("not", "isnone"):
            inner = self.expr(node.args[0], 5)
            text = f"not {inner}" if node.op == "not" else f"{inner} is None"
            return f"({text})" if prec > 3 else text
        if node.op == counts.OP:
            return f"longest(grid, {self.device()}, lambda pid: {counts.text(node.args[0], self.expr)})"
        if name := call_name(node):
            return f"{name}({', '.join(self.expr(a) for a in node.args)})"
        assert node.op in INFIX, f"`{node.op}` cannot be computed on the host"
        symbol, own = INFIX[node.op]
        text = f"{self.expr(node.args[0], own)} {symbol} {self.expr(node.args[1], own + 1)}"
        return f"({text})" if own < prec else text

    def text(self, made: Part | Choice) -> str:
        site = self.site
        parts = made.parts()
        gradients = list(dict.fromkeys(name for part in parts for name in part.gradients))
        accumulated = {name for part in parts for name in part.accumulated}
        body = self.chosen(made, gradients)
        steps = [step for part in parts for step in part.steps]
        if not site.tables and any(step.grid != "grid" or step.asks_programs for step in steps):
            body = [*self.without_programs(gradients), *body]
        grads = [self.result(name, gradients, accumulated) for name in site.given_names]
        body += _return(["None", *grads, *(self.results_behind(name, gradients) for name in site.tables)])
        return "\n".join(["", *self.head(), *self.forward(), "", *self.backward(body)]) + "\n"

    def without_programs(self, gradients: list[str]) -> list[str]:
        """What a launch without programs leaves: owners of a gradient would look for them in vain, and so
        would who asks how far they go."""
        owned = [name for name in gradients if name not in self.inplace]
        grads = [
            f"gradient_of({name})" if name in owned else self.result(name, gradients, set())
            for name in self.site.given_names
        ]
        return ["if 0 in grid:", *indented(_return(["None", *grads], WIDTH - 12))]

    def chosen(self, made: Part | Choice, gradients: list[str]) -> list[str]:
        """The lines of the part that belongs to the flags of a call."""
        if isinstance(made, Part):
            return self.part(made, gradients)
        one, other = (self.chosen(side, gradients) for side in (made.one, made.other))
        return [f"if {self.expr(made.flag)}:", *indented(one), "else:", *indented(other)]

    def part(self, part: Part, gradients: list[str]) -> list[str]:
        """The lines that allocate `gradients` and make them."""
        body = [] if part.rows is None else part.rows.setup(self.expr)
        scattered = {one.base: one for one in part.scattered}
        for name in sorted(gradients, key=lambda name: name in part.copies):  # after what they are copies of
            if name in self.site.tables:
                body += self.gradient_table(name)
            elif name in self.inplace:
                up = upstream_name(name, self.inplace)
                whole = f", {part.written[name]}" if name in part.written else ""
                there = f"None if {up} is None else " * (name in self.site.optional)
                body += break_line(f"{gradient_name(name)} = {there}passed_on({up}{whole})", WIDTH - 8)
            elif name not in part.split:
                self.saved[name] = None
                flag = ", accumulate=True" if name in part.accumulated else ""
                if name in part.written:
                    flag += f", written={part.written[name]}"
                made = f"gradient_of({name}{flag})"
                left = gradient_name(name)
                if name in part.copies:
                    made = f"handed_on({part.copies[name]}, {name}, {part.written[name]})"
                if name in scattered:
                    one = scattered[name]
                    left, made = f"{left}, {one.few}", f"sums_for({name}, {self.expr(one.reached)})"
                body += break_line(f"{left} = {made}", WIDTH - 8)
        for check in part.checks:
            body += break_line(check, WIDTH - 8)
        for step in part.steps:
            body += self.step(step, part.rows, part.copies)
        return body

    def gradient_table(self, name: str) -> list[str]:
        """The gradients of what is behind a table, and their table."""
        self.behind[name] = None
        self.saved[name] = None  # its shape says which of the tensors saved are its own
        d, tensors = gradient_name(name), tensors_of(name)
        made = f"[gradient_of(t, accumulate=True) for t in {tensors}]"
        lines = [f"{gradient_name(tensors)} = {made}", f"{d} = table_of({gradient_name(tensors)}, {name})"]
        return [part for line in lines for part in break_line(line, WIDTH - 8)]

    def results_behind(self, name: str, gradients: list[str]) -> str:
        if name in gradients:
            zipped = f"zip({gradient_name(tensors_of(name))}, {tensors_of(name)})"
            return f"*(finished(d, t) for d, t in {zipped})"
        self.saved[name] = None
        return f"*[None] * {name}.numel()"

    def result(self, name: str, gradients: list[str], accumulated: set[str]) -> str:
        site = self.site
        arg = site.args.get(name)
        if arg is None or arg.kind != "pointer" or name in site.tables:
            return "None"
        d = gradient_name(name)
        if name in gradients:
            return f"finished({d}, {name})" if name in accumulated else d
        if name in site.outputs and name in site.added:
            return d  # the launch adds to the buffer: what was there keeps its gradient
        if site.first is not None and name == site.first[0]:
            return f"torch.zeros_like({d})"  # for None, torch drops the gradient of all that is beside a view
        return "None"

    def head(self) -> list[str]:
        site = self.site
        return [
            f"class {site.class_name}(torch.autograd.Function):",
            f'    """A launch of {site.kernel_name} that autograd can go back through."""',
            "",
        ]

    def forward(self) -> list[str]:
        site = self.site
        call = [*site.positional, *(f"{n}={n}" for n in site.given_names if n not in site.positional)]
        params = ["ctx", "grid", *site.given_names, *["*pointed"] * bool(site.tables)]
        lines = ["    @staticmethod", *_signature("forward", params)]
        for cond, (taken, at) in site.kernel.graph.folded.items():
            lines += self.refusal(cond, taken, at)
        for name in sorted(site.kernel.either):
            lines += broken(f"if isinstance({name}, torch.Tensor) and {name}.is_floating_point():")
            why = f"{name} is a number in the traced calls: its gradient is not known"
            lines += broken(f'raise NotImplementedError("{why}")', 12)
        read, into = self.sharing()
        if read:
            lines += broken(f"separate({tuple_text(into)}, {tuple_text(read)})")
        for name in sorted(self.inplace & set(self.saved)):
            lines += broken(f"before_{name} = {self.unless_none(name, f'{name}.clone()')}")
        launched, given = "grid", list(self.saving)
        if self.saving:
            resolved = self.resolved_grid()
            if site.autotuned and resolved:
                launched = OWN_GRID
                lines.append(
                    f"        {OWN_GRID} = grid  # asked again, with the blocks that the launch chooses"
                )
            buffers, rules = self.saved_buffers()
            lines += [part for name in rules for part in broken(f"{name} = {heuristic_text(site, name)}")]
            lines += resolved + self.more_programs() + buffers
            given += self.saved_rows() + [STEPS] * bool(trips_of(self.saving.values()))
        lines += broken(f"{self.launched}[{launched}]({', '.join([*given, *call])})")
        outputs = [f"*{tensors_of(n)}" if n in site.tables else n for n in site.outputs]
        if site.tables:
            lines += broken(_divided(list(site.tables), "pointed"))
        lines += broken(f"ctx.mark_dirty({self.modified(outputs)})")
        lines += self.other_blocks()
        kept_rules = [name for name in site.launch.heuristics if name in self.kept]
        lines += [part for name in kept_rules for part in broken(f"{name} = {heuristic_text(site, name)}")]
        if not self.saving and site.blocks is None:
            lines += self.resolved_grid()
        for name, count in site.replaced.items():
            there = f"{name} is not None and " * (name in site.optional)
            lines += broken(f"if {there}{self.expr(count, 5)} != {name}.numel():")
            why = f"{name} holds values, and has to be overwritten as a whole"
            lines += broken(f'raise ValueError("{why}")', 12)
        for name, written in site.empty.items():
            asked = f"ctx.needs_input_grad[{1 + site.given_names.index(name)}]"
            if written is not None:
                asked += f" and {self.expr(written, 5)} != {name}.numel()"
            lines += broken(f"if {asked}:")
            why = f"{name} holds differentiable values, as in no call that was traced"
            lines += broken(f'raise NotImplementedError("{why}")', 12)
        saved = [self.kept_of(n) for n in self.saved]
        saved += [f"*{tensors_of(n)}" for n in self.behind]
        if saved:
            lines += broken(f"ctx.save_for_backward({', '.join(saved)})")
        kept = ["grid", *self.kept]
        lines += broken(f"ctx.launch = {tuple_text(kept)}")
        lines += broken(f"ctx.strides = {tuple_text(list(map(self.strides, site.outputs)))}")
        returned = ", ".join(outputs)
        lines.append(f"        return ({returned},)" if "*" in returned else f"        return {returned}")
        return lines

    def resolved_grid(self) -> list[str]:
        """A callable grid sees the arguments as Triton would show them."""
        if isinstance(self.site.call.func.slice, ast.Tuple):  # type: ignore[attr-defined]
            return []
        given, _ = grid_written(self.site)
        asked = {n.value for n in tree_nodes(self.site.host) if isinstance(n, ast.Constant)}
        rules = [n for n in self.site.launch.heuristics if given is None or n in asked]
        made = set() if self.saving else self.kept.keys()  # those that have names by now
        texts = {name: name if name in made else heuristic_text(self.site, name) for name in rules}
        passed = {*self.site.given_names, *(self.site.launch.config or ()), *self.site.launch.heuristics}
        for name, value in self.site.launch.args.items():  # what the kernel has by default
            if name in asked - passed and isinstance(value, int | float | str):
                texts[name] = repr(value)
        seen = _arguments(self.site, texts)
        return ["        if callable(grid):", *broken(f"grid = grid({seen})", 12)]

    def other_blocks(self) -> list[str]:
        """From here on a Function has the backward's own blocks, and the programs that go with them."""
        own = self.site.blocks
        if own is None:
            return []
        name, axes = own.rows, range(len(self.site.launch.grid))
        lines = [] if self.saving else self.resolved_grid() + self.more_programs()
        if isinstance(own, Tiles):
            size = own.sizes[name]
            row = name if own.length is None else f"min({own.length}, {name})"
            count = f"max(({row} + {size - 1}) // {size}, 1)"
            lines += [
                "        # tiles of a row: a program each in the backward",
                *broken(f"{self.tiles_name} = {count}"),
            ]
            grid = tuple_text([self.tiles_name if axis == own.axis else f"grid[{axis}]" for axis in axes])
            return lines + broken(f"grid, {name} = {grid}, min({name}, {size})")
        if isinstance(own, Grid | Queued):
            lines += broken(f"ctx.queue = {self.queue}") if self.queue else []
            return lines + self.tiles.lines(own, self.named_apart)
        rows, size = f"grid[{own.axis}] * {name}", own.sizes[name]
        grid = tuple_text([f"{rows} // {size}" if axis == own.axis else f"grid[{axis}]" for axis in axes])
        lines += broken(f"if {rows} % {size} == 0:  # blocks of the backward's own")
        values = ", ".join(map(str, own.sizes.values()))
        return lines + broken(f"grid, {', '.join(own.sizes)} = {grid}, {values}", 12)

    def more_programs(self) -> list[str]:
        """As many programs as make whole blocks of the backward's own, where rows that do not exist have
        nothing to do: what is saved of them is what the forward has there."""
        own = self.site.blocks
        if own is None or own.length is None or isinstance(own, Tiles):
            return []
        name, size = own.rows, own.sizes[own.rows]
        rows = f"grid[{own.axis}] * {name}"
        more = f"triton.cdiv({rows}, {size}) * ({size} // {name})"
        axes = range(len(self.site.launch.grid))
        grid = tuple_text([more if axis == own.axis else f"grid[{axis}]" for axis in axes])
        return [
            f"        # rows from {own.length} on have nothing to do: as many as make whole blocks",
            *broken(f"if {size} % {name} == 0 and {own.length} <= {rows}:"),
            *broken(f"grid = {grid}", 12),
        ]

    def unless(self, region: Region) -> str:
        """That a call does not take a branch that is known when a kernel is compiled."""
        assert region.cond is not None
        return f"not {self.expr(region.cond, 3)}" if region.positive else self.expr(region.cond, 3)

    def saved_rows(self) -> list[str]:
        """How many rows the backward's programs have, where the copy of the kernel shares them out itself."""
        asking = self.only_asking()
        kept = next(iter(self.saving.values()))
        return [] if kept.row is None else [f"grid[{kept.row}] * {asking.expr(kept.numel, 11)}"]

    def saved_buffers(self) -> tuple[list[str], list[str]]:
        """The lines that allocate what the copy of the kernel saves, and the heuristics that they need."""
        asking = self.only_asking()
        site = self.site
        device = next(
            n
            for n in site.given_names
            if n in site.args and site.args[n].kind == "pointer" and not site.args[n].none
        )
        programs = " * ".join(f"grid[{axis}]" for axis in range(len(site.launch.grid)))
        lines = []
        if trips := trips_of(self.saving.values()):
            most = ", ".join(map(asking.expr, trips))
            known = f"1 if 0 in grid else max({most}, 1)" if "grid" in most else f"max({most}, 1)"
            lines += broken(f"{STEPS} = {known}")
        for name, kept in self.saving.items():
            each = (
                ""
                if kept.numel.op == "const" and kept.numel.value == 1
                else f" * {asking.expr(kept.numel, 11)}"
            )
            size = f"{programs}{f' * {STEPS}' if kept.taped is not None else ''}{each}"
            if kept.cut is not None:
                size = " * ".join(asking.expr(length, 11) for length in kept.cut.matrix.lengths)
                size += f" if {asking.expr(kept.cut.flag, 3)} else 0" if kept.cut.flag is not None else ""
            dtype = f"torch.{'bool' if kept.dtype == 'int1' else kept.dtype}"
            if kept.dtype.startswith("$"):  # whatever a call has, no less than was traced
                given = asking.value(kept.dtype.split(":")[1])
                dtype = f"torch.promote_types({given}.dtype, torch.{real(kept.dtype)})"
            made = f"torch.empty({size}, dtype={dtype}, device={device}.device)"
            lines += broken(f"{name} = {made}")
        return lines, [name for name in site.launch.heuristics if name in asking.kept]

    def sharing(self) -> tuple[list[str], list[str]]:
        """What a launch reads of numbers, and what it writes, that had memory of their own when traced."""
        site, args = self.site, self.site.args
        written = [n for n in site.outputs if n not in site.tables]
        memory = {args[n].storage for n in written if not args[n].none}
        loads: dict[str, list[Node]] = {}
        for node in nodes_in(site.kernel.effects):
            if node.op == "load" and node.is_float and node.args[0].op == "param":
                loads.setdefault(node.args[0].attrs["name"], []).append(node)
        read = []
        for name in site.given_names:
            if name not in loads or name in written or name in site.left:
                continue
            if args[name].storage not in memory:
                read.append(name)
            elif flag := self.flag_of([load.home for load in loads[name]]):
                read.append(f"{name} if {flag} else None")
        for name in site.left:
            stores = [e for e in walk(site.kernel.effects) if isinstance(e, Store)]
            flag = self.flag_of([s.region for s in stores if s.base.attrs["name"] == name])
            written.append(f"{name} if {flag} else None" if flag else name)
        return (read, written) if written else ([], [])

    def flag_of(self, regions: list[Region]) -> str | None:
        """What a launch asks before all that is done in these, which the traced one leaves out: None where
        that is not known."""
        g, asked = self.site.kernel.graph, []
        for region in regions:
            conds = [(r.cond, r.positive) for r in region.chain() if r.cond is not None and is_static(r.cond)]
            asked.append(
                {(c, p) for c, p in conds if g.concrete(c) is not None and bool(g.concrete(c)) is not p}
            )
        shared = sorted(set.intersection(*asked), key=lambda one: one[0].id)
        if not shared:
            return None
        cond, positive = shared[0]
        return self.expr(cond, 3) if positive else f"not {self.expr(cond, 3)}"

    def kept_of(self, name: str) -> str:
        """What is saved of a tensor: a copy, where it is changed by this launch or after it."""
        if name in self.inplace:
            return f"before_{name}"
        if name not in self.site.overwritten:
            return name
        return self.unless_none(name, f"{name}.clone()")

    def unless_none(self, name: str, text: str) -> str:
        """What is done with a tensor, where a call may leave that out: an input, or such an output."""
        always = name in self.site.written and name not in self.site.optional
        return text if always else f"None if {name} is None else {text}"

    def modified(self, outputs: list[str]) -> str:
        """The outputs as `mark_dirty` wants them: tensors."""
        every = ", ".join(outputs)
        if not set(outputs) & self.site.optional:
            return every
        return f"*(t for t in ({every}{',' * (len(outputs) == 1)}) if t is not None)"

    def refusal(self, cond: Node, taken: bool, line: int) -> list[str]:
        """The forward refuses a launch that takes a branch that was left out."""
        asking = copy.copy(self)  # what is only asked for here is not kept
        asking.saved, asking.behind, asking.kept = dict(self.saved), dict(self.behind), {}
        text = asking.expr(cond, 3)
        rules = [name for name in self.site.launch.heuristics if name in asking.kept]
        why = f"the branch of line {line} that this launch takes has no backward"
        return [
            *(part for name in rules for part in broken(f"{name} = {heuristic_text(self.site, name)}")),
            *broken(f"if {f'not {text}' if taken else text}:"),
            *broken(f'raise NotImplementedError("{why}")', 12),
        ]

    def strides(self, output: str) -> str:
        if output in self.site.tables:
            return f"[t.stride() for t in {tensors_of(output)}]"
        return self.unless_none(output, f"{output}.stride()")

    def backward(self, body: list[str]) -> list[str]:
        site = self.site
        many = [n for n in site.outputs if n in site.tables]
        ups = [gradient_name(n) for n in site.outputs if n not in many]
        lines = ["    @staticmethod", *_signature("backward", ["ctx", *ups, *["*upstream"] * bool(many)])]
        if self.saved:
            pointed = ["*pointed"] if self.behind else []
            lines += _unpacked([*self.saved, *pointed], "ctx.saved_tensors")
        if self.behind:
            lines += broken(_divided(list(self.behind), "pointed"))
        lines += _unpacked(["grid", *self.kept], "ctx.launch")
        if many:
            lines += broken(_divided(many, "upstream", gradient_name))
        for i, name in enumerate(site.outputs):
            up = gradient_name(name)
            if name in many:
                each = gradient_name(tensors_of(name))
                zipped = f"zip({each}, ctx.strides[{i}])"
                lines += broken(f"{each} = [laid_out(d, s) for d, s in {zipped}]")
                lines += broken(f"{up} = table_of({each}, {name})")
                continue
            there = f"None if {up} is None else " * (name in site.optional)
            laid = upstream_name(name, self.inplace)
            lines += broken(f"{laid} = {there}laid_out({up}, ctx.strides[{i}])")
        return lines + indented(indented(body))


def _summed(sums: list[tuple[str, str]]) -> list[str]:
    """The lines that add partial sums up, two gradients at a time: a launch less."""
    pairs = [sums[at : at + 2] for at in range(0, len(sums), 2)]
    lines = []
    for pair in pairs:
        given = ", ".join(name for one in pair for name in one)
        function = "summed" if len(pair) == 1 else "summed_both"
        lines.append(f"{', '.join(d for d, _ in pair)} = {function}({given})")
    return lines


def tensors_of(table: str) -> str:
    """The name of the tensors behind a table of pointers."""
    return f"{table}_tensors"


def _divided(tables: list[str], source: str, spelled: Callable[[str], str] = str) -> str:
    names = [spelled(tensors_of(name)) for name in tables]
    left = f"({names[0]},)" if len(names) == 1 else ", ".join(names)
    return f"{left} = divided({source}, {', '.join(tables)})"


def config_text(config: dict) -> str:
    """A dictionary as a formatter would write it."""
    items = [f"{json.dumps(k)}: {json.dumps(v) if isinstance(v, str) else v!r}" for k, v in config.items()]
    return f"{{{', '.join(items)}}}"


def config_name(site: Site) -> str:
    return f"{site.kernel_name}_config".upper()


def _arguments(
    site: Site, more: dict[str, str] | None = None, asked: set[str] | None = None, before: Sequence[str] = ()
) -> str:
    """The arguments of a launch by name, from within its Function, those that are asked for; and `more`."""
    known = {n: n for n in site.given_names if n in site.params and (asked is None or n in asked)}
    items = [f"{name}={text}" for name, text in (known | (more or {})).items()]
    items += [f"{n}={heuristic_text(site, n)}" for n in before if asked is None or n in asked]
    if site.autotuned and (asked is None or asked & set(site.launch.config or {})):
        items.append(f"**{config_name(site)}")
    return f"dict({', '.join(items)})"


def heuristic_text(site: Site, name: str) -> str:
    """What a heuristic computes, from the arguments that the Function has under their own names."""
    known = set(site.given_names)
    rule = site.heuristics.get(name)
    if not isinstance(rule, ast.Lambda):
        called, asked = site.rules[name]
        return f"{called}({_arguments(site, asked=asked, before=site.before[name])})"
    given = rule.args.args[0].arg

    class Inline(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            match node:
                case ast.Subscript(ast.Name(owner), ast.Constant(str(wanted))) if owner == given:
                    if wanted in known:
                        return ast.Name(wanted, ast.Load())
                    if site.launch.config and wanted in site.launch.config:
                        return ast.parse(f'{config_name(site)}["{wanted}"]', mode="eval").body
                    if wanted in site.before.get(name, ()):
                        return ast.parse(heuristic_text(site, wanted), mode="eval").body
                    message = f"`{name}` reads `{wanted}`, which the launch does not pass"
                    raise Refusal("heuristics", message, line=node.lineno)
            return self.generic_visit(node)

    return ast.unparse(Inline().visit(copy.deepcopy(rule.body)))


def _return(values: list[str], width: int = WIDTH - 8) -> list[str]:
    """One gradient per argument of the forward; a long tail of None is folded."""
    first = next((i for i, v in enumerate(values) if v != "None"), 0)
    if first > 3:
        values = [f"*[None] * {first}", *values[first:]]
    last = max((i for i, v in enumerate(values) if v != "None"), default=0)
    tail = len(values) - 1 - last
    if tail > 3:
        return break_line(f"return ({', '.join(values[: last + 1])}, *[None] * {tail})", width)
    text = ", ".join(values)
    return break_line(f"return ({text})" if "*" in text else f"return {text}", width)


def _unpacked(names: list[str], source: str) -> list[str]:
    if len(names) == 1:
        return [f"        ({names[0]},) = {source}"]
    line = f"        {', '.join(names)} = {source}"
    if len(line) <= WIDTH:
        return [line]
    wrapped = ["            " + part + "," for part in wrap(names, WIDTH - 13)]
    return ["        (", *wrapped, f"        ) = {source}  # fmt: skip"]


def _signature(name: str, params: list[str]) -> list[str]:
    head = f"    def {name}({', '.join(params)}):"
    if len(head) <= WIDTH:
        return [head]
    return [
        f"    def {name}(",
        *("        " + line + "," for line in wrap(params, WIDTH - 10)),
        "    ):  # fmt: skip",
    ]
