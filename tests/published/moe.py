"""Experts over tokens sorted by expert: blocks of sorted ids, an expert a block, routed weights applied."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def fused_moe_kernel(
    a_ptr, b_ptr, c_ptr, topk_weights_ptr, sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded,
    N, K, EM, num_valid_tokens,
    stride_am, stride_ak, stride_be, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    MUL_ROUTED_WEIGHT: tl.constexpr, top_k: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(axis=0)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    pid_m = pid // num_pid_n
    pid_n = pid % num_pid_n
    if pid_m * BLOCK_SIZE_M >= tl.load(num_tokens_post_padded):
        return
    offs_token_id = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M).to(tl.int64)
    offs_token = tl.load(sorted_token_ids_ptr + offs_token_id)
    token_mask = offs_token < num_valid_tokens
    off_experts = tl.load(expert_ids_ptr + pid_m).to(tl.int64)

    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N).to(tl.int64)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (offs_token[:, None] // top_k * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + off_experts * stride_be + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_SIZE_K)):
        a = tl.load(a_ptrs, mask=token_mask[:, None] & (offs_k[None, :] < K - k * BLOCK_SIZE_K), other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_SIZE_K, other=0.0)
        accumulator += tl.dot(a, b)
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk
    if MUL_ROUTED_WEIGHT:
        moe_weight = tl.load(topk_weights_ptr + offs_token, mask=token_mask, other=0)
        accumulator = accumulator * moe_weight[:, None]

    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * offs_token[:, None] + stride_cn * offs_cn[None, :]
    tl.store(c_ptrs, accumulator, mask=token_mask[:, None] & (offs_cn[None, :] < N))


def moe_align_block_size(topk_ids, block_size, num_experts):
    flat = topk_ids.reshape(-1)
    sorted_ids, expert_ids = [], []
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().reshape(-1)
        pad = -len(mine) % block_size
        sorted_ids.append(torch.cat([mine, mine.new_full((pad,), flat.numel())]))
        expert_ids += [expert] * ((len(mine) + pad) // block_size)
    ids = torch.cat(sorted_ids).to(torch.int32)
    experts = torch.tensor(expert_ids, dtype=torch.int32, device=flat.device)
    return ids, experts, torch.tensor([len(ids)], dtype=torch.int32, device=flat.device)


@autodiff(inputs_require_grad=(0, 1, 2))
def fused_moe(x, w, topk_weights, topk_ids, mul_routed_weight=True):
    tokens, K = x.shape
    E, _, N = w.shape
    top_k = topk_ids.shape[1]
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16}
    ids, experts, padded = moe_align_block_size(topk_ids, config["BLOCK_SIZE_M"], E)
    c = torch.zeros(tokens * top_k, N, device=x.device, dtype=x.dtype)
    EM = ids.shape[0]
    grid = lambda META: (triton.cdiv(EM, META["BLOCK_SIZE_M"]) * triton.cdiv(N, META["BLOCK_SIZE_N"]),)
    fused_moe_kernel[grid](
        x, w, c, topk_weights, ids, experts, padded, N, K, EM, tokens * top_k,
        x.stride(0), x.stride(1), w.stride(0), w.stride(1), w.stride(2), c.stride(0), c.stride(1),
        MUL_ROUTED_WEIGHT=mul_routed_weight, top_k=top_k, **config,
    )  # fmt: skip
    return c.view(tokens, top_k, N)


SWEEP = [{"T": 12, "E": 3, "K": 24, "N": 20, "routed": True}]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    T, E, K, N = (dims[name] for name in "TEKN")
    x = torch.randn(T, K, device=device, dtype=dtype)
    w = torch.randn(E, K, N, device=device, dtype=dtype)
    weights = torch.rand(T, 2, device=device, dtype=dtype)
    return x, w, weights, torch.randint(0, E, (T, 2), device=device), dims["routed"]
