"""The stages built on mma.sync, as machine code and on the CPU: what each claims of itself is there. Needs no GPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from shared import cubin, in_turn, needs_compiler, tiers

from flashlab.build import sass
from flashlab.build.compiler import Cubin
from flashlab.build.sass import Instruction
from flashlab.core.problem import DType, Mask, Problem
from flashlab.kernels.registry import Stage, get
from flashlab.run.attention import emulate
from flashlab.verify.oracle import make_inputs
from flashlab.verify.verdict import check

ARCH = "sm_90a"
REGISTERS, SWIZZLE = get("07_mma_registers"), get("08_swizzle")
MASKS = (False, True)
SM_REGISTERS, REGISTER_UNIT = 65536, 8
MMA_M, MMA_N, MMA_K, WARP = 16, 8, 16, 32
OPTIONS: tuple[Mapping[str, int], ...] = (
    {"LAZY_RESCALE": 0},
    {"SUM_BY_MMA": 0},
    {"LAZY_RESCALE": 0, "SUM_BY_MMA": 0},
    {"STEP_KEYS": 32, "Q_IN_REGISTERS": 0, "TILE_KV": 32, "PIPELINE_STAGES": 4},
)

every_stage = pytest.mark.parametrize("stage", [REGISTERS, SWIZZLE], ids=lambda stage: stage.id)


def loop(built: Cubin) -> list[Instruction]:
    """The instructions of the loop over tiles: the backward branch around the most products."""
    code = sass.without_padding(sass.disassemble(built.code, built.entry))
    loops = []
    for last in code:
        target = re.search(r"0x([0-9a-f]+)$", last.operands)
        if last.opcode == "BRA" and target and int(target[1], 16) < last.address:
            loops.append([one for one in code if int(target[1], 16) <= one.address <= last.address])
    return max(loops, key=lambda body: (count(body, "HMMA"), -len(body)))


def count(code: list[Instruction], name: str) -> int:
    return sum(instruction.opcode.split(".")[0] == name for instruction in code)


def products(built: Cubin, head_dim: int) -> int:
    """Instructions for one of the two products of a warp and a tile."""
    sizes = built.parameters
    return sizes["TILE_Q"] // sizes["WARPS"] // MMA_M * (sizes["TILE_KV"] // MMA_N) * (head_dim // MMA_K)


def longest_run(code: list[Instruction], name: str, without: str) -> int:
    """The most instructions of that name between two of the other one."""
    best = run = 0
    for instruction in code:
        opcode = instruction.opcode.split(".")[0]
        run = 0 if opcode == without else run + (opcode == name)
        best = max(best, run)
    return best


def variants(stage: Stage, whole: bool) -> Iterable[tuple[int, DType, bool]]:
    """Head dim, element type and whether causal: all, or in part each head dim, and each type under each mask."""
    return itertools.product(stage.head_dims, stage.dtypes, MASKS) if whole else in_turn(stage)


@tiers
@every_stage
def test_products_read_what_ldmatrix_loads_and_nothing_leaves_the_registers(stage: Stage, whole: bool) -> None:
    for head_dim, dtype, causal in variants(stage, whole):
        built = cubin(stage, head_dim, causal=causal, dtype=dtype)
        body = loop(built)
        bodies = 1 if stage is REGISTERS else 2  # the last tile has none after it
        rows = built.parameters["TILE_Q"] // built.parameters["WARPS"] // MMA_M
        sums = bodies * rows * built.parameters["TILE_KV"] // MMA_K * built.parameters.get("SUM_BY_MMA", 0)
        assert count(body, "HMMA") == (bodies + 1) * products(built, head_dim) + sums
        matrices = built.parameters["TILE_KV"] * head_dim // 256  # ldmatrix brings 16 × 16 elements
        of_q = 0 if built.parameters["Q_IN_REGISTERS"] else rows * head_dim // MMA_K
        assert count(body, "LDSM") <= (bodies + 1) * matrices + of_q * built.parameters["TILE_KV"] // MMA_K
        assert count(body, "LDSM") >= (bodies + 1) * matrices
        names = {instruction.opcode.split(".")[0] for instruction in body}
        assert names.isdisjoint({"LDL", "STL", "STS", "CALL"})
        assert built.resources.spill_store_bytes == built.resources.spill_load_bytes == built.resources.stack_bytes == 0


@tiers
@every_stage
def test_as_many_blocks_fit_as_it_says(stage: Stage, whole: bool) -> None:
    for head_dim, dtype, causal in variants(stage, whole):
        built = cubin(stage, head_dim, causal=causal, dtype=dtype)
        assert built.launch_shape is not None
        registers = -(-built.resources.registers // REGISTER_UNIT) * REGISTER_UNIT
        assert registers * built.launch_shape.threads * built.parameters["MIN_BLOCKS"] <= SM_REGISTERS


@tiers
def test_products_and_exponentials_alternate(whole: bool) -> None:
    """Left alone, ptxas puts a tile's Q·K behind everything else, where nothing overlaps with it, and says nothing."""
    for dtype, causal in itertools.product(SWIZZLE.dtypes, MASKS) if whole else ((SWIZZLE.dtypes[0], False),):
        parent, built = (cubin(stage, 64, causal=causal, dtype=dtype) for stage in (REGISTERS, SWIZZLE))
        assert longest_run(loop(parent), "HMMA", "MUFU") >= products(parent, 64)
        steps = built.parameters["TILE_KV"] // built.parameters["STEP_KEYS"]
        assert longest_run(loop(built), "HMMA", "MUFU") <= 3 * products(built, 64) // steps


@needs_compiler
@every_stage
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_memory_has_no_bank_conflicts(stage: Stage, head_dim: int) -> None:
    problem = Problem(batch=1, q_heads=1, kv_heads=1, q_len=128, kv_len=128, head_dim=head_dim)
    report = emulate(*make_inputs(problem, seed=0), stage=stage.id, races=True).report
    shared = [counter for counter in report.counters if counter.space == "shared"]
    assert {counter.kind for counter in shared} >= {"matrix", "async copy"}
    assert [counter for counter in shared if counter.wavefronts != counter.ideal_wavefronts] == []
    assert report.findings == ()


@needs_compiler
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@every_stage
def test_any_finite_scale(stage: Stage, scale: float) -> None:
    """Maxima are of scores before they are scaled, which a positive scale alone allows."""
    problem = Problem(batch=1, q_heads=2, kv_heads=1, q_len=100, kv_len=300, head_dim=64)
    q, k, v = make_inputs(problem, seed=0)
    found = emulate(q, k, v, scale=scale, stage=stage.id, races=True)
    verdict = check(found.out, found.lse, q, k, v, causal=False, dtype="float16", scale=scale)
    assert (verdict.reason, found.report.findings) == ("", ())


@needs_compiler
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
@pytest.mark.parametrize(("q_len", "kv_len", "causal"), [(150, 333, False), (150, 333, True), (300, 130, True)])
def test_every_option_gives_the_same_answer(options: Mapping[str, int], q_len: int, kv_len: int, causal: bool) -> None:
    mask: Mask = "causal" if causal else "full"
    problem = Problem(batch=1, q_heads=2, kv_heads=1, q_len=q_len, kv_len=kv_len, head_dim=64, mask=mask)
    q, k, v = make_inputs(problem, seed=0)
    found = emulate(q, k, v, causal=causal, stage=SWIZZLE.id, params=options, races=True)
    verdict = check(found.out, found.lse, q, k, v, causal=causal, dtype="float16")
    assert (verdict.reason, found.report.findings) == ("", ())


@needs_compiler
def test_a_reference_that_lags_behind_the_maximum_is_caught_up() -> None:
    """Scores that grow from tile to tile by more than LAZY_RESCALE allows, and by less."""
    problem = Problem(batch=1, q_heads=1, kv_heads=1, q_len=128, kv_len=512, head_dim=64)
    q, k, v = make_inputs(problem, seed=0)
    k *= (1 + 3 * (np.arange(problem.kv_len) // 64))[:, None].astype(k.dtype)
    for lazy in (1, 8):
        found = emulate(q, k, v, stage=SWIZZLE.id, params={"LAZY_RESCALE": lazy})
        assert check(found.out, found.lse, q, k, v, causal=False, dtype="float16").reason == ""
