"""Before a backward is judged the oracles must agree: what a forward gets that makes them differ, and what
the result says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Agent
from files import FORWARD, SMALL

REFERENCE = "\n\ndef reference(x, w):\n    return x * w\n"
# The kernel's scale is a number that the host reads of x, all of it: no gradient goes that way, though the
# outputs change with it.
HOST_VALUE = FORWARD.replace("x * w, mask", "x * w * scale, mask").replace(
    "y_ptr, N, BLOCK:", "y_ptr, N, scale, BLOCK:"
)
HOST_VALUE = HOST_VALUE.replace("w, y, N, BLOCK=", "w, y, N, x.sum().item(), BLOCK=")
SIZES = '[{"M": 4, "N": 24}, {"M": 3, "N": 33}]'
RACY = FORWARD.replace("y_ptr + row * N + cols", "y_ptr + cols").replace(SIZES, '[{"M": 64, "N": 64}]')

# name: (forward file, words of the message)
DISAGREE = {
    "reference": (
        FORWARD + REFERENCE.replace("x * w", "x * w * 1.01"),
        ["reference()", "oracle made from the forward", "output 0"],
    ),
    "reference of a gradient only": (
        FORWARD + REFERENCE.replace("x * w", "x * w + (x - x.detach())"),
        ["reference()", "gradient of x"],
    ),
    "finite differences": (HOST_VALUE, ["gradient of x", "finite differences", "certain to"]),
    "race": (RACY, ["Triton forward", "float64 oracle", "output 0"]),
}


LARGER = "larger, "


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the results of all of them have for an error: a batch, for which Python starts once."""
    agent = Agent(tmp_path_factory.mktemp("disagree"))
    kernels = agent.folder / "kernels"
    kernels.mkdir()
    for name, (text, _) in DISAGREE.items():
        (kernels / f"{name}.py").write_text(text)
        larger = text.replace(SIZES, '[{"M": 64, "N": 64}]')
        if name in ("race", "finite differences"):
            (kernels / f"{LARGER}{name}.py").write_text(larger + "\n")
    done = agent("batch", kernels, "--backend", "none", "--json")
    assert {item["exit_code"] for item in done.result["files"]} == {3}, done.err
    return {Path(item["file"]).stem: item["result"]["error"] for item in done.result["files"]}


@pytest.mark.parametrize("name", DISAGREE)
def test_oracles_that_disagree_end_the_run_with_code_3(errors: dict[str, dict[str, Any]], name: str) -> None:
    error = errors[name]
    assert error["kind"] == "forward_oracle_mismatch"
    for word in DISAGREE[name][1]:
        assert word in error["message"], error["message"]
    assert error["remedy"]


@pytest.mark.parametrize("name", ["race", "finite differences"])
def test_the_smallest_shape_that_shows_it_is_named(errors: dict[str, dict[str, Any]], name: str) -> None:
    # What finite differences miss is by chance as small as their own error now and then, of the smallest too.
    sizes = [16] if name == "race" else [16, 32]
    assert errors[LARGER + name]["dims"] in [{"M": size, "N": size} for size in sizes]


SQUARE = "\n\ndef reference(x):\n    return x * x\n"
# A straight-through stub: its gradient is not its derivative, on purpose, and detach() says so.
STRAIGHT = SMALL.replace("    y = torch", "    x = x + (torch.round(x) - x).detach()\n    y = torch", 1)
# What has no memory anywhere no oracle can compare: it fails itself, which says nothing about the forward.
FAILS = SQUARE.replace("x * x", '(x * x).to("meta") if x.numel() WHERE else x * x')
# Whole numbers: one is nothing to the outputs, as a size that the tensors tell; the other is.
NUMBERS = SMALL.replace("def square(x)", "def square(x, size, times)").replace(
    "    x = x.contiguous()\n    y = torch", "    x = times * x.contiguous()\n    y = torch", 1
)
NUMBERS = NUMBERS.replace("dtype=dtype),)", 'dtype=dtype), dims["N"], 3)')
NO_ERRORS = {
    "numbers": NUMBERS,
    "agree": SMALL + SQUARE,
    "cannot tell": STRAIGHT,
    "reference raises": SMALL + SQUARE.replace("x * x", "x.no_such_thing"),
    "fails at one size": SMALL + FAILS.replace("WHERE", "== 1"),
    "fails at all others": SMALL + FAILS.replace("WHERE", "!= 24"),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """The results and the logs of runs that go on; a batch, too."""
    agent = Agent(tmp_path_factory.mktemp("agree"))
    kernels = agent.folder / "kernels"
    kernels.mkdir()
    for name, text in NO_ERRORS.items():
        (kernels / f"{name}.py").write_text(text)
    done = agent("batch", kernels, "--backend", "none", "--no-optimise", "--json")
    results = {Path(item["file"]).stem: item["result"] for item in done.result["files"]}
    assert set(results) == set(NO_ERRORS), done.err
    lines = done.err.splitlines()
    return {
        name: (result, "\n".join(line for line in lines if name in line)) for name, result in results.items()
    }


def test_oracles_that_agree_are_in_the_result_and_the_report(ended: dict[str, tuple[Any, str]]) -> None:
    result, _ = ended["agree"]
    assert result["exit_code"] == 0
    oracles = result["oracles"]
    assert oracles["reference"] == "agree"
    differences = oracles["finite_differences"]
    assert (differences["verdict"], differences["agree"], differences["open"]) == ("agree", 4, 0)
    assert differences["dims"] == {"N": 24}
    report = (Path(result["run_dir"]) / "report.md").read_text()
    assert "| finite differences against the oracle | agree: 4 slopes agree, 0 tell nothing |" in report


def test_a_whole_number_that_changes_no_output_is_not_varied(ended: dict[str, tuple[Any, str]]) -> None:
    result, _ = ended["numbers"]
    assert result["exit_code"] == 0
    scalars = result["oracles"]["scalars"]
    assert {one["name"] for one in scalars["varied"]} == {"times"}
    assert scalars["never_varied"] == {"size": "the outputs stay the same"}


def test_differences_that_cannot_tell_are_no_agreement(ended: dict[str, tuple[Any, str]]) -> None:
    result, log = ended["cannot tell"]
    assert result["exit_code"] in (0, 4)
    differences = result["oracles"]["finite_differences"]
    assert (differences["verdict"], differences["agree"]) == ("open", 0)
    assert "detaches" in differences["reason"]
    assert "finite differences say nothing" in log


def test_reference_that_raises_is_said_and_is_no_second_opinion(ended: dict[str, tuple[Any, str]]) -> None:
    result, _ = ended["reference raises"]
    assert result["exit_code"] == 0
    assert result["oracles"]["reference"] == "unusable"
    assert "no_such_thing" in result["oracles"]["reference_error"]


def test_a_case_that_the_oracle_itself_fails_in_is_said(ended: dict[str, tuple[Any, str]]) -> None:
    result, log = ended["fails at one size"]
    assert result["exit_code"] == 0
    crashed = result["oracles"]["crashed"]
    assert crashed["cases"] and "meta" in crashed["message"]
    assert (
        f"the oracle itself failed in {crashed['cases']} cases, on which nothing is checked: oracle: " in log
    )
    report = (Path(result["run_dir"]) / "report.md").read_text()
    assert "in which the oracle itself failed" in report


def test_nothing_is_verified_where_it_leaves_no_hidden_shape(ended: dict[str, tuple[Any, str]]) -> None:
    result, _ = ended["fails at all others"]
    assert result["exit_code"] not in (0, 4)
    assert result["error"]["kind"] == "internal"
    assert "no hidden shape is left: oracle: " in result["error"]["message"]
