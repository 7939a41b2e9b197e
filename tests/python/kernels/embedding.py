"""y[i] = table[ids[i]] * scale: a data-dependent gather."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"V": 12, "N": 20, "D": 24}]


@triton.jit
def embedding_kernel(ids_ptr, table_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.load(ids_ptr + row)
    cols = tl.arange(0, BLOCK)
    mask = cols < d
    tl.store(y_ptr + row * d + cols, tl.load(table_ptr + token * d + cols, mask=mask) * scale, mask=mask)


@autodiff(inputs_require_grad=(1,))
def embedding(ids, table, scale=1.5):
    d = table.shape[1]
    y = torch.empty((*ids.shape, d), device=table.device, dtype=table.dtype)
    embedding_kernel[(ids.numel(),)](ids, table, y, d, scale, BLOCK=triton.next_power_of_2(d))
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    ids = torch.randint(0, dims["V"], (dims["N"],), device=device)
    return ids, torch.randn(dims["V"], dims["D"], device=device, dtype=dtype)


def reference(ids, table, scale=1.5):
    return table[ids] * scale
