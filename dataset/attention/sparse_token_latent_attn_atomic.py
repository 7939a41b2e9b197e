"""Sparse attention to chosen tokens: all heads of a query share its list; a latent row is key and value.

Forward    for query t with its list of S tokens, j over the list:   P_hj = softmax_j(s <q_th, c_j>),
           o_th = sum_j P_hj c_j      (s = D^-1/2; an entry of -1 is no token; an empty list gives 0)
Backward   dS_hj = P_hj (<do_th, c_j> - delta_h),  delta_h = <do_th, o_th>,   dq_th = s sum_j dS_hj c_j,
           dc_j = sum over the queries that chose j, and all heads, of  s dS_hj q_th + P_hj do_th

Forward schedule: a program owns a query; its heads are the rows of a tile, so that gathered latents serve all
of them by dots, although every query gathers its own. An online softmax walks the list. lse is saved, and o
in float32: where one token has nearly all of P, dS is a difference of nearly equal numbers, and a delta of
rounded o would be all of it.
Backward schedule: the same owner, the same gathers. dq is its own. A row of dc is a sum over all queries that
chose the token: the lists are chosen anew each step and hold thousands of entries, so that to invert them
would mean sorting T S pairs, and the owner of a token would then gather q and do, H rows each, where the
query's owner has them at hand. So each tile of latents gets its gradient, both routes added and all heads
summed by two dots, with one atomic add of D numbers an entry into a buffer in fp32, and a kernel rounds it.

op: sparse_latent_attention
schedule: atomic_accumulate, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = 1.4426950408889634


def tiling(q):
    H, D = q.shape[2:]
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK_H": max(16, triton.next_power_of_2(H)),
        "BLOCK_S": 16 if q.dtype == torch.float32 else 32,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "num_warps": 8,
        "num_stages": 1,
    }


@triton.jit
def load_heads(ptr, h, d, H, D):
    mask = (h < H)[:, None] & (d < D)[None, :]
    return tl.load(ptr + h[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_heads(ptr, value, h, d, H, D):
    mask = (h < H)[:, None] & (d < D)[None, :]
    tl.store(ptr + h[:, None] * D + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def gather_latents(c_ptr, idx_ptr, start, S, d, D, BLOCK_S: tl.constexpr):
    """Tokens of a piece of the list, which of them are there, and their rows."""
    j = start + tl.arange(0, BLOCK_S)
    token = tl.load(idx_ptr + j, mask=j < S, other=-1)
    there = token >= 0
    mask = there[:, None] & (d < D)[None, :]
    return token, there, tl.load(c_ptr + token[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def sparse_latent_kernel(
    q_ptr, c_ptr, idx_ptr, o_ptr, exact_ptr, lse_ptr, T, N, H, D, S, scale_log2, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    c_ptr += query // T * N * D
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    q = load_heads(q_ptr + query * H * D, h, d, H, D)
    m = tl.full([BLOCK_H], -1e30, dtype=tl.float32)  # finite: a list may be empty
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    for start in range(0, S, BLOCK_S):
        _, there, c = gather_latents(c_ptr, idx_ptr + query * S, start, S, d, D, BLOCK_S)
        s = tl.dot(q, tl.trans(c), input_precision=PRECISION) * scale_log2
        s = tl.where(there[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p, rescale = tl.exp2(s - m_new[:, None]), tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(c.dtype), c, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    total = tl.where(total > 0, total, 1.0)
    o = acc / total[:, None]
    store_heads(o_ptr + query * H * D, o, h, d, H, D)
    store_heads(exact_ptr + query * H * D, o, h, d, H, D)
    tl.store(lse_ptr + query * H + h, m + tl.log2(total), mask=h < H)


def sparse_latent_forward(q, c, idx):
    (B, T, H, D), N, S = q.shape, c.shape[1], idx.shape[2]
    if c.shape[0] != B or c.shape[2] != D or idx.shape[:2] != (B, T):
        raise ValueError("c must have rows as wide as q's, and idx a list for each query")
    if D > 256 or H > 128 or max(16, H) * D > 16384:
        raise ValueError(f"{H} heads of {D} channels do not fit one tile")
    o, exact = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)
    lse = torch.empty((B, T, H), device=q.device, dtype=torch.float32)
    sparse_latent_kernel[(B * T,)](q, c, idx, o, exact, lse, T, N, H, D, S, D**-0.5 * LOG2E, **tiling(q))
    return o, exact, lse


@autodiff(inputs_require_grad=(0, 1))
def sparse_latent_attention(q, c, idx):
    """q: (B, T, H, D); c: (B, N, D); idx: int64 (B, T, S), tokens below N or -1."""
    return sparse_latent_forward(q.contiguous(), c.contiguous(), idx.contiguous())[0]


def reference(q, c, idx):
    B = c.shape[0]
    rows = c[torch.arange(B, device=c.device)[:, None, None], idx.clamp(min=0)]
    s = q.shape[3] ** -0.5 * torch.einsum("bthd,btsd->bths", q, rows)
    s = s.masked_fill((idx < 0)[:, :, None], -1e30)
    p = torch.softmax(s, dim=-1) * (idx >= 0)[:, :, None]
    return torch.einsum("bths,btsd->bthd", p, rows)


SWEEP = [
    {"B": 1, "T": 2048, "N": 4096, "H": 32, "D": 128, "S": 512},
    {"B": 2, "T": 509, "N": 1021, "H": 20, "D": 96, "S": 100},
]
SWEEP_CPU = [
    {"B": 1, "T": 7, "N": 30, "H": 4, "D": 20, "S": 21},
    {"B": 2, "T": 3, "N": 9, "H": 16, "D": 16, "S": 5},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, N, H, D, S = (dims[name] for name in ("B", "T", "N", "H", "D", "S"))
    q = torch.randn(B, T, H, D, device=device, dtype=dtype)
    c = torch.randn(B, N, D, device=device, dtype=dtype)
    idx = torch.randint(0, N, (B, T, S), device=device)
    return q, c, torch.where(torch.rand(B, T, S, device=device) < 0.1, -1, idx)


# ---- backward ----


@triton.jit
def sparse_latent_backward_kernel(
    q_ptr, c_ptr, idx_ptr, o_ptr, do_ptr, lse_ptr, dq_ptr, dc_ptr, T, N, H, D, S, scale, scale_log2,
    PRECISION: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    c_ptr += query // T * N * D
    dc_ptr += query // T * N * D
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    q = load_heads(q_ptr + query * H * D, h, d, H, D)
    do = load_heads(do_ptr + query * H * D, h, d, H, D)
    o = load_heads(o_ptr + query * H * D, h, d, H, D)
    delta = tl.sum(do.to(tl.float32) * o, axis=1)
    lse = tl.load(lse_ptr + query * H + h, mask=h < H, other=0.0)
    dq = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    for start in range(0, S, BLOCK_S):
        token, there, c = gather_latents(c_ptr, idx_ptr + query * S, start, S, d, D, BLOCK_S)
        s = tl.dot(q, tl.trans(c), input_precision=PRECISION) * scale_log2
        seen = there[None, :] & (h < H)[:, None]
        p = tl.where(seen, tl.exp2(tl.where(seen, s - lse[:, None], 0.0)), 0.0)
        ds = p * (tl.dot(do, tl.trans(c), input_precision=PRECISION) - delta[:, None]) * scale
        ds = ds.to(c.dtype)
        dq = tl.dot(ds, c, dq, input_precision=PRECISION)
        dc = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
        dc = tl.dot(tl.trans(p.to(do.dtype)), do, dc, input_precision=PRECISION)
        mask = there[:, None] & (d < D)[None, :]
        tl.atomic_add(dc_ptr + token[:, None] * D + d[None, :], dc, mask=mask)
    store_heads(dq_ptr + query * H * D, dq, h, d, H, D)


@triton.jit
def round_kernel(buffer_ptr, out_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(buffer_ptr + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=i < size)


class SparseLatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, c, idx):
        q, c, idx = q.contiguous(), c.contiguous(), idx.contiguous()
        o, exact, lse = sparse_latent_forward(q, c, idx)
        ctx.save_for_backward(q, c, idx, exact, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, c, idx, o, lse = ctx.saved_tensors
        (B, T, H, D), N, S, needs = q.shape, c.shape[1], idx.shape[2], ctx.needs_input_grad
        dq, dc = torch.empty_like(q), torch.empty_like(c)
        buffer = torch.zeros(c.shape, device=c.device, dtype=torch.float32)
        sparse_latent_backward_kernel[(B * T,)](
            q, c, idx, o, do.contiguous(), lse, dq, buffer, T, N, H, D, S, D**-0.5, D**-0.5 * LOG2E,
            **tiling(q),
        )  # fmt: skip
        if needs[1]:
            round_kernel[(triton.cdiv(dc.numel(), 1024),)](buffer, dc, dc.numel(), BLOCK=1024)
        return dq if needs[0] else None, dc if needs[1] else None, None


def sparse_latent_attention_autograd(q, c, idx):
    return SparseLatentAttention.apply(q, c, idx)
