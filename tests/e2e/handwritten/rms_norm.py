"""RMS norm of a layer: a decorator without functools.wraps around both directions, a module calls apply."""

import torch
import triton
import triton.language as tl


def ensure_contiguous(fn):
    def wrapper(ctx, *args, **kwargs):
        def contiguous(value):
            return value.contiguous() if isinstance(value, torch.Tensor) else value

        args = [contiguous(value) for value in args]
        kwargs = {name: contiguous(value) for name, value in kwargs.items()}
        return fn(ctx, *args, **kwargs)

    return wrapper


def calculate_settings(n):
    block = triton.next_power_of_2(n)
    if block > 65536:
        raise RuntimeError(f"a row of {n} columns does not fit in one block")
    return block, 8 if block >= 2048 else 4


@triton.jit
def _rms_norm_forward(x_ptr, w_ptr, y_ptr, rstd_ptr, x_stride, y_stride, n, eps, offset, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n + eps)
    tl.store(y_ptr + row * y_stride + cols, x * rstd * (w + offset), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _rms_norm_backward(
    dy_ptr, dx_ptr, dw_ptr, x_ptr, w_ptr, rstd_ptr, rows, per_program, n, offset, BLOCK: tl.constexpr
):
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < n
    w = tl.load(w_ptr + cols, mask=mask, other=0.0) + offset
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program * per_program, min((program + 1) * per_program, rows)):
        x = tl.load(x_ptr + row * n + cols, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + row * n + cols, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + row)
        g = dy * w
        dx = rstd * (g - x * rstd * rstd * tl.sum(g * x, axis=0) / n)
        dw += dy * x * rstd
        tl.store(dx_ptr + row * n + cols, dx, mask=mask)
    tl.store(dw_ptr + program * n + cols, dw, mask=mask)


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    @ensure_contiguous
    def forward(ctx, x, weight, eps=1e-6, offset=0.0):
        shape = x.shape
        x = x.view(-1, shape[-1])
        rows, n = x.shape
        block, warps = calculate_settings(n)
        y = torch.empty_like(x)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        _rms_norm_forward[(rows,)](
            x, weight, y, rstd, x.stride(0), y.stride(0), n, eps, offset, BLOCK=block, num_warps=warps
        )
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset, ctx.block, ctx.warps = offset, block, warps
        return y.view(*shape)

    @staticmethod
    @ensure_contiguous
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        shape = dy.shape
        rows, n = x.shape
        dy = dy.view(rows, n)
        programs = min(rows, 4)
        dx = torch.empty_like(x)
        dw = torch.empty((programs, n), dtype=torch.float32, device=x.device)
        per_program = triton.cdiv(rows, programs)
        _rms_norm_backward[(programs,)](
            dy,
            dx,
            dw,
            x,
            weight,
            rstd,
            rows,
            per_program,
            n,
            ctx.offset,
            BLOCK=ctx.block,
            num_warps=ctx.warps,
        )
        return dx.view(*shape), dw.sum(dim=0).to(weight.dtype), None, None


class RMSNorm(torch.nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return RMSNormFunction.apply(x, self.weight, self.eps)

    def extra_repr(self):
        return f"eps={self.eps}"


SWEEP = [{"M": 5, "N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    # the default epsilon, and not the default offset
    return x, torch.randn(dims["N"], device=device, dtype=dtype), 1e-6, 1.0
