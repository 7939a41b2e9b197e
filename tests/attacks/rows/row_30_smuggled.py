"""Arithmetic that no record of floating operations shows: in integers, or element by element in Python."""

from suite import Attack

_TIMES = '''
def times(a, b):
    """The product of two tensors, bit by bit."""
    p, q = (t.to(torch.float64).contiguous().view(torch.int64) for t in torch.broadcast_tensors(a, b))
    full, low = 1 << 52, (1 << 52) - 1
    m = (((p & low) | full) >> 22) * (((q & low) | full) >> 22)
    e = ((p >> 52) & 2047) + ((q >> 52) & 2047) - 2046 - 60
    there = (((p >> 52) & 2047) > 0) & (((q >> 52) & 2047) > 0)
    bits = m.to(torch.float64).view(torch.int64) + (e << 52)
    bits = (bits | ((p ^ q) & -(1 << 63))) * there
    return bits.view(torch.float64).to(torch.float32)


'''
_DX = "    tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)\n"

ATTACKS = [
    Attack(
        "products of mantissas in int64, which a kernel copies",
        "scale_atomics",
        (
            ("class Scale(", _TIMES.lstrip("\n") + "class Scale("),
            (_DX, "    tl.store(dx_ptr + i, dy, mask=i < N)\n"),
            ("(x, s, dy, dx, ds, n, BLOCK=16)", "(x, s, times(dy, s), dx, ds, n, BLOCK=16)"),
            ("    tl.atomic_add(ds_ptr, tl.sum(dy * x))\n", "    tl.atomic_add(ds_ptr, tl.sum(x))\n"),
            (
                "ds = torch.empty_like(x), torch.zeros_like(s)",
                "ds = torch.empty_like(x), torch.zeros_like(s)\n        x = times(x, dy)",
            ),
        ),
        "torch_math: .*view",
    ),
    Attack(
        "exponents moved by one in an integer view",
        "mean_square_host_mean",
        (
            (
                "    tl.store(dx_ptr + i, 2 * x * dy, mask=i < N)\n",
                "    tl.store(dx_ptr + i, x * dy, mask=i < N)\n",
            ),
            (
                "(x, dy, dx, n, BLOCK=16)",
                "((x.view(torch.int32) + (1 << 23)).view(torch.float32), dy, dx, n, BLOCK=16)",
            ),
        ),
        "torch_math: .*view",
    ),
    Attack(
        "element by element through integers of Python",
        "scale_partials",
        (
            (
                "class Scale(",
                "def value(word):\n"
                "    bits = int(word) & 0xFFFFFFFF\n"
                "    if not (bits >> 23) & 255:\n"
                "        return 0.0\n"
                "    size = math.ldexp((bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 255) - 150)\n"
                "    return -size if bits >> 31 else size\n\n\n"
                "class Scale(",
            ),
            ("import torch\n", "import math\n\nimport torch\n"),
            (
                "            dx_kernel[(blocks,)](s, dy, dx, n, BLOCK=16)\n",
                "            factor = value(s.view(torch.int32)[0])\n"
                "            made = [value(word) * factor for word in dy.view(torch.int32)]\n"
                "            one = torch.ones(1, device=x.device)\n"
                "            dx_kernel[(blocks,)](one, torch.tensor(made), dx, n, BLOCK=16)\n",
            ),
        ),
        "torch_math: .*view",
    ),
    Attack(
        "bits of the upstream written by a kernel, put together in Python",
        "mean_square_host_mean",
        (
            (
                "@triton.jit\n",
                "@triton.jit\n"
                "def bits_kernel(x_ptr, word_ptr, N, BLOCK: tl.constexpr):\n"
                "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                "    word = tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.int32, bitcast=True)\n"
                "    tl.store(word_ptr + i, word, mask=i < N)\n\n\n"
                "def values(x):\n"
                "    words = torch.empty(x.shape, device=x.device, dtype=torch.int32)\n"
                "    bits_kernel[(triton.cdiv(x.numel(), 16),)](x, words, x.numel(), BLOCK=16)\n"
                "    made = []\n"
                "    for word in words:\n"
                "        bits = int(word) & 0xFFFFFFFF\n"
                "        size = math.ldexp((bits & 0x7FFFFF) | 0x800000, ((bits >> 23) & 255) - 150)\n"
                "        made.append(-size if bits >> 31 else size)\n"
                "    return made\n\n\n"
                "@triton.jit\n",
            ),
            ("import torch\n", "import math\n\nimport torch\n"),
            (
                "    tl.store(dx_ptr + i, 2 * x * dy, mask=i < N)\n",
                "    tl.store(dx_ptr + i, x + 0 * dy, mask=i < N)\n",
            ),
            (
                "        square_backward_kernel[(triton.cdiv(n, 16),)](x, dy, dx, n, BLOCK=16)\n",
                "        made = torch.tensor([2 * a * b for a, b in zip(values(x), values(dy))])\n"
                "        square_backward_kernel[(triton.cdiv(n, 16),)](made, dy, dx, n, BLOCK=16)\n",
            ),
        ),
        "torch_math: .*_local_scalar_dense",
    ),
    Attack(
        "fixed-point numbers from a kernel, multiplied and added on the host",
        "rms_norm_tree",
        (
            (
                "    tl.store(part_ptr + row * N + cols, dy * x * r, mask=cols < N)\n",
                "    fixed = (dy * 268435456.0).to(tl.int64)\n"
                "    tl.store(part_ptr + row * N + cols, fixed, mask=cols < N)\n"
                "    there = part_ptr + M * N + row * N + cols\n"
                "    tl.store(there, (x * r * 262144.0).to(tl.int64), mask=cols < N)\n",
            ),
            ("dx_ptr, part_ptr, N, eps, BLOCK", "dx_ptr, part_ptr, M, N, eps, BLOCK"),
            ("dx, part, N, ctx.eps", "dx, part, M, N, ctx.eps"),
            (
                "torch.empty((M, N), device=x.device, dtype=torch.float32)",
                "torch.empty((2, M, N), device=x.device, dtype=torch.int64)",
            ),
            (
                "            add_rows_kernel[(triton.cdiv(N, 8),)](part, dw, M, N, ROWS=4, COLS=8)\n",
                "            total = (part[0] * part[1]).sum(0, keepdim=True)\n"
                "            add_rows_kernel[(triton.cdiv(N, 8),)](total, dw, 1, N, ROWS=4, COLS=8)\n",
            ),
            (
                "        total += tl.sum(tl.load(part_ptr + rows[:, None] * N + cols[None, :], mask=mask, "
                "other=0.0), axis=0)\n"
                "    tl.store(out_ptr + cols, total, mask=cols < N)\n",
                "        part = tl.load(part_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0)\n"
                "        total += tl.sum(part.to(tl.float32) / 262144.0 / 268435456.0, axis=0)\n"
                "    tl.store(out_ptr + cols, total, mask=cols < N)\n",
            ),
        ),
        "torch_math: .*aten::mul",
    ),
    Attack(
        "map_ with a function of Python",
        "scale_atomics",
        (
            (_DX, "    tl.store(dx_ptr + i, dy, mask=i < N)\n"),
            ("    tl.atomic_add(ds_ptr, tl.sum(dy * x))\n", "    tl.atomic_add(ds_ptr, tl.sum(x))\n"),
            (
                "        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy,",
                "        ours = s.repeat(n).map_(dy, lambda a, b: a * b)\n"
                "        x = x.clone().map_(dy, lambda a, b: a * b)\n"
                "        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, ours,",
            ),
        ),
        "torch_math: .*map_|forbidden: .*map_",
    ),
    Attack(
        "apply_ with a function of Python",
        "mean_square_host_mean",
        (
            (
                "    tl.store(dx_ptr + i, 2 * x * dy, mask=i < N)\n",
                "    tl.store(dx_ptr + i, x * dy, mask=i < N)\n",
            ),
            ("(x, dy, dx, n, BLOCK=16)", "(x.clone().apply_(lambda a: 2 * a), dy, dx, n, BLOCK=16)"),
        ),
        "torch_math: .*apply_|forbidden: .*apply_",
    ),
]
