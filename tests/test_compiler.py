"""The compiler: every stage for every architecture, what ptxas says, the cache, and what an error tells."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from cuda import pathfinder
from cuda.bindings import nvrtc
from shared import REPORTED, a_variant_elsewhere, ends_of, one_type_a_head_dim, part_of, parts_of, tiers

from flashlab.build import cache, compiler
from flashlab.build.compiler import Cubin, Job, LaunchShape
from flashlab.core.errors import (
    CompileError,
    DTypeError,
    MissingPackageError,
    OutputError,
    ParameterError,
    PerformanceWarningError,
    UnsupportedError,
)
from flashlab.core.paths import ROOT
from flashlab.kernels.registry import ARCHS, CUDA_STAGES, STAGES, Stage

SMEM_KIB = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120": 99}
"""Shared memory that a block may have, by the CUDA C++ Programming Guide, table of compute capabilities."""
NAIVE = STAGES["00_naive"]
KERNEL = 'extern "C" __global__ void kernel(int* out) { out[0] = VALUE; }\n'
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) kernel(float* p, int n) {
  float a[200];
  for (int i = 0; i < 200; ++i) a[i] = p[i];
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int i = 0; i < 200; ++i) a[i] = a[i] * a[(i + 37) % 200] + p[j];
  }
  for (int i = 0; i < 200; ++i) p[i] = a[i];
}
"""
SPILLING_CALLEE = """
__device__ __noinline__ float callee(const float* p, int n) {
  float a[200], sum = 0;
  for (int i = 0; i < 200; ++i) a[i] = p[i];
  for (int j = 0; j < n; ++j) {
#pragma unroll
    for (int i = 0; i < 200; ++i) a[i] = a[i] * a[(i + 37) % 200] + p[j];
  }
  for (int i = 0; i < 200; ++i) sum += a[i] * p[i + n];
  return sum;
}
extern "C" __global__ void other(float* p) { p[0] = 1; }
extern "C" __global__ void __launch_bounds__(1024) kernel(float* p, int n) { p[0] = callee(p, n); }
"""
DROPPED_SETMAXNREG = """
extern "C" __global__ void kernel(int* out) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  out[0] = 1;
}
"""
WGMMA = """
__device__ void product(float (&d)[4], unsigned long long a) {
  asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, p, 1, 1, 0, 0;\\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));
}
extern "C" __global__ void __launch_bounds__(128, 1) kernel(float* out, unsigned long long a) {
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  product(d, a);
  BETWEEN
  product(d, a);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds the entries of a cache of the test's own."""
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


def build(folder: Path, text: str = KERNEL, *, arch: str = "sm_90a", value: int = 1, may_spill: bool = False) -> Cubin:
    source = folder / "kernel.cu"
    source.write_text(text, encoding="utf-8")
    return compiler.compile_file(source, entry="kernel", arch=arch, defines={"VALUE": value}, may_spill=may_spill)


def naive(source: Path | None = None, *, head_dim: int = 64, overrides: dict[str, int] | None = None) -> Cubin:
    return compiler.compile_stage(
        compiler.Job(
            stage=NAIVE,
            head_dim=head_dim,
            dtype="float16",
            causal=True,
            arch="sm_90a",
            source=source,
            overrides=overrides,
        )
    )


few_and_all = parts_of([CUDA_STAGES[one] for one in REPORTED], CUDA_STAGES.values())
"""A part of the matrix of few stages, and the whole one of every stage."""


# --- every stage ---


@tiers
@pytest.mark.parametrize("stage", CUDA_STAGES.values(), ids=CUDA_STAGES)
def test_every_variant_compiles_for_hopper_and_every_head_dim_for_every_architecture(stage: Stage, whole: bool) -> None:
    """In part, for Hopper the smallest head dim or, of every second stage, the largest, in another type."""
    work = compiler.jobs([stage])
    assert {job.arch for job in work} == set(stage.archs)
    assert len(work) == len(stage.archs) * len(stage.head_dims) * len(stage.dtypes) * 2
    work = a_variant_elsewhere(work) if whole else ends_of(part_of(work))[list(CUDA_STAGES).index(stage.id) % 2 :][:1]
    results = compiler.compile_many(work)
    assert not [f"{j.label}\n{r}" for j, r in zip(work, results, strict=True) if isinstance(r, CompileError)]
    for job, cubin in zip(work, results, strict=True):
        assert isinstance(cubin, Cubin)
        assert (cubin.name, cubin.entry, cubin.arch) == (stage.id, stage.entry, job.arch)
        assert cubin.code.startswith(b"\x7fELF")
        assert cubin.parameters == stage.parameters(job.head_dim)
        assert re.fullmatch(r"NVRTC \d+\.\d+\.\d+", cubin.compiler)
        assert 0 < cubin.resources.registers <= 255
        if not stage.may_spill(job.head_dim, job.arch):
            assert cubin.resources.spill_store_bytes == cubin.resources.spill_load_bytes == 0
        shape = cubin.launch_shape
        assert shape is not None
        assert shape.threads % 32 == 0
        assert shape.threads * cubin.resources.registers <= 64 * 1024
        assert shape.smem_bytes + cubin.resources.static_smem_bytes <= SMEM_KIB[job.arch] * 1024


@few_and_all
def test_rows_off_a_16_byte_boundary_have_code_too(stage: Stage, whole: bool) -> None:
    """On the newest architecture in one type a head dim; where that is not Hopper, under one mask.

    In part, of few stages, the smallest head dim on Hopper; test_emulated_stages.py has every stage's for a CPU.
    """
    if whole:
        work = one_type_a_head_dim(a_variant_elsewhere(compiler.jobs([stage], [stage.archs[-1]], aligned=(False,))))
        assert {job.head_dim for job in work} == set(stage.head_dims)
    else:
        work = part_of(compiler.jobs([stage], aligned=(False,)))[:1]
    assert not [
        f"{j.label}\n{r}" for j, r in zip(work, compiler.compile_many(work), strict=True) if isinstance(r, CompileError)
    ]


@few_and_all
def test_every_choice_of_a_tunable_compiles_for_some_head_dim(stage: Stage, whole: bool) -> None:
    """Each beside one of every other tunable; what does not go together is tried alone, beside the defaults.

    That is as many kernels as the longest list of choices has, not as all lists have. Not every pair is covered. In
    part, of few stages, one choice of each tunable that is not its default.
    """
    defaults = stage.parameters(stage.head_dims[0])
    lists = {name: param.choices for name, param in stage.params.items()}
    if not whole:
        others = {name: tuple(one for one in choices if one != defaults[name]) for name, choices in lists.items()}
        lists = {name: choices[-1:] for name, choices in others.items() if choices}
    left = {(name, choice) for name, choices in lists.items() for choice in choices}
    in_turn: list[dict[str, int]] = [
        {name: choices[(row + column) % len(choices)] for column, (name, choices) in enumerate(lists.items())}
        for row in range(max(map(len, lists.values()), default=0))
    ]
    refused: list[str] = []
    for together, head_dim in ((True, stage.head_dims[0]), *((False, head_dim) for head_dim in stage.head_dims)):
        work = [
            Job(stage=stage, head_dim=head_dim, dtype="float16", causal=True, arch="sm_90a", overrides=overrides)
            for overrides in (in_turn if together else [{name: choice} for name, choice in sorted(left)])
        ]
        for job, result in zip(work, compiler.compile_many(work), strict=True):
            if isinstance(result, CompileError) and not isinstance(result, PerformanceWarningError):
                refused.append(f"{job.label}\n{result}")
            else:
                left -= set((job.overrides or {}).items())
    assert not left, "\n".join(refused)


def test_what_was_compiled_cold_comes_from_the_cache_the_same(empty_cache: Path) -> None:
    work = [job for one in REPORTED for job in ends_of(part_of(compiler.jobs([STAGES[one]])))]
    seen: list[str] = []
    results = compiler.compile_many(work, follow=lambda *step: seen.append(step[2]))
    assert sorted(seen) == sorted(f"compiled: {job.label}" for job in work)
    assert not any(isinstance(r, CompileError) or r.cached for r in results)
    for first, second in zip(results, compiler.compile_many(work), strict=True):
        assert isinstance(first, Cubin)
        assert isinstance(second, Cubin)
        assert second.cached
        assert dataclasses.replace(second, cached=False) == first


def test_a_refused_variant_leaves_the_others(empty_cache: Path) -> None:
    jobs = [
        Job(stage=NAIVE, head_dim=64, dtype="float16", causal=False, arch="sm_90a", overrides={"THREADS": threads})
        for threads in (128, 4096)
    ]
    good, bad = compiler.compile_many(jobs)
    assert isinstance(good, Cubin)
    assert isinstance(bad, CompileError)
    assert jobs[1].label == "00_naive D64 full float16 sm_90a THREADS=4096"


# --- what a cubin says ---


def test_tunables_reach_the_code() -> None:
    assert naive(overrides={"THREADS": 64}).launch_shape == LaunchShape(threads=64, smem_bytes=0, tile_q=64)
    assert naive(overrides={"THREADS": 256}).parameters == {"THREADS": 256}
    assert "-DTHREADS=256" in naive(overrides={"THREADS": 256}).options


def test_nothing_recorded_of_a_stage_names_a_folder_of_this_machine() -> None:
    cubin = naive()
    assert not [option for option in cubin.options if str(ROOT) in option or option.startswith("-I/")]
    assert str(ROOT).encode() not in cubin.code
    assert str(ROOT) not in cubin.log


def test_resources_of_a_kernel(tmp_path: Path, empty_cache: Path) -> None:
    text = """
    extern "C" __global__ void kernel(float* p) {
      __shared__ float tile[256];
      tile[threadIdx.x] = p[threadIdx.x];
      __syncthreads();
      p[threadIdx.x] = tile[255 - threadIdx.x];
    }
    """
    cubin = build(tmp_path, text)
    assert cubin.launch_shape is None
    assert cubin.resources.static_smem_bytes == 1024
    assert (cubin.resources.stack_bytes, cubin.resources.spill_store_bytes) == (0, 0)
    assert cubin.parameters == {"VALUE": 1}


def test_the_spills_of_a_called_function_count(tmp_path: Path, empty_cache: Path) -> None:
    cubin = build(tmp_path, SPILLING_CALLEE, may_spill=True)
    assert cubin.resources.spill_store_bytes > 0
    assert cubin.resources.stack_bytes > 0
    clean = compiler.compile_file(tmp_path / "kernel.cu", entry="other", arch="sm_90a", defines={"VALUE": 1})
    assert clean.resources.spill_store_bytes == 0


# --- lost performance fails ---


def test_a_spill_fails_unless_allowed(tmp_path: Path, empty_cache: Path) -> None:
    with pytest.raises(PerformanceWarningError, match=r"spills the rest: \d+ bytes of stores") as caught:
        build(tmp_path, SPILLING)
    assert "bytes spill stores" in caught.value.log
    assert build(tmp_path, SPILLING, may_spill=True).resources.spill_load_bytes > 0
    with pytest.raises(PerformanceWarningError):  # from the cache as well
        build(tmp_path, SPILLING)


def test_a_stage_may_spill_only_where_it_says_so() -> None:
    allowed = naive(head_dim=128)
    assert allowed.resources.spill_store_bytes > 0, "the test needs a stage that spills"
    strict = dataclasses.replace(NAIVE, spills={})
    with pytest.raises(PerformanceWarningError, match="00_naive"):
        compiler.compile_stage(compiler.Job(stage=strict, head_dim=128, dtype="float16", causal=True, arch="sm_90a"))


def test_a_dropped_setmaxnreg_fails(tmp_path: Path, empty_cache: Path) -> None:
    with pytest.raises(PerformanceWarningError, match=r"C7508.*setmaxnreg"):
        build(tmp_path, DROPPED_SETMAXNREG)
    assert build(tmp_path, DROPPED_SETMAXNREG.replace("kernel(", "__launch_bounds__(128, 1) kernel("))


def test_serialised_wgmma_fails(tmp_path: Path, empty_cache: Path) -> None:
    with pytest.raises(PerformanceWarningError, match=r"C751\d.*serialized"):
        build(tmp_path, WGMMA.replace("BETWEEN", "d[0] += out[1];"))
    assert build(tmp_path, WGMMA.replace("BETWEEN", "")).code


@pytest.mark.parametrize("number", [7508, 7510, 7511, 7512, 7513, 7514, 7515])
def test_every_advisory_of_lost_performance_is_known(number: int) -> None:
    line = f"ptxas info    : (C{number}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert compiler._LOST_PERFORMANCE.findall(f"ptxas info    : 0 bytes gmem\n{line}\nmore\n") == [line]
    assert not compiler._LOST_PERFORMANCE.search(
        "ptxas info    : (C7519) warpgroup.arrive is injected in around line 49"
    )


# --- errors ---


@pytest.mark.parametrize(
    ("text", "quoted", "logged"),
    [
        ('#include "absent.cuh"\n', '{source}:1: #include "absent.cuh"', 'cannot open source file "absent.cuh"'),
        (
            '\nstatic_assert(VALUE > 1, "VALUE must be larger");\n',
            '{source}:2: static_assert(VALUE > 1, "VALUE must be larger");',
            "VALUE must be larger",
        ),
        (
            '__device__ int many[10 / (VALUE - 1)];\nstatic_assert(VALUE > 1, "VALUE must be larger");\n',
            '{source}:2: static_assert(VALUE > 1, "VALUE must be larger");',
            "division by zero",
        ),
        ("\n\n" + KERNEL.replace("VALUE", "nothing"), "{source}:3: extern", 'identifier "nothing" is undefined'),
        (
            '__device__ void f() {\n  asm volatile("wgmma.nonsense;");\n}\n'
            'extern "C" __global__ void kernel() {\n  f();\n}\n',
            '{source}:2: asm volatile("wgmma.nonsense;");',
            "Not a name of any known instruction",
        ),
    ],
    ids=["include", "static_assert", "static_assert first", "identifier", "assembly"],
)
def test_a_compile_error_shows_command_line_and_log(
    tmp_path: Path, empty_cache: Path, text: str, quoted: str, logged: str
) -> None:
    with pytest.raises(CompileError) as caught:
        build(tmp_path, text)
    error = caught.value
    quoted = quoted.format(source=tmp_path / "kernel.cu")
    assert error.source_line is not None
    assert error.source_line.startswith(quoted)
    assert error.command.startswith("nvcc --cubin --gpu-architecture=sm_90a --std=c++17 ")
    assert "-DVALUE=1" in error.command
    assert error.command.endswith(f" {tmp_path / 'kernel.cu'}")
    assert logged in error.log
    for part in (quoted, error.command, error.log):
        assert part in str(error)
    assert not list(empty_cache.glob("*"))


def test_an_error_in_a_header_names_the_header(tmp_path: Path, empty_cache: Path) -> None:
    (tmp_path / "mine.cuh").write_text("// a comment\n__device__ int broken = ;\n", encoding="utf-8")
    with pytest.raises(CompileError) as caught:
        build(tmp_path, f'#include "mine.cuh"\n{KERNEL}')
    assert caught.value.source_line == f"{tmp_path / 'mine.cuh'}:2: __device__ int broken = ;"


def test_a_missing_kernel_names_those_there_are(tmp_path: Path, empty_cache: Path) -> None:
    with pytest.raises(CompileError, match="wanted the kernel 'kernel', the file defines colonel"):
        build(tmp_path, KERNEL.replace("kernel", "colonel"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [("", "got a file without one. Define:"), ("launch_shape = {2048, 0, 64};", "got LaunchShape(threads=2048")],
    ids=["absent", "too many threads"],
)
def test_a_stage_without_a_launch_shape_is_refused(tmp_path: Path, empty_cache: Path, line: str, reason: str) -> None:
    declaration = f'extern "C" __device__ const LaunchShape {line}' if line else ""
    text = re.sub(
        r'extern "C" __device__ const LaunchShape [^;]*;', declaration, NAIVE.source.read_text(encoding="utf-8")
    )
    edited = tmp_path / "edited.cu"
    edited.write_text(text, encoding="utf-8")
    with pytest.raises(CompileError, match=re.escape(reason)):
        naive(edited)


@pytest.mark.parametrize(
    ("tensor_maps", "boxes", "reason"),
    [
        (True, "", "wanted launch_shape with a box_q and a box_kv of 1 to 256 rows"),
        (True, ", 64", "box_kv=0"),
        (True, ", 64, 512", "box_kv=512"),
        (False, ", 64, 64", "the stage takes no tensor maps"),
        (False, "}, 1, 0", "wanted launch_shape without box_q, box_kv and panels_kv"),
        (True, ", 64, 64, 1}, -1, 0", "wanted launch_shape with a panels_kv of 0, for all,"),
        (True, ", 64, 64, 1}, 0, 9", "wanted launch_shape with a cluster of 0 to 8 blocks"),
    ],
)
def test_tensor_maps_and_their_boxes_go_together(
    tmp_path: Path, empty_cache: Path, tensor_maps: bool, boxes: str, reason: str
) -> None:
    text = NAIVE.source.read_text(encoding="utf-8")
    assert text.count("0, THREADS};") == 1
    edited = tmp_path / "edited.cu"
    if "}" in boxes:  # a shape inside that of a cluster
        text = text.replace("const LaunchShape launch_shape = {", "const ClusterLaunchShape launch_shape = {{")
    edited.write_text(text.replace("0, THREADS};", f"0, THREADS{boxes}}};"), encoding="utf-8")
    stage = dataclasses.replace(NAIVE, tensor_maps=tensor_maps)
    with pytest.raises(CompileError, match=re.escape(reason)):
        compiler.compile_stage(
            compiler.Job(stage=stage, head_dim=64, dtype="float16", causal=True, arch="sm_90a", source=edited)
        )


def test_a_launch_shape_of_fewer_numbers_is_read() -> None:
    numbers = struct.pack("<15i", 128, 4096, 64, 32, 80, 1, 1, 2, 16, 3, 4, 5, 1, 1, 99)
    whole = LaunchShape(
        128, 4096, 64, 32, 80, True, 1, 2, 16, sm_blocks=3, tile_blocks=4, part_words=5, whole_tiles=1, zero_parts=1
    )
    assert compiler._launch_shape(numbers) == whole
    assert compiler._launch_shape(numbers[:24]) == LaunchShape(128, 4096, 64, 32, 80, True)
    assert compiler._launch_shape(numbers[:12]) == LaunchShape(threads=128, smem_bytes=4096, tile_q=64)


def test_a_stage_of_one_architecture_is_compiled_for_it_alone() -> None:
    hopper = dataclasses.replace(NAIVE, min_arch="sm_90a", max_arch="sm_90a", spills={})
    assert {job.arch for job in compiler.jobs([hopper])} == {"sm_90a"}
    with pytest.raises(UnsupportedError, match="needs sm_90a, got sm_100a"):
        compiler.compile_stage(compiler.Job(stage=hopper, head_dim=64, dtype="float16", causal=True, arch="sm_100a"))


def test_what_cannot_be_compiled_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="head dim 64 or 128, got 96"):
        naive(head_dim=96)
    with pytest.raises(UnsupportedError, match="takes float16, got bfloat16"):
        compiler.compile_stage(compiler.Job(stage=NAIVE, head_dim=64, dtype="bfloat16", causal=True, arch="sm_90a"))
    newer = dataclasses.replace(NAIVE, min_arch="sm_90a", spills={})
    with pytest.raises(UnsupportedError, match="needs sm_90a or newer"):
        compiler.compile_stage(compiler.Job(stage=newer, head_dim=64, dtype="float16", causal=True, arch="sm_80"))
    with pytest.raises(ParameterError, match=f"arch: wanted one of {', '.join(ARCHS)}, got 'sm_42'"):
        compiler.compile_stage(compiler.Job(stage=NAIVE, head_dim=64, dtype="float16", causal=True, arch="sm_42"))
    with pytest.raises(DTypeError, match="dtype: wanted one of float16, bfloat16, got 'float8'"):
        compiler.compile_stage(compiler.Job(stage=NAIVE, head_dim=64, dtype="float8", causal=True, arch="sm_90a"))  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="no parameter 'TILE_Z'; it has THREADS"):
        naive(overrides={"TILE_Z": 3})
    with pytest.raises(ParameterError, match=r"source: wanted a CUDA C\+\+ file"):
        naive(tmp_path / "absent.cu")


# --- the toolchain ---


@pytest.fixture
def _fresh_toolchain(monkeypatch: pytest.MonkeyPatch) -> object:
    compiler.toolchain.cache_clear()
    yield
    monkeypatch.undo()
    compiler.toolchain.cache_clear()


@pytest.mark.usefixtures("_fresh_toolchain")
def test_a_missing_header_wheel_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler._WHEELS, "nvidia-cuda-crt", ("include", "crt/absent.h"))
    with pytest.raises(MissingPackageError, match=r"pip install 'nvidia-cuda-crt==\d+\.\d+\.\*'$"):
        compiler.toolchain()


@pytest.mark.usefixtures("_fresh_toolchain")
def test_headers_may_lie_in_several_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home,) = {path for path in compiler.toolchain().include_dirs if (path / "crt").is_dir()}
    second = tmp_path / "nvidia" / home.parent.name / "include"
    second.mkdir(parents=True)
    (second / "crt").symlink_to(home / "crt")
    record = tmp_path / "nvidia_cuda_crt-13.0.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: nvidia-cuda-crt\nVersion: 13.0.1\n", encoding="utf-8")
    compiler.toolchain.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = compiler.toolchain().include_dirs
    assert second in found
    assert home in found


def test_what_is_in_the_cache_needs_no_compiler_loaded() -> None:
    """Loading NVRTC and what finds it took half of a process's first call."""
    naive()
    text = (
        "import sys; from flashlab.build import compiler; from flashlab.kernels.registry import STAGES; "
        "job = compiler.Job(stage=STAGES['00_naive'], head_dim=64, causal=True, dtype='float16', arch='sm_90a'); "
        "assert compiler.compile_stage(job).cached; "
        "print(sorted(sys.modules.keys() & {'cuda.pathfinder', 'cuda.bindings', 'cuda.core'}))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_wheels_nvrtc_is_the_one_that_a_process_loads() -> None:
    loaded = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    assert loaded is not None
    _, major, minor = nvrtc.nvrtcVersion()
    assert compiler.toolchain().nvrtc_version == f"{major}.{minor}"
    assert compiler.toolchain().identity[0].endswith(f" {Path(loaded).stat().st_size}")


def test_another_nvrtc_than_the_installed_one_compiles_nothing(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(compiler.toolchain(), nvrtc_version="13.99")
    monkeypatch.setattr(compiler, "toolchain", lambda: other)
    with pytest.raises(CompileError, match=r"wanted NVRTC \d+\.99, which is installed, .* got NVRTC \d+\.\d+\n"):
        build(tmp_path)


# --- the cache ---


def test_what_the_code_depends_on_changes_the_entry(tmp_path: Path, empty_cache: Path) -> None:
    header = tmp_path / "sub" / "mine.cuh"
    header.parent.mkdir()
    header.write_text("#define EXTRA 1\n", encoding="utf-8")
    text = f'#include "sub/mine.cuh"\n{KERNEL.replace("VALUE", "VALUE + EXTRA")}'
    first = build(tmp_path, text)
    assert not first.cached
    assert build(tmp_path, text).cached

    changed = [
        build(tmp_path, text, value=2),
        build(tmp_path, text, arch="sm_80"),
        build(tmp_path, text + "// remark\n"),
    ]
    header.write_text("#define EXTRA 7\n", encoding="utf-8")
    changed.append(build(tmp_path, text))
    assert not any(cubin.cached for cubin in changed)
    assert len({cubin.sha256 for cubin in (first, *changed)}) == 4  # a remark makes the same machine code


def test_a_changed_common_header_changes_the_entry(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = tmp_path / "common"
    common.mkdir()
    for header in compiler.COMMON.iterdir():
        (common / header.name).write_bytes(header.read_bytes())
    monkeypatch.setattr(compiler, "COMMON", common)
    first = naive()
    assert naive().cached
    text = (common / "attention.cuh").read_text(encoding="utf-8")
    (common / "attention.cuh").write_text(text.replace("LN_2 = 0.69", "LN_2 = 0.70"), encoding="utf-8")
    second = naive()
    assert not second.cached
    assert second.sha256 != first.sha256


def test_what_nobody_uses_for_days_is_deleted_once_a_day(tmp_path: Path, empty_cache: Path) -> None:
    def aged(days: float, *files: Path) -> None:
        for file in files:
            os.utime(file, times=(time.time() - days * 86400,) * 2)

    def cached(*values: int) -> list[bool]:
        return [build(tmp_path, value=value).cached for value in values]

    assert cached(1, 2) == [False, False]
    aged(6, *empty_cache.glob("*/facts.json"))
    assert cached(2) == [True], "used now"
    assert cached(3) == [False]
    assert len([*empty_cache.iterdir()]) == 3, "looked at today"
    for name in (".new-killed", ".new-now"):
        (empty_cache / name / "entry").mkdir(parents=True)
    aged(6, empty_cache / ".new-killed")
    aged(1.1, empty_cache.parent / "trimmed")
    assert cached(4) == [False]
    assert [path.name for path in empty_cache.glob(".new-*")] == [".new-now"]
    (empty_cache / ".new-now" / "entry").rmdir()
    (empty_cache / ".new-now").rmdir()
    assert len([*empty_cache.iterdir()]) == 3
    assert cached(2, 3, 4, 1) == [True, True, True, False], "the one that nobody used is gone"


def test_another_compiler_changes_the_entry(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path)
    tools = compiler.toolchain()
    other = dataclasses.replace(tools, identity=("another", *tools.identity[1:]))
    monkeypatch.setattr(compiler, "toolchain", lambda: other)
    assert not build(tmp_path).cached


def test_the_current_folder_does_not_matter(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attention.cuh").write_text("#error not this one\n", encoding="utf-8")
    expected = naive().sha256
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "second"))
    again = naive()
    assert not again.cached
    assert again.sha256 == expected


@pytest.mark.parametrize("package", ["torch", "cupy"])
def test_a_process_that_has_loaded_a_gpu_library_compiles_in_another(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    here = compiler.compile_stage(compiler.Job(stage=NAIVE, head_dim=64, dtype="float16", causal=True, arch="sm_90a"))
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "another"))
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(compiler, "_run_here", None)  # not in this process
    there = compiler.compile_stage(compiler.Job(stage=NAIVE, head_dim=64, dtype="float16", causal=True, arch="sm_90a"))
    assert not there.cached
    assert (there.code, there.resources) == (here.code, here.resources)
    with pytest.raises(CompileError) as caught:
        build(tmp_path, KERNEL.replace("VALUE", "undeclared"))
    assert "undeclared" in (caught.value.source_line or "")


def test_a_copy_elsewhere_makes_the_same_machine_code(tmp_path: Path, empty_cache: Path) -> None:
    copy = tmp_path / "copy.cu"
    copy.write_text(NAIVE.source.read_text(encoding="utf-8"), encoding="utf-8")
    assert naive(copy).sha256 == naive().sha256


@pytest.mark.parametrize("name", ["cubin", "facts.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "swapped"])
def test_a_damaged_entry_is_compiled_anew(tmp_path: Path, empty_cache: Path, name: str, damage: str) -> None:
    first = build(tmp_path)
    (folder,) = empty_cache.iterdir()
    entry = folder / name
    content = entry.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    entry.write_bytes(
        {
            "truncated": content[:-100],
            "flipped": flipped,
            "empty": b"",
            "text": b"not an entry",
            "swapped": content[64:] + content[:64],
        }[damage]
    )
    second = build(tmp_path)
    assert not second.cached
    assert second.sha256 == first.sha256
    assert build(tmp_path).cached


def test_processes_share_a_cache(empty_cache: Path) -> None:
    program = (
        "from flashlab.build import compiler\n"
        "work = [j for j in compiler.jobs(archs=['sm_90a']) if j.stage.id == '00_naive' and j.head_dim == 64] * 3\n"
        "for cubin in compiler.compile_many(work): print(cubin.sha256)\n"
    )
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 2
    assert len(list(empty_cache.iterdir())) == 2, "no entry lost, no temporary file left"


def test_what_another_thread_makes_is_waited_for_and_not_made_again(empty_cache: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> dict[str, object]:
        made.append(folder)
        time.sleep(0.2)  # the other threads wait at the lock
        (folder / "file").touch()
        return {}

    with ThreadPoolExecutor(3) as pool:
        entries = list(pool.map(lambda _: cache.entry("cubins", "key", ["file"], make), range(3)))
    assert len(made) == 1
    assert sorted(entry.cached for entry in entries) == [False, True, True]


def test_an_unwritable_cache_is_named(tmp_path: Path, read_only_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(read_only_dir))
    with pytest.raises(OutputError, match="FLASHLAB_CACHE") as caught:
        build(tmp_path)
    assert str(read_only_dir) in str(caught.value)


def test_importing_the_module_loads_no_compiler() -> None:
    program = (
        "import sys; from flashlab.build import compiler, sass; "
        "print([m for m in sys.modules if m.split('.')[0] == 'cuda'])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
