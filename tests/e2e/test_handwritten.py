"""Modules that somebody wrote without knowing of pairs: an autograd function, make_args and SWEEP are enough
for the verdict."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from conftest import Agent, Ended

FILES = Path(__file__).parent / "handwritten"


def check(agent: Agent, name: str, *edits: tuple[str, str]) -> Ended:
    text = (FILES / f"{name}.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (agent.folder / f"{name}.py").write_text(text)
    return agent("check", f"{name}.py", "--json", "--junit", "out.xml")


@pytest.mark.parametrize(
    ("name", "stub", "grads"),
    [("alias", "silu", ["x"]), ("caller", "rms_norm", ["x", "weight"]), ("class_only", "MaskedScale", ["x"])],
)
def test_right_module_is_verified_as_it_is(agent: Agent, name: str, stub: str, grads: list[str]) -> None:
    done = check(agent, name)
    assert (done.code, done.result["verdict"], done.result["stub"]) == (0, "verified", stub), done.err
    assert [gradient["name"] for gradient in done.result["gradients"]] == grads


# name: (module, edit, what the verdict must say)
WRONG = {
    "a wrong factor": ("alias", ("(1 + x * (1 - s))", "(1 + x * s)"), "gradient of x is wrong"),
    "torch in the backward": (
        "caller",
        ("        return dx, dw, None", "        return dx, (grad_output * x).sum(0), None"),
        "torch_math",
    ),
    "matmul in the backward": (
        "caller",
        ("        return dx, dw, None", "        return torch.matmul(dx, dx), dw, None"),
        "torch_math: line",
    ),
    "another library in the backward": (
        "caller",
        ("        M, N = x.shape\n        dx,", "        M, N = np.shape(x)\n        dx,"),
        "import: line",
    ),
    "a fallback": (
        "alias",
        (
            "        silu_bwd[(triton.cdiv(x.numel(), 64),)](x, dy, dx, x.numel(), BLOCK=64)\n        "
            "return dx",
            "        try:\n            silu_bwd[(1,)](x, dy, dx, x.numel(), BLOCK=64)\n"
            "        except Exception:\n            dx = dy\n        return dx",
        ),
        "try: line",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_module_is_not_verified_and_says_why(agent: Agent, name: str) -> None:
    module, edit, reason = WRONG[name]
    done = check(agent, module, edit)
    assert done.code == 4, done.err
    assert reason in done.result["failures"]
    suite = ET.parse(agent.folder / "out.xml").getroot().find("testsuite")
    assert suite is not None and (suite.get("failures"), suite.get("errors")) != ("0", "0")
    failure = suite.find("testcase[@name='verdict']/failure")
    assert failure is not None and failure.text is not None and reason in failure.text


def test_several_functions_that_could_be_meant_are_named_with_the_remedy(agent: Agent) -> None:
    done = check(agent, "alias", ("silu = SiLU.apply", "silu = SiLU.apply\nswish = SiLU.apply"))
    assert done.code == 3
    assert "silu (line 46)" in done.result["error"]["message"] and "swish" in done.result["error"]["message"]
    assert "@autodiff" in done.result["error"]["remedy"]


def test_decorator_says_which_function_and_which_inputs(agent: Agent) -> None:
    decorated = "@autodiff(inputs_require_grad=(1,))\ndef rms_norm(x, weight, eps=1e-6):"
    decorate = (
        ("import numpy as np\n", "import numpy as np\nfrom kernel_agent import autodiff\n"),
        ("def rms_norm(x, weight, eps=1e-6):", decorated),
    )
    unnamed = check(agent, "caller", *decorate)
    assert unnamed.code == 4 and "which no position names" in unnamed.result["failures"], unnamed.err
    done = check(agent, "caller", *decorate, ("        return dx, dw, None", "        return None, dw, None"))
    assert done.code == 0, done.err
    assert [gradient["name"] for gradient in done.result["gradients"]] == ["weight"]


def test_module_without_any_backward_is_told_what_is_missing(agent: Agent) -> None:
    done = check(agent, "alias", ("    def backward(ctx, dy):", "    def backwards(ctx, dy):"))
    assert done.code == 3
    assert "no torch.autograd.Function with a backward" in done.err


# A gradient that is twice too large, and a judge that is told to halve it: `told` in four ways.
HALVED = """

def _halved(path, made, save=_judge.save):
    if not any(name.startswith("fwd/") for name in made):
        made = {name: t / 2 if name.startswith(("grad/", "again/")) else t for name, t in made.items()}
    return save(path, made)


"""
PATCHES = {
    "sys.modules": (
        'import sys\n\n_judge = sys.modules["kernel_agent.tensors"]\n',
        "_judge.save = _halved\n",
    ),
    "setattr": (
        'import sys\n\n_judge = sys.modules["kernel_agent.tensors"]\n',
        'setattr(_judge, "save", _halved)\n',
    ),
    "exec": (
        "_names = {}\nexec(\"import sys; judge = sys.modules['kernel_agent.tensors']\", _names)\n"
        '_judge = _names["judge"]\n',
        '_judge.__dict__["save"] = _halved\n',
    ),
    "importlib": (
        'import importlib\n\n_judge = importlib.import_module("kernel_agent.tensors")\n',
        "_judge.save = _halved\n",
    ),
    "a frame": (
        "def _walk():\n    yield\n\n\n_frame = _walk().gi_frame\n"
        '_judge = _frame.f_builtins["__import__"]("kernel_agent.tensors").tensors\n',
        "vars(_judge).update(save=_halved)\n",
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_module_that_patches_the_judge_is_not_verified_and_is_told_so(agent: Agent, name: str) -> None:
    found, put = PATCHES[name]
    done = check(
        agent,
        "alias",
        ("(1 + x * (1 - s))", "(1 + x * (1 - s)) * 2"),
        ("silu = SiLU.apply", "silu = SiLU.apply\n" + found + HALVED + put),
    )
    said = done.result.get("failures") or done.result["error"]["message"]
    assert done.code in (3, 4) and re.search("patch: line|changes .*kernel_agent", said), said


def test_module_that_imports_the_judges_own_package_is_told_so(agent: Agent) -> None:
    done = check(agent, "alias", ("silu = SiLU.apply", "silu = SiLU.apply\nfrom kernel_agent import draw"))
    assert done.code == 3, done.err
    assert "kernel_agent.draw" in done.result["error"]["message"] and done.result["error"]["line"] == 47
    assert "autodiff" in done.result["error"]["remedy"]


def test_module_whose_tests_and_settings_are_its_own_is_verified(agent: Agent) -> None:
    """What it does beside the check is nobody's business, as long as it changes nothing for others."""
    beside = """import os
import sys

torch.backends.cuda.matmul.allow_tf32 = False
os.environ["NAME"] = "value"


class Settings:
    def __init__(self):
        self.seed = 1


def main(argv=sys.argv):
    settings = Settings()
    settings.seed = 2
    for name, value in vars(settings).items():
        print(name, getattr(settings, name), value)


if __name__ == "__main__":
    sys.exit(main())
"""
    done = check(agent, "alias", ("silu = SiLU.apply", "silu = SiLU.apply\n" + beside))
    assert done.code == 0, done.err
