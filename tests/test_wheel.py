"""The wheel, installed in an environment away from the repository, and the pins of the two commands."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

import pytest
import support
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import tfdist

PROJECT = tomllib.loads((support.REPOSITORY / "pyproject.toml").read_text())["project"]
PINNED = {"quickstart": ("cpu", "examples"), "dev": ("dev",)}


def run(program: Path, *arguments: str, cwd: Path) -> support.Finished:
    return support.run_command([program, *arguments], env={"PYTHONPATH": None}, cwd=cwd, timeout=300)


@pytest.mark.slow
def test_the_wheel_holds_what_is_needed_away_from_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    configs = support.REPOSITORY / "configs"
    assert {f"tfdist/configs/{file.relative_to(configs)}" for file in configs.glob("*/*.*")} <= names
    examples = support.REPOSITORY / "examples"
    assert {f"tfdist/examples/{file.relative_to(examples)}" for file in examples.glob("*/*.*")} <= names
    files = [path for path in (support.REPOSITORY / "tfdist").rglob("*") if path.is_file()]
    beside = [path for path in files if path.suffix not in (".py", ".pyc")]
    assert {str(path.relative_to(support.REPOSITORY)) for path in beside} <= names
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks", "configs"))]
    assert wheel.name.startswith(f"tfdist-{tfdist.__version__}-py3-none-any")


@pytest.mark.slow
def test_the_installed_commands_and_examples_work_in_any_directory(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import tfdist; print(tfdist.__file__, tfdist.__version__)", cwd=tmp_path)
    assert where.check().stdout.startswith(str(installed.parent)) and tfdist.__version__ in where.stdout
    copied = run(installed / "tfdist", "new", "small", "--example=smallest", cwd=tmp_path).check()
    assert copied.stdout == "small: smallest.gin, smallest.py\n" and (tmp_path / "small/smallest.gin").is_file()
    run(installed / "python", "-m", "tfdist.examples.files.prepare_tables", cwd=tmp_path).check()
    validated = run(installed / "tfdist", "validate", "tfdist:experiments/iris_csv.gin", cwd=tmp_path).check()
    assert validated.stdout.endswith("valid\n")
    launched = run(installed / "tfdist-launch", "--workers=1", "--module=this", "--", "x", cwd=tmp_path)
    assert "[worker 0] The Zen of Python" in launched.check().stdout


def pins(name: str) -> dict[str, list[Requirement]]:
    """What a file of requirements/ pins, by package; each with a digest of its files."""
    text = (support.REPOSITORY / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    found: dict[str, list[Requirement]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement, *digests = line.split("--hash=")
            assert digests, line
            parsed = Requirement(requirement)
            found.setdefault(canonicalize_name(parsed.name), []).append(parsed)
    return found


def asked_for(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for with these extras."""
    found = [Requirement(each) for each in PROJECT["dependencies"]] if extras else []
    for extra in extras:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            found += asked_for(*requirement.extras) if requirement.name == "tfdist" else [requirement]
    return found


@pytest.mark.parametrize("name", PINNED)
def test_what_the_two_commands_install_is_pinned_to_what_is_asked_for(name: str) -> None:
    pinned = pins(name)
    for requirement in asked_for(*PINNED[name]):
        there = pinned[canonicalize_name(requirement.name)]
        for pin in there:
            (version,) = [each.version for each in pin.specifier]
            assert requirement.specifier.contains(version, prereleases=True), f"{pin}: run tools/lock.sh"


@pytest.mark.slow
def test_both_commands_pin_alike_and_every_python_is_thought_of() -> None:
    dev, quick = pins("dev"), pins("quickstart")
    assert quick.keys() <= dev.keys()
    for name, there in quick.items():
        assert {str(each.specifier) for each in there} <= {str(each.specifier) for each in dev[name]}, name
    releases = [minor for minor in range(30) if SpecifierSet(PROJECT["requires-python"]).contains(f"3.{minor}")]
    for minor in releases:
        environment = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
        for name in ("tensorflow", "numpy", "keras"):
            fitting = [pin for pin in dev[name] if pin.marker is None or pin.marker.evaluate(environment)]
            assert len(fitting) == 1, (name, minor)
