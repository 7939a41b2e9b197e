"""Small integers of a launch that a backward kernel is compiled for: window sizes, strides, scale factors.

    def pool_bwd(..., k_const: tl.constexpr):        def pool_bwd(..., k):
        k = tl.zeros([], tl.int32) + k_const
        for i_const in tl.static_range(k_const):         for i in range(k):
            i = tl.zeros([], tl.int32) + i_const

A division by a known number is a multiplication, and a loop of known length is no loop. Any value is right: a
new one compiles anew, which is why lengths of tensors stay as they are. Within a kernel each such number is a
tensor, as it would be at run time: between Python numbers `//` and `%` round otherwise, nothing wraps, and
their types give way to others'. Only the bounds of a loop that is unrolled are Python's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..ir.folding import concrete
from ..ir.nodes import For, Node, Region, nodes_in
from ..ir.simplify import is_number, is_zero
from ..ir.spelling import INFIX
from ..schedule import whole_rows
from .demand import Demand

if TYPE_CHECKING:
    from ...forward import Forward
    from ..read.trace import Site

LARGEST = 16  # a window, a stride, heads: not the length of anything
UNROLLED = 32  # copies of a loop's body, in the known calls
NUMBERS = (*INFIX, "neg", "cdiv", "minimum", "maximum", "cast", "select")
DIVIDING = ("floordiv", "mod", "cdiv")


@dataclass(frozen=True)
class Lengths:
    """How large numbers of the traced call become in SWEEP."""

    largest: dict[int, int] = field(default_factory=dict)  # of sizes of the call
    every: bool = True  # whether all of SWEEP is among the known calls

    def stay_small(self, value: int) -> bool:
        """Whether an argument with this value is no length, as far as sizes of its name say; one that is no
        size is known by the calls alone."""
        return self.largest.get(value, 0 if self.every else LARGEST + 1) <= LARGEST


def lengths(fwd: Forward, dims: dict[str, Any], others: Sequence[dict[str, Any]]) -> Lengths:
    """Of a call, and others whose launches are known too. Of two names of one size the smaller counts: which
    of them an argument is, is not known."""
    found = {size: min(sizes) for size, sizes in whole_rows.grown(fwd, dims).items()}
    return Lengths(found, all(shape.dims in (dims, *others) for shape in fwd.sweep))


@dataclass
class Compiled:
    """What one kernel is compiled for: its parameters by the names of the forward's, and the loops whose
    bounds are known by that."""

    names: dict[str, str] = field(default_factory=dict)
    unrolled: set[Region] = field(default_factory=set)
    tensors: set[str] = field(default_factory=set)  # those that the text names as such

    @property
    def notes(self) -> list[str]:
        """What the kernel's comment says of it."""
        every = ", ".join(f"`{name}`" for name in self.names)
        said = [f"compiled for the values of {every}: a new one compiles anew"] * bool(every)
        many = (
            "loops over them are unrolled whatever their number: right, but slow to compile, for a large one"
        )
        return said + [many] * bool(self.unrolled)

    def steps(self, loop: For) -> str:
        """The range of an unrolled loop."""
        found = self._range(loop.region, loop.order == "reverse")
        assert found is not None
        return found

    def bounding(self, region: Region) -> set[str]:
        """The parameters in its bounds."""
        return _params(region.bounds or ())

    def known(self, region: Region, backwards: bool) -> bool:
        """Whether bounds are Python numbers, and some of them are such only here."""
        return not self.names.keys().isdisjoint(self.bounding(region)) and bool(
            self._range(region, backwards)
        )

    def _range(self, region: Region, backwards: bool) -> str | None:
        assert region.bounds is not None
        lo, hi, step = region.bounds
        unit = is_number(step, 1)
        counted = unit and is_zero(lo)
        first, end = self._text(lo, 9), self._count(hi) if counted else self._text(hi, 9)
        each = self._text(step)
        if first is None or end is None or each is None or backwards and not unit:
            return None
        if backwards:
            return f"{end} - 1, {'' if counted else f'{first} '}-{' ' * (not counted)}1, -1"
        return end if counted else ", ".join([first, end, each][: 2 if unit else 3])

    def _count(self, count: Node) -> str | None:
        """How many steps there are. A quotient that is negative is rounded otherwise by Python, and there is
        no step in either case."""
        if count.op not in ("cdiv", "floordiv"):
            return self._text(count)
        over, by = self._text(count.args[0], 9 if count.op == "cdiv" else 10), self._text(count.args[1], 11)
        if over is None or by is None:
            return None
        return f"({over} + {by} - 1) // {by}" if count.op == "cdiv" else f"{over} // {by}"

    def _text(self, node: Node, precedence: int = 0) -> str | None:
        """A number that Python computes as the kernel does, but that it does not wrap: then there are more
        steps than are ever compiled."""
        if node.op == "const" and type(node.value) is int and node.value >= 0:
            return repr(node.value)
        if node.op == "param":
            return self.names.get(node.attrs["name"])
        if node.op not in ("add", "sub", "mul"):
            return None
        symbol, own = INFIX[node.op]
        left, right = self._text(node.args[0], own), self._text(node.args[1], own + 1)
        if left is None or right is None:
            return None
        return f"({left} {symbol} {right})" if own < precedence else f"{left} {symbol} {right}"


class Constants:
    """The integers of a launch that are small in all known calls."""

    def __init__(self, site: Site, lengths: Lengths) -> None:
        self.site, self.lengths = site, lengths

    def of(self, demand: Demand) -> Compiled:
        """What the kernel that computes this is compiled for."""
        compiled = Compiled({name: f"{name}_const" for name in self.used(demand)})
        taken = {*self.site.kernel.args, *(n.attrs.get("name") for n in demand.seen)}
        compiled.names = {n: one for n, one in compiled.names.items() if one not in taken}
        compiled.unrolled = self._unrolled(demand, compiled)
        return compiled

    def used(self, demand: Demand) -> list[str]:
        """Those by which a kernel knows how often a loop turns, or what divides or multiplies an index."""
        small = {n for n in self.site.kernel.args if self._is_small(n)}
        if _used(demand, small):  # only then are other calls made
            launches = [self.site.launch, *self.site.others()]
            values = {n: [launch.args.get(n) for launch in launches] for n in small}
            small = {n for n in small if all(type(v) is int and 0 <= v <= LARGEST for v in values[n])}
            if all(v == 1 for n in _used(demand, small) for v in values[n]):  # Triton compiles for those
                return []
        found = _used(demand, small)
        return [n for n in self.site.kernel.args if n in found]

    def _is_small(self, name: str) -> bool:
        """Whether an argument is small in the traced call, and no length in SWEEP."""
        value: Any = self.site.launch.args.get(name)
        if type(value) is not int or name in self.site.kernel.either:
            return False
        return 0 <= value <= LARGEST and self.lengths.stay_small(value)

    def _unrolled(self, demand: Demand, compiled: Compiled) -> set[Region]:
        """Loops with known bounds and few steps, those inside them counted with them, that hold no product of
        matrices."""
        regions = {r for loop in demand.need for r in loop.region.chain() if r.is_loop}
        products = [node.home for node in demand.seen if node.op in ("dot", "user")]
        copies: dict[Region, int] = {}
        found = set()
        for region in sorted(regions, key=lambda r: r.depth, reverse=True):
            copies[region] = max((n for r, n in copies.items() if r.inside(region)), default=1)
            plain = region.kind == "for" and region.call.split(".")[-1] == "range" and not region.stages
            if not plain or any(home.inside(region) for home in products):
                continue
            if not all(
                compiled.known(region, loop.order == "reverse")
                for loop in demand.need
                if loop.region is region
            ):
                continue
            steps = [self._steps(region, launch) for launch in (self.site.launch, *self.site.others())]
            most = max((n for n in steps if n is not None), default=0)
            if None not in steps and copies[region] * most <= UNROLLED:
                copies[region] *= max(1, most)
                found.add(region)
        return found

    def _steps(self, region: Region, launch: Any) -> int | None:
        """How many steps a loop has in one call."""
        assert region.bounds is not None
        known = self.site.kernel.graph.example_of(launch.args, launch.grid)
        values = [concrete(bound, known) for bound in region.bounds]
        if not all(type(value) is int for value in values) or values[2] < 1:
            return None
        return len(range(*values))


def _used(demand: Demand, small: set[str]) -> set[str]:
    """The names in what such a kernel computes from them alone, where it counts."""
    numbers = [bound for loop in demand.need for bound in _bounds(loop.region, small)]
    numbers += [number for node in demand.seen for number in _by(node)]
    return {name for number in numbers if _is_given(number, small) for name in _params([number])}


def _bounds(region: Region, small: set[str]) -> tuple[Node, ...]:
    bounds = region.bounds or ()
    return bounds if all(_is_given(bound, small) for bound in bounds) else ()


def _by(node: Node) -> tuple[Node, ...]:
    """What may divide an index, in a block or each step of a loop, or multiply one in a block: once for a
    program takes no time."""
    repeated = node.shape or any(region.is_loop for region in node.home.chain())
    if node.is_float or not repeated:
        return ()
    return node.args[1:] if node.op in DIVIDING else node.args if node.op == "mul" and node.shape else ()


def _is_given(number: Node, small: set[str]) -> bool:
    """Whether it is computed from these arguments, literals and what is known at compile time alone."""
    if number.op == "param":
        return number.attrs["name"] in small
    if number.op in NUMBERS:
        return all(_is_given(arg, small) for arg in number.args)
    return number.op in ("const", "constexpr")


def _params(numbers: Iterable[Node]) -> set[str]:
    """The parameters that numbers are computed from."""
    return {node.attrs["name"] for node in nodes_in(numbers) if node.op == "param"}
