"""State between calls: what belongs to one graph is in the module, or in memory that the next call uses."""

from suite import Attack

KEPT = (None, "\n\nKEPT = {}\n")
LATER = "two graphs alive at once"
AFTERWARDS = "looked at after later calls"
STEP = "other values in the same tensors"

ATTACKS = [
    Attack(
        "the statistics of the last forward of a shape, in the module",
        "layer_norm_saved_statistics",
        (
            (
                "ctx.save_for_backward(x, w, mean, r)",
                "ctx.save_for_backward(x, w)\n        KEPT[x.shape] = mean, r",
            ),
            (
                "        x, w, mean, r = ctx.saved_tensors\n",
                "        x, w = ctx.saved_tensors\n        mean, r = KEPT[x.shape]\n",
            ),
            KEPT,
        ),
        LATER,
    ),
    Attack(
        "a gradient's buffer that the next backward of the shape writes into",
        "scale_atomics",
        (
            (
                "dx, ds = torch.empty_like(x), torch.zeros_like(s)",
                "dx, ds = KEPT.setdefault(x.shape, torch.empty_like(x)), torch.zeros_like(s)",
            ),
            KEPT,
        ),
        AFTERWARDS,
    ),
    Attack(
        "an output's buffer that the next forward of the shape writes into",
        "layer_norm_saved_statistics",
        (
            (
                "        y = torch.empty_like(x)\n",
                "        y = KEPT.setdefault(x.shape, torch.empty_like(x))\n",
            ),
            KEPT,
        ),
        rf"output 0 of the forward .*{AFTERWARDS}|{AFTERWARDS}",
    ),
    Attack(
        "a workspace cached by its shape, filled by the forward and read by the backward",
        "norm/l2_normalize_rows",
        (
            (
                "        y, r = l2_normalize_forward(x, eps)\n        ctx.save_for_backward(x, r)\n",
                "        y, r = l2_normalize_forward(x, eps)\n        KEPT.setdefault(r.shape, r).copy_(r)\n"
                "        ctx.save_for_backward(x)\n",
            ),
            (
                "        x, r = ctx.saved_tensors\n",
                "        (x,) = ctx.saved_tensors\n        r = KEPT[x.shape[:-1]]\n",
            ),
            KEPT,
        ),
        LATER,
    ),
    Attack(
        "a transposed weight, made when the weight was first seen",
        "linear_strides",
        (
            (
                "        ctx.save_for_backward(x, w)\n",
                "        ctx.save_for_backward(x, w)\n"
                "        ctx.turned = KEPT.setdefault(id(w), (w, w.detach().t().contiguous().clone()))[1]\n",
            ),
            ("matmul_into(dy, w.t(), ", "matmul_into(dy, ctx.turned, "),
            KEPT,
        ),
        STEP,
    ),
    Attack(
        "inputs kept as attributes of the context",
        "linear_split_k",
        (
            ("ctx.save_for_backward(x, w)", "ctx.x, ctx.w = x, w"),
            ("x, w = ctx.saved_tensors", "x, w = ctx.x, ctx.w"),
        ),
        "inputs changed before the backward",
    ),
    Attack(
        "targets kept beside saved tensors, where autograd does not watch them",
        "loss/huber_mean_two_level",
        (
            ("ctx.save_for_backward(x, y)", "ctx.save_for_backward(x)\n        ctx.y = y.data"),
            ("x, y = ctx.saved_tensors", "(x,), y = ctx.saved_tensors, ctx.y"),
        ),
        "inputs changed before the backward",
    ),
    Attack(
        "graphs on a stack, of which the backward takes the topmost",
        "softmax_saved_output",
        (
            ("        ctx.save_for_backward(y)\n", "        STACK.append(y.detach())\n"),
            ("        (y,) = ctx.saved_tensors\n", "        y = STACK[-1]\n"),
            (None, "\n\nSTACK = []\n"),
        ),
        LATER,
    ),
    Attack(
        "a seed that moves on after 300 backwards",
        "dropout_sampling/dropout_philox_seed_replay",
        (
            (
                "        return apply_mask(dy.contiguous(), ctx.p, ctx.seed), None, None\n",
                "        CALLS.append(1)\n"
                "        later = len(CALLS) // 300\n"
                "        return apply_mask(dy.contiguous(), ctx.p, ctx.seed + later), None, None\n",
            ),
            (None, "\n\nCALLS = []\n"),
        ),
        "after many calls",
    ),
    Attack(
        "an answer that is halved once 200 calls were made",
        "rms_norm_tree",
        (
            (
                "        x, w = ctx.saved_tensors\n",
                "        x, w = ctx.saved_tensors\n        CALLS.append(None)\n",
            ),
            (
                "rms_norm_backward_kernel[(M,)](",
                "rms_norm_backward_kernel[(M if len(CALLS) < 200 else (M + 1) // 2,)](",
            ),
            (None, "\n\nCALLS = []\n"),
        ),
        "after many calls",
    ),
    Attack(
        "a table kept where autograd counts no versions",
        "rope_positional/rope_half_rotation_tables",
        (
            ("ctx.save_for_backward(cos, sin)", "ctx.tables = cos, sin"),
            ("cos, sin = ctx.saved_tensors", "cos, sin = ctx.tables"),
        ),
        "inputs changed before the backward",
    ),
]
