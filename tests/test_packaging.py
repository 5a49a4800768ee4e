"""pyproject.toml, constraints.txt, environment.yml, Makefile, Dockerfile and the documents say the same."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from shared import tiers, tracked

import flashlab
from flashlab.cli import doctor
from flashlab.core.paths import ROOT
from flashlab.kernels.registry import STAGES
from flashlab.record import store
from flashlab.run import gpu

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def requirements(*extras: str) -> list[Requirement]:
    """What the project itself asks for, with those extras."""
    project = PROJECT["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, Version]:
    """The lock."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(parts) == 2 for parts in found), "constraints.txt holds something else than name==version"
    return {canonicalize_name(name): Version(version) for name, version in found}


def make_targets() -> list[str]:
    """Targets that `make help` lists."""
    return re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_requirement_is_pinned_at_a_version_it_allows() -> None:
    locked = pins()
    for requirement in requirements(*PROJECT["project"]["optional-dependencies"]):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt; `make lock` resolves it"
        assert version in requirement.specifier, f"{requirement} and constraints.txt ({version}) disagree: `make lock`"


def test_everything_installed_for_flashlab_is_pinned() -> None:
    """The whole tree of what is installed here, not only what pyproject.toml names."""
    from importlib import metadata

    locked = pins()
    todo = [
        (canonicalize_name(r.name), frozenset(r.extras)) for r in requirements() if not r.marker or r.marker.evaluate()
    ]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        assert name in locked, f"{name} is installed for flashlab and not in constraints.txt"
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            wanted = any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}) if needed.marker else True
            item = (canonicalize_name(needed.name), frozenset(needed.extras))
            if wanted and item not in seen:
                seen.add(item)
                todo.append(item)


def test_cuda_wheels_share_one_minor_release() -> None:
    locked = pins()
    wheels = (
        "nvidia-cuda-nvrtc",
        "nvidia-cuda-runtime",
        "nvidia-cuda-crt",
        "nvidia-cuda-cccl",
        "cuda-bindings",
        "cuda-toolkit",
    )
    assert {locked[name].release[:2] for name in wheels} == {(13, 0)}


def test_the_base_install_has_no_gpu_frameworks() -> None:
    heavy = {"torch", "triton", "cupy-cuda13x", "fa3-fwd", "ray"}
    assert not heavy & {canonicalize_name(requirement.name) for requirement in requirements("lab", "dev")}


def test_the_bundle_names_pinned_packages() -> None:
    lines = (ROOT / "scripts" / "bundle.txt").read_text(encoding="utf-8").splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert len(names) == len(set(names))
    assert not {canonicalize_name(name) for name in names} - pins().keys()


def test_the_package_says_that_it_is_typed() -> None:
    """PEP 561; the wheel takes every file of the package."""
    assert (Path(flashlab.__file__).parent / "py.typed").is_file()
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["src/flashlab"]
    assert not wheel.keys() - {"packages", "shared-data", "hooks"}, "nothing is left out"


@tiers
@pytest.mark.slow
def test_a_wheel_works_away_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """What the build hook adds, laid out as pip would; in whole, with a stage compiled for the CPU, and its runtime."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(ROOT / "scripts" / "wheel.py"))["Hook"]()
    hook.root = str(ROOT)
    added: dict[str, dict[str, str]] = {"force_include": {}}
    hook.initialize("editable", added)
    assert added == {"force_include": {}}
    hook.initialize("standard", added)
    shutil.copytree(ROOT / "src" / "flashlab", tmp_path / "flashlab", ignore=shutil.ignore_patterns("__pycache__"))
    for source, target in added["force_include"].items():
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if Path(source).is_dir() else shutil.copy)(source, tmp_path / target)
    program = (
        "from flashlab.build import compiler\n"
        "from flashlab.cli import doctor\n"
        "from flashlab.core import paths\n"
        "from flashlab.kernels import registry\n"
        "from flashlab.run import choice, gpu\n"
        "table = choice.table('nvidia-h200')\n"
        "print(paths.KERNELS, compiler.COMMON.is_dir(), len(registry.STAGES), table is not None)\n"
        "print(*doctor._data(paths.DATA))\n"
        "gpu.available = lambda: gpu.WORKS_WITHOUT\n"
        "print(next(doctor._gpu()).detail)\n"
        "paths.cache_dir().write_text('no folder')\n"
        "print(*{finding.fix for finding in doctor._folders()})"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "FLASHLAB_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    kernels = tmp_path / "flashlab" / "installed" / "kernels"
    first, second, without_gpu, fix = done.stdout.splitlines()
    assert first == f"{kernels} True {len(STAGES)} True"
    assert "tables of choices of nvidia-h100-80gb-hbm3, nvidia-h200" in second
    assert "`sass`, `explain` and `check --on cpu`; and in Python" in without_gpu
    assert "report" not in without_gpu
    assert fix == doctor._OTHER_CACHE
    (tmp_path / "cache").unlink()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flashlab", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    before = sorted((tmp_path / "flashlab" / "installed").rglob("*"))
    for needs in (
        *("repair", "results --verify", "results", "report", "report --data .", "claims", "sweep plan", "tuned"),
        *("collect .", "bench", "check 00 --record"),
    ):
        refused = run(*needs.split())
        assert (refused.returncode, refused.stdout) == (1, ""), needs
        assert refused.stderr.startswith("flashlab: needs the checkout: wanted its "), (needs, refused.stderr)
        assert needs.startswith(("report", "sweep")) <= ("its notebooks" in refused.stderr), (needs, refused.stderr)
    assert sorted((tmp_path / "flashlab" / "installed").rglob("*")) == before
    assert run("explain", "16x16x2048x64", "--gpu", "nvidia-h100-80gb-hbm3").returncode == 0
    explained = run("explain", "16x16x2048x64").stdout
    assert gpu.available() is None or f" on {store.gpus()[0]}" in explained, explained
    if not whole:
        return
    checked = run("check", "00", "--on", "cpu", "--length", "1x1", "--dtype", "float16", "--mask", "full")
    assert "page: wanted" not in checked.stderr


def test_environment_installs_the_project_through_the_lock() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, last = environment["dependencies"]
    named = {re.split(r"[=<>]", entry)[0]: entry for entry in conda}
    assert named.keys() == {"python", "pip", "git", "make", "gxx"}, "Python packages belong in pyproject.toml"
    python = Version(named["python"].split("=")[1])
    assert python in Requirement(f"python{PROJECT['project']['requires-python']}").specifier
    assert last["pip"][0] == "-c constraints.txt"
    (project,) = last["pip"][1:]
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", project)
    assert extras is not None
    assert set(extras[1].split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


def test_installs_go_through_the_lock() -> None:
    assert "--constraint constraints.txt" in (ROOT / "scripts" / "install.sh").read_text(encoding="utf-8")
    for name in ("Makefile", "Dockerfile", ".ci/run"):
        assert "pip install" not in (ROOT / name).read_text(encoding="utf-8")


def test_makefile_installs_the_extras_that_exist() -> None:
    extras = PROJECT["project"]["optional-dependencies"].keys()
    used = set(
        re.findall(r"scripts/install\.sh ([a-z]+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert used == {"dev", "lab"}
    assert used | {"gpu", "sweep", "transformers"} == extras


def test_readme_and_help_name_every_target() -> None:
    targets = make_targets()
    assert {"report", "test", "lab", "serve", "lint", "lock", "bundle", "clean"} <= set(targets)
    shown = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True
    )
    for target in targets:
        assert f"make {target}" in shown.stdout
        assert target == "help" or f"make {target}" in README


def test_readme_paths_and_links_exist() -> None:
    # Before the first run is recorded there is no chart to show.
    recorded = bool(store.gpus())
    links = re.findall(r"\]\(([^)#]+)\)", README)
    links = [link for link in links if "://" not in link and (recorded or not link.startswith("data"))]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
    tree = README.split("## Folders")[1].split("```")[1]
    folders = re.findall(r"^(?:  )?([a-z]+)/ ", tree, re.MULTILINE)
    assert {"kernels", "notebooks", "tests", "scripts", "site", "common", "micro"} <= set(folders)
    for folder in folders:
        assert any((parent / folder).is_dir() for parent in (ROOT, ROOT / "kernels", ROOT / "src" / "flashlab")), folder


def test_readme_folder_map_names_every_subpackage() -> None:
    tree = README.split("## Folders")[1].split("```")[1]
    packages = {path.parent.name for path in (ROOT / "src" / "flashlab").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"^  ([a-z]+)/ ", tree, re.MULTILINE))


def test_every_script_is_documented() -> None:
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "site").glob("*.md"))
    texts = "".join(path.read_text(encoding="utf-8") for path in (*pages, ROOT / "pyproject.toml"))
    programs = (path.name for path in (ROOT / "scripts").iterdir() if path.suffix in (".py", ".sh"))
    assert not [name for name in programs if name not in texts]


def test_readme_stages_and_commands_exist() -> None:
    assert set(re.findall(r"\b\d\d_[a-z_]+\b", README.replace("02_ladder", ""))) <= STAGES.keys()
    from typer.main import get_command

    from flashlab.cli.app import app

    commands = get_command(app).commands.keys()  # type: ignore[attr-defined]
    listed = README.split("## The command line")[1].split("```")[1]
    assert set(re.findall(r"^flashlab (\w+)", listed, re.MULTILINE)) == commands


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("counters_ncu.py", "--out", "none.jsonl", "--stages", "99_x"), "counters_ncu: stage: wanted one of 00_naive"),
        (("chart.py", "none-such"), "chart: wanted recorded runs of GPU 'none-such'"),
        (("rounding.py", "--kind", "none-such"), "rounding: inputs: wanted one of normal"),
    ],
)
def test_a_script_says_what_is_wrong_in_a_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    name, *others = arguments
    program = [sys.executable, str(ROOT / "scripts" / name), *others]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_readme_says_what_the_bundle_is_for() -> None:
    bundle = (ROOT / "scripts" / "bundle.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'PYTHON_VERSION = "(.*)"', bundle)
    section = README.split("## A GPU machine without internet")[1].split("##")[0]
    assert f"an x86-64 one with Python {version} and a torch" in section


def test_layers_name_every_subpackage() -> None:
    (flow,) = [one for one in PROJECT["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    layers = {name.strip() for layer in flow["layers"] for name in layer.split("|")}
    package = ROOT / "src" / "flashlab"
    modules = {path.stem for path in package.glob("*.py") if not path.stem.startswith("_")}
    assert layers == modules | {path.parent.name for path in package.glob("*/__init__.py")}


def test_what_is_made_is_ignored() -> None:
    made = (
        ".venv/x",
        "build/site/index.html",
        "src/flashlab/__pycache__/a.pyc",
        ".mypy_cache/a",
        "out.ipynb",  # of the README's papermill commands
    )
    for name in made:
        subprocess.run(["git", "-C", str(ROOT), "check-ignore", "--quiet", name], check=True)
    kept = ("site/index.md", "data/nvidia-h200/runs/a.jsonl", "notebooks/a.ipynb")
    for name in kept:
        assert subprocess.run(["git", "-C", str(ROOT), "check-ignore", "--quiet", name], check=False).returncode == 1


def test_dockerfile_lints_clean() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    result = subprocess.run([str(hadolint), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_dockerfile_ends_unprivileged_in_jupyterlab() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")
    (command,) = (line for line in lines if line.startswith("CMD "))
    assert '"jupyter", "lab"' in command
    for source in re.findall(r"^COPY --chown=\S+ (.+) \S+$", "\n".join(lines), re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name


def test_citation_and_license_are_those_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "version", "license"}
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == flashlab.__version__
    assert citation["license"] == PROJECT["project"]["license"] == "Apache-2.0"
    assert all(author.keys() & {"name", "family-names"} for author in citation["authors"])
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_nothing_names_one_machine() -> None:
    """No home folder, checkout or package index of the machine a file was written on."""
    here = "|".join(re.escape(f"{folder}/") for folder in {ROOT, Path.home()} - {Path("/")})
    forbidden = re.compile(rf"{here}|/home/(?!ubuntu/)\w+/|index-url\s*=|extra-index")
    for path in map(ROOT.joinpath, tracked()):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path == Path(__file__):
            continue
        # FlashInfer's own words in records, from before records abbreviated the home folder.
        found = forbidden.search(text.replace("/root/.cache/flashinfer/", "~/.cache/flashinfer/"))
        assert found is None, f"{path.relative_to(ROOT)}: {found and found.group()}"


def test_scripts_can_be_run() -> None:
    for name in (".ci/run", "scripts/install.sh", "scripts/lock.sh"):
        path = ROOT / name
        assert path.stat().st_mode & stat.S_IXUSR, name
        assert path.read_text(encoding="utf-8").startswith("#!")
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_ci_runs_every_test() -> None:
    """`make test` by one side of a marker, then a part of the other by `make test-all`; and at last the files some of
    whose tests want torch, which is installed for them."""
    makefile, ci = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", ".ci/run"))
    ran = re.findall(r"^ *make (\S+)(?: ARGS=\"(.*?)(?:\"|\$\())?", ci, re.MULTILINE)
    assert ran == [("lint", ""), ("test", ""), ("test-all", "-m exhaustive --part $part/5"), ("test", "")]
    assert re.search(r"^if scripts/install\.sh dev transformers; then\n    make test ARGS=.+importorskip", ci, re.M)
    recipes = dict(re.findall(r"^([a-z-]+): .*\n\t@(.*pytest|.*PYTEST.*)$", makefile, re.IGNORECASE | re.MULTILINE))
    assert "-m 'not exhaustive'" in recipes["test"]
    assert " -m " not in recipes["test-all"]
    assert "not exhaustive" in recipes["test-fast"]


def test_a_commit_on_ci_has_one_of_five_parts() -> None:
    """Whatever its hash, and every part is some commit's."""
    line = next(line for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines() if "part=" in line)
    parts = set()
    for commit in ("0000000", "0000001", "0000002", "0000003", "0000004", "fffffff", "08a9b3e"):
        script = f"git() {{ echo {commit}; }}\n{line}\necho $part"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        parts.add(int(done.stdout))
    assert parts == {1, 2, 3, 4, 5}


def test_the_parts_of_the_tests_are_all_of_them() -> None:
    """Each test is in one part: `--part 1/3` to `--part 3/3` select what no `--part` does."""

    def selected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run([*command, "tests/test_statistics.py"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if "::" in line]

    parts = [selected("--part", f"{number}/3") for number in (1, 2, 3)]
    assert all(parts)
    assert sorted(chain(*parts)) == sorted(selected())


@pytest.mark.parametrize("wrong", ["0/3", "4/3", "3"])
def test_a_part_that_is_none_is_refused(wrong: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "--part", wrong, "tests/test_statistics.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4, done.stdout
    assert f"wanted K/N, such as 2/5, got '{wrong}'" in done.stderr


def test_workflow_and_hooks_run_what_there_is() -> None:
    """The workflow runs make targets, docker and pipx, with the history that records are held against."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    assert {command.removeprefix("make ") for command in commands if command.startswith("make ")} <= targets
    assert {"make lint", "make test-fast", "make report"} <= set(commands)
    assert {command.split()[0] for command in commands} <= {"make", "docker", "pipx"}
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout")]
    assert all(step["with"]["fetch-depth"] == 0 for step in checkouts)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    for hook in local["hooks"]:
        program, _, argument = hook["entry"].partition(" ")
        assert argument in targets if program == "make" else program == ".venv/bin/ruff"


def test_no_script_hides_a_module_of_python() -> None:
    """Python looks beside the script first: a `numbers.py` there took away what `statistics` imports."""
    hidden = {path.stem for path in (ROOT / "scripts").glob("*.py")} & sys.stdlib_module_names
    assert not hidden


# --- What a missing prerequisite says ---------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout without .venv, in a folder with a space, beside a `bin` that holds basic tools and no Python."""
    tree = tmp_path / "my tree"
    (tree / "scripts").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/install.sh"):
        shutil.copy(ROOT / name, tree / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "bash", "make", "dirname", "id", "tr", "rm", "mkdir", "touch", "awk"):
        found = shutil.which(name)
        assert found, name
        (programs / name).symlink_to(found)
    return tree


def make(tree: Path, target: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(tree.parent / "bin"), "HOME": os.environ.get("HOME", "/")}
    return subprocess.run(
        ["make", "-C", str(tree), target], env=environment, capture_output=True, text=True, check=False
    )


def fake_python(tree: Path, name: str, body: str) -> None:
    path = tree.parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_no_python_is_named_with_the_command(bare: Path) -> None:
    result = make(bare, "report")
    assert result.returncode != 0
    assert "missing: Python 3.11 or newer, found: none" in result.stderr
    assert "apt-get install python3 python3-venv" in result.stderr


def test_an_old_python_is_named_with_its_version(bare: Path) -> None:
    fake_python(bare, "python3", 'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi')
    result = make(bare, "test")
    assert result.returncode != 0
    assert "found: Python 3.9.2" in result.stderr


def test_a_python_without_venv_is_named_with_its_package(bare: Path) -> None:
    fake_python(bare, "python3", 'case "$2" in *ensurepip*) exit 1;; *print*) echo python3.12-venv;; *) exit 0;; esac')
    result = make(bare, "report")
    assert result.returncode != 0
    assert re.search(r"venv module\. Install it with: .*apt-get install python3\.12-venv", result.stderr)


def test_nothing_to_serve_says_how_to_build_it(bare: Path) -> None:
    fake_python(bare, "python3", "exit 1")
    stamps = bare / ".venv" / ".installed"
    stamps.mkdir(parents=True)
    for name in ("base", "base-gpu"):
        (stamps / name).touch()
    result = make(bare, "serve")
    assert result.returncode != 0
    assert "make report" in result.stderr
