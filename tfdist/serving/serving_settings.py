"""The settings of predictions and exports: what the gin roots `predict` and `export` take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from tfdist.serving.prediction_files import WRITERS
from tfdist.settings.checks import COUNT, FUNCTION, Check, one_of, or_none
from tfdist.settings.declaration import setting
from tfdist.strategies import auto
from tfdist.strategies.strategy import Strategy
from tfdist.training.run.eval_sets import EVAL_DATA
from tfdist.training.run.train_settings import COMPUTES, STRATEGY, EvalData, TrainedSettings

DATA = dataclasses.replace(EVAL_DATA, wanted=FUNCTION.wanted)  # a training's, which may be several sets
EXPORTS = ("litert", "saved_model", "onnx")
FORMATS = Check(
    "a list of 'saved_model', 'litert' and 'onnx'",
    lambda value: isinstance(value, (list, tuple)) and len(value) > 0 and all(each in EXPORTS for each in value),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSettings(TrainedSettings):
    """The predictions of a trained model for examples."""

    NAME: ClassVar[str] = "predict"

    data: EvalData = setting("examples, with or without targets; of several sets the first", DATA)
    strategy: Strategy = setting(COMPUTES, STRATEGY, make_default=auto.choose)
    format: str = setting("of the files", one_of(*WRITERS), "jsonl")
    examples_per_file: int = setting("about; a file holds whole steps", COUNT, 65_536, unit="examples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings(TrainedSettings):
    """A trained model in the forms in which other programs run it."""

    NAME: ClassVar[str] = "export"

    data: EvalData = setting("examples to compare every export with the model on", DATA)
    formats: Sequence[str] = setting("what to write", FORMATS, ("saved_model",))
    quantize: str | None = setting(
        "quantizes the weights of dense layers and embeddings, for LiteRT all weights", or_none(one_of("int8")), None
    )
    num_examples: int = setting("to compare on", COUNT, 64, unit="examples")
