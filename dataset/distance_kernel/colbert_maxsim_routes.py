"""Late interaction: the score of a document is the sum, over a query's tokens, of the best token match.

Forward    t_bci = the first t with the largest <Q_bi, D_ct>,  s_bc = sum_i <Q_bi, D_c,t_bci>
Backward   t is piecewise constant:
           dQ_bi = sum_c ds_bc D_c,t_bci,   dD_ct = sum_{b, i: t_bci = t} ds_bc Q_bi

Forward schedule: a program owns one (query, document), multiplies tiles of tokens, and keeps the largest
product of each query token and its place. Similarities are not stored, places are: one number where a
similarity matrix has as many as the document has tokens.
Backward schedule: the saved places make the problem linear and sparse. A query's tokens gather: their owner
walks the documents and reads just the rows that won. A document's tokens are not told who chose them, but
lists need not be inverted: the owner of a tile of them walks the places of all queries and compares, and the
comparison, a matrix of zeros and ones, multiplies the query's tokens in a dot. Each gradient is stored once.

op: maxsim
schedule: index_or_seed_replay, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(q.shape[2]))
    return {"PRECISION": PRECISION, "BLOCK_I": 32, "BLOCK_T": 32, "BLOCK_D": BLOCK_D}


@triton.jit
def load_tokens(ptr, first, rows, d, R, D):
    mask = (rows[:, None] < R) & (d[None, :] < D)
    return tl.load(ptr + (first.to(tl.int64) * R + rows[:, None]) * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tokens(ptr, value, first, rows, d, R, D):
    mask = (rows[:, None] < R) & (d[None, :] < D)
    offs = (first.to(tl.int64) * R + rows[:, None]) * D + d[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def maxsim_kernel(
    q_ptr, d_ptr, s_ptr, place_ptr, C, I, T, D,
    PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(1), tl.program_id(0)
    feature = tl.arange(0, BLOCK_D)
    pair = b.to(tl.int64) * C + c
    score = tl.zeros([BLOCK_I], dtype=tl.float32)
    for start in range(0, I, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        q = load_tokens(q_ptr, b, i, feature, I, D)
        best = tl.full([BLOCK_I], -float("inf"), dtype=tl.float32)
        place = tl.zeros([BLOCK_I], dtype=tl.int32)
        for t_start in range(0, T, BLOCK_T):
            t = t_start + tl.arange(0, BLOCK_T)
            doc = load_tokens(d_ptr, c, t, feature, T, D)
            match = tl.dot(q, tl.trans(doc), input_precision=PRECISION)
            match = tl.where(t[None, :] < T, match, -float("inf"))
            largest = tl.max(match, axis=1)
            better = largest > best
            place = tl.where(better, t_start + tl.argmax(match, axis=1), place)
            best = tl.where(better, largest, best)
        score += tl.where(i < I, best, 0.0)
        tl.store(place_ptr + pair * I + i, place, mask=i < I)
    tl.store(s_ptr + pair, tl.sum(score, axis=0))


def maxsim_forward(q, d):
    (B, I, D), (C, T) = q.shape, d.shape[:2]
    if d.shape[2] != D or not 1 <= D <= 128 or T == 0:
        raise ValueError("q and d must have the same features, at most 128, and documents a token")
    s = torch.empty((B, C), device=q.device, dtype=torch.float32)
    place = torch.empty((B, C, I), device=q.device, dtype=torch.int32)
    maxsim_kernel[(C, B)](q, d, s, place, C, I, T, D, **tiling(q))
    return s, place


@autodiff(inputs_require_grad=(0, 1))
def maxsim(q, d):
    """q: (B, I, D), B queries of I tokens; d: (C, T, D), C documents of T tokens; gives (B, C), float32."""
    return maxsim_forward(q.contiguous(), d.contiguous())[0]


def reference(q, d):
    return torch.einsum("bik,ctk->bcit", q, d).max(-1).values.sum(-1)


SWEEP = [{"B": 64, "C": 64, "I": 32, "T": 180, "D": 128}, {"B": 17, "C": 50, "I": 45, "T": 501, "D": 96}]
SWEEP_CPU = [{"B": 4, "C": 5, "I": 7, "T": 19, "D": 16}, {"B": 2, "C": 3, "I": 35, "T": 40, "D": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, C, I, T, D = (dims[name] for name in ("B", "C", "I", "T", "D"))
    q = torch.randn(B, I, D, device=device, dtype=dtype)
    return q, torch.randn(C, T, D, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def query_kernel(d_ptr, place_ptr, ds_ptr, dq_ptr, C, I, T, D, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    feature = tl.arange(0, BLOCK_D)
    mask = (i[:, None] < I) & (feature[None, :] < D)
    dq = tl.zeros([BLOCK_I, BLOCK_D], dtype=tl.float32)
    for c in range(C):
        pair = b.to(tl.int64) * C + c
        place = tl.load(place_ptr + pair * I + i, mask=i < I, other=0)
        row = (tl.zeros([BLOCK_I], dtype=tl.int64) + c) * T + place
        won = tl.load(d_ptr + row[:, None] * D + feature[None, :], mask=mask, other=0.0)
        dq += tl.load(ds_ptr + pair) * won.to(tl.float32)
    store_tokens(dq_ptr, dq, b, i, feature, I, D)


@triton.jit
def document_kernel(
    q_ptr, place_ptr, ds_ptr, dd_ptr, B, C, I, T, D,
    PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    feature = tl.arange(0, BLOCK_D)
    dd = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for b in range(B):
        pair = tl.program_id(1).to(tl.int64) + b * C
        ds = tl.load(ds_ptr + pair)
        for start in range(0, I, BLOCK_I):
            i = start + tl.arange(0, BLOCK_I)
            place = tl.load(place_ptr + pair * I + i, mask=i < I, other=-1)
            offs = (b * I + i[:, None]) * D + feature[None, :]
            q = tl.load(q_ptr + offs, mask=(i[:, None] < I) & (feature[None, :] < D), other=0.0)
            chose = tl.where(place[None, :] == t[:, None], 1.0, 0.0).to(q.dtype)
            dd += ds * tl.dot(chose, q, input_precision=PRECISION)
    store_tokens(dd_ptr, dd, c, t, feature, T, D)


class MaxSim(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, d):
        q, d = q.contiguous(), d.contiguous()
        s, place = maxsim_forward(q, d)
        ctx.save_for_backward(q, d, place)
        return s

    @staticmethod
    def backward(ctx, ds):
        q, d, place = ctx.saved_tensors
        ds, tiles = ds.contiguous(), tiling(q)
        (B, I, D), (C, T) = q.shape, d.shape[:2]
        dq = dd = None
        if ctx.needs_input_grad[0]:
            dq = torch.empty_like(q)
            grid = (triton.cdiv(I, 16), B)
            query_kernel[grid](d, place, ds, dq, C, I, T, D, BLOCK_I=16, BLOCK_D=tiles["BLOCK_D"])
        if ctx.needs_input_grad[1]:
            dd = torch.empty_like(d)
            grid = (triton.cdiv(T, tiles["BLOCK_T"]), C)
            document_kernel[grid](q, place, ds, dd, B, C, I, T, D, **tiles)
        return dq, dd


def maxsim_autograd(q, d):
    return MaxSim.apply(q, d)
