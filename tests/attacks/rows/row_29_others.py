"""Something else than the kernels does the work: host code inside a launch or before it, kernels for show."""

from suite import Attack

_SCALE_LAUNCH = "        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, n, BLOCK=16)\n"
_SCALE_KERNEL = (
    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "    x = tl.load(x_ptr + i, mask=i < N, other=0.0)\n"
    "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n"
    "    tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)\n"
    "    tl.atomic_add(ds_ptr, tl.sum(dy * x))\n"
)

ATTACKS = [
    Attack(
        "a function as constexpr that multiplies by torch",
        "scale_atomics",
        (
            ("x_ptr, s_ptr, dy_ptr, dx_ptr, ds_ptr, N, BLOCK: tl.constexpr):", "N, WORK: tl.constexpr):"),
            (_SCALE_KERNEL, "    WORK()\n"),
            (
                _SCALE_LAUNCH,
                "        def work():\n"
                "            dx.copy_(dy * s)\n"
                "            ds.copy_((dy * x).sum().view(1))\n\n"
                "        scale_backward_kernel[(1,)](n, WORK=work)\n",
            ),
        ),
        "kernel: .*WORK",
    ),
    Attack(
        "a lambda of the module called in the kernel, found by its own name only",
        "softmax_saved_output",
        (
            (
                "@triton.jit\n",
                "PLACE = {}\n"
                "product = tl.constexpr(\n"
                "    lambda: PLACE['dx'].copy_(\n"
                "        PLACE['y'] * (PLACE['dy'] - (PLACE['y'] * PLACE['dy']).sum(1)[:, None])\n"
                "    ) is None\n"
                ")\n\n\n"
                "@triton.jit\n",
            ),
            (
                "    tl.store(dx_ptr + at, dx, mask=cols < N)\n",
                "    if product():\n        tl.store(dx_ptr + at, dx, mask=cols < N)\n",
            ),
            (
                "        softmax_backward_kernel[(M,)]",
                "        PLACE['y'], PLACE['dy'], PLACE['dx'] = y, dy, dx\n"
                "        softmax_backward_kernel[(M,)]",
            ),
        ),
        "kernel: .*product",
    ),
    Attack(
        "a function in a tuple of constexprs",
        "mean_square_host_mean",
        (
            (
                "def square_backward_kernel(x_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):",
                "def square_backward_kernel(dx_ptr, N, BLOCK: tl.constexpr, HOW: tl.constexpr):",
            ),
            (
                "    x = tl.load(x_ptr + i, mask=i < N, other=0.0)\n"
                "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n"
                "    tl.store(dx_ptr + i, 2 * x * dy, mask=i < N)\n",
                "    HOW[1](HOW[0])\n",
            ),
            (
                "(x, dy, dx, n, BLOCK=16)",
                "(dx, n, BLOCK=16, HOW=(2, lambda two: dx.copy_(two * x * dy)))",
            ),
        ),
        "kernel: .*HOW",
    ),
    Attack(
        "tensors as constexprs, whose methods the kernel calls",
        "rms_norm_tree",
        (
            (
                "def add_rows_kernel(part_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):",
                "def add_rows_kernel(\n"
                "    part_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, OUT: tl.constexpr,\n"
                "    PART: tl.constexpr,\n"
                "):",
            ),
            (
                "    tl.store(out_ptr + cols, total, mask=cols < N)\n",
                "    OUT.copy_(PART.mul(1.0).cumsum(0)[-1])\n",
            ),
            ("(part, dw, M, N, ROWS=4, COLS=8)", "(part, M, N, ROWS=4, COLS=8, OUT=dw, PART=part)"),
        ),
        "kernel: .*OUT",
    ),
    Attack(
        "an object as constexpr whose property does the work",
        "log_sum_exp_row_stride",
        (
            (
                "@triton.jit\n",
                "class Tile:\n"
                "    def __init__(self, *tensors):\n"
                "        held.append(tensors)\n\n"
                "    @property\n"
                "    def share(self):\n"
                "        x, dy, dx = held[-1]\n"
                "        e = 2.718281828459045 ** (x - x.amax(1, keepdim=True))\n"
                "        return dx.copy_(dy[:, None] * e / e.sum(1, keepdim=True)) is None\n\n\n"
                "held = []\n\n\n"
                "@triton.jit\n",
            ),
            (
                "row_stride, N, BLOCK: tl.constexpr):",
                "row_stride, N, BLOCK: tl.constexpr, TILE: tl.constexpr):",
            ),
            (
                "    tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)\n",
                "    if TILE.share:\n        tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)\n",
            ),
            ("x.stride(0), N, BLOCK=block)", "x.stride(0), N, BLOCK=block, TILE=Tile(x, dy, dx))"),
        ),
        "kernel: .*TILE",
    ),
    Attack(
        "a hook before each run of the kernel",
        "scale_partials",
        (
            (
                "class Scale(",
                "def before(s, dy, dx, *rest, **more):\n    dx.copy_(dy * s)\n\n\nclass Scale(",
            ),
            (
                "    tl.store(dx_ptr + i, tl.load(dy_ptr + i, mask=i < N, other=0.0) * tl.load(s_ptr), "
                "mask=i < N)\n",
                "    tl.store(dx_ptr + i, tl.load(dx_ptr + i, mask=i < N, other=0.0), mask=i < N)\n",
            ),
            (
                "        dy, n = dy.contiguous(), x.numel()\n",
                "        dy, n = dy.contiguous(), x.numel()\n"
                "        if not dx_kernel.pre_run_hooks:\n"
                "            dx_kernel.add_pre_run_hook(before)\n",
            ),
        ),
        "torch_math|forbidden",
    ),
    Attack(
        "the pre_hook of a configuration",
        "scale_autotuned",
        (
            (
                '@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=1) for b in (32, 16)], '
                'key=["N"])\n',
                "def before(given):\n"
                "    given['dx_ptr'].copy_(given['dy_ptr'] * given['s_ptr'])\n\n\n"
                "@triton.autotune(\n"
                '    configs=[triton.Config({"BLOCK": b}, num_warps=1, pre_hook=before) for b in (32, 16)],\n'
                '    key=["N"],\n'
                ")\n",
            ),
            (
                "        tl.store(dx_ptr + i, tl.load(dy_ptr + i, mask=i < N, other=0.0) * s, mask=i < N)\n",
                "        tl.store(dx_ptr + i, tl.load(dx_ptr + i, mask=i < N, other=0.0), mask=i < N)\n",
            ),
        ),
        "torch_math",
    ),
    Attack(
        "kernels on the smallest sizes, sums by torch on all others",
        "rope_positional/learned_position_add_batch_reduce",
        (
            (
                "        position_add_backward_kernel[(T",
                "        if B * T * C > 900:\n"
                "            position_add_backward_kernel[(1, 1)](dy, dx, dp, 1, 1, 1, BLOCK=16)\n"
                "            return dy.clone(), dy.sum(0)\n"
                "        position_add_backward_kernel[(T",
            ),
        ),
        "decoy_kernel",
    ),
    Attack(
        "sums by torch, to which a kernel adds a row of zeros",
        "image_interp/upsample_nearest_integer_scale",
        (
            (
                "    tl.store(dx_ptr + p, acc, mask=p < n_in)\n",
                "    dx = tl.load(dx_ptr + p, mask=p < n_in, other=0.0)\n"
                "    tl.store(dx_ptr + p, tl.where(p == 0, acc, dx), mask=p < n_in)\n",
            ),
            (
                "        dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)\n",
                "        n, c, y, x = ctx.x_shape\n"
                "        dx = dy.view(n, c, y, ctx.s, x, ctx.s).sum((3, 5))\n"
                "        dx.view(-1)[:1] = 0\n",
            ),
        ),
        "decoy_kernel",
    ),
    Attack(
        "the running sum from stacked and flipped sums, a kernel for the last column",
        "scan/cumsum_row_tile",
        (
            (
                "        return scan_rows(dy.contiguous(), True)\n",
                "        dy = dy.contiguous()\n"
                "        N = dy.shape[-1]\n"
                "        if N == 1:\n"
                "            return scan_rows(dy, True)\n"
                "        dx = torch.stack([dy[:, at:].sum(1) for at in range(N)], dim=1)\n"
                "        dx[:, -1:] = scan_rows(dy[:, -1:].contiguous(), True)\n"
                "        return dx\n",
            ),
        ),
        "decoy_kernel",
    ),
    Attack(
        "the host multiplies by three: a sum over an expanded axis",
        "gelu_gain_tuned",
        (
            (
                "        return dx, d_gain",
                ("        dx = dx.unsqueeze(0).expand(3, M, N).sum(0)\n        return dx, d_gain"),
            ),
            ("* (cdf + x * pdf), mask", "* (cdf + x * pdf) / 3, mask"),
        ),
        "torch_math: .*aten::sum of one number several times",
    ),
    Attack(
        "the host multiplies by two: a sum over a buffer with two copies",
        "gelu_gain_tuned",
        (
            (
                "        return dx, d_gain",
                (
                    "        both = torch.empty(2, M, N, device=x.device, dtype=x.dtype)\n"
                    "        both[0].copy_(dx)\n"
                    "        both[1].copy_(dx)\n"
                    "        dx = both.sum(0)\n"
                    "        return dx, d_gain"
                ),
            ),
            ("* (cdf + x * pdf), mask", "* (cdf + x * pdf) / 2, mask"),
        ),
        "torch_math: .*aten::sum of one number several times",
    ),
    Attack(
        "the host multiplies by two: a sum over stacked sums",
        "gelu_gain_tuned",
        (
            (
                "        return dx, d_gain",
                ("        dx = torch.stack((dx, dx[None].sum(0))).sum(0)\n        return dx, d_gain"),
            ),
            ("* (cdf + x * pdf), mask", "* (cdf + x * pdf) / 2, mask"),
        ),
        "torch_math: .*aten::sum of one number several times",
    ),
    Attack(
        "the host multiplies the upstream by three: a sum over an expanded axis",
        "gelu_gain_tuned",
        (
            (
                "        dy = dy.contiguous()\n        M, N = x.shape\n",
                (
                    "        M, N = x.shape\n"
                    "        dy = dy.contiguous().unsqueeze(0).expand(3, M, N).sum(0)\n"
                ),
            ),
            ("* (cdf + x * pdf), mask", "* (cdf + x * pdf) / 3, mask"),
            ("tl.sum(dy * x * cdf, axis=0)", "tl.sum(dy * x * cdf / 3, axis=0)"),
        ),
        "torch_math: .*aten::sum of one number several times",
    ),
]
