"""What an attack is, and how a pair is made of it.

A *control* is a right backward for one of the forward files: the part below `# ---- backward ----`. Every
pair of dataset/ is one too, by the name FAMILY/ID. An *attack* is a control with a few exact replacements
(the diff is the attack), and a pattern that the facts of its verdict must match: being rejected for another
reason is a failure too.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DATASET = HERE.parents[1] / "dataset"
MARKER = "# ---- backward ----"
_IMPORT = "from kernel_agent import autodiff\n"
_PAIR_IMPORT = """

def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub
"""


@dataclass(frozen=True)
class Attack:
    """`control` names a file of controls/, or a pair as FAMILY/ID; each of `edits` is (old, new), where old
    occurs exactly once, or (None, new) to append.

    `reason` is a regular expression that the facts of the verdict must match. `row` is filled in from the
    file's name.
    """

    name: str
    control: str
    edits: tuple[tuple[str | None, str], ...]
    reason: str
    row: int = 0

    def backward(self) -> str:
        text = control(self.control)
        for old, new in self.edits:
            if old is None:
                text += new
                continue
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} occurs {text.count(old)} times in {self.control}")
            text = text.replace(old, new)
        return text


def controls() -> list[str]:
    own = sorted(path.stem for path in (HERE / "controls").glob("*.py"))
    return own + sorted(f"{path.parent.name}/{path.stem}" for path in DATASET.glob("*/*.py"))


def is_pair(name: str) -> bool:
    return "/" in name


def control(name: str) -> str:
    if is_pair(name):
        return (DATASET / f"{name}.py").read_text().split(MARKER, 1)[1].lstrip("\n")
    return (HERE / "controls" / f"{name}.py").read_text()


def forward_of(name: str) -> str:
    """The forward of a control: the file in forwards/ with the longest name that the control's name begins
    with, or the pair's own."""
    if is_pair(name):
        return (DATASET / f"{name}.py").read_text().split(MARKER, 1)[0].rstrip("\n") + "\n"
    found = [path for path in (HERE / "forwards").glob("*.py") if name.startswith(path.stem)]
    return max(found, key=lambda path: len(path.stem)).read_text().replace(_IMPORT, _PAIR_IMPORT)


def pair(name: str, backward: str) -> str:
    """The forward of control `name`, completed with `backward`."""
    forward = forward_of(name)
    return f"{forward}\n\n{MARKER}\n\n{backward}"


def attacks() -> list[Attack]:
    """Every attack of rows/, in the order of verdict.md's table."""
    found: list[Attack] = []
    for path in sorted((HERE / "rows").glob("row_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        row = int(path.stem.split("_")[1])
        found += [Attack(a.name, a.control, a.edits, a.reason, row) for a in module.ATTACKS]
    return found
