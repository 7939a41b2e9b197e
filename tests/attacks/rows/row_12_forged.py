"""The process ends early, writes results itself, or returns less than it should."""

from suite import Attack

ATTACKS = [
    Attack(
        "SystemExit in the backward",
        "scale_atomics",
        (("        return dx, ds\n", "        raise SystemExit(0)\n"),),
        "raised",
    ),
    Attack(
        "exit() at import",
        "scale_atomics",
        ((None, "\n\nexit()\n"),),
        "forbidden: line .*exit|module_code: line",
    ),
    Attack(
        "os._exit(0)",
        "scale_atomics",
        (
            ("import torch\n", "import os\n\nimport torch\n"),
            ("        return dx, ds\n", "        os._exit(0)\n"),
        ),
        "import: line .* os",
    ),
    Attack(
        "a forged result.json",
        "scale_atomics",
        ((None, '\n\nwith open("result.json", "w") as file:\n    file.write("{}")\n'),),
        "forbidden: line .* open",
    ),
    Attack(
        "torch.save over the tensors",
        "scale_atomics",
        (
            (
                "        return dx, ds\n",
                '        torch.save(dx, "case-0.safetensors")\n        return dx, ds\n',
            ),
        ),
        "forbidden: line .*torch.save",
    ),
    Attack(
        "a shorter gradient",
        "scale_atomics",
        (("        return dx, ds\n", "        return dx[:-1].clone(), ds\n"),),
        "raised.*(shape|size)",
    ),
    Attack(
        "a broadcast gradient",
        "softmax_saved_output",
        (("        return dx\n", "        return dx[:1].expand(M, N)\n"),),
        "gradient of x",
    ),
    Attack(
        "too few gradients",
        "scale_atomics",
        (("        return dx, ds\n", "        return dx\n"),),
        "raised.*gradients",
    ),
    Attack(
        "a crash of the process",
        "scale_atomics",
        (("    return Scale.apply(x, s)\n", "    return scale_autograd(x, s)\n"),),
        "raised.*[Rr]ecursion",
    ),
]
