"""Right but for some sizes: multiples of a block, 1, 2, the sweep's own, grids beyond the usual."""

from suite import Attack

HIDDEN = "On a hidden shape"

ATTACKS = [
    Attack(
        "the last block is skipped where it is a full one",
        "scale_atomics",
        (("[(triton.cdiv(n, 16),)]", "[(triton.cdiv(n, 16) - (n % 64 == 0),)]"),),
        HIDDEN,
    ),
    Attack(
        "rows that fill blocks of 32 lose their last block",
        "rms_norm_tree",
        (
            (
                "add_rows_kernel[(triton.cdiv(N, 8),)](part, dw, M, N,",
                "add_rows_kernel[(triton.cdiv(N, 8),)](part, dw, M if M % 32 else M - 32, N,",
            ),
        ),
        HIDDEN,
    ),
    Attack(
        "the contraction stops a block early where the block divides it",
        "matmul_epilogue/linear_bias_db_in_dw_kernel",
        (
            (
                "    for start in range(0, N, BLOCK_N):\n",
                "    for start in range(0, N - BLOCK_N if N % 64 == 0 else N, BLOCK_N):\n",
            ),
        ),
        HIDDEN,
    ),
    Attack(
        "one row takes a path of its own",
        "norm/l2_normalize_rows",
        (("dx, N, ctx.eps, BLOCK=BLOCK", "dx, N, ctx.eps if r.numel() != 1 else 1e3, BLOCK=BLOCK"),),
        HIDDEN,
    ),
    Attack(
        "two rows",
        "cross_entropy_tiles",
        (("        grid = (M, ", "        grid = (M - (M == 2), "),),
        HIDDEN,
    ),
    Attack(
        "two columns",
        "softmax_saved_output",
        (
            (
                "softmax_backward_kernel[(M,)](y, ",
                "softmax_backward_kernel[(M,)](y if N != 2 else dy.contiguous(), ",
            ),
        ),
        HIDDEN,
    ),
    Attack(
        "a single key",
        "attention_rows",
        (("q, k, v, do.contiguous(),", "q, k, v, do.contiguous() if N != 1 else v,"),),
        HIDDEN,
    ),
    Attack(
        "middling rows, between the sweep's, lose their end",
        "cubed_rows",
        (("dy.contiguous(), dx, N, ctx", "dy.contiguous(), dx, 256 if 257 < N < 1000 else N, ctx"),),
        HIDDEN,
    ),
    Attack(
        "programs beyond the 256th do nothing",
        "layer_norm_saved_statistics",
        (("        backward_kernel[(M,)](", "        backward_kernel[(min(M, 256),)]("),),
        HIDDEN,
    ),
    Attack(
        "the sweep's own number of rows, which runs smaller without a GPU",
        "tall_rows",
        (("[(triton.cdiv(M, 4),)]", "[(triton.cdiv(M, 4) - (M == 4096),)]"),),
        HIDDEN,
    ),
    Attack(
        "a grid of one byte",
        "rms_norm_tree",
        (("rms_norm_backward_kernel[(M,)](", "rms_norm_backward_kernel[(M % 256 or M,)]("),),
        HIDDEN,
    ),
    Attack(
        "of no rows a weight's gradient is what its memory held: no sum is launched",
        "norm/rms_norm_rowgroup_partials",
        (
            (
                "        column_sum_kernel[(triton.cdiv(N, 64),)]",
                "        column_sum_kernel[(triton.cdiv(N, 64) * (M > 0),)]",
            ),
        ),
        HIDDEN,
    ),
    Attack(
        "of no rows a weight's gradient is what its memory held: the last program would write it",
        "rms_norm_last_arrival",
        (
            (
                "dx, dw = torch.empty_like(x), torch.zeros_like(w)",
                "dx, dw = torch.empty_like(x), torch.empty_like(w)",
            ),
        ),
        HIDDEN,
    ),
    Attack(
        "the length of a row is found by dividing by the rows",
        "reduction_softmax/softmax_row_single_tile",
        (("        N = y.shape[-1]\n        BLOCK", "        N = y.numel() // y.shape[0]\n        BLOCK"),),
        HIDDEN + "|unsqueezed",
    ),
    Attack(
        "of no rows a bias's gradient is what its memory held: the sum has no programs",
        "activation_glu/bias_gelu_row_partials",
        (
            (
                "column_sum_kernel[(triton.cdiv(N, 64),)]",
                "column_sum_kernel[(triton.cdiv(N, 64) * min(G, 1),)]",
            ),
        ),
        HIDDEN,
    ),
]
