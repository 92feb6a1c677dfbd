"""What `config/loading.py` promises, with real files; the roots are small functions, most of it needs no TensorFlow."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mistakes import each_is_refused

from tfdist.config import loading
from tfdist.errors import UserError

CALLS: list[dict[str, Any]] = []


def train(*, model, data=None, epochs: int = 1, seed: int = 0, callbacks=(), options=None):
    CALLS.append({"model": model, "data": data, "epochs": epochs, "options": options})
    return {
        "epochs": epochs,
        "model": model() if callable(model) else model,
        "data": data() if callable(data) else data,
    }


def evaluate(*, model, data=None):
    return model()


def logged(*, paths: Any = None) -> Any:
    return paths


def check():
    raise UserError("the batch size cannot be split")


ROOTS = {"train": train, "evaluate": evaluate, "log": logged, "check": check}

FILES = {
    "library.py": """
        class Digits:
            def __init__(self, path="digits", batch=8):
                self.path, self.batch = path, batch

        def load_digits(split="train", shuffle=False):
            return ("digits", split, shuffle)

        def build_convnet(filters=(8,), head=None, name=None):
            return ("convnet", filters, head() if callable(head) else head, name)

        def build_mlp(width):
            return ("mlp", width)

        def build_head(classes=10):
            return ("head", classes)

        def noisy():
            raise ValueError("what the user's code says")

        CLASSES = 10
    """,
    "other.py": "def build(): return 'other'\ndef load_digits(): return 'other'",
    "constants.py": "import gin\ngin.constant('constants.SIZE', 7)\ndef build(size): return size",
    "broken.py": "x = 1\ndef f(:\n    pass\n",
    "nowhere.py": "x = 1\nimport nowhere_to_be_found\n",
    "dividing.py": "def f():\n    return 1 / 0\nf()\n",
    "outdated.py": "x = 1\nimport tfdist.tasks.base\n",
    "runs/both.gin": """
        # Trains and evaluates one model.
        train.model = %MODEL
        evaluate.model = %MODEL
        MODEL = %gin.REQUIRED
    """,
    "experiments/digits.gin": "",
    "inner.gin": "# One line.\ntrain.epoch = 1",
    "a.gin": "include 'b.gin'",
    "b.gin": "train.model = 1\ninclude 'a.gin'",
    "data.gin": "import library as data\ntrain.data = @data.load_digits",
    "head.gin": "import library as data\ntrain.model = @data.build_head",
    "other_data.gin": "import other as data",
    "model.gin": "import library\ninclude 'data.gin'\ntrain.model = @library.build_mlp",
    "without.gin": "train.model = @library.build_mlp",
}


@pytest.fixture(autouse=True)
def _workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in a directory with FILES, and forgets modules that a test has imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    for name, text in FILES.items():
        write(name, text)
    Path("binary.gin").write_bytes(b"\xff\xfe\x00")
    CALLS.clear()
    yield
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return name


def load(*texts: str, params: tuple[str, ...] = (), roots: dict[str, Callable] | None = None) -> loading.Config:
    """Loads texts as the files 0.gin, 1.gin …"""
    names = [write(f"{i}.gin", text) for i, text in enumerate(texts)]
    return loading.load(gin_files=names, gin_params=params, roots=lambda: ROOTS if roots is None else roots)


EXPERIMENT = """
    from __gin__ import dynamic_registration
    import library
    include 'runs/both.gin'
    MODEL = @library.build_convnet
    library.build_convnet.filters = (32, 64)
    train.epochs = 10
    train.data = @train/library.load_digits
    train/library.load_digits.shuffle = True
"""

RICH = (
    EXPERIMENT
    + """
    import os.path as paths
    train.callbacks = [
        @library.build_head, @a/library.build_head(), 'text that is long enough to need more than one line of its own',
        {'z': 1e-7, 'a': (None, True, -2.5), 'nested': [%MODEL, %SIZES, @paths.basename]},
    ]
    SIZES = (1,)
    library.build_convnet.name = 'it\\'s "quoted" %MODEL @x \\n'
    a/library.build_head.classes = 1e400
    """
)


# What holds.


@pytest.mark.parametrize(
    ("texts", "params", "expected"),
    [
        (
            [EXPERIMENT],
            (),
            {"epochs": 10, "model": ("convnet", (32, 64), None, None), "data": ("digits", "train", True)},
        ),
        ([EXPERIMENT, "train.epochs = 20"], (), {"epochs": 20}),
        ([EXPERIMENT, "train.epochs = 20"], ("train.epochs = 30", "train.epochs = 40"), {"epochs": 40}),
        # a param may use the imports of the files, and import itself
        ([EXPERIMENT], ("MODEL = @library.build_head",), {"model": ("head", 10)}),
        ([EXPERIMENT], ("import other", "MODEL = @other.build"), {"model": "other"}),
        # each file has names of its own, and those of what it includes
        (
            [
                "import library as models\nMODEL = @models.build_head\ninclude 'runs/both.gin'",
                "import other as models\nMODEL = @models.build",
            ],
            (),
            {"model": "other"},
        ),
        (
            ["include 'model.gin'\nlibrary.build_mlp.width = 8\ndata.load_digits.split = 'test'"],
            (),
            {"model": ("mlp", 8), "data": ("digits", "test", False)},
        ),
        (
            ["include 'head.gin'\ninclude 'other_data.gin'\nimport other as data\ntrain.data = @data.load_digits"],
            (),
            {"model": ("head", 10), "data": "other"},
        ),
        # a user's module may define constants
        (
            ["import constants\ntrain.model = @constants.build\nconstants.build.size = %constants.SIZE"],
            (),
            {"model": 7},
        ),
        (["A = %B\nB = %C\nC = 3\ntrain.model = 1\ntrain.epochs = %A"], (), {"epochs": 3}),
        # a reference's scope holds for what it is given
        (
            [
                """
                import library
                train.model = @big/library.build_convnet
                library.build_convnet.head = @library.build_head
                big/library.build_head.classes = 1000
                """
            ],
            (),
            {"model": ("convnet", (8,), ("head", 1000), None)},
        ),
        # a macro's name is the scope of what it evaluates
        (
            ["import library\ntrain.model = %HEAD\nHEAD = @library.build_head()\nHEAD/library.build_head.classes = 3"],
            (),
            {"model": ("head", 3)},
        ),
        # a call with arguments takes the rest from its own scope
        (
            [
                """
                import library
                train.model = @wide/library.build_convnet(filters=[64], head=@library.build_head(classes=%N))
                wide/library.build_convnet.name = 'wide'
                N = 3
                """
            ],
            (),
            {"model": ("convnet", [64], ("head", 3), "wide")},
        ),
        ([RICH], (), {"epochs": 10}),
        # what an override has made idle is left alone
        ([EXPERIMENT], ("MODEL = @library.build_head", "train.data = None"), {"model": ("head", 10), "data": None}),
    ],
)
def test_what_holds_also_holds_for_what_is_written(texts: list[str], params: tuple[str, ...], expected: dict[str, Any]):
    loaded = load(*texts, params=params)
    found = loaded.run("train")
    assert {name: found[name] for name in expected} == expected
    again = load(loaded.text())
    assert again.run("train") == found
    assert (again.text(), again.settings()) == (loaded.text(), loaded.settings())
    operative = load(loaded.operative_text())
    assert operative.run("train") == found and operative.settings() == loaded.settings()


def test_what_a_root_returns_is_used_within_the_configuration():
    text = "import library\ntrain.model = @library.build_head\nlibrary.build_head.classes = 3"
    loaded = load(text, roots={"train": lambda model: model})
    assert loaded.run("train", lambda model: ("used", model())) == ("used", ("head", 3))
    assert loaded.run("train")() == ("head", 10)  # outside of it


def test_blocks_scopes_and_containers():
    text = """
        import library
        train:
            model = 1
            options = {'heads': [@library.build_head, @wide/library.build_head()], 'rate': -1e-3, 'none': None}
        wide/library.build_head.classes = 100
    """
    load(text).run("train")
    options = CALLS[0]["options"]
    assert options["heads"][0]() == ("head", 10)
    assert options["heads"][1] == ("head", 100)
    assert options["rate"] == -1e-3 and options["none"] is None


def test_a_configuration_may_be_params_only_and_share_an_object():
    shared = "train.data = @one/gin.singleton"
    params = (
        "import library",
        "train.model = @one/gin.singleton()",
        shared,
        "one/gin.singleton.constructor = @library.Digits",
    )
    loaded = load(params=params)
    result = loaded.run("train")
    assert result["model"] is result["data"]
    assert load(loaded.text()).settings() == loaded.settings()


def test_loading_does_not_touch_an_earlier_configuration():
    first = load(EXPERIMENT)
    second = load(EXPERIMENT, params=("train.epochs = 2", "library.build_convnet.filters = (1,)"))
    assert (first.run("train")["epochs"], second.run("train")["epochs"]) == (10, 2)
    assert first.run("train")["model"][1] == (32, 64)


def test_a_root_may_load_and_run_another_configuration():
    def tune(*, rounds=1):
        inner = load(EXPERIMENT, params=("train.epochs = 2",))
        return inner.run("train")["epochs"], rounds

    outer = load("tune.rounds = 4", roots={"tune": tune})
    assert outer.run("tune") == (2, 4)
    assert "tune.rounds = 4" in outer.operative_text()


def test_a_root_inherits_of_another_what_it_has_no_value_for():
    def loaded(text: str) -> loading.Config:
        inherited = {"evaluate.model": ["train.options", "train.model"], "evaluate.data": ["train.data"]}
        return loading.load(gin_files=[write("0.gin", text)], gin_params=(), roots=lambda: ROOTS, inherited=inherited)

    text = "import library\ntrain.model = @library.build_head\ntrain.options = None"
    assert loaded(text).run("evaluate") == ("head", 10)
    assert loaded(f"{text}\nevaluate.model = @library.Digits\n").run("evaluate").path == "digits"
    with pytest.raises(UserError, match=r"evaluate\.model has no value"):
        loaded("train.epochs = 3").run("evaluate")


# Files.


def test_includes_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write("repo/configs/runs/short.gin", "train.epochs = 1")
    write("repo/configs/experiments/a.gin", "include 'configs/runs/short.gin'\ninclude 'b.gin'\ntrain.model = 1")
    write("repo/configs/experiments/b.gin", "train.seed = 3")
    write("repo/configs/experiments/beside.py", "def build(): return 'beside'")
    write("elsewhere/empty", "")
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = loading.load(
        gin_files=["../repo/configs/experiments/a.gin"],
        gin_params=["import beside", "train.model = @beside.build"],
        roots=lambda: ROOTS,
    )
    assert loaded.run("train") == {"epochs": 1, "model": "beside", "data": None}


def test_a_byte_order_mark_at_the_start_of_a_file_is_no_part_of_it():
    Path("marked.gin").write_text("\ufefftrain.model = 1\ninclude 'inner.gin'", encoding="utf-8")
    Path("inner.gin").write_text("\ufefftrain.epochs = 4", encoding="utf-8")
    assert load("include 'marked.gin'").run("train")["epochs"] == 4


def test_the_written_configuration_says_where_its_modules_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = list(sys.path)
    loaded = load("import library\ntrain.model = @library.build_head")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [p for p in path if p not in ("", str(tmp_path))])
    del sys.modules["library"]
    assert load(loaded.text()).run("train")["model"] == ("head", 10)
    assert "# modules in:" not in load("import json\ntrain.model = @json.dumps").text()


test_a_file_that_cannot_be_used_is_refused = each_is_refused(
    lambda name: loading.load(gin_files=[name], gin_params=(), roots=lambda: ROOTS),
    ("experiments/digit.gin", "no gin file 'experiments/digit.gin'.*Did you mean 'experiments/digits.gin'"),
    ("configs/runs/train_and_evaluate.gin", "no gin file 'runs/train_and_evaluate.gin' any more. Remove it. Write"),
    ("tfdist:runs/train_and_evaluate.gin", "any more. Remove it. Write for the macros"),
    ("a.gin", "b.gin:2: .*circle: a.gin → b.gin → a.gin"),
    ("runs", "runs is a directory"),
    ("binary.gin", "binary.gin cannot be read"),
    ("a" * 5000, "too long"),
    ("gs:/nowhere.gin", "no gin file"),
)


# Mistakes.

LIBRARY = "import library\ntrain.model = @library."
MISTAKES = [  # a text, and what the message begins with and holds
    # what cannot be read
    *(
        (f"train.seed = 1\n{line}\ntrain.epochs = 3\n", "0.gin:2: ", expected, line)
        for line, expected in (
            ("train.epochs = 1 +", "gin does not calculate"),
            ("train.epochs = digits", "Text has quotes, 'digits'"),
            ("train.epochs = true", "Did you mean True?"),
            ("train.epochs =", "literal"),
            ("train.epochs", "NAME.PARAMETER = VALUE"),
            ("train.model = @library.build(3)", "lines of their own"),
            ("train.model = @library.build(width)", "lines of their own"),
            ("train.model = @library.build(width=3 depth=2)", "commas"),
            ("train.model = @library.build(width=3, width=2)", "twice"),
            ("train.epochs = -%N", "Only a number"),
            ("train.epochs = -True", "Only a number"),
            ("%N = 3", "without the '%'"),
            ("train.options = {'a', 'b'}", "pairs"),
            ("train.options = {[]: 1}", "key of a dict is a text"),
            ("train.options = {1: 2, 1: 3}", "1 stands there twice"),
            ("train.options = f'{1}'", "cannot read th"),
            ("train.options = 'a' b'b'", "cannot mix bytes"),
            ("train.options = '\\ud800'", "UTF-8"),
            ("train.options = " + "[" * 60 + "]" * 60, "More than 50 brackets"),
            ("gin.macro.value = 3", "NAME = VALUE"),
            ("include ''", "is empty"),
            ("include 'runs/bth.gin'", "Did you mean 'runs/both.gin'"),
        )
    ),
    *(
        (f"train.seed = 1\n\n# A comment.\n{line}\n", "0.gin:4: ", "not closed", line)
        for line in ("a = [1,", "a = '''")
    ),
    ("train:\n    seed = 1\n  epochs = 2\n", "0.gin:3: "),
    ("train.options = " + "{1: " * 60 + "1" + "}" * 60, "0.gin:1: ", "More than 50"),
    ("include 'inner.gin'", "inner.gin:2: train has no parameter 'epoch'"),
    # macros
    ("A = []\ntrain.options = {%A: 1}\ntrain.model = 1", "0.gin:2: ", "key of a dict is a text"),
    ("train.model = %MODLE\nMODEL = 3", "0.gin:1: ", "%MODLE", "Did you mean 'MODEL'"),
    ("import library\ntrain.model = %SOMETHING", "0.gin:2: ", "%SOMETHING is defined nowhere"),
    ("import library\ntrain.model = %STRATEGY", "0.gin:2: ", "Remove the line: without it the strategy is what fits."),
    ("train.model = %A\nA = [%B]\nB = %A", "0.gin:2: ", "by way of itself"),
    ("log.paths = %RUN_DIRS", "0.gin:1: ", "the macro %RUN_DIRS is defined nowhere. Did you mean 'RUN_DIR'?"),
    ("log.paths = %RUNDIR/log.csv", "0.gin:1: ", "the macro %RUNDIR/log.csv is defined nowhere."),
    ("log.paths = %RUN_DIR/{epoch}.keras", "0.gin:1: ", "has quotes: '%RUN_DIR/…'"),
    ("RUN_DIR = 'runs/mine'", "0.gin:1: the macro RUN_DIR is given by --run_dir. Give yours another name."),
    ("train.options = %RUN_DIR\ntrain.model = 1", "%RUN_DIR is used, and this command has no run directory"),
    # names
    (LIBRARY + "build_convnt", "0.gin:2: library has no 'build_convnt'.", "Did you mean 'build_convnet'"),
    (LIBRARY + "build_mlp\nlibrary.build_mpl.width = 3", "0.gin:3: ", "Did you mean 'build_mlp'"),
    (LIBRARY + "CLASSES", "0.gin:2: ", "library.CLASSES is a int"),
    (LIBRARY + "build_mlp(widht=3)", "0.gin:2: ", "'widht'", "Did you mean 'width'?"),
    ("train.model = @json.loads", "0.gin:1: ", "Add the line 'import json'"),
    ("train.model = @tf.zeros", "0.gin:1: ", "Add the line 'import tensorflow as tf'"),
    ("train.model = @errors.suggest", "0.gin:1: ", "Add the line 'from tfdist import errors'"),
    ("import library\ninclude 'without.gin'", "without.gin:1: ", "Add the line 'import library', as 0.gin:1 does"),
    ("import library\ntrain.model = @libary.build_head", "0.gin:2: ", "Did you mean 'library'"),
    ("trian.epochs = 3", "0.gin:1: ", "'trian'", "Did you mean 'train'"),
    ("train.model = 1\ntrain.epoch = 10", "0.gin:2: train has no parameter 'epoch'. Did you mean 'epochs'?", "seed"),
    (
        "train.model = 1\ntrain.canonical_replicas = 4",
        "0.gin:2: train.canonical_replicas is gone. Write train.deterministic = 8, with that number.",
    ),
    (
        "include 'head.gin'\ninclude 'other_data.gin'\ntrain.data = @data.load_digits",
        "0.gin:3: the name 'data' may be of 'import library as data' and 'import other as data'.",
    ),
    # imports
    ("import libary\ntrain.model = 1", "0.gin:1: 'import libary': there is no module 'libary'. Did you mean 'library'"),
    (
        "from tfdist import errrors\ntrain.model = 1",
        "0.gin:1: ",
        "tfdist has no module 'errrors'",
        "Did you mean 'errors'",
    ),
    ("import surely_nowhere_to_be_found\ntrain.model = 1", "0.gin:1: ", "Is it installed"),
    ("from tfdist.data.pipeline import served\ntrain.model = 1", "0.gin:1: ", "served any more. End your own pipeline"),
    (
        "from tfdist.tasks import base\ntrain.model = 1",
        "0.gin:1: ",
        "base any more. Write `from tfdist.tasks.task import",
    ),
    (
        "train.model = 1\nimport outdated",
        "0.gin:2: 'import outdated' failed: ",
        "outdated.py:2",
        "from tfdist.tasks.task import",
    ),
    ("from library import build_head\ntrain.model = 1", "0.gin:1: ", "Write 'import library', and library.build_head"),
    ("train.model = 1\nimport broken", "0.gin:2: 'import broken' failed: ", "broken.py:2"),
    (
        "train.model = 1\nimport nowhere",
        "0.gin:2: 'import nowhere' failed: ",
        "nowhere.py:2: import nowhere_to_be_found",
    ),
    ("train.model = 1\nimport dividing", "0.gin:2: 'import dividing' failed: ", "dividing.py:2: return 1 / 0"),
    ("import library as train\ntrain.model = 1", "0.gin:1: "),
    ("import gin\ntrain.model = 1", "0.gin:1: "),
    ("from __gin__ import dynamic_registratio\ntrain.model = 1", "0.gin:1: "),
    # values that are missing
    ("include 'runs/both.gin'", "runs/both.gin:4: MODEL must be set", "--gin_param='MODEL = …'"),
    ("train.epochs = 3", "train.model has no value", "--gin_param='train.model = …'"),
    ("import library\ntrain.model = [@library.build_mlp()]", "0.gin:2: library.build_mlp.width has no value"),
    # settings without effect
    (
        LIBRARY + "build_mlp(width=1)\nlibrary.build_head.classes = 3",
        "0.gin:3: ",
        "that is used refers to @library.build_head",
    ),
    ("train.model = 1\nUNUSED = 3\nimport library\nlibrary.build_mlp.width = 3", "0.gin:", "0.gin:2: ", "0.gin:4: "),
    (EXPERIMENT + "    MODLE = 3\n", "0.gin:9: the macro MODLE is defined, but nothing", "Did you mean 'MODEL'"),
    ("train.model = 1\nepochs = 3", "0.gin:2: ", "Did you mean 'train.epochs'"),
    (
        EXPERIMENT.replace("train/library.load_digits.", "trian/library.load_digits."),
        "0.gin:8: ",
        "Did you mean 'train'",
    ),
    (LIBRARY + "build_head\nHEAD/library.build_head.classes = 3", "0.gin:3: ", "carries the scope 'HEAD'"),
    (
        LIBRARY + "build_convnet()\nlibrary.build_convnet.head = %HEAD\nHEAD = [@library.build_convnet()]",
        "0.gin:4: ",
        "without end",
    ),
    # params, which are separated from the file by a line
    *(
        (f"train.model = 1\n--\n{param}", f"--gin_param {param!r}: ", "no '='")
        for param in ("train.epochs", "", "epochs 3")
    ),
    ("train.model = 1\n--\ntrain.epochs = 3x", "--gin_param 'train.epochs = 3x': "),
    ("train.model = 1\n--\ntrain.epoch = 10", "--gin_param 'train.epoch = 10': train has no parameter 'epoch'."),
    ("train.model = 1\n--\ntrain.options = " + "[" * 5000, "--gin_param "),
    # what the called code finds out itself
    ("", "the batch size cannot be split"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case[-1][:60])
def test_a_mistake_is_one_message_that_names_the_line_and_what_to_write(case: tuple[str, ...]):
    text, begins, *expected = case
    file, is_param, param = text.partition("\n--\n")
    with pytest.raises(UserError) as caught:
        loaded = load(file, params=(param,) if is_param else ())
        loaded.run("log" if "log.paths" in text else "train" if text else "check")
    found = str(caught.value)
    assert found.startswith(begins) and all(each in found for each in expected)
    assert "Traceback" not in found and "In call to configurable" not in found and len(found) < 1000


def test_plain_mistakes_are_reported_without_importing_tensorflow():
    program = """
        import sys
        from tfdist import errors
        from tfdist.config import loading
        def roots():
            raise AssertionError("called too early")
        texts = ["include 'missing.gin'", "import keras\\nA = [", "import keras\\nA = %NOWHERE", "import keras\\nA = 1"]
        for text in texts:
            open("0.gin", "w").write(text)
            try:
                loading.load(gin_files=["0.gin"], gin_params=["A"] if text == texts[-1] else [], roots=roots)
            except errors.UserError:
                assert not {"tensorflow", "keras"} & set(sys.modules)
            else:
                raise AssertionError(text)
    """
    environment = {"PYTHONPATH": str(Path(loading.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True)


def test_an_unset_required_value_that_the_root_does_not_reach_is_left_alone():
    loaded = load("train.model = 1\nevaluate.model = %gin.REQUIRED")
    assert loaded.run("train")["model"] == 1 and "evaluate.model = %gin.REQUIRED" in loaded.text()
    with pytest.raises(UserError, match=r"0.gin:2: evaluate.model must be set"):
        loaded.check("evaluate")


def test_a_model_or_data_function_with_arguments_is_called_when_the_root_calls_it():
    loaded = load(
        """\
        import library
        train.model = @library.build_mlp(width=3)
        train.data = @library.load_digits(split='test')
        train.options = @library.load_digits(split='held')
        """
    )
    CALLS.clear()
    made = loaded.run("train")
    assert made["model"] == ("mlp", 3) and made["data"] == ("digits", "test", False)
    (call,) = CALLS
    assert callable(call["model"]) and callable(call["data"])
    assert call["options"] == ("digits", "held", False)


def test_a_call_inside_the_run_that_lacks_a_value_is_the_users_error():
    loaded = load("import library\ntrain.model = @library.build_mlp")
    with pytest.raises(TypeError) as caught:
        loaded.run("train")
    told = str(loaded.user_error(caught.value))
    assert told.startswith("library.build_mlp() failed: TypeError") and "'width'" in told


def test_an_exception_from_called_code_keeps_type_message_and_traceback():
    with pytest.raises(ValueError) as caught:
        load("import library\ntrain.model = @library.noisy").run("train")
    assert type(caught.value) is ValueError and str(caught.value) == "what the user's code says"
    assert any("library.noisy" in note or "'noisy'" in note for note in caught.value.__notes__)
    assert caught.traceback[-1].path.name == "library.py"


# What is written.


def test_the_operative_configuration_adds_the_defaults_that_were_used():
    loaded = load(EXPERIMENT)
    assert loaded.operative_text() == loaded.text()
    loaded.run("train")
    text = loaded.operative_text()
    for line in ("train.seed = 0", "library.load_digits.split = 'train'", "library.build_convnet.name = None"):
        assert line in text.splitlines()
    assert "build_head" not in text
    again = load(text)
    assert again.run("train") == loaded.run("train") and again.settings() == loaded.settings()
    assert again.operative_text().count("train.seed = 0") == 1
    idle = load(EXPERIMENT, params=("MODEL = @library.build_head",))
    assert "build_convnet" not in idle.text() and "Without effect" in idle.explain()


def test_the_written_configuration_does_not_depend_on_earlier_loads():
    write("pack/__init__.py", "")
    write("pack/models.py", "def build(): return 'built'")
    first, second = (
        "from pack import models\ntrain.model = @models.build",
        "import pack.models\ntrain.model = @pack.models.build",
    )
    texts = [load(first).text(), load(second).text()]
    assert [load(first).text(), load(second).text()] == texts
    assert load(first).settings() == load(second).settings()
    assert load(texts[1]).text() == texts[1]


def test_the_settings_depend_on_what_holds_only():
    write("same.gin", "import library as models\ntrain.epochs = 10\nMODEL = @models.build_convnet")
    same = """
        include 'same.gin'
        import library
        N = (32, 64)
        train/library.load_digits.shuffle = True
        train.data = @train/library.load_digits
        include 'runs/both.gin'
        include 'same.gin'
        library.build_convnet.filters = %N
        train.seed = 0
    """
    assert load(same).settings() == load(EXPERIMENT).settings()
    assert load(EXPERIMENT, params=("train.epochs = 11",)).settings() != load(EXPERIMENT).settings()


def test_the_explanation_is_a_table_of_values_and_sources():
    lines = load(EXPERIMENT, params=("train.epochs = 3",)).explain().splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("  train.epochs "))
    assert lines[row].split() == ["train.epochs", "=", "3", "--gin_param", "'train.epochs", "=", "3'"]
    assert lines[row + 1].split() == ["overrides", "10", "of", "0.gin:6"]
    sources = [line.index("0.gin:") for line in lines if " = " in line and "0.gin:" in line and "overrides" not in line]
    assert len(set(sources)) == 1
    assert load(EXPERIMENT).explain() == load(EXPERIMENT).explain()


def test_the_run_directory_is_a_macro_that_stays_one_in_what_is_written():
    text = """
        log.paths = [%LOG, '%RUN_DIR/{epoch:02d}-a.keras', {'all': %RUN_DIR}, '100%', '%Y-%m-%d']
        LOG = %RUN_DIR/logs/log.csv
    """
    loaded = load(text)
    for run_dir in ("runs/one", "gs://bucket/two/"):
        under = run_dir.rstrip("/")
        assert loaded.run("log", run_dir=run_dir) == [
            f"{under}/logs/log.csv",
            f"{under}/{{epoch:02d}}-a.keras",
            {"all": run_dir},
            "100%",
            "%Y-%m-%d",
        ]
    written = loaded.operative_text()
    assert "LOG = %RUN_DIR/logs/log.csv" in written and "'%RUN_DIR/{epoch:02d}-a.keras'" in written
    assert "runs/one" not in written and "bucket" not in written
    again = load(written)
    assert again.settings() == loaded.settings()
    assert again.run("log", run_dir="elsewhere")[0] == "elsewhere/logs/log.csv"
    assert "%RUN_DIR/logs/log.csv" in loaded.explain()


# Keras.


@pytest.mark.parametrize(
    ("reference", "what"),
    [
        ("keras.optimizers.Adam", "an optimizer"),
        ("keras.metrics.Mean", "a metric"),
        ("keras.layers.Dense", "a layer"),
        ("nets.Net", "a model"),
        ("nets.build", "a model"),
    ],
)
def test_keras_objects_with_variables_are_not_built_before_the_scope(reference: str, what: str):
    write("nets.py", NETS)
    with pytest.raises(UserError) as caught:
        load(f"import keras\nimport nets\ntrain.model = %M\nM = [@{reference}()]")
    text = str(caught.value)
    assert text.startswith(f"0.gin:4: @{reference}() makes {what}")
    assert f"Write @{reference}, without parentheses" in text


NETS = """
    from __future__ import annotations
    import keras

    class Net(keras.Model):
        def __init__(self, width=3):
            super().__init__()
            self.dense = keras.layers.Dense(width)

    class Functional(keras.Model):
        def __init__(self, width=3):
            inputs = keras.Input((4,))
            super().__init__(inputs, keras.layers.Dense(width)(inputs))

    def build() -> keras.Model:
        return Net()
"""


def test_keras_classes_can_be_referred_to_and_configured():
    import keras

    write("nets.py", NETS)
    text = """
        import nets
        train.model = @keras.optimizers.Adam
        keras.optimizers.Adam:
            learning_rate = @keras.optimizers.schedules.CosineDecay()
            global_clipnorm = 2.0
        keras.optimizers.schedules.CosineDecay:
            initial_learning_rate = 0.5
            decay_steps = 10
        train.data = [@nets.Net, @nets.Functional]
        nets.Net.width = 7
        nets.Functional.width = 8
        train.callbacks = [@keras.callbacks.EarlyStopping(), @keras.losses.SparseCategoricalCrossentropy()]
        keras.callbacks.EarlyStopping.patience = 3
    """
    loaded = load(text)
    optimizer = loaded.run("train")["model"]
    assert type(optimizer) is keras.optimizers.Adam and optimizer.global_clipnorm == 2.0
    nets = CALLS[0]["data"]
    with loading._gin_state(loaded._gin_bindings, {}):
        assert nets[0]().dense.units == 7
        assert nets[1]().output_shape == (None, 8)
    assert load(loaded.operative_text()).settings() == loaded.settings()


def test_what_tfdist_offers_is_known_by_one_name_without_an_import():
    import tfdist

    assert len(dir(tfdist)) > 60
    for name in tfdist._MODULES:
        assert callable(getattr(tfdist, name))
    loaded = load("train.model = @keras.Sequential\ntrain.data = [@tfdist.Group()]\ntfdist.Group.pattern = 'bias$'")
    assert loaded.run("train")["data"] == [tfdist.Group("bias$")]
    assert load(loaded.operative_text()).settings() == loaded.settings()
    long = load("from tfdist.recipes import groups\ntrain.model = 1\ntrain.data = @groups.Group(pattern='bias$')")
    assert long.run("train")["data"] == tfdist.Group("bias$")
