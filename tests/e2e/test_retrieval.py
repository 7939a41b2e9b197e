"""A search finds a pair that helps, on the half of tests/retrieval that the embedder was chosen on."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from conftest import BUILD, PROGRAM, ROOT, Agent

sys.path.insert(0, str(ROOT / "scripts"))
import retrieval


def test_labels__name_files_pairs_and_families_that_exist() -> None:
    labels = json.loads((retrieval.FOLDER / "labels.json").read_text())
    files = {path.stem for path in (retrieval.FOLDER / "queries").glob("*.py")}
    known = {name: family for name, (family, _) in retrieval.pairs().items()}
    assert set(labels) == files and len(files) >= 150
    for name, label in labels.items():
        assert set(label["ids"]) <= set(known), name
        assert label["family"] in (*known.values(), None) and bool(label["ids"]) == bool(label["family"]), (
            name
        )
        tree = ast.parse((retrieval.FOLDER / "queries" / f"{name}.py").read_text())
        decorators = [
            ast.unparse(d) for f in tree.body if isinstance(f, ast.FunctionDef) for d in f.decorator_list
        ]
        assert any(d.startswith("triton.jit") for d in decorators), name
        assert sum(d.startswith("autodiff(") for d in decorators) == 1, name
    assert {label["family"] for label in labels.values()} == {*known.values(), None}


def test_halves__hang_on_the_name_alone() -> None:
    assert retrieval.half_of("alibi_pair_bias") == "test" and retrieval.half_of("H") == "tune"
    assert len(retrieval.queries("tune")) + len(retrieval.queries("test")) == 155


def test_scores__count_first_hits_families_and_ranks() -> None:
    families = retrieval.pairs()
    one, two, *_ = (name for name, (family, _) in families.items() if family == "norm")
    other = next(name for name, (family, _) in families.items() if family == "loss")
    asked = [
        retrieval.Query("a", "", frozenset({one}), "norm"),
        retrieval.Query("b", "", frozenset({one}), "norm"),
        retrieval.Query("c", "", frozenset(), None),  # counts in no recall
    ]
    order = [[one, other], [two, one], [other]]
    assert retrieval.scores(asked, order, order) == {
        "recall@1 by id": 0.5,
        "recall@1 by family": 1.0,
        "recall@4 by id": 1.0,
        "recall@4 by family": 1.0,
        "mrr": 0.75,
    }


def test_search__finds_a_pair_that_helps(agent: Agent, tmp_path: Path) -> None:
    store = tmp_path / "pairs.db"
    assert agent("store", "build", ROOT / "dataset", "--store", store).code == 0
    asked = retrieval.queries("tune")
    found = [retrieval.ask(str(PROGRAM), str(store), query, retrieval.SHOWN) for query in asked]
    shown = [[name for name, _ in hits] for hits in found]
    result = retrieval.scores(asked, shown, shown)
    assert result["recall@4 by id"] >= 0.9 and result["recall@4 by family"] >= 0.95, result
    useful = [
        name in query.ids for query, hits in zip(asked, found, strict=True) for name, x in hits if x >= 0.6
    ]
    assert sum(useful) / len(useful) >= 0.45, "what --min-sim's default promises"


def test_published_files__have_a_neighbour_at_the_default(agent: Agent, tmp_path: Path) -> None:
    files = sorted((ROOT / "tests/published").glob("*.py"))
    store = BUILD / "pairs.db"
    found = [agent("store", "search", path, "--store", store, "--min-sim", "0.6", "--json") for path in files]
    assert sum(bool(done.result["hits"]) for done in found) >= 0.8 * len(files)
