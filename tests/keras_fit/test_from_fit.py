"""The script of docs/from_fit.md, copied from the page, as one process and as workers of one run."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import support

PAGE = support.REPOSITORY / "docs" / "from_fit.md"
LAUNCH = ["-m", "tfdist.launch", "--workers=2"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [LAUNCH, pytest.param([*LAUNCH, "--launcher=horovod"], marks=pytest.mark.horovod)])
def test_the_script_trains_alike_as_one_process_and_as_two_workers(tmp_path: pathlib.Path, command: list[str]) -> None:
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    losses = []
    for name, arguments in (("one", ["train.py"]), ("two", [*command, "train.py"])):
        support.run_python(arguments, cwd=tmp_path, env={"PYTHONPATH": str(support.REPOSITORY)}).check()
        run = (tmp_path / "runs" / "digits").rename(tmp_path / name)
        losses.append(json.loads((run / "result.json").read_text())["train_metrics"]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and losses[0] < 0.1


@pytest.mark.slow
def test_a_worker_whose_model_was_made_before_it_joined_is_told_two_ways_to_start(tmp_path: pathlib.Path) -> None:
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    cluster = {"cluster": {"worker": [f"127.0.0.1:{support.free_ports(1)[0]}"]}, "task": {"type": "worker", "index": 0}}
    env = {"PYTHONPATH": str(support.REPOSITORY), "TF_CONFIG": json.dumps(cluster)}
    done = support.run_python(["train.py"], cwd=tmp_path, env=env)
    last = done.stderr.strip().splitlines()[-1]
    assert done.status == 1 and "with tfdist.choose_strategy().scope(): … Or start the script by tfdist launch" in last
