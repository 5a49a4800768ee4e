"""A whole model: LLaMA-7B's geometry with random weights in transformers, by each attention.

    flashlab llama           prefill of one prompt, and decoding after it, tokens per second

Weights do not change how long a GEMM or an attention takes, so that random ones are as good as trained ones; none are
downloaded. Each attention runs the same model on the same tokens, one after the other in an order drawn anew, and a
time is the host's clock from a synchronised GPU to a synchronised GPU: what a user waits for. `nothing` returns Q in
place of attention; what a model takes longer than with it is attention's share. Decoding is timed twice: as
transformers launches it, kernel by kernel, which takes the host longer than the GPU, and with one step replayed as a
CUDA graph, as serving engines do.
"""

from __future__ import annotations

import copy
import importlib
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from flashlab.core.errors import ParameterError, refuse_unknown
from flashlab.core.paths import DATA
from flashlab.core.problem import Problem
from flashlab.kernels import peers
from flashlab.measure.cells import GpuWorker, need, record_rows
from flashlab.measure.harness import Message, serve
from flashlab.measure.options import Options
from flashlab.query import select
from flashlab.query.statistics import interval, ratio_of_medians
from flashlab.record import store
from flashlab.record.schema import ModelRun
from flashlab.show.tables import Column, code, number, table

OPTIONS = Options(worker=(sys.executable, "-m", "flashlab.experiments.llama"))
GEOMETRY: Mapping[str, int] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
"""LLaMA-7B (Touvron et al. 2023, table 2), as transformers' LlamaConfig names it."""
DTYPE = "bfloat16"
PROMPT = 2048
NEW = 32
"""Tokens decoded after the prompt."""
BATCHES = (1, 8)
NOTHING = "nothing"
ATTENTIONS = ("flashlab", "sdpa", "fa3", NOTHING)
GRAPH = "decode_graph"
PHASES: Mapping[str, str] = {"prefill": "prefill", "decode": "decode, launch by launch", GRAPH: "decode, a CUDA graph"}
"""In the order of the page, and as it names them."""
REPEATS = 7
USD_PER_GPU_HOUR = 4.0
"""An assumed price, where a record has none of its own."""
TIMEOUT_S = 240.0


def measure(
    attentions: Sequence[str] = ATTENTIONS,
    *,
    batches: Sequence[int] = BATCHES,
    prompt: int = PROMPT,
    new: int = NEW,
    repeats: int = REPEATS,
    options: Options = OPTIONS,
) -> tuple[Path, tuple[str, ...]]:
    """Time prefill and decoding with each attention, and append a `schema.ModelRun` each to data/<gpu>/models/.

    Args:
        attentions: names among `ATTENTIONS`, or libraries of `flashlab.kernels.peers`; those are for prefill alone.
        batches: sequences at once; the first is also what is prefilled.
        prompt, new: tokens before the first time, and tokens decoded after them.
        repeats: of each.

    Returns:
        The file, and what has no time, with the reason.

    Raises:
        ParameterError: no such attention, or none at all.
        NoGpuError, MissingPackageError, LaunchError, OutputError: as they say.
    """
    known = dict.fromkeys((*ATTENTIONS, *peers.PEERS))
    refuse_unknown("attention", known, *attentions)
    if not attentions:
        raise ParameterError(f"attention: wanted one of {', '.join(known)}, got none")
    job: Message = {"attentions": list(attentions), "new": new, "batches": list(batches), "prompt": prompt}
    job |= {"repeats": repeats, "geometry": dict(GEOMETRY)}
    return record_rows(ModelRun, job, options, step_s=TIMEOUT_S, total_s=TIMEOUT_S)


# --- The worker -------------------------------------------------------------------------------------------------------


class _Worker(GpuWorker):
    """Holds the model, and runs it with one attention after the other."""

    def work(self) -> None:
        """All of the job."""
        self.hold()
        self.time_all(f"cuda:{self.device}", lambda: self.torch.cuda.synchronize(self.device), self.capture)

    def capture(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """A decoding step as a CUDA graph: what replays it, and the tensor that it leaves its logits in."""
        torch = self.torch
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # compiles, and sets up, what may not be captured
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        return graph.replay, logits

    def time_all(
        self,
        device: str,
        wait: Callable[[], None],
        capture: Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]],
    ) -> None:
        """Each phase by each attention; `wait` returns when the device has done what was asked of it."""
        torch, job = self.torch, self.job
        transformers = need("transformers")
        self._random = random.Random(job["seed"])
        importlib.import_module("flashlab.torch").register()
        names = {name: _known(name) for name in job["attentions"]}
        torch.manual_seed(job["seed"])
        self._say("make the model")
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, DTYPE))
        try:
            with torch.device(device):
                self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**job["geometry"])).eval()
        finally:
            torch.set_default_dtype(before)
        self._wait, self._capture = wait, capture
        geometry = self.model.config
        self._said = {
            "dtype": DTYPE,
            "prompt_tokens": job["prompt"],
            "layers": geometry.num_hidden_layers,
            "heads": geometry.num_attention_heads,
            "kv_heads": geometry.num_key_value_heads,
            "head_dim": geometry.hidden_size // geometry.num_attention_heads,
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "transformers": transformers.__version__,
        }
        with torch.no_grad():
            for index, batch in enumerate(job["batches"]):
                shape = (batch, job["prompt"])
                tokens = torch.randint(1, geometry.vocab_size, shape, device=device)
                if index == 0:
                    self._prefill(names, tokens)
                self._decode(
                    {name: of for name, of in names.items() if name not in peers.PEERS or name == "sdpa"}, tokens
                )

    def _say(self, what: str) -> None:
        self.send({"type": "step", "what": what})

    def _interleaved(self, names: Mapping[str, str], run: Callable[[str], Any], phase: str, fields: Message) -> None:
        """Run with every attention so many times; those that cannot are said to be missing, and the others go on.

        `run` takes the attention's name, and returns logits.
        """
        times: dict[str, list[float]] = {}
        logits: dict[str, Any] = {}
        able = []
        for name, registered in names.items():  # the first run compiles, and shows what comes out
            self._say(f"{phase}, {name}")
            with self.attempt(f"{phase} by {name}"):
                self.model.set_attn_implementation(registered)
                logits[name] = run(name)
                self._wait()
                able.append(name)
        for _ in range(self.job["repeats"]):
            self._random.shuffle(able)
            for name in able:
                self.model.set_attn_implementation(names[name])
                self._wait()
                began = time.perf_counter()
                run(name)
                self._wait()
                times.setdefault(name, []).append(time.perf_counter() - began)
        for name in sorted(able):
            difference = None
            if "sdpa" in logits and name not in (NOTHING, "sdpa"):
                right = logits["sdpa"].float()
                difference = float((logits[name].float() - right).abs().max() / right.std())
            row = {**self._said, **fields, "attention": name, "phase": phase, "time_s": times[name]}
            self.send({"type": "row", "row": {**row, "logit_error": difference}})

    def _prefill(self, names: Mapping[str, str], tokens: Any) -> None:
        def run(_: str) -> Any:
            return self.model(tokens, use_cache=False, logits_to_keep=1).logits

        self._interleaved(names, run, "prefill", {"batch": len(tokens), "new_tokens": 0})

    def _decode(self, names: Mapping[str, str], tokens: Any) -> None:
        """Decoding after one prompt, token by token; then its first step again and again.

        Each step gets the same token, not the likeliest, so that every attention sees the same.
        """
        self.model.set_attn_implementation("sdpa")
        prompt = self.model(tokens[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        token, new = tokens[:, -1:], self.job["new"]
        replays: dict[str, tuple[Callable[[], None], Any]] = {}

        def decode(steps: int) -> Any:
            cache = copy.copy(prompt)  # a layer gets longer by having other tensors
            cache.layers = [copy.copy(layer) for layer in prompt.layers]
            for _ in range(steps):
                logits = self.model(token, past_key_values=cache, use_cache=True).logits
            return logits[:, -1:]

        def replay(name: str) -> Any:
            if name not in replays:
                replays[name] = self._capture(lambda: decode(1))
            again, logits = replays[name]
            for _ in range(new):
                again()
            return logits

        fields = {"batch": len(tokens), "new_tokens": new}
        self._interleaved(names, lambda _: decode(new), "decode", fields)
        self._interleaved(names, replay, GRAPH, fields)


def _known(name: str) -> str:
    """The name by which transformers knows an attention, made known to it."""
    if name in ("flashlab", "sdpa"):
        return name
    masking, modeling = (importlib.import_module(f"transformers.{part}_utils") for part in ("masking", "modeling"))
    registered = f"library_{name}"
    modeling.AttentionInterface.register(registered, _nothing if name == NOTHING else _library(name))
    masking.AttentionMaskInterface.register(registered, lambda **_: None)
    return registered


def _nothing(module: Any, query: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    return query.transpose(1, 2).contiguous(), None


def _library(name: str) -> Callable[..., tuple[Any, None]]:
    """A library of `peers` as transformers calls an attention: causal, scaled by 1/sqrt(head_dim)."""
    calls: dict[Problem, Any] = {}
    peer = peers.get(name)

    def attention(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        batch, heads, q_len, head_dim = query.shape
        problem = Problem(
            **{"batch": batch, "q_heads": heads, "kv_heads": key.shape[1], "q_len": q_len, "kv_len": key.shape[2]},
            **{"head_dim": head_dim, "dtype": DTYPE, "mask": "causal"},
        )
        if problem not in calls:
            calls[problem] = peer.build(problem)
        out = calls[problem](*peers.in_layout(peer.layout, query, key, value))
        return peers.bhsd_view(peer.layout, out).transpose(1, 2).contiguous(), None

    return attention


# --- The page ---------------------------------------------------------------------------------------------------------


def shown(records: Sequence[ModelRun]) -> list[dict[str, Any]]:
    """The newest run's rows, prefill first, then by batch, the fastest first; `nothing` only as what is taken off.

    Each has its `record`, `tokens_per_s`, `attention_share` (of the time, what the model takes longer than with
    `nothing`; None where that is not on record, or the 95 % interval includes 0), `usd_per_million`, and whether that
    price is `assumed`.
    """
    newest = max((record.run for record in records), default="")
    rows = [record for record in records if record.run == newest]
    without = {(record.phase, record.batch): record.time_s for record in rows if record.attention == NOTHING}
    figures: list[dict[str, Any]] = []
    for record in (record for record in rows if record.attention != NOTHING):
        seconds, bare = median(record.time_s), without.get((record.phase, record.batch))
        rate = record.batch * (record.new_tokens or record.prompt_tokens) / seconds
        price = record.start.usd_per_gpu_hour if record.start else None
        rest = interval(ratio_of_medians, bare, record.time_s, paired=True) if bare else None
        share = 1 - rest.value if rest and not rest.low <= 1 <= rest.high else None
        row = {"record": record, "tokens_per_s": rate, "attention_share": share}
        row |= {"usd_per_million": (price or USD_PER_GPU_HOUR) / 3600 / rate * 1e6, "assumed": price is None}
        figures.append(row)
    order = [*PHASES]
    return sorted(
        figures, key=lambda row: (order.index(row["record"].phase), row["record"].batch, -row["tokens_per_s"])
    )


COLUMNS = (
    Column("phase", lambda row: PHASES[row["record"].phase]),
    Column("batch", "record.batch"),
    Column("attention", "record.attention", code, left=True),
    Column("ms", lambda row: 1e3 * median(row["record"].time_s) / (row["record"].new_tokens or 1)),
    Column("range, ms", lambda row: _range(row["record"])),
    Column("tokens/s", "tokens_per_s"),
    Column("attention, % of the time", lambda row: row["attention_share"] and 100 * row["attention_share"]),
    Column("US$ per million tokens", "usd_per_million"),
    Column("largest difference of logits from SDPA's", "record.logit_error"),
)


def _range(record: ModelRun) -> str:
    steps = record.new_tokens or 1
    return "–".join(number(1e3 * seconds / steps) for seconds in (min(record.time_s), max(record.time_s)))


def page(out: Any, results: Any, data: Path = DATA) -> None:
    """Write the table of each GPU's newest run, or a note that there is none."""
    by_gpu = (shown(store.records(gpu, ModelRun, data)) for gpu in store.gpus(data, "models"))
    tables = [_table(rows) for rows in by_gpu if rows]
    none = "*No model run is on record yet: `flashlab llama` on a machine with a GPU makes one.*"
    out.snippet("llama.md", "\n\n".join(tables) or none)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    record = rows[0]["record"]
    price = f"at {number(USD_PER_GPU_HOUR)} US$/GPU-hour (assumed)" if rows[0]["assumed"] else "at the recorded price"
    facts = (
        record.gpu.name,
        f"{record.layers} layers, {record.heads} heads of {record.head_dim}, "
        f"{number(record.parameters / 1e9)} billion parameters",
        f"{record.dtype}, prompt of {record.prompt_tokens} tokens; a decoded token's time is that of one step",
        f"median of {len(record.time_s)}, interleaved, one start",
        f"transformers {record.transformers}, torch {record.software.get('torch', 'unknown')}",
        f"cost {price}",
    )
    return f"{table(COLUMNS, rows)}\n\n<small>{select.sourced(*facts, runs=[record.run])}</small>"


PAGES = {"llama": page}


if __name__ == "__main__":
    sys.exit(serve(lambda job, send: _Worker(job, send).work()))
