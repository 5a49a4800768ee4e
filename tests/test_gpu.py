"""Arrays, streams and refusals that need no GPU."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashlab.core import errors
from flashlab.record.schema import Gpu
from flashlab.run import arrays, fp8, gpu


def test_strides_of_a_contiguous_array() -> None:
    assert arrays.contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert arrays.contiguous_strides((2, 0, 4)) == (4, 4, 1)
    assert arrays.contiguous_strides(()) == ()


class _Pair:
    """An object with the `__cuda_stream__` protocol."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 77)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (5, 5),
        (_Pair(), 77),
        (SimpleNamespace(__cuda_stream__=(0, 78)), 78),
        (SimpleNamespace(cuda_stream=6), 6),
        (SimpleNamespace(ptr=7), 7),
        (SimpleNamespace(handle=8), 8),
    ],
)
def test_streams_of_every_library(stream: Any, handle: int) -> None:
    assert arrays.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [-1, True, "0", 1.5, object()])
def test_what_is_no_stream(stream: Any) -> None:
    with pytest.raises(errors.ParameterError, match="stream: wanted"):
        arrays.stream_handle(stream)


class _Torch:
    """torch as far as streams go: which one is current, on device 0."""

    def __init__(self) -> None:
        self.streams = [3]
        self.cuda = self
        self.is_tensor = lambda _: True

    def current_stream(self, device: Any) -> SimpleNamespace:
        assert device == 0
        return SimpleNamespace(cuda_stream=self.streams[-1])

    def default_stream(self, device: Any) -> SimpleNamespace:
        assert device == 0
        return SimpleNamespace(cuda_stream=0)

    def ExternalStream(self, stream: int, device: Any) -> SimpleNamespace:  # noqa: N802 - torch's name
        assert device == 0
        assert stream > 0
        return SimpleNamespace(cuda_stream=stream)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        self.streams.append(stream.cuda_stream)
        yield
        self.streams.pop()


class _Tensor:
    """A tensor that notes on which streams it is written to."""

    device, _version = 0, 0

    def __init__(self, torch: _Torch) -> None:
        self.torch, self.written_on = torch, [torch.streams[-1]]

    def copy_(self, _: Any) -> None:
        self.written_on.append(self.torch.streams[-1])

    __setitem__ = lambda self, _, to: self.copy_(to)  # noqa: E731
    is_inference = lambda _: False  # noqa: E731


_Tensor.__module__ = "torch"


@pytest.mark.parametrize("stream", [0, 3, 5])
def test_what_a_call_makes_for_itself_is_made_on_its_stream(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel waits for no other stream, and memory that torch is given back is handed on in its stream's order."""
    torch = _Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    source = _Tensor(torch)
    copies = arrays.TorchCopies({"K": source}, lambda _: (_Tensor(torch),), stream)
    source._version = 1
    copies.refresh()
    (copy,) = copies.made["K"]
    assert copy.written_on == [stream, stream]
    monkeypatch.setattr(arrays.Place, "empty", lambda *_: _Tensor(torch))
    assert fp8._ones(arrays.Place(source, stream), (1, 2)).written_on == [stream, stream]
    assert torch.streams == [3]


def test_host_arrays_are_refused_with_what_works() -> None:
    with pytest.raises(errors.DeviceError, match=r"q: wanted .*got a NumPy array.*cupy.asarray\(q\)"):
        arrays.on_device(np.zeros(3, np.float16), "q")
    with pytest.raises(errors.DeviceError, match="got list"):
        arrays.on_device([1.0], "q")


class _HostDlpack:
    """A library whose arrays have DLPack, in host memory."""

    def __init__(self) -> None:
        self._array = np.zeros((2, 3), np.float16)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_a_dlpack_array_in_host_memory_is_refused() -> None:
    with pytest.raises(errors.DeviceError, match=r"k: wanted .*DLPack device type 1"):
        arrays.on_device(_HostDlpack(), "k")


class _Interface:
    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (1, 2, 3, 64), "typestr": "<f2", "data": (1 << 20, False), "strides": None, "version": 3, **changes
        }  # fmt: skip


def test_an_array_interface_that_is_broken_is_refused() -> None:
    with pytest.raises((errors.DeviceError, errors.DTypeError), match="v: wanted"):
        arrays.on_device(_Interface(typestr="nonsense"), "v")


def _fake_torch(**fields: Any) -> Any:
    """Something that says it is torch's, as far as it is looked at."""
    kind = type("Tensor", (), {"__module__": "torch"})
    tensor = kind()
    base = {
        "device": SimpleNamespace(type="cuda", index=1),
        "layout": "torch.strided",
        "is_nested": False,
        "is_neg": lambda: False,
        "_is_zerotensor": lambda: False,
        "untyped_storage": lambda: SimpleNamespace(device=SimpleNamespace(type="cuda")),
        "dtype": "torch.bfloat16",
        "shape": (1, 2, 3, 64),
        "stride": lambda: (384, 192, 64, 1),
        "data_ptr": lambda: 4096,
    }
    for name, value in {**base, **fields}.items():
        setattr(tensor, name, value)
    return tensor


def test_a_torch_tensor_is_read_through_its_own_attributes() -> None:
    view = arrays.on_device(_fake_torch(), "q")
    assert (view.pointer, view.device, view.dtype, view.library) == (4096, 1, "bfloat16", "torch")
    assert view.strides == (384, 192, 64, 1)


def test_torch_tensors_that_cannot_be_read() -> None:
    with pytest.raises(errors.DeviceError, match=r"q.cuda\(\)"):
        arrays.on_device(_fake_torch(device=SimpleNamespace(type="cpu", index=None)), "q")
    with pytest.raises(errors.DeviceError, match="sparse"):
        arrays.on_device(_fake_torch(layout="torch.sparse_coo"), "q")


def test_a_cupy_array_has_strides_in_bytes() -> None:
    kind = type("ndarray", (), {"__module__": "cupy"})
    array = kind()
    for name, value in {
        "data": SimpleNamespace(ptr=8192), "shape": (2, 64), "strides": (144, 2), "dtype": np.dtype(np.float16),
        "device": SimpleNamespace(id=0),
    }.items():  # fmt: skip
        setattr(array, name, value)
    view = arrays.on_device(array, "q")
    assert (view.pointer, view.strides, view.dtype, view.library) == (8192, (72, 1), "float16", "cupy")


def test_a_subclass_of_a_librarys_array_is_that_librarys() -> None:
    base = type("Tensor", (), {"__module__": "torch"})
    mine = type("Mine", (base,), {"__module__": "somewhere"})
    assert arrays.library_of(mine()) == "torch"
    assert arrays.library_of(np.zeros(1)) == "other"


class _NoDriver:
    """cuda.bindings where there is no libcuda."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    @staticmethod
    def cuInit(flags: int) -> Any:  # noqa: N802
        raise RuntimeError("Failed to dlopen libcuda.so.1")


class _Driver:
    """A driver whose calls return what they are told."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, init: int = 0, count: int = 1) -> None:
        self.init = init
        self.count = count

    def cuInit(self, flags: int) -> Any:  # noqa: N802
        return (self.init,)

    def cuDeviceGetCount(self) -> Any:  # noqa: N802
        return (0, self.count)

    def cuGetErrorName(self, status: int) -> Any:  # noqa: N802
        return (0, b"CUDA_ERROR_OLD")

    def cuGetErrorString(self, status: int) -> Any:  # noqa: N802
        return (0, b"the driver is old")

    def cuPair(self) -> Any:  # noqa: N802
        return (0, 1, 2)

    def cuNothing(self) -> Any:  # noqa: N802
        return (0,)

    def cuFails(self) -> Any:  # noqa: N802
        return (35, None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(fake: Any) -> None:
        monkeypatch.setattr(gpu, "_bindings", lambda: fake)
        gpu.require.cache_clear()

    yield use
    gpu.require.cache_clear()


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (_NoDriver(), "no driver: Failed to dlopen libcuda.so.1"),
        (_Driver(init=3), r"CUDA_ERROR_OLD \(the driver is old\)"),
        (_Driver(count=0), "sees none"),
    ],
)
def test_no_gpu_says_why_and_what_works(fake: Any, words: str, driver: Any) -> None:
    driver(fake)
    with pytest.raises(errors.NoGpuError, match=words) as caught:
        gpu.require()
    assert "Without a GPU work `flashlab doctor`" in str(caught.value)
    assert "`check --on cpu`" in str(caught.value)
    reason = gpu.available()
    assert reason == str(caught.value)
    assert re.search(words, gpu.absence())
    assert not re.search(r"wanted|flashlab|\.$", gpu.absence())
    assert gpu.device_count() == 0
    with pytest.raises(errors.NoGpuError):
        gpu.info()


def test_a_gpus_record_has_what_nvml_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {
        **{"slug": "nvidia-h200", "name": "NVIDIA H200", "compute_capability": (9, 0), "sm_count": 132},
        **{"memory_bytes": 1 << 37, "l2_bytes": 60 << 20, "fingerprint": "0123456789ab"},
    }
    info = gpu.GpuInfo(index=0, arch="sm_90a", max_smem_bytes=227 << 10, **fields)
    said = {
        "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlSystemGetDriverVersion": "580.1",
    }
    monkeypatch.setattr(gpu, "nvml_handle", lambda _: object())
    monkeypatch.setattr(gpu, "nvml_read", lambda function, *_: said[function])
    monkeypatch.setattr(gpu, "call", lambda *_: 0)
    monkeypatch.setattr(gpu, "_attribute", lambda *_: 1_500_000)
    assert info.record == Gpu(**fields, max_sm_clock_mhz=1980.0, power_limit_w=700.0, driver="580.1")
    assert Gpu.model_validate(json.loads(json.dumps(info.record.model_dump(mode="json")))) == info.record

    without = gpu.GpuInfo(index=0, arch="sm_90a", max_smem_bytes=227 << 10, **fields)
    monkeypatch.setattr(gpu, "nvml_handle", lambda _: None)
    monkeypatch.setattr(gpu, "nvml_read", lambda *_: None)
    assert without.record == Gpu(**fields, max_sm_clock_mhz=1500.0, power_limit_w=None, driver="unknown")


def test_a_driver_error_keeps_its_name_and_text(driver: Any) -> None:
    driver(_Driver())
    assert gpu.available() is None
    assert gpu.call("cuPair") == (1, 2)
    assert gpu.call("cuDeviceGetCount") == 1
    assert gpu.call("cuNothing") is None
    with pytest.raises(errors.LaunchError, match=r"cuFails: CUDA_ERROR_OLD \(the driver is old\)"):
        gpu.call("cuFails")
