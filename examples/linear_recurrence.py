"""A gated linear recurrence with a learned decay per channel:

    h[t] = sigmoid(decay) * h[t-1] + sigmoid(gate[t]) * x[t],    h[-1] = h0 or 0

`gate` and `h0` may be None (no gate, zero start). A program walks the time axis for a block of channels.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_D": 64}, num_warps=2),
        triton.Config({"BLOCK_D": 128}, num_warps=4),
        triton.Config({"BLOCK_D": 256}, num_warps=4),
    ],
    key=["T", "D"],
)
@triton.heuristics(
    {
        "HAS_GATE": lambda args: args["gate_ptr"] is not None,
        "HAS_H0": lambda args: args["h0_ptr"] is not None,
    }
)
@triton.jit
def linear_recurrence_kernel(
    x_ptr, decay_ptr, gate_ptr, h0_ptr, h_ptr,
    T, D,
    HAS_GATE: tl.constexpr, HAS_H0: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = cols < D
    a = tl.sigmoid(tl.load(decay_ptr + cols, mask=mask, other=0.0).to(tl.float32))
    if HAS_H0:
        h = tl.load(h0_ptr + b * D + cols, mask=mask, other=0.0).to(tl.float32)
    else:
        h = tl.zeros([BLOCK_D], dtype=tl.float32)
    for t in range(T):
        offs = (b * T + t) * D + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            x = x * tl.sigmoid(tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32))
        h = a * h + x
        tl.store(h_ptr + offs, h, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def linear_recurrence(x, decay, gate=None, h0=None):
    """x, gate: (batch, time, channels); decay: (channels,); h0: (batch, channels)."""
    B, T, D = x.shape
    x = x.contiguous()
    gate = None if gate is None else gate.contiguous()
    h0 = None if h0 is None else h0.contiguous()
    h = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(D, meta["BLOCK_D"]), B)
    linear_recurrence_kernel[grid](x, decay, gate, h0, h, T, D)
    return h


SWEEP = [
    {"B": 8, "T": 2048, "D": 1024, "gate": True, "h0": False},
    {"B": 4, "T": 1024, "D": 2048, "gate": True, "h0": True},
    {"B": 5, "T": 333, "D": 500, "gate": False, "h0": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D = dims["B"], dims["T"], dims["D"]
    x = torch.randn(B, T, D, device=device, dtype=dtype)
    decay = 2 + torch.randn(D, device=device, dtype=dtype)
    gate = torch.randn(B, T, D, device=device, dtype=dtype) if dims["gate"] else None
    h0 = torch.randn(B, D, device=device, dtype=dtype) if dims["h0"] else None
    return (x, decay), {"gate": gate, "h0": h0}
