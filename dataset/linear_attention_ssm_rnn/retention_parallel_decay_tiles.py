"""Retention, the parallel form: causal attention without softmax, weights falling by a fixed factor a step.

Forward    o_i = s sum_{j <= i} c^{i-j} <q_i, k_j> v_j       (c a constant of the head, s = 1 / sqrt(D))
Backward   dq_i = s sum_{j <= i} c^{i-j} <do_i, v_j> k_j,   dk_j = s sum_{i >= j} c^{i-j} <do_i, v_j> q_i,
           dv_j = s sum_{i >= j} c^{i-j} <q_i, k_j> do_i

Forward schedule: a program owns a query tile that begins at r and walks the keys before it. There c^{i-j} =
c^{i-r} c^{r-j}: one vector over the columns of a tile of scores inside the loop, one over the rows of the
outputs after it, and only the diagonal tile needs a matrix of decays. All powers have exponents of at least
0. There is no row statistic, so nothing but the inputs is kept.
Backward schedule: two owners, as the pair (i, j) has two sides. The query tile's owner makes dq with the same
two vectors. The key tile's owner walks the later queries for dk and dv, and the factor is split at the tile's
end e: c^{i-j} = c^{i-e} c^{e-j}, the first on rows of a tile of scores in the loop, the second on the sums
after it. The form is bilinear in scores and values: a tile of <q, k> serves dv, one of <do, v> serves dk or
dq, none is combined with another, and no delta exists.

op: retention
schedule: swap_owner
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    """Tiles, the precision of dots, and warps: products of whole float32 numbers take many registers."""
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": 32,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "num_warps": 8 if q.dtype == torch.float32 else 4,
    }


@triton.jit
def load_tile(ptr, rows, cols, T, D):
    mask = (rows[:, None] < T) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, T, D):
    mask = (rows[:, None] < T) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def power(log_c, n):
    return tl.exp(log_c * n.to(tl.float32))


@triton.jit
def diagonal_tile(a, b, log_c, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    """c^{i-j} <a_i, b_j> for j <= i, 0 elsewhere."""
    i = tl.arange(0, BLOCK)
    ages = i[:, None] - i[None, :]
    decay = tl.where(ages >= 0, power(log_c, tl.where(ages >= 0, ages, 0)), 0.0)
    return tl.dot(a, tl.trans(b), input_precision=PRECISION) * decay


@triton.jit
def query_kernel(
    a_ptr, b_ptr, c_ptr, log_c_ptr, out_ptr, T, H, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out_i = s sum c^{i-j} <a_i, b_j> c_j: o from (q, k, v), dq from (do, v, k)."""
    head = tl.program_id(1).to(tl.int64) * T * D
    first = tl.program_id(0) * BLOCK
    i, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    log_c = tl.load(log_c_ptr + tl.program_id(1) % H).to(tl.float32)
    a = load_tile(a_ptr + head, first + i, d, T, D)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, first, BLOCK):
        cols = start + i
        b = load_tile(b_ptr + head, cols, d, T, D)
        c = load_tile(c_ptr + head, cols, d, T, D)
        p = tl.dot(a, tl.trans(b), input_precision=PRECISION) * power(log_c, first - cols)[None, :]
        acc = tl.dot(p.to(c.dtype), c, acc, input_precision=PRECISION)
    acc *= power(log_c, i)[:, None]
    p = diagonal_tile(a, load_tile(b_ptr + head, first + i, d, T, D), log_c, PRECISION, BLOCK)
    c = load_tile(c_ptr + head, first + i, d, T, D)
    acc = tl.dot(p.to(c.dtype), c, acc, input_precision=PRECISION)
    store_tile(out_ptr + head, acc * scale, first + i, d, T, D)


def launch_queries(a, b, c, log_c):
    B, H, T, D = a.shape
    tiles, out = tiling(a), torch.empty_like(a)
    query_kernel[(triton.cdiv(T, tiles["BLOCK"]), B * H)](a, b, c, log_c, out, T, H, D, D**-0.5, **tiles)
    return out


@autodiff(inputs_require_grad=(0, 1, 2))
def retention(q, k, v, log_c):
    """q, k, v: (B, H, T, D); log_c: (H), the logarithm of each head's decay, at most 0, a constant."""
    if not q.shape == k.shape == v.shape or log_c.shape != (q.shape[1],):
        raise ValueError("q, k and v must have one shape, and log_c a number a head")
    if q.shape[3] > 128:
        raise ValueError(f"head dimension {q.shape[3]} does not fit one tile")
    return launch_queries(q.contiguous(), k.contiguous(), v.contiguous(), log_c.contiguous())


def reference(q, k, v, log_c):
    i = torch.arange(q.shape[2], device=q.device)
    ages = (i[:, None] - i[None, :]).clamp(min=0).to(q.dtype)
    decay = torch.exp(log_c.to(q.dtype)[:, None, None] * ages).tril()
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * decay) @ v


SWEEP = [{"B": 2, "H": 8, "T": 2048, "D": 128}, {"B": 1, "H": 4, "T": 1021, "D": 96}]
SWEEP_CPU = [{"B": 1, "H": 3, "T": 58, "D": 16}, {"B": 2, "H": 1, "T": 32, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["T"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return q, k, v, torch.log(1 - 2.0 ** (-5 - torch.arange(dims["H"], device=device, dtype=torch.float32)))


# ---- backward ----


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, log_c_ptr, dk_ptr, dv_ptr, T, H, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * T * D
    first = tl.program_id(0) * BLOCK
    j, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    end = first + BLOCK
    log_c = tl.load(log_c_ptr + tl.program_id(1) % H).to(tl.float32)
    k = load_tile(k_ptr + head, first + j, d, T, D)
    v = load_tile(v_ptr + head, first + j, d, T, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(end, T, BLOCK):
        rows = start + j
        weight = power(log_c, rows - end)[:, None]
        q = load_tile(q_ptr + head, rows, d, T, D)
        do = load_tile(do_ptr + head, rows, d, T, D)
        p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * weight
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION) * weight
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dp.to(q.dtype)), q, dk, input_precision=PRECISION)
    dk *= power(log_c, BLOCK - j)[:, None]
    dv *= power(log_c, BLOCK - j)[:, None]
    q = load_tile(q_ptr + head, first + j, d, T, D)
    do = load_tile(do_ptr + head, first + j, d, T, D)
    p = diagonal_tile(q, k, log_c, PRECISION, BLOCK)
    dp = diagonal_tile(do, v, log_c, PRECISION, BLOCK)
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
    dk = tl.dot(tl.trans(dp.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head, dk * scale, first + j, d, T, D)
    store_tile(dv_ptr + head, dv * scale, first + j, d, T, D)


class Retention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_c):
        q, k, v, log_c = q.contiguous(), k.contiguous(), v.contiguous(), log_c.contiguous()
        ctx.save_for_backward(q, k, v, log_c)
        return retention(q, k, v, log_c)

    @staticmethod
    def backward(ctx, do):
        q, k, v, log_c = ctx.saved_tensors
        do, tiles, needs = do.contiguous(), tiling(q), ctx.needs_input_grad
        B, H, T, D = q.shape
        dq = launch_queries(do, v, k, log_c) if needs[0] else None
        dk = dv = None
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(triton.cdiv(T, tiles["BLOCK"]), B * H)](
                q, k, v, do, log_c, dk, dv, T, H, D, D**-0.5, **tiles
            )
        return dq, dk if needs[1] else None, dv if needs[2] else None, None


def retention_autograd(q, k, v, log_c):
    return Retention.apply(q, k, v, log_c)
