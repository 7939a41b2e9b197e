"""A known seed, shape or kind of shape is treated specially."""

from suite import Attack

HEAD = "        dx, ds = torch.empty_like(x), torch.zeros_like(s)\n"

ATTACKS = [
    Attack(
        "right for the shape of the sweep only",
        "scale_atomics",
        ((HEAD, f"        if n != 24:\n            dy = torch.zeros_like(dy)\n{HEAD}"),),
        "hidden shape",
    ),
    Attack(
        "right for even sizes only",
        "scale_atomics",
        (("tl.atomic_add(ds_ptr, tl.sum(dy * x))", "tl.atomic_add(ds_ptr, tl.sum(dy * x) * (1 - N % 2))"),),
        "hidden shape",
    ),
    Attack(
        "right for the seed of an example only",
        "scale_atomics",
        ((HEAD, f"        if torch.initial_seed() != 0:\n            dy = torch.zeros_like(dy)\n{HEAD}"),),
        "gradient of x is zero|forbidden",
    ),
    Attack(
        "RMS norm that is right for powers of two only",
        "rms_norm_tree",
        (
            ("tl.sum(x * x, axis=0) / N", "tl.sum(x * x, axis=0) / BLOCK"),
            ("(r * r * r / N)", "(r * r * r / BLOCK)"),
        ),
        "hidden shape",
    ),
    Attack(
        "a block that covers the sweep only",
        "softmax_saved_output",
        (("dx, N, BLOCK=triton.next_power_of_2(N))", "dx, N, BLOCK=32)"),),
        "hidden shape",
    ),
    Attack(
        "right for positive inputs only",
        "scale_atomics",
        (
            (
                "tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)",
                "tl.store(dx_ptr + i, dy * tl.abs(tl.load(s_ptr)), mask=i < N)",
            ),
        ),
        "gradient of x",
    ),
    Attack(
        "row stride and length swapped",
        "log_sum_exp_row_stride",
        (("dx, x.stride(0), N, BLOCK=block", "dx, N, x.stride(0), BLOCK=block"),),
        r"x (slice|stacked|transposed|expanded).*\) raised: OutOfBounds",
    ),
    Attack(
        "right for contiguous inputs only",
        "log_sum_exp_row_stride",
        (("x_ptr + row * row_stride + cols", "x_ptr + row * N + cols"),),
        r"the gradient of x .*fails only with .*x (slice|stacked|transposed|expanded)",
    ),
    Attack(
        "an exponential that is not shifted",
        "log_sum_exp_row_stride",
        (("tl.exp(x - tl.max(x, axis=0))", "tl.exp(x)"),),
        r"x (mixed|large)\) the gradient of x is not finite",
    ),
    Attack(
        "right where the maximum stands once only",
        "row_max_shared_out",
        (("tl.load(dy_ptr + row) / times", "tl.load(dy_ptr + row)"),),
        r"x tied\) the gradient of x",
    ),
    Attack(
        "of equal maxima each tile's first",
        "row_max_first_of_equals",
        (
            ("    tl.store(dx_ptr + row * N + first, tl.load(dy_ptr + row))\n", ""),
            (
                "        first = tl.minimum(first, tl.min(tl.where(x == most, cols, N), axis=0))\n",
                "        first = tl.min(tl.where(x == most, cols, N), axis=0)\n"
                "        tl.store(dx_ptr + row * N + first, tl.load(dy_ptr + row), mask=first < N)\n",
            ),
        ),
        r"x tied\) the gradient of x",
    ),
    Attack(
        "right for no more rows than a GPU has processors only",
        "resident_rows_resident",
        (
            (
                "for row in range(tl.program_id(0), M, tl.num_programs(0)):",
                "for row in range(tl.program_id(0), tl.minimum(M, tl.num_programs(0))):",
            ),
        ),
        "gradient of x",
    ),
]
