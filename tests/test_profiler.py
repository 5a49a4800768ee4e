"""Profiles: what Nsight Compute writes is read, what it refuses is dropped, and a launch that breaks costs itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashlab import gpu, profiler, records
from flashlab.errors import LaunchError, MissingError, ParameterError
from flashlab.problem import FIRST_SHAPE, Problem
from flashlab.records import Machine

FIRST = Problem.parse(FIRST_SHAPE)
SLUG = "made-up-gpu"
# For the shell and for Python alike: a path with a space cannot stand after #!.
FAKE = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, re, sys
plan = json.load(open({plan!r}))
arguments = sys.argv[1:]
with open(plan["log"], "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if arguments == ["--query-metrics"]:
    print("Device NVIDIA Made-Up")
    for name in plan["known"]:
        print(name + "   Counter   what it counts")
    sys.exit(0)
metrics = arguments[arguments.index("--metrics") + 1].split(",")
refused = [name for name in metrics if name.split(".")[0] in plan["refuse"]]
if refused:
    print("==ERROR== Failed to find metric " + refused[0])
    sys.exit(1)
job = json.loads(arguments[-1])
lines = ["==PROF== Connected", '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
for number, stage in enumerate(job["stages"]):
    if stage in plan["break"]:
        break
    for name in metrics:
        value = "nan" if name in plan["nan"] else "1,234.5"
        lines.append(f'"{{number}}","1","attention_{{stage}}(AttentionParams)","{{name}}","","{{value}}"')
open(arguments[arguments.index("--log-file") + 1], "w").write("\\n".join(lines))
sys.exit(1 if set(job["stages"]) & set(plan["break"]) else 0)
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program named ncu that follows a plan; returns what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program, plan_file, log = folder / "ncu", tmp_path / "plan.json", tmp_path / "asked.jsonl"
    program.write_text(FAKE.format(python=sys.executable, plan=str(plan_file)), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    info = SimpleNamespace(name="Made-Up GPU", slug=SLUG, arch="sm_90a")
    monkeypatch.setattr(gpu, "info", lambda device=0: info)

    def set_up(**plan: Any) -> Any:
        whole = {"known": [], "refuse": [], "break": [], "nan": [], "log": str(log), **plan}
        plan_file.write_text(json.dumps(whole), encoding="utf-8")
        return lambda: [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]

    return set_up


def _profile(tmp_path: Path, *stage_ids: str, **options: Any) -> tuple[list[records.StageProfile], list[str]]:
    said: list[str] = []
    path, found = profiler.profile(stage_ids, FIRST, data=tmp_path / "data", say=said.append, **options)
    assert path.parent == tmp_path / "data" / SLUG / "profiles"
    assert records.profiles(SLUG, tmp_path / "data") == found
    return list(found), said


def test_every_stage_gets_a_record(tmp_path: Path, ncu: Any) -> None:
    asked = ncu()
    found, said = _profile(tmp_path, "00_naive", "05_wmma")
    assert [one.stage for one in found] == ["00_naive", "05_wmma"]
    assert all(set(one.metrics) == set(profiler.METRICS) for one in found)
    assert found[0].metrics["sm__cycles_active.avg"] == 1234.5
    assert found[0].problem.problem() == FIRST
    assert said == []
    assert len(asked()) == 2  # the question what there is, and one run of both
    gpu_record = records.Gpu(
        slug=SLUG, name="Made-Up GPU", compute_capability=(9, 0), sm_count=1, max_sm_clock_mhz=None, memory_bytes=1,
        l2_bytes=1, power_limit_w=None, driver="1", fingerprint="0123456789ab",
    )  # fmt: skip
    records.write_machine(Machine(gpu=gpu_record, host={}), tmp_path / "data")
    records.write_checksums(SLUG, tmp_path / "data")
    assert records.verify(SLUG, tmp_path / "data") == ()


def test_a_launch_that_breaks_costs_itself(tmp_path: Path, ncu: Any) -> None:
    ncu(**{"break": ["01_coalesced"]})
    found, said = _profile(tmp_path, "00_naive", "01_coalesced", "05_wmma")
    assert [one.stage for one in found] == ["00_naive", "05_wmma"]
    assert "01_coalesced: not profiled" in said
    with pytest.raises(LaunchError, match="01_coalesced"):
        _profile(tmp_path, "01_coalesced")


def test_metrics_that_are_not_there_are_dropped_and_named(tmp_path: Path, ncu: Any) -> None:
    known = [name.split(".")[0] for name in profiler.METRICS if "gmma" not in name and not name.endswith(".ratio")]
    ncu(known=known, refuse=["dram__throughput", "lts__t_sectors"], nan=["gpu__time_duration.sum"])
    (found,), said = _profile(tmp_path, "00_naive")
    lost = set(profiler.METRICS) - set(found.metrics)
    averages = {name for name in profiler.METRICS if name.endswith(".ratio")}
    assert {"dram__throughput", "lts__t_sectors", "gpu__time_duration"} <= {name.split(".")[0] for name in lost}
    assert averages <= set(found.metrics)
    assert any(line.startswith("unknown here: sm__inst_executed_pipe_tensor_op_gmma") for line in said)
    assert sum("ncu has no" in line for line in said) == 2


def test_what_cannot_be_profiled_is_refused(tmp_path: Path, ncu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu()
    with pytest.raises(ParameterError, match="D256"):
        profiler.profile(["00_naive"], Problem.parse("1x1x64x256"), data=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="ncu"):
        profiler.profile(["00_naive"], FIRST, data=tmp_path)


@pytest.mark.parametrize("wide", [False, True])
def test_what_ncu_writes(wide: bool) -> None:
    rows = [
        ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"),
        ("10", "attention_b(AttentionParams)", "m__a.sum", "inst", "2"),
        ("9", "attention_a", "m__a.sum", "inst", "1,234"),
        ("9", "attention_a", "m__b.sum", "", "0.5"),
        ("9", "attention_a", "m__c.sum", "", "n/a"),
    ]
    if wide:
        rows = [
            ("ID", "Kernel Name", "m__a.sum", "m__b.sum", "m__c.sum"),
            ("", "", "inst", "", ""),
            ("9", "attention_a", "1,234", "0.5", "n/a"),
            ("10", "attention_b(AttentionParams)", "2", "", ""),
        ]
    text = "==PROF== Connected\n" + "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)
    assert profiler.parse(text) == [
        ("attention_a", {"m__a.sum": 1234, "m__b.sum": 0.5}),
        ("attention_b", {"m__a.sum": 2}),
    ]
    assert profiler.parse("==ERROR== none\n") == []


def test_a_profile_says_what_the_units_did() -> None:
    active = ".avg.pct_of_peak_sustained_active"
    profile = records.StageProfile(
        gpu="G", commit="unknown", dirty=True, stage="00_naive", problem=records.ProblemFields.of(FIRST), time="",
        metrics={
            f"sm__pipe_tensor_op_hmma_cycles_active{active}": 61.0,
            f"sm__inst_executed_pipe_xu{active}": 50.0,
            f"smsp__issue_active{active}": 40.0,
            "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": 1.0,
            "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": 1.0,
            "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio": 2.0,
            "smsp__average_warps_issue_stalled_drain_per_issue_active.ratio": 0.0,
        },
    )  # fmt: skip
    assert (profile.tensor_percent, profile.exp_percent, profile.issue_percent) == (61.0, 50.0, 40.0)
    assert profile.fma_percent is None
    assert profile.states == {"gmma": 50.0, "wait": 25.0, "selected": 25.0}
    assert next(iter(profile.states)) == "gmma"
