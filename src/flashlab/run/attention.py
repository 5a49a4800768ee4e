"""The public calls `attention`, `prepare` and `emulate`, on the caller's arrays and stream.

plan.py validates the arguments and selects the stage; `prepare` compiles and loads the kernel and returns a callable
that only enqueues it, which is what gets timed. Arrays in host memory run on the CPU through `emulate`, which also
reports what the kernel did wrong.

Everything that does not depend on addresses (validation, selection, machine code, grid, strides) is computed once per
layout and cached (recipes.py). `prepare` checks on every call whether the sources of a cached recipe changed;
`attention` on torch tensors with a cached layout checks at most once per second.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from flashlab.build import compiler, triton_code
from flashlab.build.compiler import Variant
from flashlab.core.arithmetic import several
from flashlab.core.errors import EmulationError, InputError, ParameterError, TooLargeError, UnsupportedError
from flashlab.core.problem import Problem
from flashlab.kernels.registry import Stage
from flashlab.record.checks import Fallbacks as Fallbacks
from flashlab.run import arrays, choice, emulator, gpu, recipes
from flashlab.run.arguments import (
    AttentionMaps,
    AttentionParams,
    fitted,
    maps_for,
    params_for,
    tile_maps,
    triton_arguments,
    triton_parameters,
    workspace,
)
from flashlab.run.arrays import DeviceArray
from flashlab.run.plan import (
    Plan,
    Sequences,
    by_head,
    check_flags,
    check_lengths,
    outputs_of,
    plan,
    refuse_overlap,
    tunables,
)
from flashlab.run.recipes import Recipe

if TYPE_CHECKING:
    from flashlab.build.compiler import Cubin, LaunchShape

with suppress(ImportError):  # gpu.py reports a missing package when a GPU is used
    # Takes tens of milliseconds, which the first call would pay otherwise. Loads no driver.
    importlib.import_module("cuda.bindings.driver")

_ASSUMED_FLOPS_PER_S = 1e9
"""Assumed emulation speed per core; stages differ by a factor of ten."""
_HOOKS_COST = 8.0
"""Assumed slowdown of a kernel with hooks."""
_CLEARLY = 4.0
"""A problem is refused if its estimated time exceeds the limit by this factor."""
_NAN = 0x7FFFFFFF
"""Bits of a NaN, with which a workspace on the CPU is filled before the launch."""


def _runner(stage: Stage) -> Any:
    """Import the module named by `Stage.runner`; None for a stage that needs no runner.

    A runner has one or more of these:

    - `passes(recipe, views, params, stream)`: return the function that enqueues all kernels of the stage on a GPU.
      `views` are Q, K, V and O, and `params` is the first argument of a kernel launched without a runner.
    - `emulated_passes(call)`: return the kernel arguments of an `EmulatedCall`, in place of the default ones.
    - `interpreted` and `interpret`: run the stage on a CPU if the emulator cannot.
    """
    return None if stage.runner is None else importlib.import_module(stage.runner)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A validated, compiled and loaded call; calling it enqueues the kernel and returns immediately.

    Keeps its arrays alive; `out` and `lse` are arrays of the caller's library. Calls run in order on the stream, and
    share the tile-scheduler counters of a persistent kernel.
    """

    recipe: Recipe
    out: Any
    lse: Any
    launch: Callable[[], None]
    keep: tuple[Any, ...]
    """Objects that must outlive the call."""
    counted: gpu.Zeroed | None
    """Device counters read by `fallbacks`."""

    @property
    def plan(self) -> Plan:
        """The problem, the stage, and why the slow path is taken, if it is."""
        return self.recipe.plan

    @property
    def cubin(self) -> Cubin:
        """The compiled machine code."""
        return self.recipe.code.cubin

    @property
    def launch_shape(self) -> LaunchShape:
        """Threads, shared memory and tile sizes of the kernel."""
        return self.recipe.shape

    def __call__(self) -> None:
        """Enqueue the kernel once. The device's context must be current, as torch and CuPy ensure for their device."""
        self.launch()

    def fallbacks(self) -> Fallbacks | None:
        """Wait for all calls and return their total counts; None unless `prepare` had `count_fallbacks`."""
        return None if self.counted is None else Fallbacks(*memoryview(self.counted.read()).cast("I"))

    def blocks_per_sm(self) -> int:
        """Resident blocks per SM."""
        return gpu.blocks_per_sm(self.recipe.code.function, self.launch_shape.threads, self.launch_shape.smem_bytes)

    def __reduce__(self) -> NoReturn:
        """Refuse `copy` and `pickle`: the launch is bound to its arrays, process and GPU."""
        raise InputError(
            "a prepared call can be neither copied nor pickled, because it is bound to the addresses of its arrays "
            "and to loaded machine code. Calling `flashlab.prepare` with the copied arrays works."
        )


def _recipe(
    inputs: Mapping[str, DeviceArray], out: DeviceArray | None, how: Mapping[str, Any], code: Mapping[str, Any]
) -> Recipe:
    """Return the recipe for arrays of this layout, creating it on the first call.

    `how` are the options of `plan`, and `code` those of the compiler; its overrides are (name, value) pairs.

    Raises:
        FlashlabError: as `plan`, compiling and loading raise.
    """
    device = gpu.info(inputs["q"].device)
    # Types are part of the key: 1, 1.0 and True are equal, but True is not a valid scale.
    asked = (*how.values(), *map(type, how.values()), *code.values(), repr((how["window"], code["overrides"])))
    key = (*map(recipes.layout, (*inputs.values(), out)), asked, device.slug)
    try:
        cached = recipes.by_layout.get(key)
    except TypeError:  # `plan` refuses every unhashable option
        cached = None
    if cached is not None and cached.is_current():
        if out is not None:
            refuse_overlap("out", out, inputs)
        return cached
    made = _make_recipe(inputs, out, device, how, code)
    recipes.by_layout.put(key, made)
    return made


def _make_recipe(
    inputs: Mapping[str, DeviceArray],
    out: DeviceArray | None,
    device: gpu.GpuInfo,
    how: Mapping[str, Any],
    code: Mapping[str, Any],
) -> Recipe:
    arch, slug = device.arch, device.slug
    tables = choice.stamps()  # before they are read
    planned = plan(*inputs.values(), arch=arch, out=out, slug=slug, sm_count=device.sm_count, **how)
    if how["stage"] is None:
        _warn_of_kin(slug, arch)
    stage, problem = planned.stage, planned.problem
    overrides = choice.parameters(stage, slug, problem, arch=arch, overrides=dict(code["overrides"]))
    asked = {**code, "overrides": overrides}
    loaded = recipes.loaded(
        compiler.Job.of(stage, problem, arch=arch, aligned=planned.aligned, **asked), planned.device
    )
    q = inputs["q"]
    # A newly allocated output is contiguous.
    views = _views(inputs, out or replace(q, strides=arrays.contiguous_strides(q.shape)))
    tensors = _by_head(views)
    params = params_for(problem, planned.scale, tensors)
    in_triton = stage.language == "triton"
    return Recipe(
        plan=planned,
        views=views,
        code=loaded,
        structures=(params, AttentionMaps()) if stage.tensor_maps else (params,),
        maps=tile_maps(planned, loaded.shape, tensors),
        parameters=(lambda structures: triton_parameters(structures[0])) if in_triton else tuple,
        tables=tables,
    )


def _views(inputs: Mapping[str, DeviceArray], out: DeviceArray) -> dict[str, DeviceArray]:
    """Name the arrays as kernel parameters, in the order in which a recipe takes their addresses.

    Packed K and V without rows become a row of Q, which is not read, because a tensor map needs memory.
    """
    q = inputs["q"]
    return {
        name.upper() if len(name) == 1 else name: view if view.shape[0] else replace(q, shape=(1, *view.shape[1:]))
        for name, view in inputs.items()
    } | {"O": out}


def _by_head(views: Mapping[str, DeviceArray]) -> dict[str, DeviceArray]:
    """Q, K, V and O as (batch, heads, length, head_dim)."""
    return {
        name: by_head(view, name) if "cu_seqlens_q" in views else view for name, view in views.items() if name in "QKVO"
    }


@lru_cache(maxsize=16)
def _warn_of_kin(slug: str, arch: str) -> None:
    """Log once per process that stages are selected by the records of another GPU."""
    table = choice.table_for(slug, arch)
    if table is not None and table.gpu != slug:
        logging.getLogger(__name__).warning(
            "%s has no table of choices: stages are selected by the table of %s, the most similar GPU. `flashlab tune` "
            "and `flashlab tuned` make one.",
            slug,
            table.gpu,
        )


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    stage: str | None = None,
    out: Any | None = None,
    return_lse: bool = False,
    lse: Any | None = None,
    stream: Any | None = None,
    params: Mapping[str, int] | None = None,
    source: Path | str | None = None,
    may_spill: bool = False,
    count_fallbacks: bool = False,
    sequences: Sequences | None = None,
) -> Prepared:
    """Validate, compile and load an `attention` call on a GPU without launching it, for repeated calls and timing.

    Calling the result enqueues the kernel once and returns immediately; every call uses the same memory and the stream
    fixed here. The device's context must be current, as torch and CuPy ensure for their current device. Different
    results may be called from different threads concurrently; calls of one result must be serialised.

    Args:
        q: (batch, q_heads, q_len, head_dim), as in `attention`, on a GPU.
        k: (batch, kv_heads, kv_len, head_dim), as in `attention`, on the device of q.
        v: like `k`.
        causal: whether to apply a causal mask, as in `attention`.
        window: sliding window, as in `attention`.
        softcap: soft cap on scores, softcap · tanh(score / softcap); 0 disables it.
        scale: factor on the scores; default: 1/sqrt(head_dim).
        stage: stage id; default: as in `attention`.
        out: output array, like `q`; default: a new contiguous array.
        return_lse: whether to allocate an array for the log-sum-exp.
        stream: stream to enqueue on; default: the current stream of the library of q.
        params: tunables of the stage, by name, as in `attention`.
        lse: output array for the log-sum-exp, contiguous float32 (batch, q_heads, q_len); default: a new array if
            `return_lse`.
        source: path of an edited copy of the stage's source, compiled instead of it.
        may_spill: whether registers may spill even if the stage forbids it.
        count_fallbacks: whether to count how often the kernel leaves its fast path (`Prepared.fallbacks`).
        sequences: packed sequences; q, k, v, out and lse then have the shapes of `varlen_attention`.

    Returns:
        A callable that keeps its arrays alive. `out` and `lse` are the outputs, arrays of the caller's library;
        `plan.stage` is the stage and `cubin.parameters` its tunables.

    Raises:
        FlashlabError: as `attention` does.
    """
    check_flags(may_spill=may_spill, count_fallbacks=count_fallbacks)
    gpu.require()
    arrays.refuse_gradients(q=q, k=k, v=v, out=out, lse=lse)
    place = arrays.place_of(q, stream, "gpu")
    inputs = {name: place.view(of, name) for name, of in {"q": q, "k": k, "v": v, **_named(sequences)}.items()}
    target = None if out is None else place.view(out, "out")
    handle = place.stream
    assert handle is not None
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "stage": stage}
    how["window"] = tuple(window) if isinstance(window, list) else window  # hashable
    how["max_seqlen_q"] = None if sequences is None else sequences.max_seqlen_q
    code = {"overrides": tuple(sorted(tunables(params).items())), "source": _file(source), "may_spill": may_spill}
    recipe = _recipe(inputs, target, how, code)
    made = outputs_of(place, inputs, out, lse, return_lse=return_lse)
    views = _views(inputs, made.out_view)
    device = recipe.plan.device
    work, work_pointer = recipes.work_memory(q, device, handle, recipe.words) if recipe.words[0] else (None, 0)
    counted = gpu.Zeroed(device, len(Fallbacks._fields) * recipes.WORD_BYTES, handle) if count_fallbacks else None
    others = (made.lse_view.pointer if made.lse_view else 0, work_pointer, counted.pointer if counted else 0)
    return Prepared(
        recipe=recipe,
        launch=_launch(recipe, views, others, handle) if inputs["q"].shape[0] else lambda: None,
        out=made.out,
        lse=made.lse,
        keep=(*views.values(), made.lse_view, work, stream),
        counted=counted,
    )


def _named(sequences: Sequences | None) -> dict[str, Any]:
    """The cumulative lengths of `sequences`, by argument name; empty for None.

    Raises:
        ParameterError: `sequences` is neither None nor `Sequences`.
    """
    if not isinstance(sequences, Sequences | None):
        raise ParameterError(
            f"sequences: wanted flashlab.Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q), got "
            f"{type(sequences).__name__}. `flashlab.Sequences(*sequences)` makes one of a tuple."
        )
    names = ("cu_seqlens_q", "cu_seqlens_k")
    return {} if sequences is None else {name: getattr(sequences, name) for name in names}


def _file(source: Any) -> Path | None:
    """The path of the source to compile instead of the stage's; None for None.

    Raises:
        ParameterError: `source` is not a path.
    """
    if not isinstance(source, str | Path | None):
        raise ParameterError(f"source: wanted the path of an edited copy of the stage's file, got {source!r}")
    return None if source is None else Path(source)


def _launch(
    recipe: Recipe, views: Mapping[str, DeviceArray], others: tuple[int, int, int], stream: int
) -> Callable[[], None]:
    """Build the launch. `others`: addresses of the log-sum-exp, tile-scheduler counters and fallback counters, or 0."""
    planned, addresses = recipe.plan, [*(view.pointer for view in views.values()), *others]
    runner = _runner(planned.stage)
    if hasattr(runner, "passes"):
        params = AttentionParams.from_buffer_copy(recipe.image(*addresses))
        passes: Callable[[], None] = runner.passes(recipe, views, params, stream)
        return passes
    return recipes.Slot(recipe, addresses, stream).launch


# --- on the CPU -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """Result of a call on the CPU."""

    out: Any
    """The output, an array of the caller's library."""
    lse: Any
    """The log-sum-exp, float32 (batch, q_heads, q_len), or (q_heads, total_q) for packed sequences, an array of the
    caller's library; None if not requested."""
    report: emulator.Report
    """The kernel's printed output, and findings and counters if `races` was set."""
    kernel: emulator.Emulated
    plan: Plan
    fallbacks: Fallbacks | None = None
    """None unless `count_fallbacks` was set."""


def emulate(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    stage: str | None = None,
    out: Any | None = None,
    lse: Any | None = None,
    return_lse: bool = True,
    params: Mapping[str, int] | None = None,
    source: Path | str | None = None,
    schedule: str = "ascending",
    races: bool = False,
    timeout_s: float | None = emulator.DEFAULT_TIMEOUT_S,
    threads: int | None = None,
    cancel: threading.Event | None = None,
    surroundings: Mapping[str, Any] | None = None,
    count_fallbacks: bool = False,
    sequences: Sequences | None = None,
) -> Emulation:
    """Run an `attention` call on the CPU: the stage's own source, emulated thread by thread in a worker process.

    Args:
        q: (batch, q_heads, q_len, head_dim), as in `attention`, in host memory.
        k: (batch, kv_heads, kv_len, head_dim), as in `attention`, in host memory.
        v: like `k`.
        causal: whether to apply a causal mask, as in `attention`.
        window: sliding window, as in `attention`.
        softcap: soft cap on scores, softcap · tanh(score / softcap); 0 disables it.
        scale: factor on the scores; default: 1/sqrt(head_dim).
        stage: stage id; default: the last rung of the ladder that supports the problem.
        out: output array, like `q`; default: a new contiguous array.
        params: tunables of the stage, by name; default: those of the stage.
        lse: output array for the log-sum-exp; default: a new array if `return_lse`.
        return_lse: whether to compute the log-sum-exp; implied by `lse`.
        source: path of an edited copy of the stage's source, compiled instead of it.
        schedule: order in which warps run: `ascending`, `descending` or `seeded:N`.
        races: whether to detect races, uninitialised reads and out-of-bounds accesses, and to count bank conflicts and
            sectors, as `findings` and `counters` of the report. Many times slower.
        timeout_s: time limit in seconds. A call estimated to exceed it clearly is refused in advance, and a run that
            exceeds it is stopped. None: no limit.
        threads: number of operating-system threads; default: one per core.
        cancel: event that stops the run, like Ctrl-C, when set from another thread.
        surroundings: for some of `q`, `k`, `v`, `out` and `lse`, the contiguous NumPy array that it is a view of; the
            kernel can then access, and damage, the memory around it.
        count_fallbacks: whether to count how often the kernel leaves its fast path.
        sequences: packed sequences; q, k, v, out and lse then have the shapes of `varlen_attention`. Their time is not
            estimated in advance.

    Returns:
        The outputs and the emulator's report.

    Raises:
        FlashlabError: invalid input, as in `attention`.
        TooLargeError: the call would clearly exceed `timeout_s`.
        EmulationError: the run failed or timed out.
        CompileError: the stage's source does not compile.
        MissingPackageError: there is no C++ compiler.
        KeyboardInterrupt: Ctrl-C or `cancel`; the worker has ended.
    """
    check_flags(races=races, count_fallbacks=count_fallbacks)
    emulator.schedule_item(schedule)
    emulator.check_limits(timeout_s, threads)
    _check_surroundings(surroundings)
    if not isinstance(cancel, threading.Event | None):
        raise ParameterError(f"cancel: wanted a threading.Event, or None, got {cancel!r}")
    arrays.refuse_gradients(q=q, k=k, v=v, out=out, lse=lse)
    place = arrays.place_of(q, None, "cpu")
    inputs = {name: place.view(of, name) for name, of in {"q": q, "k": k, "v": v, **_named(sequences)}.items()}
    target = None if out is None else place.view(out, "out")
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "stage": stage}
    how["max_seqlen_q"] = None if sequences is None else sequences.max_seqlen_q
    planned = plan(*inputs.values(), arch=None, out=target, **how)
    if sequences is not None:
        ends = (inputs[name].owner for name in ("cu_seqlens_q", "cu_seqlens_k"))
        total_q, total_k = inputs["q"].shape[0], inputs["k"].shape[0]
        check_lengths(*ends, total_q=total_q, total_k=total_k, max_seqlen_q=sequences.max_seqlen_q)
    elif timeout_s is not None:
        refuse_too_large(planned.stage.id, planned.problem, timeout_s=timeout_s, races=races, threads=threads)
    made = outputs_of(place, inputs, out, lse, return_lse=return_lse)
    variant = Variant.of(
        planned.stage, planned.problem, aligned=planned.aligned, overrides=tunables(params), source=_file(source)
    )
    kernel = _kernel_on_cpu(variant, schedule=schedule, races=races)
    call = EmulatedCall(
        planned,
        kernel,
        _views(inputs, made.out_view),
        made.lse_view,
        surroundings=surroundings,
        count_fallbacks=count_fallbacks,
    )
    if inputs["q"].shape[0]:
        report = call.launch(timeout_s, schedule=schedule, threads=threads, cancel=cancel)
    else:
        report = emulator.Report(status="ok", message="", seconds=0.0)
    call.finish(report)
    fallbacks = Fallbacks(*call.fallbacks.tolist()) if count_fallbacks else None
    return Emulation(out=made.out, lse=made.lse, report=report, kernel=kernel, plan=planned, fallbacks=fallbacks)


_SURROUNDED = ("q", "k", "v", "out", "lse")


def _check_surroundings(given: Any) -> None:
    """Raise `ParameterError` unless `given` is None or maps argument names to NumPy arrays."""
    named = dict(given) if isinstance(given, Mapping) else {"": given}
    if given is not None and not all(name in _SURROUNDED and isinstance(x, np.ndarray) for name, x in named.items()):
        got = ", ".join(f"{type(x).__name__}{name and f' for {name}'}" for name, x in named.items())
        raise ParameterError(f"surroundings: wanted a NumPy array for some of {', '.join(_SURROUNDED)}, got {got}")


def _kernel_on_cpu(variant: Variant, *, schedule: str, races: bool) -> emulator.Emulated:
    runner = _runner(variant.stage)
    if not hasattr(runner, "interpret"):
        return emulator.build_stage(variant, hooks=races)
    if races or schedule != "ascending":
        raise UnsupportedError(
            f"Stage {variant.stage.id} runs on a CPU by Triton's interpreter, one program after the other: there are "
            "no races to look for and no schedule but ascending."
        )
    kernel: emulator.Emulated = runner.interpreted(variant)
    return kernel


def _workspace_on_cpu(words: int, counters: int) -> Any:
    work = np.full(words, _NAN, np.uint32)
    work[:counters] = 0
    return work


class EmulatedCall:
    """A kernel on the CPU with its arguments, ready to launch.

    `passes`, or else the runner's `emulated_passes`, builds the arguments from this call, in place of `params_for` and
    `tile_maps`. It may set `grid` and `after`.
    """

    def __init__(
        self,
        planned: Plan,
        kernel: emulator.Emulated,
        views: Mapping[str, DeviceArray],
        lse: DeviceArray | None,
        *,
        passes: Callable[[EmulatedCall], list[emulator.Structure]] | None = None,
        surroundings: Mapping[str, Any] | None = None,
        count_fallbacks: bool = False,
    ) -> None:
        assert kernel.launch_shape is not None
        self.planned, self.kernel, self.views = planned, kernel, views
        self.shape, self.grid = fitted(planned.problem, kernel.launch_shape)
        self.after: Callable[[], None] = lambda: None
        """Called when the kernel has finished."""
        words, counters = workspace(self.shape, self.grid)
        work = _workspace_on_cpu(words, counters)
        self._work = work[:counters]
        self.fallbacks = np.zeros(len(Fallbacks._fields), np.uint32)
        # Rows that belong to no sequence are not written.
        written: emulator.Access = "rw" if planned.problem.varlen else "w"
        self.pointers = {
            name: emulator.Pointer(
                array=view.owner,
                access=written if name in ("O", "LSE") else "r",
                name=name,
                surroundings=(surroundings or {}).get("out" if name == "O" else name.lower()),
            )
            for name, view in {**views, **({} if lse is None else {"LSE": lse})}.items()
        }
        """By the names of their fields in `AttentionParams` and the other structures."""
        tensors = _by_head(views)
        self.params = params_for(planned.problem, planned.scale, tensors)
        if self.shape.persistent:
            self.pointers["work"] = emulator.Pointer(array=work, name="work")
        if count_fallbacks:
            self.pointers["fallbacks"] = emulator.Pointer(array=self.fallbacks, name="fallbacks")
        self._runner: Any = _runner(planned.stage)
        passes = passes or getattr(self._runner, "emulated_passes", None)
        self._arguments = [emulator.Structure(value=self.params, pointers=self.pointers)]
        if passes is not None:
            self._arguments = passes(self)
        elif planned.stage.tensor_maps:
            maps = tile_maps(planned, self.shape, tensors)
            value = maps_for({name: tensor_map.emulated() for name, tensor_map in maps.items()})
            within = {name: replace(self.pointers[name], displacement=encoded.origin) for name, encoded in maps.items()}
            self._arguments.append(emulator.Structure(value=value, pointers=within))

    def launch(
        self,
        timeout_s: float | None = emulator.DEFAULT_TIMEOUT_S,
        *,
        schedule: str = "ascending",
        threads: int | None = None,
        cancel: threading.Event | None = None,
    ) -> emulator.Report:
        """Run the kernel."""
        problem = self.planned.problem
        if hasattr(self._runner, "interpret"):
            values = {"HEAD_DIM": problem.head_dim, "CAUSAL": int(problem.causal), **self.kernel.parameters}
            report: emulator.Report = self._runner.interpret(
                self.kernel,
                {**triton_arguments(self.params), "wants_lse": int("LSE" in self.pointers), **self.pointers},
                constants={name: values[name] for name in triton_code.CONSTANTS},
                dtype=problem.dtype,
                grid=self.grid,
                timeout_s=timeout_s,
                cancel=cancel,
            )
            return report
        return emulator.launch(
            self.kernel,
            self._arguments,
            grid=self.grid,
            cluster=(max(1, self.shape.cluster), 1, 1),
            schedule=schedule,
            threads=threads,
            early=self.planned.stage.early_launch,
            timeout_s=timeout_s,
            cancel=cancel,
        )

    def finish(self, report: emulator.Report) -> None:
        """Copy outputs to their destination after the kernel has finished.

        Raises:
            EmulationError: the kernel did not reset its counters to 0.
        """
        self.after()
        if self._work.any():
            left = {place: int(self._work[place]) for place in self._work.nonzero()[0].tolist()}
            raise EmulationError(
                f"{self.planned.stage.id} on the CPU: wanted its counters back at 0 after the last "
                f"block, for the launch after this one, got, by place, {left}",
                report=report,
            )


def run_on_cpu(
    planned: Plan,
    views: Mapping[str, DeviceArray],
    lse: DeviceArray | None,
    params: Mapping[str, int],
    passes: Callable[[EmulatedCall], list[emulator.Structure]],
) -> None:
    """Run a validated call of a runner on the CPU; the arguments are those of `EmulatedCall`, `params` the tunables.

    Raises:
        UnsupportedError, CompileError, MissingPackageError, EmulationError: as `emulate` does.
    """
    planned.stage.require(planned.problem)
    variant = Variant.of(planned.stage, planned.problem, aligned=planned.aligned, overrides=params)
    call = EmulatedCall(planned, emulator.build_stage(variant, hooks=False), views, lse, passes=passes)
    call.finish(call.launch())


def refuse_too_large(stage_id: str, problem: Problem, *, timeout_s: float, races: bool, threads: int | None) -> None:
    """Raise `TooLargeError` if emulating a stage would clearly exceed `timeout_s`; arguments as in `emulate`.

    Call this before drawing the inputs, which may not fit into memory.
    """
    cores = threads or emulator.cores()
    seconds = problem.flops * (_HOOKS_COST if races else 1.0) / (_ASSUMED_FLOPS_PER_S * cores)
    if seconds > _CLEARLY * timeout_s:
        raise TooLargeError(
            f"{problem.label} by stage {stage_id} would take about {_duration(seconds)} on "
            f"{several(cores, 'core')}; wanted at most {_duration(timeout_s)}. A smaller problem works; "
            "`flashlab.emulate(…, timeout_s=None)` and `flashlab check --insist` have no time limit.",
            seconds=seconds,
        )


def _duration(seconds: float) -> str:
    """Format a duration: `14 minutes`."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 2 else f"{seconds:.2g} seconds"


# --- wherever the arrays are ------------------------------------------------------------------------------------------


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    stage: str | None = None,
    out: Any | None = None,
    return_lse: bool = False,
    stream: Any | None = None,
    params: Mapping[str, int] | None = None,
    device: str | None = None,
) -> Any:
    """Compute softmax(scale · Q Kᵀ) V on the device of the arrays.

    On a GPU, the kernel is enqueued on the caller's stream, without copies or synchronisation. Torch tensors with the
    layout and options of an earlier call skip all validation; an edited kernel source is then noticed within a second.
    In host memory, the same kernel is emulated on the CPU and has finished when this returns (`emulate` has more
    options and returns a report).

    Args:
        q: (batch, q_heads, q_len, head_dim), float16 or bfloat16. On a CUDA GPU: a torch tensor, a CuPy array, or any
            object with DLPack or `__cuda_array_interface__`. In host memory: a NumPy array (ml_dtypes.bfloat16), a
            torch tensor, or any object with DLPack. The last dimension must be contiguous. Rows that do not start on
            16-byte boundaries are slower, and so are strides of 0 or less (an expanded K or V) if the stage uses
            tensor maps: see `plan.why_slow` of a prepared call or emulation.
        k: (batch, kv_heads, kv_len, head_dim); kv_heads divides q_heads (grouped-query attention).
        v: like `k`.
        causal: whether query i sees only keys j ≤ i + kv_len - q_len (aligned bottom right). The output of a query
            that sees no key is 0.
        window: sliding window (left, right): query i sees keys with -left ≤ j - i - (kv_len - q_len) ≤ right; None or
            -1 is no limit, a single number applies to both sides. Tiles entirely outside are skipped. Hugging Face's
            `sliding_window=w` is causal with `window=(w - 1, None)`. Not all stages support it (`Stage.features`).
        softcap: soft cap on scores before the mask, softcap · tanh(score / softcap); 0 disables it. Computed with the
            GPU's approximate tanh (PTX ISA, tanh.approx), so a capped score is off by up to 2^-11 of itself, however
            large the cap, and the log-sum-exp by as much as its scores. Supported by the stages that support `window`.
        scale: finite factor on the scores; default: 1/sqrt(head_dim). Scaled scores must lie within ±2^27: FP32 cannot
            represent the differences of larger ones, and their rows may be 0, infinity or NaN.
        stage: stage id. Default: on a GPU, the fastest stage on the nearest recorded problem (choice.py; `flashlab
            explain` shows which and why); on a CPU, the last rung of the ladder that supports the problem.
        out: output array, like `q`; default: a new contiguous array of the caller's library.
        return_lse: whether to also return the log-sum-exp of the scores (natural log, float32; -inf if a query sees no
            key, NaN if one of its scores is NaN).
        stream: integer handle or stream object; default: the library's current stream on that device. With any other
            stream, the caller must keep the arrays alive until the kernel has finished.
        params: tunables of the stage, by name. Default: on a GPU, the fastest values on the nearest tuned problem
            (data/<gpu>/tuned.json), if any; else the stage's defaults.
        device: `cpu` or `gpu`, to require that device; default: the device of the arrays. Moves no data.

    Returns:
        The output (batch, q_heads, q_len, head_dim), or (output, lse) with lse (batch, q_heads, q_len).

    Raises:
        InputError: invalid arguments (ShapeError, DTypeError, LayoutError, DeviceError, UnknownStageError,
            ParameterError).
        UnsupportedError: no stage, or not the named one, supports this call here; TooLargeError if emulation would
            take too long.
        NoGpuError, MissingPackageError, CompileError, LaunchError, EmulationError: see there.
    """
    asked = (causal, None if window is None else repr(window), softcap, scale, stage, return_lse, device)
    key, addresses, again = recipes.lookup((q, k, v), out, asked, params)
    if again is not None:
        return again(q, addresses, out, return_lse, stream)
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "stage": stage}
    how |= {"out": out, "params": params}
    return first_call(q, k, v, how, key=key, device=device, stream=stream, return_lse=return_lse)


def first_call(
    q: Any,
    k: Any,
    v: Any,
    how: Mapping[str, Any],
    *,
    key: Hashable | None,
    device: str | None,
    stream: Any | None,
    return_lse: bool,
) -> Any:
    """Run a call without a cached recipe and cache one under `key`: the output, or (output, lse).

    `how`: options common to `prepare` and `emulate`.
    """
    if arrays.place_of(q, stream, device).stream is None:
        ran = emulate(q, k, v, **how, return_lse=return_lse)
        return (ran.out, ran.lse) if return_lse else ran.out
    prepared = prepare(q, k, v, **how, return_lse=return_lse, stream=stream)
    with gpu.context(prepared.plan.device):
        prepared()
    if key is not None and isinstance(prepared.launch, gpu.Launch) and prepared.plan.stage.language == "cuda":
        recipes.by_layout.put(key, prepared.recipe)
    return (prepared.out, prepared.lse) if return_lse else prepared.out
