"""What this machine has of what flashlab uses, each finding with the command that puts it right."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer

from flashlab.cli.options import Data, Json
from flashlab.cli.output import answer, say
from flashlab.core.errors import FlashlabError, MissingError, MissingPackageError
from flashlab.core.paths import BUILD, DATA, ROOT, cache_dir, writable_dir

State = Literal["ok", "absent", "broken"]
"""absent: not there, and flashlab does without, as `detail` says. broken: something flashlab needs does not work."""

OLDEST_PYTHON = (3, 11)
_LOG_BEGINS = "\nCommand:"
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at."""

    name: str
    state: State
    detail: str
    """What was found, or what is lost without it."""
    fix: str = ""
    """The command that puts it right; empty where nothing is wrong."""


def examine(data: Path = DATA) -> tuple[Finding, ...]:
    """Everything looked at, in reading order. Never raises."""
    return tuple(finding for look in _LOOKS for finding in _guarded(look, data))


def _guarded(look: Callable[[Path], Iterator[Finding]], data: Path) -> Iterator[Finding]:
    try:
        yield from look(data)
    except FlashlabError as error:
        yield Finding(name=look.__name__.strip("_"), state="broken", detail=str(error), fix="see the message")


def apt(package: str) -> str:
    """The command that installs a Debian package here."""
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {package}"


def _pip(*wanted: str) -> str:
    constraints = ROOT / "constraints.txt"
    return shlex.join([sys.executable, "-m", "pip", "install", "-c", str(constraints), *wanted])


def _python(_: Path) -> Iterator[Finding]:
    new_enough = sys.version_info >= OLDEST_PYTHON
    yield Finding(
        name="python",
        state="ok" if new_enough else "broken",
        detail=f"{platform.python_version()} at {sys.executable}",
        fix="" if new_enough else apt("python3 python3-venv"),
    )


def _compile_and_read(_: Path) -> Iterator[Finding]:
    """Compiles the first stage for the oldest architecture and reads it back: proof beats a version number."""
    from flashlab.build import compiler, sass
    from flashlab.kernels.registry import ARCHS, STAGES

    stage = next(iter(STAGES.values()))
    try:
        cubin = compiler.compile_stage(
            stage, head_dim=stage.head_dims[0], dtype=stage.dtypes[0], causal=False, arch=stage.archs[0]
        )
    except FlashlabError as error:
        yield Finding(name="compiler", state="broken", detail=str(error), fix=_pip("-e", str(ROOT)))
        return
    yield Finding(name="compiler", state="ok", detail=f"{cubin.compiler}, compiles for {', '.join(ARCHS)}")
    try:
        total = sass.mix(cubin.code)["total"]
    except FlashlabError as error:
        yield Finding(name="disassembler", state="broken", detail=str(error), fix=_pip("-e", str(ROOT)))
    else:
        yield Finding(name="disassembler", state="ok", detail=f"read {total} instructions of stage {stage.id}")


def _cpu(_: Path) -> Iterator[Finding]:
    """Compiles the first stage for the CPU and runs it."""
    import numpy

    from flashlab.build import symbols
    from flashlab.kernels.registry import STAGES
    from flashlab.run import emulator
    from flashlab.run.attention import emulate

    try:
        found = emulator.cxx()
    except MissingPackageError as error:
        yield Finding(
            name="cpu", state="absent", detail=f"{error}. Kernels run on a GPU alone", fix=emulator.install_command()
        )
        return
    stage = next(iter(STAGES.values()))
    q = numpy.ones((1, 1, 1, stage.head_dims[0]), numpy.float16)
    try:
        emulate(q, q, q, stage=stage.id)
    except FlashlabError as error:
        detail = f"{found.banner}: {str(error).partition(_LOG_BEGINS)[0]}"
        yield Finding(name="cpu", state="broken", detail=detail, fix="see the message")
        return
    yield Finding(name="cpu", state="ok", detail=f"{found.banner}, runs kernels on {emulator.machine()}")
    reason = symbols.missing()
    if reason:
        yield Finding(name="source lines", state="absent", detail=reason, fix=apt("binutils"))


def _gpu(_: Path) -> Iterator[Finding]:
    from flashlab.run import gpu

    reason = gpu.available()
    if reason:
        yield Finding(name="gpu", state="absent", detail=f"{reason} The report replays the committed data.")
        return
    try:
        found = gpu.info()
    except FlashlabError as error:
        yield Finding(name="gpu", state="absent", detail=str(error))
        return
    yield Finding(name="gpu", state="ok", detail=f"{found.name}, {found.arch}, driver {found.driver}")


def _gpu_packages(_: Path) -> Iterator[Finding]:
    from flashlab.build import triton_code
    from flashlab.run import gpu

    has_gpu = gpu.available() is None
    for name, module, without in (
        ("torch", "torch", "no measuring"),
        ("cupy", "cupy", "no measuring"),
        ("triton", "triton", "no FlexAttention peer"),
        ("flash-attention-3", "fa3_fwd_interface", "no FlashAttention-3 peer"),
        ("flash-attention-4", "flash_attn", "no FlashAttention-4 peer"),
    ):
        if importlib.util.find_spec(module):
            yield Finding(name=name, state="ok", detail=_version(module))
        elif has_gpu:
            yield Finding(name=name, state="absent", detail=f"not installed: {without}", fix=_pip("-e", f"{ROOT}[gpu]"))
        elif name in ("torch", "triton"):
            needs = f"of use for the stages in Triton alone, whose interpreter needs {triton_code.INTERPRETER_NEEDS}"
            yield Finding(name=name, state="absent", detail=f"not installed, and without a GPU {needs}")
        else:
            yield Finding(name=name, state="absent", detail="not installed, and of no use without a GPU")


def _version(module: str) -> str:
    names = metadata.packages_distributions().get(module, [])
    return ", ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys(names)) or "installed"


def _programs(_: Path) -> Iterator[Finding]:
    for names, package, without in (
        (("git",), "git", "records cannot name the commit that made them"),
        (("g++",), "g++", "Triton and FlexAttention cannot build their launchers"),
        (CHROMIUM_NAMES, "chromium", "the tests that open the site in a browser are skipped"),
    ):
        found = next(filter(None, map(shutil.which, names)), None)
        yield Finding(
            name=names[0],
            state="ok" if found else "absent",
            detail=found or f"not on PATH: {without}",
            fix="" if found else apt(package),
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    yield Finding(
        name="Python.h",
        state="ok" if header.is_file() else "absent",
        detail=str(header) if header.is_file() else "not there: Triton and FlexAttention cannot build their launchers",
        fix="" if header.is_file() else apt(f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"),
    )


def _profiler(_: Path) -> Iterator[Finding]:
    from flashlab.measure import profile

    try:
        yield Finding(name="ncu", state="ok", detail=f"Nsight Compute {profile.version()}, {profile.program()}")
    except MissingError as error:
        yield Finding(name="ncu", state="absent", detail=f"no profiling: {error}")


def _folders(_: Path) -> Iterator[Finding]:
    for name, folder, fix in (
        ("cache", cache_dir(), "export FLASHLAB_CACHE=/a/folder/you/may/write"),
        ("build", BUILD, f"sudo chown -R {os.geteuid()} {shlex.quote(str(ROOT))}"),
    ):
        try:
            writable_dir(folder, name)
        except FlashlabError as error:
            yield Finding(name=name, state="broken", detail=str(error), fix=fix)
        else:
            yield Finding(name=name, state="ok", detail=f"{folder} can be written")


def _data(data: Path) -> Iterator[Finding]:
    from flashlab.record import store

    with_data = store.gpus(data)
    if not with_data:
        yield Finding(
            name="data",
            state="absent",
            detail=f"no recorded runs under {data}: there is nothing to replay",
            fix="flashlab bench, on a machine with an NVIDIA GPU",
        )
    for name in with_data:
        damage = store.verify(name, data)
        runs = store.runs(name, data)
        num_records = sum(len(run.records) for run in runs)
        yield Finding(
            name=f"data/{name}",
            state="broken" if damage else "ok",
            detail="; ".join(map(str, damage)) or f"{num_records} sound records in {len(runs)} runs",
            fix=f"git checkout -- {shlex.quote(str(data / name))}" if damage else "",
        )


_LOOKS = (_python, _compile_and_read, _cpu, _gpu, _gpu_packages, _programs, _profiler, _folders, _data)


def doctor(*, data: Data = DATA, as_json: Json = False) -> None:
    """Say what this machine has of what flashlab uses, and the command that puts right what is missing."""
    findings = examine(data)
    answer([asdict(one) for one in findings], {"": "name", "state": "state", "found": "detail"}, as_json=as_json)
    for one in findings:
        if one.fix and not as_json:
            say(f"{one.name}: {one.fix}")
    if any(one.state == "broken" for one in findings):
        raise typer.Exit(1)


COMMANDS = {"doctor": doctor}
