"""What the cases are made of: values, parts of experiments, and a user's module."""

from __future__ import annotations

MODULE = """
import keras
import numpy as np

def images(n=24):
    return np.zeros((n, 8, 8, 1), np.float32), np.arange(n) % 10

def rows(n=24):
    return np.zeros((n, 4), np.float32), np.zeros(n, np.float32)

def named(n=24):
    return {"a": np.zeros((n, 4), np.float32)}, np.zeros(n, np.float32)

def nothing():
    return None

def none_at_all():
    return np.zeros((0, 8, 8, 1), np.float32), np.zeros(0, np.int64)

def words(n=24):
    return np.full((n, 8, 8, 1), "a"), np.full(n, "b")

def holes(n=24):
    return np.full((n, 8, 8, 1), np.nan, np.float32), np.zeros(n, np.int64)

def uneven():
    return np.zeros((5, 8, 8, 1), np.float32), np.zeros(4)

def scalar():
    return 3

def raises():
    raise RuntimeError("own words")

def exits():
    raise SystemExit(3)

def flat(units=10):
    x = keras.Input((8, 8, 1))
    return keras.Model(x, keras.layers.Dense(units)(keras.layers.Flatten()(x)))

def compiled():
    model = flat()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model

def two_outputs():
    x = keras.Input((8, 8, 1))
    y = keras.layers.Flatten()(x)
    return keras.Model(x, {"a": keras.layers.Dense(10)(y), "b": keras.layers.Dense(1)(y)})

def frozen():
    model = flat()
    model.trainable = False
    return model

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(10)

    def call(self, x):
        return self.dense(keras.ops.reshape(x, (-1, 64)))

def loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

def mean_loss(y_true, y_pred):
    return keras.ops.mean(loss(y_true, y_pred))

def loss_of_three(a, b, c):
    return a

class Watcher(keras.callbacks.Callback):
    pass

class Raises(keras.callbacks.Callback):
    def set_params(self, params):
        raise RuntimeError("own words")

NUMBER = 3
"""

IMPORTS = (
    "import keras",
    "import mine",
    "from tfdist.tasks import supervised",
    "from tfdist.strategies import one_device",
    "from tfdist.strategies import mirrored",
    "from tfdist.strategies import multi_worker",
    "from tfdist.checkpoint import policy",
    "from tfdist.tuning.search import space",
    "from tfdist.tuning.search import search",
    "from tfdist.data.sources import mixture",
    "from tfdist.data.sources import user_dataset",
)

VALUES = (
    *("None", "True", "False", "0", "1", "2", "-1", "7", "2.5", "-0.0", "1e999", "-1e999", "1e-9", "3j", "65537"),
    *("2147483648", "9223372036854775808", "1" + "0" * 30, "''", "' '", "'a'", "'auto'", "'3'", "'val_loss'", "b'a'"),
    *("'a\\0b'", "'/'", "'gs://'", "'" + "a" * 400 + "'", "'\\n'", "'ä'", "[]", "()", "{}", "[None]", "[1, 'a']"),
    *("(1,)", "{'a': 1}", "{1: 2}", "{None: None}", "[[]]", "[[[[1]]]]", "@keras.optimizers.SGD", "@mine.images"),
    *("@mine.images()", "@mine.flat", "@mine.raises", "@mine.raises()", "@mine.exits()", "@mine.Own", "@mine.loss"),
    *("@mine.Watcher()", "[@mine.Watcher()]", "[@mine.Watcher]", "[@keras.callbacks.TerminateOnNaN()]", "%MODEL"),
    *("%gin.REQUIRED", "@keras.losses.MeanSquaredError()", "@keras.losses.MeanSquaredError"),
    *("@supervised.Supervised()", "@supervised.Supervised(loss=@mine.loss)"),
    *("@keras.optimizers.schedules.CosineDecay()", "@one_device.OneDevice()", "@policy.CheckpointPolicy()"),
    *("@policy.CheckpointPolicy(keep_last=0)", "@train", "@train()", "@mine.NUMBER", "@mine"),
    *("@space.choice(values=[1, 2])", "@gin.singleton()", "@mirrored.Mirrored(num_cpu_devices=-1)", "@scope/mine.rows"),
)
SMALL_VALUES = tuple(v for v in VALUES if not v[:4].isdigit())
SETTINGS = (
    "keras.optimizers.Adam.learning_rate",
    "keras.optimizers.Adam.global_clipnorm",
    "keras.optimizers.Adam.name",
    "keras.optimizers.schedules.CosineDecay.decay_steps",
    "convnet.build_convnet.filters",
    "convnet.build_convnet.input_shape",
    "convnet.build_convnet.num_classes",
    "train/sklearn_sets.load_digits.split",
    "supervised.Supervised.loss",
    "supervised.Supervised.metrics",
    "supervised.Supervised.loss_weights",
    "policy.CheckpointPolicy.every_steps",
    "policy.CheckpointPolicy.every_seconds",
    "policy.CheckpointPolicy.keep_best",
    "evaluate.weights",
    "evaluate.global_batch_size",
    "evaluate.data",
    "one_device.OneDevice.device",
    "tune.space",
    "tune.objective",
    "tune.max_trials",
    "mirrored.Mirrored.num_cpu_devices",
    "EPOCHS",
)
COSTLY = {"convnet.build_convnet.filters", "convnet.build_convnet.input_shape", "convnet.build_convnet.num_classes"}
NEEDED = {
    "policy": ("train.checkpoint = @policy.CheckpointPolicy()",),
    "one_device": ("train.strategy = @one_device.OneDevice()",),
    "mirrored": ("train.strategy = @mirrored.Mirrored()",),
}

PARTS = {
    "model": (
        *("@mine.flat", "@mine.flat", "@mine.Own", "@mine.compiled", "@mine.two_outputs", "@mine.frozen"),
        "@mine.images",
    ),
    "train_data": (
        *("@mine.images", "@mine.images", "@mine.rows", "@mine.named", "@mine.nothing", "@mine.none_at_all"),
        *("@mine.words", "@mine.holes", "@mine.uneven", "@mine.scalar", "@mine.raises", "@mine.exits"),
    ),
    "strategy": ("@one_device.OneDevice()", "@mirrored.Mirrored(num_cpu_devices=2)"),
    "global_batch_size": ("8", "8", "24", "1", "100"),
    "epochs": ("1", "2", "None"),
    "optimizer": ("@keras.optimizers.SGD", "@keras.optimizers.Adam", "@mine.flat", "@mine.loss", "'sgd'"),
    "task": (
        *("@supervised.Supervised(loss=@mine.loss)", "@supervised.Supervised(loss=@mine.mean_loss)"),
        *("@supervised.Supervised(loss=@mine.loss_of_three)", "@supervised.Supervised()", "@supervised.Supervised"),
    ),
}
OPTIONAL_PARTS = {
    "eval_data": ("@mine.images", "@mine.rows", "@mine.raises", "@mine.none_at_all", "None"),
    "callbacks": ("[@mine.Watcher()]", "[@mine.Raises()]", "[@keras.callbacks.EarlyStopping()]", "[]", "[3]"),
    "num_microbatches": ("2", "3", "8"),
    "precision": ("'bfloat16'", "'float16'", "'float32'"),
    "steps": ("1", "5"),
    "start_from": ("'mine.py'", "'.'", "'run'"),
    "checkpoint": ("'off'", "'auto'", "@policy.CheckpointPolicy(every_steps=1)"),
    "must_report": ("'loss'", "'val_loss'", "'accuracy'"),
    "hyperparameters": ("{}", "{'a': 1}"),
}


def params(*lines: str) -> tuple[str, ...]:
    """Each line as a --gin_param."""
    return tuple(f"--gin_param={line}" for line in lines if line.strip())
