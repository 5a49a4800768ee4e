"""Packed sequences beside libraries and padding: the lengths, what each implementation is given, records and table."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
from shared import needs_compiler

import flashlab
from flashlab.core.errors import LaunchError, NoGpuError, ParameterError
from flashlab.core.problem import Problem
from flashlab.experiments import packed
from flashlab.kernels import registry
from flashlab.measure import cells
from flashlab.measure.harness import WorkerDiedError
from flashlab.record import store
from flashlab.record.schema import PackedRun
from flashlab.run import gpu
from flashlab.run.attention import Prepared
from flashlab.show import pages


def _record(name: str, time_us: float, **fields: Any) -> PackedRun:
    row = synthetic.measurement("00_naive", Problem.parse("1x8x512x64"))
    base = row.model_dump(include={"run", "time", "gpu", "source", "software", "start"})
    taken = row.samples[0].model_dump() | {"time_us": (time_us,) * 3, "sm_clock_mhz": (), "call_clock_mhz": ()}
    said = {"distribution": "short", "lengths": (100, 300), "heads": 16, "head_dim": 64, "dtype": "bfloat16"}
    whole = {**base, **said, "mask": "causal", "samples": taken | {"cycles_per_score": None}, "verdict": None}
    return PackedRun.model_validate({**whole, "name": name, **fields})


@pytest.mark.parametrize("name", packed.LENGTHS)
def test_lengths_add_up_and_are_the_same_at_each_call(name: str) -> None:
    found = packed.lengths(name)
    assert sum(found) == packed.TOKENS
    assert min(found) > 0
    assert found == packed.lengths(name)
    assert (max(found) == 8192) == (name == "one_long")
    assert (len(set(found)) == 1) == (name == "equal")


class _Emulated(Prepared):
    """Stands for what `prepare` returns."""

    def __init__(self, q: Any, k: Any, v: Any, *, stream: int, **how: Any) -> None:
        vars(self).update(keep=(q, k, v, how), out=q.clone())

    def __call__(self) -> None:
        *tensors, how = self.keep
        flashlab.emulate(*tensors, out=self.out, **how)


@needs_compiler
def test_every_implementation_computes_the_same_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

    def library(
        q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, causal: bool
    ) -> Any:
        assert max_seqlen_q == 40
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, 5, 45, 46]
        out = torch.empty_like(q)
        for begin, end in ((0, 5), (5, 45), (45, 46)):
            one = (x[begin:end].transpose(0, 1).float() for x in (q, k, v))
            out[begin:end] = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=causal).transpose(0, 1)
        return out, None

    monkeypatch.setattr(packed, "prepare", _Emulated)
    monkeypatch.setattr(packed.peers, "get", lambda _: SimpleNamespace(require=lambda _: None))
    monkeypatch.setitem(sys.modules, packed.LIBRARIES["fa3"], SimpleNamespace(flash_attn_varlen_func=library))
    of = {"lengths": (5, 40, 1), "heads": 2, "head_dim": 64, "dtype": "float16", "mask": "causal"}
    case = packed._Packed(torch, of, seed=0, device="cpu")
    outs = {name: packed._output(case.build(name, 0)) for name in ("16_ones_column", "padded", "fa3")}
    for index, length in enumerate(of["lengths"]):
        wanted = case.of_sequence(outs["fa3"], index)
        assert wanted.shape == (1, 2, length, 64)
        for out in outs.values():
            torch.testing.assert_close(case.of_sequence(out, index), wanted, atol=2e-3, rtol=2e-3)


@needs_compiler
def test_every_implementation_decodes_the_same_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

    class Library:
        """Sequence by sequence, from what FlashInfer is given."""

        def __init__(self, problem: Problem, ends: Any, order: Any, last: Any) -> None:
            assert (problem.q_heads, problem.kv_heads, problem.q_len) == (4, 2, 1)
            self.given = ends, order, last

        def __call__(self, q: Any, cache: Any) -> Any:
            ends, order, last = self.given
            outs = []
            for index in range(len(q)):
                pages = order[ends[index] : ends[index + 1]].long()
                count = (len(pages) - 1) * packed.PAGE_SIZE + int(last[index])
                k, v = (pool[pages].flatten(0, 1)[:count].transpose(0, 1).repeat_interleave(2, 0) for pool in cache)
                weights = (q[index].float()[:, None] @ k.float().transpose(1, 2) / 128**0.5).softmax(-1)
                outs.append((weights @ v.float())[:, 0])
            return torch.stack(outs).to(q.dtype)

    monkeypatch.setattr(packed.peers, "get", lambda _: SimpleNamespace(require=lambda _: None))
    monkeypatch.setattr(packed.peers, "FlashInferPages", Library)
    monkeypatch.setattr(packed, "copies_beyond_l2", lambda *_: 2)
    of = {"lengths": (5, 40, 16), "heads": 4, "kv_heads": 2, "head_dim": 128, "dtype": "float16"}
    case = packed._Paged(torch, of, seed=0, device="cpu", info=None)
    assert case.of_sequence(case.tensors[1], 1).shape == (1, 2, 40, 128)
    wanted = packed._output(case.build("flashinfer", 0))
    assert case.of_sequence(wanted, 1).shape == (1, 4, 1, 128)
    for name in packed.DECODE_NAMES:
        run = case.build(name, None)
        torch.testing.assert_close(packed._output(run), wanted, atol=2e-3, rtol=2e-3)
        assert not torch.equal(run(), wanted)  # the second call is on the other copy


def test_lengths_in_decoding_are_those_of_the_batch() -> None:
    for name in packed.DECODE_LENGTHS:
        assert packed.lengths(name, 16) == packed.lengths(name, 16)
        assert len(packed.lengths(name, 16)) == 16
    assert max(packed.lengths("one_long", 4)) == 65_536
    with pytest.raises(ParameterError, match="lengths: wanted one of equal, "):
        packed.lengths("long", 4)


def test_decoding_has_a_table_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = {"heads": 32, "kv_heads": 8, "head_dim": 128, "mask": "full", "lengths": (16, 984)}
    records = [
        _record("d1_paged_kv", 50.0, **of),
        _record("d12_paged_ends", 40.0, **of),
        _record("flashinfer", 44.0, **of),
    ]
    monkeypatch.setattr(packed.paged, "taken", lambda _: "d1_paged_kv")
    (taken,) = packed.shown(records)
    assert taken["stage"] == "d1_paged_kv"
    monkeypatch.setattr(packed.paged, "taken", lambda _: "d13_shares_of_time")
    (row,) = packed.shown([*records, _record("fa3", 60.0)])
    assert (row["stage"], row["over"]["flashinfer"], row["keys"]) == ("d12_paged_ends", pytest.approx(1.1), 1000)
    (parent,) = packed.shown([*records, _record("d13_shares_of_time", 42.0, **of)])
    assert (parent["stage"], parent["us"]["d12_paged_ends"]) == ("d13_shares_of_time", 40.0)  # not the fastest
    assert row["gb_per_s"] == pytest.approx(2 * 2 * 1000 * 8 * 128 / 40e-6 / 1e9)
    assert records[1].tflops(40.0) == pytest.approx(2 * 2 * 1000 * 32 * 128 / 40e-6 / 1e12)  # what `verify` bounds
    path = tmp_path / "nvidia-h200" / "packed" / f"{records[0].run}.jsonl"
    path.parent.mkdir(parents=True)
    for record in records:
        store.append(path, record)
    out = pages.Output(root=tmp_path / "generated")
    packed.page(out, SimpleNamespace(gpu="nvidia-h200"), tmp_path)
    text = (out.root / "snippets" / "ragged.md").read_text(encoding="utf-8")
    assert "| 2 | `short` | 1,000 | 50.0 | 40.0 | 44.0 | d12 |" in text  # no column for what did not run
    assert "NVIDIA H200 · bfloat16" in text
    assert "flashlab packed" in (out.root / "snippets" / "packed.md").read_text(encoding="utf-8")  # nothing of it there


def test_every_rung_that_packs_is_measured() -> None:
    packing = [stage.id for stage in registry.STAGES.values() if "varlen" in stage.features]
    assert packed.NAMES[: len(packing)] == tuple(packing)


def test_the_table_holds_the_newest_run_and_says_what_is_missing(tmp_path: Path) -> None:
    out = pages.Output(root=tmp_path / "generated")
    packed.page(out, SimpleNamespace(gpu="nvidia-h200"), tmp_path)
    snippet = out.root / "snippets" / "packed.md"
    assert "flashlab packed" in snippet.read_text(encoding="utf-8")
    records = [_record("16_ones_column", 50.0), _record("padded", 120.0), _record("fa3", 60.0)]
    records += [_record("16_ones_column", 1.0, run="20250101T000000Z-0123abc")]
    path = tmp_path / "nvidia-h200" / "packed" / f"{records[0].run}.jsonl"
    path.parent.mkdir(parents=True)
    for record in records:
        store.append(path, record)
    later = [_record("16_ones_column", 40.0, run="29990101T000000Z-0123abc").model_copy(update={"head_dim": 128})]
    assert [row["median_us"] for row in packed.shown(records + later)] == [50.0, 40.0]  # of a run without this problem
    last = [_record(packed.PACKING[-1], 45.0), *records]
    assert [(row["stage"], row["median_us"]) for row in packed.shown(last)] == [(packed.PACKING[-1], 45.0)]
    (row,) = packed.shown(records)
    flops = sum(Problem.parse(f"1x16x{n}x64", mask="causal").flops for n in (100, 300))
    assert row["tflops"] == pytest.approx(flops / 50.0 / 1e6)
    store.write_checksums("nvidia-h200", tmp_path)
    assert not {1, 2, 3} & {damage.line for damage in store.verify("nvidia-h200", tmp_path)}
    packed.page(out, SimpleNamespace(gpu="nvidia-h200"), tmp_path)
    text = snippet.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| `short`"))
    assert "| 2 | D64 causal bfloat16 | `16_ones_column` | 50.00 |" in line
    assert line.rstrip().endswith("| ×2.40 | ×1.20 |")
    assert "16,384 tokens in total" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "4"], "--batch: wanted --decode too"),
        (["--stages", "d13"], "--stages: wanted --decode too"),
        (["--decode", "--stages", "d13_shares_of_time[END_STEPS=8],16"], "stages: wanted one of d1_paged_kv, "),
        (["--decode", "--mask", "full"], "--mask: wanted no --decode"),
        (["--decode", "--head-dim", "64"], "--head-dim: wanted no --decode"),
    ],
)
def test_options_of_the_other_kind_are_refused(options: list[str], words: str) -> None:
    run = subprocess.run([sys.executable, "-m", "flashlab", "packed", *options], capture_output=True, text=True)
    assert run.returncode
    assert words in " ".join(run.stderr.split())


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ParameterError, match="lengths: wanted one of equal, "):
        packed.measure(distributions=["long"])


def test_what_a_worker_sends_is_on_record_with_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _record("padded", 120.0).model_dump(mode="json")
    header = ("schema_version", "run", "time", "gpu", "source", "software", "start")
    row = {name: value for name, value in record.items() if name not in header}
    sent = [
        {"type": "hello", "gpu": synthetic.own_gpu(tmp_path), "software": record["software"]},
        {"type": "step", "what": "short 64, padded"},
        {"type": "row", "row": row},
        {"type": "missing", "what": "fa3 at short 64", "reason": "no such wheel"},
    ]

    class Fake:
        def __init__(self, _: object, job: Any) -> None:
            assert (job["names"], job["device"]) == (packed.NAMES, 0)

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None: ...
        def run(self, act: Any, **_: Any) -> None:
            for message in sent:
                if message["type"] == "death":
                    raise WorkerDiedError("crashed", "killed by SIGSEGV")
                act(message)

    monkeypatch.setattr(cells, "Worker", Fake)
    options = replace(packed.OPTIONS, data=tmp_path)
    path, missing = packed.measure(distributions=["short"], options=options)
    assert missing == ("fa3 at short 64: no such wheel",)
    (read,), damage = store.read(path, PackedRun)
    assert not damage
    assert (read.name, read.lengths, read.run) == ("padded", (100, 300), path.stem)
    sent.append({"type": "death"})
    with pytest.raises(LaunchError, match=r"got 1, kept in .*; missing: .*; the rest: killed by SIGSEGV"):
        packed.measure(distributions=["short"], options=options)
    assert len(store.read(max(path.parent.glob("*.jsonl")), PackedRun)[0]) == 1
    sent.pop()
    sent[2] = {"type": "row", "row": {**row, "heads": 0}}
    with pytest.raises(LaunchError, match="wanted a sound row"):
        packed.measure(distributions=["short"], options=options)
    sent[2:3] = []
    with pytest.raises(LaunchError, match="wanted at least one row, got none: fa3 at short 64"):
        packed.measure(distributions=["short"], options=options)


@pytest.mark.skipif(gpu.available() is None, reason="there is a GPU, which it would measure on")
def test_without_a_gpu_its_worker_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoGpuError, match="GPU"):
        packed.measure(options=replace(packed.OPTIONS, data=tmp_path))
