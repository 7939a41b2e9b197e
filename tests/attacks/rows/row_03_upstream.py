"""The upstream gradient is ignored, or used in part, or not linearly."""

from suite import Attack

LOAD = "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n"
SOFTMAX_LOAD = "    dy = tl.load(dy_ptr + at, mask=cols < N, other=0.0)\n"
STRIDED = "dy = tl.load(dy_ptr + row * dy_row + cols * dy_col, mask=cols < N, other=0.0)"

ATTACKS = [
    Attack(
        "replaced by ones",
        "scale_atomics",
        ((LOAD, "    dy = tl.where(i < N, 1.0, 0.0)\n"),),
        "gradient of x is wrong",
    ),
    Attack(
        "only its first element",
        "scale_atomics",
        ((LOAD, "    dy = tl.where(i < N, tl.load(dy_ptr), 0.0)\n"),),
        "gradient of x is wrong",
    ),
    Attack(
        "softmax that is right for an upstream of ones",
        "softmax_saved_output",
        (("y * (dy - tl.sum(y * dy, axis=0))", "y * (1 - tl.sum(y, axis=0))"),),
        "gradient of x (is zero everywhere, and must not be|is wrong)",
    ),
    Attack(
        "softmax with the mean of the upstream",
        "softmax_saved_output",
        (("tl.sum(y * dy, axis=0)", "tl.sum(dy, axis=0) / N"),),
        "gradient of x is wrong",
    ),
    Attack(
        "clipped",
        "scale_atomics",
        ((LOAD, LOAD + "    dy = tl.minimum(tl.maximum(dy, -6.0), 6.0)\n"),),
        "not_linear: the gradient of x",
    ),
    Attack(
        "small values flushed",
        "scale_atomics",
        (
            (LOAD, LOAD + "    dy = tl.where(tl.abs(dy) < 1e-5, 0.0, dy)\n"),
            (
                "tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)",
                "tl.store(dx_ptr + i, tl.where(tl.abs(dy) < 1e-2, 0.0, dy) * tl.load(s_ptr), mask=i < N)",
            ),
        ),
        "not_linear: the gradient of \\S+|gradient of x is wrong",
    ),
    Attack(
        "rounded to a grid",
        "scale_atomics",
        ((LOAD, LOAD + "    dy = tl.floor(dy * 1048576.0 + 0.5) / 1048576.0\n"),),
        "not_linear: the gradient of x",
    ),
    Attack(
        "its absolute value",
        "scale_atomics",
        ((LOAD, LOAD.replace("tl.load(", "tl.abs(tl.load(").replace("other=0.0)", "other=0.0))")),),
        "gradient of x is wrong",
    ),
    Attack(
        "divided by itself",
        "softmax_saved_output",
        ((SOFTMAX_LOAD, SOFTMAX_LOAD + "    dy = dy * dy / dy\n    dy = tl.where(cols < N, dy, 0.0)\n"),),
        "onehot upstream.*not finite",
    ),
    Attack(
        "assumed contiguous",
        "softmax_saved_output",
        (("dy.contiguous()", "dy"),),
        "fails only with (slice|stacked|transposed|expanded|spanned|shifted|swapped) upstream",
    ),
    Attack(
        "assumed without stride 0",
        "softmax_strided",
        (
            (
                "strides = (*dy.stride(), *dx.stride())",
                "strides = (max(dy.stride(0), 1), max(dy.stride(1), 1), *dx.stride())",
            ),
        ),
        "fails only with (expanded|spanned) upstream",
    ),
    Attack(
        "rows assumed to lie one after another",
        "softmax_saved_output",
        (("dy.contiguous()", "dy if dy.stride(1) == 1 and dy.stride(0) else dy.contiguous()"),),
        "fails only with (slice|shifted) upstream",
    ),
    Attack(
        "assumed never None",
        "several_outputs",
        (
            ('HAS_CUBE": dcube is not None', 'HAS_CUBE": True'),
            ('HAS_SQUARE": dsquare is not None', 'HAS_SQUARE": True'),
        ),
        "none_one upstream",
    ),
    Attack(
        "one of two outputs forgotten",
        "several_outputs",
        (
            (
                "    if HAS_CUBE:\n        dx += 3 * x * x * tl.load(dcube_ptr + i, mask=i < N, other=0.0)\n",
                "",
            ),
        ),
        "gradient of x",
    ),
    Attack(
        "cross-entropy that knows only the upstream of a mean",
        "cross_entropy_tiles",
        (("tl.load(dloss_ptr + row))", "tl.load(dloss_ptr))"),),
        "gradient of logits is wrong",
    ),
    Attack(
        "cross-entropy that takes the upstream of a sum for granted",
        "cross_entropy_tiles",
        (("tl.load(dloss_ptr + row))", "1.0)"),),
        "gradient of logits is wrong",
    ),
    Attack(
        "wrong only for an upstream of zeros",
        "softmax_saved_output",
        (
            (
                "    dx = y * (dy - tl.sum(y * dy, axis=0))\n",
                "    total = tl.sum(tl.abs(dy), axis=0)\n    dx = y * (dy / total - tl.sum(y * dy, axis=0) "
                "/ total) * total\n",
            ),
        ),
        "not finite",
    ),
]
