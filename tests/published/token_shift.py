"""y_t = x_{t-1} - x_t, zero before a sequence begins; padded or packed."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import input_guard, packed


@triton.heuristics({"IS_VARLEN": lambda args: args["cu_seqlens"] is not None})
@triton.autotune(
    configs=[triton.Config({}, num_warps=w, num_stages=s) for w in [1, 2, 4, 8] for s in [1, 2]], key=["BD"]
)
@triton.jit
def token_shift_fwd_kernel_short(
    x, y, cu_seqlens, T, D: tl.constexpr, BD: tl.constexpr, IS_VARLEN: tl.constexpr
):
    i_t, i_b = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    if IS_VARLEN:
        i_n = i_b
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int32), tl.load(cu_seqlens + i_n + 1).to(tl.int32)
        g_t = i_t + bos
        if g_t >= eos:
            return
        is_first_pos = i_t == 0
    else:
        g_t = i_b * T + i_t
        is_first_pos = i_t == 0

    base = g_t * D + o_d
    b_x = tl.load(x + base, mask=m_d)
    if is_first_pos:
        tl.store(y + base, -b_x, mask=m_d)
    else:
        b_s = tl.load(x + base - D, mask=m_d)
        tl.store(y + base, b_s - b_x, mask=m_d)


@autodiff(inputs_require_grad=(0,))
@input_guard
def token_shift(x, cu_seqlens=None):
    if cu_seqlens is not None:
        assert x.dim() == 3 and x.shape[0] == 1, "Input must be [1, total, D] with cu_seqlens"
        N, T = len(cu_seqlens) - 1, int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    else:
        N, T = x.shape[0], x.shape[1]
    D = x.shape[2]
    y = torch.empty_like(x)
    token_shift_fwd_kernel_short[(T, N)](
        x=x, y=y, cu_seqlens=cu_seqlens, T=T, D=D, BD=triton.next_power_of_2(D)
    )
    return y


SWEEP = [
    {"B": 3, "T": 6, "D": 20, "packed": False},
    {"B": 1, "T": 17, "D": 33, "packed": True},
]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["D"], device=device, dtype=dtype)
    return x, packed(dims["T"], device) if dims["packed"] and dims["B"] == 1 else None
