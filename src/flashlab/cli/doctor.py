"""`flashlab doctor` checks the environment and names the command that fixes each problem; `flashlab repair` completes
truncated records.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, as_json, say
from flashlab.core.arithmetic import several
from flashlab.core.errors import CompileError, DamagedRecordError, FlashlabError, MissingError, NoDataError, OutputError
from flashlab.core.paths import BUILD, DATA, INSTALLED, ROOT, cache_dir, writable_dir

State = Literal["ok", "absent", "broken"]
"""absent: an optional component is missing, `detail` names the consequence. broken: a required one does not work."""
OLDEST_PYTHON = (3, 11)
_OTHER_CACHE = "export FLASHLAB_CACHE=/path/to/a/writable/folder"
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Finding:
    """The state of one component."""

    name: str
    state: State
    detail: str
    """What was found, or what does not work without it."""
    fix: str = ""
    """The command that fixes it; empty if nothing is wrong."""


def examine(data: Path = DATA) -> tuple[Finding, ...]:
    """Check every component, in display order. Never raises."""
    return (*_toolchain(), *_gpu(), *_programs(), *_folders(), *_data(data))


def apt(package: str) -> str:
    """The command that installs a Debian package."""
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install {package}"


def _pip(extra: str = "") -> str:
    where = [f"flashlab{extra}"] if INSTALLED else ["-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}{extra}"]
    return shlex.join([sys.executable, "-m", "pip", "install", *where])


def _look(
    name: str, look: Callable[[], str], *, fix: str = "", lost: str = "", unwritable: str = _OTHER_CACHE
) -> Finding:
    """Finding with the result of `look`, or with its error message and `fix`, or `unwritable` for an `OutputError`.

    A `MissingError` counts as absent if `lost` names what does not work without it; any other error as broken.
    """
    try:
        return Finding(name, "ok", look())
    except OutputError as error:
        return Finding(name, "broken", str(error), unwritable)
    except FlashlabError as error:
        if lost and isinstance(error, MissingError):
            return Finding(name, "absent", f"{lost}: {error}", fix)
        return Finding(name, "broken", error.summary if isinstance(error, CompileError) else str(error), fix)


def _toolchain() -> Iterator[Finding]:
    """Check the toolchain by compiling the first stage for the oldest architecture and for the CPU."""
    import numpy

    from flashlab.build import compiler, sass, symbols
    from flashlab.kernels.registry import ARCHS, STAGES
    from flashlab.run import emulator
    from flashlab.run.attention import emulate

    stage = next(iter(STAGES.values()))

    def cubin() -> compiler.Cubin:
        dtype, arch = stage.dtypes[0], stage.archs[0]
        return compiler.compile_stage(
            compiler.Job(stage=stage, head_dim=stage.head_dims[0], dtype=dtype, causal=False, arch=arch)
        )

    def on_cpu() -> str:
        banner = emulator.cxx().banner
        q = numpy.ones((1, 1, 1, stage.head_dims[0]), numpy.float16)
        emulate(q, q, q, stage=stage.id)
        return f"{banner}, runs kernels on {emulator.machine()}"

    current = sys.version_info >= OLDEST_PYTHON
    state: State = "ok" if current else "broken"
    python = f"{platform.python_version()} at {sys.executable}"
    yield Finding("python", state, python, "" if current else apt("python3 python3-venv"))
    yield _look("compiler", lambda: f"{cubin().compiler}, compiles for {', '.join(ARCHS)}", fix=_pip())
    yield _look("disassembler", lambda: f"read {sass.mix(cubin().code)['total']} instructions", fix=_pip())
    cpu = _look("cpu", on_cpu, fix=emulator.install_command(), lost="kernels run only on a GPU")
    yield cpu
    reason = symbols.missing()
    if cpu.state == "ok" and reason:
        yield Finding("source lines", "absent", reason, apt("binutils"))


def _gpu() -> Iterator[Finding]:
    from flashlab.build import triton_code
    from flashlab.measure import profile
    from flashlab.run import gpu

    reason = gpu.available()
    try:
        here = None if reason else gpu.info()
    except FlashlabError as error:
        here, reason = None, str(error)
    if here is None:
        yield Finding("gpu", "absent", f"{reason}{'' if INSTALLED else ' The report replays the committed data.'}")
    else:
        yield Finding("gpu", "ok", f"{here.name}, {here.arch}, driver {here.record.driver}")
    on_cpu = f"and without a GPU needed only for Triton stages: {triton_code.INTERPRETER_NEEDS}"
    for name, module, lost, without_gpu in (
        ("torch", "torch", "no measurements", on_cpu),
        ("cupy", "cupy", "no measurements", "and not needed without a GPU"),
        ("triton", "triton", "no FlexAttention peer", on_cpu),
        ("flash-attention-3", "fa3_fwd_interface", "no FlashAttention-3 peer", "and not needed without a GPU"),
        ("flash-attention-4", "flash_attn", "no FlashAttention-4 peer", "and not needed without a GPU"),
    ):
        if importlib.util.find_spec(module):
            packages = dict.fromkeys(metadata.packages_distributions().get(module, []))
            versions = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
            yield Finding(name, "ok", versions or "installed")
        elif gpu.available() is None:
            yield Finding(name, "absent", f"not installed: {lost}", _pip("[gpu]"))
        else:
            yield Finding(name, "absent", f"not installed, {without_gpu}")
    yield _look("ncu", lambda: f"Nsight Compute {profile.version()}, {profile.program()}", lost="no profiling")


def _programs() -> Iterator[Finding]:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    launchers = "Triton and FlexAttention cannot build their launchers"
    for name, path, lost, package in (
        ("git", shutil.which("git"), "records cannot name their commit", "git"),
        ("g++", shutil.which("g++"), launchers, "g++"),
        ("chromium", next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None), "no browser tests", "chromium"),
        ("Python.h", header if header.is_file() else None, launchers, f"python3.{sys.version_info[1]}-dev"),
    ):
        yield (
            Finding(name, "ok", str(path)) if path else Finding(name, "absent", f"not installed: {lost}", apt(package))
        )


def _folders() -> Iterator[Finding]:
    for name, folder, fix in (
        ("cache", cache_dir(), _OTHER_CACHE),
        ("build", BUILD, _OTHER_CACHE if INSTALLED else f"sudo chown -R {os.geteuid()} {shlex.quote(str(ROOT))}"),
    ):
        yield _look(name, partial(_writable, folder, name), unwritable=fix)


def _writable(folder: Path, name: str) -> str:
    return f"{writable_dir(folder, name)} is writable"


def _data(data: Path) -> Iterator[Finding]:
    from flashlab.record import store

    if INSTALLED and data == DATA:
        tables = ", ".join(store.folders(data))
        yield Finding("data", "ok", f"tables of choices of {tables}; records, notebooks and the site need a checkout")
        return
    if not store.gpus(data):
        lost = f"no recorded runs under {data}: nothing to replay"
        yield Finding("data", "absent", lost, "flashlab bench, on a machine with an NVIDIA GPU")
    for name in store.folders(data):
        damage = store.verify(name, data)
        where = shlex.quote(str(data / name))
        fix = "" if data == DATA else f" --data {shlex.quote(str(data))}"
        # `repair` completes an unfinished run, which git does not track; anything else damaged is restored from git.
        fix = f"flashlab repair {name}{fix}" if store.mends(name, data) else f"git checkout -- {where}"
        detail = "; ".join(map(str, damage)) or f"sound: {store.extent(name, data)}"
        yield Finding(f"data/{name}", "broken" if damage else "ok", detail, fix if damage else "")


def repair(
    gpus: opt.GpuNames = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be repaired without doing it.")] = False,
    data: opt.Data = DATA,
) -> None:
    """Complete folders of records left unfinished by a crash, a kill or a full disk, keeping every valid line.

    Truncated lines move to aside/ with their position; valid files enter CHECKSUMS; machine.json is rebuilt from the
    newest record. Files modified later are reported, not changed: git has them. Do not run this during a measurement.
    """
    from flashlab.measure.harness import host
    from flashlab.record import store
    from flashlab.run import gpu as here

    # Only folders with records get a CHECKSUMS file: an empty --data is the current directory.
    known = [name for name in store.folders(data) if store.record_files(name, data)]
    if not known:
        raise NoDataError(f"wanted folders of records under {data}, found none")
    if unknown := set(gpus or ()) - set(known):
        raise NoDataError(f"gpu: wanted folders under {data}, got {', '.join(unknown)}. Existing: {', '.join(known)}")
    this = None if here.available() else here.info().slug
    done = [
        mend
        for name in gpus or known
        for mend in (
            store.mends(name, data) if dry_run else store.repair(name, data, host=host() if name == this else None)
        )
    ]
    answer(
        done,
        {"file": "path", "action": "action", "lines": lambda mend: list(mend.torn)},
        document=[{"file": mend.path, "action": mend.action, "lines": list(mend.torn)} for mend in done],
    )
    damage = [] if dry_run else [fault for name in gpus or known for fault in store.verify(name, data)]
    if damage:
        listed = "\n  ".join(map(str, damage))
        raise DamagedRecordError(f"wanted sound records, found damage that cannot be repaired:\n  {listed}")
    say(f"{several(len(done), 'file')} {'to repair' if dry_run else 'repaired; all records are sound'}")


def doctor(*, data: opt.Tables = DATA) -> None:
    """Check compilers, GPU, packages, folders and records, and show the command that fixes each problem."""
    findings = examine(data)
    answer(findings, ("name", "state", "detail"))
    for finding in findings:
        if finding.fix and not as_json():
            say(f"{finding.name}: {finding.fix}")
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


COMMANDS = {"doctor": doctor, "repair": repair}
