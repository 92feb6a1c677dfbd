"""`fit` with `tfdist.BackupAndRestore`, interrupted anywhere, ends as the `fit` that was not."""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import forks
import keras
import numpy as np
import pytest
import support
import tensorflow as tf

import tfdist
from tfdist.checkpoint import catalog
from tfdist.errors import EXIT_PREEMPTED, UserError

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fit_digits

KILLS = 3
PROGRAM = pathlib.Path(fit_digits.__file__)


@pytest.fixture(autouse=True)
def without_autotune(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.data.Dataset, "with_options", fit_digits.without_autotune)


class InterruptedError_(Exception):
    """Stands for whatever ends a `fit`."""


class Interrupt(keras.callbacks.Callback):
    """Raises at the n-th call of any hook that a `fit` calls between its begin and its end."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self._at = at
        self._calls: set[int] = set()  # which, unlike a number, a checkpoint does not bring back

    @property
    def count(self) -> int:
        return len(self._calls)

    def _count(self, *_: object, **__: object) -> None:
        self._calls.add(self.count)
        if self.count == self._at:
            raise InterruptedError_

    on_epoch_begin = on_epoch_end = on_train_batch_begin = on_train_batch_end = _count
    on_test_begin = on_test_batch_begin = on_test_batch_end = on_test_end = _count


def assert_same(
    one: tuple[list[np.ndarray], dict[str, list[float]]], other: tuple[list[np.ndarray], dict[str, list[float]]]
) -> None:
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        np.testing.assert_array_equal(a, b)


def interrupted_again_and_again(
    checkpoint: keras.callbacks.Callback, moments: list[int], fit: Callable[[list[keras.callbacks.Callback]], Any]
) -> Any:
    """What `fit` gives in the end, after it was interrupted at each of the moments."""
    for moment in moments:
        with pytest.raises(InterruptedError_):
            fit([Interrupt(moment), checkpoint])
    return fit([Interrupt(None), checkpoint])


@pytest.mark.slow
@pytest.mark.parametrize("kind", fit_digits.KINDS)
def test_an_interrupted_fit_goes_on_at_the_next_batch(kind: str, tmp_path: pathlib.Path) -> None:
    counter = Interrupt(None)
    undisturbed = fit_digits.train(kind, [counter])
    rng = random.Random(kind)
    checkpoint = tfdist.BackupAndRestore(tmp_path / "checkpoints", save_freq=1)
    moments = [rng.randrange(2, counter.count // 2) for _ in range(2)]
    again = interrupted_again_and_again(checkpoint, moments, lambda callbacks: fit_digits.train(kind, callbacks))
    assert_same(undisturbed, again)


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", ["epoch", 5, 12])
def test_it_goes_on_from_the_last_checkpoint_however_often_they_are_made(
    save_freq: str | int, tmp_path: pathlib.Path
) -> None:
    counter = Interrupt(None)
    undisturbed = fit_digits.train("shuffled", [counter])
    checkpoint = tfdist.BackupAndRestore(tmp_path / "checkpoints", save_freq=save_freq)
    moments = [counter.count // 2, counter.count // 2]
    assert_same(
        undisturbed,
        interrupted_again_and_again(checkpoint, moments, lambda callbacks: fit_digits.train("shuffled", callbacks)),
    )
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("hooks_later", [-9, -1, 1])  # in the last batch, the evaluation, the next epoch
def test_the_end_of_an_epoch_may_be_the_moment(hooks_later: int, tmp_path: pathlib.Path) -> None:
    hooks = Interrupt(None)
    undisturbed = fit_digits.train("unknown_size", [hooks], epochs=2)
    checkpoint = tfdist.BackupAndRestore(tmp_path / "checkpoints", save_freq=1)
    again = interrupted_again_and_again(
        checkpoint,
        [hooks.count // 2 + hooks_later],
        lambda callbacks: fit_digits.train("unknown_size", callbacks, epochs=2),
    )
    assert_same(undisturbed, again)


@pytest.mark.slow
def test_a_fit_interrupted_twice_in_one_evaluation_keeps_the_metrics_of_its_epoch(tmp_path: pathlib.Path) -> None:
    class InEvaluation(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            raise InterruptedError_

    undisturbed = fit_digits.train("unknown_size", [], epochs=2)
    checkpoint = tfdist.BackupAndRestore(tmp_path / "checkpoints", save_freq=1)
    for _ in range(2):
        with pytest.raises(InterruptedError_):
            fit_digits.train("unknown_size", [InEvaluation(), checkpoint], epochs=2)
    assert_same(undisturbed, fit_digits.train("unknown_size", [checkpoint], epochs=2))


@pytest.mark.slow
def test_other_callbacks_go_on_with_what_they_had(tmp_path: pathlib.Path) -> None:
    class Average(keras.callbacks.Callback):
        """The user's own, with state in plain attributes."""

        def __init__(self) -> None:
            super().__init__()
            self.batches = 0
            self.weights: list[np.ndarray] = []
            self.seen: dict[str, Any] = {"losses": [], "last": (0, 0)}

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            self.weights = [*self.weights[-2:], self.model.layers[0].get_weights()[0]]
            self.seen["losses"].append(logs["loss"])
            self.seen["last"] = (batch, self.batches)

    def made() -> list[keras.callbacks.Callback]:
        return [
            Average(),
            keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True, mode="max"),
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, mode="max"),
        ]

    def fit(callbacks: list[keras.callbacks.Callback]) -> Any:
        own = made()
        done = fit_digits.train("shuffled", [own[0], *callbacks, *own[1:]], epochs=8)
        return done, own

    counter = Interrupt(None)
    (undisturbed, before) = fit([counter])
    assert len(undisturbed[1]["loss"]) < 8  # stopped early
    assert undisturbed[1]["learning_rate"][-1] < undisturbed[1]["learning_rate"][0]
    checkpoint = tfdist.BackupAndRestore(tmp_path / "checkpoints", save_freq=1)
    (again, after) = interrupted_again_and_again(checkpoint, [counter.count // 2, counter.count // 4], fit)
    assert_same(undisturbed, again)
    assert after[0].batches == before[0].batches
    assert after[0].seen == before[0].seen
    for a, b in zip(after[0].weights, before[0].weights, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (after[1].wait, after[1].best, after[1].stopped_epoch) == (
        before[1].wait,
        before[1].best,
        before[1].stopped_epoch,
    )


@pytest.mark.slow
def test_a_setting_that_the_user_changed_stays_changed(tmp_path: pathlib.Path) -> None:
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=5)
    checkpoint = tfdist.BackupAndRestore(tmp_path / "checkpoints", save_freq=1)
    with pytest.raises(InterruptedError_):
        fit_digits.train("arrays", [stopping, Interrupt(60), checkpoint])
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=9)
    fit_digits.train("arrays", [stopping, checkpoint])
    assert stopping.patience == 9


@pytest.mark.slow
def test_without_deletion_a_finished_fit_is_not_trained_again(tmp_path: pathlib.Path) -> None:
    def fit(*callbacks: keras.callbacks.Callback, epochs: int) -> Any:
        checkpoint = tfdist.BackupAndRestore(tmp_path / "checkpoints", delete_checkpoint=False)
        return fit_digits.train("shuffled", [*callbacks, checkpoint], epochs=epochs)

    first = fit(epochs=2)
    counter = Interrupt(None)
    assert_same(first, fit(counter, epochs=2))
    assert counter.count == 0
    assert_same(fit(epochs=3), fit_digits.train("shuffled", [], epochs=3))  # more epochs continue it


@pytest.mark.slow
def test_the_next_fit_of_the_same_model_begins_at_its_first_epoch(tmp_path: pathlib.Path) -> None:
    model = fit_digits.build_model()
    images, labels = fit_digits.digits()
    checkpoint = tfdist.BackupAndRestore(tmp_path / "checkpoints", save_freq=1)
    with pytest.raises(InterruptedError_):
        model.fit(images, labels, epochs=3, verbose=0, callbacks=[Interrupt(40), checkpoint])
    model.fit(images, labels, epochs=3, verbose=0, callbacks=[checkpoint])
    assert model.fit(images, labels, epochs=1, verbose=0).epoch == [0]


@pytest.mark.slow
def test_double_checkpoint_keeps_two_and_a_damaged_one_is_passed_over(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = fit_digits.train("shuffled", [])
    checkpoint = tfdist.BackupAndRestore(tmp_path, save_freq=1, double_checkpoint=True)
    with pytest.raises(InterruptedError_):
        fit_digits.train("shuffled", [Interrupt(50), checkpoint])
    checkpoint._session.abandon()
    older, newest = [entry for entry in catalog.list_checkpoints(str(tmp_path)) if not entry.is_leftover]
    damaged = next(pathlib.Path(newest.path).glob("*.safetensors*"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    assert_same(undisturbed, fit_digits.train("shuffled", [checkpoint]))
    said = capsys.readouterr().err
    assert damaged.name in said
    assert f"from the checkpoint of batch {older.step}" in said


@pytest.mark.slow
def test_a_single_checkpoint_is_kept_otherwise(tmp_path: pathlib.Path) -> None:
    checkpoint = tfdist.BackupAndRestore(tmp_path, save_freq=1)
    with pytest.raises(InterruptedError_):
        fit_digits.train("arrays", [Interrupt(50), checkpoint])
    checkpoint._session.abandon()
    assert len(catalog.list_checkpoints(str(tmp_path))) == 1


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path: pathlib.Path) -> None:
    checkpoint = tfdist.BackupAndRestore(tmp_path, save_freq=1)
    with pytest.raises(InterruptedError_):
        fit_digits.train("arrays", [Interrupt(20), checkpoint])
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(17), keras.layers.Dense(10)])
    model.compile("sgd", "mse")
    with pytest.raises(UserError, match=r"float32\[64, 16\] in the checkpoint, float32\[64, 17\] here"):
        model.fit(np.zeros((8, 64)), np.zeros((8, 10)), verbose=0, callbacks=[checkpoint])


@pytest.mark.slow
def test_shorter_data_are_refused(tmp_path: pathlib.Path) -> None:
    model = fit_digits.build_model()
    images, labels = fit_digits.digits()
    checkpoint = tfdist.BackupAndRestore(tmp_path, save_freq=1)
    with pytest.raises(InterruptedError_):
        model.fit(fit_digits.data("shuffled")["x"], verbose=0, callbacks=[Interrupt(22), checkpoint])
    dataset = fit_digits.tf.data.Dataset.from_tensor_slices((images[:64], labels[:64])).batch(32).repeat(1)
    unknown = dataset.filter(lambda *_: True)
    with pytest.raises(UserError, match="the data is shorter now"):
        model.fit(unknown, verbose=0, callbacks=[checkpoint])


@pytest.mark.parametrize("save_freq", ["batch", 0, -1, 1.5, None, True])
def test_a_wrong_save_freq_is_refused(save_freq: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="save_freq="):
        tfdist.BackupAndRestore(tmp_path, save_freq=save_freq)


def test_a_missing_directory_name_is_refused() -> None:
    with pytest.raises(ValueError, match="backup_dir"):
        tfdist.BackupAndRestore("")


def test_a_model_that_is_not_built_is_refused(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="not built"):
        model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0, callbacks=[tfdist.BackupAndRestore(tmp_path)])


def test_outside_of_fit_it_says_where_it_belongs(tmp_path: pathlib.Path) -> None:
    checkpoint = tfdist.BackupAndRestore(tmp_path)
    checkpoint.set_model(fit_digits.build_model())
    with pytest.raises(UserError, match=r"keras\.Model\.fit"):
        checkpoint.on_train_begin()


@pytest.mark.slow
def test_after_a_fit_that_raised_signals_do_again_what_they_did_before(tmp_path: pathlib.Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(InterruptedError_):
            fit_digits.train("arrays", [Interrupt(20), tfdist.BackupAndRestore(tmp_path, save_freq=1)])
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


# Processes


def start(result: pathlib.Path, backup_dir: pathlib.Path | str, kind: str) -> subprocess.Popen[bytes]:
    return forks.Popen(
        [sys.executable, PROGRAM, result, backup_dir, kind],
        env=support.clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def load(result: pathlib.Path) -> tuple[list[np.ndarray], Any]:
    with np.load(result) as stored:
        names = [name for name in stored.files if name != "history"]
        return [stored[name] for name in names], str(stored["history"])


def wait_for_line(process: subprocess.Popen[bytes], line: bytes, count: int) -> None:
    for _ in range(count):
        for read in process.stdout:
            if read == line:
                break
        else:
            pytest.fail(f"ended with {process.wait()} before the line {line!r}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "mirrored"])
def test_a_process_killed_at_any_moment_loses_nothing(kind: str, tmp_path: pathlib.Path) -> None:
    rng = random.Random(kind)
    with start(tmp_path / "undisturbed.npz", "", kind) as process:
        try:
            process.stdout.read()
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
    kills = 0
    for attempt in itertools.count():
        with start(tmp_path / "killed.npz", tmp_path / "checkpoints", kind) as process:
            try:
                if attempt < KILLS:
                    wait_for_line(process, b"batch\n", rng.randrange(1, 12))
                    for _ in range(rng.randrange(20_000)):  # some time, so that it is not always at the line's write
                        os.getpid()
                    process.kill()
                process.stdout.read()
                status = process.wait(timeout=120)
            finally:
                process.kill()
        assert status in (0, -signal.SIGKILL)
        kills += status == -signal.SIGKILL
        if status == 0:
            break
    assert kills == KILLS
    assert_same(load(tmp_path / "killed.npz"), load(tmp_path / "undisturbed.npz"))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [b"batch\n", b"evaluation\n"])
def test_a_signal_saves_and_ends_the_process_and_nothing_is_done_twice(moment: bytes, tmp_path: pathlib.Path) -> None:
    checkpoints, result = tmp_path / "checkpoints", tmp_path / "result.npz"
    batches = 0
    with start(result, checkpoints, "arrays") as process:
        try:
            wait_for_line(process, moment, 3)
            process.send_signal(signal.SIGTERM)
            rest = process.stdout.read()
            assert process.wait(timeout=120) == EXIT_PREEMPTED
        finally:
            process.kill()
    batches = (3 if moment == b"batch\n" else fit_digits.BATCHES) + rest.count(b"batch\n")
    (entry,) = [entry for entry in catalog.list_checkpoints(str(checkpoints)) if not entry.is_leftover]
    assert entry.step == batches
    with start(result, checkpoints, "arrays") as process:
        try:
            rest = process.stdout.read()
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
    assert batches + rest.count(b"batch\n") == 6 * fit_digits.BATCHES
