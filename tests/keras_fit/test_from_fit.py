"""The script of docs/from_fit.md, copied from the page, as one process and as workers of one run."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import support

PAGE = support.REPOSITORY / "docs" / "from_fit.md"
LAUNCH = ["-m", "tfdist.launch", "--workers=2", "--module=train"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [LAUNCH, pytest.param([*LAUNCH, "--launcher=horovod"], marks=pytest.mark.horovod)])
def test_the_script_trains_alike_as_one_process_and_as_two_workers(tmp_path: pathlib.Path, command: list[str]) -> None:
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    losses = []
    for name, arguments in (("one", ["train.py"]), ("two", command)):
        support.run_python(arguments, cwd=tmp_path, env={"PYTHONPATH": str(support.REPOSITORY)}).check()
        run = (tmp_path / "runs" / "digits").rename(tmp_path / name)
        losses.append(json.loads((run / "result.json").read_text())["train_metrics"]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and losses[0] < 0.1
