"""Products of several sizes in one launch: tables of pointers, a persistent while loop over tiles."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"SIZES": [[16, 16, 32], [40, 24, 16]]}, {"SIZES": [[33, 17, 31], [1, 5, 3]]}]


@triton.jit
def grouped_kernel(
    a_table,
    b_table,
    c_table,
    like_ptr,
    sizes_ptr,
    groups,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    element = like_ptr.dtype.element_ty  # of every tensor in the tables
    tile = tl.program_id(0)
    done = 0
    for g in range(groups):
        m = tl.load(sizes_ptr + g * 3)
        n = tl.load(sizes_ptr + g * 3 + 1)
        k = tl.load(sizes_ptr + g * 3 + 2)
        tiles_n = tl.cdiv(n, BN)
        tiles = tl.cdiv(m, BM) * tiles_n
        while tile >= done and tile < done + tiles:
            a_ptr = tl.load(a_table + g).to(tl.pointer_type(element))
            b_ptr = tl.load(b_table + g).to(tl.pointer_type(element))
            c_ptr = tl.load(c_table + g).to(tl.pointer_type(element))
            rows = (tile - done) // tiles_n * BM + tl.arange(0, BM)
            cols = (tile - done) % tiles_n * BN + tl.arange(0, BN)
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for start in range(0, k, BK):
                inner = start + tl.arange(0, BK)
                a = tl.load(
                    a_ptr + rows[:, None] * k + inner[None, :],
                    mask=(rows[:, None] < m) & (inner[None, :] < k),
                    other=0.0,
                )
                b = tl.load(
                    b_ptr + inner[:, None] * n + cols[None, :],
                    mask=(inner[:, None] < k) & (cols[None, :] < n),
                    other=0.0,
                )
                acc += tl.dot(a, b, input_precision="ieee")
            tl.store(
                c_ptr + rows[:, None] * n + cols[None, :], acc, mask=(rows[:, None] < m) & (cols[None, :] < n)
            )
            tile += tl.num_programs(0)
        done += tiles


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def grouped_gemm(a0, b0, a1, b1):
    pairs = [(a0, b0), (a1, b1)]
    outs = [torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=a.dtype) for a, b in pairs]
    table = [
        [t.data_ptr() for t in column] for column in ([a for a, _ in pairs], [b for _, b in pairs], outs)
    ]
    a_table, b_table, c_table = (torch.tensor(row, device=a0.device, dtype=torch.int64) for row in table)
    sizes = torch.tensor(
        [[a.shape[0], b.shape[1], a.shape[1]] for a, b in pairs], device=a0.device, dtype=torch.int32
    )
    grouped_kernel[(2,)](a_table, b_table, c_table, a0, sizes, 2, BM=16, BN=16, BK=16)
    return tuple(outs)


def make_args(dims, device="cuda", dtype=torch.float32):
    made = []
    for m, n, k in dims["SIZES"]:
        made += [torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)]
    return tuple(made)


def reference(a0, b0, a1, b1):
    return a0 @ b0, a1 @ b1
