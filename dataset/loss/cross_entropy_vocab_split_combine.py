"""Cross-entropy of few rows over a large vocabulary, which several programs share.

Forward    l = lse(z) - z_t.  Part s of the vocabulary gives m_s = max z_j and c_s = sum exp(z_j - m_s);
           m = max_s m_s,  lse = m + log sum_s c_s exp(m_s - m)
Backward   dz_j = dl (exp(z_j - lse) - [j = t])

Forward schedule: a grid of (row, part). A row a program would leave most of the device idle where rows are
few: a fine-tuning step of short answers, the last token of each prompt. So there are as many parts as fill
it. A part walks its columns with an online maximum and sum, and the one that holds the target stores z_t. A
second kernel merges the parts of a row: associative, so it does not matter how a row was cut.
Backward schedule: the same grid and the same cut, now without anything to merge: with the merged lse a part
rebuilds its own probabilities. A part is a long run of columns for one program, in place of a program for
each tile: lse, dl and the target are fetched once a part, and the loads of the next tile can be under way
while this one is stored.

op: cross_entropy
schedule: partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


PROGRAMS = 1024  # a few for each multiprocessor
BLOCK = 1024


def cut(M, V):
    """Number of parts of a row, and their length in columns, a multiple of BLOCK."""
    tiles = triton.cdiv(V, BLOCK)
    length = triton.cdiv(tiles, max(1, min(tiles, PROGRAMS // max(1, M)))) * BLOCK
    return triton.cdiv(V, length), length


@triton.jit
def part_kernel(z_ptr, target_ptr, m_ptr, c_ptr, zt_ptr, V, length, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = part * length
    end = tl.minimum(begin + length, V)
    m = -1e30  # finite: all that a part has may be -inf
    c = 0.0
    for start in range(begin, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + cols, mask=cols < end, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(z, axis=0))
        c = c * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new), axis=0)
        m = m_new
    slot = row * tl.num_programs(1) + part
    tl.store(m_ptr + slot, m)
    tl.store(c_ptr + slot, c)
    target = tl.load(target_ptr + row)
    if (target >= begin) & (target < end):
        tl.store(zt_ptr + row, tl.load(z_ptr + row * V + target).to(tl.float32))


@triton.jit
def merge_kernel(m_ptr, c_ptr, zt_ptr, loss_ptr, lse_ptr, parts, BLOCK_S: tl.constexpr):
    row = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    m_s = tl.load(m_ptr + row * parts + s, mask=s < parts, other=-1e30)
    c_s = tl.load(c_ptr + row * parts + s, mask=s < parts, other=0.0)
    m = tl.max(m_s, axis=0)
    lse = m + tl.log(tl.sum(c_s * tl.exp(m_s - m), axis=0))
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, lse - tl.load(zt_ptr + row))


def cross_entropy_forward(logits, target):
    M, V = logits.shape
    parts, length = cut(M, V)
    m, c = (torch.empty((M, parts), device=logits.device, dtype=torch.float32) for _ in range(2))
    z_t, loss, lse = (torch.empty(M, device=logits.device, dtype=torch.float32) for _ in range(3))
    part_kernel[(M, parts)](logits, target, m, c, z_t, V, length, BLOCK=BLOCK)
    merge_kernel[(M,)](m, c, z_t, loss, lse, parts, BLOCK_S=triton.next_power_of_2(parts))
    return loss, lse


@autodiff(inputs_require_grad=(0,))
def cross_entropy(logits, target):
    """logits: (M, V); target: int64 (M); gives (M) in float32."""
    return cross_entropy_forward(logits.contiguous(), target.contiguous())[0]


def reference(logits, target):
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


SWEEP = [{"M": 32, "V": 256000}, {"M": 131, "V": 128256}]
SWEEP_CPU = [{"M": 3, "V": 4100}, {"M": 11, "V": 513}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, V = dims["M"], dims["V"]
    return 2 * torch.randn(M, V, device=device, dtype=dtype), torch.randint(0, V, (M,), device=device)


# ---- backward ----


@triton.jit
def part_backward_kernel(
    z_ptr, target_ptr, lse_ptr, dloss_ptr, dz_ptr, V, length, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * length
    end = tl.minimum(begin + length, V)
    target = tl.load(target_ptr + row)
    lse = tl.load(lse_ptr + row)
    dloss = tl.load(dloss_ptr + row)
    for start in range(begin, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + cols, mask=cols < end, other=0.0).to(tl.float32)
        dz = dloss * (tl.exp(z - lse) - tl.where(cols == target, 1.0, 0.0))
        tl.store(dz_ptr + row * V + cols, dz.to(dz_ptr.dtype.element_ty), mask=cols < end)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        logits, target = logits.contiguous(), target.contiguous()
        loss, lse = cross_entropy_forward(logits, target)
        ctx.save_for_backward(logits, target, lse)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, target, lse = ctx.saved_tensors
        M, V = logits.shape
        parts, length = cut(M, V)
        dz = torch.empty_like(logits)
        part_backward_kernel[(M, parts)](logits, target, lse, dloss.contiguous(), dz, V, length, BLOCK=BLOCK)
        return dz, None


def cross_entropy_autograd(logits, target):
    return CrossEntropy.apply(logits, target)
