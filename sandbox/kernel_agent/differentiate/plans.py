"""What the passes make of one launch: the effects of its backward, and who writes which gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .ir.nodes import GradWrite, If, Node, Store, walk
from .ir.refusal import Refusal
from .ir.report import LineReport
from .ir.values import Kernel, signature
from .read import block_sizes, trace
from .reverse import forward_values, normalised, running_maxima, wrapped_indices, written_once
from .reverse.sweep import Reverse, writes
from .schedule import (
    divisors,
    flags,
    folded,
    gradient_writes,
    own_adds,
    own_blocks,
    partials,
    product_tiles,
    row_exponents,
    row_factors,
    saved,
    saved_numbers,
    saved_tiles,
    second_launch,
    shared_loops,
    split_loops,
    step_matrices,
    step_rows,
    swapped_lanes,
    tile_queues,
    tuning,
    turned_tiles,
    whole_rows,
    whole_steps,
)
from .schedule.decisions import Totals
from .schedule.nests import NotOwned
from .schedule.owner import Owner
from .schedule.partials import Partials
from .schedule.saved import Saved
from .schedule.shared_loops import Shared
from .schedule.step_matrices import StepMatrix
from .schedule.whole_rows import Rows
from .write.demand import effects_of
from .write.steps import SHARES

FLAGS = 2  # of which each side of a launch may have kernels of its own
# What is raised where an invariant of these passes does not hold for a kernel.
BROKEN = (AssertionError, NotOwned, RecursionError)


@dataclass(frozen=True)
class Asked:
    """What a schedule and a configuration ask of the passes."""

    schedule: str
    splits: int = 0  # programs that share a sum of products; 0: it is shared where it is long
    shares: int = 0  # programs of a kernel that would have few, which share its loop; 0: they do not
    runs: int = 0  # programs that walk entries of a table, those that name the same in turn; 0: none do
    scan: int = 0  # steps of linear recurrences that loops take at once; 0: one after the other
    apart: bool = False  # kernels of the backward have tiles of their own each, where the launch has others
    outputs: bool = False  # read back what took a sum, where an output holds it
    operands: bool = False  # those of products are computed once, where more than one program would
    saved: bool = False  # the forward saves numbers that took a sum, and what random numbers decide
    exact: bool = False  # nothing is read back that an output holds rounded
    walks: bool = False  # sums are in registers also where other gradients are added to at places of data
    disjoint: bool = False  # rows that an output's stores keep apart are disjoint
    constants: bool = False  # kernels are compiled for small integers
    matrix: bool = False  # tiles of an adjoint that several products take are kept as a matrix
    tf32x3: bool = False  # exact products of float32 are three in TF32 each
    whole: bool = False  # blocks that lie wholly inside go without masks
    logsumexp: bool = False  # exponents of a row hold its factor
    turned: bool = False  # owner kernels form the tiles transposed that their products take so
    unmasked: bool = False  # steps of products whose tiles lie wholly inside go without masks
    longest: Mapping[int, int] = field(default_factory=dict, compare=False)  # whole_rows.longest()
    rows: bool = True  # what steps add to rows of a gradient is a product behind their loop


@dataclass
class Scheduled:
    """The effects of one launch's backward: the main kernel, the owners', and what is added after them."""

    site: trace.Site
    reverse: Reverse
    owner: Owner
    fused: Partials | None
    taped: forward_values.Tape
    after: list
    totals: Totals
    rows: Rows | None = None  # the block is a whole row
    saved: list[Saved] = field(default_factory=list)  # by the forward
    offers: list[dict[str, Any]] = field(default_factory=list)  # configurations that ask for something else
    shared: Shared | None = None  # the main kernel's loop
    matrices: list[StepMatrix] = field(default_factory=list)  # that the main kernel stores for owners
    could_store: bool = False  # whether there may be some
    could_fold: bool = False  # whether exponents of rows could hold their factors

    @property
    def effects(self) -> list:
        """Those that kernels have, but for operands that are computed once."""
        main = [effect for effect in self.reverse.effects if effects_of(effect)]
        return main + self.after + [effect for made in self.owner.kernels for effect in made.effects]

    @property
    def added(self) -> set[str]:
        """The gradients that owner kernels add to atomically."""
        return {base for made in self.owner.kernels if made.entries is not None for base in made.bases}

    @property
    def writes(self) -> list[GradWrite]:
        """Those of the main kernel and of what follows it."""
        return writes(self.reverse.effects) + writes(self.after)


def planned(site: trace.Site, name: str, asked: Asked, known: list[LineReport]) -> Scheduled:
    """The passes from the forward graph to effects with a schedule."""
    totals = Totals(naive=forward_values.naive(site))
    report = list(known)
    normalised.undivide(site.kernel, report)
    running_maxima.detach(site.kernel, report)
    reverse = Reverse(site.kernel, set(), exact=asked.exact)
    reverse.report = report
    reverse.run()
    written_once.use_ends(reverse)
    swapped_lanes.run(reverse)
    gradient_writes.merge(reverse)
    wrapped_indices.unwrap(reverse)
    offers = [{"outputs": 1}] * forward_values.holds_sums(reverse)
    forward_values.use_stored(reverse, asked.outputs)
    could_fold = row_exponents.use(reverse, row_factors.move(reverse), asked.logsumexp)
    if saved.offers(reverse, site):
        offers.append({"saved": 1})
    kept = saved.use(reverse, site, asked.saved)
    if not kept and asked.saved and asked.apart:
        kept = saved_tiles.use(reverse, site)
    divisors.invert(reverse)
    gathered = step_rows.gather(reverse) if asked.rows and asked.schedule != "atomic" else []
    could = asked.schedule != "atomic" and not asked.matrix and step_matrices.offers(reverse, site)
    matrices = step_matrices.use(reverse, site) if asked.matrix else []
    totals.atomics = len(writes(reverse.effects))
    if asked.schedule != "atomic":
        folded.run(reverse)
    axes = trace.program_axes(site)
    gradient_writes.prove(reverse, axes, site.launch.grid, asked.disjoint and asked.schedule != "atomic")
    gradient_writes.mark(reverse)
    owner = _owner(reverse, axes, name, site, asked)
    offers += [{"walks": 1}] * (asked.schedule == "partials" and partials.beside_data(reverse, axes))
    fused = partials.fuse(reverse, axes, asked.walks) if asked.schedule == "partials" else None
    after: list = []
    if asked.schedule != "atomic" and not isinstance(fused, Partials):
        owner = _of_tiles(reverse, axes, name, site.launch.grid) or owner.run()
        after = second_launch.split(reverse, axes, owner.refused, site.launch.grid)
        own_adds.run(reverse, axes, site.launch.grid)
        gradient_writes.mark(reverse)
        gradient_writes.fill(reverse)
    if any(write.kind == "atomic_add" for write in writes(reverse.effects) if write in gathered):
        return planned(site, name, replace(asked, rows=False), known)
    for made in owner.kernels if matrices else ():
        product_tiles.tile(owner, made, [one.name for one in matrices], asked.longest)
    if step_matrices.stays(reverse, matrices):
        return planned(site, name, replace(asked, matrix=False), known)
    taped = forward_values.Tape(reverse, lambda buffer: forward_values.size(buffer, site)).run()
    others = {one.buffer for one in kept}
    walked = isinstance(fused, Partials)
    numbers, handed = ([], 0) if walked else saved_numbers.use(reverse, site, taped, others)
    plan = Scheduled(
        site,
        reverse,
        owner,
        fused if isinstance(fused, Partials) else None,
        taped,
        after,
        totals,
        saved=kept + numbers,
        offers=offers,
        matrices=matrices,
        could_store=could,
        could_fold=could_fold,
    )
    plan.offers += tuning.one_warp(reverse, site)
    alone = not (plan.fused or plan.after or owner.spills.made or taped.buffers or numbers)
    if alone and asked.schedule != "atomic" and not matrices:
        plan.offers += _shares(reverse, site)
    if alone and (asked.shares or matrices):
        plan.shared = shared_loops.find(reverse, site.launch.grid)
    totals.kept = sum(w.kind == "atomic_add" for w in plan.writes) + len(plan.added)
    totals.tape = handed + sum(forward_values.size(b, site) for b in taped.buffers)
    if plan.fused is not None and not kept and not asked.saved:
        other = planned(site, name, replace(asked, saved=True), known)
        if other.saved and other.fused is not None:
            return other
    return plan


def turn_tiles(plan: Scheduled) -> None:
    """Have owner kernels form tiles transposed, where that is all that their products want of them."""
    for made in plan.owner.kernels:
        found = turned_tiles.turned(plan.reverse.kernel.graph, made.effects)
        if found is not None:
            made.effects = found
            reason = "formed transposed: products take it out of registers"
            plan.reverse.say(None, "tile", "none", reason)


def split_steps(plan: Scheduled) -> None:
    """Have loops of products walk the steps without masks whose tiles lie wholly inside."""
    kernel = plan.reverse.kernel
    found = [one for effects, _ in splittable(plan) for one in whole_steps.find(kernel.graph, effects)]
    for one in {one.steps.loop: one for one in found}.values():
        split_loops.split(kernel, one)
    if found:
        plan.reverse.say(None, "loop", "none", split_loops.REASON)


def splittable(plan: Scheduled) -> list[tuple[list, list[Node] | None]]:
    """The effects of kernels whose loops may be split, not of one whose loop is walked in another way; each
    with its grid, if that is not the forward's."""
    main = [effect for effect in plan.reverse.effects if effects_of(effect)]
    walked = plan.fused is not None or plan.shared is not None or plan.taped.buffers
    return [*([] if walked else [(main, None)]), *((made.effects, made.grid) for made in plan.owner.kernels)]


def _owner(reverse: Reverse, axes: list[int], name: str, site: trace.Site, asked: Asked) -> Owner:
    """Of what many programs add to, by what is asked of it."""
    return Owner(
        reverse,
        axes,
        name,
        site.launch.grid,
        asked.splits > 0,
        own=site.blocks if asked.apart and isinstance(site.blocks, block_sizes.Grid) else None,
        operands=asked.operands,
        stored=asked.disjoint,
        runs=asked.runs > 0,
    )


def _of_tiles(reverse: Reverse, axes: list[int], name: str, grid: tuple[int, ...]) -> Owner | None:
    """The owners of tiles that programs walk a queue of, where there are any."""
    before = list(reverse.report)
    walked = tile_queues.find(reverse, axes, grid)
    owner = None if walked is None else Owner(reverse, axes, name, grid, walk=walked).run()
    if owner is not None and owner.kernels:
        return owner
    reverse.report = before
    return None


def _shares(reverse: Reverse, site: trace.Site) -> list[dict[str, Any]]:
    """A configuration that shares a loop out, where the traced call has few programs, or has with blocks that
    are offered."""
    if shared_loops.offers(reverse, site.launch.grid):
        return [{"shares": SHARES}]
    if shared_loops.find(reverse, site.launch.grid) is None or (fewer := own_blocks.fewer(site)) is None:
        return []
    config, grid = fewer
    return [{**config, "shares": SHARES}] if shared_loops.offers(reverse, grid) else []


@dataclass
class Sides:
    """A launch whose backward is made twice: for calls with a flag, and for those without."""

    flag: Node
    plans: list[Scheduled | Sides]
    taken: bool  # which of them the traced call takes

    def leaves(self) -> list[Scheduled]:
        """Every plan, in order."""
        return [leaf for plan in self.plans for leaf in leaves(plan)]


Schedule = Callable[[trace.Site, str], Scheduled]


def leaves(plan: Scheduled | Sides) -> list[Scheduled]:
    return plan.leaves() if isinstance(plan, Sides) else [plan]


class Flagged:
    """The backwards of a launch for calls that give its flags certain answers, each scheduled once."""

    def __init__(self, scheduled: Schedule) -> None:
        self.scheduled = scheduled
        self.made: dict[frozenset, Scheduled | None] = {}

    def best(self, whole: Scheduled, facts: flags.Answers = ()) -> tuple[Scheduled | Sides, float]:
        """A plan, or the sides of a flag where one has fewer atomic adds than in one kernel with the other;
        and how many fewer, a side counted for half."""
        best: Scheduled | Sides = whole
        gain, graph = 0.0, whole.site.kernel.graph
        if whole.site.again is None or len(facts) == FLAGS:
            return whole, 0.0
        asked = flags.asked_of(whole.site, whole.writes)
        if not asked or not self.may_help(whole, asked, facts):
            return whole, 0.0
        for flag in asked:
            sides = Sides(flag, [], bool(graph.concrete(flag)))
            saved: list[float] = []
            for answer in (True, False):
                plan = self.plan(whole.site, (*facts, (flag, answer)))
                if plan is None:
                    break
                found, more = self.best(plan, (*facts, (flag, answer)))
                sides.plans.append(found)
                saved.append(flags.added(whole.writes, [(flag, answer)]) - plan.totals.kept + more)
            if len(saved) < 2 or min(saved) < 0 or sum(saved) / 2 < gain:
                continue
            if sum(saved) / 2 > gain or gain and len(sides.leaves()) < len(leaves(best)):
                best, gain = sides, sum(saved) / 2
        return best, gain

    def may_help(self, whole: Scheduled, asked: list[Node], facts: flags.Answers) -> bool:
        """Whether more is proven where every flag is known: where it is not, one or two of them do not help
        either."""
        for answers in flags.together(asked, FLAGS - len(facts)):
            plan = self.plan(whole.site, (*facts, *answers))
            if plan is None or plan.totals.kept < flags.added(whole.writes, answers):
                return True
            if plan.totals.proven > whole.totals.proven:
                return True
        return False

    def plan(self, site: trace.Site, facts: flags.Answers) -> Scheduled | None:
        """The backward of calls that agree with `facts`; None where that cannot be written."""
        known = {signature(flag): answer for flag, answer in facts}
        key = frozenset(known.items())
        if key not in self.made:
            name = "".join(flags.ending(flag, answer) for flag, answer in facts)
            try:
                plan = self.scheduled(_of_side(site, known), name)
                check_inplace(plan)
                self.made[key] = plan
            except (Refusal, *BROKEN):
                self.made[key] = None
        return self.made[key]


def _of_side(site: trace.Site, facts: dict[tuple, bool]) -> trace.Site:
    """A launch of calls that agree with facts; where the traced one does not, another that does is its
    example."""
    assert site.again is not None
    kernel = site.again(facts, None)
    if kernel.graph.elsewhere:
        any(kernel.graph.takes(launch.args, launch.grid) for launch in site.others())
    return replace(site, kernel=kernel)


def of_rows(
    best: Scheduled, rows: Rows, scheduled: Callable[[trace.Site, str], Scheduled]
) -> Scheduled | Sides:
    """The same with a whole row in each block, where that costs nothing; beside what there was if SWEEP has
    rows that are too long for it."""
    if best.site.again is None:
        return best
    try:
        plan = scheduled(replace(best.site, kernel=best.site.again({}, rows.block)), "")
        rows = rows.held(plan.reverse.effects, plan.fused is not None)
        if rows.longest > rows.limit:
            plan = scheduled(replace(best.site, kernel=best.site.again({}, rows.block)), "_row")
            rows = rows.held(plan.reverse.effects, plan.fused is not None)
    except (Refusal, *BROKEN):
        return best
    plan.rows = rows
    costs_more = (plan.totals.kept, plan.totals.tape) > (best.totals.kept, best.totals.tape)
    if costs_more or rows.limit < whole_rows.LEAST:
        return best
    if rows.longest <= rows.limit:
        return plan
    short = rows.short(best.site.kernel.graph)
    return Sides(short, [plan, best], bool(best.site.kernel.graph.concrete(short)))


def check_inplace(plan: Scheduled) -> None:
    """What the forward overwrites must have its gradient overwritten by one program an element."""
    kernel, owned = plan.site.kernel, {name for one in plan.owner.kernels for name in one.bases}
    gradients = {w.base.attrs["name"] for w in plan.writes}
    accumulated = sums(plan.writes, kernel.inplace)
    site, stored = plan.site, [e for e in walk(plan.site.kernel.effects) if isinstance(e, Store)]
    replaced = {(w.base, w.offset, w.mask) for w in plan.writes}
    for inplace in kernel.inplace & (gradients | owned | set(site.outputs)):
        mine = {(s.base, s.offset, s.mask) for s in stored if s.base.attrs["name"] == inplace}
        if inplace in owned | accumulated or inplace not in gradients or not mine <= replaced:
            message = f"`{inplace}` is overwritten, but not by one program an element"
            remedy = "Write to a buffer of its own; what the kernel leaves out, torch can put beside it."
            over = [s for s in stored if s.base.attrs["name"] == inplace]
            reading = [s for s in over if (s.base, s.offset, s.mask) in site.kernel.loaded]
            raise Refusal(
                "in-place access",
                message,
                remedy,
                reading[0].line if reading else site.kernel.line,
                fold=next((at for store in reading for at in _untaken(site.kernel, store)), None),
            )


def _untaken(kernel: Kernel, store: Store) -> list[int]:
    """The lines of the conditions by which the traced launch does not come to a store."""
    found = []
    for branch in (e for e in walk(kernel.effects) if isinstance(e, If) and e.line in kernel.graph.untaken):
        side = branch.other if kernel.graph.concrete(branch.cond) else branch.then
        if store.region.inside(side) and branch.line is not None:
            found.append(branch.line)
    return found


def sums(found: list[GradWrite], inplace: set[str]) -> set[str]:
    """The gradients that are sums; not those of which a part takes the place of an upstream, and the other
    is added to it once."""
    return {
        name
        for write in found
        if write.kind != "store"
        and not ((name := write.base.attrs["name"]) in inplace and write.kind == "add")
    }


def keeps_matrices(site: trace.Site, asked: Asked) -> bool:
    """Whether all products of tiles that would be stored have kernels of their own: asked of a kernel that is
    read anew, as passes change one."""
    if site.again is None:
        return False
    try:
        other = replace(site, kernel=site.again({}, None))
        return bool(planned(other, "", replace(asked, matrix=True), []).matrices)
    except (Refusal, *BROKEN):
        return False
