"""What `config/loading.py` promises, with real files; the roots are small functions, most of it needs no TensorFlow."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def fail(*, error=None):
    raise error()


ROOTS = {"train": train, "evaluate": evaluate, "fail": fail}

LIBRARY = """
    import functools

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
"""

WIRING = """
    # Trains and evaluates one model.
    train.model = %MODEL
    evaluate.model = %MODEL
    MODEL = %gin.REQUIRED
"""


@pytest.fixture(autouse=True)
def _workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in an empty directory with a module `library`, and forgets modules that a test has imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    write("library.py", LIBRARY)
    write("runs/both.gin", WIRING)
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


def message(*texts: str, params: tuple[str, ...] = (), run: str | None = None, roots=None) -> str:
    """The message that loading, or the run, ends with."""
    with pytest.raises(UserError) as caught:
        loaded = load(*texts, params=params, roots=roots)
        assert run is not None
        loaded.run(run)
    text = str(caught.value)
    assert "Traceback" not in text and "In call to configurable" not in text
    return text


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


# What holds.


def test_a_root_runs_with_its_settings():
    assert load(EXPERIMENT).run("train") == {
        "epochs": 10,
        "model": ("convnet", (32, 64), None, None),
        "data": ("digits", "train", True),
    }


def test_what_a_root_returns_is_used_within_the_configuration():
    text = "import library\ntrain.model = @library.build_head\nlibrary.build_head.classes = 3"
    loaded = load(text, roots={"train": lambda model: model})
    assert loaded.run("train", lambda model: ("used", model())) == ("used", ("head", 3))
    assert loaded.run("train")() == ("head", 10)  # outside of it


def test_later_files_win_and_params_win_over_files():
    loaded = load(EXPERIMENT, "train.epochs = 20", params=("train.epochs = 30", "train.epochs = 40"))
    assert loaded.run("train")["epochs"] == 40
    assert load(EXPERIMENT, "train.epochs = 20").run("train")["epochs"] == 20


def test_a_param_may_use_every_import_of_the_files_and_import_itself():
    write("other.py", "def build(): return 'other'")
    assert load(EXPERIMENT, params=("MODEL = @library.build_head",)).run("train")["model"] == ("head", 10)
    loaded = load(EXPERIMENT, params=("import other", "MODEL = @other.build"))
    assert loaded.run("train")["model"] == "other"


def test_each_file_has_names_of_its_own():
    write("other.py", "def build(): return 'other'")
    first = "import library as models\nMODEL = @models.build_head\ninclude 'runs/both.gin'"
    second = "import other as models\nMODEL = @models.build"
    loaded = load(first, second)
    assert loaded.run("train")["model"] == "other"
    assert load(loaded.text()).run("train")["model"] == "other"


def test_roots_have_plain_names_with_and_without_dynamic_registration():
    assert load("train.model = 1\ntrain.epochs = 5").run("train")["epochs"] == 5
    assert (
        load("from __gin__ import dynamic_registration\ntrain.model = 1\ntrain.epochs = 5").run("train")["epochs"] == 5
    )


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


def test_the_settings_of_a_class_and_of_its_methods_reach_it():
    text = """
        import library
        train.model = 1
        train.data = @library.Digits
        library.Digits.path = 'elsewhere'
    """
    assert load(text).run("train")["data"].path == "elsewhere"


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
    assert load(loaded.text()).digest() == loaded.digest()


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


def test_constants_that_a_users_module_defines_are_values():
    write("own.py", "import gin\ngin.constant('own.SIZE', 7)\ndef build(size): return size")
    text = "import own\ntrain.model = @own.build\nown.build.size = %own.SIZE"
    assert load(text).run("train")["model"] == 7


def test_settings_of_functions_that_the_user_decorated_may_go_unseen():
    write("own.py", "import gin\n@gin.configurable\ndef helper(size=1): return size\ndef build(): return helper()")
    text = "import own\ntrain.model = @own.build\nhelper.size = 5"
    loaded = load(text)
    assert loaded.run("train")["model"] == 5
    assert load(loaded.text()).run("train")["model"] == 5


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


def test_a_url_is_read_by_the_function_given():
    texts = {"gs://bucket/run/config.gin": "train.model = 1\ntrain.epochs = 8"}
    loaded = loading.load(gin_files=list(texts), gin_params=(), roots=lambda: ROOTS, read_url=texts.__getitem__)
    assert loaded.run("train")["epochs"] == 8
    assert loaded.bindings[1].source == "gs://bucket/run/config.gin:2"


def test_a_missing_file_is_named_with_near_ones():
    write("experiments/digits.gin", "")
    with pytest.raises(UserError, match=r"no gin file 'experiments/digit.gin'.*Did you mean 'experiments/digits.gin'"):
        loading.load(gin_files=["experiments/digit.gin"], gin_params=(), roots=lambda: ROOTS)


def test_a_missing_include_is_named_with_its_line():
    text = message("train.model = 1\ninclude 'runs/bth.gin'")
    assert text.startswith("0.gin:2: there is no gin file 'runs/bth.gin'")
    assert "Did you mean 'runs/both.gin'" in text and "include 'runs/bth.gin'" in text


def test_files_that_include_each_other_are_refused():
    write("a.gin", "include 'b.gin'")
    write("b.gin", "train.model = 1\ninclude 'a.gin'")
    with pytest.raises(UserError, match=r"b.gin:2: .*circle: a.gin → b.gin → a.gin"):
        loading.load(gin_files=["a.gin"], gin_params=(), roots=lambda: ROOTS)


def test_an_error_in_an_included_file_names_that_file_once():
    write("inner.gin", "# One line.\ntrain.epoch = 1")
    text = message("train.model = 1\ninclude 'inner.gin'")
    assert text.startswith("inner.gin:2: ") and "0.gin" not in text


@pytest.mark.parametrize("name", ["runs", "binary.gin"])
def test_what_cannot_be_read_as_a_gin_file_is_refused(name: str):
    Path("binary.gin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=name):
        loading.load(gin_files=[name], gin_params=(), roots=lambda: ROOTS)


def test_a_file_knows_the_modules_that_what_it_includes_imports():
    write("data.gin", "import library as data\ntrain.data = @data.load_digits")
    write("model.gin", "import library\ninclude 'data.gin'\ntrain.model = @library.build_mlp")
    loaded = load("include 'model.gin'\nlibrary.build_mlp.width = 8\ndata.load_digits.split = 'test'")
    assert loaded.run("train")["model"] == ("mlp", 8)
    assert loaded.run("train")["data"] == ("digits", "test", False)
    again = load(loaded.text())
    assert again.run("train") == loaded.run("train") and again.digest() == loaded.digest()


def test_an_included_file_does_not_know_the_modules_of_what_includes_it():
    write("model.gin", "train.model = @library.build_mlp")
    text = message("import library\ninclude 'model.gin'")
    assert text.startswith("model.gin:1: the name 'library' is not imported here.")
    assert "Add the line 'import library', as 0.gin:1 does: an import holds in its own file and in those that" in text


def test_a_name_that_included_files_give_to_two_modules_has_to_be_imported():
    write("other.py", "def load_digits():\n    return 'other'")
    write("one.gin", "import library as data\ntrain.model = @data.build_head")
    write("two.gin", "import other as data")
    both = "include 'one.gin'\ninclude 'two.gin'\ntrain.data = @data.load_digits"
    text = message(both)
    assert text.startswith("0.gin:3: the name 'data' may be of 'import library as data' and 'import other as data'.")
    assert load(f"{both}\nimport other as data").run("train")["data"] == "other"
    text = message("include 'one.gin'\ninclude 'two.gin'", params=("train.data = @data.load_digits",))
    assert "may be of" in text


def test_the_written_configuration_says_where_its_modules_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = list(sys.path)
    loaded = load("import library\ntrain.model = @library.build_head")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [p for p in path if p not in ("", str(tmp_path))])
    del sys.modules["library"]
    assert load(loaded.text()).run("train")["model"] == ("head", 10)
    assert "# modules in:" not in load("import json\ntrain.model = @json.dumps").text()


def test_a_root_inherits_of_another_what_it_has_no_value_for():
    def loaded(text: str) -> loading.Config:
        inherited = {"evaluate.model": ["train.options", "train.model"], "evaluate.data": ["train.data"]}
        return loading.load(gin_files=[write("0.gin", text)], gin_params=(), roots=lambda: ROOTS, inherited=inherited)

    text = "import library\ntrain.model = @library.build_head\ntrain.options = None"
    assert loaded(text).run("evaluate") == ("head", 10)
    assert loaded(f"{text}\nevaluate.model = @library.noisy\n").bindings[-1].key == "evaluate.model"
    with pytest.raises(UserError, match=r"evaluate\.model has no value"):
        loaded("train.epochs = 3").run("evaluate")


# Syntax and macros, before anything is imported.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.epochs = 1 +", "gin does not calculate"),
        ("train.epochs = digits", "'digits'"),
        ("train.epochs = true", "True"),
        ("train.epochs =", "literal"),
        ("train.epochs", "NAME.PARAMETER = VALUE"),
        ("train.model = @library.build(3)", "lines of their own"),
        ("train.model = @library.build(width)", "lines of their own"),
        ("train.model = @library.build(width=3 depth=2)", "commas"),
        ("train.model = @library.build(width=3, width=2)", "twice"),
        ("train.epochs = -%N", "Only a number"),
        ("%N = 3", "without the '%'"),
        ("train.options = {'a', 'b'}", "pairs"),
        ("train.options = {[]: 1}", "key of a dict is a text"),
        ("train.options = {({},): 1}", "key of a dict is a text"),
        ("train.options = {1: 2, 1: 3}", "1 stands there twice"),
        ("train.options = f'{1}'", "Nothing is calculated"),
        ("train.options = 'a' b'b'", "cannot mix bytes"),
        ("train.options = '\\ud800'", "UTF-8"),
        ("train.options = " + "[" * 60 + "]" * 60, "More than 50 brackets"),
        ("train.epochs = -True", "Only a number"),
        ("gin.macro.value = 3", "NAME = VALUE"),
        ("include ''", "is empty"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_what_to_write(line: str, expected: str):
    text = message(f"train.seed = 1\n{line}\ntrain.epochs = 3\n")
    assert text.startswith("0.gin:2: ") and expected in text and line in text


def test_what_is_nested_without_sense_is_one_short_message():
    assert len(message("train.options = " + "[" * 5000 + "]" * 5000)) < 1000
    assert "More than 50" in message("train.options = " + "{1: " * 60 + "1" + "}" * 60)
    assert len(message(params=("train.options = " + "[" * 5000,))) < 1000


def test_macros_and_files_that_need_each_other_without_end_are_refused():
    for i in range(400):
        write(f"deep{i}.gin", f"include 'deep{i + 1}.gin'")
    assert "more than 100 gin files" in message("include 'deep0.gin'")
    chain = "\n".join(f"A{i} = %A{i + 1}" for i in range(600))
    assert "more than 100 others" in message(f"{chain}\nA600 = 3\ntrain.epochs = %A0")
    assert load("A = %B\nB = %C\nC = 3\ntrain.model = 1\ntrain.epochs = %A").run("train")["epochs"] == 3


def test_a_macro_for_a_list_is_no_key():
    text = message("A = []\ntrain.options = {%A: 1}\ntrain.model = 1")
    assert text.startswith("0.gin:2: the key of a dict is a text")


def test_a_function_that_is_its_own_argument_is_refused():
    text = message(
        """
        import library
        train.model = @library.build_convnet()
        library.build_convnet.head = %HEAD
        HEAD = @library.build_head(classes=@library.build_convnet())
        """
    )
    assert text.startswith("0.gin:4: ") and "without end" in text


def test_a_byte_order_mark_at_the_start_of_a_file_is_no_part_of_it():
    Path("marked.gin").write_text("\ufefftrain.model = 1\ninclude 'inner.gin'", encoding="utf-8")
    Path("inner.gin").write_text("\ufefftrain.epochs = 4", encoding="utf-8")
    assert loading.load(gin_files=["marked.gin"], gin_params=(), roots=lambda: ROOTS).run("train")["epochs"] == 4


def test_a_name_of_a_file_that_cannot_be_looked_for_is_refused():
    with pytest.raises(UserError, match="too long"):
        loading.load(gin_files=["a" * 5000], gin_params=(), roots=lambda: ROOTS)


def test_arguments_may_stand_in_the_call():
    loaded = load(
        """
        import library
        train.model = @library.build_convnet(filters=[8, 16], head=@library.build_head(classes=%N), name='a')
        train.options = {'wide': @library.build_mlp(width=64), 'narrow': @library.build_mlp(width=8,)}
        N = 3
        """
    )
    loaded.run("train")
    assert CALLS[-1]["model"] == ("convnet", [8, 16], ("head", 3), "a")
    assert CALLS[-1]["options"] == {"wide": ("mlp", 64), "narrow": ("mlp", 8)}
    again = load(loaded.text())
    again.run("train")
    assert CALLS[-1] == CALLS[-2] and again.digest() == loaded.digest()


def test_arguments_in_a_call_are_checked_like_any_setting():
    text = message("import library\ntrain.model = @library.build_mlp(widht=3)\n")
    assert text.startswith("0.gin:2: ") and "'widht'" in text and "Did you mean 'width'?" in text


def test_a_call_with_arguments_takes_the_rest_from_its_own_scope():
    loaded = load(
        """
        import library
        train.model = @wide/library.build_convnet(filters=[64])
        wide/library.build_convnet.name = 'wide'
        """
    )
    loaded.run("train")
    assert CALLS[-1]["model"] == ("convnet", [64], None, "wide")


@pytest.mark.parametrize("line", ["train.callbacks = [1,", "train.callbacks = (", "train.x = '''"])
def test_what_is_not_closed_is_named_near_its_line(line: str):
    text = message(f"train.seed = 1\n\n# A comment.\n{line}\n")
    assert text.startswith("0.gin:4: ") and "not closed" in text and line in text


def test_wrong_indentation_is_named():
    assert "0.gin:3" in message("train:\n    seed = 1\n  epochs = 2\n")


@pytest.mark.parametrize("param", ["train.epochs", "", "epochs 3"])
def test_a_param_without_a_value_is_refused(param: str):
    text = message("train.model = 1", params=(param,))
    assert text.startswith(f"--gin_param {param!r}: ") and "no '='" in text and "train.epochs = 3" in text


def test_a_param_that_cannot_be_read_is_named():
    assert message("train.model = 1", params=("train.epochs = 3x",)).startswith("--gin_param 'train.epochs = 3x': ")


def test_a_misspelt_macro_is_refused_with_the_near_one():
    text = message("train.model = %MODLE\nMODEL = 3")
    assert text.startswith("0.gin:1: ") and "%MODLE" in text and "Did you mean 'MODEL'" in text


def test_a_misspelt_macro_is_refused_even_if_a_users_module_might_have_defined_a_constant():
    assert "%SOMETHING is defined nowhere" in message("import library\ntrain.model = %SOMETHING")
    assert "Write: include 'tfdist:strategies/auto.gin'" in message("import library\ntrain.model = %STRATEGY")


def test_a_macro_defined_by_way_of_itself_is_refused():
    assert "by way of itself" in message("train.model = %A\nA = [%B]\nB = %A")


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("include 'missing.gin'", []),
        ("import keras\ntrain.model = [", []),
        ("import keras\ntrain.model = %NOWHERE", []),
        ("import keras\ntrain.model = 1", ["train.epochs"]),
    ],
)
def test_plain_mistakes_are_reported_without_importing_tensorflow(text: str, params: list[str]):
    write("a.gin", text)
    program = f"""
        import sys
        from tfdist import errors
        from tfdist.config import loading
        def roots():
            raise AssertionError("called too early")
        try:
            loading.load(gin_files=["a.gin"], gin_params={params!r}, roots=roots)
        except errors.UserError:
            sys.exit("tensorflow" in sys.modules or "keras" in sys.modules)
        sys.exit(3)
    """
    environment = {"PYTHONPATH": str(Path(loading.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment).returncode == 0


# Names.


def test_an_unknown_function_is_refused_with_the_near_one():
    text = message("import library\ntrain.model = @library.build_convnt")
    assert text.startswith("0.gin:2: library has no 'build_convnt'.") and "Did you mean 'build_convnet'" in text
    text = message("import library\ntrain.model = @library.build_mlp\nlibrary.build_mpl.width = 3")
    assert text.startswith("0.gin:3: ") and "Did you mean 'build_mlp'" in text


def test_a_name_that_is_not_imported_is_refused_with_the_missing_line():
    write("1.gin", "")
    text = message("train.model = @library.build_head", "import library")
    assert text.startswith("0.gin:1: the name 'library' is not imported here.")
    assert "Add the line 'import library', as 1.gin:1 does" in text
    assert "Add the line 'import json'" in message("train.model = @json.loads")
    assert "Add the line 'from tfdist import errors'" in message("train.model = @errors.suggest")


def test_a_misspelt_root_is_refused_with_the_near_one():
    text = message("trian.epochs = 3")
    assert "'trian'" in text and "Did you mean 'train'" in text
    assert "Did you mean 'library'" in message("import library\ntrain.model = @libary.build_head")


def test_an_unknown_parameter_is_refused_with_the_valid_ones():
    text = message("train.model = 1\ntrain.epoch = 10")
    assert text.startswith("0.gin:2: train has no parameter 'epoch'. Did you mean 'epochs'?")
    assert "seed" in text and text.endswith("\n    train.epoch = 10")
    text = message("train.model = 1", params=("train.epoch = 10",))
    assert text.startswith("--gin_param 'train.epoch = 10': train has no parameter 'epoch'.")


def test_a_setting_that_is_gone_is_refused_with_what_to_write_instead():
    text = message("train.model = 1\ntrain.canonical_replicas = 4")
    assert text.startswith(
        "0.gin:2: train.canonical_replicas is gone. Write train.deterministic = 8, with that number."
    )


def test_what_is_no_function_is_refused():
    assert "library.CLASSES is a int" in message("import library\ntrain.model = @library.CLASSES")


def test_an_import_of_a_missing_module_is_refused_with_the_near_one():
    text = message("import libary\ntrain.model = 1")
    assert (
        text.startswith("0.gin:1: 'import libary': there is no module 'libary'.") and "Did you mean 'library'" in text
    )
    text = message("from tfdist import errrors\ntrain.model = 1")
    assert "tfdist has no module 'errrors'" in text and "Did you mean 'errors'" in text
    assert "Is it installed" in message("import surely_nowhere_to_be_found\ntrain.model = 1")


def test_an_import_of_a_removed_module_says_what_to_write_instead():
    text = message("from tfdist.data.pipeline import served\ntrain.model = 1")
    assert "tfdist has no tfdist.data.pipeline.served any more. End your own pipeline with tf.data" in text


def test_an_import_of_a_function_is_refused_with_the_import_of_its_module():
    text = message("from library import build_head\ntrain.model = @build_head")
    assert "Write 'import library', and library.build_head" in text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 1\ndef f(:\n    pass\n", "own.py:2"),
        ("x = 1\nimport nowhere_to_be_found\n", "own.py:2: import nowhere_to_be_found"),
        ("def f():\n    return 1 / 0\nf()\n", "own.py:2: return 1 / 0"),
    ],
)
def test_a_failure_inside_a_users_module_is_shown_with_its_line(code: str, expected: str):
    write("own.py", code)
    text = message("train.model = 1\nimport own")
    assert text.startswith("0.gin:2: 'import own' failed: ") and expected in text


@pytest.mark.parametrize(
    "statement", ["import library as train", "import gin", "from __gin__ import dynamic_registratio"]
)
def test_imports_that_gin_files_cannot_have_are_refused(statement: str):
    assert message(f"{statement}\ntrain.model = 1").startswith("0.gin:1: ")


# Values that are missing.


def test_an_unset_required_macro_is_refused_where_the_root_reaches_it():
    text = message("include 'runs/both.gin'", run="train")
    assert text.startswith("runs/both.gin:4: MODEL must be set") and "--gin_param='MODEL = …'" in text


def test_an_unset_required_value_that_the_root_does_not_reach_is_left_alone():
    loaded = load("train.model = 1\nevaluate.model = %gin.REQUIRED")
    assert loaded.run("train")["model"] == 1
    with pytest.raises(UserError, match=r"0.gin:2: evaluate.model must be set"):
        loaded.check("evaluate")


def test_a_roots_parameter_without_default_must_be_set():
    text = message("train.epochs = 3", run="train")
    assert "train.model has no value" in text and "--gin_param='train.model = …'" in text


def test_what_is_evaluated_for_a_root_must_be_complete():
    text = message("import library\ntrain.model = [@library.build_mlp()]", run="train")
    assert text.startswith("0.gin:2: library.build_mlp.width has no value")


def test_a_call_inside_the_run_that_lacks_a_value_is_named():
    text = message("import library\ntrain.model = @library.build_mlp", run="train")
    assert "library.build_mlp.width has no value. Write library.build_mlp.width = …" in text


def test_gins_own_required_arguments_are_named():
    write("own.py", "import gin\ndef build(width=gin.REQUIRED): return width")
    assert "own.build.width has no value" in message("import own\ntrain.model = @own.build", run="train")


def test_an_unknown_root_is_refused_with_the_near_one():
    with pytest.raises(UserError, match="Did you mean 'train'"):
        load("train.model = 1").run("trains")


# Settings without effect.


def test_a_setting_of_a_function_that_nothing_refers_to_is_refused():
    text = message(EXPERIMENT, "import library\nlibrary.build_mlp.width = 3")
    assert text.startswith("1.gin:2: ") and "nothing that is used refers to @library.build_mlp" in text
    assert text.endswith("library.build_mlp.width = 3")


def test_all_settings_without_effect_are_named_at_once():
    text = message("train.model = 1", "import library\nlibrary.build_mlp.width = 3\nUNUSED = 3")
    assert "1.gin:2: " in text and "1.gin:3: " in text


def test_settings_made_idle_by_an_override_are_left_alone_and_not_written():
    loaded = load(EXPERIMENT, params=("MODEL = @library.build_head",))
    assert loaded.run("train")["model"] == ("head", 10)
    assert "build_convnet" not in loaded.text()
    idle = [binding for binding in loaded.bindings if binding.idle]
    assert [(b.key, b.overridden) for b in idle] == [("library.build_convnet.filters", False)]
    assert "Without effect" in loaded.explain()


def test_a_macro_that_nothing_uses_is_refused():
    text = message(EXPERIMENT + "    MODLE = 3\n")
    assert "the macro MODLE is defined, but nothing" in text and "Did you mean 'MODEL'" in text
    assert "Did you mean 'train.epochs'" in message("train.model = 1\nepochs = 3")


def test_a_setting_in_a_scope_that_no_reference_carries_is_refused():
    text = message(EXPERIMENT.replace("train/library.load_digits.shuffle", "trian/library.load_digits.shuffle"))
    assert "0.gin:8: " in text and "'trian'" in text and "Did you mean 'train'" in text


def test_an_outer_references_scope_holds_for_what_it_is_given():
    text = """
        import library
        train.model = @big/library.build_convnet
        library.build_convnet.head = @library.build_head
        big/library.build_head.classes = 1000
    """
    assert load(text).run("train")["model"][2] == ("head", 1000)


def test_a_macros_name_is_the_scope_of_what_it_evaluates_only():
    text = "import library\ntrain.model = %HEAD\nHEAD = @library.build_head{}\nHEAD/library.build_head.classes = 3"
    assert load(text.format("()")).run("train")["model"] == ("head", 3)
    assert "carries the scope 'HEAD'" in message(text.format(""))


# Errors of called code.


def test_a_user_error_from_called_code_comes_through_clean():
    def check():
        raise UserError("the batch size cannot be split")

    write("own.py", "")
    roots = {"train": train, "inner": check}
    assert message("train.model = @inner", run="train", roots=roots) == "the batch size cannot be split"


def test_an_exception_from_called_code_keeps_type_message_and_traceback():
    with pytest.raises(ValueError) as caught:
        load("import library\ntrain.model = @library.noisy").run("train")
    assert type(caught.value) is ValueError and str(caught.value) == "what the user's code says"
    assert any("library.noisy" in note or "'noisy'" in note for note in caught.value.__notes__)
    assert caught.traceback[-1].path.name == "library.py"


def test_a_type_error_inside_called_code_stays_one():
    write("own.py", "def build(width=1): return len(width)")
    with pytest.raises(TypeError, match="has no len"):
        load("import own\ntrain.model = @own.build").run("train")


# What is written.


def effective(loaded: loading.Config) -> dict[str, str]:
    return {b.key: b.value for b in loaded.bindings if not b.overridden and not b.idle}


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
    train.seed = %gin.REQUIRED
    """
)


def test_the_written_configuration_loads_to_the_same_one():
    loaded = load(RICH, params=("train.epochs = 3",))
    text = loaded.text()
    again = load(text)
    assert effective(again) == effective(loaded)
    assert (again.text(), again.digest()) == (text, loaded.digest())
    assert again._gin_bindings.keys() == loaded._gin_bindings.keys()


def test_the_written_configuration_has_plain_roots_and_its_imports():
    text = load(EXPERIMENT, params=("train.epochs = 3",)).text()
    modules = f"# modules in: {Path.cwd().resolve()}"
    assert text.splitlines()[1:4] == [modules, "from __gin__ import dynamic_registration", "import library"]
    for line in ("train.epochs = 3", "MODEL = @library.build_convnet", "train/library.load_digits.shuffle = True"):
        assert line in text.splitlines()


def test_the_operative_configuration_adds_the_defaults_that_were_used():
    loaded = load(EXPERIMENT)
    assert loaded.operative_text() == loaded.text()
    loaded.run("train")
    text = loaded.operative_text()
    for line in ("train.seed = 0", "library.load_digits.split = 'train'", "library.build_convnet.name = None"):
        assert line in text.splitlines()
    assert "build_head" not in text
    again = load(text)
    assert effective(loaded).items() <= effective(again).items()
    assert again.run("train") == loaded.run("train")
    assert again.digest() == loaded.digest()
    assert again.operative_text().count("train.seed = 0") == 1


def test_the_written_configuration_does_not_depend_on_earlier_loads():
    write("pack/__init__.py", "")
    write("pack/models.py", "def build(): return 'built'")
    first, second = (
        "from pack import models\ntrain.model = @models.build",
        "import pack.models\ntrain.model = @pack.models.build",
    )
    texts = [load(first).text(), load(second).text()]
    assert [load(first).text(), load(second).text()] == texts
    assert load(first).digest() == load(second).digest()
    assert load(texts[1]).text() == texts[1]


def test_the_digest_depends_on_what_holds_only():
    write("other.gin", "import library as models\ntrain.epochs = 10\nMODEL = @models.build_convnet")
    same = """
        include 'other.gin'
        import library
        N = (32, 64)
        train/library.load_digits.shuffle = True
        train.data = @train/library.load_digits
        include 'runs/both.gin'
        include 'other.gin'
        library.build_convnet.filters = %N
        train.seed = 0
    """
    assert load(same).digest() == load(EXPERIMENT).digest()
    assert load(EXPERIMENT, params=("train.epochs = 11",)).digest() != load(EXPERIMENT).digest()
    assert len(load(EXPERIMENT).digest()) == 64


def test_bindings_say_where_they_come_from_and_what_was_overridden():
    bindings = load(EXPERIMENT, params=("train.epochs = 3",)).bindings
    epochs = [b for b in bindings if b.key == "train.epochs"]
    assert [(b.value, b.source, b.overridden) for b in epochs] == [
        ("10", "0.gin:6", True),
        ("3", "--gin_param 'train.epochs = 3'", False),
    ]


def test_the_explanation_is_a_table_of_values_and_sources():
    lines = load(EXPERIMENT, params=("train.epochs = 3",)).explain().splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("  train.epochs "))
    assert lines[row].split() == ["train.epochs", "=", "3", "--gin_param", "'train.epochs", "=", "3'"]
    assert lines[row + 1].split() == ["overrides", "10", "of", "0.gin:6"]
    sources = [line.index("0.gin:") for line in lines if " = " in line and "0.gin:" in line and "overrides" not in line]
    assert len(set(sources)) == 1
    assert load(EXPERIMENT).explain() == load(EXPERIMENT).explain()


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
    pytest.importorskip("keras")
    write("nets.py", NETS)
    text = message(f"import keras\nimport nets\ntrain.model = %M\nM = [@{reference}()]")
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
    keras = pytest.importorskip("keras")
    write("nets.py", NETS)
    text = """
        import keras
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
    assert load(loaded.operative_text()).digest() == loaded.digest()


def test_a_misspelt_parameter_of_a_keras_optimizer_is_refused_before_the_run():
    pytest.importorskip("keras")
    text = message("import keras\ntrain.model = @keras.optimizers.Adam\nkeras.optimizers.Adam.learning_rte = 1.0")
    assert "0.gin:3: " in text and "Did you mean 'learning_rate'" in text


def logged(*, paths: Any = None) -> Any:
    return paths


def test_the_run_directory_is_a_macro_that_stays_one_in_what_is_written():
    roots = {"train": logged}
    text = """
        train.paths = [%LOG, '%RUN_DIR/{epoch:02d}-a.keras', {'all': %RUN_DIR}, '100%', '%Y-%m-%d']
        LOG = %RUN_DIR/logs/log.csv
    """
    loaded = load(text, roots=roots)
    for run_dir in ("runs/one", "gs://bucket/two/"):
        under = run_dir.rstrip("/")
        assert loaded.run("train", run_dir=run_dir) == [
            f"{under}/logs/log.csv",
            f"{under}/{{epoch:02d}}-a.keras",
            {"all": run_dir},
            "100%",
            "%Y-%m-%d",
        ]
    written = loaded.operative_text()
    assert "LOG = %RUN_DIR/logs/log.csv" in written and "'%RUN_DIR/{epoch:02d}-a.keras'" in written
    assert "runs/one" not in written and "bucket" not in written
    again = load(written, roots=roots)
    assert again.digest() == loaded.digest()
    assert again.run("train", run_dir="elsewhere")[0] == "elsewhere/logs/log.csv"
    assert "%RUN_DIR/logs/log.csv" in loaded.explain()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.paths = %RUN_DIRS", "the macro %RUN_DIRS is defined nowhere. Did you mean 'RUN_DIR'?"),
        ("train.paths = %RUNDIR/log.csv", "the macro %RUNDIR/log.csv is defined nowhere."),
        ("train.paths = ['%RUNDIR/log.csv']", "begins with %RUNDIR, which is nothing. Did you mean '%RUN_DIR'?"),
        ("train.paths = '%run_dir/log.csv'", "begins with %run_dir, which is nothing. Did you mean '%RUN_DIR'?"),
        ("train.paths = %RUN_DIR/{epoch}.keras", "has quotes: '%RUN_DIR/…'"),
        ("RUN_DIR = 'runs/mine'", "the macro RUN_DIR is given by --run_dir. Give yours another name."),
    ],
)
def test_what_is_nearly_the_run_directory_is_refused(text, expected):
    assert expected in message(text, roots={"train": logged})


@pytest.mark.slow
def test_without_a_run_directory_its_macro_is_refused():
    loaded = load("train.options = %RUN_DIR\ntrain.model = 1")
    with pytest.raises(UserError, match="%RUN_DIR is used, and this command has no run directory"):
        loaded.run("train")
