"""The command as a user types it: help, every kind of wrong input, validate, train, evaluate.

What is wrong is typed into `main` inside this process where that shows the same as a process of its own would; the
rest, and all that connects a strategy of several replicas, runs `python -m tfdist.main`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import keras
import pytest
import tensorflow as tf
from equivalence.runs import assert_same_bits, load_weights
from support import REPOSITORY, Finished, run_command, run_python

from tfdist import main as command
from tfdist.commands import verbs
from tfdist.errors import EXIT_NO_READER, EXIT_STORE_UNAVAILABLE, StoreUnavailableError
from tfdist.storage import files
from tfdist.telemetry.result import RunResult

CONFIGS = REPOSITORY / "configs"
DIGITS = "--gin_file=configs/experiments/digits.gin"
EXPERIMENTS = sorted(f.relative_to(REPOSITORY) for f in CONFIGS.glob("experiments/*.gin"))
REFERENCES = sorted(f.relative_to(REPOSITORY) for f in CONFIGS.glob("reference/*.gin"))
STRATEGIES = sorted(f.relative_to(REPOSITORY) for f in CONFIGS.glob("strategies/*.gin"))
ABSENT_PEERS = json.dumps(
    {"cluster": {"worker": ["host0.invalid:2222", "host1.invalid:2222"]}, "task": {"type": "worker", "index": 1}}
)
USERS_MODULE = """\
import keras
import numpy as np
import tensorflow as tf

def flat(units):
    x = keras.Input((8, 8, 1))
    return keras.Model(x, keras.layers.Dense(units)(keras.layers.Flatten()(x)))

def model_of_rows():
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(10)(x))

def compiled_model():
    model = flat(10)
    model.compile("sgd", "mse")
    return model

def no_model():
    flat(10)

def model_that_raises():
    return flat("ten")

def loss_that_raises(y_true, y_pred):
    return {"a": 1}["b"]

def data_that_raises():
    return np.load("no/such/file.npy")

def labels_out_of_range():
    return np.zeros((50, 8, 8, 1), np.float32), np.arange(50)

class CallbackThatRaises(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise RuntimeError("the callback's own words")

class ScheduleThatRaises(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        raise RuntimeError("the schedule's own words")

    def get_config(self):
        return {}

def unseen_labels_out_of_range():
    return tf.data.Dataset.from_tensor_slices((np.zeros((50, 8, 8, 1), np.float32), np.array([0] * 49 + [49])))

def data_that_exits():
    raise SystemExit(3)

def text_labels():
    return np.zeros((50, 8, 8, 1), np.float32), np.array(["zero"] * 50)

def text_inputs():
    return np.full((50, 8, 8, 1), "dark"), np.zeros(50, np.int32)

def one_nan():
    x = np.zeros((50, 8, 8, 1), np.float32)
    x[7, 0, 0, 0] = np.nan
    return x, np.zeros(50, np.int32)

def rows_of_four():
    return np.zeros((50, 4), np.float32), np.zeros(50, np.int32)

def infinite_weights():
    return np.zeros((50, 8, 8, 1), np.float32), np.zeros(50, np.int32), np.full(50, np.inf, np.float32)

def dataset(change=lambda x: x):
    given = np.zeros((50, 8, 8, 1), np.float32), np.zeros(50, np.int32)
    return tf.data.Dataset.from_tensor_slices(given).map(lambda x, y: (change(x), y))

def refusing_dataset():
    return dataset(lambda x: tf.debugging.check_numerics(tf.math.log(x), "the logarithm"))

def key_error(x):
    return {}["no such image"]

def raising_dataset():
    return dataset(lambda x: tf.ensure_shape(tf.py_function(key_error, [x], tf.float32), (8, 8, 1)))

def lost_connection():
    def examples():
        raise ConnectionResetError("the server's own words")
        yield
    return tf.data.Dataset.from_generator(examples, output_signature=dataset().element_spec)

def raising_generator():
    examples = (key_error(n) for n in range(50))
    return tf.data.Dataset.from_generator(lambda: examples, output_signature=dataset().element_spec)

def generator_without_shapes():
    return tf.data.Dataset.from_generator(lambda: [], output_types=(tf.float32, tf.int32))

def layer_that_raises():
    chosen = keras.layers.Lambda(lambda x: x if keras.ops.sum(x) > 0 else -x)
    return keras.Sequential([keras.Input((8, 8, 1)), chosen, keras.layers.Flatten(), keras.layers.Dense(10)])

def probabilities():
    return keras.Sequential([flat(10), keras.layers.Softmax()])

def frozen_model():
    model = flat(10)
    model.trainable = False
    return model
"""


@pytest.fixture(autouse=True)
def _users_module(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(USERS_MODULE)
    yield
    sys.modules.pop("mine", None)


def check_refused(answer: Finished, *words: str) -> None:
    """Status 2 and exactly one message, which holds the words; no traceback and no training."""
    assert answer.status == 2, answer
    assert answer.stderr.startswith("error: ") and answer.stderr.count("error: ") == 1, answer.stderr
    assert "Traceback" not in answer.stderr + answer.stdout
    assert not re.search(r"^(training:|epoch |done:)", answer.stdout, re.MULTILINE), answer.stdout
    for word in words:
        assert word in answer.stderr, f"{word!r} is not in: {answer.stderr}"


def param(text: str) -> str:
    return f"--gin_param={text}"


def strategy(name: str) -> str:
    return f"--gin_file=configs/strategies/{name}.gin"


# Help


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("main", ("--gin_file:", "--gin_param:", "--run_dir:", "--mode:", *command.MODES)),
        ("launch", ("--workers: how many",)),
        ("doctor", ("--peer_seconds:", "--largest_mib:")),
    ],
)
def test_help_imports_neither_tensorflow_nor_keras_nor_gin_names_no_file_and_may_be_cut_short(
    tmp_path: Path, module: str, shown: tuple[str, ...]
) -> None:
    for name in ("tensorflow", "keras", "gin", *(["numpy"] if module == "main" else [])):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    told = run_python(["-m", f"tfdist.{module}", "--help"], env=environment).check()
    assert all(text in told.stdout for text in shown) and f"{module}.py" not in told.stdout
    assert not told.stderr
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as unread:
        help_of = [sys.executable, "-m", f"tfdist.{module}", "--help"]
        cut = subprocess.run(help_of, cwd=REPOSITORY, stdout=unread, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (cut.returncode, cut.stderr) == (EXIT_NO_READER, "")


# What is wrong, and what its one message says

WRONG_FLAGS = [
    ([], ["No experiment given", "Write --gin_file=tfdist:experiments/digits.gin"]),
    (["--mode=evaluate"], ["No experiment given", "--run_dir=DIR of a training", "--gin_file=tfdist:"]),
    (
        [DIGITS, "--mode=trian"],
        ["--mode=trian", "predict, export, plan, find_rate, prove, tune, validate", "Did you mean 'train'?"],
    ),
    ([DIGITS, "--mode"], ["Missing value for flag --mode", "--help lists the flags"]),
    ([DIGITS, "--gin_params=train.epochs = 1"], ["'gin_params'", "Did you mean: gin_param ?"]),
    ([DIGITS, "--run-dir=x"], ["'run-dir'", "Did you mean: run_dir ?"]),
    ([DIGITS, "--gin_param=train.epochs", "=", "3"], ["'= 3'", "quotes", "--gin_param='train.epochs = 3'"]),
    ([DIGITS, "--gin_param=train.seed = 1  # \udcff"], ["no text in UTF-8"]),
    (["--gin_file="], ["is empty"]),
    (["--gin_file=nothing.gin"], ["'nothing.gin'", "Looked for it in", " [missing-file]\n"]),
    ([f"--gin_file={CONFIGS}"], ["is a directory"]),
    (["--gin_file=tfdist:../../pyproject.toml"], ["comes with no gin file"]),
]
WRONG_SETTINGS = [
    ("train.epoch = 3", ["train.epoch = 3", "Did you mean 'epochs'? [unknown-setting]\n"]),
    ("train.model = %gin.REQUIRED", ["train.model must be set"]),
    ("train.epochs = None", ["train needs an end", "train.epochs = 10"]),
    ("train.epochs = 0", ["train.epochs is 0", "at least 1", " [wrong-value]\n"]),
    ("train.precision = 'bfloat'", ["train.precision is 'bfloat'", "'float32'", "Did you mean 'bfloat16'"]),
    (
        "train.num_microbatches = 'auto'",
        ["num_microbatches is 'auto'; write a whole ", " Leave it out: train.recovery"],
    ),
    ("train.xla = True", ["train.xla is True", "'auto', 'off', 'pass', 'update', 'on'"]),
    ("train.model = 'convnet'", ["train.model is 'convnet'", "without parentheses"]),
    ("train.eval_data = @keras.losses.Huber()", ["train.eval_data is a Huber", "without arguments"]),
    ("train.model = @convnet.build_convnet()", ["@convnet.build_convnet()", "without parentheses"]),
    ("keras.optimizers.Adam.learning_rate = 'high'", ["keras.optimizers.Adam()", "learning_rate = 'high'"]),
    ("train.train_data = @train/sklearn_sets.load_digits()", ["train.train_data is a tuple", "without parenthes"]),
    ("train/sklearn_sets.load_digits.split = 'tran'", ["'tran'", "Did you mean 'train'?"]),
    ("train.task = @supervised.Supervised", ["train.task is the class Supervised", "with parentheses"]),
    ("train.strategy = 'mirrored'", ["train.strategy is 'mirrored'", "@mirrored.Mirrored()"]),
    ("supervised.Supervised.metrics = ['acuracy']", ["metrics holds 'acuracy'", "Did you mean 'accuracy'"]),
    ("train.callbacks = [@keras.callbacks.BackupAndRestore()]", ["backup_dir"]),
    ("convnet.build_convnet.filters = (8, 8, 8, 8, 8)", ["convnet.build_convnet()", "filters = (8, 8, 8, 8, 8)"]),
    (
        "convnet.build_convnet.input_shape = (4, 4, 1)",
        ["do not fit", "(None, 4, 4, 1)", "float32[None, 8, 8, 1]", "[shape-mismatch]"],
    ),
]
WRONG_STRATEGIES = [
    ("mirrored", "mirrored.Mirrored.num_cpu_devices = -1", ["num_cpu_devices is -1"]),
    (
        "mirrored",
        "mirrored.Mirrored.num_cpu_devices = 0",
        ["GPUs", "finds 0", "num_cpu_devices = 2", " [missing-gpu]\n"],
    ),
    ("mirrored", "mirrored.Mirrored.num_gpus = 2", ["num_gpus is gone", "CUDA_VISIBLE_DEVICES"]),
    ("one_device", "one_device.OneDevice.device = 'GPU:0'", ["'GPU:0'", "finds 0 GPUs"]),
    ("one_device", "one_device.OneDevice.device = 'gpu0'", ["'gpu0'", "'GPU:0'"]),
    ("multi_worker", "multi_worker.MultiWorker.implementation = 'rign'", ["'rign'", "Did you mean 'ring'?"]),
    ("multi_worker", "multi_worker.MultiWorker.bytes_per_pack = -1", ["bytes_per_pack is -1"]),
    (
        "multi_worker",
        "multi_worker.MultiWorker.peer_timeout_seconds = 60",
        ["TF_CONFIG", "tfdist launch", " [cluster-mismatch]\n"],
    ),
    ("horovod", "horovod.Horovod.fusion_threshold_bytes = 1", ["bytes is gone", "HOROVOD_FUSION_THRESHOLD"]),
    ("auto", "auto.choose.mirrored = @mirrored.Mirrored()", ["auto.choose.mirrored", "without parentheses"]),
    ("tpu", "train.epochs = 1", ["No TPU found", "tfdist[tpu]", "TPU.address"]),
]
WRONG_CODE = [
    ("train.model = @mine.model_that_raises", ["mine.model_that_raises() failed", "mine.py:22, in model_that_"]),
    ("train.must_report = [None]", ["train.must_report is [None]", "'val_accuracy'"]),
    ("train.start_from = 'mine.py'", ["train.start_from = 'mine.py' is no weights", ".keras"]),
    ("train.start_from = 'a\\0b'", ["no path"]),
    ("train.model = @mine.model_of_rows", ["do not fit the data", "(None, 4)", "float32[None, 8, 8, 1]"]),
    ("train.model = @mine.compiled_model", ["mine.py:13", "compiled", "Return it uncompiled"]),
    ("train.model = @mine.no_model", ["mine.py:18", "returned NoneType"]),
    ("train.model = @mine.frozen_model", ["no trainable variables"]),
    ("train.model = @mine.layer_that_raises", ["do not fit the data", "the shape of the Lambda's output"]),
    ("supervised.Supervised.loss = @mine.loss_that_raises", ["KeyError: 'b'", "mine.py:25, in loss_that_raises"]),
    (
        "train.train_data = @mine.data_that_raises",
        ["FileNotFoundError", "no/such/file.npy", "mine.py:28", "\n    [code-failure]\n"],
    ),
    ("train.train_data = @mine.data_that_exits", ["data_that_exits() failed: SystemExit: 3"]),
    (
        "train.train_data = @mine.labels_out_of_range",
        ["Example 10 of the training data has the label 10", "0 … 9", " [labels-out-of-range]\n"],
    ),
    (
        "train.train_data = @mine.raising_generator",
        ["code failed: KeyError: 'no such image'\n    mine.py:87, in <genexpr>"],
    ),
    ("train.train_data = @mine.generator_without_shapes", ["does not say the shapes", "output_signature"]),
]
WRONG_DIRECTORIES = [
    ("mine.py/run", ["mine.py", "is a file", "Choose another run directory"]),
    ("/proc/run", ["'/proc/run' cannot be written", "Choose another run directory"]),
]
REFUSED = [
    *WRONG_FLAGS,
    *(([DIGITS, param(setting), "--run_dir=run"], words) for setting, words in WRONG_SETTINGS),
    *(([DIGITS, strategy(name), param(setting), "--run_dir=run"], words) for name, setting, words in WRONG_STRATEGIES),
    *(([DIGITS, param("import mine"), param(setting), "--run_dir=run"], words) for setting, words in WRONG_CODE),
    *(([DIGITS, f"--run_dir={directory}"], words) for directory, words in WRONG_DIRECTORIES),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_what_is_wrong_is_one_message_before_training(
    answer: Callable[..., Finished], arguments: list[str], words: list[str]
) -> None:
    check_refused(answer(*arguments), *words)


# Files, directories, environment


@pytest.mark.slow
def test_a_gin_file_in_a_bucket_that_cannot_be_reached_is_told_within_seconds() -> None:
    args = ["-m", "tfdist.main", "--gin_file=gs://no-such-bucket/experiment.gin"]
    dead_proxy = {"https_proxy": "http://127.0.0.1:9", "NO_GCE_CHECK": "true"}
    told = run_python(args, env=dead_proxy, timeout=60)
    assert told.status == EXIT_STORE_UNAVAILABLE
    assert "the gin file gs://no-such-bucket/experiment.gin cannot be read" in told.stderr


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export", "resume", "report"])
def test_a_verb_of_a_run_in_a_store_that_does_not_answer_has_the_status_that_says_so(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_out(path: str) -> NoReturn:
        raise StoreUnavailableError(errno.EIO, "Read timed out", path)

    for name in ("read", "exists", "stat", "list_dir"):
        if hasattr(files, name):
            monkeypatch.setattr(files, name, time_out)
    assert verbs.run([verb, "gs://bucket/run"]) == EXIT_STORE_UNAVAILABLE
    shown = capsys.readouterr().err
    assert "Read timed out" in shown and "Traceback" not in shown


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_that_lacks_a_character_is_told_all_the_same(encoding: str) -> None:
    environment = {"PYTHONIOENCODING": f"{encoding}:strict", "PYTHONUTF8": "0"}
    told = run_python(["-m", "tfdist.main", "--gin_file=日本語.gin"], env=environment)
    assert told.status == 2 and "Traceback" not in told.stderr and "\\u65e5\\u672c\\u8a9e.gin" in told.stderr
    about = run_python(["-m", "tfdist.main", "--help"], env=environment).check()
    assert "--gin_file=FILE" in about.stdout


def test_a_wrong_tf_config_is_told(answer: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "host0:2222,host1:2222")
    check_refused(answer(DIGITS, strategy("auto"), "--run_dir=run"), "TF_CONFIG", "not JSON")


@pytest.mark.slow
def test_horovod_that_is_not_installed_is_told_with_the_command_that_builds_it(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('no Horovod here')")
    args = ["-m", "tfdist.main", DIGITS, strategy("horovod"), "--run_dir=run"]
    told = run_python(args, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}, cwd=tmp_path)
    check_refused(told, "no Horovod here", "python -m tfdist.build_horovod")


def test_a_python_without_what_tfdist_stands_on_is_told(tmp_path: Path) -> None:
    told = run_python(["-S", "-m", "tfdist.main", DIGITS], env={"PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path)
    check_refused(told, "has no module 'absl'", sys.executable, "in which tfdist is installed")


@pytest.mark.parametrize(
    ("begin", "words"),
    [
        ("sys.modules['keras'] = None", ["has no module 'keras'", "pip install keras"]),
        ("sys.modules['tensorflow'] = None", ["has no module 'tensorflow'", "'tfdist[gpu]'", "'tfdist[tpu]'"]),
        (
            "import importlib.metadata as m; v = m.version; "
            "m.version = lambda p: '2.19.1' if p == 'tensorflow' else v(p)",
            ["tensorflow is 2.19.1; tfdist needs TensorFlow 2.20 or 2.21", "'tfdist[cpu]'"],
        ),
    ],
    ids=["keras", "tensorflow", "another release"],
)
def test_a_missing_package_or_another_tensorflow_is_told_before_a_run(
    begin: str, words: list[str], tmp_path: Path
) -> None:
    block = f"import sys; {begin}; from tfdist import main; sys.exit(main.main())"
    told = run_python(["-c", block, DIGITS, "--run_dir=run"], cwd=tmp_path)
    check_refused(told, *words)
    assert not (tmp_path / "run").exists()


WEIGHTS = "model.weights.h5"


@pytest.fixture
def other_weights(tmp_path: Path) -> str:
    """A file of weights that fit another model than the digits'."""
    path = tmp_path / WEIGHTS
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save_weights(path)
    return path.name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.train_data = @mine.text_labels", "train.eval_data = None"], ["labels are text", "0, 1, 2"]),
        (["train.train_data = @mine.text_inputs", "train.eval_data = None"], ["gives the model text", "TextVector"]),
        (["train.eval_data = @mine.rows_of_four"], ["do not fit the data", "float32[None, 4]"]),
        (
            ["train.callbacks = [@keras.callbacks.EarlyStopping(monitor='val_acuracy')]"],
            ["EarlyStopping monitors 'val_acuracy'", "Did you mean 'val_accuracy'", "Reported: loss, accuracy, val_"],
        ),
        (
            ["train.callbacks = [@keras.callbacks.EarlyStopping()]", "train.eval_data = None"],
            ["EarlyStopping monitors 'val_loss', and nothing is evaluated", "train.eval_data"],
        ),
        (
            ["train.callbacks = [@keras.callbacks.EarlyStopping()]", "train.eval_every = '10 steps'"],
            ["'val_loss' at the end of each epoch, whose 23 steps", "'10 steps' does not divide", "eval_every = 1,"],
        ),
        (
            ["train.callbacks = [@keras.callbacks.ReduceLROnPlateau(monitor='loss')]"],
            ["ReduceLROnPlateau sets the learning rate", "schedule of Adam"],
        ),
        ([f"train.start_from = '{WEIGHTS}'"], [WEIGHTS, "do not load into this model"]),
        (
            [
                "from tfdist.checkpoint import policy",
                "train.checkpoint = @policy.CheckpointPolicy()",
                "policy.CheckpointPolicy.keep_best = 'val_acuracy'",
            ],
            ["policy.CheckpointPolicy.keep_best is 'val_acuracy'", "Did you mean 'val_accuracy'", "val_loss"],
        ),
    ],
)
def test_what_cannot_be_learned_is_told_before_training_and_by_validate(
    answer: Callable[..., Finished], other_weights: str, settings: list[str], words: list[str]
) -> None:
    given = [param("import mine"), param("import keras"), *map(param, settings)]
    for mode in ("validate", "train"):
        check_refused(answer(DIGITS, *given, "--run_dir=run", f"--mode={mode}"), *words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.train_data = @mine.one_nan"], ["first batch of the training data holds", "x holds nan in example"]),
        (["train.eval_data = @mine.one_nan"], ["first batch of the evaluation data holds", "x holds nan in example"]),
        (["train.train_data = @mine.infinite_weights", "train.eval_data = None"], ["sample_weight holds inf in exam"]),
    ],
)
def test_values_that_are_not_finite_are_told_by_validate(
    answer: Callable[..., Finished], settings: list[str], words: list[str]
) -> None:
    given = [param("import mine"), *map(param, settings)]
    check_refused(answer(DIGITS, *given, "--mode=validate"), *words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.callbacks = [@mine.CallbackThatRaises()]", ["CallbackThatRaises, in on_train_begin", "mine.py:35"]),
        (
            "keras.optimizers.Adam.learning_rate = @mine.ScheduleThatRaises()",
            ["the schedule's own words", "mine.py:39"],
        ),
        ("train.train_data = @mine.unseen_labels_out_of_range", ["label value of 49", "valid range of [0, 10)"]),
        ("train.train_data = @mine.refusing_dataset", ["input pipeline failed: the logarithm : Tensor had Inf"]),
        (
            "train.train_data = @mine.raising_dataset",
            ["Your code failed: KeyError: 'no such image'", "mine.py:75, in key_error"],
        ),
        ("supervised.Supervised.loss = 'mse'", ["cannot compute on these examples", "[64] vs. [64,10]"]),
    ],
)
def test_what_fails_only_while_training_is_told_in_one_message_too(
    answer: Callable[..., Finished], setting: str, words: list[str]
) -> None:
    failed = answer(DIGITS, param("import mine"), param(setting), "--run_dir=run")
    assert failed.status == 2 and "Traceback" not in failed.stderr
    assert failed.stderr.startswith("error: ") and failed.stderr.count("error: ") == 1
    for word in words:
        assert word in failed.stderr
    assert failed.stderr.endswith("[code-failure]\n")
    last = json.loads(Path("run/events.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "run_failed" and last["details"]["error_id"] == "code-failure"
    assert "support.py" not in failed.stderr and "test_main.py" not in failed.stderr
    assert not Path("run/result.json").exists()


def test_shapes_that_are_known_only_where_all_batches_are_full_are_told_in_one_message_too(
    answer: Callable[..., Finished],
) -> None:
    given = [param("supervised.Supervised.loss = 'mse'"), param("train.global_batch_size = 479")]
    for mode in ("train", "validate"):
        failed = answer(DIGITS, *given, "--run_dir=run", f"--mode={mode}")
        assert failed.status == 2 and failed.stderr.startswith("error: ") and "Traceback" not in failed.stderr
        assert "do not fit the data" in failed.stderr and "Dimensions must be equal" in failed.stderr


def test_a_connection_that_the_users_code_lost_is_no_mistake_of_the_user(answer: Callable[..., Finished]) -> None:
    with pytest.raises(tf.errors.UnknownError, match="the server's own words"):  # which ends the command with status 1
        answer(DIGITS, param("import mine"), param("train.train_data = @mine.lost_connection"), "--run_dir=run")


def test_a_bug_of_tfdist_keeps_its_traceback_and_the_users_own_has_one_by_verbose(
    answer: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = answer(DIGITS, *map(param, ["import mine", "train.model = @mine.model_that_raises"]), "--verbose")
    assert told.status == 2 and "Traceback" in told.stderr and 'return flat("ten")' in told.stderr
    assert re.fullmatch(r" *mine\.py:.*\n *\[code-failure\]\n", "".join(told.stderr.splitlines(True)[-2:]))
    from tfdist.training.run import assembly

    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a bug")

    fail.__code__ = fail.__code__.replace(co_filename=assembly.__file__)
    monkeypatch.setattr(assembly, "build_step", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        answer(DIGITS, "--run_dir=run")


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_the_command_quietly(tmp_path: Path) -> None:
    line = f"{sys.executable} -m tfdist.main {DIGITS} --mode=validate 2>errors | head -1; echo ${{PIPESTATUS[0]}}"
    told = run_command(["bash", "-c", line], cwd=tmp_path).check()
    assert told.stdout.splitlines() == ["convnet.build_convnet", "141"]
    assert not (tmp_path / "errors").read_text()


# Validate


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the experiments read from data/, made by the commands that their first comments name."""
    data = tmp_path_factory.mktemp("prepared")
    for name in ("digits", "images", "tables", "text"):
        run_python([REPOSITORY / "examples/files" / f"prepare_{name}.py", f"--out={data}"], timeout=180).check()
    teacher = ["-m", "tfdist.main", DIGITS, param("train.epochs = 1"), f"--run_dir={data / 'teacher'}"]
    run_python(teacher, cwd=REPOSITORY).check()
    return data


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> None:
    """The prepared data in the working directory."""
    (tmp_path / "data").symlink_to(prepared, target_is_directory=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(prepared / "teacher", target_is_directory=True)


DIGITS_FILE = Path("configs/experiments/digits.gin")
VALIDATED = [(file, None) for file in [*EXPERIMENTS, *REFERENCES]] + [(DIGITS_FILE, file) for file in STRATEGIES]


@pytest.mark.slow
@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(("experiment", "chosen"), VALIDATED, ids=lambda f: f.stem if f else "own")
def test_validate_accepts_every_experiment_and_every_strategy(
    answer: Callable[..., Finished],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    experiment: Path,
    chosen: Path | None,
) -> None:
    arguments = [f"--gin_file={experiment}", "--mode=validate", "--run_dir=run"]
    name = chosen.stem if chosen else "auto"
    if chosen:
        arguments.append(f"--gin_file={chosen}")
    if name == "mirrored":
        arguments.append(param("mirrored.Mirrored.num_cpu_devices = 2"))
    if name == "multi_worker":
        monkeypatch.setenv("TF_CONFIG", ABSENT_PEERS)
    told = answer(*arguments)
    assert told.status == 0 and not told.stderr, told
    assert told.stdout.splitlines()[-1] == "valid"
    replicas = {"mirrored": "2 replicas", "multi_worker": "2 replicas", "tpu": "as many replicas as"}.get(name, "1 rep")
    assert f"strategy: {'one_device' if name == 'auto' else name}, {replicas}" in told.stdout
    evaluation = () if experiment in REFERENCES else ("evaluation data: ",)
    for beginning in ("training data: ", *evaluation, "model: ", "optimizer: "):
        assert re.search(rf"^{beginning}\S", told.stdout, re.MULTILINE)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_validate_shows_rates_loss_and_outputs_and_notes_those_that_the_loss_does_not_take(
    answer: Callable[..., Finished],
) -> None:
    from_logits = "keras.losses.SparseCategoricalCrossentropy.from_logits"
    softmax = (param("import mine"), param("train.model = @mine.probabilities"))
    for given, note in (
        ((), None),
        ((*softmax, param(f"{from_logits} = False")), None),
        ((param(f"{from_logits} = False"),), "Give the loss from_logits=True, or the last layer activation='softmax'."),
        (softmax, "the outputs are probabilities, and sparse_categorical_crossentropy with from_logits=True takes"),
    ):
        shown = answer(DIGITS, *given, "--mode=validate").check().stdout
        line = r"first batch of the training data: loss \d+\.\d+; outputs float32\[8, 10\], -?\d\S* … \d\S*"
        assert re.search(f"^{line}$", shown, re.MULTILINE), shown
        assert note in shown if note else "note: the outputs" not in shown
        assert "learning rate: 0.004 at step 0, 0.00218 at step 139, 0.0004 at step 275" in shown


@pytest.mark.slow
def test_validate_checks_an_experiment_that_only_trains_and_the_evaluation_of_one_that_does_both(
    answer: Callable[..., Finished], tmp_path: Path
) -> None:
    (tmp_path / "mine.gin").write_text("include 'tfdist:experiments/digits.gin'\ntrain.eval_data = None\n")
    assert answer("--gin_file=mine.gin", "--mode=validate").status == 0
    check_refused(
        answer(DIGITS, param("evaluate.global_batch_size = 0"), "--mode=validate"), "evaluate.global_batch_size is 0"
    )


def test_every_file_of_configs_is_part_of_an_experiment() -> None:
    included: set[str] = set()
    for file in CONFIGS.rglob("*.gin"):
        included |= set(re.findall(r"^include '(?:tfdist:|configs/)(\S+)'", file.read_text(), re.MULTILINE))
    given = {str(f.relative_to(CONFIGS)) for f in CONFIGS.rglob("*.gin") if f.parent.name != "experiments"}
    assert given - included == {str(f.relative_to("configs")) for f in [*STRATEGIES, *REFERENCES]}


# Train and evaluate


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """The run directory of the digits, trained deterministically in a process, and what that said."""
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    settings = param("train.deterministic = True")
    args = ["-m", "tfdist.main", DIGITS, settings, f"--run_dir={run_dir}"]
    return run_dir, run_python(args, cwd=REPOSITORY).check()


@pytest.mark.slow
def test_the_digits_are_learned(trained: tuple[Path, Finished]) -> None:
    run_dir, told = trained
    result = json.loads((run_dir / "result.json").read_text())
    assert set(result) == {field.name for field in dataclasses.fields(RunResult)}
    assert result["status"] == "done" and result["strategy"] == "one_device"
    assert (result["num_workers"], result["num_replicas"], result["global_batch_size"]) == (1, 1, 64)
    assert (result["steps"], result["epochs"], result["examples_seen"]) == (276, 12, 12 * 1437)
    assert result["eval_metrics"]["accuracy"] >= 0.97
    assert (result["mode"], result["end_reason"], result["stopped_by"]) == ("train", "completed", None)
    assert [(start["step"], start["lost_steps"]) for start in result["starts"]] == [(0, 0)]
    assert (result["steps_per_epoch"], result["checkpoint_step"]) == (23, 276)
    assert result["best"]["metric"] == "val_loss" and result["best"]["step"] == 23 * result["best"]["epoch"]
    names = {file.name for file in run_dir.iterdir()}
    assert {"config.gin", "result.json", "metrics.jsonl", "events.jsonl", "tensorboard", "export"} <= names
    points = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {(p["epoch"], p["split"]) for p in points} == {(e, s) for e in range(1, 13) for s in ("train", "eval")}
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["training_started", "run_finished"]
    lines = told.stdout.splitlines()  # as on any pipe
    assert "\x1b" not in told.stdout and "\r" not in told.stdout and not told.stderr
    assert lines[0].startswith("train: one_device, 1 worker, 1 replica") and lines[-1].startswith("done: 276 steps")
    epochs = [line.split("  step")[0] for line in lines if line.startswith("epoch ")]
    assert epochs[0] == "epoch  1/12" and epochs[-1] == "epoch 12/12" and len(set(epochs)) == len(epochs)


@pytest.mark.slow
def test_config_gin_run_again_gives_the_same_bits(trained: tuple[Path, Finished], tmp_path: Path) -> None:
    run_dir, _ = trained
    args = ["-m", "tfdist.main", f"--gin_file={run_dir / 'config.gin'}", f"--run_dir={tmp_path / 'again'}"]
    run_python(args, cwd=tmp_path).check()
    assert settings_in(tmp_path / "again/config.gin") == settings_in(run_dir / "config.gin")
    assert_same_bits(load_weights(run_dir), load_weights(tmp_path / "again"))


def settings_in(config: Path) -> list[str]:
    return sorted(line for line in config.read_text().splitlines() if line and not line.startswith("#"))
