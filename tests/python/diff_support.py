"""For the tests of the differentiator: draft a backward, run it as a candidate, compare with the oracle."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_agent import devices, forward, tensors
from kernel_agent.differentiate import operation
from kernel_agent.operations import candidate, oracle

ROOT = Path(__file__).resolve().parents[2]
MARKER = "# ---- backward ----"
IMPORT = "from kernel_agent import autodiff\n"
INLINE = (
    "def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent\n    return lambda stub: stub\n"
)
FP32 = 1e-5


def draft(file: Path, dims: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The result of op differentiate; raises errors.Unusable."""
    request = {
        "op": "differentiate",
        "nonce": "n",
        "file": str(file),
        "device": "cpu",
        "target": "sm_90",
        "dtype": "float32",
    }
    return operation.run({**request, "case": {"dims": dims, "seed": 1}, **options}, file.parent)


def edits_of(source: str, file: Path, once: bool = True) -> Callable[..., Path]:
    """For a fixture: writes the source to the file with edits, each (old, new); `once`: old text stands there
    once, else it may stand more often."""

    def make(*edits: tuple[str, str]) -> Path:
        text = source
        for old, new in edits:
            assert text.count(old) == 1 if once else old in text, old
            text = text.replace(old, new)
        file.write_text(text)
        return file

    return make


def pair_text(source: str, backward: str) -> str:
    return source.replace(IMPORT, INLINE).rstrip() + f"\n\n\n{MARKER}\n\n" + backward


def gradients_of(file: Path, cases: list[dict[str, Any]], dtype: str) -> list[dict[str, torch.Tensor]]:
    """The oracle's gradients in float64, and no more of what it makes of a case. Once for each state of the
    file and of the modules beside it: many drafts of a forward are compared at the same cases."""
    texts = tuple(path.read_text() for path in (file, *sorted(file.parent.rglob("*.py"))))
    return _gradients_of(file, texts, json.dumps(cases), dtype)


@functools.lru_cache(16)
def _gradients_of(
    file: Path, _texts: tuple[str, ...], cases: str, dtype: str
) -> list[dict[str, torch.Tensor]]:
    fwd = forward.load(str(file), "interpret", "sm_90", "cpu", processors=devices.FEW_PROCESSORS)
    found = []
    for case in json.loads(cases):
        made = oracle.Case(fwd, case, dtype)
        recording = made.record(dtype)
        made.require_taken(recording)
        exact, _, gradients = made.differentiate(recording)
        exact.release()
        found.append(gradients)
    return found


def errors(
    file: Path, backward: str, cases: list[tuple[dict[str, Any], str]], dtype: str = "float32"
) -> dict[str, list[float]]:
    """Relative error of every gradient against the oracle's, over (dims, layout of the upstream) cases; NaN
    where one is missing."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        pair = scratch / f"{file.stem}_pair.py"
        pair.write_text(pair_text(file.read_text(), backward))
        asked = [
            {"id": i, "dims": dims, "seed": 20 + i, "upstream": {"kind": "normal", "seed": 40 + i}}
            | {"layouts": {} if layout == "normal" else {"upstream/0": layout}}
            for i, (dims, layout) in enumerate(cases)
        ]
        common = {"nonce": "n", "device": "cpu", "target": "sm_90", "dtype": dtype}
        ran = candidate.run(
            {"op": "candidate", "file": str(pair), "cases": [{**c, "needs": None} for c in asked], **common},
            scratch,
        )
        for got, expected in zip(ran["cases"], gradients_of(file, asked, dtype), strict=True):
            assert got["ok"], got["error"]
            mine = tensors.load(scratch / got["file"])
            for name, reference in expected.items():
                value = mine.get(f"grad/{name}")
                if value is None:
                    found.setdefault(name, []).append(0.0 if not reference.any() else float("nan"))
                    continue
                gap = (value.double() - reference).norm() / reference.norm().clamp_min(1e-30)
                if value.numel() and not reference.any():
                    gap = value.double().abs().max()
                found.setdefault(name, []).append(gap.item())
    return found


def assert_right(
    file: Path,
    result: dict[str, Any],
    cases: list[tuple[dict[str, Any], str]],
    bound: float = FP32,
    dtype: str = "float32",
) -> None:
    found = errors(file, result["backward"], cases, dtype)
    wrong = {n: e for n, e in found.items() if not all(v <= bound for v in e)}
    assert not wrong, f"{file.stem}: {wrong}\n{result['backward']}"
