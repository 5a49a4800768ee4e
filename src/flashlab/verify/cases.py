"""Which problems and layouts break kernels: what a check of stages goes through, on a GPU (measure/check.py) or a CPU.

Grouped-query heads are always on. Beside normal inputs of hostile lengths there are hostile inputs, whose scores reach
what a kernel does seldom, and rows that lie far apart. on_cpu.py runs the cases on a CPU.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from flashlab.core.errors import ParameterError, refuse_unknown
from flashlab.core.inputs import END, NORMAL, SCALE8, drawn
from flashlab.core.inputs import HOSTILE as HOSTILE_INPUTS
from flashlab.core.paths import table
from flashlab.core.problem import BYTES_PER_ELEMENT, DTYPES, MASKS, UNLIMITED, Problem, Window, matching
from flashlab.kernels.registry import Stage
from flashlab.record.schema import Verdict
from flashlab.run.plan import with_features
from flashlab.verify.verdict import check_as_flash_attention, strides_of

_LENGTHS: Mapping[str, tuple[tuple[int, int], ...]] = {
    name: tuple((q_len, kv_len) for q_len, kv_len in pairs) for name, pairs in table(__file__, "lengths").items()
}
HOSTILE, FLASH_ATTENTION_LENGTHS = _LENGTHS["hostile"], _LENGTHS["flash_attention"]
LAYOUTS: dict[str, str] = {
    "contiguous": "bhsd",
    "bshd": "bshd",  # heads side by side in a token, as a projection writes them
    "padded": "bhsd+8",  # a gap of 8 elements after every row
    "misaligned": "bhsd+1@1",  # rows of odd length that start at any element: nothing is 16-byte aligned
}
"""The place of every tensor, as `_PLACE` reads it."""
FAR_LAYOUTS: dict[str, str] = {"far": f"sbhd~{(1 << 23) + 8}", "far_misaligned": f"sbhd~{(1 << 23) + 9}@1"}
"""Likewise, of rows so far apart that from the 257th on offsets take more than 32 bits."""
FAR_LENGTHS = ((272, 272),)
"""Few rows past the 256th: memory between rows is never touched, and what is touched goes by the page."""
TENSORS = ("q", "k", "v", "out")
_PLACE = re.compile(r"(?P<order>[bhs]{3}d)(\+(?P<gap>\d+))?(~(?P<row>\d+))?(@(?P<offset>\d+))?(?P<shared>=)?")
"""How a tensor lies: `bshd+8@3=` is heads side by side in a token, a gap of 8 elements after each row, moved by 3
elements, one head that all share; `~8388616` are rows so many elements apart. A random layout is one place for each of
`TENSORS`, joined by slashes."""
HEADS = (2, 4, 2)
"""Batch, query heads and key heads of a case: the least in which no head or batch can be taken for another."""
TWO_HEADS, LONE_HEAD = (1, 2, 1), (1, 1, 1)
"""On a CPU, whose time goes by heads: of a problem that is there for its edges, and of a long one."""
MANY_SCORES = 1 << 16
"""A head with so many scores makes a problem long, where a warpgroup's 64 rows count as one tile at least."""
HOSTILE_LENGTHS = ((70, 400), (400, 400))
"""Lengths for hostile inputs: several tiles of keys, whose scores grow from either end. A CPU takes the first."""
SCHEDULES = ("ascending", "seeded:1")
"""The orders of warps that a CPU goes through: a copy or a warp that is early in one is late in the other."""


@dataclass(frozen=True)
class Case:
    """A problem in one layout, and the implementations that take it."""

    problem: Problem
    layout: str
    names: tuple[str, ...]
    schedule: str = SCHEDULES[0]
    """On a CPU: the order in which warps take their turns."""

    @property
    def aligned(self) -> bool:
        """Whether every row starts on a 16-byte boundary."""
        steps = re.findall(r"[+~@](\d+)", _places(self.layout))
        return all(int(n) * BYTES_PER_ELEMENT % 16 == 0 for n in steps)

    @property
    def launched(self) -> Problem:
        """The problem as a call runs it, without a window that hides no key: it decides the machine code."""
        return with_features(self.problem, self.problem.window, self.problem.softcap)

    @property
    def detectable(self) -> bool:
        """Whether the race detector has room for it: it keeps something for each byte, between rows far apart too."""
        return self.layout not in FAR_LAYOUTS


class Selection(TypedDict, total=False):
    """Which cases a check goes through, on a GPU and on a CPU; see `chosen_cases`."""

    lengths: Sequence[tuple[int, int]] | None
    dtypes: Sequence[str]
    masks: Sequence[str]
    layouts: Sequence[str] | None
    inputs: Sequence[str] | None
    features: Mapping[str, Any] | None
    head_dims: Sequence[int] | None
    random: int
    suite: str | None


def cases(
    able: Mapping[str, Stage],
    *,
    lengths: Sequence[tuple[int, int]] = HOSTILE,
    dtypes: Sequence[str] = DTYPES,
    masks: Sequence[str] = MASKS,
    layouts: Sequence[str] = tuple(LAYOUTS),
    inputs: Sequence[str] = (NORMAL,),
    head_dims: Sequence[int] | None = None,
    heads: tuple[int, int, int] = HEADS,
    features: Mapping[str, Any] | None = None,
) -> list[Case]:
    """Every combination that at least one implementation takes.

    `able` is the stage of each name, `features` a window and a soft cap.

    Raises:
        ParameterError, DTypeError: an unknown layout, mask or type, or inputs that are not drawn.
    """
    kinds = [drawn(name) for name in inputs]
    refuse_unknown("layout", {**LAYOUTS, **FAR_LAYOUTS}, *layouts)
    combinations: list[Case] = []
    dims = _head_dims(able) if head_dims is None else head_dims
    for head_dim, dtype, mask, (q_len, kv_len) in itertools.product(dims, dtypes, masks, lengths):
        problem = Problem.of(*heads, q_len, kv_len, head_dim, dtype=dtype, mask=mask, **(features or {}))
        names = tuple(name for name, stage in able.items() if stage.why_not(problem) is None)
        of_problem = (replace(problem, inputs=kind) for kind in kinds if names)
        combinations += [Case(same, layout, names) for same in of_problem for layout in layouts]
    return combinations


def _some(chosen: list[Case], among: Sequence[Case] = ()) -> list[Case]:
    if not chosen:
        dtypes, dims = ({getattr(case.problem, name) for case in among} for name in ("dtype", "head_dim"))
        have = (
            f". They take {', '.join(sorted(dtypes))} at head dims {', '.join(map(str, sorted(dims)))}" if among else ""
        )
        raise ParameterError(f"wanted at least one stage that takes one of those types and head dims, got none{have}")
    return chosen


def _why_none(
    able: Mapping[str, Stage],
    lengths: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    head_dims: Sequence[int] | None,
    features: Mapping[str, Any],
) -> str:
    """Why no stage takes those problems: each one's reason, at a type and a head dim that it takes where there are."""
    reasons = []
    for stage in able.values():
        dtype = next((candidate for candidate in dtypes if candidate in stage.dtypes), dtypes[0])
        dims = stage.head_dims if head_dims is None else head_dims
        head_dim = next((candidate for candidate in dims if candidate in stage.head_dims), dims[0])
        reasons.append(stage.why_not(Problem.of(*HEADS, *lengths[0], head_dim, dtype=dtype, **features)))
    return " ".join(dict.fromkeys(filter(None, reasons)))


def _head_dims(able: Mapping[str, Stage]) -> list[int]:
    return sorted({dim for stage in able.values() for dim in stage.head_dims})


def only(
    among: Sequence[Case],
    *,
    dtypes: Sequence[str] = DTYPES,
    masks: Sequence[str] = MASKS,
    head_dims: Sequence[int] | None = None,
) -> list[Case]:
    """The cases of those types, masks and head dims.

    Raises:
        ParameterError: nothing is left.
    """
    conditions = {"dtype": [*dtypes], "mask": [*masks], "head_dim": [*(head_dims or ())]}
    return _some([case for case in among if matching([case.problem], **conditions)], among)


def chosen_cases(
    able: Mapping[str, Stage],
    *,
    seed: int,
    on_cpu: bool,
    schedules: Sequence[str] | None = None,
    **selection: Unpack[Selection],
) -> list[Case]:
    """The cases of a check.

    Where lengths, layouts, inputs and schedules are left open, those of `default_cases` or `default_cases_on_cpu`.
    Where one of them is given, every combination: by default of all hostile lengths, every layout (on a CPU for long
    problems the first alone), normal inputs, and the first schedule. `random` replaces lengths, masks, types, layouts,
    head dims and features by so many `random_cases`, `suite` by the cases of one of `SUITES`.

    Raises:
        ParameterError: what was asked for does not exist.
    """
    dtypes, masks = selection.get("dtypes", DTYPES), selection.get("masks", MASKS)
    lengths, layouts, inputs = selection.get("lengths"), selection.get("layouts"), selection.get("inputs")
    suite = selection.get("suite")
    for values, what in ((lengths, "length"), (layouts, "layout"), (inputs, "kind of inputs"), (schedules, "schedule")):
        if values is not None and not values:
            raise ParameterError(f"wanted at least one {what}, got none")
    some: dict[str, Any] = {"dtypes": dtypes, "masks": masks, "head_dims": selection.get("head_dims")}
    features = selection.get("features")
    kinds = inputs or (NORMAL,)
    if count := selection.get("random", 0):
        scores = CPU_SCORES if on_cpu else GPU_SCORES
        chosen = random_cases(able, count, seed=seed, max_scores=scores, inputs=kinds)
    elif suite:
        refuse_unknown("suite", SUITES, suite)
        chosen = only(flash_attention_cases(able, on_cpu=on_cpu), **some)
    elif not (lengths or layouts or inputs or schedules or features):
        return only(default_cases_on_cpu(able) if on_cpu else default_cases(able), **some)
    else:
        chosen = []
        for pair in lengths or HOSTILE:
            through = layouts or tuple(LAYOUTS)
            if on_cpu and is_long(*pair):
                through = through[:1]
            heads = _heads_on_cpu(*pair) if on_cpu else HEADS
            chosen += cases(able, lengths=[pair], layouts=through, inputs=kinds, heads=heads, **some, features=features)
        if not chosen:
            why = _why_none(able, lengths or HOSTILE, dtypes, some["head_dims"], features or {})
            raise ParameterError(f"wanted at least one stage that takes those problems, got none. {why}")
    return [replace(case, schedule=schedule) for case in _some(chosen) for schedule in schedules or SCHEDULES[:1]]


def default_cases(able: Mapping[str, Stage]) -> list[Case]:
    """What a GPU goes through: hostile lengths in every layout, hostile inputs, rows far apart, windows, soft caps."""
    hostile = cases(able, lengths=HOSTILE_LENGTHS, layouts=("contiguous", "misaligned"), inputs=tuple(HOSTILE_INPUTS))
    return [*cases(able), *hostile, *_far_cases(able), *featured_cases(able)]


def default_cases_on_cpu(able: Mapping[str, Stage]) -> list[Case]:
    """What a CPU goes through.

    A hostile length goes through the first layout under the first schedule, and through each of the others in turn,
    under the second; a long one goes through the first alone. So does a hostile kind of inputs, for which the masks
    share layouts and schedules, and a stage's head dims take turns.
    """
    first, *others = LAYOUTS

    def variant(problem: Problem) -> int:
        return DTYPES.index(problem.dtype) + MASKS.index(problem.mask)

    def elsewhere(case: Case) -> Case:
        problem = case.problem
        which = variant(problem) + problem.head_dim // 64 + problem.q_len + problem.kv_len
        return replace(case, layout=others[which % len(others)], schedule=SCHEDULES[1])

    chosen: list[Case] = []
    for pair in HOSTILE:
        for case in cases(able, lengths=[pair], layouts=(first,), heads=_heads_on_cpu(*pair)):
            chosen += [case] if is_long(*pair) else [case, elsewhere(case)]
    for number, kind in enumerate(HOSTILE_INPUTS):
        for case in cases(able, lengths=HOSTILE_LENGTHS[:1], layouts=(first,), inputs=(kind,)):
            dims = {name: able[name].head_dims for name in case.names}
            turn = number + variant(case.problem)
            names = tuple(name for name in case.names if case.problem.head_dim == dims[name][turn % len(dims[name])])
            if names:
                case = replace(case, names=names)
                chosen.append(elsewhere(case) if case.problem.causal else case)
    return [*chosen, *_far_cases(able), *featured_cases(able, on_cpu=True)]


def _far_cases(able: Mapping[str, Stage]) -> list[Case]:
    """Of one head, one head dim and one mask: what an offset is computed from does not depend on them."""
    return cases(
        able,
        lengths=FAR_LENGTHS,
        masks=("causal",),
        layouts=tuple(FAR_LAYOUTS),
        head_dims=_head_dims(able)[:1],
        heads=LONE_HEAD,
        inputs=("hostile_waves", END.name),
    )


WINDOWS: tuple[Window, ...] = ((0, UNLIMITED), (1, UNLIMITED), (63, 0), (100, 37), (UNLIMITED, 5), (300, UNLIMITED))
"""Windows that break kernels: of a query's own key, off every tile, open to one side, and longer than some keys."""
SOFTCAPS = (1.0, 30.0, 50.0)
"""Of scores that all but vanish in it, and those of Gemma 2."""


def featured_cases(able: Mapping[str, Stage], *, on_cpu: bool = False) -> list[Case]:
    """Windows and soft caps, each alone and both together, on normal and on hostile inputs.

    Every length meets every window, on a GPU in every head dim, type and mask; on a CPU, which compiles for each of
    these, one of four combinations.
    """
    both = [{"window": window, "softcap": cap} for window, cap in zip(WINDOWS, SOFTCAPS * 2, strict=True)]
    asked = [*({"window": window} for window in WINDOWS), *({"softcap": cap} for cap in SOFTCAPS), *both]
    kinds = itertools.cycle((NORMAL, *HOSTILE_INPUTS))
    dims = _head_dims(able)
    chosen: list[Case] = []
    for number, (features, pair) in enumerate(itertools.product(asked, _LENGTHS["features"])):
        parity, other = number % 2, number // 2 % 2
        layout = "misaligned" if other else "contiguous"
        every: dict[str, Any] = {
            "lengths": [pair],
            "layouts": (layout,),
            "inputs": (next(kinds),),
            "features": features,
        }
        if on_cpu:
            every |= {
                "head_dims": [dims[parity % len(dims)]],
                "dtypes": (DTYPES[other],),
                "masks": (MASKS[parity ^ other],),
            }
            every |= {"heads": _heads_on_cpu(*pair)}
        chosen += cases(able, **every)
    return chosen


def is_long(q_len: int, kv_len: int) -> bool:
    """Whether a head of those lengths takes a CPU long."""
    return max(q_len, _WARPGROUP_ROWS) * kv_len >= MANY_SCORES


def _heads_on_cpu(q_len: int, kv_len: int) -> tuple[int, int, int]:
    """Batch and heads of a problem on a CPU: all of `HEADS` between the tiny ones and the larger ones."""
    few = max(q_len, kv_len) <= 17 or q_len * kv_len > 1 << 14
    return LONE_HEAD if is_long(q_len, kv_len) else TWO_HEADS if few else HEADS


_WARPGROUP_ROWS = 64
FLASH_ATTENTION: Literal["flash-attention"] = "flash-attention"
FLASH_ATTENTION_INPUTS = (NORMAL, SCALE8.name, "sink_first")
SUITES: Mapping[str, Callable[..., Verdict]] = {FLASH_ATTENTION: check_as_flash_attention}
"""Cases of other people's tests, and the rule by which they judge."""
_FLASH_ATTENTION_HEADS = ((6, 6), (6, 2), (6, 1))
"""Query heads and key heads: one each, some shared, one for all."""


def flash_attention_cases(able: Mapping[str, Stage], *, on_cpu: bool = False) -> list[Case]:
    """The forward cases of flash-attention's own tests, on normal inputs, on scaled ones and with a sink.

    Batches and heads are theirs, and so is the layout. A CPU has one batch, and takes short lengths alone.
    """
    return [
        case
        for q_heads, kv_heads in _FLASH_ATTENTION_HEADS
        for q_len, kv_len in FLASH_ATTENTION_LENGTHS
        if not on_cpu or q_len * kv_len <= MANY_SCORES
        for case in cases(
            able,
            lengths=[(q_len, kv_len)],
            layouts=("bshd",),
            heads=(1 if on_cpu else 9 if kv_len <= 2048 else 2, q_heads, kv_heads),
            inputs=FLASH_ATTENTION_INPUTS,
        )
    ]


_LONGEST, _MOST_KEYS = 1500, 1 << 16
_FEW_ROWS = 16
"""A tile of queries in a decoder: fewer rows of a K/V head cost as much."""
_TILES = (16, 32, 64, 128, 192, 256, 384, 512, 1024, 4096, 16384)
_EDGES = (1, 2, 3, 7, 8, 9, *(n + d for n in _TILES for d in (-1, 0, 1)))
"""Lengths at which tiles begin and end."""
GPU_SCORES, CPU_SCORES = 1 << 22, 1 << 15
"""Scores of a random problem at most: what a GPU checks in milliseconds, and a CPU emulates in a second."""


def random_cases(
    able: Mapping[str, Stage],
    count: int,
    *,
    seed: int,
    max_scores: int = GPU_SCORES,
    inputs: Sequence[str] = (NORMAL,),
) -> list[Case]:
    """`count` problems drawn with `seed`, each in a layout of its own, of `max_scores` scores at most.

    Lengths are 1 to 1500, many of them at the edges of tiles, those of queries and keys independent of one another; so
    are the places of the four tensors: order of the dimensions, gaps, addresses, heads that share their memory. Where
    stages take few query rows alone, half of the problems have few, and as many keys as `max_scores` leaves them. Where
    stages take windows and soft caps, half have some: since each is machine code of its own, a seed tries them under
    one mask a head dim and type, the next seed under the other. Kinds of inputs follow one another.

    Raises:
        ParameterError: no stage, or no case asked for, or inputs that are not drawn.
    """
    kinds = [drawn(name) for name in inputs]
    if count < 1 or not able:
        raise ParameterError(f"wanted at least one random case and one stage, got {count} and {len(able)}")
    rng = np.random.default_rng(seed)
    dtypes = sorted({dtype for stage in able.values() for dtype in stage.dtypes})
    dims = _head_dims(able)
    limits = sorted({stage.max_rows or 0 for stage in able.values()})
    features = sorted({feature for stage in able.values() for feature in stage.features} - {"varlen"})
    sets = [subset for size in range(1, len(features) + 1) for subset in itertools.combinations(features, size)]
    heads = [(b, g * h, h) for b in (1, 2, 3) for g in (1, 2, 3, 4, 8) for h in (1, 2, 3)]
    drawn_cases: list[Case] = []
    while len(drawn_cases) < count:
        rows = limits[int(rng.integers(len(limits)))]
        q_len = _random_length(rng, rows or _LONGEST)
        kv_len = _random_length(rng, min(_MOST_KEYS, max_scores // _FEW_ROWS) if rows else _LONGEST)
        fitting = [
            (b, q, kv)
            for b, q, kv in heads
            if b * max(q * q_len, kv * _FEW_ROWS if rows else 0) * kv_len <= max_scores
            and (not rows or q // kv * q_len <= rows)
        ]
        if not fitting:
            continue
        heads_drawn = fitting[int(rng.integers(len(fitting)))]
        problem = Problem.of(
            *heads_drawn,
            q_len,
            kv_len,
            int(rng.choice(dims)),
            dtype=rng.choice(dtypes).item(),
            mask=rng.choice(MASKS).item(),
            inputs=kinds[len(drawn_cases) % len(kinds)],
        )
        if sets and rng.random() < 0.5:
            which = int(rng.integers(len(sets)))
            turn = seed + which + dims.index(problem.head_dim) + dtypes.index(problem.dtype)
            window = _random_window(rng, max(q_len, kv_len))
            values: dict[str, Any] = {"window": window, "softcap": float(rng.choice(SOFTCAPS))}
            problem = replace(problem, mask=MASKS[turn % len(MASKS)], **{name: values[name] for name in sets[which]})
        names = tuple(name for name, stage in able.items() if stage.why_not(problem) is None)
        if names:
            drawn_cases.append(Case(problem, _random_layout(rng), names))
    return drawn_cases


def _random_length(rng: np.random.Generator, longest: int = _LONGEST) -> int:
    if rng.random() < 0.5:
        return int(rng.choice([edge for edge in _EDGES if edge <= longest]))
    return int(math.exp(rng.uniform(0, math.log(longest + 1))))


def _random_window(rng: np.random.Generator, length: int) -> Window:
    """Open to one side, or closed to both; now and then of a query's own key alone, or wider than the sequence.

    None shows no key after a query's own: that is a causal mask, whose machine code a seed does not compile with it.
    """
    left, right = (_random_length(rng, 2 * length) for _ in range(2))
    left = 0 if rng.random() < 0.2 else left
    return ((left, right), (left, UNLIMITED), (left, UNLIMITED), (UNLIMITED, right))[int(rng.integers(4))]


def _random_layout(rng: np.random.Generator) -> str:
    steps = ((0,), (0, 8, 16), (0, 1, 2, 3, 5, 8))[int(rng.integers(3))]  # no gaps, whole chunks, anything
    places = []
    for tensor in TENSORS:
        order = "".join(rng.permutation(list("bhs"))) + "d"
        gap, offset = (int(n) for n in rng.choice(steps, 2))
        shared = "=" if tensor != "out" and rng.random() < 0.15 else ""
        places.append(f"{order}{f'+{gap}' if gap else ''}{f'@{offset}' if offset else ''}{shared}")
    return "/".join(places)


# --- How a case's tensors lie in memory -------------------------------------------------------------------------------


def _places(layout: str) -> str:
    """A layout as one place for each of `TENSORS`: its own, or the one that its name stands for."""
    named = LAYOUTS.get(layout) or FAR_LAYOUTS.get(layout)
    return "/".join([named] * len(TENSORS)) if named else layout


def laid_out(values: tuple[Any, Any, Any], layout: str, xp: Any = np) -> tuple[Any, Any, Any]:
    """q, k and v, (batch, heads, length, head_dim) each, with one head for all where the layout has them share it."""
    shared = [place.endswith("=") for place in layout.split("/")] if "=" in layout else [False] * 3
    q, k, v = (
        xp.broadcast_to(x[:, :1], x.shape) if is_shared else x for x, is_shared in zip(values, shared, strict=False)
    )
    return q, k, v


def placement(shape: Sequence[int], layout: str, tensor: str = "out") -> dict[str, Any]:
    """How `Guarded` lays out one of `TENSORS`, (batch, heads, length, head_dim).

    Raises:
        ParameterError: there is no such layout.
    """
    places = [_PLACE.fullmatch(part) for part in _places(layout).split("/")]
    place = places[TENSORS.index(tensor)] if len(places) == len(TENSORS) else None
    if place is None or None in places:
        raise ParameterError(
            f"layout: wanted one of {', '.join(LAYOUTS)}, or {len(TENSORS)} places such as bshd+8@3=, got {layout!r}"
        )
    batch, heads, length, head_dim = shape
    sizes = (batch, 1 if place["shared"] else heads, length, head_dim)
    b, h, row, d = strides_of(sizes, row_padding=int(place["gap"] or 0), order=place["order"])
    strides = (b, 0 if place["shared"] else h, int(place["row"] or row), d)
    return {"strides": strides, "offset_words": int(place["offset"] or 0), "sparse": place["row"] is not None}
