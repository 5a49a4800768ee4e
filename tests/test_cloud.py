"""The examples of cloud/ say what their tools understand, and run what there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashlab.core.paths import ROOT
from flashlab.record import provenance, upload

CLOUD = ROOT / "cloud"
TASK: dict[str, Any] = yaml.safe_load((CLOUD / "skypilot.yaml").read_text(encoding="utf-8"))
GPUS = ("L4:1", "A100:1", "A100-80GB:1", "H100:1", "H200:1", "H200:8", "B200:1")
SBATCH = {
    "job-name": r"\w+", "nodes": r"\d+", "ntasks": r"\d+", "gpus": r"(\w+:)?\d+", "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]", "time": r"(\d+-)?\d\d:\d\d:\d\d", "requeue": "", "signal": r"((R|B):)?(TERM|USR1)@\d+",
    "open-mode": "append|truncate", "output": r"[\w%./-]+",
}  # fmt: skip
"""Options of sbatch that the example may use, and how their values are written, from sbatch's manual."""


@pytest.mark.parametrize("name", ["run.sh", "ssh.sh", "slurm.sbatch"])
def test_scripts_are_shell_and_can_be_run(name: str) -> None:
    path = CLOUD / name
    assert os.access(path, os.X_OK)
    assert path.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(path)], check=True)


@pytest.mark.parametrize("step", ["setup", "run"])
def test_steps_of_the_task_are_shell(step: str) -> None:
    subprocess.run(["bash", "-n"], input=TASK[step], text=True, check=True)


def test_options_of_the_batch_script_are_sbatchs() -> None:
    """sbatch reads them up to the first command, and not below."""
    lines = (CLOUD / "slurm.sbatch").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert options == [line.removeprefix("#SBATCH --") for line in lines[:first] if line.startswith("#SBATCH --")]
    for option in options:
        name, _, value = option.partition("=")
        assert re.fullmatch(SBATCH[name], value), option


def test_examples_run_targets_and_commands_that_exist() -> None:
    """Every example ends in the same script, and what it is given is a make target or a command of flashlab."""
    from typer.main import get_command

    from flashlab.cli.app import app

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = set(get_command(app).commands) | {"sweep"}  # type: ignore[attr-defined]
    for path in sorted(CLOUD.iterdir()):
        text = path.read_text(encoding="utf-8")
        assert "cloud/run.sh" in text or path.name == "README.md"
        for target in re.findall(r"\bmake ([a-z-]+)\b(?! there)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name}: make {target}"
        for command in re.findall(r"(?:bin/|`)flashlab ([a-z]+)", text):
            assert command in commands, f"{path.name}: flashlab {command}"


def test_what_the_examples_set_is_what_flashlab_reads() -> None:
    variables = {upload.VARIABLE, *provenance.RENTED.values()}
    for name in ("skypilot.yaml", "ssh.sh", "run.sh", "README.md"):
        assert variables == set(re.findall(r"FLASHLAB_\w+", (CLOUD / name).read_text(encoding="utf-8"))), name


def test_the_machine_is_the_containers() -> None:
    """One base image and one list of packages, in two places that must not drift apart."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)[:1]
    assert TASK["resources"]["image_id"] == f"docker:{base}"
    wanted, given = (re.search(r"--no-install-recommends ([a-z0-9 +-]+)", text) for text in (dockerfile, TASK["setup"]))
    assert wanted
    assert given
    assert set(wanted[1].split()) == set(given[1].split())


def test_the_task_takes_no_secret() -> None:
    """Credentials are the cloud's own; values that a launch must give are null, others harmless."""
    assert {name for name, value in TASK["envs"].items() if value is None} == {"REPO", upload.VARIABLE}
    assert "secrets" not in TASK
    for path in CLOUD.iterdir():
        assert not re.search(r"(?i)(secret|token|password|access.?key)\s*[=:]", path.read_text(encoding="utf-8")), path


_READ_BY_SKYPILOT = """
import json, sys, yaml
from sky.utils import accelerator_registry
accelerator_registry.canonicalize_accelerator_name = lambda name, cloud: name  # would fetch a catalogue
import sky
for gpus in sys.argv[2:]:
    given = [("REPO", "https://example.invalid/x.git"), ("FLASHLAB_UPLOAD", "s3://bucket/folder")]
    task = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), env_overrides=given)
    task.set_resources_override({"accelerators": gpus})
    (resources,) = task.resources
    print(json.dumps([resources.accelerators, resources.use_spot, task.envs["FLASHLAB_UPLOAD"]]))
"""


def test_skypilot_takes_the_task_on_every_gpu(tmp_path: Path) -> None:
    sky = shutil.which("sky")
    if sky is None:
        pytest.skip("needs SkyPilot's `sky` on PATH: python3 -m venv sky && sky/bin/pip install skypilot")
    python = Path(sky).resolve().parent / "python"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    result = subprocess.run(
        [str(python), "-c", _READ_BY_SKYPILOT, str(CLOUD / "skypilot.yaml"), *GPUS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    read = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    names = [(name, int(count)) for name, _, count in (gpus.partition(":") for gpus in GPUS)]
    assert read == [[{name: count}, True, "s3://bucket/folder"] for name, count in names]


# --- What the scripts do, with stand-ins for what a rented machine has ------------------------------------------------


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout with stand-ins: nvidia-smi, an installer that says what it was asked, a flashlab that has a GPU."""
    tree = tmp_path / "my tree"
    (tree / "cloud").mkdir(parents=True)
    for name in ("run.sh", "ssh.sh"):
        shutil.copy(CLOUD / name, tree / "cloud" / name)
    program(tmp_path / "bin", "nvidia-smi", "echo 580.159.04; echo 590.10")
    program(tree / "scripts", "install.sh", 'echo "installs $*"')
    program(tree / ".venv" / "bin", "python", 'case "$1" in -m) echo "pip ${*: -1}";; esac')
    (tree / "data" / "nvidia-h100").mkdir(parents=True)
    (tree / "data" / "nvidia-h100" / "machine.json").write_text("{}", encoding="utf-8")
    return tree


def run(tree: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{tree.parent / 'bin'}:{os.environ['PATH']}"
    given = {"PATH": path, "HOME": str(tree.parent), **environment}
    return subprocess.run(command, cwd=tree.parent, env=given, capture_output=True, text=True, timeout=60, check=False)


def test_a_rented_machine_installs_and_measures(machine: Path) -> None:
    result = run(machine, str(machine / "cloud" / "run.sh"), "pwd")
    assert (result.returncode, result.stdout.splitlines()) == (0, ["installs gpu", str(machine)])


def test_a_sweep_gets_ray(machine: Path) -> None:
    result = run(machine, str(machine / "cloud" / "run.sh"), "echo", "sweep", "--ray", "local")
    assert result.stdout.splitlines() == ["installs gpu sweep", "sweep --ray local"]


@pytest.mark.parametrize(("place", "package"), [("s3://b/f", "s3fs"), ("gs://b/f", "gcsfs"), ("/mnt/f", None)])
def test_a_bucket_gets_what_it_needs(place: str, package: str | None, machine: Path) -> None:
    result = run(machine, str(machine / "cloud" / "run.sh"), "true", FLASHLAB_UPLOAD=place)
    assert result.stdout.splitlines() == ["installs gpu", *([f"pip {package}"] if package else [])]


@pytest.mark.parametrize(
    ("body", "message"),
    [("exit 9", "found none that nvidia-smi lists"), ("echo 570.01", "wanted NVIDIA driver 580 or newer, found 570")],
)
def test_a_machine_that_cannot_measure_costs_nothing_more(body: str, message: str, machine: Path) -> None:
    program(machine.parent / "bin", "nvidia-smi", body)
    result = run(machine, str(machine / "cloud" / "run.sh"), "echo", "measured")
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_a_gpu_that_flashlab_cannot_use_is_no_replay(machine: Path) -> None:
    program(machine / ".venv" / "bin", "python", "echo 'no CUDA device' >&2; exit 1")
    result = run(machine, str(machine / "cloud" / "run.sh"), "echo", "measured")
    assert result.returncode == 1
    assert "measured" not in result.stdout


def test_a_machine_behind_ssh_measures_this_commit_and_gives_the_records_back(machine: Path) -> None:
    program(machine / "cloud", "run.sh", 'echo "runs $* at $PWD as $FLASHLAB_INSTANCE"; echo new > data/new; exit 3')
    program(machine.parent / "bin", "ssh", 'shift; mkdir -p "$HOME/there"; cd "$HOME/there"; exec bash -c "$*"')
    git = ("git", "-C", str(machine), "-c", "user.name=t", "-c", "user.email=t@example.invalid")
    for arguments in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "x")):
        subprocess.run([*git, *arguments], check=True)
    instance = "it's $(touch evil) & p5"
    for _ in range(2):  # the second time the checkout is there already
        result = run(
            machine,
            str(machine / "cloud" / "ssh.sh"), "a-host", "make", "report", "FULL=1",
            FLASHLAB_INSTANCE=instance,
        )  # fmt: skip
        assert result.returncode == 3, result.stderr
        there = machine.parent / "there" / "flashlab"
        assert f"runs make report FULL=1 at {there} as {instance}" in result.stdout
        assert (machine / "build" / "collected" / "a-host" / "new").read_text(encoding="utf-8") == "new\n"
    assert not list(machine.parent.rglob("evil"))


def test_ssh_wants_a_host(machine: Path) -> None:
    result = run(machine, str(machine / "cloud" / "ssh.sh"))
    assert (result.returncode, result.stderr) == (2, "usage: cloud/ssh.sh HOST [COMMAND...]\n")
