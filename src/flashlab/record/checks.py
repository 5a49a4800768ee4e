"""Records of checks against the oracle: writing and reading.

A comparison is one stage on one problem in one layout, with the verdict, and no timing. Files under data/<gpu>/checks,
random or flash-attention have thousands of them, so that a line has all of a case, and of what passed three digits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from flashlab.core.errors import DamagedRecordError, FlashlabError
from flashlab.core.inputs import NORMAL
from flashlab.core.paths import signature
from flashlab.core.problem import FEATURES, Problem
from flashlab.record.schema import Base, Label, Prose, Status, Verdict

_DIGITS = 3
_ERRORS = ("max_abs", "rms", "lse")


def _verdict(error: Sequence[float | None], limit: Sequence[float | None], failed: str | None = None) -> dict[str, Any]:
    """The fields of a verdict from its errors and limits, in the order of `_ERRORS`."""
    numbers = {f"{name}_error": number for name, number in zip(_ERRORS, error, strict=True)}
    numbers |= {f"{name}_limit": number for name, number in zip(_ERRORS, limit, strict=True)}
    return {"passed": failed is None, "reason": failed or "", **numbers}


def _of_format_3(said: Any) -> Any:
    return _verdict(**said) if isinstance(said, Mapping) and "error" in said else said


RecordedVerdict = Annotated[Verdict | None, BeforeValidator(_of_format_3)]
"""A verdict as a line has it; format 3 has lists of its errors and limits."""


class Fallbacks(NamedTuple):
    """Number of warp tiles in which a call left the fast path: the counters of `AttentionParams.fallbacks`."""

    renormalized: int
    """Tiles whose reference maximum was updated."""
    recomputed: int
    """Tiles whose scores were recomputed."""


@dataclass(frozen=True, kw_only=True)
class EmulatorVerdict:
    """Verdict of the emulator on the inputs of a GPU."""

    status: Status
    """`ok` if the emulator passes the check and agrees with the GPU."""
    reason: Prose = ""
    shape: Label | None = None
    """The emulated problem, which for a large one has fewer heads."""
    verdict: RecordedVerdict = None
    """The emulator's output against the oracle."""
    agreement: RecordedVerdict = None
    """The GPU's output against the emulator's, within the same limits."""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One stage on one problem in one layout."""

    stage: Label
    problem: Problem
    layout: Label = ""
    status: Status
    """`ok` if passed."""
    reason: Prose = ""
    verdict: RecordedVerdict = None
    schedule: str = ""
    """On a CPU: the warp order."""
    findings: tuple[str, ...] = ()
    """On a CPU, with race detection: all findings."""
    fallbacks: Fallbacks | None = None
    """How often the kernel left its fast path; None if it did not finish."""
    emulator: EmulatorVerdict | None = None
    """On a GPU, if the case was also emulated."""


FORMAT = 4
"""File format: a header line, then one line per case, i.e. problem and layout. In format 3, verdicts of what failed are
lists of errors and limits. In the first format, whose files name no format, each line is a complete comparison.
`read_lines` reads all of them."""


class Header(Base):
    """Header of a file, common to all its comparisons."""

    model_config = ConfigDict(extra="ignore")  # a line of the first format holds the comparison too

    seed: int | None = None
    """Seed of the inputs; None in older files."""

    def line(self) -> dict[str, Any]:
        """The first line of a file."""
        return {"format": FORMAT, **self.model_dump(mode="json")}


@dataclass(frozen=True, kw_only=True)
class Compared(CheckRow):
    """A recorded comparison. Errors have three digits."""

    header: Header


_ROW, _COMPARED = TypeAdapter(CheckRow), TypeAdapter(list[Compared])
_FAILED = {"stage", "status", "reason", "verdict", "emulator"}


def case_line(rows: Sequence[CheckRow]) -> dict[str, Any]:
    """Encode the comparisons of one case compactly.

    `ok` has the numbers of each stage that passed: errors, then limits, in the order of `_ERRORS`, with few digits; if
    emulated, also those of the emulator's output, and of the comparison of both. `emulated` is the emulated problem.
    `other` has failures, `inputs` the kind unless normal, `fallbacks` the nonzero counts by stage.
    """
    problem, passed = rows[0].problem, [row for row in rows if _passed(row)]
    fallbacks = {row.stage: row.fallbacks for row in rows if row.fallbacks and any(row.fallbacks)}
    failed = (row for row in rows if not _passed(row))
    other = [_ROW.dump_python(row, mode="json", include=_FAILED, exclude_defaults=True) for row in failed]
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
    """Verdicts of the stage and, if emulated, of the emulator and of the comparison of both."""
    said = (row.verdict, *((row.emulator.verdict, row.emulator.agreement) if row.emulator else ()))
    return [verdict for verdict in said if verdict is not None]


def _numbers(verdict: Verdict) -> list[float | None]:
    """Errors, then limits, rounded to few digits."""
    numbers = (getattr(verdict, f"{name}_{side}") for side in ("error", "limit") for name in _ERRORS)
    return [None if number is None else float(f"{number:.{_DIGITS}g}") for number in numbers]


def read_lines(path: Path) -> tuple[Compared, ...]:
    """Read the comparisons in a file of either format; cached while the file is unchanged.

    Raises:
        DamagedRecordError: a line is invalid.
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
    """Decode a line of `case_line` into fields of `Compared`."""
    what = {"dtype": line["dtype"], "mask": line["mask"], "inputs": line.get("inputs", NORMAL)}
    what |= {name: line[name] for name in FEATURES if name in line}
    comparisons = []
    for stage, numbers in line["ok"].items():
        each = [numbers[at : at + len(_ERRORS)] for at in range(0, len(numbers), len(_ERRORS))]
        verdict, *beside = (_verdict(*pair) for pair in zip(each[::2], each[1::2], strict=True))
        comparisons.append({"stage": stage, "status": "ok", "verdict": verdict})
        if beside:
            said = {"status": "ok", "shape": line.get("emulated")}
            comparisons[-1]["emulator"] = said | dict(zip(("verdict", "agreement"), beside, strict=True))
    comparisons += line.get("other", ())
    of = {"problem": Problem.parse(line["shape"], **what), "layout": line["layout"]}
    counted = line.get("fallbacks", {})
    return [row | of | {"fallbacks": counted.get(row["stage"])} for row in comparisons]
