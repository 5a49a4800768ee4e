"""Compiles kernels to machine code on any machine, with NVRTC and headers from PyPI wheels and a content-keyed cache.

Needs no GPU, driver or system CUDA. A compiled kernel is its machine code with the report of ptxas. Performance losses
that ptxas only warns about (serialised wgmma, ignored setmaxnreg, spills) are errors here.

Threads can compile concurrently (NVRTC runs outside Python's lock), and so can processes that share a cache.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
import shlex
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from flashlab.build import cache, triton_code
from flashlab.build.parallel import Follow, ignore, on_all_cores
from flashlab.build.sources import contents, quote, read, readable, shown
from flashlab.core.errors import CompileError, MissingPackageError, PerformanceWarningError, refuse_unknown
from flashlab.core.paths import KERNELS, digest
from flashlab.core.problem import DType, Feature, Problem
from flashlab.kernels.registry import (
    ARCHS,
    CUDA_STAGES,
    LARGEST_CLUSTER,
    PORTABLE_CLUSTER,
    STAGES,
    Stage,
    capability,
)

COMMON = KERNELS / "common"
ELEMENTS: Mapping[DType, str] = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
"""Value of the macro ELEMENT for each data type."""

_WHEELS = {
    "nvidia-cuda-nvrtc": ("lib", "libnvrtc.so.{major}"),
    "nvidia-cuda-runtime": ("include", "cuda_fp16.h"),
    "nvidia-cuda-crt": ("include", "crt/mma.h"),
    "nvidia-cuda-cccl": ("include/cccl", "cuda/std/cstdint"),
}
"""By wheel: its folder below nvidia/cu<major>, and a file that proves its presence. The version is that of NVRTC."""

_LOST_PERFORMANCE = re.compile(r"^.*(?:\(C75(?:08|1[0-5])\)|Potential Performance Loss).*$", re.MULTILINE)
"""ptxas advisories that cost performance: C7508 setmaxnreg ignored, C7510 to C7515 wgmma serialised. All begin with
"Potential Performance Loss", which is matched too, so that advisories with other numbers also fail."""


@dataclass(frozen=True)
class LaunchShape:
    """Launch parameters of a kernel: the constant `launch_shape` in its machine code."""

    threads: int
    """Threads per CTA."""
    smem_bytes: int
    """Dynamic shared memory per CTA."""
    tile_q: int
    """Query rows per tile."""
    box_q: int = 0
    """Rows in the TMA box of Q; 0: the kernel uses no tensor maps."""
    box_kv: int = 0
    """Rows in the TMA box of K and V."""
    persistent: bool = False
    """Whether CTAs are persistent and process tiles until none is left."""
    panels_kv: int = 0
    """64-column panels in the TMA box of K and V; 0: all."""
    cluster: int = 0
    """Cluster size; the CTAs process neighbouring tiles of a head; 0 or 1: no clusters. With `split_keys`: number of
    CTAs over which the keys of a tile are split; 0: chosen by the launcher."""
    split_keys: int = 0
    """Keys per step of a split-KV kernel, in which several CTAs split the keys of a tile, which packs all query heads
    that share a K/V head; 0: a tile belongs to one query head and one CTA. The CTAs are those of a cluster, or in a
    persistent kernel any, and the keys of all tiles are shared equally."""
    sm_blocks: int = 0
    """Of such a persistent kernel: maximum CTAs per SM."""
    tile_blocks: int = 0
    """Of the same: maximum number of CTAs over which the keys of a tile are split."""
    part_words: int = 0
    """Of the same: 4-byte words in the workspace per partial tile."""
    whole_tiles: int = 0
    """Of the same: 1 if up to a sixteenth of the CTA slots may stay empty so that no share crosses tiles."""
    zero_parts: int = 0
    """Of the same: 1 if the partial tiles must be 0 before a launch; they are 0 after it."""


_MAX_THREADS = 1024
_MAX_BOX = 256
"""Maximum rows of a TMA box, the limit in every dimension."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resource usage of a kernel and the functions it calls, as reported by ptxas."""

    registers: int
    """Registers per thread."""
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    """Local memory per thread, including spilled registers."""
    static_smem_bytes: int


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled kernel: a `Cubin`, or a `cpu.Emulated` for the CPU."""

    name: str
    """Stage id, or stem of the source file."""
    entry: str
    """Name of the kernel."""
    parameters: dict[str, int]
    """Tunables as compiled, or the integer macros of a file."""
    launch_shape: LaunchShape | None
    """None if the source defines none."""
    compiler: str
    """`NVRTC 13.0.88`, as recorded in the machine code, or `Triton 3.6.0`."""
    log: str = field(repr=False)
    compile_seconds: float
    """Compilation time; if cached, that of the original compilation."""
    cached: bool


@dataclass(frozen=True, kw_only=True)
class Cubin(Compiled):
    """Machine code for a GPU."""

    arch: str
    code: bytes = field(repr=False)
    """An ELF file."""
    sha256: str
    """Digest of `code`."""
    options: tuple[str, ...]
    """All options that affect the code, without the folders of the header wheels."""
    resources: Resources


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The compiler and its headers on this machine."""

    nvrtc_version: str
    """Major and minor: `13.0`."""
    include_dirs: tuple[Path, ...]
    identity: tuple[str, ...]
    """Distinguishes toolchains with the same `nvrtc_version`; part of every cache key."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Compile-time parameters of a stage, independent of the target; for a GPU architecture, see `Job`."""

    stage: Stage
    head_dim: int
    dtype: DType
    causal: bool
    features: tuple[Feature, ...] = ()
    """Optional features of the problem."""
    aligned: bool = True
    """Whether every row of every tensor starts on a 16-byte boundary."""
    overrides: Mapping[str, int] | None = None
    """Tunables that differ from their defaults."""
    source: Path | None = None
    """File to compile instead of the stage's own, e.g. an edited copy."""

    @classmethod
    def of(cls, stage: Stage, problem: Problem, **others: Any) -> Self:
        """Return the variant for a problem; `others` are the remaining fields."""
        names = ("head_dim", "dtype", "causal", "features")
        return cls(stage=stage, **{name: getattr(problem, name) for name in names}, **others)

    @property
    def file(self) -> Path:
        """The file that is compiled."""
        return self.source or self.stage.source

    @property
    def parameters(self) -> dict[str, int]:
        """Values of all tunables.

        Raises:
            ParameterError: an override is not a tunable of the stage, or not an integer.
        """
        return self.stage.parameters(self.head_dim, self.overrides)

    @property
    def macros(self) -> dict[str, int | str]:
        """Macros with which a CUDA C++ stage is compiled."""
        fixed = {"HEAD_DIM": self.head_dim, "CAUSAL": int(self.causal), "ALIGNED": int(self.aligned)}
        asked = {feature.upper(): 1 for feature in self.features}
        return {**fixed, **asked, "ELEMENT": ELEMENTS[self.dtype], **self.parameters}

    @property
    def label(self) -> str:
        """Display name: `00_naive D64 causal float16`."""
        return self._label()

    def _label(self, *where: str) -> str:
        mask = "causal" if self.causal else "full"
        extra = [
            *self.features,
            *([] if self.aligned else ["unaligned"]),
            *([] if self.source is None else [self.source.name]),
            *(f"{name}={value}" for name, value in (self.overrides or {}).items()),
        ]
        return " ".join([self.stage.id, f"D{self.head_dim}", mask, self.dtype, *where, *extra])

    def require(self, arch: str | None = None) -> None:
        """Raise `UnsupportedError` (see `Stage.require`) or `DTypeError` if the stage does not support the variant."""
        mask = "causal" if self.causal else "full"
        self.stage.require(Problem.of(1, 1, 1, 1, 1, self.head_dim, dtype=self.dtype, mask=mask), arch)


@dataclass(frozen=True, kw_only=True)
class Job(Variant):
    """A variant for an architecture, the argument of `compile_stage`."""

    arch: str
    line_info: bool = False
    """Whether to include line information, for `sass.lines`. Does not change the instructions; Triton always includes
    it."""
    may_spill: bool = False
    """Whether to allow register spills to local memory."""

    @property
    def label(self) -> str:
        """Display name: `00_naive D64 causal float16 sm_90a`."""
        return self._label(self.arch)


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """Locate the compiler and headers without loading them, since a call whose kernel is cached needs no compiler.

    Raises:
        MissingPackageError: a package is missing; the message names the pip command.
    """
    version, major, pinned = "", "", ">=13,<14"
    folders: list[Path] = []
    identity: list[str] = []
    missing: list[str] = []
    for wheel, (folder, name) in _WHEELS.items():
        try:
            wheel_metadata = metadata.distribution(wheel)
            if not version:
                major, minor, *_ = wheel_metadata.version.split(".")
                version, pinned = f"{major}.{minor}", f"=={major}.{minor}.*"
            place = Path(str(wheel_metadata.locate_file(f"nvidia/cu{major}/{folder}")))
            file = place / name.format(major=major)
            # The library is too large to be read at every start.
            content = file.stat().st_size if folder == "lib" else digest(file.read_bytes())
        except (metadata.PackageNotFoundError, OSError):
            missing.append(f"'{wheel}{pinned}'")
            continue
        folders.append(place)
        identity.append(f"{wheel} {wheel_metadata.version} {content}")
    if missing:
        raise MissingPackageError(
            "wanted NVRTC and the CUDA headers from wheels to compile kernels, not all are installed. "
            f"Install them: pip install {' '.join(missing)}"
        )
    return Toolchain(nvrtc_version=version, include_dirs=tuple(dict.fromkeys(folders[1:])), identity=tuple(identity))


def compile_stage(job: Job) -> Cubin:
    """Compile a stage, or take it from the cache.

    Code for unaligned tensors may spill, because only its correctness matters.

    Raises:
        UnsupportedError: the stage does not support the head dim or dtype, or not on that architecture.
        ParameterError: an unknown architecture or tunable, or an unreadable source.
        CompileError: the compiler rejected the source, or the code lacks the kernel or its launch shape.
        PerformanceWarningError: compiled with a performance loss.
        MissingPackageError: there is no compiler.
        OutputError: the cache cannot be written.
    """
    refuse_unknown("arch", ARCHS, job.arch)
    job.require(job.arch)
    stage, parameters = job.stage, job.parameters
    if stage.language == "triton":
        request = _triton_request(job)
    else:
        request = _nvrtc_request(job.file, job.arch, job.macros, line_info=job.line_info)
    # Tunables are chosen for calls without features: a call with one is better a little slower than refused.
    wider = not job.aligned or bool(job.features)
    may_spill = job.may_spill or wider or stage.may_spill(job.head_dim, job.arch)
    cubin = _cubin(request, name=stage.id, entry=stage.entry, parameters=parameters, may_spill=may_spill)
    fault = launch_shape_fault(stage, cubin.launch_shape)
    if fault:
        raise request.error(fault, cubin.log)
    return cubin


def launch_shape_fault(stage: Stage, shape: LaunchShape | None) -> str | None:
    """Describe what is invalid in the launch shape of a stage; None if it is valid."""
    if shape is None:
        return (
            "wanted the constant that says how to launch it, got a file without one. Define: "
            'extern "C" __device__ const LaunchShape launch_shape = {THREADS, SMEM_BYTES, TILE_Q};'
        )
    shares = (shape.sm_blocks, shape.tile_blocks, shape.part_words)
    boxes = (shape.box_q, shape.box_kv)
    most = LARGEST_CLUSTER if shape.split_keys else PORTABLE_CLUSTER
    faults = {
        f"with 1 to {_MAX_THREADS} threads, a size of shared memory and a positive tile_q": not (
            0 < shape.threads <= _MAX_THREADS and shape.smem_bytes >= 0 and shape.tile_q > 0
        ),
        "with sm_blocks, tile_blocks and part_words of a persistent kernel that splits keys, all positive, or none of "
        "them": any(shares) and not (all(n > 0 for n in shares) and shape.persistent and shape.split_keys > 0),
        f"with a cluster of 0 to {most} blocks": not 0 <= shape.cluster <= most,
        f"with a box_q and a box_kv of 1 to {_MAX_BOX} rows for its tensor maps": stage.tensor_maps
        and not all(0 < rows <= _MAX_BOX for rows in boxes),
        f"with a panels_kv of 0, for all, to {_MAX_BOX}": not 0 <= shape.panels_kv <= _MAX_BOX,
        "without box_q, box_kv and panels_kv, as the stage takes no tensor maps (`Stage.tensor_maps`)": not (
            stage.tensor_maps or not any((*boxes, shape.panels_kv))
        ),
    }
    return next((f"wanted launch_shape {wanted}, got {shape}" for wanted, is_so in faults.items() if is_so), None)


def compile_file(
    source: Path, *, entry: str, arch: str, defines: Mapping[str, int | str], may_spill: bool = False
) -> Cubin:
    """Compile any CUDA C++ file, or take it from the cache.

    Args:
        entry: name of the kernel in the machine code (declare it `extern "C"`).
        defines: macros; those with integer values become the cubin's `parameters`.

    Raises:
        ParameterError: an unknown architecture, or an unreadable source.
        CompileError: the compiler rejected the source, or the code has no kernel of that name.
        PerformanceWarningError: compiled with a performance loss.
        MissingPackageError: there is no compiler.
        OutputError: the cache cannot be written.
    """
    refuse_unknown("arch", ARCHS, arch)
    parameters = {name: value for name, value in defines.items() if isinstance(value, int)}
    request = _nvrtc_request(source, arch, defines)
    return _cubin(request, name=source.stem, entry=entry, parameters=parameters, may_spill=may_spill)


def jobs(
    stages: Iterable[Stage] | None = None, archs: Sequence[str] = ARCHS, *, aligned: Sequence[bool] = (True,)
) -> tuple[Job, ...]:
    """Jobs for every head dim, mask and dtype of `stages` on `archs`.

    Default: all stages whose compiler is installed.
    """
    if stages is None:
        stages = CUDA_STAGES.values() if triton_code.missing() else STAGES.values()
    return tuple(
        Job(stage=stage, head_dim=head_dim, dtype=dtype, causal=causal, arch=arch, aligned=rows_aligned)
        for stage in stages
        for arch in stage.archs
        if arch in archs
        for head_dim in stage.head_dims
        for dtype in stage.dtypes
        for causal in (False, True)
        for rows_aligned in aligned
    )


def compile_many(
    work: Sequence[Job],
    *,
    follow: Follow = ignore,
) -> tuple[Cubin | CompileError, ...]:
    """Compile several variants in parallel; a compile error is returned in place of its cubin.

    Raises:
        FlashlabError: as `compile_stage` does, except CompileError and PerformanceWarningError, which are returned.
    """
    if any(job.stage.language == "cuda" for job in work):
        toolchain()

    def made(job: Job) -> Cubin | CompileError:
        try:
            return compile_stage(job)
        except CompileError as error:
            return error

    def said(job: Job, made: Cubin | CompileError) -> str:
        return f"{'refused' if isinstance(made, CompileError) else 'compiled'}: {job.label}"

    return tuple(on_all_cores(made, work, what=said, follow=follow))


# --- one build: what goes in, its key, and the errors it makes ---

_CUBIN_FACTS = 1
"""Version of the facts about machine code in the cache."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Everything that determines the machine code."""

    source: Path
    """Absolute path."""
    text: str
    arch: str
    options: tuple[str, ...]
    """Recorded options, without folders of this machine."""
    command: str
    """An equivalent command line."""
    compiler: str
    """Name and version of the compiler, for display."""
    key: tuple[Any, ...]
    """Inputs of the compilation other than text and options."""
    compile: Callable[[_Request], tuple[bytes, dict[str, Any]]]
    """Returns the machine code, and facts that include the `log`."""

    @property
    def display(self) -> str:
        """Name of the source in messages."""
        return shown(self.source)

    def cached(self) -> cache.Entry:
        """Return the cache entry, creating it if there is none."""

        def make(folder: Path) -> dict[str, Any]:
            start = time.perf_counter()
            code, facts = self.compile(self)
            (folder / "cubin").write_bytes(code)
            return {**_read_elf(code), **facts, "compile_seconds": time.perf_counter() - start}

        key = [_CUBIN_FACTS, self.display, self.text, self.options, *self.key]
        return cache.entry("cubins", key, ["cubin"], make)

    def error(
        self, message: str, log: str, *, kind: type[CompileError] = CompileError, source_line: str | None = None
    ) -> CompileError:
        """Build an error with the command, the log and the source line, if known."""
        return kind(f"{self.display}: {message}", command=self.command, log=log, source_line=source_line)


def _cubin(request: _Request, *, name: str, entry: str, parameters: dict[str, int], may_spill: bool) -> Cubin:
    made = request.cached()
    code, log = (made.folder / "cubin").read_bytes(), made.facts["log"]
    kernels, shape, compiler = (made.facts[name] for name in ("kernels", "launch_shape", "release"))
    if entry not in kernels:
        raise request.error(
            f"wanted the kernel {entry!r}, the file defines {', '.join(kernels) or 'none'}. "
            'Declare it extern "C" __global__.',
            log,
        )
    resources = _parse_resources(log, entry)
    if resources is None:
        raise request.error(f"wanted ptxas's report on {entry!r} in the compiler's log, got a log without one", log)
    lost = [line.strip() for line in _LOST_PERFORMANCE.findall(log)]
    if not may_spill and (resources.spill_store_bytes or resources.spill_load_bytes):
        lost.append(
            f"{entry} keeps {resources.registers} registers a thread and spills the rest: "
            f"{resources.spill_store_bytes} bytes of stores, {resources.spill_load_bytes} bytes of loads"
        )
    if lost:
        message = f"compiled for {request.arch} with lost performance:\n  " + "\n  ".join(lost)
        raise request.error(message, log, kind=PerformanceWarningError)
    return Cubin(
        name=name,
        entry=entry,
        arch=request.arch,
        code=code,
        sha256=digest(code),
        parameters=parameters,
        options=request.options,
        compiler=f"NVRTC {compiler}" if compiler and request.compile is _by_nvrtc else request.compiler,
        resources=resources,
        launch_shape=None if shape is None else LaunchShape(**shape),
        log=log,
        compile_seconds=made.facts["compile_seconds"],
        cached=made.cached,
    )


# --- Triton ---


def _triton_request(job: Job) -> _Request:
    missing, parameters = triton_code.missing(), job.parameters
    if missing:
        raise MissingPackageError(f"wanted Triton to compile stage {job.stage.id}, got none. Install it: {missing}")
    constants = {name: int(job.macros[name]) for name in triton_code.CONSTANTS}
    settings = {"num_warps": parameters["WARPS"], "num_stages": parameters["PIPELINE_STAGES"]}
    # Without 16-byte copies it takes registers that no bound foresaw; that code is there to answer.
    if job.aligned and parameters["MAX_REGISTERS"]:
        settings["maxnreg"] = parameters["MAX_REGISTERS"]
    options = (
        f"--target={job.arch}",
        *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items()),
        f"--element={job.dtype}",
        f"--aligned={int(job.aligned)}",
        *(f"--constant={name}={value}" for name, value in constants.items()),
    )
    source, compiler = job.file.resolve(), f"Triton {triton_code.version()}"

    def compile_kernel(request: _Request) -> tuple[bytes, dict[str, Any]]:
        code, log, launch = triton_code.compile_kernel(
            source,
            entry=job.stage.entry,
            dtype=job.dtype,
            constants=constants,
            options=settings,
            capability=capability(job.arch),
            aligned=job.aligned,
        )
        log = readable(log)
        if code is None:
            message = f"wanted machine code for {job.arch} from {compiler}, got an error:"
            raise request.error(message, log, source_line=log.strip().rpartition("\n")[2] or None)
        return code, {"log": log, "launch_shape": {**launch, "tile_q": constants["TILE_Q"]}}

    return _Request(
        source=source,
        text=read(job.file, "Python"),
        arch=job.arch,
        options=options,
        command=shlex.join(["triton.compile", shown(source), *options]),  # Triton has no command line
        compiler=compiler,
        key=("triton", compiler, job.stage.entry),
        compile=compile_kernel,
    )


# --- NVRTC ---


def _nvrtc_request(source: Path, arch: str, defines: Mapping[str, int | str], *, line_info: bool = False) -> _Request:
    tools = toolchain()
    options = (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        *([_LINE_INFO] if line_info else []),
        f"-I{shown(COMMON)}",
        *(f"-D{name}={value}" for name, value in defines.items()),
    )
    source, text = source.resolve(), read(source, "CUDA C++")
    # For nvcc, to be run in the checkout. Its register allocation may differ from NVRTC's.
    wheels = (f"-I{shown(path)}" for path in tools.include_dirs)
    return _Request(
        source=source,
        text=text,
        arch=arch,
        options=options,
        command=shlex.join(["nvcc", "--cubin", *options, *wheels, shown(source)]),
        compiler=f"NVRTC {tools.nvrtc_version}",
        key=(contents(source, text, [COMMON]), tools.identity),
        compile=_by_nvrtc,
    )


def _by_nvrtc(request: _Request) -> tuple[bytes, dict[str, Any]]:
    code, log = _run_nvrtc(request)
    if code is not None:
        return code, {"log": log}
    in_assembly = re.search(r"^ptxas .*error", log, re.MULTILINE)
    line = _ptx_source_line(request) if in_assembly else _source_line(log)
    raise request.error(f"wanted machine code for {request.arch}, got an error:", log, source_line=line)


_LINE_INFO = "-lineinfo"
_ALTERS_NVRTC = ("torch", "cupy")
"""Packages whose use in a process can make the same NVRTC generate different code for the same source: observed after a
scaled_dot_product_attention of torch 2.11, with NVRTC 13.0.88. A process that has loaded one compiles in another
process. Without them, it was observed once, in a test process that had compiled hundreds of kernels."""
_ELSEWHERE = (
    "import pickle, sys; path, work = pickle.load(sys.stdin.buffer); sys.path[:] = path; "
    "from flashlab.build.compiler import _run_here; done = _run_here(*pickle.loads(work)); "
    "sys.stdout.buffer.write(pickle.dumps(done))"
)


def _run_nvrtc(request: _Request, *, ptx: bool = False) -> tuple[bytes | None, str]:
    """Run NVRTC; returns the machine code, or the PTX, and the log. The code is None on error."""
    work = (request, ptx, (COMMON, *toolchain().include_dirs))
    if not any(name in sys.modules for name in _ALTERS_NVRTC):
        return _run_here(*work)
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE],
        input=pickle.dumps((sys.path, pickle.dumps(work))),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        message = f"wanted a process of its own for the compiler, it ended with {done.returncode}"
        raise request.error(message, done.stderr.decode(errors="replace"))
    code: bytes | None
    code, log = pickle.loads(done.stdout)
    return code, log


def _run_here(request: _Request, ptx: bool, folders: Sequence[Path]) -> tuple[bytes | None, str]:
    # Not by cuda.core, which wants a driver for PTX and hands over an error's log in a message alone.
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    if (loaded := f"NVRTC {major}.{minor}") != request.compiler:
        raise request.error(f"wanted {request.compiler}, which is installed, to compile it, got {loaded}", "")

    options = [option for option in request.options if not option.startswith("-I")]
    options += [f"-I{path}" for path in folders]  # after the source's own folder
    if ptx:
        options = [option.replace("architecture=sm_", "architecture=compute_") for option in options]
    options.append("--no-cache")  # where there is a driver, NVRTC keeps code by its PTX, and then ptxas reports nothing
    # By an absolute name: NVRTC searches its folder, and the current one where it names none.
    _, program = nvrtc.nvrtcCreateProgram(request.text.encode(), str(request.source).encode(), 0, [], [])

    def content(name: str) -> bytes:
        _, size = getattr(nvrtc, f"nvrtcGet{name}Size")(program)
        memory = bytearray(size)
        getattr(nvrtc, f"nvrtcGet{name}")(program, memory)
        return bytes(memory)

    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        made = status == nvrtc.nvrtcResult.NVRTC_SUCCESS
        log = readable(content("ProgramLog").decode(errors="replace"))
        return content("PTX" if ptx else "CUBIN") if made else None, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _source_line(log: str) -> str | None:
    """Return `file:line: text` of the most useful error in a log: that of a static_assert, else the first."""
    errors = re.findall(r"^(\S.*)\((\d+)\): (?:\w+ )?error\b(.*)", log, re.MULTILINE)
    if not errors:
        return None
    file, line, _ = next((error for error in errors if "static assertion failed" in error[2]), errors[0])
    return quote(file, int(line))


def _ptx_source_line(request: _Request) -> str | None:
    """Return `file:line: text` of the inline assembly that ptxas rejected.

    ptxas reports lines of the PTX, which maps them to source lines if it has line information.
    """
    lined = dataclasses.replace(request, options=(*request.options, _LINE_INFO))
    _, log = _run_nvrtc(lined)
    ptx, _ = _run_nvrtc(lined, ptx=True)
    match = re.search(r"ptxas .*?, line (\d+); error", log)
    if match is None or ptx is None:
        return None
    text = ptx.decode(errors="replace")
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', text, re.MULTILINE))
    locations = re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)", "\n".join(text.splitlines()[: int(match[1])]), re.MULTILINE)
    if not locations or locations[-1][0] not in files:
        return None
    return quote(files[locations[-1][0]], int(locations[-1][1]))


# --- reading what came out ---


def _read_elf(code: bytes) -> dict[str, Any]:
    """Read the names of the `kernels`, the `launch_shape` and the compiler `release` from an ELF file, as JSON."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    elf = ELFFile(io.BytesIO(code))
    symbols = elf.get_section_by_name(".symtab")
    kernels: list[str] = []
    launch_shape = None
    for symbol in symbols.iter_symbols() if isinstance(symbols, SymbolTableSection) else ():
        section = symbol.entry.st_shndx
        if not isinstance(section, int):
            continue
        if symbol.entry.st_info.type == "STT_FUNC" and elf.get_section(section).name == f".text.{symbol.name}":
            kernels.append(symbol.name)
        if symbol.name == "launch_shape":
            data = elf.get_section(section).data()
            launch_shape = _launch_shape(data[symbol.entry.st_value :][: symbol.entry.st_size])
    note = elf.get_section_by_name(".note.nv.tkinfo")
    version = re.search(rb"release [\d.]+, V([\d.]+)", note.data()) if note else None
    shape = None if launch_shape is None else dataclasses.asdict(launch_shape)
    return {"kernels": kernels, "launch_shape": shape, "release": version[1].decode() if version else None}


def instructions(code: bytes) -> dict[str, bytes]:
    """Machine instructions of a cubin's functions, by section; may be empty."""
    from elftools.elf.elffile import ELFFile

    sections = ELFFile(io.BytesIO(code)).iter_sections()
    return {section.name: section.data() for section in sections if section.name.startswith(".text.")}


def _launch_shape(data: bytes) -> LaunchShape:
    """Decode the integers of the constant; missing ones are 0."""
    names = [field.name for field in dataclasses.fields(LaunchShape)]
    whole = struct.Struct(f"<{len(names)}i")
    numbers = dict(zip(names, whole.unpack(data[: whole.size].ljust(whole.size, b"\0")), strict=True))
    return LaunchShape(**{**numbers, "persistent": bool(numbers["persistent"])})


def _parse_resources(log: str, entry: str) -> Resources | None:
    """Parse the report of `ptxas -v` on `entry`, including spills of functions that it calls; None if there is none."""
    own = re.search(rf"Compiling entry function '{re.escape(entry)}'.*?(?=Compiling entry function|\Z)", log, re.DOTALL)
    report = own[0] if own else ""
    used = re.search(r"Used (\d+) registers([^\n]*)", report)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if used is None or not frames:
        return None
    cumulative = re.search(r"(\d+) bytes cumulative stack size", used[2])
    smem = re.search(r"(\d+) bytes smem", used[2])
    return Resources(
        registers=int(used[1]),
        spill_store_bytes=sum(int(stores) for _, stores, _ in frames),
        spill_load_bytes=sum(int(loads) for _, _, loads in frames),
        stack_bytes=max(int(cumulative[1]) if cumulative else 0, *(int(frame) for frame, _, _ in frames)),
        static_smem_bytes=int(smem[1]) if smem else 0,
    )
