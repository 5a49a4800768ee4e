"""Comparisons of stages with the oracle on record: how a file of them is written, and read.

A comparison is no timing: one stage on one problem in one layout, and what the oracle said. Thousands of them stand in
a file under data/<gpu>/checks, random or flash-attention, so that a line holds those of a case, and a number has three
digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from flashlab.core.errors import DamagedRecordError, FlashlabError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import signature
from flashlab.core.problem import FEATURES, Problem
from flashlab.record.schema import Base, Label, Prose, Status, Verdict


class Fallbacks(NamedTuple):
    """How often a call left the fast path: the counters behind `AttentionParams.fallbacks`, in tiles of a warp."""

    renormalized: int
    """Whose reference was moved."""
    recomputed: int
    """Whose scores were computed again."""


@dataclass(frozen=True, kw_only=True)
class EmulatorVerdict:
    """What the emulator says of the inputs a GPU was given."""

    status: Status
    """`ok` where the emulator passes the check and agrees with the chip."""
    reason: Prose
    shape: Label | None
    """What was emulated: the problem, or of a large one some of its heads."""
    verdict: Verdict | None
    """The emulator's output against the oracle."""
    agreement: Verdict | None
    """The chip's output against the emulator's, within the same limits."""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One stage on one problem in one layout."""

    stage: Label
    problem: Problem
    layout: Label = ""
    status: Status
    """`ok` is passed."""
    reason: Prose = ""
    verdict: Verdict | None = None
    schedule: str = ""
    """On a CPU: the order in which warps took their turns."""
    findings: tuple[str, ...] = ()
    """On a CPU, where races were looked for: everything found."""
    fallbacks: Fallbacks | None = None
    """How often the kernel left its fast path; None where it did not come to an end."""
    emulator: EmulatorVerdict | None = None
    """On a GPU, where the emulator was asked too."""


FORMAT = 3
"""Of a file of comparisons: a first line with what holds for all of them, then a line for each case, a problem in a
layout. In a file whose first line names no format, the first one's, a line is a comparison and holds everything.
`read_lines` reads both alike."""
_DIGITS = 3
_ERRORS = ("max_abs", "rms", "lse")


class Header(Base):
    """What holds for every comparison of a file."""

    model_config = ConfigDict(extra="ignore")  # a line of the first format holds the comparison too

    def line(self) -> dict[str, Any]:
        """The first line of a file."""
        return {"format": FORMAT, **self.model_dump(mode="json")}


@dataclass(frozen=True, kw_only=True)
class Compared(CheckRow):
    """A comparison on record. Errors have few digits there."""

    header: Header


_COMPARED = TypeAdapter(list[Compared])


def case_line(rows: Sequence[CheckRow]) -> dict[str, Any]:
    """The comparisons of one case, short.

    `ok` has the numbers of each stage that passed: errors, then limits, in the order of `_ERRORS`, with few digits;
    where the emulator was asked, the same of its output, and of the two compared. `emulated` is what it ran. `other`
    has what did not pass. `inputs` is the kind where it is not normal, `fallbacks` the counts of stages that had any.
    """
    problem, passed = rows[0].problem, [row for row in rows if _passed(row)]
    fallbacks = {row.stage: row.fallbacks for row in rows if row.fallbacks and any(row.fallbacks)}
    other = [_compact(row, ("stage", "status", "reason", "verdict", "emulator")) for row in rows if not _passed(row)]
    emulated = [row.emulator.shape for row in passed if row.emulator is not None]
    return {
        **{name: getattr(problem, name) for name in ("shape", "dtype", "mask")},
        **({} if problem.inputs == NORMAL else {"inputs": problem.inputs}),
        **{name: getattr(problem, name) for name in problem.features},
        "layout": rows[0].layout,
        "ok": {row.stage: [number for verdict in _verdicts(row) for number in _numbers(verdict)] for row in passed},
        **({"fallbacks": fallbacks} if fallbacks else {}),
        **({"other": other} if other else {}),
        **({"emulated": emulated[0]} if emulated else {}),
    }


def _passed(row: CheckRow) -> bool:
    return row.status == "ok" and row.verdict is not None and not row.reason


def _verdicts(row: CheckRow) -> list[Verdict]:
    """Of the stage and, where the emulator was asked, of that and of the two compared."""
    said = (row.verdict, *((row.emulator.verdict, row.emulator.agreement) if row.emulator else ()))
    return [verdict for verdict in said if verdict is not None]


def _numbers(verdict: Verdict) -> list[float | None]:
    """Errors, then limits, each with few digits."""
    numbers = (getattr(verdict, f"{name}_{side}") for side in ("error", "limit") for name in _ERRORS)
    return [None if number is None else float(f"{number:.{_DIGITS}g}") for number in numbers]


def _compact(said: CheckRow | EmulatorVerdict, names: Sequence[str]) -> dict[str, Any]:
    """Those fields of it that say something, verdicts short."""
    line: dict[str, Any] = {}
    for name in names:
        value = getattr(said, name)
        if isinstance(value, Verdict):
            numbers, failed = _numbers(value), {} if value.passed else {"failed": value.reason}
            line[name] = {**failed, "error": numbers[: len(_ERRORS)], "limit": numbers[len(_ERRORS) :]}
        elif isinstance(value, EmulatorVerdict):
            line[name] = {"shape": None, **_compact(value, tuple(vars(value)))}
        elif value:
            line[name] = value
    return line


def _verdict(error: Sequence[float | None], limit: Sequence[float | None], failed: str | None = None) -> dict[str, Any]:
    """The fields of a verdict that was made short."""
    numbers = {f"{name}_error": number for name, number in zip(_ERRORS, error, strict=True)}
    numbers |= {f"{name}_limit": number for name, number in zip(_ERRORS, limit, strict=True)}
    return {"passed": failed is None, "reason": failed or "", **numbers}


def _expanded(said: Mapping[str, Any], *verdicts: str) -> dict[str, Any]:
    """What `_compact` made short, with every field."""
    return {"reason": "", **said} | {name: said.get(name) and _verdict(**said[name]) for name in verdicts}


def read_lines(path: Path) -> tuple[Compared, ...]:
    """The comparisons in a file of either format; read once while its content stays.

    Raises:
        DamagedRecordError: a line that is none.
    """
    return _read(path, signature(path))


@lru_cache(maxsize=64)
def _read(path: Path, _: tuple[int, ...]) -> tuple[Compared, ...]:
    comparisons: list[Compared] = []
    header: Header | None = None
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if "format" in line:
                header = Header.model_validate(line)
            else:
                shared = {"header": header or Header.model_validate(line)}
                rows = _compared(line) if header else [line]
                comparisons += _COMPARED.validate_python([row | shared for row in rows])
        except ValidationError as error:
            what = f"{'.'.join(map(str, error.errors()[0]['loc']))}: {error.errors()[0]['msg']}"
            raise DamagedRecordError(f"{path}:{number}: wanted a comparison, got: {what}") from error
        except (ValueError, KeyError, TypeError, AttributeError, FlashlabError) as error:
            raise DamagedRecordError(f"{path}:{number}: wanted a comparison, got: {error!r}") from error
    return tuple(comparisons)


def _compared(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The comparisons of a line of `case_line`, as `Compared` takes them."""
    what = {"dtype": line["dtype"], "mask": line["mask"], "inputs": line.get("inputs", NORMAL)}
    what |= {name: line[name] for name in FEATURES if name in line}
    comparisons = []
    for stage, numbers in line["ok"].items():
        each = [numbers[at : at + len(_ERRORS)] for at in range(0, len(numbers), len(_ERRORS))]
        verdict, *beside = (_verdict(*pair) for pair in zip(each[::2], each[1::2], strict=True))
        comparisons.append({"stage": stage, "status": "ok", "verdict": verdict})
        if beside:
            said = {"status": "ok", "reason": "", "shape": line.get("emulated")}
            comparisons[-1]["emulator"] = said | dict(zip(("verdict", "agreement"), beside, strict=True))
    for row in line.get("other", ()):
        emulator = {"emulator": _expanded(row["emulator"], "verdict", "agreement")} if "emulator" in row else {}
        comparisons.append(_expanded(row, "verdict") | emulator)
    of = {"problem": Problem.parse(line["shape"], **what), "layout": line["layout"]}
    counted = line.get("fallbacks", {})
    return [row | of | {"fallbacks": counted.get(row["stage"])} for row in comparisons]
