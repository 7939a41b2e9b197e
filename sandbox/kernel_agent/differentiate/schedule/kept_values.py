"""Values that took a loop: the main kernel stores them, a few numbers a program, and owner kernels load them.

What is stored is the part of a value that has the fewest axes; what is elementwise around it is computed
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..ir.names import suggested
from ..ir.nodes import If, Node, Region, TapeStore, beneath, nodes_in, real, walk
from ..ir.rewriter import Rewriter
from ..ir.values import is_named, is_static, takes_loop
from ..read.block_sizes import Grid
from ..reverse.sweep import Reverse, writes
from .kept_tiles import Matrix, matrix
from .programs import Programs

ROWS = "rows"  # marks what is kept in place of a product of it


@dataclass
class Spill:
    """A value of the main kernel that owner kernels read: `numel` elements a program, or a matrix."""

    name: str
    dtype: str
    numel: Node
    matrix: Matrix | None = None
    like: Spill | None = None  # the same value, of another tensor's type: it may be one buffer


class Spills:
    """The values that the main kernel of one launch keeps for others."""

    def __init__(
        self,
        reverse: Reverse,
        programs: Programs,
        grid_param: Callable[[Node], Node | None],
        none: bool = False,
        own: Grid | None = None,
    ) -> None:
        """`none`: keep nothing, as no number tells which program of the forward a value is of. `own`: tiles
        of the backward's own, which owner kernels may have others than."""
        self.none, self.own = none, own
        self.reverse, self.g, self.programs = reverse, reverse.kernel.graph, programs
        self.grid_param = grid_param
        self.made: dict[Node, Spill] = {}
        self.known = list(nodes_in(reverse.effects))  # before anything is stored
        self.sides: set[Node] = set()
        self.won = {won.last for won in reverse.won.values()}  # whole numbers, of the step that a loop chose
        self.stored: list[tuple[list, TapeStore]] = []  # with the effects that each is among

    def read(self, node: Node, index: Callable[[], Node], also: bool) -> Node | None:
        """A load of a value that took a loop (`also`: or much work), at `index()` of what the main kernel
        stores, program by program; None for others, for what is kept as a matrix, for what it stores in a
        branch, as elsewhere it may not be there, and for what hangs on the parts of a program's number, which
        it does not have."""
        if node.home is not self.g.top or not self.wanted(node) and not (also and node.is_float):
            return None
        if any(n.op == "vpid" for n in nodes_in([node])):
            return None
        at = index()  # which may find that there is none
        kept = self._keep(node, whole=False)
        return None if kept.matrix is not None else self._load(node, kept, at)

    def wanted(self, node: Node) -> bool:
        """Whether a value is one that is kept."""
        if not self.able(node):
            return False
        if self.narrowed(node):
            return self.wanted(node.args[0])
        return takes_loop(node) and not thinner(node) or sums_saved(node) or bool(node.attrs.get("kept"))

    def narrowed(self, node: Node) -> bool:
        """Whether a value is one for products, of the type of a tensor's elements, and nothing wants it as it
        was computed: then it is kept so, in half the bytes."""
        if node.op != "cast" or not node.dtype.startswith("$") or not node.is_float or is_named(node.dtype):
            return False
        if node in self.sides:
            return True
        alone = all(isinstance(n, Node) and self._apart(n) for n in self._users(node.args[0]))
        return alone and self._always_there(node.dtype.split(":")[1])

    def _apart(self, user: Node) -> bool:
        """Whether what is computed of a value leaves it to products: such a cast, or a sum over it, which is
        kept itself."""
        if user.op == "reduce":
            return self.wanted(user)
        return user.op == "cast" and user.dtype.startswith("$")

    def cast(self, value: Node, like: Node) -> Node:
        """Such a cast of what the value is on one side of a branch."""
        made = self.g.cast(value, like.dtype)
        if self._users(value) == [like.args[0]]:
            self.sides.add(made)
        return made

    def _users(self, node: Node) -> list[object]:
        """What is computed of a value, and writes of it."""
        found: list[object] = [n for n in self.known if node in n.args or node in n.attrs.values()]
        return found + [w for w in writes(self.reverse.effects) if w.value is node]

    def _always_there(self, name: str) -> bool:
        """Whether a tensor is read whatever is known when the kernel is compiled: it is never None."""
        loads = [n for n in self.known if n.op == "load" and n.args[0].op == "param"]
        return any(
            n.args[0].attrs["name"] == name
            and all(region.cond is None or region.is_loop for region in n.home.chain())
            for n in loads
        )

    def able(self, node: Node) -> bool:
        """Whether a value is one of a program, known where no loop is around it: a branch may be."""
        return (
            not self.none
            and (node.is_float or node in self.won)
            and (node.home is self.g.top or self._branch(node.home) is not None)
        )

    def _branch(self, home: Region) -> list | None:
        """The effects of a branch that is in no loop."""
        if any(region.is_loop for region in home.chain()):
            return None
        found = [e for e in walk(self.reverse.effects) if isinstance(e, If) and home in (e.then, e.other)]
        return (
            (found[-1].then_effects if home is found[-1].then else found[-1].other_effects) if found else None
        )

    def branches(self) -> list[If]:
        """Those of the main kernel that are in no loop."""
        found = [e for e in walk(self.reverse.effects) if isinstance(e, If)]
        return [e for e in found if not any(region.is_loop for region in e.then.chain())]

    def state(self) -> tuple:
        """What `restore` takes back everything after."""
        return dict(self.made), len(self.stored), len(self.reverse.report)

    def restore(self, state: tuple) -> None:
        self.made, stored, lines = state
        for effects, effect in self.stored[stored:]:
            effects.remove(effect)
        del self.stored[stored:]
        del self.reverse.report[lines:]

    def flags(self, effects: list) -> dict[Region | None, None]:
        """The branches in which something is stored that these effects read and that hangs on the tiles, of
        what is known when a kernel is compiled; None: it is stored always, or where that is not known."""
        loads = [n for n in nodes_in(effects) if n.op == "load" and n.attrs.get("buffer")]
        names = {n.args[0].attrs["name"] for n in loads}
        names -= {spill.name for spill in self.made.values() if spill.matrix is not None}
        regions = [effect.region for _, effect in self.stored if effect.buffer in names]
        found = [
            r if r.cond is not None and is_static(r.cond) and r.parent is self.g.top else None
            for r in regions
        ]
        return dict.fromkeys(found)

    def names(self) -> set[str]:
        return {spill.name for spill in self.made.values()}

    def load(self, node: Node, variable: Callable[[Node], Node]) -> Node:
        """Load in an owner kernel what the main kernel stores for each program."""
        found = self._keep(node)
        if found.matrix is not None:
            return self._load(node, found, *found.matrix.place(self.g, node.shape, variable))
        return self._load(node, found, self._place(self.linear(variable), node.shape, found.numel))

    def _keep(self, node: Node, whole: bool = True) -> Spill:
        """Have the main kernel store a value; `whole`: as a matrix, if it is a tile of one."""
        g = self.g
        if node not in self.made:
            numel = g.product(node.shape)
            name = f"spill_{node.hint or suggested(node, {})}"
            while name in self.names():
                name += "_"
            dtype = node.dtype if self.narrowed(node) else real(node.dtype)
            own = self.own if node.reverse and whole else None
            found = matrix(own, self.programs.numbered, node, self.known)
            narrowed = [n for n in self.made if node.op == n.op == "cast" and node.args[0] is n.args[0]]
            like = self.made[narrowed[0]] if narrowed and dtype.startswith("$") else None
            self.made[node] = Spill(name, dtype, numel, found, like)
            with g.at(g.top):
                if found is None:
                    at, mask = self._place(self.linear(lambda n: n, main=True), node.shape, numel), None
                else:
                    at, mask = found.place(g, node.shape)
            branch = self._branch(node.home)
            effects = self.reverse.effects if branch is None else branch
            effect = TapeStore(name, at, node, g.top if branch is None else node.home, mask)
            effects.append(effect)
            self.stored.append((effects, effect))
            reason = "took a loop: the main kernel keeps it for the owner kernels"
            self.reverse.say(node.line, "spill", "none", f"`{node.hint or 'value'}` {reason}")
        return self.made[node]

    def _load(self, node: Node, found: Spill, at: Node, mask: Node | None = None) -> Node:
        g = self.g
        base = g.scratch(found.name, found.dtype)
        args = (base, at) if mask is None else (base, at, mask, g.number(0))
        read = g.make("load", args, {"other": mask is not None, "buffer": True}, node.dtype, node.shape)
        read.hint, read.upstream = read.hint or node.hint, node.upstream
        read.reverse = read.reverse and not node.attrs.get("kept")  # it keeps its name
        return read

    def linear(self, variable: Any, main: bool = False) -> Node:
        """The number of a forward program."""
        g = self.g
        total: Node | None = None
        for node, count in self.programs.numbered:
            here = variable(node)
            count = count if main else Rewriter(g, self.grid_param).node(count)
            total = g.cast(here, "int64") if total is None else g.add(g.mul(total, count), here)
        assert total is not None
        return total

    def _place(self, linear: Node, shape: tuple, numel: Node) -> Node:
        g = self.g
        index = g.mul(linear, numel)
        for axis in range(len(shape)):
            index = g.add(index, g.lanes(shape, axis))
        return index


def sums_saved(node: Node) -> bool:
    """Whether a block is summed that the forward saved something for: it would be loaded again for that."""
    return node.op == "reduce" and any(n.attrs.get("saved") for n in nodes_in([node]))


def thinner(node: Node) -> bool:
    """Whether what took a loop in a value has fewer axes: then that is kept, and the value is made again."""
    if node.op in ("expand", "cast", "broadcast"):
        return True
    if node.op in ("where", "neg"):
        return all(thinner(arg) for arg in node.args if takes_loop(arg))
    if node.op == "dot":  # of rows that a loop ended with: they are fewer than what they make
        return all(arg.attrs.get(ROWS) for arg in node.args if takes_loop(arg))
    if node.op not in ("add", "sub", "mul", "div"):
        return False
    return all(
        len(beneath(arg, "expand", "broadcast", "cast").shape) < len(node.shape)
        for arg in node.args
        if takes_loop(arg)
    )
