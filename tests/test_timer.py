"""How samples are planned, taken in turn and judged, on a GPU that is made of a clock and a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from flashlab.build import compiler
from flashlab.kernels import registry
from flashlab.measure import timer as timing
from flashlab.measure.timer import Reading, State, Timer, conditions, throttle_reasons
from flashlab.record.schema import Conditions

MICRO_DEFINES: dict[str, dict[str, int | str]] = {
    "fp32_fma": {"CHAINS": 8, "UNROLL": 16},
    "half2_fma": {"CHAINS": 8, "UNROLL": 16},
    "exp2": {"CHAINS": 8, "UNROLL": 16},
    "tensor": {"CHAINS": 8, "UNROLL": 16, "ELEMENT": "__half"},
    "smem_read": {"UNROLL": 16},
}


class Fake:
    """A GPU on which a call takes as long as its name's entry in `call_us`."""

    def __init__(
        self,
        call_us: dict[str, float],
        *,
        host_us: float = 5.0,
        always_late: bool = False,
        clock_mhz: Callable[[str, int, float], float] = lambda name, calls, gap_s: 1000.0,
    ) -> None:
        self.call_us = call_us
        self.host_us = host_us
        self.always_late = always_late
        self.clock_mhz = clock_mhz
        self.call_clock_mhz: float | None = 800.0
        self.time_s = 0.0
        self.log: list[tuple[str, int, bool]] = []
        self.gaps: list[float] = []
        self.spins: list[float] = []
        self.joules = 0.0
        self.last = ""

    def run(self, name: str) -> Callable[[], None]:
        def call() -> None:
            self.last = name

        return call

    def runs(self) -> dict[str, timing.Run]:
        return {name: self.run(name) for name in self.call_us}

    def sample(self, run: timing.Run, *, calls: int, spin_us: float, cold: bool) -> Reading:
        run()
        time_us = self.call_us[self.last]
        self.log.append((self.last, calls, cold))
        self.spins.append(spin_us)
        self.time_s += (time_us * calls + spin_us) / 1e6
        late = self.always_late or self.host_us * calls > spin_us
        clock_mhz = self.clock_mhz(self.last, calls, self.gaps[-1])
        return Reading(
            time_us=time_us,
            sm_clock_mhz=clock_mhz,
            call_clock_mhz=self.call_clock_mhz,
            enqueue_us=self.host_us * calls,
            starved=late,
        )

    def chunk(self, run: timing.Run, calls: int) -> Callable[[], Reading]:
        run()
        time_us = self.call_us[self.last]

        def wait() -> Reading:
            self.time_s += time_us * calls / 1e6
            self.joules += 500.0 * time_us * calls / 1e6
            return Reading(time_us=time_us, sm_clock_mhz=900.0, call_clock_mhz=850.0, enqueue_us=5.0, starved=False)

        return wait

    def warm_up(self, run: timing.Run, calls: int) -> None:
        run()

    def state(self) -> State:
        return State(sm_clock_mhz=990.0, power_w=300.0, temperature_c=50.0, throttle_reasons=("sw_power_cap",))

    def energy_j(self) -> float | None:
        return self.joules

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.gaps.append(seconds)
        self.time_s += seconds


def test_a_sample_lasts_about_a_millisecond() -> None:
    fake = Fake({"slow": 5000.0, "middle": 100.0, "fast": 2.0})
    series = Timer(fake).burst(fake.runs(), samples=10)
    assert {name: s.calls for name, s in series.items()} == {"slow": 1, "middle": 10, "fast": timing.MAX_CALLS}
    assert all(len(s.time_us) == len(s.sm_clock_mhz) == 10 for s in series.values())
    assert series["middle"].median_us == 100.0


def test_a_cold_sample_is_one_call_after_a_flush() -> None:
    fake = Fake({"a": 2.0})
    series = Timer(fake).burst(fake.runs(), cold=True, samples=5, min_samples=3)
    assert series["a"].cache == "cold"
    assert series["a"].calls == 1
    assert [cold for _, _, cold in fake.log[-5:]] == [True] * 5


def test_implementations_take_turns_in_an_order_drawn_anew() -> None:
    names = dict.fromkeys("abcdef", 100.0)
    fake = Fake(dict(names))
    Timer(fake, seed=3).burst(fake.runs(), samples=20)
    order = [name for name, _, _ in fake.log[-20 * len(names) :]]
    rounds = [tuple(order[i : i + 6]) for i in range(0, len(order), 6)]
    assert all(Counter(r) == Counter(list(names)) for r in rounds)
    assert len(set(rounds)) > 10
    again = Fake(dict(names))
    Timer(again, seed=3).burst(again.runs(), samples=20)
    assert again.log == fake.log
    other = Fake(dict(names))
    Timer(other, seed=4).burst(other.runs(), samples=20)
    assert other.log != fake.log


def test_a_slow_implementation_takes_its_least_and_no_more() -> None:
    fake = Fake({"naive": 1.5e6, "fast": 100.0})
    series = Timer(fake).burst(fake.runs(), samples=40, min_samples=7, cap_s=3.0)
    assert len(series["naive"].time_us) == 7
    assert len(series["fast"].time_us) == 40


def test_every_sample_is_announced_before_it_is_taken() -> None:
    fake = Fake({"a": 100.0, "b": 100.0})
    messages: list[str] = []
    seen: list[int] = []

    def announce(name: str) -> None:
        messages.append(name)
        seen.append(len(fake.log))

    Timer(fake).burst(fake.runs(), samples=7, announce=announce)
    assert [messages[seen.index(i)] for i in range(len(fake.log))] == [name for name, _, _ in fake.log]


def test_the_gap_is_twice_the_work_before_it_within_bounds() -> None:
    fake = Fake({"long": 4000.0})
    Timer(fake).burst(fake.runs(), samples=7)
    assert fake.gaps[-1] == pytest.approx(8e-3)
    short = Fake({"short": 1.0})
    Timer(short).burst(short.runs(), samples=7)
    assert min(short.gaps) == timing.MIN_GAP_S
    endless = Fake({"endless": 2e6})
    Timer(endless).burst(endless.runs(), samples=7)
    assert max(endless.gaps) == timing.MAX_GAP_S


def test_a_sample_that_waited_for_the_host_is_taken_again() -> None:
    fake = Fake({"a": 10.0}, host_us=300.0)
    series = Timer(fake).burst(fake.runs(), samples=7)
    assert len(series["a"].time_us) == 7
    # The first probe was late with its short spin, and none of the counted ones was.
    assert fake.spins[0] < 300.0
    assert all(spin > 300.0 * timing.MAX_CALLS for spin in fake.spins[-7:])


def test_a_clock_that_is_held_back_gets_longer_gaps_before_anything_counts() -> None:
    def clock_mhz(name: str, calls: int, gap_s: float) -> float:
        return 900.0 if name == "hot" and gap_s < 6e-3 else 1000.0

    fake = Fake({"cool": 1000.0, "hot": 500.0}, clock_mhz=clock_mhz)
    series = Timer(fake).burst(fake.runs(), samples=20)
    assert series["hot"].calls == 2
    assert set(series["hot"].sm_clock_mhz) == set(series["cool"].sm_clock_mhz) == {1000.0}
    # Only before the one that needs them.
    assert len([gap for gap in fake.gaps[-40:] if gap < 6e-3]) == 20


def test_a_clock_that_no_gap_keeps_up_gets_shorter_samples() -> None:
    fake = Fake(
        {"cool": 1000.0, "hot": 125.0},
        clock_mhz=lambda name, calls, gap_s: 900.0 if name == "hot" and calls > 2 else 1000.0,
    )
    series = Timer(fake).burst(fake.runs(), samples=20)
    assert series["hot"].calls == 2
    assert set(series["hot"].sm_clock_mhz) == {1000.0}


def test_a_clock_that_nothing_keeps_up_is_on_record() -> None:
    fake = Fake(
        {"cool": 1000.0, "hot": 500.0}, clock_mhz=lambda name, calls, gap_s: {"cool": 1000.0, "hot": 900.0}[name]
    )
    series = Timer(fake).burst(fake.runs(), samples=20)
    assert series["hot"].calls == 1
    assert len(series["hot"].time_us) == 20
    assert set(series["hot"].sm_clock_mhz) == {900.0}


def test_a_clock_that_falls_later_widens_the_gaps() -> None:
    fake = Fake({"cool": 1000.0, "hot": 1000.0})
    fake.clock_mhz = lambda name, calls, gap_s: (
        900.0 if name == "hot" and len(fake.log) > 10 and gap_s < 7e-3 else 1000.0
    )
    series = Timer(fake).burst(fake.runs(), samples=20)
    low = [clock for clock in series["hot"].sm_clock_mhz if clock < 1000.0]
    assert 1 <= len(low) <= 3
    assert set(series["hot"].sm_clock_mhz[-10:]) == {1000.0}


def test_the_clock_of_the_calls_is_kept_whole_or_not_at_all() -> None:
    fake = Fake({"a": 100.0, "b": 100.0})
    assert set(Timer(fake).burst(fake.runs(), samples=7)["a"].call_clock_mhz) == {800.0}
    fake.call_clock_mhz = None
    assert Timer(fake).burst(fake.runs(), samples=7)["a"].call_clock_mhz == ()


def test_the_clock_between_two_spins_is_that_of_one_sm() -> None:
    first = timing._Mark(start_clock=0, start_ns=0, end_clock=20_000, end_ns=10_000, sm=3)
    second = timing._Mark(start_clock=1_520_000, start_ns=1_010_000, end_clock=1_560_000, end_ns=1_030_000, sm=3)
    assert first.clock_mhz == second.clock_mhz == 2000.0
    assert second.clock_mhz_since(first) == 1500.0
    second.sm = 4
    assert second.clock_mhz_since(first) is None
    second.sm = 3
    assert first.clock_mhz_since(second) is None


def test_an_implementation_that_always_waits_is_measured_all_the_same() -> None:
    fake = Fake({"syncs": 100.0}, always_late=True)
    series = Timer(fake).burst(fake.runs(), samples=7)
    assert len(series["syncs"].time_us) == 7


@pytest.mark.parametrize(("seconds", "wanted"), [(1.5, 0.75), (2.0, 1.0), (5.0, 4.0)])
def test_sustained_counts_what_comes_after_a_second_or_half(seconds: float, wanted: float) -> None:
    fake = Fake({"a": 100.0})
    found = Timer(fake).sustained(fake.run("a"), seconds=seconds, call_us=fake.call_us["a"])
    assert found.regime == "sustained"
    assert found.calls == 500
    counted = sum(t * found.calls for t in found.time_us) / 1e6
    assert wanted - 0.1 <= counted <= wanted + 0.1
    assert found.continuous_s is not None
    assert seconds <= found.continuous_s < seconds + 0.1
    assert fake.time_s >= found.continuous_s
    assert set(found.sm_clock_mhz) == {900.0}
    assert set(found.call_clock_mhz) == {850.0}
    assert len(found.call_clock_mhz) == len(found.time_us)
    assert found.conditions is not None
    assert found.conditions.energy_j_per_call == pytest.approx(500.0 * 100e-6, rel=0.05)


def test_what_nvml_said_is_summed_up() -> None:
    fake = Fake({"a": 5000.0})
    found = Timer(fake).burst(fake.runs(), samples=7)["a"].conditions
    assert found is not None
    assert found.power_w_max == found.power_w_mean == 300.0
    assert found.energy_j_per_call is None
    assert conditions([]).power_w_max is None
    states = [
        State(sm_clock_mhz=900.0, power_w=None, temperature_c=40.0, throttle_reasons=("b",)),
        State(sm_clock_mhz=1000.0, power_w=5.0, temperature_c=None, throttle_reasons=("a", "b")),
        State(sm_clock_mhz=None, power_w=4.0, temperature_c=None, throttle_reasons=()),
    ]
    assert conditions(states, 0.5) == Conditions(
        sm_clock_mhz_min=900.0, sm_clock_mhz_max=1000.0, power_w_max=5.0, power_w_mean=4.5,
        temperature_c_max=40.0, throttle_reasons=("a", "b"), energy_j_per_call=0.5,
    )  # fmt: skip


def test_throttle_reasons_have_names() -> None:
    assert throttle_reasons(0) == ()
    assert throttle_reasons(0x1) == ()
    assert throttle_reasons(0x4 | 0x40) == ("sw_power_cap", "hw_thermal_slowdown")
    assert throttle_reasons(1 << 40) == ("unknown_0x10000000000",)


def test_throttle_reason_names_are_nvmls() -> None:
    import pynvml

    def snake(name: str) -> str:
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_")

    prefix = "nvmlClocksEventReason"
    for name in dir(pynvml):
        value = getattr(pynvml, name)
        if name.startswith(prefix) and not name.endswith("All") and isinstance(value, int) and value > 1:
            found = throttle_reasons(value)
            # Two names of NVML's stand for one bit.
            assert found == (snake(name.removeprefix(prefix)),) or "UserDefined" in name, name


@pytest.mark.parametrize("arch", registry.ARCHS)
def test_every_micro_benchmark_compiles(arch: str) -> None:
    sources = sorted(timing.MICRO.glob("*.cu"))
    assert {s.stem for s in sources} >= {"spin", "empty", *MICRO_DEFINES}
    for source in sources:
        defines = MICRO_DEFINES.get(source.stem, {})
        cubin = compiler.compile_file(source, entry=f"micro_{source.stem}", arch=arch, defines=defines)
        assert cubin.resources.spill_store_bytes == 0
        assert cubin.resources.stack_bytes == 0
