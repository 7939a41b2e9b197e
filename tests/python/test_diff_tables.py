"""Kernels that take tables of pointers: the gradients of what is behind them come back to the right tensors,
or a refusal does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diff_support import ROOT, assert_right, draft, errors
from kernel_agent import errors as unusable
from kernel_agent import forward

GROUPED = ROOT / "tests/python/kernels/grouped_gemm.py"
HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"] + 3 * i, device=device, dtype=dtype) for i in range(2))


def table_of_addresses(tensors):
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)

"""
KERNEL = """
@triton.jit
def product_kernel(x_table, y_table, size_ptr, BLOCK: tl.constexpr):
    g = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < tl.load(size_ptr + g)
    x_ptr = tl.load(x_table + g).to(tl.pointer_type(tl.float32))
    y_ptr = tl.load(y_table + g).to(tl.pointer_type(tl.float32))
    x = tl.load(x_ptr + cols, mask=mask, other=0.0)
    tl.store(y_ptr + cols, x * x * (g + 1), mask=mask)

"""
STUB = """
@autodiff(inputs_require_grad=(0, 1))
def product(a, b):
    xs = [a, b]
    ys = [torch.empty_like(x) for x in xs]
    sizes = torch.tensor([x.numel() for x in xs], dtype=torch.int32)
    x_table = torch.tensor([x.data_ptr() for x in xs], dtype=torch.int64)
    y_table = torch.tensor([y.data_ptr() for y in ys], dtype=torch.int64)
    product_kernel[(len(xs),)](x_table, y_table, sizes, BLOCK=64)
    return tuple(ys)
"""
SHAPES = [{"N": 20}, {"N": 1}, {"N": 37}]


def source(*changes: tuple[str, str]) -> str:
    text = HEAD + KERNEL + STUB
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def right(file: Path) -> dict[str, Any]:
    result = draft(file, SHAPES[0])
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])
    return result


def test_a_program_for_each_tensor__stores_to_buffers_of_its_own(write: Callable[..., Path]) -> None:
    assert right(write(source()))["report"]["atomics"] == 0


@pytest.mark.parametrize(
    "index",
    ["g // 2", "g % 2", "tl.load(size_ptr + g) * 0", "tl.minimum(g, 1)"],
)
def test_programs_that_share_an_entry__add_atomically(index: str, write: Callable[..., Path]) -> None:
    changes = (
        ("tl.load(x_table + g)", f"tl.load(x_table + {index})"),
        ("[a, b]", "[a, b, a, b]"),
        ("cols < tl.load(size_ptr + g)", "cols < tl.minimum(tl.load(size_ptr), tl.load(size_ptr + g))"),
    )
    result = right(write(source(*changes)))
    assert result["report"]["atomics"] == 1
    assert "# SCHEDULE: d_x_table stays atomic" in result["backward"]


def test_schedule__of_tables_alone__is_atomic_and_has_no_alternative(write: Callable[..., Path]) -> None:
    report = draft(write(source()), {"N": 20})["report"]
    assert report["schedule"] == "atomic" and report["alternatives"] == [] and report["atomics_naive"]


def test_two_loads_through_one_table__add_atomically(write: Callable[..., Path]) -> None:
    """Program 0 reads entry 1 as well, which is program 1's own."""
    more = (
        "    other = tl.load(x_table + 1 - g).to(tl.pointer_type(tl.float32))\n"
        "    x = x + tl.load(other + cols, mask=cols < tl.load(size_ptr), other=0.0)\n    tl.store(y_ptr"
    )
    result = right(write(source(("    tl.store(y_ptr", more))))
    assert result["report"]["atomics"] == 2


def test_a_tensor_in_two_entries__gets_both_gradients(write: Callable[..., Path]) -> None:
    right(write(source(("xs = [a, b]", "xs = [a, b, a]"), ("(len(xs),)", "(3,)"))))


def test_gradients_only_of_some(write: Callable[..., Path]) -> None:
    right(write(source(("inputs_require_grad=(0, 1)", "inputs_require_grad=(1,)"))))


def test_tables_beside_tensors__and_outputs_of_both_kinds(write: Callable[..., Path]) -> None:
    """A second table is not written, one buffer comes as an argument, and a helper makes the pointer."""
    changes = (
        ("def product_kernel(x_table,", "def product_kernel(w_ptr, z_ptr, x_table,"),
        ("x_ptr = tl.load(x_table + g).to(tl.pointer_type(tl.float32))", "x_ptr = entry(x_table, g)"),
        (
            "    tl.store(y_ptr",
            "    w = tl.load(w_ptr + cols, mask=cols < 4, other=1.0)\n"
            "    tl.store(z_ptr + g * BLOCK + cols, x + w, mask=mask)\n    x = x * w\n    tl.store(y_ptr",
        ),
        ("product_kernel[(len(xs),)](", "product_kernel[(len(xs),)](b, z, "),
        ("    sizes =", "    z = torch.zeros(2, 64, dtype=a.dtype, device=a.device)\n    sizes ="),
        ("xs = [a, b]", "xs = [a * 2, b]"),
        ("return tuple(ys)", "return z, *ys"),
    )
    helper = (
        "\n@triton.jit\ndef entry(table, at):\n    return tl.load(table + "
        "at).to(tl.pointer_type(tl.float32))\n"
    )
    file = write(
        source(*changes).replace(
            "\n@triton.jit\ndef product_kernel", helper + "\n@triton.jit\ndef product_kernel"
        )
    )
    result = draft(file, SHAPES[0])
    assert_right(file, result, [({"N": n}, "normal") for n in (20, 4)])


def test_two_launches__the_second_reads_what_the_first_wrote(write: Callable[..., Path]) -> None:
    changes = (
        (
            "    return tuple(ys)",
            "    zs = [torch.empty_like(y) for y in ys]\n"
            "    z_table = torch.tensor([z.data_ptr() for z in zs], dtype=torch.int64)\n"
            "    product_kernel[(len(xs),)](y_table, z_table, sizes, BLOCK=64)\n    return tuple(zs)",
        ),
    )
    right(write(source(*changes)))


@pytest.mark.parametrize("element", ["tl.float16", "element"])
def test_half_precision__is_added_up_in_single(write: Callable[..., Path], element: str) -> None:
    """Whether the forward names the type or takes it from an argument."""
    file = write(GROUPED.read_text().replace("tl.pointer_type(element)", f"tl.pointer_type({element})"))
    dims = forward.load(file).sweep[0].dims
    result = draft(file, dims, dtype="float16")
    kernel = result["backward"].split("def laid_out")[0]
    assert "d_a_ptr = tl.load(d_a_table + g).to(tl.pointer_type(tl.float32))" in kernel
    named = element if element == "tl.float16" else "like_ptr.dtype.element_ty"
    assert f"d_c_ptr = tl.load(d_c_table + g).to(tl.pointer_type({named}))" in kernel
    found = errors(file, result["backward"], [(dims, "normal")], dtype="float16")
    assert all(value < 1e-3 for values in found.values() for value in values), found


def test_gradients__are_made_for_other_sizes_than_the_traced() -> None:
    small, large = ({"SIZES": sizes} for sizes in ([[5, 1, 3], [1, 1, 1]], [[33, 50, 20], [64, 16, 7]]))
    result = draft(GROUPED, small)
    assert (result["report"]["atomics"], result["report"]["tape_bytes"]) == (2, 0)
    assert_right(GROUPED, result, [(large, "normal"), (small, "transposed"), (large, "expanded")])


def test_a_table_of_something_else__is_told_at_run_time(write: Callable[..., Path]) -> None:
    """The stub takes addresses where the traced call did not: those tensors would get no gradient."""
    changed = (
        "x_table = torch.tensor([x.data_ptr() for x in xs] if a.numel() == 20 else "
        "list(map(torch.Tensor.data_ptr, xs)))"
    )
    file = write(source(("x_table = torch.tensor([x.data_ptr() for x in xs], dtype=torch.int64)", changed)))
    result = draft(file, SHAPES[0])
    assert_right(file, result, [(SHAPES[0], "normal")])
    with pytest.raises(AssertionError, match=r"candidate_raised.*holds an address that is not"):
        assert_right(file, result, [(SHAPES[1], "normal")])


REFUSED: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "offset_in_bytes": ((("tl.load(x_table + g).to(", "(tl.load(x_table + g) + 4).to("),), "loaded as it is"),
    "block_of_pointers": ((("tl.load(x_table + g).to(", "tl.load(x_table + tl.arange(0, 2)).to("),), "loaded as it is"),
    "made_elsewhere": (
        (("x_table = torch.tensor([x.data_ptr() for x in xs], dtype=torch.int64)", "x_table = table_of_addresses(xs)"),),
        "outside product()",
    ),
    "not_of_tensors": ((("[x.data_ptr() for x in xs]", "[x.untyped_storage().data_ptr() for x in xs]"),), "not known"),
    "another_type": ((("x_table + g).to(tl.pointer_type(tl.float32))", "x_table + g).to(tl.pointer_type(tl.float16))"),), "not of float16"),
    "without_a_name": ((("product_kernel[(len(xs),)](x_table,", "product_kernel[(len(xs),)](x_table.clone(),"),), "no name"),
    "detached": ((("[x.data_ptr() for x in xs]", "[x.detach().data_ptr() for x in xs]"),), "detached input"),
    "views": (
        (("ys = [torch.empty_like(x) for x in xs]", "whole = a.new_empty(2, 64)\n    ys = [whole[0], whole[1]]"),),
        "points into views",
    ),
    "one_output_twice": ((("ys = [torch.empty_like(x) for x in xs]", "ys = [torch.empty_like(b)] * 2"),), "one output twice"),
    "added_to": ((("tl.store(y_ptr", "tl.atomic_add(y_ptr"),), "added to through a table"),
    "in_place": ((("[y.data_ptr() for y in ys]", "[x.data_ptr() for x in xs]"),), "written and read"),
    "changes_in_a_loop": (
        (
            ("    tl.store(y_ptr", "    for i in range(1):\n        x = x + tl.load(x_ptr + cols, mask=mask, other=0.0)\n"
             "        x_ptr = tl.load(x_table + 1 - g).to(tl.pointer_type(tl.float32))\n    tl.store(y_ptr"),
        ),
        "another buffer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused__with_place_and_remedy(name: str, write: Callable[..., Path]) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(unusable.Unusable) as caught:
        draft(write(source(*changes)), SHAPES[0])
    error = caught.value
    assert error.kind == "unsupported_op"
    (refusal,) = error.extra["refusals"]  # type: ignore[attr-defined]
    assert message in refusal["message"]
    assert refusal["line"] is not None
    assert refusal["remedy"]
