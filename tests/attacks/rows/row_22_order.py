"""needs_input_grad is not heeded, or gradients are mixed up."""

from suite import Attack

RETURN = "        return dx, dw.sum(0).to(w.dtype), db.sum(dim=0).to(w.dtype), None\n"

ATTACKS = [
    Attack(
        "dw and db swapped",
        "layer_norm_partials",
        ((RETURN, "        return dx, db.sum(0).to(w.dtype), dw.sum(dim=0).to(w.dtype), None\n"),),
        "equals the expected value of",
    ),
    Attack(
        "dk and dv swapped",
        "attention_rows",
        (("return dq, dk, dv", "return dq, dv, dk"),),
        "equals the expected value of",
    ),
    Attack(
        "dx transposed",
        "linear_strides",
        (
            (
                "        return dx, dw\n",
                "        return dx if dx is None else dx.t().contiguous().view(dx.shape), dw\n",
            ),
        ),
        "transposed",
    ),
    Attack(
        "only the wanted gradients are returned",
        "layer_norm_partials",
        (
            (
                RETURN,
                RETURN.replace("        return dx", "        grads = dx").rstrip(", None\n")
                + "\n        return *(g for g, needed in zip(grads, ctx.needs_input_grad) if needed), None\n",
            ),
        ),
        "raised.*number of gradients",
    ),
    Attack(
        "right when all are wanted",
        "layer_norm_partials",
        (
            (
                RETURN,
                "        if not all(ctx.needs_input_grad[:3]):\n            dx = "
                f"torch.zeros_like(dx)\n{RETURN}",
            ),
        ),
        "only x wants a gradient",
    ),
    Attack(
        "wrong when two of three are wanted",
        "layer_norm_partials",
        (
            (
                RETURN,
                "        if sum(ctx.needs_input_grad) == 2:\n            db = "
                f"torch.zeros_like(db)\n{RETURN}",
            ),
        ),
        "want gradients",
    ),
    Attack(
        "dq without the scale",
        "attention_rows",
        (
            (
                "tl.store(dq_ptr + row * D + d, tl.sum(ds[:, None] * k, axis=0))",
                "tl.store(dq_ptr + row * D + d, tl.sum(ds[:, None] * k, axis=0) / scale)",
            ),
        ),
        "gradient of q is wrong.*(It equals|scale)",
    ),
    Attack(
        "causal mask off by one",
        "attention_rows",
        (("tl.where(cols <= row,", "tl.where(cols <= row + 1,"),),
        "gradient of",
    ),
    Attack(
        "causal mask forgotten",
        "attention_rows",
        (("tl.where(cols <= row,", "tl.where(cols < N,"),),
        "gradient of",
    ),
    Attack(
        "the ignored target gets a gradient",
        "cross_entropy_tiles",
        (("tl.where(target < 0, 0.0, tl.load(dloss_ptr + row))", "tl.load(dloss_ptr + row)"),),
        "gradient of logits",
    ),
    Attack(
        "softmax without its sum",
        "softmax_saved_output",
        (("y * (dy - tl.sum(y * dy, axis=0))", "y * dy"),),
        "gradient of x is wrong",
    ),
    Attack(
        "layer norm without the second mean",
        "layer_norm_partials",
        ((" - xhat * tl.sum(g * xhat, axis=0) / N", ""),),
        "gradient of x is wrong",
    ),
]
