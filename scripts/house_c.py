"""The order of the C program: which folder may include which, no circles, who may touch libuv, curl
and libmicrohttpd.

    python3 scripts/house_c.py [ROOT]      prints one line for each finding; exit code 1 where there is one

A header and the body of its name count as one, `X_internal.h` as a part of X: it belongs to the files `X*.c`
of its folder. What a body offers to others is declared in a header of its own (a name that begins with the
other's), or in that of its folder (run/run.h): so includes show who calls whom.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# One may include those before it, and itself. CONTRIBUTING.md says what is in each.
ORDER = (
    "base",
    "sandbox",
    "rag",
    "agent/core",
    "agent/io",
    "agent/disk",
    "agent/app",
    "agent/ops",
    "agent/run",
    "agent/serve",
    "agent/cli",
)
ALONE = ("sandbox/jail",)  # programs of their own, which include nothing of the others
WITH_LIBUV = "agent/io"

INCLUDE = re.compile(r'^#include "([^"]+)"')
OFFERED = re.compile(r"^(?!static\b)[a-z][^;={}]*?\b(ka_\w+)\([^;{}]*\)\s*\{", re.MULTILINE)
LIBUV = re.compile(
    r"\b(?:uv_\w+|UV_\w+|curl_\w+|CURL\w*|MHD_\w+)|#include <(?:uv\.h|curl/[^>]*|microhttpd\.h)>"
)
NO_CODE = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)


class Source:
    """A C file below the root, its includes by line, and its code without comments and texts."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        self.folder = path.parent.as_posix()
        text = (root / path).read_text()
        found = ((INCLUDE.match(line), number) for number, line in enumerate(text.splitlines(), 1))
        self.includes = [(match[1], number) for match, number in found if match]
        self.code = NO_CODE.sub(lambda match: "\n" * match[0].count("\n") or " ", text)

    def target(self, included: str) -> Path:
        return Path(included) if "/" in included else self.path.parent / included


def _sources(root: Path) -> dict[Path, Source]:
    paths = (path for folder in (*ORDER, *ALONE) for path in sorted((root / folder).glob("*.[ch]")))
    return {path: Source(root, path) for path in (path.relative_to(root) for path in paths)}


def _module(path: Path) -> str:
    return path.with_suffix("").as_posix().removesuffix("_internal")


def _spelling(sources: dict[Path, Source]) -> Iterator[str]:
    for source in sources.values():
        for included, line in source.includes:
            at = f"{source.path}:{line}"
            target = source.target(included)
            if target not in sources:
                yield f"{at}: there is no {target}; another folder's header is named from the root"
            elif "/" in included and target.parent == source.path.parent:
                yield f"{at}: a header of the same folder is named {target.name} alone"


def _order(sources: dict[Path, Source]) -> Iterator[str]:
    for source in sources.values():
        for included, line in source.includes:
            folder = source.target(included).parent.as_posix()
            if folder == source.folder or source.target(included) not in sources:
                continue
            if source.folder in ALONE or folder in ALONE:
                yield f"{source.path}:{line}: {', '.join(ALONE)} and the rest do not know each other"
            elif ORDER.index(folder) > ORDER.index(source.folder):
                yield f"{source.path}:{line}: {folder} comes after {source.folder} in the order of the house"


def _owner(header: Path) -> str:
    """What the names of the files begin with that a header is for."""
    return header.stem.removesuffix("internal").removesuffix("_")


def _private(sources: dict[Path, Source]) -> Iterator[str]:
    for source in sources.values():
        for included, line in source.includes:
            target = source.target(included)
            if not target.stem.endswith("internal"):
                continue
            if target.parent != source.path.parent or not source.path.stem.startswith(_owner(target)):
                yield f"{source.path}:{line}: {target} belongs to the files {_owner(target)}*.c of its folder"


def _is_own(header: Path, body: Path) -> bool:
    if header.parent != body.parent:
        return False
    owner = _owner(header)
    return body.stem.startswith(owner) or owner.startswith(body.stem) or owner == body.parent.name


def _offers(sources: dict[Path, Source]) -> Iterator[str]:
    declared: dict[str, Path] = {}
    for path, source in sources.items():
        if path.suffix == ".h":
            for name in re.findall(r"\b(ka_\w+)\(", source.code):
                declared.setdefault(name, path)
    for path, source in sources.items():
        for match in OFFERED.finditer(source.code) if path.suffix == ".c" else ():
            header = declared.get(match[1])
            if not header or not _is_own(header, path):
                line = source.code.count("\n", 0, match.start(1)) + 1
                yield f"{path}:{line}: {match[1]} is declared in {header or 'no header'}, not its own"


def _circles(sources: dict[Path, Source]) -> Iterator[str]:
    graph: dict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        others = {_module(source.target(included)) for included, _ in source.includes}
        graph[_module(path)] |= others - {_module(path)}
    for circle in circles_of({name: sorted(graph[name]) for name in sorted(graph)}):
        yield f"{circle[0]}: a circle of includes: {' -> '.join(circle)}"


def circles_of(graph: Mapping[str, Iterable[str]]) -> Iterator[list[str]]:
    """The ways on which something leads back to itself."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> Iterator[list[str]]:
        if name in way:
            yield [*way[way.index(name) :], name]
        elif name not in done:
            for other in graph.get(name, ()):
                yield from visit(other, [*way, name])
            done.add(name)

    for name in graph:
        yield from visit(name, [])


def _names(sources: dict[Path, Source]) -> Iterator[str]:
    seen: dict[str, Path] = {}
    for path in sources:
        other = seen.setdefault(path.name, path)
        if other != path:
            yield f"{path}:1: {other} has the same name"


def _libuv(sources: dict[Path, Source]) -> Iterator[str]:
    for source in sources.values():
        if source.folder == WITH_LIBUV:
            continue
        for number, line in enumerate(source.code.splitlines(), 1):
            if found := LIBUV.search(line):
                at = f"{source.path}:{number}"
                yield f"{at}: {found[0]}: libuv, curl and libmicrohttpd are {WITH_LIBUV}'s alone"


def problems(root: Path) -> list[str]:
    sources = _sources(root)
    checks = (_spelling, _order, _private, _offers, _circles, _names, _libuv)
    return [problem for check in checks for problem in check(sources)]


def main(argv: list[str]) -> int:
    found = problems(Path(argv[1]) if len(argv) > 1 else Path(__file__).parents[1])
    print("\n".join(found) or "nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
