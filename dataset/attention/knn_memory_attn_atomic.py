"""Attention of each token to K entries that were looked up for it in a large memory, as its neighbours.

Forward    token t, head h, entries n_c = index[h, t, c]:  S_c = s <q_t, k_{n_c}>,  P = softmax over c,
           o_t = sum_c P_c v_{n_c};  an index of -1 stands for none, and o = 0 where all are
Backward   dS_c = P_c (<do_t, v_{n_c}> - delta_t),  delta_t = sum_c P_c <do_t, v_{n_c}>,
           dq_t = s sum_c dS_c k_{n_c},
           dk_n = s sum of dS_c q_t,  dv_n = sum of P_c do_t, over all (t, c) with n_c = n

Forward schedule: a program owns (token, head) and gathers its K keys and values, a row each, into two tiles.
No two tokens have the same keys, so scores are sums over channels, not dots; the row of scores is whole in
registers and softmax is plain.
Backward schedule: the same program has, after one gather and one rebuild of P, all that its token gives: dq,
which is its own, and K rows each for dk and dv, which go where the index says. They are added by atomics,
into fp32: a memory has many more entries than a token looks up, so it is rare that two programs want one
address at a time, and no order of programs would make the destinations local. Inverting the index by a sort,
so that an entry gathers, pays where entries are wanted by many; here most lists would be empty or short, and
q, do and the statistics would be gathered in random order instead. In short types a last kernel rounds the
sums.

op: memory_attention
schedule: atomic_accumulate, row_reduce_correct
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_entries(ptr, entry, d, D):
    """The rows that are looked up, 0 for none."""
    mask = (entry[:, None] >= 0) & (d[None, :] < D)
    return tl.load(ptr + entry[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def entry_weights(q, k, entry, scale):
    """P of a token's entries; all 0 where there is none."""
    s = tl.where(entry >= 0, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))
    e = tl.exp(s - tl.maximum(tl.max(s, axis=0), -1e30))
    total = tl.sum(e, axis=0)
    return e / tl.where(total > 0.0, total, 1.0)


@triton.jit
def memory_kernel(
    q_ptr, k_ptr, v_ptr, index_ptr, o_ptr, T, S, K, D, scale, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    row = head * T + tl.program_id(0)
    c, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    entry = tl.load(index_ptr + row * K + c, mask=c < K, other=-1)
    q = tl.load(q_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    p = entry_weights(q, load_entries(k_ptr + head * S * D, entry, d, D), entry, scale)
    o = tl.sum(p[:, None] * load_entries(v_ptr + head * S * D, entry, d, D), axis=0)
    tl.store(o_ptr + row * D + d, o.to(o_ptr.dtype.element_ty), mask=d < D)


def blocks_of(K, D):
    return {"BLOCK_K": triton.next_power_of_2(K), "BLOCK_D": triton.next_power_of_2(D)}


@autodiff(inputs_require_grad=(0, 1, 2))
def memory_attention(q, k, v, index):
    """q: (heads, T, dim); k, v: (heads, S, dim), the memory; index: int64 (heads, T, K), from -1 to S - 1."""
    q, k, v, index = q.contiguous(), k.contiguous(), v.contiguous(), index.contiguous()
    (H, T, D), S, K = q.shape, k.shape[1], index.shape[2]
    if k.shape != (H, S, D) or v.shape != k.shape or index.shape != (H, T, K) or K == 0:
        raise ValueError("k, v or index do not fit q, or nothing is looked up")
    if K > 128 or D > 128:
        raise ValueError(f"{K} entries of dimension {D} do not fit one tile")
    o = torch.empty_like(q)
    memory_kernel[(T, H)](q, k, v, index, o, T, S, K, D, D**-0.5, **blocks_of(K, D))
    return o


def reference(q, k, v, index):
    H, (T, K) = q.shape[0], index.shape[1:]
    head = torch.arange(H, device=q.device)[:, None, None].expand(H, T, K)
    known, at = index >= 0, index.clamp(min=0)
    s = (q.shape[-1] ** -0.5 * (q[:, :, None] * k[head, at]).sum(-1)).masked_fill(~known, -1e30)
    return ((torch.softmax(s, dim=-1) * known)[..., None] * v[head, at]).sum(2)


SWEEP = [
    {"H": 8, "T": 4096, "S": 65536, "K": 32, "D": 64},
    {"H": 4, "T": 3001, "S": 50021, "K": 20, "D": 128},
]
SWEEP_CPU = [
    {"H": 2, "T": 9, "S": 40, "K": 6, "D": 16},
    {"H": 1, "T": 20, "S": 7, "K": 3, "D": 11},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    H, T, S, K, D = (dims[key] for key in ("H", "T", "S", "K", "D"))
    q = torch.randn(H, T, D, device=device, dtype=dtype)
    k, v = (torch.randn(H, S, D, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, torch.randint(-1, S, (H, T, K), device=device)


# ---- backward ----


@triton.jit
def memory_backward_kernel(
    q_ptr, k_ptr, v_ptr, index_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, T, S, K, D, scale,
    MEMORY: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = head * T + tl.program_id(0)
    c, d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    entry = tl.load(index_ptr + row * K + c, mask=c < K, other=-1)
    q = tl.load(q_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    k = load_entries(k_ptr + head * S * D, entry, d, D)
    v = load_entries(v_ptr + head * S * D, entry, d, D)
    p = entry_weights(q, k, entry, scale)
    dp = tl.sum(do[None, :] * v, axis=1)
    ds = p * (dp - tl.sum(p * dp, axis=0)) * scale  # the row's delta, without o
    dq = tl.sum(ds[:, None] * k, axis=0)
    tl.store(dq_ptr + row * D + d, dq.to(dq_ptr.dtype.element_ty), mask=d < D)
    if MEMORY:
        mask = (entry[:, None] >= 0) & (d[None, :] < D)
        at = head * S * D + entry[:, None] * D + d[None, :]
        tl.atomic_add(dk_ptr + at, ds[:, None] * q[None, :], mask=mask, sem="relaxed")
        tl.atomic_add(dv_ptr + at, p[:, None] * do[None, :], mask=mask, sem="relaxed")


@triton.jit
def round_kernel(sum_ptr, grad_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(sum_ptr + offs, mask=offs < n_elements, other=0.0)
    tl.store(grad_ptr + offs, total.to(grad_ptr.dtype.element_ty), mask=offs < n_elements)


class MemoryAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, index):
        q, k, v, index = q.contiguous(), k.contiguous(), v.contiguous(), index.contiguous()
        ctx.save_for_backward(q, k, v, index)
        return memory_attention(q, k, v, index)

    @staticmethod
    def backward(ctx, do):
        q, k, v, index = ctx.saved_tensors
        (H, T, D), S, K, needs = q.shape, k.shape[1], index.shape[2], ctx.needs_input_grad
        memory = needs[1] or needs[2]
        dq = torch.empty_like(q)
        dk, dv = (
            torch.zeros(k.shape if memory else (0,), device=k.device, dtype=torch.float32) for _ in range(2)
        )
        memory_backward_kernel[(T, H)](
            q, k, v, index, do.contiguous(), dq, dk, dv, T, S, K, D, D**-0.5, MEMORY=memory, **blocks_of(K, D)
        )
        if memory and k.dtype != torch.float32:
            sums, (dk, dv) = (dk, dv), (torch.empty_like(k), torch.empty_like(v))
            for total, grad in zip(sums, (dk, dv), strict=True):
                round_kernel[(triton.cdiv(k.numel(), 1024),)](total, grad, k.numel(), BLOCK=1024)
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, None


def memory_attention_autograd(q, k, v, index):
    return MemoryAttention.apply(q, k, v, index)
