"""What calls on a GPU keep for the next one like them.

A `Recipe` is all of a launch that the addresses of its arrays do not decide: the machine code, the grid, strides, and
how tensor maps are encoded. It is made once for a layout, by `attention` or `paged_attention`, and kept; a call like an
earlier one fills in addresses and counters. No argument of a kernel is shared between calls, so that threads and
streams need no lock.
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
from flashlab.run.kept import Kept
from flashlab.run.plan import ROW_ALIGNMENT_BYTES, Plan, lse_shape

if TYPE_CHECKING:
    from flashlab.build.compiler import Cubin, LaunchShape
    from flashlab.core.problem import Problem
    from flashlab.run.tensor_map import TensorMap

WORD_BYTES = ctypes.sizeof(ctypes.c_uint)
_TRUSTED_S = 1.0
"""How long a repeated call goes without looking whether a source or the table of choices was edited."""
_MAX_RECIPES = 2048
_MAX_CODES = 1024
_MAX_STREAMS = 256
_MAX_IMAGES = 256


# --- machine code -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a job compiles to, on a device."""

    cubin: Cubin
    shape: LaunchShape
    function: gpu.Function
    sms: int
    """Of the device."""
    blocks_per_sm: int
    most_splits: int
    """Blocks a cluster at most, of a kernel that leaves them to the launch; 0 of others."""
    sources: Stamps
    """Of the file that was compiled and the headers that it includes."""

    def fitted(self, problem: Problem) -> tuple[LaunchShape, tuple[int, int, int]]:
        """A problem's launch and its grid on the device: see `arguments.fitted`."""
        room = {"sms": self.sms, "blocks_per_sm": self.blocks_per_sm, "most_splits": self.most_splits}
        return fitted(problem, self.shape, **room)

    def stands(self) -> bool:
        """Whether the sources are what they were."""
        try:
            return stamps(path for path, *_ in self.sources) == self.sources
        except FileNotFoundError:
            return False


_codes: Kept[Loaded] = Kept(_MAX_CODES)
"""By job and device. Decoding has another length, and so another recipe, at every step, but the same code."""


def loaded(job: compiler.Job, device: int) -> Loaded:
    """A job's code, compiled and loaded at the first call, and again where a source was edited.

    Raises:
        What compiling and loading do.
    """
    key = (job.label, job.file, job.may_spill, device)
    kept = _codes.get(key)
    if kept is not None and kept.stands():
        return kept
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
    """All of a call that the addresses of its arrays do not decide."""

    plan: Plan
    code: Loaded
    views: InitVar[Mapping[str, DeviceArray]]
    """Q, the other inputs and the output, by the fields that hold their addresses."""
    structures: tuple[ctypes.Structure, ...]
    """The kernel's arguments, whose addresses count for nothing."""
    counts: InitVar[str] = "fallbacks"
    """The field that holds the address of what a launch counts."""
    maps: Mapping[str, TensorMap] = field(default_factory=dict)
    """Of Q, K, V and O, the second structure; empty: there are none."""
    parameters: Callable[[Sequence[Any]], Sequence[Any]] = tuple
    """From the structures, addresses filled in, to what the kernel takes."""
    table: tuple[str, int] | None = None
    """The GPU whose table of choices had a say, and when the table was written."""
    shape: LaunchShape = field(init=False)
    """The code's, with the blocks of a cluster where those are the launch's to choose."""
    grid: tuple[int, int, int] = field(init=False)
    spans: tuple[tuple[int, ...], ...] = field(init=False)
    """Bytes that the inputs and the output touch, from their addresses on."""
    places: tuple[int, ...] = field(init=False)
    """Words of the structures, one after the other, that hold addresses: of the views, the LSE, the workspace, and what
    is counted."""
    mapped: dict[str, int] = field(init=False)
    """Where among the addresses those of the tensor maps are, in the order of the maps."""
    contiguous: bool = field(init=False)
    """Whether Q is, as the output will be."""
    lse_shape: tuple[int, ...] = field(init=False)
    words: tuple[int, int] = field(init=False)
    """Of the workspace: see `workspace`; none where the kernel counts nothing."""
    image: Callable[..., bytes] = field(init=False)
    """From addresses to the structures, one after the other, some kept: allocators hand out the same ones again."""
    _seen: float = field(default_factory=time.monotonic)
    _idle: list[Slot] = field(default_factory=list)
    """As many as threads were ever in a call at once."""

    def __post_init__(self, views: Mapping[str, DeviceArray], counts: str) -> None:
        q, *_ = views.values()
        self.shape, self.grid = self.code.fitted(self.plan.problem)
        self.spans = tuple(tuple(edge - view.pointer for edge in view.extent) for view in views.values())
        places: dict[str, int] = {}
        start = 0
        for structure in self.structures:
            for name in (*views, "LSE", "work", counts):
                if hasattr(structure, name):  # tensor maps, which come later, have names of arrays too
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

    def stands(self, trusted_s: float = 0.0) -> bool:
        """Whether the sources and the table are what they were; not looked at again for `trusted_s`."""
        now = time.monotonic()
        if now < self._seen + trusted_s:
            return True
        stands = self.code.stands() and (self.table is None or self.table[1] == choice.stamp(self.table[0]))
        if stands:
            self._seen = now
        return stands

    def __call__(self, q: Any, addresses: list[int], out: Any | None, return_lse: bool, stream: Any | None) -> Any:
        """Enqueue on torch tensors: the output, or the output and the log-sum-exp.

        `addresses`: of the inputs, and of `out` where there is one.
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
        del held  # not before: another thread may have found it too small, and have given it up
        self._idle.append(slot)  # the driver has copied the arguments
        return out if lse is None else (out, lse)


class Slot:
    """A launch of a recipe whose addresses and stream may be set anew; one call at a time uses it."""

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
        """Set them, in the order of the recipe's `places`; those that are left out are 0."""
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
    """A kernel's launch; in clusters where it leaves those to the launch."""
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

by_layout: Kept[Recipe] = Kept(_MAX_RECIPES)
"""By the layout of arrays and what was asked for: as `layout` has it, and as `kept` does of torch tensors."""
_works: Kept[tuple[Any, int, int]] = Kept(_MAX_STREAMS)
"""What persistent kernels count in, but for a graph's, its address and words, by device and stream or graph: a launch
leaves the counters at 0 for the next one on its stream, whichever kernel's that is."""


def layout(array: DeviceArray | None) -> tuple[Any, ...] | None:
    """What a recipe takes from an array."""
    if array is None:
        return None
    misalignment = array.pointer % ROW_ALIGNMENT_BYTES
    return (array.shape, array.strides, array.dtype, array.device, misalignment, array.readonly)


def kept(
    inputs: tuple[Any, ...], out: Any | None, asked: tuple[Any, ...], params: Mapping[str, int] | None
) -> tuple[Hashable | None, list[int], Recipe | None]:
    """The key under which `by_layout` has a call of torch tensors, their addresses, and its recipe.

    No key where they are no such tensors, want gradients, or are not what is in their memory. No recipe where none is
    kept, where a source was edited since, and where `out` overlaps an input, which is the caller's to refuse.
    """
    torch = sys.modules.get("torch")
    if torch is None or torch.autograd.forward_ad._current_level >= 0:  # there may be tangents, which are refused
        return None, [], None
    addresses: list[int] = []
    tensor = torch.Tensor
    try:
        # 1, 1.0 and True are one key, and one of them is no scale.
        key: tuple[Any, ...] = (*asked, *map(type, asked), *(sorted(params.items()) if params else ()))
        for x in inputs if out is None else (*inputs, out):
            if type(x) is not tensor or x.requires_grad or x.is_neg():
                return None, [], None
            address = x.data_ptr()
            if not address:  # torch has tensors of zeros without memory
                return None, [], None
            addresses.append(address)
            key = (key, x.shape, x.stride(), x.dtype, x.device, address % ROW_ALIGNMENT_BYTES)
        recipe = by_layout.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no strides, no memory, or no key: refused by who asked
        return None, [], None
    if recipe is None or not recipe.stands(_TRUSTED_S) or (out is not None and _overlap(recipe.spans, addresses)):
        return key, addresses, None
    return key, addresses, recipe


def _overlap(spans: Sequence[tuple[int, ...]], addresses: Sequence[int]) -> bool:
    """Whether the last array overlaps one of those before it."""
    places = ((address + low, address + high) for address, (low, high) in zip(addresses, spans, strict=True))
    *others, (low, high) = places
    return any(low < other_high and other_low < high for other_low, other_high in others)


def work_memory(like: Any, device: int, stream: int, words: tuple[int, int]) -> tuple[Any, int]:
    """The memory in which a persistent kernel counts, as `workspace` has it, to whatever runs on `stream`, and its
    address.

    Where it can, the caller's library allocates it on that stream: it hands the memory on when the stream has done with
    it, so that giving it up waits for nothing.
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
    """What holds the memory that launches on a stream share, or those in a graph that it is captured into, and its
    address; 0 where they count nothing, and `words` are none.

    A graph may be launched on any stream, beside what runs on the one that it was captured on, so that it has memory of
    its own. Where a launch needs more than there is, it gets new memory, and a stream's old is given up behind the
    launches that use it: whoever launches holds on to it until then.
    """
    if not words[0]:
        return None, 0
    stream_id = gpu.stream_id(stream)
    graph = gpu.graph_id(stream) if stream_id is None else None
    key = (device, graph or stream_id, words[0] == words[1])  # a kernel may want all of it 0, and leaves it so
    kept = _works.get(key)
    if kept is None or kept[2] < words[0]:
        if graph:
            kept = (None, gpu.zeroed_of_graph(device, words[0] * WORD_BYTES, stream), words[0])
        else:
            kept = (*work_memory(like, device, stream, words), words[0])
        _works.put(key, kept)
    return kept[:2]
