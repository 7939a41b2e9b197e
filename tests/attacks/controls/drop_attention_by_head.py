@triton.jit
def drop_attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, do_ptr, d_lse_ptr, dq_ptr, dk_ptr, dv_ptr, M, N, D, scale, p_drop, seed,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kv = (b * N + n[:, None]) * D + d[None, :]
    in_kv = (n[:, None] < N) & (d[None, :] < D)
    k = tl.load(k_ptr + kv, mask=in_kv, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + kv, mask=in_kv, other=0.0).to(tl.float32)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for m in range(M):
        row = (b * M + m) * D + d
        q = tl.load(q_ptr + row, mask=d < D, other=0.0).to(tl.float32)
        do = tl.load(do_ptr + row, mask=d < D, other=0.0).to(tl.float32)
        d_lse = tl.load(d_lse_ptr + b * M + m).to(tl.float32)
        s = tl.where(n < N, tl.sum(q[None, :] * k, axis=1) * scale, -float("inf"))
        p = tl.exp(s - tl.load(lse_ptr + b * M + m))
        keep = tl.rand(seed, (b * M + m) * N + n) >= p_drop
        z = tl.where(keep, p / (1 - p_drop), 0.0)
        dv += z[:, None] * do[None, :]
        dz = tl.sum(do[None, :] * v, axis=1)
        dp = tl.where(keep, dz / (1 - p_drop), 0.0)
        ds = p * (dp - tl.sum(p * dp, axis=0) + d_lse) * scale
        dk += ds[:, None] * q[None, :]
        tl.store(dq_ptr + row, tl.sum(ds[:, None] * k, axis=0), mask=d < D)
    tl.store(dk_ptr + kv, dk, mask=in_kv)
    tl.store(dv_ptr + kv, dv, mask=in_kv)


class DropAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, p_drop, seed):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = drop_attention(q, k, v, p_drop, seed)
        ctx.save_for_backward(q, k, v, lse)
        ctx.how = p_drop, seed
        return o, lse

    @staticmethod
    def backward(ctx, do, d_lse):
        q, k, v, lse = ctx.saved_tensors
        B, M, D = q.shape
        N = k.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        drop_attention_backward_kernel[(B,)](
            q, k, v, lse, do.contiguous(), d_lse.contiguous(), dq, dk, dv, M, N, D, D**-0.5, *ctx.how,
            BLOCK_N=triton.next_power_of_2(N), BLOCK_D=triton.next_power_of_2(D),
        )  # fmt: skip
        return dq, dk, dv, None, None


def drop_attention_autograd(q, k, v, p_drop=0.2, seed=7):
    return DropAttention.apply(q, k, v, p_drop, seed)
