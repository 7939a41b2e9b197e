"""Between two layers of a conditioned transformer: gated residual, RMS norm, scale, by vectors of a sample.

Forward    for sample b, token t:   y = res + a_b f,   zhat = y r,  r = (mean y^2 + eps)^(-1/2),
           z = zhat (1 + s_b);   returns y and z
Backward   with g = dz (1 + s_b):   D = dy + r (g - zhat mean(g zhat)), all that arrives at y:
           dres = D,   df = a_b D,   da_b = sum over the tokens of b of D f,   ds_b = of dz zhat

Forward schedule: a program owns a token. r is saved, and y, which is an output.
Backward schedule: a and s are vectors a sample that all of its tokens share, neither one for all rows, as a
norm's weight, nor one a row. So the grid is (part of the tokens, sample): a program stays in one sample and
keeps a, s, da and ds in registers while it walks its tokens; for each of them it adds both routes into y
before the stores of dres and df. Its da and ds go to slots (sample, part), and a second kernel adds the parts
of each sample. With many samples one part each would do; with few, the parts fill the GPU.

op: ada_layer_norm
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 4
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tile_of(N):
    """A whole row in one tile, and warps enough to hold it in registers."""
    BLOCK = triton.next_power_of_2(N)
    return {"BLOCK": BLOCK, "num_warps": min(16, max(4, BLOCK // 512))}


@triton.jit
def load_row(ptr, row, cols, N):
    return tl.load(ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, value, row, cols, N):
    tl.store(ptr + row * N + cols, value.to(ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def gate_norm_kernel(f_ptr, res_ptr, a_ptr, s_ptr, y_ptr, z_ptr, r_ptr, T, N, eps, BLOCK: tl.constexpr):
    b, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    row = b * T + tl.program_id(0)
    y = load_row(res_ptr, row, cols, N) + load_row(a_ptr, b, cols, N) * load_row(f_ptr, row, cols, N)
    y = y.to(y_ptr.dtype.element_ty).to(tl.float32)  # the norm sees what the next layer will see
    r = tl.rsqrt(tl.sum(y * y, axis=0) / N + eps)
    tl.store(r_ptr + row, r)
    store_row(y_ptr, y, row, cols, N)
    store_row(z_ptr, y * r * (1 + load_row(s_ptr, b, cols, N)), row, cols, N)


def ada_rms_norm_forward(f, res, a, s, eps):
    B, T, N = f.shape
    if res.shape != f.shape or a.shape != (B, N) or s.shape != (B, N):
        raise ValueError(f"f {tuple(f.shape)}, res {tuple(res.shape)} and a {tuple(a.shape)} do not fit")
    if N > 16384:
        raise ValueError(f"a row of {N} does not fit one tile")
    y, z = torch.empty_like(f), torch.empty_like(f)
    r = torch.empty((B, T), device=f.device, dtype=torch.float32)
    gate_norm_kernel[(T, B)](f, res, a, s, y, z, r, T, N, eps, **tile_of(N))
    return y, z, r


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def gate_residual_ada_rms_norm(f, res, a, s, eps=1e-6):
    """f, res: (B, T, N), a layer's result and its residual; a, s: (B, N). Returns y and z, (B, T, N) each."""
    f, res, a, s = f.contiguous(), res.contiguous(), a.contiguous(), s.contiguous()
    return ada_rms_norm_forward(f, res, a, s, eps)[:2]


def reference(f, res, a, s, eps=1e-6):
    y = res + a[:, None] * f
    return y, y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1 + s[:, None])


SWEEP = [{"B": 16, "T": 1024, "N": 1152}, {"B": 3, "T": 4097, "N": 3000}]
SWEEP_CPU = [{"B": 2, "T": 37, "N": 40}, {"B": 3, "T": 9, "N": 17}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, N = dims["B"], dims["T"], dims["N"]
    f, res = (torch.randn(B, T, N, device=device, dtype=dtype) for _ in range(2))
    a, s = (torch.randn(B, N, device=device, dtype=dtype) for _ in range(2))
    return f, res, a, 0.2 * s


# ---- backward ----

PROGRAMS = 256  # about two a multiprocessor


@triton.jit
def gate_norm_backward_kernel(
    f_ptr, a_ptr, s_ptr, y_ptr, r_ptr, dy_ptr, dz_ptr, df_ptr, dres_ptr, da_slots_ptr, ds_slots_ptr, T, N,
    BLOCK: tl.constexpr,
):  # fmt: skip
    part, parts = tl.program_id(0), tl.num_programs(0)
    b, cols = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    a, s = load_row(a_ptr, b, cols, N), load_row(s_ptr, b, cols, N)
    da = tl.zeros([BLOCK], dtype=tl.float32)
    ds = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(part, T, parts):
        row = b * T + t
        r = tl.load(r_ptr + row)
        zhat = load_row(y_ptr, row, cols, N) * r
        dz = load_row(dz_ptr, row, cols, N)
        g = dz * (1 + s)
        D = load_row(dy_ptr, row, cols, N) + r * (g - zhat * (tl.sum(g * zhat, axis=0) / N))
        store_row(dres_ptr, D, row, cols, N)
        store_row(df_ptr, a * D, row, cols, N)
        da += D * load_row(f_ptr, row, cols, N)
        ds += dz * zhat
    store_row(da_slots_ptr, da, b * parts + part, cols, N)
    store_row(ds_slots_ptr, ds, b * parts + part, cols, N)


@triton.jit
def sum_parts_kernel(da_slots_ptr, ds_slots_ptr, da_ptr, ds_ptr, parts, N, BLOCK: tl.constexpr):
    b, cols = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    da = tl.zeros([BLOCK], dtype=tl.float32)
    ds = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(parts):
        da += load_row(da_slots_ptr, b * parts + part, cols, N)
        ds += load_row(ds_slots_ptr, b * parts + part, cols, N)
    store_row(da_ptr, da, b, cols, N)
    store_row(ds_ptr, ds, b, cols, N)


class GateResidualAdaRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, res, a, s, eps):
        f, a, s = f.contiguous(), a.contiguous(), s.contiguous()
        y, z, r = ada_rms_norm_forward(f, res.contiguous(), a, s, eps)
        ctx.save_for_backward(f, a, s, y, r)
        return y, z

    @staticmethod
    def backward(ctx, dy, dz):
        f, a, s, y, r = ctx.saved_tensors
        (B, T, N), needs = f.shape, ctx.needs_input_grad
        parts = min(T, triton.cdiv(PROGRAMS, max(1, B)))
        df, dres, da, ds = (torch.empty_like(t) for t in (f, f, a, s))
        slots = torch.empty((2, B, parts, N), device=f.device, dtype=torch.float32)
        gate_norm_backward_kernel[(parts, B)](
            f, a, s, y, r, dy.contiguous(), dz.contiguous(), df, dres, slots[0], slots[1], T, N, **tile_of(N)
        )
        if needs[2] or needs[3]:
            sum_parts_kernel[(triton.cdiv(N, 128), B)](slots[0], slots[1], da, ds, parts, N, BLOCK=128)
        grads = (df, dres, da, ds)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=False)), None


def gate_residual_ada_rms_norm_autograd(f, res, a, s, eps=1e-6):
    return GateResidualAdaRMSNorm.apply(f, res, a, s, eps)
