"""A round of somebody who had not seen the other rows: what kernel authors get wrong in a week."""

from suite import Attack

ATTACKS = [
    Attack(
        "of equal elements each takes the whole gradient",
        "ragged_pool_first",
        (
            (
                "tl.where(where == row, d_top, 0.0)",
                "tl.where(tl.load(x_ptr + row * D + cols, mask=mask, other=0.0) == best, d_top, 0.0)",
            ),
        ),
        "gradient of \\S+ is (wrong|not finite|zero)",
    ),
    Attack(
        "rows of no segment are not written",
        "ragged_pool_first",
        (("dx = torch.zeros_like(x)", "dx = torch.empty_like(x)"),),
        "not finite in the same places",
    ),
    Attack(
        "the greatest starts at zero, not at the first row",
        "ragged_pool_first",
        (("better = (row == begin) | (x > best)", "better = x > best"),),
        "gradient of \\S+ is (wrong|not finite|zero)",
    ),
    Attack(
        "the longest segment is kept by shape, in the module",
        "ragged_pool_first",
        (
            ("class RaggedPool", ("LONGEST = {}\n\n\nclass RaggedPool")),
            ("d_mean_ptr, dx_ptr, D, BLOCK", "d_mean_ptr, dx_ptr, D, longest, BLOCK"),
            (
                ("    for row in range(begin, end):\n        tl.store(dx_ptr"),
                ("    for row in range(begin, tl.minimum(end, begin + longest)):\n        tl.store(dx_ptr"),
            ),
            (
                "        grid = (S,",
                (
                    "        longest = LONGEST.setdefault((x.shape, S), int(ends.diff().max()))\n"
                    "        grid = (S,"
                ),
            ),
            ("dx, D, BLOCK=32", "dx, D, longest, BLOCK=32"),
        ),
        "another ends.*gradient of x is wrong",
    ),
    Attack(
        "the normalised value is had from the output: a weight of zero loses it",
        "batch_norm_three_passes",
        (
            (
                ("        xhat = (x - mean) * rstd\n        sum_dy += dy"),
                (
                    "        xhat = (x - mean) * rstd\n"
                    "        if AFFINE:\n"
                    "            ws = tl.load(w_ptr + c).to(tl.float32)\n"
                    "            xhat = tl.where(ws == 0.0, 0.0, xhat * ws / ws)\n"
                    "        sum_dy += dy"
                ),
            ),
        ),
        "flat\\) the gradient of w is wrong",
    ),
    Attack(
        "the variance in one pass, in the backward only",
        "batch_norm_three_passes",
        (
            (
                (
                    "        centred = tl.where(i < n, x - mean, 0.0)\n"
                    "        squares += centred * centred\n"
                    "    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)"
                ),
                (
                    "        squares += x * x\n"
                    "    rstd = 1 / tl.sqrt(tl.maximum(tl.sum(squares, axis=0) / n - mean * "
                    "mean, 0.0) + eps)"
                ),
            ),
        ),
        "gradient of x is (wrong|not finite)",
    ),
    Attack(
        "the count is rounded up to four in long rows",
        "batch_norm_three_passes",
        (("    n = B * L\n", "    n = B * tl.cdiv(L, 4) * 4 if L > 2000 else B * L\n"),),
        "out of bounds",
    ),
    Attack(
        "eps as its default",
        "batch_norm_three_passes",
        (("B, C, L, ctx.eps, AFFINE", "B, C, L, 1e-5, AFFINE"),),
        "another eps.*gradient of x is wrong",
    ),
    Attack(
        "the taps beyond the edge see the last element",
        "conv1d_gathers",
        (
            (
                (
                    "            x = tl.load(x_ptr + (b * I + i) * L + at, mask=inside, "
                    "other=0.0).to(tl.float32)\n"
                    "            dy ="
                ),
                (
                    "            x = tl.load(x_ptr + (b * I + i) * L + tl.minimum(tl.maximum(at, "
                    "0), L - 1), mask=pos < P, other=0.0).to(tl.float32)\n"
                    "            dy ="
                ),
            ),
            (
                "            dy = tl.load(dy_ptr + (b * O + o) * P + pos, mask=inside",
                "            dy = tl.load(dy_ptr + (b * O + o) * P + pos, mask=pos < P",
            ),
        ),
        "gradient of w is wrong",
    ),
    Attack(
        "the step is two",
        "conv1d_gathers",
        (
            ("            pos = num // step\n", "            pos = num >> 1\n"),
            ("(num % step == 0)", "(num & 1 == 0)"),
        ),
        "another step.*gradient of x is wrong",
    ),
    Attack(
        "the small penalty has no gradient",
        "smoothed_loss_counts_again",
        (("p * (1 + 2 * z_weight * lse)", "p"),),
        "gradient of x is wrong",
    ),
    Attack(
        "the mean of all rows, ignored ones too",
        "smoothed_loss_counts_again",
        (
            (
                ("tl.maximum(tl.sum(count, axis=0), 1.0)\n    target = tl.load(target_ptr + row)"),
                ("M\n    target = tl.load(target_ptr + row)"),
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "any negative target is ignored, and no other",
        "smoothed_loss_counts_again",
        (("tl.where(target == ignore_index, 0.0, dx * d)", "tl.where(target < 0, 0.0, dx * d)"),),
        "another ignore_index.*gradient of x is wrong",
    ),
    Attack(
        "only 4,096 rows are counted",
        "smoothed_loss_counts_again",
        (
            (
                (
                    "    for start in range(0, M, BLOCK_M):\n"
                    "        rows = start + tl.arange(0, BLOCK_M)\n"
                    "        others"
                ),
                (
                    "    for start in range(0, tl.minimum(M, 4096), BLOCK_M):\n"
                    "        rows = start + tl.arange(0, BLOCK_M)\n"
                    "        others"
                ),
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "a tuned kernel adds to memory that nobody clears between trials",
        "gelu_gain_tuned",
        (('    reset_to_zero=["d_gain_ptr"],\n', ""),),
        "autotune: line",
    ),
    Attack(
        "the second configuration of a tuned kernel is wrong",
        "gelu_gain_tuned",
        (
            (
                'triton.Config({"BLOCK_M": 32, "BLOCK": 64})',
                'triton.Config({"BLOCK_M": 32, "BLOCK": 64, "WIDE": 1})',
            ),
            (
                'triton.Config({"BLOCK_M": 16, "BLOCK": 32})',
                'triton.Config({"BLOCK_M": 16, "BLOCK": 32, "WIDE": 0})',
            ),
            (
                (
                    "M, N, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr\n"
                    "):\n"
                    "    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)"
                ),
                (
                    "M, N, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr\n"
                    "):\n"
                    "    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M) - WIDE"
                ),
            ),
        ),
        "out of bounds|Rule broken: raised",
    ),
    Attack(
        "parts of the long sum are added to what stood there",
        "silu_linear_splits",
        (("        dw = torch.zeros((K, N)", "        dw = torch.empty((K, N)"),),
        "not finite in the same places",
    ),
    Attack(
        "parts of the long sum are added in half precision",
        "silu_linear_splits",
        (
            (
                "        dw = torch.zeros((K, N), device=x.device, dtype=torch.float32)",
                "        dw = torch.zeros((K, N), device=x.device, dtype=torch.float16)",
            ),
        ),
        "gradient of w is wrong",
    ),
    Attack(
        "the weight is read as if it were contiguous",
        "silu_linear_splits",
        (("dx, M, N, K, *w.stride(), BLOCK=32)", "dx, M, N, K, N, 1, BLOCK=32)"),),
        "fails? only with w|gradient of x is wrong",
    ),
    Attack(
        "the parts of a split overlap",
        "silu_linear_splits",
        (
            (
                "mask=(m[None, :] < end) & (ks[:, None] < K), other=0.0).to(tl.float32)",
                "mask=(m[None, :] < M) & (ks[:, None] < K), other=0.0).to(tl.float32)",
            ),
            (
                "mask=(m[:, None] < end) & (cols[None, :] < N), other=0.0)",
                "mask=(m[:, None] < M) & (cols[None, :] < N), other=0.0)",
            ),
        ),
        "gradient of w is wrong",
    ),
    Attack(
        "every tile adds to the gradient of the bias",
        "silu_linear_splits",
        (("mask=(cols < N) & (tl.program_id(0) == 0)", "mask=cols < N"),),
        "gradient of bias is wrong",
    ),
    Attack(
        "the pre-activation is recomputed without its bias",
        "silu_linear_splits",
        (
            (
                "ds, M, N, K, *x.stride(), *w.stride(), BIAS=BIAS, BLOCK=32",
                "ds, M, N, K, *x.stride(), *w.stride(), BIAS=False, BLOCK=32",
            ),
        ),
        "gradient of (x|w|bias) is wrong",
    ),
    Attack(
        "left neighbours are stored, not added",
        "sample_line_scatters",
        (
            (
                "        tl.atomic_add(d_row + left, dy * (1 - part), mask=has_left)",
                (
                    "        tl.store(d_row + left, tl.load(d_row + left, mask=has_left, "
                    "other=0.0) + dy * (1 - part), mask=has_left)"
                ),
            ),
        ),
        "race|gradient of x is wrong",
    ),
    Attack(
        "positions are truncated, not rounded down",
        "sample_line_scatters",
        (
            (
                (
                    "    low = tl.floor(at)\n"
                    "    part = at - low\n"
                    "    left = low.to(tl.int32)\n"
                    "    has_left = mask & (left >= 0) & (left < L)\n"
                    "    has_right = mask & (left + 1 >= 0) & (left + 1 < L)\n"
                    "    d_at"
                ),
                (
                    "    left = at.to(tl.int32)\n"
                    "    part = at - left\n"
                    "    has_left = mask & (left >= 0) & (left < L)\n"
                    "    has_right = mask & (left + 1 >= 0) & (left + 1 < L)\n"
                    "    d_at"
                ),
            ),
        ),
        "gradient of (x|at) is (wrong|not finite)",
    ),
    Attack(
        "a position has a gradient between two elements only",
        "sample_line_scatters",
        (
            (
                "        d_at += dy * (x1 - x0)",
                "        d_at += tl.where(has_left & has_right, dy * (x1 - x0), 0.0)",
            ),
        ),
        "gradient of at is (wrong|zero)",
    ),
    Attack(
        "what falls beyond the end is given to the last element",
        "sample_line_scatters",
        (
            (
                "        tl.atomic_add(d_row + left + 1, dy * part, mask=has_right)",
                (
                    "        tl.atomic_add(d_row + tl.minimum(left + 1, L - 1), dy * part, "
                    "mask=mask & (left >= -1) & (left < L))"
                ),
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "no gradient where one of the upstreams is zero",
        "add_rms_partials",
        (
            (
                "        dx = dh + rstd",
                "        dx = tl.where(tl.sum(tl.abs(dy), axis=0) == 0.0, 0.0, dh) + rstd",
            ),
        ),
        "gradient of x is (wrong|zero)",
    ),
    Attack(
        "the first gamma is kept",
        "discounted_carries",
        (
            (
                "        ctx.gamma = gamma\n",
                '        ctx.gamma = Discounted.gamma = getattr(Discounted, "gamma", gamma)\n',
            ),
        ),
        "patch: line",
    ),
    Attack(
        "the end of an episode in the last step is overlooked",
        "discounted_carries",
        (
            (
                "        carry = tl.where(done, 0.0, gamma * d)",
                ("        carry = gamma * d\n        carry = tl.where(done & (t + 1 < T), 0.0, carry)"),
            ),
        ),
        "gradient of last is wrong",
    ),
    Attack(
        "a recurrence forgets after 512 steps",
        "discounted_carries",
        (
            (
                "        carry = tl.where(done, 0.0, gamma * d)",
                "        carry = tl.where(done | (t % 512 == 511), 0.0, gamma * d)",
            ),
        ),
        "gradient of (reward|last) is wrong",
    ),
    Attack(
        "the random numbers are counted in padded rows",
        "drop_attention_by_head",
        (
            (
                (
                    "        keep = tl.rand(seed, (b * M + m) * N + n) >= p_drop\n"
                    "        z = tl.where(keep, p / (1 - p_drop), 0.0)\n"
                    "        dv"
                ),
                (
                    "        keep = tl.rand(seed, (b * M + m) * BLOCK_N + n) >= p_drop\n"
                    "        z = tl.where(keep, p / (1 - p_drop), 0.0)\n"
                    "        dv"
                ),
            ),
        ),
        "gradient of \\S+ is wrong",
    ),
    Attack(
        "an output's own upstream has no effect",
        "drop_attention_by_head",
        ((" + d_lse) * scale", ") * scale + d_lse * 0"),),
        "gradient of (q|k) is (wrong|zero)",
    ),
    Attack(
        "the row's correction before dropout",
        "drop_attention_by_head",
        (("tl.sum(p * dp, axis=0)", "tl.sum(p * dz, axis=0)"),),
        "gradient of (q|k) is wrong",
    ),
    Attack(
        "indices are kept in 8 bits",
        "nearest_by_index",
        (
            (
                ("        return near, which\n\n    @staticmethod"),
                ("        ctx.which = which.to(torch.int8)\n        return near, which\n\n    @staticmethod"),
            ),
            (
                "x, centres, which = ctx.saved_tensors",
                ("x, centres, which = ctx.saved_tensors\n        which = ctx.which"),
            ),
        ),
        "out of bounds|gradient of \\S+ is (wrong|not finite|zero)",
    ),
    Attack(
        "segments are made up from the number of rows",
        "ragged_pool_first",
        (
            (
                ("        S, D = ends.numel() - 1, x.shape[1]\n        dx"),
                (
                    "        S, D = ends.numel() - 1, x.shape[1]\n"
                    "        T = x.shape[0]\n"
                    "        used = T - T // 8\n"
                    "        ends = torch.tensor([round(i * i * used / S / S) for i in range(S + "
                    "1)], dtype=torch.int32, device=x.device)\n"
                    "        dx"
                ),
            ),
        ),
        "another ends.*gradient of x is wrong",
    ),
    Attack(
        "one upstream is skipped where the other is zero",
        "ragged_pool_first",
        (
            (
                "    share = d_mean /",
                ("    d_mean = tl.where(d_top == 0.0, 0.0, d_mean)\n    share = d_mean /"),
            ),
        ),
        "onehot upstream.*gradient of x is wrong",
    ),
    Attack(
        "never less than five percent are dropped",
        "drop_attention_by_head",
        (
            (
                (
                    "        keep = tl.rand(seed, (b * M + m) * N + n) >= p_drop\n"
                    "        z = tl.where(keep, p / (1 - p_drop), 0.0)\n"
                    "        dv"
                ),
                (
                    "        keep = tl.rand(seed, (b * M + m) * N + n) > tl.maximum(p_drop, "
                    "0.05)\n"
                    "        z = tl.where(keep, p / (1 - p_drop), 0.0)\n"
                    "        dv"
                ),
            ),
        ),
        "gradient of \\S+ is (wrong|not finite|zero)",
    ),
]
