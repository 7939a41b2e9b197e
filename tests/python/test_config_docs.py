"""The manual page of section 5 and the sample configuration have the settings of the program, with its types
and defaults, and the program reads the sample."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_option_docs import ROOT, table_options, table_rows

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


UNIT = ROOT / "scripts" / "kernel-agent.service"


def test_unit_starts_the_service_with_options_that_there_are() -> None:
    lines = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"[A-Z]\w+=", line))
    assert " serve " in lines["ExecStart"]
    assert set(re.findall(r"--([a-z-]+)", lines["ExecStart"])) <= table_options()
    assert lines["Type"] == "notify" and lines["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert float(lines["WatchdogSec"]) > 0
    # The jail could not be made under these.
    assert not {"RestrictNamespaces", "PrivateUsers", "SystemCallFilter", "ProtectProc"} & set(lines)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_unit_is_one_for_systemd(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/kernel-agent", str(BUILD / "kernel-agent")))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    wrong = [line for line in done.stderr.splitlines() if UNIT.name in line and "Command 'man" not in line]
    assert wrong == [], done.stderr
