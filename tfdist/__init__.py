"""Trains Keras 3 models on TensorFlow under any strategy; here are the names that scripts and gin files use."""

import importlib
from typing import Any

__version__ = "0.1.0"
# By their modules. Gin files name them without an import: @tfdist.Supervised()
_NAMES = {
    "checkpoint.policy": ("CheckpointPolicy",),
    "data.formats.array_files": ("ArrayFiles",),
    "data.formats.image_folder": ("ImageFolder",),
    "data.formats.tfds_source": ("load_tfds",),
    "data.formats.tfrecord": ("TFRecordSource",),
    "data.sources.augment": ("Augmentation",),
    "data.sources.columns": ("Columns", "Decoding"),
    "data.sources.indexed": ("IndexedSource",),
    "data.sources.mixture": ("Mixture",),
    "data.sources.user_dataset": ("DatasetFunction",),
    "data.tables.tables": ("Table",),
    "data.text.text": ("TextLines",),
    "data.text.token_windows": ("TokenWindows",),
    "data.transforms.drawn": ("MaskedTokens", "TwoViews"),
    "data.transforms.mapped": ("Mapped",),
    "data.transforms.mixing": ("CutMix", "MixUp"),
    "keras_fit.fit": ("TfdistFit", "fit"),
    "models.convnet": ("build_convnet",),
    "models.mlp": ("build_mlp",),
    "models.resnet": ("build_resnet",),
    "models.text_classifier": ("build_text_classifier",),
    "models.transformer": ("build_transformer_classifier", "build_transformer"),
    "recipes.groups": ("Group", "Grouped", "LayerwiseDecay"),
    "recipes.lora": ("adapted",),
    "recipes.optimizers": ("Lars",),
    "recipes.schedules": (
        *("CosineDecay", "CosineDecayRestarts", "ExponentialDecay", "ForBatch", "InverseSquareRoot"),
        *("InverseTimeDecay", "PiecewiseConstantDecay", "PolynomialDecay", "Warmup", "WarmupStableDecay"),
    ),
    "strategies.auto": ("choose_strategy",),
    "strategies.horovod": ("Horovod",),
    "strategies.mirrored": ("Mirrored",),
    "strategies.multi_worker": ("MultiWorker",),
    "strategies.one_device": ("OneDevice",),
    "strategies.pipelined": ("Pipelined",),
    "strategies.tpu": ("TPU",),
    "tasks.adversarial": ("Adversarial",),
    "tasks.contrastive": ("Contrastive",),
    "tasks.distillation": ("Distillation",),
    "tasks.language": ("LanguageModel", "Perplexity"),
    "tasks.multi_task": ("UncertaintyWeighted",),
    "tasks.supervised": ("Supervised",),
    "telemetry.sinks.mlflow": ("MLflow",),
    "telemetry.sinks.opentelemetry": ("OpenTelemetry",),
    "telemetry.sinks.prometheus": ("Prometheus",),
    "telemetry.sinks.wandb": ("Wandb",),
    "training.recovery.origins": ("StartFrom",),
    "training.recovery.rollback": ("Rollback",),
    "training.run.eval_sets": ("EvalSet",),
    "tuning.search.search": ("AshaStopping", "Bayesian", "Grid", "Hyperband", "MedianStopping", "Random"),
    "tuning.search.space": ("boolean", "choice", "integer", "log_uniform", "reverse_log_uniform", "uniform"),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, as it brings Keras and TensorFlow with it; see PEP 562."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
