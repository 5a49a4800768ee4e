"""Exercises: a line of a real kernel with a blank, and what becomes of the kernel with an answer in it.

show(ask("mask"))                       the line among its neighbours
show(str(check("mask", answer)))        the answer in an edited copy, run on this machine's CPU: right or wrong, and why

exercises.toml lists them. The blank is cut out of the kernel's file as it is now, and the kernel's own text is the
solution, so neither can drift from the kernel: where the line is no longer there once, `blank` refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flashlab.core.errors import ParameterError, refuse_unknown
from flashlab.core.facts import Facts
from flashlab.core.paths import table
from flashlab.core.problem import Mask
from flashlab.kernels import registry
from flashlab.show.notebook import progress_bar
from flashlab.show.tables import number
from flashlab.show.trial import Trial, attempt, compare, edited, explained, findings, said

BLANK = "____"
_BEFORE, _AFTER = 4, 3
"""Lines that stand around a blank."""
_TIMEOUT_S = 10.0
_SHOWN_FINDINGS = 2


class Exercise(Facts):
    """One line of a stage's file to fill in."""

    stage: str
    line: str
    """A part of the line, with `BLANK` where the answer goes; of the file's lines, exactly one fits."""
    shape: str
    """The problem that answers run on."""
    mask: Mask = "full"
    params: Mapping[str, int] = {}
    """Tunables that differ from their defaults."""
    conflicts: float | None = None
    """How many times the ideal's wavefronts of shared memory an answer may cost; None where they do not count."""
    wrong: tuple[str, ...]
    """Answers that must not pass."""

    @property
    def blank(self) -> re.Match[str]:
        """Where the line is in the stage's file; its group is the kernel's own answer.

        Raises:
            ParameterError: the kernel has changed, and the line is not there once.
        """
        source = registry.get(self.stage).source
        before, after = map(re.escape, self.line.split(BLANK))
        matches = list(re.finditer(rf"{before}(\S.*?){after}", source.read_text(encoding="utf-8")))
        if len(matches) != 1:
            raise ParameterError(f"exercise: wanted one line of {source.name} like {self.line!r}, found {len(matches)}")
        return matches[0]


EXERCISES: Mapping[str, Exercise] = {name: Exercise.model_validate(entry) for name, entry in table(__file__).items()}
"""By name, in the order of the notebook."""


def get(name: str) -> Exercise:
    """The exercise of that name.

    Raises:
        ParameterError: there is none.
    """
    refuse_unknown("exercise", EXERCISES, name)
    return EXERCISES[name]


def ask(name: str) -> str:
    """The line with its blank, among its neighbours, as Markdown; what of these would tell the answer is left out.

    Raises:
        ParameterError: no such exercise, or its line is no longer in the kernel.
    """
    exercise = get(name)
    blank = exercise.blank
    at = blank.string.count("\n", 0, blank.start())
    lines = blank.string.replace(blank[1], "…").splitlines()
    lines[at] = re.sub(r"\s+//.*", "", blank.string.splitlines()[at].replace(blank[1], BLANK))
    around = lines[max(0, at - _BEFORE) : at + 1 + _AFTER]
    indent = min(len(line) - len(line.lstrip()) for line in around if line and not line.startswith("#"))
    shown = "\n".join(line if line.startswith("#") else line[indent:] for line in around)
    return f"`kernels/{registry.get(exercise.stage).source.name}`, line {at + 1}:\n\n```cpp\n{shown}\n```\n"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """An answer, tried."""

    exercise: Exercise
    trial: Trial | None = None
    """None where nothing is filled in."""

    @property
    def conflicts(self) -> float | None:
        """How many times the ideal's wavefronts of shared memory it took; None where that does not count."""
        if self.exercise.conflicts is None or not self.trial or not self.trial.report:
            return None
        counters = [counter for counter in self.trial.report.counters if counter.space == "shared"]
        return sum(counter.wavefronts for counter in counters) / sum(counter.ideal_wavefronts for counter in counters)

    @property
    def passed(self) -> bool:
        """Whether the answer is right; not where there is none."""
        costly = self.conflicts is not None and self.conflicts > (self.exercise.conflicts or 0.0)
        return self.trial is not None and self.trial.passed and not costly

    def __str__(self) -> str:
        if self.trial is None:
            return f"*Nothing is filled in yet: put C++ in place of `{BLANK}` and run the cell again.*"
        if self.passed:
            own = f"The kernel has `{self.exercise.blank[1]}` there"
            return f"**Right.** {own} ([{self.exercise.stage}](../kernels/{self.exercise.stage}.cu))."
        if self.trial.passed:
            return (
                f"**Not yet.** The result is right, but shared memory takes {number(self.conflicts)} × the wavefronts "
                "that the requests need: lanes meet in the same banks."
            )
        parts = [
            "**Wrong.** What the kernel did with it:",
            explained(self.trial),
            said(self.trial) if self.trial.error else compare({"with your answer": self.trial}),
        ]
        report = self.trial.report
        if report and report.findings:
            parts.append(findings(replace(report, findings=report.findings[:_SHOWN_FINDINGS])))
        return "\n\n".join(filter(None, parts))


def check(name: str, answer: str) -> Checked:
    """Run the exercise's kernel with `answer` in the blank on the CPU, looking for races.

    Raises:
        ParameterError: no such exercise, its line is no longer in the kernel, or the answer is no text.
        OutputError: the edited copy or the compile cache cannot be written.
    """
    exercise = get(name)
    blank = exercise.blank
    if not isinstance(answer, str):
        raise ParameterError(f'answer: wanted C++ as text, got {answer!r}. `check("{name}", "{answer}")` works.')
    if answer.strip() in ("", BLANK):
        return Checked(exercise=exercise)
    start = blank.start()
    new = blank[0][: blank.start(1) - start] + answer + blank[0][blank.end(1) - start :]
    with progress_bar() as progress:
        progress(0, 1, "compile and run")
        trial = attempt(
            exercise.stage,
            edited(exercise.stage, blank[0], new),
            shape=exercise.shape,
            mask=exercise.mask,
            params=exercise.params,
            timeout_s=_TIMEOUT_S,
        )
    return Checked(exercise=exercise, trial=trial)
