@triton.jit
def sample_line_backward_kernel(x_ptr, at_ptr, dy_ptr, dx_ptr, d_at_ptr, C, L, P, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = p < P
    at = tl.load(at_ptr + b * P + p, mask=mask, other=-9.0).to(tl.float32)
    low = tl.floor(at)
    part = at - low
    left = low.to(tl.int32)
    has_left = mask & (left >= 0) & (left < L)
    has_right = mask & (left + 1 >= 0) & (left + 1 < L)
    d_at = tl.zeros([BLOCK], dtype=tl.float32)
    for c in range(C):
        row = x_ptr + (b * C + c) * L
        d_row = dx_ptr + (b * C + c) * L
        dy = tl.load(dy_ptr + (b * C + c) * P + p, mask=mask, other=0.0).to(tl.float32)
        x0 = tl.load(row + left, mask=has_left, other=0.0).to(tl.float32)
        x1 = tl.load(row + left + 1, mask=has_right, other=0.0).to(tl.float32)
        d_at += dy * (x1 - x0)
        tl.atomic_add(d_row + left, dy * (1 - part), mask=has_left)
        tl.atomic_add(d_row + left + 1, dy * part, mask=has_right)
    tl.store(d_at_ptr + b * P + p, d_at, mask=mask)


class SampleLine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, at):
        ctx.save_for_backward(x, at)
        return sample_line(x, at)

    @staticmethod
    def backward(ctx, dy):
        x, at = (t.contiguous() for t in ctx.saved_tensors)
        dy = dy.contiguous()
        B, C, L = x.shape
        P = at.shape[1]
        dx = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
        d_at = torch.empty_like(at)
        grid = (B, triton.cdiv(P, 32))
        sample_line_backward_kernel[grid](x, at, dy, dx, d_at, C, L, P, BLOCK=32)
        return dx.to(x.dtype), d_at


def sample_line_autograd(x, at):
    return SampleLine.apply(x, at)
