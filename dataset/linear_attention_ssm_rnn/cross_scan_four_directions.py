"""Cross scan of vision state-space models: one feature map read along four paths.

Forward    L = Y X;  row by row  y_0[i X + j] = x_ij,  column by column  y_1[j Y + i] = x_ij,
           both backwards  y_2[l] = y_0[L - 1 - l],  y_3[l] = y_1[L - 1 - l]
Backward   a pixel stands once on each path, so with r = i X + j and c = j Y + i
           dx_ij = dy_0[r] + dy_2[L - 1 - r] + dy_1[c] + dy_3[L - 1 - c]   (the "cross merge")

Forward schedule: a program owns a 32 x 32 tile of one map. It is loaded once, and stored four times: along
rows as it is, along columns transposed, so that every store runs along its path and coalesces.
Backward schedule: the owner of a tile gathers: four loads, each along its path, the two of the column paths
as a transposed tile, one sum and one store. The static maps are inverted by hand, so that no address has two
writers and there is nothing to zero; a scatter of four paths would need atomics, or four passes over dx.

op: cross_scan
schedule: gather_transpose
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 32


@triton.jit
def tile_index(BLOCK: tl.constexpr):
    """Rows and columns of the program's tile, and the number of its map."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    return i, j, tl.program_id(0).to(tl.int64)


@triton.jit
def cross_scan_kernel(x_ptr, y_ptr, Y, X, C, BLOCK: tl.constexpr):
    i, j, plane = tile_index(BLOCK)
    L = Y * X
    mask, path = (i[:, None] < Y) & (j[None, :] < X), i[:, None] * X + j[None, :]
    x = tl.load(x_ptr + plane * L + path, mask=mask, other=0.0)
    first = y_ptr + (plane // C * 4 * C + plane % C) * L  # y: (B, 4, C, L)
    tl.store(first + path, x, mask=mask)
    tl.store(first + 2 * C * L + L - 1 - path, x, mask=mask)
    x = tl.trans(x)
    mask, path = (j[:, None] < X) & (i[None, :] < Y), j[:, None] * Y + i[None, :]
    tl.store(first + C * L + path, x, mask=mask)
    tl.store(first + 3 * C * L + L - 1 - path, x, mask=mask)


@autodiff(inputs_require_grad=(0,))
def cross_scan(x):
    """x: (B, C, Y, X); gives (B, 4, C, Y X)."""
    x = x.contiguous()
    B, C, Y, X = x.shape
    y = torch.empty((B, 4, C, Y * X), device=x.device, dtype=x.dtype)
    cross_scan_kernel[(B * C, triton.cdiv(Y, BLOCK), triton.cdiv(X, BLOCK))](x, y, Y, X, C, BLOCK=BLOCK)
    return y


def reference(x):
    rows, columns = x.flatten(2), x.transpose(2, 3).flatten(2)
    return torch.stack([rows, columns, rows.flip(-1), columns.flip(-1)], dim=1)


SWEEP = [{"B": 32, "C": 192, "Y": 56, "X": 56}, {"B": 8, "C": 96, "Y": 61, "X": 110}]
SWEEP_CPU = [{"B": 2, "C": 3, "Y": 7, "X": 39}, {"B": 1, "C": 2, "Y": 33, "X": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["C"], dims["Y"], dims["X"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def cross_merge_kernel(dy_ptr, dx_ptr, Y, X, C, BLOCK: tl.constexpr):
    i, j, plane = tile_index(BLOCK)
    L = Y * X
    first = dy_ptr + (plane // C * 4 * C + plane % C) * L
    mask, path = (j[:, None] < X) & (i[None, :] < Y), j[:, None] * Y + i[None, :]
    along = tl.load(first + C * L + path, mask=mask, other=0.0).to(tl.float32)
    along += tl.load(first + 3 * C * L + L - 1 - path, mask=mask, other=0.0).to(tl.float32)
    mask, path = (i[:, None] < Y) & (j[None, :] < X), i[:, None] * X + j[None, :]
    dx = tl.trans(along) + tl.load(first + path, mask=mask, other=0.0).to(tl.float32)
    dx += tl.load(first + 2 * C * L + L - 1 - path, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + plane * L + path, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class CrossScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return cross_scan(x)

    @staticmethod
    def backward(ctx, dy):
        B, C, Y, X = ctx.shape
        dx = torch.empty(ctx.shape, device=dy.device, dtype=dy.dtype)
        grid = (B * C, triton.cdiv(Y, BLOCK), triton.cdiv(X, BLOCK))
        cross_merge_kernel[grid](dy.contiguous(), dx, Y, X, C, BLOCK=BLOCK)
        return dx


def cross_scan_autograd(x):
    return CrossScan.apply(x)
