"""Torch, autograd or plain Python computes the gradient."""

from suite import Attack

BODY = """        x, s = ctx.saved_tensors
        x, dy, n = x.contiguous(), dy.contiguous(), x.numel()
        dx, ds = torch.empty_like(x), torch.zeros_like(s)
        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, n, BLOCK=16)
        return dx, ds
"""
LAUNCH = "        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, n, BLOCK=16)\n"
RETURN = "        return dx, ds\n"
SOFTMAX = (
    "        softmax_backward_kernel[(M,)](y, dy.contiguous(), dx, N, BLOCK=triton.next_power_of_2(N))\n   "
    "     return dx\n"
)

ATTACKS = [
    Attack(
        "torch.softmax",
        "softmax_saved_output",
        ((SOFTMAX, SOFTMAX.replace("return dx", "return torch.softmax(dx, -1)")),),
        "torch_math: line",
    ),
    Attack(
        "falls back on torch when the kernel fails",
        "scale_atomics",
        (
            (
                LAUNCH,
                f"        try:\n    {LAUNCH}        except Exception:\n            return dy * s, (dy * "
                "x).sum().view(1)\n",
            ),
        ),
        "try: line",
    ),
    Attack(
        "torch.autograd.grad",
        "scale_atomics",
        (
            (
                RETURN,
                "        with torch.enable_grad():\n            leaf = x.detach().requires_grad_()\n       "
                "     return torch.autograd.grad(leaf * s, leaf, dy)[0], ds\n",
            ),
        ),
        "autograd: line",
    ),
    Attack(
        "operators of tensors",
        "scale_atomics",
        ((RETURN, "        return dy * s, ds\n"),),
        "torch_math.*aten::mul",
    ),
    Attack(
        "operators, with the kernel's result mixed in",
        "scale_atomics",
        (
            (
                "tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)",
                "tl.store(dx_ptr + i, dy * 0, mask=i < N)",
            ),
            (RETURN, "        return dx + dy * s, ds\n"),
        ),
        "torch_math.*aten::(add|mul)",
    ),
    Attack(
        "an alias of torch.mul",
        "scale_atomics",
        ((RETURN, "        return blend(dy, s), ds\n"), (None, "\n\nblend = torch.mul\n")),
        "torch_math",
    ),
    Attack(
        "torch.mul under another name",
        "scale_atomics",
        (
            ("import torch\n", "import torch\nfrom torch import mul as blend\n"),
            (RETURN, "        return blend(dy, s), ds\n"),
        ),
        "torch_math",
    ),
    Attack(
        "torch.nn.functional under another name",
        "softmax_saved_output",
        (
            ("import torch\n", "import torch\nimport torch.nn.functional as F\n"),
            (SOFTMAX, SOFTMAX.replace("return dx", "return F.softmax(dx, -1)")),
        ),
        "torch_math: line",
    ),
    Attack(
        "plain Python over tolist()",
        "scale_atomics",
        (
            (
                RETURN,
                "        if ds.sum().isfinite():\n            dx = torch.tensor([g * 2 for g in "
                "dy.tolist()])\n        return dx, ds\n",
            ),
        ),
        "torch_math: line",
    ),
    Attack(
        "numpy behind a tensor",
        "scale_atomics",
        ((RETURN, "        return torch.from_numpy(dy.numpy() * s.numpy()), ds\n"),),
        "torch_math: line",
    ),
    Attack(
        "host code that runs only when the kernels did",
        "scale_atomics",
        (
            (
                RETURN,
                "        if float(ds) == float(ds):\n            dx = dy * s\n        return dx, ds\n",
            ),
        ),
        "torch_math",
    ),
    Attack(
        "a factor outside the Function",
        "scale_atomics",
        (("return Scale.apply(x, s)", "return Scale.apply(x, torch.ones_like(s)) * s"),),
        "torch_math.*aten::mul",
    ),
    Attack(
        "no kernel at all",
        "scale_atomics",
        ((BODY, "        x, s = ctx.saved_tensors\n        return dy * s, (dy * x).sum().view(1)\n"),),
        "no_launch: line",
    ),
    Attack(
        "torch.compile",
        "scale_atomics",
        ((RETURN, "        return torch.compile(lambda a, b: a * b)(dy, s), ds\n"),),
        "autograd: line",
    ),
    Attack(
        "torch.jit.script",
        "scale_atomics",
        (
            (RETURN, "        return product(dy, s), ds\n"),
            (None, "\n\n@torch.jit.script\ndef product(a, b):\n    return a * b\n"),
        ),
        "forbidden: line",
    ),
    Attack(
        "names made at run time",
        "scale_atomics",
        ((RETURN, '        return getattr(torch, "m" + "ul")(dy, s), ds\n'),),
        "forbidden: line .* getattr",
    ),
    Attack(
        "a dunder method",
        "scale_atomics",
        ((RETURN, "        return dy.__mul__(s), ds\n"),),
        "forbidden: line .*__mul__",
    ),
    Attack(
        "math on a tensor in the kernel's body",
        "scale_atomics",
        (
            (
                "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n",
                "    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n    torch.manual_seed(0)\n",
            ),
        ),
        "kernel: line .*torch",
    ),
    Attack(
        "torch.library",
        "scale_atomics",
        ((RETURN, "        return torch.ops.aten.mul(dy, s), ds\n"),),
        "torch_math: line",
    ),
    Attack(
        "the stub's own operation, word for word, in the backward",
        "gated_writes_the_stub_out",
        (
            ("ctx.save_for_backward(gate)", "ctx.save_for_backward(g)"),
            (
                "        (gate,) = ctx.saved_tensors\n",
                "        (g,) = ctx.saved_tensors\n        gate = torch.sigmoid(g)\n",
            ),
        ),
        "torch_math: line",
    ),
    Attack(
        "the stub's own operation in a helper that the backward calls too",
        "gated_writes_the_stub_out",
        (
            ("        gate = torch.sigmoid(g)\n", "        gate = make_gate(g)\n"),
            ("ctx.save_for_backward(gate)", "ctx.save_for_backward(g)"),
            (
                "        (gate,) = ctx.saved_tensors\n",
                "        (g,) = ctx.saved_tensors\n        gate = make_gate(g)\n",
            ),
            (None, "\n\ndef make_gate(g):\n    return torch.sigmoid(g)\n"),
        ),
        "torch_math: line",
    ),
    Attack(
        "the sum of two gradients that autograd would make, made by torch",
        "twice_applied",
        (("        return dx, ds\n", "        return dx + torch.zeros_like(dx), ds\n"),),
        "torch_math: the backward computes with torch \\(aten::add\\)",
    ),
    Attack(
        "autograd's own product of a torch operation around the Function",
        "twice_applied",
        (
            (
                "    x = x.contiguous()\n    return Product.apply(x, s), Product.apply(x, t)",
                "    x = x.contiguous()\n    return Product.apply(x, s), x * t",
            ),
        ),
        "torch_math",
    ),
    Attack(
        "a division that the stub does too, done by torch in the backward",
        "mean_square_host_mean",
        (("        return dx\n", "        return dx / torch.ones_like(dx)\n"),),
        "torch_math: the backward computes with torch \\(aten::div\\)",
    ),
    Attack(
        "autograd's own derivative of a division that the stub does not do",
        "mean_square_host_mean",
        (("return Square.apply(x).sum() / x.numel()", "return Square.apply(x / 3).sum() / x.numel() * 9"),),
        "torch_math",
    ),
]
