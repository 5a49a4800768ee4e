"""The notebooks: their parameters, what they refuse, and that they come to their end on a machine without a GPU."""

from __future__ import annotations

import ast
import functools
import html
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import nbformat
import pytest
from ahead import chosen
from shared import OF_STAGES, REPORTED, tiers
from synthetic import write_checks, write_synthetic

from flashlab.core.errors import (
    MissingPackageError,
    NoDataError,
    NoGpuError,
    OutputError,
    ParameterError,
    ReportError,
    UnknownStageError,
)
from flashlab.core.paths import DATA, KERNELS, NOTEBOOKS, ROOT, SITE
from flashlab.core.problem import Problem, suite
from flashlab.kernels.registry import CUDA_STAGES, STAGES
from flashlab.record import store
from flashlab.record.checks import CheckRow, EmulatorVerdict
from flashlab.record.schema import Verdict
from flashlab.run import emulator, gpu
from flashlab.show import notebook, pages, saving, site, sweep, trial
from flashlab.show.notebook import Lab, Outcome, read_outcome, settings
from flashlab.show.saving import strip_before_save
from flashlab.show.trial import attempt, compare, compare_rows, count_accesses, edited, own_copy

INDEX = "index"
"""The notebook that lists the others; it is text alone, and never executed."""
EVERY = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
NAMES = [name for name in EVERY if name != INDEX]
OF_RECORDS = [name for name in NAMES if name not in ("edit_a_kernel", "exercises")]
"""Those that show what is in data/."""
MUCH_OF_DATA = ("02_ladder", "07_against_peers")
"""Those that show the most of it, and that `make test` runs on what is committed; on made-up records it runs all."""
REPLAY = Path(__file__).with_name("replay.py")
NO_COMPILER = trial.no_compiler()
needs_compiler = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER)
HIDDEN_RACE = "__syncwarp();   // the row's scores are in registers"
"""A barrier of 05_wmma without which the numbers are right all the same."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_synthetic(folder, problems=suite("first"))
    return folder


@pytest.fixture(scope="module")
def replayed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders by test: what the cells of its notebooks wrote and showed, run without a kernel (tests/replay.py)."""
    folder = tmp_path_factory.mktemp("replayed")
    (folder / "none").mkdir()
    # Stages are what notebooks compile and emulate, which `report` does with all of them.
    given = {
        "test_before_anything_was_measured": {"data": str(folder / "none"), "stages": "00_naive"},
        "test_replay_of_the_committed_data": {},
    }
    few = {name: {"stages": "00_naive"} for name in OF_STAGES}
    jobs = [
        {
            "notebook": str(NOTEBOOKS / f"{name}.ipynb"),
            "out": str(folder / test),
            "parameters": {"source": "replay", **few.get(name, {}), **parameters},
        }
        for test, parameters in given.items()
        for name in (one["name"] for one in chosen(request, test))
    ]
    subprocess.run([sys.executable, str(REPLAY)], input=json.dumps(jobs), text=True, check=True)
    return folder


def _replayed(folder: Path, name: str) -> tuple[Outcome, str]:
    """The result of a notebook in that folder, and all that it showed."""
    failed = folder / f"{name}.err"
    assert not failed.exists(), failed.read_text(encoding="utf-8")
    return read_outcome(folder / f"{name}.json", name), (folder / f"{name}.txt").read_text(encoding="utf-8")


def _cells(name: str) -> list[nbformat.NotebookNode]:
    return list(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells)


def test_every_notebook_has_a_page_and_every_page_a_notebook() -> None:
    assert set(NAMES) == set(pages.PAGE_OF)


@pytest.mark.parametrize("name", NAMES)
def test_form(name: str) -> None:
    cells = _cells(name)
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert "**Question.**" in cells[0].source
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    declared = ast.parse(tagged[0].source).body
    names = {node.target.id for node in declared if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    used = {node.id for cell in cells if cell.cell_type == "code" for node in ast.walk(ast.parse(cell.source))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}  # fmt: skip
    assert "out" in names
    assert names <= used, "a parameter that does nothing misleads"
    assert all("  # " in line for line in tagged[0].source.splitlines())
    for cell in cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            plumbing = bool({"hide", "hide-input"} & set(cell.metadata.get("tags", [])))
            assert cell.metadata.get("jupyter", {}).get("source_hidden", False) is plumbing, "hidden on the site alone"
            nodes = list(ast.walk(ast.parse(cell.source)))
            assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda) for node in nodes)


def _ran(path: Path) -> nbformat.NotebookNode:
    """A notebook as JupyterLab and papermill leave it."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    notebook.metadata["kernelspec"]["display_name"] = "Python 3 (ipykernel)"
    notebook.metadata["language_info"] |= {"version": "3.12.1", "codemirror_mode": {"name": "ipython", "version": 3}}
    notebook.metadata["papermill"] = {"duration": 1.0}
    for cell in (one for one in notebook.cells if one.cell_type == "code"):
        cell.execution_count = 3
        cell.outputs = [nbformat.v4.new_output("stream", text="1")]  # type: ignore[no-untyped-call]
        cell.metadata |= {"scrolled": True, "execution": {"iopub.execute_input": "2026"}}
    return notebook


@pytest.mark.parametrize("name", EVERY)
def test_what_jupyterlab_saves_is_what_git_has(name: str, tmp_path: Path) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    for root, saved_as, stripped in (
        (ROOT, f"/notebooks/{path.name}", True),
        (NOTEBOOKS, path.name, True),
        (ROOT, f"build/{path.name}", False),
        (tmp_path, f"notebooks/{path.name}", False),
    ):
        notebook, manager = _ran(path), SimpleNamespace(root_dir=str(root))
        strip_before_save(model={"type": "notebook", "content": notebook}, path=saved_as, contents_manager=manager)
        nbformat.write(notebook, tmp_path / path.name)  # type: ignore[no-untyped-call]
        assert ((tmp_path / path.name).read_bytes() == path.read_bytes()) is stripped
    strip_before_save(model={"type": "file"}, path="notebooks/cells.toml", contents_manager=SimpleNamespace())


def test_every_jupyter_server_of_the_environment_strips() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ((source, target),) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"].items()
    assert target == "etc/jupyter/jupyter_server_config.d/flashlab.json", "where servers look below sys.prefix"
    (name,) = json.loads((ROOT / source).read_text(encoding="utf-8"))["ServerApp"]["jpserver_extensions"]
    assert name == saving.__name__ == saving._jupyter_server_extension_points()[0]["module"]
    hooks: list[object] = []
    saving._load_jupyter_server_extension(
        SimpleNamespace(contents_manager=SimpleNamespace(register_pre_save_hook=hooks.append))
    )
    assert hooks == [strip_before_save]


@pytest.mark.parametrize("name", NAMES)
def test_calls_fit_what_they_call(name: str) -> None:
    """Also those that only a machine with a GPU makes."""
    trees = [ast.parse(cell.source) for cell in _cells(name) if cell.cell_type == "code"]
    names: dict[str, Any] = {"lab": Lab}
    for tree in trees:
        imports: list[ast.stmt] = [one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), name, "exec"), names)
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        root, _, rest = ast.unparse(call.func).partition(".")
        keywords = {one.arg or "**": one.value for one in call.keywords}
        if root not in names or not re.fullmatch(r"[\w.]*", rest) or "**" in keywords:
            continue
        called = functools.reduce(getattr, filter(None, rest.split(".")), names[root])
        if inspect.isfunction(called) and not any(isinstance(one, ast.Starred) for one in call.args):
            bound = [None] if root == "lab" else []
            inspect.signature(called, follow_wrapped=False).bind(*bound, *call.args, **keywords)


def test_the_index_asks_what_the_notebooks_ask_and_is_what_jupyterlab_opens() -> None:
    text = "\n".join(cell.source for cell in _cells(INDEX))
    listed = re.findall(r"^\| \[(.+)\]\((\w+)\.ipynb\) \| (.+?) \|", text, re.MULTILINE)
    assert sorted(name for _, name, _ in listed) == NAMES
    for title, name, question in listed:
        assert _cells(name)[0].source.splitlines()[:3] == [f"# {title}", "", f"**Question.** {question}"]
    for file in ("Makefile", "Dockerfile"):
        assert f"default_url=/lab/tree/notebooks/{INDEX}.ipynb" in (ROOT / file).read_text(encoding="utf-8")


def test_the_comparison_with_the_libraries_begins_with_its_result() -> None:
    question, *shown = (cell for cell in _cells("07_against_peers") if "hide" not in cell.metadata.get("tags", []))
    shown = [cell.source for cell in shown if "parameters" not in cell.metadata.get("tags", [])]
    assert question.source.endswith("?")
    assert shown[0] == "lab.show(tables.against, lab.against_peers())"
    assert shown[1] == "lab.show(tables.AGAINST, lab.against_peers())"
    assert shown[2].startswith("## How to read")


@pytest.mark.parametrize("name", EVERY)
def test_links_lead_somewhere_in_jupyterlab(name: str) -> None:
    for cell in _cells(name):
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\(([^)#]+)", cell.source):
                if not link.startswith("https://"):
                    assert (NOTEBOOKS / link).is_file(), link
        else:
            for folder in re.findall(r'pages="(.+?)"', cell.source):
                assert (NOTEBOOKS / folder).is_dir(), folder


@pytest.mark.parametrize("name", NAMES)
def test_replay(name: str, report: Path) -> None:
    outcome = read_outcome(report / "notebooks" / f"{name}.json", name)
    assert outcome.source == "replay"
    assert outcome.gpu == "nvidia-h200"
    assert outcome.numbers
    if name == "01_correctness":
        assert [kind for kind, passed in outcome.numbers["outputs"].items() if passed] == ["sound"]
    if name == "edit_a_kernel" and not NO_COMPILER:
        assert outcome.numbers["right"] == {"as it is": True, "edited": True}
        assert (outcome.numbers["before"], outcome.numbers["after"]) == (True, False)
        (race,) = outcome.numbers["findings"]
        assert len(set(re.findall(r"build/edits/(05_wmma-[0-9a-f]{8}\.cu):", race))) == 1
        assert outcome.numbers["elsewhere"] is False, "the race is there at every shape"
        assert outcome.numbers["early"] == {"ascending": False, "descending": False}
    if name == "exercises":
        assert not any(outcome.numbers["right"].values()), "nothing is filled in"


@tiers
@pytest.mark.parametrize("name", OF_STAGES)
def test_a_notebook_compiles_and_emulates_its_stages(name: str, whole: bool, report: Path, tmp_path: Path) -> None:
    if whole:
        outcome = sweep.execute(
            NOTEBOOKS / f"{name}.ipynb", tmp_path, {"source": "replay", "data": str(report / "data")}
        )
    else:
        outcome = read_outcome(report / "notebooks" / f"{name}.json", name)
    stages = {name: CUDA_STAGES[name] for name in (CUDA_STAGES if whole else REPORTED)}
    if name == "01_correctness":
        assert outcome.numbers["emulated"] == ({} if NO_COMPILER else dict.fromkeys(stages, True))
    else:
        assert set(outcome.numbers["sass"]) == set(stages)
        assert outcome.numbers["compiled"] == sum(len(stage.archs) for stage in stages.values())


@pytest.mark.parametrize("name", OF_RECORDS)
def test_before_anything_was_measured(name: str, replayed: Path) -> None:
    outcome, text = _replayed(replayed / "test_before_anything_was_measured", name)
    assert outcome.gpu is None
    assert "Nothing has been measured yet" in text


@pytest.mark.skipif(not store.gpus(DATA), reason="no GPU's records are committed under data/")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in MUCH_OF_DATA else pytest.mark.exhaustive) for name in OF_RECORDS],
)
def test_replay_of_the_committed_data(name: str, replayed: Path) -> None:
    outcome, text = _replayed(replayed / "test_replay_of_the_committed_data", name)
    assert outcome.gpu in store.gpus(DATA)
    assert "Nothing has been measured yet" not in text


def test_a_wrong_value_ends_the_notebook_with_its_error(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="ParameterError: source: wanted one of auto, measure, replay, got 'later'"):
        sweep.execute(NOTEBOOKS / "02_ladder.ipynb", tmp_path, {"source": "later", "data": str(data)})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"source": "later"}, ParameterError, "source: wanted one of auto, measure, replay, got 'later'"),
        ({"inputs": "normal,sinks"}, ParameterError, "inputs: wanted one of normal.*; the nearest is"),
        ({"suite": "huge"}, ParameterError, "suite: wanted one of .*standard.*, got 'huge'"),
        ({"stages": "00_naive,99_magic"}, UnknownStageError, "stage: wanted one of 00_naive.*, got '99_magic'"),
        ({"stages": "0"}, UnknownStageError, "wanted a unique prefix, got '0'"),
        ({"stages": 6}, ParameterError, "stages: wanted text, got 6.*`-r stages VALUE`"),
        *(({"stages": stages}, ParameterError, "stages: wanted text, got ") for stages in ([5], ["05", None], b"05")),
        *(
            ({name: ["a"]}, ParameterError, f"{name}: wanted text")
            for name in ("gpu", "suite", "inputs", "out", "data")
        ),
        ({"out": "a\0b"}, ParameterError, "out: wanted text, got 'a"),
        ({"stages": "00,f0"}, ParameterError, "stages: wanted stages of the ladder, 00_naive.*, got f0_e4m3, off the"),
        ({"new": 16}, ParameterError, "new: wanted text, got 16.*`-r new VALUE`"),
        ({"dtype": "half"}, ParameterError, "dtype: wanted one of float16, bfloat16, got 'half'"),
        ({"regime": "cold"}, ParameterError, "regime: wanted one of burst, sustained, got 'cold'"),
        ({"gpu": "nvidia-abacus"}, NoDataError, "'nvidia-abacus'.*GPUs with data: nvidia-h200"),
    ],
)
def test_settings_refuse(
    arguments: dict[str, Any], error: type[Exception], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        settings(**{"source": "replay", "data": data, "out": tmp_path, **arguments})


def test_a_parameter_says_the_same_in_every_notebook() -> None:
    """What is taken where `gpu` is empty, as `settings` resolves it; and no list of suites, which grows elsewhere."""
    said: dict[str, set[str]] = {}
    for name in NAMES:
        for cell in _cells(name):
            if "parameters" in cell.metadata.get("tags", ()):
                for line in cell.source.splitlines():
                    said.setdefault(line.partition(":")[0], set()).add(line.partition("  # ")[2])
    assert said["gpu"] == {"folder under data/, for example nvidia-h200; empty: this GPU, else data/main_gpu's"}
    assert all(len(said[key]) == 1 for key in ("source", "stages", "inputs", "out", "data"))
    assert not [one for one in said["suite"] if "smoke" in one or "peers or lengths" in one]


@pytest.mark.parametrize("name", NAMES)
def test_every_further_parameter_is_checked(name: str) -> None:
    """`-p new 16` is a number to papermill, and `-p dtype half` would show an empty chart."""
    cells = [cell for cell in _cells(name) if cell.cell_type == "code"]
    (given,) = (cell.source for cell in cells if "parameters" in cell.metadata.get("tags", ()))
    names = {line.target.id for line in ast.parse(given).body if isinstance(line, ast.AnnAssign)}  # type: ignore[union-attr]
    (call,) = (cell.source for cell in cells if "lab = settings(" in cell.source)
    assert names == set(re.findall(r"(?:\"\w+\": |\w+=)(\w+)(?=[,)}])", call))


def test_the_anatomy_of_a_stage_without_machine_code(data: Path, tmp_path: Path) -> None:
    sweep.execute(NOTEBOOKS / "03_anatomy.ipynb", tmp_path, {"stages": "t0", "data": str(data), "source": "replay"})
    assert "has machine code here" in (tmp_path / "03_anatomy.ipynb").read_text(encoding="utf-8")


def test_settings_take_prefixes_of_stages(data: Path, tmp_path: Path) -> None:
    chosen = settings(source="replay", data=data, out=tmp_path, stages="06, 00_n").stages
    assert chosen == ("00_naive", "06_cp_async")


def test_a_lab_shows_the_first_kind_of_inputs_and_holds_all_against_the_libraries(tmp_path: Path) -> None:
    (full, causal), kinds = suite("first"), ("falling", "normal")
    write_synthetic(tmp_path, problems=[replace(full, inputs=kind) for kind in kinds])
    what: dict[str, Any] = {"source": "replay", "data": tmp_path, "out": tmp_path}
    lab = settings(inputs="falling, normal", **what)
    assert {row.problem.inputs for row in (*lab.rows(), *lab.rows(full))} == {"falling"}
    assert not lab.rows(causal)
    assert {one.problem.inputs for one in lab.against_peers()} == {"falling", "normal"}
    assert "inputs falling, normal" in str(lab)
    assert {row.problem.inputs for row in settings(**what).rows()} == {"normal"}
    assert "inputs" not in str(settings(**what))


def test_settings_refuse_an_unwritable_folder(read_only_dir: Path, data: Path) -> None:
    with pytest.raises(OutputError, match="result file"):
        settings(source="replay", data=data, out=read_only_dir)


def test_records_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    """A bucket that was not mounted must not end as an empty report that looks well."""
    file = tmp_path / "file"
    file.touch()
    for data in (tmp_path / "none", file):
        with pytest.raises(NoDataError, match=f"existing folder of records, got {data}"):
            settings(source="replay", data=data, out=tmp_path)
        with pytest.raises(NoDataError, match=str(data)):
            site.run(source="replay", data=data, out=tmp_path / "out")
    assert not (tmp_path / "out" / "site").exists()


def test_measuring_wants_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_resolve", lambda *_: ("measure", "nvidia-h200"))
    with pytest.raises(OutputError, match="records, got /proc"):  # where root can make no file either
        settings(source="measure", data="/proc", out=tmp_path)


def test_settings_resolve(data: Path, tmp_path: Path) -> None:
    lab = settings(source="replay", data=data, out=tmp_path, stages="05_wmma, 00_naive")
    assert lab.stages == ("00_naive", "05_wmma")
    assert lab.gpu == "nvidia-h200"
    assert str(lab).endswith("nvidia-h200; 2 stages"), "a suite is measured, not shown"
    assert str(replace(lab, source="measure", stages=lab.stages[:1])).endswith("; 1 stage, suite standard")
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
    ("source", "message", "timeout_s"),
    [
        # A page of its own and a sweep (test_sweep.py) meet these two as well.
        pytest.param("1 / 0", "ZeroDivisionError", 60, marks=pytest.mark.exhaustive),
        pytest.param("import os; os.kill(os.getpid(), 9)", "99_made_up", 60, marks=pytest.mark.exhaustive),
        ("import sys; sys.exit(0)\n---\nprint('never')", "99_made_up", 60),
        ("pass", "did not come to its end", 60),
        ("import time; time.sleep(60)", "99_made_up", 2),
    ],
    ids=["error", "kernel killed", "exits", "no result", "too slow"],
)
def test_a_notebook_that_does_not_finish_is_not_a_success(
    source: str, message: str, timeout_s: float, make_notebook: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ReportError, match=message):
        sweep.execute(make_notebook(source), tmp_path / "out", {}, timeout_s=timeout_s)


def test_a_notebook_that_fails_costs_its_own_page_alone(make_notebook: Callable[[str], Path], tmp_path: Path) -> None:
    good = "from flashlab.show.notebook import settings\npath = settings(source='replay', out=out).write('{name}')"
    for name, source in (("00_hardware", "1 / 0"), ("01_correctness", good.format(name="01_correctness"))):
        make_notebook(source).rename(tmp_path / f"{name}.ipynb")
    cells = [sweep.cell(tmp_path / f"{name}.ipynb", "", {}) for name in ("00_hardware", "01_correctness")]
    said: list[str] = []
    ended = sweep.run(cells, tmp_path / "out", tmp_path, flat=True, fresh=True, say=said.append)
    failed = {one.notebook.stem: ended[one.id].why for one in cells if ended[one.id].state == "failed"}
    assert failed.keys() == {"00_hardware"}
    assert "ZeroDivisionError" in failed["00_hardware"]
    assert sorted(line.split(":")[0] for line in said) == ["00_hardware", "01_correctness"]
    folder = tmp_path / "pages"
    (folder / "snippets").mkdir(parents=True)
    pages._notebook_page(
        pages.Output(root=folder), "00_hardware", "roofline.md#hardware", tmp_path / "out", None, failed["00_hardware"]
    )
    text = (folder / "snippets" / "notebooks" / "00_hardware.md").read_text(encoding="utf-8")
    assert '!!! failure "Not complete"' in text
    assert "ZeroDivisionError" in text


def test_a_progress_bar_says_what_is_left_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("IPython.core.getipython.get_ipython", object)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    monkeypatch.setattr("IPython.display.update_display", lambda data, **_: drawn.append(data["text/html"]))
    monkeypatch.setattr(notebook, "_REDRAWN_S", 0.0)
    clock = iter((0.0, 0.0, 30.0))
    monkeypatch.setattr(notebook.time, "monotonic", lambda: next(clock))
    with notebook.progress_bar() as progress:
        progress(0, 4, "a<b>")
        progress(1, 4, "next")
    assert [re.sub("<progress.*?</progress> ", "", one) for one in drawn] == [
        "0 of 4: a&lt;b&gt;",
        "0:01:30 left, 1 of 4: next",
        "",
    ]


def test_progress_outside_a_notebook_does_not_import_ipython_where_threads_would_race_for_it() -> None:
    script = (
        "import sys; from flashlab.show.notebook import progress_bar\n"
        "with progress_bar() as progress: progress(0, 1, 'a')\n"
        "print('IPython' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_result_file_of_another_notebook_is_refused(tmp_path: Path) -> None:
    lab = settings(source="replay", data=tmp_path, out=tmp_path)
    path = lab.write("00_hardware")
    assert read_outcome(path, "00_hardware").notebook == "00_hardware"
    with pytest.raises(ReportError, match="result file of '00_hardware'"):
        read_outcome(path, "02_ladder")
    path.write_text(json.dumps({"notebook": 3}), encoding="utf-8")
    with pytest.raises(ReportError, match="no result file"):
        read_outcome(path, "00_hardware")


# --- Kernels on this machine's CPU ---


@pytest.fixture
def edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trial, "EDITS", tmp_path / "edits")
    return tmp_path / "edits"


def test_an_edit_is_a_copy_with_one_change(edits: Path) -> None:
    source = STAGES["05_wmma"].source
    before = source.read_bytes()
    path = edited("05_wmma", HIDDEN_RACE, "//")
    assert path.parent == edits
    assert path.read_text(encoding="utf-8") == before.decode().replace(HIDDEN_RACE, "//")
    assert source.read_bytes() == before
    assert [child.name for child in edits.iterdir()] == [path.name]
    diff = trial.diff(source, path)
    assert [line[0] for line in diff.splitlines() if HIDDEN_RACE in line] == ["-"]
    assert "files are equal" in trial.diff(source, source)


def test_two_edits_of_a_stage_are_two_files_and_the_same_edit_is_one(edits: Path) -> None:
    first, other = (edited("05_wmma", HIDDEN_RACE, text) for text in ("//", "// two"))
    assert first != other
    assert edited("05_wmma", HIDDEN_RACE, "//") == first
    assert HIDDEN_RACE not in first.read_text(encoding="utf-8")
    assert "// two" in other.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "words"),
    [
        (
            "__syncwarp();",
            r"once in kernels/05_wmma\.cu, got '__syncwarp\(\);', which occurs \d times, in lines \d+, .*;",
        ),
        ("__syncwrap();", "which occurs 0 times$"),
        ("", "which occurs 0 times$"),
    ],
)
def test_an_edit_of_what_is_not_there_once_is_refused(old: str, words: str, edits: Path) -> None:
    with pytest.raises(ParameterError, match=words):
        edited("05_wmma", old, "")
    with pytest.raises(UnknownStageError):
        edited("05_wma", "a", "b")
    assert not edits.exists()


def test_an_own_copy_follows_the_stage_until_it_is_edited(edits: Path) -> None:
    path = own_copy("00_naive")
    assert path == edits / "00_naive.cu"
    assert path.read_bytes() == STAGES["00_naive"].source.read_bytes()
    for copy in (path, edits / "original" / path.name):
        copy.write_text("the stage as it was", encoding="utf-8")
    assert own_copy("00_naive").read_bytes() == STAGES["00_naive"].source.read_bytes()
    path.write_text("mine", encoding="utf-8")
    assert own_copy("00_naive").read_text(encoding="utf-8") == "mine"


@needs_compiler
def test_a_race_is_found_where_the_numbers_are_right() -> None:
    copy = edited("05_wmma", HIDDEN_RACE, "//")
    before, after = attempt("05_wmma", shape="1x1x64x64"), attempt("05_wmma", copy, shape="1x1x64x64")
    assert before.passed
    assert not after.passed
    assert after.verdict is not None
    assert after.verdict.passed
    assert len(after.errors) == 64 // trial.QUERY_ROWS
    table = compare({"as it is": before, "edited": after})
    assert "| right |" in table
    assert "1 × race" in table
    found = trial.findings(after.report)
    assert found.count(f"{copy.name}:") == 2
    assert "make_float2(rescale, rescale)" in html.unescape(found)
    chart = compare_rows({"as it is": before, "edited": after}, name="rows")
    assert not isinstance(chart, str)
    assert "05_wmma" in chart.provenance


@needs_compiler
def test_a_finding_in_a_header_names_the_line_that_called_it() -> None:
    old = "__syncthreads();   // the tile is complete"
    copy = edited("01_coalesced", old, "__syncwarp();")
    run = attempt("01_coalesced", copy, shape="1x1x64x64")
    assert run.wrong == ("race", "uninitialised", "wrong values")
    assert run.report is not None
    line = 1 + copy.read_text(encoding="utf-8").splitlines().index("    __syncwarp();")
    called = f"{copy.name}:{line - 2}"
    assert re.search(rf"tile\.cuh:\d+ \(called at \S*{called}\)", str(run.report.findings[0]))
    table = html.unescape(trial.findings(run.report))
    assert re.search(rf"{called}</code><br><code>load_tile<.*<br>in .*tile\.cuh:\d+", table)
    assert [row.split("**")[1] for row in trial.explained(run).splitlines()] == list(run.wrong)


def test_what_may_be_wrong_is_explained_where_the_site_says_more() -> None:
    runtime = "".join(path.read_text(encoding="utf-8") for path in (KERNELS / "emulation" / "runtime").glob("*.cpp"))
    kinds = set(re.findall(r'(?:report\(by, |findings\.add\(\{)"([^"]+)"', runtime))
    kinds |= {
        kind for named in re.findall(r"const char\* kind = (.*);", runtime) for kind in re.findall('"([^"]+)"', named)
    }
    assert {"race", "input modified", "before griddepcontrol.wait"} <= kinds
    assert kinds | {*get_args(emulator.Status)} - {"ok"} <= trial.EXPLAINED.keys()
    for explanation in trial.EXPLAINED.values():
        name, _, anchor = (page := explanation["page"]).partition("#")
        text = (SITE / name).read_text(encoding="utf-8")
        headings = {re.sub(r"\W+", "-", one.lower()) for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        assert f"{{ #{anchor} }}" in text or anchor in headings, page


@needs_compiler
def test_a_copy_that_passes_a_small_shape_fails_a_hostile_one_and_is_told_what_was_not_tried(tmp_path: Path) -> None:
    copy = edited("00_naive", "visible_keys(p, q_row)", "(CAUSAL ? min(p.kv_len, q_row + 1) : p.kv_len)")
    assert all(attempt("00_naive", copy, shape="1x1x32x64", mask=mask).passed for mask in ("full", "causal"))
    found = settings(source="replay", data=tmp_path, out=tmp_path).check_copy("00_naive", copy, "1x2x128x128")
    assert not found.passed
    failed = {(row.problem.mask, row.problem.q_len, row.problem.kv_len) for row in found.rows if row.status != "ok"}
    assert failed == {("causal", 113, 203), ("causal", 239, 1), ("causal", 70, 400)}
    assert {row.problem.head_dim for row in found.rows} == {128}
    assert "**Not tried:** head dim 64; " in str(found)
    assert str(found).count("B1 H2/1 Sq113 Sk203") == 1


@needs_compiler
def test_padding_is_what_keeps_lanes_out_of_each_others_banks() -> None:
    padded = attempt("03_warp_rows", shape="1x1x64x64")
    plain = attempt("03_warp_rows", shape="1x1x64x64", params={"PADDING": 0})
    assert padded.report is not None
    assert plain.report is not None
    lines = trial.conflicts({"padded": padded.report, "plain": plain.report}).splitlines()
    line = next(line for line in lines if "(K_row);" in html.unescape(line))
    assert "×1.0 |" in line
    assert "×8.0 |" in line
    assert "p.LSE" in trial.sectors({"padded": padded.report})


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tile_key += TILE_KV", "tile_key += 0", "not done after 1 seconds"),
        ("float lane_max = NEG_INF;", "float lane_max = NEG_INF", "wanted code for the CPU, got an error"),
        ("smem.K + k0 * STRIDE", "(element*)16 + k0 * STRIDE", "on the CPU: "),
    ],
    ids=["endless", "does not compile", "a wild pointer"],
)
def test_what_goes_wrong_comes_back_as_text(old: str, new: str, words: str) -> None:
    copy = edited("05_wmma", old, new)
    run = attempt("05_wmma", copy, timeout_s=1)
    assert words in run.error
    assert f"{copy.name}:" in run.error
    assert "command:" not in run.error
    assert not run.passed
    assert "no result" in compare({"edited": run})
    assert isinstance(compare_rows({"edited": run}, name="rows"), str)
    assert run.error in trial.said(run)
    trial.findings(run.report)
    trial.conflicts({"edited": run.report})


def test_a_trial_too_large_for_the_cpu_makes_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.oracle, "make_inputs", lambda problem: pytest.fail("inputs of many gigabytes"))
    assert "would take about" in attempt("00_naive", shape="9x99x99999x64").error


@needs_compiler
def test_sectors_do_not_depend_on_where_numpy_puts_an_array() -> None:
    counted = {
        tuple((c.space, c.access, c.requests, c.sectors, c.wavefronts) for c in report.counters)
        for report in (count_accesses("05_wmma", "1x1x64x64") for _ in range(3))
    }
    assert len(counted) == 1
    # One block: Q, K and V come once and the output goes once, all in whole sectors of 32 bytes.
    assert sum(sectors for space, access, _, sectors, _ in counted.pop() if space == "global") == 4 * 64 * 64 * 2 // 32


@needs_compiler
def test_a_trial_places_every_array_as_cuda_would(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []

    def emulate(*inputs: Any, **options: Any) -> Any:
        placed.extend(array.ctypes.data % 256 for array in (*inputs, options["out"], options["lse"]))
        return trial_emulate(*inputs, **options)

    trial_emulate = trial.emulate
    monkeypatch.setattr(trial, "emulate", emulate)
    assert attempt("05_wmma", shape="1x1x64x64").passed
    assert placed == [0] * 5


@needs_compiler
def test_counters_are_compared_where_some_are_on_record(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "data", problems=suite("first"))
    lab = settings(source="replay", data=tmp_path / "data", out=tmp_path, stages="00_naive,01_coalesced")
    assert "wanted Nsight Compute's counters" in str(lab.counters())
    line = {
        "stage": "01_coalesced",
        "shape": "1x1x64x64",
        "gpu": "NVIDIA H200",
        "commit": "0123abcdef0123abcdef0123abcdef0123abcdef",
        "dirty": False,
        "metrics": {
            "smsp__sass_inst_executed_op_global_st.sum": 16,
            "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_st.sum": 2048,
            "something__new.avg": 0.5,
        },
    }
    folder = tmp_path / "data" / "nvidia-h200" / "counters"
    folder.mkdir()
    (folder / "20260102T030405Z-0123abc.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    counted = lab.counters()
    assert set(counted.compared) == {"01_coalesced"}
    assert set(counted.compared["01_coalesced"]) == {"global stores"}
    assert counted.equal == ()
    assert "NVIDIA H200 · 1x1x64x64 full float16 · commit 0123abc" in str(counted)
    assert not settings(source="replay", data=tmp_path / "data", out=tmp_path, stages="00_naive").counters().compared


def test_chip_and_emulator_are_shown_where_they_are_on_record(data: Path, tmp_path: Path) -> None:
    assert settings(source="replay", data=data, out=tmp_path).beside_emulator() == ""
    write_synthetic(tmp_path / "data", problems=suite("first"))
    verdict = Verdict(passed=True, reason="", max_abs_error=1e-4, max_abs_limit=1e-3)
    asked = EmulatorVerdict(status="ok", reason="", shape="1x2x1x64", verdict=verdict, agreement=verdict)
    problem = Problem.parse("1x2x1x64")
    row = CheckRow(stage="05_wmma", problem=problem, status="ok", verdict=verdict, emulator=asked)
    folder = tmp_path / "data" / "nvidia-h200" / "checks"
    write_checks(folder / "20260102T030405Z-0123abc.jsonl", [row])
    lab = settings(source="replay", data=tmp_path / "data", out=tmp_path)
    assert "| `05_wmma` | 1 | 1 | 1 | 1 | 10.0 % |" in lab.beside_emulator()
    # A later comparison without the emulator does not hide it.
    write_checks(folder / "20260103T030405Z-0123abc.jsonl", [replace(row, emulator=None)])
    assert "commit 0123abc" in lab.beside_emulator()


def test_without_a_compiler_notebooks_say_so_and_finish(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PATH on which no compiler is: the kernel's own, for the notebook's process."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(MissingPackageError):
        emulator.cxx()
    assert "Install one" in trial.no_compiler()
    assert "wanted a C++20 compiler" in attempt("00_naive").error
    for name in ("01_correctness", "edit_a_kernel", "exercises"):
        given = {"source": "replay", "data": str(data)} if name == "01_correctness" else {}
        outcome = sweep.execute(NOTEBOOKS / f"{name}.ipynb", tmp_path / name, given)
        assert outcome.numbers
        text = (tmp_path / name / f"{name}.ipynb").read_text(encoding="utf-8")
        assert emulator.install_command() in text


@needs_compiler
def test_an_edit_may_come_as_parameters(data: Path, tmp_path: Path) -> None:
    parameters = {"stage": "00_naive", "shape": "1x1x32x64", "mask": "causal"}
    change = {"old": "row_sum = row_sum * rescale + prob;", "new": "row_sum = row_sum + prob;  // forgets to rescale"}
    outcome = sweep.execute(NOTEBOOKS / "edit_a_kernel.ipynb", tmp_path, parameters | change)
    assert outcome.numbers["before"]
    assert not outcome.numbers["after"]
    assert outcome.numbers["right"] == {"as it is": True, "edited": False}
