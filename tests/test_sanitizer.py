"""compute-sanitizer: what its tools write is read, what breaks is no clean record, and what is on record is clean."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import synthetic

from flashlab.core.errors import MissingError, ParameterError
from flashlab.core.paths import DATA
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.experiments import sanitizer
from flashlab.kernels import registry
from flashlab.measure import bench
from flashlab.measure.options import Options
from flashlab.query import select
from flashlab.record import store
from flashlab.record.schema import Sanitized
from flashlab.run import gpu
from flashlab.show import pages, tables

SLUG = "nvidia-h200"
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at attention_05_wmma+0x1230 in 05_wmma.cu:77
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f0000000000 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2d1] in libcuda.so.1
=========
========= Invalid __global__ read of size 2 bytes
=========     at attention_08_swizzle(AttentionParams)+0x20
=========
========= Invalid __shared__ write of size 4 bytes
=========     at some_other_kernel+0x20
=========
========= ERROR SUMMARY: 3 errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attention_06_cp_async+0x100
=========     and Read access at attention_06_cp_async+0x220 [1024 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
# For the shell and for Python alike: a path with a space cannot stand after #!.
FAKE = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, os, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2030.1.0.0 (build 1)")
    sys.exit(0)
tool = arguments[arguments.index("--tool") + 1]
plan = json.load(open({plan!r}))
path = arguments[arguments.index("--connect") + 1]
pipe = open(path, "w")
job = json.load(open(os.path.dirname(path) + "/job.json"))
def send(**message):
    pipe.write(json.dumps(message) + "\\n")
    pipe.flush()
send(type="hello")
stage = job["stage"]
for _ in range(8):
    send(type="launched", stage=stage)
for reason in plan["failed"].get(stage, []):
    send(type="failed", stage=stage, reason=reason)
log = plan["logs"].get(tool)
if log is not None:
    open(arguments[arguments.index("--log-file") + 1], "w").write(log)
print("the end")
if tool in plan["dead"]:
    sys.exit(9)
send(type="done")
"""


def _read(log: str) -> sanitizer.Watched:
    watched = sanitizer.Watched()
    watched.read(log)
    return watched


def test_a_clean_log_says_so() -> None:
    assert (_read(CLEAN).errors, _read(CLEAN).reports) == (0, {})


def test_reports_are_counted_for_the_kernel_they_name() -> None:
    found = _read(OUT_OF_BOUNDS)
    assert found.errors == 3
    read = "Invalid __global__ read of size 2 bytes"
    written = "Invalid __shared__ write of size 4 bytes"
    assert found.reports == {"05_wmma": [read], "08_swizzle": [read], "": [written]}


def test_races_are_counted_by_their_own_summary() -> None:
    found = _read(RACES)
    assert (found.errors, found.of("06_cp_async")["errors"]) == (1, 1)


def test_a_log_without_a_summary_has_no_total() -> None:
    assert _read("========= COMPUTE-SANITIZER\n").errors is None
    assert _read("").errors is None


def _here(arch: str) -> gpu.GpuInfo:
    record = synthetic.gpu(SLUG)
    info = gpu.GpuInfo(**{field.name: getattr(record, field.name, 0) for field in fields(gpu.GpuInfo)} | {"arch": arch})
    vars(info)["record"] = record  # NVML would say it
    return info


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program named compute-sanitizer that follows a plan."""
    folder, plan_file = tmp_path / "bin", tmp_path / "plan.json"
    folder.mkdir()
    program = folder / "compute-sanitizer"
    program.write_text(FAKE.format(python=sys.executable, plan=str(plan_file)), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(gpu, "info", lambda device=0: _here("sm_90a"))
    monkeypatch.setattr(bench, "compile_ahead", lambda *args, **how: None)

    def run(*stage_ids: str, **plan: Any) -> dict[tuple[str, str], Sanitized]:
        whole = {"logs": dict.fromkeys(sanitizer.TOOLS, CLEAN), "failed": {}, "dead": []} | plan
        plan_file.write_text(json.dumps(whole), encoding="utf-8")
        path, found = sanitizer.sanitize(stage_ids, options=replace(sanitizer.OPTIONS, data=tmp_path / "data"))
        assert path.parent == tmp_path / "data" / SLUG / "sanitizer"
        assert store.sanitized(SLUG, tmp_path / "data") == found
        assert [d for d in store.verify(SLUG, tmp_path / "data") if "machine" not in str(d.path)] == []
        return {(record.tool, record.stage): record for record in found}

    return run


def test_every_tool_and_stage_has_a_record(tool: Any) -> None:
    found = tool("05_wmma", "08_swizzle")
    assert set(found) == {(name, stage) for name in sanitizer.TOOLS for stage in ("05_wmma", "08_swizzle")}
    assert all(record.clean and record.launches == 8 for record in found.values())
    assert {record.version for record in found.values()} == {"Version 2030.1.0.0 (build 1)"}
    text = tables.sanitized(tuple(found.values()))
    assert "No errors were found." in text
    assert "| `05_wmma` | 0 in 8 |" in text


def test_what_a_tool_finds_is_not_clean(tool: Any) -> None:
    logs = dict.fromkeys(sanitizer.TOOLS, CLEAN) | {"memcheck": OUT_OF_BOUNDS, "racecheck": RACES}
    found = tool("05_wmma", "06_cp_async", logs=logs)
    assert (found["memcheck", "05_wmma"].errors, found["racecheck", "06_cp_async"].errors) == (1, 1)
    # A report that names no stage that was asked for is everyone's.
    assert found["memcheck", "06_cp_async"].errors == 0
    assert not found["memcheck", "06_cp_async"].clean
    assert found["racecheck", "05_wmma"].clean
    assert "Errors were found." in tables.sanitized(tuple(found.values()))


def test_a_tool_that_breaks_off_is_not_clean(tool: Any) -> None:
    found = tool("05_wmma", dead=["initcheck"], logs={"initcheck": CLEAN, "memcheck": CLEAN, "racecheck": CLEAN})
    assert not found["initcheck", "05_wmma"].clean
    assert "exit status 9" in found["initcheck", "05_wmma"].findings[-1]
    assert not found["synccheck", "05_wmma"].clean  # no log at all
    assert found["memcheck", "05_wmma"].clean


def test_a_launch_that_fails_is_an_error(tool: Any) -> None:
    found = tool("05_wmma", failed={"05_wmma": ["S1: refused"]})
    assert all(record.errors == 1 and not record.clean for record in found.values())


def test_what_cannot_be_run_is_refused(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="tools: wanted some of memcheck"):
        sanitizer.sanitize(tools=("leakcheck",), options=Options(data=tmp_path))
    monkeypatch.setattr(gpu, "info", lambda device=0: _here("sm_75"))
    with pytest.raises(ParameterError, match="wanted a stage that runs on sm_75"):
        sanitizer.sanitize(["08_swizzle"], options=Options(data=tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    monkeypatch.setattr(gpu, "info", lambda device=0: _here("sm_90a"))
    with pytest.raises(MissingError, match="compute-sanitizer"):
        sanitizer.sanitize(["08_swizzle"], options=Options(data=tmp_path))


@pytest.mark.parametrize("stage_id", [*registry.STAGES, *registry.DECODE, *registry.FP8])
def test_a_stage_is_launched_on_all_that_it_takes(stage_id: str) -> None:
    stage = registry.get(stage_id)
    cases = sanitizer.launches(stage_id)
    found = {(case.problem, case.aligned) for case in cases}
    of_each = [len(stage.head_dims), len(stage.dtypes), 2, 2 + (set(stage.features) >= {"window", "softcap"})]
    few_rows = sum(q_len <= 3 for q_len, _ in sanitizer.LENGTHS)
    assert len(found) == prod([*of_each, few_rows if stage.max_rows else len(sanitizer.LENGTHS)])
    assert all(stage.why_not(problem) is None for problem, _ in found)
    assert len(cases) == len(found)


def test_the_site_says_what_was_found(tool: Any, tmp_path: Path) -> None:
    def page() -> str:
        out = pages.Output(root=tmp_path / "generated")
        pages.check_records(out, select.load_all(tmp_path / "data"), tmp_path / "data")
        return (out.root / "snippets" / "sanitizer.md").read_text(encoding="utf-8")

    synthetic.write_synthetic(tmp_path / "data", SLUG, problems=[Problem.parse(FIRST_SHAPE)])
    assert "No such run is on record yet" in page()
    run = next(iter(tool("05_wmma").values())).run
    assert "| `05_wmma` | 0 in 8 |" in page()
    assert f"(generated/data/{SLUG}/sanitizer/{run}.jsonl.xz)" in page()


@pytest.mark.parametrize("slug", store.gpus() or ["none"])
def test_what_is_on_record_is_clean_and_of_every_tool(slug: str) -> None:
    records = store.sanitized(slug, DATA)
    if not records:
        pytest.skip(f"no run of compute-sanitizer on record for {slug}: scripts/sanitize.py makes one")
    assert [f"{r.tool} {r.stage}: {r.errors} errors, {r.findings[:1]}" for r in records if not r.clean] == []
    stages = {record.stage for record in records}
    assert {(r.tool, r.stage) for r in records} == {(tool, stage) for tool in sanitizer.TOOLS for stage in stages}
