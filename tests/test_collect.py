"""What another machine recorded is taken over whole and sound, each run once, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import synthetic

from flashlab.core.errors import DamagedRecordError, NoDataError, ParameterError
from flashlab.core.problem import Problem, suite
from flashlab.query import compare, statistics
from flashlab.record import store
from flashlab.record.collect import collect
from flashlab.record.schema import Machine, Measurement, to_line
from flashlab.show import charts

SLUG = "nvidia-h200"
OTHER = "20260105T000000Z-0123abc-4f2a91"
MIXED = "20260106T000000Z-7654321-4f2a91"
DIRTY = "20260107T000000Z-0123abc-dirty-4f2a91"
PROBLEMS = suite("smoke")


def moved(row: Measurement, run: str, *, factor: float = 1.0, start: str = "", **changes: object) -> Measurement:
    """A row as another run would have it: every sample a little different."""
    samples = tuple(
        one.model_copy(
            update={"time_us": tuple(factor * t for t in one.time_us), "cycles_per_score": None, "sm_clock_mhz": ()}
        )
        for one in row.samples
    )
    when = {"boot": start or "01234567", "at": "2026-01-05T00:00:00+00:00"}
    return Measurement.model_validate(row.model_dump() | {"run": run, "samples": samples, "start": when} | changes)


def elsewhere(folder: Path, run: str = OTHER, **changes: object) -> Path:
    """The data folder of another machine, with one run more or less alike."""
    path = folder / SLUG / "runs" / f"{run}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [synthetic.measurement(name, PROBLEMS[0]) for name in ("00_naive", "sdpa")]
    for row in rows:
        store.append(path, moved(row, run, factor=1.01, **changes))
    if not (folder / SLUG / "machine.json").exists():
        store.write_machine(Machine(gpu=synthetic.gpu(SLUG), host={}), folder)
    store.write_checksums(SLUG, folder)
    return folder


def test_runs_are_taken_over_once(tmp_path: Path) -> None:
    data, other = tmp_path / "data", elsewhere(tmp_path / "other")
    synthetic.write_synthetic(data, problems=PROBLEMS)
    before = {path: path.read_bytes() for path in data.rglob("*.jsonl")}
    (found,) = collect([other], data)
    assert (found.gpu, found.taken, found.known) == (SLUG, (f"runs/{OTHER}.jsonl",), ())
    assert store.verify(SLUG, data) == ()
    assert {path: path.read_bytes() for path in before} == before
    (again,) = collect([other / SLUG], data)
    assert (again.taken, again.known) == ((), (f"runs/{OTHER}.jsonl",))
    # What was appended to since, and a GPU that is new here.
    elsewhere(other)
    lines = (other / SLUG / "runs" / f"{OTHER}.jsonl").read_bytes().splitlines(keepends=True)
    (other / SLUG / "runs" / f"{OTHER}.jsonl").write_bytes(b"".join(lines[:3]))
    (other / SLUG / "CHECKSUMS").unlink()
    store.write_checksums(SLUG, other)
    with pytest.raises(DamagedRecordError, match="the samples of"):
        collect([other], data)  # a row that stands there twice
    new = tmp_path / "new"
    assert [one.taken for one in collect([elsewhere(tmp_path / "third")], new)] == [(f"runs/{OTHER}.jsonl",)]
    assert store.verify(SLUG, new) == ()
    with pytest.raises(NoDataError, match=r"wanted runs of commit fedcba9 in .*, found none"):
        collect([tmp_path / "third"], new, commit="fedcba9")


@pytest.mark.parametrize("longer_first", [True, False])
def test_of_two_copies_of_a_run_the_longer_is_taken(longer_first: bool, tmp_path: Path) -> None:
    longer = elsewhere(tmp_path / "longer")
    shutil.copytree(longer, shorter := tmp_path / "shorter")
    path = shorter / SLUG / "runs" / f"{OTHER}.jsonl"
    path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\n")
    (shorter / SLUG / "CHECKSUMS").unlink()
    store.write_checksums(SLUG, shorter)
    folders = [longer, shorter] if longer_first else [shorter, longer]
    collect(folders, tmp_path / "data")
    runs = [folder / SLUG / "runs" / f"{OTHER}.jsonl" for folder in (tmp_path / "data", longer)]
    assert runs[0].read_bytes() == runs[1].read_bytes()
    shift(path)
    with pytest.raises(DamagedRecordError, match="one of them was changed"):
        collect(folders, tmp_path / "new")


def test_a_prefix_of_a_commit_does_not_select_runs_by_their_random_suffix(tmp_path: Path) -> None:
    other = elsewhere(tmp_path / "other")
    with pytest.raises(NoDataError, match="wanted runs of commit 4f2a"):
        collect([other], tmp_path / "data", commit="4f2a")
    assert collect([other], tmp_path / "data", commit="0123")[0].taken == (f"runs/{OTHER}.jsonl",)


def test_runs_that_came_without_their_checksums_are_taken_once_repaired(tmp_path: Path) -> None:
    other = elsewhere(tmp_path / "other")
    for name in ("CHECKSUMS", "machine.json"):
        (other / SLUG / name).unlink()
    with pytest.raises(DamagedRecordError, match=r"not listed in CHECKSUMS\n") as refusal:
        collect([other], tmp_path / "data")
    assert f"`flashlab repair --data {other}`" in str(refusal.value)
    store.repair(SLUG, other)
    assert [one.taken for one in collect([other], tmp_path / "data")] == [(f"runs/{OTHER}.jsonl",)]


def test_folders_of_two_commits_are_not_taken_over_together(tmp_path: Path) -> None:
    source = {"commit": "7654321", "dirty": False}
    folders = [elsewhere(tmp_path / "other"), elsewhere(tmp_path / "third", MIXED, source=source)]
    shift(folders[1] / SLUG / "runs" / f"{MIXED}.jsonl")
    words = r"(?s)other, .*third: wanted new runs of one commit.* 0123abc, 7654321"
    with pytest.raises(DamagedRecordError, match=words):
        collect(folders, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    collect(folders, tmp_path / "data", commit="7654321")
    assert [path.stem for path in store.files(tmp_path / "data" / SLUG / "runs")] == [MIXED]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("tampered", "wanted sound records, found:\n.*differs from CHECKSUMS"),
        ("mixed", "new runs of one commit.*\n  0123abc, 7654321"),
        ("dirty", f"runs of a commit as it is, found:\n  {DIRTY}"),
        ("other lines", "one of them was changed"),
        ("copied", r"wanted sound records with the new ones, found:\n.*the samples of runs/.* again"),
        ("empty", "which has no records"),
        ("missing", "which does not exist"),
    ],
)
def test_what_cannot_be_trusted_is_refused_and_nothing_is_taken(harm: str, words: str, tmp_path: Path) -> None:
    data, other = tmp_path / "data", elsewhere(tmp_path / "other", DIRTY if harm == "dirty" else OTHER)
    path = other / SLUG / "runs" / f"{OTHER}.jsonl"
    if harm == "tampered":
        path.write_text(path.read_text("utf-8").replace('"ok"', '"error"', 1), encoding="utf-8")
    elif harm == "mixed":
        elsewhere(other, MIXED, source={"commit": "7654321", "dirty": False}, start="89abcdef")
        shift(other / SLUG / "runs" / f"{MIXED}.jsonl")
    elif harm == "other lines":
        elsewhere(data)
        shift(data / SLUG / "runs" / f"{OTHER}.jsonl")
    elif harm == "copied":
        elsewhere(data, MIXED, source={"commit": "7654321", "dirty": False})
    elif harm == "missing":
        other = tmp_path / "misspelled"
    elif harm == "empty":
        shutil.rmtree(other / SLUG)
    before = sorted(data.rglob("*"))
    with pytest.raises((DamagedRecordError, NoDataError), match=f"(?s){words}"):
        collect([other], data)
    assert sorted(data.rglob("*")) == before
    if harm == "mixed":
        assert [one.taken for one in collect([other], data, commit="7654321")] == [(f"runs/{MIXED}.jsonl",)]


def shift(path: Path) -> None:
    """Other samples in a file, sealed anew."""
    rows = [Measurement.model_validate_json(line) for line in path.read_bytes().splitlines()]
    given = [moved(row, row.run, factor=1.001, source=row.source) for row in rows]
    path.write_text("".join(map(to_line, given)), encoding="utf-8")
    (path.parents[1] / "CHECKSUMS").unlink()
    store.write_checksums(SLUG, path.parents[2])


# --- What changed -----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_drivers(tmp_path: Path) -> Path:
    """One code under two drivers, two starts each, half a percent apart; a stage is a tenth slower under the second."""
    folder = tmp_path / SLUG / "runs"
    folder.mkdir(parents=True)
    days = iter(range(1, 9))
    for driver, slower in (("580.1", 1.0), ("590.2", 1.1)):
        for start, factor in (("0", 1.0), ("1", 1.005)):
            run = f"202601{next(days):02}T000000Z-0123abc-4f2a91"
            for name in ("00_naive", "sdpa"):
                row = synthetic.measurement(name, PROBLEMS[0])
                gpu = row.gpu.model_copy(update={"driver": driver})
                times = factor * (slower if name == "00_naive" else 1.0)
                boot = f"{driver[:3]}{start}0000"
                store.append(folder / f"{run}.jsonl", moved(row, run, factor=times, start=boot, gpu=gpu))
    return tmp_path


def test_a_change_is_told_from_the_noise_between_starts(two_drivers: Path) -> None:
    found = compare.compare("580.1", "590.2", two_drivers)
    assert found.noise_percent == pytest.approx(0.5, abs=0.01)
    told = {one.name: one for one in found.changes}
    assert {name: (one.verdict, one.starts) for name, one in told.items()} == {
        "00_naive": ("slower", (2, 2)),
        "sdpa": ("same", (2, 2)),
    }
    slower = told["00_naive"]
    assert slower.ratio == pytest.approx(1 / 1.1)
    assert slower.low < slower.ratio < slower.high < 1
    assert found.differs["driver"] == ("580.1", "590.2")
    assert "GPU" not in found.differs
    chart = charts.changes(found)
    assert "590.2" in chart.svg["wide"]
    assert "B1 H2 S130 D64 full float16, 00_naive: 0.9091" in chart.alt
    back = compare.compare("590.2", "580.1", two_drivers)
    assert {one.name: one.verdict for one in back.changes} == {"00_naive": "faster", "sdpa": "same"}


def test_sides_are_runs_commits_drivers_or_gpus(two_drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = sorted(path.stem for path in (two_drivers / SLUG / "runs").iterdir())
    alone = compare.compare(runs[0], runs[2], two_drivers)
    assert {one.starts for one in alone.changes} == {(1, 1)}
    assert alone.noise_percent == pytest.approx(0.5, abs=0.01)  # what other starts of either driver say
    found = compare.compare(f"{SLUG}+580.1", "0123abc+590.2", two_drivers).changes
    assert found
    assert compare.compare("NVIDIA H200+580.1", "0123abc+590.2", two_drivers).changes == found
    assert compare.compare(runs[0], runs[2], two_drivers, mask="full").changes == alone.changes
    monkeypatch.setattr(statistics, "over_starts", lambda *_: pytest.fail("no interval is drawn that nobody asked for"))
    with pytest.raises(NoDataError, match="of mask causal, found none"):
        compare.compare(runs[0], runs[2], two_drivers, mask="causal")
    with pytest.raises(NoDataError, match="GPUs with data: nvidia-h200"):
        compare.compare("580.1", "abacus", two_drivers)
    for nothing in ("", f"{SLUG}+"):  # every run begins with it
        with pytest.raises(ParameterError, match=f"got '{nothing}'".replace("+", r"\+")):
            compare.compare(nothing, "590.2", two_drivers)
    document = json.loads(json.dumps(alone.differs))
    assert "driver" in document


def test_a_problem_that_one_side_lacks_is_left_out(two_drivers: Path) -> None:
    run = "20260201T000000Z-7654321-4f2a91"
    row = synthetic.measurement("sdpa", Problem.parse("1x2x64x64"))
    source = {"commit": "7654321", "dirty": False}
    store.append(two_drivers / SLUG / "runs" / f"{run}.jsonl", moved(row, run, source=source))
    with pytest.raises(NoDataError, match="both timed"):
        compare.compare("590.2+0123abc", run, two_drivers)


def test_without_two_starts_of_one_code_nobody_knows_what_noise_is(two_drivers: Path) -> None:
    for path in sorted((two_drivers / SLUG / "runs").iterdir())[1::2]:
        path.unlink()
    found = compare.compare("580.1", "590.2", two_drivers)
    assert found.noise_percent is None
    assert {one.verdict for one in found.changes} == {"unknown"}
