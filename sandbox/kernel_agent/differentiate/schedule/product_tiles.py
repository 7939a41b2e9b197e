"""Tiles of their own for kernels that own a gradient which is a product of a matrix that is stored.

    d = tl.arange(0, BLOCK_D)                           tile = tl.program_id(0)
    cols = tl.program_id(0) * BLOCK + lanes             cols = tile // tiles_d * 128 + tl.arange(0, 128)
    for program in range(grid_0):                       d = tile % tiles_d * 128 + tl.arange(0, 128)
        rows = program * BLOCK + lanes                  for start in range(0, grid_0 * BLOCK, 64):
        d_y += tl.dot(tl.trans(matrix), x)                  d_y += tl.dot(tl.trans(matrix), x)

What is multiplied then hangs on where its elements are, and not on who made them: all three axes may have
blocks of any size. Lanes of a row have nothing to do with each other, so that a program has some of them
where the forward has a whole row in a block. Elements are those that all programs had, no more and no less:
lanes beyond them are masked off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..ir.names import suggested
from ..ir.nodes import BYTES, Carry, For, GradWrite, Node, beneath, nodes_in, real
from ..ir.simplify import is_number, is_zero
from ..ir.values import loop_out
from ..prove.affine import Affine
from ..prove.masks import parts
from .owner import PROGRAMS, Owner, OwnerKernel

# Elements along each axis of a gradient, the first that leave enough to do for a GPU in the largest call. Of
# halves a tile of 128 by 128 has 64 operations for each byte that it loads.
TILES = (128, 64)
WARPS = {128: 8, 64: 4}
SUMMED = {2: 64, 4: 32, 8: 16}  # along the axis that is summed over, by the bytes of an element

_ELEMENTWISE = {"add", "sub", "mul", "compare", "and", "or", "not", "where", "floordiv", "mod"}
_TOLD = ("pid", "iv", "phi", "loopout", "ifout", "vpid", "npid")


class _Other(Exception):
    """A kernel that is something else than such a product."""


@dataclass(frozen=True)
class _Index:
    """An index of one axis: the node, how many values it has in this kernel, and for the host."""

    node: Node
    size: Node
    host: Node | None = None


@dataclass(frozen=True)
class _Product:
    """What a kernel stores: the sum over a loop of products of a tile of the matrix and another."""

    write: GradWrite
    loop: For
    dot: Node


def tile(owner: Owner, made: OwnerKernel, matrices: Iterable[str], longest: Mapping[int, int]) -> bool:
    """Give an owner kernel such tiles, if it is a product of a matrix. `longest`: for sizes of the traced
    call the greatest that calls have."""
    found = _product(made, set(matrices))
    if found is None:
        return False
    try:
        _Tiled(owner, made, found, longest).run()
    except _Other:
        return False
    return True


def _product(made: OwnerKernel, matrices: set[str]) -> _Product | None:
    """The one product that a kernel stores, of loads alone."""
    write = made.effects[0] if len(made.effects) == 1 else None
    if not isinstance(write, GradWrite) or made.split or made.operands or write.value.op != "loopout":
        return None
    loop = write.value.attrs["loop"]
    carry = loop.carries[write.value.attrs["index"]]
    if loop.effects or len(loop.carries) != 1 or not is_zero(carry.init) or carry.next is None:
        return None
    terms = [arg for arg in carry.next.args if arg is not carry.phi] if carry.next.op == "add" else []
    if len(terms) != 1 or terms[0].op != "dot" or len(terms[0].args) != 2:
        return None
    loads = [beneath(arg, "permute", "cast") for arg in terms[0].args]
    names = {load.args[0].attrs.get("name") for load in loads if load.op == "load"}
    alone = all(load.op == "load" for load in loads) and names & matrices
    return _Product(write, loop, terms[0]) if alone else None


class _Tiled:
    """Rebuilds what a kernel stores with other blocks along each axis."""

    def __init__(self, owner: Owner, made: OwnerKernel, found: _Product, longest: Mapping[int, int]) -> None:
        self.owner, self.g, self.made, self.found, self.longest = owner, owner.g, made, found, longest
        self.table: dict[Node, Node] = {}  # indices, with those in their place
        self.sizes: dict[Node, Node] = {}  # how many values those in their place have

    def run(self) -> None:
        g, made, write, dot = self.g, self.made, self.found.write, self.found.dot
        stored, (left, right) = self.indices([write.offset]), map(self.indices, zip(dot.args[:2]))
        summed = left.keys() & right.keys()
        if len(stored) != 2 or len(summed) != 1 or len(left) != 2 or len(right) != 2:
            raise _Other
        (over,) = summed
        if {*left, *right} - summed != {*stored} or stored.keys() & summed:
            raise _Other
        first, second = (next(stored[n] for n in side if n is not over) for side in (left, right))
        if first.host is None or second.host is None:
            raise _Other
        grid = self.programs(first, second, write.mask)
        bytes_of = max(BYTES.get(real(arg.dtype), 4) for arg in dot.args[:2])
        step = g.const(SUMMED[bytes_of])
        region = g.loop_region(g.const(0), left[over].size, step, "range", self.found.loop.region.line)
        assert region.iv is not None
        region.iv.hint = region.iv.hint or "start"
        with g.at(region):
            self.replace(left[over], g.add(region.iv, g.lane(step, 0, 1)))
            operands = [self.node(arg) for arg in dot.args[:2]]
            shape = (operands[0].shape[0], operands[1].shape[1])
            product = g.make("dot", operands, {"precision": dot.attrs["precision"]}, dot.dtype, shape)
            product.upstream = True
        old = self.found.loop.carries[0].phi
        with g.at(g.top):
            zeros = g.zeros(shape, old.dtype)
            phi = g.adjoint_carry(old.hint or "d_sum", zeros, region)
            with g.at(region):
                carry = Carry(phi, zeros, g.add(phi, product))
            total = loop_out(g, For(region, g.top, [carry], line=self.found.loop.line), 0)
            total.upstream = True
            offset, mask = self.node(write.offset), self.masked(write.mask, [write.offset])
        effect = GradWrite(write.base, offset, mask, total, g.top, write.line, "store", write.proof)
        effect.covers, effect.layouts, effect.asked = write.covers, write.layouts, write.asked
        made.effects[:], made.grid[:] = [effect], grid
        made.few, made.warps = False, WARPS[shape[0].value]

    def programs(self, first: _Index, second: _Index, mask: Node | None) -> list[Node]:
        """The grid of programs with a tile each, those of one row of tiles one after the other; here they are
        told apart."""
        g = self.g
        with g.at(g.top):
            one, two = (self.reached(index, mask) for index in (first, second))
            tile = g.const(self.tile(one, two))
            counts = [g.make("cdiv", (host, tile)) for host in (one, two)]
            inside = g.make("cdiv", (self.owner.in_kernel(two), tile))
            program = g.intern("pid", (), {"axis": 0, "kernel": f"{self.made.name}_tiles"}, "int32", ())
            program.hint = "tile"
            for index, at in (
                (first, g.make("floordiv", (program, inside))),
                (second, g.make("mod", (program, inside))),
            ):
                self.replace(index, g.add(g.mul(at, tile), g.lane(tile, 0, 1)))
        return [g.mul(*counts)]

    def tile(self, *sizes: Node) -> int:
        """The elements along each axis of a tile; `sizes`: of the gradient."""
        known = [int(self.g.concrete(n, self.g.launched(self.owner.grid)) or 1) for n in sizes]
        known = [self.longest.get(size, size) for size in known]
        wide = (t for t in TILES if math.prod(-(-size // t) for size in known) >= PROGRAMS)
        return next(wide, TILES[-1])

    def reached(self, index: _Index, mask: Node | None) -> Node:
        """How many values of an index may be stored, for the host: no more than a mask has."""
        assert index.host is not None
        affine = Affine(self.g)
        for part in parts(mask):
            if part.op != "compare" or part.attrs["cmp"] != "<" or part.args[1].shape:
                continue
            if beneath(part.args[0], "expand", "cast") is index.node and affine.uniform(part.args[1]):
                return self.g.make("minimum", (index.host, part.args[1]))
        return index.host

    def replace(self, index: _Index, new: Node) -> None:
        new.hint = new.hint or index.node.hint
        self.table[index.node], self.sizes[new] = new, index.size

    def indices(self, values: Iterable[Node]) -> dict[Node, _Index]:
        """The indices that values are made of."""
        nodes = list(nodes_in(values))
        found = {n: index for n in nodes if (index := self.index(n)) is not None}
        inside = {arg for n in found for arg in n.args}
        lanes = [n for n in nodes if n.op == "arange" and n not in inside]
        return found | {n: _Index(n, n.args[1], n.args[1]) for n in lanes}

    def index(self, node: Node) -> _Index | None:
        """An index of a program's block, or of a step's."""
        if node.op != "add" or len(node.shape) != 1:
            return None
        for lane, start in (node.args, node.args[::-1]):
            if lane.op != "arange" or not is_zero(lane.args[0]):
                continue
            size = lane.args[1]
            number = next((n for n in start.args if n is not size), start) if start.op == "mul" else start
            whole = start.op == "mul" and size in start.args
            if number.op == "pid" and whole:
                return self.of_programs(node, number, size)
            if number is self.found.loop.region.iv:
                return self.of_steps(node, size, whole)
        return None

    def of_programs(self, node: Node, number: Node, size: Node) -> _Index:
        count = self.made.grid[number.attrs["axis"]]
        return _Index(node, self.g.mul(self.owner.in_kernel(count), size), self.g.mul(count, size))

    def of_steps(self, node: Node, size: Node, whole: bool) -> _Index | None:
        g, bounds = self.g, self.found.loop.region.bounds
        if bounds is None or not is_zero(bounds[0]) or not Affine(g).uniform(bounds[1]):
            return None
        _, end, step = bounds
        if whole:
            return _Index(node, g.mul(end, size)) if is_number(step, 1) else None
        return _Index(node, g.mul(g.make("cdiv", (end, size)), size)) if step is size else None

    # values with these indices

    def node(self, node: Node) -> Node:
        """A value with the new indices. Raises _Other where it is made of something else."""
        g = self.g
        if node in self.table:
            return self.table[node]
        if not node.shape:
            if any(n.op in _TOLD for n in nodes_in([node])):
                raise _Other
            return node
        if node.op == "load":
            return self.load(node)
        args = [self.node(arg) for arg in node.args]
        if node.op == "broadcast":
            return args[0]
        if node.op == "expand":
            new = g.expand(args[0], node.attrs["axis"])
        elif node.op == "cast":
            new = g.cast(args[0], node.dtype)
        elif node.op == "permute":
            shape = tuple(args[0].shape[axis] for axis in node.attrs["order"])
            new = g.make("permute", args, node.attrs, node.dtype, shape)
        elif node.op in _ELEMENTWISE:
            new = g.make(node.op, args, node.attrs, node.dtype)
        else:
            raise _Other
        new.hint = new.hint or node.hint
        return new

    def load(self, node: Node) -> Node:
        """A load, also masked where there was no lane."""
        g, (base, offset, *rest) = self.g, node.args
        mask = self.masked(rest[0] if rest else None, [offset])
        other = rest[1] if len(rest) > 1 else g.number(0)
        at = self.node(offset)
        if mask is None or other.shape or not is_zero(other):
            raise _Other
        new = g.make("load", (base, at, mask, other), {**node.attrs, "other": True}, node.dtype, at.shape)
        new.hint, new.line = new.hint or node.hint or suggested(node, {}), node.line
        new.reverse, new.upstream = node.reverse, node.upstream
        return new

    def masked(self, mask: Node | None, places: list[Node]) -> Node | None:
        """A mask, and that the indices in these places are among those that there were."""
        g, made = self.g, None if mask is None else self.node(mask)
        for place in places:
            for old in self.indices([place]):
                new = self.table[old]
                at = [n for n in nodes_in([self.node(place)]) if n.op == "expand" and n.args[0] is new]
                known = {n.shape: n for n in at if len(n.shape) == 2}
                if len(known) != 1:
                    raise _Other
                (index,) = known.values()
                inside = g.compare("<", index, self.sizes[new])
                made = inside if made is None else g.both(made, inside)
        return made
