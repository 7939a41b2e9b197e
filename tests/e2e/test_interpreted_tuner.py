"""What the tuner leaves alone where nothing is compiled."""

from __future__ import annotations

from conftest import ROOT, Agent


def test_products_that_are_rounded_otherwise__are_not_tried_in_the_interpreter(agent: Agent) -> None:
    """There they are exact: nothing would say what they lose. The differentiator offers them first."""
    pair = ROOT / "dataset/transform_fft/dct2_rows_matmul.py"
    forward = agent.folder / pair.name
    forward.write_text(pair.read_text().partition("# ---- backward ----")[0])
    sweep = ("--sweep", '[{"M": 5, "N": 64}]')
    done = agent("--file-path", forward, "--backend", "none", "--no-retrieval", "--json", *sweep)
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert "optimise: schedule: " in done.err and "tf32x3" not in done.err, done.err
