"""Kernels on the CPU: building, launching, and every way in which either goes wrong."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared import NO_COMPILER, needs_compiler, source_file

from flashlab.build.symbols import EMULATION
from flashlab.core.errors import (
    CompileError,
    EmulationError,
    MissingPackageError,
    OutputError,
    ParameterError,
    UnsupportedError,
)
from flashlab.kernels.registry import STAGES
from flashlab.run import emulator
from flashlab.run.attention import emulate
from flashlab.run.emulator import Pointer, Structure, build_file, launch

THREADS = 64


def kernel(folder: Path, body: str, *, parameters: str = "float* out", before: str = "", hooks: bool = False) -> Any:
    text = f'{before}\nextern "C" __global__ void kernel({parameters}) {{\n{body}\n}}\n'
    (folder / "kernel.cu").write_text(text, encoding="utf-8")  # what line_of reads
    return build_file(source_file("kernel.cu", text), entry="kernel", hooks=hooks)


def line_of(folder: Path, words: str) -> int:
    lines = (folder / "kernel.cu").read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


# --- launching ---


@needs_compiler
def test_arrays_of_any_strides_scalars_and_structures_reach_the_kernel(tmp_path: Path) -> None:
    built = kernel(
        tmp_path,
        """
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = view.data[i * view.step] * scale + half_scale + (nothing == nullptr ? 0.5f : 0.0f);""",
        parameters="float* out, View view, int count, float scale, double half_scale, const float* nothing",
        before="struct View { const float* data; long long step; };",
    )

    class View(ctypes.Structure):
        _fields_ = (("data", ctypes.c_void_p), ("step", ctypes.c_longlong))

    values = np.arange(300, dtype=np.float32)[::-3]
    out = np.full(100, -1, np.float32)
    view = Structure(value=View(0, values.strides[0] // 4), pointers={"data": Pointer(array=values, access="r")})
    report = launch(built, [out, view, 97, np.float32(2), 1.0, None], grid=[2], block=[THREADS])
    assert report.status == "ok"
    assert report.findings == ()
    np.testing.assert_array_equal(out[:97], 2 * values[:97] + 1.5)
    assert (out[97:] == -1).all()
    assert (values == np.arange(300, dtype=np.float32)[::-3]).all()


@needs_compiler
def test_dynamic_shared_memory_under_any_name_and_printf(tmp_path: Path) -> None:
    built = kernel(
        tmp_path,
        """
  extern __shared__ float tile[];
  tile[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
  if (threadIdx.x == 0) printf("hello from block %d\\n", (int)blockIdx.x);""",
    )
    out = np.zeros(THREADS, np.float32)
    for schedule in ("ascending", "descending", "seeded:3"):
        report = launch(built, [out], grid=[1], block=[THREADS], smem_bytes=4 * THREADS, schedule=schedule)
        np.testing.assert_array_equal(out, np.arange(THREADS)[::-1])
        assert report.printed == "hello from block 0\n"


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arguments": []}, "takes 1, got 0"),
        ({"arguments": ["text"]}, "argument 0: wanted a NumPy array"),
        ({"arguments": [np.float32(1)]}, "takes 8 bytes, got 4"),
        ({"grid": [0]}, "grid: wanted"),
        ({"block": [1, 1, 1, 1]}, "block: wanted"),
        ({"block": None}, "defines no launch_shape"),
        ({"schedule": "random"}, "schedule: wanted ascending"),
        ({"schedule": "seeded:x"}, "schedule: wanted ascending"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    built = kernel(tmp_path, "  out[0] = 1;")
    options: dict[str, Any] = {"arguments": [np.zeros(1, np.float32)], "grid": [1], "block": [1], **changes}
    with pytest.raises(ParameterError, match=words.replace("(", r"\(")):
        launch(built, options.pop("arguments"), **options)


@needs_compiler
def test_more_shared_memory_than_a_block_may_have_is_no_crash(tmp_path: Path) -> None:
    """As a GPU refuses it: `check` lists it as unsupported."""
    runtime = (EMULATION / "runtime" / "block.h").read_text(encoding="utf-8")
    assert f"DYNAMIC_BYTES = {emulator.MAX_SMEM_BYTES // 1024} * 1024;" in runtime
    built = kernel(tmp_path, "  extern __shared__ float tile[];\n  out[threadIdx.x] = tile[threadIdx.x] = threadIdx.x;")
    how: dict[str, Any] = {"grid": [1], "block": [THREADS]}
    launch(built, [np.zeros(THREADS, np.float32)], **how, smem_bytes=emulator.MAX_SMEM_BYTES)
    with pytest.raises(UnsupportedError, match="wanted 232449 bytes of shared memory a block, got at most 232448"):
        launch(built, [np.zeros(THREADS, np.float32)], **how, smem_bytes=emulator.MAX_SMEM_BYTES + 1)
    x = np.zeros((1, 1, 1, 64), np.float16)
    with pytest.raises(UnsupportedError, match="d15_short_starts: wanted 271488 bytes of shared memory a block"):
        emulate(x, x, x, stage="d15_short_starts", params={"STEP_KEYS": 32, "WARPS": 8, "PIPELINE_STAGES": 4})


@needs_compiler
def test_a_copy_of_no_bytes_may_be_from_anywhere(tmp_path: Path) -> None:
    """A pointer that steps past the rows of a tile may happen to lie in the emulation's shared memory."""
    built = kernel(
        tmp_path,
        """
  __shared__ __align__(16) float copied[4], other[4];
  ptx::cp_async_cg_16(copied, other, valid_bytes);
  ptx::cp_async_wait_all();
  out[0] = copied[0];""",
        parameters="float* out, int valid_bytes",
        before='#include "ptx.cuh"',
    )
    out = np.ones(1, np.float32)
    launch(built, [out, 0], grid=[1], block=[1])
    assert out == 0
    with pytest.raises(EmulationError, match=r"cp\.async: wanted global memory, got shared memory"):
        launch(built, [out, 4], grid=[1], block=[1])


@needs_compiler
def test_only_what_was_asked_to_is_written(tmp_path: Path) -> None:
    built = kernel(tmp_path, "  out[threadIdx.x] = in[threadIdx.x]; out[4] = 9;", parameters="float* out, float* in")
    buffer, values = np.full(8, 7, np.float32), np.arange(4, dtype=np.float32)
    launch(built, [Pointer(array=buffer[:4], access="w"), Pointer(array=values, access="r")], grid=[1], block=[4])
    assert buffer.tolist() == [0, 1, 2, 3, 7, 7, 7, 7]
    around = Pointer(array=buffer[:4], access="w", surroundings=buffer)
    launch(built, [around, values], grid=[1], block=[4])
    assert buffer.tolist() == [0, 1, 2, 3, 9, 7, 7, 7]


# --- what goes wrong while it runs ---


@needs_compiler
def test_a_crash_names_its_line_and_leaves_this_process_alone(tmp_path: Path) -> None:
    built = kernel(tmp_path, "  if (threadIdx.x == 5)\n    *(volatile int*)16 = 1;  // here\n  out[0] = 1;")
    out = np.zeros(1, np.float32)
    with pytest.raises(EmulationError, match="segmentation fault") as caught:
        launch(built, [out], grid=[1], block=[32])
    assert f"kernel.cu:{line_of(tmp_path, '// here')}" in str(caught.value)
    assert "thread 5, 0, 0" in str(caught.value)
    assert caught.value.report.status == "crash"
    assert out[0] == 0


@needs_compiler
def test_an_endless_loop_is_stopped_and_says_where(tmp_path: Path) -> None:
    built = kernel(tmp_path, "  volatile float* spin = out;\n  while (spin[0] == 0) { }  // here")
    with pytest.raises(EmulationError, match="not done after 1 seconds") as caught:
        launch(built, [np.zeros(1, np.float32)], grid=[1], block=[32], timeout_s=1)
    assert f"kernel.cu:{line_of(tmp_path, '// here')}" in str(caught.value)
    assert caught.value.report.status == "timeout"


@needs_compiler
def test_a_limit_before_the_worker_has_begun_is_said(tmp_path: Path) -> None:
    loop = kernel(tmp_path, "while (true) out[0] = out[0] + 1;")
    with pytest.raises(EmulationError, match=r"kernel on the CPU: not done after 1e-09 seconds"):
        launch(loop, [np.zeros(1, np.float32)], grid=[1], block=[1], timeout_s=1e-9)


@needs_compiler
def test_a_deadlock_says_who_waits_where(tmp_path: Path) -> None:
    built = kernel(
        tmp_path, "  if (threadIdx.x < 32)\n    while (true) __syncwarp(threadIdx.x == 0 ? 3u : 1u);  // here"
    )
    with pytest.raises(EmulationError) as caught:
        launch(built, [np.zeros(1, np.float32)], grid=[1], block=[32], timeout_s=5)
    assert f"kernel.cu:{line_of(tmp_path, '// here')}" in str(caught.value)


@needs_compiler
def test_a_race_is_told_with_both_lines(tmp_path: Path) -> None:
    built = kernel(
        tmp_path,
        """
  __shared__ float tile[64];
  tile[threadIdx.x] = out[threadIdx.x];  // writes
  out[threadIdx.x] = tile[63 - threadIdx.x];  // reads""",
        hooks=True,
    )
    report = launch(built, [np.ones(64, np.float32)], grid=[1], block=[64])
    races = [finding for finding in report.findings if finding.kind == "race"]
    assert races
    said = str(races[0])
    assert said.startswith("race in shared memory (")
    assert f"kernel.cu:{line_of(tmp_path, '// writes')}" in said
    assert f"kernel.cu:{line_of(tmp_path, '// reads')}" in said
    assert "with no barrier between" in said
    assert any(counter.space == "shared" for counter in report.counters)


@needs_compiler
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two blocks that wait for each other need two cores")
def test_blocks_that_update_a_word_at_the_same_moment_do_not_race(tmp_path: Path) -> None:
    built = kernel(
        tmp_path,
        """
  for (unsigned i = 1; i < count; ++i) {
    atomicAdd(&out[0], 1u);
    while (atomicAdd(&out[0], 0u) < gridDim.x * i) {}  // until the other block is here too
    atomicAdd(&out[i], 1u);
  }""",
        parameters="unsigned* out, unsigned count",
        hooks=True,
    )
    for _ in range(5):
        out = np.zeros(10_000, np.uint32)
        assert launch(built, [out, len(out)], grid=[2], block=[1], timeout_s=60).findings == ()
        assert (out[1:] == 2).all()


@needs_compiler
def test_what_lies_out_of_bounds_and_what_was_never_written_is_told(tmp_path: Path) -> None:
    built = kernel(
        tmp_path, "  out[threadIdx.x] = in[threadIdx.x + 1] + out[0];", parameters="float* out, float* in", hooks=True
    )
    out, values = np.zeros(32, np.float32), np.zeros(32, np.float32)
    report = launch(
        built,
        [Pointer(array=out, access="w", name="out"), Pointer(array=values, access="r", name="in")],
        grid=[1],
        block=[32],
    )
    kinds = {finding.kind for finding in report.findings}
    assert {"out of bounds", "uninitialised"} <= kinds


EARLY = """
#include "ptx_sm90.cuh"
"""


@needs_compiler
def test_what_is_touched_before_the_kernel_before_has_ended_is_told(tmp_path: Path) -> None:
    built = kernel(
        tmp_path,
        """
  const int early = given[1];  // too soon
  ptx::griddepcontrol_wait();
  out[threadIdx.x] = given[0] + early;""",
        parameters="int* out, const int* given",
        before=EARLY,
        hooks=True,
    )
    given = Pointer(array=np.arange(2, dtype=np.int32), access="r", name="given")

    def kinds(**how: Any) -> dict[str, str]:
        found = launch(built, [np.zeros(32, np.int32), given], grid=[1], block=[32], **how).findings
        return {finding.kind: str(finding) for finding in found}

    assert kinds() == {}, "nothing else is under way"
    (said,) = kinds(early=True).items()
    assert said[0] == "before griddepcontrol.wait"
    assert f"kernel.cu:{line_of(tmp_path, '// too soon')}" in said[1]


@needs_compiler
def test_every_block_waits_for_the_kernel_before(tmp_path: Path) -> None:
    """The blocks run one after another, on the same threads: what one has waited for, the next has not."""
    built = kernel(
        tmp_path,
        """
  if (blockIdx.x == 0) ptx::griddepcontrol_wait();
  out[blockIdx.x * 32 + threadIdx.x] = 1;""",
        parameters="int* out",
        before=EARLY,
        hooks=True,
    )
    found = launch(built, [np.zeros(64, np.int32)], grid=[2], block=[32], threads=1, early=True).findings
    assert [finding.kind for finding in found] == ["before griddepcontrol.wait"]


@needs_compiler
@pytest.mark.parametrize("hooks", [False, True])
def test_a_relaxed_load_before_the_kernel_before_has_ended_finds_anything(tmp_path: Path, hooks: bool) -> None:
    built = kernel(
        tmp_path,
        """
  const int early = ptx::ld_relaxed_gpu(&given[threadIdx.x]);
  ptx::griddepcontrol_wait();
  out[threadIdx.x] = early;
  out[32 + threadIdx.x] = ptx::ld_relaxed_gpu(&given[threadIdx.x]);""",
        parameters="int* out, const int* given",
        before=EARLY,
        hooks=hooks,
    )
    values = np.arange(500, 532, dtype=np.int32)

    def found(**how: Any) -> tuple[int, int]:
        """How many are what they will be, before the wait and after it."""
        out = np.zeros((2, 32), np.int32)
        arguments = [out.reshape(-1), Pointer(array=values, access="r", name="given")]
        report = launch(built, arguments, grid=[1], block=[32], **how)
        assert report.findings == ()
        early, late = (out == values).sum(axis=1).tolist()
        return early, late

    assert found(schedule="seeded:1") == (32, 32), "nothing else is under way"
    assert found(early=True) == (32, 32)
    assert found(early=True, schedule="descending") == (0, 32)
    some, late = found(early=True, schedule="seeded:1")
    assert 0 < some < 32
    assert late == 32


@needs_compiler
def test_ctrl_c_ends_the_worker(tmp_path: Path) -> None:
    built = kernel(tmp_path, "  volatile float* spin = out;\n  while (spin[0] == 0) { }")
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it leaves behind without it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            launch(built, [np.zeros(1, np.float32)], grid=[1], block=[32])
    finally:
        signal.signal(signal.SIGINT, before)
    cancel = threading.Event()
    threading.Timer(0.2, cancel.set).start()
    with pytest.raises(KeyboardInterrupt):
        launch(built, [np.zeros(1, np.float32)], grid=[1], block=[32], cancel=cancel)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if children.exists():
        running = [Path(f"/proc/{pid}/exe") for pid in children.read_text().split()]
        assert built.executable not in [exe.resolve() for exe in running]


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/exe").exists(), reason="needs Linux")
def test_a_worker_ends_when_its_parent_was_killed(tmp_path: Path) -> None:
    built = kernel(tmp_path, "  volatile float* spin = out;\n  while (spin[0] != 1) { }")
    script = (
        "import sys, numpy as np\nfrom pathlib import Path\nfrom flashlab.run.emulator import build_file, launch\n"
        "built = build_file(Path(sys.argv[1]), entry='kernel')\n"
        "launch(built, [np.zeros(1, np.float32)], grid=[1], block=[32])\n"
    )

    def running() -> list[Path]:
        every = Path("/proc").glob("[0-9]*/exe")
        return [exe for exe in every if os.access(exe, os.R_OK) and exe.resolve() == built.executable.resolve()]

    parent = subprocess.Popen([sys.executable, "-c", script, str(built.source)])
    while not running():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    ends = time.monotonic() + 20
    while running():
        assert time.monotonic() < ends
        time.sleep(0.05)


# --- what goes wrong before ---


@needs_compiler
def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        kernel(tmp_path, "  out[0] = 1\n  out[1] = 2;")
    assert caught.value.source_line is not None
    assert "kernel.cu:" in caught.value.source_line
    assert "expected" in str(caught.value)
    assert caught.value.log
    assert "kernel.cu" in caught.value.command


@needs_compiler
def test_inline_assembly_is_refused_by_name_and_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="inline PTX cannot run on a CPU") as caught:
        kernel(tmp_path, '  asm volatile("bar.sync 0;");  // here')
    assert caught.value.source_line is not None
    assert f"kernel.cu:{line_of(tmp_path, '// here')}" in caught.value.source_line


@needs_compiler
def test_an_unknown_function_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="__no_such_intrinsic") as caught:
        kernel(tmp_path, "  out[0] = __no_such_intrinsic(1.0f);  // here")
    assert f"kernel.cu:{line_of(tmp_path, '// here')}" in (caught.value.source_line or "")


@needs_compiler
def test_a_macro_that_the_emulation_uses_itself_is_named(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text('extern "C" __global__ void kernel(float* out) { out[0] = HALF; }\n', encoding="utf-8")
    with pytest.raises(CompileError, match=r"expected unqualified-id.*the emulation uses the name HALF itself"):
        build_file(source, entry="kernel", defines={"HALF": 3})


def test_a_file_without_the_kernel_says_what_it_has(tmp_path: Path) -> None:
    if NO_COMPILER:
        pytest.skip(NO_COMPILER)
    source = tmp_path / "other.cu"
    source.write_text('extern "C" __global__ void __launch_bounds__(64) other(int* p) { *p = 1; }\n', encoding="utf-8")
    with pytest.raises(CompileError, match="wanted the kernel 'kernel', the file defines other"):
        build_file(source, entry="kernel")
    with pytest.raises(ParameterError, match="wanted a CUDA C"):
        build_file(tmp_path / "none.cu", entry="kernel")


def test_no_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match=r"C\+\+20 compiler .* got none on PATH. Install one: ") as caught:
        build_file(STAGES["00_naive"].source, entry="attention_00_naive")
    assert emulator.install_command() in str(caught.value)


def test_an_old_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "g++"
    old.write_text(
        '#!/bin/sh\ncase "$1" in -dM) echo "#define __GNUC__ 9";; --version) echo "g++ 9";; *) echo machine;; esac\n',
        encoding="utf-8",
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match=r"got .*/g\+\+, g\+\+ 9"):
        emulator.cxx()


# --- the cache ---


@needs_compiler
def test_a_build_is_kept_and_a_damaged_one_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernel(tmp_path, "  out[0] = 1;")
    again = kernel(tmp_path, "  out[0] = 1;")
    assert again.cached
    assert again.executable == first.executable
    with first.executable.open("r+b") as file:
        file.write(b"damaged")
    anew = kernel(tmp_path, "  out[0] = 1;")
    assert not anew.cached
    out = np.zeros(1, np.float32)
    launch(anew, [out], grid=[1], block=[1])
    assert out[0] == 1
    (tmp_path / "kernel.cu").write_text(
        '#include "own.cuh"\nextern "C" __global__ void kernel(float* out) { out[0] = VALUE; }\n', encoding="utf-8"
    )
    for value in (2, 3):
        (tmp_path / "own.cuh").write_text(f"#define VALUE {value}\n", encoding="utf-8")
        launch(build_file(tmp_path / "kernel.cu", entry="kernel"), [out], grid=[1], block=[1])
        assert out[0] == value


@needs_compiler
def test_a_macro_of_a_name_in_the_emulations_headers_goes_with_them(tmp_path: Path) -> None:
    """They are read ahead, without a kernel's macros; where that would make a difference, they are read again."""
    source = source_file("kernel.cu", 'extern "C" __global__ void kernel(float* out) { out[0] = VALUE; }')
    built = build_file(source, entry="kernel", defines={"predicate": "renamed", "VALUE": "sizeof(uint)"})
    out = np.zeros(1, np.float32)
    launch(built, [out], grid=[1], block=[1])
    assert out[0] == 4


@needs_compiler
def test_threads_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(
        f'// {time.time_ns()}\nextern "C" __global__ void kernel(int* p) {{ *p = 1; }}\n', encoding="utf-8"
    )
    found: list[emulator.Emulated] = []
    threads = [threading.Thread(target=lambda: found.append(build_file(source, entry="kernel"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(built.cached for built in found) == [False, True, True, True]


@needs_compiler
def test_processes_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(
        f'// {time.time_ns()}\nextern "C" __global__ void kernel(int* p) {{ *p = 1; }}\n', encoding="utf-8"
    )
    program = (
        "import sys; from pathlib import Path; from flashlab.run.emulator import build_file; "
        "print(build_file(Path(sys.argv[1]), entry='kernel').cached)"
    )
    command = [sys.executable, "-c", program, str(source)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].strip() for process in running]
    assert sorted(said) == ["False", "True", "True"]
    folder = build_file(source, entry="kernel").executable.parent
    assert not folder.with_name(f"{folder.name}.lock").exists()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, read_only_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(read_only_dir))
    with pytest.raises(OutputError, match="FLASHLAB_CACHE"):
        kernel(tmp_path, "  out[0] = 1;")
