@triton.jit
def conv1d_dx_kernel(
    w_ptr, dy_ptr, dx_ptr, I, O, L, P, step, dilation, pad, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0)
    i = tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for o in range(O):
        for t in range(TAPS):
            num = at + pad - t * dilation
            pos = num // step
            hit = (at < L) & (num >= 0) & (num % step == 0) & (pos < P)
            dy = tl.load(dy_ptr + (b * O + o) * P + pos, mask=hit, other=0.0).to(tl.float32)
            acc += dy * tl.load(w_ptr + (o * I + i) * TAPS + t).to(tl.float32)
    tl.store(dx_ptr + (b * I + i) * L + at, acc, mask=at < L)


@triton.jit
def conv1d_dw_kernel(
    x_ptr, dy_ptr, dw_ptr, B, I, O, L, P, step, dilation, pad, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    o = tl.program_id(0)
    i = tl.program_id(1)
    t = tl.program_id(2)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(B):
        for start in range(0, P, BLOCK):
            pos = start + tl.arange(0, BLOCK)
            at = pos * step + t * dilation - pad
            inside = (pos < P) & (at >= 0) & (at < L)
            x = tl.load(x_ptr + (b * I + i) * L + at, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + (b * O + o) * P + pos, mask=inside, other=0.0).to(tl.float32)
            acc += x * dy
    tl.store(dw_ptr + (o * I + i) * TAPS + t, tl.sum(acc, axis=0))


class Conv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, step, dilation, pad):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.how = step, dilation, pad
        return conv1d(x, w, step, dilation, pad)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        B, I, L = x.shape
        O, _, TAPS = w.shape
        P = dy.shape[2]
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        conv1d_dx_kernel[(B, I, triton.cdiv(L, 32))](w, dy, dx, I, O, L, P, *ctx.how, TAPS=TAPS, BLOCK=32)
        conv1d_dw_kernel[(O, I, TAPS)](x, dy, dw, B, I, O, L, P, *ctx.how, TAPS=TAPS, BLOCK=32)
        return dx, dw, None, None, None


def conv1d_autograd(x, w, step=2, dilation=1, pad=1):
    return Conv1d.apply(x, w, step, dilation, pad)
