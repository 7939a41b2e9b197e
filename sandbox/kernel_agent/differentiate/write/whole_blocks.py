"""Kernels that go without masks where a block lies wholly inside.

    mask = offs < N                  if pid * BLOCK + (BLOCK - 1) < N:
    tl.load(x_ptr + offs, mask)          k_bwd_block(..., WHOLE=True)    # mask = all true
                                     else:
                                         k_bwd_block(..., WHOLE=False)   # mask = offs < N

Triton loads and stores 16 bytes at once where it knows that neighbours share their mask. It does where N is a
multiple of 16, for which it compiles a kernel anew; for any other N each element is loaded by itself, in
every block for the sake of the last one.

Asked is the comparison of a block's last lane, computed as the mask computes it. That answers for all lanes
also where numbers wrap: a block starts at a multiple of its size, which is a power of two, so no type's end
lies inside one, and within a block indices ascend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..ir.folding import concrete
from ..ir.graph import Graph
from ..ir.nodes import GradWrite, Node, Region, TapeStore, beneath, nodes_in, walk
from ..ir.simplify import is_zero
from ..ir.values import Kernel
from ..prove.affine import Affine, Form, Var, nonzero
from ..prove.masks import conjuncts, without_expansions
from .demand import Demand
from .emit import Emitted, Emitter
from .line_breaks import WIDTH, folded, indented, wrap

if TYPE_CHECKING:
    from ..read.trace import Site
    from .constants import Constants

ALIGNED = 16  # elements; also the multiple that Triton asks whole numbers for
MOST = 400  # values that a kernel computes, which is compiled twice over
INTEGERS = ("int32", "int64")
GIVEN = ("const", "constexpr", "param", "pid", "npid")
NUMBERS = ("add", "sub", "mul", "neg", "floordiv", "mod", "cdiv", "minimum", "maximum", "cast")
SPREAD = ("expand", "broadcast")
WHOLE = "all lanes of most blocks are inside: those go without the masks that ask it of each"


@dataclass(frozen=True)
class Bounded:
    """A comparison `index < bound`, and the lanes of its index."""

    compare: Node
    lanes: Node

    @property
    def bound(self) -> Node:
        return self.compare.args[1]

    @property
    def size(self) -> Node:
        """How many lanes there are."""
        return self.lanes.args[1]


def bounded(node: Node) -> Bounded | None:
    """A comparison that one lane of a block answers for all."""
    if node.op != "compare" or node.attrs["cmp"] != "<" or node.home.parent is not None:
        return None
    index, bound = node.args
    lanes = _lanes(index)
    if lanes is None or not _is_number(bound) or not _is_number(lanes.args[1]):
        return None
    return Bounded(node, lanes) if any(n.op == "pid" for n in nodes_in([index])) else None


def _lanes(index: Node) -> Node | None:
    """Those of an index that is a multiple of their number, and they."""
    if index.op == "arange":
        return index if is_zero(index.args[0]) and index.dtype in INTEGERS else None
    if index.dtype not in INTEGERS:
        return None
    if index.op in SPREAD or (index.op == "cast" and index.args[0].dtype in INTEGERS):
        return _lanes(index.args[0])
    if index.op not in ("add", "sub"):
        return None
    left, right = index.args
    for one, other in ((left, right), (right, left))[: 2 if index.op == "add" else 1]:
        lanes = _lanes(one)
        if lanes is not None and _is_multiple(other, lanes.args[1]):
            return lanes
    return None


def _is_multiple(number: Node, size: Node) -> bool:
    """Whether what is the same in all lanes is a multiple of a power of two, also after it has wrapped."""
    number = beneath(number, *SPREAD)
    if not _is_number(number):
        return False
    if number.op in ("add", "sub", "neg", "cast"):
        return all(_is_multiple(arg, size) for arg in number.args)
    (known, factors), (by, wanted) = _factors(number), _factors(size)
    missing = Counter(wanted) - Counter(factors)
    return known == 0 or (known % by == 0 and not missing)


def _factors(number: Node) -> tuple[int, list[Node]]:
    """A product's known factor, and the others."""
    number = beneath(number, "cast")
    if number.op == "const" and type(number.value) is int:
        return number.value, []
    if number.op != "mul":
        return 1, [number]
    (left, more), (right, rest) = map(_factors, number.args)
    return left * right, more + rest


def _is_number(node: Node) -> bool:
    """Whether a whole number is computed from what a program and its launch are given, whatever it does."""
    if node.shape or node.dtype not in INTEGERS or node.home.parent is not None:
        return False
    return node.op in GIVEN or node.op in NUMBERS and all(map(_is_number, node.args))


def last_lane(g: Graph, one: Bounded) -> Node:
    """The comparison of a block's last lane, a number."""

    def last(index: Node) -> Node:
        if index.op == "arange":
            return g.sub(one.size, g.const(1))
        if index.op in SPREAD:
            return last(index.args[0])
        if index.op == "cast":
            return g.cast(last(index.args[0]), index.dtype)
        if not index.shape:
            return index
        made = g.make(index.op, [last(arg) for arg in index.args])
        assert made.dtype == index.dtype, f"the last lane of {index!r} is {made.dtype}"
        return made

    return g.compare("<", last(one.compare.args[0]), one.bound)


class WholeBlocks:
    """The blocks of a launch, and which kernels go without masks in some."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def of(self, effects: list) -> list[Bounded]:
        """What is asked before a kernel with these effects. Nothing where some access keeps its mask, nor
        where that would be no faster: it is where a known launch has whole blocks in a length that is no
        multiple of 16, and most of what the kernel loads and stores for long hangs on that, in the innermost
        loop and of the largest blocks."""
        g, found = self.site.kernel.graph, self._accesses(effects)
        if not found:
            return []
        sizes = [(access.loops, g.elements(access.shape)) for access in found]
        long = [access for access, size in zip(found, sizes, strict=True) if size == max(sizes)]
        launches = chain([self.site.launch], (launch for launch in self.site.others()))
        known = (g.example_of(launch.args, launch.grid) for launch in launches)
        if not any(2 * sum(access.pays(values) for access in long) > len(long) for values in known):
            return []
        return list({one.compare: one for access in found for one in access.masks}.values())

    def _accesses(self, effects: list) -> list[Access]:
        demand = Demand(effects)
        if len(demand.seen) > MOST or any(n.op in ("dot", "user") for n in demand.seen):
            return []
        affine = Affine(self.site.kernel.graph)
        found = [_access(affine, one) for one in _accessed(demand, effects)]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) and any(one.along for one in known) else []


@dataclass(frozen=True)
class Access:
    """A load or store of a block whose mask, if it has one, only says that lanes are inside."""

    shape: tuple[Node, ...]
    loops: int  # around it
    masks: list[Bounded]
    along: Bounded | None  # of neighbours
    rest: list[tuple[int, list[Node]]]  # products that their address has beside their lanes

    def pays(self, known: dict[int, Any]) -> bool:
        """Whether a launch with these values has whole blocks, aligned, where Triton does not see that
        neighbours share their mask."""
        if self.along is None:
            return False
        bound, size = concrete(self.along.bound, dict(known)), concrete(self.along.size, dict(known))
        if type(bound) is not int or type(size) is not int or bound % ALIGNED == 0 or bound < size:
            return False
        return size % ALIGNED == 0 and all(_is_aligned(one, known) for one in self.rest)


def _is_aligned(product: tuple[int, list[Node]], known: dict[int, Any]) -> bool:
    """Whether Triton knows a product to be a multiple of 16."""
    factor, nodes = product
    values = [concrete(node, dict(known)) for node in nodes]
    for node, value in zip(nodes, values, strict=True):
        if type(value) is int and (value % ALIGNED == 0 or node.op in ("const", "constexpr")):
            factor *= value
    return factor % ALIGNED == 0


@dataclass(frozen=True)
class Place:
    """What a load or store is given."""

    offset: Node
    mask: Node | None
    region: Region


def _accessed(demand: Demand, effects: list) -> list[Place]:
    """All of blocks."""
    loads = [node for node in sorted(demand.seen, key=lambda n: n.id) if node.op == "load"]
    found = [Place(load.args[1], load.args[2] if len(load.args) > 2 else None, load.home) for load in loads]
    for effect in (*walk(effects), *(store for loop in demand.need for store in loop.tape)):
        if isinstance(effect, GradWrite):
            found.append(Place(effect.offset, effect.mask, effect.region))
        if isinstance(effect, TapeStore):
            found.append(Place(effect.index, effect.mask, effect.region))
    return [one for one in found if one.offset.shape or (one.mask is not None and one.mask.shape)]


def _access(affine: Affine, one: Place) -> Access | None:
    """What is known of one; None where it keeps a mask."""
    shape, loops = one.offset.shape, sum(region.is_loop for region in one.region.chain())
    if one.mask is not None and len(one.mask.shape) > len(shape):
        return None
    parts = [(bounded(node), axes) for node, axes in conjuncts(one.mask, len(shape))]
    masks = [(asked, axes) for asked, axes in parts if asked is not None]
    if len(masks) < len(parts):
        return None
    form = nonzero(affine.terms(one.offset, tuple(range(len(shape)))))
    every = [asked for asked, _ in masks]
    for asked, axes in masks:
        at = _unit(form, asked, axes)
        if at is not None:
            rest = (product for index, terms in form.items() if index != at for product in terms.items())
            products = [(factor, [affine.nodes[i] for i in ids]) for ids, factor in rest]
            return Access(shape, loops, every, asked, products)
    return Access(shape, loops, every, None, [])


def _unit(form: Form, one: Bounded, axes: tuple[int, ...]) -> tuple[Var | None, ...] | None:
    """The term of an address that is the comparison's lanes themselves."""
    core, left = without_expansions(one.compare.args[0], axes)
    if len(core.shape) != 1:
        return None
    return next((index for index in form if _is_unit(form, index, (left[-1], one.lanes.id))), None)


def _is_unit(form: Form, index: tuple[Var | None, ...], lane: tuple[int, int]) -> bool:
    """Whether a term is the lanes with this key."""
    alone = index[0] if len(index) == 1 else None
    return alone is not None and (alone.kind, alone.key) == ("lane", lane) and form[index] == {(): 1}


class Whole(Emitter):
    """Prints a kernel that chooses, by its block, how a function with the effects goes about masks."""

    def __init__(
        self,
        kernel: Kernel,
        name: str,
        lines: list[str],
        constants: Constants | None,
        asked: Iterable[Bounded],
        taken: Iterable[str],
    ) -> None:
        """`asked` are those that WholeBlocks.of() found; `taken`: names of other functions."""
        super().__init__(kernel, name, lines, constants)
        self.asked = {one.compare: one for one in asked}
        self.flag = self.unique("WHOLE")
        self.called = f"{name}_block"
        while self.called in taken:
            self.called += "_"

    def emit(self, effects: list, decisions: list[str], tiles: int | None = None) -> Emitted:
        assert tiles is None  # then a program has another place than its number says
        return super().emit(effects, decisions)

    def inline(self, node: Node) -> bool:
        return node not in self.asked and super().inline(node)

    def render(self, node: Node) -> tuple[str, int, int]:
        text, precedence, section = super().render(node)
        if node not in self.asked:
            return text, precedence, section
        true = f"{self.tl}.full({self.shape(node.shape)}, True, {self.tl}.int1)"
        return f"{true} if {self.flag} else {text}", 0, section

    def kernel_text(self, signature: list[str], lines: list[str]) -> str:
        """The function, and below it the kernel."""
        names = [parameter.split(":")[0] for parameter in signature]
        body = self.function_text(self.called, [*signature, f"{self.flag}: {self.tl}.constexpr"], lines)
        before, asked = self._asked()
        choice = [f"if {asked}:", *self._call(names, True), "else:", *self._call(names, False)]
        note = ["# " + line for line in folded(WHOLE, WIDTH - 6)]
        return f"{body}\n\n{self.function_text(self.name, signature, [*note, *before, *choice])}"

    def _asked(self) -> tuple[list[str], str]:
        """Whether a block is whole, and the statements in front of that."""
        printer = Emitter(self.kernel, self.name, self.source)
        conditions = dict.fromkeys(last_lane(self.g, one) for one in self.asked.values())
        every = reduce(self.g.both, conditions)
        printer.demand = Demand([])
        printer.demand.use(every)
        printer.demand.drain()
        printer.sizes, printer.places, printer.addresses, printer.tiles = set(), {}, {}, set()
        printer.compiled = replace(self.compiled, tensors=set(), unrolled=set())
        printer.reserved |= self.reserved
        asked = printer.expr(every)[0]
        printer._constants()
        assert printer.params <= self.params and not printer.extra
        return printer.scope.text(), asked

    def _call(self, names: list[str], whole: bool) -> list[str]:
        given = [*names, f"{self.flag}={whole}"]
        line = f"{self.called}({', '.join(given)})"
        if len(line) <= WIDTH - 8:
            return indented([line])
        inner = ["    " + part + "," for part in wrap(given, WIDTH - 13)]
        return indented([f"{self.called}(", *inner, ")" + "  # fmt: skip" * (len(inner) > 1)])
