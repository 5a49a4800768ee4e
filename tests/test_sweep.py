"""Sweeps whose cells come to harm: what was measured stays, once, the others finish, and a second call completes."""

from __future__ import annotations

import collections
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_cell
import nbformat
import pytest
from shared import tiers

from flashlab.core.errors import NoGpuError, ParameterError
from flashlab.core.paths import NOTEBOOKS
from flashlab.core.problem import suite
from flashlab.kernels import registry
from flashlab.measure import bench
from flashlab.record import store
from flashlab.show import site, sweep
from flashlab.show.pages import PAGE_OF

HERE = Path(__file__).parent
THERE = {fake_cell.SLUG: 1}
PARAMETERS = """source: str = "measure"
gpu: str = ""
stages: str = ""
harm: str = ""
shape: str = ""
pause: str = "0"
data: str = ""
out: str = ""
"""

Make = Callable[..., tuple[sweep.Cell, ...]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A file of made-up cells, a notebook each, by the harm that comes to them."""

    def cells(*harms: str, times: int = 1, pause: str = "0") -> tuple[sweep.Cell, ...]:
        lines = []
        for number, harm in enumerate(harms, start=1):
            name = f"{number:02}_{harm or 'well'}"
            given = nbformat.v4.new_code_cell(PARAMETERS)  # type: ignore[no-untyped-call]
            given.metadata["tags"] = ["parameters"]
            body = (
                f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport fake_cell\n"
                f"fake_cell.run({name!r}, shape, harm, out, data, float(pause))"
            )
            made = nbformat.v4.new_notebook(cells=[given, nbformat.v4.new_code_cell(body)])  # type: ignore[no-untyped-call]
            made.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
            nbformat.write(made, tmp_path / f"{name}.ipynb")  # type: ignore[no-untyped-call]
            values = f'{{ harm = "{harm}", shape = "1x{number}x64x64", pause = "{pause}" }}'
            lines.append(f'[[made_up]]\nnotebook = "{name}"\nminutes = 1\nparameters = {values}\n')
            if harm:
                (tmp_path / f"harm-{harm}").write_text(str(times), encoding="utf-8")
        (tmp_path / "cells.toml").write_text("\n".join(lines), encoding="utf-8")
        return sweep.cells_of("made_up", tmp_path / "cells.toml", available=THERE)

    return cells


def run(cells: tuple[sweep.Cell, ...], folder: Path, timeout_s: float = 60.0) -> dict[str, sweep.State]:
    ended = sweep.run(cells, folder / "sweep", folder / "data", timeout_s=timeout_s, available=THERE)
    return {one.parameters["harm"]: ended[one.id] for one in cells}


def rows(folder: Path) -> collections.Counter[tuple[str, str, str]]:
    """How often each row is on record, sound and with a time."""
    found = store.measurements(fake_cell.SLUG, folder / "data")
    return collections.Counter((row.problem.shape, row.problem.mask, row.name) for row in found if row.status == "ok")


def nothing_lost_nothing_twice(cells: tuple[sweep.Cell, ...], folder: Path) -> None:
    wanted = {
        (shape, mask, name)
        for shape in (f"1x{number}x64x64" for number in range(1, len(cells) + 1))
        for mask in ("full", "causal")
        for name in fake_cell.NAMES
    }
    assert rows(folder) == dict.fromkeys(wanted, 1)


@tiers
def test_what_ends_a_notebook_costs_a_try_and_no_row(make: Make, tmp_path: Path, whole: bool) -> None:
    """SIGKILL of the kernel, in the whole of papermill too; a GPU that is lost for a while."""
    cells = make("kernel", *(("papermill",) if whole else ()), "lost")
    ended = run(cells, tmp_path)
    assert [(state.state, state.why) for state in ended.values()] == [("done", "on try 2")] * len(cells)
    nothing_lost_nothing_twice(cells, tmp_path)
    assert store.verify(fake_cell.SLUG, tmp_path / "data") == ()


@pytest.mark.exhaustive
def test_what_fails_twice_costs_its_own_cell_until_it_is_run_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, a disk that is full in the middle of a line; an illegal address and too little memory on the GPU,
    which cost a row each."""
    monkeypatch.setenv("FLASHLAB_USD_PER_GPU_HOUR", "60")
    of_rows = {"illegal": "crashed", "memory": "unsupported"}
    cells = make("error", "disk", *of_rows, times=2)
    ended = run(cells, tmp_path)
    states = {harm: state.state for harm, state in ended.items()}
    assert states == {"error": "failed", "disk": "failed", **dict.fromkeys(of_rows, "done")}
    assert "ZeroDivisionError: made up" in ended["error"].why
    assert "No space left on device" in ended["disk"].why
    planned = sweep.planned(cells, tmp_path / "sweep", tmp_path / "data")
    assert [one["state"] for one in planned] == [ended[one["parameters"]["harm"]].state for one in planned]
    assert all(one["cost"] == pytest.approx(one["minutes"], abs=0.011) for one in planned)
    assert {mend.action for mend in store.mends(fake_cell.SLUG, tmp_path / "data")} == {"set aside"}
    store.repair(fake_cell.SLUG, tmp_path / "data")
    assert {state.state for state in run(cells, tmp_path).values()} == {"done"}
    # A row without a time has a record that says why.
    timeless = [one for one in store.measurements(fake_cell.SLUG, tmp_path / "data") if one.status != "ok"]
    said = {(one.status, one.reason) for one in timeless}
    assert {status for status, _ in said} == set(of_rows.values())
    assert {"ILLEGAL_ADDRESS" in reason or "CUDA out of memory" in reason for _, reason in said} == {True}
    assert set(rows(tmp_path).values()) == {1}
    assert len(rows(tmp_path)) == 4 * len(cells) - len(timeless)
    assert store.verify(fake_cell.SLUG, tmp_path / "data") == ()


def test_a_cell_that_hangs_is_ended_with_all_it_started(make: Make, tmp_path: Path) -> None:
    cells = make("hang", times=1)
    assert run(cells, tmp_path, timeout_s=8)["hang"].why == "on try 2"
    nothing_lost_nothing_twice(cells, tmp_path)


DRIVER = """
import sys
from flashlab.show import sweep
sweep.gpus_here = lambda: {there!r}
from flashlab.cli.app import main
sys.argv = ["flashlab", "sweep", "run", "--set", "made_up", "--file", {file!r}, "--out", {out!r}, "--data", {data!r}]
main()
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """A sweep in a process of its own."""
    where = {name: str(folder / name) for name in ("out", "data")} | {"file": str(folder / "cells.toml")}
    where["out"] = str(folder / "sweep")
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(there=THERE, **where)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(what: Callable[[], object], limit_s: float = 60.0) -> None:
    ends = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < ends, "it never came to that"
        time.sleep(0.1)


def left_of(folder: Path) -> list[str]:
    """The processes that still work for a sweep there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in said:
            found.append(said)
    return found


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)])
def test_a_sweep_that_is_ended_mid_cell_goes_on(how: signal.Signals, make: Make, tmp_path: Path) -> None:
    cells = make("", pause="1")
    process = start(tmp_path)
    wait_for(lambda: rows(tmp_path))
    process.send_signal(how)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == (143 if how == signal.SIGTERM else -9), output
    if how == signal.SIGTERM:
        wait_for(lambda: not left_of(tmp_path), 10)
        assert 0 < len(rows(tmp_path)) < 4
    else:  # What it started ends by itself, and holds the cell until then.
        assert [one["state"] for one in sweep.planned(cells, tmp_path / "sweep", tmp_path / "data")] == ["running"]
        wait_for(lambda: not left_of(tmp_path))
    assert run(cells, tmp_path)[""].state == "done"
    nothing_lost_nothing_twice(cells, tmp_path)
    assert store.verify(fake_cell.SLUG, tmp_path / "data") == ()


def test_ctrl_c_waits_for_no_cell_that_has_not_begun(make: Make, tmp_path: Path) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweep.run(make("", ""), tmp_path / "sweep", tmp_path / "data", available=THERE, live=interrupt)
    assert time.monotonic() - began < 8


def test_two_sweeps_on_one_folder_share_its_cells(make: Make, tmp_path: Path) -> None:
    cells = make("", pause="0.5")
    first, second = start(tmp_path), start(tmp_path)
    said = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert sorted((first.returncode, second.returncode)) in ([0, 0], [0, 1]), said
    if first.returncode or second.returncode:
        assert any("runs it" in one for one in said)
    nothing_lost_nothing_twice(cells, tmp_path)


def test_a_cell_is_run_again_for_what_it_depends_on_alone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = make("")
    assert run((one,), tmp_path)[""].state == "done"
    ran_at = (tmp_path / "sweep" / one.id / f"{one.notebook.stem}.cell.json").read_bytes()
    assert run((one,), tmp_path)[""].state == "done"
    assert (tmp_path / "sweep" / one.id / f"{one.notebook.stem}.cell.json").read_bytes() == ran_at
    changed = one.model_copy(update={"digests": one.digests | {"kernels/05_wmma.cu": "0" * 64}})
    now = sweep.state(changed, tmp_path / "sweep" / one.id, tmp_path / "data")
    assert (now.state, now.why) == ("left", "changed since it ran: kernels/05_wmma.cu")
    (run_file,) = {row.run for row in store.measurements(fake_cell.SLUG, tmp_path / "data")} & {
        sorted((tmp_path / "data" / fake_cell.SLUG / "runs").iterdir())[0].stem
    }
    (tmp_path / "data" / fake_cell.SLUG / "runs" / f"{run_file}.jsonl").unlink()
    now = sweep.state(one, tmp_path / "sweep" / one.id, tmp_path / "data")
    assert now.state == "left"
    assert "its records are not in" in now.why


def test_a_cell_depends_on_the_kernels_it_names() -> None:
    (every,) = (one for one in sweep.cells_of("quick", available=["x"]) if one.notebook.stem == "02_ladder")
    named = sweep.cell(every.notebook, "x", {"stages": "05_wmma"})
    kernels = {name for name in named.digests if name.startswith("kernels/")}
    assert "kernels/05_wmma.cu" in kernels
    assert "kernels/common/wmma.cuh" in kernels
    assert not {"kernels/06_cp_async.cu", "kernels/common/hopper.cuh"} & kernels
    assert {f"kernels/{stage.id}{stage.source.suffix}" for stage in registry.STAGES.values()} <= every.digests.keys()
    assert every.digests["kernels/05_wmma.cu"] == named.digests["kernels/05_wmma.cu"]


def test_a_gpu_that_nobody_has_is_refused_at_once_with_what_is_there(make: Make, tmp_path: Path) -> None:
    cells = make("")
    with pytest.raises(NoGpuError, match=r"wanted test-gpu, found 2 nvidia-h200"):
        sweep.run(cells, tmp_path / "sweep", tmp_path / "data", available={"nvidia-h200": 2})
    assert not (tmp_path / "sweep").exists()


def test_a_mistyped_parameter_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copy(NOTEBOOKS / "02_ladder.ipynb", tmp_path)
    text = "[[made_up]]\nnotebook = '02_ladder'\nminutes = 1\nparameters = {sutie = 'first'}"
    (tmp_path / "cells.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ParameterError, match=r"suite.*got sutie"):
        sweep.cells_of("made_up", tmp_path / "cells.toml", available=["x"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "wanted one of the sets.*none.*got 'made_up'"),
        ("[[made_up]]\nnotebook = '02_ladder'", "minutes: Field required"),
        ("[[made_up]]\nnotebook = 'nowhere'\nminutes = 1", "wanted one that exists"),
        ("[[made_up", "wanted a TOML file of cells"),
    ],
)
def test_a_file_of_cells_that_makes_no_sense_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "cells.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ParameterError, match=words):
        sweep.cells_of("made_up", tmp_path / "cells.toml", available=["x"])


def test_lists_of_values_make_a_cell_of_each() -> None:
    cells = [one for one in sweep.cells_of("full", available=["a", "b"]) if one.notebook.stem == "02_ladder"]
    assert [(one.gpu, one.parameters["suite"]) for one in cells] == [
        (gpu, of) for gpu in ("a", "b") for of in ("standard", "peers", "lengths")
    ]
    assert len({one.id for one in cells}) == len(cells)


def test_a_first_look_takes_less_than_twelve_minutes() -> None:
    """The minutes in the file of cells are not less than the estimate."""
    cells = sweep.cells_of("quick", available=["x"])
    for one in cells:
        if one.parameters.get("suite"):
            stages = one.parameters["stages"].split(",") if "stages" in one.parameters else None
            plan = bench.plan_of(one.parameters["suite"])
            _, seconds = bench.estimate(suite(one.parameters["suite"]), stages=stages, plan=plan, ceilings=False)
            assert seconds <= 60 * one.minutes
    shown = site.showing("", stages="")
    assert sum(one.minutes for one in cells) + sum(one.minutes for one in shown) / 2 < 12
    assert {one.notebook.stem for one in shown} == set(PAGE_OF)


ray_installed = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import ray"], capture_output=True, check=False).returncode != 0,
    reason="ray is not installed: pip install 'flashlab[sweep]'",
)


@ray_installed
def test_ray_gives_each_cell_a_gpu_of_its_own(make: Make, tmp_path: Path) -> None:
    """Two made-up GPUs: cells on one at once would meet its lock, and a worker that dies is tried again."""
    cells = make("", "kernel", "papermill", pause="0.2")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with sweep.with_ray("local", available={fake_cell.SLUG: 2}) as ray:
        assert sweep.ray_gpus(ray) == {fake_cell.SLUG: 2}
        with pytest.raises(NoGpuError, match="found 2 test-gpu"):
            sweep.run(
                [cells[0].model_copy(update={"gpu": "nvidia-h200"})], tmp_path / "sweep", tmp_path / "data", ray=ray
            )
        ended = sweep.run(cells, tmp_path / "sweep", tmp_path / "data", ray=ray, timeout_s=60)
    assert {one.state for one in ended.values()} == {"done"}
    nothing_lost_nothing_twice(cells, tmp_path)
