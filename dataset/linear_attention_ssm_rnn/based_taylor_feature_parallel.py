"""Based: causal attention whose exponential is cut to its second-order Taylor polynomial.

Forward    x_ij = <q_i, k_j> / sqrt(D),   w_ij = 1 + x_ij + x_ij^2 / 2 for j <= i, 0 elsewhere,
           n_i = sum_j w_ij,   o_i = sum_j w_ij v_j / n_i
Backward   e_i = do_i / n_i and r_i = -<do_i, o_i> / n_i are the gradients of numerator and n_i:
           dw_ij = <e_i, v_j> + r_i,   dx_ij = dw_ij (1 + x_ij),   dv_j = sum_i w_ij e_i,
           dq_i = sum_j dx_ij k_j / sqrt(D),   dk_j = sum_i dx_ij q_i / sqrt(D)

Forward schedule: the feature map of this weight has 1 + D + D^2 numbers, so that for moderate lengths and
heads a tile of scores is cheaper than a state. A program owns a query tile and walks the keys to the
diagonal. w is at least 1/2 and grows like a square, so there is no maximum to subtract and nothing to
rescale; n is kept.
Backward schedule: the two owners of flash attention. Its P = e^x is its own derivative; here the slope is 1 +
x and not w, so a rebuilt tile of x gives both, w for dv and 1 + x for dq and dk. e and r are made once, by a
small kernel: dividing do by n beforehand takes the normaliser out of both walks, and r is all that is left of
it. The query tile's owner makes dq, the key tile's owner dk and dv, each stored once.

op: based_attention
schedule: swap_owner, row_reduce_correct
difficulty: 4
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
def load_tile(ptr, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    return tl.load(ptr + rows[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, N, D):
    mask = (rows[:, None] < N) & (cols[None, :] < D)
    tl.store(ptr + rows[:, None] * D + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def weights(q, k, rows, cols, N, scale, PRECISION: tl.constexpr):
    """w and its slope 1 + x of a tile; both 0 where a key is in the future or a query outside."""
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    seen = (rows[:, None] < N) & (cols[None, :] <= rows[:, None])
    return tl.where(seen, 1.0 + x + 0.5 * x * x, 0.0), tl.where(seen, 1.0 + x, 0.0)


@triton.jit
def based_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, n_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    n = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        w, _ = weights(q, k, rows, cols, N, scale, PRECISION)
        n += tl.sum(w, axis=1)
        acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
    n = tl.where(rows < N, n, 1.0)
    store_tile(o_ptr + head * D, acc / n[:, None], rows, d, N, D)
    tl.store(n_ptr + head + rows, n, mask=rows < N)


def based_forward(q, k, v):
    if not q.shape == k.shape == v.shape:
        raise ValueError("q, k and v must have one shape")
    B, H, N, D = q.shape
    if D > 128:
        raise ValueError(f"head dimension {D} does not fit one tile")
    o, n, tiles = torch.empty_like(v), torch.empty((B, H, N), device=q.device, dtype=torch.float32), tiling(q)
    based_kernel[(triton.cdiv(N, tiles["BLOCK"]), B * H)](q, k, v, o, n, N, D, D**-0.5, **tiles)
    return o, n


@autodiff(inputs_require_grad=(0, 1, 2))
def based_attention(q, k, v):
    """q, k, v: (B, H, N, D)."""
    return based_forward(q.contiguous(), k.contiguous(), v.contiguous())[0]


def reference(q, k, v):
    x = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    w = (1 + x + 0.5 * x * x).tril()
    return w @ v / w.sum(-1, keepdim=True)


SWEEP = [{"B": 2, "H": 16, "N": 2048, "D": 64}, {"B": 1, "H": 8, "N": 1021, "D": 96}]
SWEEP_CPU = [{"B": 1, "H": 2, "N": 44, "D": 16}, {"B": 2, "H": 1, "N": 32, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = (dims["B"], dims["H"], dims["N"], dims["D"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))


# ---- backward ----


@triton.jit
def e_r_kernel(o_ptr, do_ptr, n_ptr, e_ptr, r_ptr, ROWS, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    n = tl.load(n_ptr + rows, mask=rows < ROWS, other=1.0)
    e = load_tile(do_ptr, rows, d, ROWS, D).to(tl.float32) / n[:, None]
    store_tile(e_ptr, e, rows, d, ROWS, D)
    r = -tl.sum(e * load_tile(o_ptr, rows, d, ROWS, D).to(tl.float32), axis=1)
    tl.store(r_ptr + rows, r, mask=rows < ROWS)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, e_ptr, r_ptr, dk_ptr, dv_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr + head * D, cols, d, N, D)
    v = load_tile(v_ptr + head * D, cols, d, N, D)
    dk = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        q = load_tile(q_ptr + head * D, rows, d, N, D)
        e = load_tile(e_ptr + head * D, rows, d, N, D)
        r = tl.load(r_ptr + head + rows, mask=rows < N, other=0.0)
        w, slope = weights(q, k, rows, cols, N, scale, PRECISION)
        dx = (tl.dot(e, tl.trans(v), input_precision=PRECISION) + r[:, None]) * slope
        dv = tl.dot(tl.trans(w.to(e.dtype)), e, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dx.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_tile(dk_ptr + head * D, dk * scale, cols, d, N, D)
    store_tile(dv_ptr + head * D, dv, cols, d, N, D)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, e_ptr, r_ptr, dq_ptr, N, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * N
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + head * D, rows, d, N, D)
    e = load_tile(e_ptr + head * D, rows, d, N, D)
    r = tl.load(r_ptr + head + rows, mask=rows < N, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = load_tile(k_ptr + head * D, cols, d, N, D)
        v = load_tile(v_ptr + head * D, cols, d, N, D)
        _, slope = weights(q, k, rows, cols, N, scale, PRECISION)
        dx = (tl.dot(e, tl.trans(v), input_precision=PRECISION) + r[:, None]) * slope
        dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr + head * D, dq * scale, rows, d, N, D)


class BasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, n = based_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, n)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, n = ctx.saved_tensors
        B, H, N, D = q.shape
        tiles, needs = tiling(q), ctx.needs_input_grad
        e, r, grid = torch.empty_like(q), torch.empty_like(n), (triton.cdiv(N, tiles["BLOCK"]), B * H)
        e_r_kernel[(triton.cdiv(B * H * N, 32),)](
            o, do.contiguous(), n, e, r, B * H * N, D, BLOCK=32, BLOCK_D=tiles["BLOCK_D"]
        )
        dq = dk = dv = None
        if needs[0]:
            dq = torch.empty_like(q)
            query_kernel[grid](q, k, v, e, r, dq, N, D, D**-0.5, **tiles)
        if needs[1] or needs[2]:
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            key_kernel[grid](q, k, v, e, r, dk, dv, N, D, D**-0.5, **tiles)
        return dq, dk if needs[1] else None, dv if needs[2] else None


def based_attention_autograd(q, k, v):
    return BasedAttention.apply(q, k, v)
