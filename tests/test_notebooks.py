"""The notebooks: their parameters, what they refuse, and that they come to their end on a machine without a GPU."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from synthetic import write_synthetic

from flashlab import gpu, notebook, records, report
from flashlab.errors import NoDataError, NoGpuError, OutputError, ParameterError, ReportError, UnknownStageError
from flashlab.notebook import settings
from flashlab.paths import DATA, NOTEBOOKS
from flashlab.problem import suite
from flashlab.stages import STAGES

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
PARAMETERS = {"source", "gpu", "stages", "suite", "out", "data"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_synthetic(folder, problems=suite("first"))
    return folder


def _cells(name: str) -> list[nbformat.NotebookNode]:
    return list(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells)


def test_every_notebook_has_a_page_and_every_page_a_notebook() -> None:
    assert set(NAMES) == set(report.PAGE_OF)


@pytest.mark.parametrize("name", NAMES)
def test_form(name: str) -> None:
    cells = _cells(name)
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert "**Question.**" in cells[0].source
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    declared = ast.parse(tagged[0].source).body
    assert {node.target.id for node in declared if isinstance(node, ast.AnnAssign)} == PARAMETERS  # type: ignore[union-attr]
    assert all("  # " in line for line in tagged[0].source.splitlines())
    for cell in cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            nodes = list(ast.walk(ast.parse(cell.source)))
            assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda) for node in nodes)


@pytest.mark.parametrize("name", NAMES)
def test_replay(name: str, data: Path, tmp_path: Path) -> None:
    outcome = report.execute(NOTEBOOKS / f"{name}.ipynb", tmp_path, {"source": "replay", "data": str(data)})
    assert outcome.source == "replay"
    assert outcome.gpu == "nvidia-h200"
    assert outcome.numbers
    if name == "01_correctness":
        assert [kind for kind, passed in outcome.numbers.items() if passed] == ["sound"]
    if name == "03_anatomy":
        assert set(outcome.numbers["sass"]) == set(STAGES)
        assert outcome.numbers["compiled"] == sum(len(stage.archs) for stage in STAGES.values())


@pytest.mark.parametrize("name", NAMES)
def test_before_anything_was_measured(name: str, tmp_path: Path) -> None:
    empty = tmp_path / "data"
    outcome = report.execute(NOTEBOOKS / f"{name}.ipynb", tmp_path / "out", {"source": "replay", "data": str(empty)})
    assert outcome.gpu is None
    if name != "03_anatomy":
        text = (tmp_path / "out" / f"{name}.ipynb").read_text(encoding="utf-8")
        assert "Nothing has been measured yet" in text


@pytest.mark.skipif(not records.gpus(DATA), reason="no GPU's records are committed under data/")
@pytest.mark.parametrize("name", NAMES)
def test_replay_of_the_committed_data(name: str, tmp_path: Path) -> None:
    outcome = report.execute(NOTEBOOKS / f"{name}.ipynb", tmp_path, {"source": "replay"})
    assert outcome.gpu in records.gpus(DATA)


def test_a_mistyped_parameter_is_refused_by_name_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"suite.*got sutie"):
        report.execute(NOTEBOOKS / "02_ladder.ipynb", tmp_path / "out", {"sutie": "first"})
    assert not (tmp_path / "out").exists()


def test_a_wrong_value_ends_the_notebook_with_its_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="ParameterError: source: wanted one of auto, measure, replay, got 'later'"):
        report.execute(NOTEBOOKS / "02_ladder.ipynb", tmp_path, {"source": "later", "data": str(data)})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"source": "later"}, ParameterError, "source: wanted one of auto, measure, replay, got 'later'"),
        ({"suite": "huge"}, ParameterError, "suite: wanted one of .*standard.*, got 'huge'"),
        ({"stages": "00_naive,99_magic"}, UnknownStageError, "stage: wanted one of 00_naive.*, got '99_magic'"),
        ({"gpu": "nvidia-abacus"}, NoDataError, "'nvidia-abacus'.*GPUs with data: nvidia-h200"),
    ],
)
def test_settings_refuse(
    arguments: dict[str, str], error: type[Exception], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        settings(**{"source": "replay", "data": data, "out": tmp_path, **arguments})  # type: ignore[arg-type]


def test_settings_refuse_an_unwritable_folder(read_only_dir: Path, data: Path) -> None:
    with pytest.raises(OutputError, match="result file"):
        settings(source="replay", data=data, out=read_only_dir)


def test_settings_resolve(data: Path, tmp_path: Path) -> None:
    lab = settings(source="replay", data=data, out=tmp_path, stages="05_wmma, 00_naive")
    assert lab.stages == ("00_naive", "05_wmma")
    assert lab.gpu == "nvidia-h200"
    assert {row.name for row in lab.rows() if row.kind == "stage"} == {"00_naive", "05_wmma"}
    assert any(row.kind == "peer" for row in lab.rows())


@pytest.mark.skipif(gpu.available() is None, reason="this machine has a GPU")
def test_measuring_without_a_gpu_is_refused_and_auto_replays(data: Path, tmp_path: Path) -> None:
    with pytest.raises(NoGpuError):
        settings(source="measure", data=data, out=tmp_path)
    assert settings(source="auto", data=data, out=tmp_path).source == "replay"


@pytest.fixture
def make_notebook(tmp_path: Path) -> Callable[[str], Path]:
    def make(source: str) -> Path:
        parameters = nbformat.v4.new_code_cell('out: str = ""')  # type: ignore[no-untyped-call]
        parameters.metadata["tags"] = ["parameters"]
        cells = [parameters, *(nbformat.v4.new_code_cell(part) for part in source.split("---"))]  # type: ignore[no-untyped-call]
        path = tmp_path / "99_made_up.ipynb"
        made = nbformat.v4.new_notebook(cells=cells)  # type: ignore[no-untyped-call]
        made.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
        nbformat.write(made, path)  # type: ignore[no-untyped-call]
        return path

    return make


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", "99_made_up"),
        ("import sys; sys.exit(0)\n---\nprint('never')", "99_made_up"),
        ("pass", "did not come to its end"),
        ("import time; time.sleep(60)", "99_made_up"),
    ],
    ids=["error", "kernel killed", "exits", "no result", "too slow"],
)
def test_a_notebook_that_does_not_finish_is_not_a_success(
    source: str, message: str, make_notebook: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ReportError, match=message):
        report.execute(make_notebook(source), tmp_path / "out", {}, timeout_s=8)


def test_a_result_file_of_another_notebook_is_refused(tmp_path: Path) -> None:
    lab = settings(source="replay", data=tmp_path / "none", out=tmp_path)
    path = lab.write("00_hardware")
    assert notebook.read_outcome(path, "00_hardware").notebook == "00_hardware"
    with pytest.raises(ReportError, match="result file of '00_hardware'"):
        notebook.read_outcome(path, "02_ladder")
    path.write_text(json.dumps({"notebook": 3}), encoding="utf-8")
    with pytest.raises(ReportError, match="no result file"):
        notebook.read_outcome(path, "00_hardware")
