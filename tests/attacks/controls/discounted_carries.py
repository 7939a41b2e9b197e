@triton.jit
def discounted_backward_kernel(done_ptr, dv_ptr, dr_ptr, d_last_ptr, T, B, gamma, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < B
    carry = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        d = carry + tl.load(dv_ptr + t * B + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dr_ptr + t * B + cols, d, mask=mask)
        done = tl.load(done_ptr + t * B + cols, mask=mask, other=0)
        carry = tl.where(done, 0.0, gamma * d)
    tl.store(d_last_ptr + cols, carry, mask=mask)


class Discounted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, reward, done, last, gamma):
        done = done.contiguous()
        ctx.save_for_backward(done)
        ctx.gamma = gamma
        ctx.like = last.shape, last.dtype
        return discounted(reward, done, last, gamma)

    @staticmethod
    def backward(ctx, dv):
        (done,) = ctx.saved_tensors
        dv = dv.contiguous()
        T, B = dv.shape
        dr = torch.empty_like(dv)
        d_last = torch.empty(ctx.like[0], device=dv.device, dtype=ctx.like[1])
        grid = (triton.cdiv(B, 32),)
        discounted_backward_kernel[grid](done, dv, dr, d_last, T, B, ctx.gamma, BLOCK=32)
        return dr, None, d_last, None


def discounted_autograd(reward, done, last, gamma=0.95):
    return Discounted.apply(reward, done, last, gamma)
