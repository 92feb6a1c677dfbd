"""Every command and snippet of the tutorials and how-tos, typed with an installed wheel in an empty directory.

A page is typed from its top to its end, in one directory. A command runs as it stands, but for the replacements of
`REPLACED`; one that begins as `NOT_HERE` says does not. What the page shows as its output has to come out, whatever the
numbers. A snippet of Python is written to the file that the page names, or executed; one of gin is validated on top of
the experiment that the page adds it to. What no table names fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
import yaml
from processes import serving
from support import REPOSITORY, Finished, free_ports, is_open, read_code_blocks, run_command

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
SITE = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
NAV = {name: pages for section in SITE["nav"] for name, pages in section.items()}
PAGES = ["../README.md"] + [
    page if isinstance(page, str) else next(iter(page.values()))
    for name in ("Start", "How-to", "Operate")
    for page in NAV[name]
]
PORTS = free_ports(4)

# How a command begins that does not run here, and why.
NOT_HERE = {
    "RAY_ADDRESS=HOST:6379": "a Ray cluster: tests/tuning/test_ray.py",
    "airflow": "an environment of Airflow's own: tests/launch/test_pipelines.py",
    "docker": "Docker",
    "gcloud": "an account at Google",
    "kill -USR2 PID": "a training that is killed",
    "kubectl": "a cluster: tests/launch/test_clusters.py",
    "nvidia-smi": "a GPU",
    "pip install": "a package index",
    "python -c 'import tensorflow": "a GPU",
    'python -c "import tensorflow': "a TPU",
    "ray start": "a Ray cluster: tests/tuning/test_ray.py",
    "python make_small.py": "TFDS: tests/examples/test_examples.py",
    "tfdist launch -n 2 train cifar10.gin": "TFDS: tests/examples/test_examples.py",
    "tfdist report runs/cifar10": "TFDS: tests/examples/test_examples.py",
    "tfdist train language.gin": "KerasHub: tests/examples/test_examples.py",
    "python generate.py": "the same",
    "tfdist launch -n 2 train lora.gin": "KerasHub: tests/examples/test_examples.py",
    "python kfp_pipeline.py": "an environment of kfp's own: tests/launch/test_pipelines.py",
    "tfdist doctor tfdist:experiments/digits.gin --compile_for": "JAX and libtpu, 1.3 GB: tests/tpu_compiler",
    "tfdist launch -n 2 --launcher=horovod": "Horovod, which is not everywhere: tests/keras_fit/test_from_fit.py",
    "tfdist launch --hosts=": "two machines: tests/launch/test_hosts.py",
    "tfdist launch --launcher=ray": "a Ray cluster: tests/launch/test_ray.py",
    "tools/": "a package index",
}
# What is typed instead: shorter trainings, this machine for others, directories for buckets, free ports.
REPLACED = {
    "train.epochs=2000": "train.epochs=2",
    "sweep tfdist:experiments/digits_sweep.gin": (
        "sweep tfdist:experiments/digits_sweep.gin tune.max_trials=2 train.epochs=1"
    ),
    "--min_workers=4 doctor": "--min_workers=2 doctor --largest_mib=1",
    "--min_workers=4 --max": "--min_workers=2 --max",
    "train tfdist:experiments/digits.gin tfdist:strategies/tpu.gin": (
        "validate tfdist:experiments/digits.gin tfdist:strategies/tpu.gin"
    ),
    "gs://BUCKET/": "runs/",
    "gs://bucket/": "runs/",
    "/shared/run": "runs/shared",
    "$HOME/": "",
    "/var/lib/prometheus/node-exporter": ".",
    "host1\\nhost2:2": "localhost:2",
    '"host1:2222", "host2:2222"': f'"127.0.0.1:{PORTS[0]}"',
    "tests/gcs/server.py --port=9023": f"{REPOSITORY}/tests/gcs/server.py --port={PORTS[1]}",
    "127.0.0.1:9023": f"127.0.0.1:{PORTS[1]}",
    "--port=8000": f"--port={PORTS[2]}",
    "tensorboard --logdir": f"tensorboard --port={PORTS[3]} --logdir",
}
SERVERS = {
    f"{REPOSITORY}/tests/gcs/server.py": PORTS[1],
    "server/serve.py": PORTS[2],
    "tensorboard": PORTS[3],
}
REMOVED = {"tfdist launch -n 4 train.py": "runs/digits"}  # as the page says before the command
# How a shown line begins that another course of things prints: a kill, after which a run resumes.
NOT_PRINTED = (
    *("Resuming at step", "warning: SIGTERM was received", "Left at step", "2,737 "),
    *("[launch] worker 1 ended", "[launch] Starting again", "[worker 0] Resuming at step"),
)


@dataclasses.dataclass(frozen=True)
class Snippet:
    """What a page's block of Python or gin is.

    Attributes:
      file: it is written as this file.
      before: it is executed after these lines, which the page leaves out.
      gin: it is validated after these lines.
      reason: why it is compiled alone.
    """

    file: str = ""
    before: str = ""
    gin: str | None = None
    reason: str = ""


DIGITS = "include 'tfdist:experiments/digits.gin'\n"
BLOCKS = "include 'blocks.gin'\n"
SINKS = "from tfdist.telemetry.sinks import prometheus\ntrain.sinks = [@prometheus.Prometheus()]\n"
SNIPPETS = {
    "from_fit.md": [Snippet(file="train.py")],
    "your_own_experiment.md": [
        Snippet(file="smallest.py"),
        Snippet(file="smallest.gin"),
        Snippet(gin=""),
        Snippet(before="import keras\nimport numpy as np\n"),
        Snippet(gin="include 'diabetes.gin'\n"),
        Snippet(gin=DIGITS),
        Snippet(before="import keras\nfrom tfdist.tasks.task import Task, Term\n"),
    ],
    "data.md": [
        Snippet(file="my_data.py"),
        Snippet(gin=DIGITS),
        Snippet(file="my_data.py"),
        Snippet(gin=DIGITS),
        Snippet(gin=f"{DIGITS}import my_sets\n"),
        Snippet(before="import numpy as np\nfrom PIL import Image\npaths, labels = ['one.png'], [0]\n"),
        Snippet(before="import tensorflow as tf\n"),
    ],
    "checkpoint.md": [Snippet(gin=DIGITS), Snippet(gin=DIGITS)],
    "recipes.md": [
        Snippet(gin=BLOCKS + "train.optimizer = @keras.optimizers.AdamW\n"),
        Snippet(gin=BLOCKS),
        Snippet(gin=BLOCKS + "train.optimizer = @keras.optimizers.SGD\n"),
        Snippet(gin=DIGITS),
        Snippet(gin=DIGITS),
    ],
    "train_steps.md": [Snippet(file="train.py")],
    "sharding.md": [
        Snippet(gin=DIGITS),
        Snippet(gin=BLOCKS),
        Snippet(gin=BLOCKS + "tfdist.Pipelined.num_cpu_devices = 3\n"),
        Snippet(gin=DIGITS + "train.drop_remainder = True\n"),
    ],
    "tuning.md": [
        Snippet(gin=DIGITS),
        Snippet(reason="ten trials: tests/tuning/test_hypermodel.py"),
        Snippet(gin="include 'tfdist:experiments/digits_sweep.gin'\n"),
    ],
    "trackers.md": [Snippet(gin=DIGITS)],
    "serving.md": [Snippet(gin=DIGITS)],
    "launch.md": [Snippet(gin=DIGITS)],
    "pipelines.md": [Snippet(reason="kfp has an environment of its own")],
    "monitoring.md": [Snippet(gin=DIGITS), Snippet(gin=DIGITS + SINKS), Snippet(gin=DIGITS)],
}

# The files that a page takes as there, by name.
IMAGES = """
import numpy as np
from PIL import Image
images = np.random.default_rng(0).random((64, 8, 8, 1), np.float32)
np.savez("train.npz", images=images, labels=np.arange(64) % 10)
Image.fromarray(np.uint8(images[0, ..., 0] * 255)).save("one.png")
"""
HUB = """
import numpy as np
def load_dataset(name, split):
    return [{"image": np.zeros((8, 8, 1), np.float32), "label": number % 10} for number in range(64)]
"""
SETS = """
import numpy as np
def load(split):
    return np.zeros((64, 8, 8, 1), np.float32), np.arange(64) % 10
"""
BLOCKS_MODULE = """
import keras
import numpy as np

def load_words():
    return np.arange(512).reshape(64, 8) % 100, np.arange(64) % 2

def build_blocks():
    layers = keras.layers
    names = ["transformer_1", *(f"block_{number}" for number in range(5)), "transformer_2"]
    dense = [layers.Dense(16, activation="relu", name=name) for name in names]
    ends = [layers.LayerNormalization(name="norm"), layers.Dense(2, name="head")]
    words = [keras.Input((8,)), layers.Embedding(100, 4, name="words"), layers.Flatten()]
    return keras.Sequential([*words, *dense, *ends])
"""
BLOCKS_GIN = """
import blocks
train.model = @blocks.build_blocks
train.train_data = @blocks.load_words
train.task = @tfdist.Supervised()
tfdist.Supervised.loss = @keras.losses.SparseCategoricalCrossentropy()
train.epochs = 10
train.global_batch_size = 32
train.optimizer = @keras.optimizers.Adam
"""
SCRIPT = read_code_blocks(REPOSITORY / "docs" / "from_fit.md", "python")[0]
BLOCKS_FILES = {"blocks.py": BLOCKS_MODULE, "blocks.gin": BLOCKS_GIN}
REQUEST = '{"modelConfig": {"size": "1M"}, "dataConfig": {"size": "1GB"}, "clusterConfig": {"gpusPerNode": 2}}'
FILES = {
    "../README.md": {"train.py": SCRIPT},
    "from_fit.md": {"hosts.txt": "localhost:2\n"},
    "data.md": {"datasets.py": HUB, "prepare.py": IMAGES, "my_sets.py": SETS},
    "plan.md": {"request.json": REQUEST},
    "recipes.md": BLOCKS_FILES,
    "sharding.md": BLOCKS_FILES,
    **{page: {"my.gin": DIGITS} for page in ("launch.md", "clusters.md", "tuning.md")},
}
EXAMPLES = {"your_own_experiment.md": "diabetes", "serving.md": "serving"}
# Runs of the digits that a page takes as there.
RUNS = {
    "recipes.md": ["digits"],
    "report.md": ["digits", *(f"dropout-{rate}/seed-{seed}" for rate in ("0.0", "0.3") for seed in (0, 1))],
    "serving.md": ["digits"],
    "trackers.md": ["digits"],
}


LAUNCHED: dict[str, str] = {}  # what commands printed that several pages have, and nothing else depends on


class Shell:
    """Types commands one after another, as one terminal does."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self.directory = directory
        self._python = str(programs / "python")
        path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ["PATH"]])
        self._environment: dict[str, str | None] = {"PYTHONPATH": None, "PATH": path}
        self._servers = contextlib.ExitStack()

    def close(self) -> None:
        """Ends the servers."""
        self._servers.close()

    def type(self, line: str) -> Finished:
        """Runs a command; one of `SERVERS` until the end of the page."""
        words = shlex.split(line, comments=True)
        if words[0] == "cd":
            self.directory /= words[1]
            return Finished(0, "", "")
        if words[0] == "export":
            self._environment.update(word.split("=", 1) for word in words[1:])
            return Finished(0, "", "")
        if words[0] in ("tfdist", "python"):
            command = [self._python, *(["-m", "tfdist"] if words[0] == "tfdist" else []), *words[1:]]
        else:
            command = ["bash", "-c", line]
        for program, port in SERVERS.items():
            if program in line:
                nowhere, where = Path(os.devnull), {"variables": self._environment, "directory": self.directory}
                self._servers.enter_context(serving(command, nowhere, functools.partial(is_open, port), **where))
                return Finished(0, "", "")
        return run_command(command, env=self._environment, cwd=self.directory, timeout=300).check()


@pytest.fixture(scope="module")
def programs(installed: Path) -> Iterator[Path]:
    """The programs of the wheel's environment, whose Python is forked."""
    forks.INSTALLED.add(str(installed / "python"))
    yield installed
    forks.INSTALLED.clear()


@pytest.fixture(scope="module")
def digits(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a training."""
    shell = Shell(programs, tmp_path_factory.mktemp("digits"))
    shell.type("tfdist train tfdist:experiments/digits.gin --run_dir=runs/digits")
    return shell.directory / "runs" / "digits"


@pytest.fixture
def shell(programs: Path, tmp_path: Path) -> Iterator[Shell]:
    """A terminal in an empty directory."""
    with contextlib.closing(Shell(programs, tmp_path)) as shell:
        yield shell


def test_tfdist_is_the_wheel_s_in_forked_processes_too(shell: Shell, programs: Path) -> None:
    for needed in ("tfdist", "tensorflow"):  # of which the second is forked
        printed = shell.type(f"python -c 'import {needed}; import tfdist; print(tfdist.__file__)'").stdout
        assert printed.startswith(str(programs.parent))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs_as_it_is_typed(
    page: str, shell: Shell, request: pytest.FixtureRequest, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for name, text in FILES.get(page, {}).items():
        (tmp_path / name).write_text(text)
    if "prepare.py" in FILES.get(page, {}):
        shell.type("python prepare.py")
    if page in EXAMPLES:
        copy(REPOSITORY / "examples" / EXAMPLES[page], tmp_path)
    for run in RUNS.get(page, []):
        shutil.copytree(request.getfixturevalue("digits"), tmp_path / "runs" / run)
    snippets = iter(SNIPPETS.get(page, []))
    output = None
    for language, text in BLOCK.findall((REPOSITORY / "docs" / page).read_text()):
        indent = len(text) - len(text.lstrip(" "))
        text = re.sub(rf"^ {{{indent}}}", "", text, flags=re.MULTILINE)
        for old, new in REPLACED.items():
            text = text.replace(old, new)
        printed, output = output, None
        with subtests.test(text.partition("\n")[0]):
            if language == "bash":
                output = type_commands(shell, text)
            elif language == "python":
                run_snippet(shell, text, next(snippets))
            elif language == "text" and printed is not None:
                check_output(text, printed)
    assert not list(snippets)


def copy(example: Path, directory: Path) -> None:
    """Copies an example of the repository: a directory's files, or a file into examples/."""
    if example.is_dir():
        shutil.copytree(example, directory, dirs_exist_ok=True)
    else:
        (directory / "examples").mkdir()
        shutil.copy(example, directory / "examples")


def type_commands(shell: Shell, text: str) -> str | None:
    """Types the lines of a block; returns what they print, None where one of them does not run here."""
    printed = ""
    skipped = False
    for line in list_lines(text):
        if line.startswith(tuple(NOT_HERE)):
            skipped = True
            continue
        if line in REMOVED:
            shutil.rmtree(shell.directory / REMOVED[line], ignore_errors=True)
        output = LAUNCHED.get(line) or shell.type(line).outputs()
        if line.startswith("tfdist launch -n"):
            LAUNCHED[line] = output
        printed += output
    return None if skipped else printed


def list_lines(text: str) -> Iterator[str]:
    """The lines that a shell reads: up to the end of what is quoted or continued."""
    line = ""
    for part in text.replace("\\\n", " ").splitlines():
        line = f"{line}\n{part}" if line else part
        with contextlib.suppress(ValueError):  # a quotation goes on
            shlex.split(line, comments=True)
            yield line
            line = ""


def check_output(shown: str, printed: str) -> None:
    """Fails unless each line that the page shows is among those that were printed, whatever the numbers."""
    lines = {mask_numbers(line) for line in printed.splitlines()}
    wanted = [line for line in shown.splitlines() if line != "…" and not line.startswith(NOT_PRINTED)]
    assert not [line for line in wanted if mask_numbers(line) not in lines], printed


def mask_numbers(line: str) -> str:
    """The line without its numbers, the units of its times and the width of its columns."""
    return " ".join(re.sub(r"\b[0-9a-f]{12}\b|\d[\d,.:]*(e-?\d+)?( (s|min|h)\b)?", "0", line).split())


def run_snippet(shell: Shell, text: str, snippet: Snippet) -> None:
    """Writes, validates, executes or compiles a snippet."""
    if snippet.file:
        (shell.directory / snippet.file).write_text(text)
    elif snippet.gin is not None:
        (shell.directory / "snippet.gin").write_text(f"{snippet.gin}\n{text}")
        assert "\nvalid\n" in shell.type("tfdist validate snippet.gin").stdout
    else:
        compile(text, "snippet.py", "exec")
        if not snippet.reason:
            (shell.directory / "snippet.py").write_text(f"{snippet.before}\n{text}")
            shell.type("python snippet.py")


def test_every_entry_of_the_tables_is_for_something() -> None:
    text = "\n".join((REPOSITORY / "docs" / page).read_text() for page in PAGES)
    lines = [line for language, block in BLOCK.findall(text) if language == "bash" for line in block.splitlines()]
    assert not [start for start in NOT_HERE if not [line for line in lines if line.startswith(start)]]
    assert not [old for old in REPLACED if old not in text]
    assert not {*SNIPPETS, *FILES, *EXAMPLES, *RUNS} - {*PAGES}
