"""Right only for some values: of the inputs, or of the upstream."""

from suite import Attack

MOMENTS = "    x = tl.where(mask, x - tl.load(x_ptr + row * N), 0.0)\n"
LSE = "    e = tl.exp(x - tl.max(x, axis=0))\n"
RMS_DW = "    tl.store(part_ptr + row * N + cols, dy * x * r, mask=cols < N)"
SILU = "dy * b * s * (1 + a * (1 - s))"
DY = "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n"

ATTACKS = [
    Attack(
        "the variance as the difference of two moments, which cancel in a constant row",
        "layer_norm_shifted_moments",
        ((MOMENTS, ""),),
        r"x (flat|spanned)[^)]*\) the gradient of x is wrong",
    ),
    Attack(
        "finds the input again from the output: divides by a weight that may be zero",
        "rms_norm_tree",
        (
            (
                RMS_DW,
                "    w = tl.load(w_ptr + cols, mask=cols < N, other=1.0).to(tl.float32)\n"
                "    tl.store(part_ptr + row * N + cols, dy * (x * r * w) / w, mask=cols < N)",
            ),
        ),
        r"fails only with .*w flat",
    ),
    Attack(
        "centres logits before the maximum is taken off: a masked one makes the mean infinite",
        "log_sum_exp_row_stride",
        (
            (
                LSE,
                "    mean = tl.sum(tl.where(cols < N, x, 0.0), axis=0) / N\n"
                "    x = tl.where(cols < N, x - mean, x)\n" + LSE,
            ),
        ),
        r"fails only with x masked",
    ),
    Attack(
        "the derivative of the gate cut off where it is 'about 1'",
        "activation_glu/swiglu_two_inputs_recompute",
        ((SILU, "dy * b * tl.where(a > 5, 1.0, tl.where(a < -5, 0.0, s * (1 + a * (1 - s))))"),),
        r"fails only with ",
    ),
    Attack(
        "the argument of an exponential clamped: the gate's tail is flat",
        "activation_glu/swiglu_two_inputs_recompute",
        (("s = tl.sigmoid(a)", "s = 1 / (1 + tl.exp(-tl.minimum(tl.maximum(a, -6.0), 6.0)))"),),
        r"gradient of [ab] is wrong.*fails only with",
    ),
    Attack(
        "what passes the upstream on where x is positive, but not beyond 4.5",
        "rectified_in_place",
        (("tl.where(x > 0, dy, 0.0)", "tl.where((x > 0) & (x < 4.5), dy, 0.0)"),),
        r"fails only with .*x large|x large.*wrong",
    ),
    Attack(
        "an upstream beyond 30,000 taken for an overflow",
        "scale_atomics",
        ((DY, DY + "    dy = tl.where(tl.abs(dy) > 3e4, 0.0, dy)\n"),),
        r"not linear in the upstream: 65536 times",
    ),
    Attack(
        "an upstream clipped at 10,000",
        "softmax_strided",
        (
            (
                "    dx = y * (dy - tl.sum(y * dy, axis=0))\n",
                "    dy = tl.minimum(tl.maximum(dy, -1e4), 1e4)\n"
                "    dx = y * (dy - tl.sum(y * dy, axis=0))\n",
            ),
        ),
        r"not linear in the upstream: 65536 times",
    ),
    Attack(
        "a sum in fixed point: order does not matter, but it overflows under a loss scale",
        "layer_norm_saved_statistics",
        (
            (
                "    tl.atomic_add(db_ptr + cols, dy, mask=mask)\n",
                "    units = (dy.to(tl.float64) * 35184372088832.0).to(tl.int64)\n"
                "    tl.atomic_add(db_ptr + cols, units, mask=mask)\n",
            ),
            (
                "dx, dw, db = torch.empty_like(x), torch.zeros_like(w), torch.zeros_like(w)",
                "dx, dw = torch.empty_like(x), torch.zeros_like(w)\n"
                "        total = torch.zeros(w.shape, device=w.device, dtype=torch.int64)\n"
                "        db = torch.empty_like(w)",
            ),
            (
                "dy.contiguous(), dx, dw, db, N, BLOCK=triton.next_power_of_2(N))\n",
                "dy.contiguous(), dx, dw, total, N, BLOCK=triton.next_power_of_2(N))\n"
                "        units_kernel[(1,)](total, db, N, BLOCK=triton.next_power_of_2(N))\n",
            ),
            (
                "class LayerNorm(",
                "@triton.jit\ndef units_kernel(total_ptr, out_ptr, N, BLOCK: tl.constexpr):\n"
                "    cols = tl.arange(0, BLOCK)\n"
                "    total = tl.load(total_ptr + cols, mask=cols < N, other=0)\n"
                "    tl.store(out_ptr + cols, total.to(tl.float64) / 35184372088832.0, mask=cols < N)\n\n\n"
                "class LayerNorm(",
            ),
        ),
        r"gradient of b is not linear in the upstream: 65536 times",
    ),
    Attack(
        "gradients below a millionth flushed to zero",
        "scale_partials",
        (
            (
                "    tl.store(dx_ptr + i, tl.load(dy_ptr + i, mask=i < N, other=0.0) * tl.load(s_ptr), ",
                "    dx = tl.load(dy_ptr + i, mask=i < N, other=0.0) * tl.load(s_ptr)\n"
                "    tl.store(dx_ptr + i, tl.where(tl.abs(dx) < 1e-6, 0.0, dx), ",
            ),
        ),
        r"not linear in the upstream: 5.96046e-08 times",
    ),
    Attack(
        "float16 gradients scaled up by 256 in between, so that small ones survive: large ones overflow",
        "half_norm_strides",
        (
            (
                "    g = dy * tl.load(w_ptr",
                "    dy = (dy * 256).to(tl.float16).to(tl.float32) / 256\n    g = dy * tl.load(w_ptr",
            ),
        ),
        r"not linear in the upstream: 256 times|not finite",
    ),
]
