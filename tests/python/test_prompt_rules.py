"""The prompts say what form a mechanical draft has: a model that is shown both has to find it so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from diff_support import ROOT, draft
from kernel_agent import forward

PROMPTS = ROOT / "prompts"


def parsed(name: str) -> tuple[str, ast.Module]:
    file: Path = ROOT / "examples" / f"{name}.py"
    loaded = forward.load(file)
    text = draft(file, (loaded.sweep_cpu or loaded.sweep)[0].dims)["backward"]
    return text, ast.parse(text)


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "swiglu"])
def test_draft_has_the_form_that_its_prompt_describes(name: str) -> None:
    said = " ".join((PROMPTS / "draft.md").read_text().split())
    assert "a function for each launch around the stub's own host code" in said
    assert "all gradients computed whether they are needed or not, buffers filled with zeros" in said
    text, tree = parsed(name)
    functions = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    entry = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and "_autograd" in node.name)
    assert len(functions) == ast.unparse(entry).count(".apply(") == 1  # each of these has one launch
    assert "torch.empty" in ast.unparse(entry)  # the stub's host code
    assert "needs_input_grad" not in text and "zero_()" in text


def test_rules_leave_room_for_that_form() -> None:
    rules = (PROMPTS / "system.md").read_text()
    assert "A mechanical draft has one around each launch instead" in rules
    assert "exactly one subclass" not in rules
