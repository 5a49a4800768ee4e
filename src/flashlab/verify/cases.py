"""Test cases: adversarial problems and layouts for checks on a GPU (measure/check.py) or a CPU (on_cpu.py).

All cases use grouped-query attention. They combine normal inputs of hostile lengths, hostile inputs, whose scores
exercise rarely taken paths, and rows that are far apart.
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
"""Layouts of all tensors, in the syntax of `_PLACE`."""
FAR_LAYOUTS: dict[str, str] = {"far": f"sbhd~{(1 << 23) + 8}", "far_misaligned": f"sbhd~{(1 << 23) + 9}@1"}
"""Likewise, with rows so far apart that offsets exceed 32 bits from row 256 on."""
FAR_LENGTHS = ((272, 272),)
"""A few rows past the 256th: the memory between rows is never touched, so that its pages take no memory."""
TENSORS = ("q", "k", "v", "out")
_PLACE = re.compile(r"(?P<order>[bhs]{3}d)(\+(?P<gap>\d+))?(~(?P<row>\d+))?(@(?P<offset>\d+))?(?P<shared>=)?")
"""Layout of a tensor: `bshd+8@3=` has dimension order bshd, a gap of 8 elements after each row, an offset of 3 elements
and one head shared by all; `~8388616` is the row stride in elements. A random layout is one of these for each of
`TENSORS`, joined by slashes."""
HEADS = (2, 4, 2)
"""Batch, query heads and K/V heads of a case: the smallest that reveal mixed-up heads or batches."""
TWO_HEADS, LONE_HEAD = (1, 2, 1), (1, 1, 1)
"""Likewise on a CPU, where time is proportional to heads: for small problems, and for long ones."""
MANY_SCORES = 1 << 16
"""Scores per head from which a problem counts as long; at least 64 rows, those of a warpgroup, are counted."""
HOSTILE_LENGTHS = ((70, 400), (400, 400))
"""Lengths for hostile inputs: several tiles of keys, whose scores grow from either end. A CPU uses the first."""
SCHEDULES = ("ascending", "seeded:1")
"""Warp orders on a CPU: a copy or warp that is early in one is late in the other."""


@dataclass(frozen=True)
class Case:
    """A problem in a layout, and the implementations that support it."""

    problem: Problem
    layout: str
    names: tuple[str, ...]
    schedule: str = SCHEDULES[0]
    """Warp order on a CPU."""

    @property
    def aligned(self) -> bool:
        """Whether every row starts on a 16-byte boundary."""
        steps = re.findall(r"[+~@](\d+)", _places(self.layout))
        return all(int(n) * BYTES_PER_ELEMENT % 16 == 0 for n in steps)

    @property
    def launched(self) -> Problem:
        """The problem as launched, without window sides that hide no key; it determines the machine code."""
        return with_features(self.problem, self.problem.window, self.problem.softcap)

    @property
    def detectable(self) -> bool:
        """Whether the race detector can run it: its memory covers every byte, also between rows far apart."""
        return self.layout not in FAR_LAYOUTS


class Selection(TypedDict, total=False):
    """Options that select the cases of a check; see `chosen_cases`."""

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
    """Build every combination that at least one implementation supports.

    `able` maps names to stages; `features` are a window and a soft cap.

    Raises:
        ParameterError, DTypeError: an unknown layout, mask or dtype, or inputs that are not drawn.
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
        raise ParameterError(
            f"wanted at least one stage that supports one of those dtypes and head dims, got none{have}"
        )
    return chosen


def _why_none(
    able: Mapping[str, Stage],
    lengths: Sequence[tuple[int, int]],
    dtypes: Sequence[str],
    head_dims: Sequence[int] | None,
    features: Mapping[str, Any],
) -> str:
    """Explain why no stage supports the problems: each stage's reason, at a dtype and head dim that it supports."""
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
    """Filter cases by dtypes, masks and head dims.

    Raises:
        ParameterError: no case is left.
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
    """Select the cases of a check.

    Without lengths, layouts, inputs and schedules: `default_cases` or `default_cases_on_cpu`. With one of them: every
    combination, by default of all hostile lengths, all layouts (only the first for long problems on a CPU), normal
    inputs, and the first schedule. `random` draws lengths, masks, dtypes, layouts, head dims and features of that many
    `random_cases`; `suite` uses the cases of one of `SUITES`.

    Raises:
        ParameterError: an option does not exist, or no case is left.
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
            raise ParameterError(f"wanted at least one stage that supports those problems, got none. {why}")
    return [replace(case, schedule=schedule) for case in _some(chosen) for schedule in schedules or SCHEDULES[:1]]


def default_cases(able: Mapping[str, Stage]) -> list[Case]:
    """Cases on a GPU: hostile lengths in every layout, hostile inputs, rows far apart, windows, soft caps."""
    hostile = cases(able, lengths=HOSTILE_LENGTHS, layouts=("contiguous", "misaligned"), inputs=tuple(HOSTILE_INPUTS))
    return [*cases(able), *hostile, *_far_cases(able), *featured_cases(able)]


def default_cases_on_cpu(able: Mapping[str, Stage]) -> list[Case]:
    """Cases on a CPU, fewer than on a GPU.

    A hostile length uses the first layout with the first schedule, and one of the other layouts, in rotation, with the
    second; a long one only the former. Hostile inputs likewise, with layouts and schedules split between the masks, and
    head dims in rotation.
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
    """Cases with rows far apart, with one head, head dim and mask, on which offsets do not depend."""
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
"""Adversarial windows: only the diagonal, not aligned to tiles, open to one side, and longer than some sequences."""
SOFTCAPS = (1.0, 30.0, 50.0)
"""A cap that flattens all scores, and those of Gemma 2."""


def featured_cases(able: Mapping[str, Stage], *, on_cpu: bool = False) -> list[Case]:
    """Cases with windows and soft caps, separately and together, on normal and hostile inputs.

    Every length with every window: on a GPU in every head dim, dtype and mask; on a CPU, where each of these needs
    another compilation, in one of four combinations.
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
    """Whether a head of these lengths takes long on a CPU."""
    return max(q_len, _WARPGROUP_ROWS) * kv_len >= MANY_SCORES


def _heads_on_cpu(q_len: int, kv_len: int) -> tuple[int, int, int]:
    """Batch and heads of a problem on a CPU: all of `HEADS` only for medium sizes."""
    few = max(q_len, kv_len) <= 17 or q_len * kv_len > 1 << 14
    return LONE_HEAD if is_long(q_len, kv_len) else TWO_HEADS if few else HEADS


_WARPGROUP_ROWS = 64
FLASH_ATTENTION: Literal["flash-attention"] = "flash-attention"
FLASH_ATTENTION_INPUTS = (NORMAL, SCALE8.name, "sink_first")
SUITES: Mapping[str, Callable[..., Verdict]] = {FLASH_ATTENTION: check_as_flash_attention}
"""Test suites of other projects, and their rules."""
_FLASH_ATTENTION_HEADS = ((6, 6), (6, 2), (6, 1))
"""Query heads and K/V heads: multi-head, grouped-query and multi-query attention."""


def flash_attention_cases(able: Mapping[str, Stage], *, on_cpu: bool = False) -> list[Case]:
    """The forward cases of flash-attention's own tests, on normal inputs, on scaled ones and with a sink.

    Batch, heads and layout are theirs; on a CPU, batch 1 and only short lengths.
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
"""Query rows of a decoding tile; fewer rows per K/V head cost the same."""
_TILES = (16, 32, 64, 128, 192, 256, 384, 512, 1024, 4096, 16384)
_EDGES = (1, 2, 3, 7, 8, 9, *(n + d for n in _TILES for d in (-1, 0, 1)))
"""Lengths around tile boundaries."""
GPU_SCORES, CPU_SCORES = 1 << 22, 1 << 15
"""Maximum scores of a random problem: milliseconds to check on a GPU, about a second to emulate on a CPU."""


def random_cases(
    able: Mapping[str, Stage],
    count: int,
    *,
    seed: int,
    max_scores: int = GPU_SCORES,
    inputs: Sequence[str] = (NORMAL,),
) -> list[Case]:
    """Draw `count` problems with `seed`, each in its own layout, with at most `max_scores` scores.

    Lengths of queries and keys are independent, 1 to 1500, many of them at tile boundaries. The layouts of the four
    tensors are independent too: dimension order, gaps, addresses, shared heads. If some stages support only few query
    rows, half of the problems have few, with as many keys as `max_scores` allows. If some support windows and soft
    caps, half of the problems have them; because each needs its own compilation, a seed uses one mask per head dim and
    dtype, and the next seed the other. Kinds of inputs rotate.

    Raises:
        ParameterError: `count` or `able` is empty, or inputs that are not drawn.
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
    """Draw a window: open to one side or bounded, occasionally only the diagonal, or wider than the sequence.

    The right side is never 0: that is a causal mask, which needs another compilation.
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
    """Expand a named layout to one for each of `TENSORS`; a random layout stays as it is."""
    named = LAYOUTS.get(layout) or FAR_LAYOUTS.get(layout)
    return "/".join([named] * len(TENSORS)) if named else layout


def laid_out(values: tuple[Any, Any, Any], layout: str, xp: Any = np) -> tuple[Any, Any, Any]:
    """Return q, k and v, (batch, heads, length, head_dim) each, with heads made equal if the layout shares them."""
    shared = [place.endswith("=") for place in layout.split("/")] if "=" in layout else [False] * 3
    q, k, v = (
        xp.broadcast_to(x[:, :1], x.shape) if is_shared else x for x, is_shared in zip(values, shared, strict=False)
    )
    return q, k, v


def placement(shape: Sequence[int], layout: str, tensor: str = "out") -> dict[str, Any]:
    """Arguments of `Guarded` for one of `TENSORS`, (batch, heads, length, head_dim).

    Raises:
        ParameterError: no such layout.
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
