"""Hopper's asynchronous instructions on the CPU: to the bit, in three schedules, and what misuse gets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sm90_cases
from sm90_cases import Case, Map

from flashlab.build import compiler
from flashlab.core.errors import EmulationError
from flashlab.run import emulator

KERNELS = Path(__file__).parent / "kernels"
SCHEDULES = ("ascending", "descending", "seeded:5")


def run(case: Case, schedule: str = "ascending", *, hooks: bool = False) -> emulator.Report:
    """The case ran, gave what it must, and the detector found nothing."""
    report = case.emulate(schedule, hooks=hooks)
    assert case.difference() == ""
    assert [str(finding) for finding in report.findings] == []
    return report


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shapes", [True, False], ids=["shapes", "layouts"])
def test_wgmma_in_every_shape_and_layout(shapes: bool, schedule: str) -> None:
    run(sm90_cases.wgmma_case(shapes=shapes), schedule)


def test_wgmma_reads_what_the_proxy_fence_has_released() -> None:
    run(sm90_cases.wgmma_case(shapes=False), hooks=True)


def test_tensor_copies() -> None:
    cases = sm90_cases.tensor_cases()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda at: run(cases[at], SCHEDULES[at % 3], hooks=at % 4 == 0), range(len(cases))))


@pytest.mark.parametrize("hooks", [False, True], ids=["fast", "hooks"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_attention(schedule: str, hooks: bool) -> None:
    run(sm90_cases.attention_case(203), schedule, hooks=hooks)


@pytest.mark.parametrize("hooks", [False, True], ids=["fast", "hooks"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cluster(schedule: str, hooks: bool) -> None:
    run(sm90_cases.cluster_case(), schedule, hooks=hooks)


@pytest.mark.parametrize("hooks", [False, True], ids=["fast", "hooks"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_and_barriers(schedule: str, hooks: bool) -> None:
    run(sm90_cases.copies_case(), schedule, hooks=hooks)


# --- misuse -----------------------------------------------------------------------------------------------------------

MISUSE = {
    "UNINITIALISED": "that mbarrier_init has initialised, got one that it has not",
    "TWICE": "got one in use",
    "TOO_MANY_ARRIVALS": "wanted at most the 1 of 1 arrivals still pending in phase 0, got 2",
    "TOO_FEW_BYTES": "wanted no more bytes than expect_tx announced for phase 0, got 16 more",
    "OVERWRITTEN": "something has written over it",
    "MISALIGNED_TILE": "a multiple of 128, got offset 16",
    "TILE_PAST_END": "wanted 8192 bytes of shared memory from offset 31744, got 1024",
    "WRONG_RANK": "wanted a tensor map of 3 dimensions, got one of 2",
    "NOT_A_MAP": "128 bytes without a tensor map's mark",
    "NO_FENCE": "wanted wgmma_fence before the first wgmma",
    "NO_WAIT": "wanted wgmma_wait_group before",
    "NO_COMMIT": "was not committed",
    "TOUCHED": "got d[5] (row 18, column 9) of this thread written",
    "DESCRIPTOR_PAST_END": "wanted B inside of shared memory",
    "WARP_DIFFERS": "in all four warps of the warpgroup",
    "COMMITS_DIFFER": "wanted all lanes of the warp to issue and commit alike, got 1 wgmma and 1 commits in lane 0, "
    "1 and 2 in lane 3",
    "WAIT_DIFFERS": "wanted the same number of pending groups in all lanes of the warp, got 0 and 1",
    "FEWER_IN_A_WARP": "the same number of wgmma in all four warps of the warpgroup, got 1 in warp 3 and 2 in warp 0",
    "TOUCHED_WITHOUT_FENCE": "with element 3 written after the last one",
    "STORE_NOT_READ": "wanted cp_async_bulk_wait_group_read",
    "TOO_MANY_REGISTERS": "wanted at most the 64512 registers of the block's 384 threads, 168 each at launch",
    "COPY_NOT_WAITED": "no thread has waited for it",
    "ODD_BULK_BYTES": "wanted a multiple of 16 bytes, got 24",
    "NEVER_EXPECTED": "no thread has waited for it",
    "ODD_COORDINATE": "wanted a first coordinate at a multiple of 16 bytes, got 4, which is byte 8",
    "NEGATIVE_STORE": "wanted coordinates from 0 on, got -1 in dimension 1",
}
DEADLOCKS = {
    "TOO_MANY_BYTES": "mbarrier wait, parity 0, phase 0, 0 of 1 arrivals pending, 16 bytes outstanding",
    "COUNT_TOO_HIGH": "mbarrier wait, parity 0, phase 0, 1 of 2 arrivals pending, 8192 bytes outstanding",
    "NO_RELEASE": "mbarrier wait, parity 0, phase 0, 3 of 128 arrivals pending, 0 bytes outstanding",
}
NAMES = (KERNELS / "sm90_misuse.cu").read_text(encoding="utf-8").split("enum Which {")[1].split("}")[0].split(",")
WHICH = {name.strip(): number for number, name in enumerate(NAMES) if name.strip()}


def misuse_case(name: str) -> Case:
    """The wrong use of that name; what it computes does not matter."""
    source = np.zeros((64, 64), np.float16)
    return Case(
        label=name,
        file="sm90_misuse",
        arguments=(
            Map(array=source, box=(64, 64), swizzle=3),
            np.zeros(4096, np.uint8),
            np.zeros(4096, np.uint8),
            WHICH[name],
        ),
        wanted=(),
        block=(384,) if name == "TOO_MANY_REGISTERS" else (128,),
        smem_bytes=4 * 8192,
    )


def test_correct_use_is_no_misuse() -> None:
    for schedule in SCHEDULES:
        run(misuse_case("NONE"), schedule)


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name: str) -> None:
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError) as caught:
            misuse_case(name).emulate(schedule)
        report = caught.value.report
        assert report is not None
        assert report.status == "misuse"
        assert MISUSE[name] in report.message
        assert report.where is not None
        assert report.where.frame is not None
        assert "sm90_misuse.cu" in str(report.where)


@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlock_says_what_the_barrier_waits_for(name: str) -> None:
    with pytest.raises(EmulationError) as caught:
        misuse_case(name).emulate()
    report = caught.value.report
    assert report is not None
    assert report.status == "deadlock"
    assert DEADLOCKS[name] in {waiting.what for waiting in report.waiting}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (20, 40), "box": (8, 20), "at": (0, 0)}, "a multiple of 16 bytes in dimension 0, got 40"),
        ({"shape": (20, 300), "box": (8, 264), "at": (0, 0)}, "a box of 1 to 256 elements in dimension 0, got 264"),
        ({"shape": (20, 80), "box": (8, 72), "at": (0, 0), "swizzle": 3}, "at most 128 bytes in dimension 0"),
        ({"shape": (20, 40), "box": (8, 32), "at": (0, 0), "dtype": np.uint8, "nan_fill": True}, "wanted a fill of 0"),
    ],
)
def test_tensor_maps_follow_the_drivers_rules(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        sm90_cases.tensor_case(**arguments).emulate()  # type: ignore[arg-type]


# --- the same files for the chip --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_kernels_compile_for_sm_90a() -> None:
    def build(at: tuple[str, dict[str, int | str]]) -> str:
        name, defines = at
        cubin = compiler.compile_file(
            KERNELS / f"{name}.cu", entry=name, arch="sm_90a", defines=defines, may_spill=name == "sm90_wgmma"
        )
        return "\n".join(line for line in cubin.log.splitlines() if "warning" in line.lower())

    files: list[tuple[str, dict[str, int | str]]] = [("sm90_wgmma", {"SHAPES": 0})]
    files += [("sm90_wgmma", {"SHAPES": 1, "FIRST_N": n, "LAST_N": n}) for n in (8, 136, 256)]
    files += [(name, {}) for name in ("sm90_tensor", "sm90_attention", "sm90_cluster", "sm90_copies")]
    with ThreadPoolExecutor(2) as pool:
        assert [warnings for warnings in pool.map(build, files) if warnings] == []
