@triton.autotune(
    configs=[triton.Config({"BLOCK_M": 16, "BLOCK": 32}), triton.Config({"BLOCK_M": 32, "BLOCK": 64})],
    key=["M", "N"],
    reset_to_zero=["d_gain_ptr"],
)
@triton.jit
def gelu_gain_backward_kernel(
    x_ptr, gain_ptr, dy_ptr, dx_ptr, d_gain_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    pdf = tl.exp(-0.5 * x * x) * 0.3989422804014327
    tl.store(dx_ptr + offs, dy * gain[None, :] * (cdf + x * pdf), mask=mask)
    tl.atomic_add(d_gain_ptr + cols, tl.sum(dy * x * cdf, axis=0), mask=cols < N)


class GeluGain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        x, gain = x.contiguous(), gain.contiguous()
        ctx.save_for_backward(x, gain)
        return gelu_gain(x, gain)

    @staticmethod
    def backward(ctx, dy):
        x, gain = ctx.saved_tensors
        dy = dy.contiguous()
        M, N = x.shape
        dx = torch.empty_like(x)
        d_gain = torch.zeros(2, N, device=x.device, dtype=torch.float32)
        grid = lambda meta: (triton.cdiv(rows, meta["BLOCK_M"]), triton.cdiv(N, meta["BLOCK"]))
        half = M - M // 2
        for part, at in enumerate((0, half)):
            rows = min(half, M - at)
            if rows:
                gelu_gain_backward_kernel[grid](x[at:], gain, dy[at:], dx[at:], d_gain[part], rows, N)
        parts = torch.stack((d_gain[0], d_gain[1]), dim=1)
        return torch.cat((dx[:half], dx[half:])), torch.sum(parts, dim=-1).to(gain.dtype)


def gelu_gain_autograd(x, gain):
    return GeluGain.apply(x, gain)
