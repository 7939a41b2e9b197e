"""The remedy of a refusal, followed, leads to a backward that is right: every refused source of
test_diff_refusal_list with the small edit that its remedy asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft
from test_diff_refusal_list import FILES, KERNEL_OF_X, KERNELS, STORE, source_of

PLACE = "    p = out_ptr + n + cols\n"
SECOND = """
@triton.jit
def second(x_ptr, sum_ptr, out_ptr, n, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + cols, mask=mask, other=0.0) * tl.load(sum_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + cols, x, mask=mask)


@autodiff"""
LAUNCH = "    kernel[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)\n"

# The body of the kernel that the remedy asks for
BODIES = {
    "loop_else": "    for i in range(3):\n        x = x * 2.0\n    x = x + 1.0",
    "try": "    x = x * 2.0",
    "match": "    if n == 1:\n        x = x * 2.0\n    elif n == 40:\n        x = x * 3.0",
    "raise": "    x = x * x",
    "different_blocks": "    x = x + tl.arange(0, 16)",
    "undefined": "    factor = 3.0\n    x = x * factor",
    "scaled_pointer": "    x = tl.load(x_ptr + 2 * cols, mask=2 * cols < n, other=0.0)",
    "no_such_operation": "    x = tl.sqrt(x * x + 1.0)",
    "no_such_attribute": "    x = x * x.shape[0]",
    "asked_too_early": "    x = (x * 2.0).to(kind_of(tl.float32, 3))",
    "no_such_method": "    x = tl.sqrt(x * x + 1.0)",
    "branch_only": "    if n > 3:\n        pair = (x * 2.0, x)\n    else:\n        pair = (x, x)\n    x = pair[0] * pair[1]",
    "pointer_of_branch": "    if n > 3:\n        x = tl.load(y_ptr + cols, mask=mask, other=0.0)\n    x = x * x",
    "text": "    x = two(x, 2.0)",
    "matrix_product": "    x = x[:, None] * x[None, :]\n    x = tl.sum(tl.dot(x, x), axis=1)",
    "power": "    x = x * x",
    "float_floor_division": "    x = x * tl.floor(x / 2.0)",
    "membership": "    if n == 1 or n == 40:\n        x = x * 2.0",
    "recursion": "    for i in range(3):\n        x = x * 2.0",
    "missing_argument": "    x = two(x, x)",
    "changes_kind": "    p = (x, x)\n    for i in range(3):\n        q = x\n    x = x + p[0]",
    "axis_at_run_time": "    x = x + tl.sum(x, axis=0)",
    "assigned_attribute": "    y = 3\n    x = x * y",
    "augmented_element": "    x = tl.where(tl.arange(0, BLOCK) == 0, x * 2.0, x)",
    "two_loop_variables": "    for i in range(3):\n        x = x * 2.0",
    "loop_over_block": "    for i in range(3):\n        x = x * 2.0",
    "loop_over_other": "    for i in range(3):\n        x = x * 2.0",
    "set": "    x = two(x, 1)",
    "starred": "    x = two(x, x)",
    "unpacked_block": "    a, b = (x, 2.0 * x)\n    x = a * b",
    "return_in_loop": "    if n < 3:\n        return\n    for i in range(3):\n        x = x * 2.0",
    "element": "    x = x + tl.sum(tl.where(tl.arange(0, BLOCK) == 0, x, 0.0), axis=0)",
    "unknown_function": "    x = tl.sin(x)",
    "strange_dtype": "    x = x.to(tl.float32) * 3.0",
    "scan_of_three": "    x = tl.associative_scan(x, 0, two)",
    "pointer_method": "    x = tl.load(x_ptr + cols, mask=mask, other=0.0) + tl.sum(x, axis=0)",
    "load_of_values": "    x = x * tl.load(x_ptr + cols, mask=mask, other=0.0)",
    "store_to_values": "    tl.store(out_ptr + n + cols, x * x, mask=mask)",
    "block_pointer_of_number": "    p = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (16,), (0,))\n    x = x * tl.load(p)",
    "advanced_pointer": "    p = x_ptr + 1\n    x = x * tl.load(p)",
    "advanced_by_method": "    p = x_ptr + 1\n    x = x * tl.load(p)",
    "bitcast": "    x = x * x.to(tl.float32)",
    "cast_pointer": "    x = x * tl.cast(tl.load(x_ptr), tl.float32)",
    "pointer_to": "    x = x * tl.load(x_ptr).to(tl.float32)",
    "dot_of_vectors": "    x = x * tl.sum(x * x, axis=0)",
    "wrong_arguments": "    x = tl.where(x > 0.0, x * x, x)",
    "by_every_program": "    tl.store(out_ptr + n + cols, x * x, mask=mask)",
    "stored_twice": "    x = x * x",
    "stored_in_every_step": "    s = x\n    for i in range(3):\n        s = x * i\n    tl.store(out_ptr + n + cols, s, mask=mask)",
    "read_elsewhere": "    x = x * tl.load(x_ptr + n - 1 - cols, mask=mask, other=0.0)",
    "reads_that_meet": "    a = tl.load(x_ptr + cols, mask=mask, other=0.0)\n    tl.store(out_ptr + n + cols, a * x, mask=mask)",
    "read_after_a_branch": PLACE + "    kept = x * x\n    if n > 3:\n        kept = x\n    tl.store(p, kept, mask=mask)\n    x = kept * x",
    "while_state": "    for i in range(3):\n        x = tl.sin(x)",
    "unknown_trips": "    k = tl.load(y_ptr).to(tl.int32)\n    for i in range(n):\n        x = tl.where(i < k + 2, tl.sin(x) * x, x)",
    "other_buffer": "    for i in range(3):\n        x = x + tl.load(x_ptr + cols, mask=mask, other=0.0)\n        x = x * tl.load(y_ptr + cols, mask=mask, other=0.0)",
    "other_block": "    p = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (16,), (0,))\n    for i in range(3):\n"
    "        x = x + tl.sum(tl.load(p), axis=0)\n"
    "        q = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (8,), (0,))\n        x = x + tl.sum(tl.load(q), axis=0)",
    "compared_pointer": "    x = tl.where(tl.load(x_ptr) > 0, x, 0.0)",
    "no_rule": "    x = libdevice.sinh(x)",
}  # fmt: skip

# Edits elsewhere in the file: what stands there, and what the remedy puts in its place
EDITS: dict[str, list[tuple[str, str]]] = {
    "returned_sometimes": [
        ("        return (x, x)\n", "        return x * x\n    else:\n        return x\n"),
    ],
    "scan_of_pairs": [("return tl.maximum(a1, a2), b1 + b2", "return a1 * a2, a2 * b1 + b2")],
    "scan_of_elsewhere": [("tl.standard._elementwise_max", "larger")],
    "scan_of_builtin": [("tl.maximum)", "larger)")],
    "scan_of_other_type": [(".to(tl.float16)", ".to(tl.float16).to(tl.float32)")],
    "reduce_of_other_type": [("(b1 * b2).to(tl.float16)", "b1 * b2")],
    "atomic_result": [
        ("    x = x * tl.atomic_add(out_ptr + cols, x)  # here" + STORE, "    tl.atomic_add(out_ptr + cols, x, mask=mask)"),
        ("\n@autodiff", SECOND),
        (LAUNCH, "    total = torch.zeros_like(x)\n" + LAUNCH.replace("out", "total") + LAUNCH.replace("kernel", "second").replace("y,", "total,")),
    ],
    "address_of_nothing": [
        ("p = n.to(", "p = tl.load(table).to("),
        ("tl.load(p + cols)", "tl.load(p + cols, mask=mask, other=0.0)"),
        ("n, BLOCK: tl", "n, table, BLOCK: tl"),
        (LAUNCH, "    table = torch.tensor([x.data_ptr()], dtype=torch.int64)\n" + LAUNCH.replace(", BLOCK", ", table, BLOCK")),
    ],
    "stored_in_a_branch": [
        ("    p = out_ptr + n + cols\n    x = x + tl.load(p)\n", "    p = out_ptr + n + cols\n"),
        ("        tl.store(p, x)  # here" + STORE, "        x = x * x + tl.load(p, mask=mask, other=0.0)\n        tl.store(p, x, mask=mask)"),
    ],
    "updated_in_every_step": [
        ("    for i in range(3):\n        x = x + tl.load(p)\n", "    s = tl.load(p, mask=mask, other=0.0)\n    for i in range(3):\n        x = x * x + s\n"),
        ("        tl.store(p, x * 0.0)  # here" + STORE, "        s = x * 0.5\n    tl.store(p, s, mask=mask)"),
    ],
    "writes_nothing": [("dtype=torch.int32", "dtype=x.dtype")],
    "shadowed": [("def gradient_of(", "def gradient_of_mine(")],
    "taken_name": [("d_x_ptr", "w_ptr")],
    "no_launch": [("    out = x * 2\n", "    out = torch.empty_like(x)\n" + LAUNCH), ("\n@autodiff", KERNEL_OF_X + "\n\n@autodiff")],
    "gradients_off": [("    with torch.no_grad():\n        return", "    return")],
    "two_on_a_line": [("; kernel[(3,)](x, y, out, 40, BLOCK=16)  # here", "\n    more = torch.empty_like(x)\n    kernel[(3,)](y, x, more, 40, BLOCK=16)\n    return out, more")],
    "through_two_pointers": [("    out = x + y\n", "    both = x + y\n"), ("(out, y, out,", "(both, y, out,")],
    "indirect": [("[kernel][0][(3,)]", "kernel[(3,)]")],
    "nested_kernel": [("if True:\n", ""), ("    @triton.jit\n    def kernel", "@triton.jit\ndef kernel")],
    "odd_argument": [("{40}", "int(40)")],
    "odd_keyword": [("{40}", "int(40)")],
    "odd_unpacked": [("{40}", "int(40)")],
    "view_beside_output": [("out.view(-1)", "out"), ("    return out\n", "    return out.view(2, -1)\n")],
    "other_type": [("tl.float64", "tl.float32")],
    "unknown_addresses": [(".untyped_storage().data_ptr()", ".data_ptr()")],
    "added_through_table": [("tl.atomic_add(", "tl.store(")],
    "nameless_table": [("x_table.clone(),", "x_table,")],
}  # fmt: skip

# Nothing in a kernel stands in their place.
EXEMPT = {
    "sort": "triton.language sorts in no other way; an adjoint can be registered",
}


def test_every_refusal__has_its_remedy_followed() -> None:
    assert sorted([*BODIES, *EDITS, *EXEMPT]) == sorted([*KERNELS, *FILES])


def followed(name: str) -> str:
    source = source_of(name)
    if name in BODIES:
        return source.replace(KERNELS[name][0], BODIES[name])
    for old, new in EDITS[name]:
        assert old in source
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("name", sorted([*BODIES, *EDITS]))
def test_remedy__followed__is_differentiated_rightly(name: str, tmp_path: Path) -> None:
    file = tmp_path / "cured.py"
    file.write_text(followed(name))
    assert_right(file, draft(file, {"N": 40}), [({"N": 40}, "normal")])
