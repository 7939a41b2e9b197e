"""Linear blend skinning: each vertex of a body follows a weighted mean of its joints' transforms.

Forward    A_bv = sum_j w_vj T_bj,  3 x 4 matrices;   y_bv = A_bv [x_bv; 1]
Backward   O_bv = dy_bv [x_bv; 1]^T, 3 x 4 as well, is dA:
           dx_bv = A_bv[:, :3]^T dy_bv,   dw_vj = sum_b <O_bv, T_bj>,   dT_bj = sum_v w_vj O_bv

Forward schedule: a matrix counts as a row of 12 numbers, padded to 16, so that A is a product of w (V, J) and
T_b (J, 12): a dot for a tile of vertices of one body. The sum over the last column is made in registers.
Backward schedule: all three gradients are that product again in turn, none of it with atomics. dx's owner
makes A anew, as it is 12 numbers a vertex and x, y are 3. O is of rank one and never stored: whoever needs it
builds it on load, number r 4 + c from dy's r and x's c. The weights are one table for all bodies, so dw's
owner (vertex tile, joint tile) loops over bodies, 16 deep a dot; dT's owner (body, joint tile) loops over
vertices. Each sees the whole of its sum, and few numbers a step: O's 16 columns come from 6.

op: lbs_skinning
schedule: swap_owner, recompute_from_stats
difficulty: 4
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling():
    return {
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK": 64,
        "JOINTS": 32,
    }


@triton.jit
def load_weights(w_ptr, v, j, V, J):
    mask = (v[:, None] < V) & (j[None, :] < J)
    return tl.load(w_ptr + v[:, None] * J + j[None, :], mask=mask, other=0.0)


@triton.jit
def load_transforms(t_ptr, j, J):
    """(joints, 16), the last four zero: a fourth row that no transform has."""
    k = tl.arange(0, 16)
    mask = (j[:, None] < J) & (k[None, :] < 12)
    return tl.load(t_ptr + j[:, None] * 12 + k[None, :], mask=mask, other=0.0)


@triton.jit
def load_homogeneous(x_ptr, v, V):
    """(vertices, 4): x, y, z, 1."""
    c = tl.arange(0, 4)
    x = tl.load(x_ptr + v[:, None] * 3 + c[None, :], mask=(v[:, None] < V) & (c[None, :] < 3), other=0.0)
    return tl.where(c[None, :] == 3, 1.0, x)


@triton.jit
def load_vectors(g_ptr, v, V):
    """(vertices, 4): x, y, z, 0."""
    c = tl.arange(0, 4)
    return tl.load(g_ptr + v[:, None] * 3 + c[None, :], mask=(v[:, None] < V) & (c[None, :] < 3), other=0.0)


@triton.jit
def store_vectors(ptr, value, v, V):
    c = tl.arange(0, 4)
    tl.store(ptr + v[:, None] * 3 + c[None, :], value, mask=(v[:, None] < V) & (c[None, :] < 3))


@triton.jit
def blend(w_ptr, t_ptr, v, V, J, PRECISION: tl.constexpr, BLOCK: tl.constexpr, JOINTS: tl.constexpr):
    """A of a tile of vertices, (BLOCK, rows of 4, columns of 4)."""
    a = tl.zeros([BLOCK, 16], dtype=tl.float32)
    for start in range(0, J, JOINTS):
        j = start + tl.arange(0, JOINTS)
        a = tl.dot(
            load_weights(w_ptr, v, j, V, J), load_transforms(t_ptr, j, J), a, input_precision=PRECISION
        )
    return tl.reshape(a, [BLOCK, 4, 4])


@triton.jit
def skinning_kernel(
    x_ptr, w_ptr, t_ptr, y_ptr, V, J, PRECISION: tl.constexpr, BLOCK: tl.constexpr, JOINTS: tl.constexpr
):
    body = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = blend(w_ptr, t_ptr + body * J * 12, v, V, J, PRECISION, BLOCK, JOINTS)
    x = load_homogeneous(x_ptr + body * V * 3, v, V)
    store_vectors(y_ptr + body * V * 3, tl.sum(a * x[:, None, :], axis=2), v, V)


@autodiff(inputs_require_grad=(0, 1, 2))
def skinning(x, w, t):
    """x: (B, V, 3); w: (V, J); t: (B, J, 3, 4), rotations and translations of the joints; all float32."""
    (B, V, _), J = x.shape, w.shape[1]
    if w.shape[0] != V or t.shape != (B, J, 3, 4):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and t {tuple(t.shape)} do not fit")
    x, w, t, tiles = x.contiguous(), w.contiguous(), t.contiguous(), tiling()
    y = torch.empty_like(x)
    skinning_kernel[(B, triton.cdiv(V, tiles["BLOCK"]))](x, w, t, y, V, J, **tiles)
    return y


def reference(x, w, t):
    a = torch.einsum("vj,bjrc->bvrc", w, t)
    return torch.einsum("bvrc,bvc->bvr", a[..., :3], x) + a[..., 3]


SWEEP = [{"B": 128, "V": 6890, "J": 24}, {"B": 31, "V": 10475, "J": 55}]
SWEEP_CPU = [{"B": 2, "V": 53, "J": 6}, {"B": 3, "V": 70, "J": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, V, J = (dims[name] for name in "BVJ")
    x = torch.randn(B, V, 3, device=device, dtype=dtype)
    w = torch.softmax(3 * torch.randn(V, J, device=device, dtype=dtype), dim=-1)
    return x, w, torch.randn(B, J, 3, 4, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def load_outer(x_ptr, g_ptr, v, V, BLOCK: tl.constexpr):
    """O of a tile of vertices as rows, (BLOCK, 16)."""
    g, x = load_vectors(g_ptr, v, V), load_homogeneous(x_ptr, v, V)
    return tl.reshape(g[:, :, None] * x[:, None, :], [BLOCK, 16])


@triton.jit
def dx_kernel(
    g_ptr, w_ptr, t_ptr, dx_ptr, V, J, PRECISION: tl.constexpr, BLOCK: tl.constexpr, JOINTS: tl.constexpr
):
    body = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = blend(w_ptr, t_ptr + body * J * 12, v, V, J, PRECISION, BLOCK, JOINTS)
    g = load_vectors(g_ptr + body * V * 3, v, V)
    store_vectors(dx_ptr + body * V * 3, tl.sum(a * g[:, :, None], axis=1), v, V)


@triton.jit
def dw_kernel(
    x_ptr, g_ptr, t_ptr, dw_ptr, B, V, J,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, JOINTS: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * JOINTS + tl.arange(0, JOINTS)
    dw = tl.zeros([BLOCK, JOINTS], dtype=tl.float32)
    for _ in range(B):
        outer = load_outer(x_ptr, g_ptr, v, V, BLOCK)
        dw = tl.dot(outer, tl.trans(load_transforms(t_ptr, j, J)), dw, input_precision=PRECISION)
        x_ptr += V * 3
        g_ptr += V * 3
        t_ptr += J * 12
    tl.store(dw_ptr + v[:, None] * J + j[None, :], dw, mask=(v[:, None] < V) & (j[None, :] < J))


@triton.jit
def dt_kernel(
    x_ptr, g_ptr, w_ptr, dt_ptr, V, J, PRECISION: tl.constexpr, BLOCK: tl.constexpr, JOINTS: tl.constexpr
):
    body = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * JOINTS + tl.arange(0, JOINTS)
    dt = tl.zeros([JOINTS, 16], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        outer = load_outer(x_ptr + body * V * 3, g_ptr + body * V * 3, v, V, BLOCK)
        dt = tl.dot(tl.trans(load_weights(w_ptr, v, j, V, J)), outer, dt, input_precision=PRECISION)
    k = tl.arange(0, 16)
    at = dt_ptr + (body * J + j[:, None]) * 12 + k[None, :]
    tl.store(at, dt, mask=(j[:, None] < J) & (k[None, :] < 12))


class Skinning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, t):
        x, w, t = x.contiguous(), w.contiguous(), t.contiguous()
        ctx.save_for_backward(x, w, t)
        return skinning(x, w, t)

    @staticmethod
    def backward(ctx, g):
        x, w, t = ctx.saved_tensors
        (B, V, _), J, tiles, g = x.shape, w.shape[1], tiling(), g.contiguous()
        vertex_tiles, joint_tiles = triton.cdiv(V, tiles["BLOCK"]), triton.cdiv(J, tiles["JOINTS"])
        dx = dw = dt = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(B, vertex_tiles)](g, w, t, dx, V, J, **tiles)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            dw_kernel[(vertex_tiles, joint_tiles)](x, g, t, dw, B, V, J, **tiles)
        if ctx.needs_input_grad[2]:
            dt = torch.empty_like(t)
            dt_kernel[(B, joint_tiles)](x, g, w, dt, V, J, **tiles)
        return dx, dw, dt


def skinning_autograd(x, w, t):
    return Skinning.apply(x, w, t)
