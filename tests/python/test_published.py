"""Forward files in the manner of large libraries: each is differentiated, with the schedule that is named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest
from diff_support import ROOT, draft
from kernel_agent import errors, forward

FOLDER = ROOT / "tests/published"
TABLE: dict[str, tuple[int, int]] = {  # atomics, and bytes of tape, of calls like that of the first shape
    "chunk_o": (0, 0),
    "cross_entropy": (1, 0),
    "cumsum": (0, 0),
    "dyt": (0, 0),
    "embedding": (1, 0),
    "flash_bias": (0, 0),
    "flash_tutorial": (0, 0),
    "flash_varlen": (3, 0),
    "fused_add_rms_norm": (0, 0),
    "geglu": (0, 0),
    "group_norm": (4, 0),
    "grouped_gemm": (1, 0),
    "jsd": (0, 0),
    "kkt": (0, 0),
    "l2norm": (0, 0),
    "layer_norm": (0, 0),
    "matmul": (0, 0),
    "mean_pooling": (0, 0),
    "moe": (3, 0),
    "poly_norm": (0, 0),
    "rms_norm": (0, 0),
    "short_conv": (0, 0),
    "softmax": (0, 0),
    "swiglu": (0, 0),
    "token_shift": (0, 0),
    "tvd": (0, 0),
    "wy": (0, 0),
}
PACKED = {  # atomics where sequences are packed: their rows are found in data
    "chunk_o": 4,
    "cumsum": 1,
    "kkt": 3,
    "mean_pooling": 1,
    "short_conv": 2,
    "token_shift": 2,
    "wy": 5,
}
REFUSED = {  # what the refusal says, and its remedy
    "chunk_h": ("the length of this loop is not known before the launch", "Bound the loop by arguments"),
    "rope": ("is written and read at different addresses", "Write the result to its own buffer"),
    "rotary": ("overwritten, but not by one program an element", "Write to a buffer of its own"),
}


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules beside the files can be imported."""
    monkeypatch.syspath_prepend(str(FOLDER))
    importlib.invalidate_caches()
    yield
    for name in [n for n in sys.modules if n == "ops" or n.startswith("ops.")]:
        del sys.modules[name]


def test_every_file_is_in_one_table() -> None:
    assert sorted([*TABLE, *REFUSED]) == sorted(p.stem for p in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", sorted(TABLE))
def test_published__is_differentiated_with_this_schedule(name: str) -> None:
    file = FOLDER / f"{name}.py"
    report = draft(file, forward.load(file).sweep[0].dims)["report"]
    assert (report["atomics"], report["tape_bytes"]) == TABLE[name]


@pytest.mark.parametrize("name", sorted(PACKED))
def test_published__packed_or_not__has_kernels_of_its_own(name: str) -> None:
    file = FOLDER / f"{name}.py"
    packed = next(shape.dims for shape in forward.load(file).sweep if shape.dims["packed"])
    result = draft(file, packed)
    assert result["report"]["atomics"] == PACKED[name]
    kernels = result["backward"].split("@triton.jit\ndef ")[1:]
    plain = [kernel for kernel in kernels if "_without_varlen" in kernel.partition("(")[0]]
    assert plain and not any("atomic_add" in kernel for kernel in plain)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_published__is_refused_with_a_remedy(name: str) -> None:
    file = FOLDER / f"{name}.py"
    with pytest.raises(errors.Unusable) as caught:
        draft(file, forward.load(file).sweep[0].dims)
    message, remedy = REFUSED[name]
    assert message in str(caught.value)
    assert remedy in str(caught.value.remedy)
