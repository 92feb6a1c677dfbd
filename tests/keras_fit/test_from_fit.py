"""The script of docs/from_fit.md, copied from the page, as one process and as workers of one run."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import shutil

import pytest
import support

PAGE = support.REPOSITORY / "docs" / "from_fit.md"
LAUNCH = ["-m", "tfdist.launch", "--workers=2"]
PATH = {"PYTHONPATH": str(support.REPOSITORY)}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with the script."""
    made = tmp_path_factory.mktemp("from_fit")
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (made / "train.py").write_text(script)
    (made / "start.py").write_text("import train\n")
    return made


@functools.cache
def train(directory: pathlib.Path, *command: str) -> float:
    """The last loss of the script's training, which runs once by each command."""
    what = [] if "--module=train" in command or "start.py" in command else ["train.py"]
    support.run_python([*command, *what], cwd=directory, env=PATH).check()
    run = directory / "runs" / "digits"
    loss = json.loads((run / "result.json").read_text())["train_metrics"]["loss"]
    shutil.rmtree(run)
    return loss


@pytest.mark.parametrize(
    "command",
    [
        LAUNCH,
        pytest.param([*LAUNCH, "--launcher=horovod"], marks=pytest.mark.horovod),
        [*LAUNCH, "start.py"],
        [*LAUNCH, "--module=train"],
    ],
)
def test_the_script_trains_alike_as_one_process_and_as_two_workers(directory: pathlib.Path, command: list[str]) -> None:
    one, two = train(directory), train(directory, *command)
    assert one == pytest.approx(two, abs=1e-4) and one < 0.1


def test_a_worker_whose_model_was_made_before_it_joined_is_told_two_ways_to_start(directory: pathlib.Path) -> None:
    cluster = {"cluster": {"worker": [f"127.0.0.1:{support.free_ports(1)[0]}"]}, "task": {"type": "worker", "index": 0}}
    done = support.run_python(["train.py"], cwd=directory, env=PATH | {"TF_CONFIG": json.dumps(cluster)})
    last = done.stderr.strip().splitlines()[-1]
    assert done.status == 1 and "with tfdist.choose_strategy().scope(): … Or start the script by tfdist launch" in last
