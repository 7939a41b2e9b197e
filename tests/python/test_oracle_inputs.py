"""Other layouts and values of inputs: which the oracle takes of a forward, and why not the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_agent import forward
from kernel_agent.operations import oracle
from kernel_agent.torch_tl import replay
from oracle_support import ROWS, relative, run_case, stub
from sources import SCALE


def test_inputs__where_a_part_of_the_upstream_passes__are_taken(write, tmp_path):
    """The rest of the part that passes is NaN, which is no NaN of the function's."""
    path = stub(write, "return torch.cat([square(x[:10].contiguous()), x[10:]])")
    case, found = run_case(path, tmp_path, values={"x": "mixed"})
    assert case["ok"], case["error"]
    assert found["passed/x"].isnan().any()


BY_STRIDE = """\
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 6, "N": 20}]


@triton.jit
def sums_kernel(x_ptr, y_ptr, row_stride, column_stride, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + cols * column_stride, mask=cols < N, other=0.0)
    tl.store(y_ptr + row, tl.sum(tl.exp(x), axis=0))


@autodiff(inputs_require_grad=(0,))
def sums(x):
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    sums_kernel[(M,)](x, y, *x.stride(), N, BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
"""


ROW_MAX = BY_STRIDE.replace("tl.sum(tl.exp(x), axis=0)", "tl.max(x, axis=0)")


@pytest.mark.parametrize("layout", ["slice", "stacked", "transposed", "shifted"])
def test_layouts__forward_that_reads_by_strides__has_the_gradient_of_the_same_values(layout, write, tmp_path):
    path = write(BY_STRIDE)
    _, plain = run_case(path, tmp_path)
    case, made = run_case(path, tmp_path, layouts={"x": layout})
    assert case["ok"], case
    assert torch.equal(made["grad/x"], plain["grad/x"]) and torch.equal(made["fwd/0"], plain["fwd/0"])


def test_unsqueezed__forward_that_takes_any_number_of_axes__has_the_gradient_in_its_shape(write, tmp_path):
    path, shaped = write(SCALE), {"layouts": {"x": "unsqueezed"}}
    _, plain = run_case(path, tmp_path)
    case, made = run_case(path, tmp_path, **shaped)
    assert case["ok"], case
    assert torch.equal(made["grad/x"], plain["grad/x"][None]) and made["grad/x"].dim() == 2
    case, _ = run_case(write(BY_STRIDE), tmp_path, **shaped)
    assert case["error"]["kind"] in ("inputs_refused", "stub_raised"), case


def test_no_elements__are_taken_where_the_forward_takes_them(write, tmp_path):
    case, made = run_case(write(SCALE), tmp_path, dims={"N": 0})
    assert case["ok"], case
    assert made["grad/x"].shape == made["fwd/0"].shape == (0,)


def test_layouts__expanded_input__has_a_gradient_for_each_element(write, tmp_path):
    case, made = run_case(write(BY_STRIDE), tmp_path, layouts={"x": "expanded"})
    assert case["ok"], case
    assert torch.equal(made["fwd/0"], made["fwd/0"][:1].expand(made["fwd/0"].shape))
    assert not torch.equal(made["grad/x"][0], made["grad/x"][1]), "rows have upstreams of their own"


@pytest.mark.parametrize(
    ("source", "varied", "why"),
    [
        (ROWS, {"layouts": {"x": "slice"}}, "the forward is wrong for them"),
        (ROWS, {"layouts": {"x": "transposed"}}, "the outputs take over their strides"),
        (
            BY_STRIDE.replace("x.stride(), N", "(x.stride(0), 1), N"),
            {"layouts": {"x": "stacked"}},
            "the forward is wrong for them",
        ),
        (BY_STRIDE, {"values": {"x": "mixed"}}, "is not finite"),
    ],
)
def test_inputs__that_are_not_fair_to_the_forward__are_refused(source, varied, why, write, tmp_path):
    case, _ = run_case(write(source), tmp_path, **varied)
    assert not case["ok"] and case["error"]["kind"] == "inputs_refused" and why in case["error"]["message"]
    assert list(case["blame"]) == [f"x {kind}" for choice in varied.values() for kind in choice.values()]


def test_inputs__of_which_rounding_decides_what_overflows__are_refused(write, tmp_path):
    """Eager PyTorch has a gradient of 1 here, in float32; without rounding it is 1e57."""
    rounds = "tl.sum(tl.sin(x / ((z * z + 1e-30) * (z * z + 1e-30))) * 1e-3 + x, axis=0)"
    source = BY_STRIDE.replace(
        "    tl.store(y_ptr + row, tl.sum(tl.exp(x), axis=0))",
        f"    z = (x * 0.0 + 1e8) + 1.0 - 1e8 - 1.0\n    tl.store(y_ptr + row, {rounds})",
    )
    assert run_case(write(source), tmp_path)[0]["ok"]
    for kind in ("large", "tied"):
        case, _ = run_case(write(source), tmp_path, values={"x": kind})
        assert not case["ok"] and "of x is beyond the range of float32" in case["error"]["message"], case


def test_inputs__refused_together__blame_what_is_refused_alone(write, tmp_path):
    case, _ = run_case(
        write(BY_STRIDE), tmp_path, layouts={"x": "slice", "upstream/0": "expanded"}, values={"x": "mixed"}
    )
    assert not case["ok"] and list(case["blame"]) == ["x mixed"] and "not finite" in case["blame"]["x mixed"]


def test_blame__of_the_same_dimensions__is_found_out_once(write, tmp_path, monkeypatch):
    asked: list[dict[str, Any]] = []
    found_out = oracle.why_unfair

    def counted(fwd: Any, request: Any, case: Any, varied: Any) -> str:
        asked.append(case["dims"])
        return found_out(fwd, request, case, varied)

    monkeypatch.setattr(oracle, "why_unfair", counted)
    path = write(BY_STRIDE)
    dims = forward.load(path).sweep[0].dims
    varied = {"layouts": {"x": "slice"}, "values": {"x": "mixed"}}
    cases = [{"id": at, "dims": dims, "seed": at, "upstream": {"kind": "normal", "seed": 9}} for at in (0, 1)]
    request = {"file": str(path), "device": "cpu", "target": "sm_90", "dtype": None, "fd": False}
    made = oracle.run(request | {"cases": [case | varied for case in cases]}, tmp_path)["cases"]
    assert [list(case["blame"]) for case in made] == [["x mixed"]] * 2 and asked == [dims] * 2


@pytest.mark.parametrize("varied", [{"values": {"x": "flat"}}, {"layouts": {"x": "spanned"}}])
def test_inputs__equal_elements_at_a_kink__are_refused_and_elsewhere_taken(varied, write, tmp_path):
    assert run_case(write(BY_STRIDE), tmp_path, **varied)[0]["ok"]
    source = ROW_MAX.replace("other=0.0", 'other=-float("inf")')
    case, _ = run_case(write(source, "max.py"), tmp_path, **varied)
    assert not case["ok"] and "not unique" in case["error"]["message"]


def test_inputs__zero_at_a_kink__is_refused(write, tmp_path):
    relu = BY_STRIDE.replace("tl.sum(tl.exp(x), axis=0)", "tl.sum(tl.maximum(x, 0.0), axis=0)")
    assert relu != BY_STRIDE
    case, _ = run_case(write(relu), tmp_path, values={"x": "flat"})
    assert not case["ok"] and "not unique" in case["error"]["message"]


@pytest.mark.parametrize(
    ("body", "masked"), [("tl.exp(x)", True), ("0 * tl.exp(-x)", False), ("tl.sigmoid(x * x)", False)]
)
def test_inputs__of_minus_infinity__are_taken_where_nothing_is_nan(body, masked, write, tmp_path):
    case, made = run_case(write(BY_STRIDE.replace("tl.exp(x)", body)), tmp_path, values={"x": "masked"})
    assert case["ok"] == masked
    assert not masked or bool((made["grad/x"][0, 1::3] == 0).all())


WEIGHTED = BY_STRIDE.replace("sums(x)", "sums(x, w)").replace("grad=(0,)", "grad=(0, 1)")
WEIGHTED = WEIGHTED.replace("kernel[(M,)](x, y,", "kernel[(M,)](x, w, y,")


def test_layouts__right_by_luck_beside_constant_rows__are_refused_all_the_same(write, tmp_path):
    """The weight is read without its stride, but what it is multiplied by is zero in constant rows."""
    source = WEIGHTED.replace("(x_ptr, y_ptr,", "(x_ptr, w_ptr, y_ptr,").replace(
        "tl.sum(tl.exp(x), axis=0)",
        "tl.sum((x - tl.load(x_ptr + row * row_stride)) "
        "* tl.load(w_ptr + cols, mask=cols < N, other=0.0), axis=0)",
    )
    source = source.replace(
        "device=device, dtype=dtype),)", 'device=device, dtype=dtype), torch.randn(dims["N"], device=device))'
    )
    path = write(source)
    assert run_case(path, tmp_path, layouts={"x": "spanned"})[0]["ok"]
    case, _ = run_case(path, tmp_path, layouts={"x": "spanned", "w": "stacked"})
    assert not case["ok"] and list(case["blame"]) == ["w stacked"], case


def test_inputs__stub_that_asserts_contiguity__says_so(write, tmp_path):
    source = BY_STRIDE.replace("    M, N = x.shape\n", "    assert x.is_contiguous()\n    M, N = x.shape\n")
    case, _ = run_case(write(source), tmp_path, layouts={"x": "slice"}, values={"x": "tied"})
    assert (
        not case["ok"] and "AssertionError" in case["error"]["message"] and list(case["blame"]) == ["x slice"]
    )
    assert run_case(write(source), tmp_path)[0]["ok"]


def test_inputs__tied__give_equal_elements_one_share_together(write, tmp_path):
    assert ROW_MAX != BY_STRIDE
    source = ROW_MAX.replace("other=0.0", 'other=-float("inf")')
    case, made = run_case(write(source), tmp_path, values={"x": "tied"})
    assert case["ok"], case
    for part in ("grad", "base", "jitter"):
        gradient = made[f"{part}/x"]
        assert gradient[::2, 0].abs().min() > 0 and not gradient[1::2].any() and not gradient[:, 1:].any()
    assert torch.equal(made["grad/x"][:, 0], made["jitter/x"][:, 0])


def test_inputs__mixed_where_the_maximum_is_subtracted__are_taken(write, tmp_path):
    shifted = BY_STRIDE.replace(
        "other=0.0)\n    tl.store(y_ptr + row, tl.sum(tl.exp(x), axis=0))",
        'other=-float("inf"))\n    most = tl.max(x, axis=0)\n'
        "    tl.store(y_ptr + row, most + tl.log(tl.sum(tl.exp(x - most), axis=0)))",
    )
    assert shifted != BY_STRIDE
    case, made = run_case(write(shifted), tmp_path, values={"x": "mixed"})
    assert case["ok"], case
    assert made["fwd/0"][::2].min() > 50 and all(value.isfinite().all() for value in made.values())


GATED = (
    "x / (1 + tl.exp(-x))",
    "x * tl.sigmoid(x)",
    "tl.sigmoid(x)",
    "tl.exp(-tl.log(1 + tl.exp(-x)))",
)


@pytest.mark.parametrize("value", GATED)
def test_inputs__mixed_where_a_formula_of_float32_has_no_gradient__are_taken(value, write, tmp_path):
    """exp(-x) overflows below -88 in float32, and not in float64."""
    source = BY_STRIDE.replace("tl.sum(tl.exp(x), axis=0)", f"tl.sum({value}, axis=0)")
    case, made = run_case(write(source), tmp_path, values={"x": "mixed"})
    assert case["ok"], case
    assert made["base/x"].isfinite().all() and (made["grad/x"] != 0).any()
    assert all(relative(made[f"{part}/x"], made["grad/x"]) < 1e-5 for part in ("base", "jitter"))
    far = source.replace("(torch.randn(dims", "(1e3 * torch.randn(dims")
    case, made = run_case(write(far, "far.py"), tmp_path)
    assert case["ok"], case
    assert all(made[f"{part}/x"].isfinite().all() for part in ("grad", "base"))


def test_inputs__refused_beside_mixed_ones_of_such_a_formula__are_blamed_alone(write, tmp_path):
    source = BY_STRIDE.replace("x.stride(), N", "(x.stride(0), 1), N")
    source = source.replace("tl.sum(tl.exp(x), axis=0)", "tl.sum(x / (1 + tl.exp(-x)), axis=0)")
    case, _ = run_case(write(source), tmp_path, layouts={"x": "stacked"}, values={"x": "mixed"})
    assert not case["ok"] and list(case["blame"]) == ["x stacked"]


def test_sigmoid__has_torch_s_derivative__without_leaving_products_out(write, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "Masked", None)
    source = BY_STRIDE.replace("tl.sum(tl.exp(x), axis=0)", "tl.sum(x * tl.sigmoid(x), axis=0)")
    far = source.replace("(torch.randn(dims", "(1e3 * torch.randn(dims")
    case, made = run_case(write(far), tmp_path)
    assert case["ok"] and made["base/x"].isfinite().all()


@pytest.mark.parametrize("value", ["tl.sqrt(x - x)", "tl.log(x - x) * 0.0", "x * tl.exp(tl.abs(x))"])
def test_inputs__of_outputs_or_gradients_without_a_number__are_refused_as_before(value, write, tmp_path):
    source = BY_STRIDE.replace("tl.sum(tl.exp(x), axis=0)", f"tl.sum({value}, axis=0)")
    case, _ = run_case(write(source), tmp_path, values={"x": "mixed"})
    assert not case["ok"] and case["error"]["kind"] == "inputs_refused"


def test_inputs__large_where_rounding_decides_what_comes_out__are_not_taken(write, tmp_path):
    source = BY_STRIDE.replace("tl.exp(x)", "tl.sin(3e5 * x)")
    path = write(source)
    assert run_case(path, tmp_path)[0]["ok"]
    case, _ = run_case(path, tmp_path, values={"x": "large"})
    assert not case["ok"] and "rounding of these inputs decides" in case["error"]["message"]


def test_inputs__large_where_an_output_jumps__are_taken(write, tmp_path):
    """The largest of a row is a whole number: what is rounded off another one close by says nothing of it."""
    source = BY_STRIDE.replace(
        "tl.sum(tl.exp(x), axis=0)", "tl.sum(x * x + 1e5 * tl.where(tl.abs(x) >= 8.5, 1.0, 0.0), axis=0)"
    )
    case, made = run_case(write(source), tmp_path, values={"x": "large"})
    assert case["ok"], case
    assert made["out/0"].abs().max() > 1e5
