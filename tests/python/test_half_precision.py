"""Every forward of the tests compiles for a GPU in single and in half precision: the interpreter takes types that Triton does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_agent import draw, facts
from kernel_agent.errors import Unusable
from kernel_agent.forward import Launch, launch_intercept, load

KERNELS = sorted((Path(__file__).parent / "kernels").glob("*.py"))
DTYPES = ("float32", "float16", "bfloat16")


def launches(file: Path, dtype: str) -> list[tuple[facts.Compiler, Launch]]:
    """What the stub launches on each shape of its sweep; nothing is executed."""
    fwd = load(str(file), "interpret", "sm_90", "cpu")
    compiler = facts.Compiler(fwd.target.triton)
    found: list[tuple[facts.Compiler, Launch]] = []

    def record(launch: Launch) -> Any:
        found.append((compiler, launch))

    for shape in fwd.sweep:
        args, kwargs = draw.make_inputs(fwd, shape.dims, 1, dtype=dtype)
        with launch_intercept(record), torch.no_grad():
            fwd.call(args, kwargs)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_forward__compiles_for_sm_90(file: Path, dtype: str, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    found = launches(file, dtype)
    assert found, "the stub launched nothing"
    for compiler, launch in found:
        try:
            compiler.entry(launch)
        except Unusable as error:
            pytest.fail(f"{file.stem} in {dtype}: {error.line}: {error.message}", pytrace=False)
