import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def bag_kernel(values, offsets, weights, table, out, D, BLOCK_D: tl.constexpr):
    bag = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = d < D
    begin = tl.load(offsets + bag)
    end = tl.load(offsets + bag + 1)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for p in range(begin, end):
        idx = tl.load(values + p)
        w = tl.load(weights + p)
        acc += w * tl.load(table + idx * D + d, mask=ok, other=0.0)
    tl.store(out + bag * D + d, acc, mask=ok)


@autodiff(inputs_require_grad=(2, 3))
def embedding_bag(values, offsets, weights, table):
    n, D = offsets.numel() - 1, table.shape[1]
    out = table.new_empty(n, D)
    bag_kernel[(n, triton.cdiv(D, 128))](values, offsets, weights, table, out, D, BLOCK_D=128)
    return out
