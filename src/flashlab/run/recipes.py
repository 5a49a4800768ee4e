"""Caches of GPU calls, by layout.

A `Recipe` is everything in a launch that does not depend on the addresses of its arrays: machine code, grid, strides
and tensor-map parameters. `attention` and `paged_attention` create it once per layout; later calls only fill
in addresses and counters. Concurrent calls share no kernel arguments, so that threads and streams need no lock.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashlab.build import compiler
from flashlab.build.sources import Stamps, included, read, stamps
from flashlab.run import arrays, choice, gpu
from flashlab.run.arguments import fitted, workspace
from flashlab.run.arrays import DeviceArray, contiguous_strides
from flashlab.run.lru import LruCache
from flashlab.run.plan import ROW_ALIGNMENT_BYTES, Plan, lse_shape

if TYPE_CHECKING:
    from flashlab.build.compiler import Cubin, LaunchShape
    from flashlab.core.problem import Problem
    from flashlab.run.tensor_map import TensorMap

WORD_BYTES = ctypes.sizeof(ctypes.c_uint)
_TRUSTED_S = 1.0
"""Interval in seconds at which repeated calls check whether a source or the table of choices was edited."""
_MAX_RECIPES = 2048
_MAX_CODES = 1024
_MAX_STREAMS = 256
_MAX_IMAGES = 256


# --- machine code -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The loaded kernel of a compile job on a device."""

    cubin: Cubin
    shape: LaunchShape
    function: gpu.Function
    sms: int
    """SMs of the device."""
    blocks_per_sm: int
    most_splits: int
    """Maximum cluster size of a kernel that leaves it to the launch; 0 for others."""
    sources: Stamps
    """Timestamps of the compiled file and the headers it includes."""

    def fitted(self, problem: Problem) -> tuple[LaunchShape, tuple[int, int, int]]:
        """Launch shape and grid of a problem on the device: see `arguments.fitted`."""
        room = {"sms": self.sms, "blocks_per_sm": self.blocks_per_sm, "most_splits": self.most_splits}
        return fitted(problem, self.shape, **room)

    def is_current(self) -> bool:
        """Whether no source has been edited."""
        try:
            return stamps(path for path, *_ in self.sources) == self.sources
        except FileNotFoundError:
            return False


_codes: LruCache[Loaded] = LruCache(_MAX_CODES)
"""By job and device. Decoding has another length, and so another recipe, at every step, but the same code."""


def loaded(job: compiler.Job, device: int) -> Loaded:
    """Compile and load a job on the first call, and again after a source was edited.

    Raises:
        FlashlabError: as compiling and loading do.
    """
    key = (job.label, job.file, job.may_spill, device)
    cached = _codes.get(key)
    if cached is not None and cached.is_current():
        return cached
    headers = included(job.file, read(job.file, "CUDA C++"), [compiler.COMMON])
    sources = stamps([job.file, *headers])  # before they are read to be compiled
    cubin = compiler.compile_stage(job)
    shape = cubin.launch_shape
    assert shape is not None
    function = gpu.load(cubin, device)
    how = (function, shape.threads, shape.smem_bytes)
    made = Loaded(
        cubin=cubin,
        shape=shape,
        function=function,
        sms=gpu.info(device).sm_count,
        blocks_per_sm=gpu.blocks_per_sm(*how) if shape.persistent else 1,
        most_splits=gpu.most_splits(*how) if shape.split_keys and not shape.cluster else 0,
        sources=sources,
    )
    _codes.put(key, made)
    return made


# --- launches ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Recipe:
    """Everything in a call that does not depend on the addresses of its arrays."""

    plan: Plan
    code: Loaded
    views: InitVar[Mapping[str, DeviceArray]]
    """Q, the other inputs and the output, by the structure fields that hold their addresses."""
    structures: tuple[ctypes.Structure, ...]
    """The kernel arguments; their addresses are ignored."""
    counts: InitVar[str] = "fallbacks"
    """The field that holds the address of the fallback or fault counters."""
    maps: Mapping[str, TensorMap] = field(default_factory=dict)
    """Tensor maps of Q, K, V and O, which fill the second structure; empty if unused."""
    parameters: Callable[[Sequence[Any]], Sequence[Any]] = tuple
    """Converts the structures, with addresses, to kernel parameters."""
    tables: tuple[int, ...] | None = None
    """Modification times of the tables of choices, if they were consulted (`choice.stamps`)."""
    shape: LaunchShape = field(init=False)
    """The launch shape of the code, including a cluster size chosen by the launch."""
    grid: tuple[int, int, int] = field(init=False)
    spans: tuple[tuple[int, ...], ...] = field(init=False)
    """Byte ranges of the inputs and the output, relative to their addresses."""
    places: tuple[int, ...] = field(init=False)
    """Indices of the 64-bit words of the concatenated structures that hold the addresses of the views, the LSE, the
    workspace and the counters."""
    mapped: dict[str, int] = field(init=False)
    """Index of each tensor map's array among the addresses, in the order of the maps."""
    contiguous: bool = field(init=False)
    """Whether Q is contiguous, as a new output is."""
    lse_shape: tuple[int, ...] = field(init=False)
    words: tuple[int, int] = field(init=False)
    """Size of the workspace: see `workspace`; (0, 0) if the kernel has none."""
    image: Callable[..., bytes] = field(init=False)
    """Builds the concatenated structures from addresses; cached, because allocators reuse addresses."""
    _seen: float = field(default_factory=time.monotonic)
    _idle: list[Slot] = field(default_factory=list)
    """Idle launches, at most one per concurrent call."""

    def __post_init__(self, views: Mapping[str, DeviceArray], counts: str) -> None:
        q, *_ = views.values()
        self.shape, self.grid = self.code.fitted(self.plan.problem)
        self.spans = tuple(tuple(edge - view.pointer for edge in view.extent) for view in views.values())
        places: dict[str, int] = {}
        start = 0
        for structure in self.structures:
            for name in (*views, "LSE", "work", counts):
                if hasattr(structure, name):  # fields of tensor maps, which come later, have the same names
                    places.setdefault(name, (start + getattr(type(structure), name).offset) // 8)
            start += ctypes.sizeof(structure)
        self.places = tuple(places[name] for name in (*views, "LSE", "work", counts))
        self.mapped = {name: list(views).index(name) for name in "QKVO"}
        self.contiguous, self.lse_shape = q.strides == contiguous_strides(q.shape), lse_shape(q)
        self.words = workspace(self.shape, self.grid) if self.shape.persistent else (0, 0)
        self.image = lru_cache(maxsize=_MAX_IMAGES)(self._made_image)

    def _made_image(self, *addresses: int) -> bytes:
        memory = bytearray(b"".join(map(bytes, self.structures)))
        words = memoryview(memory).cast("Q")
        for place, address in zip(self.places, addresses, strict=False):
            words[place] = address
        if self.maps:
            with gpu.context(self.plan.device):
                encoded = (self.maps[name].encoded(addresses[place]) for name, place in self.mapped.items())
                memory[ctypes.sizeof(self.structures[0]) :] = b"".join(encoded)
        return bytes(memory)

    def is_current(self, trusted_s: float = 0.0) -> bool:
        """Whether neither sources nor table have changed, checked at most every `trusted_s` seconds."""
        now = time.monotonic()
        if now < self._seen + trusted_s:
            return True
        current = self.code.is_current() and (self.tables is None or self.tables == choice.stamps())
        if current:
            self._seen = now
        return current

    def __call__(self, q: Any, addresses: list[int], out: Any | None, return_lse: bool, stream: Any | None) -> Any:
        """Enqueue a call on torch tensors; returns the output, or (output, lse).

        `addresses` are those of the inputs, and of `out` if given.
        """
        device = self.plan.device
        if not gpu.is_current(device):
            with gpu.context(device):
                return self(q, addresses, out, return_lse, stream)
        torch = sys.modules["torch"]
        handle = arrays.current_stream("torch", device) if stream is None else arrays.stream_handle(stream)
        if out is None:
            out = torch.empty_like(q) if self.contiguous else torch.empty_like(q, memory_format=torch.contiguous_format)
            addresses.append(out.data_ptr())
        else:
            arrays.mark_written(out)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=q.device) if return_lse else None
        addresses.append(0 if lse is None else lse.data_ptr())
        held, work = streams_work(q, device, handle, self.words)
        addresses.append(work)
        try:
            slot = self._idle.pop()
        except IndexError:
            slot = Slot(self, addresses, handle)
        else:
            slot.fill(addresses)
            if slot.stream != handle:
                slot.stream, slot.launch = handle, slot.launch.on(handle)
        slot.launch()
        del held  # not earlier: another thread may have replaced it by a larger one
        self._idle.append(slot)  # the driver has copied its arguments
        return out if lse is None else (out, lse)


class Slot:
    """A reusable launch of a recipe, with settable addresses and stream; used by one call at a time."""

    __slots__ = ("_image", "_memory", "launch", "stream")

    def __init__(self, recipe: Recipe, addresses: Sequence[int], stream: int) -> None:
        self._image, memory = recipe.image, bytearray(recipe.image(*addresses))
        structures, start = [], 0
        for structure in recipe.structures:
            structures.append(type(structure).from_buffer(memory, start))
            start += ctypes.sizeof(structure)
        self._memory = memoryview(memory)
        arguments = recipe.parameters(structures)
        self.stream = stream
        self.launch = launch_of(
            recipe.code.function, recipe.shape, recipe.grid, arguments, stream, early=recipe.plan.stage.early_launch
        )

    def fill(self, addresses: Sequence[int]) -> None:
        """Set the addresses, in the order of the recipe's `places`; missing ones are 0."""
        self._memory[:] = self._image(*addresses)


def launch_of(
    function: gpu.Function,
    shape: LaunchShape,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    stream: int,
    *,
    early: bool = False,
) -> gpu.Launch:
    """Build the launch of a kernel, setting the cluster size if the kernel leaves it to the launch."""
    return gpu.Launch(
        function,
        grid=grid,
        block=(shape.threads, 1, 1),
        smem_bytes=shape.smem_bytes,
        params=arguments,
        stream=stream,
        cluster=shape.cluster if shape.split_keys else 0,
        early=early,
    )


# --- again ------------------------------------------------------------------------------------------------------------

by_layout: LruCache[Recipe] = LruCache(_MAX_RECIPES)
"""By layout and options: keys of `layout`, and of `lookup` for torch tensors."""
_works: LruCache[tuple[Any, int, int]] = LruCache(_MAX_STREAMS)
"""Workspaces of persistent kernels by device and stream or graph: owner (None for a graph's), address and words. Every
launch leaves the counters at 0 for the next launch on its stream, of any kernel."""


def layout(array: DeviceArray | None) -> tuple[Any, ...] | None:
    """The properties of an array on which a recipe depends, as part of a cache key."""
    if array is None:
        return None
    misalignment = array.pointer % ROW_ALIGNMENT_BYTES
    return (array.shape, array.strides, array.dtype, array.device, misalignment, array.readonly)


def lookup(
    inputs: tuple[Any, ...], out: Any | None, options: tuple[Any, ...], params: Mapping[str, int] | None
) -> tuple[Hashable | None, list[int], Recipe | None]:
    """Look up the recipe of a call on torch tensors: its key in `by_layout`, the addresses, and the recipe.

    A container among the options must be given as its `repr`, which shows the types of its items.

    The key is None for other arrays, tensors that require gradients, and tensors without plain memory. The recipe is
    None if none is cached, a source was edited, or `out` overlaps an input, which the caller must refuse.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.autograd.forward_ad._current_level >= 0:  # tangents are possible, which are refused
        return None, [], None
    addresses: list[int] = []
    tensor = torch.Tensor
    try:
        # Types are part of the key: 1, 1.0 and True are equal, but True is not a valid scale.
        key: tuple[Any, ...] = (*options, *map(type, options), repr(sorted(params.items())) if params else None)
        for x in inputs if out is None else (*inputs, out):
            if type(x) is not tensor or x.requires_grad or x.is_neg():
                return None, [], None
            address = x.data_ptr()
            if not address:  # torch has zero tensors without memory
                return None, [], None
            addresses.append(address)
            key = (key, x.shape, x.stride(), x.dtype, x.get_device(), address % ROW_ALIGNMENT_BYTES)
        recipe = by_layout.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no strides, no memory, or unhashable: the caller refuses it
        return None, [], None
    if recipe is None or not recipe.is_current(_TRUSTED_S) or (out is not None and _overlap(recipe.spans, addresses)):
        return key, addresses, None
    return key, addresses, recipe


def _overlap(spans: Sequence[tuple[int, ...]], addresses: Sequence[int]) -> bool:
    """Whether the last array overlaps an earlier one."""
    places = ((address + low, address + high) for address, (low, high) in zip(addresses, spans, strict=True))
    *others, (low, high) = places
    return any(low < other_high and other_low < high for other_low, other_high in others)


def work_memory(like: Any, device: int, stream: int, words: tuple[int, int]) -> tuple[Any, int]:
    """Allocate the workspace of a persistent kernel (`workspace`) on `stream`; returns its owner and address.

    If possible, the caller's library allocates it on that stream and reuses it in stream order, so that releasing it
    does not synchronise.
    """
    size, counters = words
    if arrays.library_of(like) == "other":
        zeroed = gpu.Zeroed(device, size * WORD_BYTES, stream, counters * WORD_BYTES)
        return zeroed, zeroed.pointer
    place = arrays.Place(like, stream)
    with place.enqueued():
        memory = place.empty((size,), "int32")
        memory[:counters] = 0
    return memory, place.view(memory, "work").pointer


def streams_work(like: Any, device: int, stream: int, words: tuple[int, int]) -> tuple[Any, int]:
    """Return owner and address of the workspace shared by all launches on a stream, or in the graph being captured on
    it; (None, 0) if `words` are 0.

    A graph has its own workspace, because it may be launched on any stream, concurrently with the one on which it was
    captured. A larger workspace replaces a smaller one, which is released in stream order; the caller must keep the
    owner alive until it has launched.
    """
    if not words[0]:
        return None, 0
    stream_id = gpu.stream_id(stream)
    graph = gpu.graph_id(stream) if stream_id is None else None
    key = (device, graph or stream_id, words[0] == words[1])  # some kernels need all of it to be 0, and leave it so
    cached = _works.get(key)
    if cached is None or cached[2] < words[0]:
        if graph:
            cached = (None, gpu.zeroed_of_graph(device, words[0] * WORD_BYTES, stream), words[0])
        else:
            cached = (*work_memory(like, device, stream, words), words[0])
        _works.put(key, cached)
    return cached[:2]
