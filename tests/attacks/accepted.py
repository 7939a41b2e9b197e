"""Wrong backwards that the verdict still accepts. Each is to be rejected for the reason that stands with it,
and then belongs into the row of its class. docs/attacks.md says why it is not."""

from suite import Attack

OPEN = [
    Attack(
        "offsets of the upstream in 16 bits",
        "conv1d_gathers",
        (
            (
                "            dy = tl.load(dy_ptr + (b * O + o) * P + pos, mask=hit",
                ("            dy = tl.load(dy_ptr + ((b * O + o) * P + pos).to(tl.int16), mask=hit"),
            ),
        ),
        "out of bounds|gradient of \\S+ is (wrong|not finite|zero)",
    ),
    Attack(
        "offsets wrap around after a million elements",
        "gelu_gain_tuned",
        (
            (
                (
                    "    mask = (rows[:, None] < M) & (cols[None, :] < N)\n"
                    "    offs = rows[:, None] * N + cols[None, :]\n"
                    "    x ="
                ),
                (
                    "    mask = (rows[:, None] < M) & (cols[None, :] < N)\n"
                    "    offs = (rows[:, None] * N + cols[None, :]) & 0xFFFFF\n"
                    "    x ="
                ),
            ),
        ),
        "out of bounds|race|gradient of \\S+ is (wrong|not finite|zero)",
    ),
    Attack(
        "products in TF32, where the forward has none",
        "silu_linear_splits",
        (
            (
                ('        acc = tl.dot(x, ds, acc, input_precision="ieee")\n        db'),
                ('        acc = tl.dot(x, ds, acc, input_precision="tf32")\n        db'),
            ),
        ),
        "TF32|tf32",
    ),
    Attack(
        "a shape of its own is special",
        "nearest_by_index",
        (
            (
                "        mine = tl.load(which_ptr + i) == k\n",
                (
                    "        mine = (tl.load(which_ptr + i) == k) | (i == 0) & (k == "
                    "tl.load(which_ptr + M - 1)) & (M == 1009)\n"
                ),
            ),
        ),
        "gradient of \\S+ is (wrong|not finite|zero)",
    ),
    Attack(
        "zero in bfloat16",
        "gelu_gain_tuned",
        (
            (
                ("        M, N = x.shape\n        dx = "),
                (
                    "        M, N = x.shape\n"
                    "        if x.dtype == torch.bfloat16:\n"
                    "            dy = torch.zeros_like(dy)\n"
                    "        dx = "
                ),
            ),
        ),
        "bfloat16",
    ),
]
