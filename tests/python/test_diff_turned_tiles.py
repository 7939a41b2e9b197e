"""Tiles of scores that are formed transposed, as the products of an owner kernel take them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft, edits_of, pair_text
from kernel_agent import compiled, draw, specialised
from kernel_agent.differentiate.ir.graph import Graph
from kernel_agent.differentiate.ir.nodes import Node, TapeStore, nodes_in
from kernel_agent.differentiate.schedule.turned_tiles import turned
from kernel_agent.forward import load
from kernel_agent.launches import launch_intercept

ATTENTION = ROOT / "examples/attention.py"
TURNED = {"turned": 1}
CAUSAL = {"B": 1, "H": 2, "N": 130, "D": 16, "causal": True}
RAGGED = [(CAUSAL, "normal"), ({"B": 2, "H": 1, "N": 37, "D": 24, "causal": False}, "transposed")]
SCORES = '        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * log2e)\n'


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(ATTENTION.read_text(), tmp_path / "attention.py")


def transposed(result: dict) -> list[str]:
    """What is transposed of computed tiles, and not of what was loaded."""
    return re.findall(r"tl\.trans\((?!q\)|k\)|d\)|v\))[^\n]*", result["backward"])


def offered(result: dict) -> list[dict]:
    return [config for config in result["report"]["configs"] if "turned" in config]


def test_it_is_offered__with_as_many_rows_as_tensor_cores_take(changed) -> None:
    """32 keys are too few; of blocks on offer the smallest that have enough, behind the same as they are."""
    configs = draft(ATTENTION, CAUSAL)["report"]["configs"]
    least = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    assert offered({"report": {"configs": configs}}) == [{**least, "turned": 1, "num_stages": 3}]
    assert configs.index({**least, "turned": 1, "num_stages": 3}) == configs.index(least) + 1
    enough = draft(changed(("BLOCK_M, BLOCK_N = 64, 32", "BLOCK_M, BLOCK_N = 64, 64")), CAUSAL)
    wide = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8}
    assert offered(enough) == [{**wide, "turned": 1, "num_stages": 3}, {"turned": 1, "num_stages": 3}]


def test_a_stage_more_is_offered_with_it__where_there_is_room(changed) -> None:
    def stages(file: Path, width: int) -> int | None:
        (first, *_) = offered(draft(file, {**CAUSAL, "D": width}))
        return first.get("num_stages")

    assert stages(ATTENTION, 64) == 3 and stages(ATTENTION, 128) is None
    assert stages(changed(("num_warps=4, num_stages=2", "num_warps=4, num_stages=4")), 64) is None


def test_attention__is_offered_it__and_transposes_no_computed_tile() -> None:
    plain = draft(ATTENTION, CAUSAL)
    assert offered(plain) and len(transposed(plain)) == 2
    result = draft(ATTENTION, CAUSAL, config=TURNED)
    assert transposed(result) == [] and "formed transposed" in result["backward"]
    assert result["backward"].count("tl.dot(") == plain["backward"].count("tl.dot(")
    assert not offered(result)
    assert_right(ATTENTION, result, RAGGED)


def test_it_goes_with_tiles_of_the_kernels_own() -> None:
    result = draft(ATTENTION, CAUSAL, config={"turned": 1, "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4})
    assert transposed(result) == []
    assert_right(ATTENTION, result, RAGGED)


@pytest.mark.parametrize(
    "scores",
    [
        "        s = 30 * libdevice.tanh(s / 30)\n",
        "        s = s - 0.01 * tl.abs(offs_m[:, None] - cols[None, :])\n",
        "        s = tl.where(offs_m[:, None] % 3 == cols[None, :] % 3, s * 2, -(s + 1))\n",
    ],
)
def test_whatever_is_done_for_each_score__is_done_in_the_other_order(changed, scores: str) -> None:
    imports = "import triton.language as tl\n"
    more = "from triton.language.extra import libdevice\n"
    file = changed((SCORES, SCORES + scores), (imports, imports + more))
    result = draft(file, CAUSAL, config=TURNED)
    assert transposed(result) == []
    assert_right(file, result, RAGGED)


def test_scores_that_a_loaded_tile_is_added_to__stay_as_they_are(changed) -> None:
    bias = "        s += tl.load(q_ptr + offs_m[:, None] * 0 + cols[None, :] * 0).to(tl.float32) * 0.01\n"
    plain = draft(changed((SCORES, SCORES + bias)), CAUSAL)
    assert not offered(plain)


def owner_of_keys(folder: Path, config: dict) -> str:
    """PTX for sm_90 of the kernel for dK and dV, in half precision with blocks that tensor cores take."""
    blocks = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, **config}
    made = draft(ATTENTION, CAUSAL, config=blocks, dtype="float16")
    pair = folder / "pair.py"
    pair.write_text(pair_text(ATTENTION.read_text(), made["backward"]))
    fwd = load(str(pair))
    dims = {**CAUSAL, "N": 256, "D": 64}
    (q, k, v), rest = draw.make_inputs(fwd, dims, 0, dtype="float16")
    launches: list = []
    with launch_intercept(lambda launch: (launches.append(launch), launch.run())):
        out = fwd.module.attention_autograd(q.requires_grad_(), k, v.requires_grad_(), **rest)
        out.sum().backward()
    compiler = specialised.Compiler(fwd.target.triton)
    (launch,) = (one for one in launches if one.name == "attention_kernel_bwd_v_k")
    kernel, options = compiler.specialise(launch)
    source = compiled.lower(kernel, compiler.backend, compiler.target, options)
    assert source is not None
    return str(compiled.build(source)["asm"]["ptx"])


def test_compiled__no_computed_tile_is_stored_to_shared_memory_as_a_matrix(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    plain, turned_ptx = (owner_of_keys(tmp_path, config) for config in ({}, TURNED))
    assert "stmatrix" in plain and "stmatrix" not in turned_ptx
    assert "wgmma.mma_async" in turned_ptx


class Tiles:
    """q and d (ROWS, WIDTH), k (COLUMNS, WIDTH), scores q k^T and p, in float16 as products take it."""

    def __init__(self) -> None:
        self.g = g = Graph()
        sizes = {"ROWS": 64, "COLUMNS": 32, "WIDTH": 16}
        rows, columns, width = (
            g.intern("constexpr", (), {"name": n, "value": v}, "int32", ()) for n, v in sizes.items()
        )
        self.shape = (rows, columns)
        self.q, self.k, self.d = (self.loaded((n, width)) for n in (rows, columns, rows))
        self.scores = self.product(self.q, self.turned(self.k))
        self.p = g.cast(g.call("exp2", self.scores), "float16")

    def loaded(self, shape: tuple) -> Node:
        return self.g.fresh("load", {}, "float16", shape, self.g.top)

    def turned(self, a: Node) -> Node:
        return self.g.make("permute", (a,), {"order": (1, 0)}, a.dtype, a.shape[::-1])

    def product(self, a: Node, b: Node) -> Node:
        return self.g.make("dot", (a, b), {"precision": "ieee"}, "float32", (a.shape[0], b.shape[1]))

    def of(self, tile: Node, *others: Node) -> list | None:
        """Effects that store tile^T d, and others."""
        values = (self.product(self.turned(tile), self.d), *others)
        return turned(
            self.g, [TapeStore(f"t{i}", self.g.const(0), v, self.g.top) for i, v in enumerate(values)]
        )


def test_product_of_a_transposed_tile__is_one_of_the_tile_formed_so() -> None:
    tiles = Tiles()
    (effect,) = tiles.of(tiles.p)
    left, right = effect.value.args
    assert right is tiles.d and left.op == "cast" and left.shape == tiles.shape[::-1]
    (scores,) = (n for n in nodes_in([left]) if n.op == "dot")
    assert scores.args[0] is tiles.k and scores.args[1].op == "permute"
    assert scores.args[1].args[0] is tiles.q and scores.attrs == tiles.scores.attrs


def test_what_is_in_the_graph_already__keeps_its_name() -> None:
    """Whether tiles are offered is asked of drafts that have none."""
    tiles = Tiles()
    g, (_, columns) = tiles.g, tiles.shape
    cols, n = g.make("arange", (g.const(0), columns), {}, "int32", (columns,)), g.const(20)
    there = g.compare("<", g.expand(cols, 1), n)
    row = g.compare("<", g.expand(cols, 0), n)
    row.hint = "visible"
    (effect,) = tiles.of(g.where(row, tiles.p, g.number(0.0)))
    assert there in nodes_in([effect.value]) and there.hint is None


STAYS: dict[str, Callable[[Tiles], list | None]] = {
    "another product takes it as it is": lambda t: t.of(t.p, t.product(t.p, t.k)),
    "a number of each row is one of its scores": lambda t: t.of(
        t.g.cast(t.g.sub(t.scores, t.g.reduce("max", t.scores, 1, keep=True)), "float16")
    ),
    "it was loaded": lambda t: t.of(t.loaded(t.shape)),
    "a part of it was": lambda t: t.of(t.g.mul(t.p, t.loaded(t.shape))),
    "its rows are added up in a scan": lambda t: t.of(
        t.g.make("scan", (t.p,), {"axis": 1}, "float16", t.shape)
    ),
    "a row of numbers lies along its last axis": lambda t: t.of(
        t.g.mul(t.p, t.g.cast(t.g.fresh("load", {}, "float32", t.shape[1:], t.g.top), "float16"))
    ),
    "a loop carries what it is scaled by": lambda t: t.of(
        t.g.mul(t.p, t.g.expand(t.g.fresh("phi", {}, "float16", t.shape[:1], t.g.top), 1))
    ),
}


@pytest.mark.parametrize("why", STAYS)
def test_tile__stays_where(why: str) -> None:
    assert STAYS[why](Tiles()) is None


def test_product_that_adds_to_another__is_left_alone() -> None:
    tiles = Tiles()
    g, before = tiles.g, tiles.loaded(tiles.shape)
    scores = g.make("dot", (*tiles.scores.args, before), {"precision": "ieee"}, "float32", tiles.shape)
    assert tiles.of(g.cast(g.call("exp2", scores), "float16")) is None


def test_product_that_adds_what_it_makes_of_a_tile__stays() -> None:
    tiles = Tiles()
    operands = (tiles.turned(tiles.p), tiles.d, tiles.loaded(tiles.k.shape))
    added = tiles.g.make("dot", operands, {"precision": "ieee"}, "float32", tiles.k.shape)
    effects = [TapeStore("t", tiles.g.const(0), added, tiles.g.top)]
    assert turned(tiles.g, effects) is None


def test_loaded_tiles_that_are_taken_transposed__stay_so() -> None:
    tiles = Tiles()
    loaded = tiles.product(tiles.turned(tiles.q), tiles.d)
    first, second = tiles.of(tiles.p, loaded)
    assert first.value.args[0].op == "cast" and second.value is loaded


def test_branches_that_choose_a_tile__are_asked_of_the_turned_ones() -> None:
    tiles = Tiles()
    g = tiles.g
    flag = g.intern("constexpr", (), {"name": "FLAG", "value": True}, "int1", ())
    stmt = g.fork(flag, True)
    with g.at(stmt.then):
        then = g.mul(tiles.p, g.number(2.0))
    out = g.merged(stmt, then, tiles.p, tiles.p, g.top)
    (effect,) = tiles.of(out)
    (chosen,) = (n for n in nodes_in([effect.value]) if n.op == "ifout")
    assert chosen.shape == tiles.shape[::-1] and chosen.attrs["then"].shape == chosen.shape
    assert chosen.attrs["if"] is not stmt and chosen.attrs["if"].cond is flag

    stmt.then_effects.append(TapeStore("kept", g.const(0), tiles.q, stmt.then))
    assert tiles.of(out) is None

    half = g.merged(g.fork(flag, True), tiles.p, None, tiles.p, g.top)
    assert tiles.of(half) is None
