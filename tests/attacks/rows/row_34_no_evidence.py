"""NaN where a mask discards what has no value: the float64 evaluation had NaN there too, and nothing was
compared."""

from suite import Attack

ROOT = "by_root = w * dy * 0.5 / tl.sqrt(safe)"
STORED = "tl.where(x > 0, by_root + by_log, 0.0)"
REASON = "gradient of x is not finite in the same places"

ATTACKS = [
    Attack(
        "the root of negative numbers",
        "positive_masked",
        ((ROOT, ROOT.replace("safe", "x")), (STORED, "by_root + tl.where(x > 0, by_log, 0.0)")),
        REASON,
    ),
    Attack(
        "a mask on the upstream, and not on what multiplies it",
        "positive_masked",
        (
            ("by_log = dy * (tl.log(safe) + 1)", "by_log = tl.where(x > 0, dy, 0.0) * (tl.log(x) + 1)"),
            (STORED, "tl.where(x > 0, by_root, 0.0) + by_log"),
        ),
        REASON,
    ),
    Attack(
        "lanes that nobody writes",
        "positive_written_once",
        (("dx, dw, n = torch.zeros_like(x)", "dx, dw, n = torch.empty_like(x)"),),
        REASON,
    ),
    Attack(
        "infinity in place of zero",
        "positive_masked",
        ((STORED, 'tl.where(x > 0, by_root + by_log, float("inf"))'),),
        REASON,
    ),
    Attack(
        "zero divided by zero",
        "positive_masked",
        ((STORED, "tl.where(x > 0, by_root + by_log, 0.0) * (tl.maximum(x, 0.0) / tl.maximum(x, 0.0))"),),
        REASON,
    ),
]
