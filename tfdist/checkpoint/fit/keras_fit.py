"""The inside of a running `keras.Model.fit`: its callbacks, its place in the data, and how to begin at another place.

Invariant: all that is known here of Keras's private parts (the release is pinned) stands in this file; where Keras is
another, `RunningFit` says so instead of resuming at a wrong batch. `keras_callback.py` makes one for each `fit`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras
from keras.src.trainers.epoch_iterator import EpochIterator

from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a `fit` is in its data.

    Attributes:
      epoch: from 0.
      batch: batches of that epoch that were trained on.
      drawn: batches that the iterator gave which the next batch comes from; more than `batch` where it lasts for
        several epochs, as with `steps_per_epoch`. 0: the next batch comes from a new one.
      iterators: made before that one. tf.data's shuffle gives each another order.
      steps_per_execution: batches a call.
      at_end: a call found no more data behind `batch`. It is not made again: what of a step does not depend on data,
        the next seed for instance, was computed.
    """

    epoch: int
    batch: int
    drawn: int
    iterators: int
    steps_per_execution: int
    at_end: bool = False


class RunningFit:
    """The `fit` that is calling `callback`.

    Attributes:
      callback_list: Keras's container of callbacks.

    Raises:
      UserError: nothing of the kind is calling.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        self.callback_list = _calling_callback_list(callback)
        self._model = callback.model
        self._epoch_iterator = _calling_epoch_iterator()
        self._enumerate = self._epoch_iterator._enumerate_iterator
        self._make_iterator = self._epoch_iterator._get_iterator
        self._epoch_iterator._enumerate_iterator = self._enumerate_and_count
        self._epoch_iterator._get_iterator = self._make_iterator_and_count
        self._iterator: Any = None
        self._iterators_made = 0
        self._iterators_before = 0  # the one in use was made
        self._drawn = 0
        self._done = 0  # of the epoch
        self._under_way = 0  # batches of a call that has begun
        self._at_end = False
        self._trained = 0
        self._resume_at: Place | None = None
        self._before_training: Callable[[Any], None] | None = None

    @property
    def steps_per_execution(self) -> int:
        return int(self._epoch_iterator.steps_per_execution)

    @property
    def trained(self) -> int:
        """Batches that were trained on, of all epochs of this `fit`."""
        return self._trained + (self._under_way if self._model.stop_training else 0)

    def place_before_batch(self, epoch: int, batch: int) -> Place:
        """Between two calls of an epoch, the next of which begins with `batch`."""
        return Place(epoch, batch, self._drawn, self._iterators_before, self.steps_per_execution)

    def place_after_batches(self, epoch: int) -> Place:
        """Behind the last batch of an epoch, before its evaluation."""
        stopped, size = self._model.stop_training, self._under_way
        last = size if stopped else 0  # else the call under way found no more data
        return Place(
            epoch,
            self._done + last,
            self._drawn + last,
            self._iterators_before,
            self.steps_per_execution,
            at_end=self._at_end or (bool(size) and not stopped),
        )

    def place_after_epoch(self, epoch: int) -> Place:
        """At the end of `epoch`: the beginning of the next."""
        lasts = self._epoch_iterator.steps_per_epoch is not None
        upcoming = self._epoch_iterator._current_iterator if lasts else None
        drawn = self._drawn if upcoming is not None and upcoming is self._iterator else 0
        made_before = self._iterators_made - (upcoming is not None)
        return Place(epoch + 1, 0, drawn, made_before, self.steps_per_execution)

    def resume_at(self, place: Place, before_training: Callable[[Any], None]) -> None:
        """Has the first epoch begin at `place`; its batches before that are drawn and not trained on.

        Args:
          place: where.
          before_training: called with one batch of the data after the others were drawn, only when `place.batch` is
            not 0. Keras has reset its metrics by then.
        """
        if place.batch % self.steps_per_execution:
            raise UserError(
                f"The checkpoint was made after batch {place.batch} of an epoch, with steps_per_execution="
                f"{place.steps_per_execution}. Received: steps_per_execution={self.steps_per_execution}, which does "
                "not lead to that batch; compile the model with the same value."
            )
        for _ in range(place.iterators):
            iter(self._epoch_iterator._get_iterator())
        self._old_initial_epoch = self._model._initial_epoch
        self._model._initial_epoch = place.epoch
        self._resume_at = place
        self._before_training = before_training
        if place.batch:
            self._keep_metrics_of_empty_epoch()

    def forget_initial_epoch(self) -> None:
        """Keras holds on to it: the model's next `fit` would begin there, too."""
        if self._resume_at is not None:
            self._model._initial_epoch = self._old_initial_epoch

    def build_metrics(self, batch: Any) -> None:
        """Makes the variables of compiled metrics, which Keras otherwise does while it traces the first step."""
        metrics = self._model._compile_metrics
        if metrics is not None and not metrics.built:
            self._model._symbolic_build(data_batch=batch)

    def is_running(self, frame: FrameType | None) -> bool:
        """Whether `frame` was called by this `fit`, perhaps through others."""
        return any(each.f_locals.get("epoch_iterator") is self._epoch_iterator for each in _fits(frame))

    def _keep_metrics_of_empty_epoch(self) -> None:
        """When all batches of the epoch were done before, no call gives `fit` the epoch's logs."""
        model, as_it_was = self._model, self._model._get_metrics_result_or_logs

        def metrics_or_logs(logs: Any) -> Any:
            vars(model).pop("_get_metrics_result_or_logs", None)
            return as_it_was(logs or model.get_metrics_result())

        vars(model)["_get_metrics_result_or_logs"] = metrics_or_logs

    def _make_iterator_and_count(self) -> Any:
        self._iterators_made += 1
        return self._make_iterator()

    def _enumerate_and_count(self) -> Iterator[tuple[int, int, Any]]:
        place, self._resume_at = self._resume_at, None
        self._done = self._under_way = 0
        self._at_end = False
        for begin, end, iterator in self._enumerate():
            if iterator is not self._iterator:
                self._iterator, self._iterators_before, self._drawn = iterator, self._iterators_made - 1, 0
            if place is not None and begin == 0:
                self._draw_earlier_epochs(iterator, place)
            self._under_way = end - begin + 1
            if place is not None and begin < place.batch:
                batch = self._draw(iterator, self._under_way, place)
                if end + 1 >= place.batch and self._before_training is not None:
                    self._before_training(batch)
            elif place is not None and place.at_end:
                self._at_end, self._under_way = True, 0
                self._epoch_iterator.data_adapter.on_epoch_end()
                return
            else:
                yield begin, end, iterator
                self._drawn += self._under_way
                self._trained += self._under_way
            self._done += self._under_way
            self._under_way = 0

    def _draw_earlier_epochs(self, iterator: Any, place: Place) -> None:
        earlier = max(place.drawn - place.batch, 0)
        for _ in range(earlier):
            self._draw(iterator, 1, place)
        self._epoch_iterator._steps_seen += earlier

    def _draw(self, iterator: Any, size: int, place: Place) -> Any:
        """Takes up to `size` batches, of which the last call of an epoch may find fewer; the last one of them."""
        batch = None
        for _ in range(size):
            try:
                batch = next(iterator)
            except StopIteration:
                if batch is None:
                    raise UserError(
                        f"The checkpoint was made after batch {place.batch} of epoch {place.epoch + 1} "
                        f"({place.drawn} batches of the data), and the data is shorter now. Give `fit` the same data, "
                        "or remove the checkpoint."
                    ) from None
                break
        self._drawn += size
        return batch


def _calling_callback_list(callback: keras.callbacks.Callback) -> keras.callbacks.CallbackList:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, keras.callbacks.CallbackList) and any(each is callback for each in found.callbacks):
            return found
        frame = frame.f_back
    raise _not_in_fit()


def _calling_epoch_iterator() -> EpochIterator:
    for frame in _fits(sys._getframe(1)):
        found = frame.f_locals.get("epoch_iterator")
        if isinstance(found, EpochIterator):
            return found
    raise _not_in_fit()


def _fits(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if frame.f_code.co_name == "fit":
            yield frame
        frame = frame.f_back


def _not_in_fit() -> UserError:
    return UserError(
        "tfdist.BackupAndRestore works in the callbacks of keras.Model.fit on TensorFlow. Received: a call from "
        f"elsewhere, or from the `fit` of a Keras it does not know ({keras.__version__}). In a run of tfdist.main, set "
        "train.checkpoint instead."
    )
