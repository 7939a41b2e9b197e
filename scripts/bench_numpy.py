"""Nearest rows by NumPy: the same product and selection as the store's search, timed for comparison.

scripts/bench.py drives it. Holds a matrix of random unit rows, and answers each line "search SECONDS" or
"product SECONDS" on stdin by the seconds of the least disturbed call within that time:

    OPENBLAS_NUM_THREADS=1 python scripts/bench_numpy.py --rows 500
"""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np


def measure(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the least disturbed call, repeated for `seconds`, at least three times."""
    best, first = float("inf"), time.perf_counter()
    start, calls = first, 0
    while calls < 3 or start - first < seconds:
        work()
        best = min(best, time.perf_counter() - start)
        start, calls = time.perf_counter(), calls + 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--topk", type=int, default=4)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((args.rows, args.dim), dtype=np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    query = matrix[args.rows // 2].copy()

    def search() -> np.ndarray:
        scores = matrix @ query
        best = np.argpartition(scores, -args.topk)[-args.topk :]
        return best[np.argsort(-scores[best])]

    if search()[0] != args.rows // 2:
        raise RuntimeError("the nearest row of a row is not itself")
    work = {"search": search, "product": lambda: matrix @ query}
    print("ready", flush=True)
    for line in sys.stdin:
        kind, seconds = line.split()
        print(f"{measure(work[kind], float(seconds)):.9f}", flush=True)


if __name__ == "__main__":
    main()
