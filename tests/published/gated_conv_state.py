"""y = g * conv(x), a short causal convolution that goes on from a state, if there is one, and may return the
next."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.op import silu
from ops.utils import input_guard


@triton.heuristics(
    {
        "HAS_BIAS": lambda args: args["bias"] is not None,
        "HAS_STATE": lambda args: args["state"] is not None,
        "STORE_FINAL": lambda args: args["final"] is not None,
    }
)
@triton.autotune(
    configs=[triton.Config({"BD": BD}, num_warps=w) for BD in [16, 32] for w in [2, 4]], key=["D", "W"]
)
@triton.jit
def gated_conv_fwd_kernel(
    x, g, y, weight, bias, state, final, T, D,
    W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, STORE_FINAL: tl.constexpr,
):  # fmt: skip
    i_d, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d = i_d * BD + tl.arange(0, BD)
    o_t = i_t * BT + tl.arange(0, BT)
    m_d = o_d < D
    m = (o_t < T)[:, None] & m_d[None, :]

    b_y = tl.zeros([BT, BD], dtype=tl.float32)
    for i_w in tl.static_range(W):
        o_x = o_t + (i_w - W + 1)
        b_w = tl.load(weight + o_d * W + i_w, mask=m_d, other=0.0).to(tl.float32)
        m_x = ((o_x >= 0) & (o_x < T))[:, None] & m_d[None, :]
        b_x = tl.load(x + (i_b * T + o_x[:, None]) * D + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        if HAS_STATE:
            # state[b, d, :] holds the W - 1 inputs before the first
            m_s = (o_x < 0)[:, None] & m_d[None, :]
            p_s = state + (i_b * D + o_d[None, :]) * (W - 1) + (o_x[:, None] + W - 1)
            b_x += tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)
        b_y += b_x * b_w[None, :]
    if HAS_BIAS:
        b_y += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "swish" or ACTIVATION == "silu":
        b_y = silu(b_y)
    b_g = tl.load(g + (i_b * T + o_t[:, None]) * D + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    tl.store(y + (i_b * T + o_t[:, None]) * D + o_d[None, :], (b_y * b_g).to(y.dtype.element_ty), mask=m)

    if STORE_FINAL:
        m_f = ((o_t >= T - W + 1) & (o_t < T))[:, None] & m_d[None, :]
        b_f = tl.load(x + (i_b * T + o_t[:, None]) * D + o_d[None, :], mask=m_f, other=0.0)
        p_f = final + (i_b * D + o_d[None, :]) * (W - 1) + (o_t[:, None] - (T - W + 1))
        tl.store(p_f, b_f, mask=m_f)


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
@input_guard
def gated_conv(x, g, weight, bias=None, state=None, activation="silu", output_final_state=False):
    B, T, D = x.shape
    W = weight.shape[1]
    assert T >= W - 1 or not output_final_state, "the next state would need inputs of this one"
    y = torch.empty_like(x)
    final = x.new_zeros(B, D, W - 1) if output_final_state else None
    BT = min(64, triton.next_power_of_2(max(16, T)))

    def grid(meta):
        return triton.cdiv(D, meta["BD"]), triton.cdiv(T, BT), B

    gated_conv_fwd_kernel[grid](x, g, y, weight, bias, state, final, T, D, W=W, BT=BT, ACTIVATION=activation)
    return y, final


SWEEP = [
    {"B": 2, "T": 24, "D": 24, "W": 4, "bias": True, "state": True, "final": True},
    {"B": 2, "T": 70, "D": 16, "W": 3, "bias": False, "state": False, "final": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D, W = (dims[name] for name in "BTDW")
    x, g = (torch.randn(B, T, D, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(D, W, device=device, dtype=dtype)
    bias = torch.randn(D, device=device, dtype=dtype) if dims["bias"] else None
    state = torch.randn(B, D, W - 1, device=device, dtype=dtype) if dims["state"] else None
    return (x, g, weight, bias, state), {"output_final_state": dims["final"]}
