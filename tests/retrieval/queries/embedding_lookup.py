import torch, triton, triton.language as tl
from kernel_agent import autodiff


@triton.jit
def lookup(ids, table, out, D, B: tl.constexpr):
    i = tl.program_id(0)
    d = tl.arange(0, B)
    w = tl.load(ids + i)
    tl.store(out + i * D + d, tl.load(table + w * D + d, mask=d < D), mask=d < D)


@autodiff(inputs_require_grad=(1,))
def embed(ids, table):
    out = table.new_empty(*ids.shape, table.shape[1])
    lookup[(ids.numel(),)](ids, table, out, table.shape[1], triton.next_power_of_2(table.shape[1]))
    return out
