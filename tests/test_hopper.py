"""Hopper stages as machine code for sm_90a: what each claims of its instructions must be there. No GPU is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from shared import cubin, ends_of, in_turn, needs_compiler, one_type_a_head_dim, part_of, tiers

from flashlab.build import compiler, sass
from flashlab.build.compiler import Cubin, LaunchShape
from flashlab.core.errors import CompileError
from flashlab.core.inputs import KINDS, TRAINED
from flashlab.core.problem import DType, Mask, Problem
from flashlab.kernels.registry import STAGES, Stage
from flashlab.run import choice
from flashlab.run.attention import emulate
from flashlab.verify.oracle import attention, make_inputs, to_float
from flashlab.verify.verdict import Oracle, check

ARCH = "sm_90a"
HOPPER = tuple(stage for stage in STAGES.values() if stage.tensor_maps)
SPECIALIZED = tuple(stage for stage in HOPPER if "NUM_CONSUMERS" in stage.params)
LATE = tuple(stage for stage in SPECIALIZED if "L2_SHARE_MB" in stage.params)
"""Work tiles are fetched late, and output leaves by TMA."""
SPECULATIVE = tuple(stage for stage in LATE if stage.id != "13_tma_store")
"""Some of their scores may be computed again by mma.sync, and their exponentials wait for no maximum."""
MOVING = tuple(stage for stage in SPECULATIVE if stage.id != "14_stale_max")
"""A row's reference moves by powers of two."""
ONES = tuple(stage for stage in MOVING if stage.order >= STAGES["16_ones_column"].order)
"""The PV GEMM sums the probabilities too."""
LAST = ONES[-1]
OVERLAPPING = tuple(stage for stage in SPECIALIZED if "OVERLAP" in stage.params or stage in LATE)
RESTING = tuple(stage for stage in SPECIALIZED if stage.id != "10_warp_specialized")
"""A consumer without rows passes tiles on and does nothing else."""
VARIANTS = [
    (stage, head_dim, dtype)
    for stage in SPECULATIVE
    for head_dim, dtype in itertools.product(stage.head_dims, stage.dtypes)
    if stage is LAST or (head_dim == 128) == (dtype == "bfloat16")
]
"""All of the last stage; of those before it, which share its code, each head dim and each type once."""
variants = pytest.mark.parametrize(
    ("stage", "head_dim", "dtype"),
    [
        pytest.param(
            *(stage, head_dim, dtype),
            id=f"{stage.id}-{head_dim}-{dtype}",
            marks=()
            if (head_dim, dtype) in [one[:2] for one in in_turn(LAST)] and stage is LAST
            else pytest.mark.exhaustive,
        )
        for stage, head_dim, dtype in VARIANTS
    ],
)
MASKS = (False, True)
WARPGROUP = 128
SM_REGISTERS = 65536
machine_code = cache(sass.disassemble)
"""Once, as several tests read the same."""


def chosen(stage: Stage, whole: bool) -> tuple[compiler.Job, ...]:
    """Each head dim under both masks; in part, the smallest and the largest under one."""
    work = one_type_a_head_dim(compiler.jobs([stage], [ARCH]))
    return work if whole else ends_of(part_of(work))


def cubins(stage: Stage, whole: bool) -> Iterator[tuple[int, Cubin]]:
    for job in chosen(stage, whole):
        yield job.head_dim, compiler.compile_stage(job)


def shape(built: Cubin) -> LaunchShape:
    assert built.launch_shape is not None
    return built.launch_shape


def opcodes(built: Cubin) -> list[str]:
    return [instruction.opcode for instruction in sass.without_padding(machine_code(built.code, built.entry))]


@tiers
@pytest.mark.parametrize("stage", HOPPER, ids=lambda stage: stage.id)
def test_products_and_copies_are_hoppers_own(stage: Stage, whole: bool) -> None:
    for head_dim, built in cubins(stage, whole):
        names = [opcode.split(".")[0] for opcode in opcodes(built)]
        tile_kv = built.parameters["TILE_KV"]
        assert names.count("HGMMA") >= head_dim // 16 + tile_kv // 16
        assert names.count("UTMALDG") >= 3  # of Q, K and V
        assert {"LDGSTS", "LDL", "STL"}.isdisjoint(names)
        assert ("HMMA" in names) == (stage in SPECULATIVE)
        assert built.resources.spill_store_bytes == built.resources.spill_load_bytes == 0
        assert (shape(built).box_q, shape(built).box_kv) == (64, tile_kv)


@tiers
@pytest.mark.parametrize("stage", HOPPER, ids=lambda stage: stage.id)
def test_the_output_leaves_16_bytes_at_a_time(stage: Stage, whole: bool) -> None:
    for head_dim, built in cubins(stage, whole):
        names = opcodes(built)
        stores = [name for name in names if name.startswith("STG")]
        wide = stores.count("STG.E.128")
        if stage in LATE and head_dim <= 128:  # by a TMA store, wherever a work tile ends
            assert wide == 0
            assert sum(name.startswith("UTMASTG") for name in names) == 1
        else:
            assert wide >= 16 * head_dim // 8 // 32  # a warp's 16 rows, by its lanes
        assert len(stores) - wide <= 2  # log-sum-exp, of a thread's two rows


@tiers
@pytest.mark.parametrize("stage", SPECIALIZED, ids=lambda stage: stage.id)
def test_registers_are_dealt_anew(stage: Stage, whole: bool) -> None:
    for _, built in cubins(stage, whole):
        assert shape(built).threads == (1 + built.parameters["NUM_CONSUMERS"]) * WARPGROUP
        blocks = built.parameters.get("MIN_BLOCKS", 1)
        assert built.resources.registers == SM_REGISTERS // blocks // shape(built).threads // 8 * 8
        assert sum(opcode.startswith("USETMAXREG") for opcode in opcodes(built)) == 2


@tiers
@pytest.mark.parametrize("stage", OVERLAPPING, ids=lambda stage: stage.id)
def test_the_pv_gemm_overlaps_the_softmax(stage: Stage, whole: bool) -> None:
    """One wait leaves it in flight. What stands before the next wait is ptxas's choice, because waits name no
    registers; ahead of a maximum over all scores, the wait would leave the GEMM nothing to overlap."""
    for job in chosen(stage, whole):
        mask: Mask = "causal" if job.causal else "full"
        problem = Problem.parse(f"16x16x2048x{job.head_dim}", mask=mask, dtype=job.dtype)
        built = compiler.compile_stage(replace(job, overrides=choice.parameters(stage, "nvidia-h200", problem)))
        instructions = machine_code(built.code, built.entry)
        waits = [
            (i, instruction.operands.endswith("0x1"))
            for i, instruction in enumerate(instructions)
            if instruction.opcode.startswith("WARPGROUP.DEPBAR")
        ]
        ((first, last),) = ((first, last) for (first, leaves_one), (last, _) in itertools.pairwise(waits) if leaves_one)
        opcodes = [instruction.opcode.split(".")[0] for instruction in instructions[first:last]]
        scores = built.parameters["TILE_KV"] // 2  # a thread's
        if stage in SPECULATIVE:
            assert 0 < opcodes.count("MUFU") < scores
        else:
            assert opcodes.count("FMNMX") >= scores


@pytest.mark.parametrize(
    ("head_dim", "causal", "pingpong"), [(64, False, 1), (64, True, 1), (64, True, 0), (128, False, 0)]
)
def test_probabilities_are_rounded_among_the_exponentials_where_that_is_faster(
    head_dim: int, causal: bool, pingpong: int
) -> None:
    """Before the vote that says whether rows move. A stage with a vote between rounds after the last exponential."""
    built = cubin(LAST, head_dim, causal=causal, overrides={"PINGPONG": pingpong})
    opcodes_in_order = [one.opcode for one in machine_code(built.code, built.entry)]
    among = sum(
        opcode.startswith("F2FP") and all("MUFU.EX2" in opcodes_in_order[i + a : i + b] for a, b in ((-6, 0), (1, 7)))
        for i, opcode in enumerate(opcodes_in_order)
    )
    pairs = built.parameters["TILE_KV"] // 4  # of a thread
    assert (among >= pairs // 2) == (head_dim == 64 and pingpong), (among, pairs)


@tiers
@pytest.mark.parametrize("stage", ONES, ids=lambda stage: stage.id)
def test_ones_make_the_product_8_columns_wider(stage: Stage, whole: bool) -> None:
    every = itertools.product(stage.head_dims, stage.dtypes, MASKS)
    for head_dim, dtype, causal in every if whole else in_turn(stage):
        built = cubin(stage, head_dim, causal=causal, dtype=dtype)
        widths = {opcode.split(".")[1] for opcode in opcodes(built) if opcode.startswith("HGMMA")}
        columns = {head_dim + 8} if head_dim < 256 else {192, 64 + 8}  # an instruction has at most 256
        assert widths == {f"64x{one}x16" for one in (built.parameters["TILE_KV"], *columns)}


@pytest.mark.parametrize("stage", HOPPER, ids=lambda stage: stage.id)
def test_tiles_that_do_not_fit_are_refused(stage: Stage) -> None:
    with pytest.raises(CompileError, match="must fit into shared memory"):
        cubin(stage, 128, overrides={"PIPELINE_STAGES": 16})


@needs_compiler
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
@pytest.mark.parametrize("stage", HOPPER, ids=lambda stage: stage.id)
def test_any_finite_scale(stage: Stage, scale: float) -> None:
    """The fast path folds the scale into one multiply-add with the maximum, which a positive scale alone allows."""
    problem = Problem(batch=1, q_heads=2, kv_heads=1, q_len=100, kv_len=300, head_dim=64)
    q, k, v = make_inputs(problem, seed=0)
    found = emulate(q, k, v, scale=scale, stage=stage.id)
    verdict = check(np.asarray(found.out), found.lse, q, k, v, causal=False, dtype="float16", scale=scale)
    assert verdict.reason == ""


@needs_compiler
@pytest.mark.parametrize(
    "stage",
    [pytest.param(one, id=one.id, marks=() if one is LATE[-1] else pytest.mark.exhaustive) for one in LATE],
)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize(("heads", "q_len"), [(3, 200), (6, 60)])
def test_heads_that_fill_no_section_are_worked_on_too(stage: Stage, mask: Mask, heads: int, q_len: int) -> None:
    """Two heads' K and V fit into the share of L2. Of three heads one is left over, with two work tiles of its own; of
    six with one work tile each, the last section has three, one for every block, and of those before it one is left
    over."""
    problem = Problem(batch=1, q_heads=heads, kv_heads=heads, q_len=q_len, kv_len=2000, head_dim=64, mask=mask)
    q, k, v = make_inputs(problem)
    found = emulate(q, k, v, causal=mask == "causal", stage=stage.id, params={"L2_SHARE_MB": 1})
    assert check(found.out, found.lse, q, k, v, causal=mask == "causal", dtype="float16").reason == ""


@needs_compiler
@tiers
@pytest.mark.parametrize("stage", RESTING, ids=lambda stage: stage.id)
def test_lanes_stay_together_where_a_consumer_has_no_rows(stage: Stage, whole: bool) -> None:
    """One lane says for its warp that a tile may go: ahead of others that still wait for it, it would leave them
    a phase that never comes back. Some seeds would stop there."""
    problem = Problem(batch=1, q_heads=2, kv_heads=1, q_len=130, kv_len=1000, head_dim=128)
    given = []
    for values in make_inputs(problem, seed=0):
        padded = np.zeros((*values.shape[:-1], values.shape[-1] + 1), values.dtype)[..., :-1]  # copied by hand
        padded[...] = values
        given.append(padded)
    oracle = Oracle()
    for seed in range(30 if whole else 10):
        found = emulate(*given, stage=stage.id, schedule=f"seeded:{seed}")
        assert check(found.out, found.lse, *given, causal=False, dtype="float16", oracle=oracle).reason == ""


@needs_compiler
@variants
def test_scores_far_above_the_old_maximum_are_noticed(stage: Stage, head_dim: int, dtype: DType) -> None:
    """Tiles come from the last to the first: keys that grow towards the first let every speculation fail."""
    problem = Problem(batch=1, q_heads=2, kv_heads=1, q_len=130, kv_len=900, head_dim=head_dim, dtype=dtype)
    q, k, v = make_inputs(problem, seed=0)
    growing = np.linspace(24.0, 0.1, problem.kv_len)[:, None] * np.sign(np.asarray(q, np.float64)[:, :1, :1])
    k = (growing + 0.1 * np.asarray(k, np.float64)).astype(k.dtype)
    for causal in MASKS:
        found = emulate(q, k, v, stage=stage.id, causal=causal, races=True)
        assert check(np.asarray(found.out), found.lse, q, k, v, causal=causal, dtype=dtype).reason == ""
        assert not found.report.findings


FALLBACKS = [
    pytest.param(
        *(head_dim, dtype, aligned),
        id=f"{head_dim}-{dtype}-{'aligned' if aligned else 'unaligned'}",
        marks=() if (number // 2 + number + turn) % 2 == 0 else pytest.mark.exhaustive,
    )
    for number, head_dim in enumerate(LAST.head_dims)
    for turn, dtype in enumerate(LAST.dtypes)
    for aligned in ((number + turn) % 2 == 0,)
]
"""Every head dim in both types, in one of them with aligned rows."""


@needs_compiler
@pytest.mark.parametrize(("head_dim", "dtype", "aligned"), FALLBACKS)
def test_both_fallbacks_are_reached_at_every_head_dim(head_dim: int, dtype: DType, aligned: bool) -> None:
    """A tile's first keys tell little; some others are beyond what a reference moves by, one of the first is within."""
    kv_len = 333
    problem = Problem(batch=1, q_heads=2, kv_heads=1, q_len=130, kv_len=kv_len, head_dim=head_dim, dtype=dtype)
    given = [np.asarray(x, np.float64) for x in make_inputs(problem, seed=0)]
    given[0] = 1 + 0.05 * given[0]
    given[1] *= 0.1
    given[1][:, :, [*range(150, kv_len, 40), kv_len - 3]] += 200 * head_dim**-0.5  # nats
    given[1][:, :, 7] += 270 * head_dim**-0.5
    like = make_inputs(problem, seed=0)[0].dtype
    rows = [np.zeros((*x.shape[:-1], head_dim + (not aligned)), like)[..., :head_dim] for x in given]
    for row, x in zip(rows, given, strict=True):
        row[...] = x.astype(like)
    for causal in MASKS:
        found = emulate(*rows, stage=LAST.id, causal=causal, races=True, count_fallbacks=True)
        assert check(np.asarray(found.out), found.lse, *rows, causal=causal, dtype=dtype).reason == ""
        assert not found.report.findings
        assert found.fallbacks is not None
        assert 0 < found.fallbacks.recomputed < found.fallbacks.renormalized


@needs_compiler
@pytest.mark.parametrize("dtype", LAST.dtypes)
@pytest.mark.parametrize("moved", [False, True], ids=["first move", "second move"])
def test_a_row_rises_by_any_power_of_two(moved: bool, dtype: DType) -> None:
    """A factor of 2^-126 is the smallest that is normal: rows that rise by more must be computed again.

    Each row has a score some powers of two above all that it saw before: with some rows a move does, with others not.
    """
    rows, head_dim, tile = 64, 64, 128
    powers = np.linspace(90.0, 190.0, rows)
    shape = {"q_len": rows, "kv_len": 2 * tile, "head_dim": head_dim}
    q, k, v = make_inputs(Problem(batch=1, q_heads=1, kv_heads=1, dtype=dtype, **shape))
    columns = np.zeros((2, 1, 1, rows, head_dim))
    columns[0, ..., 0], columns[1, ..., 1] = powers, 40.0  # a tile's key selects one by its only element
    to_score = np.log(2) * np.sqrt(head_dim)
    q = (columns.sum(axis=0) * to_score).astype(q.dtype)
    k = np.zeros_like(k)
    k[..., 5, 0] = 1.0
    if moved:
        k[..., tile + 50, 1] = k[..., 5, 1] = 1.0  # the last tile comes first; its first keys set the reference
    found = emulate(q, k, v, stage=LAST.id, count_fallbacks=True)
    assert check(np.asarray(found.out), found.lse, q, k, v, causal=False, dtype=dtype).reason == ""
    assert found.fallbacks is not None
    assert 0 < found.fallbacks.recomputed < found.fallbacks.renormalized


@needs_compiler
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("last_first", [True, False], ids=["towards the first key", "towards the last"])
def test_rows_whose_scores_grow_all_the_way_move_in_every_fifth_tile(last_first: bool, mask: Mask) -> None:
    """Steps of 12 nats are 17.3 powers of two: more than float16 holds above 1; a row can move by five of them."""
    kv_len = 16 * 128 + 40
    problem = Problem(batch=1, q_heads=1, kv_heads=1, q_len=100, kv_len=kv_len, head_dim=64, mask=mask, inputs="steps")
    q, k, v = make_inputs(problem)
    if not last_first:
        k, v = k[:, :, ::-1].copy(), v[:, :, ::-1].copy()
    found = emulate(q, k, v, stage="17_around_the_loop", causal=mask == "causal", count_fallbacks=True)
    assert check(np.asarray(found.out), found.lse, q, k, v, causal=mask == "causal", dtype="float16").reason == ""
    assert found.fallbacks is not None
    assert found.fallbacks.recomputed == 0
    last, warps = 3 if mask == "causal" else 1, -(-100 // 16)  # of 17 tiles, 192 rows may see so many in part
    most = warps * (last - 1 + -(-(17 - last) // 5)) if last_first else warps
    assert found.fallbacks.renormalized <= most


@needs_compiler
def test_scores_of_tiles_read_out_of_order_are_recomputed_from_their_own_keys() -> None:
    """Any tile may have a score that no move reaches: then its keys are read once more, by the tile's number."""
    tile, tiles = 128, 18
    problem = Problem(batch=1, q_heads=1, kv_heads=1, q_len=64, kv_len=tile * tiles, head_dim=64)
    q, k, v = (np.asarray(x, np.float64) for x in make_inputs(problem))
    q[..., 0], k[..., 0] = np.sqrt(problem.head_dim), 0.0  # a key's first element is added to its scores, in nats
    for number in range(tiles):
        far = k.copy()
        far[..., number * tile + 77, 0] = 150.0
        given = [x.astype(np.float16) for x in (q, far, v)]
        found = emulate(*given, stage="17_around_the_loop", count_fallbacks=True)
        assert check(np.asarray(found.out), found.lse, *given, causal=False, dtype="float16").reason == "", number
        assert found.fallbacks is not None
        assert found.fallbacks.recomputed == 64 // 16, number


def _rms_error(stage: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    wanted, _ = attention(q, k, v, causal=False)
    out = to_float(np.asarray(emulate(q, k, v, stage=stage).out), dtype=np.float64)
    return float(np.sqrt(np.mean((out - wanted) ** 2)))


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if name != TRAINED])
def test_no_kind_of_inputs_is_less_exact_than_in_the_parent(kind: str, dtype: DType) -> None:
    """A reference far from the maximum costs 16-bit weights their last bits, or all; the limits of a check are wider.

    So a row that moves to a sink at once may have its other weights no lower than it must.
    """
    problem = Problem(batch=1, q_heads=1, kv_heads=1, q_len=64, kv_len=4096, head_dim=64, dtype=dtype, inputs=kind)
    q, k, v = make_inputs(problem)
    assert LAST.parent is not None
    assert _rms_error(LAST.id, q, k, v) <= 1.02 * _rms_error(LAST.parent, q, k, v)


@needs_compiler
@pytest.mark.parametrize("sign", [1, -1], ids=["loud", "far below 0"])
@variants
def test_scores_that_need_a_maximum_get_one(stage: Stage, head_dim: int, dtype: DType, sign: int) -> None:
    """A row's first scores tell little of the others, which overflow against them, or all vanish."""
    problem = Problem(batch=1, q_heads=8, kv_heads=1, q_len=270, kv_len=270, head_dim=head_dim, dtype=dtype)
    q, k, v = make_inputs(problem, seed=0)
    loudness = np.array([40.0, 0.01, 3.0, 90.0, 0.3, 60.0, 0.0, 1.0])[None, :, None, None]
    values = np.asarray(q, np.float64) * loudness
    if sign < 0:
        values, k = -abs(values), (1 + abs(np.asarray(k, np.float64))).astype(k.dtype)
    q = values.astype(q.dtype)
    causal = sign < 0
    result = emulate(q, k, v, stage=stage.id, causal=causal)
    assert check(np.asarray(result.out), result.lse, q, k, v, causal=causal, dtype=dtype).reason == ""


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("stage", RESTING, ids=lambda stage: stage.id)
def test_the_output_is_the_same_whoever_takes_which_work(stage: Stage, dtype: DType) -> None:
    """Blocks take works as they come: no bit may depend on what a block worked on before."""
    problem = Problem(batch=1, q_heads=6, kv_heads=2, q_len=200, kv_len=300, head_dim=64, dtype=dtype)
    q, k, v = make_inputs(problem, seed=0)
    for causal in MASKS:
        first, *others = [
            emulate(q, k, v, stage=stage.id, causal=causal, schedule=schedule)
            for schedule in ("ascending", "descending", "seeded:1", "seeded:2")
        ]
        for other in others:
            assert (np.asarray(other.out).view(np.uint16) == np.asarray(first.out).view(np.uint16)).all()
            assert (np.asarray(other.lse).view(np.uint32) == np.asarray(first.lse).view(np.uint32)).all()


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("stage", HOPPER, ids=lambda stage: stage.id)
def test_what_is_no_number_stays_none(stage: Stage, bad: float) -> None:
    """One key of one head that is NaN or infinite: the kernel ends, rows that see it have no value, others theirs."""
    problem = Problem(batch=1, q_heads=2, kv_heads=2, q_len=130, kv_len=500, head_dim=64)
    q, k, v = make_inputs(problem, seed=0)
    k[0, 1, 40, 3] = bad
    found = emulate(q, k, v, stage=stage.id)
    out, lse = np.asarray(found.out), np.asarray(found.lse)
    sound = check(out[:, :1], lse[:, :1], q[:, :1], k[:, :1], v[:, :1], causal=False, dtype="float16")
    assert sound.reason == ""
    without = np.isnan(out[0, 1].astype(np.float64)).any(axis=-1)
    assert without.sum() >= problem.q_len // 3
    assert np.isnan(lse[0, 1][without]).all()


@needs_compiler
def test_tiles_by_threads_are_there_before_the_output_takes_their_place() -> None:
    """Where no row of a block sees a key, nothing waits for the block's Q but the end."""
    q, k, v = make_inputs(Problem(batch=1, q_heads=1, kv_heads=1, q_len=400, kv_len=16, head_dim=64), seed=0)
    found = emulate(q, k, v, stage="09_wgmma", params={"FEED": 1}, causal=True, races=True)
    assert not found.report.findings
    assert check(np.asarray(found.out), found.lse, q, k, v, causal=True, dtype="float16").reason == ""


@needs_compiler
@pytest.mark.parametrize(("score", "value"), [(37.0, 1e21), (-37.0, 1e-20), (17.0, 1e21), (-17.0, 1e-20)])
@pytest.mark.parametrize("stage", SPECULATIVE, ids=lambda stage: stage.id)
def test_a_work_without_a_maximum_leaves_values_their_room(stage: Stage, score: float, value: float) -> None:
    """Probabilities against another reference are far from 1, and what they multiply must still find room in FP32."""
    problem = Problem(batch=1, q_heads=1, kv_heads=1, q_len=64, kv_len=64, head_dim=64, dtype="bfloat16")
    like = make_inputs(problem, seed=0)
    q, k = (np.full_like(values, 1.0) for values in like[:2])
    v = ((1.0 + abs(np.asarray(like[2], np.float64))) * value).astype(like[2].dtype)
    found = emulate(q, k, v, stage=stage.id, scale=score / problem.head_dim)
    wanted = np.asarray(v, np.float64).mean(axis=2, keepdims=True) / value
    assert abs(np.asarray(found.out, np.float64) / value - wanted).max() < 2**-6
    assert np.asarray(found.lse) == pytest.approx(score + np.log(problem.kv_len), rel=1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("nats", [20.0, 60.0])
@pytest.mark.parametrize("key", [0, 150])
@pytest.mark.parametrize("stage", ONES, ids=lambda stage: stage.id)
def test_one_dominating_key_gives_its_value_exactly(stage: Stage, key: int, nats: float, dtype: DType) -> None:
    """Up to the largest finite one: the sum is of the very probability that it was multiplied with."""
    problem = Problem(batch=1, q_heads=1, kv_heads=1, q_len=70, kv_len=200, head_dim=64, dtype=dtype)
    like = make_inputs(problem, seed=0)
    q, k, v = np.ones_like(like[0]), np.zeros_like(like[1]), np.zeros_like(like[2])
    k[:, :, key] = 1
    v[:, :, key] = {"float16": 65504.0, "bfloat16": 255 * 2.0**120}[dtype]
    found = emulate(q, k, v, stage=stage.id, scale=nats / problem.head_dim)
    assert (np.asarray(found.out) == v[:, :, key][:, :, None]).all()


@pytest.mark.parametrize(
    ("stage", "tile_kv"),
    [
        pytest.param(stage, tile_kv, id=f"{stage.id}-{tile_kv}")
        for stage in MOVING
        for tile_kv in stage.params["TILE_KV"].choices
    ],
)
def test_a_stage_is_right_with_any_tile(stage: Stage, tile_kv: int) -> None:
    """Its exponentials come in blocks, of which a tile may have any number."""
    problem = Problem.parse("1x1x1x70x300x64", mask="causal")
    values = make_inputs(problem)
    ran = emulate(*values, causal=True, stage=stage.id, params={"TILE_KV": tile_kv, "PIPELINE_STAGES": 2})
    assert check(ran.out, ran.lse, *values, causal=True, dtype=problem.dtype).passed
