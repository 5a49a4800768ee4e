"""Compiles `.cu` files for the CPU, with the machine's C++ compiler and the headers of kernels/emulation.

A compiled kernel is an executable, which run/emulator.py starts; it is cached by content, like the machine code of
compiler.py. Built with hooks, it calls the emulation's detector at every load and store.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from flashlab.build import cache
from flashlab.build.compiler import COMMON, Compiled, LaunchShape, Variant, launch_shape_fault
from flashlab.build.parallel import on_all_cores
from flashlab.build.sources import contents, quote, read, readable, shown
from flashlab.build.symbols import EMULATION
from flashlab.core.environment import environment
from flashlab.core.errors import CompileError, MissingPackageError
from flashlab.core.paths import ROOT

RUNTIME = EMULATION / "runtime"
_COMPILERS = ("g++", "clang++", "c++")
_OLDEST = {"g++": 12, "clang++": 14}
"""Oldest supported versions, for the emulation's C++20."""
_LANGUAGE = ("-std=c++20", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-finite-loops", "-fPIE", "-pthread")
"""Kernels alias types; the hardware's arithmetic is explicit and must not be fused; and an endless loop, which C++
allows compilers to remove, must hang as on a GPU."""


# --- the compiler -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cxx:
    """The machine's C++ compiler."""

    path: str
    family: Literal["g++", "clang++"]
    version: int
    """Major version."""
    banner: str
    """First line of `--version`."""
    machine: str
    """Target: `x86_64-linux-gnu`."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Identity of the compiler in cache keys."""
        return (self.path, self.banner, self.machine)


def install_command() -> str:
    """The command that installs a C++ compiler."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("dnf"):
        return f"{sudo}dnf install gcc-c++"
    return f"{sudo}apt-get install g++"


def cxx() -> Cxx:
    """Find the first C++ compiler on PATH that is new enough.

    Raises:
        MissingPackageError: there is none; the message names the command that installs one.
    """
    return _find_cxx(os.environ.get("PATH", os.defpath))


@lru_cache(maxsize=8)
def _find_cxx(path: str) -> Cxx:
    refused: list[str] = []
    for name in _COMPILERS:
        program = shutil.which(name, path=path)
        if program is None:
            continue
        known = _ask(program)
        if known is None:
            refused.append(f"{program}, which does not run")
        elif known.version < _OLDEST[known.family]:
            refused.append(f"{program}, {known.family} {known.version}")
        else:
            return known
    got = f"got {' and '.join(refused)}" if refused else "got none on PATH"
    raise MissingPackageError(
        f"wanted a C++20 compiler to run kernels on the CPU, g++ {_OLDEST['g++']} or clang++ {_OLDEST['clang++']} or "
        f"newer, {got}. Install one: {install_command()}"
    )


def _ask(path: str) -> Cxx | None:
    def say(*arguments: str) -> str:
        return subprocess.run(
            [path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=30
        ).stdout

    try:
        macros = dict(
            re.findall(r"#define (__GNUC__|__clang_major__) (\d+)", say("-dM", "-E", "-x", "c++", os.devnull))
        )
        clang = "__clang_major__" in macros
        return Cxx(
            path=path,
            family="clang++" if clang else "g++",
            version=int(macros["__clang_major__" if clang else "__GNUC__"]),
            banner=say("--version").partition("\n")[0],
            machine=say("-dumpmachine").strip(),
        )
    except (OSError, subprocess.SubprocessError, KeyError):
        return None


# --- building ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Emulated(Compiled):
    """A kernel compiled for the CPU; `compiler` is the first line of the compiler's `--version`."""

    source: Path
    executable: Path
    hooks: bool
    """Whether its loads and stores report to the detector."""
    argument_sizes: tuple[int, ...]
    """Size in bytes of each kernel parameter."""
    command: str


def build_stage(variant: Variant, *, hooks: bool = False) -> Emulated:
    """Compile a stage for the CPU, or take it from the cache. Every stage runs on any machine.

    Raises:
        UnsupportedError: the stage does not support the head dim or dtype.
        ParameterError: an unknown tunable, or an unreadable source.
        CompileError: the compiler rejected the source, or it lacks the kernel or its launch shape.
        MissingPackageError: there is no C++ compiler.
        OutputError: the cache cannot be written.
    """
    variant.require()
    stage, parameters = variant.stage, variant.parameters
    built = _build(
        variant.file, name=stage.id, entry=stage.entry, macros=variant.macros, parameters=parameters, hooks=hooks
    )
    fault = launch_shape_fault(stage, built.launch_shape)
    if fault:
        raise CompileError(f"{shown(built.source)}: {fault}", command=built.command, log=built.log)
    return built


def build_file(
    source: Path, *, entry: str, defines: Mapping[str, int | str] | None = None, hooks: bool = False
) -> Emulated:
    """Compile any CUDA C++ file for the CPU, or take it from the cache.

    Raises:
        ParameterError: an unreadable source.
        CompileError: the compiler rejected the source, or it has no kernel of that name.
        MissingPackageError: there is no C++ compiler.
        OutputError: the cache cannot be written.
    """
    macros = dict(defines or {})
    parameters = {name: value for name, value in macros.items() if isinstance(value, int)}
    return _build(source, name=source.stem, entry=entry, macros=macros, parameters=parameters, hooks=hooks)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Everything that determines the executable."""

    source: Path
    text: str
    entry: str
    macros: tuple[tuple[str, str], ...]
    hooks: bool
    compiler: Cxx

    @cached_property
    def language(self) -> tuple[str, ...]:
        """Options shared with the precompiled headers."""
        how: tuple[str, ...] = ("-O1",)  # -O2 takes twice as long, and kernels run no faster by it
        if self.hooks and self.compiler.family == "g++":
            # -fno-tree-sra: it would take 16-byte accesses apart before the hooks see them.
            how += ("-fsanitize=thread", "-fsanitize=bounds,alignment", "-fno-tree-sra")
        elif self.hooks:
            how += ("-fsanitize=thread", "-fsanitize=array-bounds,alignment")
        many = "-fmax-errors=20" if self.compiler.family == "g++" else "-ferror-limit=20"
        # A kernel's warnings are NVRTC's business: here #pragma unroll and CUDA's attributes would fill the log.
        return (
            *_LANGUAGE,
            *how,
            "-fstack-clash-protection",  # a frame larger than a page touches each: none jumps over the guard page
            "-fno-optimize-sibling-calls",  # a call in last place would leave no return address in the kernel
            "-gdwarf-4",  # of DWARF 5, addr2line 2.40 can take a kernel's lines for those of the file that includes it
            "-g1",
            "-w",
            many,
            f"-DEMULATION_HOOKED={'true' if self.hooks else 'false'}",
            f"-I{EMULATION}",
            f"-I{COMMON}",
        )

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Options of the kernel's translation unit."""
        return (
            *self.language,
            *(f"-D{name}=shared_bytes" for name in _dynamic_shared(self.text)),
            *(f"-D{name}={value}" for name, value in self.macros),
            "-include",
            str(EMULATION / "emulation.h"),
        )

    @property
    def unit(self) -> str:
        """The translation unit: the unmodified file, and its entry points for the runtime."""
        shape = "&launch_shape" if re.search(r"\blaunch_shape\b", _without_comments(self.text)) else "nullptr"
        return f'#include "{self.source}"\nEMULATE({self.entry}, {shape})\n'

    @property
    def command(self) -> str:
        """The command that compiles the file."""
        return shlex.join([self.compiler.path, "-x", "c++", *self.options, "-c", str(self.source)])

    def error(self, message: str, log: str = "", source_line: str | None = None) -> CompileError:
        """Build an error with the command and log."""
        return CompileError(f"{shown(self.source)}: {message}", command=self.command, log=log, source_line=source_line)

    @property
    def key(self) -> tuple[Any, ...]:
        headers = contents(self.source, self.text, [COMMON, EMULATION])
        return (str(self.source), self.text, headers, self.unit, self.options, self.compiler.identity, _linker())


def _build(
    source: Path,
    *,
    name: str,
    entry: str,
    macros: Mapping[str, int | str],
    parameters: dict[str, int],
    hooks: bool,
) -> Emulated:
    source = source.resolve()
    text = read(source, "CUDA C++")
    request = _Request(
        source=source,
        text=text,
        entry=entry,
        macros=tuple((key, str(value)) for key, value in macros.items()),
        hooks=hooks,
        compiler=cxx(),
    )
    kernels = re.findall(
        r"\b__global__\b[^;{]*?\b(\w+)\s*\(", re.sub(r"__(?:launch_bounds|cluster_dims)__\s*\([^)]*\)", "", _code(text))
    )
    if entry not in kernels:
        raise request.error(f"wanted the kernel {entry!r}, the file defines {', '.join(kernels) or 'none'}.")
    made = cache.entry("emulated", request.key, ["kernel"], lambda work: _compile_kernel(request, work))
    facts = made.facts
    shape = facts["describe"]["launch_shape"]
    return Emulated(
        name=name,
        entry=entry,
        source=source,
        executable=made.folder / "kernel",
        hooks=hooks,
        parameters=parameters,
        argument_sizes=tuple(facts["describe"]["arguments"]),
        launch_shape=None if shape is None else LaunchShape(**shape),
        compiler=request.compiler.banner,
        command=request.command,
        log=facts["log"],
        compile_seconds=facts["compile_seconds"],
        cached=made.cached,
    )


def _compile_kernel(request: _Request, work: Path) -> dict[str, Any]:
    runtime, ahead = _runtime(request.compiler), _precompiled(request)
    start = time.perf_counter()
    unit = work / "unit.cpp"
    unit.write_text(request.unit, encoding="utf-8")
    done = _compile([request.compiler.path, *ahead, *request.options, "-c", str(unit), "-o", str(work / "unit.o")])
    log = readable(done.stderr)
    if done.returncode:
        raise _refusal(request, log)
    objects = [str(work / "unit.o"), *map(str, runtime)]
    link = [request.compiler.path, *_linker(), "-pthread", "-pie", *objects, "-o", str(work / "kernel"), "-ldl"]
    linked = _compile(link)
    if linked.returncode:
        missing = re.search(r"undefined reference to [`'‘](.*?)['’]", linked.stderr)
        what = f": {missing[1]} is not part of the emulation" if missing else ""
        raise request.error(f"it compiled for the CPU but did not link{what}", readable(linked.stderr))
    (work / "unit.o").unlink()
    said = subprocess.run([str(work / "kernel"), "--describe"], capture_output=True, text=True, timeout=60)
    if said.returncode:
        raise request.error("it compiled for the CPU, but the program does not start", said.stderr)
    return {"describe": json.loads(said.stdout), "log": log, "compile_seconds": time.perf_counter() - start}


def _linker() -> tuple[str, ...]:
    """Use gold if installed, which takes a third of the time of ld; newer binutils omit it."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


def _runtime(compiler: Cxx) -> tuple[Path, ...]:
    """Object files of the emulation's runtime, compiled once, in link order."""
    # boundary.cpp first: code that lies before it is the kernel's.
    sources = sorted(RUNTIME.glob("*.cpp"), key=lambda path: (path.name != "boundary.cpp", path.name))
    options = [*_LANGUAGE, "-O3", "-g1", f"-I{EMULATION}"]
    if compiler.family == "g++":
        # Nothing of the runtime moves ahead of boundary.cpp, into a section for rarely called code.
        options += ["-fno-reorder-functions", "-fno-reorder-blocks-and-partition"]
    objects = [f"{path.stem}.o" for path in sources]

    def make(work: Path) -> dict[str, Any]:
        commands = [
            [compiler.path, *options, "-c", str(path), "-o", str(work / name)]
            for path, name in zip(sources, objects, strict=True)
        ]
        for path, done, command in zip(sources, on_all_cores(_compile, commands), commands, strict=True):
            if done.returncode:
                log, error = readable(done.stderr), _ERROR.search(done.stderr)
                why = f": {error['text']}" if error else ""
                raise CompileError(
                    f"{shown(path)}: {compiler.path} did not compile the emulation's runtime{why}",
                    command=shlex.join(command),
                    log=log,
                )
        return {}

    key = ("runtime", contents(sources[0], "", [EMULATION]), options, compiler.identity)
    made = cache.entry("emulated", key, objects, make)
    return tuple(made.folder / name for name in objects)


def _precompiled(request: _Request) -> tuple[str, ...]:
    """Options that make g++ use precompiled headers of the emulation, in a fifth of the time.

    The named header is empty: if a kernel's macros are incompatible with the precompiled one next to it, g++ falls back
    to the empty header and the ordinary emulation.h.
    """
    if request.compiler.family != "g++":
        return ()
    header, precompiled = "ahead.h", "ahead.h.gch"

    def make(work: Path) -> dict[str, Any]:
        (work / header).touch()
        source = ["-x", "c++-header", str(EMULATION / "emulation.h"), "-o", str(work / precompiled)]
        if _compile([request.compiler.path, *request.language, *source]).returncode:
            (work / precompiled).touch()  # the kernel's own compilation will say why
        return {}

    key = ("headers", contents(EMULATION / "emulation.h", "", [COMMON, EMULATION]), request.language)
    made = cache.entry("emulated", (*key, request.compiler.identity), [header, precompiled], make)
    return ("-include", str(made.folder / header))


def _compile(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**environment(), "LC_ALL": "C"},  # messages that can be read back
    )
    if done.returncode and (full := re.search(r".*No space left on device.*", done.stderr)):
        raise OSError(errno.ENOSPC, full[0])
    return done


# --- what the C++ compiler said ---


# Without a line: an error in the value of a macro of the command line.
_ERROR = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?:(?P<line>\d+):)?(?:\d+:)? (?:fatal )?error: (?P<text>.*)$", re.MULTILINE
)
_MACRO = re.compile(r"note: (?:in expansion of|expanded from) macro '(\w+)'")

_AT = r"([^\s:][^:\n]*):(\d+):(?:\d+:)? +"
_EXPANSION = re.compile(rf"^{_AT}note: (?:in expansion|in definition|expanded)", re.MULTILINE)
_INSTANTIATION = re.compile(rf"^{_AT}(?:required|note: in instantiation)", re.MULTILINE)
_INCLUSION = re.compile(r"^(?:In file included| +) from ([^\s:][^:\n]*):(\d+)", re.MULTILINE)


def _refusal(request: _Request, log: str) -> CompileError:
    """Build the most useful error: the first, at the line of the user's file (or header) that caused it."""
    errors = list(_ERROR.finditer(log))
    where = None
    text = errors[0]["text"] if errors else "it ended without a word"
    for index, error in enumerate(errors):
        # From the end of the error before to the next: what includes, expands and instantiates it stands around it.
        begin = errors[index - 1].end() if index else 0
        end = errors[index + 1].start() if index + 1 < len(errors) else len(log)
        lines = [(error["file"], error["line"])]
        lines += _EXPANSION.findall(log[error.end() : end])
        lines += _INSTANTIATION.findall(log[begin:end])
        lines += _INCLUSION.findall(log[begin : error.start()])
        own = [(file, line) for file, line in lines if not _emulations(file)]
        if own:
            where, text = quote(own[0][0], int(own[0][1])), error["text"]
            break
    if where is None and (macro := _MACRO.search(log)) and macro[1] in dict(request.macros):
        text += f": the emulation uses the name {macro[1]} itself"
    return request.error(f"wanted code for the CPU, got an error: {text}", log, where)


def _emulations(file: str) -> bool:
    path = ROOT / file
    return path.is_relative_to(EMULATION) or path.name == "unit.cpp" or not path.is_file() or file.startswith("/usr/")


# --- reading a source ---


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)


def _code(text: str) -> str:
    return re.sub(r'^\s*#[^\n]*|"(?:\\.|[^"\\\n])*"', " ", _without_comments(text), flags=re.MULTILINE)


def _dynamic_shared(text: str) -> tuple[str, ...]:
    """Names under which a file declares dynamic shared memory, other than the emulation's."""
    names = re.findall(r"\bextern\s+__shared__\b[^;]*?\b(\w+)\s*\[\s*\]\s*;", _without_comments(text))
    return tuple(dict.fromkeys(name for name in names if name != "shared_bytes"))
