"""`trained` inputs: activations of a language model trained on text that is available on every machine.

A byte-level GPT (RMSNorm, RoPE, causal attention, SwiGLU, tied embeddings) is trained on the .py files of Python's
standard library, in one configuration per head dim. Q, K and V of its layers on held-out files are realistic inputs:
after RoPE, with attention sinks, and with a few large scores per row.

`train` needs torch and a GPU and takes about a minute. It stores two files per head dim in the cache: the weights,
named by their digest, and `description.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import math
import os
import random
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flashlab.build.parallel import Follow, ignore
from flashlab.core.errors import CheckFailedError, MissingError, MissingPackageError, UnsupportedError
from flashlab.core.paths import cache_dir, writable_dir
from flashlab.core.problem import Problem
from flashlab.measure.cells import need
from flashlab.record import provenance
from flashlab.record.store import write_at_once
from flashlab.run import gpu

Tensor = Any
"""A torch tensor."""
Weights = dict[str, Tensor]
See = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Called with a layer's index, its Q, K and V, and the attention output, each (batch, heads, length, head_dim)."""

VOCABULARY = 256
ROPE_BASE = 10_000.0
MIN_TEXT_BYTES = 4 << 20
_HELD_OUT_EVERY = 10
"""One in this many files is held out."""
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders outside the standard library, or not installed on many systems."""
_TOKENS_AT_ONCE = 1 << 15
_FOLLOW_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a model and its training."""

    head_dim: int
    heads: int = 16
    layers: int
    hidden: int
    """Hidden width of the MLP."""
    steps: int
    batch: int = 16
    length: int = 2048
    """Sequence length in bytes."""
    learning_rate: float
    """Peak learning rate, after a warm-up and before cosine decay to a tenth."""
    weight_decay: float = 0.1
    seed: int = 0

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    def learning_rate_at(self, step: int) -> float:
        """Learning rate with warm-up over the first eighth, at most 100 steps, and cosine decay."""
        warm_up = max(1, min(100, self.steps // 8))
        decay = 0.55 + 0.45 * math.cos(math.pi * step / self.steps)
        return self.learning_rate * min(1.0, (step + 1) / warm_up) * decay


CONFIGS = {
    64: Config(head_dim=64, layers=8, hidden=2048, steps=600, learning_rate=3e-4),
    128: Config(head_dim=128, layers=5, hidden=2048, steps=500, learning_rate=2e-4),
}
"""By head dim. Learning rates are close to those of GPT-3 models of such widths (Brown et al. 2020, table 2.1): higher
ones lead to scores of hundreds of nats. The number of steps takes about a minute on an H200."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Training and held-out text."""

    training: bytes
    held_out: bytes
    files: int

    @property
    def sha256(self) -> str:
        """Digest of both parts."""
        return hashlib.sha256(self.training + b"\0\0" + self.held_out).hexdigest()


def read_text(root: Path | None = None, seed: int = 0) -> Text:
    """Read the .py files of the standard library without its tests, or those below `root`, shuffled with `seed`.

    Raises:
        MissingError: there are fewer than `MIN_TEXT_BYTES`.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    paths: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        paths += [path for name in files if (path := Path(folder, name)).suffix == ".py" and path.is_file()]
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    random.Random(seed).shuffle(paths)
    contents = [path.read_bytes() for path in paths]
    num_bytes = sum(map(len, contents))
    if num_bytes < MIN_TEXT_BYTES:
        raise MissingError(
            f"wanted at least {MIN_TEXT_BYTES >> 20} MiB of .py files of Python's standard library to train on, got "
            f"{num_bytes / 2**20:.1f} MiB in {len(paths)} files under {root}: this Python has it zipped, stripped or "
            "elsewhere. A Python from python.org, uv, conda or your distribution works."
        )
    held_out = contents[::_HELD_OUT_EVERY]
    del contents[::_HELD_OUT_EVERY]
    return Text(training=b"\0".join(contents), held_out=b"\0".join(held_out), files=len(paths))


# --- the model ---


def initial_weights(config: Config, device: str) -> Weights:
    """Draw normal weights, on the CPU so that they are the same on every machine; float32 on `device`."""
    torch = _torch()
    generator = torch.Generator().manual_seed(config.seed)
    std = 0.64 / math.sqrt(config.width)
    std_into_stream = std / math.sqrt(2 * config.layers)

    def normal(rows: int, columns: int, std: float = std) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(device)

    width, hidden = config.width, config.hidden
    weights = {"embedding": normal(VOCABULARY, width), "norm": torch.ones(width, device=device)}
    for layer in range(config.layers):
        weights |= {
            f"{layer}.attention_norm": torch.ones(width, device=device),
            f"{layer}.qkv": normal(3 * width, width),
            f"{layer}.attention_out": normal(width, width, std_into_stream),
            f"{layer}.mlp_norm": torch.ones(width, device=device),
            f"{layer}.gate_up": normal(2 * hidden, width),
            f"{layer}.down": normal(width, hidden, std_into_stream),
        }
    return weights


def rotations(head_dim: int, length: int, device: str) -> Tensor:
    """Rotations of RoPE as complex numbers of modulus 1, (length, head_dim / 2)."""
    torch = _torch()
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Apply RoPE to pairs of neighbours in the last dimension of x (..., length, head_dim)."""
    torch = _torch()
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def forward(weights: Weights, config: Config, tokens: Tensor, see: See | None = None) -> Tensor:
    """Compute the logits (batch, length, 256) of the byte after each of `tokens` (batch, length), int64.

    Uses bfloat16 autocast on a GPU, float32 on the CPU.
    """
    torch = _torch()
    functional = torch.nn.functional
    device = tokens.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        turns = rotations(config.head_dim, tokens.shape[1], device)
        x = functional.embedding(tokens, weights["embedding"]) * math.sqrt(config.width)
        for layer in range(config.layers):
            h = functional.rms_norm(x, (config.width,), weights[f"{layer}.attention_norm"])
            qkv = functional.linear(h, weights[f"{layer}.qkv"]).unflatten(-1, (3, config.heads, config.head_dim))
            qk, v = qkv.permute(2, 0, 3, 1, 4).split((2, 1))
            (q, k), v = rotate(qk, turns), v.squeeze(0)
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            if see:
                see(layer, q, k, v, out)
            x = x + functional.linear(out.transpose(1, 2).flatten(2), weights[f"{layer}.attention_out"])
            h = functional.rms_norm(x, (config.width,), weights[f"{layer}.mlp_norm"])
            gate, up = functional.linear(h, weights[f"{layer}.gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, weights[f"{layer}.down"])
        x = functional.rms_norm(x, (config.width,), weights["norm"])
        return functional.linear(x, weights["embedding"]).float()


def _loss(weights: Weights, config: Config, window: Tensor) -> Tensor:
    """Mean loss in nats per byte on windows (batch, length + 1)."""
    logits = forward(weights, config, window[:, :-1])
    return _torch().nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def _windows(text: Tensor, batch: int, length: int) -> Tensor:
    """Evenly spaced windows of a text: (batch, length), int64."""
    starts = [index * (len(text) - length) // max(1, batch - 1) for index in range(batch)]
    return _torch().stack([text[start : start + length] for start in starts]).long()


# --- training ---


def train(config: Config, *, text: Text | None = None, device: str = "cuda", follow: Follow = ignore) -> dict[str, Any]:
    """Train a model, store it in the cache in place of that of its head dim, and `describe` it.

    Initial weights, order of the text and windows are determined by the seed. Sums on a GPU have no fixed order, so
    trainings still differ, and have different digests.

    Raises:
        MissingPackageError, NoGpuError: training is not possible here.
        MissingError: there is too little text, see `read_text`.
        UnsupportedError: the GPU's memory is too small.
        CheckFailedError: the training diverged; nothing is stored.
        OutputError: the cache is not writable.
    """
    torch = _torch()
    if device != "cpu":
        gpu.require()
        if not torch.cuda.is_available():
            raise MissingPackageError(f"wanted a torch built for CUDA, got torch {torch.__version__}. {_INSTALL}.")
    folder = writable_dir(_folder(config.head_dim), "weights (the environment variable FLASHLAB_CACHE names another)")
    text = read_text(seed=config.seed) if text is None else text
    try:
        weights, loss, seconds = _fit(config, _bytes(text.training, device), device, follow)
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"wanted memory on the GPU to train the model of head dim {config.head_dim} at batch {config.batch}, got: "
            f"{error}. A GPU of 80 GB works."
        ) from error
    stored = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in weights.items()}
    stored["held_out"] = _bytes(text.held_out, "cpu")
    del weights
    on_device = _on(stored, device)
    with torch.no_grad():
        windows = _windows(on_device["held_out"], config.batch, config.length + 1)
        held_out_loss = float(_loss(on_device, config, windows).item())
    if not math.isfinite(held_out_loss):
        raise CheckFailedError(
            f"wanted a finite loss of the model of head dim {config.head_dim} after {config.steps} steps, got "
            f"{held_out_loss}: the training diverged, and nothing is stored"
        )
    layers = [score_statistics(q, k) for q, k, _ in _extract(on_device, config, config.batch, config.length)]
    description = {
        "head_dim": config.head_dim,
        "digest": _digest(stored),
        "loss": loss,
        "held_out_loss": held_out_loss,
        "steps": config.steps,
        "seconds": seconds,
        "config": asdict(config),
        "text": {
            "sha256": text.sha256,
            "files": text.files,
            "bytes": len(text.training),
            "held_out_bytes": len(text.held_out),
        },
        "gpu": "CPU" if device == "cpu" else torch.cuda.get_device_name(device),
        "commit": provenance.source().commit,
        "software": provenance.software(),
        "layers": layers,
    }
    _store(folder, stored, description)
    return description


def _fit(config: Config, text: Tensor, device: str, follow: Follow) -> tuple[Weights, float, float]:
    """Train; returns weights, mean loss over the last tenth of the steps, and seconds."""
    torch = _torch()
    weights = initial_weights(config, device)
    for weight in weights.values():
        weight.requires_grad_()
    parameters = list(weights.values())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim == 2], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(config.seed)
    starts = torch.randint(len(text) - config.length, (config.steps, config.batch, 1), generator=generator).to(device)
    reach = torch.arange(config.length + 1, device=device)
    losses = torch.zeros(config.steps, device=device)
    start_s = time.perf_counter()
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        loss = _loss(weights, config, text[starts[step] + reach].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()
        if step % _FOLLOW_EVERY == 0:
            follow(step, config.steps, f"head dim {config.head_dim}: loss {loss.item():.3f} nats/byte")
    final = losses[-max(1, config.steps // 10) :].mean().item()  # waits for the GPU
    return weights, final, time.perf_counter() - start_s


def score_statistics(q: Tensor, k: Tensor) -> dict[str, float]:
    """Statistics of causal scores, over all heads of q and k (batch, heads, length, head_dim).

    Returns:
        std_nats and largest_nats: standard deviation and maximum of all scores, in nats;
        first_key_weight: mean over rows of the first key's probability;
        largest_probability: mean over rows of the largest probability.
    """
    torch = _torch()
    length, head_dim = q.shape[2:]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    of_heads = []
    for queries, keys in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True):
        scores = (queries.float() @ keys.float().T * head_dim**-0.5).masked_fill_(hidden, -math.inf)
        probabilities, seen = scores.softmax(-1).double(), scores[~hidden].double()
        weights = (probabilities[:, 0].mean(), probabilities.amax(-1).mean())
        of_heads.append(torch.stack([seen.mean(), seen.square().mean(), *weights, seen.max()]))
    mean, square, first, top, _ = torch.stack(of_heads).mean(0).tolist()
    return {
        "std_nats": math.sqrt(max(0.0, square - mean * mean)),
        "largest_nats": max(head[-1].item() for head in of_heads),
        "first_key_weight": first,
        "largest_probability": top,
    }


# --- what a benchmark asks for ---


def why_not(problem: Problem) -> str | None:
    """Explain why a problem cannot have these inputs on this machine; None if it can."""
    config = CONFIGS.get(problem.head_dim)
    if config is None or (problem.q_heads, problem.kv_heads) != (config.heads, config.heads):
        have = ", ".join(f"{known.heads} heads of {head_dim}" for head_dim, known in CONFIGS.items())
        return f"the trained models have {have}, each head with its own keys and values; got {problem.label}"
    if problem.q_len != problem.kv_len:
        return f"the trained models have as many queries as keys; got {problem.label}"
    if importlib.util.find_spec("torch") is None:
        return f"the trained models need torch, which is not installed; {_INSTALL}"
    if reason := gpu.absence():
        return f"the trained models need an NVIDIA GPU: {reason}"
    try:
        held_out_bytes = describe(problem.head_dim)["text"]["held_out_bytes"]
    except MissingError:
        return (
            f"the model of head dim {problem.head_dim} is not trained on this machine yet; "
            f"`flashlab train --head-dim {problem.head_dim}` does it"
        )
    if held_out_bytes < problem.q_len + problem.batch - 1:
        return f"the held-out text has {held_out_bytes} bytes, too few for the windows of {problem.label}"
    return None


def describe(head_dim: int) -> dict[str, Any]:
    """Describe the weights in the cache, as JSON.

    Fields: digest (of the weights and the held-out text), loss (mean over the last tenth of the steps) and
    held_out_loss in nats per byte, steps, seconds, config, text, gpu, commit, software, and layers: `score_statistics`
    of each on the held-out text.

    Raises:
        MissingError: the cache has no weights.
    """
    folder = _folder(head_dim)
    with contextlib.suppress(OSError):
        description: dict[str, Any] = json.loads((folder / "description.json").read_text(encoding="utf-8"))
        if (folder / f"{description['digest']}.pt").is_file():
            return description
    raise MissingError(
        f"wanted weights of a model of head dim {head_dim} in {folder}, found none. "
        f"On a machine with an NVIDIA GPU `flashlab train --head-dim {head_dim}` makes them."
    )


def activations(problem: Problem, *, device: str = "cuda") -> list[tuple[Tensor, Tensor, Tensor]]:
    """Compute Q, K and V of every layer on held-out text, after RoPE.

    Returns:
        For each layer three contiguous tensors (batch, heads, length, head_dim) of the problem's dtype.

    Raises:
        UnsupportedError: see `why_not`, or a value exceeds the range of the dtype.
        MissingError: the weights are damaged.
    """
    if reason := why_not(problem):
        raise UnsupportedError(f"inputs trained: {reason}")
    torch = _torch()
    description = describe(problem.head_dim)
    stored = _load(_folder(problem.head_dim) / f"{description['digest']}.pt")
    layers = _extract(_on(stored, device), Config(**description["config"]), problem.batch, problem.q_len)
    dtype = getattr(torch, problem.dtype)
    for layer, tensors in enumerate(layers):
        for name, x in zip("QKV", tensors, strict=True):
            largest = x.abs().max().item()
            if not largest <= torch.finfo(dtype).max:
                raise UnsupportedError(
                    f"inputs trained: wanted {name} of layer {layer} within the range of {problem.dtype}, got "
                    f"{largest:.4g}"
                )
    return [(q.to(dtype), k.to(dtype), v.to(dtype)) for q, k, v in layers]


def _extract(stored: Weights, config: Config, batch: int, length: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Compute Q, K and V of every layer on windows of the held-out text."""
    torch = _torch()
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in range(config.layers)]

    def see(layer: int, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> None:
        parts[layer].append((q.contiguous(), k.contiguous(), v.contiguous()))

    with torch.no_grad():
        for windows in _windows(stored["held_out"], batch, length).split(max(1, _TOKENS_AT_ONCE // length)):
            forward(stored, config, windows, see)
    layers = []
    for several in parts:
        q, k, v = (torch.cat(tensors) for tensors in zip(*several, strict=True))
        several.clear()
        layers.append((q, k, v))
    return layers


# --- the cache ---


def _folder(head_dim: int) -> Path:
    return cache_dir() / "trained" / str(head_dim)


def _store(folder: Path, stored: Weights, description: dict[str, Any]) -> None:
    """Store the weights, then their description, each atomically; then delete older weights."""
    weights, content = folder / f"{description['digest']}.pt", io.BytesIO()
    _torch().save(stored, content)
    write_at_once(weights, content.getvalue())
    write_at_once(folder / "description.json", json.dumps(description, indent=2, allow_nan=False) + "\n")
    for other in folder.glob("*.pt"):
        if other != weights:
            other.unlink(missing_ok=True)


def _load(path: Path) -> Weights:
    """Load weights; raises `MissingError` if they do not match the digest in the file name."""
    stored: Weights = {}
    try:
        stored = _torch().load(path, map_location="cpu", weights_only=True)
        reason = f"digest {_digest(stored)}"
    except Exception as error:  # torch has no error of its own for a file that is cut off
        reason = f"{type(error).__name__}: {error}"
    if reason != f"digest {path.stem}":
        raise MissingError(f"wanted valid weights in {path}, got {reason}. `flashlab train` replaces them.")
    return stored


def _digest(stored: Weights) -> str:
    torch = _torch()
    total = hashlib.sha256()
    for name, tensor in sorted(stored.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


def _on(stored: Weights, device: str) -> Weights:
    """Move weights, as float32, and text to a device."""
    torch = _torch()
    return {
        name: tensor.to(device, tensor.dtype if name == "held_out" else torch.float32)
        for name, tensor in stored.items()
    }


def _bytes(text: bytes, device: str) -> Tensor:
    torch = _torch()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


_INSTALL = "`pip install 'flashlab[gpu]'` installs it"
_torch = partial(need, "torch")
