"""The emulator's counters beside what Nsight Compute counted on a GPU in the same launches."""

from __future__ import annotations

import pytest
from shared import needs_compiler

from flashlab.core.paths import DATA
from flashlab.record import store
from flashlab.record.schema import StageCounters
from flashlab.show import trial

FILES = sorted(DATA.glob("*/counters/*.jsonl"))
EQUAL = ("00_naive", "01_coalesced", "02_half2", "03_warp_rows", "04_wmma_qk")
"""Stages whose machine code makes the accesses that the source says. For 05 and 06 nvcc merges neighbouring reads and
takes a store apart; what it leaves alone is compared."""
LEFT_ALONE = ("global loads", "shared stores", "ldmatrix")

pytestmark = needs_compiler


@pytest.mark.skipif(not FILES, reason="no GPU's counters are recorded")
def test_stages_count_what_the_chip_counts() -> None:
    lines = store.read(FILES[-1], StageCounters)[0]
    compared = {
        (line.stage, line.shape): trial.counted(trial.count_accesses(line.stage, line.shape), line) for line in lines
    }
    assert {stage for stage, _ in compared} >= set(EQUAL)
    differing = {}
    for (stage, shape), found in compared.items():
        assert found, (stage, shape)
        for what, (requests, their_requests, passes, their_passes) in found.items():
            exact = stage in EQUAL or what in LEFT_ALONE
            if exact and (requests, passes) != (their_requests, their_passes):
                differing[stage, shape, what] = ((requests, passes), (their_requests, their_passes))
    assert differing == {}
