"""A gradient shares memory, or is accumulated twice."""

from suite import Attack

ATTACKS = [
    Attack(
        "the upstream itself",
        "scale_atomics",
        (("        return dx, ds\n", "        return dy, ds\n"),),
        "alias|decoy_kernel",
    ),
    Attack(
        "the saved input as the buffer",
        "scale_atomics",
        (("dx, ds = torch.empty_like(x), torch.zeros_like(s)", "dx, ds = x, torch.zeros_like(s)"),),
        "alias: .*grad/x",
    ),
    Attack(
        "one buffer for two gradients",
        "layer_norm_partials",
        (
            (
                "return dx, dw.sum(0).to(w.dtype), db.sum(dim=0).to(w.dtype), None",
                "dw = dw.sum(0)\n        return dx, dw, dw.view(N), None",
            ),
        ),
        "gradient of b is wrong",
    ),
    Attack(
        "one tensor for two inputs, of which the other's lies a row further",
        "add_rms_partials",
        (
            (
                "dx, dw = torch.empty_like(x), torch.empty_like(w)",
                "both, dw = x.new_zeros((M + 1, N)), torch.empty_like(w)\n        dx = both[:M]",
            ),
            ("return dx, dx, dw, None", "return dx, both[1:], dw, None"),
        ),
        "alias: .*grad/r=grad/x",
    ),
    Attack(
        "a buffer of the forward, added to by every backward",
        "scale_atomics",
        (
            (
                "        return scale(x, s)\n",
                "        ctx.ds = torch.zeros_like(s)\n        return scale(x, s)\n",
            ),
            ("dx, ds = torch.empty_like(x), torch.zeros_like(s)", "dx, ds = torch.empty_like(x), ctx.ds"),
            ("return dx, ds", "return dx, ds.clone()"),
        ),
        "modified: saved|gradient of s",
    ),
    Attack(
        "a buffer of the module, added to by every backward",
        "scale_atomics",
        (
            ("torch.zeros_like(s)", "SUM.setdefault(n, torch.zeros_like(s))"),
            ("return dx, ds", "return dx, ds.clone()"),
            (None, "\n\nSUM = {}\n"),
        ),
        "gradient of s",
    ),
    Attack(
        "right the first time only",
        "scale_atomics",
        (
            (
                "        x, s = ctx.saved_tensors\n",
                "        x, s = ctx.saved_tensors\n        dy = dy if ctx.fresh else "
                "torch.zeros_like(dy)\n        ctx.fresh = False\n",
            ),
            ("        return scale(x, s)\n", "        ctx.fresh = True\n        return scale(x, s)\n"),
        ),
        "second backward.*gradient of x|gradient of x is zero",
    ),
    Attack(
        "nothing is left for a second backward",
        "softmax_strided",
        (("        return dx\n", "        del ctx.y\n        return dx\n"),),
        "raised.*'y'",
    ),
    Attack(
        "an input is an output that the stub did not return",
        "scale_atomics",
        (("return Scale.apply(x, s)", "Scale.apply(x, s)\n    return x"),),
        "candidate_shape|output 0",
    ),
]
