"""Values that somebody left in memory."""

from suite import Attack

ATTACKS = [
    Attack(
        "memory as it came",
        "softmax_saved_output",
        (
            (
                "softmax_backward_kernel[(M,)](y, dy.contiguous(), dx, N,",
                "softmax_backward_kernel[(M,)](y, dy.contiguous(), torch.empty_like(dx), N,",
            ),
        ),
        "not finite|decoy_kernel",
    ),
    Attack(
        "a buffer that was freed just before",
        "scale_atomics",
        (
            (
                "        return dx, ds\n",
                "        del dx\n        return torch.empty(n, dtype=x.dtype, device=x.device), ds\n",
            ),
        ),
        "not finite|decoy_kernel",
    ),
    Attack(
        "atomics onto memory as it came",
        "scale_atomics",
        (("torch.zeros_like(s)", "torch.empty_like(s)"),),
        "gradient of s is (not finite|wrong)",
    ),
    Attack(
        "new_empty and resize",
        "scale_atomics",
        (("        return dx, ds\n", "        return x.new_empty(0).resize_(n), ds\n"),),
        "not finite|decoy_kernel|torch_math",
    ),
]
