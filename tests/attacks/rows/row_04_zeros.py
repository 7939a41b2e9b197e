"""Gradients so small that zeros would pass an absolute tolerance."""

from suite import Attack

STORE = "tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)"

ATTACKS = [
    Attack(
        "zeros for x",
        "scale_atomics",
        ((STORE, "tl.store(dx_ptr + i, dy * 0.0, mask=i < N)"),),
        "gradient of x is zero everywhere, and must not be",
    ),
    Attack(
        "zeros for s",
        "scale_atomics",
        (("tl.sum(dy * x)", "tl.sum(dy * 0.0)"),),
        "gradient of s is zero everywhere, and must not be",
    ),
    Attack(
        "zeros where the gradient is small",
        "softmax_saved_output",
        (
            (
                "dx = y * (dy - tl.sum(y * dy, axis=0))",
                "dx = y * (dy - tl.sum(y * dy, axis=0))\n    dx = tl.where(tl.abs(dx) < 1e-2, 0.0, dx)",
            ),
        ),
        "not_linear: the gradient of x|gradient of x is wrong",
    ),
    Attack(
        "one row of zeros",
        "softmax_saved_output",
        (("dx, mask=cols < N)", "dx * tl.where(tl.program_id(0) == 1, 0.0, 1.0), mask=cols < N)"),),
        "whole slices are zero",
    ),
    Attack(
        "None for s",
        "scale_atomics",
        (("return dx, ds", "return dx, None"),),
        "gradient of s was not returned",
    ),
]
