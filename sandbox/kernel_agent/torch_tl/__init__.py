"""A torch-backed evaluator of Triton kernels, so that `torch.autograd` can differentiate them.

A kernel's Python source is rewritten (`instrument`) so that every operation goes through a `Runtime`, as it
would go through Triton's own code generator. Types, promotions and broadcasting are decided by Triton's
`TritonSemantic`; the operations that it would emit as IR are performed at once on torch tensors by `Builder`.
Names used throughout:

  handle   what Triton calls an IR value: here a tensor whose leading axis is the batch of programs (length 1
           when all programs agree, else the number of programs evaluated together), followed by the block's
           shape
  memory   flat tensors standing for storages; loads are differentiable gathers, stores functional scatters
  group    programs evaluated together; a branch on which they disagree splits the group and starts its
           parts again
  exact    precision in which every float is a float64 and float casts do not round; `native` rounds as the
           kernel says

Sub-modules: handles, memory, builder, reductions, runtime, instrument, launch.
"""

from kernel_agent.torch_tl.handles import EXACT, NATIVE, KernelError
from kernel_agent.torch_tl.launch import Launch, run_launch
from kernel_agent.torch_tl.memory import Cell, Memory

__all__ = ["EXACT", "NATIVE", "Cell", "KernelError", "Launch", "Memory", "run_launch"]
