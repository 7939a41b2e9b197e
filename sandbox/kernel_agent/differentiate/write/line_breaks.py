"""Long lines of generated source, broken as a formatter would."""

from __future__ import annotations

import textwrap

from ..ir.spelling import outside

WIDTH = 104


def indented(lines: list[str]) -> list[str]:
    return ["    " + line if line else "" for line in lines]


def wrap(items: list[str], width: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= width:
            lines[-1] += ", " + item
        else:
            lines.append(item)
    return lines


def folded(text: str, width: int) -> list[str]:
    """Prose in lines, the later ones indented."""
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def break_line(text: str, width: int) -> list[str]:
    """Break a long line inside its last call, as a formatter would; many arguments are filled, not listed."""
    if len(text) <= width or "(" not in text:
        return [text]
    code = text.split("  # ", 1)[0]
    if len(code) <= width:
        return [code]
    start, close = (_opening(code), 1) if code.endswith(")") else (len(code), 0)
    parts = _arguments(code[start + 1 : -1])
    while len(parts) == 1 and parts[0].endswith(")"):  # a call with one argument that is a call
        start, close = start + 1 + _opening(parts[0]), close + 1
        parts = _arguments(code[start + 1 : -close])
    left, equals, right = code.partition(" = ")
    if len(parts) < 2 or (equals and start > width // 2):  # no call that fills the line
        return [f"{left} = (", *_operands("    " + right, width), ")"] if equals else [code]
    tail = ")" * close
    one = ", ".join(parts)
    if len(one) + 4 <= width:
        return [code[: start + 1], "    " + one, tail]
    if len(parts) > 6:
        return [
            code[: start + 1],
            *("    " + line + "," for line in wrap(parts, width - 5)),
            f"{tail}  # fmt: skip",
        ]
    return [code[: start + 1], *("    " + part + "," for part in parts), tail]


def broken(text: str, indent: int = 8) -> list[str]:
    """The lines of one that is so far to the right."""
    return [" " * indent + line for line in break_line(text, WIDTH - indent)]


def tuple_text(names: list[str]) -> str:
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def _operands(text: str, width: int) -> list[str]:
    """Break a long sum or product before an operator outside brackets; of conditions each has a line."""
    if len(text) <= width:
        return [text]
    ands = [i for i in outside(text) if text.startswith(" and ", i)]
    if ands:
        indent = " " * (len(text) - len(text.lstrip()))
        ends = [*ands[1:], len(text)]
        rest = [indent + text[start:end].strip() for start, end in zip(ands, ends, strict=True)]
        return [part for line in (text[: ands[0]], *rest) for part in _operands(line, width)]
    signs = (" + ", " - ", " * ", " / ", " & ")
    best = max((i for i in outside(text[:width]) if i > 8 and text[i : i + 3] in signs), default=0)
    return [text[:best], *_operands("    " + text[best:].lstrip(), width)] if best else [text]


def _opening(code: str) -> int:
    """Where the parenthesis that the last one closes was opened."""
    depth = 0
    for i in range(len(code) - 1, -1, -1):
        depth += (code[i] in ")]}") - (code[i] in "([{")
        if depth == 0 and code[i] in "([{":
            return i
    return 0


def _arguments(text: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    commas = [i for i in outside(text) if text[i] == ","]
    starts, ends = [0, *(i + 1 for i in commas)], [*commas, len(text)]
    *parts, last = (text[start:end].strip() for start, end in zip(starts, ends, strict=True))
    return [*parts, last] if last else parts


def statement(source: list[str], line: int) -> str:
    """The statement of a file that starts at a line, on one line."""
    text = ""
    for part in source[line - 1 : line + 12]:
        text += (" " if text and not text.endswith(("(", "[")) else "") + part.split("  # ")[0].strip()
        if all(text.count(a) <= text.count(b) for a, b in ("()", "[]", "{}")):
            break
    return text.replace(",)", ")").replace(", )", ")")
