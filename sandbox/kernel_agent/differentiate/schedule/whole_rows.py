"""Kernels that walk a row a block at a time, where the backward may have the whole row in one block.

    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)

The result hangs on no BLOCK if the columns are all that the kernel does with blocks: they address, they are
compared, and what is summed over a block and over the loop is zero from N on. Then a block of the next power
of two of N gives the same in one turn, and a row that the forward reads once a loop is read once in all. So
it is done for rows of as many elements as a program can hold. Where SWEEP has longer ones too, and the
verdict sees to both, the host asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..ir.graph import Graph
from ..ir.kinds import PLAIN
from ..ir.nodes import For, If, Node, Store, beneath, nodes_in, walk
from ..ir.simplify import is_zero
from ..ir.spelling import on_host
from ..prove.masks import parts
from ..read.trace import Site

if TYPE_CHECKING:
    from ...forward import Forward

# Measured on an H200 (bench/results/gpu-h200.json): a layer norm of 8192 x 4096 in bfloat16 takes 88 us with
# 32 elements of a row in each lane and three stages, 116 with 16 and one; rows of 16,384, which registers do
# not hold, 1,000.
LONGEST = 8192  # elements of a row, at most; ka_shapes_long() has longer ones
LEAST = 1024  # where no more can be held, loops are as good
REGISTERS = 49152  # of 65,536, for what is as long as a row
SHARED = 196608  # bytes, for the rows that are loaded while one is computed
LANE = 32 * 32  # elements of a row that a warp has
MOST = 1 << 20  # elements that Triton has in a block
WARPS = "row_warps"


@dataclass(frozen=True)
class Rows:
    """The size of a block that is to be the whole row, by name; and the condition for it on the host."""

    block: str
    length: Node
    longest: int  # that SWEEP has
    limit: int = LONGEST

    @property
    def note(self) -> str:
        return f"{self.block} is a whole row, not the forward's: each is read once, and not in a loop"

    def short(self, g: Graph) -> Node:
        """The condition for it, where there are longer rows."""
        return g.compare("<=", self.length, g.const(self.limit))

    def held(self, effects: list, walks: bool) -> Rows:
        """The same with the limit that the kernel's values set. Where its one loop `walks` over rows, the
        next ones are loaded meanwhile."""
        nodes = set(nodes_in(effects))
        loads = {n for n in nodes if n.op == "load" and n.shape}
        sums = [c for e in effects if isinstance(e, For) for c in e.carries if c.phi.shape]
        limit = LONGEST
        while limit * (len(loads) + len(sums)) > REGISTERS:
            limit //= 2
        regions = [e.region for e in effects if isinstance(e, For)]
        if walks and len(regions) == 1:
            inner = [n for n in loads if n.home.inside(regions[0])]
            stages = 3 if 3 * 4 * limit * len(inner) <= SHARED else 2
            beside = self.longest > limit  # then no other rows come here
            regions[0].stages = str(stages) if beside else f"{stages} if {self.block} <= {limit} else 1"
        return replace(self, limit=limit)

    def setup(self, text: Callable[[Node], str]) -> list[str]:
        """What the host computes first: the block, and warps for it."""
        length = text(self.length)
        return [
            f"if {length} > {MOST}:",
            f'    raise ValueError(f"a row of {{{length}}} elements is more than a block of {MOST}")',
            f"{self.block} = triton.next_power_of_2({length})",
            f"{WARPS} = min(max({self.block} // {LANE}, 4), 16)",
        ]


def grown(fwd: Forward, dims: dict[str, Any]) -> dict[int, set[int]]:
    """Sizes of a call, and how large those of that name are in SWEEP at most, for each name that has one."""
    found: dict[int, set[int]] = {}
    for name, size in dims.items():
        if type(size) is int:
            sizes = [shape.dims.get(name) for shape in fwd.sweep]
            found.setdefault(size, set()).add(max([size, *(s for s in sizes if type(s) is int)]))
    return found


def longest(fwd: Forward, dims: dict[str, Any]) -> dict[int, int]:
    """The same for each size, the larger one where two names have it."""
    return {size: max(sizes) for size, sizes in grown(fwd, dims).items()}


def find(site: Site, known: Mapping[int, int]) -> Rows | None:
    """Whether all loops of a kernel walk one row, and their block may be another; `known`: of longest()."""
    effects = list(walk(site.kernel.effects))
    loops = [effect for effect in effects if isinstance(effect, For)]
    bounds = {loop.region.bounds for loop in loops if loop.cond is None}
    if len(bounds) != 1 or None in bounds or any(loop.cond is not None for loop in loops):
        return None
    low, length, block = next(b for b in bounds if b is not None)
    if not is_zero(low) or block.op != "constexpr" or site.autotuned or not _known(site, block, length):
        return None
    if any(isinstance(effect, If) for effect in effects) or site.tables or site.kernel.inplace:
        return None
    if length.attrs["traced"] not in known:
        return None
    nodes = set(nodes_in(site.kernel.effects))
    proof = _Proof(block, length, loops, nodes)
    if not proof.holds(effects):
        return None
    return Rows(block.attrs["name"], length, known[length.attrs["traced"]])


def _known(site: Site, block: Node, length: Node) -> bool:
    named = block.attrs["name"] in site.given_names
    return named and length.op == "param" and on_host(length) and length.attrs["name"] in site.given_names


class _Proof:
    """Whether the values of a kernel hang on the size of a block."""

    def __init__(self, block: Node, length: Node, loops: list[For], nodes: set[Node]) -> None:
        self.block, self.length, self.loops, self.nodes = block, length, loops, nodes
        self.index = loops[0].region.iv
        self.lanes = {n for n in nodes if n.op == "arange"}
        self.columns = {n for n in nodes if n.op == "add" and set(n.args) & self.lanes}
        self.users: dict[Node, list[Node]] = {}
        for node in nodes:
            for arg in node.args:
                self.users.setdefault(arg, []).append(node)

    def holds(self, effects: list) -> bool:
        if any(loop.region.iv is not self.index for loop in self.loops) or self.index is None:
            return False
        whole = all(
            n.args[0].op == "const" and is_zero(n.args[0]) and n.args[1] is self.block for n in self.lanes
        )
        moved = all(set(n.args) <= self.lanes | {self.index} and self.index in n.args for n in self.columns)
        led = all(user in self.columns for n in (self.index, *self.lanes) for user in self.users.get(n, ()))
        bare = not any(user.op != "arange" for user in self.users.get(self.block, ()))
        if not (whole and moved and led and bare):
            return False
        carried = [carry for loop in self.loops for carry in loop.carries]
        allowed = self.lanes | {self.index} | {c.phi for c in carried}
        outs = {n for n in self.nodes if n.op == "loopout"}
        sums = {n for n in self.nodes if n.op == "reduce"}
        if not all(n in allowed | outs | sums or n.op in PLAIN for n in self.nodes):
            return False
        if not all(n.shape in ((), (self.block,)) for n in self.nodes):
            return False
        return (
            all(self._summed(n) for n in sums)
            and all(self._added(c.phi, c.init, c.next) for c in carried)
            and all(self._reduced(n) for n in outs)
            and all(self._bounds(e.mask) for e in effects if isinstance(e, Store) and e.offset.shape)
            and all(
                len(n.args) == 4 and self._bounds(n.args[2]) for n in self.nodes if n.op == "load" and n.shape
            )
        )

    def _summed(self, node: Node) -> bool:
        """A sum over a block: of a loop's sum, or of what is zero from N on."""
        (value,) = node.args
        return node.attrs["fn"] == "sum" and (
            beneath(value, "cast").op == "loopout" or self._nothing_beyond(value)
        )

    def _added(self, phi: Node, init: Node, following: Node | None) -> bool:
        """A carry that begins at zero, to which is added what is zero from N on, or a block's sum."""
        if following is None or following.op != "add" or self.users.get(phi) != [following]:
            return False
        if phi not in following.args or following.args[0] is following.args[1]:
            return False
        (more,) = [arg for arg in following.args if arg is not phi]
        if phi.shape:
            return is_zero(init) and self._nothing_beyond(more)
        return beneath(more, "cast").op == "reduce" and beneath(more, "cast").args[0].op != "loopout"

    def _reduced(self, out: Node) -> bool:
        """A block that a loop leaves is only summed."""
        users = list(self.users.get(out, ()))
        if not out.shape:
            return True
        return bool(users) and all(
            user.op == "reduce"
            or user.op == "cast"
            and all(u.op == "reduce" for u in self.users.get(user, ()))
            for user in users
        )

    def _bounds(self, mask: Node | None) -> bool:
        """Whether a mask holds for no column from N on."""
        return any(
            part.op == "compare"
            and part.attrs["cmp"] == "<"
            and part.args[0] in self.columns
            and part.args[1] is self.length
            for part in parts(mask)
        )

    def _nothing_beyond(self, node: Node) -> bool:
        """Whether a value is zero in every column from N on."""
        if is_zero(node):
            return True
        if node.op == "load":
            masked = len(node.args) == 4 and self._bounds(node.args[2])
            return masked and is_zero(node.args[3])
        if node.op == "where":
            cond, _, other = node.args
            return self._bounds(cond) and self._nothing_beyond(other)
        if node.op in ("cast", "neg"):
            return self._nothing_beyond(node.args[0])
        if node.op == "mul":
            return any(map(self._nothing_beyond, node.args)) and all(map(self._finite, node.args))
        if node.op in ("add", "sub"):
            return all(map(self._nothing_beyond, node.args))
        return node.op == "div" and not node.args[1].shape and self._nothing_beyond(node.args[0])

    def _finite(self, node: Node) -> bool:
        """Whether a factor may be taken for finite beyond N: it is read as zero there, or is the same for all
        columns. 0 * inf would be no zero."""
        if not node.shape or node.op in ("full", "broadcast", "const") or self._nothing_beyond(node):
            return True
        if node.op in ("add", "sub", "mul", "neg", "cast", "load"):
            return (
                node.op == "load"
                and len(node.args) == 4
                or node.op != "load"
                and all(map(self._finite, node.args))
            )
        return False
