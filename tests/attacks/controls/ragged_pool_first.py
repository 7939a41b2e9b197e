@triton.jit
def ragged_pool_backward_kernel(x_ptr, ends_ptr, d_top_ptr, d_mean_ptr, dx_ptr, D, BLOCK: tl.constexpr):
    seg = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    begin = tl.load(ends_ptr + seg)
    end = tl.load(ends_ptr + seg + 1)
    best = tl.zeros([BLOCK], dtype=tl.float32)
    where = tl.zeros([BLOCK], dtype=tl.int32) - 1
    for row in range(begin, end):
        x = tl.load(x_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        better = (row == begin) | (x > best)
        best = tl.where(better, x, best)
        where = tl.where(better, row, where)
    d_top = tl.load(d_top_ptr + seg * D + cols, mask=mask, other=0.0).to(tl.float32)
    d_mean = tl.load(d_mean_ptr + seg * D + cols, mask=mask, other=0.0).to(tl.float32)
    share = d_mean / tl.maximum(end - begin, 1)
    for row in range(begin, end):
        tl.store(dx_ptr + row * D + cols, share + tl.where(where == row, d_top, 0.0), mask=mask)


class RaggedPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ends):
        x = x.contiguous()
        ctx.save_for_backward(x, ends)
        return ragged_pool(x, ends)

    @staticmethod
    def backward(ctx, d_top, d_mean):
        x, ends = ctx.saved_tensors
        S, D = ends.numel() - 1, x.shape[1]
        dx = torch.zeros_like(x)
        grid = (S, triton.cdiv(D, 32))
        ragged_pool_backward_kernel[grid](x, ends, d_top.contiguous(), d_mean.contiguous(), dx, D, BLOCK=32)
        return dx, None


def ragged_pool_autograd(x, ends):
    return RaggedPool.apply(x, ends)
