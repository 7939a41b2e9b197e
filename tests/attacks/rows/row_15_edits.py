"""The forward file or the harness is edited."""

from suite import Attack

ATTACKS = [
    Attack(
        "writes to its own file",
        "scale_atomics",
        ((None, '\n\nopen(scale_kernel.fn.__code__.co_filename, "w").close()\n'),),
        "forbidden: line .* open",
    ),
    Attack(
        "another stub",
        "scale_atomics",
        ((None, "\n\ndef scale(x, s):\n    return x.clone()\n"),),
        "redefined: line .* scale",
    ),
    Attack(
        "another forward kernel",
        "scale_atomics",
        (
            (
                None,
                "\n\n@triton.jit\ndef scale_kernel(x_ptr, s_ptr, y_ptr, N, BLOCK: tl.constexpr):\n    pass\n",
            ),
        ),
        "redefined: line .* scale_kernel",
    ),
    Attack(
        "other inputs",
        "scale_atomics",
        (
            (
                None,
                '\n\ndef make_args(dims, device="cuda", dtype=torch.float32):\n'
                '    return torch.zeros(dims["N"]), torch.zeros(1)\n',
            ),
        ),
        "redefined: line .* make_args",
    ),
    Attack(
        "another sweep", "scale_atomics", ((None, '\n\nSWEEP = [{"N": 1}]\n'),), "redefined: line .* SWEEP"
    ),
    Attack(
        "a sweep that is edited in place",
        "scale_atomics",
        ((None, "\n\nSWEEP.clear()\n"),),
        "module_code: line",
    ),
]
