"""A stub that leaves small sizes to torch."""

from __future__ import annotations

from conftest import Agent
from files import FORWARD

SMALL = "    if N <= 16:\n        return torch.relu(x) * w - torch.relu(-x) * w\n"


def test_sizes_that_the_stub_leaves_to_torch__are_differentiated_by_torch(agent: Agent) -> None:
    assert FORWARD.count("    y = torch.empty_like(x)\n") == 1
    forward = agent.folder / "scale.py"
    forward.write_text(
        FORWARD.replace("    y = torch.empty_like(x)\n", SMALL + "    y = torch.empty_like(x)\n")
    )
    done = agent("--file-path", forward, "--backend", "none", "--no-retrieval", "--no-optimise", "--json")
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
