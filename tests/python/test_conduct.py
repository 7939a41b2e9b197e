"""What the candidate's child reports of its conduct: torch operations by phase, nesting, plain outputs,
broadcast atomics."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from kernel_agent import summands, tensors
from kernel_agent.operations import candidate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attacks"))
import suite

DIMS = {
    "scale": {"N": 24},
    "several": {"N": 24},
    "attention": {"N": 1, "D": 4},
    "softmax": {"M": 3, "N": 20},
    "twice": {"N": 24},
}


def run(folder: Path, control: str, *edits: tuple[str, str]) -> dict:
    """One case of the control with these edits."""
    backward = suite.Attack("", control, edits, "").backward()
    path = folder / "pair.py"
    path.write_text(suite.pair(control, backward))
    dims = next(dims for stub, dims in DIMS.items() if control.startswith(stub))
    case = {"id": 0, "dims": dims, "seed": 5, "upstream": {"kind": "normal", "seed": 4}}
    return candidate.run({"file": str(path), "device": "cpu", "cases": [case]}, folder)["cases"][0]


def test_operators_of_tensors__are_counted_in_their_phase(tmp_path):
    result = run(
        tmp_path,
        "softmax_saved_output",
        ("ctx.save_for_backward(y)", "ctx.save_for_backward(y / 1)"),
        ("        return dx\n", "        return dx - dy\n"),
    )
    assert "aten::div" in result["torch_ops_forward"] and "aten::div" not in result["torch_ops_backward"]
    assert result["torch_ops_backward"]["aten::sub"] == 1


def test_operations_of_the_stub_itself__are_not_held_against_the_forward(tmp_path):
    result = run(tmp_path, "softmax_saved_output")
    assert "aten::empty_like" not in result["torch_ops_forward"]


def test_sum_that_autograd_makes_of_two_gradients__is_not_the_candidates(tmp_path):
    assert "aten::add" not in run(tmp_path, "twice_applied")["torch_ops_backward"]
    of_two, of_one = (
        run(tmp_path, "twice_applied", ("        return dx, ds\n", f"        return dx + {other}, ds\n"))
        for other in ("torch.zeros_like(dx)", "dx")
    )
    assert of_two["torch_ops_backward"]["aten::add"] == 2
    assert of_one["torch_ops_backward"][summands.TOLD] == 2


def test_operations_on_indices__are_not_counted(tmp_path):
    result = run(
        tmp_path,
        "softmax_saved_output",
        (
            "        return dx\n",
            "        order = torch.argsort(torch.arange(M) * -1) + 1\n        return dx\n",
        ),
    )
    assert not {"aten::argsort", "aten::sort", "aten::mul", "aten::add"} & set(result["torch_ops_backward"])


def test_a_value_that_the_host_reads__is_counted(tmp_path):
    result = run(
        tmp_path,
        "softmax_saved_output",
        ("        return dx\n", "        float(dx[0, 0])\n        return dx\n"),
    )
    assert result["torch_ops_backward"]["aten::_local_scalar_dense"] == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("square, None, x.numel() + 1, (x, cube), sign", "output 2 is 25, but the stub returns 24"),
        ("square, 0, x.numel(), (x, cube), sign", "output 1 is 0, but the stub returns None"),
        (
            "square, None, x.numel(), (x.clone(), cube), sign",
            "output 3 is tensor, but the stub returns input",
        ),
        (
            "square, None, x.numel(), x, cube, sign",
            "nests its return value as (......), the stub as (...(..).)",
        ),
    ],
)
def test_return_value_that_is_not_the_stubs__is_an_error(tmp_path, returned, message):
    result = run(tmp_path, "several_outputs", ("square, None, x.numel(), (x, cube), sign", returned))
    assert result["error"]["kind"] == "candidate_shape" and message in result["error"]["message"]


def test_atomics_with_a_mask_of_one_lane__reach_every_lane(tmp_path):
    run(tmp_path, "attention_rows")
    made = tensors.load(tmp_path / "case-0.safetensors")
    assert torch.count_nonzero(made["grad/v"]) == 4  # one row of keys: the mask is a single lane
