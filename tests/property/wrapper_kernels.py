"""The small kernels that random wrappers launch: text by kind, with an expression drawn into each.

`x` and `s` stand for the values of a block.
"""

from __future__ import annotations

import random

FUNCTIONS = [
    "tl.sin({})", "tl.sigmoid({0}) * {0}", "{} * 0.7", "tl.where({0} > 0.1, {0}, 0.2 * {0})", "tl.exp(-tl.abs({}))",
    "tl.sqrt({0} * {0} + 0.6)", "{0} * {0} * 0.3", "tl.maximum({}, -0.4)", "tl.cos({}) + 0.2", "tl.abs({}) - 0.5",
]  # fmt: skip
MIXED = [
    "{0} * {1}", "{0} + {1}", "{0} * tl.sigmoid({1})", "tl.maximum({0}, {1})", "{0} / (1.3 + tl.abs({1}))",
    "tl.where({0} > {1}, {0} * {1}, {1})", "tl.sin({0}) * {1}",
]  # fmt: skip

HEADS = {  # by kind, what a kernel takes
    "map": "x_ptr, y_ptr, total, BLOCK: tl.constexpr",
    "mix": "x_ptr, s_ptr, y_ptr, total, scale, BLOCK: tl.constexpr",
    "flagged": "x_ptr, s_ptr, y_ptr, total, scale, HAS_S: tl.constexpr, MODE: tl.constexpr, "
    "BLOCK: tl.constexpr",
    "bias": "x_ptr, b_ptr, y_ptr, n, x_rows, x_cols, BLOCK: tl.constexpr",
    "row_sum": "x_ptr, y_ptr, n, x_rows, x_cols, BLOCK: tl.constexpr",
    "col_sum": "x_ptr, y_ptr, n, x_rows, x_cols, BLOCK: tl.constexpr",
    "softmax": "x_ptr, y_ptr, lse_ptr, n, x_rows, x_cols, BLOCK: tl.constexpr",
    "matmul": "a_ptr, b_ptr, c_ptr, rows, columns, inner, a_rows, a_cols, b_rows, b_cols, "
    "BLOCK: tl.constexpr",
    "gather": "x_ptr, index_ptr, y_ptr, n, BLOCK: tl.constexpr",
    "inplace": "y_ptr, total, scale, BLOCK: tl.constexpr",
    "added": "x_ptr, y_ptr, total, BLOCK: tl.constexpr",
    "atomic": "x_ptr, y_ptr, total, BLOCK: tl.constexpr",
    "line": "x_ptr, y_ptr, first, n, BLOCK: tl.constexpr",
    "two": "x_ptr, y_ptr, z_ptr, total, BLOCK: tl.constexpr",
}

FLAT = """    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < total
"""
ROWS = """    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * x_rows + cols * x_cols, mask=mask, other=0.0).to(tl.float32)
"""
BODIES = {
    "map": FLAT
    + """    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, {f}, mask=mask)
""",
    "mix": FLAT
    + """    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if s_ptr is not None:
        s = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = {mixed}
    tl.store(y_ptr + at, {f} * scale, mask=mask)
""",
    "flagged": FLAT
    + """    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_S:
        s = tl.load(s_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = {mixed}
    if MODE == "plain":
        x = {f} * scale
    else:
        x = {g}
    tl.store(y_ptr + at, x, mask=mask)
""",
    "bias": ROWS
    + """    if b_ptr is not None:
        x += tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + cols, {f}, mask=mask)
""",
    "row_sum": ROWS
    + """    tl.store(y_ptr + row, tl.sum(tl.where(mask, {f}, 0.0), axis=0) * 0.3)
""",
    "col_sum": ROWS
    + """    tl.atomic_add(y_ptr + cols, {f}, mask=mask)
""",
    "softmax": ROWS
    + """    x = tl.where(mask, x, -float("inf"))
    top = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - top), axis=0)
    tl.store(y_ptr + row * n + cols, tl.exp(x - top) / total, mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, top + tl.log(total))
""",
    "matmul": """    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a_mask = (r[:, None] < rows) & (k[None, :] < inner)
        b_mask = (k[:, None] < inner) & (c[None, :] < columns)
        a = tl.load(a_ptr + r[:, None] * a_rows + k[None, :] * a_cols, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + k[:, None] * b_rows + c[None, :] * b_cols, mask=b_mask, other=0.0)
        total += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    x = total * 0.2
    c_mask = (r[:, None] < rows) & (c[None, :] < columns)
    tl.store(c_ptr + r[:, None] * columns + c[None, :], {f}, mask=c_mask)
""",
    "gather": """    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    at = tl.load(index_ptr + row)
    x = tl.load(x_ptr + at * n + cols, mask=cols < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + cols, {f}, mask=cols < n)
""",
    "inplace": FLAT
    + """    x = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, {f} * scale, mask=mask)
""",
    "added": FLAT
    + """    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y + {f}, mask=mask)
""",
    "atomic": FLAT
    + """    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(y_ptr + at, {f}, mask=mask)
""",
    "line": """    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + first + cols, mask=cols < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + first + cols, {f}, mask=cols < n)
""",
    "two": FLAT
    + """    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, {f}, mask=mask)
    tl.store(z_ptr + at, {g}, mask=mask)
""",
}


def parameters(kind: str) -> list[str]:
    """The names that a kernel of a kind takes, in order."""
    return [part.split(":")[0].strip() for part in HEADS[kind].split(",")]


def text(kind: str, name: str, pick: random.Random) -> str:
    """One kernel of a kind, under a name."""
    drawn = {
        "f": pick.choice(FUNCTIONS).format("x"),
        "g": pick.choice(FUNCTIONS).format("x"),
        "mixed": pick.choice(MIXED).format("x", "s"),
    }
    drawn = {key: f"({value})" for key, value in drawn.items()}
    head = f"@triton.jit\ndef {name}({HEADS[kind]}):\n"
    return head + BODIES[kind].format(**drawn)
