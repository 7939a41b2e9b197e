@triton.jit
def smoothed_backward_kernel(
    x_ptr, target_ptr, d_ptr, dx_ptr, M, V, smoothing, z_weight, ignore_index,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < V
    count = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        others = tl.load(target_ptr + rows, mask=rows < M, other=ignore_index)
        count += (others != ignore_index).to(tl.float32)
    d = tl.load(d_ptr).to(tl.float32) / tl.maximum(tl.sum(count, axis=0), 1.0)
    target = tl.load(target_ptr + row)
    x = tl.load(x_ptr + row * V + cols, mask=mask, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    e = tl.exp(x - top)
    total = tl.sum(e, axis=0)
    lse = top + tl.log(total)
    p = e / total
    dx = p * (1 + 2 * z_weight * lse) - smoothing / V
    dx -= tl.where(cols == target, 1 - smoothing, 0.0)
    dx = tl.where(target == ignore_index, 0.0, dx * d)
    tl.store(dx_ptr + row * V + cols, dx, mask=mask)


class SmoothedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, target, smoothing, z_weight, ignore_index):
        x, target = x.contiguous(), target.contiguous()
        ctx.save_for_backward(x, target)
        ctx.how = smoothing, z_weight, ignore_index
        return smoothed_loss(x, target, smoothing, z_weight, ignore_index)

    @staticmethod
    def backward(ctx, d):
        x, target = ctx.saved_tensors
        M, V = x.shape
        dx = torch.empty_like(x)
        smoothed_backward_kernel[(M,)](
            x, target, d, dx, M, V, *ctx.how, BLOCK=triton.next_power_of_2(V), BLOCK_M=64
        )
        return dx, None, None, None, None


def smoothed_loss_autograd(x, target, smoothing=0.1, z_weight=1e-4, ignore_index=-100):
    return SmoothedLoss.apply(x, target, smoothing, z_weight, ignore_index)
