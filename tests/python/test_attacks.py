"""The attack suite without the program: what the scan alone must find."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from kernel_agent.operations import scan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attacks"))
import suite
from accepted import OPEN

ATTACKS = suite.attacks()
BY_SCAN = [attack for attack in ATTACKS if ": line" in attack.reason]


def findings(control: str, backward: str) -> str:
    source = suite.pair(control, backward)
    found = scan.scan(source, ast.parse(source))["findings"]
    return "\n".join(
        f"{f['rule']}: line {f['line']}: {f['message']}" for f in found if f["severity"] == "reject"
    )


@pytest.mark.parametrize("attack", BY_SCAN, ids=lambda attack: f"{attack.row}-{attack.name}")
def test_scan__attack_with_a_rule_of_the_scan__is_found_without_running_it(attack: suite.Attack):
    found = findings(attack.control, attack.backward())
    if "|" not in attack.reason or found:  # an alternative may be found later, when it runs
        assert re.search(attack.reason, found)


@pytest.mark.parametrize("name", suite.controls())
def test_scan__honest_control__has_no_finding(name: str):
    assert findings(name, suite.control(name)) == ""


def test_attacks__cover_every_row_of_the_table():
    assert {attack.row for attack in ATTACKS} == set(range(1, 38))
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 410
    assert len(suite.controls()) >= 125


def test_open_attack__still_fits_its_control_and_is_in_no_row():
    assert OPEN and all(attack.backward() for attack in OPEN)
    assert not {attack.name for attack in OPEN} & {attack.name for attack in ATTACKS}


# What people get wrong most often; each has to be in the suite by itself.
CLASSICS = {
    "softmax that is right for an upstream of ones": "softmax",
    "db summed over one block of rows only": "layer_norm",
    "dq without the scale": "attention",
    "cross-entropy that takes the upstream of a sum for granted": "cross_entropy",
    "causal mask off by one": "attention",
    "RMS norm that is right for powers of two only": "rms_norm",
}


@pytest.mark.parametrize("name", CLASSICS)
def test_classic_mistake__is_an_attack_of_the_suite(name: str):
    (attack,) = [attack for attack in ATTACKS if attack.name == name]
    assert attack.control.startswith(CLASSICS[name]) and attack.backward() != suite.control(attack.control)


def test_suite__edit_that_does_not_fit__is_an_error():
    attack = suite.Attack("nothing", "scale_atomics", (("no such text", ""),), "x")
    with pytest.raises(ValueError, match="occurs 0 times"):
        attack.backward()
