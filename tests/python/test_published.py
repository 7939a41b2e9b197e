"""Forward files in the manner of large libraries: each is differentiated, with the schedule that is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
from diff_support import ROOT, assert_right, draft
from kernel_agent import forward

FOLDER = ROOT / "tests/published"
TABLE: dict[str, tuple[int, int]] = {  # atomics, and bytes of tape, of calls like that of the first shape
    "chunk_h": (6, 0),
    "chunk_o": (0, 0),
    "cross_entropy": (1, 0),
    "cumsum": (0, 0),
    "dequant_matmul": (0, 0),
    "dyt": (0, 0),
    "embedding": (1, 0),
    "flash_bias": (0, 0),
    "flash_tutorial": (0, 0),
    "flash_varlen": (0, 0),
    "fused_add_rms_norm": (0, 0),
    "gated_conv_state": (3, 0),
    "geglu": (0, 0),
    "group_norm": (2, 0),
    "grouped_gemm": (0, 0),
    "jsd": (0, 0),
    "kkt": (0, 0),
    "l2norm": (0, 0),
    "layer_norm": (0, 0),
    "layer_norm_gated": (0, 0),
    "matmul": (0, 0),
    "mean_pooling": (0, 0),
    "moe": (3, 0),
    "poly_norm": (0, 0),
    "rms_norm": (0, 0),
    "rms_norm_casting": (0, 0),
    "rope": (0, 0),
    "rotary": (0, 0),
    "rotary_qk_packed": (0, 0),
    "short_conv": (0, 0),
    "softmax": (0, 0),
    "swiglu": (0, 0),
    "token_shift": (0, 0),
    "tvd": (0, 0),
    "var_mean": (1, 8192),
    "wy": (0, 0),
}
PACKED = {  # atomics where sequences are packed: their rows are found in data
    "chunk_o": 0,
    "cumsum": 0,
    "kkt": 0,
    "mean_pooling": 0,
    "rotary": 0,
    "short_conv": 1,  # windows reach into the chunk before
    "token_shift": 0,
    "wy": 0,
}


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules beside the files can be imported."""
    monkeypatch.syspath_prepend(str(FOLDER))
    importlib.invalidate_caches()
    yield
    for name in [n for n in sys.modules if n == "ops" or n.startswith("ops.")]:
        del sys.modules[name]


def test_every_file_is_in_the_table() -> None:
    assert sorted(TABLE) == sorted(p.stem for p in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", sorted(TABLE))
def test_published__is_differentiated_with_this_schedule(name: str) -> None:
    file = FOLDER / f"{name}.py"
    report = draft(file, forward.load(file).sweep[0].dims)["report"]
    assert (report["atomics"], report["tape_bytes"]) == TABLE[name]


@pytest.mark.parametrize("name", sorted(PACKED))
def test_published__packed_or_not__has_kernels_of_its_own(name: str) -> None:
    file = FOLDER / f"{name}.py"
    shapes = [shape.dims for shape in forward.load(file).sweep]
    packed = next(dims for dims in shapes if dims["packed"])
    result = draft(file, packed)
    assert result["report"]["atomics"] == PACKED[name]
    if "_with_varlen" in result["backward"]:
        assert_right(file, result, [(packed, "normal")])
    kernels = result["backward"].split("@triton.jit\ndef ")[1:]
    names = {kernel: kernel.partition("(")[0] for kernel in kernels}
    plain = [k for k, n in names.items() if "_without_varlen" in n and "_with_interleaved" not in n]
    assert plain and not any("atomic_add" in kernel for kernel in plain)


@pytest.mark.parametrize("name", ["gated_conv_state", "layer_norm_gated", "rms_norm_casting"])
def test_published__draft_of_a_call_with_all_tensors__is_right_where_a_call_leaves_some_out(
    name: str,
) -> None:
    file = FOLDER / f"{name}.py"
    first, *others = [shape.dims for shape in forward.load(file).sweep]
    assert_right(file, draft(file, first), [(dims, "normal") for dims in others])
