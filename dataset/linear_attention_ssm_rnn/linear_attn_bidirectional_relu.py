"""ReLU linear attention without a mask, as vision models have it: one small matrix stands for all keys.

Forward    f_i = relu(q_i),  g_j = relu(k_j);   M = sum_j g_j v_j^T,  s = sum_j g_j;
           n_i = <f_i, s> + eps,   o_i = M^T f_i / n_i
Backward   e_i = do_i / n_i,  r_i = -<do_i, o_i> / n_i are the gradients of numerator and n_i:
           dq_i = (M e_i + r_i s) where q_i > 0,   dM = sum_i f_i e_i^T,   ds = sum_i f_i r_i;
           dk_j = (dM v_j + ds) where k_j > 0,   dv_j = dM^T g_j.
           (A query with one positive feature hardly moves its output: M e and r s cancel but for eps.)

Forward schedule: tokens are many and M is D x DV, so the tokens are cut into parts: a program sums the M and
s of its part into a slot, a second kernel adds the slots, and a third makes the outputs, a tile of tokens a
program.
Backward schedule: the same shape once more, with the roles of queries and keys exchanged. One kernel over
parts does all that queries have: it writes dq and, while f and e are at hand, sums its slot of dM and ds. The
slots are added by the same kernel as the forward's, and the owner of a tile of keys makes dk and dv from dM.
Cost is linear in tokens, each tensor is read once, and M, s and n are what is kept: to sum M again would be a
pass over k and v.

op: relu_linear_attention
schedule: partials_then_reduce, row_reduce_correct
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


MAX_PARTS = 32


def tiling(q, v):
    """Tiles, the precision of dots, and the number of tiles a part has."""
    T, D = q.shape[2:]
    BLOCK_T = 16 if q.dtype == torch.float32 else 64
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK_T": BLOCK_T,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "BLOCK_V": max(16, triton.next_power_of_2(v.shape[3])),
        "TILES": max(1, triton.cdiv(T, MAX_PARTS * BLOCK_T)),
        "num_warps": 8,
    }


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def relu(x):
    return tl.where(x > 0, x, 0.0).to(x.dtype)


@triton.jit
def key_sums_kernel(
    k_ptr, v_ptr, m_ptr, s_ptr, T, D, DV, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A part's slot of M and s: slots first, then heads."""
    head = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * tl.num_programs(0) + head
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m = tl.zeros([BLOCK_D, BLOCK_V], dtype=tl.float32)
    s = tl.zeros([BLOCK_D], dtype=tl.float32)
    for tile in range(TILES):
        rows = (tl.program_id(1) * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        g = relu(load_tile(k_ptr + head * T * D, rows, d, T, D))
        v = load_tile(v_ptr + head * T * DV, rows, e, T, DV)
        m = tl.dot(tl.trans(g), v, m, input_precision=PRECISION)
        s += tl.sum(g.to(tl.float32), axis=0)
    store_tile(m_ptr + slot * D * DV, m, d, e, D, DV)
    tl.store(s_ptr + slot * D + d, s, mask=d < D)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc, mask=i < size)


def sum_slots(slots):
    out = slots.new_empty(slots.shape[1:])
    sum_slots_kernel[(triton.cdiv(out.numel(), 256),)](slots, out, slots.shape[0], out.numel(), BLOCK=256)
    return out


@triton.jit
def output_kernel(
    q_ptr, m_ptr, s_ptr, o_ptr, n_ptr, T, D, DV, eps, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    f = relu(load_tile(q_ptr + head * T * D, rows, d, T, D))
    s = tl.load(s_ptr + head * D + d, mask=d < D, other=0.0)
    n = tl.sum(f.to(tl.float32) * s[None, :], axis=1) + eps
    m = load_tile(m_ptr + head * D * DV, d, e, D, DV).to(f.dtype)
    o = tl.dot(f, m, input_precision=PRECISION) / n[:, None]
    store_tile(o_ptr + head * T * DV, o, rows, e, T, DV)
    tl.store(n_ptr + head * T + rows, n, mask=rows < T)


def new_slots(q, v, tiles):
    """Slots of a D x DV matrix and a vector of D for each part and head."""
    (B, H, T, D), DV = q.shape, v.shape[3]
    parts = triton.cdiv(T, tiles["BLOCK_T"] * tiles["TILES"])
    options = {"device": q.device, "dtype": torch.float32}
    return torch.empty((parts, B * H, D, DV), **options), torch.empty((parts, B * H, D), **options)


def attention_forward(q, k, v, eps):
    (B, H, T, D), DV = q.shape, v.shape[3]
    if k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ValueError("q and k must have one shape, and v its batch, heads and tokens")
    if D > 128 or DV > 128:
        raise ValueError(f"head dimensions {D} and {DV} do not fit one tile")
    tiles = tiling(q, v)
    m_slots, s_slots = new_slots(q, v, tiles)
    key_sums_kernel[(B * H, m_slots.shape[0])](k, v, m_slots, s_slots, T, D, DV, **tiles)
    m, s = sum_slots(m_slots), sum_slots(s_slots)
    o, n = torch.empty_like(v), torch.empty((B, H, T), device=q.device, dtype=torch.float32)
    output_kernel[(B * H, triton.cdiv(T, tiles["BLOCK_T"]))](q, m, s, o, n, T, D, DV, eps, **tiles)
    return o, m, s, n


@autodiff(inputs_require_grad=(0, 1, 2))
def relu_linear_attention(q, k, v, eps=1e-3):
    """q, k: (B, H, T, D); v: (B, H, T, DV)."""
    return attention_forward(q.contiguous(), k.contiguous(), v.contiguous(), eps)[0]


def reference(q, k, v, eps=1e-3):
    f, g = torch.relu(q), torch.relu(k)
    return f @ (g.transpose(-1, -2) @ v) / (f @ g.sum(2)[..., None] + eps)


SWEEP = [
    {"B": 8, "H": 16, "T": 4096, "D": 64, "DV": 64},
    {"B": 2, "H": 20, "T": 1021, "D": 32, "DV": 112},
]
SWEEP_CPU = [{"B": 1, "H": 2, "T": 90, "D": 24, "DV": 20}, {"B": 1, "H": 1, "T": 530, "D": 32, "DV": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, T, D, DV = (dims[name] for name in ("B", "H", "T", "D", "DV"))
    q, k = (torch.randn(B, H, T, D, device=device, dtype=dtype) for _ in range(2))
    return q, k, torch.randn(B, H, T, DV, device=device, dtype=dtype), 0.5


# ---- backward ----


@triton.jit
def query_backward_kernel(
    q_ptr, m_ptr, s_ptr, n_ptr, o_ptr, do_ptr, dq_ptr, dm_ptr, ds_ptr, T, D, DV, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dq of a part, and its slot of dM and ds."""
    head = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * tl.num_programs(0) + head
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m = tl.trans(load_tile(m_ptr + head * D * DV, d, e, D, DV).to(q_ptr.dtype.element_ty))
    s = tl.load(s_ptr + head * D + d, mask=d < D, other=0.0)
    dm = tl.zeros([BLOCK_D, BLOCK_V], dtype=tl.float32)
    ds = tl.zeros([BLOCK_D], dtype=tl.float32)
    for tile in range(TILES):
        rows = (tl.program_id(1) * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        q = load_tile(q_ptr + head * T * D, rows, d, T, D)
        n = tl.load(n_ptr + head * T + rows, mask=rows < T, other=1.0)
        o = load_tile(o_ptr + head * T * DV, rows, e, T, DV).to(tl.float32)
        grad = load_tile(do_ptr + head * T * DV, rows, e, T, DV).to(tl.float32) / n[:, None]  # e_i
        r = -tl.sum(grad * o, axis=1)
        grad = grad.to(q.dtype)
        df = tl.dot(grad, m, input_precision=PRECISION) + r[:, None] * s[None, :]
        store_tile(dq_ptr + head * T * D, tl.where(q > 0, df, 0.0), rows, d, T, D)
        f = relu(q)
        dm = tl.dot(tl.trans(f), grad, dm, input_precision=PRECISION)
        ds += tl.sum(f.to(tl.float32) * r[:, None], axis=0)
    store_tile(dm_ptr + slot * D * DV, dm, d, e, D, DV)
    tl.store(ds_ptr + slot * D + d, ds, mask=d < D)


@triton.jit
def key_backward_kernel(
    k_ptr, v_ptr, dm_ptr, ds_ptr, dk_ptr, dv_ptr, T, D, DV, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    k = load_tile(k_ptr + head * T * D, rows, d, T, D)
    v = load_tile(v_ptr + head * T * DV, rows, e, T, DV)
    dm = load_tile(dm_ptr + head * D * DV, d, e, D, DV).to(k.dtype)
    ds = tl.load(ds_ptr + head * D + d, mask=d < D, other=0.0)
    dg = tl.dot(v, tl.trans(dm), input_precision=PRECISION) + ds[None, :]
    store_tile(dk_ptr + head * T * D, tl.where(k > 0, dg, 0.0), rows, d, T, D)
    dv = tl.dot(relu(k), dm, input_precision=PRECISION)
    store_tile(dv_ptr + head * T * DV, dv, rows, e, T, DV)


class ReluLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, eps):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, m, s, n = attention_forward(q, k, v, eps)
        ctx.save_for_backward(q, k, v, o, m, s, n)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, m, s, n = ctx.saved_tensors
        do, tiles, needs = do.contiguous(), tiling(q, v), ctx.needs_input_grad
        (B, H, T, D), DV = q.shape, v.shape[3]
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        dm, ds = new_slots(q, v, tiles)
        query_backward_kernel[(B * H, dm.shape[0])](q, m, s, n, o, do, dq, dm, ds, T, D, DV, **tiles)
        if needs[1] or needs[2]:
            dm, ds = sum_slots(dm), sum_slots(ds)
            key_backward_kernel[(B * H, triton.cdiv(T, tiles["BLOCK_T"]))](
                k, v, dm, ds, dk, dv, T, D, DV, **tiles
            )
        grads = zip((dq, dk, dv), needs[:3], strict=True)
        return *(grad if needed else None for grad, needed in grads), None


def relu_linear_attention_autograd(q, k, v, eps=1e-3):
    return ReluLinearAttention.apply(q, k, v, eps)
