"""Where a name comes from that a module imports from one of the user's others: their copies are read, and
nothing of them runs."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from .nameable import Names

_STEPS_MAX = 16  # a name that is imported from a module that imports it, and so on


@dataclass(frozen=True)
class Elsewhere:
    """The user's modules below `folder`, seen from a module of `package` ("lib.ops"; "" for none)."""

    folder: Path
    package: str

    def find(self, path: str) -> tuple[Elsewhere, Path, ast.Module, ast.FunctionDef] | None:
        """The function of a dotted name, as an import spells it (`..utils.guard`): how things are seen from
        its module, that module's file and tree, and itself. None for anything else."""
        here = self
        for _ in range(_STEPS_MAX):
            found = here._module_of(here._absolute(path))
            if found is None:
                return None
            here, file, name = found
            tree = ast.parse(file.read_text())
            functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name]
            if functions:
                return here, file, tree, functions[-1]
            path = Names(tree).imported.get(name, "")
        return None

    def _absolute(self, path: str) -> list[str]:
        """Its parts; none where it leaves the package."""
        plain = path.lstrip(".")
        level = len(path) - len(plain)
        around = self.package.split(".") if self.package else []
        if level > len(around):
            return []
        return [*around[: len(around) - level + 1], *plain.split(".")] if level else plain.split(".")

    def _module_of(self, parts: list[str]) -> tuple[Elsewhere, Path, str] | None:
        """A name's own module: a file of the folder, of which it is taken."""
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            return None
        *module, name = parts
        file, inside = self.folder.joinpath(*module).with_suffix(".py"), module[:-1]
        if not file.is_file():
            file, inside = self.folder.joinpath(*module, "__init__.py"), module
        return (Elsewhere(self.folder, ".".join(inside)), file, name) if file.is_file() else None


def around(folder: str | None) -> Elsewhere | None:
    """The user's modules in their copies, seen from the file that is scanned; None where there are none. The
    program leaves the name of that file's package beside them."""
    if not folder:
        return None
    package = Path(folder) / ".package"
    return Elsewhere(Path(folder), package.read_text() if package.is_file() else "")
