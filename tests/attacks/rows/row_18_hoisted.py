"""Work of the backward is hidden in the forward."""

from suite import Attack

ATTACKS = [
    Attack(
        "torch.softmax in the forward",
        "softmax_saved_output",
        (
            (
                "        y = softmax(x)\n        ctx.save_for_backward(y)\n",
                "        y = softmax(x)\n        ctx.save_for_backward(torch.softmax(x, -1))\n",
            ),
        ),
        "torch_math: line",
    ),
    Attack(
        "operators in the forward",
        "softmax_saved_output",
        (("        ctx.save_for_backward(y)\n", "        ctx.save_for_backward(y * 1.0)\n"),),
        "torch_math.*forward.*aten::mul",
    ),
    Attack(
        "the gradient for ones, made in the forward",
        "scale_atomics",
        (
            (
                "ctx.save_for_backward(x, s)\n        return scale(x, s)",
                "ctx.save_for_backward(x, s)\n        ctx.dx = s.expand(x.shape).contiguous()\n        "
                "return scale(x, s)",
            ),
            ("return dx, ds", "return ctx.dx.clone(), ds"),
        ),
        "decoy_kernel",
    ),
    Attack(
        "the stub's own operation, once more and on something else",
        "gated_writes_the_stub_out",
        (
            (
                "        ctx.save_for_backward(gate)\n",
                "        kept, g = gate, x[:, 0]\n        gate = torch.sigmoid(g)\n        "
                "ctx.save_for_backward(kept)\n",
            ),
        ),
        "torch_math.*forward.*aten::sigmoid",
    ),
]
