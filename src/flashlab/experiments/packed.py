"""Sequences of different lengths: packed ones, and decoding over a cache in pages, beside the libraries that take them.

    flashlab packed            prefill: every distribution of lengths, mask, type and head dim
    flashlab packed --decode   one query row a sequence: every distribution of lengths, batch and type

`Problem` has one length for all sequences of a batch, so this has records of its own. What is timed is a burst of the
timer that stages and libraries share (measure/timer.py), interleaved. In prefill, `padded` is `flashlab.attention` on a
batch in which every sequence is as long as the longest, what a program without packed sequences does; rates count the
scores that the sequences need, whoever computes more. Decoding reads rotating copies of the cache, as a model's layers
have them, through `flashlab.paged_attention`; its rates are of the keys and values that the sequences have.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import to_jsonable_python

from flashlab.core.errors import CheckFailedError, ParameterError, refuse_unknown
from flashlab.core.paths import DATA
from flashlab.core.problem import DTYPES, MASKS, DType, Mask, Problem
from flashlab.kernels import peers, registry
from flashlab.measure import timer as timing
from flashlab.measure.cells import GpuWorker, record_rows
from flashlab.measure.harness import Message, serve
from flashlab.measure.options import Options
from flashlab.measure.worker import copies_beyond_l2
from flashlab.query import select
from flashlab.query.rows import grouped
from flashlab.record import store
from flashlab.record.schema import PackedRun, Verdict
from flashlab.run import gpu, paged
from flashlab.run.attention import Prepared, prepare
from flashlab.run.plan import Sequences
from flashlab.show.tables import Column, code, mhz, number, short_title, table, times
from flashlab.verify.verdict import check

OPTIONS = Options(worker=(sys.executable, "-m", "flashlab.experiments.packed"))
TOKENS = 16_384
HEADS = 16
HEAD_DIMS = (64, 128)
PACKING = tuple(stage.id for stage in registry.STAGES.values() if "varlen" in stage.features)
"""The rungs that take packed sequences; the last of them takes the padded batch too."""
PADDED = "padded"
LIBRARIES: Mapping[str, str] = {"fa3": "fa3_fwd_interface", "fa4": "flash_attn.cute"}
"""Libraries to the module that has `flash_attn_varlen_func`."""
NAMES = (*PACKING, PADDED, *LIBRARIES)


class Distribution(NamedTuple):
    """Lengths drawn uniformly from `low` to `high`, and one of `longest` if that is not 0."""

    says: str
    low: int
    high: int
    longest: int = 0


LENGTHS: Mapping[str, Distribution] = {
    "equal": Distribution("sequences of 2,048 each", 2048, 2048),
    "uniform": Distribution("uniform from 1 to 4,096", 1, 4096),
    "one_long": Distribution("one of 8,192, and others of 64 to 1,024", 64, 1024, 8192),
    "short": Distribution("uniform from 16 to 512", 16, 512),
}
"""Distributions for prefill, each with `TOKENS` tokens in total."""
TIMEOUT_S = 180.0
Q_HEADS, KV_HEADS, DECODE_HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
"""The decoding problem."""
FLASHINFER = "flashinfer"
DECODE_NAMES = (*(stage.id for stage in registry.DECODE.values() if stage.runner == paged.__name__), FLASHINFER)
BATCHES = (4, 16, 64)
"""Numbers of sequences in decoding."""
DECODE_LENGTHS: Mapping[str, Distribution] = {
    "equal": Distribution("8,192 keys each", 8192, 8192),
    "uniform": Distribution("uniform from 1 to 16,384", 1, 16_384),
    "one_long": Distribution("one of 65,536, others of 64 to 4,096", 64, 4096, 65_536),
    "short": Distribution("uniform from 16 to 2,048", 16, 2048),
}
"""Distributions of the numbers of keys in decoding, for a batch of sequences."""


def lengths(name: str, batch: int | None = None) -> tuple[int, ...]:
    """The lengths of a distribution, deterministic: `TOKENS` in total for prefill, or for a batch in decoding.

    Raises:
        ParameterError: no such distribution.
    """
    known = LENGTHS if batch is None else DECODE_LENGTHS
    refuse_unknown("lengths", known, name)
    _, low, high, longest = known[name]
    rng = np.random.default_rng(0)
    if batch is not None:
        drawn = rng.integers(low, high + 1, batch).tolist()
        drawn[batch // 2] = longest or drawn[batch // 2]
        return tuple(drawn)
    drawn = [longest] if longest else []
    while (left := TOKENS - sum(drawn)) > 0:
        drawn.append(min(left, int(rng.integers(low, high + 1))))
    return tuple(rng.permutation(drawn).tolist())


def measure(
    *,
    decode: bool = False,
    stages: Sequence[str] | None = None,
    distributions: Sequence[str] = tuple(LENGTHS),
    batches: Sequence[int] = BATCHES,
    head_dims: Sequence[int] = HEAD_DIMS,
    dtypes: Sequence[DType] = DTYPES,
    masks: Sequence[Mask] = MASKS,
    options: Options = OPTIONS,
) -> tuple[Path, tuple[str, ...]]:
    """Time packed sequences, and append a `schema.PackedRun` each to data/<gpu>/packed/.

    Args:
        decode: one query row a sequence instead, over a cache in pages, without a mask.
        stages: with tunables or without, of those that read pages, in decoding; all of them where None.
        batches: sequences in decoding.
        head_dims, masks: of prefill.

    Returns:
        The file, and what has no time, with the reason.

    Raises:
        ParameterError: no such distribution or none at all, or a stage that reads no pages.
        NoGpuError, MissingPackageError, LaunchError, OutputError: as they say.
    """
    if not distributions:
        raise ParameterError(f"lengths: wanted one of {', '.join(LENGTHS)}, got none")
    names: Sequence[str] = NAMES
    heads = {"heads": HEADS}
    sequences: Sequence[int | None] = (None,)
    if decode:
        for name in stages or ():
            if registry.parse(name)[0].id not in DECODE_NAMES:
                raise ParameterError(f"stages: wanted one of {', '.join(DECODE_NAMES[:-1])}, got {name!r}")
        names = DECODE_NAMES if stages is None else (*stages, FLASHINFER)
        heads, head_dims, masks = {"heads": Q_HEADS, "kv_heads": KV_HEADS}, (DECODE_HEAD_DIM,), ("full",)
        sequences = batches
    registry.able(map(registry.get, PACKING), [Problem.of(1, HEADS, HEADS, 1, 1, dim) for dim in head_dims])
    cases = [
        {"distribution": name, "lengths": lengths(name, batch), "head_dim": head_dim, "dtype": dtype, "mask": mask}
        | heads
        for name, batch, head_dim, dtype, mask in itertools.product(distributions, sequences, head_dims, dtypes, masks)
    ]
    job: Message = {"names": names, "cases": cases}
    return record_rows(PackedRun, job, options, total=len(cases) * len(names), step_s=TIMEOUT_S)


# --- The worker -------------------------------------------------------------------------------------------------------


class _Packed:
    """Q, K and V of a case, packed; and its implementations."""

    def __init__(self, torch: Any, case: Message, *, seed: int, device: str) -> None:
        chosen = self.chosen = case["lengths"]
        self.dtype, self.causal = case["dtype"], case["mask"] == "causal"
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (sum(chosen), case["heads"], case["head_dim"])
        self.tensors = [
            torch.randn(shape, generator=generator, device=device).to(getattr(torch, self.dtype)) for _ in range(3)
        ]
        ends = np.concatenate([[0], np.cumsum(chosen)])
        self.bounds = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        self.cu_seqlens = torch.from_numpy(ends.astype(np.int32)).to(device)

    def of_sequence(self, packed: Any, index: int) -> Any:
        """(1, heads, length, head_dim) of (total, heads, head_dim), or of (sequences, heads, longest, head_dim)."""
        if packed.dim() == 4:
            return packed[index : index + 1, :, : self.chosen[index]]
        begin, end = self.bounds[index]
        return packed[begin:end].transpose(0, 1)[None]

    def build(self, name: str, stream: int) -> timing.Run:
        """What enqueues one call."""
        if name == PADDED:
            return self._padded(stream)
        if name in LIBRARIES:
            return self._library(name)
        sequences = Sequences(self.cu_seqlens, self.cu_seqlens, max(self.chosen))
        return prepare(*self.tensors, causal=self.causal, sequences=sequences, stage=name, stream=stream)

    def _padded(self, stream: int) -> timing.Run:
        longest = max(self.chosen)
        wide = []
        for packed in self.tensors:
            wide.append(packed.new_zeros(len(self.chosen), packed.shape[1], longest, packed.shape[2]))
            for index, length in enumerate(self.chosen):
                wide[-1][index, :, :length] = self.of_sequence(packed, index)[0]
        # Padding follows a sequence, so under a causal mask none of its rows sees it. Without a mask all do, so that
        # only the time means something.
        return prepare(*wide, causal=self.causal, stage=PACKING[-1], stream=stream)

    def _library(self, name: str) -> timing.Run:
        _, heads, head_dim = self.tensors[0].shape
        problem = Problem.parse(f"1x{heads}x{max(self.chosen)}x{head_dim}", dtype=self.dtype)
        peers.get(name).require(problem)
        function = importlib.import_module(LIBRARIES[name]).flash_attn_varlen_func
        ends, longest = self.cu_seqlens, max(self.chosen)
        how = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        known = inspect.signature(function).parameters
        return partial(
            function, *self.tensors, causal=self.causal, **{key: of for key, of in how.items() if key in known}
        )


class _Paged:
    """One query row a sequence, and a cache in pages, in copies that calls rotate over; its implementations as
    `_Packed` has them."""

    def __init__(self, torch: Any, case: Message, *, seed: int, device: str, info: gpu.GpuInfo) -> None:
        chosen = self.chosen = case["lengths"]
        self.dtype, self.causal = case["dtype"], False
        q_heads, kv_heads, head_dim = case["heads"], case["kv_heads"], case["head_dim"]
        self.shape = f"{len(chosen)}x{q_heads}x{kv_heads}x1x{PAGE_SIZE}x{head_dim}"
        generator = torch.Generator(device=device).manual_seed(seed)
        pages = [-(-length // PAGE_SIZE) for length in chosen]
        self.ends = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        """Of each sequence's pages in `order`."""
        self.order = torch.randperm(sum(pages), generator=generator, device=device).int()
        self.table = torch.zeros(len(chosen), max(pages), dtype=torch.int32, device=device)
        for index, count in enumerate(pages):
            self.table[index, :count] = self.order[int(self.ends[index]) :][:count]
        self.lengths = torch.tensor(chosen, dtype=torch.int32, device=device)
        pool = (sum(pages), PAGE_SIZE, kv_heads, head_dim)  # FlashInfer's default layout
        size = 4 * math.prod(pool)
        self.copies = [
            tuple(
                torch.randn(shape, generator=generator, device=device).to(getattr(torch, self.dtype))
                for shape in ((len(chosen), q_heads, head_dim), pool, pool)
            )
            for _ in range(copies_beyond_l2(size, info))
        ]

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """Of the first call: Q (batch, q_heads, head_dim), K and V (pages, page size, kv_heads, head_dim)."""
        return self.copies[0]

    def of_sequence(self, packed: Any, index: int) -> Any:
        """(1, heads, length, head_dim) of Q or the output, or of a pool."""
        if packed.dim() == 3:
            return packed[index][None, :, None]
        begin, end = self.ends[index : index + 2]
        pages = packed[self.order[begin:end].long()]
        return pages.flatten(0, 1)[: self.chosen[index]].transpose(0, 1)[None]

    def build(self, name: str, stream: int) -> timing.Run:
        """What enqueues a call on the next copy, the first one first."""
        call = self._library() if name == FLASHINFER else partial(self._stage, name, stream)
        runs = itertools.cycle([partial(call, *tensors) for tensors in self.copies])
        return lambda: next(runs)()

    def _stage(self, name: str, stream: int, q: Any, k: Any, v: Any) -> Any:
        stage, params = registry.parse(name)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        call = partial(paged.paged_attention, stage=stage.id, params=params, stream=stream)
        out = call(q[:, :, None], k, v, self.table, self.lengths)
        return out[:, :, 0]

    def _library(self) -> Callable[..., Any]:
        problem = Problem.parse(self.shape, dtype=self.dtype)
        peers.get(FLASHINFER).require(problem)
        last = (self.lengths - 1) % PAGE_SIZE + 1
        run = peers.FlashInferPages(problem, self.ends, self.order, last)
        return lambda q, k, v: run(q, (k, v))


def _output(run: timing.Run) -> Any:
    """The output of one call."""
    out: Any = run()
    return run.out if isinstance(run, Prepared) else out[0] if isinstance(out, tuple) else out


class _Worker(GpuWorker):
    """Checks and times the cases of the job."""

    def work(self) -> None:
        """All of the job."""
        self.hold()
        stream = int(self.torch.cuda.current_stream(self.device).cuda_stream)
        backend = timing.CudaBackend(self.device, stream)
        with self.torch.no_grad():
            for case in self.job["cases"]:
                self._case(case, timing.Timer(backend, seed=self.job["seed"]), stream)
                self.free()

    def _case(self, case: Message, timer: timing.Timer, stream: int) -> None:
        chosen, decoding = case["lengths"], "kv_heads" in case
        label = " ".join(map(str, (len(chosen), *(case[key] for key in ("distribution", "head_dim", "dtype", "mask")))))
        how = {"seed": self.job["seed"], "device": "cuda"}
        packed = _Paged(self.torch, case, **how, info=self.info) if decoding else _Packed(self.torch, case, **how)
        runs: dict[str, timing.Run] = {}
        verdicts: dict[str, Verdict | None] = {}
        for name in self.job["names"]:
            self.send({"type": "step", "what": f"{label}, {name}"})
            with self.attempt(f"{name} at {label}", survive=True):
                run = packed.build(name, stream)
                verdicts[name] = None if name == PADDED and not packed.causal else self._checked(packed, _output(run))
                runs[name] = run
        for name, samples in timer.burst(runs, samples=20).items():
            if decoding:
                samples = samples.model_copy(update={"cache": "rotating"})
            row = {**case, "name": name, "samples": samples, "verdict": verdicts[name]}
            self.send({"type": "row", "row": to_jsonable_python(row)})

    def _checked(self, packed: _Packed | _Paged, out: Any) -> Verdict:
        """The verdict on the longest sequence; raises `CheckFailedError` where it or the last one is wrong."""
        verdict = None
        for index in (len(packed.chosen) - 1, packed.chosen.index(max(packed.chosen))):
            q, k, v, o = (self.for_oracle(packed.of_sequence(x, index).contiguous()) for x in (*packed.tensors, out))
            verdict = check(o, None, q, k, v, causal=packed.causal, dtype=packed.dtype, xp=self.cupy)
            if not verdict.passed:
                raise CheckFailedError(f"sequence {index} of {len(packed.chosen)}: {verdict.reason}")
        assert verdict is not None
        return verdict


# --- The page ---------------------------------------------------------------------------------------------------------


def shown(records: Sequence[PackedRun]) -> list[dict[str, Any]]:
    """One row per case, from its newest run: our stage, its rate and its speed-up over the others. Our stage is the
    run's newest; in decoding, the one that `flashlab.paged_attention` chooses, if the run has it."""

    def case(record: PackedRun) -> tuple[Any, ...]:
        decoding = record.kv_heads or 0
        return (
            decoding,
            record.head_dim,
            record.dtype,
            record.mask,
            record.distribution,
            decoding and len(record.lengths),
        )

    def taken(record: PackedRun) -> str:
        shape = f"{len(record.lengths)}x{record.heads}x{record.kv_heads}x1x{max(record.lengths)}x{record.head_dim}"
        return paged.taken(Problem.parse(shape))

    rows = []
    for (kv_heads, head_dim, dtype, mask, distribution, _), same in grouped(records, case).items():
        newest = max(record.run for record in same)
        by_name = {record.name: record for record in same if record.run == newest}
        names = (taken(same[0]), *DECODE_NAMES[-2::-1]) if kv_heads else PACKING[::-1]
        ours = next((by_name[name] for name in names if name in by_name), None)
        if ours is None:
            continue
        time_us = ours.samples.median_us
        problem = dtype if kv_heads else f"D{head_dim} {mask} {dtype}"
        row = {"distribution": distribution, "problem": problem, "dtype": dtype}
        row |= {"sequences": len(ours.lengths), "keys": sum(ours.lengths), "stage": ours.name, "median_us": time_us}
        row |= {"us": {name: record.samples.median_us for name, record in by_name.items()}}
        row |= {"over": {name: us / time_us for name, us in row["us"].items()}}
        row |= {"gb_per_s": ours.gb_per_s(time_us)} if kv_heads else {"tflops": ours.tflops(time_us)}
        rows.append(row)
    return rows


COLUMNS = (
    Column("lengths", "distribution", code),
    Column("sequences", "sequences"),
    Column("problem", "problem", left=True),
    Column("stage", "stage", code),
    Column("µs", "median_us", mhz),
    Column("TFLOP/s", "tflops", number),
    *(
        Column(f"over {PADDED if name == PADDED else short_title(name)}", f"over.{name}", times)
        for name in (PADDED, *LIBRARIES)
    ),
)
DECODE_COLUMNS = (
    Column("sequences", "sequences"),
    Column("lengths", "distribution", code),
    Column("keys", "keys", "{:,}".format),
    *(Column(f"{name.split('_')[0]}, µs", f"us.{name}", number) for name in DECODE_NAMES[:-1]),
    Column(f"{short_title(FLASHINFER)}, µs", f"us.{FLASHINFER}", number),
    Column("chosen", "stage", lambda name: name.split("_")[0]),
    Column("GB/s", "gb_per_s", mhz),
    Column(f"over {short_title(FLASHINFER)}", f"over.{FLASHINFER}", times),
)


def _page(out: Any, results: Any, data: Path, *, decoding: bool) -> None:
    """Write the table of the main GPU's newest run, or a note that there is none."""
    snippet, flag = ("ragged.md", " --decode") if decoding else ("packed.md", "")
    of = store.records(results.gpu, PackedRun, data) if results is not None else []
    records = [record for record in of if bool(record.kv_heads) == decoding]
    rows = shown(records)
    if not rows:
        out.snippet(snippet, f"*No such sequences are on record yet: `flashlab packed{flag}` on a GPU makes them.*")
        return
    newest = max(records, key=lambda record: record.run)
    meaning = DECODE_LENGTHS if decoding else LENGTHS
    what = "; ".join(f"{name}: {meaning[name].says}" for name in dict.fromkeys(row["distribution"] for row in rows))
    how = (
        f"one query row per sequence, H{Q_HEADS}/{KV_HEADS} D{DECODE_HEAD_DIM}, pages of {PAGE_SIZE} keys"
        if decoding
        else f"{TOKENS:,} tokens in total, {HEADS} heads"
    )
    facts = (
        newest.gpu.name,
        f"{how}, {what}",
        f"burst, interleaved, each problem in one start{', rotating K and V' * decoding}",
    )
    if decoding:  # in one type: both read as many bytes, and the records have both
        shown_in = next(dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows))
        facts = (f"{facts[0]} · {shown_in}", *facts[1:])
        rows = [row for row in rows if row["dtype"] == shown_in]
        rows.sort(key=lambda row: (row["sequences"], list(meaning).index(row["distribution"])))
    columns = DECODE_COLUMNS if decoding else COLUMNS
    source = select.sourced(*facts, runs=[newest.run])
    out.snippet(snippet, f"{table(columns, rows, drop_empty=True)}\n\n<small>{source}</small>")


def page(out: Any, results: Any, data: Path = DATA) -> None:
    """Write both tables."""
    for decoding in (False, True):
        _page(out, results, data, decoding=decoding)


PAGES = {"packed": page}


if __name__ == "__main__":
    sys.exit(serve(lambda job, send: _Worker(job, send).work()))
