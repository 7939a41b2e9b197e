import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.heuristics({"BLOCK_D": lambda args: min(triton.next_power_of_2(args["d"]), 4096)})
@triton.jit
def _silu_and_mul_kernel(gateup_ptr, out_ptr, stride_in, stride_out, d, BLOCK_D: tl.constexpr):
    token_id = tl.program_id(0)
    gateup_ptr += token_id * stride_in
    out_ptr += token_id * stride_out
    for start in range(0, d, BLOCK_D):
        offs = start + tl.arange(0, BLOCK_D)
        m = offs < d
        gate = tl.load(gateup_ptr + offs, mask=m, other=0.0).to(tl.float32)
        up = tl.load(gateup_ptr + d + offs, mask=m, other=0.0).to(tl.float32)
        tl.store(out_ptr + offs, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=m)


@autodiff(inputs_require_grad=(0,))
def silu_and_mul(x):
    tokens, width = x.shape
    d = width // 2
    out = x.new_empty((tokens, d))
    _silu_and_mul_kernel[(tokens,)](x, out, x.stride(0), out.stride(0), d)
    return out
