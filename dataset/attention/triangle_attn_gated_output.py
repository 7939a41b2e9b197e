"""Triangle attention of a structure model, with its pair bias, its mask and its gate.

Forward    row i of a pair map, a head:  S_jk = s <q_ij, k_ik> + B_jk for the k that mask_i lets be seen,
           P = softmax(S),  a_ij = sum_k P_jk v_ik,  o = g * a,  g = sigmoid(u)
Backward   gate:       da = do * g,  du = do * a * g (1 - g),
           attention:  delta_j = <da_j, a_j>,  dS = P * (da V^T - delta),  dV = P^T da,
                       dQ = s dS K,  dK = s dS^T Q,
           B is shared by the rows i:  dB = sum_i dS

Forward schedule: a program owns (row, head, tile of queries) and walks the keys with an online softmax; the
gate multiplies in the epilogue, while a is in registers. a and lse (in log2) are saved. A row whose keys are
all masked gives 0.
Backward schedule: the gate's backward is pointwise and needs do, u and a, which delta needs too; one prologue
reads the three, writes du and da, and reduces delta, so the gate costs no pass of its own and the later
kernels see plain attention with da for an upstream. They have three ownerships, one for each way in which
tensors are shared: a query tile walks the keys (dQ), a key tile the queries (dK, dV), and a (j, k) tile of B
walks the rows i, adding dS in registers. Adding dS to B from each row would be I atomics an element.

op: triangle_attention
schedule: swap_owner, recompute_from_stats, row_reduce_correct
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LOG2E = tl.constexpr(1.4426950408889634)


def tiling(q):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK = 32 if q.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": max(16, triton.next_power_of_2(q.shape[-1]))}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def scores(q, k, bias_ptr, mask_ptr, rows, cols, J, scale, PRECISION: tl.constexpr):
    """Scores of one tile in units of log2, -inf for a masked key."""
    bias = load_tile(bias_ptr, rows, cols, J, J).to(tl.float32)
    seen = tl.load(mask_ptr + cols, mask=cols < J, other=0) != 0
    s = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias) * LOG2E
    return tl.where(seen[None, :], s, -float("inf"))


@triton.jit
def triangle_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, u_ptr, a_ptr, o_ptr, lse_ptr, H, J, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * J
    bias_ptr += (tl.program_id(1) % H).to(tl.int64) * J * J
    mask_ptr += (tl.program_id(1) // H).to(tl.int64) * J
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + base * D, rows, d, J, D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # finite: the first keys may all be masked
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, J, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + base * D, cols, d, J, D)
        v = load_tile(v_ptr + base * D, cols, d, J, D)
        s = scores(q, k, bias_ptr, mask_ptr, rows, cols, J, scale, PRECISION)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    total = tl.where(total > 0.0, total, 1.0)
    a = acc / total[:, None]
    u = load_tile(u_ptr + base * D, rows, d, J, D).to(tl.float32)
    store_tile(a_ptr + base * D, a, rows, d, J, D)
    store_tile(o_ptr + base * D, a * tl.sigmoid(u), rows, d, J, D)
    tl.store(lse_ptr + base + rows, m + tl.log2(total), mask=rows < J)


def triangle_forward(q, k, v, bias, mask, u):
    I, H, J, D = q.shape
    if not q.shape == k.shape == v.shape == u.shape or bias.shape != (H, J, J) or mask.shape != (I, J):
        raise ValueError("k, v, u, bias or mask do not fit q")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    a, o = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty((I, H, J), device=q.device, dtype=torch.float32)
    tiles = tiling(q)
    grid = (triton.cdiv(J, tiles["BLOCK"]), I * H)
    triangle_kernel[grid](q, k, v, bias, mask, u, a, o, lse, H, J, D, D**-0.5, **tiles)
    return o, a, lse


@autodiff(inputs_require_grad=(0, 1, 2, 3, 5))
def triangle_attention(q, k, v, bias, mask, u):
    """q, k, v, u: (I, heads, J, dim); bias: (heads, J, J); mask: int8 (I, J), not 0 for keys to be seen."""
    return triangle_forward(*(tensor.contiguous() for tensor in (q, k, v, bias, mask, u)))[0]


def reference(q, k, v, bias, mask, u):
    seen = (mask != 0)[:, None, None, :]
    s = (q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) + bias).masked_fill(~seen, -1e30)
    return torch.sigmoid(u) * ((torch.softmax(s, dim=-1) * seen) @ v)


SWEEP = [{"I": 256, "H": 4, "J": 256, "D": 32}, {"I": 131, "H": 4, "J": 197, "D": 64}]
SWEEP_CPU = [{"I": 3, "H": 2, "J": 21, "D": 16}, {"I": 2, "H": 1, "J": 40, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    I, H, J, D = (dims[key] for key in ("I", "H", "J", "D"))
    q, k, v, u = (torch.randn(I, H, J, D, device=device, dtype=dtype) for _ in range(4))
    bias = torch.randn(H, J, J, device=device, dtype=dtype)
    mask = (torch.rand(I, J, device=device) < 0.8).to(torch.int8)
    return q, k, v, bias, mask, u


# ---- backward ----


@triton.jit
def ungate_kernel(
    do_ptr, u_ptr, a_ptr, da_ptr, du_ptr, delta_ptr, R, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    do = load_tile(do_ptr, rows, d, R, D).to(tl.float32)
    a = load_tile(a_ptr, rows, d, R, D).to(tl.float32)
    g = tl.sigmoid(load_tile(u_ptr, rows, d, R, D).to(tl.float32))
    store_tile(da_ptr, do * g, rows, d, R, D)
    store_tile(du_ptr, do * a * g * (1 - g), rows, d, R, D)
    tl.store(delta_ptr + rows, tl.sum(do * g * a, axis=1), mask=rows < R)


@triton.jit
def rebuild_p_ds(q, k, v, da, lse, delta, bias_ptr, mask_ptr, rows, cols, J, scale, PRECISION: tl.constexpr):
    """P and dS of one tile, rows of queries by columns of keys; lse is +inf for rows beyond the end."""
    s = scores(q, k, bias_ptr, mask_ptr, rows, cols, J, scale, PRECISION)
    p = tl.exp2(s - lse[:, None])
    dp = tl.dot(da, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, da_ptr, lse_ptr, delta_ptr, dq_ptr, H, J, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * J
    bias_ptr += (tl.program_id(1) % H).to(tl.int64) * J * J
    mask_ptr += (tl.program_id(1) // H).to(tl.int64) * J
    rows, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + base * D, rows, d, J, D)
    da = load_tile(da_ptr + base * D, rows, d, J, D)
    lse = tl.load(lse_ptr + base + rows, mask=rows < J, other=float("inf"))
    delta = tl.load(delta_ptr + base + rows, mask=rows < J, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, J, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + base * D, cols, d, J, D)
        v = load_tile(v_ptr + base * D, cols, d, J, D)
        _, ds = rebuild_p_ds(q, k, v, da, lse, delta, bias_ptr, mask_ptr, rows, cols, J, scale, PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + base * D, dq * scale, rows, d, J, D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, da_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, H, J, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * J
    bias_ptr += (tl.program_id(1) % H).to(tl.int64) * J * J
    mask_ptr += (tl.program_id(1) // H).to(tl.int64) * J
    cols, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + base * D, cols, d, J, D)
    v = load_tile(v_ptr + base * D, cols, d, J, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, J, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + base * D, rows, d, J, D)
        da = load_tile(da_ptr + base * D, rows, d, J, D)
        lse = tl.load(lse_ptr + base + rows, mask=rows < J, other=float("inf"))
        delta = tl.load(delta_ptr + base + rows, mask=rows < J, other=0.0)
        p, ds = rebuild_p_ds(q, k, v, da, lse, delta, bias_ptr, mask_ptr, rows, cols, J, scale, PRECISION)
        dv = tl.dot(tl.trans(p.to(da.dtype)), da, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + base * D, dk * scale, cols, d, J, D)
    store_tile(dv_ptr + base * D, dv, cols, d, J, D)


@triton.jit
def bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, da_ptr, lse_ptr, delta_ptr, dbias_ptr, I, H, J, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    dbias = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for i in range(I):
        base = (i * H + h) * J
        q = load_tile(q_ptr + base * D, rows, d, J, D)
        da = load_tile(da_ptr + base * D, rows, d, J, D)
        k = load_tile(k_ptr + base * D, cols, d, J, D)
        v = load_tile(v_ptr + base * D, cols, d, J, D)
        lse = tl.load(lse_ptr + base + rows, mask=rows < J, other=float("inf"))
        delta = tl.load(delta_ptr + base + rows, mask=rows < J, other=0.0)
        _, ds = rebuild_p_ds(
            q, k, v, da, lse, delta, bias_ptr + h * J * J, mask_ptr + i * J, rows, cols, J, scale, PRECISION
        )
        dbias += ds
    store_tile(dbias_ptr + h * J * J, dbias, rows, cols, J, J)


class TriangleAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, mask, u):
        q, k, v, bias, mask, u = (tensor.contiguous() for tensor in (q, k, v, bias, mask, u))
        o, a, lse = triangle_forward(q, k, v, bias, mask, u)
        ctx.save_for_backward(q, k, v, bias, mask, u, a, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, bias, mask, u, a, lse = ctx.saved_tensors
        (I, H, J, D), tiles, needs = q.shape, tiling(q), ctx.needs_input_grad
        T = triton.cdiv(J, tiles["BLOCK"])
        da, du, delta = torch.empty_like(a), torch.empty_like(u), torch.empty_like(lse)
        ungate_kernel[(triton.cdiv(I * H * J, 32),)](
            do.contiguous(), u, a, da, du, delta, I * H * J, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        seen = (q, k, v, bias, mask, da, lse, delta)
        dq = dk = dv = dbias = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[(T, I * H)](*seen, dq, H, J, D, D**-0.5, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[(T, I * H)](*seen, dk, dv, H, J, D, D**-0.5, **tiles)
        if needs[3]:
            dbias = torch.empty_like(bias)
            bias_kernel[(T, T, H)](*seen, dbias, I, H, J, D, D**-0.5, **tiles)
        dk, dv, du = (grad if needs[at] else None for grad, at in ((dk, 1), (dv, 2), (du, 5)))
        return dq, dk, dv, dbias, None, du


def triangle_attention_autograd(q, k, v, bias, mask, u):
    return TriangleAttention.apply(q, k, v, bias, mask, u)
