#!/usr/bin/env python3
"""Everything that only a GPU can show, in one command with limits: `make gpu`, or from the tarball of `make
dist`

    python3 scripts/gpu.py --out gpu-NAME.json [--only PART,...] [--skip PART,...] [--limit PART=SECONDS ...]
                           [--whole] [--budget 600] [--device cuda] [--python PATH] [--jobs 8] [--list]

Some parts take a sample; `--whole --only PART` takes every file and every round, which is more than ten
minutes for all parts together.

Parts run one after another; a line is printed as each ends, and the results are written after each. A part
that runs past its limit, or past the budget of the whole, is ended with all its processes and said to be
late; what it had found until then counts. With `--device cpu` the same parts run in a reduced form, which
shows that the script works and nothing about a GPU.

The exit code is 1 where a part found something wrong, or ran past its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded

ROOT = Path(__file__).resolve().parents[1]
SMALL = "dataset/reduction_softmax/softmax_row_single_tile.py"
SMALL_SWEEP = [{"M": 37, "N": 90}, {"M": 4, "N": 513}]
CPU_SWEEP = [{"M": 3, "N": 20}]
NORM = "bench/gpu/layer_norm_30.py"
TEXT_MAX = 400  # characters of a message that are kept
SLOW = 40  # seconds after which a run's longest children are kept
LONGEST = 6


@dataclasses.dataclass
class Bench:
    """What the parts need: where the programs are, on what they run, and how much time there is."""

    bin: Path
    device: str
    python: str
    jobs: int
    work: Path
    whole: bool = False  # every file and every round, not a sample
    until: float = 0.0  # of the part at work, by time.monotonic()

    @property
    def program(self) -> Path:
        return self.bin / "kernel-agent"

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    def left(self, most: float = 1e9) -> float:
        return max(0.0, min(most, self.until - time.monotonic()))

    def environment(self, **more: str) -> dict[str, str]:
        """Compiled kernels are kept for this run alone; what a part starts is known by its folder."""
        runtime = self.work / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        plain = {"KA_DEVICE": self.device, "KA_PYTHON": self.python}
        plain |= {"XDG_CACHE_HOME": str(self.work.parent / "cache"), "XDG_RUNTIME_DIR": str(runtime)}
        return os.environ | plain | more

    def run(self, *command: object, most: float = 1e9, **environment: str) -> bounded.Ended:
        return bounded.run(command, self.left(most), self.environment(**environment), ROOT)

    def script(self, *command: object, most: float = 1e9, **environment: str) -> bounded.Ended:
        return self.run(self.python, *command, most=most, **environment)

    def check(self, *arguments: object, most: float = 1e9) -> dict[str, Any]:
        """A run of the program as a small entry: verdict, seconds, shapes, what went wrong."""
        command = [self.program, *arguments, "--json", "--quiet", "--out", self.work / "runs"]
        return entry_of(self.run(*command, most=most))


def entry_of(ended: bounded.Ended) -> dict[str, Any]:
    """What is kept of one run of the program."""
    made: dict[str, Any] = {"verdict": "none", "seconds": round(ended.seconds, 1)}
    try:
        result = json.loads(ended.out)
    except json.JSONDecodeError:
        return made | {"reason": f"{ended.why}: {ended.err.strip()[-TEXT_MAX:]}"}
    made["verdict"] = result.get("verdict", "none")
    made |= {
        name: result[name]
        for name in ("loop_blocked_ms", "loop_blocked_work_ms", "sanitizer")
        if name in result
    }
    shapes = result.get("shapes") or {}
    made["shapes"] = {name: value for name, value in shapes.items() if isinstance(value, int)}
    if made["seconds"] > SLOW:
        made["longest"] = longest(result.get("children") or [])
    differences = (result.get("oracles") or {}).get("finite_differences") or {}
    if "Error" in differences.get("reason", ""):  # of ours: what a file does to them is said in words
        made["no_differences"] = differences["reason"][:TEXT_MAX]
    if made["verdict"] != "verified":
        why = result.get("failures") or (result.get("error") or {}).get("message") or ended.why
        made["reason"] = why.strip()[:TEXT_MAX]
    return made


def longest(children: list[dict[str, Any]]) -> list[str]:
    """What a slow run's longest children did: operation, part, when in the run, how many cases."""
    spans = sorted(children, key=lambda child: child.get("start", 0) - child.get("end", 0))
    return [
        f"{c.get('op')} {c.get('part') or ''} {c.get('start')}-{c.get('end')} s, {c.get('cases')} cases"
        for c in spans[:LONGEST]
    ]


def wrong(entries: Iterable[dict[str, Any]], fine: tuple[str, ...] = ("verified",)) -> list[str]:
    bad = [entry for entry in entries if entry["verdict"] not in fine or "no_differences" in entry]
    named = [(entry.get("file") or entry.get("name", ""), entry) for entry in bad]
    why = [entry.get("reason") or entry.get("no_differences", "") for entry in bad]
    return [
        f"{name}: {entry['verdict']}: {said}"[:TEXT_MAX]
        for (name, entry), said in zip(named, why, strict=True)
    ]


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of verdicts, counted, and those that are wrong."""
    return {"verdicts": dict(Counter(row["verdict"] for row in rows)), "rows": rows, "failures": wrong(rows)}


def shown(file: str | Path) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(file)


def swept(bench: Bench, sweep: list[dict[str, int]]) -> list[str]:
    """Options for a sweep in place of the file's own, where there is no GPU."""
    return [] if bench.gpu else ["--sweep", json.dumps(sweep)]


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:TEXT_MAX] if lines else ""


def of_script(ended: bounded.Ended, file: Path | None = None) -> dict[str, Any]:
    """A script's last words, the lines in which it says what failed, and the JSON that it wrote."""
    made: dict[str, Any] = {"said": last_line(ended.out)}
    if ended.code is None:
        made["late"] = True
    if ended.code != 0:
        marks = ("FAIL", "ESCAPED", "WEAK")
        bad = [line.strip()[:TEXT_MAX] for line in ended.out.splitlines() if line.strip().startswith(marks)]
        made["failures"] = bad[:20] or [f"{ended.why}: {last_line(ended.err) or made['said']}"]
    if file is not None and file.exists():
        made["result"] = json.loads(file.read_text())
    return made


# ---- processes on the GPU


def compute_processes() -> list[int] | None:
    """Processes that hold memory of a GPU; None where nobody can say."""
    found = bounded.smi("compute-apps=pid")
    return None if found is None else sorted(int(line) for line in found if line.isdigit())


def naming(text: str) -> list[int]:
    """Processes whose command line or environment has this text."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        for name in ("cmdline", "environ"):
            try:
                if text.encode() in (entry / name).read_bytes():
                    found.append(int(entry.name))
                    break
            except OSError:
                continue
    return found


def memory_used() -> int | None:
    """MiB in use on the first GPU: what is left behind may have no process that this machine shows."""
    found = bounded.smi("gpu=memory.used")
    return int(found[0]) if found and found[0].isdigit() else None


def settled(folder: Path, before: list[int] | None, seconds: float = 10.0) -> dict[str, Any]:
    """Processes of a run below `folder`, and new ones on the GPU, once they had some seconds to die."""
    started = time.monotonic()
    while True:
        mine, now = naming(str(folder)), compute_processes()
        new = None if now is None or before is None else [pid for pid in now if pid not in before]
        spent = time.monotonic() - started
        if (not mine and not new) or spent > seconds:
            return {"processes_left": len(mine), "compute_left": new, "after_s": round(spent, 1)}
        time.sleep(0.2)


# ---- the parts: each yields its result as it grows; the last one counts


Part = Callable[[Bench], Iterator[dict[str, Any]]]


def part_escapes(bench: Bench) -> Iterator[dict[str, Any]]:
    """tests/jail: every way out of the jail."""
    command = ["tests/jail/run.py", "--jail", bench.bin / "ka-jail", "--checks", "100" if bench.gpu else "3"]
    names = [] if bench.gpu else ["tcp", "unix_abstract"]
    yield of_script(bench.script(*command, *names))


def part_starts(bench: Bench) -> Iterator[dict[str, Any]]:
    """Cold and warm starts, and a kernel compiled or found in the cache, launched."""
    cold, warm, compiles = (5, 100, 10) if bench.gpu else (1, 3, 1)
    file = bench.work / "jail.json"
    options = ["--cold", cold, "--warm", warm, "--compiles", compiles, "--json", "--out", file]
    ended = bench.script("scripts/bench_jail.py", "--jail", bench.bin / "ka-jail", *options)
    yield of_script(ended, file) | {"said": ""}


def part_examples(bench: Bench) -> Iterator[dict[str, Any]]:
    """Every example with its whole sweep, one at a time, drafted by the differentiator."""
    entries: list[dict[str, Any]] = []
    files = sorted((ROOT / "examples").glob("*.py"))
    if not bench.whole:
        files = [file for file in files if file.stem in SAMPLE_EXAMPLES]
    options = ["--backend", "none", "--no-optimise", *swept(bench, CPU_SWEEP)]
    for file in files if bench.gpu else files[-1:]:
        made = {"verdict": "not reached", "seconds": 0.0}
        if bench.left() > 1:
            made = bench.check("--file-path", file, *options, most=90)
        entries.append({"file": shown(file), **made})
        yield judged(entries)


def part_candidate(bench: Bench) -> Iterator[dict[str, Any]]:
    """Candidates as a model's answers: a backward, the same with another comment, and with other kernels."""
    file = ROOT / "examples" / ("layer_norm.py" if bench.gpu else "softmax.py")
    sweep = swept(bench, CPU_SWEEP)
    drafted = bench.run(bench.program, "differentiate", file, "--json", "--out", bench.work / "runs", *sweep)
    try:
        backward = str(json.loads(drafted.out)["backward"])
    except (json.JSONDecodeError, KeyError):
        yield {"failures": [f"differentiate: {drafted.why}: {drafted.err.strip()[-TEXT_MAX:]}"]}
        return
    box = bench.work / "box"
    box.mkdir()
    answers = [backward, backward + "\n# the same", backward.replace(") / N", ") * (1.0 / N)")]
    answers = [f"```python\n{code}\n```\n" for code in answers]
    options = ["--backend", f"mailbox:{box}", "--draft", "llm", "--max-iters", "4", "--json", "--quiet"]
    command = [bench.program, "--file-path", file, *options, *sweep, "--out", bench.work / "candidate"]
    answered: list[float] = []
    seconds: list[float] = []
    with (bench.work / "candidate.json").open("w+b") as out:
        process = bounded.start(command, out, subprocess.DEVNULL, bench.environment(), ROOT)
        try:
            while bench.left() > 0 and process.poll() is None and len(answered) <= len(answers):
                asked = sorted(box.glob("*.request.md"))
                if len(asked) > len(answered):
                    if answered:
                        seconds.append(round(time.monotonic() - answered[-1], 2))
                    answer = asked[-1].with_name(asked[-1].name.replace(".request.", ".answer."))
                    made_ready = bench.work / "answer.md"
                    made_ready.write_text([*answers, "Nothing is left to gain."][len(answered)])
                    os.utime(made_ready, (0, 0))  # so that nobody waits whether it is still being written
                    made_ready.rename(answer)
                    answered.append(time.monotonic())
                time.sleep(0.02)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(bench.left(15))
        finally:
            bounded.end(process)
    made: dict[str, Any] = {"file": f"examples/{file.name}", "from_answer_to_next_s": seconds}
    made["last_s"] = of_the_last_candidate(bench.work / "candidate.json")
    if len(seconds) < len(answers):
        made["failures"] = [f"only {len(seconds)} of {len(answers)} candidates were judged"]
    yield made


def of_the_last_candidate(path: Path) -> list[str]:
    """Its children: when each began and ended, from the first of them on. Empty if the run left no result."""
    try:
        children = json.loads(path.read_text())["children"]
    except (OSError, json.JSONDecodeError, KeyError):
        return []
    first = max((child["start"] for child in children if child["op"] == "scan"), default=0.0)
    return [
        f"{child['op']} {child['start'] - first:.2f} {child['end'] - first:.2f}"
        for child in children
        if child["start"] >= first
    ]


def part_norm(bench: Bench) -> Iterator[dict[str, Any]]:
    """A layer norm of 30 shapes."""
    options = ["--backend", "none", "--no-optimise", *swept(bench, CPU_SWEEP)]
    made = {"file": NORM, **bench.check("--file-path", ROOT / NORM, *options)}
    yield made | {"failures": wrong([made])}


def part_all(bench: Bench) -> Iterator[dict[str, Any]]:
    """All examples and pairs, several at a time."""
    files: list[str | Path] = [
        *sorted((ROOT / "examples").glob("*.py")),
        *sorted((ROOT / "dataset").glob("*/*.py")),
    ][:: 1 if bench.whole else 4]
    if not bench.gpu:
        files = [ROOT / SMALL]
    out = bench.work / "all.json"
    options = ["--device", bench.device, "--python", bench.python, "--jobs", str(bench.jobs)]
    options += ["--deadline", "90", "--seconds", "120"]
    if bench.gpu:
        options += ["--budget", str(max(0.0, bench.left() - 65)), "--sweeps", "bench/gpu_sweeps.json"]
    ended = bench.script(
        *["scripts/check_all.py", "--program", bench.program, "--out", out, "--runs", bench.work / "runs"],
        *[*options, *files],
    )
    made = of_script(ended)
    rows = json.loads(out.read_text())["results"] if out.exists() else []
    kept = []
    for row in rows:
        kept.append({"file": shown(row["file"]), "verdict": row["verdict"], "seconds": row.get("seconds")})
        kept[-1] |= {name: row[name] for name in ("loop_blocked_ms", "loop_blocked_work_ms") if name in row}
        row["reason"] = str(row.get("failures") or row.get("error") or row.get("stderr", ""))
    yield made | judged(kept) | {"failures": wrong(rows, ("verified", "not reached"))}


def part_attacks(bench: Bench) -> Iterator[dict[str, Any]]:
    """tests/attacks with compiled kernels. Some aim at the interpreter: then another reason is no hole."""
    only = [] if bench.gpu else ["--only", "control scale_atomics"]
    share = (bounded.share(bench.jobs) or ["", "0"])[1]
    options = ["--build", bench.bin, "--jobs", bench.jobs, "--any-reason", *only]
    ended = bench.script("tests/attacks/run.py", *options, KA_CHILDREN=share)
    lines = ended.out.splitlines()
    done = sum(line.startswith(("ok ", "FAIL")) for line in lines)
    accepted = [line for line in lines if line.startswith("FAIL") and line.endswith(": ACCEPTED")]
    cut = [line.strip()[:TEXT_MAX] for line in accepted]
    yield of_script(ended) | {"judged": done, "accepted": cut}


def part_matrix(bench: Bench) -> Iterator[dict[str, Any]]:
    """The differentiator alone on the staged kernels, in three precisions."""
    out = bench.work / "matrix.json"
    command = ["scripts/diff_matrix.py", "--program", bench.program, "--device", bench.device, "--out", out]
    command += ["--python", bench.python, "--jobs", bench.jobs, "--deadline", 90, "--seconds", 150]
    command += ["--runs", bench.work / "matrix", "--dtypes", "fp32,fp16,bf16" if bench.gpu else "fp32"]
    names = ["vector_add"] if not bench.gpu else [] if bench.whole else SAMPLE_KERNELS
    ended = bench.script(*command, *names)
    made = of_script(ended)
    found = json.loads(out.read_text()) if out.exists() else {"rows": []}
    wanted = ("name", "dtype", "verdict", "reason", "seconds", "worst_error")
    rows = [{key: row[key] for key in wanted if key in row} for row in found["rows"]]
    by_dtype: dict[str, Counter[str]] = {}
    for row in rows:
        by_dtype.setdefault(row["dtype"], Counter())[row["verdict"]] += 1
    bad = [f"{row['dtype']} {line}" for row in rows for line in wrong([row], ("verified", "refused"))]
    yield made | {
        "verdicts": {name: dict(counts) for name, counts in by_dtype.items()},
        "rows": rows,
        "failures": bad or (made.get("failures", []) if not rows else []),
    }


# Reads and writes past its tensors: what memcheck has to find.
BEYOND = ("mask = cols < N", "mask = cols < N + 8")


def part_sanitizer(bench: Bench) -> Iterator[dict[str, Any]]:
    """check --sanitize on a small pair; then the tools alone, also on one out of bounds: they must see it."""
    if not bench.gpu:
        yield {"skipped": "compute-sanitizer watches compiled kernels on a GPU"}
        return
    path = os.environ["PATH"] + ":/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    tool = shutil.which("compute-sanitizer", path=path)
    if tool is None:
        yield {"failures": ["there is no compute-sanitizer on PATH"]}
        return
    arguments = ["check", ROOT / SMALL, "--sanitize", "--sweep", json.dumps(SMALL_SWEEP), "--json", "--quiet"]
    ended = bench.run(bench.program, *arguments, "--out", bench.work / "runs", most=150, PATH=path)
    pair = entry_of(ended)
    made: dict[str, Any] = {"tool": tool, "pair": pair, "failures": wrong([{"file": SMALL, **pair}])}
    yield made
    for name, text in (("right", None), ("out_of_bounds", BEYOND)):
        made[f"alone_{name}"] = watched_alone(bench, tool, name, text)
        yield made
    seen = {run["tool"]: run for run in made["alone_out_of_bounds"].get("runs", [])}
    if not seen.get("memcheck", {}).get("findings"):
        made["failures"] = [*made["failures"], "memcheck does not see an access out of bounds"]
    yield made


def watched_alone(bench: Bench, tool: str, name: str, edit: tuple[str, str] | None) -> dict[str, Any]:
    """Operation sanitize without program and jail: the small pair as it is, or edited below its marker."""
    folder = bench.work / f"sanitize-{name}"
    folder.mkdir()
    head, marker, tail = (ROOT / SMALL).read_text().partition("# ---- backward ----")
    pair = folder / "pair.py"
    pair.write_text(head + marker + (tail.replace(*edit) if edit else tail))
    case = {"id": 0, "dims": SMALL_SWEEP[0], "seed": 1, "upstream": {"kind": "normal", "seed": 2}}
    request = {"sanitizer": tool, "file": str(pair), "device": "cuda", "target": "sm_90", "cases": [case]}
    request["tool_seconds"] = 45
    code = (
        "import json, sys; from pathlib import Path; from kernel_agent.operations import sanitize\n"
        "print(json.dumps(sanitize.run(json.loads(sys.argv[1]), Path(sys.argv[2]))))"
    )
    ended = bench.script("-c", code, json.dumps(request), folder, most=65, PYTHONPATH=str(ROOT / "sandbox"))
    try:
        return json.loads(ended.out)
    except json.JSONDecodeError:
        return {"error": f"{ended.why}: {ended.err.strip()[-TEXT_MAX:]}"}


def part_row(bench: Bench) -> Iterator[dict[str, Any]]:
    """500 checks of a small pair: how many were not verified, how many aborted, what stays on the GPU."""
    wanted, streams = (500 if bench.whole else 40, bench.jobs) if bench.gpu else (2, 1)
    each = -(-wanted // streams)  # checks of one process
    before, memory, stop = compute_processes(), memory_used(), bench.until - 10
    sweep = json.dumps([{"M": 8, "N": 33}])
    copies = [bench.work / f"pair_{at}.py" for at in range(each)]
    for copy in copies:
        copy.write_text((ROOT / SMALL).read_text())
    entries: list[dict[str, Any]] = []
    aborted = 0

    def stream(at: int) -> tuple[list[dict[str, Any]], int]:
        made, aborts = [], 0
        for _ in range(at * each, wanted, streams * each):
            if time.monotonic() > stop:
                break
            options = ["--sweep", sweep, "--json", "--quiet", "--out", bench.work / f"row{at}"]
            options += bounded.share(streams)
            ended = bench.run(bench.program, "check", *copies, *options)
            lines = ended.out.splitlines()
            for line in lines:  # a result a line
                made.append({"file": SMALL, **entry_of(dataclasses.replace(ended, out=line))})
                made[-1]["seconds"] = round(ended.seconds / len(lines), 2)
            if ended.code is not None and len(lines) < each:
                made.append({"file": SMALL, **entry_of(dataclasses.replace(ended, out=""))})
            aborts += ended.out.count("signal 6") + (ended.code == -6)
        return made, aborts

    with ThreadPoolExecutor(streams) as pool:
        for made, aborts in pool.map(stream, range(streams)):
            entries += made
            aborted += aborts
    left = settled(bench.work, before)
    times = sorted(entry["seconds"] for entry in entries)
    waits = sorted(entry.get("loop_blocked_ms", 0) for entry in entries)
    result: dict[str, Any] = {
        "asked": wanted,
        "done": len(entries),
        "streams": streams,
        "verdicts": judged(entries)["verdicts"],
        "aborted": aborted,
        "median_s": times[len(times) // 2] if times else None,
        "loop_blocked_ms": [waits[len(waits) // 2], waits[-1]] if waits else None,
        "gpu_memory_mib": [memory, memory_used()],
        **left,
    }
    bad = wrong(entries)[:20] + ([f"{aborted} ended by abort"] if aborted else [])
    bad += [f"{left['compute_left']} still on the GPU"] if left["compute_left"] else []
    yield result | {"failures": bad}


def part_two(bench: Bench) -> Iterator[dict[str, Any]]:
    """Two runs at once on one GPU."""
    files = [SMALL, "dataset/norm/rms_norm_rowgroup_partials.py" if bench.gpu else SMALL]
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda file: bench.check("check", ROOT / file, *swept(bench, CPU_SWEEP)), files)
        yield judged([{"file": file, **entry} for file, entry in zip(files, made, strict=True)])


def part_killed(bench: Bench) -> Iterator[dict[str, Any]]:
    """The program killed in the middle of a check: nothing of it is left after some seconds."""
    before = compute_processes()
    runtime = bench.work / "killed"
    runtime.mkdir(mode=0o700)
    environment = bench.environment(XDG_RUNTIME_DIR=str(runtime))
    command = [bench.program, "check", ROOT / SMALL, "--json", "--quiet", "--out", bench.work / "runs"]
    process = bounded.start(command, env=environment, cwd=ROOT)
    try:
        seen_at, most = None, 0
        while bench.left() > 15 and process.poll() is None:
            children = len(naming(str(runtime)))
            most = max(most, children)
            busy = children > 3
            if busy and bench.gpu:
                busy = bool(set(compute_processes() or [0]) - set(before or []))
            seen_at = seen_at or (time.monotonic() if busy else None)
            if seen_at and time.monotonic() - seen_at > 1:
                break
            time.sleep(0.1)
        ended_before = process.poll() is not None
        process.kill()
        process.wait()
        left = settled(runtime, before)
    finally:
        bounded.end(process)
    made: dict[str, Any] = {"processes_at_kill": most, **left}
    bad = ["the check ended before it could be killed"] if ended_before else []
    if left["processes_left"] or left["compute_left"]:
        bad.append(f"left: {left['processes_left']} processes, on the GPU {left['compute_left']}")
    yield made | {"failures": bad}


def part_hostile(bench: Bench) -> Iterator[dict[str, Any]]:
    """Children that answer with hostile results, where the tests have them."""
    found = sorted((ROOT / "tests").glob("*/hostile.py"))
    if not found:
        yield {"skipped": "no tests/*/hostile.py"}
        return
    for file in found:
        yield of_script(bench.script(file, "--build", bench.bin))


# Timed: file, and a sweep where its own is for an interpreter.
ROWS = [{"M": 4096, "N": 1024}, {"M": 8192, "N": 4096}, {"M": 1151, "N": 2047}]
TIMED: dict[str, list[dict[str, int]] | None] = {
    "examples/layer_norm.py": None,
    "examples/softmax.py": None,
    "dataset/norm/rms_norm_rowgroup_partials.py": ROWS,
    "dataset/activation_glu/swiglu_two_inputs_recompute.py": ROWS,
    "examples/rms_norm.py": None,
    "examples/swiglu.py": None,
    "dataset/norm/layer_norm_affine_rowgroup_partials.py": ROWS,
    "dataset/reduction_softmax/softmax_row_single_tile.py": ROWS,
}
SAMPLE_TIMED = 4
# Of examples that have none: what people would use instead.
GROUPED_GEMM = """
def reference(x, w, ends):
    if x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0 and w.shape[2] % 8 == 0:  # rows of 16 bytes
        return torch.nn.functional.grouped_mm(x, w, offs=ends)
    rows = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ one for a, b, one in zip(rows, rows[1:], w)])
"""
LINEAR_RECURRENCE = """
def reference(x, decay, gate=None, h0=None):
    a = torch.sigmoid(decay)
    inputs = (x if gate is None else x * torch.sigmoid(gate)).float().unbind(1)
    h = torch.zeros_like(inputs[0]) if h0 is None else h0.float()
    states = []
    for step in inputs:
        h = a * h + step
        states.append(h)
    return torch.stack(states, 1).to(x.dtype)
"""
REFERENCES = {
    "examples/grouped_gemm.py": GROUPED_GEMM.lstrip(),
    "examples/linear_recurrence.py": LINEAR_RECURRENCE.lstrip(),
    "examples/softmax.py": "def reference(x):\n    return torch.softmax(x, dim=-1)\n",
    "examples/swiglu.py": "def reference(gate, up):\n    return torch.nn.functional.silu(gate) * up\n",
}


def part_bench(bench: Bench) -> Iterator[dict[str, Any]]:
    """Times of layer norm, rms norm, softmax and swiglu, beside eager PyTorch and torch.compile."""
    files = list(TIMED) if bench.whole else list(TIMED)[:SAMPLE_TIMED]
    if not bench.gpu:
        ended = bench.run(bench.program, "bench", ROOT / SMALL, "--out", bench.work / "runs")
        refused = ended.code == 2 and "nothing was timed" in ended.err
        yield {"skipped": "no time means anything on a CPU"} if refused else {"failures": [ended.why]}
        return
    rows: list[dict[str, Any]] = []
    for at, file in enumerate(files):
        most = bench.left(110) - 2
        made = {"verdict": "not reached"}
        if most > 25:
            made = timed(bench, at, file, TIMED[file], most)
        rows.append({"file": file, **made})
        yield {"rows": rows, "failures": wrong(rows, ("timed", "not reached"))}


def timed(
    bench: Bench, at: int, file: str, sweep: list[dict[str, int]] | None, most: float
) -> dict[str, Any]:
    """The table of one pair and its figures; of an example, the pair that the differentiator drafts."""
    folder = bench.work / f"timed-{at}"
    folder.mkdir()
    pair = folder / Path(file).name
    text = (ROOT / file).read_text()
    if "# ---- backward ----" not in text:
        drafted = bench.run(bench.program, "differentiate", ROOT / file, "--print", "--quiet", most=most)
        if drafted.code != 0:
            return {"verdict": "not drafted", "reason": f"{drafted.why}: {drafted.err.strip()[-TEXT_MAX:]}"}
        text += f"\n\n{REFERENCES.get(file, '')}\n\n# ---- backward ----\n\n\n{drafted.out}"
    pair.write_text(text)
    options = ["--device", bench.device, "--seconds", "20" if bench.whole else "8", "--out", folder]
    options += ["--sweep", json.dumps(sweep) if sweep else "required"]
    ended = bench.run(bench.program, "bench", pair, *options, most=bench.left(most))
    found = next(folder.glob("*/bench.json"), None)
    result = json.loads(found.read_text()) if found else {}
    made: dict[str, Any] = {"verdict": "timed" if ended.code == 0 else "not timed"}
    made |= {"seconds": round(ended.seconds, 1), "table": ended.out.splitlines(), "result": result}
    if ended.code != 0:
        made["reason"] = f"{ended.why}: {(ended.err or ended.out).strip()[-TEXT_MAX:]}"
    return made


# Seconds on a GPU, of the sample and of the whole. All samples together fit into ten minutes.
PARTS: dict[str, tuple[float, float, Part]] = {
    "sanitizer": (90, 180, part_sanitizer),
    "killed": (30, 40, part_killed),
    "two": (45, 60, part_two),
    "starts": (40, 60, part_starts),
    "candidate": (50, 60, part_candidate),
    "norm": (60, 120, part_norm),
    "bench": (240, 590, part_bench),
    "examples": (150, 400, part_examples),
    "matrix": (110, 540, part_matrix),
    "all": (100, 360, part_all),
    "attacks": (60, 300, part_attacks),
    "row": (60, 580, part_row),
    "escapes": (90, 120, part_escapes),
    "hostile": (45, 60, part_hostile),
}
SAMPLE_EXAMPLES = ("attention", "layer_norm", "linear_recurrence", "softmax")
SAMPLE_KERNELS = [
    "chunk_linear_attention",
    "group_norm",
    "in_place",
    "matmul",
    "persistent_softmax",
    "rms_norm",
    "scans",
]


# ---- the whole


def machine(python: str) -> dict[str, Any]:
    made = bounded.machine()
    code = "from importlib.metadata import version as v\nprint(v('torch'), v('triton'))"
    asked = bounded.run([python, "-c", code], 30)
    if asked.code == 0:
        made["torch"], made["triton"] = asked.out.split()
    gpus = bounded.smi("gpu=name,driver_version")
    return made if gpus is None else made | {"gpu": gpus[:1]}


def run_part(name: str, bench: Bench, limit: float) -> dict[str, Any]:
    """The part's last result, with its seconds; whatever it raises is a failure of it."""
    started = time.monotonic()
    bench.until = started + limit
    made: dict[str, Any] = {}
    try:
        for found in PARTS[name][2](bench):
            made = found
    except Exception as exc:  # noqa: BLE001 (the other parts have to run)
        made = {**made, "failures": [*made.get("failures", []), f"{type(exc).__name__}: {exc}"[:TEXT_MAX]]}
    spent = time.monotonic() - started
    late = spent > limit or made.pop("late", False)
    return {"seconds": round(spent, 1), "limit": round(limit, 1), "late": bool(late), **made}


def line_of(name: str, made: dict[str, Any]) -> str:
    if "skipped" in made:
        state = f"skipped: {made['skipped']}"
    else:
        bad = made.get("failures") or []
        state = "late" if made["late"] else "ok" if not bad else f"{len(bad)} wrong"
        told = ("verdicts", "verdict", "done", "aborted", "said")
        facts = [f"{key} {made[key]}" for key in told if made.get(key)]
        state = "  ".join([f"{state:9}", *facts, *(["first: " + bad[0].replace("\n", " ")] if bad else [])])
    return f"{name:10} {made.get('seconds', 0):7.1f} s  {state}"[:400]


def chosen(options: argparse.Namespace) -> list[str]:
    only, skip = (list(filter(None, text.split(","))) for text in (options.only, options.skip))
    unknown = [name for name in [*only, *skip, *options.limit] if name not in PARTS]
    if unknown:
        raise SystemExit(f"gpu.py: no part {unknown[0]!r}; the parts are {' '.join(PARTS)}")
    return [name for name in only or PARTS if name not in skip]


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required="--list" not in sys.argv)
    parser.add_argument("--only", default="", help="these parts, in this order")
    parser.add_argument("--skip", default="")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS")
    parser.add_argument("--budget", type=float, default=600, help="seconds for all parts together")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--python", default="", help="the Python with torch and Triton")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--bin", type=Path, help="folder with kernel-agent and ka-jail")
    whole = "everything, not samples: several calls with --only"
    parser.add_argument("--whole", action="store_true", help=whole)
    parser.add_argument("--list", action="store_true", help="the parts and their limits")
    options = parser.parse_args()
    limits = (text.partition("=") for text in options.limit)
    options.limit = {name: float(seconds) for name, _, seconds in limits}
    return options


def first_of(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def main() -> int:
    options = parse()
    if options.list:
        for name, (sample, whole, part) in PARTS.items():
            print(f"{name:10} {sample:4.0f} s, {whole:4.0f} s whole  {(part.__doc__ or '').splitlines()[0]}")
        return 0
    names = chosen(options)
    store = first_of((ROOT / "pairs.db", ROOT / "build/pairs.db"))
    if store and "KA_STORE" not in os.environ:
        os.environ["KA_STORE"] = str(store)
    begun = time.monotonic()
    results: dict[str, Any] = {}
    python = options.python or str(first_of([ROOT / ".venv/bin/python"]) or sys.executable)
    built = options.bin or (first_of([ROOT / "bin/kernel-agent"]) or ROOT / "build/kernel-agent").parent
    head = {"device": options.device, "command": " ".join(sys.argv), "machine": machine(python)}
    with tempfile.TemporaryDirectory(prefix="ka-gpu-", ignore_cleanup_errors=True) as folder:
        for name in names:
            left = options.budget - (time.monotonic() - begun)
            work = Path(folder) / name
            work.mkdir()
            bench = Bench(built.resolve(), options.device, python, options.jobs, work, options.whole)
            limit = min(options.limit.get(name, PARTS[name][options.whole]), left)
            results[name] = run_part(name, bench, limit) if limit > 1 else {"skipped": "no time left"}
            print(line_of(name, results[name]), flush=True)
            spent = round(time.monotonic() - begun, 1)
            bounded.write_json(options.out, head | {"seconds": spent, "parts": results})
    return 1 if any(made.get("failures") or made.get("late") for made in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
