"""How often a search of the store finds a pair that helps: ours and its peers on tests/retrieval.

    scripts/retrieval.py [--half tune|test] [--program build/kernel-agent] [--store build/pairs.db]
                         [--embeddings URL --model NAME] [--only-ours] [--misses] [--out FILE]

Peers: BM25 (SQLite's FTS5) and tf-idf over words of the forward, with the docstring; the mean of 200 random
orders; with --embeddings, vectors of an endpoint that speaks OpenAI's /embeddings, which is sent the text
from the first kernel on. A peer sees of a pair what stands above the marker; words are cut at underscores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import sqlite3
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests/retrieval"
MARKER = "# ---- backward ----"
USEFUL = 0.6  # --min-sim's default
SHOWN = 4  # --topk's default

Ranked = list[str]  # ids of pairs, the best first


@dataclass(frozen=True)
class Query:
    name: str
    text: str
    ids: frozenset[str]
    family: str | None


def queries(half: str) -> list[Query]:
    labels = json.loads((FOLDER / "labels.json").read_text())
    return [
        Query(name, file_of(name).read_text(), frozenset(label["ids"]), label["family"])
        for name, label in labels.items()
        if half_of(name) == half
    ]


def file_of(name: str) -> Path:
    return FOLDER / "queries" / f"{name}.py"


def half_of(name: str) -> str:
    return "test" if hashlib.sha256(name.encode()).digest()[0] % 2 else "tune"


def pairs() -> dict[str, tuple[str, str]]:
    """Of each id its family and the text above the marker."""
    files = sorted((ROOT / "dataset").glob("*/*.py"))
    return {path.stem: (path.parent.name, path.read_text().split(MARKER)[0]) for path in files}


def words(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[^\W\d_]+|\d+", text)]


# ---- ours


def ask(program: str, store: str, query: Query, topk: int) -> list[tuple[str, float]]:
    """Ids and similarities, as a run is shown them: a pair that is the query itself is none."""
    command = [program, "store", "search", str(file_of(query.name)), "--store", store, "--json"]
    command += ["--topk", str(topk), "--min-sim", "-1"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return [(hit["id"], hit["similarity"]) for hit in found["hits"]]


# ---- peers


def bm25() -> Callable[[Query], Ranked]:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE VIRTUAL TABLE pair USING fts5(id UNINDEXED, text)")
    known = pairs()
    db.executemany("INSERT INTO pair VALUES (?, ?)", [(i, " ".join(words(t))) for i, (_, t) in known.items()])

    def search(query: Query) -> Ranked:
        match = " OR ".join(f'"{word}"' for word in sorted(set(words(query.text))))
        rows = db.execute("SELECT id FROM pair WHERE pair MATCH ? ORDER BY bm25(pair), id", (match,))
        return [row[0] for row in rows]

    return search


def tf_idf() -> Callable[[Query], Ranked]:
    texts = {name: Counter(words(text)) for name, (_, text) in pairs().items()}
    df = Counter(word for text in texts.values() for word in text)

    def vector(text: Counter[str]) -> dict[str, float]:
        all_ = {w: (1 + math.log(n)) * math.log(len(texts) / df[w]) for w, n in text.items() if w in df}
        length = math.sqrt(sum(x * x for x in all_.values())) or 1.0
        return {w: x / length for w, x in all_.items()}

    rows = {name: vector(text) for name, text in texts.items()}

    def search(query: Query) -> Ranked:
        q = vector(Counter(words(query.text)))
        score = {name: sum(x * row.get(w, 0.0) for w, x in q.items()) for name, row in rows.items()}
        return sorted(score, key=lambda name: (-score[name], name))

    return search


def neural(url: str, model: str) -> Callable[[Query], Ranked]:
    def embed(texts: list[str]) -> list[list[float]]:
        body = json.dumps({"model": model, "input": texts}).encode()
        request = urllib.request.Request(f"{url}/embeddings", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            rows = sorted(json.load(answer)["data"], key=lambda row: row["index"])
        return [unit(row["embedding"]) for row in rows]

    def unit(row: list[float]) -> list[float]:
        length = math.sqrt(sum(x * x for x in row)) or 1.0
        return [x / length for x in row]

    def kernels(text: str) -> str:
        return text[max(0, text.find("@triton")) :]  # such models read the first few hundred words

    known = pairs()
    rows = dict(zip(known, embed([kernels(text) for _, text in known.values()]), strict=True))

    def search(query: Query) -> Ranked:
        q = embed([kernels(query.text)])[0]
        score = {name: sum(a * b for a, b in zip(q, row, strict=True)) for name, row in rows.items()}
        return sorted(score, key=lambda name: (-score[name], name))

    return search


# ---- scores


def scores(asked: list[Query], shown: list[Ranked], everything: list[Ranked]) -> dict[str, float]:
    """`shown`: the hits as a run gets them; `everything`: all pairs in order, for the rank of the first."""
    families = {name: family for name, (family, _) in pairs().items()}
    total: Counter[str] = Counter()
    useful = 0
    for query, best, order in zip(asked, shown, everything, strict=True):
        if not query.ids:
            continue
        useful += 1
        good = [name in query.ids for name in best]
        near = [name in query.ids or families[name] == query.family for name in best]
        for k in (1, SHOWN):
            total[f"recall@{k} by id"] += any(good[:k])
            total[f"recall@{k} by family"] += any(near[:k])
        ranks = [at for at, name in enumerate(order, 1) if name in query.ids]
        total["mrr"] += 1 / ranks[0] if ranks else 0.0
    names = [f"recall@{k} by {what}" for k in (1, SHOWN) for what in ("id", "family")] + ["mrr"]
    return {name: round(total[name] / useful, 3) for name in names}


def of_order(asked: list[Query], search: Callable[[Query], Ranked]) -> dict[str, float]:
    found = [search(query) for query in asked]
    return scores(asked, [order[:SHOWN] for order in found], found)


def by_chance(asked: list[Query]) -> dict[str, float]:
    names, draw, rounds = list(pairs()), random.Random(0), 200
    sums: Counter[str] = Counter()
    for _ in range(rounds):
        sums.update(of_order(asked, lambda _query: draw.sample(names, len(names))))
    return {name: round(value / rounds, 3) for name, value in sums.items()}


def histogram(asked: list[Query], found: list[list[tuple[str, float]]]) -> dict[str, list[int]]:
    """Of each tenth of similarity, how many of the hits shown are acceptable, and how many are not."""
    families = {name: family for name, (family, _) in pairs().items()}
    bins: dict[str, list[int]] = {f"{low / 10:.1f}": [0, 0, 0] for low in range(10)}
    for query, hits in zip(asked, found, strict=True):
        for name, similarity in hits:
            kind = 0 if name in query.ids else 1 if families[name] == query.family else 2
            bins[f"{min(max(int(similarity * 10), 0), 9) / 10:.1f}"][kind] += 1
    return bins


def ours(program: str, store: str, asked: list[Query], misses: bool) -> dict[str, object]:
    hits = [ask(program, store, query, SHOWN) for query in asked]
    order = [[name for name, _ in ask(program, store, query, 1024)] for query in asked]
    result: dict[str, object] = dict(scores(asked, [[name for name, _ in row] for row in hits], order))
    # what a run would be shown: the hits at the default --min-sim
    at = [[name for name, similarity in row if similarity >= USEFUL] for row in hits]
    useful = [(query, row) for query, row in zip(asked, at, strict=True) if query.ids]
    none = [row for query, row in zip(asked, at, strict=True) if not query.ids]
    shown = [(query, name) for query, row in useful for name in row]
    result["at min-sim"] = {
        "queries with a hit": round(sum(bool(row) for _, row in useful) / len(useful), 3),
        "queries with an acceptable hit": round(
            sum(bool(q.ids & set(row)) for q, row in useful) / len(useful), 3
        ),
        "hits that are acceptable": round(sum(name in q.ids for q, name in shown) / max(1, len(shown)), 3),
        "false hits": f"{sum(bool(row) for row in none)} of {len(none)}",
    }
    result["similarity: acceptable, family, neither"] = histogram(asked, hits)
    if misses:
        for query, row in zip(asked, hits, strict=True):
            first = next((at for at, (name, _) in enumerate(row, 1) if name in query.ids), 0)
            if first != 1:
                print(f"{query.name}: {first} {[(name, round(x, 2)) for name, x in row]}", file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--half", choices=("tune", "test"), default="test")
    parser.add_argument("--program", default=str(ROOT / "build/kernel-agent"))
    parser.add_argument("--store", default=str(ROOT / "build/pairs.db"))
    parser.add_argument("--embeddings", metavar="URL", help="base URL of an endpoint with /embeddings")
    parser.add_argument("--model", default="", help="the model's name there")
    parser.add_argument("--misses", action="store_true", help="say on stderr where the first hit is not good")
    parser.add_argument("--only-ours", action="store_true", help="no peers")
    parser.add_argument("--out", type=Path, help="also write the result there")
    given = parser.parse_args()
    asked = queries(given.half)
    result: dict[str, object] = {
        "command": "scripts/retrieval.py " + " ".join(sys.argv[1:]),
        "half": given.half,
        "queries": len(asked),
        "queries without a good pair": sum(not query.ids for query in asked),
        "pairs": len(pairs()),
        "ours": ours(given.program, given.store, asked, given.misses),
    }
    if not given.only_ours:
        result["bm25"] = of_order(asked, bm25())
        result["tf-idf"] = of_order(asked, tf_idf())
        result["random"] = by_chance(asked)
        if given.embeddings:
            result[f"embeddings of {given.model}"] = of_order(asked, neural(given.embeddings, given.model))
    text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", json.dumps(result, indent=2))
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
