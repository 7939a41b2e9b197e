"""The programs of one launch: along the course of their kernel (courses.py), many at a time where they go
together.

Programs that take the same way are done together, each operation once for all of them (rows.py): what they do
to memory comes call by call then, in each call in the order of the programs, and no longer one program after
another. Of that only those could tell that meet in memory, which is a race and found as one; kernels that put
their programs in order by atomics are run one program after another. Where ways part at a question each group
goes on for itself, and where a call raises each program goes on alone from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from triton.runtime.jit import JITFunction

from . import courses, rows
from .courses import Course, Otherwise, Said, Slot, Step, Stretch, Values, Walk, answer
from .remember import Memory, Unknown, note

PROGRAMS_BEFORE = 2  # that their Python runs alone: then remember.py has written down what they call
MOST_TOGETHER = 128  # programs
BYTES_TOGETHER = 1 << 19  # that a value of theirs has, about: more than a cache holds is not faster

Program = tuple[int, int, int]


class Turns(Protocol):
    """Who is told which program it is that does what comes next."""

    def begin(self, program: Program) -> None: ...
    def begin_many(self, programs: list[Program]) -> np.ndarray:
        """Their epochs (races.py)."""

    def turn_to(self, program: Program, epoch: int) -> None:
        """One of those that began together goes on."""


class Programs:
    """Of one launch. `bound` are the arguments as the kernel's Python wants them, `together`: whether
    programs may be run together."""

    def __init__(
        self,
        kernel: JITFunction,
        function: Callable[..., Any],
        bound: Mapping[str, Any],
        memory: Memory,
        turns: Turns,
        together: bool,
    ) -> None:
        """`function` is the kernel's Python."""
        self.kernel, self.function, self.bound, self.memory = kernel, function, bound, memory
        self.turns, self.together = turns, together
        self.course: Course | None = None
        key: list[Any] = []
        self.arguments: list[Any] = []
        try:
            for value in bound.values():
                note(value, key, self.arguments)
            memory.add_kinds([tensor.handle for tensor in self.arguments], key)
        except Unknown:
            return
        which = tuple(key)
        known: dict[Any, Course] = kernel.__dict__.setdefault("_kernel_agent_courses", {})
        if len(known) > courses.MOST_COURSES:
            known.clear()
        course = known.get(which)
        if course is None or not course.is_current():
            course = known[which] = Course(memory, len(self.arguments))
        self.course = course
        self.base: Values = [tensor.handle for tensor in self.arguments]
        self.known: set[Stretch] = set()  # of which the steps of the launch are done

    def run(self, programs: list[Program]) -> None:
        at = 0
        while at < len(programs):
            count = min(self._most(), len(programs) - at)
            if count > 1:
                Together(self, programs[at : at + count]).run()
            else:
                count = 1
                self.turns.begin(programs[at])
                self._run_one()
            at += count

    def _most(self) -> int:
        """How many of the next programs go together."""
        course = self.course
        if not self.together or course is None or not course.is_promising() or not course.bytes:
            return 1
        one = max(1, course.bytes // course.slots)
        return min(MOST_TOGETHER, courses.MOST_BYTES // course.bytes, BYTES_TOGETHER // one)

    def _run_one(self) -> None:
        course = self.course
        if course is None or not course.is_promising():
            self.function(**self.bound)
        elif course.before < PROGRAMS_BEFORE:
            course.before += 1
            self.function(**self.bound)
        elif course.first is None:
            course.first = Stretch()
            self._walk(self.fresh(), [], course.first)
        else:
            self.follow(course.first, self.fresh(), [])

    def fresh(self) -> Values:
        """What each program begins with."""
        values: Values = []
        self.fit(values)
        return values

    def fit(self, values: Values) -> None:
        """A place for each slot that there is by now."""
        course = self.course
        assert course is not None
        first = len(self.base)
        self.base += [course.constants.get(slot) for slot in range(first, course.slots)]
        values += self.base[len(values) :]

    def _walk(self, values: Values, log: list[Any], stretch: Stretch | None) -> None:
        """The kernel's Python, from where `log` ends; what is new goes into `stretch`, if there is one."""
        assert self.course is not None
        walk = self.memory.watch = Walk(self.course, self.arguments, values, log, stretch)
        walk.enter(self.kernel.fn)
        try:
            self.function(**self.bound)
        finally:
            self.memory.watch = None
        walk.end()

    def leave(self, values: Values, log: list[Any]) -> None:
        assert self.course is not None
        self.course.left += 1
        self._walk(values, log, None)

    def enter(self, stretch: Stretch, values: Values) -> bool:
        """What a stretch needs once: that it is sealed, and the steps of the launch. Whether those raise."""
        course = self.course
        assert course is not None
        if not stretch.sealed:
            course.seal(stretch)
            for slot in stretch.constant:
                self.base[slot] = course.constants[slot]
        for slot in stretch.constant:
            values[slot] = self.base[slot]
        if stretch not in self.known:
            if self._take(stretch.once, values, stretch) is not None:
                return True
            for slot in stretch.made_once:
                self.base[slot] = values[slot]
            self.known.add(stretch)
        else:
            for slot in stretch.made_once:
                values[slot] = self.base[slot]
        return False

    # ---- one program

    def follow(self, stretch: Stretch, values: Values, log: list[Any]) -> None:
        course = self.course
        assert course is not None
        log = log.copy()
        while True:
            self.fit(values)
            stopped = [] if self.enter(stretch, values) else self._take(stretch.steps, values, stretch)
            if stopped is not None:
                self.leave(values, log + stopped)
                return
            log += stretch.log
            if stretch.question is None:
                if stretch.whole:
                    course.ended += 1
                else:
                    self.leave(values, log)
                return
            kind, asked = stretch.question
            said = answer(kind, [values[o.number] if type(o) is Slot else o for o in asked])
            log.append(Said(said))
            known = stretch.answers.get(said)
            if known is None:
                self.learn(stretch, said, values, log)
                return
            stretch = known

    def learn(self, stretch: Stretch, said: int, values: Values, log: list[Any]) -> None:
        """The program that is the first to give this answer goes on by its Python, which is written down if
        there is room for it."""
        course = self.course
        assert course is not None
        course.left += 1
        known = None
        if course.has_room() and len(stretch.answers) < courses.MOST_ANSWERS:
            known = stretch.answers[said] = Stretch()
        self._walk(values, log, known)

    def _take(self, steps: list[Step], values: Values, stretch: Stretch) -> list[Any] | None:
        """Steps of one program. None, or, where one raises or makes something else, the log until there."""
        at = 0
        try:
            for inputs, function, out, one, other, at in steps:  # noqa: B007
                if inputs == 2:
                    values[out] = function(values[one], values[other])
                elif inputs == 1:
                    values[out] = function(values[one])
                elif inputs < 0:
                    function(values)
                else:
                    values[out] = function(*[values[slot] for slot in one])
        except Otherwise as found:
            return [*stretch.log[:at], Said(found.made)]
        except Exception:  # noqa: BLE001 (whatever it is, it is raised again, from the kernel's own line)
            return stretch.log[:at]
        return None


class Together:
    """Programs that follow their course together, as far as they take the same way."""

    def __init__(self, owner: Programs, programs: list[Program]) -> None:
        self.owner, self.programs = owner, programs
        self.places = np.array(programs, np.int32)
        self.epochs = owner.turns.begin_many(programs)

    def run(self) -> None:
        course = self.owner.course
        assert course is not None and course.first is not None
        self._follow(course.first, self.owner.fresh(), np.arange(len(self.programs)), [])

    def _turn_to(self, program: int) -> None:
        self.owner.turns.turn_to(self.programs[program], int(self.epochs[program]))

    def _follow(self, stretch: Stretch, values: Values, who: np.ndarray, log: list[Any]) -> None:
        """`values` has rows for those of the programs whose numbers `who` has."""
        course = self.owner.course
        assert course is not None
        log = log.copy()
        while len(who) > 1:
            self.owner.fit(values)
            rows.now.programs, rows.now.epochs = self.places[who], self.epochs[who]
            raised = self.owner.enter(stretch, values)
            stopped = [[]] * len(who) if raised else self._take(stretch, values, who)
            if stopped is not None:
                self._leave(values, who, [log + part for part in stopped])
                return
            log += stretch.log
            if stretch.question is None:
                if stretch.whole:
                    course.ended += len(who)
                else:
                    self._leave(values, who, [log] * len(who))
                return
            answers = self._answers(stretch.question, values, len(who))
            groups = list(dict.fromkeys(answers))
            if len(groups) > 1:
                for said in groups:
                    members = np.array([number for number, own in enumerate(answers) if own == said])
                    part = [rows.chosen(value, members) for value in values]
                    self._answered(stretch, said, part, who[members], [*log, Said(said)])
                return
            log.append(Said(groups[0]))
            known = stretch.answers.get(groups[0])
            if known is None:
                self._answered(stretch, groups[0], values, who, log)
                return
            stretch = known
        if len(who):
            self._turn_to(who[0])
            self.owner.follow(stretch, [rows.row(value, 0) for value in values], log)

    def _answers(self, question: tuple[str, list[Any]], values: Values, count: int) -> list[int]:
        kind, asked = question
        operands = [values[o.number] if type(o) is Slot else o for o in asked]
        if not any(type(operand) in (rows.Rows, rows.Each) for operand in operands):
            return [answer(kind, operands)] * count
        return [answer(kind, [rows.row(operand, number) for operand in operands]) for number in range(count)]

    def _answered(self, stretch: Stretch, said: int, values: Values, who: np.ndarray, log: list[Any]) -> None:
        """Programs go on behind their answer. Where nobody knows the way the first of them finds it."""
        known = stretch.answers.get(said)
        if known is None:
            self.owner.fit(values)
            self._turn_to(who[0])
            self.owner.learn(stretch, said, [rows.row(value, 0) for value in values], log)
            known = stretch.answers.get(said)
            rest = np.arange(1, len(who))
            values, who = [rows.chosen(value, rest) for value in values], who[1:]
        if known is None:
            self._leave(values, who, [log] * len(who))
        else:
            self._follow(known, values, who, log)

    def _leave(self, values: Values, who: np.ndarray, logs: list[list[Any]]) -> None:
        """Each goes on by its Python."""
        for number, program in enumerate(who):
            self._turn_to(program)
            self.owner.leave([rows.row(value, number) for value in values], logs[number])

    def _take(self, stretch: Stretch, values: Values, who: np.ndarray) -> list[list[Any]] | None:
        """The steps of a stretch. None, or, where a call raises or makes something else, for each program the
        log until there."""
        for number, step in enumerate(stretch.steps):
            twin = stretch.twins[number]
            if twin is not None:
                inputs, _, out, one, other, _ = step
                try:
                    if inputs == 2:
                        values[out] = twin(values[one], values[other])
                    elif inputs == 1:
                        values[out] = twin(values[one])
                    else:
                        values[out] = twin(*[values[slot] for slot in one])
                    continue
                except Exception:  # noqa: BLE001 (nothing was done: one after another they are asked below)
                    stretch.twins[number] = None
            stopped = self._each(step, stretch, values, who)
            if stopped is not None:
                return stopped
        return None

    def _each(self, step: Step, stretch: Stretch, values: Values, who: np.ndarray) -> list[list[Any]] | None:
        """One step, by one program after another."""
        inputs, function, out, one, other, at = step
        operands = [one] if inputs == 1 else [one, other] if inputs == 2 else one
        made: dict[int, list[Any]] = {}
        stopped: list[Any] | None = None
        for number, program in enumerate(who):
            self._turn_to(program)
            own = _Own(values, number, made)
            try:
                if inputs < 0:
                    function(own)
                else:
                    own[out] = function(*[own[slot] for slot in operands])
            except Otherwise as found:
                stopped = [*stretch.log[:at], Said(found.made)]
            except Exception:  # noqa: BLE001 (raised again, from the kernel's own line)
                stopped = stretch.log[:at]
            if stopped is not None:
                for slot, found_by in made.items():
                    values[slot] = rows.Each(found_by + [None] * (len(who) - len(found_by)))
                rest = len(who) - number - 1
                return [stretch.log[: at + 1]] * number + [stopped] + [stretch.log[:at]] * rest
        for slot, found_by in made.items():
            values[slot] = rows.gathered(found_by)
        return None


class _Own:
    """The values of one of several programs; what it makes goes to `made`."""

    def __init__(self, values: Values, number: int, made: dict[int, list[Any]]) -> None:
        self.values, self.number, self.made = values, number, made

    def __getitem__(self, slot: int) -> Any:
        return rows.row(self.values[slot], self.number)

    def __setitem__(self, slot: int, value: Any) -> None:
        self.made.setdefault(slot, []).append(value)
