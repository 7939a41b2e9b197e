"""Loops of products whose steps go without masks where a tile lies wholly inside."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from diff_support import FP32, ROOT, draft, edits_of, errors, pair_text
from kernel_agent import compiled, draw, specialised, tensors
from kernel_agent.differentiate import pipeline
from kernel_agent.forward import load
from kernel_agent.launches import launch_intercept
from kernel_agent.operations import candidate

ATTENTION = ROOT / "examples/attention.py"
UNMASKED = {"unmasked": 1}
BLOCKS = "BLOCK_M, BLOCK_N = 64, 32"
DIAGONAL = "visible = visible & (cols[None, :] <= offs_m[:, None])"
END = "end_n = tl.minimum(start_m + BLOCK_M, N) if CAUSAL else N"
CAUSAL = {"B": 1, "H": 2, "N": 200, "D": 16, "causal": True}
SIZES = (200, 130, 128, 65, 64, 37, 15, 1)
RAGGED = [{**CAUSAL, "N": N, "D": 8 if N == 65 else 16, "causal": N != 128} for N in SIZES]
RAGGED += [{**CAUSAL, "N": N, "causal": False} for N in (130, 97, 31)]


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(ATTENTION.read_text(), tmp_path / "attention.py")


def gradients(file: Path, backward: str, cases: list[dict]) -> list[dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        pair = Path(folder) / f"{file.stem}_pair.py"
        pair.write_text(pair_text(file.read_text(), backward))
        upstream = {"kind": "normal", "seed": 7}
        asked = [
            {"id": i, "dims": dims, "seed": 20 + i, "upstream": upstream, "layouts": {}, "needs": None}
            for i, dims in enumerate(cases)
        ]
        common = {"nonce": "n", "device": "cpu", "target": "sm_90", "dtype": "float32"}
        ran = candidate.run({"op": "candidate", "file": str(pair), "cases": asked, **common}, Path(folder))
        assert all(got["ok"] for got in ran["cases"]), ran
        found = [tensors.load(Path(folder) / got["file"]) for got in ran["cases"]]
        return [{n: t.clone() for n, t in one.items() if n.startswith("grad/")} for one in found]


def assert_same(file: Path, cases: list[dict] = RAGGED, **more: Any) -> str:
    """Gradients are right, and to the last bit those of the loops that are not split."""
    split = draft(file, cases[0], config={**UNMASKED, **more})["backward"]
    whole = draft(file, cases[0], config=more)["backward"]
    assert "MASKED=False" in split and "MASKED" not in whole
    assert all(len(line) <= 110 for line in split.splitlines() if "MASKED" in line or "whole_" in line)
    pairs = zip(gradients(file, split, cases), gradients(file, whole, cases), strict=True)
    for dims, (one, other) in zip(cases, pairs, strict=True):
        assert one and one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), dims
    found = errors(file, split, [(dims, "normal") for dims in cases])
    assert all(error <= FP32 for each in found.values() for error in each), found
    return split


def kernel(backward: str, name: str) -> str:
    return backward.split(f"\ndef {name}(")[1].split("\n@triton.jit")[0]


def heads(backward: str, name: str) -> list[tuple[str, str]]:
    """The loops of a kernel, each with what it says of masks."""
    loops = re.findall(r"    for (.*):\n(?:.*\n)*?.*MASKED=(\w+)", kernel(backward, name))
    return [(head, masked) for head, masked in loops]


def test_attention__masks_the_diagonal_and_the_end() -> None:
    split = assert_same(ATTENTION)
    rows, columns = heads(split, "attention_kernel_bwd"), heads(split, "attention_kernel_bwd_v_k")
    assert [masked for _, masked in rows] == ["False", "True"]
    assert [masked for _, masked in columns] == ["True", "False", "True"]
    assert rows[1][0].endswith("end_n, BLOCK_N)") and columns[2][0].endswith("grid_0)")


@pytest.mark.parametrize("blocks", [(32, 64), (16, 64), (64, 16), (32, 32)])
def test_blocks_of_any_sizes__and_tiles_that_are_turned(changed, blocks) -> None:
    file = changed((BLOCKS, f"BLOCK_M, BLOCK_N = {blocks[0]}, {blocks[1]}"))
    assert_same(file)
    assert_same(file, RAGGED[:4], turned=1)


def test_blocks_of_the_backwards_own() -> None:
    assert_same(ATTENTION, RAGGED[:6], BLOCK_M=64, BLOCK_N=64, num_warps=4, turned=1)


@pytest.mark.parametrize("window", [1, 40, 100, 1000])
def test_sliding_windows(changed, window: int) -> None:
    """The first key is seen by all: a row that sees none of a tile has no maximum yet."""
    inside = f"((offs_m[:, None] - cols[None, :] < {window}) | (cols[None, :] == 0))"
    split = assert_same(changed((DIAGONAL, f"{DIAGONAL} & {inside}")))
    masked = [masked for _, masked in heads(split, "attention_kernel_bwd")]
    assert masked == ["True", "False", "True"]


@pytest.mark.parametrize("shift", ["+ 45", "- 45", "+ N // 2", "- H"])
def test_keys_that_begin_before_or_behind_the_rows(changed, shift: str) -> None:
    """Rows without any key have no softmax: those see their first."""
    seen = f"((cols[None, :] <= offs_m[:, None] {shift}) | (cols[None, :] == 0))"
    also = f"(cols[None, :] * 1 <= offs_m[:, None] {shift} + 200)"
    file = changed((DIAGONAL, f"visible = visible & {seen} & {also}"), (END, "end_n = N"))
    assert_same(file)


@pytest.mark.parametrize(
    "comparison",
    [
        "offs_m[:, None] >= cols[None, :]",
        "-cols[None, :] >= -offs_m[:, None]",
        "cols[None, :] < offs_m[:, None] + 1",
    ],
)
def test_however_the_diagonal_is_written(changed, comparison: str) -> None:
    split = assert_same(changed((DIAGONAL, f"visible = visible & ({comparison})")), RAGGED[:5])
    assert "whole_end" in kernel(split, "attention_kernel_bwd")


@pytest.mark.parametrize("name", ["gqa_attn_kv_owner_loops_group", "sliding_window_attn_inverse_band",
    "evoformer_attn_bias_tile_owner", "varlen_attn_tile_table", "flash_attn_causal_split_dq_dkdv",
    "memory_prefix_kv_attn"])  # fmt: skip
def test_attentions_of_the_store(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text((ROOT / f"dataset/attention/{name}.py").read_text().split("# ---- backward ----")[0])
    fwd = load(str(file), "interpret", "sm_90", "cpu")
    assert_same(file, fwd.module.SWEEP_CPU)


# offers


def offered(**dims: Any) -> bool:
    return UNMASKED in draft(ATTENTION, {**CAUSAL, **dims})["report"]["configs"]


def test_it_is_offered__where_programs_have_whole_steps() -> None:
    assert offered() and offered(N=130) and offered(N=65, causal=False)
    assert not offered(N=37) and not offered(N=63, causal=False)
    assert UNMASKED not in draft(ATTENTION, CAUSAL, config=UNMASKED)["report"]["configs"]


def test_whether_it_is_offered__leaves_the_draft_alone(monkeypatch) -> None:
    asked = draft(ATTENTION, CAUSAL)["backward"]
    monkeypatch.setattr(pipeline, "offer_unmasked", lambda *_: None)
    assert draft(ATTENTION, CAUSAL)["backward"] == asked


# compiled


def lowered(file: Path, folder: Path, dims: dict, config: dict) -> dict[str, str]:
    """Triton IR for sm_90 of the kernels of a backward, in half precision."""
    made = draft(file, CAUSAL, config=config, dtype="float16")
    pair = folder / "pair.py"
    pair.write_text(pair_text(file.read_text(), made["backward"]))
    fwd = load(str(pair))
    (q, k, v), rest = draw.make_inputs(fwd, dims, 0, dtype="float16")
    launches: list = []
    with launch_intercept(lambda launch: (launches.append(launch), launch.run())):
        out = fwd.module.attention_autograd(
            q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), **rest
        )
        out.sum().backward()
    compiler = specialised.Compiler(fwd.target.triton)
    found = {}
    for launch in launches:
        if "bwd" in launch.name:
            jitted, options = compiler.specialise(launch)
            source = compiled.lower(jitted, compiler.backend, compiler.target, options)
            assert source is not None
            assert compiled.build(source)["asm"]["cubin"]
            found[launch.name] = source.text
    return found


def loops(ttir: str) -> list[str]:
    """The bodies of loops with products."""
    return [body for body in re.findall(r"scf\.for.*?\n    }", ttir, re.S) if "tt.dot" in body]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def test_compiled__whole_steps_compare_nothing_and_choose_nothing(tmp_path, cached) -> None:
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    made = lowered(ATTENTION, tmp_path, {**CAUSAL, "N": 256, "D": 64}, {**blocks, **UNMASKED})
    for name, parts in (("attention_kernel_bwd", 2), ("attention_kernel_bwd_v_k", 3)):
        bodies = loops(made[name])
        assert len(bodies) == parts
        asks = ["arith.cmpi" in body or "arith.select" in body for body in bodies]
        assert asks == ([False, True] if parts == 2 else [True, False, True])
    plain = lowered(ATTENTION, tmp_path, {**CAUSAL, "N": 256, "D": 64}, {**blocks})
    assert all(len(loops(ttir)) == 1 for ttir in plain.values())


@pytest.mark.parametrize("causal", [True, False])
def test_compiled__with_sizes_that_triton_makes_constants(tmp_path, cached, causal: bool) -> None:
    made = lowered(ATTENTION, tmp_path, {**CAUSAL, "H": 1, "N": 1, "causal": causal}, UNMASKED)
    assert len(made) == 2
