from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from synthetic import write_synthetic

from flashlab.build import compiler, sass
from flashlab.cli import doctor
from flashlab.core.errors import MissingPackageError
from flashlab.core.problem import suite
from flashlab.record import store
from flashlab.run import emulator, gpu


def by_name(data: Path) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(data)}


def test_looks_at_everything(tmp_path: Path) -> None:
    found = by_name(tmp_path)
    for name in ("python", "compiler", "disassembler", "cpu", "gpu", "torch", "cupy", "triton", "flash-attention-3"):
        assert name in found
    for name in ("git", "g++", "chromium", "Python.h", "ncu", "cache", "build", "data"):
        assert name in found
    assert found["python"].state == found["compiler"].state == found["disassembler"].state == "ok"


def test_what_is_broken_has_a_fix(tmp_path: Path) -> None:
    for finding in doctor.examine(tmp_path):
        assert finding.detail
        assert finding.state != "broken" or finding.fix


def test_no_gpu_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda: "wanted a CUDA GPU, got no driver.")
    found = by_name(tmp_path)
    assert found["gpu"].state == "absent"
    assert "no driver" in found["gpu"].detail
    assert found["torch"].state in ("ok", "absent")
    assert not found["torch"].fix
    for name in ("torch", "triton"):
        if found[name].state == "absent":
            assert "Triton 3.9 or newer, in an environment of its own" in found[name].detail
    if found["cupy"].state == "absent":
        assert "not needed without a GPU" in found["cupy"].detail


def test_a_gpu_without_its_packages_gets_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available", lambda: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    found = by_name(tmp_path)["cupy"]
    assert found.state == "absent"
    assert "[gpu]" in found.fix
    assert "constraints.txt" in found.fix


def test_a_missing_compiler_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise MissingPackageError("wanted NVRTC, got nothing")

    monkeypatch.setattr(compiler, "compile_stage", refuse)
    found = by_name(tmp_path)["compiler"]
    assert (found.state, found.detail) == ("broken", "wanted NVRTC, got nothing")
    assert "pip install" in found.fix


def test_a_missing_disassembler_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise MissingPackageError("wanted nvdisasm, got nothing")

    monkeypatch.setattr(sass, "mix", refuse)
    assert by_name(tmp_path)["disassembler"].state == "broken"


def test_an_unwritable_cache_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only_dir: Path) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(read_only_dir))
    found = by_name(tmp_path)["cache"]
    assert found.state == "broken"
    assert str(read_only_dir) in found.detail
    assert "FLASHLAB_CACHE" in found.fix


def test_a_full_cache_is_no_missing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gxx = tmp_path / "bin" / "g++"
    gxx.parent.mkdir()
    gxx.write_text(
        f"""#!/bin/sh
case " $* " in *" -c "*) echo "a.s: Fatal error: can't write a.o: 'No space left on device'" >&2; exit 1 ;; esac
exec {shutil.which("g++")} "$@"
""",
        encoding="utf-8",
    )
    gxx.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gxx.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiler, "_read_elf", full)  # as writing the cubin does
    found = by_name(tmp_path)
    for name in ("compiler", "cpu"):
        assert found[name].state == "broken"
        assert "No space left on device" in found[name].detail
        assert found[name].fix.startswith("export FLASHLAB_CACHE=")


def test_missing_programs_come_with_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name, **_: None)
    found = by_name(tmp_path)
    for name in ("git", "g++", "chromium"):
        assert found[name].state == "absent"
        assert found[name].fix.endswith(f"apt-get install {name}")


def test_the_cpu_runs_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_name(tmp_path)["cpu"]
    assert found.state in ("ok", "absent")
    assert found.state == "absent" or "runs kernels on" in found.detail
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name(tmp_path)["cpu"]
    assert found.state == "absent"
    assert "only on a GPU" in found.detail
    assert found.fix == emulator.install_command()


def test_data_is_verified(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path, problems=suite("smoke"))
    found = by_name(tmp_path)["data/nvidia-h200"]
    assert found.state == "ok"
    assert re.fullmatch(r"sound: \d+ records in 1 run", found.detail)
    path.write_text(path.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    found = by_name(tmp_path)["data/nvidia-h200"]
    assert found.state == "broken"
    assert "differs from CHECKSUMS" in found.detail
    assert "git checkout" in found.fix


def test_a_run_that_was_cut_off_is_repaired_and_not_checked_out(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path, problems=suite("smoke"))
    for name in ("machine.json", "CHECKSUMS"):
        (tmp_path / "nvidia-h200" / name).unlink()
    found = by_name(tmp_path)["data/nvidia-h200"]
    assert found.fix == f"flashlab repair nvidia-h200 --data {tmp_path}"
    lines = path.read_bytes()
    path.write_bytes(lines + lines[: lines.index(b"\n") // 2])
    assert [mend.action for mend in store.repair("nvidia-h200", tmp_path)] == ["set aside", "make"]
    assert path.read_bytes() == lines
    assert by_name(tmp_path)["data/nvidia-h200"].state == "ok"
