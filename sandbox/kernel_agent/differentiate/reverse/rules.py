"""The adjoint of every operation: one table. What has no rule is refused, and never taken to be zero.

A rule gets the graph, the forward node and the adjoint `d` of its result (in float32, of the result's shape)
and yields `(argument, contribution)` pairs. Contributions may be wider than the argument: `sweep` sums them
back over broadcast axes.

Ties, as in the oracle: `maximum` and `minimum` give the adjoint to the strictly greater (smaller) operand and
on a tie to the second one; a block maximum goes to its first largest element; `clamp` passes where low <= x
<= high; `abs` has derivative 0 at 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

from ..ir.graph import Graph
from ..ir.kinds import ARITHMETIC, DETACHED, MOVING
from ..ir.names import LINEAR_STEP
from ..ir.nodes import Node, adjoint_dtype, beneath, nodes_in, reachable
from ..ir.refusal import Refusal
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..read import language
from . import derivatives
from .padding import TAME, dead_lanes_hurt, value_hurts
from .saturation import GROWS, LOGARITHMS, POWERS, settled, sources, sums_powers

Contributions = Iterator[tuple[Node, Node]]
RULES: dict[str, Callable[[Graph, Node, Node], Contributions]] = {}

# Functions that the generated section defines.
TURNED = "_turned"  # behind the name of a combine function, and before the number of its values
SMALL_DOT = "small_dot"
GATHERED = 1 << 15  # pairs of places that the adjoint of a gather may compare


def rule_of(*ops: str) -> Callable:
    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def adjoint(g: Graph, node: Node, d: Node) -> Contributions:
    """What each argument of `node` receives for the adjoint `d` of its result."""
    rule = RULES.get(node.op)
    if rule is None:
        raise Refusal(node.op, f"`{node.op}` has no adjoint", line=node.line)
    yield from rule(g, node, d)


def unbroadcast(g: Graph, d: Node, shape: tuple) -> Node:
    """Sum `d` back to `shape`, the shape of what was broadcast to make it."""
    while len(d.shape) > len(shape):
        d = g.reduce("sum", d, 0)
    for axis, (have, want) in enumerate(zip(d.shape, shape, strict=True)):
        if g.is_one(want) and not g.is_one(have):
            d = g.reduce("sum", d, axis, keep=True)
    return d


# Rules without a condition: what each argument receives.
PLAIN: dict[str, Callable[[Graph, Node, Node], tuple[Node, ...]]] = {
    "add": lambda g, n, d: (d, d),
    "sub": lambda g, n, d: (d, g.neg(d)),
    "over": lambda g, n, d: (d, g.zeros(n.shape, d.dtype)),  # written over a value, which has no more effect
    "neg": lambda g, n, d: (g.neg(d),),
    **dict.fromkeys(("cast", "broadcast", "full"), lambda g, n, d: (d,)),
    "expand": lambda g, n, d: (g.reduce("sum", d, n.attrs["axis"]),),
    "reshape": lambda g, n, d: (g.make("reshape", (d,), {}, d.dtype, n.args[0].shape),),
    "flip": lambda g, n, d: (g.make("flip", (d,), n.attrs, d.dtype, d.shape),),
}


@rule_of(*PLAIN)
def _(g: Graph, n: Node, d: Node) -> Contributions:
    yield from zip(n.args, PLAIN[n.op](g, n, d), strict=False)


@rule_of("mul")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    a, b = n.args
    if a is b:
        twice = g.mul(g.mul(d, g.number(2)), a)
        yield a, settled(g, d, twice) if a in g.saturated else twice
        return
    yield a, product(g, d, b)
    yield b, product(g, d, a)


def product(g: Graph, d: Node, x: Node) -> Node:
    """d * x, and 0 where the adjoint is 0 and x may be infinite: a masked lane contributes nothing."""
    if x in g.saturated:
        return settled(g, d, g.mul(d, x))
    if may_be_infinite(x):
        dead = g.compare("==", d, g.number(0))
        return g.where(dead, g.number(0), g.mul(d, x))
    return chosen(g, d, lambda d: g.mul(d, x), value_hurts(x)) if may_be_undefined(x) else g.mul(d, x)


def chosen(g: Graph, d: Node, contribution: Callable[[Node], Node], dead: bool = False) -> Node:
    """What an adjoint contributes, and 0 where another value was chosen: the derivative of the one that was
    not may be no number there, and 0 times that is none either. `dead`: the same in lanes that are masked."""
    below = chosen_at(d)
    if below.op != "where" or not any(map(is_zero, below.args[1:])):
        return (
            g.where(g.compare("==", d, g.number(0)), g.number(0), contribution(d))
            if dead
            else contribution(d)
        )
    cond, first, second = below.args
    if is_zero(second):
        return g.where(cond, contribution(first if below is d else d), g.number(0))
    return g.where(cond, g.number(0), contribution(second if below is d else d))


def unless_left_out(g: Graph, d: Node, contribution: Callable[[Node], Node], divisor: Node) -> Node:
    """What an adjoint contributes to a quotient by one number; 0 where a condition on that number has chosen
    another value, as `where(n > 0, total / n, 0)` has."""
    below = chosen_at(d)
    if below.op != "where" or not any(map(is_zero, below.args[1:])):
        return contribution(d)
    asked, made = sources(below.args[0]), sources(divisor)
    return contribution(d) if asked.isdisjoint(made) else chosen(g, d, contribution)


def chosen_at(d: Node) -> Node:
    """The choice that an adjoint is a multiple of; what it is made of first where there is none."""
    while d.op in ("mul", "div", "neg", "cast"):
        factors = [a for a in d.args if a.op == "where"] if d.op == "mul" else []
        d = factors[0] if factors else d.args[0]
    return d


def may_be_undefined(node: Node, but: tuple[str, ...] = ()) -> bool:
    """Whether lanes of a value may be no number by a division of each, or by a function `but` for some."""
    rest, seen = [node], set[Node]()
    while rest:
        one = rest.pop()
        if one in seen or one.shape != node.shape:
            continue
        seen.add(one)
        if (
            one.op == "call"
            and one.attrs["fn"] in derivatives.UNDEFINED
            and one.attrs["fn"] not in but
            or one.op == "div"
            and is_lanewise(one.args[1])
        ):
            return True
        if one.op in ARITHMETIC or one.op in ("neg", "cast", "where", "call"):
            rest += one.args
    return False


def is_lanewise(divisor: Node) -> bool:
    """Whether a divisor is one of each lane."""
    return bool(divisor.shape) and beneath(divisor, "cast").op not in ("broadcast", "full", "const")


def may_be_infinite(node: Node) -> bool:
    """Whether a value carries the infinity that stands in for masked-off elements."""
    if node.op == "const":
        return node.value in (float("inf"), float("-inf"))
    if node.op == "load":
        return len(node.args) == 4 and may_be_infinite(node.args[3])
    if node.op in ARITHMETIC | MOVING or node.op in ("neg", "cast"):
        return any(may_be_infinite(arg) for arg in node.args)
    if node.op == "where":
        return any(may_be_infinite(arg) for arg in node.args[1:])
    return node.op == "call" and node.attrs["fn"] in ("log", "log2", "log10", "log1p", "abs")


@rule_of("div")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    a, b = n.args
    lanes = lanes_of("div", n) if is_lanewise(b) else functools.partial(unless_left_out, divisor=b)
    yield a, lanes(g, d, lambda d: quotient(g, d, b))
    if b.active:
        if b.op == "call" and b.attrs["fn"] in POWERS and b.shape == n.shape:  # whose inverse may be infinite
            yield b.args[0], g.neg(scaled(g, product(g, d, n), POWERS[b.attrs["fn"]]))
            return
        hurts = n in g.saturated or may_be_infinite(n)
        hurts = hurts or (not is_lanewise(b) and may_be_undefined(a, TAME))
        times = functools.partial(product, g) if hurts else g.mul
        yield b, lanes(g, d, lambda d: g.neg(quotient(g, times(d, n), b)))


def scaled(g: Graph, d: Node, factor: float) -> Node:
    return d if factor == 1 else g.mul(d, g.number(factor))


def quotient(g: Graph, d: Node, divisor: Node) -> Node:
    """d / divisor; of one that a whole row or column shares, the reciprocal is taken once and multiplied."""
    small, spread = divisor, []
    while small.op in ("broadcast", "expand"):
        spread.append(small)
        small = small.args[0]
    held = [node for node in spread if node.op == "expand"]
    if not held or not small.shape or held[0].shape == d.shape or not small.is_float:
        return g.div(d, divisor)
    inverse = g.div(g.number(1), small)
    if small.hint:
        inverse.hint = f"inv_{small.hint}"
    for node in reversed(spread):
        inverse = g.again(node, [inverse])
    return g.mul(d, inverse)


def lanes_of(name: str, n: Node) -> Callable[..., Node]:
    """How an adjoint goes through a function that is undefined somewhere."""
    return functools.partial(chosen, dead=dead_lanes_hurt(name, *n.args))


def plainly(_: Graph, d: Node, contribution: Callable[[Node], Node]) -> Node:
    return contribution(d)


@rule_of("maximum", "minimum")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    first, second = n.args
    wins = g.compare(">" if n.op == "maximum" else "<", first, second)
    if first.active:
        yield first, g.where(wins, d, g.number(0))
    if second.active:
        yield second, g.where(wins, g.number(0), d)


@rule_of("clamp")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    x, low, high = n.args
    above = g.compare(">=", x, low)
    below = g.compare("<=", x, high)
    yield x, g.where(g.both(above, below), d, g.number(0))
    if low.active:
        yield low, g.where(above, g.number(0), d)
    if high.active:
        yield high, g.where(below, g.number(0), d)


@rule_of("where")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    cond, a, b = n.args
    if a.active:
        yield a, g.where(cond, d, g.number(0))
    if b.active:
        yield b, g.where(cond, g.number(0), d)


@rule_of("permute")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    order = n.attrs["order"]
    inverse = tuple(order.index(i) for i in range(len(order)))
    yield n.args[0], g.make("permute", (d,), {"order": inverse}, d.dtype, n.args[0].shape)


@rule_of("join")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    for i, arg in enumerate(n.args):
        yield arg, g.make("split", (d,), {"index": i}, d.dtype, n.shape[:-1])


@rule_of("split")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    zero = g.zeros(d.shape, d.dtype)
    pair = (d, zero) if n.attrs["index"] == 0 else (zero, d)
    yield n.args[0], g.make("join", pair, {}, d.dtype, n.args[0].shape)


@rule_of("dot")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    a, b = n.args
    rank = len(a.shape)
    swap = (*range(rank - 2), rank - 1, rank - 2)

    def transposed(x: Node) -> Node:
        return g.make("permute", (x,), {"order": swap}, x.dtype, tuple(x.shape[i] for i in swap))

    def attrs(extent: Node) -> dict:
        return n.attrs | {"small": rank == 2 and n.dtype == "float32" and _may_be_small(g, extent)}

    dtype = adjoint_dtype(n.dtype)
    if a.active:
        yield a, g.make("dot", (g.cast(d, b.dtype), transposed(b)), attrs(b.shape[-1]), dtype, a.shape)
    if b.active:
        yield b, g.make("dot", (transposed(a), g.cast(d, a.dtype)), attrs(a.shape[-2]), dtype, b.shape)


def _may_be_small(g: Graph, extent: Node) -> bool:
    """Whether a product that sums over `extent` may meet fewer than the 16 that a GPU's product wants.

    What the forward's own products sum over is large enough, and so is what no size of the call decides.
    """
    names = {node.attrs["name"] for node in nodes_in([extent]) if node.op == "constexpr"}
    return extent not in g.contracted and bool(names & g.sized)


@rule_of("reduce")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    (a,), axis = n.args, n.attrs["axis"]
    wide = g.expand(d, axis)
    if n.attrs["fn"] == "sum":
        yield a, g.broadcast(wide, a.shape)
        return
    shape = (*a.shape[:axis], *a.shape[axis + 1 :])
    best = g.make("argreduce", (a,), {"fn": n.attrs["fn"], "axis": axis}, "int32", shape)
    lane = g.lane(a.shape[axis], axis, len(a.shape))
    chosen = g.compare("==", lane, g.expand(best, axis))
    yield a, g.where(chosen, wide, g.number(0))


@rule_of("scan")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    back = {**n.attrs, "reverse": not n.attrs["reverse"]}
    if n.attrs["fn"] == "sum":
        yield n.args[0], g.make("scan", (d,), back, d.dtype, d.shape)
        return
    # y[i] = x[i] y[i-1] is a recurrence without a summand: e[i] = x[i+1] e[i+1] + d[i], and x[i] gets e[i]
    # y[i-1]. Nothing is divided.
    (x,), axis, forward = n.args, n.attrs["axis"], not n.attrs["reverse"]
    attrs = {"axis": axis, "reverse": forward, "text": LINEAR_STEP}
    e = g.make("affine", (shifted(g, x, axis, -1 if forward else 1), d), attrs, d.dtype, d.shape)
    e.upstream = True
    yield x, g.mul(e, shifted(g, n, axis, 1 if forward else -1, edge=1))


@rule_of("combine")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    """y[i] = f(y[i-1], x[i]) for an associative f: e[i] = d[i] + f_1(y[i], x[i+1]) e[i+1], a recurrence the
    other way, and x[i] gets f_2(y[i-1], x[i]) e[i]; the first, which is as it was, gets e."""
    (x,), axis, forward = n.args, n.attrs["axis"], not n.attrs["reverse"]
    before, after = (1, -1) if forward else (-1, 1)
    ((first,), (second,)) = _pulled(g, n, ([shifted(g, n, axis, before)], [x]), [g.number(1)], [True])
    attrs = {"axis": axis, "reverse": forward, "text": LINEAR_STEP}
    e = g.make("affine", (shifted(g, first, axis, after), d), attrs, d.dtype, d.shape)
    e.upstream = True
    lane = g.lane(x.shape[axis], axis, len(x.shape))
    start = g.compare("==", lane, g.const(0) if forward else g.sub(x.shape[axis], g.const(1)))
    yield x, g.where(start, e, g.mul(second, e))


@rule_of("fold")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    """f(before, f(x[i], after)) for every place i, f being associative: scans give what is before and after
    it, and f's derivatives do the rest. The first has nothing before it, the last nothing after."""
    xs, axis, shape = list(n.args), n.attrs["axis"], n.args[0].shape
    places = [
        [shifted(g, one, axis, by) for one in _combined(g, n, reverse)]
        for by, reverse in ((1, False), (-1, True))
    ]
    before, after = places
    lane = g.lane(shape[axis], axis, len(shape))
    first = g.compare("==", lane, g.const(0))
    last = g.compare("==", lane, g.sub(shape[axis], g.const(1)))
    active = _active(g, n)
    rest = [g.where(last, x, made) for x, made in zip(xs, _called(g, n, xs, after), strict=True)]
    wide, zero = g.broadcast(g.expand(d, axis), shape), g.number(0)
    whole = [wide if index == n.attrs["index"] else zero for index in range(len(xs))]
    _, to_rest = _pulled(g, n, (before, rest), whole, active)
    to_rest = [g.where(first, own, pulled) for own, pulled in zip(whole, to_rest, strict=True)]
    to_xs, _ = _pulled(g, n, (xs, after), to_rest, active)
    for x, own, pulled in zip(xs, to_rest, to_xs, strict=True):
        if x.active:
            yield x, g.where(last, own, pulled)


def _combined(g: Graph, n: Node, reverse: bool) -> list[Node]:
    """What the combine function makes of all up to each place, that included."""
    text = f"{n.attrs['text']}{TURNED}{len(n.args)}" if reverse else n.attrs["text"]
    attrs = {"axis": n.attrs["axis"], "reverse": reverse, "text": text}
    return [
        g.make("combined", n.args, {**attrs, "index": index}, x.dtype, x.shape)
        for index, x in enumerate(n.args)
    ]


def _called(g: Graph, n: Node, left: list[Node], right: list[Node]) -> list[Node]:
    """The combine function of these operands."""
    lefts, rights, made = g.combined[n.attrs["made"]]
    rewriter = Rewriter(g, dict(zip((*lefts, *rights), (*left, *right), strict=True)).get)
    return [rewriter.node(one) for one in made]


def _active(g: Graph, n: Node) -> list[bool]:
    """Which of the values hang on what has a gradient: those that have one themselves, and what the combine
    function makes of such."""
    left, right, made = g.combined[n.attrs["made"]]
    active = [x.active and x.is_float for x in n.args]
    while True:
        wanted = {
            node for operands in (left, right) for node, is_on in zip(operands, active, strict=True) if is_on
        }
        more = [
            is_on or (one.is_float and not wanted.isdisjoint(nodes_in([one])))
            for one, is_on in zip(made, active, strict=True)
        ]
        if more == active:
            return active
        active = more


def _pulled(
    g: Graph, n: Node, operands: tuple[list[Node], list[Node]], ds: list[Node], active: list[bool]
) -> tuple[list[Node], list[Node]]:
    """What the operands of a combine function receive for the adjoints of its values; zeros where a value
    has no gradient anywhere."""
    made = _called(g, n, *operands)
    wanted = {node for side in operands for node, is_on in zip(side, active, strict=True) if is_on}
    every = {node for side in operands for node in side}
    between = sorted(
        reachable(made, lambda node: node.args if node not in every else ()), key=lambda node: node.id
    )
    hanging: set[Node] = set()
    for node in between:
        if node in wanted or (node not in every and not hanging.isdisjoint(node.args)):
            hanging.add(node)
    adjoints: dict[Node, Node] = {}

    def receive(node: Node, contribution: Node) -> None:
        if node in hanging:
            known = adjoints.get(node)
            adjoints[node] = contribution if known is None else g.add(known, contribution)

    for one, d, is_on in zip(made, ds, active, strict=True):
        if is_on:
            receive(one, d)
    for node in reversed(between):
        if node in every or node not in adjoints or node.op in DETACHED or not node.is_float:
            continue
        for arg, contribution in adjoint(g, node, adjoints.pop(node)):
            receive(arg, contribution)
    zero = g.number(0)
    left, right = ([g.broadcast(adjoints.get(node, zero), node.shape) for node in side] for side in operands)
    return left, right


@rule_of("gather")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    """out[i] = x[index[i]]: every place of x sums what was taken from it, found by comparing."""
    x, index = n.args
    axis = n.attrs["axis"]
    places = x.shape[axis]
    size = math.prod(g.concrete(dim) or 0 for dim in (places, *index.shape))
    if not 0 < size <= GATHERED:
        message = f"its adjoint compares {size} pairs of places in registers"
        raise Refusal("tl.gather", message, "Load the gathered elements by address.", n.line)
    lane = g.lane(places, axis + 1, len(index.shape) + 1)
    taken = g.compare("==", g.expand(index, axis + 1), lane)
    yield x, g.reduce("sum", g.where(taken, g.expand(d, axis + 1), g.number(0)), axis)


@rule_of("affine")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    """h[i] = a[i] h[i-1] + x[i]: the adjoint runs the other way, e[i] = a[i+1] e[i+1] + d[i]; a[i] gets e[i]
    h[i-1]."""
    a, x = n.args
    axis, forward = n.attrs["axis"], not n.attrs["reverse"]
    a_next = shifted(g, a, axis, -1 if forward else 1)
    e = g.make("affine", (a_next, d), {**n.attrs, "reverse": forward}, d.dtype, d.shape)
    e.upstream = True
    yield x, e
    if a.active:
        yield a, g.mul(e, shifted(g, n, axis, 1 if forward else -1))


def shifted(g: Graph, x: Node, axis: int, by: int, edge: float = 0) -> Node:
    """x moved along an axis by one place, `edge` moved in."""
    lane = g.lane(x.shape[axis], axis, len(x.shape))
    last = g.sub(x.shape[axis], g.const(1))
    moved_lane = g.sub(lane, g.const(by)) if by > 0 else g.add(lane, g.const(-by))
    low = g.make("maximum", (moved_lane, g.const(0)))
    index = g.broadcast(g.make("minimum", (low, last)), x.shape)
    moved = g.make("gather", (x, index), {"axis": axis}, x.dtype, x.shape)
    end = g.const(0) if by > 0 else last
    moved_in = g.number(edge) if x.is_float else g.const(int(edge))  # places stay whole numbers
    return g.where(g.compare("==", lane, end), moved_in, moved)


@rule_of("user")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    name = n.attrs["fn"]
    made = language.USER_RULES[name](g, n, d)
    if not isinstance(made, (tuple, list)) or len(made) != len(n.args):
        wanted = f"one adjoint or None for each of {len(n.args)} arguments, in a tuple"
        message = f"the rule for `{name}` has to return {wanted}"
        raise Refusal(name, message, "Return (d_first, d_second, ...).", n.line)
    for arg, contribution in zip(n.args, made, strict=True):
        if contribution is not None:
            yield arg, contribution


@rule_of("call")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    name = n.attrs["fn"]
    lanes = lanes_of(name, n) if name in derivatives.UNDEFINED else plainly
    if saturates(g, n):
        lanes = lambda g, d, contribution: settled(g, d, contribution(d))
    if name in derivatives.BINARY:
        yield from _of_two(g, n, d, derivatives.BINARY[name], lanes)
    else:
        x = n.args[0]
        yield x, lanes(g, d, lambda d: derivatives.UNARY[name](g, x, n, d))


def saturates(g: Graph, n: Node) -> bool:
    """Whether a function's derivative may be infinite where its adjoint is 0, and contributes nothing."""
    name = n.attrs["fn"]
    if name in LOGARITHMS:
        return n in g.saturated and sums_powers(n.args[0])
    return (n in g.saturated and name in GROWS) or (
        name == "pow" and not g.saturated.isdisjoint((n, *n.args))
    )


@rule_of("fmod")
def _(g: Graph, n: Node, d: Node) -> Contributions:
    yield from _of_two(g, n, d, derivatives.rest, lanes_of(n.op, n))


def _of_two(g: Graph, n: Node, d: Node, rule: Callable, lanes: Callable) -> Contributions:
    x, z = n.args
    for at, arg in enumerate(n.args):
        if arg.active:
            yield arg, lanes(g, d, lambda d, at=at: rule(g, x, z, n, d)[at])
