"""An allowed name that means something else, and the stub's allowance spent on something else."""

from suite import Attack

STORE = "tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)"
NOTHING = "tl.store(dx_ptr + i, dy * 0, mask=i < N)"
RETURN = "        return dx, ds\n"


LIBRARY = """

def product(pair, dims):
    return (pair[0] * pair[1])[None]


kept = Library("aten", "IMPL")
done = kept.impl("flip", product, "CPU")
"""

FORWARD_MEAN = "        ctx.save_for_backward(x)\n        return square(x)\n"
OWN_MEAN = """        ctx.save_for_backward(x / (x.numel() / 2))
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        mean_kernel[(triton.cdiv(x.numel(), 16),)](x, total, x.numel(), BLOCK=16)
        return total
"""
MEAN_KERNEL = """

@triton.jit
def mean_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.atomic_add(y_ptr, tl.sum(x * x) / N)
"""

ATTACKS = [
    Attack(
        "an allowed operator, implemented anew through torch.library",
        "scale_atomics",
        (
            ("import torch\n", "import torch\nfrom torch.library import Library\n"),
            (STORE, NOTHING),
            (
                RETURN,
                "        pair = torch.stack([dy, s.expand(n)])\n"
                "        dx = torch.cat([torch.flip(pair, [0]), dx[None]]).sum(0)\n" + RETURN,
            ),
            (None, LIBRARY),
        ),
        "torch_math: line .*torch.library",
    ),
    Attack(
        "the stub's division, spent on the derivative",
        "mean_square_host_mean",
        (
            (FORWARD_MEAN, OWN_MEAN),
            (
                "tl.store(dx_ptr + i, 2 * x * dy, mask=i < N)",
                "tl.store(dx_ptr + i, x * tl.load(dy_ptr), mask=i < N)",
            ),
            ("    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)\n", ""),
            ("    return Square.apply(x).sum() / x.numel()\n", "    return Square.apply(x)\n"),
            (None, MEAN_KERNEL),
        ),
        "torch_math: .*(forward|line).*aten::div",
    ),
    Attack(
        "an import inside the function, under another name",
        "scale_atomics",
        (
            (STORE, NOTHING),
            (
                RETURN,
                "        from torch import mul as blend\n\n        dx = blend(dy, s) + dx\n" + RETURN,
            ),
        ),
        "torch_math: line .*torch.mul",
    ),
    Attack(
        "torch itself under another name",
        "scale_atomics",
        ((STORE, NOTHING), (RETURN, "        t = torch\n        dx = t.add(t.mul(dy, s), dx)\n" + RETURN)),
        "(torch_math|forbidden): line .*torch",
    ),
    Attack(
        "a table of torch's functions in a default argument",
        "scale_atomics",
        (
            (STORE, NOTHING),
            (RETURN, "        dx = blend(dx, dy, s)\n" + RETURN),
            (None, "\n\ndef blend(a, b, c, how={'p': torch.addcmul}):\n    return how['p'](a, b, c)\n"),
        ),
        "torch_math: line .*torch.addcmul",
    ),
    Attack(
        "a bound method, called later",
        "scale_atomics",
        ((STORE, NOTHING), (RETURN, "        times = dy.mul\n        dx = dx.add(times(s))\n" + RETURN)),
        "torch_math",
    ),
    Attack(
        "operator.mul over tensors",
        "scale_atomics",
        (
            ("import torch\n", "import functools\nimport operator\n\nimport torch\n"),
            (STORE, NOTHING),
            (RETURN, "        dx = dx + functools.reduce(operator.mul, (dy, s))\n" + RETURN),
        ),
        "torch_math: the backward computes with torch \\(.*aten::mul",
    ),
    Attack(
        "operator.matmul",
        "scale_atomics",
        (
            ("import torch\n", "import operator\n\nimport torch\n"),
            (STORE, NOTHING),
            (RETURN, "        dx = dx + operator.matmul(dy[:, None], s[:, None])[:, 0]\n" + RETURN),
        ),
        "import: line .*operator.matmul",
    ),
    Attack(
        "operator.attrgetter makes names at run time",
        "scale_atomics",
        (
            ("import torch\n", "from operator import attrgetter\n\nimport torch\n"),
            (STORE, NOTHING),
            (RETURN, '        dx = dx + attrgetter("mu" + "l")(dy)(s)\n' + RETURN),
        ),
        "import: line .*operator.attrgetter",
    ),
    Attack(
        "typing.get_type_hints evaluates text",
        "scale_atomics",
        (
            ("import torch\n", "import typing\n\nimport torch\n"),
            (STORE, NOTHING),
            (RETURN, "        dx = dx + typing.get_type_hints(Late)['v'](dy, s)\n" + RETURN),
            (None, '\n\nclass Late:\n    v: "torch.mul"\n'),
        ),
        "import: line .*typing.get_type_hints",
    ),
    Attack(
        "contextlib.suppress around a launch",
        "scale_atomics",
        (
            ("import torch\n", "import contextlib\n\nimport torch\n"),
            (
                "        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s",
                "        with contextlib.suppress(Exception):\n"
                "            scale_backward_kernel[(triton.cdiv(n, 16),)](x, s",
            ),
        ),
        "import: line .*contextlib.suppress",
    ),
    Attack(
        "functools.wraps gives a kernel other attributes",
        "scale_atomics",
        (
            ("import torch\n", "import functools\nfrom dataclasses import dataclass\n\nimport torch\n"),
            (STORE, NOTHING),
            (
                "        x, s = ctx.saved_tensors\n",
                "        x, s = ctx.saved_tensors\n        functools.wraps(Other())(scale_backward_kernel)\n",
            ),
            (
                None,
                "\n\ndef other(x_ptr, s_ptr, dy_ptr, dx_ptr, ds_ptr, N, BLOCK):\n    pass\n\n\n"
                "@dataclass\nclass Other:\n"
                "    rewritten: object = other\n",
            ),
        ),
        "import: line .*functools.wraps",
    ),
]
