"""GPU properties, contexts and memory, and kernel launches on the caller's stream.

Importing this module does not touch the driver. Every driver error becomes a `LaunchError` with the driver's name and
text.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from flashlab.core.errors import (
    LaunchError,
    MissingPackageError,
    NoGpuError,
    UnsupportedError,
)
from flashlab.core.paths import INSTALLED, slug
from flashlab.kernels.registry import LARGEST_CLUSTER, PORTABLE_CLUSTER, arch_for
from flashlab.record.schema import Gpu
from flashlab.run.lru import LruCache

if TYPE_CHECKING:
    from flashlab.build.compiler import Cubin

WORKS_WITHOUT = (
    "Without a GPU work `flashlab doctor`, `stages`, `compile`, `sass`, `explain`"
    + (
        ""
        if INSTALLED
        else ", `results`, `compare`, `claims`, `tuned`, `collect`, `repair`, `report`, `sweep plan`, "
        "`bench --dry-run`, `tune --dry-run`, `ablate --list`"
    )
    + " and `check --on cpu`; and in Python `flashlab.attention` and `flashlab.emulate` on arrays in host memory."
)
_WANTED = "wanted a CUDA GPU, got "
NVML_SM, NVML_CORE = 1, 0
"""nvml.h: SM clock, and on-die temperature sensor."""


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """Properties of a GPU, as reported by the driver."""

    index: int
    """CUDA device index in this process."""
    slug: str
    """Folder name under data/: `nvidia-h200`."""
    name: str
    compute_capability: tuple[int, int]
    arch: str
    """The architecture for which stages are compiled."""
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    max_smem_bytes: int
    """Maximum dynamic shared memory per CTA."""
    fingerprint: str
    """Anonymous identifier of the device: see `schema.Gpu`."""

    @cached_property
    def record(self) -> Gpu:
        """The GPU as recorded, with readings of NVML, which is loaded only here because that would delay the first
        call."""
        handle = nvml_handle(self.index)
        clock_mhz = nvml_read("nvmlDeviceGetMaxClockInfo", handle, NVML_SM)
        clock_mhz = clock_mhz or _attribute(call("cuDeviceGet", self.index), "CLOCK_RATE") / 1e3
        limit_mw = nvml_read("nvmlDeviceGetEnforcedPowerLimit", handle)
        driver = None if handle is None else nvml_read("nvmlSystemGetDriverVersion")
        return Gpu(
            **{name: value for name, value in asdict(self).items() if name in Gpu.model_fields},
            max_sm_clock_mhz=float(clock_mhz) or None,
            power_limit_w=limit_mw / 1e3 if limit_mw else None,
            driver=str(driver or "unknown"),
        )


@dataclass(frozen=True, kw_only=True)
class Function:
    """A kernel loaded on a device."""

    cubin: Cubin
    device: int
    handle: Any
    """cuda.bindings `CUfunction`."""
    library: _Library
    """Keeps the machine code loaded."""


@cache
def _bindings() -> Any:
    """Import the driver bindings. Failure is not cached, so that a later call retries."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MissingPackageError(
            f"wanted the Python package cuda-bindings to reach the driver, got: {error}. "
            "`pip install 'cuda-bindings>=13,<14'` installs it."
        ) from error


def call(function: str, *args: Any) -> Any:
    """Call a driver function by name and return its results without the status: None, a value or a tuple.

    Raises:
        LaunchError: the driver returned an error; the message has its name and text.
    """
    driver = _bindings()
    status, *values = getattr(driver, function)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{function}: {describe(status)}")
    return values[0] if len(values) == 1 else tuple(values) or None


def describe(status: Any) -> str:
    """Format the driver's name and text of a status."""
    driver = _bindings()
    texts = []
    for function in (driver.cuGetErrorName, driver.cuGetErrorString):
        error, text = function(status)
        texts.append(text.decode() if error == driver.CUresult.CUDA_SUCCESS and text else str(status))
    return f"{texts[0]} ({texts[1]})"


@cache
def require() -> None:
    """Initialise the driver once. Failure is not cached, so that a later call retries.

    Raises:
        NoGpuError, MissingPackageError: no GPU can be used; the message has the reason.
    """
    driver = _bindings()
    try:
        (status,) = driver.cuInit(0)
        count = call("cuDeviceGetCount") if status == driver.CUresult.CUDA_SUCCESS else 0
    except RuntimeError as error:  # cuda.bindings could not load libcuda
        raise NoGpuError(f"{_WANTED}no driver: {error}. {WORKS_WITHOUT}") from error
    except LaunchError as error:
        raise NoGpuError(f"{_WANTED}{error}. {WORKS_WITHOUT}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise NoGpuError(f"{_WANTED}{describe(status)} from the driver. {WORKS_WITHOUT}")
    if count < 1:
        raise NoGpuError(f"{_WANTED}a driver that sees none. {WORKS_WITHOUT}")


def available() -> str | None:
    """Return None if a GPU can be used, else the reason. Never raises."""
    try:
        require()
    except (NoGpuError, MissingPackageError) as error:
        return str(error)
    return None


def absence() -> str:
    """Short form of the reason of `available`; empty if a GPU can be used."""
    return (available() or "").removesuffix(f" {WORKS_WITHOUT}").removeprefix(_WANTED).rstrip(".")


def device_count() -> int:
    """Number of GPUs visible to this process; 0 if none can be used."""
    return int(call("cuDeviceGetCount")) if available() is None else 0


def _attribute(device: Any, name: str) -> int:
    enum = _bindings().CUdevice_attribute
    return int(call("cuDeviceGetAttribute", getattr(enum, f"CU_DEVICE_ATTRIBUTE_{name}"), device))


def nvml_handle(index: int) -> Any | None:
    """Return the NVML handle of a CUDA device, or None if NVML or its Python package is missing.

    Matched by PCI address, because NVML numbers devices in its own order and ignores CUDA_VISIBLE_DEVICES.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    device = call("cuDeviceGet", index)
    bus = call("cuDeviceGetPCIBusId", 32, device)
    try:
        nvml.nvmlInit()
        return nvml.nvmlDeviceGetHandleByPciBusId(bus.split(b"\0")[0].decode())
    except nvml.NVMLError:
        return None


def nvml_read(function: str, *args: Any) -> Any | None:
    """Return an NVML reading, or None if it is unavailable here or an argument is None."""
    if None in args:
        return None
    nvml = importlib.import_module("pynvml")
    try:
        return getattr(nvml, function)(*args)
    except nvml.NVMLError:
        return None


@cache
def _info(index: int) -> GpuInfo:
    count = device_count()
    if not 0 <= index < count:
        raise NoGpuError(f"wanted GPU {index}, got {count} GPU(s) numbered from 0. {WORKS_WITHOUT}")
    device = call("cuDeviceGet", index)
    name = call("cuDeviceGetName", 256, device).split(b"\0")[0].decode()
    capability = (_attribute(device, "COMPUTE_CAPABILITY_MAJOR"), _attribute(device, "COMPUTE_CAPABILITY_MINOR"))
    uuid = bytes(call("cuDeviceGetUuid", device).bytes)
    return GpuInfo(
        index=index,
        name=name,
        slug=slug(name),
        compute_capability=capability,
        arch=arch_for(capability),
        sm_count=_attribute(device, "MULTIPROCESSOR_COUNT"),
        memory_bytes=int(call("cuDeviceTotalMem", device)),
        l2_bytes=_attribute(device, "L2_CACHE_SIZE"),
        fingerprint=hashlib.sha256(uuid).hexdigest()[:12],
        max_smem_bytes=_attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


def info(index: int | None = None) -> GpuInfo:
    """Return the properties of a GPU, by default the current one, or the first if none is current.

    Raises:
        NoGpuError: no GPU, no driver, or no such index.
        UnsupportedError: flashlab does not support the architecture of the GPU.
    """
    require()
    if index is None:
        status, device = _bindings().cuCtxGetDevice()
        index = int(device) if status == _bindings().CUresult.CUDA_SUCCESS else 0
    return _info(index)


@cache
def _primary_context(device: int) -> Any:
    require()
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))


@cache
def _primary_handle(device: int) -> int:
    return int(_primary_context(device))


@contextmanager
def context(device: int) -> Iterator[None]:
    """Make a device's primary context, which torch and CuPy use, current, and restore the caller's afterwards."""
    primary = _primary_context(device)
    current = call("cuCtxGetCurrent")
    if int(current) == int(primary):
        yield
        return
    call("cuCtxPushCurrent", primary)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def is_current(device: int) -> bool:
    """Whether a device's primary context is the current one."""
    status, current = _bindings().cuCtxGetCurrent()
    return not status and int(current) == _primary_handle(device)


@cache
def _is_capturing() -> Any:
    """The driver's cuStreamIsCapturing, without the overhead of the Enum that cuda.bindings returns."""
    address, _ = call("cuGetProcAddress", b"cuStreamIsCapturing", 10000, 0)
    return ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(int(address))


_DEFAULT_STREAM = -1
"""Id of the default stream, distinct from all others."""
_SEMAPHORE_BYTES = 32
"""Size of a sem_t on 64-bit Linux."""


def is_capturing(stream: int) -> bool:
    """Whether a stream of the current context is being captured into a graph; False for the default stream, 0."""
    capturing = ctypes.c_int()
    status = _is_capturing()(stream, ctypes.byref(capturing)) if stream else 0
    if status:
        raise LaunchError(f"querying stream capture: {describe(_bindings().CUresult(status))}")
    return bool(capturing.value)


def stream_id(stream: int) -> int | None:
    """Return an id of a stream of the current context that is never reused in this process, unlike handles.

    None while the stream is being captured into a graph.
    """
    if not stream:
        return _DEFAULT_STREAM
    if is_capturing(stream):
        return None
    driver = _bindings()
    status, number = driver.cuStreamGetId(driver.CUstream(stream))
    if status:
        raise LaunchError(f"identifying a stream: {describe(status)}")
    return int(number)


def synchronize(device: int) -> None:
    """Wait for all work on a device.

    Raises:
        LaunchError: a kernel launched earlier failed.
    """
    with context(device):
        call("cuCtxSynchronize")


def memory_free_bytes(device: int) -> int:
    """Free device memory, in bytes."""
    with context(device):
        free, _ = call("cuMemGetInfo")
    return int(free)


class _Library:
    """Machine code loaded in the driver, unloaded when this is collected."""

    __slots__ = ("handle",)

    def __init__(self, code: bytes) -> None:
        self.handle = call("cuLibraryLoadData", code, [], [], 0, [], [], 0)

    def __del__(self) -> None:
        # See `Zeroed.__del__`.
        with suppress(Exception):
            call("cuLibraryUnload", self.handle)


def _load(cubin: Cubin, device: int, smem_bytes: int) -> Function:
    driver = _bindings()
    gpu = info(device)
    if smem_bytes > gpu.max_smem_bytes:
        raise UnsupportedError(
            f"{cubin.name}: wanted {smem_bytes} bytes of shared memory per CTA, got a GPU with at "
            f"most {gpu.max_smem_bytes} ({gpu.name}). Smaller tiles or fewer pipeline stages fit."
        )
    with context(device):
        try:
            library = _Library(cubin.code)
            kernel = call("cuLibraryGetKernel", library.handle, cubin.entry.encode())
        except LaunchError as error:
            raise LaunchError(f"loading {cubin.name} for {cubin.arch} on {gpu.name} ({gpu.arch}): {error}") from error
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuKernelSetAttribute", attribute, smem_bytes, kernel, call("cuDeviceGet", device))
        function = call("cuKernelGetFunction", kernel)
    return Function(cubin=cubin, device=device, handle=function, library=library)


_loaded: LruCache[Function] = LruCache(512)
"""By digest of the code, kernel, device and shared memory."""


def load(cubin: Cubin, device: int, *, smem_bytes: int | None = None) -> Function:
    """Load the kernel of a cubin on a device, once per process.

    `smem_bytes` is the dynamic shared memory to allow, by default that of the cubin's launch shape.

    Raises:
        LaunchError: the driver rejects the machine code.
        UnsupportedError: the GPU has less shared memory than the kernel needs.
    """
    if smem_bytes is None:
        smem_bytes = cubin.launch_shape.smem_bytes if cubin.launch_shape else 0
    key = (cubin.sha256, cubin.entry, device, smem_bytes)
    function = _loaded.get(key)
    if function is None:
        function = _load(cubin, device, smem_bytes)
        _loaded.put(key, function)
    return function


def read(device: int, address: int, size_bytes: int) -> bytearray:
    """Synchronise the device and copy memory from it."""
    synchronize(device)
    content = bytearray(size_bytes)
    with context(device):
        call("cuMemcpyDtoH", ctypes.addressof(ctypes.c_char.from_buffer(content)), address, size_bytes)
    return content


class Zeroed:
    """Device memory whose first `zero_bytes`, by default all, are zeroed on `stream`.

    Freed when collected, which synchronises the device.
    """

    __slots__ = ("_device", "pointer", "size_bytes")

    def __init__(self, device: int, size_bytes: int, stream: int = 0, zero_bytes: int | None = None) -> None:
        self._device, self.size_bytes = device, size_bytes
        with context(device):
            self.pointer = int(call("cuMemAlloc", size_bytes))
            zero_bytes = size_bytes if zero_bytes is None else zero_bytes
            call("cuMemsetD8Async", self.pointer, 0, zero_bytes, _bindings().CUstream(stream))

    def read(self) -> bytearray:
        """Synchronise the device and copy the contents."""
        return read(self._device, self.pointer, self.size_bytes)

    def __del__(self) -> None:
        # At exit, or with a broken context, the driver has freed it already.
        with suppress(Exception):
            call("cuMemFree", self.pointer)


_of_graphs: list[tuple[Any, Zeroed]] = []
"""Memory owned by graphs, each with the semaphore that is posted when its graph is destroyed."""
_of_graphs_lock = threading.Lock()


def graph_id(stream: int) -> tuple[int, int]:
    """Return an id of the graph and stream of a stream capture in progress."""
    return int(call("cuStreamGetCaptureInfo", _bindings().CUstream(stream))[1]), stream


def zeroed_of_graph(device: int, size_bytes: int, stream: int) -> int:
    """Return the address of zeroed memory that lives as long as the graph being captured on `stream`.

    The allocation is not a graph node. The graph owns a user object whose destructor posts a semaphore, because it runs
    on a driver thread that may call neither Python nor CUDA. Memory whose semaphore was posted is freed here.
    """
    driver, libc, gone = _bindings(), ctypes.CDLL(None), ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    libc.sem_init(gone, 0, 0)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(gone))  # leaked: graphs may outlive Python at exit
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED  # do not capture the allocation
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        with _of_graphs_lock:
            _of_graphs[:] = [(sem, memory) for sem, memory in _of_graphs if libc.sem_trywait(sem)]
        with context(device):
            other = call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            memory = Zeroed(device, size_bytes, int(other))
            call("cuStreamSynchronize", other)
            call("cuStreamDestroy", other)
            graph = call("cuStreamGetCaptureInfo", driver.CUstream(stream))[2]
            post = driver.CUhostFn(ctypes.cast(libc.sem_post, ctypes.c_void_p).value)
            no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC.value
            owner = call("cuUserObjectCreate", ctypes.addressof(gone), post, 1, no_sync)
            give = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE.value
            call("cuGraphRetainUserObject", graph, owner, 1, give)
        with _of_graphs_lock:
            _of_graphs.append((gone, memory))
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)
    return memory.pointer


def blocks_per_sm(function: Function, threads: int, smem_bytes: int) -> int:
    """Resident CTAs per SM, from the driver's occupancy calculation."""
    with context(function.device):
        return int(call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function.handle, threads, smem_bytes))


def most_splits(function: Function, threads: int, smem_bytes: int) -> int:
    """Maximum cluster size of a kernel on its device, including non-portable sizes."""
    config = _bindings().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = LARGEST_CLUSTER, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem_bytes
    with context(function.device):
        _allow_any_cluster(function)
        return int(call("cuOccupancyMaxPotentialClusterSize", function.handle, config))


def _allow_any_cluster(function: Function) -> None:
    attribute = _bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    call("cuFuncSetAttribute", function.handle, attribute, 1)


class Launch:
    """A launch with fixed arguments; calling it enqueues the kernel and returns immediately.

    The kernels take structs by value, which cuda.core's `launch` does not support (NVIDIA/cuda-python issue 2343), so
    this calls `cuLaunchKernel` of cuda.bindings with the address of the array of argument addresses. `params` are the
    kernel parameters in order, ctypes values. `cluster` is the cluster size along x for kernels that leave it to the
    launch; 0: the kernel's own. `early` enables programmatic dependent launch, which lets the kernel start while its
    predecessor finishes; not in graphs, where such an edge takes longer than an ordinary one.
    """

    __slots__ = ("_early", "_how", "_keep", "_ok", "_plain", "_stream", "device", "function", "params")

    def __init__(
        self,
        function: Function,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem_bytes: int,
        params: Sequence[Any],
        stream: int,
        cluster: int = 0,
        early: bool = False,
    ) -> None:
        driver = _bindings()
        pointers = (ctypes.c_void_p * len(params))(*map(ctypes.addressof, params))
        self.function = function
        self.device = function.device
        self.params = tuple(params)
        self._how: dict[str, Any] = {"grid": grid, "block": block, "smem_bytes": smem_bytes}
        self._how |= {"cluster": cluster, "early": early}
        self._keep = pointers
        self._ok = driver.CUresult.CUDA_SUCCESS
        self._stream = stream
        attributes = []
        if cluster > PORTABLE_CLUSTER:
            with context(function.device):
                _allow_any_cluster(function)
        if cluster:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attributes[-1].value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
        self._plain = self._form(attributes)
        self._early: tuple[Any, tuple[Any, ...]] | None = None
        if early:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
            self._early = self._form(attributes)

    def _form(self, attributes: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The driver function for a launch with these attributes, and its arguments."""
        driver, address = _bindings(), ctypes.addressof(self._keep)
        stream, grid, block = driver.CUstream(self._stream), self._how["grid"], self._how["block"]
        if not attributes:
            smem_bytes = self._how["smem_bytes"]
            return driver.cuLaunchKernel, (self.function.handle, *grid, *block, smem_bytes, stream, address, 0)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = self._how["smem_bytes"], stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        return driver.cuLaunchKernelEx, (config, self.function.handle, address, 0)

    def on(self, stream: int) -> Launch:
        """The same launch, sharing its arguments, on another stream."""
        return Launch(self.function, **self._how, params=self.params, stream=stream)

    def __call__(self) -> None:
        """Enqueue the kernel. The device's context must be current, as for the library that owns the arrays.

        Raises:
            LaunchError: the driver rejects the launch.
        """
        form = self._plain if self._early is None or is_capturing(self._stream) else self._early
        launch, arguments = form
        (status,) = launch(*arguments)
        if status != self._ok:
            raise LaunchError(f"launching {self.function.cubin.name} ({launch.__name__}): {describe(status)}")
