"""Trainings whose batches other processes make: the same weights, and an end when a service is wrong or gone."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence

import forks
import keras
import numpy as np
import pytest
import support
from PIL import Image

from tfdist.data.pipeline.served import Served
from tfdist.errors import EXIT_PEER_LOST, EXIT_USER_ERROR, UserError

pytestmark = pytest.mark.slow

EXPERIMENT = """
from __gin__ import dynamic_registration
import keras
from tfdist import experiment
from tfdist.data.formats import image_folder
from tfdist.models import convnet
from tfdist.tasks import supervised

train.train_data = @image_folder.ImageFolder
train.model = @convnet.build_convnet
train.optimizer = @keras.optimizers.Adam
train.task = @supervised.Supervised()
train.strategy = %STRATEGY
train.epochs = 3
train.global_batch_size = 16
train.deterministic = True
image_folder.ImageFolder.root = %ROOT
image_folder.ImageFolder.size = (8, 8)
image_folder.ImageFolder.channels = 1
image_folder.ImageFolder.augmentation = [@keras.layers.RandomRotation]
keras.layers.RandomRotation.factor = 0.1
convnet.build_convnet.input_shape = (8, 8, 1)
convnet.build_convnet.num_classes = 2
supervised.Supervised.loss = @keras.losses.SparseCategoricalCrossentropy()
keras.losses.SparseCategoricalCrossentropy.from_logits = True
"""
AUTO = support.REPOSITORY / "configs" / "strategies" / "auto.gin"
SERVED = """
from __gin__ import dynamic_registration
from tfdist.data.formats import image_folder
from tfdist.data.pipeline import served
train.train_data = @served.Served
served.Served.data = @image_folder.ImageFolder
served.Served.services = %SERVICES
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The experiment, and what takes its data from services."""
    folder = tmp_path_factory.mktemp("experiment")
    draw = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(37):
            pixels = draw.integers(0, 255, (8, 8)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{i}.png")
    (folder / "plain.gin").write_text(EXPERIMENT + f"ROOT = {str(folder / 'images')!r}\ninclude '{AUTO}'\n")
    (folder / "served.gin").write_text(SERVED)
    return [str(folder / "plain.gin"), str(folder / "served.gin")]


@contextlib.contextmanager
def services(files: Sequence[str], count: int, *params: str) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """Running services, and the parameter that names them."""
    ports = support.free_ports(count)
    named = f"--gin_param=SERVICES = {[f'127.0.0.1:{port}' for port in ports]}"
    flags = [*(f"--gin_file={file}" for file in files), named, *(f"--gin_param={param}" for param in params)]
    mark = uuid.uuid4().hex
    started = [
        forks.Popen(
            [sys.executable, "-m", "tfdist.data_service", *flags, f"--port={port}"],
            env=support.clean_environment() | {support.MARK: mark},
            stdout=subprocess.PIPE,
            text=True,
        )
        for port in ports
    ]
    try:
        for process, port in zip(started, ports, strict=True):
            assert process.stdout.readline() == f"serving on 127.0.0.1:{port}\n"
        yield named, started
    finally:
        support.kill_marked(mark)
        for process in started:
            process.wait()
            process.stdout.close()


def command(files: Sequence[str], run_dir: pathlib.Path, *more: str) -> list[str]:
    return ["-m", "tfdist.main", *(f"--gin_file={file}" for file in files), f"--run_dir={run_dir}", *more]


def weights(run_dir: pathlib.Path) -> list[np.ndarray]:
    return [np.array(w) for w in keras.models.load_model(run_dir / "export" / "model.keras").get_weights()]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_one_worker_learns_the_same_bits_from_any_number_of_services(
    files: list[str], tmp_path: pathlib.Path, count: int
) -> None:
    support.run_python(command(files[:1], tmp_path / "plain")).check()
    with services(files, count) as (named, _):
        support.run_python(command(files, tmp_path / "served", named)).check()
    assert equal(weights(tmp_path / "served"), weights(tmp_path / "plain"))


def test_two_workers_learn_the_same_bits_from_two_services(files: list[str], tmp_path: pathlib.Path) -> None:
    launch = ["-m", "tfdist.launch", "--workers=2", "--"]
    support.run_python([*launch, *command(files[:1], tmp_path / "plain")[2:]]).check()
    with services(files, 2) as (named, _):
        support.run_python([*launch, *command(files, tmp_path / "served", named)[2:]]).check()
    assert equal(weights(tmp_path / "served"), weights(tmp_path / "plain"))


def test_a_service_that_reads_other_data_or_is_not_there_is_refused(files: list[str], tmp_path: pathlib.Path) -> None:
    with services(files, 1, "image_folder.ImageFolder.method = 'nearest'") as (named, _):
        refused = support.run_python(command(files, tmp_path / "other", named))
    assert refused.status == EXIT_USER_ERROR
    assert "it reads other data. Start it with the same gin files" in refused.stderr
    absent = support.run_python(command(files, tmp_path / "absent", named))
    assert absent.status == EXIT_USER_ERROR
    assert "cannot be reached" in absent.stderr and "python -m tfdist.data_service" in absent.stderr


def test_a_training_ends_when_a_service_is_killed(files: list[str], tmp_path: pathlib.Path) -> None:
    endless = ("--gin_param=train.epochs = 1000000", "--gin_param=train.xla = 'off'")
    with services(files, 2) as (named, started):
        training = forks.Popen(
            [sys.executable, *command(files, tmp_path / "run", named, *endless)],
            env=support.clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            for line in training.stdout:
                if "epoch" in line and "loss" in line:  # it trains
                    break
            started[1].kill()
            _, said = training.communicate(timeout=100)
        finally:
            training.kill()
            training.wait()
    assert training.returncode == EXIT_PEER_LOST
    assert "is gone, and training waits for its batches" in said


def test_a_corrupt_image_that_a_service_meets_is_told_by_the_training(files: list[str], tmp_path: pathlib.Path) -> None:
    root = tmp_path / "images"
    for i in range(40):
        (root / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), i).save(root / "ab"[i % 2] / f"{i}.png")
    (root / "a" / "4.png").write_bytes(b"no image")
    where = f"ROOT = {str(root)!r}"
    with services(files, 2, where) as (named, _):
        ended = support.run_python(command(files, tmp_path / "run", named, f"--gin_param={where}"))
    assert ended.status == EXIT_USER_ERROR
    assert "4.png" in ended.stderr and "cannot be decoded" in ended.stderr


def test_workers_of_one_command_end_with_it(files: list[str]) -> None:
    ports = support.free_ports(1)
    flags = [*(f"--gin_file={file}" for file in files), "--gin_param=SERVICES = ['127.0.0.1:1']"]
    mark = uuid.uuid4().hex
    started = forks.Popen(
        [sys.executable, "-m", "tfdist.data_service", *flags, f"--port={ports[0]}", "--workers=2"],
        env=support.clean_environment() | {support.MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = {started.stdout.readline() for _ in range(2)}
        assert lines == {f"serving on 127.0.0.1:{ports[0] + i}\n" for i in range(2)}
        started.terminate()
        assert started.wait(30) == 0
        assert started.stdout.read() == ""  # nobody holds it open any more
    finally:
        support.kill_marked(mark)
        started.stdout.close()


def test_what_cannot_be_served_is_refused() -> None:
    import tensorflow as tf

    arrays = (np.zeros((4, 2), np.float32), np.zeros(4, np.int32))
    with pytest.raises(UserError, match=r"whose examples cannot be shared out among services"):
        Served(lambda: tf.data.Dataset.from_tensor_slices(arrays), services=["127.0.0.1:5050"])
    for wrong in ("127.0.0.1:5050", [], ["nowhere"], ["grpc://host:1"]):
        with pytest.raises(UserError, match=r"Served.services is a list of addresses"):
            Served(lambda: arrays, services=wrong)
