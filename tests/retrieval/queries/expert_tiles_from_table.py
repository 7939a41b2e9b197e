import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def fused_moe_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    topk_weights_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    N,
    K,
    num_valid,
    stride_am,
    stride_be,
    stride_bn,
    stride_cm,
    top_k: tl.constexpr,
    MUL_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    slot = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(sorted_token_ids_ptr + slot)
    valid = token < num_valid
    expert = tl.load(expert_ids_ptr + pid_m)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (token[:, None] // top_k) * stride_am + k[None, :]
    b_ptrs = b_ptr + expert * stride_be + n[None, :] * stride_bn + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(0, tl.cdiv(K, BLOCK_K)):
        rest = K - i * BLOCK_K
        a = tl.load(a_ptrs, mask=valid[:, None] & (k[None, :] < rest), other=0.0)
        b = tl.load(b_ptrs, mask=k[:, None] < rest, other=0.0)
        acc += tl.dot(a, b)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    if MUL_WEIGHT:
        acc = acc * tl.load(topk_weights_ptr + token, mask=valid, other=0)[:, None]
    c_ptrs = c_ptr + token[:, None] * stride_cm + n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=valid[:, None] & (n[None, :] < N))


@autodiff(inputs_require_grad=(0, 1, 2))
def moe_gemm(a, b, topk_weights, sorted_ids, expert_ids, top_k=2):
    E, N, K = b.shape
    c = a.new_empty(a.shape[0] * top_k, N)
    fused_moe_kernel[(expert_ids.numel(), triton.cdiv(N, 64))](
        a,
        b,
        c,
        topk_weights,
        sorted_ids,
        expert_ids,
        N,
        K,
        c.shape[0],
        a.stride(0),
        b.stride(0),
        b.stride(1),
        c.stride(0),
        top_k,
        True,
        64,
        64,
        32,
    )
    return c
