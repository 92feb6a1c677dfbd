"""One `keras.Model.fit` with its checkpoints: when to save, what, and how to put it back.

Invariant: a state is taken between two batches or two epochs, when every callback is done with what ended and none
has begun what follows. `keras_callback.BackupAndRestore` makes one for each `fit`.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint import catalog, restore
from tfdist.checkpoint.callback_state import Baseline
from tfdist.checkpoint.fit.keras_fit import Place, RunningFit
from tfdist.checkpoint.policy import CheckpointPolicy
from tfdist.checkpoint.preemption import Preemption
from tfdist.checkpoint.state import State
from tfdist.checkpoint.write.manager import CheckpointManager
from tfdist.errors import EXIT_PREEMPTED, UserError
from tfdist.storage import files

MAKER = "tfdist.BackupAndRestore"
KERAS_FILE = "latest.weights.h5"  # what Keras's own callback leaves in its directory


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `BackupAndRestore`."""

    backup_dir: str
    save_freq: str | int
    double_checkpoint: bool
    delete_checkpoint: bool

    @property
    def every_batches(self) -> int | None:
        return None if self.save_freq == "epoch" or not self.save_freq else int(self.save_freq)


class FitSession:
    """The checkpoints of the `fit` that is calling `callback`; `begin` first."""

    def __init__(self, callback: keras.callbacks.Callback, settings: Settings) -> None:
        self._callback = callback
        self._settings = settings
        self._model = callback.model
        self._fit = RunningFit(callback)
        self._say = _EventSink()
        self._preemption = _FitPreemption(self._fit, self._say)
        self._others: list[keras.callbacks.Callback] = []
        self._baseline: Baseline | None = None
        self._restored = _newest(settings.backup_dir, self._say)
        self._epoch = 0
        self._steps_before = 0 if self._restored is None else self._restored.step  # batches of earlier processes
        self._saved = 0  # as `_fit.trained` counts
        self._metrics_of_epoch: dict[str, Any] | None = None  # while an evaluation uses their variables
        self._manager = CheckpointManager(
            settings.backup_dir,
            CheckpointPolicy(keep_last=2 if settings.double_checkpoint else 1, on_error="stop"),
            identity={"made_by": MAKER, "keras": keras.__version__, "tensorflow": tf.__version__},
            tell=self._say,
        )

    def begin(self) -> None:
        """Restores what there is, and takes its places among the callbacks."""
        self._take_places()
        if self._restored is not None:
            self._resume(self._restored)
        self._preemption.__enter__()

    def _take_places(self) -> None:
        """The list is replaced and not changed, since Keras is going through it."""
        container = self._fit.callback_list
        self._others = [
            each for each in container.callbacks if each is not self._callback and not isinstance(each, _First)
        ]
        first = _First(self)
        first.set_model(self._model)
        container.callbacks = [first, *self._others, self._callback]

    def _resume(self, state: State) -> None:
        place, finished = Place(**state.values["place"]), state.values["finished"]
        self._restore_variables(state)
        if finished:
            place = dataclasses.replace(place, epoch=self._callback.params["epochs"], batch=0)
            where = "at the end of a training that was stopped early"
        else:
            where = f"with batch {place.batch + 1:,} of epoch {place.epoch + 1}"
        self._fit.resume_at(place, self._restore_metrics)
        self._say.text(
            f"continuing {where}, from the checkpoint of batch {state.step:,} in {self._settings.backup_dir}"
        )

    def _restore_variables(self, state: State) -> None:
        optimizer = self._model.optimizer
        with self._model.distribute_strategy.scope():
            if optimizer is not None and not optimizer.built:
                optimizer.build(self._model.trainable_variables)
            _assign(_lasting_variables(self._model), state.tensors)

    def _restore_metrics(self, batch: Any) -> None:
        assert self._restored is not None
        self._fit.build_metrics(batch)
        with self._model.distribute_strategy.scope():
            _assign(_metric_variables(self._model), self._restored.tensors)
        self._restored = None

    def _restore_callbacks(self) -> None:
        """Once all of them had `on_train_begin`, where they set what they begin with."""
        if self._baseline is not None:
            return
        self._baseline = Baseline(self._others)
        if self._restored is not None:
            gone = self._baseline.restore(self._restored.values["callbacks"], self._restored.tensors)
            if gone:
                self._say.text(
                    f"warning: the checkpoint has the state of callbacks that are not here: {', '.join(gone)}"
                )

    # What `_First` calls, before any other callback

    def epoch_begins(self, epoch: int) -> None:
        self._epoch = epoch
        if self._baseline is None:
            self._fit.forget_initial_epoch()
            self._restore_callbacks()
            if self._restored is not None:  # again: a callback may have set a learning rate, say, in `on_train_begin`
                self._restore_variables(self._restored)
                if not self._restored.values["place"]["batch"]:
                    self._restored = None

    def batch_begins(self, batch: int) -> None:
        """All callbacks are done with the batches before `batch`."""
        self._metrics_of_epoch = None
        self._save_if_due(self._fit.place_before_batch(self._epoch, batch))

    def evaluation_begins(self) -> None:
        """The batches of the epoch are done, and Keras is about to reset the metrics."""
        self._metrics_of_epoch = self._metric_values()
        self._save_if_due(self._fit.place_after_batches(self._epoch))

    def evaluation_goes_on(self) -> None:
        if self._preemption.reason is not None and self._metrics_of_epoch is not None:
            self._save_if_due(self._fit.place_after_batches(self._epoch))

    def train_ends(self) -> None:
        self._fit.forget_initial_epoch()  # here when no epoch was left
        self._restore_callbacks()

    # What the callback calls, after all others

    def epoch_ends(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self._metrics_of_epoch = None
        is_last = self._model.stop_training or epoch + 1 >= self._callback.params["epochs"]
        self._save_if_due(self._fit.place_after_epoch(epoch), logs, may_leave=not is_last)

    def end(self) -> None:
        """Leaves no checkpoint behind, if that was asked for."""
        self._preemption.__exit__(None, None, None)
        self._manager.close()
        if self._settings.delete_checkpoint:
            for entry in catalog.list_checkpoints(self._settings.backup_dir):
                catalog.remove(entry.path)
            files.remove_tree(self._settings.backup_dir)

    def abandon(self) -> None:
        """After a `fit` that raised."""
        self._preemption.__exit__(None, None, None)
        self._manager.close()

    def _save_if_due(self, place: Place, logs: Mapping[str, Any] | None = None, *, may_leave: bool = True) -> None:
        self._manager.check()
        leaving = self._preemption.reason is not None and may_leave
        every = self._settings.every_batches
        unsaved = self._fit.trained - self._saved
        due = unsaved >= every if every is not None else logs is not None and self._settings.save_freq == "epoch"
        if unsaved and (due or leaving):
            self._save(place, logs or {})
        if leaving:
            self._leave()

    def _save(self, place: Place, logs: Mapping[str, Any]) -> None:
        assert self._baseline is not None
        callback_values, arrays = self._baseline.changes()
        tensors = _tensors(_lasting_variables(self._model))
        if place.batch:
            tensors |= self._metric_values() if self._metrics_of_epoch is None else self._metrics_of_epoch
        values = {
            "place": dataclasses.asdict(place),
            "callbacks": callback_values,
            "finished": any(getattr(each, "stopped_epoch", 0) for each in self._others),  # an EarlyStopping
        }
        metrics = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        self._manager.save(State(self._steps_before + self._fit.trained, tensors | arrays, values), metrics=metrics)
        self._saved = self._fit.trained

    def _metric_values(self) -> dict[str, np.ndarray]:
        return {name: np.array(each) for name, each in _tensors(_metric_variables(self._model)).items()}

    def _leave(self) -> NoReturn:
        self._manager.close()
        self._preemption.__exit__(None, None, None)
        batches = self._steps_before + self._saved
        self._say.text(
            f"leaving, as {self._preemption.reason}. The {batches:,} batches trained so far are backed up in "
            f"{self._settings.backup_dir}: the same `fit` continues there."
        )
        raise SystemExit(EXIT_PREEMPTED)


class _First(keras.callbacks.Callback):
    """Stands before all other callbacks, so that it comes between what has ended and what begins."""

    def __init__(self, session: FitSession) -> None:
        super().__init__()
        self._session = session

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._session.epoch_begins(epoch)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._session.batch_begins(batch)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._session.evaluation_begins()

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._session.evaluation_goes_on()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._session.train_ends()


class _FitPreemption(Preemption):
    """Signals count while `fit` runs; one that comes after `fit` raised does what it did before."""

    def __init__(self, fit: RunningFit, say: _EventSink) -> None:
        super().__init__(tell=say.text)
        self._fit = fit

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._fit.is_running(frame):
            super()._on_signal(number, frame)
        else:
            self.__exit__(None, None, None)
            signal.raise_signal(number)


class _EventSink:
    """Says on standard error what a user of `fit` should know."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def info(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        pass

    def warning(self, event: str, *, step: int | None = None, message: str | None = None, **details: object) -> None:
        if event not in self._told or event != "checkpoint_waited":  # which may come with every batch
            self.text(f"warning: {message or event}")
        self._told.add(event)

    def text(self, text: str) -> None:
        sys.stderr.write(f"BackupAndRestore: {text}\n")
        sys.stderr.flush()


def _newest(backup_dir: str, say: _EventSink) -> State | None:
    state = restore.newest(backup_dir, tell=say)
    if state is None:
        if KERAS_FILE in files.list_names(backup_dir):
            say.text(f"warning: {backup_dir} has a checkpoint of Keras's own callback, which is not read")
        return None
    if state.manifest is None or state.manifest.identity.get("made_by") != MAKER:
        raise UserError(
            f"The checkpoints in {backup_dir!r} were not made by {MAKER}. Give it a directory of its own, or "
            "continue the run they belong to with tfdist.main."
        )
    return state


def _lasting_variables(model: keras.Model) -> dict[str, Any]:
    """Keras's variables that outlast an epoch, the states of seed generators among them, by where they stand.

    Their own names may count the layers that a process made before.
    """
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    named = {f"model/{index}": each for index, each in enumerate(model.variables)}
    return named | {f"optimizer/{index}": each for index, each in enumerate(optimizer)}


def _metric_variables(model: keras.Model) -> dict[str, Any]:
    return {f"metrics/{index}": each for index, each in enumerate(model.metrics_variables)}


def _replicas(name: str, variable: Any) -> Sequence[tf.Variable]:
    """The variables of the replicas, where each may have a value of its own; else none.

    That is so for sums that are brought together when they are read, and for moving statistics, which Keras does not
    bring together at all.
    """
    values = getattr(variable.value, "values", ())
    return () if variable.trainable or name.startswith("optimizer/") or len(values) < 2 else values


def _tensors(variables: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint has of Keras's variables: of some, both what is read of them and what each replica has."""
    tensors: dict[str, Any] = {}
    for name, variable in variables.items():
        replicas = _replicas(name, variable)
        tensors[name] = np.array(variable.numpy()) if replicas else variable.value
        tensors |= {f"replica-{index}/{name}": each for index, each in enumerate(replicas)}
    return tensors


def _assign(variables: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Gives variables their values; raises UserError with the differences when the checkpoint is of another model."""
    groups = {name.partition("/")[0] for name in variables}
    saved = {name: array for name, array in tensors.items() if name.partition("/")[0] in groups}
    wanted = {name: (tuple(each.shape), each.dtype) for name, each in variables.items()}
    for name, array in restore.match(saved, wanted, partial=False).items():
        variables[name].assign(array)
        replicas = _replicas(name, variables[name])
        own = [tensors.get(f"replica-{index}/{name}") for index in range(len(replicas) + 1)]
        if own[-1] is None and all(each is not None for each in own[:-1]):  # as many replicas as there were
            for replica, value in zip(replicas, own, strict=False):
                replica.assign(value)
