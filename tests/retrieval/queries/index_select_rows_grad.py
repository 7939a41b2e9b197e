"""Rows of a feature store by index, for recommender towers."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


def hash_bucket(keys, buckets, salt=0x9E3779B1):
    return ((keys * salt) % (2**31 - 1)) % buckets


def expected_hits(frequency, batch):
    return {key: share * batch for key, share in frequency.items()}


class Shards:
    """Where a row of the global table lives."""

    def __init__(self, rows, parts):
        self.bounds = [rows * p // parts for p in range(parts + 1)]

    def owner(self, row):
        return next(p for p in range(len(self.bounds) - 1) if row < self.bounds[p + 1])


@triton.jit
def take_rows(feature, picks, dest, count, width, stride_f, stride_d, ROWS: tl.constexpr, COLS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    src = tl.load(picks + r, mask=r < count, other=0).to(tl.int64)
    for c0 in range(0, width, COLS):
        c = c0 + tl.arange(0, COLS)
        ok = (r < count)[:, None] & (c < width)[None, :]
        tl.store(
            dest + r[:, None] * stride_d + c[None, :],
            tl.load(feature + src[:, None] * stride_f + c[None, :], mask=ok),
            mask=ok,
        )


@autodiff(inputs_require_grad=(0,))
def index_select(feature, picks):
    dest = feature.new_empty(picks.numel(), feature.shape[1])
    take_rows[(triton.cdiv(picks.numel(), 8),)](
        feature,
        picks,
        dest,
        picks.numel(),
        feature.shape[1],
        feature.stride(0),
        dest.stride(0),
        ROWS=8,
        COLS=128,
    )
    return dest


class Tower(torch.nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(rows, width) * width**-0.5)

    def forward(self, keys):
        return index_select(self.table, hash_bucket(keys, self.table.shape[0]))
