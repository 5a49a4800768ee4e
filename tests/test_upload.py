"""Records reach a bucket or folder whole, come back from it, and no secret is said on the way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from synthetic import RUN, measurement, write_synthetic

from flashlab.core.errors import DamagedRecordError, MissingPackageError, OutputError, ParameterError
from flashlab.core.problem import suite
from flashlab.record import store, upload
from flashlab.record.schema import to_line

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: scripts/install.sh dev")

GPU = "nvidia-h200"
LATER = "20260103T030405Z-0123abc"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_synthetic(tmp_path / "data", problems=suite("first"))
    return tmp_path / "data"


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "bucket") if request.param == "file" else f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def taken(place: str, into: Path) -> Path:
    """What lies at the place, as a folder of data."""
    files, root = fsspec.core.url_to_fs(place)
    for path in files.find(root):
        target = into / path.removeprefix(root).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files.cat_file(path))
    return into


def add_run(data: Path, run: str = LATER) -> Path:
    path = data / GPU / "runs" / f"{run}.jsonl"
    record = measurement("00_naive", suite("first")[0], run=run, seed=int(run[:8]))
    whole = data.parent / path.name
    whole.write_text(to_line(record), encoding="utf-8")
    return whole.replace(path)


def test_nothing_happens_without_a_place(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(upload.VARIABLE, raising=False)
    assert upload.sync(GPU, data) == (0, 0)


def test_what_is_sent_is_a_sound_folder_and_is_sent_once(data: Path, place: str, tmp_path: Path) -> None:
    fetched, sent = upload.sync(GPU, data, place)
    assert (fetched, sent) == (0, len(store.record_files(GPU, data)) - 1)  # CHECKSUMS itself is not counted
    assert upload.sync(GPU, data, place) == (0, 0)
    copy = taken(place, tmp_path / "copy")
    assert not store.verify(GPU, copy)
    assert store.measurements(GPU, copy) == store.measurements(GPU, data)


def test_after_a_notebook_only_its_records_are_sent(data: Path, place: str, tmp_path: Path) -> None:
    upload.sync(GPU, data, place)
    add_run(data)
    assert upload.sync(GPU, data, place) == (0, 1)
    assert not store.verify(GPU, taken(place, tmp_path / "copy"))


def test_a_machine_that_starts_anew_gets_what_was_measured(data: Path, place: str, tmp_path: Path) -> None:
    """A spot machine that was taken away comes back with the committed records alone."""
    fresh = tmp_path / "fresh"
    shutil.copytree(data, fresh)
    add_run(data)
    upload.sync(GPU, data, place)
    assert upload.sync(GPU, fresh, place) == (1, 0)
    assert not store.verify(GPU, fresh)
    assert store.measurements(GPU, fresh) == store.measurements(GPU, data)


def test_an_upload_that_was_cut_off_is_completed(data: Path, place: str, tmp_path: Path) -> None:
    """CHECKSUMS goes last: without it, files that are there already are sent again, and none is missing."""
    upload.sync(GPU, data, place)
    files, root = fsspec.core.url_to_fs(place)
    files.pipe_file(f"{root}/{GPU}/{store.CHECKSUMS}", b"torn")
    files.rm_file(f"{root}/{GPU}/runs/{RUN}.jsonl")
    assert upload.sync(GPU, data, place)[1] == len(store.record_files(GPU, data)) - 1
    assert not store.verify(GPU, taken(place, tmp_path / "copy"))


def test_what_is_no_record_is_not_fetched(data: Path, tmp_path: Path) -> None:
    place = tmp_path / "bucket"
    upload.sync(GPU, data, str(place))
    for name in ("evil.py", "runs/evil.sh", "../above.json", "runs/.hidden.jsonl", "Runs/x.jsonl", "deep/er/x.json"):
        path = place / GPU / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}", encoding="utf-8")
    before = sorted(data.rglob("*"))
    assert upload.sync(GPU, data, str(place)) == (0, 0)
    assert sorted(data.rglob("*")) == before


def test_a_record_that_was_changed_is_not_sent(data: Path, place: str) -> None:
    upload.sync(GPU, data, place)
    path = data / GPU / "runs" / f"{RUN}.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("00_naive", "01_coalesced"), encoding="utf-8")
    with pytest.raises(DamagedRecordError, match="differs from CHECKSUMS"):
        upload.sync(GPU, data, place)


@pytest.mark.parametrize("place", ["s3://key:secret@bucket/x", "simplecache::s3://b", "https://h/x?token=secret"])
def test_a_place_with_credentials_is_refused_and_not_repeated(place: str, data: Path) -> None:
    with pytest.raises(ParameterError) as raised:
        upload.sync(GPU, data, place)
    assert "secret" not in str(raised.value)


def test_an_unknown_place_is_named(data: Path) -> None:
    with pytest.raises(ParameterError, match="moon://"):
        upload.sync(GPU, data, "moon://base")


def test_a_place_that_cannot_be_written_is_named(data: Path, read_only_dir: Path) -> None:
    with pytest.raises(OutputError, match=f"go to {read_only_dir}"):
        upload.sync(GPU, data, str(read_only_dir))


def test_what_a_place_needs_is_named_with_its_command(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacking)
    with pytest.raises(MissingPackageError, match=r"access S3.*pip install s3fs"):
        upload.sync(GPU, data, "s3://bucket/folder")


def test_two_that_send_at_once_lose_nothing(data: Path, tmp_path: Path) -> None:
    """Notebooks on several GPUs of one machine end when they like."""
    place = str(tmp_path / "bucket")
    runs = [f"2026010{day}T030405Z-0123abc" for day in range(3, 8)]
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(lambda run: (add_run(data, run), upload.sync(GPU, data, place)), runs))
    copy = taken(place, tmp_path / "copy")
    assert {path.stem for path in (copy / GPU / "runs").glob("*.jsonl")} == {RUN, *runs}
    assert not store.verify(GPU, copy)


def test_between_cells_a_failure_is_said(data: Path, read_only_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(upload.VARIABLE, str(read_only_dir))
    assert "not copied yet" in upload.attempt(GPU, data)
    monkeypatch.delenv(upload.VARIABLE)
    assert upload.attempt(GPU, data) == ""


def test_a_gpu_that_was_never_measured_proves_the_place_and_gets_no_folder(data: Path, tmp_path: Path) -> None:
    place = tmp_path / "bucket"
    assert upload.sync("nvidia-l4", data, str(place)) == (0, 0)
    assert not (data / "nvidia-l4").exists()
    assert (place / "nvidia-l4" / store.CHECKSUMS).read_bytes() == b""


def test_a_bucket_that_is_not_there_is_not_made(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """s3fs makes one for a folder that is asked for: a name that somebody mistyped would work, and cost."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a folder was asked for")

    monkeypatch.setattr(fsspec.filesystem("memory"), "makedirs", refuse)
    monkeypatch.setattr(fsspec.filesystem("memory"), "mkdir", refuse)
    assert upload.sync(GPU, data, f"memory://{tmp_path.name}")[1]
    fsspec.filesystem("memory").store.clear()
