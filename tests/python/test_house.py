"""scripts/house.py: each way to leave the order of the house, planted in a folder, is found; and this tree
keeps it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import house

PACKAGE = "sandbox/kernel_agent"


def found(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    tree = house.Tree(root)
    return [str(finding) for check in house.CHECKS for finding in check(tree)]


def function(lines: int, above: str = "", beside: str = "") -> str:
    return f"{above}def work():{beside}\n" + "    pass\n" * (lines - 1)


def test_house__this_tree__is_in_order(capsys):
    assert house.main(["house.py"]) == 0, capsys.readouterr().out


def test_house__finding__ends_with_code_1(tmp_path, capsys):
    (tmp_path / "a.py").write_text("x = 1  # " + "long " * 40)
    assert house.main(["house.py", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("a.py:1: 2")


@pytest.mark.parametrize(
    "text",
    [
        "from kernel_agent.operations import oracle\n",
        "from ..operations.oracle import run\n",
        "import kernel_agent.operations.oracle\n",
        "def late():\n    from ..operations import oracle\n",
    ],
)
def test_order__import_of_a_later_folder__is_found(tmp_path, text):
    files = {f"{PACKAGE}/operations/oracle.py": "run = 1\n", f"{PACKAGE}/torch_tl/memory.py": text}
    (finding,) = found(tmp_path, files)
    assert "memory.py" in finding and "kernel_agent.operations.oracle comes after" in finding


def test_order__import_of_an_earlier_folder__is_none(tmp_path):
    files = {
        f"{PACKAGE}/operations/oracle.py": "from ..torch_tl.memory import Cell\n",
        f"{PACKAGE}/torch_tl/memory.py": "from .. import errors\n",
        f"{PACKAGE}/errors.py": "",
    }
    assert found(tmp_path, files) == []


def test_circles__three_modules__are_one_circle(tmp_path):
    files = {
        f"{PACKAGE}/one.py": "from . import two\n",
        f"{PACKAGE}/two.py": "def late():\n    from .three import x\n",
        f"{PACKAGE}/three.py": "from .one import y\n",
    }
    (finding,) = found(tmp_path, files)
    assert "a circle of imports: " in finding
    assert {part.split(".")[-1] for part in finding.split(": ")[-1].split(" -> ")} == {"one", "two", "three"}


def test_circles__for_the_type_checker_alone__is_none(tmp_path):
    files = {
        f"{PACKAGE}/one.py": "from . import two\n",
        f"{PACKAGE}/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import y\n",
    }
    assert found(tmp_path, files) == []


def test_names__one_name_in_two_folders__is_found(tmp_path):
    files = {
        f"{PACKAGE}/tape.py": "",
        f"{PACKAGE}/torch_tl/tape.py": "",
        f"{PACKAGE}/torch_tl/__init__.py": "",
    }
    (finding,) = found(tmp_path, {**files, f"{PACKAGE}/__init__.py": "", "tests/tape.py": ""})
    assert "has the same name" in finding


def test_functions__long_one__is_found(tmp_path):
    (finding,) = found(tmp_path, {"a.py": function(house.LINES + 1)})
    assert finding == f"a.py:1: work has {house.LINES + 1} lines, more than {house.LINES}"


@pytest.mark.parametrize(
    "text",
    [
        function(house.LINES),
        function(house.LINES + 1, above="# long: a table\n"),
        function(house.LINES + 1, above="# long: a table\n@property\n"),
        function(house.LINES + 1, beside="  # long: a table"),
    ],
)
def test_functions__short_or_with_a_reason__are_none(tmp_path, text):
    assert found(tmp_path, {"a.py": text}) == []


@pytest.mark.parametrize("name", ["a.py", "a.sh", "Makefile"])
def test_columns__wide_line__is_found(tmp_path, name):
    (finding,) = found(tmp_path, {name: "#" + " word" * 30 + "\n"})
    assert finding == f"{name}:1: 151 columns, more than 110"


@pytest.mark.parametrize(
    "text",
    [
        "#" + " word" * 30 + " https://example.org/page\n",
        "x = [\n    " + "1, " * 40 + "\n]  # fmt: skip\n",
        "x = 1" + " + 1" * 25 + "  # type: ignore[operator]\n",
    ],
)
def test_columns__addresses_tables_and_marks__are_none(tmp_path, text):
    assert found(tmp_path, {"a.py": text}) == []


def test_columns__markdown__is_held_outside_tables_and_code(tmp_path):
    wide = "word " * 30
    text = f"{wide}\n\n| {wide} |\n\n    {wide}\n\n```\n{wide}\n```\n"
    assert found(tmp_path, {"a.md": text}) == ["a.md:1: 150 columns, more than 110"]


def test_c__is_held_to_lengths_and_names_too(tmp_path):
    body = "static int work(int a)\n{\n" + "    a++;\n" * house.LINES + "}\n"
    files = {
        "agent/a.c": body,
        "agent/io/a.c": "/* " + "word " * 30 + "*/\n",
        "agent/b.c": f"/* long: a table */\n{body}",
    }
    names, long, wide = found(tmp_path, files)
    assert "has the same name" in names and "work has 82 lines" in long and "columns" in wide
