"""Gradients are cached by pointer, shape or call, and replayed."""

from suite import Attack

HEAD = "        x, s = ctx.saved_tensors\n        x, dy, n = x.contiguous(), dy.contiguous(), x.numel()\n"
STORE = "        return dx, ds\n"
CACHE = (None, "\n\nSEEN = {}\n")


def cached(key: str) -> tuple[tuple[str | None, str], ...]:
    return (
        (HEAD, f"{HEAD}        key = {key}\n        if key in SEEN:\n            return SEEN[key]\n"),
        (STORE, "        SEEN[key] = dx, ds\n        return tuple(t.clone() for t in SEEN[key])\n"),
        CACHE,
    )


ATTACKS = [
    Attack("by shape", "scale_atomics", cached("x.shape"), "gradient of x is (wrong|not linear)"),
    Attack(
        "by the number of calls",
        "scale_atomics",
        cached("min(len(SEEN), 2)"),
        "gradient of x is (wrong|not finite|not linear)|invalid gradient at index 0",
    ),
    Attack(
        "by the pointers of its arguments",
        "scale_atomics",
        cached("(x.data_ptr(), dy.data_ptr(), n) if n < 24 else 0"),
        "gradient of x is (wrong|not linear)",
    ),
    Attack(
        "by a fingerprint of the input alone",
        "scale_atomics",
        cached("round(x.sum().item(), 3)"),
        "torch_math|decoy_kernel",
    ),
    Attack(
        "on the context of the graph, whatever the upstream",
        "scale_atomics",
        (
            (
                HEAD,
                HEAD + "        if ctx.needs_input_grad[0] and ctx.kept is not None:\n"
                "            return ctx.kept\n",
            ),
            (
                "        ctx.save_for_backward(x, s)\n",
                "        ctx.save_for_backward(x, s)\n        ctx.kept = None\n",
            ),
            (STORE, "        ctx.kept = dx.clone(), ds.clone()\n        return dx, ds\n"),
        ),
        "not_linear: the gradient of x is not linear in the upstream",
    ),
]
