"""The emulation away from x86-64 and g++: clang++, ucontext in place of the assembly, and another processor by QEMU."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shared import needs_compiler

from flashlab import emulate
from flashlab.build.compiler import Variant
from flashlab.core.paths import KERNELS
from flashlab.core.problem import Problem
from flashlab.kernels.registry import get
from flashlab.run import emulator
from flashlab.verify import oracle
from flashlab.verify.verdict import check

STAGE = "06_cp_async"
"""cp.async, WMMA, block and warp barriers, dynamic shared memory."""
PROBLEM = Problem.parse("1x2x33x64", mask="causal")
AARCH64 = ("aarch64-linux-gnu-g++", "qemu-aarch64")

pytestmark = needs_compiler


def passes(*, schedule: str = "ascending", races: bool = False) -> str:
    """The checker's reason, empty where the stage is right; findings count as reasons."""
    q, k, v = oracle.make_inputs(PROBLEM)
    ran = emulate(q, k, v, causal=True, stage=STAGE, schedule=schedule, races=races, timeout_s=120)
    found = [str(finding) for finding in ran.report.findings]
    return check(ran.out, ran.lse, q, k, v, causal=True, dtype="float16").reason or "; ".join(found)


def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
    """Leave nothing on PATH but these programs."""
    for name in programs:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not installed")
        (tmp_path / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("races", [pytest.param(False, id="fast"), pytest.param(True, id="hooks")])
def test_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, races: bool) -> None:
    only(tmp_path, monkeypatch, "clang++", "ld", "addr2line")
    assert emulator.cxx().family == "clang++"
    assert passes(races=races) == ""


def build_by_hand(folder: Path, compiler: str, *options: str) -> Path:
    """The stage's executable, with the commands that emulator.py runs, and `options` besides."""
    built = emulator.build_stage(Variant(stage=get(STAGE), head_dim=64, dtype="float16", causal=True), hooks=False)
    words = shlex.split(built.command)
    unit = folder / "unit.cpp"
    unit.write_text(
        f'#include "{built.source}"\nEMULATE({built.entry}, &launch_shape)\n',
        encoding="utf-8",
    )
    objects = [folder / "unit.o"]
    subprocess.run(
        [compiler, *words[3 : words.index("-c")], *options, "-x", "c++", "-c", str(unit), "-o", str(objects[0])],
        check=True,
    )
    runtime = KERNELS / "emulation" / "runtime"
    sources = sorted(runtime.glob("*.cpp"), key=lambda path: (path.name != "boundary.cpp", path.name))
    for source in sources:
        objects.append(folder / f"{source.stem}.o")
        flags = ["-std=c++20", "-O1", "-fPIE", "-pthread", f"-I{runtime.parent}", *options]
        subprocess.run([compiler, *flags, "-c", str(source), "-o", str(objects[-1])], check=True)
    executable = folder / "kernel"
    subprocess.run([compiler, "-pthread", "-pie", *map(str, objects), "-o", str(executable)], check=True)
    return executable


def runs_as(executable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package run this executable for the stage."""
    real = emulator.build_stage
    monkeypatch.setattr(
        emulator, "build_stage", lambda *args, **options: replace(real(*args, **options), executable=executable)
    )


@pytest.mark.exhaustive
def test_ucontext_in_place_of_the_assembly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = build_by_hand(tmp_path, emulator.cxx().path, "-DFLASHLAB_UCONTEXT")
    symbols = subprocess.run(["nm", str(executable)], capture_output=True, text=True, check=True).stdout
    assert "swapcontext" in symbols
    assert "flashlab_switch" not in symbols
    runs_as(executable, monkeypatch)
    for schedule in ("ascending", "seeded:3"):
        assert passes(schedule=schedule) == "", schedule


@pytest.mark.exhaustive
def test_aarch64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [name for name in AARCH64 if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")
    executable = build_by_hand(tmp_path, AARCH64[0])
    header = np.fromfile(executable, dtype=np.uint16, count=10)
    assert header[9] == 183  # EM_AARCH64: it is the other processor's
    script = tmp_path / "run"
    script.write_text(f'#!/bin/sh\nexec {AARCH64[1]} -L /usr/aarch64-linux-gnu {executable} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    runs_as(script, monkeypatch)
    assert passes() == ""
