"""The Dockerfiles, read where they cannot be built: their steps are shell, what they copy is there, versions agree."""

from __future__ import annotations

import fnmatch
import json
import pathlib
import re
import subprocess
import tomllib

import pytest
from support import REPOSITORY

import tfdist

DOCKERFILES = ("Dockerfile", "docker/horovod-gpu.Dockerfile")
INSTRUCTIONS = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with its arguments on one line."""
    lines = [line for line in (REPOSITORY / name).read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets the builder see a file; the last pattern that matches it or a directory above wins."""
    sent = True
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        pattern = line.strip().lstrip("!").removeprefix("**/")
        above = [path, *(str(parent) for parent in pathlib.PurePosixPath(path).parents if str(parent) != ".")]
        names = above if not line.startswith("**/") else [part for each in above for part in each.split("/")]
        if pattern and not line.startswith("#") and any(fnmatch.fnmatch(each, pattern) for each in names):
            sent = line.startswith("!")
    return sent


@pytest.mark.parametrize("name", DOCKERFILES)
def test_its_steps_are_shell_that_stops_at_the_first_failure(name: str) -> None:
    steps = [rest for word, rest in instructions(name) if word == "RUN"]
    assert steps
    for step in steps:
        subprocess.run(["bash", "-n"], input=step, text=True, check=True)
        assert step.startswith("set -eu;")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_it_copies_what_is_there(name: str) -> None:
    found = instructions(name)
    assert {word for word, _ in found} <= INSTRUCTIONS
    for _, rest in (each for each in found if each[0] == "COPY"):
        for source in rest.split()[:-1]:
            assert (REPOSITORY / source).exists(), source
            assert is_sent(source), f".dockerignore keeps {source} out"
    assert not is_sent("runs/digits/result.json") and not is_sent("tfdist/__pycache__/main.pyc")
    for _, rest in (each for each in found if each[0] in ("ENTRYPOINT", "CMD")):
        assert isinstance(json.loads(rest), list)  # so that signals reach Python and no shell


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCKERFILES)
def test_its_versions_are_those_of_the_project(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert "==" not in text  # versions are pyproject.toml's
    assert re.findall(r"python:?3\.11", text)
    for extras in re.findall(r"'\.\[([a-z,]+)\]'", text):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    release = tfdist.__version__
    assert set(re.findall(r"tfdist(?:-horovod)?:([0-9.]+[0-9])", text)) == {release}
