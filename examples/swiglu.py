"""SwiGLU: silu(gate) * up, elementwise, for the two projections of a transformer's feed-forward layer."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n_elements
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, silu(gate) * up, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def swiglu(gate, up):
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape")
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    n_elements = out.numel()
    grid = lambda meta: (triton.cdiv(n_elements, meta["BLOCK"]),)
    swiglu_kernel[grid](gate, up, out, n_elements, BLOCK=1024)
    return out


SWEEP = [
    {"B": 8, "T": 2048, "F": 8192},
    {"B": 4, "T": 1024, "F": 11008},
    {"B": 3, "T": 511, "F": 1000},
    {"B": 16, "T": 4096, "F": 14336, "required": False},
]


def make_args(dims, device="cuda", dtype=torch.float16):
    shape = (dims["B"], dims["T"], dims["F"])
    gate = torch.randn(shape, device=device, dtype=dtype)
    up = torch.randn(shape, device=device, dtype=dtype)
    return gate, up
