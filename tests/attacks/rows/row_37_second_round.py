"""A second round by somebody else: buffers in turn, what autograd computes for the stub, and what tells a
check from use."""

from suite import Attack

IN_TURN = """_turn = itertools.count()
_rings = {}


def in_turn(name, like):
    ring = _rings.setdefault((name, like.shape, like.dtype, like.device), [])
    at = next(_turn) % 8
    while len(ring) < 8:
        ring.append(torch.empty_like(like))
    return ring[at]


"""

ATTACKS = [
    Attack(
        "gradients lie in eight buffers in turn",
        "softmax_saved_output",
        (
            (("import torch\nimport triton\n"), ("import itertools\n\nimport torch\nimport triton\n")),
            (
                "class Softmax(",
                f"{IN_TURN}class Softmax(",
            ),
            ("        dx = torch.empty_like(y)\n", "        dx = in_turn('dx', y)\n"),
        ),
        "looked at after later calls|decoy_kernel",
    ),
    Attack(
        "outputs lie in eight buffers in turn",
        "layer_norm_saved_statistics",
        (
            (("import torch\nimport triton\n"), ("import itertools\n\nimport torch\nimport triton\n")),
            (
                "class LayerNorm(",
                f"{IN_TURN}class LayerNorm(",
            ),
            ("        y = torch.empty_like(x)\n", "        y = in_turn('y', x).detach()\n"),
        ),
        "looked at after later calls",
    ),
    Attack(
        "statistics of a forward lie in eight buffers in turn, on ctx",
        "layer_norm_saved_statistics",
        (
            (("import torch\nimport triton\n"), ("import itertools\n\nimport torch\nimport triton\n")),
            (
                "class LayerNorm(",
                f"{IN_TURN}class LayerNorm(",
            ),
            (
                (
                    "        mean, r = x.new_empty(M, dtype=torch.float32), x.new_empty(M, "
                    "dtype=torch.float32)\n"
                ),
                ("        mean = in_turn('mean', x[:, 0])\n        r = in_turn('r', x[:, 0])\n"),
            ),
            (
                "        ctx.save_for_backward(x, w, mean, r)\n",
                ("        ctx.save_for_backward(x, w)\n        ctx.statistics = mean, r\n"),
            ),
            (
                "        x, w, mean, r = ctx.saved_tensors\n",
                ("        x, w = ctx.saved_tensors\n        mean, r = ctx.statistics\n"),
            ),
        ),
        "two graphs alive at once",
    ),
    Attack(
        "an output kept where autograd does not watch it",
        "softmax_saved_output",
        (
            ("        ctx.save_for_backward(y)\n", "        ctx.y = y\n"),
            ("        (y,) = ctx.saved_tensors\n", "        y = ctx.y\n"),
        ),
        "inputs changed before the backward",
    ),
    Attack(
        "an output's data saved",
        "softmax_saved_output",
        (("        ctx.save_for_backward(y)\n", "        ctx.save_for_backward(y.data)\n"),),
        "inputs changed before the backward",
    ),
    Attack(
        "a transposed weight in lru_cache",
        "linear_transposed_gradients",
        (
            (("import torch\nimport triton\n"), ("import functools\n\nimport torch\nimport triton\n")),
            (
                "class Linear(",
                (
                    "@functools.lru_cache(maxsize=8)\n"
                    "def turned(w):\n"
                    "    return w.detach().t().contiguous()\n"
                    "\n"
                    "\n"
                    "class Linear("
                ),
            ),
            ("dy, w.t())", "dy, turned(w))"),
        ),
        "other values in the same tensors",
    ),
    Attack(
        "the upstream gets an axis in place",
        "softmax_saved_output",
        (
            (
                "        dx = torch.empty_like(y)\n",
                ("        dy.unsqueeze_(0)\n        dx = torch.empty_like(y)\n"),
            ),
        ),
        "modified: upstream/0",
    ),
    Attack(
        "an input that wanted no gradient wants one",
        "scale_atomics",
        (
            (
                "        ctx.save_for_backward(x, s)\n",
                ("        ctx.save_for_backward(x, s)\n        s.requires_grad_(True)\n"),
            ),
        ),
        "modified: s was modified",
    ),
    Attack(
        "wrong outputs where nothing is recorded",
        "scale_atomics",
        (
            (
                "    return Scale.apply(x, s)\n",
                (
                    "    if not torch.is_grad_enabled():\n"
                    "        return scale(x, s.flip(0).clone().zero_())\n"
                    "    return Scale.apply(x, s)\n"
                ),
            ),
        ),
        "without a graph",
    ),
    Attack(
        "wrong outputs where no input wants a gradient",
        "scale_atomics",
        (
            (
                "    return Scale.apply(x, s)\n",
                (
                    "    if not (x.requires_grad or s.requires_grad):\n"
                    "        return torch.zeros_like(x)\n"
                    "    return Scale.apply(x, s)\n"
                ),
            ),
        ),
        "without a graph",
    ),
    Attack(
        "one output detached",
        "twice_same_product",
        (
            (
                "    return Twice.apply(x.contiguous(), s, t)\n",
                ("    y, z = Twice.apply(x.contiguous(), s, t)\n    return y, z.detach()\n"),
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "one output marked as without gradient",
        "twice_same_product",
        (
            (
                "        return product(x, s), product(x, t)\n",
                (
                    "        y, z = product(x, s), product(x, t)\n"
                    "        ctx.mark_non_differentiable(z)\n"
                    "        return y, z\n"
                ),
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "stub's undifferentiated product, of ones that stand for x",
        "masked_scale_stub_multiplies",
        (
            (
                "        return product(dy.contiguous(), z), None\n",
                "        return None, copied(dy.contiguous())\n",
            ),
            (
                "class Scaled(",
                (
                    "@triton.jit\n"
                    "def copy_kernel(a_ptr, out_ptr, N, BLOCK: tl.constexpr):\n"
                    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                    "    tl.store(out_ptr + i, tl.load(a_ptr + i, mask=i < N, other=0.0), mask=i < N)\n"
                    "\n"
                    "\n"
                    "def copied(a):\n"
                    "    out = torch.empty_like(a)\n"
                    "    copy_kernel[(triton.cdiv(a.numel(), 16),)](a, out, a.numel(), BLOCK=16)\n"
                    "    return out\n"
                    "\n"
                    "\n"
                    "class One(torch.autograd.Function):\n"
                    "    @staticmethod\n"
                    "    def forward(ctx, x, like):\n"
                    "        return torch.ones_like(x)\n"
                    "\n"
                    "    @staticmethod\n"
                    "    def backward(ctx, dy):\n"
                    "        return copied(dy.contiguous()), None\n"
                    "\n"
                    "\n"
                    "class Scaled("
                ),
            ),
            (
                "    return Scaled.apply(x, keep * gain)\n",
                ("    z = product(keep, gain)\n    return Scaled.apply(x.detach(), One.apply(x, z) * z)\n"),
            ),
        ),
        "torch_math: the forward computes with torch",
    ),
    Attack(
        "stub's undifferentiated product, of an operand that stands for x",
        "masked_scale_stub_multiplies",
        (
            (
                "        return product(dy.contiguous(), z), None\n",
                ("        k, = ctx.saved_tensors\n        return None, product(dy.contiguous(), k), None\n"),
            ),
            (
                ("    def forward(ctx, x, z):\n        ctx.save_for_backward(z)\n"),
                ("    def forward(ctx, x, z, k):\n        ctx.save_for_backward(k)\n"),
            ),
            ("        (z,) = ctx.saved_tensors\n", ""),
            (
                "class Scaled(",
                (
                    "@triton.jit\n"
                    "def copy_kernel(a_ptr, out_ptr, N, BLOCK: tl.constexpr):\n"
                    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                    "    tl.store(out_ptr + i, tl.load(a_ptr + i, mask=i < N, other=0.0), mask=i < N)\n"
                    "\n"
                    "\n"
                    "def copied(a):\n"
                    "    out = torch.empty_like(a)\n"
                    "    copy_kernel[(triton.cdiv(a.numel(), 16),)](a, out, a.numel(), BLOCK=16)\n"
                    "    return out\n"
                    "\n"
                    "\n"
                    "class One(torch.autograd.Function):\n"
                    "    @staticmethod\n"
                    "    def forward(ctx, x, like):\n"
                    "        return copied(like)\n"
                    "\n"
                    "    @staticmethod\n"
                    "    def backward(ctx, dy):\n"
                    "        return copied(dy.contiguous()), None\n"
                    "\n"
                    "\n"
                    "class Scaled("
                ),
            ),
            (
                "    return Scaled.apply(x, keep * gain)\n",
                (
                    "    return Scaled.apply(x.detach(), One.apply(x, keep.detach()) * "
                    "gain.detach(), keep.detach())\n"
                ),
            ),
        ),
        "torch_math: the backward computes with torch",
    ),
    Attack(
        "the residual's sum with alpha",
        "tripled_residual_added_by_torch",
        (
            ("        return triple(x)\n", "        return copied(x)\n"),
            ("        return triple(dy.contiguous())\n", "        return copied(dy.contiguous())\n"),
            (
                "class Triple(",
                (
                    "@triton.jit\n"
                    "def copy_kernel(a_ptr, out_ptr, N, BLOCK: tl.constexpr):\n"
                    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                    "    tl.store(out_ptr + i, tl.load(a_ptr + i, mask=i < N, other=0.0), mask=i < N)\n"
                    "\n"
                    "\n"
                    "def copied(a):\n"
                    "    out = torch.empty_like(a)\n"
                    "    copy_kernel[(triton.cdiv(a.numel(), 16),)](a, out, a.numel(), BLOCK=16)\n"
                    "    return out\n"
                    "\n"
                    "\n"
                    "class Triple("
                ),
            ),
            ("    return r + Triple.apply(x)\n", "    return r.add(Triple.apply(x), alpha=3)\n"),
        ),
        "torch_math: the forward computes with torch .aten::add",
    ),
    Attack(
        "three copies of an input: autograd adds up",
        "tripled_residual_added_by_torch",
        (
            (
                ("    def forward(ctx, x):\n        return triple(x)\n"),
                ("    def forward(ctx, x):\n        return x.sum(0)\n"),
            ),
            (
                "        return triple(dy.contiguous())\n",
                ("        dx = copied(dy.contiguous())\n        return dx.expand(3, *dx.shape)\n"),
            ),
            (
                "class Triple(",
                (
                    "@triton.jit\n"
                    "def copy_kernel(a_ptr, out_ptr, N, BLOCK: tl.constexpr):\n"
                    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
                    "    tl.store(out_ptr + i, tl.load(a_ptr + i, mask=i < N, other=0.0), mask=i < N)\n"
                    "\n"
                    "\n"
                    "def copied(a):\n"
                    "    out = torch.empty_like(a)\n"
                    "    copy_kernel[(triton.cdiv(a.numel(), 16),)](a, out, a.numel(), BLOCK=16)\n"
                    "    return out\n"
                    "\n"
                    "\n"
                    "class Triple("
                ),
            ),
            ("    return r + Triple.apply(x)\n", "    return r + Triple.apply(x.expand(3, *x.shape))\n"),
        ),
        "torch_math: .*one number several times",
    ),
    Attack(
        "one gradient for an input that is given twice: autograd doubles",
        "scale_shared_upstream",
        (
            ("    def forward(ctx, x, s):\n", "    def forward(ctx, x, _, s):\n"),
            (
                "        wants_x, wants_s = ctx.needs_input_grad\n",
                "        wants_x, _, wants_s = ctx.needs_input_grad\n",
            ),
            ("other=0.0) * tl.load(s_ptr), mask=i < N)", "other=0.0) * tl.load(s_ptr) * 0.5, mask=i < N)"),
            ("        return dx, ds\n", "        return dx, dx, ds\n"),
            ("    return Scale.apply(x, s)\n", "    return Scale.apply(x, x, s)\n"),
        ),
        "torch_math: .*(one number several times|aten::add)",
    ),
    Attack(
        "a part of the loss that the stub makes by torch is detached",
        "weighted_loss_rows",
        (("energy.mean(), energy\n", "energy.mean().detach(), energy\n"),),
        "gradient of x is wrong",
    ),
    Attack(
        "a backward that is typing.cast",
        "tripled_residual_added_by_torch",
        (
            (
                "class Triple(",
                (
                    "class Same(torch.autograd.Function):\n"
                    "    @staticmethod\n"
                    "    def forward(ctx, x):\n"
                    "        return triple(x)\n"
                    "\n"
                    "    backward = staticmethod(typing.cast)\n"
                    "\n"
                    "\n"
                    "class Triple("
                ),
            ),
            ("import torch\n", ("import typing\n\nimport torch\n")),
            ("    return r + Triple.apply(x)\n", "    return r + Same.apply(x)\n"),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "an input that is the second output of what made it",
        "scale_atomics",
        (
            (
                "        ctx.save_for_backward(x, s)\n",
                ("        ctx.save_for_backward(x, s)\n        ctx.odd = x.output_nr\n"),
            ),
            (
                "        return dx, ds\n",
                "        return (dx, ds) if ctx.odd == 0 else (torch.zeros_like(dx), ds)\n",
            ),
        ),
        "forbidden: .*output_nr",
    ),
    Attack(
        "a kernel asks whether it is compiled: constexpr",
        "scale_atomics",
        (
            (
                "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n",
                (
                    "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n"
                    "    if isinstance(BLOCK, tl.constexpr):\n"
                    "        dy = dy * 0.5\n"
                ),
            ),
        ),
        "kernel: .*asks how a value is kept",
    ),
    Attack(
        "a kernel asks whether it is compiled: hasattr",
        "scale_atomics",
        (
            (
                "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n",
                (
                    "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n"
                    "    if hasattr(BLOCK, 'value'):\n"
                    "        dy = dy * 0.5\n"
                ),
            ),
        ),
        "kernel: .*uses hasattr",
    ),
    Attack(
        "the device is read out of a tensor's type",
        "scale_atomics",
        (
            (
                "        return dx, ds\n",
                (
                    "        return (dx, ds) if x.type() == 'torch.FloatTensor' else (dx, "
                    "torch.zeros_like(ds))\n"
                ),
            ),
        ),
        "gradient of s is zero everywhere",
    ),
    Attack(
        "what a launch returns tells whether it was compiled",
        "scale_atomics",
        (
            (
                (
                    "        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, n, BLOCK=16)\n"
                    "        return dx, ds\n"
                ),
                (
                    "        done = scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, "
                    "n, BLOCK=16)\n"
                    "        return (dx, ds) if done is None else (dx, torch.zeros_like(ds))\n"
                ),
            ),
        ),
        "gradient of s is zero everywhere",
    ),
    Attack(
        "compiled kernels in a cache tell",
        "scale_atomics",
        (
            (
                "        return dx, ds\n",
                (
                    "        if scale_backward_kernel.device_caches:\n"
                    "            return dx, torch.zeros_like(ds)\n"
                    "        return dx, ds\n"
                ),
            ),
        ),
        "forbidden: .*device_caches",
    ),
    Attack(
        "a tuned kernel's trials clear the upstream",
        "gelu_gain_tuned",
        (('    reset_to_zero=["d_gain_ptr"],\n', '    reset_to_zero=["d_gain_ptr", "dy_ptr"],\n'),),
        "modified: upstream/0|zero everywhere",
    ),
    Attack(
        "a tuner's key leaves out what its pruning hangs on",
        "gelu_gain_restored",
        (
            (
                (
                    '    configs=[triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((32, 1), '
                    "(64, 2), (128, 4))],\n"
                    '    key=["N"],\n'
                ),
                (
                    '    configs=[triton.Config({"BLOCK": b, "EVEN": even}) for b in (32, 64) for '
                    "even in (True, False)],\n"
                    "    key=[],\n"
                    '    prune_configs_by={"early_config_prune": fitting},\n'
                ),
            ),
            ('@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})\n', ""),
            (
                "@triton.autotune(",
                (
                    "def fitting(configs, named_args, **_):\n"
                    '    return [c for c in configs if not c.kwargs["EVEN"] or named_args["N"] % 8 '
                    '== 0 and named_args["N"] >= 16]\n'
                    "\n"
                    "\n"
                    "@triton.autotune("
                ),
            ),
            (
                "    mask = (cols >= 0) if EVEN else (cols < N)\n",
                "    mask = (cols < N // 8 * 8) if EVEN else (cols < N)\n",
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "a graph has one buffer for a gradient, and hands it out each time",
        "scale_atomics",
        (
            (
                "        return dx, ds\n",
                (
                    "        ctx.kept = getattr(ctx, 'kept', ds)\n"
                    "        ctx.kept.copy_(ds)\n"
                    "        return dx, ctx.kept\n"
                ),
            ),
        ),
        "looked at after later calls",
    ),
    Attack(
        "a gradient's buffer is found by the inputs that it is of",
        "scale_atomics",
        (
            (
                "        dx, ds = torch.empty_like(x), torch.zeros_like(s)\n",
                (
                    "        dx = BUFFERS.setdefault((id(x), id(s)), torch.empty_like(x))\n"
                    "        ds = torch.zeros_like(s)\n"
                ),
            ),
            (None, "\n\nBUFFERS = {}\n"),
        ),
        "looked at after later calls",
    ),
    Attack(
        "NaN in the upstream is zero",
        "scale_atomics",
        (
            (
                "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n",
                (
                    "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n"
                    "    dy = tl.where(dy == dy, dy, 0.0)\n"
                ),
            ),
        ),
        "not_linear: .*NaN times the upstream",
    ),
    Attack(
        "infinities in the upstream are zero",
        "scale_atomics",
        (
            (
                "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n",
                (
                    "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n"
                    "    dy = tl.where(tl.abs(dy) < 3.0e38, dy, 0.0)\n"
                ),
            ),
        ),
        "not_linear: .* times the upstream leaves",
    ),
    Attack(
        "an upstream is cut off at a thousand million",
        "cubed_rows",
        (
            (
                "        slope = 3 * x * x * alpha\n",
                ("        slope = 3 * x * x * alpha\n        dy = tl.minimum(dy, 1e9)\n"),
            ),
        ),
        "not_linear: .*infinity times the upstream",
    ),
    Attack(
        "a tail of more than half a block",
        "cubed_rows",
        (
            (
                "        slope = 3 * x * x * alpha\n",
                (
                    "        slope = 3 * x * x * alpha\n"
                    "        slope = tl.where((start + BLOCK > N) & (N - start > 40), 0.9 * slope, slope)\n"
                ),
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "the last sixteen of a block of 64 are missing in the tail",
        "cubed_rows",
        (
            (
                "        tl.store(dx_ptr + row * N + cols, dy * slope, mask=cols < N)\n",
                (
                    "        slope = tl.where((start + BLOCK > N) & (cols >= start + 49), 0.0, slope)\n"
                    "        tl.store(dx_ptr + row * N + cols, dy * slope, mask=cols < N)\n"
                ),
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "numbers above a quarter are taken for the half that make_args gives",
        "cubed_rows",
        (
            (
                "        slope = 3 * x * x * alpha\n",
                "        slope = 3 * x * x * tl.where(alpha > 0.25, 0.5, alpha)\n",
            ),
        ),
        "another alpha",
    ),
    Attack(
        "the last byte of a packed mask is left out where it is not full",
        "rectified_bits",
        (
            (
                "    tl.store(bits_ptr + byte, packed.to(tl.uint8), mask=byte * 8 < N)\n",
                "    tl.store(bits_ptr + byte, packed.to(tl.uint8), mask=byte * 8 + 7 < N)\n",
            ),
        ),
        "gradient of x is wrong",
    ),
]
