"""Dockerfile, compose.yaml, .devcontainer/ and binder/: steps run in a fresh folder as far as no engine is needed."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from flashlab.core.paths import ROOT
from flashlab.kernels.registry import STAGES

HOME = "/home/ubuntu/flashlab"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
DEVCONTAINER: dict[str, Any] = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Step:
    word: str
    """`RUN`, `COPY`, …"""
    text: str


def steps() -> list[Step]:
    """The Dockerfile's instructions, a continued line as one."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    return [Step(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def those(word: str) -> list[str]:
    return [step.text for step in steps() if step.word == word]


def context() -> list[str]:
    """What a builder is sent, but for `.git`: the files of the checkout that .dockerignore does not name."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [n for n in names if not any(fnmatch.fnmatch(part, one) for one in ignored for part in n.split("/"))]


def copy(text: str, tree: Path, names: list[str]) -> None:
    """A COPY with --chown, from the context."""
    owner, *sources, target = text.split()
    assert owner == "--chown=1000:1000"
    for source in sources:
        taken = [name for name in names if source in (".", name) or name.startswith(f"{source}/")]
        assert taken, f"COPY {source}: nothing of it is in the context"
        for name in taken:
            inside = name if source in (".", name) else name.removeprefix(f"{source}/")
            path = tree / target / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path)


PIP = """#!/usr/bin/env bash
# In place of .venv's Python: says what it is asked to install, and that what the build needs is there by then.
case "$*" in
*"pip install"*) [ -f README.md ] && [ -f LICENSE ] && [ -f src/flashlab/_version.py ] && echo "pip: ${*: -1}" ;;
*) exec %s "$@" ;;
esac
"""


def test_the_steps_run_in_a_fresh_folder(tmp_path: Path) -> None:
    """All but installing packages: folders, copies in their order, the make target, owners, and then the package."""
    home, mine = tmp_path / "home", (os.getuid(), os.getgid())
    tree, names, said = home / "flashlab", context(), []
    begun = False
    for step in steps():
        begun = begun or step.word == "WORKDIR"
        text = step.text.replace("/home/ubuntu", str(home)).replace("--owner=1000 --group=1000", "")
        text = text.replace("! -user 1000", f"! -user {mine[0]}").replace('"${GPU}"', '""')
        if step.word == "COPY":
            copy(step.text, tree, names)
        if step.word == "RUN" and "apt-get" not in text:
            python = tree / ".venv" / "bin" / "python"
            if begun and not python.exists():
                python.parent.mkdir(parents=True)
                python.write_text(PIP % shlex.quote(sys.executable), encoding="utf-8")
                python.chmod(0o755)
            where = tree if begun else tmp_path
            said.append(
                subprocess.run(["bash", "-ec", text], cwd=where, check=True, capture_output=True, text=True).stdout
            )
    assert [line for line in "".join(said).splitlines() if line.startswith("pip")] == ["pip: .", "pip: .[lab]"]
    for name in ("data", "build", "notebooks", ".venv/.installed/lab"):
        assert (tree / name).exists(), name
    result = subprocess.run(
        [sys.executable, "-m", "flashlab", "stages", "--json"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(stage_id in result.stdout for stage_id in STAGES)


def test_folders_belong_to_the_user_whatever_builds() -> None:
    """BuildKit, podman and kaniko differ in the owner of what WORKDIR and COPY make; what is there keeps its owner."""
    order = [step.word for step in steps()]
    made = next(i for i, step in enumerate(steps()) if step.text.startswith("install --directory"))
    assert made < order.index("WORKDIR") < order.index("USER") < order.index("COPY")
    folders = {f"{HOME}/{name}" for name in ("build", "data")}
    folders |= {f"{HOME}/{text.split()[-1]}" for text in those("COPY") if text.split()[-1] not in (".", "./")}
    assert {HOME, *folders} <= set(steps()[made].text.split())
    assert all(text.startswith("--chown=1000:1000 ") for text in those("COPY"))
    assert those("WORKDIR") == [HOME]
    assert those("USER") == ["1000"]
    (check,) = (text for text in those("RUN") if text.startswith("test"))
    assert "! -user 1000" in check


def test_the_image_says_what_it_is() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', " ".join(those("LABEL"))))
    assert labels.keys() == {"title", "description", "licenses", "base.name", "revision"}
    assert labels["base.name"] == f"docker.io/{those('FROM')[0].split()[0]}"
    assert labels["revision"] == "${COMMIT}"


def test_its_health_needs_no_gpu_and_no_token() -> None:
    """JupyterLab's version, at the port that the command names."""
    (check,) = those("HEALTHCHECK")
    python, flag, code = json.loads(check[check.index("[") :])
    assert (python, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    (port,) = re.findall(r"127\.0\.0\.1:(\d+)/api'", code)
    command = json.loads(those("CMD")[0])
    assert f"--port={port}" in command
    assert those("EXPOSE") == [port]


def test_jupyterlab_keeps_its_token_and_is_published_on_localhost_alone() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    texts = [those("CMD")[0], makefile, (ROOT / "compose.yaml").read_text(encoding="utf-8")]
    texts += [(ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8")]
    for text in texts:
        assert not re.search(r"(?i)token\s*=|password\s*=|disable_check_xsrf|allow_origin|allow-remote", text)
    assert "--ip=127.0.0.1" in makefile
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    for path in (ROOT / "README.md", ROOT / "Dockerfile"):
        for published in re.findall(r"docker run[^\n]* -p (\S+)", path.read_text(encoding="utf-8")):
            assert published.startswith("127.0.0.1:"), path


def test_compose_builds_the_dockerfile_with_and_without_a_gpu() -> None:
    services = COMPOSE["services"]
    assert services.keys() == {"lab", "gpu"}
    assert services["gpu"]["extends"] == "lab"
    arguments = {text.partition("=")[0] for text in those("ARG")}
    for service in services.values():
        assert service["build"]["args"].keys() <= arguments
    assert not services["lab"]["build"]["args"]["GPU"]
    (device,) = services["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert {mount.split(":")[1] for mount in services["lab"]["volumes"]} == {f"{HOME}/data", f"{HOME}/build"}


def test_devcontainer_starts_from_the_dockerfiles_system() -> None:
    build = DEVCONTAINER["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert any(text.endswith(f" AS {build['target']}") for text in those("FROM"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    program, *targets = DEVCONTAINER["postCreateCommand"].split()
    assert program == "make"
    for target in targets:
        assert f"\n$(STAMPS)/{Path(target).name}: " in makefile


def test_binder_installs_what_notebooks_need_without_a_gpu() -> None:
    folder = ROOT / "binder"
    script = (folder / "postBuild").read_text(encoding="utf-8")
    assert os.access(folder / "postBuild", os.X_OK)
    subprocess.run(["bash", "-n", str(folder / "postBuild")], check=True)
    assert "scripts/install.sh\n" in script, "without an extra: neither torch nor a second JupyterLab"
    assert '--prefix "$NB_PYTHON_PREFIX" --name python3' in script, "where repo2docker's JupyterLab looks"
    python = Version((folder / "runtime.txt").read_text(encoding="utf-8").strip().removeprefix("python-"))
    assert f"python3.{python.minor}" in (ROOT / "scripts" / "install.sh").read_text(encoding="utf-8")
    packages = (folder / "apt.txt").read_text(encoding="utf-8").split()
    assert packages == ["g++", "make"]
