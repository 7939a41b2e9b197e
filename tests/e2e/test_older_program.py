"""Files and command lines of the earlier program of this name."""

from __future__ import annotations

from pathlib import Path

from conftest import Agent
from files import SMALL

OLDER = (
    SMALL.replace("inputs_require_grad=", "idxs_buffers=")
    .replace(
        '{"N": 24}',
        '{"N": 24, "dtype": torch.bfloat16}, {"N": 33, "dtype": torch.bfloat16, "required": False}',
    )
    .replace(
        'device="cuda", dtype=torch.float32):',
        'device="cuda", dtype=None):\n    dtype = dtype or dims["dtype"]',
    )
)
FURTHER = {  # what else it took, and what the log says
    "--patience_parity_restore 3": "is --patience-parity",
    "--context 65536": "is --context-tokens",
    "--rag": "is the default",
    "--rag-topk 3": "is --topk",
    "--rag-min-sim 0.5": "is --min-sim",
}
OPTIONS = ["--compiler", "--mode", "phased", "-r", "medium", "-c", "262144", "--patience_perf_stop", "4"]


def test_older_file_by_an_older_command_line__is_verified(agent: Agent, tmp_path: Path) -> None:
    file = tmp_path / "older.py"
    file.write_text(OLDER)
    done = agent("--file-path", file, "--backend", "none", "--no-optimise", "--json", *OPTIONS)
    assert done.code == 0, done.err
    assert "-r is --reasoning-effort" in done.err and "--patience_perf_stop is --patience-perf" in done.err
    pair = Path(done.result["pair"]).read_text()
    assert "idxs_buffers=(0,)" in pair and 'dtype": torch.bfloat16' in pair
    checked = agent("check", done.result["pair"])
    assert checked.code == 0, checked.err


def test_further_options_of_the_older_program__are_taken_or_answered(agent: Agent, tmp_path: Path) -> None:
    file = tmp_path / "older.py"
    file.write_text(OLDER)
    done = agent("inspect", file, *" ".join(FURTHER).split())
    assert done.code == 0, done.err
    for option, said in FURTHER.items():
        assert f"{option.split()[0]} {said}" in done.err
    refused = agent("inspect", file, "--checkpoint", "weights")
    assert refused.code != 0 and "--base-url URL and --model NAME" in refused.err
