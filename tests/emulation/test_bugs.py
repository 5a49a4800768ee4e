"""The corpus of seeded bugs in tests/wrong/emulation: each kernel is silent as it stands, and caught with -DBUG.

A file's first lines say what must catch it; see README.md there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from ahead import ahead, chosen
from emulation import kernel_file
from shared import NO_COMPILER

from flashlab.core.paths import ROOT
from flashlab.run import emulator
from flashlab.run.emulator import Emulated, Finding, Place, Report

CORPUS = sorted((ROOT / "tests/wrong/emulation").glob("*.cu"))
SCHEDULES = ("ascending", "descending", "seeded:7")
KINDS = {
    "race", "uninitialised", "out of bounds", "input modified", "in flight", "missing fence", "divergent barrier",
    "deadlock", "misaligned", "misuse", "wrong result",
}  # fmt: skip
MECHANISMS = 24
"""As many different bugs at least."""
FIRST = {kernel_file.read(path).facts["mechanism"]: path for path in reversed(CORPUS)}
"""Of each mechanism the first file, which `make test` runs."""
every_bug = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path in FIRST.values() else pytest.mark.exhaustive)
        for path in CORPUS
    ],
)


@pytest.fixture(scope="module")
def builds(request: pytest.FixtureRequest) -> Iterator[Mapping[tuple[str, bool], Future[Emulated]]]:
    """Both variants of every file, by name and whether it is the wrong one."""
    if NO_COMPILER:
        pytest.skip(NO_COMPILER)

    def build(path: Path, wrong: bool) -> Emulated:
        hooks = not wrong or kernel_file.read(path).facts["needs"] == "hooks"
        return emulator.build_file(path, entry=path.stem, defines={"BUG": 1} if wrong else {}, hooks=hooks)

    tests = {False: "test_the_correct_kernel_is_silent", True: "test_the_wrong_kernel_is_caught"}
    both = [(one["path"], wrong) for wrong, test in tests.items() for one in chosen(request, test)]
    with ahead({(path.stem, wrong): partial(build, path, wrong) for path, wrong in both}) as found:
        yield found


def test_the_corpus_is_large_and_well_described() -> None:
    assert len(CORPUS) >= MECHANISMS
    for path in CORPUS:
        file = kernel_file.read(path)
        assert {"bug", "mechanism", "caught by", "needs", "launch"} <= file.facts.keys(), path
        assert set(file.facts["caught by"].split("|")) <= KINDS, path
        assert file.facts["needs"] in ("hooks", "any"), path
        assert set(file.outputs()) == set(file.expected()), path
        assert "#if BUG" in path.read_text() or "#if !BUG" in path.read_text(), path


@every_bug
def test_the_correct_kernel_is_silent(path: Path, builds: Mapping[tuple[str, bool], Future[Emulated]]) -> None:
    file = kernel_file.read(path)
    wanted = file.expected()
    emulated = builds[path.stem, False].result()
    for schedule in SCHEDULES:
        report, arrays = kernel_file.emulate(file, emulated, schedule)
        assert report.status == "ok", f"{schedule}: {report.message}"
        assert not report.findings, f"{schedule}:\n" + "\n".join(str(finding) for finding in report.findings)
        assert not kernel_file.difference(file, arrays, wanted), schedule


@every_bug
def test_the_wrong_kernel_is_caught(path: Path, builds: Mapping[tuple[str, bool], Future[Emulated]]) -> None:
    file = kernel_file.read(path)
    wanted = set(file.facts["caught by"].split("|"))
    emulated = builds[path.stem, True].result()
    for schedule in SCHEDULES:
        report, arrays = kernel_file.emulate(file, emulated, schedule)
        caught = {finding.kind for finding in report.findings if _in_the_right_place(file, finding)}
        if report.status != "ok" and _at_a_mark(file, report.where):
            caught.add(report.status)
        if report.status == "ok" and kernel_file.difference(file, arrays, file.expected()):
            caught.add("wrong result")
        assert caught & wanted, f"{schedule}: wanted {' or '.join(sorted(wanted))}, got\n{_reasons(report, caught)}"
        assert report.status != "deadlock" or report.waiting, "a deadlock says who waits"


def _in_the_right_place(file: kernel_file.KernelFile, finding: Finding) -> bool:
    """Whether the lines that a finding names are those that the file marks."""
    lines = {_line(file, actor.place) for actor in (finding.first, finding.second) if actor}
    if not file.marks:
        return True
    if "" in file.marks:
        return bool(lines) and lines <= set(file.marks[""])
    return any({first, second} == lines for first in file.marks["first"] for second in file.marks["second"])


def _at_a_mark(file: kernel_file.KernelFile, place: Place | None) -> bool:
    return place is None or not file.marks or any(_line(file, place) in lines for lines in file.marks.values())


def _line(file: kernel_file.KernelFile, place: Place) -> int:
    """The line of the file itself that a place was called from."""
    return next((frame.line for frame in place.frames if frame.file == file.path), 0)


def _reasons(report: Report, caught: set[str]) -> str:
    lines = [f"{report.status} {report.message} {report.where or ''}", *map(str, report.findings)]
    return "\n".join(lines) + f"\nof which in the right place: {', '.join(sorted(caught)) or 'nothing'}"
