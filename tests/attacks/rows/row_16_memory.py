"""Elements are not written, or written where nobody may."""

from suite import Attack

ATTACKS = [
    Attack(
        "the last tile is missing",
        "scale_atomics",
        (("scale_backward_kernel[(triton.cdiv(n, 16),)]", "scale_backward_kernel[(max(n // 16, 1),)]"),),
        "gradient of x is (not finite|wrong)",
    ),
    Attack(
        "a tail that a mask cuts off",
        "softmax_saved_output",
        (("tl.store(dx_ptr + at, dx, mask=cols < N)", "tl.store(dx_ptr + at, dx, mask=cols < N - 1)"),),
        "gradient of x is not finite.*indices 19",
    ),
    Attack(
        "a store without a mask",
        "scale_atomics",
        (
            (
                "tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)",
                "tl.store(dx_ptr + i, dy * tl.load(s_ptr))",
            ),
        ),
        "raised.*writes out of bounds",
    ),
    Attack(
        "a load without a mask",
        "scale_atomics",
        (("    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n", "    dy = tl.load(dy_ptr + i)\n"),),
        "raised.*reads out of bounds",
    ),
    Attack(
        "an atomic below its tensor",
        "scale_atomics",
        (("tl.atomic_add(ds_ptr, tl.sum(dy * x))", "tl.atomic_add(ds_ptr - 4096, tl.sum(dy * x))"),),
        "raised.*updates out of bounds",
    ),
    Attack(
        "one row too many",
        "softmax_saved_output",
        (("softmax_backward_kernel[(M,)]", "softmax_backward_kernel[(M + 1,)]"),),
        "raised.*out of bounds",
    ),
    Attack(
        "db summed over one block of rows only",
        "layer_norm_partials",
        (("db.sum(dim=0).to(w.dtype)", "db[:1].sum(dim=0).to(w.dtype)"),),
        "gradient of b is wrong",
    ),
    Attack(
        "partial rows stored over each other",
        "layer_norm_partials",
        (("tl.store(dw_ptr + block * N + cols, dw, mask=mask)", "tl.store(dw_ptr + cols, dw, mask=mask)"),),
        "gradient of w is (not finite|wrong)",
    ),
    Attack(
        "stores instead of atomics",
        "layer_norm_saved_statistics",
        (("tl.atomic_add(db_ptr + cols, dy, mask=mask)", "tl.store(db_ptr + cols, dy, mask=mask)"),),
        "gradient of b is wrong",
    ),
    Attack(
        "the tail of the inner loop is missing",
        "linear_strides",
        (("for start in range(0, K, T):", "for start in range(0, K // T * T, T):"),),
        "gradient of",
    ),
]
