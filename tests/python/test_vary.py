"""Layouts and values of single tensors, and what a case makes of its inputs by them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_agent import draw, forward, vary
from kernel_agent.vary import Varied
from sources import SCALE

SHAPES = [(), (1,), (6,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (2, 3, 4, 5), (0, 3)]


def values_of(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("kind", ["slice", "stacked", "transposed", "shifted", "swapped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_layout__of_any_shape__has_the_same_values(kind, dtype, shape):
    plain = values_of(shape, dtype)
    made = vary.LAYOUTS[kind].change(plain)
    assert torch.equal(made, plain) and made.dtype == dtype and made.shape == plain.shape


@pytest.mark.parametrize("kind", ["slice", "stacked", "transposed", "shifted", "swapped"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_layout_of_indices_and_flags__has_the_same_values_beside_what_is_none(kind, dtype):
    plain = torch.tensor([[0, 1, 2], [2, 1, 0]]).to(dtype)
    made = vary.LAYOUTS[kind].change(plain)
    assert torch.equal(made, plain) and made.dtype == dtype
    whole = made.as_strided((made.untyped_storage().size() // made.element_size(),), (1,), 0)
    if kind in ("slice", "stacked", "shifted") and dtype != torch.bool:
        beside = [v for v in whole.tolist() if v not in (0, 1, 2)]
        assert len(beside) == len(whole) - 6 and all(v < 0 or v == torch.iinfo(dtype).max for v in beside)


@pytest.mark.parametrize(
    ("kind", "shape", "strides", "offset"),
    [
        ("slice", (6,), (1,), 6),
        ("slice", (3, 4), (11, 1), 4),
        ("stacked", (6,), (2,), 0),
        ("stacked", (3, 4), (8, 2), 0),
        ("transposed", (3, 4), (1, 3), 0),
        ("transposed", (2, 3, 4), (1, 2, 6), 0),
        ("expanded", (6,), (0,), 0),
        ("expanded", (1, 5), (5, 0), 0),
        ("expanded", (3, 4), (0, 1), 0),
        ("spanned", (3, 4), (4, 0), 0),
        ("shifted", (3, 4), (4, 1), 4),
        ("shifted", (2, 3, 4), (16, 4, 1), 4),
        ("swapped", (2, 3, 4), (4, 8, 1), 0),
        ("swapped", (2, 3, 4, 5), (5, 10, 30, 1), 0),
    ],
)
def test_layout__has_the_strides_of_real_graphs(kind, shape, strides, offset):
    made = vary.LAYOUTS[kind].change(values_of(shape))
    assert made.stride() == strides and made.storage_offset() == offset


@pytest.mark.parametrize(("axis", "kind"), [(0, "expanded"), (-1, "spanned")])
def test_layout__expanded__is_what_the_backward_of_a_sum_hands_out(axis, kind):
    seen = []
    y = torch.ones(3, 4, requires_grad=True) * 1
    y.register_hook(seen.append)
    (y.sum(axis) * torch.arange(1.0, y.sum(axis).numel() + 1)).sum().backward()
    made = vary.LAYOUTS[kind].change(values_of((3, 4)))
    zero = [stride == 0 for stride in made.stride()]
    assert zero == [stride == 0 for stride in seen[0].stride()] and sum(zero) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layout__what_stands_beside__is_of_another_value_or_nan(dtype):
    plain = values_of((5, 7), dtype)
    half = vary.LAYOUTS["slice"].change(plain)
    whole = half.as_strided((5, 17), (17, 1), 0)
    beside = whole[:, :7]
    assert whole[:, 14:].isnan().all() and bool((beside.abs() >= 1).all())
    assert not bool((beside.sign() == plain.sign()).any())
    other = vary.LAYOUTS["stacked"].change(plain).as_strided((5, 7), (14, 2), 1)
    assert torch.equal(other, beside)
    assert vary.LAYOUTS["shifted"].change(plain).as_strided((1, 7), (7, 1), 0).isnan().all()


@pytest.mark.parametrize(("kind", "large", "small"), [("mixed", 100, 0.01), ("uneven", 8, 0.125)])
def test_values__mixed__are_every_other_row_large_and_the_rest_small(kind, large, small):
    x = values_of((6, 5))
    made = vary.VALUES[kind].change(x)
    assert torch.equal(made[::2], x[::2] * large) and torch.equal(made[1::2], x[1::2] * small)


def test_values__tied__have_the_greatest_of_each_row_twice():
    plain = values_of((6, 5))
    x = vary.VALUES["tied"].change(plain)
    most = plain.amax(-1).reshape(3, 2).amax(-1, keepdim=True).expand(3, 2).reshape(6)
    assert torch.equal(x[:, 0], most) and torch.equal(x[:, -1], x[:, 0])
    assert ((x == x.amax(-1, keepdim=True)).sum(-1) == 2).all()
    for row, values in zip(x.tolist(), plain.tolist(), strict=True):
        assert set(row) <= {*values, row[0]} and len(set(row)) >= len(values) - 2


@pytest.mark.parametrize("shape", [(5,), (1, 4), (5, 3), (2, 3, 4)])
def test_values__tied__have_one_share_where_they_are_equal(shape):
    plain = values_of(shape)
    x = vary.VALUES["tied"].change(plain)
    rows = x.reshape(-1, shape[-1])
    assert all(row[0] == row[-1] == row.max() for row in rows)
    assert all(one[0] == other[0] for one, other in zip(rows[0::2], rows[1::2], strict=False))
    assert len(rows) % 2 == 0 or rows[-1].max() == plain.reshape(rows.shape)[-1].max()
    gradient = values_of(shape)
    folded = vary.fold_ties(gradient).reshape(rows.shape)
    torch.testing.assert_close(folded.sum(), gradient.sum())
    whole = gradient.reshape(rows.shape)
    for at in range(0, len(rows), 2):
        torch.testing.assert_close(folded[at, 0], whole[at : at + 2][:, [0, -1]].sum())
    assert not folded[1::2, 0].any() and not folded[:, -1].any()
    assert torch.equal(folded[:, 1:-1], whole[:, 1:-1])


def test_values__flat__are_rows_that_are_constant_zero_or_nearly_constant():
    plain = values_of((6, 5))
    x = vary.VALUES["flat"].change(plain)
    assert (x[::3] == x[::3, :1]).all() and x[::3].all() and not x[1::3].any()
    for row, values in zip(x[2::3], plain[2::3], strict=True):
        assert row.unique().numel() == values.unique().numel() and row.std() < values.std() / 100
        assert row.abs().min() >= 3
    vector = vary.VALUES["flat"].change(plain[0])
    assert vector.tolist() == [0.0 if i == 1 or i == 4 else v for i, v in enumerate(plain[0].tolist())]


def test_values__large__reach_beyond_8_in_each_row_and_leave_zeros():
    x = torch.cat((values_of((4, 50)), torch.zeros(1, 50)))
    made = vary.VALUES["large"].change(x)
    assert torch.allclose(made[:4].abs().amax(-1), torch.full((4,), vary.LARGEST)) and not made[4].any()
    assert torch.equal(made.sign(), x.sign())


def test_values__masked__have_minus_infinity_in_each_row_and_never_a_whole_one():
    x = vary.VALUES["masked"].change(values_of((4, 7)))
    gone = x == -torch.inf
    assert gone.any(-1).all() and not gone.all(-1).any() and not torch.equal(gone[0], gone[1])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*vary.LAYOUTS.values(), *vary.VALUES.values()]),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
def test_kind__of_any_tensor__keeps_shape_dtype_and_the_tensor_itself(kind, shape, dtype):
    plain = values_of(shape, dtype)
    before = plain.clone()
    made = kind.change(plain)
    axes = kind in vary.LAYOUTS.values() and kind.axes
    assert made.shape == (1, *plain.shape) if axes else made.shape == plain.shape
    assert made.dtype == dtype
    assert torch.equal(plain, before) and torch.equal(kind.change(plain).isnan(), made.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_folded_gradient__is_the_same_however_equals_share_it(dtype):
    first = torch.tensor([[6.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, -3.0]], dtype=dtype)
    halves = torch.tensor([[3.0, 1.0, 2.0, 3.0], [-1.5, 1.0, 2.0, -1.5]], dtype=dtype)
    twice = torch.tensor([[6.0, 1.0, 2.0, 6.0], [-3.0, 1.0, 2.0, -3.0]], dtype=dtype)
    folded = vary.fold_ties(first)
    assert folded.dtype == dtype and torch.equal(folded, vary.fold_ties(halves))
    assert not torch.equal(folded, vary.fold_ties(twice))
    small = torch.ones(4, 2)
    assert torch.equal(vary.fold_ties(small), small) and vary.fold_ties(small) is not small


# ---- a case's inputs

TWO = SCALE.replace("def scale(x, factor=2.0)", "def scale(x, z, table, factor=2.0)").replace(
    "inputs_require_grad=(0,)", "inputs_require_grad=(0, 1)"
)
TWO = TWO.replace(
    'return (torch.randn(dims["N"], device=device, dtype=dtype),)',
    "return torch.randn(6, 5), torch.randn(6, 5), torch.ones(6, 5)",
)


def drawn(write, plain=False, **case):
    fwd = forward.load(write(TWO, "two.py"))
    (x, z, table), _ = draw.make_inputs(fwd, {"N": 6}, 4, varied=Varied.of(case), plain=plain)
    return x, z, table


def test_inputs__each_has_kinds_of_its_own(write):
    x, z, table = drawn(write)
    a, b, c = drawn(write, layouts={"x": "stacked", "upstream/0": "slice"}, values={"z": "flat"})
    assert torch.equal(a, x) and a.stride() == (10, 2)
    assert b.is_contiguous() and torch.equal(b, vary.VALUES["flat"].change(z))
    assert torch.equal(c, table), "what wants no gradient stays as it is"


def test_inputs__values_first_then_the_layout__and_plain_is_the_same_in_rows(write):
    case = {"layouts": {"x": "expanded"}, "values": {"x": "large"}}
    x, _, _ = drawn(write, **case)
    plain, _, _ = drawn(write, plain=True, **case)
    assert x.stride() == (0, 1) and x.abs().max() == vary.LARGEST
    assert torch.equal(plain, x) and plain.is_contiguous()


def test_inputs__table_that_wants_no_gradient__has_a_layout_too(write):
    source = SCALE.replace("def scale(x, factor", "def scale(x, table, factor").replace(
        "dtype=dtype),)", 'dtype=dtype), torch.arange(dims["N"], device=device))'
    )
    fwd = forward.load(write(source))
    (plain, *_), _ = draw.make_inputs(fwd, {"N": 6}, 3)
    (x, table), _ = draw.make_inputs(fwd, {"N": 6}, 3, varied=Varied({"table": "stacked"}, {}))
    assert torch.equal(x, plain) and table.stride() == (2,) and table.tolist() == list(range(6))


def test_inputs__shared__is_the_earlier_one_with_its_kinds_but_plain_has_memory_of_its_own(write):
    case = {"layouts": {"x": "slice", "z": "shared"}, "values": {"x": "mixed"}}
    x, z, _ = drawn(write, **case)
    assert z.data_ptr() == x.data_ptr() and z.stride() == x.stride() and torch.equal(z, x)
    a, b, _ = drawn(write, plain=True, **case)
    assert torch.equal(b, x) and a.data_ptr() != b.data_ptr()


def test_inputs__of_the_same_seed__are_the_same(write):
    case = {"layouts": {"x": "transposed"}, "values": {"z": "tied"}}
    one, other = drawn(write, **case), drawn(write, **case)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", [{"layouts": {"x": "sideways"}}, {"values": {"x": "odd"}}])
def test_case__unknown_kind__is_an_error(case):
    with pytest.raises(ValueError, match=r"none of (slice|mixed)"):
        Varied.of(case)


def test_case__what_changes_shapes__is_one_choice_of_all_that_have_it():
    varied = Varied.of({"layouts": {"x": "unsqueezed", "y": "unsqueezed", "w": "slice"}})
    shaped = Varied({"x": "unsqueezed", "y": "unsqueezed"}, {})
    assert varied.alone() == [("w slice", Varied({"w": "slice"}, {})), ("x unsqueezed", shaped)]
    assert varied.in_own_shapes() == Varied({"w": "slice"}, {})


def test_case__choices_alone__are_those_of_inputs():
    varied = Varied.of({"layouts": {"x": "slice", "upstream/0": "slice"}, "values": {"x": "flat"}})
    assert varied.alone() == [("x slice", Varied({"x": "slice"}, {})), ("x flat", Varied({}, {"x": "flat"}))]
    assert (
        varied and varied.equals() and not Varied.of({}) and not Varied.of({"values": {"x": "tied"}}).equals()
    )
    assert Varied.of({"values": {"w": "flat", "x": "tied"}}).judged() is vary.fold_ties
