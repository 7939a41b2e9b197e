"""A time that is too good to be true: work is skipped once it was checked."""

from suite import Attack

HEAD = "        x, s = ctx.saved_tensors\n"
CALLS = (None, "\n\nCALLS = []\n")

ATTACKS = [
    Attack(
        "honest for the first calls only",
        "scale_atomics",
        (
            (
                HEAD,
                HEAD + "        CALLS.append(dy)\n        if len(CALLS) > 6:\n            dy = CALLS[0]\n",
            ),
            CALLS,
        ),
        "gradient of|raised",
    ),
    Attack(
        "honest while the inputs are new",
        "scale_atomics",
        (
            (
                HEAD,
                HEAD + "        CALLS.append(x.data_ptr())\n        if CALLS.count(x.data_ptr()) > 1:\n"
                "            dy = torch.zeros_like(dy)\n",
            ),
            CALLS,
        ),
        "gradient of",
    ),
    Attack(
        "fewer programs when it is called again",
        "softmax_saved_output",
        (
            (
                "softmax_backward_kernel[(M,)]",
                "CALLS.append(M)\n        softmax_backward_kernel[(M if len(CALLS) < 4 else 1,)]",
            ),
            CALLS,
        ),
        "gradient of x is (not finite|not linear|wrong|zero)",
    ),
]
