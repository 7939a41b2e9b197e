import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.heuristics({"HAS_SCALE": lambda args: args["scale"] is not None})
@triton.autotune(configs=[triton.Config({}, num_warps=w) for w in [1, 2, 4, 8]], key=["BT"])
@triton.jit(do_not_specialize=["T"])
def chunk_local_cumsum_scalar_kernel(
    s, o, scale, T, H: tl.constexpr, BT: tl.constexpr, HAS_SCALE: tl.constexpr
):
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    p_s = tl.make_block_ptr(s + i_b * T * H + i_h, (T,), (H,), (i_t * BT,), (BT,), (0,))
    p_o = tl.make_block_ptr(o + i_b * T * H + i_h, (T,), (H,), (i_t * BT,), (BT,), (0,))
    b_s = tl.load(p_s, boundary_check=(0,)).to(tl.float32)
    b_o = tl.cumsum(b_s, axis=0)
    if HAS_SCALE:
        b_o *= scale
    tl.store(p_o, b_o.to(p_o.dtype.element_ty), boundary_check=(0,))


@autodiff(inputs_require_grad=(0,))
def chunk_local_cumsum(g, chunk_size=64, scale=None):
    B, T, H = g.shape
    o = torch.empty_like(g)
    chunk_local_cumsum_scalar_kernel[(triton.cdiv(T, chunk_size), B * H)](
        g, o, scale, T=T, H=H, BT=chunk_size
    )
    return o
