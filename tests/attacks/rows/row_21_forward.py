"""The forward is replaced by an easier function."""

from suite import Attack

APPLY = "return Scale.apply(x, s)"

ATTACKS = [
    Attack(
        "zeros",
        "scale_atomics",
        (("        return scale(x, s)\n", "        return torch.zeros_like(x)\n"),),
        "output 0 of the forward",
    ),
    Attack(
        "the identity",
        "scale_atomics",
        (("        return scale(x, s)\n", "        return x.clone()\n"),),
        "output 0 of the forward",
    ),
    Attack(
        "float16 inside",
        "scale_atomics",
        (
            (
                "        return scale(x, s)\n",
                "        return scale(x.to(torch.float16), s.to(torch.float16)).to(x.dtype)\n",
            ),
        ),
        "output 0 of the forward",
    ),
    Attack(
        "another dtype",
        "scale_atomics",
        (("        return scale(x, s)\n", "        return scale(x, s).to(torch.float16)\n"),),
        "output 0 is float16",
    ),
    Attack(
        "a softmax without the largest value taken off",
        "softmax_saved_output",
        (("        y = softmax(x)\n", "        y = softmax(x + 1)\n"),),
        "torch_math",
    ),
    Attack(
        "another number",
        "several_outputs",
        (
            (
                "return square, None, x.numel(), (x, cube), sign",
                "return square, None, x.numel() + 1, (x, cube), sign",
            ),
        ),
        "output 2",
    ),
    Attack(
        "something for None",
        "several_outputs",
        (
            (
                "return square, None, x.numel(), (x, cube), sign",
                "return square, 0, x.numel(), (x, cube), sign",
            ),
        ),
        "output 1",
    ),
    Attack(
        "a copy for the input",
        "several_outputs",
        (
            (
                "return square, None, x.numel(), (x, cube), sign",
                "return square, None, x.numel(), (x.clone(), cube), sign",
            ),
        ),
        "output 3",
    ),
    Attack(
        "another nesting",
        "several_outputs",
        (
            (
                "return square, None, x.numel(), (x, cube), sign",
                "return square, None, x.numel(), x, cube, sign",
            ),
        ),
        "nest|returns",
    ),
    Attack(
        "an integer output that is wrong",
        "several_outputs",
        (("ctx.mark_non_differentiable(sign)", "sign.fill_(1)\n        ctx.mark_non_differentiable(sign)"),),
        "output 5 of the forward",
    ),
]
