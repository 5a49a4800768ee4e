"""What calls cost the host: every call runs, and a page shows what it takes beyond the launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic

from flashlab.core.errors import LaunchError
from flashlab.core.problem import Problem
from flashlab.experiments import enqueue
from flashlab.record import store
from flashlab.record.schema import Call
from flashlab.show import pages

DECODING = Problem.parse("1x2x1x1x32x64")


def _record(name: str, times_us: tuple[float, ...], **fields: Any) -> Call:
    base = synthetic.measurement("00_naive", DECODING).model_dump(
        include={"run", "time", "gpu", "source", "software", "start"}
    )
    return Call.model_validate({**base, "name": name, "problem": DECODING, "time_us": times_us, **fields})


def test_every_call_is_timed_or_missing_with_a_reason() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    sent: list[Any] = []
    worker = enqueue._Worker({"device": 0, "seed": 0, "samples": 2, "calls": 1, "library": ""}, sent.append)
    q, k, v = (torch.randn(1, heads, length, 64).half() for heads, length in ((2, 1), (1, 32), (1, 32)))
    functions = enqueue.calls(torch, DECODING, q, k, v)
    outputs = {name: call() for name, call in functions.items()}
    contiguous = ("flashlab.attention", "flashlab.torch.attention", "torch.ops.flashlab.attention")
    for name in contiguous:
        torch.testing.assert_close(outputs[name], outputs["sdpa"], atol=2e-3, rtol=2e-3)
    pages_of = ("flashlab.paged_attention", "torch.ops.flashlab.paged_attention")
    assert torch.equal(*(outputs[name] for name in pages_of))

    def fails() -> None:
        raise RuntimeError("no such kernel here")

    worker.time(DECODING, {**functions, "fails": fails}, lambda: None)
    rows = [message["row"] for message in sent if message["type"] == "row"]
    assert {row["name"] for row in rows} == {*contiguous, *pages_of, "sdpa"}
    assert all(len(row["time_us"]) == 2 and not _record(**_renamed(row)).waits for row in rows)
    assert [message["reason"] for message in sent if message["type"] == "missing"] == [
        "RuntimeError: no such kernel here"
    ]


def test_a_first_call_is_timed_in_a_process_of_its_own() -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    assert enqueue.first_call_us(DECODING, "cpu") > 0
    with pytest.raises(LaunchError, match="no-such-device"):
        enqueue.first_call_us(DECODING, "no-such-device")


def test_a_librarys_calls_are_waited_for_one_by_one() -> None:
    sent: list[Any] = []
    done: list[str] = []
    job = {"device": 0, "seed": 0, "samples": 3, "calls": 1, "library": "sdpa"}
    worker = enqueue._Worker(job, sent.append)
    worker.time(DECODING, {"sdpa": lambda: done.append("call")}, lambda: done.append("wait"))
    assert done == ["call", "call", *["wait", "call", "wait"] * 3, "wait"]
    (row,) = (message["row"] for message in sent if message["type"] == "row")
    assert len(row["time_us"]) == 3
    assert _record(**_renamed(row)).waits


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    return {"name": row["name"], "times_us": tuple(row["time_us"]), "waits": row["waits"]}


def test_the_page_has_what_a_call_takes_beyond_the_launch(tmp_path: Path) -> None:
    out = pages.Output(root=tmp_path / "generated")
    enqueue.page(out, SimpleNamespace(gpu="nvidia-h200"), tmp_path)
    snippet = out.root / "snippets" / "enqueue.md"
    assert "flashlab enqueue" in snippet.read_text(encoding="utf-8")
    waited = _record("sdpa", (50.0,))  # a call that waits for its kernel is no such time
    records = [
        *(_record(name, times, waits=False) for name, times in ((enqueue.LAUNCH, (4.0, 4.0, 5.0)), ("sdpa", (16.0,)))),
        _record("flashlab.attention", (13.0, 14.0, 20.0), waits=False),
        _record(enqueue.FIRST, (30000.0, 30100.0, 32000.0), waits=False),
        waited,
    ]
    path = tmp_path / "nvidia-h200" / "calls" / f"{waited.run}.jsonl"
    path.parent.mkdir(parents=True)
    for record in records:
        store.append(path, record)
    enqueue.page(out, SimpleNamespace(gpu="nvidia-h200"), tmp_path)
    text = snippet.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(f"| {DECODING.label}")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]
    assert cells == [
        [f"`{enqueue.LAUNCH}`", "4.00", "4.00–5.00", "–"],
        ["`sdpa`", "16.0", "16.0–16.0", "–"],
        ["`flashlab.attention`", "14.0", "13.0–20.0", "10.0"],
        [f"`{enqueue.FIRST}`", "30,100", "30,000–32,000", "–"],
    ]
