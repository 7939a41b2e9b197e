"""Expert linear layer that gathers its rows on load: tokens are never copied into expert order.

Forward    the T k choices (token t, choice c) = t k + c, sorted by expert, stand in order: int64 (T k).
           Row i of that order is of expert e_i and token g_i = order_i // k:  Y_i = x_{g_i} W_{e_i}, stored
           at the choice's own place, order_i, so that y is (T, k, N) and a combine needs no index
Backward   dx_t = sum_c dy_tc W_e(t,c)^T,   dW_e = sum over the rows i of e of x_{g_i}^T dy_{order_i}

Forward schedule: a table from the offsets lists (expert, first row) of every row tile. A program owns a table
entry and a column tile; it reads order for its rows, and both its load of x and its store of y go through it.
Backward schedule: neither gradient makes a sorted copy. dW: (expert, K x N tile) walks the rows of its expert
and gathers both operands on load, x by token and dy by choice; one store, zeros for an expert without rows.
dX: a token has k experts, so a grouped product in which every program added to its token would need atomics.
Instead the product writes each choice's share at the choice's place (T, k, K), and the token's owner adds
its k neighbours there: contiguous, in fixed order. The table and kernel are the forward's, with the weight
read transposed and the gather told that a choice is its own row.

op: scatter_gemm
schedule: segment_gather, swap_owner
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 32


def tiling():
    """Tiles and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "BLOCK_K": BLOCK}


def tile_table(offsets):
    """int64 (tiles, 2): the expert and the first row of each row tile."""
    tiles = (offsets.diff() + BLOCK - 1) // BLOCK
    expert = torch.repeat_interleave(torch.arange(tiles.numel(), device=offsets.device), tiles)
    tile = torch.arange(expert.numel(), device=offsets.device) - (tiles.cumsum(0) - tiles)[expert]
    return torch.stack([expert, offsets[expert] + tile * BLOCK], dim=1)


@triton.jit
def scatter_gemm_kernel(
    x_ptr, w_ptr, order_ptr, offsets_ptr, table_ptr, y_ptr, N, K, FAN, stride_we, stride_wk, stride_wn,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y of a choice = row choice // FAN of x, by the weight of its expert."""
    expert = tl.load(table_ptr + 2 * tl.program_id(0))
    end = tl.load(offsets_ptr + expert + 1)
    i = tl.load(table_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, BLOCK_M)
    choice = tl.load(order_ptr + i, mask=i < end, other=0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (i[:, None] < end) & (k[None, :] < K)
        w_mask = (k[:, None] < K) & (n[None, :] < N)
        w_offs = expert * stride_we + k[:, None] * stride_wk + n[None, :] * stride_wn
        x = tl.load(x_ptr + (choice // FAN)[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        w = tl.load(w_ptr + w_offs, mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    y_mask = (i[:, None] < end) & (n[None, :] < N)
    tl.store(y_ptr + choice[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=y_mask)


def launch_scatter_gemm(x, w, order, offsets, table, fan, dtype):
    """(choices, N) from rows of x; w may be a transposed view."""
    K, N = w.shape[1:]
    y = torch.empty((order.shape[0], N), device=x.device, dtype=dtype)
    scatter_gemm_kernel[(table.shape[0], triton.cdiv(N, BLOCK))](
        x, w, order, offsets, table, y, N, K, fan, *w.stride(), **tiling()
    )
    return y


def scatter_moe_forward(x, w, order, offsets, table):
    T, K = x.shape
    if w.shape[1] != K or offsets.shape[0] != w.shape[0] + 1 or T == 0 or order.shape[0] % T:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and {order.shape[0]} choices do not fit")
    fan = order.shape[0] // T
    return launch_scatter_gemm(x, w, order, offsets, table, fan, x.dtype).view(T, fan, w.shape[2])


@autodiff(inputs_require_grad=(0, 1))
def scatter_moe_linear(x, w, order, offsets):
    """x: (T, K); w: (experts, K, N); order: int64 (T k); offsets: int64 (experts + 1), where each begins."""
    return scatter_moe_forward(x.contiguous(), w, order.contiguous(), offsets, tile_table(offsets))


def reference(x, w, order, offsets):
    fan = order.shape[0] // x.shape[0]
    parts = order.split(offsets.diff().tolist())
    rows = torch.cat([x[part // fan] @ w[e] for e, part in enumerate(parts)])
    return rows[order.argsort()].view(x.shape[0], fan, w.shape[2])


SWEEP = [
    {"T": 4096, "C": 2, "E": 8, "K": 2048, "N": 1408},
    {"T": 2047, "C": 6, "E": 64, "K": 1024, "N": 768},
]
SWEEP_CPU = [{"T": 25, "C": 2, "E": 4, "K": 32, "N": 24}, {"T": 38, "C": 3, "E": 2, "K": 19, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, C, E, K, N = (dims[name] for name in ("T", "C", "E", "K", "N"))
    x = torch.randn(T, K, device=device, dtype=dtype)
    w = torch.randn(E, K, N, device=device, dtype=dtype) / max(1, K) ** 0.5
    expert = torch.rand(T * C, device=device).square().mul(E).long().clamp(max=E - 1)  # the first are popular
    offsets = torch.searchsorted(expert.sort().values, torch.arange(E + 1, device=device))
    return x, w, expert.argsort(), offsets


# ---- backward ----


@triton.jit
def sum_choices_kernel(shares_ptr, dx_ptr, FAN, K, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for c in range(FAN):
        acc += tl.load(shares_ptr + (token * FAN + c) * K + k, mask=k < K, other=0.0)
    tl.store(dx_ptr + token * K + k, acc.to(dx_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def dw_kernel(
    x_ptr, dy_ptr, order_ptr, offsets_ptr, dw_ptr, N, K, FAN,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(2).to(tl.int64)
    end = tl.load(offsets_ptr + expert + 1)
    acc = tl.zeros([BLOCK_K, BLOCK_N], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + expert), end, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        choice = tl.load(order_ptr + i, mask=i < end, other=0)
        x_mask = (i[None, :] < end) & (k[:, None] < K)
        dy_mask = (i[:, None] < end) & (n[None, :] < N)
        x_t = tl.load(x_ptr + (choice // FAN)[None, :] * K + k[:, None], mask=x_mask, other=0.0)
        dy = tl.load(dy_ptr + choice[:, None] * N + n[None, :], mask=dy_mask, other=0.0)
        acc = tl.dot(x_t, dy, acc, input_precision=PRECISION)
    dw_mask = (k[:, None] < K) & (n[None, :] < N)
    dw_offs = (expert * K + k[:, None]) * N + n[None, :]
    tl.store(dw_ptr + dw_offs, acc.to(dw_ptr.dtype.element_ty), mask=dw_mask)


class ScatterMoeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, order, offsets):
        x, order, table = x.contiguous(), order.contiguous(), tile_table(offsets)
        ctx.save_for_backward(x, w, order, offsets, table)
        return scatter_moe_forward(x, w, order, offsets, table)

    @staticmethod
    def backward(ctx, dy):
        x, w, order, offsets, table = ctx.saved_tensors
        dy = dy.contiguous()
        (T, K), (E, _, N), fan = x.shape, w.shape, dy.shape[1]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            rows = dy.view(T * fan, N)
            shares = launch_scatter_gemm(rows, w.transpose(1, 2), order, offsets, table, 1, torch.float32)
            dx = torch.empty_like(x)
            sum_choices_kernel[(T, triton.cdiv(K, 256))](shares, dx, fan, K, BLOCK=256)
        if ctx.needs_input_grad[1]:
            dw = torch.empty((E, K, N), device=w.device, dtype=w.dtype)
            dw_kernel[(triton.cdiv(K, BLOCK), triton.cdiv(N, BLOCK), E)](
                x, dy, order, offsets, dw, N, K, fan, **tiling()
            )
        return dx, dw, None, None


def scatter_moe_linear_autograd(x, w, order, offsets):
    return ScatterMoeLinear.apply(x, w, order, offsets)
