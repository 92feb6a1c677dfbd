"""Each check by itself: against the pins, a made-up /sys, and peers that answer oddly."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
import support

from tfdist.doctor import machine, versions, worker_facts
from tfdist.doctor.findings import Finding

FITTING = {
    "tensorflow": "2.21.0",
    "keras": "3.15.1",
    "gin-config": "0.5.0",
    "numpy": "2.4.6",
    "google-crc32c": "1.7.1",
    "absl-py": "2.3.1",
    "jinja2": "3.1.6",
    "psutil": "7.2.2",
    "rich": "14.0.0",
    "tensorboard": "2.21.0",
    "packaging": "25.0",
}


def by_level(found: list[Finding], level: str) -> list[str]:
    return [each.what for each in found if each.level == level]


def test_versions_that_do_not_go_together_are_found() -> None:
    assert by_level(versions.check_versions(version_of=FITTING.get), "problem") == []
    other = FITTING | {"tensorflow": "2.19.1", "libtpu": "0.0.52"}
    found = versions.check_versions(["horovod"], version_of=other.get, driver="470.82.01")
    assert by_level(found, "problem") == [
        "tensorflow is 2.19.1, not 2.20 or 2.21",
        "horovod is not installed",
        "NVIDIA's driver is 470.82.01",
    ]
    assert by_level(found, "warning") == ["libtpu is 0.0.52, not <=0.0.24,>=0.0.17"]


def test_tensorflow_may_be_any_one_of_its_packages() -> None:
    tpu = {package: version for package, version in FITTING.items() if package != "tensorflow"} | {
        "tensorflow-tpu": "2.20.0"
    }
    assert by_level(versions.check_versions(version_of=tpu.get), "problem") == []
    assert versions.list_versions(tpu.get)["tensorflow"] == "2.20.0"
    both = versions.check_versions(version_of=(FITTING | tpu).get)
    assert by_level(both, "warning") == ["tensorflow and tensorflow-tpu are both installed"]
    none = {package: version for package, version in FITTING.items() if package != "tensorflow"}
    (missing,) = [each for each in versions.check_versions(version_of=none.get) if each.level == "problem"]
    assert missing.what == "TensorFlow is not installed" and "tfdist[gpu]" in missing.hint


@pytest.mark.slow
def test_packages_that_are_missing_are_found_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    missing = {"google_crc32c": "google-crc32c", "tensorboard": "tensorboard", "jinja2": "jinja2"}
    script = f"""
import importlib.metadata, sys
version = importlib.metadata.version
def version_of(package):
    if package in {list(missing.values())}:
        raise importlib.metadata.PackageNotFoundError(package)
    return version(package)
importlib.metadata.version = version_of
sys.modules.update(dict.fromkeys({[*missing, "wrapt"]}))
from tfdist.commands import verbs
sys.exit(verbs.run(["doctor", "--run_dir={tmp_path / "run"}"]))
"""
    told = support.run_python(["-c", script])
    assert told.status == 2 and "Traceback" not in told.outputs(), told.outputs()
    for package in missing.values():
        assert f"{package} is not installed" in told.stdout
    assert re.search(r"^ok +storage ", told.stdout, re.MULTILINE)
    assert re.search(r"^problem +devices +TensorFlow cannot be imported", told.stdout, re.MULTILINE)  # without wrapt


def test_little_shared_memory_and_few_open_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ENOUGH_SHARED_BYTES", 1 << 60)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    found = machine.check_machine(shared_memory=tmp_path, has_rdma=True)
    assert [each.level for each in found] == ["warning"] * 3
    assert "only 1024 open files" in found[1].what and "ulimit -n 4096" in found[1].hint
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert machine.check_machine(shared_memory=tmp_path)[1].level == "problem"
    assert machine.check_machine(shared_memory=tmp_path / "none")[0].level == "warning"


def write_adapter(directory: Path, state: str) -> list[Path]:
    """A machine's adapter of one port."""
    port = directory / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text("Ethernet\n")
    return machine.list_adapters(directory)


@pytest.mark.parametrize(
    ("state", "variables", "level", "expected"),
    [
        ("4: ACTIVE", {"NCCL_IB_DISABLE": "1"}, "warning", "NCCL_IB_DISABLE=1 with 1 active"),
        ("1: DOWN", {}, "warning", "none is active"),
        ("4: ACTIVE", {"NCCL_DEBUG": "WARN"}, "ok", "NCCL_DEBUG=WARN"),
        ("4: ACTIVE", {"https_proxy": "http://proxy:1"}, "ok", "mlx5_0 port 1 (Ethernet)"),
    ],
)
def test_what_slows_or_stops_the_network_is_found(
    tmp_path: Path, state: str, variables: dict[str, str], level: str, expected: str
) -> None:
    found = machine.check_network(variables, num_gpus=8, adapters=write_adapter(tmp_path, state))
    assert any(expected in what for what in by_level(found, level)), found
    assert {each.level for each in found} == {"ok", level} and "proxy:1" not in str(found)


def test_workers_that_differ_are_told_apart() -> None:
    mine = worker_facts.collect(versions={"tensorflow": "2.21.0", "libtpu": "1"}, settings={"a.b": "1"}, num_devices=2)
    same = worker_facts.compare(mine, mine, "worker 1")
    assert [each.level for each in same] == ["ok"] and worker_facts.settings_digest({"a.b": "1"}) in same[0].what
    theirs = mine | {"code": {"tfdist": "other"}, "devices": {"GPUs": 1}, "settings": {"a.b": "2"}}
    theirs["versions"] = {"tensorflow": "2.20.0"}
    found = worker_facts.compare(mine, theirs, "worker 1")
    assert [each.level for each in found] == ["problem"] * 4
    assert "tensorflow: 2.20.0 there, 2.21.0 here" in found[0].what and "a.b: 2 there, 1 here" in found[2].what
    assert [e.level for e in worker_facts.compare(mine, mine | {"settings": None}, "worker 1")] == ["warning"]
    only_beside = mine | {"versions": {"tensorflow": "2.21.0"}}
    assert [e.level for e in worker_facts.compare(mine, only_beside, "worker 1")] == ["note"]
