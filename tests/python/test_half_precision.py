"""The forwards of the tests compile for a GPU in single and in half precision, and so do backwards drafted
from them in half precision: the interpreter takes types that Triton does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diff_support import draft, pair_text
from kernel_agent import draw, specialised
from kernel_agent.errors import Unusable
from kernel_agent.forward import Launch, launch_intercept, load
from kernel_agent.operations import candidate

KERNELS = sorted((Path(__file__).parent / "kernels").glob("*.py"))
DTYPES = ("float32", "float16", "bfloat16")
# What products, atomics, pointers in tables and updates in place make of half precision.
DRAFTED = ("dot", "dot_mix", "sliding_attention", "chunk_linear_attention", "in_place", "moe", "grouped_gemm")


def launches(file: Path, dtype: str) -> list[tuple[specialised.Compiler, Launch]]:
    """What the stub launches on each shape of its sweep; nothing is executed."""
    fwd = load(str(file), "interpret", "sm_90", "cpu")
    compiler = specialised.Compiler(fwd.target.triton)
    found: list[tuple[specialised.Compiler, Launch]] = []

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
    compile_all(found, f"{file.stem} in {dtype}")


def compile_all(found: list[tuple[specialised.Compiler, Launch]], what: str) -> None:
    for compiler, launch in found:
        try:
            compiler.entry(launch)
        except Unusable as error:
            pytest.fail(f"{what}: {error.line}: {error.message}", pytrace=False)


def launches_of_pair(
    pair: Path, dims: dict[str, Any], dtype: str
) -> list[tuple[specialised.Compiler, Launch]]:
    """What the pair launches forward and backward; nothing is executed."""
    fwd = load(str(pair), "interpret", "sm_90", "cpu")
    compiler = specialised.Compiler(fwd.target.triton)
    found: list[tuple[specialised.Compiler, Launch]] = []

    def record(launch: Launch) -> Any:
        found.append((compiler, launch))

    args, kwargs = draw.make_inputs(fwd, dims, 1, dtype=dtype)
    bound = fwd.signature.bind(*args, **kwargs)
    wanted = draw.grad_inputs(fwd, draw.bind(fwd, args, kwargs))
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in wanted.items()}
    bound.arguments.update(leaves)
    with fwd.active(), launch_intercept(record):
        made = draw.flatten(candidate.entry_of(fwd, None)(*bound.args, **bound.kwargs))
        outs = [value for value in made if isinstance(value, torch.Tensor) and value.requires_grad]
        ones = [torch.ones_like(value) for value in outs]
        torch.autograd.grad(outs, list(leaves.values()), ones, allow_unused=True)
    return found


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", DRAFTED)
def test_backward__drafted_in_half_precision__compiles_for_sm_90(
    name: str, dtype: str, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    file = next(file for file in KERNELS if file.stem == name)
    dims = load(str(file), "interpret", "sm_90", "cpu").sweep[0].dims
    pair = tmp_path / f"{name}.py"
    pair.write_text(pair_text(file.read_text(), draft(file, dims, dtype=dtype)["backward"]))
    found = launches_of_pair(pair, dims, dtype)
    assert any("bwd" in launch.name for _, launch in found)
    compile_all(found, f"{name} in {dtype}")


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_backward__keeps_a_quotient_of_halves_in_single_precision(dtype: str):
    """Triton divides no halves: it widens them. A variance of rows of 100 does not fit in float16."""
    file = next(file for file in KERNELS if file.stem == "group_norm")
    dims = load(str(file), "interpret", "sm_90", "cpu").sweep[0].dims
    backward = draft(file, dims, dtype=dtype)["backward"]
    kept = [line for line in backward.splitlines() if "spill_value = torch.empty" in line]
    assert kept and all("dtype=torch.float32" in line for line in kept)


SMALL = {"dot": {"M": 1, "N": 2, "K": 16}, "moe": {"T": 3, "E": 2, "D": 16, "F": 1}}


@pytest.mark.parametrize("name", SMALL)
def test_backward__of_a_product_over_a_small_size__compiles_for_sm_90(name: str, tmp_path, monkeypatch):
    """A GPU's product sums over 16 and more. Only what the forward sums over is sure to be that large."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    file = next(file for file in KERNELS if file.stem == name)
    dims = load(str(file), "interpret", "sm_90", "cpu").sweep[0].dims
    pair = tmp_path / f"{name}.py"
    pair.write_text(pair_text(file.read_text(), draft(file, dims)["backward"]))
    compile_all(launches_of_pair(pair, SMALL[name], "float32"), name)


def test_backward__of_products_over_blocks_of_a_chosen_size__is_plain():
    file = next(file for file in KERNELS if file.stem == "matmul")
    dims = load(str(file), "interpret", "sm_90", "cpu").sweep[0].dims
    assert "small_dot" not in draft(file, dims)["backward"]
