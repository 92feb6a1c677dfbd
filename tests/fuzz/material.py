"""What the cases are made of: names, values, parts of experiments, files, flags, variables; and a user's module."""

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

# Where NAME stands in a command; FILE is a whole argument.
NAMES = (
    ("--gin_param=train.NAME = 3", "epochs"),
    ("--gin_param=train.NAME = 3", "global_batch_size"),
    ("--gin_param=train.NAME = None", "log_every_steps"),
    ("--gin_param=train.NAME = None", "eval_data"),
    ("--gin_param=evaluate.NAME = 'last'", "weights"),
    ("--gin_param=tune.NAME = 3", "max_trials"),
    ("--gin_param=NAME.epochs = 3", "train"),
    ("--gin_param=train.model = %NAME", "MODEL"),
    ("--gin_param=NAME = None", "TASK"),
    ("--gin_param=NAME = None", "STRATEGY"),
    ("--gin_param=train.optimizer = @keras.optimizers.NAME", "SGD"),
    ("--gin_param=train.optimizer = @keras.NAME.SGD", "optimizers"),
    ("--gin_param=train.optimizer = @NAME.optimizers.SGD", "keras"),
    ("--gin_param=keras.optimizers.Adam.NAME = 0.1", "beta_1"),
    ("--gin_param=keras.optimizers.Adam.NAME = 1.0", "clipnorm"),
    ("--gin_param=train/sklearn_sets.load_digits.NAME = 'train'", "split"),
    ("--gin_param=import NAME", "numpy"),
    ("--gin_param=from tfdist.models import NAME", "convnet"),
    ("--gin_param=from tfdist.NAME import mlp", "models"),
    ("--gin_param=train.precision = 'NAME'", "bfloat16"),
    ("--gin_param=train.xla = 'NAME'", "auto"),
    ("--gin_param=train.checkpoint = 'NAME'", "auto"),
    ("--gin_param=train.callbacks = [@keras.callbacks.NAME()]", "EarlyStopping"),
    ("--gin_param=train.callbacks = [@keras.callbacks.EarlyStopping(NAME='val_loss')]", "monitor"),
    ("--gin_param=train.callbacks = [@keras.callbacks.EarlyStopping(monitor='NAME')]", "val_accuracy"),
    ("--gin_param=train.must_report = 'NAME'", "val_accuracy"),
    ("--gin_param=train.start_from = 'NAME'", "mine"),
    ("--gin_param=include 'configs/strategies/NAME.gin'", "mirrored"),
    ("--NAME=run", "run_dir"),
    ("--NAME=train.seed = 1", "gin_param"),
    ("--NAME", "verbose"),
    ("--mode=NAME", "validate"),
    ("--gin_file=configs/experiments/FILE.gin", "digits"),
    ("--gin_file=configs/FILE/digits.gin", "experiments"),
)
# What a misspelling may come to and be right.
KNOWN = frozenset(
    {name for _, name in NAMES}
    | {"train", "tune", "SGD", "Adam", "mlp", "on", "off", "auto", "loss", "val_loss", "accuracy", "help", "data"}
)

VALUES = (
    *("None", "True", "False", "0", "1", "2", "-1", "7", "2.5", "-0.0", "1e999", "-1e999", "1e-9", "3j", "65537"),
    *("2147483648", "9223372036854775808", "1" + "0" * 30, "''", "' '", "'a'", "'auto'", "'3'", "'val_loss'"),
    *(
        "b'a'",
        "'a\\0b'",
        "'/'",
        "'gs://'",
        "'" + "a" * 400 + "'",
        "'\\n'",
        "'ä'",
        "[]",
        "()",
        "{}",
        "[None]",
        "[1, 'a']",
    ),
    *("(1,)", "{'a': 1}", "{1: 2}", "{None: None}", "[[]]", "[[[[1]]]]", "@keras.optimizers.SGD", "@mine.images"),
    *("@mine.images()", "@mine.flat", "@mine.raises", "@mine.raises()", "@mine.exits()", "@mine.Own", "@mine.loss"),
    *("@mine.Watcher()", "[@mine.Watcher()]", "[@mine.Watcher]", "[@keras.callbacks.TerminateOnNaN()]", "%MODEL"),
    *(
        "%gin.REQUIRED",
        "@keras.losses.MeanSquaredError()",
        "@keras.losses.MeanSquaredError",
        "@supervised.Supervised()",
    ),
    *(
        "@supervised.Supervised(loss=@mine.loss)",
        "@keras.optimizers.schedules.CosineDecay()",
        "@one_device.OneDevice()",
    ),
    *(
        "@policy.CheckpointPolicy()",
        "@policy.CheckpointPolicy(keep_last=0)",
        "@train",
        "@train()",
        "@mine.NUMBER",
        "@mine",
    ),
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
        "@mine.flat",
        "@mine.flat",
        "@mine.Own",
        "@mine.compiled",
        "@mine.two_outputs",
        "@mine.frozen",
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

STRUCTURES = (
    "train.seed = 1",
    "include 'own.gin'",
    "include 'none.gin'",
    "include 'mine.py'",
    "A = %B\nB = %A\ntrain.seed = %A",
    "A = 3\ntrain.seed = %A",
    "A = 3",
    "a/A = 3\ntrain.seed = %a/A",
    "train.seed = %a/b/c/A",
    "a/train.seed = 3",
    "train:\n  seed = 3\n  epochs = 4",
    "train:\n  seed = 3\n epochs = 4",
    "train:\n",
    "train: seed = 3",
    "import mine\ntrain.model = @mine.flat",
    "import mine\ntrain.model = @a/b/mine.flat\na/mine.flat.units = 10\na/b/mine.flat.units = 10",
    "import mine\ntrain.model = @mine.flat\nb/mine.flat.units = 3",
    "import mine as train\ntrain.seed = 3",
    "import mine as gin",
    "import mine\nimport mine as other\ntrain.model = @other.flat",
    "from mine import flat\ntrain.model = @flat",
    "import mine.flat",
    "import mine; import keras",
    "from __gin__ import other_feature",
    "from __gin__ import dynamic_registration",
    "import mine\ntrain.model = @mine.flat(units=@mine.flat())",
    "import mine\nmine.flat.units = @mine.flat()\ntrain.train_data = @mine.flat",
    "import mine\ntrain.train_data = @mine.images(n=3)",
    "import mine\ntrain.train_data = @mine.images\nmine.images.n = 0",
    "train.seed = 1\ntrain.seed = 2\ntrain.seed = 'a'",
    "train.seed = (1)",
    "train.seed = -(1)",
    "train.options = " + "[" * 300 + "]" * 300,
    "MODEL = 3",
    "MODEL = %gin.REQUIRED",
    "STRATEGY = %MODEL",
    "gin.macro.value = 3",
    "gin.singleton.constructor = 3",
    "# only a comment",
    "",
)

FILE_ARGUMENTS = (
    ("--gin_file=empty.gin",),
    ("--gin_file=text.txt",),
    ("--gin_file=binary.gin",),
    ("--gin_file=marked.gin",),
    ("--gin_file=a_directory.gin",),
    ("--gin_file=missing.gin",),
    ("--gin_file=/dev/null",),
    ("--gin_file=gs://",),
    ("--gin_file=s3://a/b.gin",),
    ("--gin_file=" + "a/" * 300 + "b.gin",),
    ("--run_dir=mine.py", "--mode=train"),
    ("--run_dir=mine.py/below", "--mode=train"),
    ("--run_dir=marker", "--mode=train", "--gin_param=train.steps = 1"),
    ("--run_dir=kinds", "--mode=train", "--gin_param=train.steps = 1"),
    ("--run_dir=other", "--mode=train", "--gin_param=train.steps = 1"),
    ("--run_dir=/proc/nothing", "--mode=train"),
    ("--run_dir=run", "--mode=evaluate"),
    ("--run_dir=nothing", "--mode=evaluate"),
    ("--gin_param=train.start_from = 'mine.py'",),
    ("--gin_param=train.start_from = 'fake.keras'",),
    ("--gin_param=train.start_from = 'fake.weights.h5'",),
    ("--gin_param=train.start_from = 'a_directory.gin'",),
    ("--gin_param=train.start_from = 'missing.keras'",),
    ("--gin_param=train.start_from = '/dev/null'",),
    ("--mode=evaluate", "--run_dir=x", "--gin_param=evaluate.weights = 'fake.keras'"),
    ("--mode=evaluate", "--run_dir=x", "--gin_param=evaluate.weights = 'mine.py'"),
    ("--mode=evaluate", "--run_dir=x", "--gin_param=evaluate.weights = 'last'"),
    ("--mode=evaluate", "--run_dir=x", "--gin_param=evaluate.weights = 'best'"),
    ("--mode=evaluate", "--run_dir=x", "--gin_param=evaluate.weights = 12"),
)

FLAGS = (
    "--help",
    "--verbose",
    "--run_dir=",
    "--run_dir=run",
    "--run_dir",
    "--gin_file",
    "--gin_file=",
    "--gin_param",
    "--gin_param=",
    "--gin_param==",
    "--gin_param=train",
    "--gin_param=train.epochs",
    "--gin_param=train.epochs=3",
    "--gin_param=train.epochs = 3 # three",
    "--mode",
    "--mode=",
    "--mode=Train",
    "--mode=export",
    "--workers=2",
    "--",
    "-v",
    "-",
    "",
    " ",
    "configs/experiments/digits.gin",
    "train.epochs = 3",
    "--gin-file=x.gin",
    "--gin_file configs/experiments/digits.gin",
    "--run_dir=\udcff",
    "--gin_param=train.seed = 1 # \udcff",
)

CLUSTER = {"cluster": {"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}, "task": {"type": "worker", "index": 0}}
ENVIRONMENT = {
    "TF_CONFIG": (
        *("", "{}", "[]", "null", "3", '"a"', "not json", '{"cluster": {}}', '{"task": {}}'),
        *('{"cluster": 3}', "{" * 3000),
        '{"cluster": {"worker": 3}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": [], "index": {}}}',
        '{"cluster": {"worker": [null]}, "task": {"type": "worker", "index": "0"}}',
    ),
    "HOROVOD_RANK": ("", "0", "a", "-1"),
    "HOROVOD_SIZE": ("", "2", "b"),
    "SLURM_PROCID": ("", "0", "x"),
    "SLURM_NTASKS": ("", "2", "x"),
    "KERAS_BACKEND": ("jax", "torch", "numpy", ""),
    "TPU_NAME": ("", "mine"),
    "CUDA_VISIBLE_DEVICES": ("", "-1", "x"),
    "HOME": ("", "/nowhere"),
    "TMPDIR": ("/nowhere",),
    "LANG": ("C", "xx"),
    "COLUMNS": ("1", "a", "0"),
    "STORAGE_EMULATOR_HOST": ("", "x", "http://127.0.0.1:1"),
    "KERASTUNER_TUNER_ID": ("", "chief"),
    "RAY_ADDRESS": ("x",),
}


def params(*lines: str) -> tuple[str, ...]:
    """Each line as a --gin_param."""
    return tuple(f"--gin_param={line}" for line in lines if line.strip())
