"""Dockerfile, compose.yaml, .devcontainer/ and binder/: steps run in a fresh folder as far as no engine is needed."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version
from shared import tracked

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
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]
    return [n for n in tracked() if not any(fnmatch.fnmatch(part, one) for one in ignored for part in n.split("/"))]


PYTHON = """#!/usr/bin/env bash
# In place of .venv's: says what it is asked to install, and that what the build needs is there by then.
case "$*" in
*"pip install"*) [ -f README.md ] && [ -f LICENSE ] && [ -f src/flashlab/_version.py ] && echo "pip: ${*: -1}" ;;
esac
"""


class Builder:
    """What a builder does with the steps, but for installing packages, below a folder that takes /home/ubuntu's place.

    Args:
        name: `buildkit`, or `kaniko`, which makes folders that root owns and gives a COPY's target to root. Owners are
            real where root runs the tests; elsewhere everything is the user's who runs them.
    """

    def __init__(self, name: str, home: Path) -> None:
        self.home, self.tree, self.names = home, home / "flashlab", context()
        self.as_root = os.getuid() == 0
        self.uid = 1000 if self.as_root else os.getuid()
        self.folders_of = 0 if self.as_root and name == "kaniko" else self.uid
        self.user, self.where, self.said = os.getuid(), home, ""

    def build(self) -> str:
        """What the steps print."""
        for step in steps():
            text = step.text.replace("/home/ubuntu", str(self.home))
            if step.word == "WORKDIR":
                self.where = Path(text)
                self._folder(self.where)
            elif step.word == "USER" and self.as_root:
                self.user = int(text)
            elif step.word == "COPY":
                self._copy(*text.split())
            elif step.word == "RUN" and "apt-get" not in text:
                self._run(text)
        return self.said

    def _folder(self, path: Path) -> None:
        if not path.is_dir():
            self._folder(path.parent)
            path.mkdir()
            os.chown(path, self.folders_of, -1)

    def _copy(self, owner: str, *places: str) -> None:
        assert owner == "--chown=1000:1000"
        *sources, target = places
        for source in sources:
            taken = [name for name in self.names if source in (".", name) or name.startswith(f"{source}/")]
            assert taken, f"COPY {source}: nothing of it is in the context"
            for name in taken:
                path = self.where / target / (name if source in (".", name) else name.removeprefix(f"{source}/"))
                self._folder(path.parent)
                shutil.copy(ROOT / name, path)
                os.chown(path, self.uid, -1)
        os.chown(self.where / target, self.folders_of, -1)

    def _run(self, text: str) -> None:
        python = self.tree / ".venv" / "bin" / "python"
        if "make " in text:
            self._stand_in(python)
        mine = {} if self.as_root else {"--owner=1000 --group=1000": "", "-user 1000": f"-user {self.uid}"}
        for there, here in {**mine, '"${GPU}"': '""'}.items():
            text = text.replace(there, here)
        ran = subprocess.run(
            ["bash", "-ec", text],
            cwd=self.where,
            user=self.user if self.as_root else None,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"{text}\n{ran.stderr}"
        self.said += ran.stdout

    def _stand_in(self, python: Path) -> None:
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON, encoding="utf-8")
        python.chmod(0o755)
        for path in (python, python.parent, python.parent.parent):
            os.chown(path, self.uid, -1)


@pytest.mark.parametrize("name", ["buildkit", "kaniko"])
def test_the_steps_run_in_a_fresh_folder_and_leave_it_to_its_user(name: str, request: pytest.FixtureRequest) -> None:
    """All but installing packages: folders, copies in their order, the make target, owners, and then the package."""
    home = Path(tempfile.mkdtemp(prefix="flashlab-"))  # pytest's own folders are closed to other users
    request.addfinalizer(lambda: shutil.rmtree(home))
    home.chmod(0o755)
    builder = Builder(name, home)
    os.chown(home, builder.uid, -1)
    said = builder.build()
    assert [line for line in said.splitlines() if line.startswith("pip")] == ["pip: .", "pip: .[lab]"]
    for name in ("data", "build", "notebooks", ".venv/.installed/lab"):
        assert (builder.tree / name).exists(), name
    assert {path.lstat().st_uid for path in builder.tree.rglob("*")} == {builder.uid}
    result = subprocess.run(
        [sys.executable, "-m", "flashlab", "stages", "--json"],
        cwd=builder.tree,
        env={**os.environ, "PYTHONPATH": str(builder.tree / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(stage_id in result.stdout for stage_id in STAGES)


def test_the_build_ends_where_something_is_not_its_users() -> None:
    assert those("WORKDIR") == [HOME]
    assert those("USER")[-1] == "1000"
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
