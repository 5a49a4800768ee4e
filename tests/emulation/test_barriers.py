"""Barriers that threads meet in different ways: legal uses are silent, others are named."""

from __future__ import annotations

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


def launch(body: str, *, threads: int = 64, cluster: int = 1, schedule: str = "ascending") -> emulator.Report:
    """One cluster of a kernel with that body, and `int* out` with an element for each thread of a block."""
    head = '#include "ptx.cuh"\n#include "ptx_sm90.cuh"\n'
    text = f'{head}extern "C" __global__ void barriers(int* out) {{\n{body}\n}}\n'
    source = source_file("barriers.cu", text)
    built = emulator.build_file(source, entry="barriers", hooks=True)
    out = np.zeros(threads, np.int32)
    return emulator.launch(
        built,
        [out],
        grid=(cluster,),
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


@pytest.mark.parametrize("threads", [1, 1024])
def test_a_polling_loop_may_idle_as_long_whatever_the_number_of_threads(threads: int) -> None:
    report = launch("for (int i = 0; i < 1000; ++i) __nanosleep(1);\nout[threadIdx.x] = 1;", threads=threads)
    assert report.status == "ok", report.message
