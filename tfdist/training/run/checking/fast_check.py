"""Every part of a training on two batches, so that what would fail after hours fails at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdist.data.sources.as_source import as_source
from tfdist.data.sources.source import Order, Reader, Source
from tfdist.data.sources.user_dataset import StreamSource
from tfdist.data.transforms.mapped import Mapped
from tfdist.storage import files
from tfdist.training.loop.backup import is_backup
from tfdist.training.run.request import Request
from tfdist.training.run.settings import TrainSettings

STEPS = 2


class FirstExamples(Mapped):
    """The first examples of a source alone.

    Args:
      source: whose.
      count: how many.
    """

    def __init__(self, source: Source, count: int) -> None:
        super().__init__(source)
        self.num_examples = min(count, source.num_examples)

    def changed_structure(self, structure: Any) -> Any:
        return structure

    def changed_reader(self, read: Reader, order: Order) -> Reader:
        return read


def shortened(settings: TrainSettings, request: Request) -> tuple[TrainSettings, Request]:
    """The same training of two steps, with an evaluation of two batches, in a directory of its own below the run's."""
    evaluated = settings.eval_batch_size or settings.global_batch_size
    short = dataclasses.replace(
        settings,
        fast_check=False,
        train_data=_few(settings.train_data, STEPS * settings.global_batch_size),
        eval_data=None if settings.eval_data is None else _few(settings.eval_data, STEPS * evaluated),
        epochs=None,
        steps=STEPS,
        steps_per_epoch=STEPS,
        eval_every=1,
        stop_after_epochs=None,
        callbacks=[callback for callback in settings.callbacks if not is_backup(callback)],
        sinks=(),
    )
    run_dir = files.join(request.run_dir, "fast_check")
    return short, dataclasses.replace(request, run_dir=run_dir, profile=None, begins_empty=True)


def _few(data: Callable[[], Any], count: int) -> Callable[[], Any]:
    def few() -> Any:
        source = as_source(data(), data)
        return source if isinstance(source, StreamSource) else FirstExamples(source, count)

    return few
