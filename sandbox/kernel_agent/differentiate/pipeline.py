"""The pipeline: a loaded forward file and one case in, the text of the backward section out."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language

from .. import draw
from ..errors import Unusable
from ..forward import Forward
from ..source import tree_nodes
from .ir.nodes import GradWrite
from .ir.refusal import Refusal
from .ir.report import LineReport, Why
from .ir.values import is_static
from .offers import offer, offer_constants, offer_scans, offer_unmasked, offer_whole
from .plans import (
    BROKEN,
    Asked,
    Flagged,
    Scheduled,
    Sides,
    check_inplace,
    keeps_matrices,
    leaves,
    of_rows,
    planned,
    split_steps,
    sums,
    turn_tiles,
)
from .prove import overwrite
from .read import adopted, block_sizes, grad_mode, launchers, parted, trace, unseen
from .read.home import Home
from .read.host_functions import HostFunctions, Method
from .reverse.sweep import writes
from .schedule import (
    exact_products,
    handed_on,
    own_blocks,
    own_lanes,
    own_tiles,
    row_tiles,
    scattered,
    step_tiles,
    tuning,
    whole_rows,
)
from .schedule.decisions import advise, header
from .schedule.gradient_writes import SKIPPED
from .schedule.owner import OwnerKernel
from .schedule.scattered import Scattered
from .write import constants, saving_copy, step_functions, whole_blocks
from .write.demand import effects_of
from .write.emit import Emitted, Emitter
from .write.helpers import OWN, PARTS, PASSED, TABLES, UNSAVED, UNTRACED, host_helpers, scan_helpers
from .write.host_copy import host_copy
from .write.line_breaks import WIDTH, break_line
from .write.section import (
    Choice,
    FunctionText,
    Part,
    Step,
    config_name,
    config_text,
)
from .write.steps import (
    SHARES,
    TilesApart,
    clear_step,
    kept_step,
    matrix_step,
    operand_step,
    owner_step,
    partials_step,
    round_step,
    shared_step,
    tape_step,
)

PROGRAMS = 256  # that keep private sums, in all: about two on each multiprocessor
SPLITS = 128  # programs that share the outermost sum of a gradient with few tiles
TUNED_APART = "the forward's own choice is tuned apart"
# Where gradients are summed over programs; a kernel that needs none of it has no alternatives.
SCHEDULES = ("owner", "partials", "atomic")
# Of a configuration, what asks the passes for something, by yes or no.
KEYS = (
    "apart", "operands", "outputs", "saved", "exact", "walks", "disjoint", "constants", "matrix", "tf32x3",
    "whole", "turned", "logsumexp", "unmasked",
)  # fmt: skip


class ProgramsKept(Exception):
    """Programs of the forward walk a queue in the backward too: its tiles have to be those they are for."""


@dataclass
class Draft:
    """The backward section and how it came about."""

    text: str
    entry: str
    report: list[LineReport] = field(default_factory=list)
    tape_bytes: int = 0
    tape_naive_bytes: int = 0
    atomics: int = 0
    atomics_naive: int = 0
    schedule: str = "atomic"
    only: bool = False  # whether no other schedule would change anything
    configs: list[dict[str, Any]] = field(default_factory=list)  # for the tuner
    rounded: bool = False  # whether something is read back that an output holds rounded
    programs: int = PROGRAMS  # that share the walk over a summed axis
    asked: Asked = field(default_factory=lambda: Asked("partials"))
    lengths: constants.Lengths = field(default_factory=constants.Lengths)  # which arguments may be some

    @property
    def alternatives(self) -> list[str]:
        """Other schedules for the tuner to try, before configurations; not atomic adds of products of
        matrices whose owners may have tiles of their own: those took twice as long wherever they were
        timed. Nor where a matrix is tried first, which has owners alone."""
        if self.only or not self.atomics_naive:
            return []
        owned = not self.atomics and any(config.get("apart") for config in self.configs)
        first = next((config for config in self.configs if config.keys() != {"tf32x3"}), {})
        owned = owned or "matrix" in first
        return [name for name in SCHEDULES if name != self.schedule and not (owned and name == "atomic")]


def differentiate(
    fwd: Forward,
    dims: dict[str, Any],
    seed: int,
    dtype: str | None = None,
    schedule: str | None = None,
    config: dict[str, Any] | None = None,
    others: Sequence[dict[str, Any]] = (),
) -> Draft:
    """Trace one call of the stub and write its backward; `others` are dims of calls that may launch what the
    first does not. Raises Refusal; errors.Unusable for the user's."""
    with adopted.reading(fwd) as whole:
        try:
            draft = _differentiated(whole, dims, seed, dtype, schedule, config, others)
        except Refusal as refusal:
            raise whole.adopted.told(refusal, fwd.path) from None
        except Unusable as error:
            whole.adopted.place_of(error, fwd.path)
            raise
        draft.report = [_of_place(whole, report) for report in draft.report]
    return draft


def _differentiated(
    fwd: Forward,
    dims: dict[str, Any],
    seed: int,
    dtype: str | None,
    schedule: str | None,
    config: dict[str, Any] | None,
    others: Sequence[dict[str, Any]],
) -> Draft:
    """The same for a forward with all that its launches need."""
    launchers.hoist(fwd)
    tuning.bind(fwd, config or {})

    sizes = whole_rows.longest(fwd, dims), constants.lengths(fwd, dims, others)
    apart: list[parted.Apart] = []  # views of fresh tensors that are tensors of their own

    def attempt(schedule: str | None, folds: trace.Folds = frozenset(), queued: bool = True) -> Draft:
        first, *more = (partial(draw.make_inputs, fwd, d, seed, dtype=dtype) for d in [dims, *others])
        traced = trace.trace(fwd, first(), (make() for make in more), folds)
        unseen.check(fwd, [*(site.call for site in traced[0]), *(launch.call for launch in traced[1])])
        trace.other_launches(fwd, more, traced[0])
        asked = [site for site in traced[0] if site.outputs]
        menus = (own_blocks, own_tiles, own_lanes, row_tiles)
        blocks = [w for one in menus for w in one.chosen(asked, config or {})]
        blocks = [one for one in blocks if queued or not isinstance(one, block_sizes.Queued)]
        if blocks:
            traced = trace.trace(fwd, first(), (make() for make in more), folds, blocks)
            trace.other_launches(fwd, more, traced[0])
        try:
            return _attempt(fwd, *traced, schedule, config or {}, sizes, apart)
        except ProgramsKept:
            return attempt(schedule, folds, queued=False)
        except Refusal as refusal:
            found = _left_out(traced[0], refusal) - folds
            if not found:
                at = next((s.call.lineno for s in traced[0] if s.home.path == refusal.file), fwd.stub_line)
                raise refusal.seen_from(fwd.path, at) from None
        return attempt(schedule, folds | found, queued)

    def parting(schedule: str | None) -> Draft:
        try:
            return attempt(schedule)
        except Refusal as refusal:
            apart[:] = parted.find(fwd) if refusal.construct == parted.CONSTRUCT else []
            if not apart:
                raise
        with parted.apart(fwd, apart):
            return attempt(schedule)

    try:
        return parting(schedule)
    except BROKEN as error:
        reason = f"the owner schedule could not be written ({type(error).__name__}: {error})"
    try:  # the schedule that asks for least
        draft = parting("atomic")
    except BROKEN as error:
        raise Refusal(
            "kernel",
            f"the passes of the differentiator contradict each other: {error or type(error).__name__}",
            "Split the kernel or reorder its loops; this is a fault of the differentiator, worth a report.",
            fwd.stub_line,
            file=fwd.path,
        ) from error
    draft.report.append(LineReport(None, "schedule", "none", reason))
    return draft


def _attempt(
    fwd: Forward,
    traced: list[trace.Site],
    untraced: list[trace.Untraced],
    schedule: str | None,
    config: dict[str, Any],
    sizes: tuple[dict[int, int], constants.Lengths],
    apart: Sequence[parted.Apart],
) -> Draft:
    """One attempt with one schedule."""
    sites = [site for site in traced if site.outputs]
    stub = next(n for n in fwd.tree.body if isinstance(n, ast.FunctionDef) and n.name == fwd.stub_name)
    draft = Draft("", f"{fwd.stub_name}_autograd", schedule=schedule or "partials")
    longest, draft.lengths = sizes
    draft.programs = int(config.get("programs", PROGRAMS))
    kept = {name: bool(config.get(name)) for name in KEYS}
    splits, shares, runs, scan = (int(config.get(name, 0)) for name in ("splits", "shares", "runs", "scan"))
    draft.asked = Asked(draft.schedule, splits, shares, runs, scan, **kept, longest=longest)
    if not sites:
        message = "no launch writes anything that depends on an input"
        raise Refusal("stub", message, line=stub.lineno, file=fwd.path)
    draft.configs = tuning.menu(fwd, sites)
    tuning.apply(sites, config)
    for site in sites:
        site.configs = tuning.block_sizes(fwd, site.kernel_name)
    _name_classes(sites)
    kernels: dict[str, str] = {}
    try:
        functions = [_of_home(fwd, site, kernels, draft) for site in sites]
    except Refusal as refusal:
        raise refusal.at(None, fwd.path) from None
    if all(site.tables for site in sites):
        draft.schedule, draft.only = "atomic", True
    launching = {host.name: host for host in (*(s.host for s in sites), *(u.host for u in untraced))}
    hosts = _with_callers(fwd, grad_mode.quiet(fwd) | launching)  # a launch is known by its host's node
    renamed = {name: f"{name}_autograd" for name in hosts if name != fwd.stub_name}
    copies = [
        host_copy(fwd, f, sites, untraced, renamed, fwd.grads if f is stub else (), apart)
        for f in {**hosts, stub.name: stub}.values()
    ]
    used = {site.kernel_name for site in sites} | {launch.kernel_name for launch in untraced}
    hoisted = [f"{name} = {text}" for name, text in (fwd.hoisted or {}).items() if name in used]
    configs = [
        f"{config_name(site)} = {config_text(site.launch.config or {})}  # {TUNED_APART}\n"
        for site in {s.kernel_name: s for s in sites}.values()
        if site.autotuned
    ]
    body = "".join(functions)
    helpers = host_helpers(body)
    helpers += [OWN] * bool(fwd.grads)
    helpers += [UNSAVED] * any(isinstance(host, Method) for host in hosts.values())
    helpers += [UNTRACED] * bool(untraced)
    helpers += [PARTS] * any(f"{parted.PARTED}(" in one for one in copies)
    left_out = {(at, site.home) for site in sites for _, at in site.kernel.graph.folded.values()}
    for at, home in sorted(left_out, key=lambda one: one[0]):
        reason = (
            "what no traced launch takes here has no adjoint and is left out: a call that takes it raises"
        )
        draft.report.append(_of_file(home, LineReport(at, "branch", "untaken", reason)))
    for launch in untraced:
        reason = f"no size that was traced launches {launch.kernel_name} here: this raises where one does"
        draft.report.append(LineReport(launch.call.lineno, "launch", "untraced", reason))
    helpers += [TABLES] * any(site.tables for site in sites)
    helpers += [PASSED] * any(k.arg is None for site in sites for k in site.call.keywords)
    above = ["".join(line + "\n" for line in break_line(text, WIDTH)) for text in hoisted]
    above += [*configs, *scan_helpers("".join(kernels.values())), *("\n" + k for k in kernels.values())]
    parts = [*above, *helpers, *functions, *copies]
    draft.text = "".join("\n" + part for part in parts).lstrip("\n")
    draft.text = "".join(_imports(fwd, draft.text)) + draft.text
    _shadow_nothing(fwd, draft.text)
    draft.text = _adopted_imports(fwd, draft.text) + draft.text
    return draft


def _left_out(sites: list[trace.Site], refusal: Refusal) -> trace.Folds:
    """The condition that could leave out what is refused, as no traced launch takes it."""
    if refusal.fold is not None:
        return frozenset([(refusal.file or "", refusal.fold)])
    untaken = [s.kernel.graph.untaken for s in sites if s.home.path == refusal.file]
    lines = [at for one in untaken for at, block in one.items() if (refusal.line or 0) in block]
    return frozenset([(refusal.file or "", max(lines))]) if lines else frozenset()


def _imports(fwd: Forward, text: str) -> list[str]:
    """What the section imports itself, as the file has it under no name, or another."""
    lines = []
    known = {"contextlib": contextlib, "math": math, "torch": torch, "triton": triton, "tl": triton.language}
    for name, module in known.items():
        if re.search(rf"(?<![\w.]){name}\.", text) and vars(fwd.module).get(name) is not module:
            whole = module.__name__
            lines.append(f"import {whole}" + f" as {name}" * (name != whole) + "\n")
    return [*lines, "\n\n"] if lines else []


def _adopted_imports(fwd: Forward, text: str) -> str:
    """What the section imports for copies of functions of other modules, above what it imports itself."""
    used = {n.id for n in tree_nodes(ast.parse(text)) if isinstance(n, ast.Name)}
    lines = [line + "\n" for one in fwd.adopted.imports.statements(used) for line in break_line(one, WIDTH)]
    first = text.split("\n", 1)[0]
    return "".join([*lines, "" if first.startswith("import ") else "\n\n"]) if lines else ""


def _of_place(fwd: Forward, report: LineReport) -> LineReport:
    """A report on a line of another module's function names its file."""
    place = fwd.adopted.place(report.line)
    if place is None or report.line is None:
        return report
    where = f"{Path(place.path).name}:{place.line(report.line)}"
    return replace(report, line=None, reason=f"{where}: {report.reason}")


def _shadow_nothing(fwd: Forward, text: str) -> None:
    """The section stands below the forward in one file: a name of both would change the forward silently."""
    theirs = {name: node for node in fwd.tree.body for name in _bound(node)}
    body = ast.parse(text).body
    made = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    assert len(made) == len({*made}), "two functions have one name"
    for name in (name for node in body for name in _bound(node)):
        if name in theirs:
            message = f"`{name}` is a name of this file, and the generated backward defines it too"
            raise Refusal("name", message, f"Rename `{name}`.").at(theirs[name], fwd.path)


def _bound(node: ast.stmt) -> list[str]:
    """What a statement at the top of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [name.id for target in targets for name in tree_nodes(target) if isinstance(name, ast.Name)]


def _name_classes(sites: list[trace.Site]) -> None:
    used: Counter[str] = Counter()
    local = {n.id for s in sites for n in tree_nodes(s.host) if isinstance(n, ast.Name)}
    local |= {n.arg for s in sites for n in tree_nodes(s.host) if isinstance(n, ast.arg)}
    for site in sites:
        base = "".join(part.capitalize() for part in site.kernel_name.split("_"))
        while base in local:  # a variable beside the launch
            base += "Launch"
        used[base] += 1
        site.class_name = base if used[base] == 1 else f"{base}{used[base]}"


def _of_home(fwd: Forward, site: trace.Site, kernels: dict[str, str], draft: Draft) -> str:
    """The same as _launch(); what it refuses in a kernel stands in that kernel's file."""
    try:
        return _launch(fwd, site, kernels, draft)
    except Refusal as refusal:
        raise refusal.at(None, fwd.path if refusal.line is None else site.home.path) from None


def _of_file(home: Home, report: LineReport) -> LineReport:
    """A report on a line of an imported kernel names its file."""
    if not home.imported or report.line is None:
        return report
    return replace(report, line=None, reason=f"{Path(home.path).name}:{report.line}: {report.reason}")


def _with_callers(fwd: Forward, hosts: dict[str, ast.FunctionDef]) -> dict[str, ast.FunctionDef]:
    """Functions that make launches, and those of the file that call them, up to the stub."""
    every = HostFunctions(fwd.tree)
    functions = every.by_name
    calls, reached, towards = every.calls(), every.reached(fwd.stub_name), set(hosts)
    while more := {name for name in reached if calls[name] & towards} - towards:
        towards |= more
    return {**hosts, **{name: functions[name] for name in functions if name in towards - hosts.keys()}}


def _launch(fwd: Forward, site: trace.Site, kernels: dict[str, str], draft: Draft) -> str:
    """The Function of one launch; the kernels it needs are added to `kernels`."""
    asked = replace(draft.asked, schedule="atomic") if site.tables else draft.asked
    asked = replace(asked, matrix=asked.matrix and keeps_matrices(site, asked))
    report: list[LineReport] = []
    meeting = _checked(site, report)
    name = f"{site.kernel_name}_bwd"
    if site.class_name[-1].isdigit() and name in kernels:
        name += site.class_name[-1]
    rows = whole_rows.find(site, asked.longest) if asked.schedule != "atomic" else None
    whole = planned(site, name, asked, report)
    text = FunctionText(site, site.kernel.inplace)

    def scheduled(side: trace.Site, end: str) -> Scheduled:
        return planned(side, name + end, asked, report)

    best, _ = Flagged(scheduled).best(whole)
    if rows is not None and isinstance(best, Scheduled):
        best = of_rows(best, rows, scheduled)
    for plan in leaves(best) if meeting is not None else ():
        if meeting is not None and plan.site is site:
            raise meeting
        overwrite.check_reads(plan.site.kernel, trace.program_axes(site), site.launch.grid)
    for plan in leaves(best) if asked.turned else ():
        turn_tiles(plan)
    for plan in leaves(best) if asked.tf32x3 else ():
        exact_products.use(plan.effects, plan.reverse.report)
    for plan in leaves(best) if asked.unmasked else ():
        split_steps(plan)
    if asked.operands:
        text.tiles.backward = [effect for plan in leaves(best) for effect in plan.effects]
    parts = _parts(best, lambda plan: _part(fwd, plan, text, kernels, draft))
    if text.saving:
        text.launched = f"{site.kernel_name}_saving{name.removeprefix(site.kernel_name + '_bwd')}"
        kernels[text.launched] = saving_copy.copy_text(
            site, site.home.lines, list(text.saving.values()), text.launched
        )
    for plan in best.leaves() if isinstance(best, Sides) and rows is None else ():
        kept = f"{plan.owner.name}: atomics kept {plan.totals.kept} of {plan.totals.atomics}"
        draft.report.append(LineReport(site.call.lineno, "flag", "each side apart", kept))
    whole = _taken(best)
    draft.report += [_of_file(site.home, one) for one in whole.reverse.report]
    draft.tape_bytes += whole.totals.tape
    draft.tape_naive_bytes += whole.totals.naive
    draft.atomics += whole.totals.kept
    draft.atomics_naive += whole.totals.atomics
    draft.rounded |= whole.reverse.rounded
    made = text.text(parts)
    trace.check_called(made, site)
    return made


def _checked(site: trace.Site, report: list[LineReport]) -> Refusal | None:
    """Refuse what is overwritten. What a kernel reads beside what it writes may be known for each side of a
    flag only: the refusal, if it is not."""
    meeting = None
    try:
        overwrite.check_reads(site.kernel, trace.program_axes(site), site.launch.grid)
    except Refusal as refusal:
        meeting = refusal
    try:
        overwrite.check(site.kernel, site.launch.grid, report, site.others)
    except Refusal as refusal:
        raise meeting or refusal from None
    return meeting


def _taken(plan: Scheduled | Sides) -> Scheduled:
    """The plan for calls like the traced one."""
    return _taken(plan.plans[not plan.taken]) if isinstance(plan, Sides) else plan


def _parts(plan: Scheduled | Sides, made: Callable[[Scheduled], Part]) -> Part | Choice:
    """What the host does for a plan."""
    if isinstance(plan, Sides):
        one, other = (_parts(side, made) for side in plan.plans)
        return Choice(plan.flag, one, other)
    return made(plan)


def _absent(write: GradWrite) -> str | None:
    """The pointer of a gradient that a branch known at compile time writes: a call may leave it out."""
    conds = [region.cond for region in write.region.chain() if region.cond is not None]
    return write.base.attrs["name"] if write.base.op == "param" and any(map(is_static, conds)) else None


def _printer(plan: Scheduled, kernels: dict[str, str], draft: Draft) -> Callable[..., Emitted]:
    """What prints a kernel of a plan into `kernels`, and offers what it could have otherwise."""
    site, owner, lines = plan.site, plan.owner, plan.site.home.lines
    taken = {made.name for made in owner.kernels} | {n.name for made in owner.kernels for n in made.operands}
    small, blocks = constants.Constants(site, draft.lengths), whole_blocks.WholeBlocks(site)

    def emit(name: str, effects: list, notes: list[str], tiles: int | None = None) -> Emitted:
        given = site.kernel, name, lines, small if draft.asked.constants else None
        found = blocks.of(effects) if tiles is None else []
        asked = found if draft.asked.whole else []
        emitter = whole_blocks.Whole(*given, asked, taken) if asked else Emitter(*given)
        if step_functions.has_split(effects):
            emitter = step_functions.Stepped(*given, {*taken, *kernels})
        emitted = emitter.emit(effects, notes, tiles)
        kernels[name] = emitted.text
        if not draft.asked.constants and small.used(emitter.demand):
            offer_constants(draft)
        if found and not asked:
            offer_whole(draft)
        return emitted

    return emit


def _part(fwd: Forward, plan: Scheduled, text: FunctionText, kernels: dict[str, str], draft: Draft) -> Part:
    """The generated kernels of one plan, and their launches."""
    site, reverse, owner, fused = plan.site, plan.reverse, plan.owner, plan.fused
    found = plan.writes
    behind = Why("table", "which tensor an address belongs to is read from a table")
    owner.refused.update({w.base: behind for w in found if w.base.op == "entry"})
    advise(reverse, found, owner.refused, draft.schedule == "atomic")
    accumulated = sums(found, site.kernel.inplace) | plan.added
    layouts = [(l, _absent(w)) for w in found for l in w.layouts]
    layouts += [(l, k.bases[0] if k.optional else None) for k in owner.kernels for l in k.layouts]
    asked = [one for w in found for one in w.asked] + [one for k in owner.kernels for one in k.asked]
    asked += overwrite.single(site.kernel, trace.program_axes(site), site.launch.grid)
    checks = [*(text.check(*layout) for layout in layouts), *text.asked(list(dict.fromkeys(asked)))]
    offer(draft, plan)
    part = Part(accumulated, list(dict.fromkeys(checks)), rows=plan.rows)
    text.saving |= {kept.buffer: kept for kept in plan.saved}
    text.saved |= dict.fromkeys(text.saving)
    notes = header(reverse, plan.totals, part.checks) + ([] if plan.rows is None else [plan.rows.note])
    notes += [f"lines are those of {Path(site.home.path).name}"] if site.home.imported else []

    copies = _copies(plan)
    emit = _printer(plan, kernels, draft)
    if any(map(effects_of, reverse.effects)):
        if isinstance(site.blocks, block_sizes.Queued):
            raise ProgramsKept
        tiles = site.blocks.axis if isinstance(site.blocks, block_sizes.Tiles) and fused is None else None
        if plan.shared is not None:
            told = [*notes, plan.shared.note]
            shares = draft.asked.shares or SHARES
            step = shared_step(text, part, plan.shared, shares, lambda e: emit(owner.name, e, told))
        else:
            walks = step_tiles.find(reverse, reverse.effects, draft.asked.scan)
            told = [*notes, *([] if fused is None else [fused.note]), *(one.note for one in walks)]
            with step_tiles.walked(walks):
                step = Step(emit(owner.name, reverse.effects, told, tiles), "grid")
        if fused is not None:
            step = partials_step(text, part, step.emitted, fused, draft.programs)
        _allocate(plan, text, step)
        part.scattered = _scattered(plan)
        part.steps += [
            *(
                clear_step(one, emit(one.name(owner.name, "clear"), one.cleared, []))
                for one in part.scattered
            ),
            step,
            *(
                round_step(one, emit(one.name(owner.name, "round"), one.rounded, []))
                for one in part.scattered
            ),
        ]
        notes = []
    apart = _tiles_apart(plan, text) if draft.asked.apart else None
    for made in owner.kernels:
        steps = _operand_steps(text, made, emit, notes)
        emitted = emit(made.name, made.effects, [*([] if steps else notes), *made.notes])
        steps.append(
            owner_step(text, part, emitted, made, owner, draft.asked.splits or SPLITS, draft.asked.runs)
        )
        if apart is not None:
            steps[0].setup[:0] = apart.before(made)
        part.steps += steps
        if made.few and not made.split:
            tuning.offer(draft.configs, {"splits": SPLITS})
        notes = []
    if plan.after:
        note = "what is added to gradients that the kernels above have stored"
        part.steps.append(Step(emit(f"{owner.name}_after", plan.after, [note]), "grid"))
    offer_scans(draft, plan)
    offer_unmasked(draft, plan)
    check_inplace(plan)
    part.written, part.copies = _written(plan, text), copies
    return part


def _allocate(plan: Scheduled, text: FunctionText, step: Step) -> None:
    """The scratch of the main kernel's launch: what it reads again, and what it keeps for owners."""
    tape_step(text, step, plan.taped.buffers)
    for spill in plan.owner.spills.made.values():
        kept_step(text, step, spill)
    for matrix in plan.matrices:
        matrix_step(text, step, matrix)


def _operand_steps(
    text: FunctionText, made: OwnerKernel, emit: Callable[[str, list, list[str]], Emitted], notes: list[str]
) -> list[Step]:
    """The launches in front of an owner kernel that compute what its products take; `notes` are above the
    first."""
    steps: list[Step] = []
    for one in made.operands:
        told = [*([] if steps else notes), f"one program a tile of `{one.called}`, for {made.name}"]
        steps.append(operand_step(text, emit(one.name, one.effects, told), one))
    return steps


def _tiles_apart(plan: Scheduled, text: FunctionText) -> TilesApart | None:
    """Tiles for each kernel, where none reads what lies by the programs of the forward."""
    of_all = plan.site.blocks
    by_program = any(kept.cut is None for kept in plan.saved)
    if plan.taped.buffers or plan.after or plan.fused or by_program:
        return None
    return (
        TilesApart(text, plan.owner, of_all)
        if isinstance(of_all, block_sizes.Grid | block_sizes.Queued)
        else None
    )


def _written(plan: Scheduled, text: FunctionText) -> dict[str, str]:
    """Of gradients of which each element is stored once, how many are."""
    written, site = {}, plan.site
    every = plan.writes + [w for k in plan.owner.kernels for w in writes(k.effects)]
    apart = writes(plan.reverse.effects)
    for name in dict.fromkeys(w.base.attrs["name"] for w in every):
        stored = [
            w for w in every if w.base.attrs["name"] == name and w.kind == "store" and w.proof != SKIPPED
        ]
        covers = [w.covers for w in stored if w.covers is not None]
        alone = len(stored) == 1 or all(w in apart for w in stored)
        if covers and len(covers) == len(stored) and alone and name not in site.tables:
            written[name] = text.expr(reduce(site.kernel.graph.add, covers))
    return written


def _scattered(plan: Scheduled) -> list[Scattered]:
    """Gradients that the main kernel alone adds to, at few places."""
    site = plan.site
    if plan.fused is not None or plan.shared is not None or isinstance(site.blocks, block_sizes.Tiles):
        return []
    others = {
        w.base for effects in (plan.after, *(k.effects for k in plan.owner.kernels)) for w in writes(effects)
    }
    apart = {*site.kernel.inplace, *site.tables, *site.optional}
    found = scattered.find(
        plan.reverse,
        trace.program_axes(site),
        lambda base: base not in others and base.attrs["name"] not in apart,
    )
    sizes = {one.base: overwrite.number_of(site.kernel, one.reached, site.launch.grid) for one in found}
    return [one for one in found if scattered.are_few(sizes[one.base], site.launch.args[one.base].numel())]


def _copies(plan: Scheduled) -> dict[str, str]:
    """Gradients that the host may hand on, each with the tensor that it is."""
    site, kernel = plan.site, plan.site.kernel
    every = plan.writes + [w for owned in plan.owner.kernels for w in writes(owned.effects)]
    count = Counter(w.base for w in every)
    summed = {*(plan.fused.bases if plan.fused else ()), *(plan.shared.bases if plan.shared else ())}
    apart = {*kernel.inplace, *site.tables, *site.optional}
    stores = [w for w in writes(plan.reverse.effects) if w.kind == "store" and w.covers is not None]
    alone = [w for w in stores if count[w.base] == 1 and w.base.op == "param" and _absent(w) is None]
    names = {w.base.attrs["name"] for w in alone} - summed - apart
    return handed_on.find(stores, names, set(site.outputs) - apart)
