"""GRU over time, reset after the product, with the input projections made outside and only h kept.

Forward    r_t = sigmoid(xr_t + h_{t-1} Ur),  z_t = sigmoid(xz_t + h_{t-1} Uz),  p_t = h_{t-1} Un + bn,
           n_t = tanh(xn_t + r_t * p_t),  h_t = (1 - z_t) * n_t + z_t * h_{t-1}
           (x_t: (B, 3 D), the parts r, z, n side by side, and U: (D, 3 D) likewise)
Backward   with dh = dy_t + (from t+1):   dn = dh * (1 - z) * (1 - n^2),   dp = dn * r,
           dr = dn * p * r * (1 - r),   dz = dh * (h_{t-1} - n) * z * (1 - z);   dx_t = (dr, dz, dn);
           to t-1:  dh * z + dr Ur^T + dz Uz^T + dp Un^T;
           dU = sum_t h_{t-1}^T (dr, dz, dp),   dbn = sum over batch and time of dp:  the third part of dU
           sees dp where dx has dn, as the reset gate stands between the two

Forward schedule: the rows of the batch are independent, so a program owns a tile of them and walks time with
h in registers and three D x D dots a step. It stores h, which is the output, and nothing else.
Backward schedule: gates cost 4 D numbers a step to keep, and to rebuild them in the walk would double its
dots, which are serial. But once all h are known, the gates of all steps are independent of each other: one
product over T B rows, by a full grid, makes r, z, n and p before the walk, into buffers that live no longer
than the backward. The walk reads them, makes three dots a step, and overwrites p with dp. dU is one product
with the long axis T B after it: the axis is cut into parts with slots, since D x 3 D has few tiles, and a
second kernel adds the slots; dbn comes from the walk, a slot a batch tile.

op: gru
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_B = 16
BLOCK = 32
MAX_PARTS = 16
ONE_STAGE = {"num_stages": 1, "num_warps": 8}  # u is a whole matrix: no room for two of its loads in flight


def precision():
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


@triton.jit
def load_tile(ptr, rows, cols, R, C, width):
    """Tile of an R x C matrix whose rows lie `width` apart."""
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * width + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C, width):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * width + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_before(h0_ptr, h_ptr, rows, cols, R, B, D):
    """States before the rows (t, b): row r - B of h, or row r of h0 at t = 0."""
    inside = (rows[:, None] < R) & (cols[None, :] < D)
    offs = rows[:, None].to(tl.int64) * D + cols[None, :]
    h = tl.load(h_ptr + offs - B * D, mask=inside & (rows[:, None] >= B), other=0.0)
    return h + tl.load(h0_ptr + offs, mask=inside & (rows[:, None] < B), other=0.0)


@triton.jit
def tanh(a):
    return 2.0 * tl.sigmoid(2.0 * a) - 1.0


@triton.jit
def gru_kernel(
    x_ptr, u_ptr, bn_ptr, h0_ptr, h_ptr, T, B, D,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.arange(0, BLOCK_D)
    bn = tl.load(bn_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    h = load_tile(h0_ptr, rows, d, B, D, D).to(tl.float32)
    for t in range(T):
        step = tl.cast(t, tl.int64) * B * D
        xr = load_tile(x_ptr + 3 * step, rows, d, B, D, 3 * D).to(tl.float32)
        xz = load_tile(x_ptr + 3 * step + D, rows, d, B, D, 3 * D).to(tl.float32)
        xn = load_tile(x_ptr + 3 * step + 2 * D, rows, d, B, D, 3 * D).to(tl.float32)
        left = h.to(u_ptr.dtype.element_ty)
        r = tl.dot(left, load_tile(u_ptr, d, d, D, D, 3 * D), xr, input_precision=PRECISION)
        z = tl.dot(left, load_tile(u_ptr + D, d, d, D, D, 3 * D), xz, input_precision=PRECISION)
        p = tl.dot(left, load_tile(u_ptr + 2 * D, d, d, D, D, 3 * D), input_precision=PRECISION)
        z = tl.sigmoid(z)
        n = tanh(xn + tl.sigmoid(r) * (p + bn[None, :]))
        h = (1 - z) * n + z * h
        store_tile(h_ptr + step, h, rows, d, B, D, D)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def gru(x, u, bn, h0):
    """x: (T, B, 3 D), input projections with bias; u: (D, 3 D); bn: (D); h0: (B, D). Gives h: (T, B, D)."""
    x, u, bn, h0 = x.contiguous(), u.contiguous(), bn.contiguous(), h0.contiguous()
    (T, B, width), D = x.shape, h0.shape[1]
    if width != 3 * D or u.shape != (D, 3 * D) or bn.shape != (D,) or h0.shape[0] != B:
        raise ValueError(f"x {tuple(x.shape)}, u {tuple(u.shape)}, h0 {tuple(h0.shape)} do not fit")
    if D > 128:
        raise ValueError(f"a state of {D} does not fit one tile")
    h = torch.empty((T, B, D), device=x.device, dtype=x.dtype)
    BLOCK_D = max(16, triton.next_power_of_2(D))
    gru_kernel[(triton.cdiv(B, BLOCK_B),)](
        x, u, bn, h0, h, T, B, D, PRECISION=precision(), BLOCK_B=BLOCK_B, BLOCK_D=BLOCK_D, **ONE_STAGE
    )
    return h


def reference(x, u, bn, h0):
    h, steps = h0, []
    for x_t in x:
        (xr, xz, xn), (ar, az, p) = x_t.chunk(3, dim=-1), (h @ u).chunk(3, dim=-1)
        z = torch.sigmoid(xz + az)
        n = torch.tanh(xn + torch.sigmoid(xr + ar) * (p + bn))
        h = (1 - z) * n + z * h
        steps.append(h)
    return torch.stack(steps)


SWEEP = [{"T": 256, "B": 256, "D": 128}, {"T": 501, "B": 61, "D": 96}]
SWEEP_CPU = [{"T": 7, "B": 5, "D": 16}, {"T": 9, "B": 18, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, B, D = dims["T"], dims["B"], dims["D"]
    x = torch.randn(T, B, 3 * D, device=device, dtype=dtype)
    u = torch.randn(D, 3 * D, device=device, dtype=dtype) / max(1, D) ** 0.5
    return x, u, torch.randn(D, device=device, dtype=dtype), torch.randn(B, D, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def gates_kernel(
    x_ptr, u_ptr, bn_ptr, h0_ptr, h_ptr, r_ptr, z_ptr, n_ptr, p_ptr, ROWS, B, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """r, z, n and p of a tile of rows (t, b), all steps at once."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r = load_tile(x_ptr, rows, d, ROWS, D, 3 * D).to(tl.float32)
    z = load_tile(x_ptr + D, rows, d, ROWS, D, 3 * D).to(tl.float32)
    p = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        k = start + tl.arange(0, BLOCK)
        h = load_before(h0_ptr, h_ptr, rows, k, ROWS, B, D)
        r = tl.dot(h, load_tile(u_ptr, k, d, D, D, 3 * D), r, input_precision=PRECISION)
        z = tl.dot(h, load_tile(u_ptr + D, k, d, D, D, 3 * D), z, input_precision=PRECISION)
        p = tl.dot(h, load_tile(u_ptr + 2 * D, k, d, D, D, 3 * D), p, input_precision=PRECISION)
    r, p = tl.sigmoid(r), p + tl.load(bn_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    n = tanh(load_tile(x_ptr + 2 * D, rows, d, ROWS, D, 3 * D).to(tl.float32) + r * p)
    store_tile(r_ptr, r, rows, d, ROWS, D, D)
    store_tile(z_ptr, tl.sigmoid(z), rows, d, ROWS, D, D)
    store_tile(n_ptr, n, rows, d, ROWS, D, D)
    store_tile(p_ptr, p, rows, d, ROWS, D, D)


@triton.jit
def gru_backward_kernel(
    u_ptr, h0_ptr, h_ptr, r_ptr, z_ptr, n_ptr, p_ptr, dy_ptr, dx_ptr, dp_ptr, dbn_ptr, dh0_ptr, T, B, D,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.arange(0, BLOCK_D)
    dh = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    dbn = tl.zeros([BLOCK_D], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        step = tl.cast(t, tl.int64) * B * D
        r, z = load_tile(r_ptr + step, rows, d, B, D, D), load_tile(z_ptr + step, rows, d, B, D, D)
        n, p = load_tile(n_ptr + step, rows, d, B, D, D), load_tile(p_ptr + step, rows, d, B, D, D)
        if t > 0:
            before = load_tile(h_ptr + step - B * D, rows, d, B, D, D).to(tl.float32)
        else:
            before = load_tile(h0_ptr, rows, d, B, D, D).to(tl.float32)
        dh += load_tile(dy_ptr + step, rows, d, B, D, D).to(tl.float32)
        dn = dh * (1 - z) * (1 - n * n)
        dz = dh * (before - n) * z * (1 - z)
        dr = dn * p * r * (1 - r)
        dp = dn * r
        dbn += tl.sum(tl.where(rows[:, None] < B, dp, 0.0), axis=0)
        store_tile(dx_ptr + 3 * step, dr, rows, d, B, D, 3 * D)
        store_tile(dx_ptr + 3 * step + D, dz, rows, d, B, D, 3 * D)
        store_tile(dx_ptr + 3 * step + 2 * D, dn, rows, d, B, D, 3 * D)
        store_tile(dp_ptr + step, dp, rows, d, B, D, D)
        ur = tl.trans(load_tile(u_ptr, d, d, D, D, 3 * D))
        dh = tl.dot(dr.to(ur.dtype), ur, dh * z, input_precision=PRECISION)
        uz = tl.trans(load_tile(u_ptr + D, d, d, D, D, 3 * D))
        dh = tl.dot(dz.to(uz.dtype), uz, dh, input_precision=PRECISION)
        un = tl.trans(load_tile(u_ptr + 2 * D, d, d, D, D, 3 * D))
        dh = tl.dot(dp.to(un.dtype), un, dh, input_precision=PRECISION)
    store_tile(dh0_ptr, dh, rows, d, B, D, D)
    tl.store(dbn_ptr + tl.program_id(0) * D + d, dbn, mask=d < D)


@triton.jit
def du_kernel(
    h0_ptr, h_ptr, dx_ptr, dp_ptr, slots_ptr, ROWS, B, D, part_rows,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part's share of a tile of dU; program_id(1) counts the tiles of r, then of z, then of n."""
    tiles = tl.cdiv(D, BLOCK)
    gate = tl.program_id(1) // tiles
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) % tiles * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(2) * part_rows
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(first, tl.minimum(first + part_rows, ROWS), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        if gate == 2:
            delta = load_tile(dp_ptr, rows, cols, ROWS, D, D)
        else:
            delta = load_tile(dx_ptr + gate * D, rows, cols, ROWS, D, 3 * D)
        before = tl.trans(load_before(h0_ptr, h_ptr, rows, d, ROWS, B, D))
        acc = tl.dot(before, delta, acc, input_precision=PRECISION)
    slot = slots_ptr + tl.program_id(2).to(tl.int64) * D * 3 * D + gate * D
    store_tile(slot, acc, d, cols, D, D, 3 * D)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


def sum_slots(slots, like):
    out, size = torch.empty_like(like), like.numel()
    sum_slots_kernel[(triton.cdiv(size, 256),)](slots, out, slots.shape[0], size, BLOCK=256)
    return out


class Gru(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        x, u, bn, h0 = (tensor.contiguous() for tensor in inputs)
        h = gru(x, u, bn, h0)
        ctx.save_for_backward(x, u, bn, h0, h)
        return h

    @staticmethod
    def backward(ctx, dy):
        x, u, bn, h0, h = ctx.saved_tensors
        (T, B, D), needs = h.shape, ctx.needs_input_grad
        batch_tiles, tiles, PRECISION = triton.cdiv(B, BLOCK_B), triton.cdiv(D, BLOCK), precision()
        options = {"device": x.device, "dtype": torch.float32}
        gates = [torch.empty((T, B, D), **options) for _ in range(4)]
        gates_kernel[(triton.cdiv(T * B, BLOCK), tiles)](
            x, u, bn, h0, h, *gates, T * B, B, D, PRECISION=PRECISION, BLOCK=BLOCK
        )
        dx, dh0, dp = torch.empty_like(x), torch.empty_like(h0), torch.empty_like(h)
        dbn = torch.empty((batch_tiles, D), **options)
        gru_backward_kernel[(batch_tiles,)](
            u, h0, h, *gates, dy.contiguous(), dx, dp, dbn, dh0, T, B, D,
            PRECISION=PRECISION, BLOCK_B=BLOCK_B, BLOCK_D=max(16, triton.next_power_of_2(D)), **ONE_STAGE,
        )  # fmt: skip
        slots = None
        if needs[1]:
            part_rows = BLOCK * max(4, triton.cdiv(T * B, MAX_PARTS * BLOCK))  # whole tiles
            parts = triton.cdiv(T * B, part_rows)
            slots = torch.empty((parts, D, 3 * D), **options)
            du_kernel[(tiles, 3 * tiles, parts)](
                h0, h, dx, dp, slots, T * B, B, D, part_rows, PRECISION=PRECISION, BLOCK=BLOCK
            )
        return (
            dx if needs[0] else None,
            sum_slots(slots, u) if needs[1] else None,
            sum_slots(dbn, bn) if needs[2] else None,
            dh0 if needs[3] else None,
        )


def gru_autograd(x, u, bn, h0):
    return Gru.apply(x, u, bn, h0)
