"""A kernel is launched, but its result does not make the gradient."""

from suite import Attack

ATTACKS = [
    Attack(
        "db by torch beside honest kernels",
        "layer_norm_partials",
        (("db.sum(dim=0).to(w.dtype)", "dy.sum(0)"),),
        "decoy_kernel: the gradient of b",
    ),
    Attack(
        "ds from the upstream alone, launch into an unused buffer",
        "scale_partials",
        (
            ("part, n, BLOCK=16)", "torch.empty_like(part), n, BLOCK=16)"),
            ("ds = part.view(blocks, 1).sum(0).to(s.dtype)", "ds = dy.sum().view(1)"),
        ),
        "decoy_kernel: the gradient of s",
    ),
    Attack(
        "a copy of a saved tensor",
        "softmax_saved_output",
        (("        return dx\n", "        return y.clone()\n"),),
        "decoy_kernel",
    ),
    Attack(
        "an empty grid",
        "softmax_saved_output",
        (
            ("softmax_backward_kernel[(M,)]", "softmax_backward_kernel[(0,)]"),
            ("torch.empty_like(y)", "torch.zeros_like(y)"),
        ),
        "decoy_kernel|no_launch",
    ),
    Attack(
        "zeros, launch into an unused buffer",
        "softmax_saved_output",
        (("        return dx\n", "        return torch.zeros_like(y)\n"),),
        "decoy_kernel",
    ),
    Attack(
        "a launch in the forward only",
        "scale_atomics",
        (
            ("        return dx, ds\n", "        return dy.clone(), s.clone()\n"),
            (
                "        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, n, BLOCK=16)\n",
                "        if n < 0:\n            scale_backward_kernel[(1,)](x, s, dy, dx, ds, n, BLOCK=16)\n",
            ),
        ),
        "no_launch",
    ),
]
