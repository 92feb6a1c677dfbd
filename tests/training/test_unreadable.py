"""A run that meets a batch which cannot be read leaves it out, and is otherwise the one that it would have been."""

from __future__ import annotations

import json
import pathlib

import keras
import numpy as np
import pytest
import support
from training import unreadable, xla_trials
from training.trainings import Trained, run

from tfdist.data.formats.image_folder import ImageFolder
from tfdist.errors import DivergedError, UserError
from tfdist.training.recovery.rollback import Rollback


def left_out(directory: pathlib.Path) -> list[int]:
    return [each["step"] for each in json.loads((directory / "rollbacks.json").read_text())]


def of_whole_file(directory: pathlib.Path, path: pathlib.Path, like: pathlib.Path, *, epochs: int = 2) -> Trained:
    """A run whose records are whole, and which leaves out the same steps from the beginning."""
    directory.mkdir()
    (directory / "rollbacks.json").write_bytes((like / "rollbacks.json").read_bytes())
    return run(directory, **unreadable.settings(unreadable.write_digits(path), epochs=epochs))


@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_the_batch_is_left_out(tmp_path: pathlib.Path, steps_per_call: int) -> None:
    path = unreadable.write_digits(tmp_path / "corrupt", corrupt=[200])
    found = run(tmp_path / "run", **unreadable.settings(path) | {"steps_per_call": steps_per_call})
    steps = left_out(tmp_path / "run")
    assert len(steps) == 2 and steps[0] <= 7 < steps[1] <= 14  # one in each of two epochs
    assert [event["step"] for event in found.events("batch_left_out")][-2:] == steps
    assert (
        "Record 200 of" in found.result.notes[0]
        and f"leaving out the batch of step {steps[0]}" in found.result.notes[0]
    )
    clean = of_whole_file(tmp_path / "clean", tmp_path / "whole", tmp_path / "run")
    assert found.bits() == clean.bits()


def test_nothing_is_read_of_a_first_batch_that_is_left_out(tmp_path: pathlib.Path) -> None:
    """With train.xla = 'auto' a batch is read to see what XLA compiles."""
    path = unreadable.write_digits(tmp_path / "corrupt", corrupt=[3])
    settings = unreadable.settings(path, epochs=1) | {"shuffle": False, "deterministic": False, "global_batch_size": 16}
    with xla_trials.trials():
        found = run(tmp_path / "run", **settings | {"steps_per_call": 1})
    assert found.events("xla_chosen")
    assert left_out(tmp_path / "run") == [1]


def test_an_image_that_cannot_be_decoded_counts_too(tmp_path: pathlib.Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (24, 4, 4, 1), np.uint8)
    for number, image in enumerate(images):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(path, image, scale=False)
    (tmp_path / "images" / "b" / "17.png").write_bytes(b"no image")
    model = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    settings = unreadable.settings(tmp_path) | {
        "model": lambda: model,
        "train_data": lambda: ImageFolder(str(tmp_path / "images"), size=(4, 4), channels=1),
        "global_batch_size": 4,
        "epochs": 1,
    }
    found = run(tmp_path / "run", **settings)
    (step,) = left_out(tmp_path / "run")
    assert "17.png" in found.result.notes[0] and 1 <= step <= 6


def test_more_than_the_policy_allows_end_the_run_in_one_message(tmp_path: pathlib.Path) -> None:
    path = unreadable.write_digits(tmp_path / "corrupt", corrupt=range(64, 448, 8))
    settings = unreadable.settings(path) | {"on_divergence": Rollback(most_failures=2)}
    failed = run(tmp_path / "run", **settings, may_fail=True)
    assert isinstance(failed.error, DivergedError) and failed.error.exit_status == 3
    assert "is corrupt" in str(failed.error) and "The run went back to step 0 2 times" in str(failed.error)


def test_without_the_policy_the_run_ends(tmp_path: pathlib.Path) -> None:
    path = unreadable.write_digits(tmp_path / "corrupt", corrupt=[200])
    failed = run(tmp_path / "run", **unreadable.settings(path) | {"on_divergence": None}, may_fail=True)
    assert isinstance(failed.error, UserError) and failed.error.exit_status == 2
    assert "Record 200 of" in str(failed.error)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored2", "multi_worker", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_replicas_leave_it_out_also_where_they_are_killed_after_it(tmp_path: pathlib.Path, strategy: str) -> None:
    launch = [
        "-m",
        "tfdist.launch",
        f"--workers={1 if strategy == 'mirrored2' else 2}",
        "--max_restarts=5",
        "--backoff_seconds=0.1",
    ]
    launch += ["--launcher=horovod"] if strategy == "horovod" else []
    path = unreadable.write_digits(tmp_path / "corrupt", corrupt=[100])  # in the second of seven batches
    program = [*launch, "--module=training.unreadable", "--", tmp_path / "run", strategy, path, "kills"]
    support.run_python(program, env=support.TESTS_PATH, timeout=400).check()
    assert len(left_out(tmp_path / "run")) == 1 and (tmp_path / "run" / "killed").exists()
    clean = of_whole_file(tmp_path / "clean", tmp_path / "whole", tmp_path / "run", epochs=1)
    found = keras.models.load_model(tmp_path / "run" / "export" / "model.keras").get_weights()
    for ours, theirs in zip(found, clean.weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
