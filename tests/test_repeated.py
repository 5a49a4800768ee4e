"""A call of `attention` like an earlier one: tensors in host memory pass for a GPU's, and a driver notes launches."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import flashlab
from flashlab.core import errors
from flashlab.run import arrays, choice, fp8, gpu, paged, recipes
from flashlab.run.arguments import AttentionMaps, AttentionParams, VarlenParams
from flashlab.run.attention import attention, prepare
from flashlab.run.lru import LruCache
from flashlab.run.tensor_map import TensorMap

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
module = sys.modules["flashlab.run.attention"]

PLAIN, MAPPED, PERSISTENT = "01_coalesced", "11_pingpong", "16_ones_column"


class Driver:
    """Notes what every launch finds in its arguments, when the real one would copy them."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstream = int

    def __init__(self) -> None:
        self.launches: list[tuple[int, dict[str, int | None], list[int]]] = []
        """Stream, addresses in the structure, addresses in the tensor maps."""
        self.prepared = self.capturing = 0
        self.stream = 5
        self.ids: dict[int, int] = {}
        self.counters: list[Any] = []
        self.params: Any = AttentionParams

    def cuLaunchKernel(self, arguments: int, *rest: Any) -> tuple[int]:  # noqa: N802 - the driver's name
        *_, stream, address, _ = rest
        places = (ctypes.c_void_p * arguments).from_address(address)
        params = self.params.from_buffer_copy(ctypes.string_at(places[0], ctypes.sizeof(self.params)))
        found = {name: getattr(params, name).data for name in "QKVO"}
        others = ("LSE", "work", "fallbacks", "cu_seqlens_q", "cu_seqlens_k")
        found |= {name: getattr(params, name) for name in others if hasattr(params, name)}
        code = ctypes.string_at(places[1], ctypes.sizeof(AttentionMaps)) if arguments > 1 else b""
        maps = [struct.unpack_from("<Q", code, start)[0] for start in range(0, len(code), 128)]
        self.launches.append((stream, found, maps))
        return (0,)

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, 1

    def is_capturing(self, stream: int, answer: Any) -> int:
        answer._obj.value = self.capturing
        return 0

    def cuStreamGetId(self, stream: int) -> tuple[int, int]:  # noqa: N802
        return 0, self.ids.get(stream, stream)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    there = Driver()

    def loaded(cubin: Any, device: int) -> Any:
        # What stands for its handle is how many arguments it takes.
        return SimpleNamespace(handle=1 if cubin.name[:2] < "09" else 2, device=device, cubin=cubin)

    def on_device(x: Any, name: str, stream: int | None = None) -> arrays.DeviceArray:
        kind = str(x.dtype).removeprefix("torch.")
        return arrays.DeviceArray(
            pointer=x.data_ptr(),
            shape=tuple(x.shape),
            strides=x.stride(),
            dtype=kind,
            device=0,
            owner=x,
            library="torch",
        )

    def counters(like: Any, device: int, stream: int, words: tuple[int, int]) -> tuple[Any, int]:
        there.counters.append(torch.zeros(words[0], dtype=torch.int32))
        return there.counters[-1], there.counters[-1].data_ptr()

    made = module._make_recipe

    def make_recipe(*args: Any) -> Any:
        there.prepared += 1
        return made(*args)

    monkeypatch.setattr(module, "_make_recipe", make_recipe)
    monkeypatch.setattr(recipes, "_TRUSTED_S", 3600.0)
    for name in ("by_layout", "_codes", "_works"):
        monkeypatch.setattr(recipes, name, LruCache(64))
    for name, value in {
        "_bindings": lambda: there,
        "_is_capturing": lambda: there.is_capturing,
        "_primary_handle": lambda _: 1,
        "require": lambda: None,
        "info": lambda _=None: SimpleNamespace(arch="sm_90a", sm_count=4, slug="nobody"),
        "load": loaded,
        "blocks_per_sm": lambda *_: 2,
        "context": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(arrays, "on_device", on_device)
    monkeypatch.setattr(arrays, "_memory_of", lambda *_: "gpu")
    monkeypatch.setattr(arrays, "current_stream", lambda *_: there.stream)
    monkeypatch.setattr(recipes, "work_memory", counters)
    monkeypatch.setattr(TensorMap, "encoded", lambda _, address: struct.pack("<Q", address).ljust(128, b"m"))
    return there


def qkv(length: int = 130, dtype: Any = torch.float16) -> tuple[Any, Any, Any]:
    q, k, v = (torch.zeros(2, 4, length, 64, dtype=dtype) for _ in range(3))
    return q, k, v


def _addresses(*named: Any) -> list[int]:
    return [x.data_ptr() for x in named]


@pytest.mark.parametrize("stage", [PLAIN, MAPPED, PERSISTENT])
def test_every_call_gets_its_own_addresses_and_is_prepared_once(driver: Driver, stage: str) -> None:
    calls = [qkv() for _ in range(4)]
    for index, (q, k, v) in enumerate(calls * 2):
        out, lse = attention(q, k, v, stage=stage, return_lse=True)
        stream, found, maps = driver.launches[-1]
        assert [found[name] for name in "QKVO"] == _addresses(q, k, v, out)
        assert (found["LSE"], found["fallbacks"], stream) == (lse.data_ptr(), None, 5)
        assert maps == ([] if stage == PLAIN else _addresses(q, k, v, out))
        assert (found["work"] is None) == (stage != PERSISTENT)
        assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
        assert (lse.shape, lse.dtype, index + 1) == (q.shape[:3], torch.float32, len(driver.launches))
    assert driver.prepared == 1
    attention(*calls[0], stage=stage)
    assert driver.launches[-1][1]["LSE"] is None
    out = torch.empty_like(calls[0][0])
    for written in (1, 2):
        attention(*calls[0], stage=stage, out=out)
        assert out._version == written, "autograd sees the write"


@pytest.mark.parametrize("stage", ["08_swizzle", PERSISTENT])
def test_packed_sequences_of_other_lengths_are_the_same_call(driver: Driver, stage: str) -> None:
    driver.params = VarlenParams
    for index in range(6):
        q, k, v = (torch.zeros(130, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
        cu = [torch.tensor([0, 10 + index, 130], dtype=torch.int32) for _ in "qk"]
        how: Any = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": 130, "stage": stage}
        out, lse = flashlab.varlen_attention(q, k, v, **how, return_lse=True, causal=True)
        stream, found, maps = driver.launches[-1]
        assert [found[name] for name in (*"QKVO", "cu_seqlens_q", "cu_seqlens_k")] == _addresses(q, k, v, out, *cu)
        assert (found["LSE"], found["fallbacks"], stream) == (lse.data_ptr(), None, 5)
        assert maps == (_addresses(q, k, v, out) if stage == PERSISTENT else [])
        assert (out.shape, lse.shape, out.is_contiguous()) == (q.shape, (4, 130), True)
        assert (driver.prepared, len(driver.launches)) == (1, index + 1)
    mine = torch.zeros_like(q)
    for _ in range(2):
        assert flashlab.varlen_attention(q, k, v, **how, out=mine, causal=True) is mine
        assert (driver.launches[-1][1]["O"], driver.launches[-1][1]["LSE"]) == (mine.data_ptr(), None)
    flashlab.varlen_attention(q, k, v, **{**how, "max_seqlen_q": 129})
    assert driver.prepared == 3


def test_check_reads_the_numbers_back(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "read", lambda _, address, size: bytearray(ctypes.string_at(address, size)))
    q, k, v = (torch.zeros(130, 4, 64, dtype=torch.float16) for _ in range(3))
    cu = torch.tensor([0, 10, 130], dtype=torch.int32)
    how: Any = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 120, "stage": PERSISTENT}
    for _ in range(2):
        flashlab.varlen_attention(q, k, v, **how, check=True)
    cu[1] = 5
    with pytest.raises(errors.InputError, match=r"max_seqlen_q: wanted at least .* 125 rows, got 120"):
        flashlab.varlen_attention(q, k, v, **how, check=True)
    flashlab.varlen_attention(q, k, v, **how)
    cu[1] = 131
    with pytest.raises(errors.InputError, match="cu_seqlens_q: wanted non-decreasing numbers from 0 to at most 130"):
        flashlab.varlen_attention(q, k, v, **how, check=True)
    with pytest.raises(errors.DTypeError, match="cu_seqlens_q: wanted int32, got int64"):
        flashlab.varlen_attention(q, k, v, **{**how, "cu_seqlens_q": cu.long()}, check=True)
    assert len(driver.launches) == 3


def test_a_repeated_call_does_little(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: Python functions entered, and nothing asked of the file system."""
    q, k, v = qkv()
    out = torch.empty_like(q)
    monkeypatch.setattr(torch, "empty_like", lambda *_, **__: out)  # on a GPU torch's pool hands out the same memory
    for _ in range(2):
        attention(q, k, v, stage=MAPPED)
    for owner, name in ((choice, "stamps"), (recipes, "stamps")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("a repeated call asked the file system"))
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("flashlab."):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        attention(q, k, v, stage=MAPPED)
    finally:
        sys.setprofile(None)
    assert len(entered) < 13, entered


def test_a_window_in_a_list_is_that_in_a_tuple(driver: Driver) -> None:
    q, k, v = qkv()
    for window in ([3, None], (3, None), [3, None]):
        attention(q, k, v, stage="08_swizzle", causal=True, window=window)
    assert (driver.prepared, len(driver.launches)) == (1, 3)


def test_another_length_takes_the_code_that_is_there(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is decoded has another length at every step."""
    attention(*qkv(130), stage=MAPPED)
    for name in ("included", "read"):
        monkeypatch.setattr(recipes, name, lambda *_: pytest.fail("a source was read again"))
    monkeypatch.setattr(recipes.compiler, "compile_stage", lambda *_: pytest.fail("a stage was compiled again"))
    attention(*qkv(131), stage=MAPPED)
    assert (driver.prepared, len(driver.launches)) == (2, 2)


def _misaligned(x: Any) -> Any:
    return torch.zeros(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view(x.shape)


@pytest.mark.parametrize(
    "change",
    [
        lambda call: {"causal": True},
        lambda call: {"scale": 0.5},
        lambda call: {"stage": "00_naive"},
        lambda call: {"params": {"THREADS": 64}},
        lambda call: {"q": _misaligned(call["q"])},
        lambda call: {"k": call["k"].transpose(1, 2).contiguous().transpose(1, 2)},
        lambda call: {"v": call["v"][:, :1].expand(2, 4, 130, 64)},
        lambda call: {"q": call["q"][:, :, :99]},
        lambda call: {"k": call["k"][:, :2].clone(), "v": call["v"][:, :2].clone()},
        lambda call: {"out": torch.zeros(2, 130, 4, 64, dtype=torch.float16).transpose(1, 2)},
    ],
)
def test_another_layout_or_option_is_prepared_anew(driver: Driver, change: Any) -> None:
    call: dict[str, Any] = {**dict(zip("qkv", qkv(), strict=True)), "stage": PLAIN}
    attention(**call)
    attention(**call)
    assert driver.prepared == 1
    changed = {**call, **change(call)}
    for _ in range(2):
        out = attention(**changed)
        found = driver.launches[-1][1]
        assert [found[name] for name in "QKVO"] == _addresses(*(changed[name] for name in "qkv"), out)
    assert driver.prepared == 2
    attention(**call)
    assert driver.prepared == 2


def test_what_a_first_call_refuses_a_repeated_one_does(driver: Driver) -> None:
    q, k, v = qkv()
    for _ in range(2):
        attention(q, k, v, stage=PLAIN, scale=1.0)
        attention(q, k, v, stage="08_swizzle", window=(1, 2), params={"TILE_KV": 64, "MIN_BLOCKS": 1})
    for wrong, words in (
        ({"stage": "08_swizzle", "window": (True, 2), "params": {"TILE_KV": 64, "MIN_BLOCKS": 1}}, "window: wanted"),
        ({"stage": "08_swizzle", "window": (1, 2.0), "params": {"TILE_KV": 64, "MIN_BLOCKS": 1}}, "window: wanted"),
        ({"stage": "08_swizzle", "window": (1, 2), "params": {"TILE_KV": 64, "MIN_BLOCKS": True}}, "wanted an integer"),
        ({"causal": 0}, "True or False"),
        ({"scale": True}, "finite number"),
        ({"scale": [1.0]}, "finite number"),
        ({"scale": 1.0, "device": "tpu"}, "device: wanted cpu"),
        ({"out": q}, "apart from q"),
        ({"out": k[:, :, :1]}, "shape of q"),
        ({"stream": "5"}, "stream: wanted"),
        ({"params": {"THREADS": [64]}}, "THREADS: wanted an integer from 1 to"),
    ):
        with pytest.raises(errors.InputError, match=words):
            attention(q, k, v, **{"stage": PLAIN, **wrong})
    out = torch.zeros_like(q)
    attention(q, k, v, stage=PLAIN, out=out)
    with pytest.raises(errors.LayoutError, match="apart from v"):
        attention(q, k, out, stage=PLAIN, out=out)
    q.requires_grad_()
    with pytest.raises(errors.InputError, match="needs no gradient"):
        attention(q, k, v, stage=PLAIN, scale=1.0)
    count = len(driver.launches)
    with torch.no_grad():
        attention(q, k, v, stage=PLAIN, scale=1.0)
    assert len(driver.launches) == count + 1


@pytest.mark.parametrize("make", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)])
def test_a_tensor_whose_memory_is_not_its_numbers_is_like_no_other(driver: Driver, make: Any) -> None:
    """By shape, strides and type it is one that was launched before; `prepare` refuses it."""
    q, k, v = qkv()
    for inputs in ((make(q), k, v), (q, make(k), v)):
        assert recipes.lookup(inputs, None, (), None) == (None, [], None)


def test_streams_and_graphs_have_counters_of_their_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    monkeypatch.setattr(gpu, "graph_id", lambda stream: (driver.capturing, stream))
    monkeypatch.setattr(gpu, "zeroed_of_graph", lambda device, size, stream: 1000 * driver.capturing + stream)

    def work(**options: Any) -> tuple[int, int]:
        attention(q, k, v, stage=PERSISTENT, **options)
        stream, found, _ = driver.launches[-1]
        return stream, found["work"]

    work()
    assert [work(), work()] == [(5, driver.counters[1].data_ptr())] * 2  # the first call's own are driver.counters[0]
    driver.stream = 6
    assert work() == (6, driver.counters[2].data_ptr())
    assert work(stream=5) == (5, driver.counters[1].data_ptr())
    for graph in (1, 2):
        driver.capturing = graph
        assert [work(stream=5), work(stream=6), work(stream=5)] == [(of, 1000 * graph + of) for of in (5, 6, 5)]
    driver.capturing, driver.ids[5] = 0, 77  # a new stream with the handle of one that was destroyed
    assert work(stream=5) == (5, driver.counters[3].data_ptr())
    assert len(driver.counters) == 4


def test_threads_that_repeat_a_call_keep_their_arguments_apart(driver: Driver) -> None:
    inside, lock = threading.Barrier(4, timeout=30), threading.Lock()
    noted: dict[int, list[Any]] = {}
    there = driver.cuLaunchKernel

    def launch(*args: Any) -> tuple[int]:
        inside.wait()  # all have filled in their arguments
        with lock:
            noted.setdefault(threading.get_ident(), []).append(there(*args) and driver.launches[-1])
        return (0,)

    attention(*qkv(), stage=MAPPED)
    driver.cuLaunchKernel = launch  # type: ignore[method-assign]

    def repeat(_: int) -> list[Any]:
        q, k, v = qkv()
        return [_addresses(q, k, v, attention(q, k, v, stage=MAPPED)) for _ in range(20)] + [threading.get_ident()]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(repeat, range(4)))
    assert driver.prepared == 1
    for *wanted, thread in results:
        assert [maps for *_, maps in noted[thread]] == wanted
        assert [[found[name] for name in "QKVO"] for _, found, _ in noted[thread]] == wanted


class PagedLaunch:
    """Notes the addresses that a launch over pages finds in its arguments."""

    made: ClassVar[list[PagedLaunch]]

    def __init__(self, _: Any, *, params: Sequence[Any], stream: int, **how: Any) -> None:
        self.params, self.stream, self.how, self.found = params, stream, how, ()
        self.made.append(self)

    def on(self, stream: int) -> PagedLaunch:
        return PagedLaunch(None, params=self.params, stream=stream, **self.how)

    def __call__(self) -> None:
        params, cache = self.params
        views = (params.Q, params.K, params.V, params.O)
        found = (*(view.data for view in views), params.LSE, cache.page_table, cache.lengths, cache.faults)
        self.found = (*found, params.work)


@pytest.mark.parametrize("stage", ["d1_paged_kv", "d6_paged_parts", "d12_paged_ends"])
def test_calls_over_pages_repeat_too(driver: Driver, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    made: list[PagedLaunch] = []
    monkeypatch.setattr(PagedLaunch, "made", made, raising=False)
    monkeypatch.setattr(gpu, "Launch", PagedLaunch)
    monkeypatch.setattr(gpu, "most_splits", lambda *_: 8)

    def call(pages: int = 4) -> tuple[Any, ...]:
        pools = [torch.zeros(9, 2, 16, 64, dtype=torch.float16) for _ in "KV"]
        table, lengths = torch.zeros(2, pages, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
        return (torch.zeros(2, 4, 1, 64, dtype=torch.float16), *pools, table, lengths)

    planned: list[Any] = []
    there = paged._recipe
    monkeypatch.setattr(paged, "_recipe", lambda made, how: planned.append(made) or there(made, how))
    for arguments in [call() for _ in range(3)] * 2:
        out, lse = paged.paged_attention(*arguments, return_lse=True, stage=stage)
        q, k, v, table, lengths = _addresses(*arguments)
        work = driver.counters[0].data_ptr() if stage != "d1_paged_kv" else None  # the stream's
        assert made[-1].found == (q, k, v, *_addresses(out, lse), table, lengths, None, work)
        assert made[-1].stream == driver.stream
        assert made[-1].how["early"] == (work is not None)
    assert len(planned) == 1
    paged.paged_attention(*arguments, out=out, stage=stage)
    with pytest.raises(errors.LayoutError, match="apart from q"):
        paged.paged_attention(*arguments, out=arguments[0], stage=stage)
    with pytest.raises(errors.ParameterError, match="finite"):
        paged.paged_attention(*arguments, return_lse=True, scale=True, stage=stage)
    assert len(planned) == 2
    paged.paged_attention(*call(5), return_lse=True, stage=stage)
    assert len(planned) == 3, "a wider page table is another layout"


@pytest.fixture
def launches(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is launched, in order: kernel, grid, types of its arguments, whether it may begin early."""
    found: list[tuple[Any, ...]] = []

    class Noted:
        def __init__(self, function: Any, *, params: Any, grid: Any, early: bool = False, **_: Any) -> None:
            self.what = (function.cubin.entry, grid, [type(one).__name__ for one in params], early)

        def __call__(self) -> None:
            found.append(self.what)

    monkeypatch.setattr(gpu, "Launch", Noted)
    monkeypatch.setattr(gpu, "load", lambda cubin, device, smem_bytes=0: SimpleNamespace(device=device, cubin=cubin))
    monkeypatch.setattr(gpu, "most_splits", lambda *_: 8)
    for module in (arrays, paged, fp8):
        monkeypatch.setattr(module, "on_device", arrays.on_device)
        monkeypatch.setattr(module, "torch_stream", lambda *_: nullcontext())
    for name in ("as_tensor", "full"):  # which a stage puts on its GPU
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, made=made, device=None, **how: made(*args, **how))
    return found


def test_both_kernels_of_fp8_are_launched_on_stored_and_on_16_bit_inputs(launches: list[tuple[Any, ...]]) -> None:
    x = torch.zeros(2, 4, 130, 128, dtype=torch.bfloat16)
    flashlab.fp8_attention(*(x.to(torch.float8_e4m3fn) for _ in range(3)), return_lse=True)
    prepare(x, x.clone(), x.clone(), stage="f0_e4m3")()
    transpose = ("transpose_f0_e4m3", (5, 4, 2), ["AttentionParams", "Fp8Params"], False)
    both = [transpose, ("attention_f0_e4m3", (8, 1, 1), ["AttentionParams", "AttentionMaps", "Fp8Params"], False)]
    assert launches == 2 * both


@pytest.mark.parametrize(("stage", "grid"), [("d1_paged_kv", (4, 2, 2)), ("d13_shares_of_time", (4, 1, 1))])
def test_a_stage_that_reads_pages_takes_keys_without_pages_too(
    launches: list[tuple[Any, ...]], stage: str, grid: tuple[int, int, int]
) -> None:
    q, k, v = (
        torch.zeros(2, heads, length, 128, dtype=torch.float16) for heads, length in ((8, 1), (2, 300), (2, 300))
    )
    prepare(q, k, v, stage=stage, causal=True, params={"SPLITS": 4})()
    early = stage != "d1_paged_kv"
    assert launches == [(f"attention_{stage}", grid, ["AttentionParams", "PagedCache"], early)]


def test_an_edit_is_noticed_before_long(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    monkeypatch.setattr(recipes, "_TRUSTED_S", 0.0)
    for _ in range(3):
        attention(q, k, v, stage=PLAIN)
    assert driver.prepared == 1
    monkeypatch.setattr(recipes.Loaded, "is_current", lambda _: False)
    attention(q, k, v, stage=PLAIN)
    assert driver.prepared == 2
    monkeypatch.setattr(recipes.Loaded, "is_current", lambda _: True)
    attention(q, k, v, stage=PLAIN)
    monkeypatch.setattr(choice, "table", lambda *_: None)
    monkeypatch.setattr(choice, "stamps", lambda *_: (7,))
    attention(q, k, v, stage=PLAIN)
    assert driver.prepared == 3


def test_an_lru_cache_is_bounded() -> None:
    cache: LruCache[int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]
    assert len(cache) == 2
    with pytest.raises(TypeError):
        cache.get([])
