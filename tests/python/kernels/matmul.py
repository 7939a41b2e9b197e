"""C = act(A @ B): grouped program ids, runtime K loop with mask, activation helper."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 40, "N": 50, "K": 70, "ACT": "leaky"}, {"M": 32, "N": 32, "K": 32, "ACT": ""}]


@triton.jit
def leaky(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    in_group = GROUP * tiles_n
    group = pid // in_group
    first = group * GROUP
    height = min(tiles_m - first, GROUP)
    pid_m = first + (pid % in_group) % height
    pid_n = (pid % in_group) // height
    rows = (pid_m * BM + tl.arange(0, BM)) % m
    cols = (pid_n * BN + tl.arange(0, BN)) % n
    inner = tl.arange(0, BK)
    a_ptrs = a_ptr + rows[:, None] * sam + inner[None, :] * sak
    b_ptrs = b_ptr + inner[:, None] * sbk + cols[None, :] * sbn
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(k, BK)):
        a = tl.load(a_ptrs, mask=inner[None, :] < k - step * BK, other=0.0)
        b = tl.load(b_ptrs, mask=inner[:, None] < k - step * BK, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += BK * sak
        b_ptrs += BK * sbk
    if ACT == "leaky":
        acc = leaky(acc)
    rows = pid_m * BM + tl.arange(0, BM)
    cols = pid_n * BN + tl.arange(0, BN)
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(c_ptr + rows[:, None] * scm + cols[None, :] * scn, acc.to(c_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def matmul(a, b, activation=""):
    m, k = a.shape
    n = b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)

    def grid(meta):
        return (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)

    matmul_kernel[grid](
        a, b, c, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        BM=16, BN=16, BK=32, GROUP=2, ACT=activation,
    )  # fmt: skip
    return c


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    b = torch.randn(dims["N"], dims["K"], device=device, dtype=dtype).t()
    return (a, b), {"activation": dims["ACT"]}


def reference(a, b, activation=""):
    c = a @ b
    return torch.where(c >= 0, c, 0.01 * c) if activation == "leaky" else c
