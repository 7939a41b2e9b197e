"""Nearest rows by NumPy: the same product and selection as the store's search, timed for comparison.

Prints one JSON list, an entry per matrix size. Run by the search benchmark, or alone:

    OPENBLAS_NUM_THREADS=1 python scripts/bench_numpy.py --rows 500,100000
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

BUDGET_SECONDS = 0.5


def measure(work: Callable[[], object]) -> float:
    """Seconds of the least disturbed call, over about BUDGET_SECONDS, after one call to warm up."""
    start = time.perf_counter()
    work()
    once = time.perf_counter() - start
    times = []
    for _ in range(min(501, max(5, int(BUDGET_SECONDS / max(once, 1e-9))))):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def bench(rows: int, dim: int, topk: int) -> dict[str, float]:
    """Time of the product alone, and with the best `topk` selected and sorted, over a (rows, dim) float32 matrix."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((rows, dim), dtype=np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    query = matrix[rows // 2].copy()

    def search() -> np.ndarray:
        scores = matrix @ query
        best = np.argpartition(scores, -topk)[-topk:]
        return best[np.argsort(-scores[best])]

    if search()[0] != rows // 2:
        raise RuntimeError("the nearest row of a row is not itself")
    return {
        "rows": rows,
        "search_ms": measure(search) * 1e3,
        "product_ms": measure(lambda: matrix @ query) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="500,100000,1000000", help="comma-separated matrix sizes")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--topk", type=int, default=4)
    args = parser.parse_args()
    print(json.dumps([bench(int(rows), args.dim, args.topk) for rows in args.rows.split(",")]))


if __name__ == "__main__":
    main()
