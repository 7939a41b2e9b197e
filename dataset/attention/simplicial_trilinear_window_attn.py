"""Two-simplicial attention: a query attends to pairs of keys, from two short windows that end at it.

Forward    S_ijl = s sum_d q_id k_jd m_ld  over i - A < j <= i, i - B < l <= i, j, l >= 0  (m: second keys),
           P = softmax over the pairs (j, l),  o_i = sum_jl P_ijl (v_j * u_l)  (u: second values)
Backward   with dp_ijl = <do_i, v_j * u_l>:   dS = P * (dp - delta_i),  delta_i = sum_jl P_ijl dp_ijl,
           dq_i = s sum_jl dS_ijl k_j * m_l,
           dk_j = s sum_il dS_ijl q_i * m_l,    dv_j = sum_il P_ijl do_i * u_l,
           dm_l = s sum_ij dS_ijl q_i * k_j,    du_l = sum_ij P_ijl do_i * v_j

Forward schedule: for a fixed l, q_i * m_l is a query in its own right, and all pairs with this l are plain
attention. A program owns one query and a head: its first window is a tile of A keys, and it walks the B
places of the second window. A step is two products of a tile with a vector. An online softmax runs over all
pairs; lse is saved.
Backward schedule: every one of the five inputs that a pair reads has an owner, three ownerships in all. dq:
the query's owner, as forwards, in two walks, the first for delta. <do_i, o_i> is the same number but for the
rounding of o, which is large beside dS where all pairs of a query are about equal, and a window is short. dk
and dv: the owner of a key j walks the queries j .. j + A - 1 that see it, with the second window of each as a
tile. dm and du: the same with the windows exchanged, which is the same kernel with exchanged arguments, as S
is symmetric in its two keys. Work is N A B D in each; one kernel for all would have to add four of the
gradients by atomics, A B times each.

op: simplicial_attention
schedule: swap_owner, recompute_from_stats
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_rows(ptr, n, inside, d, D):
    mask = inside[:, None] & (d[None, :] < D)
    return tl.load(ptr + n[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_row(ptr, n, inside, d, D):
    return tl.load(ptr + n * D + d, mask=inside & (d < D), other=0.0)


@triton.jit
def simplicial_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, u_ptr, o_ptr, lse_ptr, N, D, A, B, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * N
    d, place = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    j = i - place
    seen = (place < A) & (j >= 0)
    q = load_row(q_ptr + head * D, i, i < N, d, D)
    k = load_rows(k_ptr + head * D, j, seen, d, D)
    v = load_rows(v_ptr + head * D, j, seen, d, D)
    top = -1e30
    total = 0.0
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for step in range(tl.minimum(B, i + 1)):
        m = load_row(m_ptr + head * D, i - step, i < N, d, D)
        u = load_row(u_ptr + head * D, i - step, i < N, d, D)
        s = tl.where(seen, tl.sum((q * m)[None, :] * k, axis=1) * scale, -float("inf"))
        top_new = tl.maximum(top, tl.max(s, axis=0))
        p = tl.exp(s - top_new)
        rescale = tl.exp(top - top_new)
        total = total * rescale + tl.sum(p, axis=0)
        acc = acc * rescale + u * tl.sum(p[:, None] * v, axis=0)
        top = top_new
    tl.store(o_ptr + (head + i) * D + d, acc / total, mask=d < D)
    tl.store(lse_ptr + head + i, top + tl.log(total))


def simplicial_forward(q, k, v, m, u, A, B):
    (batch, H, N, D), shapes = q.shape, {tensor.shape for tensor in (q, k, v, m, u)}
    if len(shapes) != 1:
        raise ValueError("q, both keys and both values must have one shape")
    if not (1 <= A <= 128 and 1 <= B <= 128) or D > 128:
        raise ValueError(f"windows of {A} and {B} keys of dimension {D} do not fit one tile")
    o, lse = torch.empty_like(q), q.new_empty((batch, H, N))
    BLOCK, BLOCK_D = triton.next_power_of_2(A), triton.next_power_of_2(D)
    simplicial_kernel[(N, batch * H)](
        q, k, v, m, u, o, lse, N, D, A, B, D**-0.5, BLOCK=BLOCK, BLOCK_D=BLOCK_D
    )
    return o, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def simplicial_attention(q, k, v, m, u, A, B):
    """q, k, v, m, u: (batch, heads, tokens, dim); A, B: keys of the first and of the second window."""
    return simplicial_forward(*(tensor.contiguous() for tensor in (q, k, v, m, u)), A, B)[0]


def reference(q, k, v, m, u, A, B):
    N, D = q.shape[-2:]
    gap = torch.arange(N, device=q.device)[:, None] - torch.arange(N, device=q.device)
    first, second = ((gap >= 0) & (gap < size) for size in (A, B))
    s = D**-0.5 * torch.einsum("bhid,bhjd,bhld->bhijl", q, k, m)
    s = s.masked_fill(~(first[:, :, None] & second[:, None, :]), -float("inf"))
    p = torch.softmax(s.flatten(-2), dim=-1).view(s.shape)
    return torch.einsum("bhijl,bhjd,bhld->bhid", p, v, u)


SWEEP = [
    {"batch": 1, "H": 8, "N": 2048, "A": 64, "B": 16, "D": 64},
    {"batch": 2, "H": 4, "N": 777, "A": 30, "B": 11, "D": 48},
]
SWEEP_CPU = [
    {"batch": 1, "H": 1, "N": 12, "A": 5, "B": 3, "D": 16},
    {"batch": 1, "H": 2, "N": 6, "A": 2, "B": 8, "D": 5},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["batch"], dims["H"], dims["N"], dims["D"])
    tensors = tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(5))
    return tensors, {"A": dims["A"], "B": dims["B"]}


# ---- backward ----


@triton.jit
def rebuild_p_dp(q, k, v, do, m_ptr, u_ptr, lse, seen, second, d, D, scale):
    """P and dp of a query with one second key and all first ones, and that second key."""
    m = load_row(m_ptr, second, second >= 0, d, D)
    u = load_row(u_ptr, second, second >= 0, d, D)
    s = tl.where(seen, tl.sum((q * m)[None, :] * k, axis=1) * scale, -float("inf"))
    return tl.exp(s - lse), tl.sum((do * u)[None, :] * v, axis=1), m


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, u_ptr, lse_ptr, do_ptr, delta_ptr, dq_ptr, N, D, A, B, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * N
    d, place = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    j = i - place
    seen = (place < A) & (j >= 0)
    q = load_row(q_ptr + head * D, i, i < N, d, D)
    do = load_row(do_ptr + head * D, i, i < N, d, D)
    lse = tl.load(lse_ptr + head + i)
    m_ptr += head * D
    u_ptr += head * D
    k = load_rows(k_ptr + head * D, j, seen, d, D)
    v = load_rows(v_ptr + head * D, j, seen, d, D)
    delta = 0.0
    total = 0.0
    for step in range(tl.minimum(B, i + 1)):
        p, dp, _ = rebuild_p_dp(q, k, v, do, m_ptr, u_ptr, lse, seen, i - step, d, D, scale)
        delta += tl.sum(p * dp, axis=0)
        total += tl.sum(p, axis=0)
    delta /= total  # 1 but for rounding
    tl.store(delta_ptr + head + i, delta)
    dq = tl.zeros([BLOCK_D], dtype=tl.float32)
    for step in range(tl.minimum(B, i + 1)):
        p, dp, m = rebuild_p_dp(q, k, v, do, m_ptr, u_ptr, lse, seen, i - step, d, D, scale)
        dq += m * tl.sum((p * (dp - delta))[:, None] * k, axis=0)
    tl.store(dq_ptr + (head + i) * D + d, dq * scale, mask=d < D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, u_ptr, lse_ptr, do_ptr, delta_ptr, dk_ptr, dv_ptr, N, D, A, B, scale,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key of the window of A; the window of B is a tile."""
    j = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * N
    d, place = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    k = load_row(k_ptr + head * D, j, j < N, d, D)
    v = load_row(v_ptr + head * D, j, j < N, d, D)
    dk = tl.zeros([BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i in range(j, tl.minimum(j + A, N)):
        second = i - place
        seen = (place < B) & (second >= 0)
        q = load_row(q_ptr + head * D, i, i < N, d, D)
        do = load_row(do_ptr + head * D, i, i < N, d, D)
        m = load_rows(m_ptr + head * D, second, seen, d, D)
        u = load_rows(u_ptr + head * D, second, seen, d, D)
        s = tl.where(seen, tl.sum((q * k)[None, :] * m, axis=1) * scale, -float("inf"))
        p = tl.exp(s - tl.load(lse_ptr + head + i))
        ds = p * (tl.sum((do * v)[None, :] * u, axis=1) - tl.load(delta_ptr + head + i))
        dk += q * tl.sum(ds[:, None] * m, axis=0)
        dv += do * tl.sum(p[:, None] * u, axis=0)
    tl.store(dk_ptr + (head + j) * D + d, dk * scale, mask=d < D)
    tl.store(dv_ptr + (head + j) * D + d, dv, mask=d < D)


class SimplicialAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, m, u, A, B):
        q, k, v, m, u = (tensor.contiguous() for tensor in (q, k, v, m, u))
        o, lse = simplicial_forward(q, k, v, m, u, A, B)
        ctx.save_for_backward(q, k, v, m, u, lse)
        ctx.A, ctx.B = A, B
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, m, u, lse = ctx.saved_tensors
        do, needs, A, B = do.contiguous(), ctx.needs_input_grad, ctx.A, ctx.B
        batch, H, N, D = q.shape
        grid = (N, batch * H)
        BLOCK_A, BLOCK_B, BLOCK_D = (triton.next_power_of_2(size) for size in (A, B, D))
        dq, dk, dv, dm, du = (torch.empty_like(tensor) for tensor in (q, k, v, m, u))
        delta = torch.empty_like(lse)  # made with dq, for the keys too
        query_kernel[grid](
            q, k, v, m, u, lse, do, delta, dq, N, D, A, B, D**-0.5, BLOCK=BLOCK_A, BLOCK_D=BLOCK_D
        )
        if needs[1] or needs[2]:
            key_kernel[grid](
                q, k, v, m, u, lse, do, delta, dk, dv, N, D, A, B, D**-0.5, BLOCK=BLOCK_B, BLOCK_D=BLOCK_D
            )
        if needs[3] or needs[4]:
            key_kernel[grid](
                q, m, u, k, v, lse, do, delta, dm, du, N, D, B, A, D**-0.5, BLOCK=BLOCK_A, BLOCK_D=BLOCK_D
            )
        grads = zip((dq, dk, dv, dm, du), needs, strict=False)
        return *(grad if needed else None for grad, needed in grads), None, None


def simplicial_attention_autograd(q, k, v, m, u, A, B):
    return SimplicialAttention.apply(q, k, v, m, u, A, B)
