"""Wrong backwards made from a right one: each is one replacement in the text below `# ---- backward ----`.

mutate_text.py     a pair's text, and replacements in it
mutate_kernel.py   the kinds of mutation of a kernel
mutate_host.py     the kinds of mutation of the host's backward
mutate_calls.py    the kinds of mutation of state, layouts, defaults and numbers
mutate.py          the program: makes them, has them judged, prints the score
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator

from mutate_calls import of_calls
from mutate_host import of_host
from mutate_kernel import of_kernel
from mutate_text import MARKER, Mutant, Text, functions, is_kernel

__all__ = ["MARKER", "Mutant", "of", "sample"]


def of(pair: str, source: str) -> list[Mutant]:
    """Every mutant of the pair, without repetitions and without those that read the same as the original."""
    seen = {_meaning(source)}
    made = []
    for mutant in _all(Text(pair, source)):
        meaning = _meaning(mutant.source)
        if meaning and meaning not in seen:
            seen.add(meaning)
            made.append(mutant)
    return made


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of one pair's mutants: the kinds take turns, in an order drawn from the seed and the pair."""
    if len(mutants) <= count:
        return mutants
    draw = random.Random(f"{seed} {mutants[0].pair}")
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in draw.sample(mutants, len(mutants)):
        by_kind.setdefault(mutant.kind, []).append(mutant)
    chosen: list[Mutant] = []
    while len(chosen) < count:
        for kind in [kind for kind, left in by_kind.items() if left]:
            chosen.append(by_kind[kind].pop())
    return sorted(chosen[:count], key=lambda mutant: (mutant.line, mutant.kind, mutant.new))


def _all(text: Text) -> Iterator[Mutant]:
    for function in functions(text.backward()):
        if is_kernel(function):
            yield from of_kernel(text, function)
            continue
        if function.name != "forward" and not function.name.endswith("_autograd"):
            yield from of_host(text, function)
        yield from of_calls(text, function)


def _meaning(source: str) -> str:
    """The syntax tree: parentheses and layout say nothing. Empty for what is no Python."""
    try:
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return ""
