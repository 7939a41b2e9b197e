"""The manual page of section 5 and the sample configuration have the settings of the program, with its types
and defaults, and the program reads the sample."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from test_option_docs import ROOT, table_rows

BUILD = Path(os.environ.get("KA_BUILD", ROOT / "build"))
MAN = (ROOT / "docs" / "kernel-agent.5").read_text()
SAMPLE = (ROOT / "docs" / "config.sample").read_text()
OF_ONE_CALL = {
    *("changed-since", "config", "fail-fast", "file-path", "follow", "force", "function", "json", "junit"),
    *("only", "part", "print", "priority", "resume", "sanitize", "seconds", "wait"),
}
TYPES = {"TEXT": "text", "LIST": "text", "INT": "integer", "REAL": "number", "FLAG": "boolean"}


def table() -> dict[str, tuple[str, str]]:
    """Key -> type and default."""
    text = (ROOT / "agent" / "app" / "opts.c").read_text()
    row = r'^ {4}\{"([a-z-]+)", (?:NULL|"[a-z-]+"), ([A-Z_]+), AT\([\w.]+\), (?:NULL|"([^"]*)"),'
    found = re.findall(row, text, re.MULTILINE)
    assert len(found) == len(table_rows())
    return {
        name.replace("-", "_"): (TYPES[kind], default)
        for name, kind, default in found
        if name not in OF_ONE_CALL
    }


def test_section_5_has_each_setting_with_type_and_default() -> None:
    listed = re.findall(r"^\.It Va ([a-z_]+) Pq (\w+)(?:, (\S+))?$", MAN, re.MULTILINE)
    assert {key: (kind, default) for key, kind, default in listed} == table()


def test_sample_has_each_setting_with_its_default() -> None:
    lines = dict(re.findall(r"^#([a-z_]+) = (.*)$", SAMPLE, re.MULTILINE))
    assert set(lines) == set(table())
    for key, (kind, default) in table().items():
        if default:
            assert lines[key] == (f'"{default}"' if kind == "text" else default), key


def test_program_reads_the_sample(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(re.sub(r"^#([a-z_]+ = )", r"\1", SAMPLE, flags=re.MULTILINE))
    command = [BUILD / "kernel-agent", "status", "--config", config, "--state", tmp_path]
    command += ["--token-file", config]  # the first that is no setting's fault
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "a token is one word" in done.stderr, done.stderr
    config.write_text(config.read_text() + "surprise = 1\n")
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert "unknown setting 'surprise'" in done.stderr
