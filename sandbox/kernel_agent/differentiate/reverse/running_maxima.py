"""Running maxima that only keep numbers small: found, proven to be without effect on outputs, taken out.

Softmax subtracts a maximum that cancels in the result. A value's *shift type* says how it answers when such a
maximum m is moved by t: a `scale` of weight w is multiplied by exp(w t), a `shift` of weight w grows by w t.
If every output has weight 0 the maximum is detached: it gets no adjoint. A maximum is many numbers,
each moved for itself: along the axes of its block, and in the steps of a loop. A weight is of one number: it
tells along which axes of a value the maximum's lie, and what mixes these, or steps, has no shift type.
In an online softmax the old and the new maximum of each step are moved independently; if the other carries
have one weight before and after the step, the loop may use the final maximum from the start: exp(m_old -
m_new) becomes 1 and the loop is of class B (telescoping). Both are proofs over the whole kernel, not tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import NamedTuple

from ..ir.kinds import LANEWISE
from ..ir.nodes import (
    Carry,
    For,
    If,
    Node,
    Store,
    beneath,
    bodies,
    nodes_in,
    operands,
    reachable,
    sides,
    walk,
)
from ..ir.report import LineReport
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_minus_inf, is_zero
from ..ir.values import Kernel, loop_out
from ..prove.masks import upper_bounds


class Symbol(NamedTuple):
    """A maximum that may be moved, and for each of its axes that of the value along which it lies, counted
    from the last one: -1; None for an axis of one element."""

    node: Node
    axes: tuple[int | None, ...]


Weights = tuple[tuple[Symbol, float], ...]
Factors = tuple[tuple[tuple[int | None, ...], float], ...]  # of one maximum: where its axes lie, and weights


@dataclass(frozen=True)
class Shift:
    """kind: scale, shift, zero (any scale), floor (-inf: any shift), unknown (with the symbols to blame)."""

    kind: str
    weights: Weights = ()

    @property
    def invariant(self) -> bool:
        return self.kind in ("zero", "floor") or (self.kind != "unknown" and not self.weights)

    @property
    def symbols(self) -> set[Node]:
        return {s.node for s, _ in self.weights}

    def moved(self, table: dict[Node, Node]) -> Shift:
        """In terms of other symbols."""
        return Shift(
            self.kind, tuple((s._replace(node=table.get(s.node, s.node)), w) for s, w in self.weights)
        )

    def placed(self, where: Callable[[int], int | None]) -> Shift:
        """With the axes of the value, which count from the last one, elsewhere; where some axis of a maximum
        is gone, or two change places, nothing is known."""
        found, lost = [], set()
        for symbol, weight in self.weights:
            axes = tuple(axis if axis is None else where(axis) for axis in symbol.axes)
            left = [axis for axis in axes if axis is not None]
            if axes.count(None) > symbol.axes.count(None) or left != sorted(left):
                lost.add(symbol.node)
            found.append((symbol._replace(axes=axes), weight))
        return _blamed(lost) if lost else Shift(self.kind, tuple(found))


INVARIANT = Shift("scale")


@dataclass(eq=False)
class Online:
    """A loop that carries a running maximum, and the weights of its other carries."""

    loop: For
    index: int
    new: Node  # the maximum after the step
    weights: dict[int, Factors] = field(default_factory=dict)


def _plus(a: Weights, b: Weights, sign: int = 1) -> Weights:
    total = dict(a)
    for symbol, weight in b:
        total[symbol] = total.get(symbol, 0) + sign * weight
    return _sorted(total)


def _sorted(weights: dict[Symbol, float]) -> Weights:
    def key(item: tuple[Symbol, float]) -> tuple:
        return item[0].node.id, tuple(axis or 0 for axis in item[0].axes)

    return tuple(sorted(((s, w) for s, w in weights.items() if w), key=key))


def _symbol(node: Node) -> Shift:
    rank = len(node.shape)
    one = [dim.op == "const" and dim.value == 1 for dim in node.shape]
    return Shift(
        "shift", ((Symbol(node, tuple(None if one[axis] else axis - rank for axis in range(rank))), 1.0),)
    )


def _unknown(*types: Shift) -> Shift:
    """Of values that have no shift type already, their symbols alone are to blame."""
    lost = [t for t in types if t.kind == "unknown"]
    return _blamed({s for t in lost or types for s in t.symbols})


def _blamed(nodes: set[Node]) -> Shift:
    return Shift("unknown", tuple((Symbol(node, ()), 1.0) for node in nodes))


class Analysis:
    """Shift types of one kernel for a set of candidate maxima; these nodes are the symbols."""

    def __init__(self, kernel: Kernel, blocks: set[Node], online: dict[For, Online], base: str) -> None:
        self.kernel, self.blocks, self.online, self.base = kernel, blocks, online, base
        self.types: dict[Node, Shift] = {}
        self.family: dict[Node, Online | None] = {}  # results of online loops that are maxima

    def blame(self) -> set:
        """Symbols on which some output depends."""
        found: set = set()
        for effect in walk(self.kernel.effects):
            if isinstance(effect, Store):
                kinds = [self.of(n) for n in (effect.value, effect.offset, effect.mask) if n is not None]
                found = found.union(*(kind.symbols for kind in kinds if not kind.invariant))
            elif isinstance(effect, If):
                found |= self.of(effect.cond).symbols
            elif isinstance(effect, For):
                asked = [n for n in (*(effect.region.bounds or ()), effect.cond) if n is not None]
                found = found.union(*(self.of(node).symbols for node in asked))
        return found

    def of(self, node: Node) -> Shift:
        if node not in self.types:
            self.types[node] = _symbol(node) if node in self.blocks else self._of(node)
        return self.types[node]

    def _of(self, node: Node) -> Shift:
        if is_zero(node):
            return Shift("zero")
        if is_minus_inf(node):
            return Shift("floor")
        if node.op == "loopout":
            return self._loop(node.attrs["loop"], node.attrs["index"])
        if node.op == "ifout":
            return self._ifout(node)
        args = [self.of(arg) for arg in node.args]
        if all(t.kind != "unknown" and not t.weights for t in args):
            return INVARIANT
        rule = getattr(self, "_" + node.op, None)
        return rule(node, args) if rule else _unknown(*args)

    def _add(self, node: Node, args: list[Shift]) -> Shift:
        a, b = args
        if "zero" in (a.kind, b.kind):
            return b if a.kind == "zero" else a
        if "floor" in (a.kind, b.kind):
            return Shift("floor")
        if a.kind == b.kind == "scale" and a.weights == b.weights:
            return a
        return self._shifted(a, b, 1)

    def _sub(self, node: Node, args: list[Shift]) -> Shift:
        a, b = args
        if a.kind == "floor":
            return a
        if a.kind == b.kind == "scale" and a.weights == b.weights and a.weights:
            return a
        return self._shifted(a, b, -1)

    def _shifted(self, a: Shift, b: Shift, sign: int) -> Shift:
        if any(t.kind not in ("shift", "scale") or (t.kind == "scale" and t.weights) for t in (a, b)):
            return _unknown(a, b)
        return Shift("shift", _plus(a.weights, b.weights, sign))

    def _neg(self, node: Node, args: list[Shift]) -> Shift:
        (a,) = args
        return Shift("shift", _plus((), a.weights, -1)) if a.kind == "shift" else a

    def _mul(self, node: Node, args: list[Shift]) -> Shift:
        (a, b), over = args, node.op == "div"
        if a.kind == "zero":
            return a
        if any(t.kind in ("unknown", "floor") or (t.kind == "shift" and t.weights) for t in args):
            return _unknown(*args)
        if b.kind == "zero":
            return _unknown(*args) if over else b
        return Shift("scale", _plus(a.weights, b.weights, -1 if over else 1))

    _div = _mul

    def _dot(self, node: Node, args: list[Shift]) -> Shift:
        a, b = args
        rows = a.placed(lambda axis: None if axis == -1 else axis)
        columns = b.placed(lambda axis: None if axis == -2 else axis)
        return self._mul(node, [rows, columns])

    def _compare(self, node: Node, args: list[Shift]) -> Shift:
        """With 0: what is scaled keeps its sign."""
        kinds = {t.kind for t in args}
        return INVARIANT if kinds == {"zero", "scale"} else _unknown(*args)

    def _reduce(self, node: Node, args: list[Shift]) -> Shift:
        passing = ("scale", "zero") if node.attrs["fn"] == "sum" else ("shift", "scale")
        gone = node.attrs["axis"] - len(node.args[0].shape)
        found = args[0].placed(lambda axis: None if axis == gone else axis + (axis < gone))
        return found if args[0].kind in passing else _unknown(*args)

    def _same(self, node: Node, args: list[Shift]) -> Shift:
        return args[0]

    _cast = _broadcast = _full = _same

    def _expand(self, node: Node, args: list[Shift]) -> Shift:
        new = node.attrs["axis"] - len(node.shape)
        return args[0].placed(lambda axis: axis - (axis <= new))

    def _permute(self, node: Node, args: list[Shift]) -> Shift:
        order, rank = node.attrs["order"], len(node.shape)
        return args[0].placed(lambda axis: order.index(axis + rank) - rank)

    def _flip(self, node: Node, args: list[Shift]) -> Shift:
        flipped = node.attrs["axis"] - len(node.shape)
        return args[0].placed(lambda axis: None if axis == flipped else axis)

    def _reshape(self, node: Node, args: list[Shift]) -> Shift:
        """An axis stays one where no other before it, or none after it, is changed."""
        old, new = node.args[0].shape, node.shape

        def where(axis: int) -> int | None:
            if old[axis:] == new[axis:] and len(new) >= -axis:
                return axis
            first = axis + len(old)
            return first - len(new) if old[: first + 1] == new[: first + 1] else None

        return args[0].placed(where)

    def _where(self, node: Node, args: list[Shift]) -> Shift:
        cond, a, b = args
        if not cond.invariant:
            return _unknown(*args)
        found = self._either(a, b)
        if found.kind == "unknown" and a.kind != "unknown" and self.unseen(node):
            return a  # rows beyond the end hold a number that only keeps them finite
        return found

    def unseen(self, node: Node) -> bool:
        """Whether lanes that a `where` replaces are stored nowhere: every store leaves them out."""
        cond = beneath(node.args[0], "expand", "broadcast")
        replaced = upper_bounds(node.args[0], len(node.shape))
        if cond.op != "compare" or len(replaced) != 1:
            return False
        ((index, bound, axis),) = replaced
        stack: list[tuple[Node, int]] = [(node, axis)]
        while stack:
            item, axis = stack.pop()
            for user in self.users.get(item, ()):
                if isinstance(user, Store):
                    if user.value is not item or user.mask is None:
                        return False
                    if (index, bound, axis) not in upper_bounds(user.mask, len(item.shape)):
                        return False
                elif not isinstance(user, Node) or user.op not in LANEWISE:
                    return False
                elif user.op == "expand":
                    stack.append((user, axis + (axis >= user.attrs["axis"])))
                else:
                    stack.append((user, axis + len(user.shape) - len(item.shape)))
        return True

    @cached_property
    def users(self) -> dict[Node, list]:
        found: dict[Node, list] = {}
        for item in reachable(self.kernel.effects):
            for part in operands(item):
                if isinstance(part, Node):
                    found.setdefault(part, []).append(item)
        return found

    def _either(self, a: Shift, b: Shift) -> Shift:
        if a == b:
            return a
        for one, other in ((a, b), (b, a)):
            if one.kind == "zero" and other.kind == "scale":
                return other
            if one.kind == "floor" and other.kind == "shift":
                return other
        return INVARIANT if a.invariant and b.invariant else _unknown(a, b)

    def _call(self, node: Node, args: list[Shift]) -> Shift:
        name, (a, *_) = node.attrs["fn"], args
        if name == f"exp{self.base}" and a.kind in ("shift", "floor"):
            return Shift("scale", a.weights) if a.kind == "shift" else Shift("zero")
        if name == f"log{self.base}" and a.kind == "scale":
            return Shift("shift", a.weights)
        return _unknown(*args)

    def _ifout(self, node: Node) -> Shift:
        cond = self.of(node.args[0])
        types = [self.of(side) for side in sides(node)]
        if not cond.invariant:
            return _unknown(cond, *types)
        if self.merges(node):
            self.family[node] = None
            return _symbol(node)
        types = [self._renamed(node, t) for t in types]
        free = [
            t == INVARIANT and self._floored(node, side) for t, side in zip(types, sides(node), strict=True)
        ]
        if all(free):
            return INVARIANT
        return reduce(self._either, [Shift("zero") if f else t for t, f in zip(types, free, strict=True)])

    def _floored(self, node: Node, side: Node) -> bool:
        """Whether a number is chosen together with a maximum of -inf: it is scaled to 0 in the next step."""
        taken = "then" if side is node.attrs["then"] else "other"
        merged = [out for out in node.attrs["if"].outs if self.merges(out)]
        return not side.active and any(is_minus_inf(out.attrs[taken]) for out in merged if out.attrs[taken])

    def merges(self, node: Node) -> bool:
        """Whether an `if` chooses between running maxima here."""
        chosen = [side for side in sides(node) if side.is_float]
        for side in chosen:
            self.of(side)
        return any(side in self.family for side in chosen)

    def _renamed(self, node: Node, kind: Shift) -> Shift:
        """In terms of the merged maximum of the same `if`, where a branch is in terms of its own."""
        weights = dict(kind.weights)
        for out in node.attrs["if"].outs:
            own = {out.attrs["then"], out.attrs["other"]}
            mine = [symbol for symbol in weights if symbol.node in own]
            if mine and self.merges(out):
                for symbol in mine:
                    weights[symbol._replace(node=out)] = weights.pop(symbol)
        return Shift(kind.kind, _sorted(weights))

    def _loop(self, loop: For, index: int) -> Shift:
        online = self.online.get(loop)
        if online is not None and index == online.index:
            out = loop_out(self.kernel.graph, loop, index)
            self.family[out] = online
            return _symbol(out)
        self._body(loop, online)
        carry = loop.carries[index]
        kind = self.types.get(carry.phi, INVARIANT)
        if online is None:
            return kind
        phi = loop.carries[online.index].phi
        out = loop_out(self.kernel.graph, loop, online.index)
        self.of(out)
        return kind.moved({phi: out})

    def _body(self, loop: For, online: Online | None) -> None:
        """Find the types of the carries: assume, look at the step, assume better."""
        if all(c.phi in self.types for c in loop.carries):
            return
        old: Node | None = None
        new: Node | None = None
        moved: dict[Node, Node] = {}
        if online is not None:
            self.of(loop.carries[online.index].init)  # which may be merged from other loops' maxima
            old, new = loop.carries[online.index].phi, online.new
            self.types[old], self.types[new] = _symbol(old), _symbol(new)
            moved = {loop.carries[online.index].init: old}
        inner = {c.phi: self.of(c.init).moved(moved) for c in loop.carries if c.phi is not old}
        # A number to begin with may be scaled by the steps like what they add to it, if its maximum is known.
        free = online is not None and loop.carries[online.index].init not in self.family
        open_ = {c.phi for c in loop.carries if free and not c.init.active and inner.get(c.phi) == INVARIANT}
        inner |= dict.fromkeys(open_, Shift("zero"))
        for _ in range(6):
            before = dict(self.types)
            self.types.update(inner)
            after = {c.phi: self.of(c.next) for c in loop.carries if c.phi is not old}  # type: ignore[arg-type]
            found = {phi: self._after(loop, kind, old, new) for phi, kind in after.items()}
            better = {phi: self._carried(inner[phi], kind) for phi, kind in found.items()}
            kept = {phi for phi in open_ if better[phi].kind == "zero"} if better == inner else set()
            if better == inner and not kept:
                break
            open_ -= kept
            self.types, inner = before, {**better, **dict.fromkeys(kept, INVARIANT)}
        else:
            blamed = [_symbol(old)] if old is not None else []
            self.types.update({phi: _unknown(kind, *blamed) for phi, kind in inner.items()})
            return
        for k, carry in enumerate(loop.carries if online is not None else ()):
            assert online is not None
            kind = self.types[carry.phi]
            if carry.phi is not old and kind.kind in ("scale", "zero"):
                online.weights[k] = tuple((s.axes, w) for s, w in kind.weights if s.node is old)

    def _after(self, loop: For, kind: Shift, old: Node | None, new: Node | None) -> Shift:
        """The type after the step: in terms of the new maximum, which is the next step's old one. Other
        maxima of the step are not those of the next."""
        if kind.kind == "unknown":
            return kind
        lost = {s for s in kind.symbols if s is not new and s.home.inside(loop.region)}
        if lost or old in kind.symbols:
            return _blamed(lost) if lost else _unknown(kind)
        if old is None:
            return kind
        assert new is not None
        return Shift(kind.kind, _sorted(dict(kind.moved({new: old}).weights)))

    def _carried(self, assumed: Shift, found: Shift) -> Shift:
        if assumed == found or found.kind == "zero":
            return assumed
        if assumed.kind == "zero" or (assumed.kind == "floor" and found.kind == "shift"):
            return found
        if assumed.invariant and found.kind == "scale" and not assumed.weights:
            return found  # a start value that is not 0 is scaled to the final maximum, whatever it is
        if found.invariant and assumed.invariant:
            return INVARIANT
        return _unknown(assumed, found)


def running_maximum(loop: For) -> Online | None:
    """The carry that is a maximum with itself."""
    for k, carry in enumerate(loop.carries):
        step = carry.next
        if step is not None and step.op == "maximum" and carry.phi in step.args and carry.phi.active:
            return Online(loop, k, step)
    return None


def _of_outer_step(loop: For) -> bool:
    """Whether a loop uses what a loop around it carries: the copy that telescoping makes would see the outer
    loop's old carries."""
    carried = (n for n in nodes_in([loop]) if n.op == "phi")
    return any(loop.region is not n.home and loop.region.inside(n.home) for n in carried)


def detach(kernel: Kernel, report: list[LineReport]) -> None:
    """Take every maximum that provably cancels out of the differentiation; telescope online loops."""
    prune(kernel.effects)
    nodes = nodes_in(kernel.effects)
    blocks = {n for n in nodes if n.op == "reduce" and n.attrs["fn"] == "max" and n.active}
    found = [running_maximum(item) for item in reachable(kernel.effects) if isinstance(item, For)]
    online = {o.loop: o for o in found if o is not None and not _of_outer_step(o.loop)}
    for base in ("", "2"):
        blocks, online = _detach(kernel, blocks, online, base, report)


def _detach(
    kernel: Kernel, blocks: set, online: dict, base: str, report: list[LineReport]
) -> tuple[set, dict]:
    """One base of the exponential; returns the candidates that are left."""
    mine, loops = set(blocks), dict(online)
    while mine or loops:
        analysis = Analysis(kernel, mine, loops, base)
        blamed = analysis.blame()
        if not blamed:
            break
        if blamed <= mine:
            mine -= blamed
        else:  # an output depends on a running maximum: leave them all
            mine, loops = mine - blamed, {}
    if not mine and not loops:
        return blocks, online
    for node in sorted(mine, key=lambda n: n.id):
        node.active = False
        reason = "the maximum cancels in every output: detached"
        report.append(LineReport(node.line, "max", "shift invariance", reason))
    if loops:
        Telescope(kernel, analysis, base).run()
        for loop in loops:
            reason = "the running maximum cancels: the loop uses the final one, no tape"
            report.append(LineReport(loop.line, "D", "shift invariance", reason))
    return blocks - mine, {loop: o for loop, o in online.items() if loop not in loops}


def prune(effects: list) -> None:
    """Loops and branches that write nothing are values only: whoever needs them reaches them."""
    for effect in list(effects):
        for body in bodies(effect):
            prune(body)
        if bodies(effect) and not any(bodies(effect)):
            effects.remove(effect)


class Telescope:
    """Rewrites a kernel so that its online loops use their final maximum from the start."""

    def __init__(self, kernel: Kernel, analysis: Analysis, base: str) -> None:
        self.kernel, self.analysis, self.base = kernel, analysis, base
        self.g = kernel.graph
        self.loops: dict[tuple[For, Node], tuple[For, dict[int, int]]] = {}
        self.merged: dict[tuple[Node, Node], Node] = {}
        self.ifs: dict[tuple[If, Node], If] = {}

    def run(self) -> None:
        self.rewriter = Rewriter(self.g, self.lookup)
        self.kernel.effects = self.rewriter.effects(self.kernel.effects)

    def same(self, new: Node, old: Node) -> Node:
        """With its own final maximum a loop ends as before: the backward recomputes the original."""
        self.kernel.equal[new] = old
        return new

    def lookup(self, node: Node) -> Node | None:
        if node.op == "loopout" and (online := self.analysis.online.get(node.attrs["loop"])) is not None:
            maximum = loop_out(self.g, online.loop, online.index)
            maximum.active = False  # before anything is built from it
            if node is maximum:
                return node
            return self.same(self.value(node, maximum), node)
        if node.op == "ifout":
            self.analysis.of(node)
            if node in self.analysis.family:
                node.active = False
                return node
            for symbol in self.analysis.of(node).symbols:
                if symbol in self.analysis.family and symbol.op == "ifout":  # type: ignore[union-attr]
                    symbol.active = False  # type: ignore[attr-defined]
                    return self.same(self.value(node, symbol), node)  # type: ignore[arg-type]
        return None

    def value(self, node: Node, maximum: Node) -> Node:
        """A result of an online loop as it is when `maximum` is used from the start."""
        if node.op == "loopout":
            loop, index = self.loop(node.attrs["loop"], maximum)
            return loop_out(self.g, loop, index[node.attrs["index"]])
        key = (node, maximum)
        if key in self.merged:
            return self.merged[key]
        old = node.attrs["if"]
        if (old, maximum) not in self.ifs:
            self.ifs[old, maximum] = replace(old, then_effects=[], other_effects=[], outs=[])
        own = next(o for o in old.outs if o in self.analysis.family)
        weights = tuple((s.axes, w) for s, w in self.analysis.of(node).weights)
        chosen: list[Node | None] = []
        for side, region in (("then", old.then), ("other", old.other)):
            init, before = node.attrs[side], own.attrs[side]  # None in a branch that makes none
            with self.g.at(region):
                moved = init is not None and before is not None
                chosen.append(self.start(init, before, weights, maximum) if moved else init)
        then, other = chosen
        self.merged[key] = self.g.merged(self.ifs[old, maximum], then, other, node, node.home)
        return self.merged[key]

    def start(self, init: Node, maximum: Node, weights: Factors, final: Node) -> Node:
        """A start value, moved from the maximum it belongs to to the final one."""
        g = self.g
        if is_zero(init):
            return init
        if maximum in self.analysis.family:
            moved = bool(self.analysis.of(init).weights) or init.op == "loopout"
            return self.value(init, final) if moved else self.rewriter.node(init)
        if not weights:
            return self.rewriter.node(init)
        if is_minus_inf(maximum):
            return g.zeros(init.shape, init.dtype)
        for axes, weight in weights:
            gap = g.sub(maximum, final) if weight < 0 else g.sub(final, maximum)
            if abs(weight) != 1:
                gap = g.mul(gap, g.number(abs(weight)))
            init = g.mul(init, self.laid(g.call(f"exp{self.base}", gap), axes, len(init.shape)))
        return init

    def laid(self, factor: Node, axes: tuple[int | None, ...], rank: int) -> Node:
        """A factor with one number for each of a maximum's, along the axes of a value."""
        lies = [axis + rank for axis in axes if axis is not None]
        if len(lies) < len(axes):
            dims = tuple(dim for dim, axis in zip(factor.shape, axes, strict=True) if axis is not None)
            factor = self.g.make("reshape", (factor,), {}, factor.dtype, dims)
        for axis in range(rank if lies else 0):
            if axis not in lies:
                factor = self.g.expand(factor, axis)
        return factor

    def loop(self, loop: For, maximum: Node) -> tuple[For, dict[int, int]]:
        key = (loop, maximum)
        if key in self.loops:
            return self.loops[key]
        online = self.analysis.online[loop]
        old = loop.carries[online.index].phi
        replaced: dict[Node, Node] = {old: maximum, online.new: maximum}
        new = For(loop.region, loop.outer, line=loop.line)
        index: dict[int, int] = {}
        starts = []
        for k, carry in enumerate(loop.carries):
            if k == online.index:
                continue
            phi = self.g.twin(carry.phi, loop.region)
            replaced[carry.phi] = phi
            index[k] = len(index)
            before = loop.carries[online.index].init
            with self.g.at(loop.outer):
                init = self.start(carry.init, before, online.weights.get(k, ()), maximum)
            starts.append((carry, phi, init))
        self.loops[key] = (new, index)
        body = Rewriter(self.g, lambda n: replaced.get(n) or (n if n is maximum else self.lookup(n)))
        for carry, phi, init in starts:
            new.carries.append(Carry(phi, init, body.node(carry.next)))  # type: ignore[arg-type]
        return self.loops[key]
