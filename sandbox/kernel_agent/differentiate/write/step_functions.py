"""Loops that walk some of their steps without masks (schedule.split_loops): the body is printed once, as a
function that takes what it reads and returns the carries."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ...source import tree_nodes
from ..ir.nodes import For, Node, reachable
from ..ir.spelling import gradient_name, upstream_name
from ..ir.values import Kernel
from .constants import Constants
from .emit import Emitter, Scope
from .line_breaks import WIDTH, indented, wrap

NOTE = "# a step of the loop in {}; not masked: all lanes of its tiles are inside"


def has_split(effects: list) -> bool:
    """Whether a kernel with these effects walks a loop so."""
    return any(isinstance(item, For) and item.split is not None for item in reachable(effects))


class Stepped(Emitter):
    """Prints a kernel with such loops, and the functions that are their bodies above it."""

    def __init__(
        self, kernel: Kernel, name: str, lines: list[str], constants: Constants | None, taken: Iterable[str]
    ) -> None:
        """`taken`: names of other functions."""
        super().__init__(kernel, name, lines, constants)
        self.taken = {name, *taken}
        self.functions: list[str] = []
        self.bodies: set[int] = set()  # scopes that are printed as functions, by their ids
        self.ranges: dict[
            For, list[tuple[str, bool]]
        ] = {}  # the heads of a loop, and whether steps are masked
        self.sized: set[str] = set()  # names of numbers known when the kernel is compiled
        self.answered: set[Node] = set()
        self.flags: set[Node] = set()

    def depth(self) -> int:
        depth = 0
        for scope in self.scope.chain():
            depth += 1
            if id(scope) in self.bodies:
                break
        return depth

    def inline(self, node: Node) -> bool:
        """A comparison has no name where only masked steps ask it; what those find of it has."""
        if node.op == "select" and node.args[0] in self.flags:
            return False
        return (node in self.answered and self.demand.uses[node] <= 1) or super().inline(node)

    def define(self, node: Node) -> None:
        super().define(node)
        if node in self.sizes:
            self.sized.add(self.scope.names[node][0])

    def header(self, loop: For, inner: Scope) -> tuple[str, list[str], int]:
        head, prologue, section = super().header(loop, inner)
        if loop.split is None:
            return head, prologue, section
        (name,), region = prologue, loop.region
        assert region.bounds is not None and loop.region not in self.compiled.unrolled
        self.ranges[loop] = []
        for lo, hi, masked in loop.split.parts:
            texts = [self.expr(node) for node in (lo, hi, region.bounds[2])]
            section = max(section, *(used for _, used in texts))
            parts = [text for text, _ in texts]
            if parts[2] == "1":
                parts = parts[1:2] if parts[0] == "0" else parts[:2]
            call, stages = (
                (f"{self.tl}.range", [f"num_stages={region.stages}"]) if region.stages else (region.call, [])
            )
            self.ranges[loop].append((f"for {name} in {call}({', '.join([*parts, *stages])}):", masked))
        self.bodies.add(id(inner))
        self.answered |= loop.split.answered
        self.flags.add(loop.split.flag)
        return head, prologue, section

    def walked(self, loop: For, head: str, inner: Scope, carries: list[str]) -> list[str]:
        if loop.split is None:
            return super().walked(loop, head, inner, carries)
        assert loop.region.iv is not None
        name = f"{self.name}_step"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        flag, step = loop.split.flag.attrs["name"], inner.names[loop.region.iv][0]
        body = inner.text() + ([f"return {', '.join(carries)}"] if carries else [])
        given = self._read(body, [step, *carries])
        constants = [one for one in given if self._is_constant(one)]
        given = [step, *carries, *(one for one in given if one not in constants), *constants]
        signature = [f"{one}: {self.tl}.constexpr" if one in constants else one for one in given]
        about = NOTE.format(self.name)
        self.functions.append(
            self.function_text(
                name, [*signature, f"{flag}: {self.tl}.constexpr"], [about, *(body or ["pass"])]
            )
        )
        lines: list[str] = []
        start = f"{', '.join(carries)} = " if carries else ""
        for each, masked in self.ranges[loop]:
            lines += [each, *self._call(f"{start}{name}", [*given, f"{flag}={masked}"])]
        return lines

    def _call(self, name: str, given: list[str]) -> list[str]:
        width = WIDTH - 4 * self.depth() - 4
        line = f"{name}({', '.join(given)})"
        if len(line) <= width:
            return indented([line])
        inner = ["    " + part + "," for part in wrap(given, width - 5)]
        return indented([f"{name}(", *inner, ")" + "  # fmt: skip" * (len(inner) > 1)])

    def kernel_text(self, signature: list[str], lines: list[str]) -> str:
        return "\n\n".join([*self.functions, super().kernel_text(signature, lines)])

    def _read(self, body: list[str], own: list[str]) -> list[str]:
        """The kernel's parameters and variables that a body reads, in the order in which it names them."""
        kernel = {*self.kernel.args, *self.extra, *self.compiled.names.values()}
        kernel |= {gradient_name(name) for name in self.kernel.args}
        kernel |= {upstream_name(name, self.kernel.inplace) for name in self.kernel.args}
        for scope in self.scope.chain():
            kernel |= scope.own
        tree = ast.parse("\n".join(body).replace("return ", "_ = "))
        names = [n for n in tree_nodes(tree) if isinstance(n, ast.Name)]
        names.sort(key=lambda n: (n.lineno, n.col_offset))
        return [one for one in dict.fromkeys(n.id for n in names) if one in kernel and one not in own]

    def _is_constant(self, name: str) -> bool:
        """Whether a name is of a number known when the kernel is compiled."""
        arg = self.kernel.args.get(name)
        return (
            name in self.sized
            or name in self.compiled.names.values()
            or (arg is not None and arg.kind == "constexpr")
        )
