"""mLSTM, the matrix memory of xLSTM, in parallel form: exponential gates and a floored normaliser.

Forward    F_i = log sigmoid(f_1) + .. + log sigmoid(f_i),   l_ij = F_i - F_j + I_j for j <= i,
           m_i = max_j l_ij,   D_ij = e^{l_ij - m_i},   C = (Q K^T / sqrt(D)) * D,
           b_i = sum_j C_ij,   n_i = max(|b_i|, e^{-m_i}),   O = diag(1 / n) C V
Backward   e^{m_i} cancels in C / n, so that m gets no gradient. With delta_i = <dO_i, O_i>, and a_i the sign
           of b_i where |b_i| is the larger, 0 where e^{-m_i} is:   db_i = -a_i delta_i / n_i,
           dC_ij = <dO_i, v_j> / n_i + db_i,   dV = C^T diag(1 / n) dO,   dS = dC * D,
           dQ = dS K / sqrt(D),   dK = dS^T Q / sqrt(D).   l gets dl = dC * C, so dI = colsum(dl),
           dF = rowsum(dl) - colsum(dl),   df_t = (1 - sigmoid(f_t)) (dF_t + dF_{t+1} + ..)

Forward schedule: a program makes F of a head; then a program owns a query tile and walks the keys to the
diagonal with a running maximum, as softmax has one. But weights are signed, and neither b nor n is a sum of
exponentials: b is rescaled with the maximum like the outputs, and the floor is applied at the end. F, m, 1 /
n and a are kept, four numbers a query.
Backward schedule: flash attention's two owners. A tile of D comes from two vectors and m, scores by one dot,
dC by another, and the normaliser's branch is the one number db_i that is added to a row of dC, where softmax
would subtract delta: no pass of its own. Key owners add up columns of dl, which is dI, and query owners its
rows. Rows sum to delta_i where the floor holds and to 0 elsewhere, in exact numbers; they are summed all the
same, because pairs that lie wholly behind a gate then drop out of its suffix sum with their rounding.

op: mlstm
schedule: swap_owner, reverse_scan, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(q):
    """Tiles, the precision of dots, and warps: whole float32 operands take many registers."""
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": 32,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        "num_warps": 8 if q.dtype == torch.float32 else 4,
    }


@triton.jit
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row(ptr, rows, N):
    return tl.load(ptr + rows, mask=rows < N, other=0.0).to(tl.float32)


@triton.jit
def log_sigmoid(f):
    return tl.where(f < 0, f, 0.0) - tl.log(1.0 + tl.exp(tl.where(f < 0, f, -f)))


@triton.jit
def prefix_kernel(f_ptr, F_ptr, N, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64) * N
    carry = 0.0
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        logf = tl.where(rows < N, log_sigmoid(load_row(f_ptr + head, rows, N)), 0.0)
        tl.store(F_ptr + head + rows, carry + tl.cumsum(logf, axis=0), mask=rows < N)
        carry += tl.sum(logf, axis=0)


@triton.jit
def weights(F_rows, F_cols, i_cols, rows, cols, N):
    """l, in units of log2; -inf where a key is in the future or a query outside."""
    seen = (rows[:, None] < N) & (cols[None, :] <= rows[:, None])
    gates = F_rows[:, None] - F_cols[None, :] + i_cols[None, :]
    return tl.where(seen, gates * 1.4426950408889634, -float("inf"))  # log2(e)


@triton.jit
def mlstm_kernel(
    q_ptr, k_ptr, v_ptr, i_ptr, F_ptr, o_ptr, m_ptr, rn_ptr, side_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    F_rows = load_row(F_ptr + head, rows, N)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)
    b = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        F_cols, i_cols = load_row(F_ptr + head, cols, N), load_row(i_ptr + head, cols, N)
        log_d = weights(F_rows, F_cols, i_cols, rows, cols, N)
        m_new = tl.maximum(m, tl.max(log_d, axis=1))
        c = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale * tl.exp2(log_d - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        b = b * rescale + tl.sum(c, axis=1)
        acc = tl.dot(c.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        m = m_new
    floor = tl.exp2(-tl.where(rows < N, m, 0.0))
    n = tl.maximum(tl.abs(b), floor)
    side = tl.where(tl.abs(b) < floor, 0.0, tl.where(b < 0, -1.0, 1.0))
    store_tile(o_ptr + head * D, acc / n[:, None], rows, d, N, D)
    tl.store(m_ptr + head + rows, m, mask=rows < N)
    tl.store(rn_ptr + head + rows, 1.0 / n, mask=rows < N)
    tl.store(side_ptr + head + rows, side, mask=rows < N)


def mlstm_forward(q, k, v, igate, fgate):
    B, H, N, D = q.shape
    if not q.shape == k.shape == v.shape or not igate.shape == fgate.shape == (B, H, N):
        raise ValueError("q, k and v must have one shape, and the gates its first three sizes")
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o = torch.empty_like(q)
    stats = tuple(torch.empty((B, H, N), device=q.device, dtype=torch.float32) for _ in range(4))
    F, m, rn, side = stats
    prefix_kernel[(B * H,)](fgate, F, N, BLOCK=256)
    mlstm_kernel[(triton.cdiv(N, 32), B * H)](q, k, v, igate, F, o, m, rn, side, N, D, D**-0.5, **tiling(q))
    return o, stats


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def mlstm(q, k, v, igate, fgate):
    """q, k, v: (B, H, N, D); igate, fgate: (B, H, N), before exp and sigmoid."""
    return mlstm_forward(*(tensor.contiguous() for tensor in (q, k, v, igate, fgate)))[0]


def reference(q, k, v, igate, fgate):
    F = torch.nn.functional.logsigmoid(fgate).cumsum(-1)
    log_d = F[..., :, None] - F[..., None, :] + igate[..., None, :]
    future = torch.ones(log_d.shape[-2:], device=q.device, dtype=torch.bool).triu(1)
    log_d = log_d.masked_fill(future, -float("inf"))
    m = log_d.amax(-1, keepdim=True)
    C = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * torch.exp(log_d - m)
    return C @ v / torch.maximum(C.sum(-1, keepdim=True).abs(), torch.exp(-m))


SWEEP = [{"B": 2, "H": 8, "N": 2048, "D": 128}, {"B": 1, "H": 4, "N": 1021, "D": 96}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 41, "D": 16}, {"B": 2, "H": 1, "N": 32, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    igate, fgate = (torch.randn(shape[:3], device=device, dtype=dtype) for _ in range(2))
    return q, k, v, igate, fgate + 3


# ---- backward ----


@triton.jit
def delta_kernel(o_ptr, do_ptr, rn_ptr, side_ptr, db_ptr, D, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    delta = tl.sum(load_row(o_ptr + row * D, d, D) * load_row(do_ptr + row * D, d, D), axis=0)
    tl.store(db_ptr + row, -delta * tl.load(rn_ptr + row) * tl.load(side_ptr + row))


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, i_ptr, F_ptr, m_ptr, rn_ptr, db_ptr, do_ptr, dk_ptr, dv_ptr, column_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK, dV and the column sums of dl."""
    head = tl.program_id(1).to(tl.int64) * N
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    F_cols, i_cols = load_row(F_ptr + head, cols, N), load_row(i_ptr + head, cols, N)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    column = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        do = load_tile(do_ptr + head * D, rows, d, N, D)
        rn, db = load_row(rn_ptr + head, rows, N), load_row(db_ptr + head, rows, N)
        log_d = weights(load_row(F_ptr + head, rows, N), F_cols, i_cols, rows, cols, N)
        decay = tl.exp2(log_d - load_row(m_ptr + head, rows, N)[:, None])
        c = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale * decay
        dc = tl.dot(do, tl.trans(v), input_precision=PRECISION) * rn[:, None] + db[:, None]
        column += tl.sum(dc * c, axis=0)
        dv = tl.dot(tl.trans((c * rn[:, None]).to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans((dc * decay).to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)
    tl.store(column_ptr + head + cols, column, mask=cols < N)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, i_ptr, F_ptr, m_ptr, rn_ptr, db_ptr, do_ptr, dq_ptr, row_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ and the row sums of dl."""
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    do = load_tile(do_ptr + head * D, rows, d, N, D)
    F_rows, m = load_row(F_ptr + head, rows, N), load_row(m_ptr + head, rows, N)
    rn, db = load_row(rn_ptr + head, rows, N), load_row(db_ptr + head, rows, N)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    row = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        F_cols, i_cols = load_row(F_ptr + head, cols, N), load_row(i_ptr + head, cols, N)
        decay = tl.exp2(weights(F_rows, F_cols, i_cols, rows, cols, N) - m[:, None])
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = (dp * rn[:, None] + db[:, None]) * decay
        row += tl.sum(ds * s, axis=1)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)
    tl.store(row_ptr + head + rows, row, mask=rows < N)


@triton.jit
def gates_kernel(f_ptr, row_ptr, column_ptr, di_ptr, df_ptr, N, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64) * N
    carry = 0.0
    for step in range(tl.cdiv(N, BLOCK)):
        rows = (tl.cdiv(N, BLOCK) - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        column = load_row(column_ptr + head, rows, N)
        dF = load_row(row_ptr + head, rows, N) - column
        carry += tl.sum(dF, axis=0)
        df = (carry - tl.cumsum(dF, axis=0) + dF) * tl.sigmoid(-load_row(f_ptr + head, rows, N))
        tl.store(df_ptr + head + rows, df.to(df_ptr.dtype.element_ty), mask=rows < N)
        tl.store(di_ptr + head + rows, column.to(di_ptr.dtype.element_ty), mask=rows < N)


class Mlstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        inputs = tuple(tensor.contiguous() for tensor in inputs)
        o, stats = mlstm_forward(*inputs)
        ctx.save_for_backward(*inputs, o, *stats)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, igate, fgate, o, F, m, rn, side = ctx.saved_tensors
        do = do.contiguous()
        B, H, N, D = q.shape
        tiles, grid, needed = tiling(q), (triton.cdiv(N, 32), B * H), ctx.needs_input_grad
        db, row, column = (torch.empty_like(m) for _ in range(3))
        dq, dk, dv, di, df = (torch.empty_like(tensor) for tensor in (q, k, v, igate, fgate))
        delta_kernel[(B * H * N,)](o, do, rn, side, db, D, BLOCK_D=tiles["BLOCK_D"])
        saved = (q, k, v, igate, F, m, rn, db, do)
        if needed[0] or needed[4]:
            query_kernel[grid](*saved, dq, row, N, D, D**-0.5, **tiles)
        if any(needed[1:]):
            key_kernel[grid](*saved, dk, dv, column, N, D, D**-0.5, **tiles)
        if needed[3] or needed[4]:
            gates_kernel[(B * H,)](fgate, row, column, di, df, N, BLOCK=256)
        grads = zip((dq, dk, dv, di, df), needed, strict=True)
        return tuple(grad if wanted else None for grad, wanted in grads)


def mlstm_autograd(q, k, v, igate, fgate):
    return Mlstm.apply(q, k, v, igate, fgate)
