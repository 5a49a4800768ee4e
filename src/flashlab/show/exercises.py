"""Exercises: fill in a blank in a line of a real kernel, and run the kernel with the answer.

show(ask("mask"))                       the line in its context
show(str(check("mask", answer)))        the answer in an edited copy, run on this machine's CPU: right or wrong, and why

exercises.toml lists them. The blank is cut from the current kernel file, whose text is the solution, so neither can
drift from the kernel: `blank` raises if the line does not occur exactly once.
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
"""Lines of context before and after a blank."""
_TIMEOUT_S = 10.0
_SHOWN_FINDINGS = 2


class Exercise(Facts):
    """One line of a stage's file to fill in."""

    stage: str
    line: str
    """Part of the line, with `BLANK` in place of the answer; matches exactly one line of the file."""
    shape: str
    """The problem on which answers run."""
    mask: Mask = "full"
    params: Mapping[str, int] = {}
    """Tunables other than the defaults."""
    conflicts: float | None = None
    """Maximum ratio of an answer's shared-memory wavefronts to the ideal; None for no limit."""
    wrong: tuple[str, ...]
    """Answers that must not pass."""

    @property
    def blank(self) -> re.Match[str]:
        """The match of the line in the stage's file; its group is the kernel's answer.

        Raises:
            ParameterError: the line does not occur exactly once.
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
    """The line with its blank and context as Markdown, without text that reveals the answer.

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
    """A tested answer."""

    exercise: Exercise
    trial: Trial | None = None
    """None if nothing is filled in."""

    @property
    def conflicts(self) -> float | None:
        """Ratio of its shared-memory wavefronts to the ideal; None if not limited, or if it made no access."""
        if self.exercise.conflicts is None or not self.trial or not self.trial.report:
            return None
        counters = [counter for counter in self.trial.report.counters if counter.space == "shared"]
        ideal = sum(counter.ideal_wavefronts for counter in counters)
        return sum(counter.wavefronts for counter in counters) / ideal if ideal else None

    @property
    def passed(self) -> bool:
        """Whether there is an answer and it is right."""
        costly = self.conflicts is not None and self.conflicts > (self.exercise.conflicts or 0.0)
        return self.trial is not None and self.trial.passed and not costly

    def __str__(self) -> str:
        if self.trial is None:
            return f"*Nothing is filled in yet: put C++ in place of `{BLANK}` and run the cell again.*"
        if self.passed:
            own = f"The kernel has `{self.exercise.blank[1]}`"
            return f"**Right.** {own} ([{self.exercise.stage}](../kernels/{self.exercise.stage}.cu))."
        if self.trial.passed:
            return (
                f"**Not yet.** The result is right, but shared memory takes {number(self.conflicts)} × the ideal "
                "number of wavefronts: there are bank conflicts."
            )
        parts = [
            "**Wrong.** The kernel with your answer:",
            explained(self.trial),
            said(self.trial) if self.trial.error else compare({"with your answer": self.trial}),
        ]
        report = self.trial.report
        if report and report.findings:
            parts.append(findings(replace(report, findings=report.findings[:_SHOWN_FINDINGS])))
        return "\n\n".join(filter(None, parts))


def check(name: str, answer: str) -> Checked:
    """Run the exercise's kernel with `answer` in the blank on the CPU, with race detection.

    Raises:
        ParameterError: no such exercise, its line is no longer in the kernel, or the answer is not text.
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
