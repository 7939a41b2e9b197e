"""What prepares the keys of a delta rule: a short causal convolution, SiLU, and unit length a head.

Forward    u_t = sum_{j < K} w_j x_{t-j}  (per channel),   a = u sigmoid(u),
           per head of D channels:  r = (sum a^2 + eps)^{-1/2},   y = r a
Backward   da = r (dy - y <dy, y>),   du = da s (1 + u (1 - s)) with s = sigmoid(u);
           dx_t = sum_{j < K} w_j du_{t+j},   dw_j = sum over batch and time of du_t x_{t-j}

Forward schedule: a program owns a tile of (time, one head), so that the length is a row's own: the three
steps are one pass from x to y. r is saved, one number a token and head.
Backward schedule: a row is corrected by a sum over its head, a tap reaches over rows. In one kernel the rows
after a tile would have to be convolved, gated and normalised again by each tile that a tap leads into; so
there are two. The first owns the forward's tiles: it rebuilds u, which y cannot give back, as SiLU is not
monotone, stores du, and sums its K numbers dw a channel into a slot, x being in registers. The second gathers
dx from du along the taps, input-stationary, and a third adds the slots.

op: conv_silu_l2norm
schedule: row_reduce_correct, gather_transpose, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK_T = 32
EPS = 1e-6


@triton.jit
def load_steps(ptr, rows, cols, T, C, first, D):
    """A tile of one head's channels, 0 outside the sequence."""
    mask = ((rows >= 0) & (rows < T))[:, None] & (cols < D)[None, :]
    return tl.load(ptr + rows[:, None] * C + first + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_steps(ptr, value, rows, cols, T, C, first, D):
    mask = (rows < T)[:, None] & (cols < D)[None, :]
    offs = rows[:, None] * C + first + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_tap(w_ptr, cols, j, first, D, K):
    return tl.load(w_ptr + (first + cols) * K + K - 1 - j, mask=cols < D, other=0.0).to(tl.float32)


@triton.jit
def convolved(
    x_ptr, w_ptr, rows, cols, T, C, first, D,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    u = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for j in tl.static_range(K):
        x = load_steps(x_ptr, rows - j, cols, T, C, first, D)
        u += load_tap(w_ptr, cols, j, first, D, K)[None, :] * x
    return u


@triton.jit
def conv_norm_kernel(
    x_ptr, w_ptr, y_ptr, r_ptr, T, H, D, eps, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_D)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64) * T
    C = H * D
    u = convolved(x_ptr + batch * C, w_ptr, rows, cols, T, C, head * D, D, K, BLOCK_T, BLOCK_D)
    a = u * tl.sigmoid(u)
    r = tl.rsqrt(tl.sum(a * a, axis=1) + eps)
    store_steps(y_ptr + batch * C, a * r[:, None], rows, cols, T, C, head * D, D)
    tl.store(r_ptr + (batch + rows) * H + head, r, mask=rows < T)


def conv_norm_forward(x, w):
    (B, T, H, D), K = x.shape, w.shape[2]
    if w.shape[:2] != (H, D):
        raise ValueError("w must have a row of taps for each channel of each head")
    if D > 256 or K > 8:
        raise ValueError(f"heads of {D} channels and {K} taps do not fit one tile")
    y = torch.empty_like(x)
    r = torch.empty((B, T, H), device=x.device, dtype=torch.float32)
    conv_norm_kernel[(triton.cdiv(T, BLOCK_T), H, B)](
        x, w, y, r, T, H, D, EPS, K, BLOCK_T=BLOCK_T, BLOCK_D=triton.next_power_of_2(D)
    )
    return y, r


@autodiff(inputs_require_grad=(0, 1))
def conv_silu_l2norm(x, w):
    """x: (B, T, H, D); w: (H, D, K), its last tap for the step itself."""
    return conv_norm_forward(x.contiguous(), w.contiguous())[0]


def reference(x, w):
    dtype = torch.promote_types(x.dtype, torch.float32)
    K, w = w.shape[2], w.to(dtype)
    padded = torch.nn.functional.pad(x.to(dtype), (0, 0, 0, 0, K - 1, 0))
    u = sum(w[:, :, K - 1 - j] * padded[:, K - 1 - j : padded.shape[1] - j] for j in range(K))
    a = torch.nn.functional.silu(u)
    return (a * torch.rsqrt(a.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


SWEEP = [
    {"B": 4, "T": 4096, "H": 16, "D": 128, "K": 4},
    {"B": 1, "T": 8191, "H": 6, "D": 96, "K": 3},
]
SWEEP_CPU = [
    {"B": 2, "T": 41, "H": 2, "D": 16, "K": 4},
    {"B": 1, "T": 33, "H": 3, "D": 10, "K": 3},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, H, D, K = (dims[name] for name in ("B", "T", "H", "D", "K"))
    x = torch.randn(B, T, H, D, device=device, dtype=dtype)
    return x, torch.randn(H, D, K, device=device, dtype=dtype) / max(1, K) ** 0.5


# ---- backward ----


@triton.jit
def du_kernel(
    x_ptr, w_ptr, r_ptr, dy_ptr, du_ptr, part_ptr, T, H, D,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_D)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64) * T
    C = H * D
    x_ptr += batch * C
    u = convolved(x_ptr, w_ptr, rows, cols, T, C, head * D, D, K, BLOCK_T, BLOCK_D)
    s = tl.sigmoid(u)
    r = tl.load(r_ptr + (batch + rows) * H + head, mask=rows < T, other=0.0)
    y = u * s * r[:, None]
    dy = load_steps(dy_ptr + batch * C, rows, cols, T, C, head * D, D)
    da = r[:, None] * (dy - y * tl.sum(dy * y, axis=1)[:, None])
    du = da * s * (1 + u * (1 - s))
    store_steps(du_ptr + batch * C, du, rows, cols, T, C, head * D, D)
    slot = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * C * K
    for j in tl.static_range(K):
        dw = tl.sum(du * load_steps(x_ptr, rows - j, cols, T, C, head * D, D), axis=0)
        tl.store(part_ptr + slot + (head * D + cols) * K + K - 1 - j, dw, mask=cols < D)


@triton.jit
def dx_kernel(w_ptr, du_ptr, dx_ptr, T, H, D, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_D)
    first = tl.program_id(1) * D
    batch = tl.program_id(2).to(tl.int64) * T * H * D
    dx = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for j in tl.static_range(K):
        du = load_steps(du_ptr + batch, rows + j, cols, T, H * D, first, D)
        dx += load_tap(w_ptr, cols, j, first, D, K)[None, :] * du
    store_steps(dx_ptr + batch, dx, rows, cols, T, H * D, first, D)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK_S, BLOCK], dtype=tl.float32)
    for start in range(0, slots, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        mask = (s < slots)[:, None] & (i < size)[None, :]
        acc += tl.load(slots_ptr + s[:, None].to(tl.int64) * size + i[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + i, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty), mask=i < size)


class ConvSiluL2norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        y, r = conv_norm_forward(x, w)
        ctx.save_for_backward(x, w, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, r = ctx.saved_tensors
        (B, T, H, D), K, needs = x.shape, w.shape[2], ctx.needs_input_grad
        grid = (triton.cdiv(T, BLOCK_T), H, B)
        tiles = {"BLOCK_T": BLOCK_T, "BLOCK_D": triton.next_power_of_2(D)}
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        du = torch.empty(x.shape, device=x.device, dtype=torch.float32)
        part = torch.empty((B * grid[0], *w.shape), device=x.device, dtype=torch.float32)
        du_kernel[grid](x, w, r, dy.contiguous(), du, part, T, H, D, K, **tiles)
        if needs[0]:
            dx_kernel[grid](w, du, dx, T, H, D, K, **tiles)
        if needs[1]:
            sum_slots_kernel[(triton.cdiv(w.numel(), 64),)](
                part, dw, B * grid[0], w.numel(), BLOCK_S=32, BLOCK=64
            )
        return dx if needs[0] else None, dw if needs[1] else None


def conv_silu_l2norm_autograd(x, w):
    return ConvSiluL2norm.apply(x, w)
