"""What GPU tests share: long runs, which go on beside the other tests, and a GPU to itself for what is timed.

Most of a run in a worker process is start, compiling and the oracle, and the GPU stands idle. So a module names its
runs in `ASIDE`, by the name of the fixture that hands out what came of each. Those that the chosen tests want begin
before the first test, a few at a time, once the stages' machine code was made on all cores. Tests that need none of
them come first, then those that wait for one, and at the end, when every run is over, those that want it `quiet`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from flashlab.build import compiler
from flashlab.measure import harness
from flashlab.run import gpu

HERE = Path(__file__).parent
AT_ONCE = 4
"""Workers: each wants a core or two, and memory on the GPU for small problems."""


def _aside(item: pytest.Item) -> dict[str, Callable[[Path], Any]]:
    """The runs that a test wants."""
    named = getattr(getattr(item, "module", None), "ASIDE", {})
    return {name: run for name, run in named.items() if name in getattr(item, "fixturenames", ())}


def _rank(item: pytest.Item) -> int:
    return 2 if "quiet" in getattr(item, "fixturenames", ()) else 1 if _aside(item) else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every other test stays where it was."""
    places = [index for index, item in enumerate(items) if item.path.parent == HERE]
    for index, item in zip(places, sorted((items[index] for index in places), key=_rank), strict=True):
        items[index] = item


@pytest.fixture(scope="session")
def torch() -> Any:
    return pytest.importorskip("torch", reason="needs torch: pip install 'flashlab[gpu]'")


@pytest.fixture(scope="session")
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="needs CuPy: pip install 'flashlab[gpu]'")


@pytest.fixture(scope="session", autouse=True)
def _runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    wanted = {
        name: run
        for item in request.session.items
        if item.path.parent == HERE and not item.get_closest_marker("skip")
        for name, run in _aside(item).items()
    }

    def ahead() -> None:
        info = gpu.info()
        assert info.arch is not None
        compiler.compile_many(compiler.jobs(archs=[info.arch], aligned=(True, False)))

    with (
        pytest.MonkeyPatch.context() as patch,
        ThreadPoolExecutor(1) as compiling,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        # Here several of them share a GPU, and nobody keeps their times.
        patch.setattr(harness, "gpu_lock", lambda _: nullcontext())
        made = compiling.submit(ahead) if wanted else None

        def begin(name: str, folder: Path) -> Any:
            if made:
                made.result()
            return wanted[name](folder)

        folders = {name: tmp_path_factory.mktemp(name) for name in wanted}  # pytest makes them in one thread alone
        yield {name: pool.submit(begin, name, folder) for name, folder in folders.items()}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def aside(_runs: dict[str, Future[Any]]) -> Callable[[str], Any]:
    """Gives what came of a run, when it is over."""

    def result(name: str) -> Any:
        for module in ("torch", "cupy"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"needs {module}: pip install 'flashlab[gpu]'")
        return _runs[name].result()

    return result


@pytest.fixture(scope="session")
def quiet(_runs: dict[str, Future[Any]]) -> None:
    """Nothing else runs on the GPU any more."""
    wait(_runs.values())
