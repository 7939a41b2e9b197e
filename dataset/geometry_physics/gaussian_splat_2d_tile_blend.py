"""Gaussian splatting: projected gaussians, sorted by depth, are blended front to back over each pixel.

Forward    with d = pixel - mean_i and the conic (a, b, c):  p_i = (a d_x^2 + c d_y^2) / 2 + b d_x d_y,
           r_i = o_i exp(-p_i),  alpha_i = min(r_i, 0.99);  T_i = product of (1 - alpha_j) over j < i;
           C = sum_i T_i alpha_i color_i,  up to the first i with T_i (1 - alpha_i) < 1e-4, without it;
           a gaussian with p_i < 0 is skipped
Backward   with c_i = <color_i, dC> and what lies behind, S_i = sum_{j > i} T_j alpha_j c_j:
           dcolor_i = T_i alpha_i dC,   dalpha_i = T_i c_i - S_i / (1 - alpha_i);
           dr_i = dalpha_i unless capped,  do_i = dr_i exp(-p_i),  dp_i = -dr_i r_i;
           dmean_i = -dp_i (a d_x + b d_y, b d_x + c d_y),   dconic_i = dp_i (d_x^2 / 2, d_x d_y, d_y^2 / 2);
           all summed over pixels

Forward schedule: a program owns a tile of 16 x 16 pixels and walks the tile's list of gaussians, the pixels
as lanes. Each pixel saves its last T and how far it came.
Backward schedule: the same tile walks its list from back to front. T is not stored for every step, but taken
apart again: T_i = T_{i+1} / (1 - alpha_i), which is safe since a pixel stops before T is small and alpha is
at most 0.99; S grows on the way. A gaussian gets something from each pixel of each tile that lists it: the
256 pixels are summed in registers, so that there is one atomic add a tile and number, nine for a gaussian,
and not one a pixel. The walk begins at the furthest gaussian that any pixel of the tile came to.

op: gaussian_splatting
schedule: reverse_scan, atomic_accumulate, recompute_from_stats
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SIDE = 16  # of a tile


@triton.jit
def pixels(tile, across, H, W, SIDE: tl.constexpr):
    lane = tl.arange(0, SIDE * SIDE)
    y = tile // across * SIDE + lane // SIDE
    x = tile % across * SIDE + lane % SIDE
    return y * W + x, (y < H) & (x < W), x + 0.5, y + 0.5


@triton.jit
def splat(mean_ptr, conic_ptr, opacity_ptr, i, x, y):
    """d, the conic, exp(-p), r; the last two are 0 where p < 0."""
    dx, dy = x - tl.load(mean_ptr + 2 * i), y - tl.load(mean_ptr + 2 * i + 1)
    a, b, c = tl.load(conic_ptr + 3 * i), tl.load(conic_ptr + 3 * i + 1), tl.load(conic_ptr + 3 * i + 2)
    p = 0.5 * (a * dx * dx + c * dy * dy) + b * dx * dy
    e = tl.where(p >= 0, tl.exp(-tl.where(p >= 0, p, 0.0)), 0.0)
    return dx, dy, a, b, c, e, e * tl.load(opacity_ptr + i)


@triton.jit
def blend_kernel(
    mean_ptr, conic_ptr, opacity_ptr, color_ptr, first_ptr, list_ptr, image_ptr, T_ptr, last_ptr,
    across, H, W, SIDE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place, inside, x, y = pixels(tile, across, H, W, SIDE)
    begin = tl.load(first_ptr + tile)
    T = tl.full([SIDE * SIDE], 1.0, dtype=tl.float32)
    live = tl.full([SIDE * SIDE], 1, dtype=tl.int32)
    last = tl.zeros([SIDE * SIDE], dtype=tl.int32)  # how many of the list a pixel has taken or skipped
    red = tl.zeros([SIDE * SIDE], dtype=tl.float32)
    green = tl.zeros([SIDE * SIDE], dtype=tl.float32)
    blue = tl.zeros([SIDE * SIDE], dtype=tl.float32)
    for step in range(tl.load(first_ptr + tile + 1) - begin):
        i = tl.load(list_ptr + begin + step)
        _, _, _, _, _, _, r = splat(mean_ptr, conic_ptr, opacity_ptr, i, x, y)
        alpha = tl.where(r < 0.99, r, 0.99)
        live = tl.where(T * (1 - alpha) < 1e-4, 0, live)
        weight = tl.where(live > 0, T * alpha, 0.0)
        red += weight * tl.load(color_ptr + 3 * i)
        green += weight * tl.load(color_ptr + 3 * i + 1)
        blue += weight * tl.load(color_ptr + 3 * i + 2)
        T = tl.where(live > 0, T * (1 - alpha), T)
        last += live
    tl.store(image_ptr + 3 * place, red, mask=inside)
    tl.store(image_ptr + 3 * place + 1, green, mask=inside)
    tl.store(image_ptr + 3 * place + 2, blue, mask=inside)
    tl.store(T_ptr + place, T, mask=inside)
    tl.store(last_ptr + place, last, mask=inside)


def splatting_forward(mean, conic, opacity, color, first, order, H, W):
    G, across, down = mean.shape[0], triton.cdiv(W, SIDE), triton.cdiv(H, SIDE)
    if conic.shape != (G, 3) or color.shape != (G, 3) or opacity.shape != (G,):
        raise ValueError(f"{G} means, {tuple(conic.shape)}, {tuple(opacity.shape)}, {tuple(color.shape)}")
    if first.numel() != across * down + 1:
        raise ValueError(f"{first.numel() - 1} lists for {across * down} tiles")
    image = torch.empty((H, W, 3), device=mean.device, dtype=mean.dtype)
    T = torch.empty((H, W), device=mean.device, dtype=torch.float32)
    last = torch.empty((H, W), device=mean.device, dtype=torch.int32)
    blend_kernel[(across * down,)](
        mean, conic, opacity, color, first, order, image, T, last, across, H, W, SIDE=SIDE
    )
    return image, T, last


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def splatting(mean, conic, opacity, color, first, order, H, W):
    """mean: (G, 2), x and y in pixels; conic, color: (G, 3); opacity: (G), from 0 to 1; all float32. order:
    int32, the lists of all tiles, each from front to back; first: int32 (tiles + 1). Gives (H, W, 3)."""
    inputs = (tensor.contiguous() for tensor in (mean, conic, opacity, color, first, order))
    return splatting_forward(*inputs, H, W)[0]


def reference(mean, conic, opacity, color, first, order, H, W):
    across = triton.cdiv(W, SIDE)
    y, x = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    tile = (y // SIDE * across + x // SIDE).flatten()
    centre = torch.stack([x, y], dim=-1).flatten(0, 1).to(mean.device) + 0.5
    image = mean.new_zeros(H * W, 3)
    for number in range(first.numel() - 1):
        pixel = (tile == number).nonzero()[:, 0].to(mean.device)
        i = order[first[number] : first[number + 1]].long()
        dx, dy = (centre[pixel, None] - mean[i]).unbind(-1)
        p = 0.5 * (conic[i, 0] * dx * dx + conic[i, 2] * dy * dy) + conic[i, 1] * dx * dy
        r = torch.where(p >= 0, opacity[i] * torch.exp(-torch.where(p >= 0, p, 0.0)), 0.0)
        alpha = torch.where(r < 0.99, r, 0.99)
        before = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], dim=1), dim=1)
        live = (before[:, 1:].detach() < 1e-4).cumsum(1) == 0
        image = image.index_add(0, pixel, torch.where(live, before[:, :-1] * alpha, 0.0) @ color[i])
    return image.view(H, W, 3)


SWEEP = [{"G": 8000, "H": 256, "W": 256}, {"G": 2000, "H": 150, "W": 301}]
SWEEP_CPU = [{"G": 9, "H": 16, "W": 20}, {"G": 5, "H": 10, "W": 7}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Gaussians of one to four pixels; a tile lists those whose three deviations reach it."""
    G, H, W = (dims[name] for name in "GHW")
    mean = torch.rand(G, 2, device=device, dtype=dtype) * torch.tensor([W, H], device=device, dtype=dtype)
    deviation = 1 + 3 * torch.rand(G, device=device, dtype=dtype)
    a, c = (deviation**-2 * (0.7 + 0.6 * torch.rand(G, device=device, dtype=dtype)) for _ in range(2))
    b = (torch.rand(G, device=device, dtype=dtype) - 0.5) * (a * c).sqrt()
    across, down = triton.cdiv(W, SIDE), triton.cdiv(H, SIDE)
    corner = torch.cartesian_prod(torch.arange(down, device=device), torch.arange(across, device=device))
    centre = corner.view(-1, 2).flip(1) * SIDE + SIDE / 2
    near = (mean.float() - centre[:, None]).abs().amax(2) < SIDE / 2 + 4 * deviation.float()
    order = near.nonzero()[:, 1].to(torch.int32)
    first = torch.cat([near.new_zeros(1, dtype=torch.long), near.sum(1).cumsum(0)]).to(torch.int32)
    opacity = 0.1 + 0.85 * torch.rand(G, device=device, dtype=dtype)
    color = torch.rand(G, 3, device=device, dtype=dtype)
    return mean, torch.stack([a, b, c], dim=1), opacity, color, first, order, H, W


# ---- backward ----


@triton.jit
def add(ptr, values):
    tl.atomic_add(ptr, tl.sum(values, axis=0), sem="relaxed")


@triton.jit
def blend_backward_kernel(
    mean_ptr, conic_ptr, opacity_ptr, color_ptr, first_ptr, list_ptr, T_ptr, last_ptr, dimage_ptr,
    dmean_ptr, dconic_ptr, dopacity_ptr, dcolor_ptr, across, H, W, SIDE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    place, inside, x, y = pixels(tile, across, H, W, SIDE)
    begin = tl.load(first_ptr + tile)
    red = tl.load(dimage_ptr + 3 * place, mask=inside, other=0.0)
    green = tl.load(dimage_ptr + 3 * place + 1, mask=inside, other=0.0)
    blue = tl.load(dimage_ptr + 3 * place + 2, mask=inside, other=0.0)
    T = tl.load(T_ptr + place, mask=inside, other=1.0)
    last = tl.load(last_ptr + place, mask=inside, other=0)
    S = tl.zeros([SIDE * SIDE], dtype=tl.float32)
    count = tl.max(last, axis=0)
    for back in range(count):
        step = count - 1 - back
        i = tl.load(list_ptr + begin + step)
        dx, dy, a, b, c, e, r = splat(mean_ptr, conic_ptr, opacity_ptr, i, x, y)
        alpha = tl.where((r < 0.99) & (step < last), r, tl.where(step < last, 0.99, 0.0))
        T = T / (1 - alpha)
        weight = T * alpha  # 0 where the pixel did not come so far
        add(dcolor_ptr + 3 * i, weight * red)
        add(dcolor_ptr + 3 * i + 1, weight * green)
        add(dcolor_ptr + 3 * i + 2, weight * blue)
        shown = red * tl.load(color_ptr + 3 * i)
        shown += green * tl.load(color_ptr + 3 * i + 1) + blue * tl.load(color_ptr + 3 * i + 2)
        dr = tl.where((r < 0.99) & (step < last), T * shown - S / (1 - alpha), 0.0)
        S += weight * shown
        add(dopacity_ptr + i, dr * e)
        dp = -dr * r
        add(dmean_ptr + 2 * i, tl.where(e > 0, -dp * (a * dx + b * dy), 0.0))  # p may not be finite
        add(dmean_ptr + 2 * i + 1, tl.where(e > 0, -dp * (b * dx + c * dy), 0.0))
        add(dconic_ptr + 3 * i, 0.5 * dp * dx * dx)
        add(dconic_ptr + 3 * i + 1, dp * dx * dy)
        add(dconic_ptr + 3 * i + 2, 0.5 * dp * dy * dy)


class Splatting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mean, conic, opacity, color, first, order, H, W):
        inputs = tuple(tensor.contiguous() for tensor in (mean, conic, opacity, color, first, order))
        image, T, last = splatting_forward(*inputs, H, W)
        ctx.save_for_backward(*inputs, T, last)
        return image

    @staticmethod
    def backward(ctx, dimage):
        saved = ctx.saved_tensors
        H, W, _ = dimage.shape
        across, down = triton.cdiv(W, SIDE), triton.cdiv(H, SIDE)
        grads = [torch.zeros_like(tensor) for tensor in saved[:4]]
        blend_backward_kernel[(across * down,)](*saved, dimage.contiguous(), *grads, across, H, W, SIDE=SIDE)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return *(grad if want else None for grad, want in wanted), None, None, None, None


def splatting_autograd(mean, conic, opacity, color, first, order, H, W):
    return Splatting.apply(mean, conic, opacity, color, first, order, H, W)
