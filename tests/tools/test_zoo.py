"""tools/zoo.py misses no public class of Keras, and finds a few of them alike under every strategy."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import support
from zoo_cases import collection, comparing

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


def test_names_choose_cases() -> None:
    assert collection.match_cases(["losses/Poisson"]) == ["losses/Poisson"]
    assert collection.match_cases(["Poisson"]) == ["losses/Poisson", "metrics/metrics of classes"]
    with pytest.raises(KeyError, match="Desne"):
        collection.match_cases(["Desne"])


def test_what_differs_has_to_be_explained() -> None:
    def row(name: str, other: float, *, third: float | None = None) -> Any:
        values = [1.0, other, other if third is None else third, other]
        results = {
            strategy: {"weight_000": np.array([value])}
            for strategy, value in zip(comparing.STRATEGIES, values, strict=True)
        }
        return comparing._make_row(name, results, None)

    assert row("layers/Fine", 1.000001).is_explained
    assert not row("layers/Far", 1.1).is_explained
    assert row("layers/MixUp", 1.1).remark == comparing.MIXES
    assert not row("layers/Apart", 1.0, third=1.0000001).is_explained
    failed = {strategy: {"error": np.array("ValueError: no")} for strategy in comparing.STRATEGIES}
    refused = comparing._make_row("layers/No", failed, None)
    assert (refused.remark, refused.is_explained) == ("fails everywhere: ValueError: no", False)
    text = comparing.format_tables([row("layers/Dense", 1.0), refused])
    assert "2 classes, 1 trained: 1 of 1 bit-identical between the strategies, 1 within 1e-05 of one device." in text
    assert "| Dense | same bits | ≤ 1e-05 |  |" in text


@pytest.mark.slow
@pytest.mark.horovod
def test_a_sample_is_alike_under_every_strategy(tmp_path: pathlib.Path) -> None:
    only = [f"--only={name}" for name in SAMPLE]
    found = support.run_python([TOOL, *only, f"--work_dir={tmp_path}"], timeout=900).check()
    rows = {line.split("|")[1].strip(): line for line in found.stdout.splitlines() if "same bits" in line}
    assert {"BatchNormalization", "Dropout", "Huber", "AUC", "Adam"} <= set(rows)
    assert all("≤ 1e-05" in line for line in rows.values())
