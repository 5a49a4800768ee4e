"""Attention over a paged KV cache, as in serving engines: `paged_attention` and `append_kv`.

A cache consists of two page pools, K and V, each (num_pages, kv_heads, page_size, head_dim); a page table, (batch,
pages per sequence), of page numbers in the order of the keys; and the lengths, (batch,), in keys. Table and lengths are
int32 and stay on the device: a growing sequence reuses the launch plan, and a CUDA graph can be replayed.

As the runner of the stages that read such a cache (`attention._runner`), this module also runs them on ordinary
problems, by copying keys and values into pages in random order, so that they are checked and measured like all others.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flashlab.build import compiler
from flashlab.core.errors import (
    DeviceError,
    DTypeError,
    InputError,
    LayoutError,
    ParameterError,
    ShapeError,
    UnknownStageError,
    UnsupportedError,
)
from flashlab.core.problem import Problem
from flashlab.kernels import registry
from flashlab.kernels.registry import Stage
from flashlab.kernels.text import fields
from flashlab.run import arrays, choice, emulator, gpu, recipes
from flashlab.run.arguments import AttentionParams, params_for, seen_keys
from flashlab.run.arrays import DeviceArray, TorchCopies, on_device, on_host, torch_stream
from flashlab.run.attention import EmulatedCall, run_on_cpu
from flashlab.run.plan import (
    Plan,
    check_dtype,
    check_flags,
    check_layout,
    check_out,
    check_writable,
    outputs_of,
    planned,
    problem_of,
    refuse_overlap,
    tunables,
    with_features,
)

STAGE = "d15_short_starts"
_MANY = 64
"""With more work tiles than this, `STAGE`."""
_FEWER = "d21_parallel_lookup"
"""The stage for at most `_MANY` tiles: with few, some CTAs only combine partial results."""
_SHORT, _FEW, _SHORT_KEYS = "d1_paged_kv", 16, 4096
"""The stage for at most `_FEW` tiles with few keys each, where one cluster per tile has the least overhead."""
_TILE_ROWS = 16
"""Query rows per tile of these stages: MMA_M of kernels/common/mma.cuh."""
_VIEWS = ("Q", "K", "V", "page_table", "lengths", "O")
"""Arrays of a call, by the structure fields that hold their addresses, in the order of `paged_attention`."""
_FAULTS = 2
"""Fault counters of a launch: invalid page numbers, and lengths below 0 or beyond the page table."""
_GARBAGE = 0x7FFF
"""Bits of a NaN in both data types, which fill the unused rows of a page."""


class PagedCache(ctypes.Structure):
    """kernels/common/paged.cuh, `PagedCache`."""

    _fields_ = fields("common/paged.cuh", "PagedCache")


# --- the public calls -------------------------------------------------------------------------------------------------


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    lengths: Any,
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] | int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    out: Any | None = None,
    return_lse: bool = False,
    stream: Any | None = None,
    stage: str | None = None,
    params: Mapping[str, int] | None = None,
    check: bool = False,
) -> Any:
    """Compute attention of the last q_len tokens of each sequence over its keys in a paged KV cache.

    On a GPU (sm_90 or newer), the kernel is enqueued on the caller's stream, without copies, and without
    synchronisation unless `check`. In host memory, the same kernel is emulated on the CPU.

    Args:
        q: (batch, q_heads, q_len, head_dim), float16 or bfloat16, as in `flashlab.attention`. q_len times the number
            of query heads per K/V head is at most 64.
        k_cache: (num_pages, kv_heads, page_size, head_dim), any strides, the last dimension contiguous; page_size is a
            power of two of at most 256. Pass a cache of (num_pages, page_size, kv_heads, head_dim) as
            `cache.transpose(1, 2)`.
        v_cache: like `k_cache`.
        page_table: int32 (batch, pages per sequence), on the device of q, the last dimension contiguous: page numbers
            in the order of the keys. Entries beyond the length of a sequence are ignored.
        lengths: int32 (batch,), on the device of q, contiguous: number of keys of each sequence, including those of
            its queries. The output of a sequence of length 0 is 0.
        causal: whether query i sees only the first length - q_len + i + 1 keys of its sequence.
        window: sliding window, as in `flashlab.attention`, with the diagonal at the end of each sequence. Pages before
            the windows of all queries are not read, and their numbers are ignored.
        softcap: soft cap on scores, softcap · tanh(score / softcap); 0 disables it.
        scale: finite factor on the scores; default: 1/sqrt(head_dim).
        out: output array, like `q`; default: a new contiguous array of the caller's library.
        return_lse: whether to also return the log-sum-exp of the scores, float32 (batch, q_heads, q_len) (natural log,
            -inf if a query sees no key).
        stream: as in `flashlab.attention`.
        stage: id of a stage that reads a paged cache. Default: d15_short_starts for more than 64 work tiles (16 query
            rows of one sequence and K/V head); d1_paged_kv for at most 16 with up to 4,096 keys per sequence in the
            page table, of which only those in a window count; else d21_parallel_lookup.
        params: tunables of the stage, by name; default: as in `flashlab.attention`, for sequences of the maximum
            length that the page table holds.
        check: whether to synchronise and refuse invalid page numbers and lengths beyond the page table. Without it,
            keys in invalid pages are zeros and lengths are clipped; nothing outside the cache is read. In host memory,
            this check is always made.

    Returns:
        The output, like `q`, or (output, lse).

    Raises:
        InputError: invalid arguments (ShapeError, DTypeError, LayoutError, DeviceError, UnknownStageError,
            ParameterError).
        UnsupportedError: the stage does not support this call here.
        NoGpuError, MissingPackageError, CompileError, LaunchError, EmulationError: see there.
    """
    asked = (stage, causal, None if window is None else repr(window), softcap, scale, return_lse, check)
    key, addresses, again = recipes.lookup((q, k_cache, v_cache, page_table, lengths), out, asked, params)
    if again is not None:
        return again(q, addresses, out, return_lse, stream)
    check_flags(check=check)
    arrays.refuse_gradients(q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    here = arrays.place_of(q, stream)
    inputs = {name: here.view(of, name) for name, of in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))}
    table, keys = here.view(page_table, "page_table"), here.view(lengths, "lengths")
    problem = with_features(_problem(inputs, table, keys, causal), window, softcap)
    if out is not None:
        check_out(here.view(out, "out"), inputs)
    made = outputs_of(here, inputs, out, return_lse=return_lse)
    views = dict(zip(_VIEWS, (*inputs.values(), table, keys, made.out_view), strict=True))
    rows = {name: views[name] for name in "QKVO"}
    call = _Call(planned(problem, _stage(stage, problem), scale, rows, tensor_maps=False), views)
    overrides = {"PAGE_SIZE": inputs["k_cache"].shape[2], **tunables(params)}
    if overrides["PAGE_SIZE"] != inputs["k_cache"].shape[2]:
        raise ParameterError(
            f"params: wanted the PAGE_SIZE of k_cache, {inputs['k_cache'].shape[2]}, or none, got "
            f"{overrides['PAGE_SIZE']!r}"
        )
    if here.stream is None:
        _check_on_cpu(call)
        run_on_cpu(call.plan, views, made.lse_view, overrides, call.on_cpu)
    else:
        options = {"aligned": call.plan.aligned, "overrides": overrides}
        recipe = _run_on_gpu(call, options, made.lse_view, here.stream, check=check)
        if key is not None and not check:
            recipes.by_layout.put(key, recipe)
    return (made.out, made.lse) if return_lse else made.out


def append_kv(
    k_cache: Any, v_cache: Any, k: Any, v: Any, page_table: Any, lengths: Any, *, check: bool = False
) -> None:
    """Append the keys and values of new tokens to a paged KV cache, in place.

    Runs on the current stream of the arrays' library. Does not change `lengths`: add the number of new tokens before
    calling `paged_attention`.

    Args:
        k_cache: (num_pages, kv_heads, page_size, head_dim), a torch tensor, or a CuPy or NumPy array.
        v_cache: like `k_cache`, in other memory.
        k: (batch, kv_heads, new tokens, head_dim), of the dtype and on the device of the cache, outside
            the range of addresses of either cache.
        v: like `k`.
        page_table: int32 (batch, pages per sequence), including the pages of the new tokens.
        lengths: int32 (batch,): number of keys of each sequence before the new tokens.
        check: whether to synchronise and refuse invalid page numbers, lengths that leave no room in the page table for
            the new tokens, and tokens with the same place. Without it, these reach the library's indexing, where
            negative page numbers count from the end, too large ones fail, and one of several tokens stays. In host
            memory, this check is always made.

    Raises:
        InputError: invalid arguments (ShapeError, DTypeError, LayoutError, DeviceError, ParameterError), or, with
            `check`, an invalid page number or length, or two tokens in one place. Nothing is written.
    """
    check_flags(check=check)
    given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "page_table": page_table, "lengths": lengths}
    arrays.refuse_gradients(**given)
    library = {"torch": "torch", "cupy": "cupy"}.get(arrays.library_of(k_cache), "numpy")
    module = importlib.import_module(library)
    if not all(isinstance(x, module.Tensor if library == "torch" else module.ndarray) for x in given.values()):
        got = ", ".join(f"{type(x).__name__} as {name}" for name, x in given.items())
        raise DeviceError(f"wanted torch tensors, or CuPy or NumPy arrays, all of one library, got {got}")
    here = arrays.place_of(k_cache, None, None, "k_cache")
    views = {name: here.view(x, name) for name, x in given.items()}
    _check_appended(views)
    batch, _, count, _ = k.shape
    num_pages, _, page_size, _ = k_cache.shape
    placement = {"device": k.device} if library == "torch" else {}
    room = page_table.shape[1] * page_size - count
    check = check or here.stream is None
    if check and (off := _first(lengths, (lengths < 0) | (lengths > room))):
        raise InputError(
            f"lengths: wanted 0 to {room} keys, as the page table has room for before {count} new tokens, got {off}"
        )
    at = lengths[:, None] + module.arange(count, **placement)[None, :]
    pages = page_table[module.arange(batch, **placement)[:, None], at // page_size]
    if check and (off := _first(pages, (pages < 0) | (pages >= num_pages))):
        raise InputError(f"page_table: wanted page numbers of 0 to {num_pages - 1}, got {off}")
    if check and (slots := len(module.unique(pages * page_size + at % page_size))) < batch * count:
        raise InputError(
            f"page_table: wanted a place of its own for each of {batch * count} new tokens, got {slots} places. A page "
            "that sequences share must be copied before one of them grows."
        )
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[pages, :, at % page_size] = new.swapaxes(1, 2)


def _check_appended(views: Mapping[str, DeviceArray]) -> None:
    """Raise `InputError` if the arrays of `append_kv` are invalid, apart from their values."""
    k_cache, v_cache, k, v, table, lengths = views.values()
    _check_cache(k_cache, v_cache)
    if k_cache.pointer == v_cache.pointer:
        raise LayoutError("v_cache: wanted memory apart from k_cache, got the same; a separate tensor works")
    _, kv_heads, _, head_dim = k_cache.shape
    if k.shape != v.shape or len(k.shape) != 4 or k.shape[1::2] != (kv_heads, head_dim):
        raise ShapeError(
            f"k, v: wanted (batch, {kv_heads}, new tokens, {head_dim}) as the cache has them, got {k.shape} and "
            f"{v.shape}"
        )
    _check_pages(table, lengths, k, "k")
    room = table.shape[1] * k_cache.shape[2]
    if k.shape[2] > room:
        raise ShapeError(f"k, v: wanted at most {room} new tokens, as the page table has room for, got {k.shape[2]}")
    for name, view in views.items():
        if name in ("k_cache", "v_cache"):
            check_writable(name, view)
            refuse_overlap(name, view, {"k": k, "v": v, "page_table": table, "lengths": lengths})
        if name in ("v_cache", "k", "v") and view.dtype != k_cache.dtype:
            raise DTypeError(f"{name}: wanted the type of k_cache, {k_cache.dtype}, got {view.dtype}")
        if view.device != k_cache.device:
            raise DeviceError(f"{name}: wanted the device of k_cache, {k_cache.place}, got {view.place}")


def _check_cache(k: DeviceArray, v: DeviceArray) -> None:
    """Raise `ShapeError` if the shapes of the pools are invalid."""
    if k.shape != v.shape or len(k.shape) != 4 or 0 in k.shape:
        raise ShapeError(
            "k_cache, v_cache: wanted (num_pages, kv_heads, page_size, head_dim) of both, none of them 0, got shapes "
            f"{k.shape} and {v.shape}"
        )


def _check_pages(table: DeviceArray, lengths: DeviceArray, of: DeviceArray, name: str) -> None:
    """Raise `DTypeError` or `ShapeError` if table or lengths are invalid, apart from their values.

    They must match the batch of the array `of`, which errors call `name`.
    """
    for what, array, wanted in (("page_table", table, "(batch, pages a sequence)"), ("lengths", lengths, "(batch,)")):
        check_dtype(what, array, "int32")
        dims = 2 if array is table else 1
        if len(array.shape) != dims or array.shape[:1] != of.shape[:1] or 0 in array.shape[1:]:
            raise ShapeError(f"{what}: wanted {wanted} for {name} of shape {of.shape}, got shape {array.shape}")


def _first(array: Any, off: Any) -> str:
    """Describe the first value of `array` selected by the mask `off`, and its sequence; empty if none is."""
    if not off.any():
        return ""
    flat = off.reshape(-1).tolist()
    place = flat.index(True)
    return f"{int(array.reshape(-1)[place])} of sequence {place * len(off) // len(flat)}"


def taken(problem: Problem) -> str:
    """The id of the stage that `paged_attention` selects by default."""
    rows = problem.q_heads // problem.kv_heads * problem.q_len
    tiles = problem.batch * problem.kv_heads * -(-rows // _TILE_ROWS)
    if tiles > _MANY:
        return STAGE
    return _SHORT if tiles <= _FEW and seen_keys(problem) <= _SHORT_KEYS else _FEWER


def _stage(name: str | None, problem: Problem) -> Stage:
    stage = registry.get(taken(problem) if name is None else name)
    if stage.runner != __name__:
        able = [candidate.id for candidate in registry.DECODE.values() if candidate.runner == __name__]
        raise UnknownStageError(f"stage: wanted one that reads a paged cache, {' or '.join(able)}, got {name!r}")
    rows = problem.q_heads // problem.kv_heads * problem.q_len
    if stage.max_rows is not None and rows > stage.max_rows:
        raise UnsupportedError(
            f"q: wanted at most {stage.max_rows} query rows per K/V head (q_len times query heads per K/V head), got "
            f"{rows}. Calls with fewer queries work, and `flashlab.attention` on contiguous keys."
        )
    return stage


def _as_timed(problem: Problem) -> Problem:
    """The problem as recorded in tables: non-causal if there is one query row, which sees all keys anyway."""
    return replace(problem, mask="full") if problem.q_len == 1 else problem


def _problem(inputs: Mapping[str, DeviceArray], table: DeviceArray, lengths: DeviceArray, causal: bool) -> Problem:
    """The problem, with the maximum sequence length that the page table holds."""
    q, k, v = inputs.values()
    if len(q.shape) != 4:
        raise ShapeError(
            f"q: wanted (batch, q_heads, q_len, head_dim), got shape {q.shape}. `q[:, :, None]` converts one "
            "row per sequence, (batch, q_heads, head_dim)"
        )
    _check_pages(table, lengths, q, "q")
    _check_cache(k, v)
    _, kv_heads, page_size, head_dim = k.shape
    sizes = registry.get(STAGE).params["PAGE_SIZE"].choices
    if page_size not in sizes:
        raise ShapeError(f"k_cache: wanted pages of {', '.join(map(str, sizes))} keys, got {page_size}")
    as_sequences = (q.shape[0], kv_heads, table.shape[1] * page_size, head_dim)
    sequences = {name: replace(array, shape=as_sequences) for name, array in inputs.items() if name != "q"}
    problem = problem_of({"q": q, **sequences}, causal)
    for name, array in {**inputs, "page_table": table, "lengths": lengths}.items():
        check_layout(name, array, q)
    return problem


# --- a call -----------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A validated call."""

    plan: Plan
    views: Mapping[str, DeviceArray]
    """By the names of `_VIEWS`; K and V are the pools."""

    @property
    def structures(self) -> tuple[AttentionParams, PagedCache]:
        """The kernel arguments, without the pointers that `params_for` does not set."""
        table, pool = self.views["page_table"], self.views["K"]
        cache = PagedCache(table_stride=table.strides[0], num_pages=pool.shape[0])
        return params_for(self.plan.problem, self.plan.scale, self.views), cache

    def on_cpu(self, run: EmulatedCall) -> list[emulator.Structure]:
        """The kernel arguments on a CPU, for `EmulatedCall`."""
        return [emulator.Structure(value=structure, pointers=run.pointers) for structure in self.structures]

    def refuse(self, pages: str, lengths: str) -> None:
        """Raise `InputError` if `pages` or `lengths` describe invalid values."""
        room, numbers = self.plan.problem.kv_len, f"page numbers of 0 to {self.views['K'].shape[0] - 1}"
        off = [f"page_table: wanted {numbers}, got {pages}"] if pages else []
        off += [f"lengths: wanted 0 to {room} keys, as the page table has room for, got {lengths}"] if lengths else []
        if off:
            raise InputError("; ".join(off))


def _check_on_cpu(call: _Call) -> None:
    """Raise `InputError` for the faults that the kernel counts; in host memory the values can be inspected."""
    table, lengths, pool = call.views["page_table"].owner, call.views["lengths"].owner, call.views["K"]
    kept, (left, _) = lengths.clip(0)[:, None], call.plan.problem.reach
    first_keys = pool.shape[2] * np.arange(table.shape[1])
    read = (first_keys < kept) & (first_keys + pool.shape[2] > kept - call.plan.problem.q_len - left)
    none = _first(table, read & ((table < 0) | (table >= pool.shape[0])))
    call.refuse(none, _first(lengths, (lengths < 0) | (lengths > call.plan.problem.kv_len)))


def _run_on_gpu(
    call: _Call, options: Mapping[str, Any], lse: DeviceArray | None, stream: int, *, check: bool
) -> recipes.Recipe:
    gpu.require()
    recipe, device = _recipe(call, options), call.plan.device
    faults = gpu.Zeroed(device, _FAULTS * recipes.WORD_BYTES, stream) if check else None
    addresses = [*(view.pointer for view in call.views.values()), lse.pointer if lse else 0]
    with gpu.context(device):
        held, work = recipes.streams_work(call.views["Q"].owner, device, stream, recipe.words)
        recipes.Slot(recipe, [*addresses, work, faults.pointer if faults else 0], stream).launch()
        del held  # not before: another thread may have given it up
    if faults:
        call.refuse(*("others" if count else "" for count in memoryview(faults.read()).cast("I")))
    return recipe


def job_of(stage: Stage, problem: Problem, arch: str, options: Mapping[str, Any]) -> compiler.Job:
    """The compile job of a call. Spills are allowed, because the page size is given by the cache."""
    return compiler.Job.of(stage, problem, arch=arch, may_spill=True, **options)


def _recipe(call: _Call, options: Mapping[str, Any]) -> recipes.Recipe:
    """The recipe of the call and of others with the same layout.

    Raises:
        FlashlabError: UnsupportedError if the stage does not support this call here; as compiling and loading raise.
    """
    stage, problem, device = call.plan.stage, call.plan.problem, call.plan.device
    arch, slug = gpu.info(device).arch, gpu.info(device).slug
    stage.require(problem, arch)
    tables = choice.stamps()  # before they are read
    tuned = choice.parameters(stage, slug, _as_timed(problem), arch=arch, overrides=options["overrides"])
    code = recipes.loaded(job_of(stage, problem, arch, {**options, "overrides": tuned}), device)
    return recipes.Recipe(
        plan=call.plan,
        views=call.views,
        code=code,
        structures=call.structures,
        counts="faults",
        tables=tables,
    )


# --- any problem, in pages --------------------------------------------------------------------------------------------


def _table(problem: Problem, page_size: int) -> Any:
    """Page table in a fixed random order, NumPy int32 (batch, pages per sequence)."""
    width = -(-problem.kv_len // page_size)
    order = np.random.default_rng(0).permutation(problem.batch * width)
    return order.astype("int32").reshape(problem.batch, width)


def _in_pages(bits: Any, table: Any, page_size: int, full: Callable[..., Any]) -> Any:
    """Copy (batch, heads, length, head_dim) into a page pool, (pages, heads, page_size, head_dim).

    `bits` are 16-bit integers, an array of NumPy or torch like `table`; `full` creates a filled array of that library.
    """
    batch, heads, length, head_dim = bits.shape
    width = table.shape[1]
    padded = full((batch, heads, width * page_size, head_dim), _GARBAGE)
    padded[:, :, :length] = bits
    pages = padded.reshape(batch, heads, width, page_size, head_dim).swapaxes(1, 2)
    pool = full((batch * width, heads, page_size, head_dim), _GARBAGE)
    pool[table.reshape(-1)] = pages.reshape(batch * width, heads, page_size, head_dim)
    return pool


def passes(
    recipe: recipes.Recipe, views: Mapping[str, DeviceArray], params: AttentionParams, stream: int
) -> Callable[[], None]:
    """Run a stage on ordinary arrays, copying K and V into pages with torch, and again when a torch tensor has been
    written. See `attention._runner`."""
    plan, page_size = recipe.plan, recipe.code.cubin.parameters["PAGE_SIZE"]
    torch = importlib.import_module("torch")
    placement = {"dtype": torch.int32, "device": f"cuda:{plan.device}"}
    with torch_stream(stream, plan.device):
        table = torch.as_tensor(_table(plan.problem, page_size), **placement)
        lengths = torch.full((plan.problem.batch,), plan.problem.kv_len, **placement)

    def paged(source: Any) -> tuple[Any]:
        bits = source.view(torch.int16)
        return (_in_pages(bits, table.long(), page_size, bits.new_full),)

    pools = TorchCopies({name: views[name].owner for name in "KV"}, paged, stream)
    made = {name: pool for name, (pool,) in pools.made.items()} | {"page_table": table, "lengths": lengths}
    call = _Call(plan, {**views, **{name: on_device(array, name) for name, array in made.items()}})
    own, cache = call.structures
    own.LSE, own.work = params.LSE, params.work
    cache.page_table, cache.lengths = (call.views[name].pointer for name in ("page_table", "lengths"))
    early = plan.stage.early_launch
    launch = recipes.launch_of(recipe.code.function, recipe.shape, recipe.grid, (own, cache), stream, early=early)
    return pools.before(launch, call)


def emulated_passes(run: EmulatedCall) -> list[emulator.Structure]:
    """Run a stage on ordinary arrays on the CPU, copying K and V into pages. See `attention._runner`."""
    problem, page_size = run.planned.problem, run.kernel.parameters["PAGE_SIZE"]
    made = {"page_table": _table(problem, page_size), "lengths": np.full((problem.batch,), problem.kv_len, np.int32)}
    for name in "KV":
        bits = run.views[name].owner.view(np.uint16)
        full = partial(np.full, dtype=np.uint16)
        made[name] = _in_pages(bits, made["page_table"], page_size, full)
    run.pointers |= {name: emulator.Pointer(array=array, access="r", name=name) for name, array in made.items()}
    return _Call(run.planned, {**run.views, **{name: on_host(array, name) for name, array in made.items()}}).on_cpu(run)
