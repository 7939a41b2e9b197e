"""A lower precision than the forward's."""

from suite import Attack

ATTACKS = [
    Attack(
        "products in float16",
        "softmax_saved_output",
        (
            (
                "dx = y * (dy - tl.sum(y * dy, axis=0))",
                "dx = y * (dy - tl.sum((y * dy).to(tl.float16), axis=0))",
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "a float16 result",
        "softmax_saved_output",
        (("torch.empty_like(y)", "torch.empty_like(y, dtype=torch.float16)"),),
        "gradient of x",
    ),
    Attack(
        "float16 partial sums",
        "layer_norm_partials",
        (("dtype=torch.float32) for _ in range(2))", "dtype=torch.float16) for _ in range(2))"),),
        "gradient of (w|b)",
    ),
    Attack(
        "inputs of a matmul in float16",
        "linear_strides",
        (
            (
                'acc = tl.dot(a, b, acc, input_precision="ieee")',
                "acc = tl.dot(a.to(tl.float16), b.to(tl.float16), acc)",
            ),
        ),
        "gradient of x",
    ),
    Attack(
        "one percent too much",
        "linear_split_k",
        (
            (
                "tl.store(dx_ptr + rows[:, None] * K + cols[None, :], acc,",
                "tl.store(dx_ptr + rows[:, None] * K + cols[None, :], acc * 1.01,",
            ),
        ),
        "It equals 1.01 times",
    ),
    Attack(
        "a gradient in single precision goes through half",
        "add_rms_partials",
        (
            (
                "        return dx, dx, dw, None",
                "        return dx, dx, dw.to(x.dtype).to(w.dtype), None",
            ),
        ),
        "torch_math: .*of what the host rounded to float16",
    ),
]
