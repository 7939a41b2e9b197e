import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.autotune(
    [
        triton.Config({"BLOCK_Q": a, "BLOCK_KV": b}, num_warps=w, num_stages=s)
        for a in (64, 128)
        for b in (32, 64)
        for w in (4, 8)
        for s in (2, 3)
    ],
    key=["SEQ", "HD"],
)
@triton.jit
def gqa_kernel(
    query,
    key,
    value,
    output,
    softmax_scale,
    q_b: tl.constexpr,
    q_h: tl.constexpr,
    q_s: tl.constexpr,
    kv_b: tl.constexpr,
    kv_h: tl.constexpr,
    kv_s: tl.constexpr,
    SEQ,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // GROUP
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, HD)
    query_tile = tl.load(
        query + batch * q_b + head * q_h + rows[:, None] * q_s + dims[None, :],
        mask=(rows < SEQ)[:, None],
        other=0.0,
    )
    running_max = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros([BLOCK_Q], dtype=tl.float32)
    result = tl.zeros([BLOCK_Q, HD], dtype=tl.float32)
    kv_base = batch * kv_b + kv_head * kv_h
    for first in range(0, (block + 1) * BLOCK_Q, BLOCK_KV):
        cols = first + tl.arange(0, BLOCK_KV)
        key_tile = tl.load(
            key + kv_base + cols[None, :] * kv_s + dims[:, None], mask=(cols < SEQ)[None, :], other=0.0
        )
        logits = tl.dot(query_tile, key_tile) * softmax_scale
        logits = tl.where(rows[:, None] >= cols[None, :], logits, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        weights = tl.exp(logits - new_max[:, None])
        rescale = tl.exp(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        value_tile = tl.load(
            value + kv_base + cols[:, None] * kv_s + dims[None, :], mask=(cols < SEQ)[:, None], other=0.0
        )
        result = result * rescale[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile)
        running_max = new_max
    result = result / running_sum[:, None]
    tl.store(
        output + batch * q_b + head * q_h + rows[:, None] * q_s + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=(rows < SEQ)[:, None],
    )


@autodiff(inputs_require_grad=(0, 1, 2))
def grouped_query_attention(query, key, value):
    batch, heads, seq, hd = query.shape
    output = torch.empty_like(query)
    gqa_kernel[lambda m: (triton.cdiv(seq, m["BLOCK_Q"]), heads, batch)](
        query,
        key,
        value,
        output,
        hd**-0.5,
        *query.stride()[:3],
        *key.stride()[:3],
        seq,
        heads // key.shape[1],
        hd,
    )
    return output
