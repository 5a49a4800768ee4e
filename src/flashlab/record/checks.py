"""Comparisons of stages with the oracle on record: how a file of them is written, and read.

A comparison is no timing: one stage on one problem in one layout, and what the oracle said. Thousands of them stand in
a file under data/<gpu>/checks, random or flash-attention, so that a line holds those of a case, and a number has three
digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError

from flashlab.core.errors import DamagedRecordError, FlashlabError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import signature
from flashlab.core.problem import FEATURES, Problem
from flashlab.record.schema import Gpu, Label, Moment, Prose, RunId, Source, Status, Verdict


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
_SIDES = ("error", "limit")


class Header(BaseModel):
    """What holds for every comparison of a file."""

    run: RunId
    time: Moment
    gpu: Gpu
    source: Source
    software: dict[Label, Label]

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
    problem = rows[0].problem
    line: dict[str, Any] = {
        "shape": problem.shape,
        "dtype": problem.dtype,
        "mask": problem.mask,
        **({} if problem.inputs == NORMAL else {"inputs": problem.inputs}),
        **{name: getattr(problem, name) for name in problem.features},
        "layout": rows[0].layout,
        "ok": {row.stage: _numbers(row) for row in rows if _passed(row)},
    }
    fallbacks = {row.stage: row.fallbacks for row in rows if row.fallbacks and any(row.fallbacks)}
    if fallbacks:
        line["fallbacks"] = fallbacks
    other = [_compact(row, ("stage", "status", "reason", "verdict", "emulator")) for row in rows if not _passed(row)]
    if other:
        line["other"] = other
    emulated = [row.emulator.shape for row in rows if row.emulator is not None and _passed(row)]
    if emulated:
        line["emulated"] = emulated[0]
    return line


def _passed(row: CheckRow) -> bool:
    return row.status == "ok" and row.verdict is not None and not row.reason


def _numbers(row: CheckRow) -> list[float | None]:
    verdicts = [row.verdict, *((row.emulator.verdict, row.emulator.agreement) if row.emulator else ())]
    shorts = [_short(verdict) for verdict in verdicts if verdict is not None]
    return [number for short in shorts for side in _SIDES for number in short[side]]


def _compact(said: CheckRow | EmulatorVerdict, names: Sequence[str]) -> dict[str, Any]:
    """Those fields of it that say something, verdicts short."""
    line: dict[str, Any] = {}
    for name in names:
        value = getattr(said, name)
        if isinstance(value, Verdict):
            line[name] = _short(value)
        elif isinstance(value, EmulatorVerdict):
            line[name] = {"shape": None, **_compact(value, tuple(vars(value)))}
        elif value:
            line[name] = value
    return line


def _short(verdict: Verdict) -> dict[str, Any]:
    def digits(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.{_DIGITS}g}")

    short: dict[str, Any] = {side: [digits(getattr(verdict, f"{name}_{side}")) for name in _ERRORS] for side in _SIDES}
    return short if verdict.passed else {"failed": verdict.reason, **short}


def _expanded(line: Mapping[str, Any]) -> dict[str, Any]:
    """What `_compact` made short, with every field."""
    full = {"reason": "", **line}
    for name in ("verdict", *(("agreement",) if "shape" in line else ())):
        short = full.setdefault(name, None)
        if short is not None:
            numbers = ((f"{of}_{side}", n) for side in _SIDES for of, n in zip(_ERRORS, short[side], strict=True))
            full[name] = {"passed": "failed" not in short, "reason": short.get("failed", ""), **dict(numbers)}
    return full


def read_lines(path: Path) -> tuple[Compared, ...]:
    """The comparisons in a file of either format; read once while its content stays.

    Raises:
        DamagedRecordError: a line that is none.
    """
    return _read(path, signature(path))


@lru_cache(maxsize=64)
def _read(path: Path, _: tuple[int, ...]) -> tuple[Compared, ...]:
    found: list[Compared] = []
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
                found += _COMPARED.validate_python([row | shared for row in rows])
        except ValidationError as error:
            what = f"{'.'.join(map(str, error.errors()[0]['loc']))}: {error.errors()[0]['msg']}"
            raise DamagedRecordError(f"{path}:{number}: wanted a comparison, got: {what}") from error
        except (ValueError, KeyError, TypeError, AttributeError, FlashlabError) as error:
            raise DamagedRecordError(f"{path}:{number}: wanted a comparison, got: {error!r}") from error
    return tuple(found)


def _compared(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The comparisons of a line of `case_line`, as `Compared` takes them."""
    what = {"dtype": line["dtype"], "mask": line["mask"], "inputs": line.get("inputs", NORMAL)}
    what |= {name: line[name] for name in FEATURES if name in line}
    of = {"problem": Problem.parse(line["shape"], **what), "layout": line["layout"]}
    counted = line.get("fallbacks", {})
    found = []
    for row in (*_passed_lines(line), *line.get("other", ())):
        full = _expanded({name: row[name] for name in ("stage", "status", "reason", "verdict") if name in row}) | of
        full |= {"emulator": _expanded(row["emulator"])} if "emulator" in row else {}
        found.append(full | ({"fallbacks": counted[row["stage"]]} if row["stage"] in counted else {}))
    return found


def _passed_lines(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Those that passed, as `_compact` has the others."""
    per_side, per_verdict = len(_ERRORS), len(_ERRORS) * len(_SIDES)
    for stage, numbers in line["ok"].items():
        verdicts = [
            {side: numbers[at + i * per_side : at + (i + 1) * per_side] for i, side in enumerate(_SIDES)}
            for at in range(0, len(numbers), per_verdict)
        ]
        row: dict[str, Any] = {"stage": stage, "status": "ok", "verdict": verdicts[0]}
        if len(verdicts) > 1:
            beside = {"verdict": verdicts[1], "agreement": verdicts[2]}
            row["emulator"] = {"status": "ok", "shape": line.get("emulated"), **beside}
        yield row
