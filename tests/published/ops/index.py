"""Where packed sequences begin and end, read by kernels."""

import triton
import triton.language as tl


@triton.jit
def bounds(cu_seqlens, i_n):
    """First row and length of sequence i_n."""
    bos = tl.load(cu_seqlens + i_n).to(tl.int32)
    eos = tl.load(cu_seqlens + i_n + 1).to(tl.int32)
    return bos, eos - bos
