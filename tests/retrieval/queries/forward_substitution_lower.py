import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def trsm_lower(L, B, X, n, rhs, NP: tl.constexpr, RP: tl.constexpr):
    z = tl.program_id(0)
    i = tl.arange(0, NP)
    j = tl.program_id(1) * RP + tl.arange(0, RP)
    ok = (i < n)[:, None] & (j < rhs)[None, :]
    x = tl.load(B + (z * n + i)[:, None] * rhs + j[None, :], mask=ok, other=0.0)
    for k in range(n):
        c = tl.load(L + (z * n + i) * n + k, mask=(i < n) & (i >= k), other=0.0)
        diag = tl.sum(tl.where(i == k, c, 0.0), axis=0)
        xk = tl.sum(tl.where((i == k)[:, None], x, 0.0), axis=0) / diag
        x = tl.where(
            (i == k)[:, None], xk[None, :], x - tl.where((i > k)[:, None], c[:, None] * xk[None, :], 0.0)
        )
    tl.store(X + (z * n + i)[:, None] * rhs + j[None, :], x, mask=ok)


@autodiff(inputs_require_grad=(0, 1))
def solve_lower(L, B):
    Z, n, rhs = B.shape
    X = torch.empty_like(B)
    trsm_lower[(Z, triton.cdiv(rhs, 16))](L, B, X, n, rhs, triton.next_power_of_2(n), 16)
    return X
