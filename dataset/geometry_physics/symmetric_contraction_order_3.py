"""Symmetric contraction of an atom's features with themselves, up to products of three: the many-body step of
atomic cluster expansions.

Forward    a node n of species z has L features A_l for each channel; a term t of a fixed list has a
           coefficient u_t, a path p_t and up to three features i_t, j_t, k_t (L: none, a factor of 1):
           B_nc = sum_t W[z, p_t, c] u_t A_i A_j A_k
Backward   by the product rule, with q_t = dB W[z, p_t, c] u_t:  dA_i += q_t A_j A_k,  dA_j += q_t A_i A_k,
           dA_k += q_t A_i A_j  for the factors that there are, a square counting twice;
           dW[z, p, c] = sum over the nodes of species z and the terms with p_t = p of dB u_t A_i A_j A_k

Forward schedule: a program owns (node, tile of channels). It reads a term's numbers, gathers the three rows
from the cache, and adds: the coupling tensors are nearly empty, so a list of terms is all there is of them.
Backward schedule: dA keeps this owner, who walks the list once and adds q A A to the rows of an (L, channels)
tile in registers; rows are chosen by data, so each is added under a one-hot of its number. The weights are
read by all nodes of a species: nodes are sorted by species, cut into runs of a few, and the owner of
(run, path) walks its nodes and that path's terms, with one row in registers; terms come sorted by path. Each
run stores its row in a slot, and a last kernel adds the runs of each species. A run never crosses species.

op: symmetric_contraction
schedule: same_tile_pointwise, segment_gather, partials_then_reduce
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 64
RUN = 16  # nodes of one species that a program takes for dW


@triton.jit
def load_term(term_ptr, t):
    """Its path and its three features."""
    at = term_ptr + 4 * t
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def feature(a_ptr, row, c, L, C):
    a = tl.load(a_ptr + row * C + c, mask=(c < C) & (row < L), other=0.0)
    return tl.where(row < L, a, 1.0)


@triton.jit
def contract_kernel(a_ptr, w_ptr, species_ptr, term_ptr, u_ptr, b_ptr, terms, L, P, C, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a_ptr += n * L * C
    w_ptr += tl.load(species_ptr + n) * P * C
    b = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(terms):
        p, i, j, k = load_term(term_ptr, t)
        w = tl.load(w_ptr + p * C + c, mask=c < C, other=0.0) * tl.load(u_ptr + t)
        b += w * feature(a_ptr, i, c, L, C) * feature(a_ptr, j, c, L, C) * feature(a_ptr, k, c, L, C)
    tl.store(b_ptr + n * C + c, b, mask=c < C)


@autodiff(inputs_require_grad=(0, 1))
def contract(a, w, species, term, u):
    """a: float32 (N, L, C); w: float32 (species, P, C); species: int64 (N); term: int32 (terms, 4), a path
    and three features each, sorted by path; u: int32 (terms), their coefficients; gives (N, C)."""
    (N, L, C), P, terms = a.shape, w.shape[1], term.shape[0]
    if w.shape[2] != C or species.shape != (N,) or u.shape != (terms,) or L > 64:
        raise ValueError(f"a {tuple(a.shape)}, w {tuple(w.shape)}, {terms} terms with {tuple(u.shape)}")
    inputs = [tensor.contiguous() for tensor in (a, w, species, term, u)]
    b = torch.empty((N, C), device=a.device, dtype=a.dtype)
    contract_kernel[(N, triton.cdiv(C, BLOCK))](*inputs, b, terms, L, P, C, BLOCK=BLOCK)
    return b


def reference(a, w, species, term, u):
    padded = torch.cat([a, torch.ones_like(a[:, :1])], dim=1)
    p, i, j, k = term.long().unbind(1)
    return (w[species][:, p] * u[:, None] * padded[:, i] * padded[:, j] * padded[:, k]).sum(1)


SWEEP = [
    {"N": 2048, "L": 16, "C": 128, "species": 8, "terms": 120},
    {"N": 701, "L": 9, "C": 90, "species": 4, "terms": 70},
]
SWEEP_CPU = [
    {"N": 20, "L": 3, "C": 6, "species": 2, "terms": 5},
    {"N": 4, "L": 4, "C": 70, "species": 3, "terms": 8},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Terms of chance in place of the couplings of a group: a tenth of them of one factor, a third of two."""
    N, L, C, species, terms = (dims[name] for name in ("N", "L", "C", "species", "terms"))
    P = 1 + terms // 4
    a = torch.randn(N, L, C, device=device, dtype=dtype)
    w = torch.randn(species, P, C, device=device, dtype=dtype) / max(1, terms) ** 0.5
    path = torch.randint(0, P, (terms,), device=device).sort().values
    factors = torch.randint(0, L, (terms, 3), device=device)
    order = torch.rand(terms, device=device)
    factors[:, 2] = torch.where(order < 0.4, L, factors[:, 2])
    factors[:, 1] = torch.where(order < 0.1, L, factors[:, 1])
    term = torch.cat([path[:, None], factors], dim=1).to(torch.int32)
    u = torch.randint(0, 2, (terms,), device=device, dtype=torch.int32) * 2 - 1
    return a, w, torch.randint(0, species, (N,), device=device), term, u


# ---- backward ----


@triton.jit
def features_kernel(
    a_ptr, w_ptr, species_ptr, term_ptr, u_ptr, db_ptr, da_ptr, terms, L, P, C,
    BLOCK_L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c, row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_L)
    a_ptr += n * L * C
    w_ptr += tl.load(species_ptr + n) * P * C
    db = tl.load(db_ptr + n * C + c, mask=c < C, other=0.0)
    da = tl.zeros([BLOCK_L, BLOCK], dtype=tl.float32)
    for t in range(terms):
        p, i, j, k = load_term(term_ptr, t)
        q = db * tl.load(w_ptr + p * C + c, mask=c < C, other=0.0) * tl.load(u_ptr + t)
        x, y, z = feature(a_ptr, i, c, L, C), feature(a_ptr, j, c, L, C), feature(a_ptr, k, c, L, C)
        da += tl.where(row == i, 1.0, 0.0)[:, None] * (q * y * z)[None, :]
        da += tl.where(row == j, 1.0, 0.0)[:, None] * (q * x * z)[None, :]
        da += tl.where(row == k, 1.0, 0.0)[:, None] * (q * x * y)[None, :]
    at = da_ptr + (n * L + row[:, None]) * C + c[None, :]
    tl.store(at, da, mask=(row[:, None] < L) & (c[None, :] < C))


@triton.jit
def run_kernel(
    a_ptr, term_ptr, u_ptr, db_ptr, node_ptr, begin_ptr, end_ptr, path_ptr, slots_ptr, L, P, C,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A path's row of dW from one run of nodes; path: where the terms of each begin."""
    run, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for place in range(tl.load(begin_ptr + run), tl.load(end_ptr + run)):
        n = tl.load(node_ptr + place)
        own, b = a_ptr + n * L * C, tl.zeros([BLOCK], dtype=tl.float32)
        for t in range(tl.load(path_ptr + p), tl.load(path_ptr + p + 1)):
            _, i, j, k = load_term(term_ptr, t)
            x, y, z = feature(own, i, c, L, C), feature(own, j, c, L, C), feature(own, k, c, L, C)
            b += tl.load(u_ptr + t) * x * y * z
        dw += b * tl.load(db_ptr + n * C + c, mask=c < C, other=0.0)
    tl.store(slots_ptr + (run * P + p) * C + c, dw, mask=c < C)


@triton.jit
def sum_runs_kernel(slots_ptr, run_ptr, dw_ptr, size, BLOCK: tl.constexpr):
    """run: where the runs of each species begin."""
    z = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for run in range(tl.load(run_ptr + z), tl.load(run_ptr + z + 1)):
        dw += tl.load(slots_ptr + run * size + i, mask=i < size, other=0.0)
    tl.store(dw_ptr + z * size + i, dw, mask=i < size)


def runs_of(species, count):
    """Nodes by species, where runs begin and end among them, and where the runs of each species begin."""
    ordered, node = species.sort(stable=True)
    edge = torch.searchsorted(ordered, torch.arange(count + 1, device=species.device))
    runs = (edge.diff() + RUN - 1) // RUN
    first = torch.cat([runs.new_zeros(1), runs.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(count, device=species.device), runs)
    begin = edge[owner] + RUN * (torch.arange(owner.numel(), device=species.device) - first[owner])
    return node, begin, torch.minimum(begin + RUN, edge[owner + 1]), first


class Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w, species, term, u):
        inputs = [tensor.contiguous() for tensor in (a, w, species, term, u)]
        ctx.save_for_backward(*inputs)
        return contract(*inputs)

    @staticmethod
    def backward(ctx, db):
        a, w, species, term, u = ctx.saved_tensors
        (N, L, C), (count, P, _), terms, db = a.shape, w.shape, term.shape[0], db.contiguous()
        tiles, da, dw = triton.cdiv(C, BLOCK), None, None
        if ctx.needs_input_grad[0]:
            da, BLOCK_L = torch.empty_like(a), triton.next_power_of_2(L)
            features_kernel[(N, tiles)](
                a, w, species, term, u, db, da, terms, L, P, C, BLOCK_L=BLOCK_L, BLOCK=BLOCK
            )
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            node, begin, end, first = runs_of(species, count)
            path = torch.searchsorted(
                term[:, 0].contiguous(), torch.arange(P + 1, device=a.device, dtype=torch.int32)
            )
            slots = torch.empty((begin.numel(), P, C), device=a.device, dtype=torch.float32)
            run_kernel[(begin.numel(), P, tiles)](
                a, term, u, db, node, begin, end, path, slots, L, P, C, BLOCK=BLOCK
            )
            sum_runs_kernel[(count, triton.cdiv(P * C, 256))](slots, first, dw, P * C, BLOCK=256)
        return da, dw, None, None, None


def contract_autograd(a, w, species, term, u):
    return Contract.apply(a, w, species, term, u)
