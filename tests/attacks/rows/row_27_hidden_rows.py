"""Rows, blocks and elements that are small beside the rest, so that no norm over the whole shows them."""

from suite import Attack

DX = "dx = s * p * (dy - tl.sum(p * dy, axis=0))"
SUM = "delta = tl.sum(y * dy, axis=0) / tl.load(s_ptr + row)"
DW = "        dw = matmul_into(x.t(), dy,"

ATTACKS = [
    Attack(
        "the sign of small rows",
        "graded_recomputed",
        ((DX, f"{DX}\n    dx = tl.where(s < 2e-6, -dx, dx)"),),
        "gradient of x is close on the whole.* (Row|Elements) \\[.*sign is flipped",
    ),
    Attack(
        "small rows without the sum",
        "graded_recomputed",
        ((DX, "dx = s * p * (dy - tl.sum(p * dy, axis=0) * tl.where(s < 3e-6, 0.0, 1.0))"),),
        "gradient of x is close on the whole",
    ),
    Attack(
        "a weight that is clipped from below",
        "graded_recomputed",
        (("s = tl.load(s_ptr + row)", "s = tl.maximum(tl.load(s_ptr + row), 2e-6)"),),
        "gradient of x is close on the whole",
    ),
    Attack(
        "zeros below a threshold",
        "graded_recomputed",
        ((DX, f"{DX}\n    dx = tl.where(tl.max(tl.abs(dx), axis=0) < 1e-6, 0.0, dx)"),),
        "gradient of x is close on the whole|zero",
    ),
    Attack(
        "one element of a row off by a percent",
        "graded_recomputed",
        ((DX, f"{DX} * tl.where(s < 2e-5, tl.where(cols == 3, 1.01, 1.0), 1.0)"),),
        "gradient of x is close on the whole.* Element \\[\\d+, 3\\]",
    ),
    Attack(
        "the last block of a small row",
        "graded_recomputed",
        ((DX, f"{DX}\n    dx = tl.where(cols >= 64, tl.where(s < 3e-6, 0.0, dx), dx)"),),
        "gradient of x is close on the whole",
    ),
    Attack(
        "a small row's sum divided by its neighbour's weight",
        "graded_from_the_output",
        ((SUM, SUM.replace("row)", "row - (tl.load(s_ptr + row) < 2e-6).to(tl.int32))")),),
        "gradient of x is close on the whole",
    ),
    Attack(
        "small features of the product summed over one tile of the batch",
        "features_strides",
        (
            (DW, "        small = x.shape[1] // 16 * 16\n" + DW),
            ("if dw else None\n        return dx, dw", "if dw else None\n"
             "        if dw is not None and small > 16:\n"
             "            matmul_into(x.t()[small:, :16], dy[:16], dw[small:])\n        return dx, dw"),
        ),
        "gradient of w is close on the whole",
    ),
]  # fmt: skip
