"""What cannot be differentiated rightly is refused, by construct, line and remedy; what merely looks
dangerous is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diff_support import assert_right, draft
from kernel_agent import errors, forward
from kernel_agent.differentiate import Refusal, api
from kernel_agent.differentiate.reverse import rules

TEMPLATE = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + cols, mask=mask, other=0.0)
{body}


@autodiff(inputs_require_grad=(0, 1))
def stub(x, y):
    out = torch.zeros(2 * x.numel(), device=x.device, dtype=x.dtype)
    kernel[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)
    return out


SWEEP = [{{"N": 40}}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))
"""

REFUSED = {
    "inline_asm": ("    y = tl.inline_asm_elementwise('', '=r,r', [x], tl.float32, True, 1)\n    tl.store(out_ptr + cols, y)", "tl.inline_asm_elementwise", 13),
    "sort": ("    tl.store(out_ptr + cols, tl.sort(x), mask=mask)", "tl.sort", 13),
    "cas": ("    tl.atomic_cas(out_ptr, 0, 1)\n    tl.store(out_ptr + cols, x)", "tl.atomic_cas", 13),
    "max_atomic": ("    tl.atomic_max(out_ptr + cols, x)", "tl.atomic_max", 13),
    "atomic_result": ("    old = tl.atomic_add(out_ptr + cols, x, mask=mask)\n    tl.store(out_ptr + cols + n, old * x)", "atomic result", 14),
    "overwritten": ("    tl.store(out_ptr + cols, x, mask=mask)\n    tl.store(out_ptr + cols, x * x, mask=mask)", "overwritten store", 14),
    "overlapping": ("    tl.store(out_ptr + cols, x, mask=mask)\n    tl.store(out_ptr + cols + 1, x * x, mask=mask)", "overwritten store", 14),
    "store_in_loop": ("    for i in range(3):\n        x = x * 2.0\n        tl.store(out_ptr + cols, x, mask=mask)", "overwritten store", 15),
    "stored_by_every_program": ("    tl.store(out_ptr + tl.arange(0, BLOCK), x)", "overwritten store", 13),
    "stored_by_two_lanes": ("    tl.store(out_ptr + cols // 2, x, mask=mask)", "overwritten store", 13),
    "stored_in_two_steps": ("    for i in range(4):\n        tl.store(out_ptr + i // 2 * n + cols, x * i, mask=mask)", "overwritten store", 14),
    "stored_at_masked_bits": ("    tl.store(out_ptr + (cols & 7), x)", "overwritten store", 13),
    "lost_to_a_constant": ("    tl.store(out_ptr + cols, x, mask=mask)\n    tl.store(out_ptr + cols, 0.0, mask=mask)", "overwritten store", 14),
    "added_then_stored": ("    tl.atomic_add(out_ptr + cols, x, mask=mask)\n    tl.store(out_ptr + cols, x * x, mask=mask)", "overwritten store", 14),
    "read_after_write": ("    tl.store(out_ptr + cols, x, mask=mask)\n    y = tl.load(out_ptr + n - cols)\n    tl.store(out_ptr + cols + n, y)", "in-place access", None),
    "break": ("    for i in range(3):\n        if i > 1:\n            break\n        x = x * 2.0\n    tl.store(out_ptr + cols, x, mask=mask)", "break", 15),
    "bitcast": ("    y = x.to(tl.int32, bitcast=True)\n    tl.store(out_ptr + cols, x + y, mask=mask)", "bitcast", 13),
    "while_state": ("    s = 1.0\n    while s < 9.0:\n        x = x * 2.0\n        s = s * 3.0\n    tl.store(out_ptr + cols, x, mask=mask)", "while", 14),
}  # fmt: skip


def write(folder: Path, body: str) -> Path:
    file = folder / "refused.py"
    file.write_text(TEMPLATE.format(body=body))
    return file


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused__names_construct_and_line(name: str, tmp_path: Path) -> None:
    body, construct, line = REFUSED[name]
    file = write(tmp_path, body)
    with pytest.raises(errors.Unusable) as caught:
        draft(file, {"N": 40})
    error = caught.value
    assert error.kind == "unsupported_op"
    (refusal,) = error.extra["refusals"]  # type: ignore[attr-defined]
    assert refusal["construct"] == construct
    assert error.file == str(file)
    if line is not None:
        assert refusal["line"] == line
    assert refusal["message"] and refusal["remedy"]


@pytest.mark.parametrize("name", ["cas", "max_atomic"])
def test_order_of_programs__remedy_is_a_place_for_each(name: str, tmp_path: Path) -> None:
    """A rule of one's own would not help there."""
    with pytest.raises(errors.Unusable) as caught:
        draft(write(tmp_path, REFUSED[name][0]), {"N": 40})
    assert "place of its own" in (caught.value.remedy or "")


ACCEPTED = {
    "cleared_then_stored": "    tl.store(out_ptr + cols, 0.0, mask=mask)\n"
    "    tl.store(out_ptr + cols, x * x, mask=mask)",
    "stored_then_added": "    tl.store(out_ptr + cols, x, mask=mask)\n"
    "    tl.atomic_add(out_ptr + cols, x * x, mask=mask)",
    "stored_by_one_program": "    if tl.program_id(0) == 0:\n"
    "        tl.store(out_ptr + tl.arange(0, BLOCK), x * x)",
    "wrapped": "    y = tl.load(y_ptr + cols % n)\n    tl.store(out_ptr + cols, y * y, mask=cols < n + 5)",
    "wrapped_and_masked": "    y = tl.load(y_ptr + cols % n)\n    tl.store(out_ptr + cols, y * y, mask=mask)",
    "two_halves": "    tl.store(out_ptr + cols, x, mask=mask)\n"
    "    tl.store(out_ptr + cols + n, x * x, mask=mask)",
    "branches": (
        "    if n > 32:\n        tl.store(out_ptr + cols, x * x, mask=mask)\n"
        "    else:\n        tl.store(out_ptr + cols, x, mask=mask)"
    ),
    "early_return": "    if tl.program_id(0) > 1:\n        return\n"
    "    tl.store(out_ptr + cols, x * x, mask=mask)",
    "unused_input": "    y = tl.load(y_ptr + cols, mask=mask, other=0.0)\n"
    "    tl.store(out_ptr + cols, x + 0.0 * y, mask=mask)",
    "same_input_twice": (
        "    z = tl.load(x_ptr + n - 1 - cols, mask=mask, other=0.0)\n    tl.store(out_ptr + cols, x * z, "
        "mask=mask)"
    ),
    "gather": (
        "    at = (cols * 7) % n\n    y = tl.load(y_ptr + at, mask=mask, other=0.0)\n    tl.store(out_ptr "
        "+ cols, x * y, mask=mask)"
    ),
    "overlapping_reads": (
        "    y = tl.load(y_ptr + cols // 2, mask=mask, other=0.0)\n    tl.store(out_ptr + cols, x * y, "
        "mask=mask)"
    ),
    "windows": (
        "    w = tl.program_id(0) * 4 + tl.arange(0, BLOCK)\n    y = tl.load(y_ptr + w)\n    "
        "tl.store(out_ptr + cols, x * y, mask=mask)"
    ),
}


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_accepted__is_right(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, ACCEPTED[name])
    assert_right(file, draft(file, {"N": 40}), [({"N": 40}, "normal")])


def test_masked_infinity__does_not_reach_a_sum(tmp_path: Path) -> None:
    body = "    v = tl.load(x_ptr + cols, mask=mask, other=-float('inf'))\n    s = tl.load(y_ptr)\n"
    file = write(tmp_path, body + "    tl.store(out_ptr + cols, v * s, mask=mask)")
    entry = api.autodiff(forward.load(file).stub)
    x, y = torch.randn(40, requires_grad=True), torch.randn(40, requires_grad=True)
    out = entry(x, y)
    out.sum().backward()
    assert torch.allclose(y.grad[0], x.sum(), atol=1e-5)
    assert not y.grad[1:].any()


def test_overlapping_windows__stay_atomic(tmp_path: Path) -> None:
    report = draft(write(tmp_path, ACCEPTED["windows"]), {"N": 40})["report"]
    assert report["atomics"] == 1


def test_wrapped_index__walks_its_turns_unless_the_surplus_is_masked(tmp_path: Path) -> None:
    """Positions below `n` have one element each, and those beyond add to it: a loop over the turns has them
    all."""
    for name, turns in (("wrapped", True), ("wrapped_and_masked", False)):
        result = draft(write(tmp_path, ACCEPTED[name]), {"N": 40})
        assert result["report"]["atomics"] == 0
        assert (
            any(line["proof"].startswith("position counted anew") for line in result["report"]["lines"])
            == turns
        )


def test_registered_rule__is_used(tmp_path: Path) -> None:
    file = write(tmp_path, "    y = tl.cumprod(x, 0)\n    tl.store(out_ptr + cols, y * x, mask=mask)")
    assert "linear_step" in draft(file, {"N": 40})["backward"]  # the built-in rule

    @api.rule("cumprod")
    def _(g, node, d):
        back = g.make("scan", (g.mul(d, node),), {"fn": "sum", "axis": 0, "reverse": True}, d.dtype, d.shape)
        return (g.div(back, node.args[0]),)

    try:
        result = draft(file, {"N": 40})
        assert "linear_step" not in result["backward"]
        assert_right(file, result, [({"N": 40}, "normal")], 1e-3)
    finally:
        api.forget("cumprod")


def test_gather__that_would_fill_the_registers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "    y = tl.gather(x, (cols * 7) % BLOCK, 0)\n    tl.store(out_ptr + cols, y, mask=mask)"
    file = write(tmp_path, body)
    assert_right(file, draft(file, {"N": 40}), [({"N": 40}, "normal")])
    monkeypatch.setattr(rules, "GATHERED", 255)
    with pytest.raises(errors.Unusable) as caught:
        draft(file, {"N": 40})
    (refusal,) = caught.value.extra["refusals"]  # type: ignore[attr-defined]
    assert (refusal["construct"], refusal["line"]) == ("tl.gather", 13)


def test_refusal__reads_as_one_line() -> None:
    refusal = Refusal("tl.sort", "no adjoint", line=3, column=4, file="f.py")
    assert str(refusal) == "f.py:3:4: tl.sort: no adjoint"


@pytest.mark.parametrize("name", ["kernel_bwd", "gradient_of"])
def test_refused__name_that_the_generated_section_defines_too(name: str, tmp_path: Path) -> None:
    """Below the forward in one file, it would take the place of the user's own."""
    file = tmp_path / "named.py"
    body = "    tl.store(out_ptr + cols, x * x, mask=mask)"
    file.write_text(TEMPLATE.format(body=body) + f"\n\ndef {name}(t):\n    return t\n")
    with pytest.raises(errors.Unusable, match=f"`{name}` is a name of this file"):
        draft(file, {"N": 40})


def test_parameter_by_the_name_of_a_function_of_ours__is_refused_where_that_is_called(tmp_path: Path) -> None:
    body = "    tl.store(out_ptr + cols, x * x, mask=mask)"
    file, dims = tmp_path / "named.py", {"N": 40}
    for name, refused in (("gradient_of", True), ("longest", False), ("splits", True)):
        text = TEMPLATE.format(body=body).replace("BLOCK", name)
        file.write_text(text)
        if refused:
            with pytest.raises(errors.Unusable, match=f"`{name}` is a name that the backward of"):
                draft(file, dims)
        else:
            assert_right(file, draft(file, dims), [(dims, "normal")])
