import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def drop(x_ptr, y_ptr, n_elements, p, seed, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.rand(seed, offsets) > p
    tl.store(y_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


@autodiff(inputs_require_grad=(0,))
def seeded_dropout(x, p: float = 0.5, seed: int = 123):
    y = torch.empty_like(x)
    drop[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK_SIZE"]),)](
        x, y, x.numel(), p, seed, BLOCK_SIZE=1024
    )
    return y
