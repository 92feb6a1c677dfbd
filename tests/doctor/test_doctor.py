"""The command as a user runs it: alone, and as real workers of a cluster on this machine."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import support
from gcs.server import GcsServer
from processes import running_workers

from tfdist.commands import doctor
from tfdist.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from tfdist.launch.local_workers import tf_config

pytestmark = pytest.mark.slow

DIGITS = "--gin_file=configs/experiments/digits.gin"


def found(report: dict[str, Any], group: str, level: str | None = None) -> list[dict[str, Any]]:
    return [each for each in report["findings"] if each["group"] == group and level in (None, each["level"])]


def doctors(logs: Path, *workers: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """Runs a doctor for each worker of one cluster, each with arguments of its own; statuses and reports."""
    alone = [sys.executable, "-m", "tfdist.doctor", "--json", "--peer_seconds=90"]
    commands = [[*alone, *arguments] for arguments in workers]
    with running_workers(commands, logs, directory=support.REPOSITORY, stderr=None) as started:
        return [(process.end(), json.loads(process.output)) for process in started]


def test_two_workers_measure_their_all_reduce_and_say_where_their_configurations_differ(tmp_path: Path) -> None:
    same = [DIGITS, "--largest_mib=1"]
    (status, chief), (other_status, other) = doctors(tmp_path, same, [*same, "--gin_param=train.epochs = 7"])
    assert status == other_status == EXIT_USER_ERROR
    (problem,) = found(chief, "workers", "problem")
    assert problem["details"]["differing"] == ["train.epochs"]
    assert "train.epochs: 7 there, 12 here" in problem["what"]
    assert "train.epochs: 12 there, 7 here" in found(other, "workers", "problem")[0]["what"]
    assert all(each["why"] and each["hint"] for each in chief["findings"] if each["level"] != "ok")
    (table,) = found(chief, "allreduce")
    assert [each["num_bytes"] for each in table["details"]["timings"]] == [1 << 10 << n for n in range(0, 11, 2)]
    assert all(each["bytes_per_second"] > 0 for each in table["details"]["timings"])
    assert table["details"]["strategy"] == "multi_worker" and "1 MiB" in table["what"]
    assert chief["worker"] == 0 and other["worker"] == 1


@pytest.mark.horovod
def test_horovods_workers_compare_and_measure_too() -> None:
    command = ["-m", "tfdist.launch", "--launcher=horovod", "--workers=2", "--module=tfdist.doctor"]
    finished = support.run_python([*command, "--", DIGITS, "--largest_mib=1"], timeout=240, cwd=support.REPOSITORY)
    lines = finished.check().stdout.splitlines()
    assert any("[worker 1] ok       workers   worker 0" in line and "same versions" in line for line in lines)
    # A warning tells of a slow network, as a busy machine has one.
    allreduce = r"\[worker 0\] (ok|warning) +allreduce horovod, 2 workers, 2 replicas"
    assert any(re.match(allreduce, line) for line in lines)
    assert sum(line.startswith("[worker 0]") and " 1 MiB " in line for line in lines) == 1
    assert any(re.fullmatch(r"\[worker 1\] worker 1 \(.*\): a run can start.*", line) for line in lines)


def test_alone_it_says_whom_it_did_not_reach_and_what_cannot_be_written(gcs: GcsServer, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    mine, absent = support.free_ports(2)
    arguments = [
        "--json",
        "--peer_seconds=1",
        "--run_dir=gs://bucket/a",
        "--run_dir=gs://other/a",
        f"--run_dir={in_the_way}",
    ]
    config = tf_config([f"127.0.0.1:{mine}", f"127.0.0.1:{absent}"], 0)
    environment = {"TF_CONFIG": config, "STORAGE_EMULATOR_HOST": gcs.address}
    finished = support.run_python(["-m", "tfdist.doctor", *arguments], env=environment, cwd=support.REPOSITORY)
    assert finished.status == EXIT_USER_ERROR
    report = json.loads(finished.stdout)
    assert report["exit_status"] == EXIT_USER_ERROR
    (peer,) = found(report, "workers", "problem")
    assert f"worker 0 waited 1 s and gives up; missing: worker 1 at 127.0.0.1:{absent} (nothing" in peer["what"]
    assert [each["details"]["path"] for each in found(report, "storage", "ok")] == ["gs://bucket/a"]
    assert {each["details"]["path"] for each in found(report, "storage", "problem")} == {
        "gs://other/a",
        str(in_the_way),
    }
    assert in_the_way.read_text() == "" and not gcs.buckets.names("bucket")


def test_a_machine_without_a_cluster_is_fine(tmp_path: Path) -> None:
    finished = support.run_python(["-m", "tfdist.doctor", f"--run_dir={tmp_path}"], cwd=support.REPOSITORY)
    assert finished.status == EXIT_DONE
    lines = finished.stdout.splitlines()
    assert lines[0].startswith(f"ok       versions  python {platform.python_version()}")
    assert lines[-1].startswith("a run can start")
    assert any("examined alone" in line for line in lines)
    assert list(tmp_path.iterdir()) == []
    mistaken = [f"--gin_file={support.REPOSITORY}/tfdist/configs/experiments/digits.gin", "--gin_param=train.epoch = 3"]
    with pytest.raises(UserError, match="train has no parameter 'epoch'"):
        doctor.run(mistaken)
