"""Activations of a trained model: RoPE, training, and Q, K and V as the model's own attention took them."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashlab.core.errors import CheckFailedError, MissingError, MissingPackageError, UnsupportedError
from flashlab.core.problem import Problem
from flashlab.measure import trained
from flashlab.run import gpu
from flashlab.verify.oracle import attention

TINY = trained.Config(head_dim=16, heads=4, layers=2, hidden=128, steps=60, batch=4, length=64, learning_rate=3e-3)
PROBLEM = Problem.parse("3x4x80x16", dtype="bfloat16", mask="causal")
NORMAL = Problem.parse("16x16x2048x64")


def _text() -> trained.Text:
    source = Path(trained.__file__).read_bytes()
    return trained.Text(training=source[2000:], held_out=source[:2000], files=1)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="needs torch: `pip install 'flashlab[gpu]'`")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(torch: Any, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model that this CPU trains, in place of those of a GPU; its description."""
    monkeypatch.setenv("FLASHLAB_CACHE", str(cache))
    monkeypatch.setitem(trained.CONFIGS, 16, TINY)
    monkeypatch.setattr(gpu, "absence", lambda: "")
    try:
        return trained.describe(16)
    except MissingError:
        return trained.train(TINY, text=_text(), device="cpu")


# --- text ---


def _library(root: Path, files: dict[str, int]) -> Path:
    for name, num_bytes in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((name.encode() + b"\n") * (num_bytes // (len(name) + 1) + 1))
    return root


def test_the_text_is_every_module_but_tests_and_what_was_installed(tmp_path: Path) -> None:
    kept = {f"package/m{index:02}.py": 300_000 for index in range(20)}
    root = _library(
        tmp_path / "a",
        kept | {"site-packages/x.py": 10, "test/x.py": 10, "package/tests/x.py": 10, "package/data.txt": 10},
    )
    text = trained.read_text(root)
    assert text.files == 20
    shown = {name for name in kept if name.encode() in text.held_out}
    assert len(shown) == 2
    assert {name for name in kept if name.encode() in text.training} == kept.keys() - shown
    assert b"x.py" not in text.training + text.held_out
    assert b"data.txt" not in text.training + text.held_out
    again = trained.read_text(_library(tmp_path / "b", dict(reversed(kept.items()))))
    assert (again.sha256, again.training) == (text.sha256, text.training)
    assert trained.read_text(root, seed=1).sha256 != text.sha256


def test_a_stripped_library_is_said(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"0\.0 MiB in 1 files under .*zipped"):
        trained.read_text(_library(tmp_path, {"os.py": 1000}))


def test_this_python_has_enough_text() -> None:
    text = trained.read_text()
    assert len(text.training) > 5 * len(text.held_out) > 1 << 20


# --- the model ---


def test_the_learning_rate_rises_and_falls() -> None:
    steps = trained.CONFIGS[64].steps
    rates = [trained.CONFIGS[64].learning_rate_at(step) for step in range(steps)]
    highest = rates.index(max(rates))
    assert abs(highest - steps / 8) < 5
    assert rates[:highest] == sorted(rates[:highest])
    assert rates[highest:] == sorted(rates[highest:], reverse=True)
    assert math.isclose(rates[-1], trained.CONFIGS[64].learning_rate / 10, rel_tol=0.01)


def test_rope_keeps_lengths_and_sees_relative_positions_alone(torch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, generator=generator)
    turns = trained.rotations(64, 3000, "cpu")
    q_at, k_at = (trained.rotate(x.expand(3000, 64), turns) for x in (q, k))
    assert torch.equal(q_at[0], q)
    assert torch.allclose(q_at.norm(dim=-1), q.norm().expand(3000), rtol=1e-5)
    for distance in (0, 1, 17, 700):
        scores = (q_at[distance:] * k_at[: 3000 - distance]).sum(-1)
        assert torch.allclose(scores, scores[0].expand(len(scores)), atol=2e-3), distance
    far = (q_at[700:] * k_at[:-700]).sum(-1)
    near = (q_at[1:] * k_at[:-1]).sum(-1)
    assert abs(far[0] - near[0]) > 0.1
    longer = trained.rotations(64, 4000, "cpu")
    assert torch.equal(longer[:3000], turns)


def test_a_later_byte_changes_no_earlier_guess(torch: Any) -> None:
    weights = trained.initial_weights(TINY, "cpu")
    tokens = torch.arange(64).reshape(1, 64)
    other = tokens.clone()
    other[0, 40] = 200
    a, b = (trained.forward(weights, TINY, x) for x in (tokens, other))
    assert torch.allclose(a[:, :40], b[:, :40], atol=1e-5)
    assert not torch.allclose(a[:, 40:], b[:, 40:], atol=1e-2)


def test_windows_differ_and_stay_within_the_text(torch: Any) -> None:
    text = torch.arange(100, dtype=torch.uint8)
    windows = trained._windows(text, 4, 30)
    assert [row[0].item() for row in windows] == [0, 23, 46, 70]
    assert windows[-1, -1] == 99
    assert trained._windows(text, 1, 100).shape == (1, 100)


def test_attention_of_the_activations_is_the_models_own(torch: Any, tiny: dict[str, Any]) -> None:
    stored = trained._load(trained._folder(16) / f"{tiny['digest']}.pt")
    seen = []
    with torch.no_grad():
        trained.forward(
            trained._on(stored, "cpu"), TINY, trained._windows(stored["held_out"], 2, 80), lambda *x: seen.append(x)
        )
    assert [layer for layer, *_ in seen] == [0, 1]
    for _, q, k, v, out in seen:
        exact, _ = attention(q.numpy(), k.numpy(), v.numpy(), causal=True)
        assert np.abs(out.numpy() - exact).max() < 1e-5 * np.abs(exact).max()
        without_rope, _ = attention(q.numpy(), v.numpy(), v.numpy(), causal=True)
        assert np.abs(out.numpy() - without_rope).max() > 1e-2 * np.abs(exact).max()


def test_score_statistics_are_those_of_the_visible_scores(torch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 3, 50, 16, generator=generator) * 2
    found = trained.score_statistics(q, k)
    scores = np.einsum("bhqd,bhkd->bhqk", q.double().numpy(), k.double().numpy()) / 4
    sees = np.tri(50, dtype=bool)
    seen = scores[..., sees]
    weights = np.where(sees, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    assert found == pytest.approx(
        {
            "std_nats": seen.std(),
            "largest_nats": seen.max(),
            "first_key_weight": weights[..., 0].mean(),
            "largest_probability": weights.max(-1).mean(),
        },
        rel=1e-4,
    )


# --- training and the cache ---


def test_training_lowers_the_loss_and_is_described(tiny: dict[str, Any]) -> None:
    assert tiny["loss"] < 3.5 < math.log(256)
    assert tiny["held_out_loss"] < 4.0
    assert (tiny["head_dim"], tiny["steps"], tiny["gpu"]) == (16, 60, "CPU")
    assert tiny["seconds"] > 0
    assert trained.Config(**tiny["config"]) == TINY
    assert tiny["text"] == {
        "sha256": _text().sha256,
        "files": 1,
        "bytes": len(_text().training),
        "held_out_bytes": 2000,
    }
    assert "torch" in tiny["software"]
    assert len(tiny["layers"]) == TINY.layers
    assert all(0 < layer["std_nats"] < layer["largest_nats"] for layer in tiny["layers"])


def test_a_seed_trains_the_same_weights_and_the_newest_stay(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    steps: list[tuple[int, int, str]] = []
    few = replace(TINY, steps=3)
    first = trained.train(few, text=_text(), device="cpu", follow=lambda *step: steps.append(step))
    assert [step[:2] for step in steps] == [(0, 3)]
    assert "head dim 16: loss " in steps[0][2]
    again = trained.train(few, text=_text(), device="cpu")
    assert again["digest"] == first["digest"]
    other = trained.train(replace(few, seed=1), text=_text(), device="cpu")
    assert other["digest"] != first["digest"]
    assert trained.describe(16)["digest"] == other["digest"]
    assert {path.name for path in (tmp_path / "trained" / "16").iterdir()} == {
        "description.json",
        f"{other['digest']}.pt",
    }


def test_a_training_that_diverges_stores_nothing(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    with pytest.raises(CheckFailedError, match="diverged"):
        trained.train(replace(TINY, steps=3, learning_rate=math.inf), text=_text(), device="cpu")
    with pytest.raises(MissingError, match="found none"):
        trained.describe(16)


def test_damaged_weights_are_not_used(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sound = trained._folder(16) / f"{tiny['digest']}.pt"
    cut, named_otherwise = tmp_path / f"{tiny['digest']}.pt", tmp_path / "other.pt"
    cut.write_bytes(sound.read_bytes()[:-100])
    named_otherwise.write_bytes(sound.read_bytes())
    for path in (cut, named_otherwise, tmp_path / "absent.pt"):
        with pytest.raises(MissingError, match="flashlab train"):
            trained._load(path)


# --- what a benchmark asks for ---


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activations(torch: Any, tiny: dict[str, Any], dtype: str) -> None:
    problem = Problem.parse("3x4x80x16", dtype=dtype, mask="full")
    found = trained.activations(problem, device="cpu")
    assert len(found) == 2
    for tensors in found:
        for x in tensors:
            assert x.shape == (3, 4, 80, 16)
            assert x.is_contiguous()
            assert x.dtype == getattr(torch, dtype)
    assert not torch.equal(found[0][0], found[1][0])
    assert len({x[1].float().sum().item() for x in found[0]}) == 3
    longer = Problem.parse("1x4x300x16", dtype=dtype)
    assert trained.activations(longer, device="cpu")[1][0].shape == (1, 4, 300, 16)


def test_a_batch_in_parts_is_the_batch_at_once(
    torch: Any, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = trained._on(trained._load(trained._folder(16) / f"{tiny['digest']}.pt"), "cpu")
    whole = trained._extract(stored, TINY, 3, 80)
    monkeypatch.setattr(trained, "_TOKENS_AT_ONCE", 170)
    for layer, parts in enumerate(trained._extract(stored, TINY, 3, 80)):
        for a, b in zip(whole[layer], parts, strict=True):
            assert torch.allclose(a, b, atol=1e-4), layer


def test_activations_beyond_the_types_range_are_refused(
    torch: Any, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    extract = trained._extract
    for value in (70_000.0, math.nan):

        def spoilt(*args: Any, value: float = value) -> Any:
            found = extract(*args)
            found[0][1][2, 3, 4, 5] = value
            return found

        monkeypatch.setattr(trained, "_extract", spoilt)
        with pytest.raises(UnsupportedError, match="wanted K of layer 0 within the range of float16, got"):
            trained.activations(Problem.parse("3x4x80x16", dtype="float16"), device="cpu")
        if math.isfinite(value):
            trained.activations(PROBLEM, device="cpu")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("3x4x80x32", "4 heads of 16"),
        ("3x2x80x16", "4 heads of 16"),
        ("3x4x2x80x80x16", "4 heads of 16"),
        ("3x4x4x80x81x16", "as many queries as keys"),
        ("1x4x2001x16", "2000 bytes"),
        ("9x4x1993x16", "2000 bytes"),
    ],
)
def test_problems_that_cannot_have_them(tiny: dict[str, Any], shape: str, reason: str) -> None:
    problem = Problem.parse(shape)
    assert reason in (trained.why_not(problem) or "")
    with pytest.raises(UnsupportedError, match=reason):
        trained.activations(problem, device="cpu")


def test_problems_that_can(tiny: dict[str, Any]) -> None:
    for shape in ("3x4x80x16", "1x4x2000x16", "8x4x1993x16"):
        assert trained.why_not(Problem.parse(shape)) is None


def test_machines_that_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    spec = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'flashlab[gpu]'" in (trained.why_not(NORMAL) or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(gpu, "absence", lambda: "no driver")
    assert trained.why_not(NORMAL) == "the trained models need an NVIDIA GPU: no driver"
    monkeypatch.setattr(gpu, "absence", lambda: "")
    assert "`flashlab train --head-dim 64`" in (trained.why_not(NORMAL) or "")
    with pytest.raises(MissingError, match="flashlab train --head-dim 64"):
        trained.describe(64)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_training_says_how_to_install_it() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install 'flashlab\[gpu\]'"):
        trained.train(trained.CONFIGS[64])
