"""Softmax splatting: every pixel is thrown along its flow, and where several land the important ones win.

Forward    pixel p lands at (v, u) = p + flow_p between four pixels q with weights b_pq:
           n_qc = sum_p b_pq exp(z_p) x_pc,  d_q = sum_p b_pq exp(z_p),  y_qc = n_qc / (d_q + eps)
Backward   G_qc = dy_qc / (d_q + eps) is dn, and dd_q = -sum_c G_qc y_qc =: -H_q; both are linear in b:
           with r_q = sum_c x_pc G_qc - H_q,  dx_pc = exp(z_p) sum_q b_pq G_qc,
           dz_p = exp(z_p) sum_q b_pq r_q,  du = exp(z_p) ((1 - a) (r01 - r00) + a (r11 - r10)),
           dv = exp(z_p) ((1 - b) (r10 - r00) + b (r11 - r01)),
           a and b the fractions of v and u, and r = 0 outside

Forward schedule: a program owns a tile of source pixels and adds numerators and denominators to the four
pixels by atomics; where they land is data. A second kernel divides.
Backward schedule: the adjoint of a scatter is a gather at the same places, so there are no atomics: a first
kernel folds the quotient rule into G and H, as an owner of output pixels; then the owner of source pixels
makes its place again and reads G at four corners, a channel at a time. All three gradients come from these
reads: dx directly, and dz and dflow from four running sums r, since weight and importance multiply the whole
pixel.

op: softmax_splatting
schedule: gather_transpose, row_reduce_correct
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 128


@triton.jit
def landing(flow_ptr, n, p, P, H, W):
    """Pixel above and left of where p lands, and the fractions; far outside is cut, as nothing is there."""
    u = p % W + tl.load(flow_ptr + n * 2 * P + p, mask=p < P, other=0.0)
    v = p // W + tl.load(flow_ptr + (n * 2 + 1) * P + p, mask=p < P, other=0.0)
    u = tl.minimum(tl.maximum(u, -2.0), W + 1.0)
    v = tl.minimum(tl.maximum(v, -2.0), H + 1.0)
    i, j = tl.floor(v), tl.floor(u)
    return i.to(tl.int32), j.to(tl.int32), v - i, u - j


@triton.jit
def inside(i, j, p, P, H, W):
    return (p < P) & (i >= 0) & (i < H) & (j >= 0) & (j < W)


@triton.jit
def splat_kernel(x_ptr, flow_ptr, z_ptr, n_ptr, d_ptr, C, H, W, BLOCK: tl.constexpr):
    P = H * W
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i0, j0, a, b = landing(flow_ptr, n, p, P, H, W)
    e = tl.exp(tl.load(z_ptr + n * P + p, mask=p < P, other=0.0))
    for corner in tl.static_range(4):
        i, j = i0 + corner // 2, j0 + corner % 2
        share = e * (a if corner // 2 else 1 - a) * (b if corner % 2 else 1 - b)
        mask = inside(i, j, p, P, H, W)
        q = i * W + j
        tl.atomic_add(d_ptr + n * P + q, share, mask=mask, sem="relaxed")
        for c in range(C):
            x = tl.load(x_ptr + (n * C + c) * P + p, mask=p < P, other=0.0)
            tl.atomic_add(n_ptr + (n * C + c) * P + q, share * x, mask=mask, sem="relaxed")


@triton.jit
def divide_kernel(n_ptr, d_ptr, y_ptr, C, P, eps, BLOCK: tl.constexpr):
    plane = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(d_ptr + plane // C * P + q, mask=q < P, other=0.0)
    y = tl.load(n_ptr + plane * P + q, mask=q < P, other=0.0) / (d + eps)
    tl.store(y_ptr + plane * P + q, y, mask=q < P)


def softsplat_forward(x, flow, z, eps):
    N, C, H, W = x.shape
    if flow.shape != (N, 2, H, W) or z.shape != (N, 1, H, W):
        raise ValueError(f"flow {tuple(flow.shape)} and z {tuple(z.shape)} are not for {tuple(x.shape)}")
    sums, d, y = torch.zeros_like(x), torch.zeros_like(z), torch.empty_like(x)
    tiles = triton.cdiv(H * W, BLOCK)
    splat_kernel[(N, tiles)](x, flow, z, sums, d, C, H, W, BLOCK=BLOCK)
    divide_kernel[(N * C, tiles)](sums, d, y, C, H * W, eps, BLOCK=BLOCK)
    return y, d


@autodiff(inputs_require_grad=(0, 1, 2))
def softsplat(x, flow, z, eps=1e-3):
    """x: (N, C, H, W); flow: (N, 2, H, W), across before down, in pixels; z: (N, 1, H, W); all float32."""
    return softsplat_forward(x.contiguous(), flow.contiguous(), z.contiguous(), eps)[0]


def reference(x, flow, z, eps=1e-3):
    N, C, H, W = x.shape
    u = torch.arange(W, device=x.device) + flow[:, 0]
    v = torch.arange(H, device=x.device)[:, None] + flow[:, 1]
    i0, j0 = v.detach().floor(), u.detach().floor()
    total = x.new_zeros(N, C + 1, H * W)
    thrown = z.exp() * torch.cat([x, torch.ones_like(z)], dim=1)
    for down in range(2):
        for right in range(2):
            i, j = i0 + down, j0 + right
            weight = (1 - (v - i).abs()) * (1 - (u - j).abs())
            there = (i >= 0) & (i < H) & (j >= 0) & (j < W)
            q = torch.where(there, i * W + j, 0).long().flatten(1)
            share = (thrown * torch.where(there, weight, 0.0)[:, None]).flatten(2)
            total = total.scatter_add(2, q[:, None].expand(-1, C + 1, -1), share)
    return (total[:, :C] / (total[:, C:] + eps)).reshape(N, C, H, W)


SWEEP = [{"N": 4, "C": 32, "H": 256, "W": 256}, {"N": 3, "C": 3, "H": 301, "W": 517}]
SWEEP_CPU = [{"N": 1, "C": 3, "H": 9, "W": 8}, {"N": 2, "C": 2, "H": 12, "W": 15}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Flows of up to three pixels that end nowhere near a pixel's centre, where their gradient jumps."""
    N, C, H, W = (dims[name] for name in "NCHW")
    x = torch.randn(N, C, H, W, device=device, dtype=dtype)
    whole = torch.randint(-3, 3, (N, 2, H, W), device=device)
    flow = (whole + 0.1 + 0.8 * torch.rand(N, 2, H, W, device=device)).to(dtype)
    return x, flow, torch.randn(N, 1, H, W, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def quotient_kernel(y_ptr, d_ptr, dy_ptr, G_ptr, H_ptr, C, P, eps, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    q = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(d_ptr + n * P + q, mask=q < P, other=1.0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for c in range(C):
        at = (n * C + c) * P + q
        G = tl.load(dy_ptr + at, mask=q < P, other=0.0) / (d + eps)
        tl.store(G_ptr + at, G, mask=q < P)
        total += G * tl.load(y_ptr + at, mask=q < P, other=0.0)
    tl.store(H_ptr + n * P + q, total, mask=q < P)


@triton.jit
def corner(plane, i, j, p, P, H, W):
    return tl.load(plane + i * W + j, mask=inside(i, j, p, P, H, W), other=0.0)


@triton.jit
def softsplat_backward_kernel(
    x_ptr, flow_ptr, z_ptr, G_ptr, H_ptr, dx_ptr, dflow_ptr, dz_ptr, C, H, W, BLOCK: tl.constexpr
):
    P = H * W
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i, j, a, b = landing(flow_ptr, n, p, P, H, W)
    e = tl.exp(tl.load(z_ptr + n * P + p, mask=p < P, other=0.0))
    own = H_ptr + n * P
    r00, r01 = -corner(own, i, j, p, P, H, W), -corner(own, i, j + 1, p, P, H, W)
    r10, r11 = -corner(own, i + 1, j, p, P, H, W), -corner(own, i + 1, j + 1, p, P, H, W)
    for c in range(C):
        plane = G_ptr + (n * C + c) * P
        g00, g01 = corner(plane, i, j, p, P, H, W), corner(plane, i, j + 1, p, P, H, W)
        g10, g11 = corner(plane, i + 1, j, p, P, H, W), corner(plane, i + 1, j + 1, p, P, H, W)
        x = tl.load(x_ptr + (n * C + c) * P + p, mask=p < P, other=0.0)
        r00 += x * g00
        r01 += x * g01
        r10 += x * g10
        r11 += x * g11
        dx = e * ((1 - a) * ((1 - b) * g00 + b * g01) + a * ((1 - b) * g10 + b * g11))
        tl.store(dx_ptr + (n * C + c) * P + p, dx, mask=p < P)
    dz = e * ((1 - a) * ((1 - b) * r00 + b * r01) + a * ((1 - b) * r10 + b * r11))
    du = e * ((1 - a) * (r01 - r00) + a * (r11 - r10))
    dv = e * ((1 - b) * (r10 - r00) + b * (r11 - r01))
    tl.store(dz_ptr + n * P + p, dz, mask=p < P)
    tl.store(dflow_ptr + n * 2 * P + p, du, mask=p < P)
    tl.store(dflow_ptr + (n * 2 + 1) * P + p, dv, mask=p < P)


class SoftSplat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flow, z, eps):
        x, flow, z = x.contiguous(), flow.contiguous(), z.contiguous()
        y, d = softsplat_forward(x, flow, z, eps)
        ctx.save_for_backward(x, flow, z, y, d)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy):
        x, flow, z, y, d = ctx.saved_tensors
        (N, C, H, W), tiles = x.shape, triton.cdiv(x.shape[2] * x.shape[3], BLOCK)
        G, sums = torch.empty_like(x), torch.empty_like(z)
        dx, dflow, dz = torch.empty_like(x), torch.empty_like(flow), torch.empty_like(z)
        quotient_kernel[(N, tiles)](y, d, dy.contiguous(), G, sums, C, H * W, ctx.eps, BLOCK=BLOCK)
        softsplat_backward_kernel[(N, tiles)](x, flow, z, G, sums, dx, dflow, dz, C, H, W, BLOCK=BLOCK)
        needs = ctx.needs_input_grad
        return dx if needs[0] else None, dflow if needs[1] else None, dz if needs[2] else None, None


def softsplat_autograd(x, flow, z, eps=1e-3):
    return SoftSplat.apply(x, flow, z, eps)
