"""What passes unchanged needs no kernel; what looks like it does."""

from suite import Attack

_COPY = "        dx = dy.clone(memory_format=torch.contiguous_format)\n"
_LAUNCH = "        rectified_backward_kernel[(triton.cdiv(n, 16),)](x, dx, n, BLOCK=16)\n"

ATTACKS = [
    Attack(
        "the upstream for both inputs, of which it is that of one",
        "half_squared_hands_on",
        (("        return dx, dy\n", "        return dy, dy\n"),),
        "alias: .*grad/x=upstream/0|the gradient of x is wrong",
    ),
    Attack(
        "the half that is squared by torch, too",
        "half_squared_hands_on",
        (
            (
                "            half_squared_backward_kernel[(M,)](x, dx,",
                "            dx[:, : N // 2] *= 2 * x[:, : N // 2]\n"
                "            half_squared_backward_kernel[(M,)](x, dx.clone(),",
            ),
        ),
        "decoy_kernel: 50% of the gradient of x is the same",
    ),
    Attack(
        "the half that is squared handed on, too",
        "half_squared_hands_on",
        (
            (
                "half_squared_backward_kernel[(M,)](x, dx, N,",
                "half_squared_backward_kernel[(M,)](x, dx.clone(), N,",
            ),
        ),
        "gradient of x is wrong",
    ),
    Attack(
        "zeros or the upstream, chosen by an index that torch makes of the input",
        "rectified_in_place",
        (
            (
                _COPY + _LAUNCH,
                "        both = torch.stack((torch.zeros_like(x), dy.reshape(x.shape)), 1)\n"
                "        at = (x > 0).long() + 2 * torch.arange(n, device=x.device).reshape(x.shape)\n"
                "        dx = both.reshape(-1)[at]\n"
                "        unused = dx.clone()\n" + _LAUNCH.replace("(x, dx,", "(x, unused,"),
            ),
        ),
        "decoy_kernel: .*the gradient of x is the same",
    ),
    Attack(
        "the same, and a kernel writes the zeros once more",
        "rectified_in_place",
        (
            (
                _COPY,
                "        both = torch.stack((torch.zeros_like(x), dy.reshape(x.shape)), 1)\n"
                "        at = (x > 0).long() + 2 * torch.arange(n, device=x.device).reshape(x.shape)\n"
                "        dx = both.reshape(-1)[at]\n",
            ),
        ),
        "decoy_kernel: .*the gradient of x is the same",
    ),
]
