"""What torch's autograd computes with where it differentiates an operation of the stub.

A stub's kernels are the candidate's work, its torch operations are not: autograd's own formulas for them are
honest of any backward, where autograd's engine runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

# Of two the larger or the smaller one, and half for each where they are equal.
_CHOSEN = "div eq ge gt le lt masked_fill_ where"
# By the operation's name. None of operations that are honest of a candidate's own backward and whose formula
# is not, as an index, which is differentiated by a scatter: it might be differentiated there.
_FORMULAS = {
    "_log_softmax": "_log_softmax_backward_data",
    "_softmax": "_softmax_backward_data",
    "_to_copy": "_to_copy",
    "abs": "mul sgn",
    "add": "mul sum",
    "addcdiv": "div div_ mul neg",
    "addcmul": "mul",
    "addmm": "mm mul sum",
    "amax": "div eq mul sum",
    "amin": "div eq mul sum",
    "atan2": "eq masked_fill mul neg reciprocal",
    "baddbmm": "bmm mul",
    "binary_cross_entropy_with_logits": "div_ mul sigmoid sub",
    "bmm": "bmm",
    "clamp": "ge le logical_and_ where",
    "cos": "mul neg sin",
    "cummax": "scatter_add",
    "cummin": "scatter_add",
    "cumprod": "bitwise_and_ bitwise_not cumprod cumsum div eq gather logical_and_ "
    "masked_fill masked_fill_ max mul ne relu_ scatter_ sub where",
    "cumsum": "cumsum",
    "div": "div mul neg sum",
    "embedding": "embedding_dense_backward",
    "erf": "exp mul neg pow",
    "exp": "mul",
    "exp2": "mul",
    "expm1": "mul",
    "gather": "scatter_add",
    "hypot": "div mul",
    "lerp": "mul sub sub_",
    "linalg_vector_norm": "div eq masked_fill_ mul",
    "log": "div",
    "log10": "div mul",
    "log1p": "div",
    "log2": "div mul",
    "logcumsumexp": "abs exp gt log logcumsumexp lt sub where",
    "logsumexp": "exp mul sub",
    "masked_fill": "masked_fill",
    "max": "div eq isnan logical_and logical_or_ mul scatter sum",
    "maximum": _CHOSEN,
    "mean": "div",
    "median": "scatter",
    "min": "div eq isnan logical_and logical_or_ mul scatter sum",
    "minimum": _CHOSEN,
    "mm": "mm",
    "mul": "mul sum",
    "nan_to_num": "abs eq mul ne",
    "neg": "neg",
    "pow": "mul pow",
    "prod": "cumprod mul",
    "reciprocal": "mul neg",
    "relu": "threshold_backward",
    "roll": "roll",
    "rsqrt": "mul pow",
    "rsub": "mul neg sum",
    "scatter": "gather scatter",
    "scatter_add": "gather",
    "sin": "cos mul",
    "sort": "scatter",
    "sqrt": "div mul",
    "std": "div eq masked_fill_ mean mul sub",
    "sub": "mul neg sum",
    "topk": "scatter",
    "tril": "tril",
    "triu": "triu",
    "var": "mean mul sub",
    "var_mean": "mean mul sub",
    "where": "where",
}
# Sums and casts are honest of anybody (agent/core/conduct.c), but for what flow.py says of some.
ACCUMULATION = frozenset({"aten::add", "aten::add_", "aten::sum", "aten::_to_copy"})


def engine_may(stub: Iterable[str]) -> frozenset[str]:
    """Operations that are no candidate's where autograd's engine does them: sums, and the stub's own
    differentiated, by their formula or by what torch has for each under one name (`gelu_backward`).

    The entry's forward may do no torch operation more often than the stub, so what the engine differentiates
    is the stub's.
    """
    return _may(frozenset(stub))


@cache
def _may(stub: frozenset[str]) -> frozenset[str]:
    may = set(ACCUMULATION)
    for full in stub:
        name = full.removeprefix("aten::").removesuffix("_").removesuffix("_forward")
        made = f"{name}_backward {_FORMULAS.get(name, '')}"
        may |= {f"aten::{one}" for one in made.split()}
    return frozenset(may)
