"""sLSTM, the scalar memory of xLSTM: exponential gates, a stabiliser, and recurrence within each head.

Forward    a head has D units and four D x D matrices R, one for each of the parts z, i, f, o of its input x:
           a_t = x_t + h_{t-1} R  for each part;   z = tanh(a_z),  o = sigmoid(a_o),  l = log sigmoid(a_f),
           m_t = max(l + m_{t-1}, a_i),   i' = e^{a_i - m_t},   f' = e^{l + m_{t-1} - m_t},
           c_t = f' c_{t-1} + i' z,   n_t = f' n_{t-1} + i',   h_t = o c_t / n_t
Backward   c and n are e^{-m} times true sums, and h does not depend on m: so m counts as a constant, and
           with u = c_t / n_t:   dc_t = dh o / n_t + (from t+1),   dn_t = -dh o u / n_t + (from t+1),
           da_z = dc i' (1 - z^2),   da_i = i' (dc z + dn),   da_o = dh u o (1 - o),
           da_f = f' (dc c_{t-1} + dn n_{t-1}) (1 - sigmoid(a_f));
           to t-1:  dc f',  dn f',  and to h_{t-1} the sum over the parts of da R^T;
           dR = sum_t h_{t-1}^T da_t

Forward schedule: heads do not mix and batch rows are independent, so a program owns (batch tile, head) and
walks time with h, c, n, m in registers and four D x D dots a step. It stores h, and for the backward c, n and
m.
Backward schedule: the same owner in reverse. Its gates are rebuilt from the stored h, which costs the four
dots again, but m_t - and with it i' and f' - is read, so that no maximum is taken and no branch has a
gradient. dR is not made in the walk: four accumulators of D x D beside the state do not fit the registers. da
is dx, stored anyway, and dR is a product over (t, b) by owners of (head, part) after the walk, with the rows
split into parts, a slot each, that a last kernel adds.

op: slstm
schedule: reverse_scan, recompute_from_stats, partials_then_reduce
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_B = 16
BLOCK_R = 32
MAX_PARTS = 16


def tiling(D):
    """Tiles and the precision of dots; R is read at each step, so its loads are not staged."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(D))
    return {"PRECISION": PRECISION, "BLOCK_D": BLOCK_D, "num_stages": 1, "num_warps": 8}


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
def tanh(a):
    return 2.0 * tl.sigmoid(2.0 * a) - 1.0


@triton.jit
def log_sigmoid(a):
    return tl.where(a < 0, a, 0.0) - tl.log(1.0 + tl.exp(tl.where(a < 0, a, -a)))


@triton.jit
def preactivations(x_ptr, r_ptr, h, rows, d, B, D, width, PRECISION: tl.constexpr):
    """The four parts of x_t + h R; a part of x is `width` / 4 wide, of R one matrix."""
    left = h.to(r_ptr.dtype.element_ty)
    x = load_tile(x_ptr, rows, d, B, D, width).to(tl.float32)
    a_z = tl.dot(left, load_tile(r_ptr, d, d, D, D, D), x, input_precision=PRECISION)
    x = load_tile(x_ptr + width // 4, rows, d, B, D, width).to(tl.float32)
    a_i = tl.dot(left, load_tile(r_ptr + D * D, d, d, D, D, D), x, input_precision=PRECISION)
    x = load_tile(x_ptr + width // 4 * 2, rows, d, B, D, width).to(tl.float32)
    a_f = tl.dot(left, load_tile(r_ptr + 2 * D * D, d, d, D, D, D), x, input_precision=PRECISION)
    x = load_tile(x_ptr + width // 4 * 3, rows, d, B, D, width).to(tl.float32)
    a_o = tl.dot(left, load_tile(r_ptr + 3 * D * D, d, d, D, D, D), x, input_precision=PRECISION)
    return a_z, a_i, a_f, a_o


@triton.jit
def slstm_kernel(
    x_ptr, r_ptr, h_ptr, c_ptr, n_ptr, m_ptr, T, B, H, D,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    h = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    c = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    n = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    m = tl.full([BLOCK_B, BLOCK_D], -1e30, dtype=tl.float32)
    for t in range(T):
        step = tl.cast(t, tl.int64) * B * H * D
        x = x_ptr + 4 * step + head * D
        r = r_ptr + head * 4 * D * D
        a_z, a_i, a_f, a_o = preactivations(x, r, h, rows, d, B, D, 4 * H * D, PRECISION)
        forget = log_sigmoid(a_f) + m
        m = tl.maximum(forget, a_i)
        i, f = tl.exp(a_i - m), tl.exp(forget - m)
        c = f * c + i * tanh(a_z)
        n = f * n + i
        h = tl.sigmoid(a_o) * c / n
        place = step + head * D
        store_tile(h_ptr + place, h, rows, d, B, D, H * D)
        store_tile(c_ptr + place, c, rows, d, B, D, H * D)
        store_tile(n_ptr + place, n, rows, d, B, D, H * D)
        store_tile(m_ptr + place, m, rows, d, B, D, H * D)


def slstm_forward(x, r):
    (T, B, width), (H, _, D, _) = x.shape, r.shape
    if width != 4 * H * D or r.shape != (H, 4, D, D):
        raise ValueError(f"x {tuple(x.shape)} and r {tuple(r.shape)} do not fit")
    if D > 64:
        raise ValueError(f"heads of {D} units do not fit one tile")
    h = torch.empty((T, B, H * D), device=x.device, dtype=x.dtype)
    c, n, m = (torch.empty(h.shape, device=x.device, dtype=torch.float32) for _ in range(3))
    slstm_kernel[(triton.cdiv(B, BLOCK_B), H)](x, r, h, c, n, m, T, B, H, D, BLOCK_B=BLOCK_B, **tiling(D))
    return h, c, n, m


@autodiff(inputs_require_grad=(0, 1))
def slstm(x, r):
    """x: (T, B, 4 H D), parts z, i, f, o of H heads each; r: (H, 4, D, D). Gives h: (T, B, H D)."""
    return slstm_forward(x.contiguous(), r.contiguous())[0]


def reference(x, r):
    (T, B, _), (H, _, D, _) = x.shape, r.shape
    h, c, n = (x.new_zeros(B, H, D) for _ in range(3))
    m, steps = x.new_full((B, H, D), -1e30), []
    for x_t in x.reshape(T, B, 4, H, D):
        z, i, f, o = (x_t + torch.einsum("bhd,hpde->bphe", h, r)).unbind(1)
        forget = torch.nn.functional.logsigmoid(f) + m
        m = torch.maximum(forget, i)
        i, f = torch.exp(i - m), torch.exp(forget - m)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = torch.sigmoid(o) * c / n
        steps.append(h.flatten(1))
    return torch.stack(steps)


SWEEP = [{"T": 256, "B": 128, "H": 4, "D": 64}, {"T": 301, "B": 61, "H": 3, "D": 48}]
SWEEP_CPU = [{"T": 5, "B": 5, "H": 2, "D": 16}, {"T": 9, "B": 18, "H": 1, "D": 12}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, B, H, D = (dims[key] for key in ("T", "B", "H", "D"))
    x = torch.randn(T, B, 4 * H * D, device=device, dtype=dtype)
    return x, torch.randn(H, 4, D, D, device=device, dtype=dtype) / max(1, D) ** 0.5


# ---- backward ----


@triton.jit
def back_through(da, r_ptr, dh, d, D, PRECISION: tl.constexpr):
    r = tl.trans(load_tile(r_ptr, d, d, D, D, D))
    return tl.dot(da.to(r.dtype), r, dh, input_precision=PRECISION)


@triton.jit
def slstm_backward_kernel(
    x_ptr, r_ptr, h_ptr, c_ptr, n_ptr, m_ptr, dy_ptr, dx_ptr, T, B, H, D,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    r = r_ptr + head * 4 * D * D
    dh = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    dc = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    dn = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        step = tl.cast(t, tl.int64) * B * H * D
        place, width = step + head * D, H * D
        inside = (rows[:, None] < B) & (d[None, :] < D)
        offs = place + (rows[:, None] - B) * width + d[None, :]  # of the step before
        h_before = tl.load(h_ptr + offs, mask=inside & (t > 0), other=0.0)
        c_before = tl.load(c_ptr + offs, mask=inside & (t > 0), other=0.0)
        n_before = tl.load(n_ptr + offs, mask=inside & (t > 0), other=0.0)
        m_before = tl.load(m_ptr + offs, mask=inside & (t > 0), other=-1e30)
        x = x_ptr + 4 * step + head * D
        a_z, a_i, a_f, a_o = preactivations(x, r, h_before, rows, d, B, D, 4 * width, PRECISION)
        m = load_tile(m_ptr + place, rows, d, B, D, width)
        z, o, i = tanh(a_z), tl.sigmoid(a_o), tl.exp(a_i - m)
        f = tl.exp(log_sigmoid(a_f) + m_before - m)
        n = tl.where(inside, load_tile(n_ptr + place, rows, d, B, D, width), 1.0)
        u = load_tile(c_ptr + place, rows, d, B, D, width) / n

        dh += load_tile(dy_ptr + place, rows, d, B, D, width).to(tl.float32)
        dc += dh * o / n
        dn -= dh * o * u / n
        da_z = dc * i * (1 - z * z)
        da_i = i * (dc * z + dn)
        da_f = f * (dc * c_before + dn * n_before) * tl.sigmoid(-a_f)
        da_o = dh * u * o * (1 - o)
        dx = dx_ptr + 4 * step + head * D
        store_tile(dx, da_z, rows, d, B, D, 4 * width)
        store_tile(dx + width, da_i, rows, d, B, D, 4 * width)
        store_tile(dx + 2 * width, da_f, rows, d, B, D, 4 * width)
        store_tile(dx + 3 * width, da_o, rows, d, B, D, 4 * width)
        dh = tl.zeros([BLOCK_B, BLOCK_D], dtype=tl.float32)
        dh = back_through(da_z, r, dh, d, D, PRECISION)
        dh = back_through(da_i, r + D * D, dh, d, D, PRECISION)
        dh = back_through(da_f, r + 2 * D * D, dh, d, D, PRECISION)
        dh = back_through(da_o, r + 3 * D * D, dh, d, D, PRECISION)
        dc *= f
        dn *= f


@triton.jit
def dr_kernel(
    h_ptr, dx_ptr, slots_ptr, ROWS, B, H, D, part_rows,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A share of dR of (head, part), program_id(0) counting both, from rows (t, b)."""
    head, part = tl.program_id(0) // 4, tl.program_id(0) % 4
    d = tl.arange(0, BLOCK_D)
    first = tl.program_id(1) * part_rows
    acc = tl.zeros([BLOCK_D, BLOCK_D], dtype=tl.float32)
    for start in range(first, tl.minimum(first + part_rows, ROWS), BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        mask = (rows[:, None] < ROWS) & (rows[:, None] >= B) & (d[None, :] < D)  # h before t = 0 is 0
        offs = (rows[:, None].to(tl.int64) - B) * H * D + head * D + d[None, :]
        before = tl.load(h_ptr + offs, mask=mask, other=0.0)
        da = load_tile(dx_ptr + (part * H + head) * D, rows, d, ROWS, D, 4 * H * D)
        acc = tl.dot(tl.trans(before), da, acc, input_precision=PRECISION)
    slot = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    store_tile(slots_ptr + slot * D * D, acc, d, d, D, D, D)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


class Slstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r):
        x, r = x.contiguous(), r.contiguous()
        h, c, n, m = slstm_forward(x, r)
        ctx.save_for_backward(x, r, h, c, n, m)
        return h

    @staticmethod
    def backward(ctx, dy):
        x, r, h, c, n, m = ctx.saved_tensors
        (T, B, _), (H, _, D, _) = x.shape, r.shape
        dx, tiles = torch.empty_like(x), tiling(D)
        slstm_backward_kernel[(triton.cdiv(B, BLOCK_B), H)](
            x, r, h, c, n, m, dy.contiguous(), dx, T, B, H, D, BLOCK_B=BLOCK_B, **tiles
        )
        dr = None
        if ctx.needs_input_grad[1]:
            dr, part_rows = torch.empty_like(r), BLOCK_R * max(4, triton.cdiv(T * B, MAX_PARTS * BLOCK_R))
            parts = triton.cdiv(T * B, part_rows)
            slots = torch.empty((parts, *r.shape), device=r.device, dtype=torch.float32)
            dr_kernel[(4 * H, parts)](h, dx, slots, T * B, B, H, D, part_rows, BLOCK_R=BLOCK_R, **tiles)
            size = dr.numel()
            sum_slots_kernel[(triton.cdiv(size, 256),)](slots, dr, parts, size, BLOCK=256)
        return dx if ctx.needs_input_grad[0] else None, dr


def slstm_autograd(x, r):
    return Slstm.apply(x, r)
