"""Workers that crash, hang, do not listen and talk nonsense; no GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flashlab.core import errors
from flashlab.measure import harness
from flashlab.measure.harness import Worker, WorkerDiedError

GPU = {
    "slug": "test-gpu", "name": "Test GPU", "compute_capability": [9, 0], "sm_count": 4, "max_sm_clock_mhz": 1000.0,
    "memory_bytes": 1 << 30, "l2_bytes": 1 << 20, "power_limit_w": None, "driver": "1", "fingerprint": "0123456789ab",
}  # fmt: skip
HELLO = {"type": "hello", "gpu": GPU, "software": {"python": "3"}}
BEGIN = """
import json, os, signal, sys, time
from flashlab.core import errors
from flashlab.measure import harness
def work(job, send):
"""
END = """
sys.exit(harness.serve(work))
"""


def worker(*lines: str, job: Any = None) -> Worker:
    body = "".join(f"    {line}\n" for line in lines)
    return Worker([sys.executable, "-c", BEGIN + body + END], job or {})


def run(*lines: str, job: Any = None, step_s: float = 5.0) -> list[Any]:
    heard: list[Any] = []
    with worker(*lines, job=job) as one:
        one.run(heard.append, startup_s=20.0, step_s=step_s)
    return heard


def test_a_worker_says_what_it_does_until_it_is_done() -> None:
    heard = run("send({'type': 'hello', **job})", "send({'type': 'row', 'x': 0.1})", job={"name": "x" * (1 << 20)})
    assert [message["type"] for message in heard] == ["hello", "row"]
    assert heard[0]["name"] == "x" * (1 << 20)
    assert heard[1]["x"] == 0.1


def test_a_job_that_is_not_read_meets_its_deadline() -> None:
    """It blocked for good once, on a pipe whose other end nobody read."""
    deaf = "import sys, time; pipe = open(sys.argv[-1], 'w'); time.sleep(600)"
    for command in (["sh", "-c", "sleep 600"], [sys.executable, "-c", deaf]):
        with (
            Worker(command, {"long": "x" * (8 << 20)}) as one,
            pytest.raises(errors.LaunchError, match="no answer within 1 s"),
        ):
            one.run(lambda _: None, startup_s=1.0, step_s=600.0)


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "killed by SIGSEGV.*last words: oh"),
        ("os._exit(7)", "crashed", "exit status 7"),
        ("time.sleep(600)", "timeout", "no answer within 1 s"),
        ("pipe = open(sys.argv[-1], 'w'); any(pipe.write('x') < 0 for _ in iter(int, 1))", "timeout", "no answer"),
        ("raise ZeroDivisionError('oh')", "crashed", "ZeroDivisionError: oh"),
        ("send({'type': 'fatal', 'reason': 'broken'})", "crashed", "broken"),
        ("send({'type': 5})", "crashed", "no message"),
        ("send({'type': 'strange'})", "crashed", "no message.*strange"),
        ("raise errors.UnsupportedError('late')", "crashed", "late"),
        ("send({'type': 'row', 'x': float('nan')})", "crashed", "ValueError"),
    ],
)
def test_a_death_is_told_with_the_step_in_hand(line: str, status: str, words: str) -> None:
    def act(message: Any) -> None:
        if message["type"] in ("strange", 5):
            raise KeyError(message["type"])

    begin = ("send({'type': 'hello'})", "print('oh', flush=True)", "send({'type': 'step', 'name': 'this'})")
    with worker(*begin, line) as one, pytest.raises(WorkerDiedError, match=words) as caught:
        one.run(act, startup_s=20.0, step_s=1.0)
    assert caught.value.status == status
    assert caught.value.step == {"type": "step", "name": "this"}


def test_a_step_may_ask_for_more_time() -> None:
    longer = ("send({'type': 'hello'})", "send({'type': 'step', 'extra_s': 20})", "time.sleep(1)")
    assert len(run(*longer, step_s=0.2)) == 2


def test_a_temporary_folder_may_be_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper than the name of a socket may be long."""
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(harness.tempfile, "tempdir", str(deep))
    assert run("send({'type': 'hello'})") == [{"type": "hello"}]
    assert not list(deep.iterdir())


def test_a_worker_that_never_starts() -> None:
    with pytest.raises(errors.LaunchError, match=r"worker process that starts, got.*exit status 9"):
        run("os._exit(9)")


@pytest.mark.parametrize("name", ["NoGpuError", "MissingPackageError", "UnsupportedError", "LaunchError"])
def test_a_refusal_is_raised_as_what_it_is(name: str) -> None:
    with pytest.raises(getattr(errors, name), match="wanted a GPU"):
        run(f"raise errors.{name}('wanted a GPU, got none')")


def test_a_worker_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib\\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    with worker("import subprocess", f'subprocess.Popen([sys.executable, "-c", "{child}"])', "time.sleep(600)") as one:
        while not alive.exists():
            assert one._process.poll() is None
            time.sleep(0.05)
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()


def test_a_worker_ends_when_its_parent_was_killed(tmp_path: Path) -> None:
    """However long it says nothing: the next one wants the GPU."""
    begun = tmp_path / "begun"
    hang = f"    pathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    script = "import pathlib\n" + BEGIN + hang + END
    parent = (
        "import sys\nfrom flashlab.measure.harness import Worker\n"
        f"with Worker([sys.executable, '-c', {script!r}]) as one:\n"
        "    one.run(lambda _: None, startup_s=60, step_s=60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    while not (begun.is_file() and begun.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    ends = time.monotonic() + 20
    while Path(f"/proc/{begun.read_text()}").exists():
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_a_worker_ends_when_its_parent_was_killed_before_it_began(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # which nobody reads
    (tmp_path / "job.json").write_text("{}", encoding="utf-8")
    command = [sys.executable, "-c", BEGIN + "    pass\n" + END, "--connect", str(tmp_path / "pipe")]
    assert subprocess.run(command, timeout=20, capture_output=True).returncode == 1


def test_a_wrapped_worker_is_waited_for_and_its_output_is_read() -> None:
    command = [sys.executable, "-c", BEGIN + "    send({'type': 'hello'})\n" + END]
    wrapper = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True); print('and a report'); sys.exit(3)"
    with Worker([sys.executable, "-c", wrapper, *command]) as one:
        one.run(lambda _: None, startup_s=20.0, step_s=20.0)
        assert one.wait(20.0) == 3
        assert "and a report" in one.output()


def test_a_gpu_is_locked_while_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))
    with harness.Book(tmp_path / "a", "runs") as first:
        first.hello(HELLO)
        first.hello(HELLO)  # a second worker of the same run
        with (
            harness.Book(tmp_path / "b", "runs") as second,
            pytest.raises(errors.LaunchError, match=r"for this measurement alone.*process \d+"),
        ):
            second.hello(HELLO)
        other = {**GPU, "fingerprint": "0123456789ac"}
        with pytest.raises(errors.LaunchError, match="this run began on"):
            first.hello({**HELLO, "gpu": other})
    with harness.Book(tmp_path / "b", "runs") as third:
        third.hello(HELLO)
        assert third.path.parent == tmp_path / "b" / "test-gpu" / "runs"


def test_a_run_is_listed_though_machine_json_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path / "cache"))
    paths = []
    for expected in (contextlib.nullcontext(), pytest.raises(errors.DamagedRecordError, match=r"machine\.json")):
        with expected, harness.Book(tmp_path, "runs") as book:
            book.hello(HELLO)
            book.path.write_text("{}\n", encoding="utf-8")
            paths.append(book.path)
        (tmp_path / "test-gpu" / "machine.json").write_text("{}", encoding="utf-8")
    listed = (tmp_path / "test-gpu" / "CHECKSUMS").read_text(encoding="utf-8")
    assert all(f"  runs/{path.name}\n" in listed for path in paths)


def test_the_host_is_described_without_its_name() -> None:
    import platform

    facts = harness.host()
    assert facts["cores"].isdigit()
    assert platform.node() not in facts.values()
