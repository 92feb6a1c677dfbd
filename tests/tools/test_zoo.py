"""tools/zoo.py misses no public class of Keras, and finds a few of them alike under every strategy."""

from __future__ import annotations

import pathlib

import keras
import pytest
import support
from zoo_cases import collection

TOOL = support.REPOSITORY / "tools" / "zoo.py"
SAMPLE = ("BatchNormalization", "Dropout", "losses/Huber", "AUC", "optimizers/Adam")


def test_every_public_class_has_a_case_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collection.find_uncovered() == []
    monkeypatch.setattr(keras.layers, "Novel", type("Novel", (keras.layers.Layer,), {}), raising=False)
    monkeypatch.delattr(keras.losses, "Dice")
    assert collection.find_uncovered() == ["layers/Novel: no case", "losses/Dice: not in Keras"]


@pytest.mark.slow
def test_every_case_builds_its_parts() -> None:
    for key, case in collection.collect_cases().items():
        assert len(case.data()[0]) == 21, key
        case.task()
        case.optimizer()


@pytest.mark.slow
@pytest.mark.horovod
def test_a_sample_is_alike_under_every_strategy(tmp_path: pathlib.Path) -> None:
    only = [f"--only={name}" for name in SAMPLE]
    found = support.run_python([TOOL, *only, f"--work_dir={tmp_path}"], timeout=900).check()
    rows = {line.split("|")[1].strip(): line for line in found.stdout.splitlines() if "same bits" in line}
    assert {"BatchNormalization", "Dropout", "Huber", "AUC", "Adam"} <= set(rows)
    assert all("≤ 1e-05" in line for line in rows.values())
