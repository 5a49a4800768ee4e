"""Barriers that threads meet in different ways: legal uses are silent, others are named."""

from __future__ import annotations

import os

import numpy as np
import pytest
from emulation import kernel_file
from shared import needs_compiler, source_file

from flashlab.core.errors import EmulationError
from flashlab.core.paths import ROOT
from flashlab.run import emulator

CONFORMANCE = ROOT / "tests/emulation/conformance"
SCHEDULES = ("ascending", "descending", "seeded:7")


pytestmark = needs_compiler


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["cluster_early_exit"])
def test_legal_use_is_silent(name: str, schedule: str) -> None:
    file = kernel_file.read(CONFORMANCE / f"{name}.cu")
    emulated = emulator.build_file(file.path, entry=file.entry, hooks=True)
    report, arrays = kernel_file.emulate(file, emulated, schedule)
    assert report.status == "ok", report.message
    assert [str(finding) for finding in report.findings] == []
    assert kernel_file.difference(file, arrays, file.expected()) == ""


def launch(
    body: str, *, threads: int = 64, cluster: int = 1, clusters: int = 1, schedule: str = "ascending"
) -> emulator.Report:
    """Clusters of a kernel with that body, and `int* out` with an element for each thread of a block, of 0 at first."""
    head = '#include "ptx.cuh"\n#include "ptx_sm90.cuh"\n'
    text = f'{head}extern "C" __global__ void barriers(int* out) {{\n{body}\n}}\n'
    source = source_file("barriers.cu", text)
    built = emulator.build_file(source, entry="barriers", hooks=True)
    out = np.zeros(threads, np.int32)
    return emulator.launch(
        built,
        [out],
        grid=(cluster * clusters,),
        block=(threads,),
        cluster=(cluster,),
        smem_bytes=0,
        schedule=schedule,
        timeout_s=20,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cluster", [1, 2])
def test_an_early_exit_does_not_stand_for_one_that_has_not_arrived(cluster: int, schedule: str) -> None:
    body = """
      if (threadIdx.x >= 32) { ptx::cluster_arrive(); return; }
      if (threadIdx.x == 0) { __syncwarp(3); return; }   // lane 1 does not come there: it waits for ever
      ptx::cluster_arrive();
      ptx::cluster_wait();
      out[threadIdx.x] = 1;"""
    with pytest.raises(EmulationError) as caught:
        launch(body, cluster=cluster, schedule=schedule)
    report = caught.value.report
    assert report is not None
    assert report.status == "deadlock"
    assert "barrier.cluster.wait" in {waiting.what for waiting in report.waiting}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_barrier_zero_with_another_number_is_misuse(schedule: str) -> None:
    body = "if (threadIdx.x < 64) { __syncthreads(); } else { ptx::bar_sync(0, 64); }"
    with pytest.raises(EmulationError, match="wanted one number of threads for a barrier"):
        launch(body, threads=96, schedule=schedule)


@pytest.mark.parametrize(
    ("body", "waiting"),
    [
        ("ptx::bar_sync(1, 96);", "bar.sync, barrier 1, 64 of 96 threads there"),
        ("if (threadIdx.x < 32) __syncthreads(); else ptx::bar_sync(1, 64);", "__syncthreads, 32 of 96 threads there"),
        ("if (threadIdx.x % 32) return; __syncwarp(3);", "__syncwarp, lanes 0x1 of mask 0x3 there"),
    ],
)
def test_a_deadlock_says_who_has_come_to_a_barrier(body: str, waiting: str) -> None:
    with pytest.raises(EmulationError, match=waiting):
        launch(f"if (threadIdx.x >= 64) while (true) __nanosleep(1);\n{body}", threads=96)


@pytest.mark.parametrize("threads", [1, 1024])
def test_a_polling_loop_may_idle_as_long_whatever_the_number_of_threads(threads: int) -> None:
    report = launch("for (int i = 0; i < 1000; ++i) __nanosleep(1);\nout[threadIdx.x] = 1;", threads=threads)
    assert report.status == "ok", report.message


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two blocks that run at the same time need two cores")
def test_polling_for_a_block_that_computes_is_no_deadlock() -> None:
    body = """
      if (blockIdx.x == 0) { while (atomicAdd(&out[0], 0) == 0) __nanosleep(100); return; }
      volatile unsigned computed = 0;
      while (computed < 100000000u) computed = computed + 1;
      atomicAdd(&out[0], 1);"""
    assert launch(body, threads=1, clusters=2).status == "ok"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two blocks that run at the same time need two cores")
def test_blocks_that_poll_for_one_another_are_a_deadlock_of_all() -> None:
    with pytest.raises(EmulationError) as caught:
        launch("while (atomicAdd(&out[0], 0) == 0) __nanosleep(100);", threads=1, clusters=2)
    report = caught.value.report
    assert report is not None
    assert report.status == "deadlock"
    assert {waiting.block[0] for waiting in report.waiting} == {0, 1}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two blocks that run at the same time need two cores")
def test_a_block_that_fails_is_named_and_not_the_one_that_polls_for_it() -> None:
    body = """
      if (blockIdx.x == 0) { while (atomicAdd(&out[0], 0) == 0) __nanosleep(100); return; }
      ptx::bar_sync(0, 48);"""
    with pytest.raises(EmulationError, match="wanted a multiple of 32 threads"):
        launch(body, threads=64, clusters=2)
