"""Right only for some layouts: of the upstream, or of one input while another has its own."""

from suite import Attack

LEADING = "    if t.stride(1) != 1 and t.stride(0) != 1:\n        t = t.contiguous()\n"
ROWS = "return t, (t.stride(0), 1) if t.stride(1) == 1 else (1, t.stride(1))"
SOFTMAX_STRIDES = "strides = (*dy.stride(), *dx.stride())"
STRIDES = "strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())"
EACH = "(t.contiguous() for t in ctx.saved_tensors)"
GIVEN = "given = [x if d is None else d.contiguous() for d in (dsquare, dcube)]"
EMA = "        dh = dh.contiguous()\n        B, T, C = x.shape\n"

ATTACKS = [
    Attack(
        "a matrix lies in rows or in columns: every second element of one does neither",
        "linear_leading",
        ((LEADING, ""), (ROWS, "return t, (t.stride(0), 1) if t.stride(1) <= 1 else (1, t.stride(1))")),
        r"fails only with .*(stacked|spanned)",
    ),
    Attack(
        "stride 0 in the last axis of the upstream read as 1",
        "softmax_strided",
        ((SOFTMAX_STRIDES, "strides = (dy.stride(0), dy.stride(1) or 1, *dx.stride())"),),
        r"fails only with spanned upstream",
    ),
    Attack(
        "an upstream whose rows follow one another taken for contiguous",
        "softmax_saved_output",
        (("dy.contiguous()", "dy if dy.stride(0) == dy.shape[1] * dy.stride(1) else dy.contiguous()"),),
        r"fails only with stacked upstream",
    ),
    Attack(
        "strides of the queries taken for those of keys and values",
        "attention_strides",
        ((STRIDES, "strides = (*q.stride(), *q.stride(), *q.stride(), *do.stride())"),),
        r"gradient of [qk] is wrong",
    ),
    Attack(
        "copies keys and values where the queries have to be copied",
        "attention_rows",
        ((EACH, "ctx.saved_tensors if ctx.saved_tensors[0].is_contiguous() else " + EACH),),
        r"gradient of [qkv] is wrong",
    ),
    Attack(
        "copies the weight where the input has to be copied",
        "linear_leading",
        (
            (LEADING, ""),
            (
                "        x, w = ctx.saved_tensors\n",
                "        x, w = ctx.saved_tensors\n"
                "        if 1 not in x.stride():\n            x, w = x.contiguous(), w.contiguous()\n"
                "        dy = dy.contiguous()\n",
            ),
        ),
        r"w (stacked|spanned).*gradient of x is wrong",
    ),
    Attack(
        "a gradient with the strides of its input, which hold an element many times",
        "linear_leading",
        (("(t.shape[1], 1) if 0 in t.stride() else t.stride()", "t.stride()"),),
        r"fails only with .*(expanded|spanned)",
    ),
    Attack(
        "gradient buffers found by the address of their input",
        "linear_strides",
        (
            (
                "        dx, dw = ctx.needs_input_grad\n",
                "        dx, dw = ctx.needs_input_grad\n"
                "        buffers = {x.data_ptr(): x.new_empty(x.shape)}\n"
                "        buffers[w.data_ptr()] = w.new_empty(w.shape)\n",
            ),
            ("torch.empty(x.shape, device=x.device, dtype=x.dtype)) if dx", "buffers[x.data_ptr()]) if dx"),
            ("torch.empty(w.shape, device=w.device, dtype=w.dtype)) if dw", "buffers[w.data_ptr()]) if dw"),
        ),
        r"w shared",
    ),
    Attack(
        "the first upstream tells whether both are to be copied",
        "several_outputs",
        (
            (
                GIVEN,
                "first = dsquare if dsquare is not None else dcube\n"
                "        dense = first.is_contiguous()\n"
                "        given = [x if d is None else d if dense else d.contiguous() "
                "for d in (dsquare, dcube)]",
            ),
        ),
        r"gradient of x is wrong",
    ),
    Attack(
        "one stride for two upstreams",
        "several_by_stride",
        (
            (
                "steps = (x.stride(0), dsquare.stride(0), dcube.stride(0))",
                "step = max(dsquare.stride(0), dcube.stride(0))\n"
                "        steps = (x.stride(0), *(step if d.stride(0) else 0 for d in (dsquare, dcube)))",
            ),
        ),
        r"gradient of x is wrong|out of bounds",
    ),
    Attack(
        "sequences of a batch assumed to lie one after another, if the rows of each do",
        "linear_attention_ssm_rnn/ema_learned_decay_partials",
        (
            (
                EMA,
                "        B, T, C = x.shape\n"
                "        if dh.stride(2) != 1 or dh.stride(1) != C or not dh.stride(0):\n"
                "            dh = dh.contiguous()\n",
            ),
        ),
        r"fails only with .*(shifted|swapped) upstream",
    ),
    Attack(
        "the second upstream laid out as the first",
        "norm/fused_residual_add_rms_norm",
        (
            (
                "        dy, dh = dy.contiguous(), dh.contiguous()\n",
                "        if not dy.is_contiguous():\n            dy, dh = dy.contiguous(), dh.contiguous()\n",
            ),
        ),
        r"gradient of (x|res) is wrong|out of bounds",
    ),
    Attack(
        "a weight's stride forgotten in the backward, where that of the input is not 1 either",
        "half_norm_strides",
        (
            (
                "steps = (*x.stride(), w.stride(0), *dy.stride())",
                "steps = (*x.stride(), 1 if x.is_contiguous() else w.stride(0), *dy.stride())",
            ),
        ),
        r"gradient of x is wrong",
    ),
    Attack(
        "a table that needs no gradient is taken for contiguous",
        "rope_positional/rope_half_rotation_tables",
        (("cos, sin = cos.contiguous(), sin.contiguous()", "cos = cos.contiguous()"),),
        r"sin (slice|stacked|transposed)",
    ),
    Attack(
        "flags taken for contiguous",
        "discounted_carries",
        (("        done = done.contiguous()\n", ""),),
        r"done (slice|stacked|transposed)",
    ),
    Attack(
        "the rows of a batch are counted by its first axis",
        "reduction_softmax/softmax_row_single_tile",
        (("softmax_backward_kernel[(y.numel() // N,)](", "softmax_backward_kernel[(y.shape[0],)]("),),
        "unsqueezed",
    ),
    Attack(
        "a gradient has rows and columns, whatever the input has",
        "norm/rms_norm_rowgroup_partials",
        (("        return dx if ctx.", "        dx = dx.view(M, N)\n        return dx if ctx."),),
        "unsqueezed",
    ),
    Attack(
        "the backward takes two axes, the forward any number",
        "norm/l2_normalize_rows",
        (
            (
                "        N = x.shape[-1]\n        BLOCK = triton.next_power_of_2(N)\n        l2_normalize_b",
                "        M, N = x.shape\n        BLOCK = triton.next_power_of_2(N)\n        l2_normalize_b",
            ),
        ),
        "unsqueezed",
    ),
    Attack(
        "the elements of a gradient are counted along two axes",
        "activation_glu/swiglu_two_inputs_recompute",
        (("(a, b, dy, da, db, a.numel(), BLOCK", "(a, b, dy, da, db, a.shape[0] * a.shape[1], BLOCK"),),
        "unsqueezed",
    ),
]
