"""What the environment of a process says of proxies and of a home."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
import support
from processes import running_workers

from tfdist.errors import UserError
from tfdist.strategies.cluster import environment
from tfdist.telemetry.run_directory import RunDirectory


def test_a_user_without_a_home_gets_no_directory_of_the_name_of_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and without an entry in passwd
    cache = environment.cache_directory()
    assert os.path.isabs(cache) and cache == environment.cache_directory()
    with pytest.raises(UserError, match="this user has no home"):
        RunDirectory("~/runs/a")


@pytest.mark.slow
def test_workers_by_tf_config_meet_behind_a_proxy(tmp_path: pathlib.Path) -> None:
    digits = support.REPOSITORY / "configs" / "experiments" / "digits.gin"
    strategy = support.REPOSITORY / "configs" / "strategies" / "multi_worker.gin"
    command = [sys.executable, "-m", "tfdist.main", f"--gin_file={digits}", f"--gin_file={strategy}"]
    command += ["--gin_param=train.steps = 2", f"--run_dir={tmp_path}/run"]
    proxies = {**dict.fromkeys(environment.PROXY_VARIABLES, "http://127.0.0.1:9"), "no_proxy": "", "NO_PROXY": ""}
    with running_workers([command] * 2, tmp_path, proxies) as workers:
        assert [worker.end() for worker in workers] == [0, 0], workers[0].output
