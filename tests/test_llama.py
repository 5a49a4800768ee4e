"""A whole model by each attention: the phases on a tiny model on the CPU, the records, and the table that they make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic

from flashlab.core.errors import NoGpuError, ParameterError
from flashlab.core.problem import Problem
from flashlab.experiments import llama
from flashlab.record import store
from flashlab.record.schema import ModelRun
from flashlab.run import gpu
from flashlab.show import pages

TINY = {
    **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


def _record(attention: str, phase: str, seconds: float, **fields: Any) -> ModelRun:
    row = synthetic.measurement("00_naive", Problem.parse("1x8x512x64"))
    base = row.model_dump(include={"run", "time", "gpu", "source", "software", "start"})
    geometry = {"layers": 32, "heads": 32, "kv_heads": 32, "head_dim": 128, "parameters": 6_738_415_616}
    said = {"batch": 1, "prompt_tokens": 2048, "new_tokens": 0 if phase == "prefill" else 4, "logit_error": None}
    times = (0.9 * seconds, seconds, 1.2 * seconds)
    whole = {**base, **geometry, **said, "dtype": "bfloat16", "transformers": "5.23.0", "time_s": times}
    return ModelRun.model_validate({**whole, "attention": attention, "phase": phase, **fields})


@pytest.mark.filterwarnings("default")  # transformers 5.24 has another name for past_key_values
def test_every_attention_runs_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    sent: list[Any] = []
    job = {"device": 0, "seed": 0, "attentions": ["flashlab", "sdpa", "nothing", "fa4"], "new": 2, "repeats": 2}
    worker = llama._Worker({**job, "batches": [1, 2], "prompt": 8, "geometry": TINY}, sent.append)
    worker.torch = torch  # type: ignore[attr-defined]
    monkeypatch.setattr(llama.peers, "get", lambda _: SimpleNamespace(layout="bhsd", build=lambda _: _fails))
    worker.time_all("cpu", lambda: None, lambda step: (step, step()))
    rows = {
        (one["row"]["phase"], one["row"]["batch"], one["row"]["attention"]): one["row"] for one in sent if "row" in one
    }
    assert set(rows) == {
        (phase, batch, name)
        for phase, batch in (
            *(("prefill", 1), ("decode", 1), ("decode", 2)),
            *((llama.GRAPH, 1), (llama.GRAPH, 2)),
        )
        for name in ("flashlab", "sdpa", "nothing")
    }
    assert all(len(row["time_s"]) == 2 and min(row["time_s"]) > 0 for row in rows.values())
    assert all(row["logit_error"] < 0.1 for (*_, name), row in rows.items() if name == "flashlab")
    assert all(row["logit_error"] is None for (*_, name), row in rows.items() if name != "flashlab")
    assert [one["reason"] for one in sent if one["type"] == "missing"] == ["RuntimeError: no such kernel here"]
    base = _record("sdpa", "prefill", 1.0).model_dump()
    for row in rows.values():
        ModelRun.model_validate({**base, **row})


def _fails(*_: Any) -> None:
    raise RuntimeError("no such kernel here")


def test_the_page_has_tokens_a_second_and_attentions_share(tmp_path: Path) -> None:
    out = pages.Output(root=tmp_path / "generated")
    llama.page(out, SimpleNamespace(gpu="nvidia-h200"), tmp_path)
    assert "flashlab llama" in (out.root / "snippets" / "llama.md").read_text(encoding="utf-8")
    records = [
        *(
            _record(name, "prefill", seconds)
            for name, seconds in (("flashlab", 0.05), ("sdpa", 0.0625), ("nothing", 0.04))
        ),
        *(_record(name, "decode", seconds, batch=8) for name, seconds in (("flashlab", 0.4), ("sdpa", 0.2))),
    ]
    first, second, *decoded = llama.shown([*records, _record("sdpa", "prefill", 9.0, run="20250101T000000Z-0123abc")])
    assert [one["record"].attention for one in (first, second, *decoded)] == ["flashlab", "sdpa", "sdpa", "flashlab"]
    assert first["tokens_per_s"] == pytest.approx(2048 / 0.05)
    assert (first["attention_share"], second["attention_share"]) == pytest.approx((0.2, 0.36))
    assert first["usd_per_million"] == pytest.approx(llama.USD_PER_GPU_HOUR / 3600 * 0.05 / 2048 * 1e6)
    assert decoded[0]["tokens_per_s"] == pytest.approx(8 * 4 / 0.2)
    assert decoded[0]["attention_share"] is None
    # Of a step that the host limits, the samples do not tell how long attention takes.
    slow = [
        _record(name, "decode", 0.4, time_s=times) for name, times in (("sdpa", (0.3, 0.5)), ("nothing", (0.5, 0.4)))
    ]
    assert [one["attention_share"] for one in llama.shown(slow)] == [None]
    path = tmp_path / "nvidia-h200" / "models" / f"{records[0].run}.jsonl"
    path.parent.mkdir(parents=True)
    for record in records:
        store.append(path, record)
    llama.page(out, SimpleNamespace(gpu="nvidia-h200"), tmp_path)
    text = (out.root / "snippets" / "llama.md").read_text(encoding="utf-8")
    assert "| prefill | 1 | `flashlab` | 50.0 | 45.0–60.0 | 40,960 | 20.0 |" in text
    assert "6.74 billion parameters" in text
    assert "(assumed)" in text


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ParameterError, match="attention: wanted one of flashlab, sdpa"):
        llama.measure(["eager"])


@pytest.mark.skipif(gpu.available() is None, reason="there is a GPU, which it would measure on")
def test_without_a_gpu_its_worker_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoGpuError, match="GPU"):
        llama.measure(options=replace(llama.OPTIONS, data=tmp_path))
