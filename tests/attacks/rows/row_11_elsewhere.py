"""Work on another thread, or a tensor that computes later."""

from suite import Attack

ATTACKS = [
    Attack(
        "a thread",
        "scale_atomics",
        (
            ("import torch\n", "import threading\n\nimport torch\n"),
            (
                "        return dx, ds\n",
                "        threading.Timer(0.1, lambda: dx.copy_(dy)).start()\n        return dx, ds\n",
            ),
        ),
        "import: line .*threading",
    ),
    Attack(
        "a thread of torch",
        "scale_atomics",
        (
            (
                "        return dx, ds\n",
                "        torch.jit.fork(scale_autograd, x, s)\n        return dx, ds\n",
            ),
        ),
        "forbidden: line .*torch.jit",
    ),
    Attack(
        "a lazy tensor subclass",
        "scale_atomics",
        (
            ("        return dx, ds\n", "        return dx.as_subclass(Lazy), ds\n"),
            (None, "\n\nclass Lazy(torch.Tensor):\n    pass\n"),
        ),
        "subclass: line|is a Lazy, not a torch.Tensor",
    ),
    Attack(
        "a lazy output",
        "scale_atomics",
        (("return Scale.apply(x, s)", "return Scale.apply(x, s).as_subclass(torch.nn.Parameter)"),),
        "torch_math: line .*torch.nn.Parameter|not a torch.Tensor",
    ),
    Attack(
        "hooks on the output",
        "scale_atomics",
        (
            (
                "return Scale.apply(x, s)",
                "y = Scale.apply(x, s)\n    y.register_hook(lambda g: g * 2)\n    return y",
            ),
        ),
        "forbidden: line .*register_hook",
    ),
]
