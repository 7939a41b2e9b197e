"""A program that was installed or unpacked elsewhere finds what came with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BUILD, PROGRAM


@pytest.mark.parametrize("store", ["bin/pairs.db", "pairs.db", "share/kernel-agent/pairs.db"])
def test_the_store_that_came_with_the_program_is_found(tmp_path: Path, store: str) -> None:
    program = tmp_path / "bin" / "kernel-agent"
    program.parent.mkdir()
    shutil.copy(PROGRAM, program)
    place = tmp_path / store
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(BUILD / "pairs.db", place)
    done = subprocess.run([program, "store", "list"], env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout
