"""Inputs, the upstream or saved tensors are modified."""

from suite import Attack

ATTACKS = [
    Attack(
        "the input, by a kernel of the backward",
        "scale_atomics",
        (
            (
                "    tl.atomic_add(ds_ptr, tl.sum(dy * x))\n",
                "    tl.atomic_add(ds_ptr, tl.sum(dy * x))\n    tl.store(x_ptr + i, dy, mask=i < N)\n",
            ),
        ),
        "modified: x was modified in place",
    ),
    Attack(
        "the input, by the forward",
        "scale_atomics",
        (("        return scale(x, s)\n", "        y = scale(x, s)\n        x.zero_()\n        return y\n"),),
        "modified: x was modified in place|gradient of s",
    ),
    Attack(
        "the upstream, as the buffer of the result",
        "softmax_saved_output",
        (("dx = torch.empty_like(y)", "dx = dy"),),
        "modified: upstream/0",
    ),
    Attack(
        "a saved tensor, as the buffer of the result",
        "softmax_saved_output",
        (("dx = torch.empty_like(y)", "dx = y"),),
        "modified: (out/0|saved/0)|again",
    ),
    Attack(
        "a tensor kept on the context",
        "softmax_strided",
        (("        return dx\n", "        ctx.y.zero_()\n        return dx\n"),),
        "modified: saved/0",
    ),
]
