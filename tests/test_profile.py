"""Profiles: what Nsight Compute writes is read, samples reach source lines, and a launch that breaks costs itself."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic import profile as made_up

from flashlab.build import compiler, sass
from flashlab.cli import app
from flashlab.core.errors import LaunchError, MissingError, ParameterError
from flashlab.core.problem import FIRST_SHAPE, Problem
from flashlab.kernels import registry
from flashlab.measure import profile
from flashlab.measure.options import Options
from flashlab.measure.profile import Launch
from flashlab.record import schema, store
from flashlab.run import gpu

FIRST = Problem.parse(FIRST_SHAPE)
SLUG = "made-up-gpu"
GPU = {
    "slug": SLUG, "name": "Made-Up GPU", "compute_capability": [9, 0], "sm_count": 1, "max_sm_clock_mhz": None,
    "memory_bytes": 1, "l2_bytes": 1, "power_limit_w": None, "driver": "1",
}  # fmt: skip
# For the shell and for Python alike: a path with a space cannot stand after #!.
FAKE = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, os, sys
plan = json.load(open({plan!r}))
arguments = sys.argv[1:]
with open(plan["log"], "a") as log:
    log.write(json.dumps(arguments) + "\\n")
after = lambda option: arguments[arguments.index(option) + 1]
if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880) (public-release)")
elif "--query-metrics" in arguments:
    print("Device NVIDIA Made-Up")
    for name in plan["known"]:
        print(name + "   Counter   what it counts")
elif "--import" in arguments:
    report = json.load(open(after("--import")))
    if after("--page") == "raw":
        print('"ID","Kernel Name",' + ",".join(f'"{{name}}"' for name in report["metrics"]))
        print('"","",' + ",".join('"unit"' for name in report["metrics"]))
    for number, stage in enumerate(report["stages"]):
        if after("--page") == "raw":
            values = ["nan" if name in plan["nan"] else "1,234.5" for name in report["metrics"]]
            print(f'"{{number}}","attention_{{stage}}",' + ",".join(f'"{{value}}"' for value in values))
        elif stage in plan["listings"]:
            print(f'"Kernel Name","attention_{{stage}}",')
            print('"Address","Source","# Samples","stall_barrier","stall_long_sb","stall_barrier (Not Issued)"')
            for position, text in enumerate(plan["listings"][stage]):
                count = position % 3
                print(f'"0x{{0x7efa53700000 + 16 * position:x}}","      {{text}}","{{count}}","{{count}}","0","0"')
else:
    if plan["forbidden"]:
        print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access performance counters")
        sys.exit(1)
    metrics = after("--metrics").split(",")
    refused = [name for name in metrics if name.split(".")[0] in plan["refuse"]]
    if refused:
        print("==ERROR== Failed to find metric " + refused[0])
        sys.exit(1)
    pipe = open(after("--connect"), "w")
    job = json.load(open(os.path.dirname(after("--connect")) + "/job.json"))
    def send(**message):
        pipe.write(json.dumps(message) + "\\n")
        pipe.flush()
    send(type="hello", gpu=plan["gpu"], software={{}})
    broken = set(job["stages"]) & set(plan["break"])
    ran = [stage for stage in job["stages"] if stage not in broken] if not broken else []
    for stage in ran:
        sha256 = plan["sha256"].get(stage, "0" * 64)
        send(type="launched", stage=stage, sha256=sha256, parameters={{"TILE_Q": 64}}, tile_q=64)
    if ran:
        send(type="done")
        json.dump({{"metrics": metrics, "stages": ran}}, open(after("--export"), "w"))
    sys.exit(1 if broken else 0)
"""


@pytest.fixture(autouse=True)
def compiled_alike(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with line information and without in fresh processes, into a cache of their own: in a process that had
    compiled much else before, NVRTC has made other machine code of one of the two."""
    monkeypatch.setattr(compiler, "_ALTERS_NVRTC", ("pytest",))
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache_of_profiles"))


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program named ncu that follows a plan; returns what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program, plan_file, log = folder / "ncu", tmp_path / "plan.json", tmp_path / "asked.jsonl"
    program.write_text(FAKE.format(python=sys.executable, plan=str(plan_file)), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    info = SimpleNamespace(name="Made-Up GPU", slug=SLUG, arch="sm_90a", record=SimpleNamespace(driver="1"))
    monkeypatch.setattr(gpu, "info", lambda device=0: info)

    def set_up(**plan: Any) -> Any:
        nothing: dict[str, Any] = {"known": [], "refuse": [], "break": [], "nan": [], "listings": {}, "sha256": {}}
        fingerprint = sha256(str(tmp_path).encode()).hexdigest()[:12]  # locked while it is profiled
        whole = {**nothing, "gpu": {**GPU, "fingerprint": fingerprint}, "forbidden": False, "log": str(log), **plan}
        plan_file.write_text(json.dumps(whole), encoding="utf-8")
        return lambda: [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]

    return set_up


def _profile(tmp_path: Path, *stage_ids: str, **options: Any) -> tuple[list[schema.StageProfile], list[str]]:
    said: list[str] = []
    path, found, missed = profile.profile(
        stage_ids, FIRST, replace(profile.OPTIONS, data=tmp_path / "data", note=said.append, **options)
    )
    assert path.parent == tmp_path / "data" / SLUG / "profiles"
    assert store.records(SLUG, schema.StageProfile, tmp_path / "data") == found
    assert {one.run for one in found} == {path.stem}
    assert [f"{name}: not profiled" for name in missed] == [line for line in said if line.endswith("not profiled")]
    return list(found), said


def _cubins(stage_id: str) -> tuple[compiler.Cubin, compiler.Cubin]:
    """What is launched at the first shape on the made-up GPU, and the same with line information."""
    options: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "causal": False, "arch": "sm_90a"}
    stage = registry.get(stage_id)
    return compiler.compile_stage(compiler.Job(stage=stage, **options)), compiler.compile_stage(
        compiler.Job(stage=stage, **options, line_info=True)
    )


def _listing(cubin: compiler.Cubin) -> list[str]:
    """A kernel's instructions as ncu writes them."""
    found = []
    for one in sass.disassemble(cubin.code, cubin.entry):
        guard = f"{one.predicate} " if one.predicate and one.predicate.startswith("@") else ""
        found.append(f"{guard}{one.opcode} {one.operands}".strip())
    return found


def test_every_stage_gets_a_record_with_the_lines_that_its_samples_are_of(tmp_path: Path, ncu: Any) -> None:
    plain, _ = _cubins("05_wmma")
    listing = _listing(plain)
    asked = ncu(listings={"00_naive": ["EXIT"], "05_wmma": listing}, sha256={"05_wmma": plain.sha256})
    found, said = _profile(tmp_path, "00_naive", "05_wmma")
    assert [one.stage for one in found] == ["00_naive", "05_wmma"]
    assert all(set(one.metrics) == set(profile.METRICS) for one in found)
    assert found[0].metrics["sm__cycles_active.avg"] == 1234.5
    assert found[0].problem == FIRST
    assert found[0].ncu == "2025.3.1.0"
    runs = [line for line in asked() if "--export" in line]
    assert len(runs) == 1  # one process for both
    assert runs[0][runs[0].index("--profile-from-start") + 1] == "off"  # the launches that warm up are not profiled
    assert runs[0][runs[0].index("--clock-control") + 1] == "none"
    assert found[0].lines == ()
    assert any(line.startswith("00_naive: no lines: ncu took no samples") for line in said)
    wmma = found[1]
    assert wmma.samples == {"barrier": sum(position % 3 for position in range(len(listing)))}
    assert len(wmma.lines) == profile.LINES
    assert [line.total for line in wmma.lines] == sorted((line.total for line in wmma.lines), reverse=True)
    source = registry.get("05_wmma").source.read_text(encoding="utf-8").splitlines()
    own = [line for line in wmma.lines if line.file == "05_wmma.cu"]
    assert len(own) > profile.LINES // 2
    assert all(source[line.line - 1].strip() == line.text for line in own)
    assert store.verify(SLUG, tmp_path / "data") == ()


def test_what_is_on_record_is_not_profiled_again(tmp_path: Path, ncu: Any) -> None:
    plain, _ = _cubins("05_wmma")
    ncu(sha256={"05_wmma": plain.sha256})
    _profile(tmp_path, "05_wmma")
    said: list[str] = []
    options = Options(data=tmp_path / "data", note=said.append, resume=True)
    assert profile.profile(["05_wmma"], FIRST, options) == (None, (), ())
    assert said == ["all of it is on record; nothing was profiled"]
    _, found, _ = profile.profile(["00_naive", "05_wmma"], FIRST, options)
    assert [one.stage for one in found] == ["00_naive"]


def test_a_launch_that_breaks_costs_itself(tmp_path: Path, ncu: Any) -> None:
    ncu(**{"break": ["01_coalesced"]})
    found, said = _profile(tmp_path, "00_naive", "01_coalesced", "05_wmma")
    assert [one.stage for one in found] == ["00_naive", "05_wmma"]
    assert "01_coalesced: not profiled" in said
    with pytest.raises(LaunchError, match="01_coalesced"):
        _profile(tmp_path, "01_coalesced")


def test_what_was_profiled_is_kept_whatever_comes_after_it(
    tmp_path: Path, ncu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = _cubins("05_wmma")
    ncu(**{"break": ["01_coalesced"]}, listings={"05_wmma": _listing(plain)}, sha256={"05_wmma": plain.sha256})

    def none(*_: object) -> Any:
        raise MissingError("wanted nvdisasm, found none")

    monkeypatch.setattr(profile.sass, "disassemble", none)
    found, said = _profile(tmp_path, "05_wmma")
    assert (found[0].stage, found[0].lines) == ("05_wmma", ())
    assert "05_wmma: no lines: wanted nvdisasm, found none" in said
    under_ncu = profile.under_ncu

    def broken_off(*what: Any, job: Any, **how: Any) -> Any:
        if job["stages"] == ["16_ones_column"]:
            raise KeyboardInterrupt
        return under_ncu(*what, job=job, **how) if len(job["stages"]) == 1 else []

    monkeypatch.setattr(profile, "under_ncu", broken_off)
    with pytest.raises(KeyboardInterrupt):
        profile.profile(["00_naive", "05_wmma", "16_ones_column"], FIRST, Options(data=tmp_path / "other"))
    assert [one.stage for one in store.records(SLUG, schema.StageProfile, tmp_path / "other")] == [
        "00_naive",
        "05_wmma",
    ]
    assert (tmp_path / "other" / SLUG / "CHECKSUMS").is_file()


def test_metrics_that_are_not_there_are_dropped_and_named(tmp_path: Path, ncu: Any) -> None:
    known = [name.split(".")[0] for name in profile.METRICS if "gmma" not in name]
    ncu(known=known, refuse=["dram__bytes_write", "lts__t_sectors"], nan=["gpu__time_duration.sum"])
    (found,), said = _profile(tmp_path, "00_naive")
    lost = set(profile.METRICS) - set(found.metrics)
    assert {"dram__bytes_write", "lts__t_sectors", "gpu__time_duration"} <= {name.split(".")[0] for name in lost}
    assert any(re.match("unknown here: .*shared_op_gmma", line) for line in said)
    assert sum("ncu has no" in line for line in said) == 2


def test_the_command_line_shows_units_and_lines(
    tmp_path: Path, ncu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, _ = _cubins("05_wmma")
    ncu(listings={"05_wmma": _listing(plain)}, sha256={"05_wmma": plain.sha256}, **{"break": ["00_naive"]})
    command = ["flashlab", "profile", "05_wmma", "--data", str(tmp_path / "data"), "--lines", "2"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="0"):
        app.main()
    shown = capsys.readouterr()
    (one,) = store.records(SLUG, schema.StageProfile, tmp_path / "data")
    assert "barrier 100 %" in shown.out
    for line in one.lines[:2]:
        assert f"{line.file}:{line.line} " in shown.out
        assert line.text in shown.out
    assert one.lines[2].text not in shown.out
    assert f"profiles/{one.run}.jsonl" in shown.err
    monkeypatch.setattr(sys, "argv", [*command, "00_naive", "--json"])
    with pytest.raises(SystemExit, match="1"):  # one of the two could not be profiled
        app.main()
    assert [line["stage"] for line in json.loads(capsys.readouterr().out)] == ["05_wmma"]


def test_what_cannot_be_profiled_is_refused(tmp_path: Path, ncu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu(forbidden=True)
    with pytest.raises(ParameterError, match="D256"):
        profile.profile(["00_naive"], Problem.parse("1x1x64x256"), Options(data=tmp_path))
    with pytest.raises(MissingError, match=r"(?s)ERR_NVGPUCTRPERM.*SYS_ADMIN.*NVreg_RestrictProfilingToAdminUsers=0"):
        profile.profile(["00_naive"], FIRST, Options(data=tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(MissingError, match=r"ncu.*cuda-nsight-compute"):
        profile.profile(["00_naive"], FIRST, Options(data=tmp_path))


def test_what_ncu_writes() -> None:
    rows = [
        ("ID", "Kernel Name", "m__a.sum", "m__b.sum", "m__c.sum"),
        ("", "", "inst", "", ""),
        ("10", "attention_b(AttentionParams)", "2", "", ""),
        ("9", "attention_a", "1,234", "0.5", "n/a"),
    ]
    text = "==PROF== Connected\n" + "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)
    assert profile.parse(text) == [
        ("attention_a", {"m__a.sum": 1234, "m__b.sum": 0.5}),
        ("attention_b", {"m__a.sum": 2}),
    ]
    assert profile.parse("==ERROR== none\n") == []


# As version 2025.3.1 wrote it on an H200; some columns are left out.
SOURCE_PAGE = """\
"Kernel Name","attention_06_cp_async",
"Address","Source","# Samples","stall_imc","stall_no_inst","stall_wait","stall_no_inst (Not Issued)"
"0x7efa537a3c00","      LDC R1, c[0x0][0x28]","30","0","29","1","26"
"0x7efa537a3c10","      IMAD.MOV.U32 R63, RZ, RZ, RZ","0","0","0","0","0"
"0x7efa537a3c20","  @!P1  ULDC UR4, c[0x0][0x2a0]","23","22","0","1","0"
"Kernel Name","attention_16_ones_column",
"Address","Source","# Samples","stall_dispatch","stall_mio","stall_not_selected","stall_selected","stall_wait"
"0x7efa537ae7d0","      HGMMA.64x128x16.F32 R24, gdesc[UR16], RZ, !UPT","127","6","8","6","8","5"
"""


def test_samples_are_read_with_the_state_that_the_page_has_no_column_for() -> None:
    first, second = profile.parse_source(SOURCE_PAGE)
    assert (first.kernel, second.kernel) == ("attention_06_cp_async", "attention_16_ones_column")
    assert first.samples == {0: {"no_instruction": 29, "wait": 1}, 2: {"imc_miss": 22, "wait": 1}}
    assert first.listing[2] == "@!P1  ULDC UR4, c[0x0][0x2a0]"
    assert second.samples[0] == {
        "dispatch_stall": 6, "mio_throttle": 8, "not_selected": 6, "selected": 8, "wait": 5, "gmma": 94,
    }  # fmt: skip
    assert profile.parse_source("==ERROR== none\n") == []


def test_samples_are_traced_only_in_the_machine_code_that_was_launched() -> None:
    plain, lined = _cubins("16_ones_column")
    other, _ = _cubins("12_persistent")
    listing = _listing(plain)
    launch = Launch(kernel=plain.entry, metrics={}, listing=listing, samples={0: {"wait": 1}})
    assert compiler.instructions(plain.code) == compiler.instructions(lined.code) != {}
    assert profile.why_no_lines(launch, plain.sha256, plain, lined) is None
    assert "no samples" in str(profile.why_no_lines(replace(launch, samples={}), plain.sha256, plain, lined))
    assert "other machine code" in str(profile.why_no_lines(launch, other.sha256, plain, lined))
    assert "other machine code" in str(profile.why_no_lines(launch, plain.sha256, None, lined))
    assert "with line information" in str(profile.why_no_lines(launch, other.sha256, other, lined))
    swapped = replace(launch, listing=[listing[1], listing[0], *listing[2:]])
    assert "listing" in str(profile.why_no_lines(swapped, plain.sha256, plain, lined))


def test_an_instruction_inlined_from_a_header_counts_for_the_line_that_calls_it() -> None:
    plain, lined = _cubins("16_ones_column")
    places = sass.lines(lined.code, lined.entry)
    assert sass.lines(plain.code, plain.entry) == {}
    listing = _listing(plain)
    exponentials = [position for position, text in enumerate(listing) if "MUFU.EX2" in text]
    samples = {position: {"wait": 2} for position in exponentials}
    launch = Launch(kernel=plain.entry, metrics={}, listing=listing, samples=samples)
    found = profile.trace(launch, registry.get("16_ones_column"), lined)
    assert exponentials
    assert {places[16 * position][0].file.name for position in exponentials} == {"ptx.cuh"}
    assert {line.file for line in found} == {"16_ones_column.cu"}
    assert sum(line.total for line in found) == 2 * len(exponentials)
    assert all("ex2" in line.text for line in found)


def test_a_profile_says_what_the_units_did() -> None:
    active = ".avg.pct_of_peak_sustained_active"
    one = made_up(
        "00_naive",
        FIRST,
        metrics={
            f"sm__pipe_tensor_cycles_active{active}": 61.0,
            f"sm__inst_executed_pipe_xu{active}": 50.0,
            f"smsp__issue_active{active}": 40.0,
            "gpu__time_duration.sum": 2500.0,
            "dram__bytes_read.sum": 100.0,
            "dram__bytes_write.sum": 20.0,
            "lts__t_sectors_srcunit_tex.sum": 10.0,
            "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": 4.0,
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 64.0,
            "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 200.0,
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 50.0,
            "launch__occupancy_limit_registers": 5.0,
            "launch__occupancy_limit_shared_mem": 3.0,
            "launch__block_size": 256.0,
            "sm__warps_active.avg.peak_sustained": 64.0,
        },
        samples={"wait": 10, "selected": 10, "gmma": 20},
    )
    assert (one.tensor_percent, one.exp_percent, one.issue_percent) == (61.0, 50.0, 40.0)
    assert one.fma_percent is None
    assert (one.time_us, one.dram_bytes, one.l2_bytes) == (2.5, 120.0, 320.0)
    assert (one.load_sectors, one.conflict_percent, one.warps_percent_limit) == (16.0, 25.0, 37.5)
    assert one.states == {"gmma": 50.0, "wait": 25.0, "selected": 25.0}
    assert next(iter(one.states)) == "gmma"
    bare = made_up("00_naive", FIRST, metrics={"dram__bytes_read.sum": 1.0}, samples={})
    assert (bare.dram_bytes, bare.l2_bytes, bare.load_sectors, bare.warps_percent_limit) == (None, None, None, None)
    assert bare.states == {}
