"""Modules that somebody wrote without knowing of pairs: an autograd function, make_args and SWEEP are enough
for the verdict."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent, Ended

FILES = Path(__file__).parent / "handwritten"
BATCH = 6  # modules that one start of the program is asked about
Edit = tuple[str, str]


def put(folder: Path, name: str, *edits: Edit) -> str:
    text = (FILES / f"{name}.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return f"{name}.py"


def check(agent: Agent, name: str, *edits: Edit) -> Ended:
    return agent("check", put(agent.folder, name, *edits), "--json")


@dataclass
class Verdict:
    """Of one of several modules: its result, its exit code, its part of the JUnit file."""

    result: dict[str, Any]
    suite: ET.Element

    @property
    def code(self) -> int:
        code: int = self.result["exit_code"]
        return code


Verdicts = Callable[[str], Verdict]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """verdicts(case) of CASES. The program is asked about a batch, and once, since starting it costs as much
    as half a verdict."""
    made: dict[str, Verdict] = {}
    asked: set[int] = set()

    def of(case: str) -> Verdict:
        names = list(CASES)
        batch = names.index(case) // BATCH
        if batch not in asked:
            asked.add(batch)
            made.update(check_all(tmp_path_factory.mktemp("batch"), names[batch * BATCH :][:BATCH]))
        return made[case]

    return of


def check_all(folder: Path, cases: list[str]) -> dict[str, Verdict]:
    files = []
    for number, case in enumerate(cases):
        module, *edits = CASES[case]
        files.append(f"{number}/{put(folder / str(number), module, *edits)}")
    _, results = results_of(Agent(folder), *files)
    suites = list(ET.parse(folder / "out.xml").getroot())
    return {case: Verdict(result, suite) for case, result, suite in zip(cases, results, suites, strict=True)}


def results_of(agent: Agent, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """The results of one check, in the order of what was checked."""
    command = agent.command("check", *words, "--json", "--quiet", "--junit", "out.xml")
    done = subprocess.run(
        command, cwd=agent.folder, env=agent.env, capture_output=True, text=True, check=False
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


# name: (what is called, gradients)
RIGHT = {
    "alias": ("silu", ["x"]),
    "caller": ("rms_norm", ["x", "weight"]),
    "class_only": ("MaskedScale", ["x"]),
    "rms_norm": ("RMSNormFunction", ["x", "weight"]),
    "fused_add": ("fused_add_rms_norm", ["x", "residual", "weight"]),
    "geglu": ("geglu", ["a", "b"]),
    "swiglu": ("swiglu", ["a", "b"]),
    "cross_entropy": ("cross_entropy", ["logits"]),
    "kl_div": ("kl_div", ["log_p"]),
    "softmax_amp": ("softmax", ["x"]),
    "layer_norm": ("layer_norm", ["x", "weight", "bias"]),
}


WRAPPED = (
    "rms_norm",
    ("import torch\nimport triton\n", "from functools import wraps\n\nimport torch\nimport triton\n"),
    ("    def wrapper(ctx, *args", "    @wraps(fn)\n    def wrapper(ctx, *args"),
)


@pytest.mark.parametrize("name", RIGHT)
def test_right_module_is_verified_as_it_is(verdicts: Verdicts, name: str) -> None:
    made = verdicts(name)
    assert (made.code, made.result["verdict"]) == (0, "verified"), made.result
    assert (made.result["stub"], [g["name"] for g in made.result["gradients"]]) == RIGHT[name]


def test_raise_where_there_are_no_rows_is_told_and_no_failure(verdicts: Verdicts) -> None:
    (skipped,) = verdicts("rms_norm").result["shapes"]["skipped"]
    assert "no elements, the backward raises: ZeroDivisionError" in skipped["reason"], skipped


def test_decorator_with_functools_wraps_is_one_too(verdicts: Verdicts) -> None:
    made = verdicts("wrapped")
    assert (made.code, made.result["verdict"]) == (0, "verified"), made.result


def test_what_is_no_fault_and_worth_knowing_is_said(verdicts: Verdicts) -> None:
    shared = verdicts("fused_add").result["checked"]["remarks"]
    assert len(shared) == 1 and "grad/residual=grad/x" in shared[0]
    scaled = verdicts("cross_entropy").result["checked"]["remarks"]
    assert len(scaled) == 1 and "multiplies it by the upstream" in scaled[0]


# name: (module, edit, what the verdict must say)
WRONG = {
    "a wrong factor": ("alias", ("(1 + x * (1 - s))", "(1 + x * s)"), "gradient of x is wrong"),
    "torch in the backward": (
        "caller",
        ("        return dx, dw, None", "        return dx, (grad_output * x).sum(0), None"),
        "torch_math",
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
    "an upstream that is overwritten": (
        "swiglu",
        ("    inplace: bool = False", "    inplace: bool = True"),
        "modified: upstream/0 was modified in place: the backward overwrites the upstream gradient",
    ),
    "an input that is overwritten": (
        "geglu",
        ("da, db = torch.empty_like(a), torch.empty_like(b)", "da, db = a, b"),
        "modified: a was modified in place",
    ),
    "a saved tensor that is overwritten by a kernel": (
        "kl_div",
        ("scaled = torch.empty_like(dp)", "scaled = dp"),
        "saved/0 was modified in place: a tensor saved for the backward is overwritten",
    ),
    "a saved tensor that is overwritten with torch": (
        "cross_entropy",
        ("    return dx * grad_output", "    dx *= grad_output\n    return dx"),
        "saved/0 was modified in place: a tensor saved for the backward is overwritten",
    ),
    "a gradient of another shape": (
        "fused_add",
        ("return dx, dx, dw, None", "return dx, dx, dw[:1], None"),
        "the backward returns a gradient of the wrong shape: value 3 of its return is [1]",
    ),
    "a gradient that the forward makes with torch": (
        "cross_entropy",
        (
            "    return loss.sum(), dx\n",
            "    hot = torch.nn.functional.one_hot(target, n)\n"
            "    return loss.sum(), (logits.softmax(-1) - hot) / rows\n",
        ),
        "prepared: the forward makes the gradient of logits with torch",
    ),
    "a gradient that the forward makes with torch, scaled by a kernel": (
        "kl_div",
        ("        ctx.save_for_backward(dp)", "        ctx.save_for_backward(-log_q.exp() / rows)"),
        "prepared: the forward makes the gradient of log_p with torch",
    ),
    "a gradient that torch writes over that of a kernel": (
        "cross_entropy",
        (
            "    return loss.sum(), dx\n",
            "    hot = torch.nn.functional.one_hot(target, n)\n"
            "    return loss.sum(), dx.copy_((logits.softmax(-1) - hot) / rows)\n",
        ),
        "prepared: the forward makes the gradient of logits with torch",
    ),
    "a gradient of which a kernel makes one row": (
        "cross_entropy",
        (
            "    return loss.sum(), dx\n",
            "    hot = torch.nn.functional.one_hot(target, n)\n"
            "    made = (logits.softmax(-1) - hot) / rows\n"
            "    cross_entropy_kernel[(1,)](logits, target, loss, made, rows, n, ignore_index, BLOCK=block)\n"
            "    return loss.sum(), made\n",
        ),
        "is the same when the backward's kernels do nothing",
    ),
    "a gradient that torch finishes": (
        "cross_entropy",
        ("return dx * grad_output", "return (dx - dx.sum()) * grad_output"),
        "torch_math",
    ),
    "an upstream that scales nothing": (
        "cross_entropy",
        ("return dx * grad_output", "return dx"),
        "gradient of logits is wrong",
    ),
    "a product of two tensors that kernels made": (
        "cross_entropy",
        ("return dx * grad_output", "return dx * dx * grad_output"),
        "gradient of logits is wrong",
    ),
    "a factor that is left out": (
        "softmax_amp",
        ("tl.store(dx_ptr + row * n + cols, scale * y", "tl.store(dx_ptr + row * n + cols, y"),
        "gradient of x is wrong",
    ),
    "one of two upstreams left out": (
        "fused_add",
        ("    dx += tl.load(ds_ptr + at, mask=mask, other=0.0)\n", ""),
        "gradient of x is wrong",
    ),
    "an upstream that need not be contiguous": (
        "fused_add",
        ("    @input_guard\n    def backward", "    def backward"),
        "upstream",
    ),
    "a guard that hides failures": (
        "geglu",
        (
            "    else:\n        yield\n",
            "    else:\n        try:\n            yield\n        except RuntimeError:\n            pass\n",
        ),
        "try: line",
    ),
    "statistics that have a gradient after all": (
        "layer_norm",
        ("        ctx.mark_non_differentiable(mean, rstd)\n", ""),
        "gradient of x is wrong",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_module_is_not_verified_and_says_why(verdicts: Verdicts, name: str) -> None:
    reason, made = WRONG[name][2], verdicts(name)
    assert made.code == 4, made.result
    assert reason in made.result["failures"]
    assert (made.suite.get("failures"), made.suite.get("errors")) != ("0", "0")
    failure = made.suite.find("testcase[@name='verdict']/failure")
    assert failure is not None and failure.text is not None and reason in failure.text


WRONG_SIGMOID = ("value = s * (1 - s) if BACKWARD", "value = s if BACKWARD")


def test_each_function_of_a_module_has_its_verdict(agent: Agent) -> None:
    code, results = results_of(agent, put(agent.folder, "activations", WRONG_SIGMOID))
    verdicts = {result["stub"]: (result["verdict"], result["exit_code"]) for result in results}
    assert code == 4 and verdicts == {
        "silu": ("verified", 0),
        "sigmoid": ("not_verified", 4),
        "product": ("verified", 0),
    }
    suites = [suite.get("name") for suite in ET.parse(agent.folder / "out.xml").getroot()]
    assert suites == [f"activations.py::{name}" for name in ("silu", "sigmoid", "product")]


def test_function_that_is_named_is_checked_alone(agent: Agent) -> None:
    file = put(agent.folder, "activations", WRONG_SIGMOID)
    for name, stub, expected in (("Sigmoid", "sigmoid", 4), ("product", "product", 0)):
        done = agent("check", file, "--json", "--quiet", "--function", name)
        assert (done.code, done.result["stub"]) == (expected, stub), done.err


def test_name_that_the_file_does_not_have_is_answered_with_those_that_it_has(agent: Agent) -> None:
    done = agent("check", put(agent.folder, "activations"), "--json", "--quiet", "--function", "gelu")
    assert done.code == 3
    message = done.result["error"]["message"]
    assert "called gelu" in message and "silu, sigmoid, product" in message
    assert agent("check", put(agent.folder, "alias"), "--quiet", "--function", "silu").code == 0


def test_function_without_arguments_is_not_checked_unless_it_is_named(agent: Agent) -> None:
    file = put(agent.folder, "activations", ("def make_args_product(", "def arguments_of_product("))
    code, results = results_of(agent, file)
    assert code == 0 and [one["verdict"] for one in results] == ["verified"] * 2 + ["not_checked"]
    assert [one["stub"] for one in results] == ["silu", "sigmoid", "product"]
    error = results[2]["error"]
    assert "no make_args for it" in error["message"] and "make_args_product" in error["remedy"]
    suite = ET.parse(agent.folder / "out.xml").getroot().find("testsuite[@name='activations.py::product']")
    assert suite is not None and (suite.get("skipped"), suite.get("errors")) == ("1", "0")
    assert agent("check", file, "--quiet", "--function", "product").code == 3


def test_two_names_of_one_function_are_one_check(verdicts: Verdicts) -> None:
    made = verdicts("two names")
    assert (made.code, made.result["stub"]) == (0, "silu"), made.result


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


# A gradient that is twice too large, and a judge that is told to halve it: `told` in two ways
# (test_scan.py has more).
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
    "a frame": (
        "def _walk():\n    yield\n\n\n_frame = _walk().gi_frame\n"
        '_judge = _frame.f_builtins["__import__"]("kernel_agent.tensors").tensors\n',
        "vars(_judge).update(save=_halved)\n",
    ),
}


@pytest.mark.parametrize("name", PATCHES)
def test_module_that_patches_the_judge_is_not_verified_and_is_told_so(verdicts: Verdicts, name: str) -> None:
    made = verdicts(name)
    said = made.result.get("failures") or made.result["error"]["message"]
    assert made.code in (3, 4) and re.search("patch: line|changes .*kernel_agent", said), said


def test_module_that_imports_the_judges_own_package_is_told_so(verdicts: Verdicts) -> None:
    error = verdicts("own package").result["error"]
    assert verdicts("own package").code == 3, error
    assert "kernel_agent.draw" in error["message"] and error["line"] == 47
    assert "autodiff" in error["remedy"]


# What a module does beside the check is nobody's business, as long as it changes nothing for others.
BESIDE = """import os
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


def test_module_whose_tests_and_settings_are_its_own_is_verified(verdicts: Verdicts) -> None:
    made = verdicts("beside")
    assert made.code == 0, made.result


def after_silu(text: str) -> Edit:
    return "silu = SiLU.apply", "silu = SiLU.apply\n" + text


# name: (module, edits)
CASES: dict[str, Any] = {
    **{name: (name,) for name in RIGHT},
    "wrapped": WRAPPED,
    **{name: (module, edit) for name, (module, edit, _) in WRONG.items()},
    "two names": ("alias", after_silu("swish = SiLU.apply")),
    **{
        name: ("alias", ("(1 + x * (1 - s))", "(1 + x * (1 - s)) * 2"), after_silu(found + HALVED + patched))
        for name, (found, patched) in PATCHES.items()
    },
    "own package": ("alias", after_silu("from kernel_agent import draw")),
    "beside": ("alias", after_silu(BESIDE)),
}
