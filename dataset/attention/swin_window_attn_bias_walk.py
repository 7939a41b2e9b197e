"""Window attention of a Swin block: small windows, a bias by relative position, a mask for shifted windows.

Forward    window w, head h, N = A^2 tokens:  S = s Q K^T + B_h + M_w,  P = softmax(S),  O = P V;
           B_h[i, j] = table[at(i, j), h], at(i, j) = (y_i - y_j + A - 1)(2 A - 1) + x_i - x_j + A - 1;
           M_w is 0 or -inf, by which tokens of the window belong together
Backward   dS = P * (dP - rowsum(P * dP)),  dP = dO V^T,  dV = P^T dO,  dQ = s dS K,  dK = s dS^T Q,
           dtable[c, h] = sum of dS[i, j] over all windows and the i, j with at(i, j) = c

Forward schedule: a window fits one tile (N is 49 or 64), so there is no online softmax; a program owns
(window, head). Tokens belong together where their group is equal: N numbers a window, no N x N mask.
Backward schedule: the tile rebuilds P from its scores, with no statistics saved, and its dots give all of dQ,
dK and dV. B is one for all windows, thousands of them: a program walks the windows pid, pid + G, .. of its
head with B in registers, loaded by its table's indices once, and sums dS in registers. It stores one N x N
part, G a head, not one a window. The last kernel turns the index map around: entry c of the table is an
offset (dy, dx), its pairs are i and i + offset, at most N of them; it sums these over the G parts.

op: swin_window_attention
schedule: row_reduce_correct, partials_then_reduce, gather_transpose
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


def tiling(q, A):
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK, BLOCK_D = (max(16, triton.next_power_of_2(size)) for size in (A * A, q.shape[-1]))
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D}


@triton.jit
def load_bias(table_ptr, H, h, A, BLOCK: tl.constexpr):
    """B of head h, -inf for keys beyond the window."""
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    at = (i // A - j // A + A - 1) * (2 * A - 1) + i % A - j % A + A - 1
    mask = (i < A * A) & (j < A * A)
    bias = tl.load(table_ptr + at * H + h, mask=mask, other=0.0).to(tl.float32)
    return tl.where(j < A * A, bias, -float("inf"))


@triton.jit
def weights(q, k, bias, group_ptr, N, scale, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    group = tl.load(group_ptr + n, mask=n < N, other=0)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias
    together = (group[:, None] == group[None, :]) | (n[:, None] >= N)  # rows beyond the window stay finite
    s = tl.where(together, s, -float("inf"))
    e = tl.exp(s - tl.max(s, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def swin_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, group_ptr, o_ptr, H, A, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    window, h, N = tl.program_id(0).to(tl.int64), tl.program_id(1), A * A
    at = (window * H + h) * N * D
    n, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    q = load_tile(q_ptr + at, n, d, N, D)
    k = load_tile(k_ptr + at, n, d, N, D)
    v = load_tile(v_ptr + at, n, d, N, D)
    bias = load_bias(table_ptr, H, h, A, BLOCK)
    p = weights(q, k, bias, group_ptr + window * N, N, scale, PRECISION, BLOCK)
    store_tile(o_ptr + at, tl.dot(p.to(v.dtype), v, input_precision=PRECISION), n, d, N, D)


def check(q, k, v, table, group):
    """The side of a window."""
    W, H, N, D = q.shape
    A = round(N**0.5)
    if not q.shape == k.shape == v.shape or A * A != N:
        raise ValueError("q, k and v must have one shape, and a window must be square")
    if table.shape != ((2 * A - 1) ** 2, H) or group.shape != (W, N) or N > 64 or D > 128:
        raise ValueError("table or group do not fit q, or a window does not fit one tile")
    return A


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def swin_window_attention(q, k, v, table, group):
    """q, k, v: (windows, heads, A * A, dim); table: ((2 A - 1)^2, heads); group: int64 (windows, A * A)."""
    q, k, v, table, group = (tensor.contiguous() for tensor in (q, k, v, table, group))
    A, o, (W, H, _, D) = check(q, k, v, table, group), torch.empty_like(q), q.shape
    swin_kernel[(W, H)](q, k, v, table, group, o, H, A, D, D**-0.5, **tiling(q, A))
    return o


def reference(q, k, v, table, group):
    A = round(q.shape[2] ** 0.5)
    n = torch.arange(A * A, device=q.device)
    dy, dx = n[:, None] // A - n // A, n[:, None] % A - n % A
    bias = table[(dy + A - 1) * (2 * A - 1) + dx + A - 1].permute(2, 0, 1)
    s = q.shape[-1] ** -0.5 * q @ k.transpose(-1, -2) + bias
    together = (group[:, :, None] == group[:, None, :])[:, None]
    return torch.softmax(s.masked_fill(~together, -float("inf")), dim=-1) @ v


SWEEP = [{"W": 4096, "H": 4, "A": 7, "D": 32}, {"W": 777, "H": 6, "A": 8, "D": 48}]
SWEEP_CPU = [{"W": 10, "H": 2, "A": 2, "D": 16}, {"W": 3, "H": 1, "A": 3, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    W, H, A, D = (dims[key] for key in ("W", "H", "A", "D"))
    q, k, v = (torch.randn(W, H, A * A, D, device=device, dtype=dtype) for _ in range(3))
    table = torch.randn((2 * A - 1) ** 2, H, device=device, dtype=dtype)
    return q, k, v, table, torch.randint(0, 2, (W, A * A), device=device)


# ---- backward ----

WALK, MAX_WALKERS = 8, 256  # least windows a program, most programs a head


@triton.jit
def swin_backward_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, group_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, parts_ptr, W, H, A, D, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    walker, h, N = tl.program_id(0).to(tl.int64), tl.program_id(1), A * A
    n, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    bias = load_bias(table_ptr, H, h, A, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for window in range(walker, W, tl.num_programs(0)):
        at = (window * H + h) * N * D
        q = load_tile(q_ptr + at, n, d, N, D)
        k = load_tile(k_ptr + at, n, d, N, D)
        v = load_tile(v_ptr + at, n, d, N, D)
        do = load_tile(do_ptr + at, n, d, N, D)
        p = weights(q, k, bias, group_ptr + window * N, N, scale, PRECISION, BLOCK)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - tl.sum(p * dp, axis=1)[:, None])  # rows beyond the window: dO is 0, and so is dS
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION)
        dq = tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
        store_tile(dq_ptr + at, dq * scale, n, d, N, D)
        store_tile(dk_ptr + at, dk * scale, n, d, N, D)
        store_tile(dv_ptr + at, dv, n, d, N, D)
        total += ds
    store_tile(parts_ptr + (h * tl.num_programs(0) + walker) * N * N, total, n, n, N, N)


@triton.jit
def table_kernel(parts_ptr, dtable_ptr, H, A, G, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr):
    """An entry of the table: the pairs (i, j) of its offset, over the G parts of a head."""
    c, h, N = tl.program_id(0), tl.program_id(1), A * A
    dy, dx = c // (2 * A - 1) - A + 1, c % (2 * A - 1) - A + 1
    j = tl.arange(0, BLOCK)
    y, x = j // A + dy, j % A + dx
    pairs = (j < N) & (y >= 0) & (y < A) & (x >= 0) & (x < A)
    acc = tl.zeros([BLOCK_G, BLOCK], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        mask = (g[:, None] < G) & pairs[None, :]
        offs = ((h * G + g[:, None]).to(tl.int64) * N + (y * A + x)[None, :]) * N + j[None, :]
        acc += tl.load(parts_ptr + offs, mask=mask, other=0.0)
    tl.store(dtable_ptr + c * H + h, tl.sum(acc).to(dtable_ptr.dtype.element_ty))


class SwinWindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, table, group):
        q, k, v, table, group = (tensor.contiguous() for tensor in (q, k, v, table, group))
        ctx.save_for_backward(q, k, v, table, group)
        return swin_window_attention(q, k, v, table, group)

    @staticmethod
    def backward(ctx, do):
        q, k, v, table, group = ctx.saved_tensors
        (W, H, N, D), needs = q.shape, ctx.needs_input_grad
        A = round(N**0.5)
        tiles, G = tiling(q, A), min(triton.cdiv(W, WALK), MAX_WALKERS)
        grads = [torch.empty_like(tensor) for tensor in (q, k, v, table)]
        dq, dk, dv, dtable = grads
        parts = torch.empty((H, G, N, N), device=q.device, dtype=torch.float32)
        swin_backward_kernel[(G, H)](
            q, k, v, table, group, do.contiguous(), dq, dk, dv, parts, W, H, A, D, D**-0.5, **tiles
        )
        if needs[3]:
            table_kernel[(table.shape[0], H)](parts, dtable, H, A, G, BLOCK=tiles["BLOCK"], BLOCK_G=16)
        return *(grad if needed else None for grad, needed in zip(grads, needs, strict=False)), None


def swin_window_attention_autograd(q, k, v, table, group):
    return SwinWindowAttention.apply(q, k, v, table, group)
