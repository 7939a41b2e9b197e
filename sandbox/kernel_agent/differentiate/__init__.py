"""The built-in differentiator: source to source, from a forward Triton file to the text of its backward.

    grad(stub).text                         the backward section for a function marked with @autodiff
    softmax_autograd = autodiff(softmax)    the differentiable stub itself
    gelu_bwd = grad(gelu)                   for a plain Triton function: a jit function (x, w, d_out) -> (d_x, d_w) for kernels of
                                            one's own; its text is gelu_bwd.source
    @rule("my_op")                          an adjoint for an operation that has none here
    def _(g, node, d): ...

One pass a file: fence (refuse) -> normalise (with ops: the graph) -> loops (telescope) -> reverse (rules) -> stores -> owner ->
partials -> tape -> emit, and host and text for the stub. `compile` runs them; `op` is the child's operation.
`function` runs what applies of them on a function without a launch.
"""

from .api import autodiff, grad, rule
from .read.syntax_check import Refusal

__all__ = ["Refusal", "autodiff", "grad", "rule"]
