"""Every refusal that the differentiator can make: its message, its place, and that no refusal is without a
case here."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from diff_support import ROOT, draft
from kernel_agent import errors
from kernel_agent.differentiate import Refusal

PACKAGE = ROOT / "sandbox/kernel_agent/differentiate"
HEAD = """\
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from kernel_agent import autodiff

SWEEP = [{"N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))


@triton.jit
def again(x):
    return again(x)


@triton.jit
def two(a, b):
    return a + b


@triton.jit
def sometimes(x, n):
    if n > 3:
        return (x, x)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def pairs(a1, b1, a2, b2):
    return tl.maximum(a1, a2), b1 + b2


@triton.jit
def rounded_pairs(a1, b1, a2, b2):
    return a1 * b2 + a2 * b1, (b1 * b2).to(tl.float16)


@triton.jit
def rounded(a, b):
    return (a + b).to(tl.float16)


@tl.constexpr
def kind_of(kind, value):
    return kind

"""
KERNEL = """
@triton.jit
def kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + cols, mask=mask, other=0.0)
"""
STUB = """

@autodiff(inputs_require_grad=(0, 1))
def stub(x, y):
    out = torch.zeros(2 * x.numel(), device=x.device, dtype=x.dtype)
    kernel[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)
    return out
"""
STORE = "\n    tl.store(out_ptr + cols, x, mask=mask)"

# Body of the kernel, the offending line marked -> construct, a part of the message
KERNELS: dict[str, tuple[str, str, str]] = {
    "loop_else": ("    for i in range(3):  # here\n        x = x * 2.0\n    else:\n        x = x + 1.0", "loop else", "else branch"),
    "try": ("    try:  # here\n        x = x * 2.0\n    except ValueError:\n        x = x", "try", "`try` in a kernel"),
    "raise": ("    if n > 100:\n        raise ValueError(n)  # here", "raise", "statement is not supported"),
    "match": ("    match n:  # here\n        case 1:\n            x = x * 2.0", "match", "statement is not supported"),
    "different_blocks": ("    x = x + tl.arange(0, 8)  # here", "broadcast", "do not combine"),
    "undefined": ("    x = x * factor  # here", "name", "`factor` is not defined"),
    "scaled_pointer": ("    x = tl.load(x_ptr * 2)  # here", "pointer arithmetic", "adding and subtracting"),
    "no_such_operation": ("    x = tl.squareroot(x)  # here", "attribute", "`.squareroot`"),
    "asked_too_early": ("    x = x.to(kind_of(tl.float32, x))  # here", "kind_of", "not known before a launch"),
    "no_such_attribute": ("    x = x.size  # here", "attribute", "`.size`"),
    "no_such_method": ("    x = x.squareroot()  # here", ".squareroot", "no adjoint here"),
    "branch_only": ("    if n > 3:\n        pair = (x, x)\n    x = pair  # here", "branch-dependent value", "one branch only"),
    "pointer_of_branch": ("    p = x_ptr + cols\n    if n > 3:\n        p = y_ptr + cols\n    x = tl.load(p, mask=mask)  # here", "branch-dependent pointer", "another buffer"),
    "returned_sometimes": ("    x = x + sometimes(x, n)  # here", "branch-dependent value", "one branch only"),
    "text": ("    x = two(x, 'text')", "str", "a number or a block"),
    "matrix_product": ("    x = x @ x  # here", "matmult", "operator"),
    "power": ("    x = x ** 2  # here", "**", "power of a block"),
    "float_floor_division": ("    x = x // 2.0  # here", "float floordiv", "no floor division"),
    "membership": ("    if n in (1, 2):  # here\n        x = x * 2.0", "comparison", "comparison"),
    "recursion": ("    x = again(x)", "recursion", "calls itself"),
    "missing_argument": ("    x = two(x)  # here", "call", "without b"),
    "changes_kind": ("    p = (x, x)\n    for i in range(3):  # here\n        p = x\n    x = x + 1.0", "loop", "changes its kind"),
    "axis_at_run_time": ("    x = x + tl.sum(x, axis=n)  # here", "constexpr", "compile time"),
    "assigned_attribute": ("    x.y = 3  # here", "assignment target", "only names"),
    "augmented_element": ("    x[0] += 1.0  # here", "assignment target", "only names"),
    "two_loop_variables": ("    for i, j in range(3):  # here\n        x = x * 2.0", "loop target", "one plain variable"),
    "loop_over_block": ("    for i in cols:  # here\n        x = x * 2.0", "loop", "over a range"),
    "loop_over_other": ("    for i in enumerate(3):  # here\n        x = x * 2.0", "loop over enumerate", "over a range"),
    "set": ("    x = two(x, {1})  # here", "set", "expression"),
    "starred": ("    x = two(*(x, x))  # here", "starred call", "starred"),
    "unpacked_block": ("    a, b = x  # here", "unpacking", "tuple"),
    "return_in_loop": ("    for i in range(3):  # here\n        return", "return in a loop", "inside a loop"),
    "element": ("    x = x + x[0]  # here", "indexing", "`:` and None"),
    "unknown_function": ("    print(x)  # here", "print", "no adjoint"),
    "strange_dtype": ("    x = x.to(3)  # here", "dtype", "not a type"),
    "scan_of_pairs": ("    y, x = tl.associative_scan((x, x), 0, pairs)  # here", "associative_scan", "no first-order recurrence"),
    "scan_of_elsewhere": ("    x = tl.associative_scan(x, 0, tl.standard._elementwise_max)  # here", "associative_scan", "function of another file"),
    "scan_of_builtin": ("    x = tl.associative_scan(x, 0, tl.maximum)  # here", "associative_scan", "source of its combine function"),
    "scan_of_other_type": ("    x = tl.associative_scan(x, 0, rounded)  # here", "associative_scan", "type of its operands"),
    "reduce_of_other_type": ("    y, z = tl.reduce((x, x), 0, rounded_pairs)  # here", "tl.reduce", "2 values of the type"),
    "scan_of_three": ("    x, y, z = tl.associative_scan((x, x, x), 0, larger)  # here", "associative_scan", "one or two values"),
    "pointer_method": ("    x = x_ptr.sum()  # here", ".sum", "method of a pointer"),
    "sort": ("    x = tl.sort(x)  # here", "tl.sort", "sorting networks"),
    "load_of_values": ("    x = tl.load(x)  # here", "load", "not based on a pointer"),
    "store_to_values": ("    tl.store(x, x)  # here", "store", "not based on a pointer"),
    "block_pointer_of_number": ("    p = tl.make_block_ptr(n, (n,), (1,), (0,), (16,), (0,))  # here", "make_block_ptr", "not based on a pointer"),
    "advanced_pointer": ("    p = tl.advance(x_ptr, (1,))  # here", "advance", "only a block pointer"),
    "advanced_by_method": ("    p = x_ptr.advance((1,))  # here", "advance", "only a block pointer"),
    "bitcast": ("    x = x + x.to(tl.int32, bitcast=True)  # here", "bitcast", "bits"),
    "cast_pointer": ("    p = tl.cast(x_ptr, tl.float32)  # here", "pointer cast", "casting a pointer"),
    "pointer_to": ("    p = x_ptr.to(tl.float32)  # here", "pointer cast", "casting a pointer"),
    "dot_of_vectors": ("    x = tl.dot(x, x)  # here", "dot", "rank 2 or 3"),
    "wrong_arguments": ("    x = tl.where(x)  # here", "tl.where", "not understood"),
    "atomic_result": ("    x = x * tl.atomic_add(out_ptr + cols, x)  # here", "atomic result", "order of programs"),
    "by_every_program": ("    tl.store(out_ptr + tl.arange(0, BLOCK), x)  # here", "overwritten store", "several programs"),
    "stored_twice": ("    tl.store(out_ptr + cols, x * x, mask=mask)", "overwritten store", "stored to twice"),
    "stored_in_every_step": ("    for i in range(3):\n        tl.store(out_ptr + n + cols, x * i)  # here", "overwritten store", "in every step"),
    "read_elsewhere": ("    tl.store(out_ptr + n + cols, x)\n    x = tl.load(out_ptr + n - cols)", "in-place access", "different addresses"),
    "reads_that_meet": (
        "    p = out_ptr + n + cols\n    a = tl.load(p)\n    b = tl.load(p + 8)\n    tl.store(p, a * x)  # here\n    tl.store(p + 8, b * x)", "in-place access", "different addresses"
    ),
    "read_after_a_branch": ("    p = out_ptr + n + cols\n    if n > 3:\n        tl.store(p, x)\n    x = tl.load(p)  # here", "in-place access", "after a branch or a loop"),
    "stored_in_a_branch": ("    p = out_ptr + n + cols\n    x = x + tl.load(p)\n    if n > 3:\n        tl.store(p, x)  # here", "in-place access", "in one branch"),
    "updated_in_every_step": (
        "    p = out_ptr + n + cols\n    for i in range(3):\n        x = x + tl.load(p)\n        tl.store(p, x * 0.0)  # here", "in-place access", "in every step"
    ),
    "while_state": ("    s = 1.0\n    while s < 9.0:  # here\n        x = tl.sin(x)\n        s = s * 3.0", "while", "backwards"),
    "unknown_trips": (
        "    k = tl.load(y_ptr).to(tl.int32)\n    for i in range(k):  # here\n        x = tl.sin(x) * x", "tape", "not known before the launch"
    ),
    "other_buffer": (
        "    p = x_ptr\n    for i in range(3):  # here\n        x = x + tl.load(p + cols, mask=mask, "
        "other=0.0)\n        p = y_ptr",
        "pointer", "another buffer",
    ),
    "other_block": (
        "    p = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (16,), (0,))\n    for i in range(3):  # here\n"
        "        x = x + tl.sum(tl.load(p), axis=0)\n"
        "        p = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (8,), (0,))",
        "pointer", "blocks of another shape",
    ),
    "address_of_nothing": (
        "    p = n.to(tl.pointer_type(tl.float32))  # here\n    x = x + tl.load(p + cols)", "table of pointers", "loaded as it is"
    ),
    "compared_pointer": ("    x = tl.where(x_ptr > 0, x, 0.0)  # here", "comparison", "has no order"),
    "no_rule": ("    x = libdevice.lgamma(x)  # here", "libdevice.lgamma", "`libdevice.lgamma` has no adjoint"),
}  # fmt: skip

KERNEL_OF_X = KERNEL + "    tl.store(out_ptr + cols, x, mask=mask)\n"


TABLE = """

@triton.jit
def kernel(x_table, out_table, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(tl.load(x_table).to(tl.pointer_type(tl.float32)) + cols, mask=cols < n, other=0.0)
    tl.store(tl.load(out_table).to(tl.pointer_type(tl.float32)) + cols, x, mask=cols < n)


@autodiff(inputs_require_grad=(0, 1))
def stub(x, y):
    out = torch.empty_like(x)
    x_table, out_table = (torch.tensor([t.data_ptr()], dtype=torch.int64) for t in (x, out))
    kernel[(1,)](x_table, out_table, x.numel(), BLOCK=64)
    return out
"""


def table_with(old: str, new: str) -> str:
    """A kernel with tables of pointers, one place changed."""
    assert old in TABLE
    return TABLE.replace(old, new)


def stub_with(text: str) -> str:
    """The stub with another launch."""
    return STUB.replace("    kernel[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)", text)


# Whole files after HEAD -> construct, a part of the message
FILES: dict[str, tuple[str, str, str]] = {
    "writes_nothing": (KERNEL_OF_X + STUB.replace("dtype=x.dtype", "dtype=torch.int32"), "stub", "no launch writes anything"),
    "shadowed": (KERNEL_OF_X + STUB + "\n\ndef gradient_of(t):  # here\n    return t\n", "name", "is a name of this file"),
    "taken_name": (KERNEL_OF_X.replace("y_ptr, out_ptr, n", "d_x_ptr, out_ptr, n").replace("constexpr):", "constexpr):  # here") + STUB, "name", "gives to a value of its own"),
    "no_launch": (stub_with("    out = x * 2"), "stub", "launches no kernel"),
    "gradients_off": (
        KERNEL_OF_X + "\n\ndef twice(t):\n    with torch.no_grad():\n        return t * 2\n"
        + stub_with("    kernel[(3,)](twice(x) + x, y, out, 40, BLOCK=16)"), "no_grad", "switches gradients off"
    ),
    "two_on_a_line": (KERNEL_OF_X + stub_with("    kernel[(3,)](x, y, out, 40, BLOCK=16); kernel[(3,)](x, y, out, 40, BLOCK=16)  # here"), "launch", "cannot be found"),
    "through_two_pointers": (
        KERNEL_OF_X.replace("x, mask=mask)", "x, mask=mask)  # here") + stub_with("    out = x + y\n    kernel[(3,)](out, y, out, 40, BLOCK=16)"), "in-place access", "written and read, as"
    ),
    "indirect": (KERNEL_OF_X + stub_with("    [kernel][0][(3,)](x, y, out, 40, BLOCK=16)  # here"), "launch", "must have a name at the top level"),
    "nested_kernel": ("if True:\n" + KERNEL_OF_X.strip().replace("\n", "\n    ").replace("@triton", "    @triton") + "\n" + STUB, "launch", "not defined at the top level"),
    "odd_argument": (
        KERNEL_OF_X + stub_with("    kernel[(3,)](\n        x, y, out,\n        {40},  # here\n        BLOCK=16)"), "launch argument", "is a set"
    ),
    "odd_keyword": (
        KERNEL_OF_X + stub_with("    kernel[(3,)](\n        x, y, out, BLOCK=16,\n        n={40},  # here\n    )"), "launch argument", "is a set"
    ),
    "odd_unpacked": (
        KERNEL_OF_X + stub_with("    kernel[(3,)](x, y, out, **{'n': {40}, 'BLOCK': 16})  # here"), "launch argument", "is a set"
    ),
    "view_beside_output": (
        KERNEL_OF_X.replace("out_ptr, n", "out_ptr, more_ptr, n") + "    tl.store(more_ptr + cols, x, mask=mask)\n"
        + stub_with("    kernel[(3,)](x, y, out.view(-1), torch.empty_like(x), 40, BLOCK=16)  # here"),
        "view as output", "is a view",
    ),
    "other_type": (
        table_with("(tl.float32)) + cols, mask=cols < n, other=0.0)", "(tl.float64)) + cols, mask=cols < n, other=0.0)  # here"),
        "table of pointers", "not of float64",
    ),
    "unknown_addresses": (
        table_with("t.data_ptr()]", "t.untyped_storage().data_ptr()]"), "table of pointers", "are not known"
    ),
    "added_through_table": (table_with("tl.store(", "tl.atomic_add("), "table of pointers", "keeps a gradient of its own"),
    "nameless_table": (
        table_with("kernel[(1,)](x_table,", "kernel[(1,)](x_table.clone(),"), "table of pointers", "has no name"
    ),
}  # fmt: skip


def source_of(name: str) -> str:
    if name in FILES:
        return HEAD + FILES[name][0]
    body = KERNELS[name][0]
    return HEAD + KERNEL + body + STORE + STUB


def refused(folder: Path, name: str) -> errors.Unusable:
    file = folder / "refused.py"
    file.write_text(source_of(name))
    with pytest.raises(errors.Unusable) as caught:
        draft(file, {"N": 40})
    return caught.value


@pytest.mark.parametrize("name", sorted({**KERNELS, **FILES}))
def test_refusal__names_construct_place_and_remedy(name: str, tmp_path: Path) -> None:
    _, construct, message = {**KERNELS, **FILES}[name]
    error = refused(tmp_path, name)
    assert error.kind == "unsupported_op"
    (refusal,) = error.extra["refusals"]  # type: ignore[attr-defined]
    assert refusal["construct"] == construct
    assert message in refusal["message"]
    assert refusal["remedy"]
    assert error.file == str(tmp_path / "refused.py")
    marked = [i for i, line in enumerate(source_of(name).splitlines(), 1) if "# here" in line]
    assert refusal["line"] == marked[0] if marked else refusal["line"] is not None
    if name.startswith("odd_"):
        assert refusal["column"] is not None


# Without a case here: the first guard what nothing is known to reach, the others need a set-up of their own.
WITHOUT_CASE = {
    "the passes of the differentiator contradict each other: {error or type(error).__name__}",
    # test_diff_api.
    "the rule for `{name}` has to return {wanted}",
    "the types of the values carried by this loop do not settle",
    "`{node.op}` has no adjoint",  # an operation of the graph without a row in the table of rules
    "its adjoint compares {size} pairs of places in registers",  # needs a large block
    # Through a table of pointers only.
    "`{name}` of {site.launch.name} already holds differentiable values that this launch does not read",
    "the state of a while loop cannot be taped",  # refused by the reverse sweep before
    "`{inplace}` is overwritten, but not by one program an element",  # refused as an overwritten store before
    # test_diff_adopted.py
    "{Path(file).name}:{line}: {launch.name} is launched from another file{why}",
    "{one.name} of {Path(one.path).name} is not what its text makes",
    "{message} ({type(error).__name__}: {error})",
    "{where} leads to the launch of {kernel}, but calls no function by its name",
    "`{name}` is an input that wants a gradient, and this launch overwrites it",  # test_diff_spans.py
    # test_diff_unseen.py
    "{what}, and a draft cannot follow it there",
    "{one.name} of {Path(one.path).name} may launch a kernel, and stays in its module",
    "the source of {launch.name}, {path}, cannot be read",  # a kernel that is made of text
    "`{name}` reads `{wanted}`, which the launch does not pass",
    "`{name}` reads `{error.args[0]}`, which the launch does not pass",  # test_diff_heuristics.py
}


def sites() -> Iterator[tuple[str, int, str]]:
    """(file, line, message) of every place that makes a refusal."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "function.py":  # plain functions: their refusals have cases in test_diff_function.py
            continue
        named: dict[str, ast.expr] = {}  # a text that has a name stands right above
        for node in sorted(ast.walk(ast.parse(path.read_text())), key=lambda n: getattr(n, "lineno", 0)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named[node.targets[0].id] = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal":
                text = named.get(node.args[1].id) if isinstance(node.args[1], ast.Name) else None
                yield str(path), node.lineno, ast.unparse(text or node.args[1]).removeprefix("f").strip("'\"")


def test_every_refusal__has_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, int]] = set()
    original = Refusal.__post_init__

    def record(self: Refusal) -> None:
        frame = sys._getframe(2)
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        original(self)

    monkeypatch.setattr(Refusal, "__post_init__", record)
    for name in {**KERNELS, **FILES}:
        refused(tmp_path, name)
    missed = {text for file, line, text in sites() if (file, line) not in seen}
    assert missed == WITHOUT_CASE
