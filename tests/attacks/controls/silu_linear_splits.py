SPLITS = 3


@triton.jit
def pre_activation_kernel(
    x_ptr, w_ptr, b_ptr, dy_ptr, ds_ptr, M, N, K, x_m, x_k, w_k, w_n,
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + rows[:, None] * x_m + k[None, :] * x_k,
                    mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0)  # fmt: skip
        w = tl.load(w_ptr + k[:, None] * w_k + cols[None, :] * w_n,
                    mask=(k[:, None] < K) & (cols[None, :] < N), other=0.0)  # fmt: skip
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    sig = tl.sigmoid(acc)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    offs = rows[:, None] * N + cols[None, :]
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(ds_ptr + offs, dy * sig * (1 + acc * (1 - sig)), mask=mask)


@triton.jit
def dx_kernel(ds_ptr, w_ptr, dx_ptr, M, N, K, w_k, w_n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ks = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        ds = tl.load(ds_ptr + rows[:, None] * N + n[None, :],
                     mask=(rows[:, None] < M) & (n[None, :] < N), other=0.0)  # fmt: skip
        w = tl.load(w_ptr + ks[None, :] * w_k + n[:, None] * w_n,
                    mask=(ks[None, :] < K) & (n[:, None] < N), other=0.0).to(tl.float32)  # fmt: skip
        acc = tl.dot(ds, w, acc, input_precision="ieee")
    mask = (rows[:, None] < M) & (ks[None, :] < K)
    tl.store(dx_ptr + rows[:, None] * K + ks[None, :], acc.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dw_kernel(
    x_ptr, ds_ptr, dw_ptr, db_ptr, M, N, K, x_m, x_k, per_split, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    ks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.program_id(2) * per_split
    end = tl.minimum(begin + per_split, M)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        m = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + m[None, :] * x_m + ks[:, None] * x_k,
                    mask=(m[None, :] < end) & (ks[:, None] < K), other=0.0).to(tl.float32)  # fmt: skip
        ds = tl.load(ds_ptr + m[:, None] * N + cols[None, :],
                     mask=(m[:, None] < end) & (cols[None, :] < N), other=0.0)  # fmt: skip
        acc = tl.dot(x, ds, acc, input_precision="ieee")
        db += tl.sum(ds, axis=0)
    mask = (ks[:, None] < K) & (cols[None, :] < N)
    tl.atomic_add(dw_ptr + ks[:, None] * N + cols[None, :], acc, mask=mask)
    if BIAS:
        tl.atomic_add(db_ptr + cols, db, mask=(cols < N) & (tl.program_id(0) == 0))


class LinearSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.save_for_backward(x, w, bias)
        return linear_silu(x, w, bias)

    @staticmethod
    def backward(ctx, dy):
        x, w, bias = ctx.saved_tensors
        dy = dy.contiguous()
        M, K = x.shape
        N = w.shape[1]
        BIAS = bias is not None
        bias = bias.contiguous() if BIAS else None
        ds = torch.empty((M, N), device=x.device, dtype=torch.float32)
        grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
        pre_activation_kernel[grid](
            x, w, bias, dy, ds, M, N, K, *x.stride(), *w.stride(), BIAS=BIAS, BLOCK=32
        )
        dx = torch.empty((M, K), device=x.device, dtype=x.dtype)
        grid = (triton.cdiv(M, 32), triton.cdiv(K, 32))
        dx_kernel[grid](ds, w, dx, M, N, K, *w.stride(), BLOCK=32)
        dw = torch.zeros((K, N), device=x.device, dtype=torch.float32)
        db = torch.zeros(N, device=x.device, dtype=torch.float32) if BIAS else None
        grid = (triton.cdiv(K, 32), triton.cdiv(N, 32), SPLITS)
        per_split = triton.cdiv(M, SPLITS)
        dw_kernel[grid](x, ds, dw, db, M, N, K, *x.stride(), per_split, BIAS=BIAS, BLOCK=32)
        return dx, dw.to(w.dtype), db.to(w.dtype) if BIAS else None


def linear_silu_autograd(x, w, bias=None):
    return LinearSilu.apply(x, w, bias)
