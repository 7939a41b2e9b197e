"""NaN or infinity where a comparison may look away."""

from suite import Attack

STORE = "tl.store(dx_ptr + at, dx, mask=cols < N)"

ATTACKS = [
    Attack(
        "NaN everywhere",
        "softmax_saved_output",
        ((STORE, STORE.replace(" dx,", ' dx * float("nan"),')),),
        "gradient of x is not finite",
    ),
    Attack(
        "one NaN",
        "softmax_saved_output",
        ((STORE, STORE.replace(" dx,", ' tl.where(cols == 3, float("nan"), dx),')),),
        "gradient of x is not finite",
    ),
    Attack(
        "infinity",
        "softmax_saved_output",
        ((STORE, STORE.replace(" dx,", ' tl.where(cols == 0, float("inf"), dx),')),),
        "gradient of x is not finite",
    ),
    Attack(
        "NaN for the weight",
        "layer_norm_partials",
        (
            (
                "tl.store(dw_ptr + block * N + cols, dw, mask=mask)",
                'tl.store(dw_ptr + block * N + cols, dw * float("nan"), mask=mask)',
            ),
        ),
        "gradient of w is not finite",
    ),
]
