"""The manual page and the completions name every option and command that the program has, and no other."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def table_rows() -> list[tuple[str, str]]:
    """Names and aliases in the table of agent/app/opts.c."""
    text = (ROOT / "agent" / "app" / "opts.c").read_text()
    row = r'^ {4}\{"([a-z-]+)", (?:NULL|"([a-z-]+)"), [A-Z_]+, AT\('
    found: list[tuple[str, str]] = re.findall(row, text, re.MULTILINE)
    assert len(found) > 30
    return found


def table_options() -> set[str]:
    return {name for name, _ in table_rows()} | {"help", "version"}


def older_options() -> set[str]:
    """Aliases, and the rows of agent/app/older.c."""
    text = (ROOT / "agent" / "app" / "older.c").read_text()
    rows = re.findall(r'^ {4}\{"([a-z-]+)", (?:true|false)', text, re.MULTILINE)
    assert len(rows) == 4
    return {alias for _, alias in table_rows() if alias} | set(rows)


def commands() -> set[str]:
    text = (ROOT / "agent" / "cli" / "cli.c").read_text()
    return set(re.findall(r"^ {4}\"  kernel-agent ([a-z]+) ", text, re.MULTILINE))


MAN = (ROOT / "docs" / "kernel-agent.1").read_text()
BASH = (ROOT / "scripts" / "completion.bash").read_text()
ZSH = (ROOT / "scripts" / "completion.zsh").read_text()


def test_man_page_has_each_option_and_no_other() -> None:
    before, _, older = MAN.partition(".Sh OLDER SPELLINGS")
    older, _, after = older.partition(".Sh ")
    assert set(re.findall(r"Fl Fl ([a-z-]+)", before + after)) == table_options()
    assert older_options() <= set(re.findall(r"Fl Fl ([a-z-]+)", older)) <= older_options() | table_options()
    assert set(re.findall(r"^\.Cm ([a-z]+)", MAN.split(".Sh DESCRIPTION")[0], re.MULTILINE)) == commands()


def test_bash_completion_has_each_option_and_no_other() -> None:
    listed = BASH.split('options="')[1].split('"')[0]
    assert {word.removeprefix("--") for word in listed.split()} == table_options()
    assert commands() <= set(BASH.split('commands="')[1].split('"')[0].split())


def test_zsh_completion_has_each_option_and_no_other() -> None:
    assert set(re.findall(r"--([a-z-]+)", ZSH.split("options=(")[1].split("\n)")[0])) == table_options()
    assert commands() <= set(re.findall(r"^    '([a-z]+):", ZSH, re.MULTILINE))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["kernel-agent", "--reas"], ["--reasoning-effort"]),
        (["kernel-agent", "--device", "c"], ["cpu", "cuda"]),
        (["kernel-agent", "differ"], ["differentiate"]),
        (["kernel-agent", "store", "se"], ["search"]),
        (["kernel-agent", "--topk", ""], []),
    ],
)
def test_bash_completion_completes(words: list[str], expected: list[str]) -> None:
    script = (
        f'source {ROOT}/scripts/completion.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kernel_agent; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script, "_", *words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
