"""Attention over a cache of keys and values in pages, as serving engines keep it: `paged_attention` and `append_kv`.

A cache is two pools of pages, K and V, (num_pages, kv_heads, page_size, head_dim) each; a page table, (batch, pages a
sequence) of page numbers in the order of a sequence's keys; and the lengths, (batch,), keys of each sequence. Table and
lengths are int32 and stay on the device: a sequence that grows needs no new launch plan, and a CUDA graph replays.

As the runner of the stages that read such a cache (`attention._runner`) it also runs them on the keys and values of any
problem: it copies them into pages in a random order. So they are checked and measured like all others.
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
from flashlab.run.arguments import AttentionParams, params_for
from flashlab.run.arrays import DeviceArray, TorchCopies, on_device, on_host, torch_stream
from flashlab.run.attention import EmulatedCall, run_on_cpu
from flashlab.run.plan import (
    Plan,
    check_dtype,
    check_layout,
    check_out,
    check_writable,
    outputs_of,
    planned,
    problem_of,
    tunables,
    with_features,
)

STAGE = "d15_short_starts"
_FEW_TILES, _FEW = "d1_paged_kv", 16
"""What `taken` chooses from: one that shares out all keys by time, which lengths that differ need; and one that splits
each tile over a cluster, which starts and ends sooner, of so many tiles at most."""
_TILE_ROWS = 16
"""Query rows of a tile of theirs: MMA_M of kernels/common/mma.cuh."""
_VIEWS = ("Q", "K", "V", "page_table", "lengths", "O")
"""What a call is of, by the names of the fields that hold the addresses, in the order of `paged_attention`."""
_FAULTS = 2
"""Counters of a launch: page numbers that are none, lengths below 0 or beyond the page table."""
_GARBAGE = 0x7FFF
"""The bits of a NaN in either element type: what a page holds where it holds no key."""


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
    """Attention of the last queries of each sequence over its keys in a paged cache, where the arrays are.

    On a GPU (sm_90 or newer): enqueued on the caller's stream, nothing copied, nothing awaited unless `check`. In host
    memory: the same kernel emulated on the CPU.

    Args:
        q: (batch, q_heads, q_len, head_dim), float16 or bfloat16, as `flashlab.attention` takes it. The query heads
            that share a K/V head times q_len are at most 64.
        k_cache: (num_pages, kv_heads, page_size, head_dim), any strides, the last dimension contiguous; page_size is a
            power of two of at most 256. A cache of (num_pages, page_size, kv_heads, head_dim) comes as
            `cache.transpose(1, 2)`.
        v_cache: as `k_cache`.
        page_table: int32 (batch, pages a sequence), on the device of q, the last dimension contiguous: page numbers in
            the order of a sequence's keys. What lies beyond its length is never read.
        lengths: int32 (batch,), on the device of q, contiguous: keys of each sequence, those of its queries among them.
            A sequence of length 0 gets 0.
        causal: query i of q_len sees the first length - q_len + i + 1 keys. False: all of its sequence.
        window: of these the last so many, as `flashlab.attention` takes it, its diagonal at the end of each sequence.
            Pages before every query's window are not read, and their numbers may be anything.
        softcap: what scores are bounded by, as in `flashlab.attention`.
        scale: finite; 1/sqrt(head_dim) where None.
        out: where to write, like `q`; a new contiguous array of the caller's library where None.
        return_lse: also return the log-sum-exp of the scores (natural log, float32, -inf where a query sees no key).
        stream: as `flashlab.attention` takes it.
        stage: the id of one that reads a cache in pages. None: d1_paged_kv for at most 16 work tiles (of 16 query rows
            of a sequence that share a K/V head) and d15_short_starts for more.
        params: the stage's tunables, by name; where left out, as `flashlab.attention` has them, of sequences as long
            as the page table has room for.
        check: wait, and refuse a page number that is none and a length that is beyond the page table. Without, keys of
            such pages count as zeros and such a length is cut; nothing outside the cache is ever read. In host memory
            both are refused always.

    Returns:
        The output, or (output, lse).

    Raises:
        InputError: arguments are off (ShapeError, DTypeError, LayoutError, DeviceError, UnknownStageError,
            ParameterError).
        UnsupportedError: the kernel does not run this here.
        NoGpuError, MissingPackageError, CompileError, LaunchError, EmulationError: as they say.
    """
    asked = (stage, causal, window, softcap, scale, return_lse, check)
    key, addresses, again = recipes.kept((q, k_cache, v_cache, page_table, lengths), out, asked, params)
    if again is not None:
        return again(q, addresses, out, return_lse, stream)
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
    """Write the keys and values of new tokens into a paged cache, behind those that are there.

    Enqueued by the arrays' own library, on its current stream. `lengths` is left as it is: add the new tokens to it
    before the attention over them.

    Args:
        k_cache: as `paged_attention` takes it, a torch tensor, or a CuPy or NumPy array.
        v_cache: likewise.
        k: (batch, kv_heads, new tokens, head_dim), of the type and on the device of the cache.
        v: likewise.
        page_table: as `paged_attention` takes it; it must name the pages that the new tokens go to.
        lengths: int32 (batch,): keys of each sequence before.
        check: wait, and refuse a page number that is none and a length that leaves the page table no room for the new
            tokens. Without, the library's indexing does with them what it does: it takes a negative page number for one
            from the end, and fails of one that is too large. In host memory both are refused always.

    Raises:
        InputError: arguments are off, of which nothing is written then (ShapeError, DTypeError, LayoutError,
            DeviceError), or, with `check`, a page number or a length is.
    """
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
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[pages, :, at % page_size] = new.swapaxes(1, 2)


def _check_appended(views: Mapping[str, DeviceArray]) -> None:
    """Raise what is wrong with the arrays of `append_kv`, but for their numbers."""
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
        if name in ("v_cache", "k", "v") and view.dtype != k_cache.dtype:
            raise DTypeError(f"{name}: wanted the type of k_cache, {k_cache.dtype}, got {view.dtype}")
        if view.device != k_cache.device:
            raise DeviceError(f"{name}: wanted the device of k_cache, {k_cache.place}, got {view.place}")


def _check_cache(k: DeviceArray, v: DeviceArray) -> None:
    """Raise what is wrong with the shapes of both pools: ShapeError."""
    if k.shape != v.shape or len(k.shape) != 4 or 0 in k.shape:
        raise ShapeError(
            "k_cache, v_cache: wanted (num_pages, kv_heads, page_size, head_dim) of both, none of them 0, got shapes "
            f"{k.shape} and {v.shape}"
        )


def _check_pages(table: DeviceArray, lengths: DeviceArray, of: DeviceArray, name: str) -> None:
    """Raise what is wrong with both, but for their numbers: DTypeError, ShapeError.

    They are for the sequences of an array that errors call `name`.
    """
    for what, array, wanted in (("page_table", table, "(batch, pages a sequence)"), ("lengths", lengths, "(batch,)")):
        check_dtype(what, array, "int32")
        dims = 2 if array is table else 1
        if len(array.shape) != dims or array.shape[:1] != of.shape[:1] or 0 in array.shape[1:]:
            raise ShapeError(f"{what}: wanted {wanted} for {name} of shape {of.shape}, got shape {array.shape}")


def _first(array: Any, off: Any) -> str:
    """The first number of an array by sequences that is off, for people; empty where none is."""
    if not off.any():
        return ""
    flat = off.reshape(-1).tolist()
    place = flat.index(True)
    return f"{int(array.reshape(-1)[place])} of sequence {place * len(off) // len(flat)}"


def taken(problem: Problem) -> str:
    """The stage that reads a problem's keys in pages, where none is named."""
    rows = problem.q_heads // problem.kv_heads * problem.q_len
    tiles = problem.batch * problem.kv_heads * -(-rows // _TILE_ROWS)
    return _FEW_TILES if tiles <= _FEW else STAGE


def _stage(name: str | None, problem: Problem) -> Stage:
    stage = registry.get(taken(problem) if name is None else name)
    if stage.runner != __name__:
        able = [candidate.id for candidate in registry.DECODE.values() if candidate.runner == __name__]
        raise UnknownStageError(f"stage: wanted one that reads a cache in pages, {' or '.join(able)}, got {name!r}")
    rows = problem.q_heads // problem.kv_heads * problem.q_len
    if stage.max_rows is not None and rows > stage.max_rows:
        raise UnsupportedError(
            f"q: wanted at most {stage.max_rows} query rows a K/V head (query heads that share it times q_len), got "
            f"{rows}. Calls of fewer queries work, and `flashlab.attention` over keys in one tensor."
        )
    return stage


def _as_timed(problem: Problem) -> Problem:
    """The same problem where one query row sees all keys: tables have it without a mask."""
    return replace(problem, mask="full") if problem.q_len == 1 else problem


def _problem(inputs: Mapping[str, DeviceArray], table: DeviceArray, lengths: DeviceArray, causal: bool) -> Problem:
    """The problem of sequences as long as the page table has room for."""
    q, k, v = inputs.values()
    if len(q.shape) != 4:
        raise ShapeError(
            f"q: wanted (batch, q_heads, q_len, head_dim), got shape {q.shape}. `q[:, :, None]` makes one of a row a "
            "sequence, (batch, q_heads, head_dim)"
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
    """A sound call."""

    plan: Plan
    views: Mapping[str, DeviceArray]
    """Those of `_VIEWS`; K and V are the pools."""

    @property
    def structures(self) -> tuple[AttentionParams, PagedCache]:
        """The kernel's arguments, without the pointers that `params_for` does not set."""
        table, pool = self.views["page_table"], self.views["K"]
        cache = PagedCache(table_stride=table.strides[0], num_pages=pool.shape[0])
        return params_for(self.plan.problem, self.plan.scale, self.views), cache

    def on_cpu(self, run: EmulatedCall) -> list[emulator.Structure]:
        """The kernel's arguments on a CPU, as `EmulatedCall` takes them."""
        return [emulator.Structure(value=structure, pointers=run.pointers) for structure in self.structures]

    def refuse(self, pages: str, lengths: str) -> None:
        """Raise which page numbers and lengths are off, where some are."""
        room, numbers = self.plan.problem.kv_len, f"page numbers of 0 to {self.views['K'].shape[0] - 1}"
        off = [f"page_table: wanted {numbers}, got {pages}"] if pages else []
        off += [f"lengths: wanted 0 to {room} keys, as the page table has room for, got {lengths}"] if lengths else []
        if off:
            raise InputError("; ".join(off))


def _check_on_cpu(call: _Call) -> None:
    """Look for the faults that the kernel counts; here they are there to be seen."""
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
    """The code of a call. The page size is the cache's, so that a kernel whose registers spill is better than none."""
    return compiler.Job.of(stage, problem, arch=arch, may_spill=True, **options)


def _recipe(call: _Call, options: Mapping[str, Any]) -> recipes.Recipe:
    """What the call and those like it launch.

    Raises:
        UnsupportedError: the kernel does not run this here; and what compiling and loading raise.
    """
    stage, problem, device = call.plan.stage, call.plan.problem, call.plan.device
    arch, slug = gpu.info(device).arch, gpu.info(device).slug
    stage.require(problem, arch)
    table = (slug, choice.stamp(slug))  # before it is read
    tuned = choice.parameters(stage, slug, _as_timed(problem), arch=arch, overrides=options["overrides"])
    code = recipes.loaded(job_of(stage, problem, arch, {**options, "overrides": tuned}), device)
    return recipes.Recipe(
        plan=call.plan,
        views=call.views,
        code=code,
        structures=call.structures,
        counts="faults",
        table=table,
    )


# --- any problem, in pages --------------------------------------------------------------------------------------------


def _table(problem: Problem, page_size: int) -> Any:
    """Page numbers, in a random order that is the same at each call: NumPy int32 (batch, pages a sequence)."""
    width = -(-problem.kv_len // page_size)
    order = np.random.default_rng(0).permutation(problem.batch * width)
    return order.astype("int32").reshape(problem.batch, width)


def _in_pages(bits: Any, table: Any, page_size: int, full: Callable[..., Any]) -> Any:
    """(batch, heads, length, head_dim) as pools of pages, (pages, heads, page_size, head_dim).

    `bits`: 16-bit integers, of NumPy or torch like `table`; `full` makes an array of theirs.
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
    """A stage on arrays in any layout: keys and values are copied into pages, by torch; again where a torch tensor was
    written to since. See `attention._runner`."""
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
    """A stage on the CPU on arrays in any layout: keys and values are copied into pages. See `attention._runner`."""
    problem, page_size = run.planned.problem, run.kernel.parameters["PAGE_SIZE"]
    made = {"page_table": _table(problem, page_size), "lengths": np.full((problem.batch,), problem.kv_len, np.int32)}
    for name in "KV":
        bits = run.views[name].owner.view(np.uint16)
        full = partial(np.full, dtype=np.uint16)
        made[name] = _in_pages(bits, made["page_table"], page_size, full)
    run.pointers |= {name: emulator.Pointer(array=array, access="r", name=name) for name, array in made.items()}
    return _Call(run.planned, {**run.views, **{name: on_host(array, name) for name, array in made.items()}}).on_cpu(run)
