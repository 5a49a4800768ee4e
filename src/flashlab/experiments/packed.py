"""Sequences of different lengths, packed: `flashlab.varlen_attention` beside the libraries that take them, and padding.

    flashlab packed          every distribution of lengths, mask, type and head dim

`Problem` has one length for all sequences of a batch, so this has records of its own. What is timed is a burst of the
timer that stages and libraries share (measure/timer.py), interleaved; `padded` is `flashlab.attention` on a batch in
which every sequence is as long as the longest, what a program without packed sequences does. Rates count the scores
that the sequences need, whoever computes more.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

from flashlab.core.errors import CheckFailedError, ParameterError, UnsupportedError
from flashlab.core.paths import DATA
from flashlab.core.problem import DTYPES, MASKS, DType, Mask, Problem
from flashlab.kernels import peers
from flashlab.measure import timer as timing
from flashlab.measure.cells import GpuWorker, record_rows
from flashlab.measure.harness import Message, serve
from flashlab.measure.options import Options
from flashlab.record import store
from flashlab.record.schema import PackedRun, Verdict
from flashlab.run.attention import prepare
from flashlab.run.plan import Sequences
from flashlab.show.tables import Column, code, mhz, number, short_title, table, times
from flashlab.verify.verdict import check

OPTIONS = Options(worker=(sys.executable, "-m", "flashlab.experiments.packed"))
TOKENS = 16_384
HEADS = 16
HEAD_DIMS = (64, 128)
STAGE = "16_ones_column"
PADDED = "padded"
LIBRARIES: Mapping[str, str] = {"fa3": "fa3_fwd_interface", "fa4": "flash_attn.cute"}
"""Libraries to the module that has `flash_attn_varlen_func`."""
NAMES = (STAGE, PADDED, *LIBRARIES)
LENGTHS: Mapping[str, str] = {
    "equal": "sequences of one length, 2,048",
    "uniform": "drawn evenly from 1 to 4,096",
    "one_long": "one of 8,192, and others of 64 to 1,024",
    "short": "drawn evenly from 16 to 512",
}
"""Distributions, each of `TOKENS` tokens in all."""
TIMEOUT_S = 180.0


def lengths(name: str) -> tuple[int, ...]:
    """The lengths of a distribution, the same at each call; they add up to `TOKENS`.

    Raises:
        ParameterError: no such distribution.
    """
    if name not in LENGTHS:
        raise ParameterError(f"lengths: wanted one of {', '.join(LENGTHS)}, got {name!r}")
    rng = np.random.default_rng(0)
    drawn = {"uniform": (1, 4096), "one_long": (64, 1024), "short": (16, 512)}
    found = [8192] if name == "one_long" else []
    while (left := TOKENS - sum(found)) > 0:
        low, high = drawn.get(name, (2048, 2048))
        found.append(min(left, int(rng.integers(low, high + 1))))
    return tuple(rng.permutation(found).tolist())


def measure(
    names: Sequence[str] = NAMES,
    *,
    distributions: Sequence[str] = tuple(LENGTHS),
    head_dims: Sequence[int] = HEAD_DIMS,
    dtypes: Sequence[DType] = DTYPES,
    masks: Sequence[Mask] = MASKS,
    options: Options = OPTIONS,
) -> tuple[Path, tuple[str, ...]]:
    """Time packed sequences, and append a `schema.PackedRun` each to data/<gpu>/packed/.

    Returns:
        The file, and what has no time, with the reason.

    Raises:
        ParameterError: no such implementation or distribution.
        NoGpuError, MissingPackageError, LaunchError, OutputError: as they say.
    """
    for name in names:
        if name not in NAMES:
            raise ParameterError(f"name: wanted one of {', '.join(NAMES)}, got {name!r}")
    cases = itertools.product(distributions, head_dims, dtypes, masks)
    given = [{"lengths": lengths(case[0]), "case": case} for case in cases]
    job: Message = {"names": list(names), "cases": given}
    return record_rows("packed", PackedRun, job, options, total=len(given) * len(names), step_s=TIMEOUT_S)


# --- The worker -------------------------------------------------------------------------------------------------------


class _Packed:
    """Q, K and V of a case, packed; and its implementations, each a call that returns (total, heads, head_dim)."""

    def __init__(self, torch: Any, chosen: Sequence[int], case: Sequence[Any], *, seed: int, device: str) -> None:
        _, head_dim, self.dtype, mask = case
        self.chosen, self.causal = chosen, mask == "causal"
        made = torch.Generator(device=device).manual_seed(seed)
        shape = (sum(chosen), HEADS, head_dim)
        self.tensors = [
            torch.randn(shape, generator=made, device=device).to(getattr(torch, self.dtype)) for _ in range(3)
        ]
        ends = np.concatenate([[0], np.cumsum(chosen)])
        self.bounds = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        self.cu_seqlens = torch.from_numpy(ends.astype(np.int32)).to(device)

    def of_sequence(self, packed: Any, index: int) -> Any:
        """(1, heads, length, head_dim) of (total, heads, head_dim)."""
        begin, end = self.bounds[index]
        return packed[begin:end].transpose(0, 1)[None]

    def build(self, name: str, torch: Any, stream: int) -> tuple[timing.Run, Callable[[], Any]]:
        """What enqueues one call, and what does and returns its output."""
        q, k, v = self.tensors
        if name == PADDED:
            return self._padded(torch, stream)
        if name in LIBRARIES:
            run = self._library(name)

            def result() -> Any:
                out = run()
                return out[0] if isinstance(out, tuple) else out

            return run, result
        sequences = Sequences(self.cu_seqlens, self.cu_seqlens, max(self.chosen))
        launch = prepare(q, k, v, causal=self.causal, sequences=sequences, stage=name, stream=stream)

        def written() -> Any:
            launch()
            return launch.out

        return launch, written

    def _padded(self, torch: Any, stream: int) -> tuple[timing.Run, Callable[[], Any]]:
        longest = max(self.chosen)
        wide = []
        for packed in self.tensors:
            wide.append(packed.new_zeros(len(self.chosen), HEADS, longest, packed.shape[2]))
            for index, length in enumerate(self.chosen):
                wide[-1][index, :, :length] = self.of_sequence(packed, index)[0]
        launch = prepare(*wide, causal=self.causal, stage=STAGE, stream=stream)

        def result() -> Any:
            launch()
            rows = [launch.out[index, :, :length] for index, length in enumerate(self.chosen)]
            return torch.cat([one.transpose(0, 1) for one in rows])

        # Padding follows a sequence, so under a causal mask none of its rows sees it. Without a mask all do, so that
        # only the time means something.
        return launch, result

    def _library(self, name: str) -> timing.Run:
        problem = Problem.parse(f"1x{HEADS}x{max(self.chosen)}x{self.tensors[0].shape[2]}", dtype=self.dtype)
        if why := peers.get(name).why_not(problem):
            raise UnsupportedError(why.reason)
        function = importlib.import_module(LIBRARIES[name]).flash_attn_varlen_func
        ends, longest = self.cu_seqlens, max(self.chosen)
        how = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        known = inspect.signature(function).parameters
        return partial(
            function, *self.tensors, causal=self.causal, **{key: of for key, of in how.items() if key in known}
        )


class _Worker(GpuWorker):
    """Checks and times the cases of the job."""

    def work(self) -> None:
        """All of the job."""
        self.hold()
        stream = int(self.torch.cuda.current_stream(self.device).cuda_stream)
        backend = timing.CudaBackend(self.device, stream)
        with self.torch.no_grad():
            for one in self.job["cases"]:
                self._case(one["lengths"], one["case"], timing.Timer(backend, seed=self.job["seed"]), stream)
                self.free()

    def _case(self, chosen: Sequence[int], case: Sequence[Any], timer: timing.Timer, stream: int) -> None:
        label = " ".join(map(str, case))
        packed = _Packed(self.torch, chosen, case, seed=self.job["seed"], device="cuda")
        runs: dict[str, timing.Run] = {}
        verdicts: dict[str, Verdict | None] = {}
        for name in self.job["names"]:
            self.send({"type": "step", "what": f"{label}, {name}"})
            with self.attempt(f"{name} at {label}", survive=True):
                run, result = packed.build(name, self.torch, stream)
                verdicts[name] = None if name == PADDED and not packed.causal else self._checked(packed, result())
                runs[name] = run
        for name, samples in timer.burst(runs, samples=20).items():
            distribution, head_dim, dtype, mask = case
            row = {"name": name, "distribution": distribution, "lengths": chosen, "heads": HEADS, "mask": mask}
            row |= {"head_dim": head_dim, "dtype": dtype, "samples": samples, "verdict": verdicts[name]}
            self.send({"type": "row", "row": to_jsonable_python(row)})

    def _checked(self, packed: _Packed, out: Any) -> Verdict:
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
    """A row for each case, of the newest run that has it: ours, with its rate, and how many times faster it is than the
    others."""

    def case(one: PackedRun) -> tuple[Any, ...]:
        return (one.head_dim, one.dtype, one.mask, one.distribution)

    newest = {case(one): one.run for one in sorted(records, key=lambda one: one.run)}
    cases: dict[tuple[Any, ...], dict[str, PackedRun]] = {}
    for one in records:
        if one.run == newest[case(one)]:
            cases.setdefault(case(one), {})[one.name] = one
    rows = []
    for (head_dim, dtype, mask, distribution), by_name in cases.items():
        if STAGE not in by_name:
            continue
        ours = by_name[STAGE]
        time_us = ours.samples.median_us
        over = {name: one.samples.median_us / time_us for name, one in by_name.items()}
        rows.append(
            {
                **{"distribution": distribution, "problem": f"D{head_dim} {mask} {dtype}", "over": over},
                **{"median_us": time_us, "tflops": ours.tflops(time_us), "sequences": len(ours.lengths)},
            }
        )
    return rows


COLUMNS = (
    Column("lengths", "distribution", code),
    Column("sequences", "sequences"),
    Column("problem", "problem", left=True),
    Column("µs", "median_us", mhz),
    Column("TFLOP/s", "tflops", number),
    *(
        Column(f"over {PADDED if name == PADDED else short_title(name)}", f"over.{name}", times)
        for name in NAMES
        if name != STAGE
    ),
)


def page(out: Any, results: Any, data: Path = DATA) -> None:
    """The table of the main GPU's newest run, or that there is none."""
    records = store.records(results.gpu, PackedRun, data) if results is not None else []
    rows = shown(records)
    if not rows:
        out.snippet("packed.md", "*No packed sequences are on record yet: `flashlab packed` on a GPU makes them.*")
        return
    newest = max(records, key=lambda one: one.run)
    what = "; ".join(f"{name}: {LENGTHS[name]}" for name in dict.fromkeys(row["distribution"] for row in rows))
    facts = (
        newest.gpu.name,
        f"{TOKENS:,} tokens in all, {HEADS} heads, {what}",
        "burst, interleaved, each problem in one start",
        f"{newest.time[:10]} · commit {newest.source.commit[:7]}",
    )
    out.snippet("packed.md", f"{table(COLUMNS, rows)}\n\n<small>{' · '.join(facts)}</small>")


PAGES = {"packed": page}
RECORDS = (PackedRun,)


if __name__ == "__main__":
    sys.exit(serve(lambda job, send: _Worker(job, send).work()))
