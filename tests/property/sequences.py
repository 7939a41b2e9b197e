"""Random forward files over packed sequences: rows found in `cu`, parts of sequences in a table, heads, tiles
of the output that share an input, rotated lanes, loops over a sequence, states that are stored under a mask.
"""

from __future__ import annotations

from random import Random

from generate import Program

HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = {sweep}


"""
ARGS = """

def make_args(dims, device="cuda", dtype=torch.float32):
    T, N = dims["T"], dims["N"]
    cuts = [0, *(T * k // N for k in range(1, N)), T]
    parts = [(n, t) for n in range(N) for t in range(-(-(cuts[n + 1] - cuts[n]) // {BT}))]
    x = torch.randn(T * {H} * dims["D"], device=device, dtype=dtype)
    w = torch.randn(2, dims["D"], device=device, dtype=dtype)
    cu, table = (torch.tensor(v, device=device, dtype=torch.int64) for v in (cuts, parts[:: {turn}]))
    return x, w, cu, table, dims["D"]
"""


def make(seed: int) -> Program:
    pick = Random(f"sequences {seed}")
    own = {
        "table": pick.random() < 0.6,
        "early": pick.random() < 0.4,
        "by_heads": pick.random() < 0.25,
        "tiles": pick.random() < 0.5,
        "before": pick.random() < 0.3,
        "walk": pick.random() < 0.4,
        "state": pick.random() < 0.3,
        "wide": pick.random() < 0.3,
    }
    lanes = pick.choice(["plain", "plain", "pairs", "halves"])
    sizes = {"BT": pick.choice([4, 8, 16]), "H": pick.choice([1, 2, 3]), "BS": pick.choice([4, 8])}
    sizes["turn"] = pick.choice([1, -1])
    dims = [(19, 2, 8), (7, 3, 6), (30, 1, 4), (11, 4, 2)]
    pick.shuffle(dims)
    sweep = [dict(zip(("T", "N", "D"), one, strict=True)) for one in dims[:3]]
    text = HEAD.format(sweep=sweep) + _kernel(pick, own, lanes) + _stub(own, sizes) + ARGS.format(**sizes)
    features = [name for name, wanted in own.items() if wanted] + [f"{lanes} lanes"]
    return Program(seed, text, sweep, features, "float32")


def _kernel(pick: Random, own: dict[str, bool], lanes: str) -> str:
    cast = ".to(tl.int32)" if not own["wide"] else ""
    lines = ["i_v = tl.program_id(1)", "i_h = tl.program_id(2) % H"]
    if own["table"]:
        lines += [f"i_n = tl.load(table + 2 * tl.program_id(0)){cast}"]
        lines += [f"i_t = tl.load(table + 2 * tl.program_id(0) + 1){cast}"]
    else:
        lines += ["i_n, i_t = tl.program_id(0) // NT, tl.program_id(0) % NT"]
    lines += [f"bos, eos = tl.load(cu + i_n){cast}, tl.load(cu + i_n + 1){cast}", "n = eos - bos"]
    if own["early"]:
        lines += ["if i_t * BT >= n:", "    return"]
    lines += ["rows = i_t * BT + tl.arange(0, BT)", "d = tl.arange(0, BD)"]
    lines += ["mask = (rows < n)[:, None] & (d < D)[None, :]"]
    lines += [f"at = {_place(own, 'rows')}"]
    lines += ["v = tl.load(x + at + d[None, :], mask=mask, other=0.0)"]
    if lanes == "pairs":
        other = pick.choice(["d ^ 1", "d + (d + 1) % 2 * 2 - 1"])
        lines += [f"e = {other}", "pair = (rows < n)[:, None] & (d // 2 < D // 2)[None, :]"]
        lines += ["v = v * v + tl.load(x + at + e[None, :], mask=pair, other=0.0)"]
    elif lanes == "halves":
        lines += ["half = (rows < n)[:, None] & (d < D // 2)[None, :]"]
        lines += ["a = tl.load(x + at + d[None, :], mask=half, other=0.0)"]
        lines += ["b = tl.load(x + at + d[None, :] + D // 2, mask=half, other=0.0)"]
        lines += ["v = v + a * b"]
    if own["before"]:
        lines += [f"back = {_place(own, 'rows - 1')}"]
        lines += ["v += tl.load(x + back + d[None, :], mask=mask & (rows > 0)[:, None], other=0.0) * v"]
    if own["walk"]:
        lines += ["total = tl.zeros([BD], dtype=tl.float32)", "for start in range(0, n, BS):"]
        lines += ["    cols = start + tl.arange(0, BS)", f"    here = {_place(own, 'cols')}"]
        lines += ["    seen = (cols < n)[:, None] & (d < D)[None, :]"]
        lines += ["    u = tl.load(x + here + d[None, :], mask=seen, other=0.0)"]
        lines += [f"    {pick.choice(['total += tl.sum(u * u, 0)', 'total = total * 0.5 + tl.sum(u, 0)'])}"]
        lines += ["v = v * total[None, :]"]
    weight = "i_v * D + d" if own["tiles"] else "d"
    lines += [f"v = v * tl.load(w + {weight}, mask=d < D, other=0.0)[None, :]"]
    if own["state"]:
        lines += ["h = tl.zeros([BT, BD], dtype=tl.float32)", "for step in range(0, 3):"]
        lines += ["    h = tl.sin(h) + v * h * 0.5 + v"]
        lines += ["    tl.store(s + (step * 2 + i_v) * TOTAL + at + d[None, :], h, mask=mask)"]
        lines += ["v = v + h"]
    lines += ["tl.store(y + i_v * TOTAL + at + d[None, :], v, mask=mask)"]
    head = "@triton.jit\ndef packed_kernel(\n    x, w, y, s, cu, table, TOTAL, NT, D, H: tl.constexpr,\n"
    head += "    BT: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,\n):\n"
    return head + "".join(f"    {line}\n" for line in lines)


def _place(own: dict[str, bool], rows: str) -> str:
    """Where rows of a head begin."""
    if own["by_heads"]:
        return f"(bos * H + i_h * n + {rows})[:, None] * D"
    return f"((bos + {rows}) * H + i_h)[:, None] * D"


def _stub(own: dict[str, bool], sizes: dict[str, int]) -> str:
    tiles = 2 if own["tiles"] else 1
    grid = "len(table)" if own["table"] else "(len(cu) - 1) * NT"
    stored = "y, s" if own["state"] else "y"
    return f"""

@autodiff(inputs_require_grad=(0, 1))
def packed(x, w, cu, table, D):
    NT = triton.cdiv(int((cu[1:] - cu[:-1]).max()), {sizes["BT"]})
    y = torch.zeros({tiles}, x.numel(), device=x.device, dtype=x.dtype)
    s = torch.zeros(3, 2, x.numel(), device=x.device, dtype=x.dtype)
    packed_kernel[({grid}, {tiles}, {sizes["H"]})](
        x, w, y, s, cu, table, x.numel(), NT, D, H={sizes["H"]}, BT={sizes["BT"]},
        BD=triton.next_power_of_2(D), BS={sizes["BS"]},
    )
    return {stored}
"""
