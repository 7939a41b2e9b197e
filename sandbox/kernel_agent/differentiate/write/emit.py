"""From effects back to Triton source: what is demanded, each value at its home, in readable sections.

A value is printed inline where it is used once and is not named by the user; it gets a statement otherwise. A
scope keeps one list of lines per section (indices, recompute, upstream, reverse, write), so that the text
reads in that order.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator
from dataclasses import dataclass, field

import triton.language

from ...source import words
from ..ir.graph import Graph
from ..ir.names import stem, suggested
from ..ir.nodes import Carry, For, GradWrite, If, Node, Region, TapeStore, is_float, nodes_in, walk
from ..ir.simplify import is_number, is_zero
from ..ir.spelling import (
    ATOM,
    INFIX,
    TRIVIAL,
    gradient_name,
    negated,
    number_text,
    one_term,
    python_number,
    upstream_name,
)
from ..ir.values import Kernel, carried, dtype_text
from ..reverse.rules import SMALL_DOT
from .constants import Compiled, Constants
from .demand import Demand, effects_of, places
from .line_breaks import WIDTH, break_line, folded, indented, shortened, statement, wrap

# Loads of upstream gradients come before what is computed again: nothing waits for them there.
INDICES, UPSTREAM, RECOMPUTE, REVERSE, WRITE = range(5)
BRIEF = words("const constexpr param iv phi pid arange")
TANH = "tanh_f32"  # the helper that stands for libdevice's
ARITHMETIC = (*INFIX, "neg", "minimum", "maximum", "cdiv")
CALLS = {
    **{op: f"{{tl}}.{op}({{every}})" for op in words("minimum maximum cdiv where arange clamp join")},
    "pid": "{tl}.program_id({at[axis]})",
    "npid": "{tl}.num_programs({at[axis]})",
    "reduce": "{tl}.{at[fn]}({every}, axis={at[axis]})",
    "argreduce": "{tl}.arg{at[fn]}({every}, axis={at[axis]})",
    "scan": "{tl}.cum{at[fn]}({every}, axis={at[axis]}{back})",
    "combine": "{tl}.associative_scan({every}, {at[axis]}, {at[text]}{back})",
    "combined": "{tl}.associative_scan(({every}), {at[axis]}, {at[text]}{back})[{at[index]}]",
    "fold": "{tl}.reduce(({every}), {at[axis]}, {at[text]})[{at[index]}]",
    "gather": "{tl}.gather({every}, {at[axis]})",
    "affine": "{tl}.associative_scan(({every}), {at[axis]}, {at[text]}{back})[1]",
    "flip": "{tl}.flip({every}, {at[axis]})",
    "split": "{tl}.split({every})[{at[index]}]",
    "random": "{tl}.{at[fn]}({every}{more})",
}
TITLES = ("indices", "upstream", "recompute", "reverse", "write gradients")


@dataclass
class Scope:
    region: Region
    parent: Scope | None
    lines: list[list[str]] = field(default_factory=lambda: [[] for _ in range(5)])
    names: dict[Node, tuple[str, int]] = field(default_factory=dict)
    floor: dict[int, int] = field(default_factory=dict)  # scope -> latest section of it used from inside
    provides: dict[Node, Node] = field(default_factory=dict)  # carries that are read from a tape
    done: set[For | If] = field(default_factory=set)  # loops and branches that are written here
    own: set[str] = field(default_factory=set)  # names assigned here
    below: set[str] = field(default_factory=set)  # names assigned in loops that are closed

    def text(self) -> list[str]:
        return [line for section in self.lines for line in section]

    def chain(self) -> Iterator[Scope]:
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def inside(self, other: Scope) -> bool:
        return any(scope is other for scope in self.chain())

    def reach(self, scope: int, section: int) -> None:
        """Something in here uses a section of a scope around it."""
        self.floor[scope] = max(self.floor.get(scope, 0), section)


@dataclass
class Emitted:
    """One backward kernel as text, with what its launch has to pass."""

    name: str
    text: str
    params: list[str]  # of the forward, in order
    upstream: list[str]
    gradients: list[str]
    extra: list[str]
    constants: dict[str, str]  # of params, those it is compiled for, by its own names for them
    pids: int = 3


class Emitter:
    def __init__(
        self, kernel: Kernel, name: str, lines: list[str], constants: Constants | None = None
    ) -> None:
        """`constants`: of the launch, where the kernel is to be compiled for them."""
        self.kernel, self.name, self.source = kernel, name, lines
        self.constants, self.compiled = constants, Compiled()
        self.g: Graph = kernel.graph
        self.tl = kernel.tl
        self.reserved: set[str] = {self.tl, "triton", *keyword.kwlist, *kernel.args}
        self.reserved |= {gradient_name(n) for n in kernel.args}
        self.reserved |= {upstream_name(n, kernel.inplace) for n in kernel.inplace}
        self.reserved |= {n.attrs["name"] for n in kernel.graph.table.values() if n.attrs.get("global")}
        self.params: set[str] = set()
        self.upstream: dict[str, None] = {}
        self.gradients: dict[str, None] = {}
        self.extra: dict[str, None] = {}
        self.scope = Scope(self.g.top, None)
        self.stack = [self.scope]
        self.advised: set[str] = set()  # what a comment has said already
        self.inlining = False  # the condition of a while loop stands before its body

    # entry

    def emit(self, effects: list, decisions: list[str], tiles: int | None = None) -> Emitted:
        """`tiles` is the axis of the grid along which programs have tiles of one row."""
        self.demand = Demand(effects)
        self.reserved |= {n.attrs["name"] for n in self.demand.seen if n.attrs.get("elem")}
        self.sizes = set(nodes_in([dim for node in self.demand.seen for dim in node.shape]))
        self.places = places(self.demand, effects, self.g.top)
        if self.constants is not None:
            self.compiled = self.constants.of(self.demand)
            self.reserved.update(self.compiled.names.values())
            decisions = [*decisions, *self.compiled.notes]
        self.addresses = self._addresses(effects)
        # Tiles that are no indices: of whole numbers, too, they would be held through a loop if loaded early.
        outside = [n for n in nodes_in(effects) if n.home.parent is None]
        self.tiles = {n for n in outside if n.op == "load" and len(n.shape) > 1}
        self.tiles -= set(nodes_in(self.addresses))
        if tiles is not None:
            self._tiles_in_order(tiles)
        self.effects(effects)
        self._constants()
        body = self._sections()
        params = [n for n in self.kernel.args if n in self.params]
        constexprs = [n for n in params if self.kernel.args[n].kind == "constexpr"]
        compiled = {n: own for n, own in self.compiled.names.items() if n in params}
        runtime = [n for n in params if n not in constexprs and n not in compiled]
        up = [upstream_name(n, self.kernel.inplace) for n in self.upstream]
        grads = [gradient_name(n) for n in self.gradients if gradient_name(n) not in up]
        signature = [*runtime, *up, *grads, *self.extra]
        signature += [f"{n}: {self.tl}.constexpr" for n in (*constexprs, *compiled.values())]
        about = ["# assumptions and decisions"] * bool(decisions)
        about += ["# " + part for line in decisions for part in folded(f"- {line}", WIDTH - 6)]
        lines = [*about, *[""] * bool(decisions), *body]
        text = self.kernel_text(signature, lines)
        up, grads, extra = list(self.upstream), list(self.gradients), list(self.extra)
        return Emitted(self.name, text, params, up, grads, extra, compiled)

    def kernel_text(self, signature: list[str], lines: list[str]) -> str:
        """The kernel with these parameters and lines."""
        return self.function_text(self.name, signature, lines)

    def function_text(self, name: str, signature: list[str], lines: list[str]) -> str:
        """A jit function."""
        head = [f"def {name}({', '.join(signature)}):"]
        if len(head[0]) > WIDTH:
            head = [f"def {name}(", *("    " + line + "," for line in wrap(signature, WIDTH - 5)), "):"]
            if len(head) > 3:
                head[-1] += "  # fmt: skip"
        return "\n".join(["@triton.jit", *head, *indented(lines)]) + "\n"

    def _constants(self) -> None:
        """Numbers that the kernel is compiled for, as tensors: what else is written holds as it stands."""
        made = [n for n in self.compiled.names if n in self.compiled.tensors]
        lines = [f"{name} = {self.tensor(self.compiled.names[name], 'int32')}" for name in made]
        self.scope.lines[INDICES][:0] = lines

    def tensor(self, number: str, dtype: str) -> str:
        """A Python number as a tensor of a type; Triton refuses one that the type does not hold."""
        return f"{self.tl}.zeros([], {self.dtype(dtype)}) + {number}"

    def _tiles_in_order(self, axis: int) -> None:
        """A GPU starts programs along the grid's first axis: let those have the tiles of a row in turn."""
        row, tile = self.g.pid(0), self.g.pid(axis)
        if row not in self.demand.seen or self.demand.seen & {self.g.npid(0), self.g.npid(axis)}:
            return
        at, names = self.unique("at"), [self.unique("tile"), self.unique(row.hint or "pid")]
        first, count = f"{self.tl}.program_id(0)", f"{self.tl}.num_programs({axis})"
        programs = f"{self.tl}.program_id({axis}) * {self.tl}.num_programs(0) + {first}"
        self.line(INDICES, f"{at} = {programs}  # tiles of a row one after the other")
        self.line(INDICES, f"{', '.join(names)} = {at} % {count}, {at} // {count}")
        self.scope.names |= {tile: (names[0], INDICES), row: (names[1], INDICES)}

    def _addresses(self, effects: list) -> dict[Node, str]:
        """Offsets and masks, named after the first pointer that they are used with."""
        found: dict[Node, str] = {}
        for item in (*sorted(self.demand.seen, key=lambda n: n.id), *walk(effects)):
            if isinstance(item, Node) and item.op == "load":
                base, offset = item.args[:2]
                name = stem(base.attrs["name"])
            elif isinstance(item, GradWrite):
                name, offset = stem(item.base.attrs["name"]), item.offset
            elif isinstance(item, TapeStore):
                name, offset = item.buffer, item.index
            else:
                continue
            if name.startswith(("spill_", "tape_", "check_")):
                name = name.split("_")[0]
            found.setdefault(offset, f"{name}_offs")
        return found

    def _sections(self) -> list[str]:
        out: list[str] = []
        for title, lines in zip(TITLES, self.scope.lines, strict=True):
            if lines:
                out += [*[""] * bool(out), f"# {title}", *lines]
        return out or ["pass"]

    # effects

    def effects(self, effects: list) -> None:
        for effect in effects:
            if isinstance(effect, GradWrite):
                self.grad_write(effect)
            elif isinstance(effect, TapeStore):
                self.tape_store(effect)
            elif isinstance(effect, For) and effects_of(effect):
                self.loop(effect)
            elif isinstance(effect, If) and effects_of(effect):
                self.branch(effect)

    def grad_write(self, write: GradWrite) -> None:
        name = write.base.attrs["name"]
        self.gradients[name] = None
        start = gradient_name(name) if write.base.op == "param" else self.expr(write.base, 9)[0]
        pointer, value = (
            self.address(start, write.offset),
            self.expr(write.value, 9 * (write.kind == "add"))[0],
        )
        masked = [] if write.mask is None else [f"mask={self.expr(write.mask)[0]}"]
        if write.kind == "add":
            value = f"{self.tl}.load({', '.join([pointer, *masked])}) + {value}"
        parts = [pointer, value, *masked]
        if write.kind == "atomic_add":
            parts.append('sem="relaxed"')
        if write.advice:
            advice = "as above" if write.advice in self.advised else write.advice
            self.advised.add(write.advice)
            width = WIDTH - 4 * self.depth() - 2
            self.scope.lines[WRITE] += ["# " + line for line in folded(f"SCHEDULE: {advice}", width)]
        name = "atomic_add" if write.kind == "atomic_add" else "store"
        text = f"{self.tl}.{name}({', '.join(parts)})"
        if write.left_out:
            inner = break_line(text, WIDTH - 4 * self.depth() - 4)
            self.scope.lines[WRITE] += [f"if {start} is not None:", *indented(inner)]
        else:
            self.line(WRITE, text)

    def tape_store(self, store: TapeStore) -> None:
        self.extra[store.buffer] = None
        pointer = self.address(store.buffer, store.index)
        value, _ = self.expr(store.value)
        mask = "" if store.mask is None else f", mask={self.expr(store.mask)[0]}"
        self.line(WRITE, f"{self.tl}.store({pointer}, {value}{mask})")

    def address(self, pointer: str, offset: Node) -> str:
        return pointer if is_zero(offset) else f"{pointer} + {self.expr(offset, 9)[0]}"

    def line(self, section: int, text: str, note: int | None = None) -> None:
        if note is not None and 0 < note <= len(self.source):
            room = WIDTH - 4 - 4 * self.depth() - len(text)
            comment = statement(self.source, note)
            if room >= 24:
                comment = shortened(comment, room)
            if 0 < len(comment) <= room:
                text = f"{text}  # {comment}"
            else:
                above = shortened(f"# line {note}: {comment}", WIDTH - 4 * self.depth())
                self.scope.lines[section].append(above)
        self.scope.lines[section].extend(break_line(text, WIDTH - 4 * self.depth()))

    def depth(self) -> int:
        return sum(1 for _ in self.scope.chain())

    # loops and branches

    def open(self, region: Region) -> Scope:
        self.scope = Scope(region, self.scope)
        self.stack.append(self.scope)
        return self.scope

    def leave(self, loop: bool) -> int:
        """Forget the innermost scope; its names may be used again in sibling loops, never across an `if`.
        Returns the latest section of the outer scope that it uses."""
        inner = self.stack.pop()
        outer = inner.parent
        assert outer is not None
        (outer.below if loop else outer.own).update(inner.own)
        outer.below |= inner.below
        self.scope = outer
        section = inner.floor.pop(id(outer), 0)
        for scope, used in inner.floor.items():
            outer.reach(scope, used)
        return section

    def loop(self, loop: For) -> None:
        if loop in self.scope.done:
            return
        self.scope.done.add(loop)
        if loop.source is not None and loop.source.tape:
            self.loop(loop.source)
        need = sorted(self.demand.need.get(loop, ()))
        carries = [loop.carries[k] for k in need]
        section = REVERSE if loop.order != "forward" or loop.source is not None else RECOMPUTE
        inits: list[str] = []
        names = {}
        for carry in carries:
            text, s = self.initial(carry, loop.region in self.compiled.unrolled)
            names[carry.phi] = self.unique(carry.phi.hint or "carry")
            section = max(section, s)
            inits.append(f"{names[carry.phi]} = {text}")
        outer = self.scope
        inner = self.open(loop.region)
        self.scope = outer
        head, prologue, s = self.header(loop, inner)
        section = max(section, s)
        self.scope = inner
        inner.provides = loop.provides
        for phi, name in names.items():
            inner.names[phi] = (name, INDICES)
        if loop.region.iv is not None:
            inner.names[loop.region.iv] = (prologue[0], INDICES)
        inner.lines[INDICES].extend(prologue[1:])
        if loop.cond is not None:
            self.inlining = True
            head = f"while {self.expr(loop.cond)[0]}:"
            self.inlining = False
        for store in loop.tape:
            self.tape_store(store)
        self.effects(loop.effects)
        updates = []
        for carry in carries:
            text = self.last(carry.next)  # type: ignore[arg-type]
            if text != names[carry.phi]:
                updates.append((names[carry.phi], text, carry))
        self.update(updates)
        section = max(section, self.leave(loop=loop.region not in self.compiled.unrolled))
        lines, barrier = outer.lines[section], f"{self.tl}.debug_barrier()"
        if loop.waits or loop.tape and outer.parent is not None:
            lines.append(barrier)
        lines += [*inits, *self.walked(loop, head, inner, [names[carry.phi] for carry in carries])]
        if loop.tape:
            lines.append(barrier)
        for k in need:
            if k in loop.outs:
                outer.names[loop.outs[k]] = (names[loop.carries[k].phi], section)

    def walked(self, loop: For, head: str, inner: Scope, carries: list[str]) -> list[str]:
        """The lines of a loop with this head and what its scope holds, which assigns these carries."""
        return [head, *indented(inner.text() or ["pass"])]

    def initial(self, carry: Carry, unrolled: bool = False) -> tuple[str, int]:
        text, section = self.expr(carry.init)
        if unrolled and not carry.phi.shape and python_number(carry.init):  # no loop makes it a tensor
            return f"{self.tl}.full([], {text}, {self.dtype(carry.phi.dtype)})", section
        if carry.init.op == "const" and carry.phi.shape:
            return self.full(carry.init.value, carry.phi.shape, carry.phi.dtype), section
        return text, section

    def header(self, loop: For, inner: Scope) -> tuple[str, list[str], int]:
        """The head of a loop, the name of its variable and the lines that open its body."""
        region = loop.region
        if region.bounds is None or region.iv is None:
            return "", ["_"], INDICES
        if region in self.compiled.unrolled:
            return self.unrolled(loop, inner)
        lo, hi, step = region.bounds
        (lo_text, s1), (hi_text, s2), (step_text, s3) = self.expr(lo, 9), self.expr(hi), self.expr(step, 10)
        section = max(s1, s2, s3)
        reverse, unit = loop.order == "reverse", is_number(step, 1)
        # Triton 3.6 (TritonGPURemoveLayoutConversions) takes a lower bound that an enclosing loop carries
        # for its first value, in every iteration: count from zero instead.
        counted = not reverse and carried(lo)
        span_text = f"{self.expr(hi, 9)[0]} - {self.expr(lo, 10)[0]}"
        self.scope, outer = inner, self.scope
        name = self.unique(region.iv.hint or "i")
        back = self.unique("back") if reverse or counted else ""
        self.scope = outer
        if counted:
            line = f"{name} = {lo_text} + {back} * {step_text}"
            trips = f"{self.tl}.cdiv({span_text}, {step_text})"
        elif not reverse:
            parts = [self.expr(lo)[0], hi_text, self.expr(step)[0]]
            if unit:
                parts = parts[1:2] if is_zero(lo) else parts[:2]
            if region.stages:
                stages = f"num_stages={region.stages}"
                return f"for {name} in {self.tl}.range({', '.join([*parts, stages])}):", [name], section
            return f"for {name} in {region.call}({', '.join(parts)}):", [name], section
        elif unit:
            trips = hi_text if is_zero(lo) else span_text
            line = f"{name} = {self.expr(hi, 9)[0]} - 1 - {back}"
        else:
            span = self.expr(hi, 10)[0].strip("()") if is_zero(lo) else span_text
            trips = f"{self.tl}.cdiv({span}, {step_text})"
            start = "" if is_zero(lo) else f"{lo_text} + "
            line = f"{name} = {start}({trips} - 1 - {back}) * {step_text}"
        return f"for {back} in {region.call}({trips}):", [name, line], section

    def unrolled(self, loop: For, inner: Scope) -> tuple[str, list[str], int]:
        """The same of a loop whose bounds are numbers. Its variable is a tensor, as a loop has it; one that
        the forward calls `_` has a name, as two underscores begin what no kernel may name."""
        region = loop.region
        assert region.iv is not None
        self.scope, outer = inner, self.scope
        hint = region.iv.hint or ""
        name = self.unique(hint if hint.strip("_") else "i")
        number = self.unique(f"{name}_const")
        self.scope = outer
        self.params |= self.compiled.bounding(region)
        head = f"for {number} in {self.tl}.static_range({self.compiled.steps(loop)}):"
        return head, [name, f"{name} = {self.tensor(number, region.iv.dtype)}"], INDICES

    def update(self, updates: list[tuple[str, str, Carry]]) -> None:
        """Assign the carries of the next iteration, all at once where one needs another's old value."""
        needs = {name: self.inline_phis(carry.next) - {carry.phi} for name, _, carry in updates}  # type: ignore[arg-type]
        ordered: list[tuple[str, str, Carry]] = []
        rest = list(updates)
        while rest:  # next comes one whose old value none of the others needs
            free = [u for u in rest if not any(u[2].phi in needs[o[0]] for o in rest if o is not u)]
            if not free:
                left, right = ", ".join(u[0] for u in updates), ", ".join(u[1] for u in updates)
                self.line(WRITE, f"{left} = {right}")
                return
            ordered.append(free[0])
            rest.remove(free[0])
        for name, text, _ in ordered:
            self.assign(name, text)

    def assign(self, name: str, text: str) -> None:
        for sign in "+-":
            start = f"{name} {sign} "
            if text.startswith(start) and (sign == "+" or one_term(text[len(start) :])):
                self.line(WRITE, f"{name} {sign}= {text[len(start) :]}")
                return
        self.line(WRITE, f"{name} = {text}")

    def accumulator(self, out: Node) -> str | None:
        """The carry that an `if` adds to, when nothing else needs its old value: it is updated in place."""
        for side, other in (("then", "other"), ("other", "then")):
            phi, new = out.attrs[side], out.attrs[other]
            if phi is None or new is None or phi.op != "phi" or phi not in self.scope.names:
                continue
            steps = {loop.carries[k].next for loop, k in self.demand.owner.get(phi, ())}
            few = self.demand.uses[phi] <= 2 and self.demand.uses[out] <= 1
            if few and steps == {out} and phi in new.args:
                return self.scope.names[phi][0]
        return None

    def last(self, node: Node) -> str:
        """Text of a value that is assigned to a carry or a merged name: it needs no name of its own."""
        once = self.demand.uses[node] <= 1 and self.home(node) is self.scope.region
        if once and self.find(node) is None and node.op not in ("loopout", "ifout", "phi"):
            return self.render(node)[0]
        return self.expr(node)[0]

    def inline_phis(self, node: Node) -> set[Node]:
        """Carries that the printed text of `node` mentions."""
        if node.op == "phi":
            return {node}
        if self.find(node) is not None:
            return set()
        return set().union(*(self.inline_phis(a) for a in node.args)) if node.args else set()

    def branch(self, stmt: If) -> None:
        if stmt in self.scope.done:
            return
        self.scope.done.add(stmt)
        cond, section = self.expr(stmt.cond)
        outs = list(dict.fromkeys(self.demand.ifs.get(stmt, ())))
        if len(outs) == 1 and not effects_of(stmt) and self.choice(outs[0], cond, section):
            return
        names = {out: self.accumulator(out) or self.unique(out.hint or "value") for out in outs}
        outer, blocks = self.scope, []
        for region, effects, side in (
            (stmt.then, stmt.then_effects, "then"),
            (stmt.other, stmt.other_effects, "other"),
        ):
            inner = self.open(region)
            self.effects(effects)
            for out in outs:
                value = out.attrs[side]
                if value is None:
                    if out.attrs.get("named"):
                        self.assign(names[out], "0")
                    continue
                text = self.last(value)
                if text == names[out]:
                    continue
                if value.op in ("const", "full") and not stmt.static and out.is_float:
                    number = value if value.op == "const" else value.args[0]
                    text = self.full(number.value, out.shape, out.dtype)
                self.assign(names[out], text)
            section = max(section, self.leave(loop=False))
            blocks.append(indented(inner.text()))
        reverse = effects_of(stmt) or any(out.upstream for out in outs)
        least = REVERSE if reverse else RECOMPUTE if any(o.is_float for o in outs) else INDICES
        section = max(section, least)
        lines, (then, other) = outer.lines[section], blocks
        if then:
            lines += [f"if {cond}:", *then, *(["else:", *other] if other else [])]
        elif other:
            lines += [f"if {negated(cond)}:", *other]
        for out in outs:
            outer.names[out] = (names[out], section)

    def choice(self, out: Node, cond: str, section: int) -> bool:
        """A merged value with two short sides is a conditional expression."""
        sides = [out.attrs["then"], out.attrs["other"]]
        if any(side is None or side.shape or not self.short(side) for side in sides):
            return False
        texts = [self.expr(side) for side in sides]
        section = max([section, *(s for _, s in texts), self.own_section(out)])
        name = self.unique(out.hint or "t")
        kind = f": {self.tl}.constexpr" if out in self.sizes else ""
        self.line(section, f"{name}{kind} = {texts[0][0]} if {cond} else {texts[1][0]}")
        self.scope.names[out] = (name, section)
        return True

    def short(self, node: Node, size: int = 4) -> bool:
        """Whether a value prints inline without a statement of its own, wherever it lives."""
        if node.op in ("const", "constexpr", "param", "iv", "phi") or self.find(node) is not None:
            return size > 0
        if node.op not in ARITHMETIC or self.demand.uses[node] > 1 or node.hint:
            return False
        if not self.home(node).inside(self.scope.region):
            return False
        return size > 0 and all(self.short(a, size - len(node.args)) for a in node.args)

    # values

    def find(self, node: Node) -> tuple[str, int] | None:
        for scope in self.scope.chain():
            if node in scope.names:
                name, section = scope.names[node]
                if scope is self.scope:
                    return name, section
                self.scope.reach(id(scope), section)
                return name, INDICES
        return None

    def unique(self, hint: str) -> str:
        """A name that means nothing else here: in no open scope, and in no closed loop inside this one."""
        unrolled = self.compiled.unrolled  # an `if` hides nothing, nor does a loop that is none
        scope = next(s for s in self.scope.chain() if s.region.cond is None and s.region not in unrolled)
        inner = [s for s in self.stack if s.inside(scope)]
        around = [s for s in self.stack if scope.inside(s)]
        taken = self.reserved.union(*(s.own for s in (*around, *inner)), *(s.below for s in inner))
        name, n = hint, 1
        while name in taken:
            n += 1
            name = f"{hint}_{n}"
        self.scope.own.add(name)
        return name

    def expr(self, node: Node, prec: int = 0) -> tuple[str, int]:
        """Text of a value for use in the current scope, and the latest section it depends on."""
        known = self.find(node)
        if known is not None:
            return known
        if node.op == "phi":
            return self.taped(node)
        if node.op not in ("loopout", "ifout") and self.inline(node):
            text, own, section = self.render(node)
            return (f"({text})" if own < prec else text), section
        self.at_home(node)
        known = self.find(node)
        assert known is not None, f"{node!r} of line {node.line} was not defined where it is used"
        return known

    def taped(self, phi: Node) -> tuple[str, int]:
        for scope in reversed(self.stack):
            if phi in scope.provides:
                return self.expr(scope.provides[phi])
        raise AssertionError(f"the carry {phi.hint} of line {phi.line} is used outside its loop")

    def home(self, node: Node) -> Region:
        return self.places.get(node, node.home)

    def at_home(self, node: Node) -> None:
        """Write what gives a value its name, in the scope where it lives."""
        here, home = self.scope, self.home(node)
        scope = next((scope for scope in here.chain() if scope.region is home), None)
        assert scope is not None, f"{node!r} of line {node.line} has no home here"
        self.scope = scope
        if node.op == "loopout":
            self.loop(node.attrs["loop"])
        elif node.op == "ifout":
            self.branch(node.attrs["if"])
        else:
            self.define(node)
        self.scope = here

    def define(self, node: Node) -> None:
        text, _, section = self.render(node)
        section = max(section, self.own_section(node))
        name = self.unique(node.hint or suggested(node, self.addresses))
        adjoint = node.reverse and node.is_float and node.hint is not None
        kind = f": {self.tl}.constexpr" if node in self.sizes else ""  # else a number is a tensor
        self.line(section, f"{name}{kind} = {text}", node.line if adjoint else None)
        self.scope.names[node] = (name, section)

    def own_section(self, node: Node) -> int:
        if not node.upstream:
            return RECOMPUTE if node.is_float or node in self.tiles else INDICES
        loaded = node.op in ("load", "cast") and node.args[0].op in ("param", "load")
        return UPSTREAM if loaded else REVERSE

    def inline(self, node: Node) -> bool:
        if node.op in TRIVIAL or (self.inlining and self.home(node) is self.scope.region):
            return True
        if node.op == "cast" and self.demand.uses[node] > 1 and python_number(node.args[0]):
            return False
        if node.op == "pid":
            return not node.hint and self.demand.uses[node] <= 1
        if node.op == "expand" or (node.op in ("neg", "cast", "permute", "not") and self.find(node.args[0])):
            return not node.hint
        if self.uniform(node, 4) and not node.hint:
            return True
        if node in self.addresses and not self.brief(node, 5):
            return False
        if not self.home(node).inside(self.scope.region):
            return False
        nameless = not node.hint or node.reverse and not node.hint.startswith("d_")
        return self.demand.uses[node] <= 1 and nameless

    def brief(self, node: Node, size: int) -> bool:
        """Whether an address reads well inside a call."""
        if self.find(node) is not None or node.op in BRIEF:
            return size > 0
        return size > 0 and all(self.brief(a, size - len(node.args)) for a in node.args)

    def uniform(self, node: Node, size: int) -> bool:
        """A small scalar of parameters: cheap enough to repeat."""
        if node.op in ("const", "constexpr", "param"):
            return size > 0
        if node.shape or node.is_float or node.op not in (*ARITHMETIC, "compare", "isnone", "not"):
            return False
        return size > 0 and all(self.uniform(a, size - len(node.args)) for a in node.args)

    # text of one operation

    def render(self, node: Node) -> tuple[str, int, int]:
        """Text, precedence, section."""
        section = INDICES

        def sub(arg: Node, prec: int = 0) -> str:
            nonlocal section
            text, s = self.expr(arg, prec)
            section = max(section, s)
            return text

        op, args = node.op, node.args
        if op in INFIX:
            symbol, prec = INFIX[op]
            left, right = args
            alike = left.dtype == right.dtype and left.shape == right.shape
            product = op == "add" and right.op == "dot" and not right.attrs.get("small")
            if product and alike and self.inline(right):
                return self._dot(right, sub, sub(left)), ATOM, section
            return f"{sub(left, prec)} {symbol} {sub(right, prec + 1)}", prec, section
        if op == "compare":
            return f"{sub(args[0], 5)} {node.attrs['cmp']} {sub(args[1], 5)}", 4, section
        if op == "select":
            cond, a, b = args
            return f"{sub(a, 1)} if {sub(cond, 1)} else {sub(b)}", 0, section
        if op in ("neg", "invert"):
            return f"{'-' if op == 'neg' else '~'}{sub(args[0], 11)}", 11, section
        if op == "not":
            if args[0].op == "isnone":
                return f"{sub(args[0].args[0], 5)} is not None", 4, section
            if args[0].op == "compare" and args[0].attrs["cmp"] == "==" and self.find(args[0]) is None:
                left, right = args[0].args
                return f"{sub(left, 5)} != {sub(right, 5)}", 4, section
            return f"not {sub(args[0], 3)}", 3, section
        if op == "isnone":
            return f"{sub(args[0], 5)} is None", 4, section
        if op in ("expand", "cast", "load", "dot"):
            text = getattr(self, f"_{op}")(node, sub)
            return text, ATOM, section
        if op == "const":
            text = number_text(node.value)
            return text, 11 if text.startswith("-") else ATOM, section
        if op in ("constexpr", "param"):
            name = node.attrs["name"]
            self.compiled.tensors.add(name)
            asked = node.attrs.get("of", (name,))  # a question about the types of pointers names those
            if all(one in self.kernel.args for one in asked):
                self.params.update(asked)
            elif not node.attrs.get("global"):
                self.extra[name] = None
            return name, ATOM, section
        return self._function(node, sub), ATOM, section

    def _function(self, node: Node, sub) -> str:
        op, args, at, tl = node.op, node.args, node.attrs, self.tl
        if op == "entry":
            at_index = self._table(node) + ("" if is_zero(args[1]) else f" + {sub(args[1], 9)}")
            return f"{tl}.load({at_index}).to({tl}.pointer_type({self.dtype(at['elem'])}))"
        if op == "full":
            return self.full(args[0].value, node.shape, node.dtype)
        texts = [sub(arg) for arg in args]
        if op in ("broadcast", "reshape"):
            name = "broadcast_to" if op == "broadcast" else op
            return f"{tl}.{name}({texts[0]}, {self.shape(node.shape)})"
        if op == "permute":
            order = at["order"]
            return (
                f"{tl}.trans({texts[0]})" if order == (1, 0) else f"{tl}.permute({texts[0]}, {list(order)})"
            )
        if op == "user":
            return at["text"].format(*texts)
        if op == "call" and at["fn"] == "tanh" and node.dtype == "float32" and node.shape:
            return f"{TANH}({texts[0]})"
        if op in ("call", "next_power_of_2"):
            return f"{at.get('text') or self.named(at['fn'])}({', '.join(texts)})"
        back = ", reverse=True" if at.get("reverse") else ""
        more = "" if at.get("rounds") is None else f", n_rounds={at['rounds']}"
        return CALLS[op].format(*texts, tl=tl, every=", ".join(texts), back=back, more=more, at=at)

    def named(self, name: str) -> str:
        """A function that only the backward calls."""
        return f"{self.tl}.{name}" if hasattr(triton.language, name) else f"{self.tl}.extra.libdevice.{name}"

    def _table(self, entry: Node) -> str:
        """The table that an entry is read from: the forward's, or one that the host makes for gradients."""
        name, role = entry.attrs["name"], entry.attrs["role"]
        if role == "forward":
            self.params.add(name)
            return name
        (self.upstream if role == "upstream" else self.gradients)[name] = None
        return gradient_name(name)

    def _expand(self, node: Node, sub) -> str:
        axes, inner = [], node
        while inner.op == "expand" and self.find(inner) is None and (inner is node or not inner.hint):
            axes.append(inner.attrs["axis"])
            inner = inner.args[0]
        again = inner.op == "div" or inner.op == "mul" and any(arg.op == "reduce" for arg in inner.args)
        if again and self.demand.uses[node] > 1 and self.find(inner) is None:
            self.at_home(inner)  # each use would divide, or sum, again
        if not inner.shape:
            return sub(inner, 10)
        index = [":"] * len(inner.shape)
        for axis in reversed(axes):
            index.insert(axis, "None")
        return f"{sub(inner, ATOM)}[{', '.join(index)}]"

    def _cast(self, node: Node, sub) -> str:
        (arg,), to = node.args, node.attrs["to"]
        if arg.op == "const":
            return number_text(float(arg.value) if is_float(to) else int(arg.value))
        if arg.op == "constexpr" or (not arg.shape and python_number(arg)):
            return f"{self.tl}.full([], {sub(arg)}, {self.dtype(to)})"
        return f"{sub(arg, ATOM)}.to({self.dtype(to)})"

    def _load(self, node: Node, sub) -> str:
        base, offset, *rest = node.args
        name = base.attrs["name"]
        if base.op == "entry":
            name = sub(base, 9)
        elif node.attrs.get("upstream"):
            self.upstream[name] = None
            name = upstream_name(name, self.kernel.inplace)
        elif node.attrs.get("buffer"):
            self.extra[name] = None
        else:
            self.params.add(name)
        parts = [name if is_zero(offset) else f"{name} + {sub(offset, 9)}"]
        if rest:
            parts.append(f"mask={sub(rest[0])}")
        if len(rest) == 2:
            plain = rest[1].op == "const" and node.is_float
            parts.append(f"other={number_text(float(rest[1].value)) if plain else sub(rest[1])}")
        return f"{self.tl}.load({', '.join(parts)})"

    def _dot(self, node: Node, sub, acc: str | None = None) -> str:
        parts = [sub(node.args[0]), sub(node.args[1])]
        if node.attrs.get("small"):
            precision = node.attrs["precision"]
            return f"{SMALL_DOT}({', '.join(parts)}, {json.dumps(precision) if precision else None})"
        if acc is not None:
            parts.append(acc)
        if node.attrs["precision"] is not None:
            parts.append(f'input_precision="{node.attrs["precision"]}"')
        if node.dtype not in ("float32", "float64"):
            parts.append(f"out_dtype={self.dtype(node.dtype)}")
        return f"{self.tl}.dot({', '.join(parts)})"

    def dtype(self, dtype: str) -> str:
        text = dtype_text(dtype, self.tl)
        if dtype.startswith("$"):
            self.params.add(text.split(".")[0])
        return text

    def shape(self, shape: tuple) -> str:
        return "[" + ", ".join(self.expr(dim)[0] for dim in shape) + "]"

    def full(self, value: float, shape: tuple, dtype: str) -> str:
        if value == 0 and shape:
            return f"{self.tl}.zeros({self.shape(shape)}, {self.dtype(dtype)})"
        return f"{self.tl}.full({self.shape(shape)}, {number_text(value)}, {self.dtype(dtype)})"
