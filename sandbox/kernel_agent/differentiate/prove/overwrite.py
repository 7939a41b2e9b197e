"""The forward's own stores: a value that is overwritten later must not receive the upstream gradient.

A store inside a loop has to move with the loop, and two stores to one buffer must not meet. What is not
provable from the addresses is decided on the traced call, where addresses are computed for every program: an
overlap is refused, anything else is stated as an assumption in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import numpy as np

from ...launches import Launch
from ..ir.address_tables import root
from ..ir.folding import COMPARE
from ..ir.nodes import For, Node, Store, nodes_in, placed, reachable, sides
from ..ir.refusal import Refusal
from ..ir.report import LineReport
from ..ir.values import Kernel
from .affine import Affine, Group
from .apart import apart
from .disjoint import determined, shared_lanes
from .packed import AtMost

Placed = tuple[Store, tuple[For, ...]]
LIMIT = 1 << 16  # programs times iterations that are looked at for two stores that may meet
NEAR = 4  # programs along an axis that are looked at where the address alone tells them apart
LIMIT_ONE = 1 << 12  # and for one store that is not proven to write every element once


def check(
    kernel: Kernel,
    grid: tuple[int, ...],
    report: list[LineReport],
    elsewhere: Callable[[], Iterable[Launch]] = tuple,
) -> None:
    """Refuse kernels that overwrite a differentiable result; `elsewhere` are launches of other sizes."""
    stores = list(placed(kernel.effects, Store))
    for store, loops in stores:
        if store.value.active and store.kind == "store":
            _moves(kernel, store, loops)
            _once(kernel, (store, loops), grid, report)
            _once_elsewhere(kernel, (store, loops), grid, elsewhere)
    for (one, loops), (two, others) in combinations(stores, 2):
        if root(one.base) is not root(two.base) or one.region.excludes(two.region):
            continue
        if not _loses(one, loops, two, others):
            continue
        name = one.base.attrs["name"]
        same = one.base is two.base and one.offset is two.offset
        if same or _meet(kernel, (one, loops), (two, others), grid):
            message = f"`{name}` is stored to twice at one address (lines {one.line} and {two.line})"
            raise Refusal("overwritten store", message, "Store the final value once.", two.line)
        reason = f"the stores to `{name}` of lines {one.line} and {two.line} do not meet"
        report.append(LineReport(two.line, "assumption", "traced addresses", reason))


def single(kernel: Kernel, axes: list[int], grid: tuple[int, ...]) -> list[AtMost]:
    """What is asked of launches: along an axis that has one program in the traced call, and that a store
    does not hang on, there is one in every call. Others would store the same elements once more, and the
    gradient of what all but one of them store would count."""
    asked = []
    for store, _ in placed(kernel.effects, Store):
        regions = [region.cond for region in store.region.chain() if region.cond is not None]
        parts = [part for part in (store.base, store.offset, store.mask, *regions) if part is not None]
        for axis in axes if store.value.active and store.kind == "store" else ():
            if grid[axis] == 1 and not any(_needs(part, {kernel.graph.pid(axis)}) for part in parts):
                asked.append(AtMost(axis, kernel.graph.one))
    return list(dict.fromkeys(asked))


def check_reads(kernel: Kernel, axes: list[int], grid: tuple[int, ...]) -> None:
    """Refuse kernels that write where they also read, other than what they write there. What has to be asked
    of strides for that, the writes of the gradients at the same addresses ask."""
    loops = dict(placed(kernel.effects, Store))
    for store, offset, mask, _ in kernel.apart:
        if store not in loops:
            continue
        proof = apart(kernel.graph, (store.offset, store.mask), (offset, mask), loops[store], axes, grid)
        if isinstance(proof, str):
            name = store.base.attrs["name"]
            message = f"`{name}` is written and read at different addresses by one kernel"
            raise Refusal("in-place access", message, "Write the result to its own buffer.", store.line)


def _loses(one: Store, loops: tuple[For, ...], two: Store, others: tuple[For, ...]) -> bool:
    """Whether a differentiable value is lost if two writes, in this order, meet: adding loses nothing."""
    if one.value.active and two.kind == "store":
        return True
    return two.value.active and one.kind == "store" and bool(set(loops) & set(others))


def _once(kernel: Kernel, placed: Placed, grid: tuple[int, ...], report: list[LineReport]) -> None:
    """No two programs, steps or lanes may store to one address: only the last would have a gradient."""
    store, loops = placed
    proven = _is_proven(kernel, placed, grid)
    if proven and not any(node.op == "param" for node in nodes_in([store.offset])):
        return
    name = store.base.attrs["name"]
    near = tuple(min(count, NEAR) for count in grid)  # where strides are arguments, neighbours may still meet
    try:
        written = _addresses(kernel, store, loops, grid, LIMIT_ONE, near if proven else grid)
    except Unknown:
        if proven:
            return
        reason = f"no two programs, steps or lanes store to one address of `{name}`"
        report.append(LineReport(store.line, "assumption", "none", reason))
        return
    if len(written) != len(set(written)):
        raise Refusal(
            "overwritten store",
            f"`{name}` is stored to at one address by several programs, steps or lanes",
            "Store each element once, or add to it with tl.atomic_add.",
            store.line,
        )


def _is_proven(kernel: Kernel, placed: Placed, grid: tuple[int, ...]) -> bool:
    """Whether the address alone tells programs, steps and lanes apart, if strides are what they seem."""
    store, loops = placed
    known, groups = _determined(kernel, store)
    variables = {("pid", (axis,)) for axis, count in enumerate(grid) if count > 1}
    several = [loop for loop in loops if not _in_one_step(store, loop)]
    variables |= {("trip", (id(loop.region),)) for loop in several}
    return bool(groups) and variables <= known and not shared_lanes(kernel.graph, groups, store.offset)


def _once_elsewhere(
    kernel: Kernel, placed: Placed, grid: tuple[int, ...], elsewhere: Callable[[], Iterable[Launch]]
) -> None:
    """The same of other launches where the address does not tell programs apart, and of those with several
    programs where the traced one has one."""
    g, (store, _) = kernel.graph, placed
    everywhere = not _is_proven(kernel, placed, grid)
    known, _ = _determined(kernel, store)
    if any(node.op == "param" for node in nodes_in([store.offset])):
        known = set()
    axes = [axis for axis, count in enumerate(grid) if count == 1 and ("pid", (axis,)) not in known]
    if not everywhere and not any(_needs(store.offset, {g.pid(axis)}) for axis in axes):
        return
    traced = g.example
    try:
        for launch in elsewhere():
            several = any(axis < len(launch.grid) and launch.grid[axis] > 1 for axis in axes)
            if (several or everywhere) and g.takes(launch.args, launch.grid):
                _once(kernel, placed, launch.grid, [])
    finally:
        g.example = traced


def _moves(kernel: Kernel, store: Store, loops: tuple[For, ...]) -> None:
    """A store in a loop must go to another address in every step."""
    known, groups = _determined(kernel, store)
    variables = {var.key for group in groups for var, _ in group.terms if var.kind == "trip"}
    for loop in loops:
        moves = ("trip", (id(loop.region),)) in known or (id(loop.region),) in variables
        changing = {loop.region.iv, *(carry.phi for carry in loop.carries)}
        moves = moves or _in_one_step(store, loop)
        if not moves and not any(_needs(part, changing) for part in (store.offset, store.base)):
            raise Refusal(
                "overwritten store",
                f"`{store.base.attrs['name']}` is stored to at the same address in every step of the loop "
                f"of line {loop.line}",
                "Store after the loop.",
                store.line,
            )


def _in_one_step(store: Store, loop: For) -> bool:
    """Whether a store stands under a condition on the number of the step, `i == steps - 1`, that holds in one
    step at most."""
    conditions = [(r.cond, r.positive) for r in store.region.chain() if r.inside(loop.region)]
    return any(cond is not None and _holds_once(cond, positive, loop) for cond, positive in conditions)


def _holds_once(cond: Node, positive: bool, loop: For) -> bool:
    """`i == n`, where n does not change in the loop; `i + step >= end`, and `i >= end - step`."""
    iv, changing = loop.region.iv, {loop.region.iv, *(carry.phi for carry in loop.carries)}
    if cond.op != "compare" or loop.region.bounds is None:
        return False
    left, right = cond.args
    if cond.attrs["cmp"] == ("==" if positive else "!="):
        return any(a is iv and not _needs(b, changing) for a, b in ((left, right), (right, left)))
    if cond.attrs["cmp"] != (">=" if positive else "<"):
        return False
    _, end, step = loop.region.bounds
    after = left.op == "add" and {*left.args} == {iv, step} and right is end
    return after or left is iv and right.op == "sub" and right.args == (end, step)


def _determined(kernel: Kernel, store: Store) -> tuple[set, list[Group]]:
    """The variables that the address of a store determines, and its dimensions."""
    affine = Affine(kernel.graph)
    groups = affine.groups(store.offset) or []
    return determined(affine, groups), groups


def _needs(node: Node, wanted: set[Node | None]) -> bool:
    """Whether an address changes with one of `wanted`, also through the bounds of inner loops."""
    return any(item in wanted for item in reachable([node], _address_parts))


def _address_parts(node: Node) -> list[Node]:
    parts = list(node.args)
    if node.op == "iv":
        parts += node.home.bounds or ()
    elif node.op == "ifout":
        parts += sides(node)
    elif node.op == "loopout":
        carry = node.attrs["loop"].carries[node.attrs["index"]]
        parts += [carry.init, carry.next]
    return parts


# addresses of the traced call


class Unknown(Exception):
    """An address that depends on data."""


def _meet(kernel: Kernel, one: Placed, two: Placed, grid: tuple[int, ...]) -> bool:
    """Whether two stores write one address in the traced call; data-dependent addresses count as meeting."""
    try:
        return not set(_addresses(kernel, *one, grid)).isdisjoint(_addresses(kernel, *two, grid))
    except Unknown:
        return True


def _addresses(
    kernel: Kernel,
    store: Store,
    loops: tuple[For, ...],
    grid: tuple[int, ...],
    budget: int = LIMIT,
    programs: tuple[int, ...] | None = None,
) -> list[int]:
    """Every address that a store writes in the traced call, as often as it is written; `programs`: by so many
    along each axis alone. Raises Unknown."""
    if store.base.op == "entry":  # which tensor is data
        raise Unknown
    found: list[int] = []
    for pid in product(*(range(n) for n in programs or grid)):
        for env in _steps(kernel, loops, {"pid": pid, "grid": grid}):
            budget -= 1
            if budget < 0:
                raise Unknown
            asked = [region for region in store.region.chain() if region.cond is not None]
            if not all(bool(evaluate(kernel, r.cond, env)) == r.positive for r in asked):  # type: ignore[arg-type]
                continue
            offset = np.asarray(evaluate(kernel, store.offset, env))
            mask = True if store.mask is None else evaluate(kernel, store.mask, env)
            found += offset[np.broadcast_to(mask, offset.shape)].ravel().tolist()
    return found


def _steps(kernel: Kernel, loops: tuple[For, ...], env: dict):
    if not loops:
        yield env
        return
    region = loops[0].region
    if region.bounds is None:
        raise Unknown
    lo, hi, step = (int(evaluate(kernel, n, env)) for n in region.bounds)
    for value in range(lo, hi, step):
        yield from _steps(kernel, loops[1:], {**env, region.iv: value})


_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "minimum": np.minimum, "maximum": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "land": np.logical_and, "lor": np.logical_or,
    "floordiv": lambda a, b: np.trunc(np.divide(a, b)).astype(np.int64),
    "mod": np.fmod,
    "cdiv": lambda a, b: -(-np.asarray(a) // b),
    "cast": lambda a: a, "neg": np.negative, "not": np.logical_not, "invert": np.invert,
}  # fmt: skip
_SHAPED = ("arange", "compare", "expand", "broadcast", "full")


def number_of(kernel: Kernel, node: Node, grid: tuple[int, ...]) -> int | None:
    """A number that the host can know, in the traced call."""
    try:
        return int(evaluate(kernel, node, {"pid": (), "grid": grid}))
    except Unknown:
        return None


def evaluate(kernel: Kernel, node: Node, env: dict) -> Any:
    """An integer value in one program of the traced call."""
    op = node.op
    if op in ("pid", "npid"):
        known, axis = env["pid" if op == "pid" else "grid"], node.attrs["axis"]
        return known[axis] if axis < len(known) else int(op == "npid")
    if op in ("iv", "const", "constexpr", "param", "isnone"):
        value = env.get(node) if op == "iv" else kernel.graph.concrete(node)
        if value is None:
            raise Unknown
        return value
    if op == "ifout":
        side = node.attrs["then" if evaluate(kernel, node.args[0], env) else "other"]
        if side is None:
            raise Unknown
        return evaluate(kernel, side, env)
    if op not in _NUMPY and op not in _SHAPED:
        raise Unknown
    args = [evaluate(kernel, arg, env) for arg in node.args]
    if op == "arange":
        return np.arange(args[0], args[1])
    if op == "compare":
        return COMPARE[node.attrs["cmp"]](args[0], args[1])
    if op == "expand":
        return np.expand_dims(args[0], node.attrs["axis"]) if node.args[0].shape else args[0]
    if op in ("broadcast", "full"):
        shape = tuple(int(evaluate(kernel, dim, env)) for dim in node.shape)
        return np.broadcast_to(args[0], shape)
    return _NUMPY[op](*args)
