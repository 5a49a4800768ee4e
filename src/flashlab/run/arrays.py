"""Zero-copy views of the caller's arrays and streams: NumPy, torch, CuPy, `__cuda_array_interface__` and DLPack.

Imports no array library but NumPy until one of its arrays is passed.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from flashlab.core.errors import (
    DeviceError,
    DTypeError,
    InputError,
    LayoutError,
    MissingPackageError,
    ParameterError,
)
from flashlab.core.problem import BYTES_PER_ELEMENT

HOST = -1
"""`DeviceArray.device` of an array in host memory."""
_ANYWHERE = "a NumPy array, a torch or CuPy tensor, or any object with DLPack, in host memory or on a CUDA GPU"
_ON_GPU = "a torch or CuPy tensor on a CUDA GPU, or any object there with DLPack or __cuda_array_interface__"
_ON_HOST = "a NumPy array, a torch CPU tensor, or any object with DLPack in host memory"
_BYTES = {"float8_e4m3fn": 1, "float32": 4, "int32": 4}
"""Bytes per element of types that do not have 16 bits."""
_TYPES = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "page_table", "lengths"), "int32"),
    **dict.fromkeys(("lse", "q_scale", "k_scale", "v_scale"), "float32"),
}
"""Data types by argument name; all other arrays are float16 or bfloat16."""
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 1, 2, 13


@dataclass(frozen=True, kw_only=True)
class DeviceArray:
    """A view of an array of another library."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, not bytes."""
    dtype: str
    """Name of the data type in its library, e.g. `float16` or `bfloat16`."""
    device: int
    """CUDA device index, or `HOST`."""
    owner: Any
    """Object that keeps the memory alive; in host memory, a NumPy view."""
    library: str
    """`torch`, `cupy`, or `other`."""
    readonly: bool = False

    @property
    def place(self) -> str:
        """The device, for display."""
        return "host memory" if self.device == HOST else f"GPU {self.device}"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _BYTES.get(self.dtype, BYTES_PER_ELEMENT)

    @property
    def extent(self) -> tuple[int, int]:
        """Address range in bytes: first, and one past the last; (0, 0) without elements."""
        if 0 in self.shape:
            return 0, 0
        steps = [stride * (length - 1) for length, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(step for step in steps if step < 0)
        high = sum(step for step in steps if step > 0) + 1
        return self.pointer + low * self.itemsize, self.pointer + high * self.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share an address: a stride lies within the extent of the smaller strides."""
        reach = 0
        for stride, length in sorted((abs(s), n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1):
            if stride <= reach:
                return True
            reach += stride * (length - 1)
        return False


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def library_of(obj: Any) -> str:
    """Identify the library of an array, `torch`, `cupy` or `other`, without importing it."""
    kind: Any = type(obj)
    return _library_of(kind)


@lru_cache(maxsize=64)
def _library_of(kind: Any) -> str:
    names = {cls.__module__.partition(".")[0] for cls in kind.__mro__}
    return "torch" if "torch" in names else "cupy" if "cupy" in names else "other"


@lru_cache(maxsize=64)
def _text(named: Any) -> str:
    """Cached `str` of a data type or layout."""
    return str(named)


def _dlpack_device(obj: Any, name: str, wanted: str) -> int:
    """The DLPack device type of an array.

    Raises:
        DeviceError: the array reports none, e.g. if it is distributed over devices.
    """
    try:
        return int(obj.__dlpack_device__()[0])
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DeviceError(f"{name}: wanted {wanted}, got {type(obj).__name__}: {error}") from error


def _memory_of(obj: Any, name: str) -> str | None:
    """The memory of an array, `cpu` or `gpu`; None if it is not an array."""
    if isinstance(obj, np.ndarray):
        return "cpu"
    library = library_of(obj)
    if library == "torch" and hasattr(obj, "device"):
        return "cpu" if obj.device.type == "cpu" else "gpu"
    if library == "cupy" or hasattr(obj, "__cuda_array_interface__"):
        return "gpu"
    if hasattr(obj, "__dlpack_device__"):
        return "cpu" if _dlpack_device(obj, name, _ANYWHERE) == _DLPACK_CPU else "gpu"
    return None


def _no_array(obj: Any, name: str, works: str, module: str) -> DeviceError:
    got = "None" if obj is None else type(obj).__name__
    values = isinstance(obj, (list, tuple, int, float))
    dtype = _TYPES.get(name, "float16")
    convert = f". `{module}.asarray({name}, dtype={module}.{dtype})` makes an array of it" if values else ""
    return DeviceError(f"{name}: wanted {works}, got {got}{convert}")


def refuse_gradients(**arrays: Any) -> None:
    """Check that no torch tensor requires gradients or carries a forward-mode tangent.

    Raises:
        InputError: one does; the message names it.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    forward = torch.autograd.forward_ad
    for name, array in arrays.items():
        if not isinstance(array, torch.Tensor):
            continue
        if array.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{name}: wanted a tensor that needs no gradient, got requires_grad=True: there is no backward "
                f"pass, and the gradient would silently be lost. `torch.no_grad()` or `{name}.detach()` works."
            )
        if forward._current_level >= 0 and forward.unpack_dual(array).tangent is not None:
            raise InputError(
                f"{name}: wanted a tensor that needs no gradient, got one with a forward-mode tangent (jvp), which "
                f"would silently be lost. `torch.autograd.forward_ad.unpack_dual({name}).primal` works."
            )


def mark_written(*given: Any) -> None:
    """Bump the autograd version of the torch tensors among these, as torch's in-place operations do."""
    torch = sys.modules.get("torch")
    for array in given:
        if torch is not None and isinstance(array, torch.Tensor):
            torch.autograd.graph.increment_version(array)


def _has_memory(tensor: Any) -> bool:
    """Whether a torch tensor has memory; fake tensors and wrappers of torch.func do not."""
    try:
        return bool(tensor.untyped_storage().device.type != "meta")
    except RuntimeError:
        return False


def _refuse_no_strides(tensor: Any, name: str, wanted: str) -> None:
    """Raise `DeviceError` for a torch tensor that is not plain strided memory."""
    if tensor.is_nested:
        got = "a nested tensor. `flashlab.varlen_attention` takes packed sequences of different lengths"
    elif tensor.device.type == "meta":
        got = "a torch tensor on meta, which has no data. One in host memory or on a GPU works"
    elif _text(tensor.layout) != "torch.strided":
        got = f"a torch tensor with layout {tensor.layout}. `{name}.to_dense()` works"
    elif tensor.is_neg():
        got = f"a torch tensor with the negative bit set. `{name}.resolve_neg()` works"
    elif tensor._is_zerotensor():
        got = f"a torch tensor of zeros without memory. `{name}.clone()` works"
    elif not _has_memory(tensor):
        got = (
            "a torch tensor without memory, as under torch.compile and torch.vmap. The operators of `flashlab.torch` "
            "take such q, k and v"
        )
    else:
        return
    raise DeviceError(f"{name}: wanted {wanted}, got {got}.")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def stream_handle(stream: Any) -> int:
    """The CUstream handle of an integer, a torch, CuPy or cuda.core stream, or any object with `__cuda_stream__`.

    Raises:
        ParameterError: the object is not a stream.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if value is not None:
            return int(value)
    raise ParameterError(
        "stream: wanted a CUstream as an integer, a torch, CuPy or cuda.core stream, or an object with "
        f"__cuda_stream__, got {type(stream).__name__}"
    )


def current_stream(library: str, device: int) -> int:
    """The handle of the current stream of torch or CuPy on a device; 0, the default stream, for other libraries."""
    if library == "torch":
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what torch's own generated code asks
        return int(torch.cuda.current_stream(device).cuda_stream if raw is None else raw(device))
    if library == "cupy":
        return int(importlib.import_module("cupy").cuda.get_current_stream(device).ptr)
    return 0


def on_device(obj: Any, name: str, stream: int | None = None) -> DeviceArray:
    """View a torch tensor, a CuPy array, or any DLPack or `__cuda_array_interface__` object on a GPU.

    `name` is used in errors. `stream` is the consumer: producers with DLPack or the interface (version 3, which names a
    stream) order their work before it. Torch and CuPy arrays are ordered by the caller.

    Raises:
        DeviceError: the object is not an array, or not on a CUDA GPU.
        DTypeError: the data type is unsupported.
    """
    library = library_of(obj)
    if library == "torch" and hasattr(obj, "data_ptr"):
        _refuse_no_strides(obj, name, _ON_GPU)
        if obj.device.type != "cuda":
            raise DeviceError(
                f"{name}: wanted {_ON_GPU}, got a torch tensor on {obj.device}. `{name}.cuda()` moves it."
            )
        return DeviceArray(
            pointer=obj.data_ptr(),
            shape=tuple(obj.shape),
            strides=tuple(obj.stride()),
            dtype=_text(obj.dtype).removeprefix("torch."),
            device=obj.device.index,
            owner=obj,
            library="torch",
        )
    if library == "cupy" and hasattr(obj, "data") and hasattr(obj.data, "ptr"):
        return DeviceArray(
            pointer=obj.data.ptr,
            shape=tuple(obj.shape),
            strides=tuple(stride // obj.dtype.itemsize for stride in obj.strides),
            dtype=obj.dtype.name,
            device=obj.device.id,
            owner=obj,
            library="cupy",
        )
    if isinstance(obj, np.ndarray):
        raise DeviceError(
            f"{name}: wanted {_ON_GPU}, got a NumPy array in host memory. `cupy.asarray({name})` moves it."
        )
    if hasattr(obj, "__dlpack__") or hasattr(obj, "__cuda_array_interface__"):
        return _through_protocol(obj, name, stream)
    raise _no_array(obj, name, _ON_GPU, "cupy")


def _through_protocol(obj: Any, name: str, stream: int | None) -> DeviceArray:
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package cuda-core to read {name}, got: {error}. `pip install cuda-core` installs it."
        ) from error
    kind = type(obj).__name__
    if hasattr(obj, "__dlpack_device__"):
        device_type = _dlpack_device(obj, name, _ON_GPU)
        if device_type not in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            raise DeviceError(f"{name}: wanted {_ON_GPU}, got {kind} on DLPack device type {device_type}")
    # In DLPack, the legacy default stream is 1, 0 is invalid, and -1 requests no ordering.
    consumer = -1 if stream is None else stream or 1
    try:
        if hasattr(obj, "__dlpack__"):
            view = StridedMemoryView.from_dlpack(obj, consumer)
        else:
            view = StridedMemoryView.from_cuda_array_interface(obj, consumer)
        dtype = view.dtype
    except NotImplementedError as error:
        raise DTypeError(f"{name}: wanted float16 or bfloat16, got an unsupported data type: {error}") from error
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DeviceError(f"{name}: wanted {_ON_GPU}, got {kind}: {error}") from error
    if not view.is_device_accessible or view.device_id < 0:
        raise DeviceError(f"{name}: wanted {_ON_GPU}, got {kind} in host memory")
    shape = tuple(int(length) for length in view.shape)
    return DeviceArray(
        pointer=int(view.ptr),
        shape=shape,
        strides=tuple(view.strides) if view.strides is not None else contiguous_strides(shape),
        dtype="unknown" if dtype is None else dtype.name,
        device=int(view.device_id),
        owner=(obj, view),
        library="other",
        readonly=bool(view.readonly),
    )


@contextmanager
def torch_stream(stream: int, device: Any) -> Iterator[None]:
    """Make a stream the current one of torch, on a torch device or device index."""
    cuda = importlib.import_module("torch").cuda
    if cuda.current_stream(device).cuda_stream == stream:
        yield
        return
    # ExternalStream(0) would create a new stream instead of using the default one.
    theirs = cuda.ExternalStream(stream, device) if stream else cuda.default_stream(device)
    with cuda.stream(theirs):
        yield


@contextmanager
def _current(stream: int, like: Any) -> Iterator[None]:
    """Make a stream the current one of the library of `like`, on its device."""
    if library_of(like) == "torch":
        with torch_stream(stream, like.device):
            yield
        return
    with like.device:
        # ExternalStream is deprecated in favour of Stream.from_external, whose result destroys the stream when
        # collected, but this stream belongs to the caller.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            theirs = importlib.import_module("cupy").cuda.ExternalStream(stream)
        with theirs:
            yield


class TorchCopies:
    """Tensors derived from GPU arrays with torch, updated in place when a source tensor has been written."""

    def __init__(self, arrays: Mapping[str, Any], make: Callable[[Any], tuple[Any, ...]], stream: int) -> None:
        """`make` maps an array, as a torch tensor, to its derived tensors, whose shapes must not change.

        It runs on `stream`, on which the tensors are read, so that no synchronisation is needed.
        """
        torch = importlib.import_module("torch")
        self._sources = {name: x if torch.is_tensor(x) else torch.from_dlpack(x) for name, x in arrays.items()}
        self._make, self._stream = make, stream
        self._versions = self._seen()
        with self._enqueued():
            self.made = {name: make(source) for name, source in self._sources.items()}

    def _enqueued(self) -> AbstractContextManager[None]:
        return torch_stream(self._stream, next(iter(self._sources.values())).device)

    def _seen(self) -> list[int | None]:
        """Version counter of each source; None for inference tensors, which have none."""
        return [None if source.is_inference() else source._version for source in self._sources.values()]

    def refresh(self) -> None:
        """Update the derived tensors if a source may have changed."""
        if None not in self._versions and self._versions == self._seen():
            return
        self._versions = self._seen()
        with self._enqueued():
            for name, source in self._sources.items():
                for old, new in zip(self.made[name], self._make(source), strict=True):
                    old.copy_(new)

    def before(self, launch: Callable[[], None], *needs: Any) -> Callable[[], None]:
        """Wrap a launch to refresh the tensors first; it keeps `needs` alive."""

        def refreshed(_: Any = needs) -> None:
            self.refresh()
            launch()

        return refreshed


# --- in host memory ---------------------------------------------------------------------------------------------------


def on_host(obj: Any, name: str) -> DeviceArray:
    """View an array in host memory; `name` is used in errors.

    Raises:
        DeviceError: the object is not an array, or is on a GPU.
        DTypeError, LayoutError: NumPy does not support its data type or strides.
    """
    if library_of(obj) == "torch" and hasattr(obj, "is_nested"):
        _refuse_no_strides(obj, name, _ON_HOST)
    if _memory_of(obj, name) == "gpu":
        raise DeviceError(
            f"{name}: wanted {_ON_HOST} for a run on the CPU, got {type(obj).__name__} on a GPU. "
            f"`{name}.cpu()` (torch) or `cupy.asnumpy({name})` copies it; without device='cpu', arrays on a GPU run "
            "there."
        )
    if not hasattr(obj, "__dlpack__"):
        raise _no_array(obj, name, _ON_HOST, "numpy")
    library = library_of(obj)
    dtype = None
    try:
        if isinstance(obj, np.ndarray):
            array = obj
        elif library == "torch":
            torch = importlib.import_module("torch")
            dtype = str(obj.dtype).removeprefix("torch.")
            # NumPy lacks these types: pass the bits as integers.
            bits = torch.int16 if dtype == "bfloat16" else torch.uint8 if dtype.startswith("float8") else None
            array = (obj.detach() if bits is None else obj.detach().view(bits)).numpy()
        else:
            array = np.from_dlpack(obj)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if dtype:  # torch's: quantized, or complex and conjugated
            works = f"`{name}.{'dequantize().' if obj.is_quantized else ''}half()` works."
            raise DTypeError(f"{name}: wanted float16 or bfloat16, got {dtype}. {works}") from error
        raise DTypeError(
            f"{name}: wanted {_ON_HOST}, of float16 or bfloat16, got {type(obj).__name__}, which NumPy cannot read: "
            f"{error}. `numpy.asarray` of it works, for bfloat16 with dtype ml_dtypes.bfloat16."
        ) from error
    if isinstance(array, np.ma.MaskedArray):
        raise DTypeError(
            f"{name}: wanted {_ON_HOST}, got a masked array, whose mask would be ignored. `{name}.filled()` works."
        )
    if not array.dtype.isnative:
        raise DTypeError(
            f"{name}: wanted this machine's byte order, got {array.dtype}. "
            f'`{name}.astype("{array.dtype.name}")` works.'
        )
    if any(stride % array.itemsize for stride in array.strides):
        raise LayoutError(
            f"{name}: wanted strides of whole elements, got {array.strides} bytes. "
            f"`ascontiguousarray({name})` makes one."
        )
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return DeviceArray(
        pointer=int(array.ctypes.data),
        shape=tuple(array.shape),
        strides=strides if array.size else contiguous_strides(array.shape),  # NumPy makes them 0
        dtype=dtype or array.dtype.name,
        device=HOST,
        owner=array,
        library=library,
        readonly=not array.flags.writeable,
    )


# --- in either --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a call runs: host memory, or a GPU and the stream on which the call is enqueued."""

    like: Any
    """The caller's Q, whose library allocates new arrays."""
    stream: int | None
    """None in host memory."""

    def view(self, array: Any, name: str) -> DeviceArray:
        """View an array, which must be there.

        Raises:
            DeviceError, DTypeError, LayoutError: as `on_host` and `on_device` do.
        """
        return on_host(array, name) if self.stream is None else on_device(array, name, self.stream)

    def enqueued(self) -> AbstractContextManager[None]:
        """Context in which the caller's library uses the call's stream: its work is ordered before the kernel, and its
        allocations are reused only after that stream has finished with them."""
        if self.stream is None or library_of(self.like) == "other":
            return nullcontext()
        return _current(self.stream, self.like)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate an array there: of the caller's library, or of NumPy in host memory unless that is torch.

        Raises:
            ParameterError: on a GPU, the library is neither torch nor CuPy.
        """
        library = library_of(self.like)
        if library == "torch":
            torch = importlib.import_module("torch")
            return torch.empty(shape, dtype=getattr(torch, dtype), device=self.like.device)
        if self.stream is None:
            return np.empty(shape, dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        if library == "cupy":
            cupy = importlib.import_module("cupy")
            with _current(self.stream, self.like):  # CuPy's pool hands memory back to the stream that allocated it
                return cupy.empty(shape, dtype=self.like.dtype if self.like.dtype.name == dtype else dtype)
        raise ParameterError(
            "out and return_lse: wanted torch or CuPy arrays, whose library can allocate outputs, got "
            f"{type(self.like).__name__}. Pass `out=`, and leave return_lse False."
        )


def place_of(q: Any, stream: Any | None, device: str | None = None, name: str = "q") -> Place:
    """Determine where a call runs: on `device`, `cpu` or `gpu`, by default that of Q, and on the current stream.

    `name` is the name of Q in errors.

    Raises:
        ParameterError: `stream` or `device` is invalid, or a stream was given for the CPU.
        DeviceError, DTypeError: Q is not an array.
    """
    devices = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}
    if device is not None and (not isinstance(device, str) or device not in devices):
        raise ParameterError(f"device: wanted {', '.join(devices)}, or None for where the arrays are, got {device!r}")
    memory = _memory_of(q, name) if device is None else devices[device]
    if memory is None:
        raise _no_array(q, name, _ANYWHERE, "numpy")
    if memory == "cpu":
        if stream is not None:
            raise ParameterError("stream: wanted None for a run on the CPU, which is done when the call returns")
        return Place(q, None)
    if stream is not None:
        return Place(q, stream_handle(stream))
    library = library_of(q)
    # Only torch and CuPy have a current stream, per device; arrays of other libraries are ordered before the default
    # stream.
    return Place(q, 0 if library == "other" else current_stream(library, on_device(q, name).device))
