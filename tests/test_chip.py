"""Micro-benchmarks of one SM: the machine code holds what is named, values follow from clocks, records read back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import synthetic
from pydantic import ValidationError

from flashlab.core.errors import CompileError, NoGpuError, ParameterError
from flashlab.experiments import chip
from flashlab.measure.options import Options
from flashlab.measure.timer import MicroParams
from flashlab.record import schema, store
from flashlab.record.schema import ChipReading
from flashlab.run import emulator, gpu

SOME = (
    # one of each kernel and kind
    "ex2_16_warps",
    "fmnmx_16_warps",
    "pack_16_warps",
    "ex2_polynomial_8_warps",
    "shuffle_latency",
    "mbarrier_arrive_wait",
    "mbarrier_handover",
    "bar_sync_2_warpgroups",
    "named_barrier_handover",
    "bulk_copy_8_kib",
    "shared_load_latency",
    "wgmma_n64_2wg_ss",
    "wgmma_n128_1wg_rs_v",
    "wgmma_n256_2wg_rs",
    "issue_n64_2wg_rs_each",
    "issue_4_n64_1wg_rs",
    "softmax_4_warps",
    "softmax_polynomial_4_1_warps",
    "ffma_2wg_alone",
    "wgmma_n64_2wg_rs_beside_softmax_2wg",
    "loop_serial_d64_1wg_n64",
    "loop_across_anchored_d64_2wg_n128",
    "loop_across_d128_2wg_n128",
    "loop_halves_anchored_d64_2wg_n64",
    "loop_across_anchored_d64_3wg_n128_without_max_in_turns_asks_votes",
    "wgmma_n64_1wg_ss_beside_hmnmx2_1wg",
)


some = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if number % 2 else ()) for number, name in enumerate(SOME)],
)
"""`make test` takes every second."""


@some
def test_machine_code_holds_what_is_measured(name: str) -> None:
    case = chip.CASES[name]
    cubin = chip.compile_case(case)
    counted = chip.count_opcodes(case, cubin)
    assert counted.keys() == case.opcodes.keys()
    assert cubin.resources.registers * case.threads <= 1 << 16


def test_what_the_compiler_left_out_is_noticed() -> None:
    case = chip.CASES["ex2_16_warps"]
    cubin = chip.compile_case(case)
    with pytest.raises(CompileError, match="FFMA"):
        chip.count_opcodes(chip.Case(**{**vars(case), "opcodes": {"FFMA": 128}}), cubin)
    with pytest.raises(CompileError, match="at least 1000"):
        chip.count_opcodes(chip.Case(**{**vars(case), "opcodes": {"MUFU.EX2": -1000}}), cubin)


def order_of(name: str) -> list[str]:
    """Products, waits for products and exponentials of a case's machine code, in their order."""
    from flashlab.build import sass

    case = chip.CASES[name]
    kinds = {"HGMMA": "product", "WARPGROUP.DEPBAR": "wait", "MUFU.EX2": "power"}
    return [
        kind
        for instruction in sass.disassemble(chip.compile_case(case).code, case.entry)
        for opcode, kind in kinds.items()
        if instruction.opcode.startswith(opcode)
    ]


def runs_of(kinds: Iterable[str]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for kind in kinds:
        found = [*found[:-1], (kind, found[-1][1] + 1)] if found and found[-1][0] == kind else [*found, (kind, 1)]
    return found


def test_an_anchor_keeps_the_powers_before_the_wait() -> None:
    """Without it ptxas takes every power after the wait for the product that they were to run beside."""
    free = runs_of(order_of("loop_across_d64_2wg_n128"))
    assert free == [("product", 12), ("wait", 2), ("power", 64)]
    anchored = runs_of(order_of("loop_across_anchored_d64_2wg_n128"))
    assert anchored == [("product", 12), ("wait", 1), ("power", 64), ("wait", 1)]


def test_both_halves_run_beside_products() -> None:
    assert runs_of(order_of("loop_halves_anchored_d64_2wg_n64")) == 2 * [("product", 8), ("power", 32), ("wait", 1)]


@some
def test_every_kernel_runs_on_a_cpu_without_a_finding(name: str) -> None:
    case = chip.CASES[name]
    kernel = emulator.build_file(case.source, entry=case.entry, defines=case.macros, hooks=True)
    size = case.threads // 32 * (3 + case.stamps)
    out = np.zeros(max(size, 1 << 14), np.int64)
    numbers = np.linspace(0.5, 1, 1 << 14, dtype=np.float32)
    count = min(case.count, 50) if case.kernel == "overlap" else case.count
    structure = emulator.Structure(
        value=MicroParams(0, 0, count, 2),
        pointers={
            "out": emulator.Pointer(array=out, access="w", name="out"),
            "in": emulator.Pointer(array=numbers, access="r", name="in"),
        },
    )
    report = emulator.launch(
        kernel, [structure], grid=(1, 1, 1), block=(case.threads, 1, 1), smem_bytes=case.smem_bytes, timeout_s=60
    )
    assert not report.findings
    assert chip.block_of(case, out[:size].tolist()).value > 0


def test_rates_latencies_and_scores_follow_from_the_clocks() -> None:
    rate = chip.CASES["ex2_4_warps"]
    words = [w for warp in range(4) for w in (1000 + warp, 2000 + 2 * warp, 40)]
    assert chip.block_of(rate, words).value == pytest.approx(4 * 40 * 32 * 128 / (2006 - 1000))
    step = chip.CASES["mbarrier_handover"]
    assert chip.block_of(step, [0, 4000, 10, 5, 4000, 10]).value == 4000 / 20
    score = chip.CASES["loop_serial_d64_1wg_n64"]
    assert chip.block_of(score, [0, 4096, 2] * 4).value == pytest.approx(4096 / (2 * 64 * 64))


def test_the_other_warps_are_told_apart() -> None:
    case = chip.CASES["wgmma_n64_1wg_ss_beside_ex2_1wg"]
    words = [0, 1000, 10] * 4 + [0, 1100, 7] * 4
    found = chip.block_of(case, words)
    assert found.value == pytest.approx(10 * 2 * 64 * 64 * 16 * 8 / 1000)
    assert found.beside == pytest.approx(4 * 7 * 32 * 128 / 1100)


def test_stamps_are_the_medians_of_the_warps() -> None:
    case = chip.CASES["issue_1_n64_1wg_rs"]
    words = [w for warp in range(4) for w in (0, 500, 4, 10 + warp, 100)]
    found = chip.block_of(case, words)
    assert found.stamps == (11.5, 100.0)
    assert found.value == 100.0


@pytest.mark.parametrize("words", [[0, 0, 0] * 4, [5, 4, 1] * 4, [0, 9, 1] * 3])
def test_words_of_no_run_are_refused(words: list[int]) -> None:
    with pytest.raises(ParameterError, match="clocks of 4 warps"):
        chip.block_of(chip.CASES["ex2_4_warps"], words)


def test_cases_are_chosen_by_name_and_group() -> None:
    assert {case.group for case in chip.choose(["unit"])} == {"unit"}
    assert [case.name for case in chip.choose(["ex2_4_warps"])] == ["ex2_4_warps"]
    assert len(chip.choose(None)) == len(chip.CASES)
    with pytest.raises(ParameterError, match="softmax"):
        chip.choose(["nothing of the kind"])


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if gpu.available() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(NoGpuError):
        chip.measure(["unit"], options=Options(data=tmp_path))


def reading(name: str, value: float, *, run: str = synthetic.RUN) -> ChipReading:
    case = chip.CASES[name]
    return ChipReading(
        run=run,
        time="2026-01-02T03:04:05Z",
        gpu=synthetic.gpu(),
        source={"commit": synthetic.COMMIT, "dirty": False},  # type: ignore[arg-type]
        software={},
        name=name,
        group=case.group,
        unit=case.unit,
        value=value,
        one_sm=(value,),
        all_sms=(value,),
        how=case.how,
        kernel=case.kernel,
        defines=case.macros,
        repeats=case.repeats,
        sha256=hashlib.sha256(name.encode()).hexdigest(),
        registers=32,
        opcodes={},
    )


def test_the_newest_reading_counts_and_damage_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200" / "chip"
    folder.mkdir(parents=True)
    assert chip.newest("nvidia-h200", tmp_path) == {}
    old, new = reading("ex2_4_warps", 15.0), reading("ex2_4_warps", 16.0, run="20260102T030406Z-0123abc")
    (folder / f"{old.run}.jsonl").write_text(old.model_dump_json() + "\n", encoding="utf-8")
    (folder / f"{new.run}.jsonl").write_text(new.model_dump_json() + '\n{"kind": "chip"}\n', encoding="utf-8")
    assert chip.newest("nvidia-h200", tmp_path)["ex2_4_warps"] == new
    found, damage = store.read(folder / f"{new.run}.jsonl", schema.ChipReading)
    assert found == (new,)
    assert [d.line for d in damage] == [2]


def test_a_reading_without_a_value_is_none() -> None:
    with pytest.raises(ValidationError):
        reading("ex2_4_warps", float("nan"))
