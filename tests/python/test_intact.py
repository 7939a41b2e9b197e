"""What a file may not change of the code that judges it."""

from __future__ import annotations

import pytest
import torch
from kernel_agent import draw, errors, forward, intact
from sources import SCALE_PAIR

OWN = SCALE_PAIR.replace("# ---- backward ----", "")


def test_nothing_changed__is_none():
    assert intact.changed(intact.taken()) is None


def test_function_of_torch__that_is_another__is_named(monkeypatch):
    before = intact.taken()
    monkeypatch.setattr(torch, "equal", lambda a, b: True)
    assert intact.changed(before) == "torch.equal"


def test_method_and_new_name_of_this_package__are_named(monkeypatch):
    before = intact.taken()
    monkeypatch.setattr(draw, "open", print, raising=False)
    assert intact.changed(before) == "kernel_agent.draw.open"
    monkeypatch.undo()
    monkeypatch.setattr(torch.autograd.Function, "apply", None)
    assert "Function" in (intact.changed(before) or "")


def test_file__that_has_torch_change_itself__is_loaded(write):
    text = OWN.replace("def scale_autograd", "@torch.compiler.disable\ndef scale_autograd")
    assert forward.load(write(text)).stub_name == "scale"


def test_file__that_patches_by_a_way_nobody_thought_of__is_unusable(write, monkeypatch):
    monkeypatch.setattr(torch, "equal", torch.equal)  # put back afterwards
    text = OWN + "\n\ngetattr(torch, 'x', lambda: 0); torch.__dict__.update(equal=max)\n"
    with pytest.raises(errors.Unusable, match=r"changes torch\.equal") as caught:
        forward.load(write(text))
    assert caught.value.kind == "import" and caught.value.remedy


@pytest.mark.parametrize("line", ["import kernel_agent.draw", "from kernel_agent import draw, autodiff"])
def test_import_of_the_judges_package__is_told_with_its_line(line, write):
    with pytest.raises(errors.Unusable, match=r"imports kernel_agent\.draw") as caught:
        forward.load(write(f"{line}\n{OWN}"))
    assert (caught.value.kind, caught.value.line) == ("import", 1)
