"""The public call: `attention(q, k, v)` on the caller's arrays and stream, by the stage that suits the problem.

plan.py checks the arguments and chooses the stage; `prepare` compiles and loads what a plan needs and gives a callable
that only enqueues, which is what gets timed. Arrays in host memory run on the CPU: `emulate`, which also says what the
kernel did wrong.

All that does not depend on addresses (the checks, the choice, the machine code, the grid, the strides) is done once for
a layout and kept (recipes.py). `prepare` asks the file system at each call whether a recipe's sources are what they
were; a call of `attention` like an earlier one, on torch tensors, does so once in a second.
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
from flashlab.run.plan import Plan, Sequences, by_head, check_lengths, outputs_of, plan, refuse_overlap, tunables
from flashlab.run.recipes import Recipe

if TYPE_CHECKING:
    from flashlab.build.compiler import Cubin, LaunchShape

with suppress(ImportError):  # not installed: gpu.py says so where a GPU is asked for
    # Tens of milliseconds, which a process's first call would take otherwise. No driver is loaded yet.
    importlib.import_module("cuda.bindings.driver")

_ASSUMED_FLOPS_PER_S = 1e9
"""What a core is taken to do; stages differ by ten times."""
_HOOKS_COST = 8.0
"""How many times longer a kernel is taken to run with hooks."""
_CLEARLY = 4.0
"""So many times over its limit by these assumptions, a problem is refused."""
_NAN = 0x7FFFFFFF
"""The bits of a NaN: what a workspace on a CPU holds before a kernel writes there."""


def _runner(stage: Stage) -> Any:
    """The module of `Stage.runner`; None where the core launches the stage by itself.

    It has one or more of these:

    - `passes(recipe, views, params, stream)`: what enqueues the stage's kernel among others on a GPU. `views` are Q, K,
      V and O, and `params` is what a kernel gets that the core launches.
    - `emulated_passes(call)`: the arguments of an `EmulatedCall`, in place of its own.
    - `interpreted` and `interpret` run the stage on a CPU where the emulator cannot.
    """
    return None if stage.runner is None else importlib.import_module(stage.runner)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A validated, compiled, loaded call: calling it enqueues the kernel and returns at once.

    Holds its arrays; `out` and `lse` are the caller's library's. Calls are ordered by the stream, and share the
    counters of a persistent kernel.
    """

    recipe: Recipe
    out: Any
    lse: Any
    launch: Callable[[], None]
    keep: tuple[Any, ...]
    """What must live as long as this."""
    counted: gpu.Zeroed | None
    """The counters behind `fallbacks`."""

    @property
    def plan(self) -> Plan:
        """The problem, the stage and why it is slow, where it is."""
        return self.recipe.plan

    @property
    def cubin(self) -> Cubin:
        """The machine code."""
        return self.recipe.code.cubin

    @property
    def launch_shape(self) -> LaunchShape:
        """Threads, shared memory and tiles of the kernel."""
        return self.recipe.shape

    def __call__(self) -> None:
        """Enqueue once. The device's context must be current (torch and CuPy see to it on their current device)."""
        self.launch()

    def fallbacks(self) -> Fallbacks | None:
        """What all calls so far counted, once they are done; None where `prepare` was not asked to count."""
        return None if self.counted is None else Fallbacks(*memoryview(self.counted.read()).cast("I"))

    def blocks_per_sm(self) -> int:
        """Blocks resident on an SM."""
        return gpu.blocks_per_sm(self.recipe.code.function, self.launch_shape.threads, self.launch_shape.smem_bytes)

    def __reduce__(self) -> NoReturn:
        """Refuse what `copy` and `pickle` ask for: the launch is of these arrays, this process and this GPU."""
        raise InputError(
            "a prepared call can be neither copied nor pickled, because it launches loaded machine code on the "
            "addresses of its arrays. Calling `flashlab.prepare` with the copied arrays works."
        )


def _recipe(
    inputs: Mapping[str, DeviceArray], out: DeviceArray | None, how: Mapping[str, Any], code: Mapping[str, Any]
) -> Recipe:
    """What `prepare` needs for arrays of that layout, made at the first such call.

    `how` is what `plan` takes of the caller's options, and `code` what the compiler does; its overrides are items.

    Raises:
        What `plan` raises, and what compiling and loading do.
    """
    device = gpu.info(inputs["q"].device)
    # 1, 1.0 and True are one key, and one of them is no scale.
    asked = (*how.values(), *map(type, how.values()), *code.values())
    key = (*map(recipes.layout, (*inputs.values(), out)), asked, device.slug)
    try:
        kept = recipes.by_layout.get(key)
    except TypeError:  # an option that cannot be part of a key is one that `plan` refuses
        kept = None
    if kept is not None and kept.stands():
        if out is not None:
            refuse_overlap("out", out, inputs)
        return kept
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
    table = (slug, choice.stamp(slug))  # before it is read
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
    # A new output is contiguous.
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
        table=table,
    )


def _views(inputs: Mapping[str, DeviceArray], out: DeviceArray) -> dict[str, DeviceArray]:
    """By the names of a kernel's parameters, in the order in which a recipe takes their addresses."""
    return {name.upper() if len(name) == 1 else name: view for name, view in inputs.items()} | {"O": out}


def _by_head(views: Mapping[str, DeviceArray]) -> dict[str, DeviceArray]:
    """Q, K, V and O as kernels see them: (batch, heads, length, head_dim)."""
    return {
        name: by_head(view, name) if "cu_seqlens_q" in views else view for name, view in views.items() if name in "QKVO"
    }


@lru_cache(maxsize=16)
def _warn_of_kin(slug: str, arch: str) -> None:
    """Log, once a process, that another GPU's records choose the stages here."""
    table = choice.table_for(slug, arch)
    if table is not None and table.gpu != slug:
        logging.getLogger(__name__).warning(
            "%s has no table of choices of its own: stages are chosen by that of %s, its nearest kin. `flashlab tune` "
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
    """`attention` on a GPU, validated, compiled and loaded, but not launched: for repeated calls and for timing.

    Calling what this returns enqueues the kernel once and returns at once; it reads and writes the same memory at each
    call, on the stream that was fixed here. The device's context must be current, as torch and CuPy keep it for their
    current device. Two threads may call two of them at once, and one of them one after the other.

    Args:
        q: as `attention` takes it, on a GPU.
        k: likewise.
        v: likewise.
        causal: as `attention` takes it, like the eight after it.
        window: keys that a query sees beside its own.
        softcap: what scores are bounded by.
        scale: what scores are multiplied by.
        stage: a stage's id, or None.
        out: where to write the output, or None.
        return_lse: whether to make an array for the log-sum-exp.
        stream: the stream to enqueue on, or None.
        params: values of the stage's tunables.
        lse: where to write the log-sum-exp, contiguous float32 (batch, q_heads, q_len); a new array where None and
            `return_lse`.
        source: an edited copy of the stage's file, compiled in place of it.
        may_spill: let registers spill where the stage forbids it.
        count_fallbacks: make the calls count how often the kernel fell back (`Prepared.fallbacks`).
        sequences: of `varlen_attention`, whose arrays the others then are.

    Returns:
        A callable that holds its arrays; `out` and `lse` are the output and, where asked for, the log-sum-exp, of the
        caller's library; `plan.stage` is the stage, `cubin.parameters` its tunables.

    Raises:
        FlashlabError: what `attention` raises.
    """
    gpu.require()
    arrays.refuse_gradients(q=q, k=k, v=v, out=out, lse=lse)
    place = arrays.place_of(q, stream, "gpu")
    inputs = {name: place.view(of, name) for name, of in {"q": q, "k": k, "v": v, **_named(sequences)}.items()}
    target = None if out is None else place.view(out, "out")
    handle = place.stream
    assert handle is not None
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "stage": stage}
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
        launch=_launch(recipe, views, others, handle),
        out=made.out,
        lse=made.lse,
        keep=(*views.values(), made.lse_view, work, stream),
        counted=counted,
    )


def _named(sequences: Sequences | None) -> dict[str, Any]:
    """The arrays among what a call is asked for.

    Raises:
        ParameterError: it is asked for something else.
    """
    if not isinstance(sequences, Sequences | None):
        raise ParameterError(
            f"sequences: wanted flashlab.Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q), got "
            f"{type(sequences).__name__}. `flashlab.Sequences(*sequences)` makes one of a tuple."
        )
    names = ("cu_seqlens_q", "cu_seqlens_k")
    return {} if sequences is None else {name: getattr(sequences, name) for name in names}


def _file(source: Any) -> Path | None:
    """The file to compile in place of the stage's.

    Raises:
        ParameterError: it is no path.
    """
    if not isinstance(source, str | Path | None):
        raise ParameterError(f"source: wanted the path of an edited copy of the stage's file, got {source!r}")
    return None if source is None else Path(source)


def _launch(
    recipe: Recipe, views: Mapping[str, DeviceArray], others: tuple[int, int, int], stream: int
) -> Callable[[], None]:
    """`others`: the addresses of the log-sum-exp, of the tile scheduler's counters and of the fallbacks', or 0."""
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
    """What a call on the CPU gave."""

    out: Any
    """Of the caller's library."""
    lse: Any
    """The log-sum-exp, float32 (batch, q_heads, q_len), or (q_heads, total_q) of packed sequences, of the caller's
    library; None where none was asked for."""
    report: emulator.Report
    """Findings and counters where `races` were looked for, and what the kernel printed."""
    kernel: emulator.Emulated
    plan: Plan
    fallbacks: Fallbacks | None = None
    """None where it was not asked to count."""


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
    """`attention` on the CPU: the stage's own file, thread for thread, in a worker process.

    Args:
        q: as `attention` takes it, in host memory.
        k: likewise.
        v: likewise.
        causal: as `attention` takes it, like the six after it.
        window: keys that a query sees beside its own.
        softcap: what scores are bounded by.
        scale: what scores are multiplied by.
        stage: a stage's id, or None.
        out: where to write the output, or None.
        params: values of the stage's tunables.
        lse: where to write the log-sum-exp; a new array where None and `return_lse`.
        return_lse: False: the kernel is not asked for it, unless `lse` is given.
        source: compile an edited copy of the stage's file instead, by its path.
        schedule: `ascending`, `descending` or `seeded:N`: the order in which warps take their turns.
        races: look for races, uninitialised reads and accesses out of bounds, and count bank conflicts and sectors:
            the report's `findings` and `counters`. Many times slower.
        timeout_s: how long it may take: refused beforehand where it would clearly take longer, stopped when it does.
            None for as long as it takes.
        threads: operating-system threads; one for each core where None.
        cancel: set from another thread, it stops the run as Ctrl-C does.
        surroundings: for `q`, `k`, `v`, `out` or `lse`, the contiguous NumPy array that it is a view into, which the
            kernel then finds around it and may damage.
        count_fallbacks: the kernel counts how often it left its fast path.
        sequences: of `varlen_attention`, whose arrays the others then are. How long they take is not asked beforehand.

    Raises:
        FlashlabError: what `attention` raises of bad input.
        TooLargeError: it would clearly take longer than `timeout_s`.
        EmulationError: the run failed, or took longer.
        CompileError: the stage's file does not compile.
        MissingPackageError: there is no C++ compiler.
        KeyboardInterrupt: Ctrl-C, or `cancel`; the worker is gone.
    """
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
    report = call.launch(timeout_s, schedule=schedule, threads=threads, cancel=cancel)
    call.finish(report)
    fallbacks = Fallbacks(*call.fallbacks.tolist()) if count_fallbacks else None
    return Emulation(out=made.out, lse=made.lse, report=report, kernel=kernel, plan=planned, fallbacks=fallbacks)


_SURROUNDED = ("q", "k", "v", "out", "lse")


def _check_surroundings(given: Any) -> None:
    """Raises `ParameterError` where it is not None, nor NumPy arrays by the names of those that are views into them."""
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
    """The arguments of a kernel on the CPU, ready to be launched.

    `passes` makes them where they are others than `params_for` and `tile_maps` say, from this call; a runner's
    `emulated_passes` stands in its place where there is one. It may set `grid` and `after`.
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
        """What is left to do when the kernel is done."""
        words, counters = workspace(self.shape, self.grid)
        work = _workspace_on_cpu(words, counters)
        self._work = work[:counters]
        self.fallbacks = np.zeros(len(Fallbacks._fields), np.uint32)
        # Rows that belong to no sequence stay as they were.
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
        """By the names of the fields that hold them, of `AttentionParams` and others."""
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
        """Bring outputs where they belong, once the kernel is done.

        Raises:
            EmulationError: it left its counters at other values than it found them.
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
    """A sound call that a runner makes of its own kind of arrays, as `EmulatedCall` takes it; `params`: tunables.

    Raises:
        UnsupportedError, CompileError, MissingPackageError, EmulationError: as `emulate` says.
    """
    planned.stage.require(planned.problem)
    variant = Variant.of(planned.stage, planned.problem, aligned=planned.aligned, overrides=params)
    call = EmulatedCall(planned, emulator.build_stage(variant, hooks=False), views, lse, passes=passes)
    call.finish(call.launch())


def refuse_too_large(stage_id: str, problem: Problem, *, timeout_s: float, races: bool, threads: int | None) -> None:
    """Raises `TooLargeError` where a stage would clearly take longer; `emulate` has the other arguments.

    Whoever draws the inputs asks before, since they may be more than fits into memory.
    """
    cores = threads or emulator.cores()
    seconds = problem.flops * (_HOOKS_COST if races else 1.0) / (_ASSUMED_FLOPS_PER_S * cores)
    if seconds > _CLEARLY * timeout_s:
        raise TooLargeError(
            f"{problem.label} by stage {stage_id} would take about {_duration(seconds)} on "
            f"{several(cores, 'core')}; wanted at most {_duration(timeout_s)}. A smaller problem works; "
            "`flashlab.emulate(…, timeout_s=None)` and `flashlab check --insist` take as long as it takes.",
            seconds=seconds,
        )


def _duration(seconds: float) -> str:
    """For people: `14 minutes`."""
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
    """softmax(scale · Q Kᵀ) V where the arrays are.

    On a GPU: enqueued on the caller's stream; no copies, no synchronisation. Torch tensors laid out as in an earlier
    call with the same options are launched at once; that a kernel's source was edited is then noticed within a second.
    In host memory: the same kernel on the CPU, done when this returns (`emulate` takes more options and returns a
    report).

    Args:
        q: (batch, q_heads, q_len, head_dim), float16 or bfloat16. On a CUDA GPU: a torch tensor, a CuPy array, or
            anything with DLPack or `__cuda_array_interface__`. In host memory: a NumPy array (ml_dtypes.bfloat16), a
            torch tensor, or anything with DLPack. Any strides, the last dimension contiguous; rows that are not on
            16-byte boundaries are slower, and so are strides of 0 or less where the stage takes tensor maps (those of
            an expanded K or V): `plan.why_slow` of a prepared call or an emulation says so.
        k: (batch, kv_heads, kv_len, head_dim); kv_heads divides q_heads (grouped-query attention).
        v: as `k`.
        causal: query i sees key j when j - i ≤ kv_len - q_len (aligned bottom right). A query that sees none gets 0.
        window: (left, right): of those keys, query i sees those with -left ≤ j - i - (kv_len - q_len) ≤ right; None or
            -1 is no limit to that side, one number both sides. Keys outside cost nothing, by whole tiles. Hugging
            Face's `sliding_window=w` is causal with `window=(w - 1, None)`. Some stages take one (`Stage.features`).
        softcap: c > 0: a score s becomes c · tanh(s / c) before the mask, in the same stages; 0: it stays.
        scale: finite; 1/sqrt(head_dim) where None. Scores times the scale may be as large as 2^27 either way. FP32
            cannot hold the differences of larger ones, which the largest float16 inputs give: such a row may come out
            as 0, infinity or NaN.
        stage: a stage's id. None: on a GPU the one that was fastest on the nearest problem on record (choice.py;
            `flashlab explain` says which and why), on a CPU the last rung of the ladder.
        out: where to write, like `q`; a new contiguous array of the caller's library where None.
        return_lse: also return the log-sum-exp of the scores (natural log, float32, -inf where a query sees no key, NaN
            where one of its scores is).
        stream: an integer or a stream object; the library's current stream on that device where None. With another
            stream than the current one, keeping the arrays alive until it is done is the caller's part.
        params: the stage's tunables, by name. On a GPU those that are not named are what won there on the nearest
            problem (data/<gpu>/tuned.json), where something did, and else the stage's defaults.
        device: `cpu` or `gpu`, to be sure of it; where the arrays are, where None. It moves nothing.

    Returns:
        The output, or (output, lse).

    Raises:
        InputError: arguments are off (ShapeError, DTypeError, LayoutError, DeviceError, UnknownStageError,
            ParameterError).
        UnsupportedError: no stage, or not the named one, runs this here; TooLargeError on a CPU that would take long.
        NoGpuError, MissingPackageError, CompileError, LaunchError, EmulationError: as they say.
    """
    asked = (causal, window, softcap, scale, stage, return_lse, device)
    key, addresses, again = recipes.kept((q, k, v), out, asked, params)
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
    """A call of which `recipes.kept` knows none like it: the output, or (output, lse); `key` is what it gave.

    `how`: what both `prepare` and `emulate` take.
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
