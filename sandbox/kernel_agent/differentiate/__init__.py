"""The built-in differentiator: source to source, from a forward Triton file to the text of its backward.

    grad(stub).text                         the backward section for a function marked with @autodiff
    softmax_autograd = autodiff(softmax)    the differentiable stub itself
    gelu_bwd = grad(gelu)                   for a plain Triton function: a jit function
                                            (x, w, d_out) -> (d_x, d_w) for kernels of one's own; its text
                                            is gelu_bwd.source
    @rule("my_op")                          an adjoint for an operation that has none here
    def _(g, node, d): ...

One pass a module, in groups. A group uses the ones before it: `ir` (the graph), `prove` (addresses), `read`
(source to graph), `reverse` (adjoints), `schedule` (who writes what) and `write` (text). `plans` runs the
passes on one launch, `pipeline` on a file, down to its text, `offers` for what a tuner may ask, `function` on
a function without a launch; `operation` is the child's. scripts/house.py keeps the order.
"""

from .api import autodiff, grad, rule
from .ir.refusal import Refusal

__all__ = ["Refusal", "autodiff", "grad", "rule"]
