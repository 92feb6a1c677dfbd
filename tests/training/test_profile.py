"""Profiles of a training: exactly the steps asked for, by every worker, and nothing of the training is changed."""

from __future__ import annotations

import pathlib
import signal

import pytest
import support
import tensorflow as tf
from processes import Running, running
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace
from training.trainings import Trained
from training.trainings import run as train

from tfdist.errors import UserError
from tfdist.training.run.request import ProfiledSteps
from tfdist.training.watch.profiler import MARK

DIGITS = ["--gin_file=configs/experiments/digits.gin", "--gin_param=train.epochs = 2"]  # 23 steps each
PROFILES = "tensorboard/plugins/profile/*/worker-?.xplane.pb"
OUTCOMES = "[worker 0] Profile of the steps", "Fatal Python error"


def profiled_steps(path: pathlib.Path) -> int:
    """The steps of the calls that a profile holds whole."""
    space = XSpace.FromString(path.read_bytes())
    (host,) = [plane for plane in space.planes if plane.name == "/host:CPU"]
    calls = [e for line in host.lines for e in line.events if host.event_metadata[e.metadata_id].name == MARK]
    stats = [stat for call in calls for stat in call.stats if host.stat_metadata[stat.metadata_id].name == "steps"]
    return sum(getattr(stat, stat.WhichOneof("value")) for stat in stats)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--profile=steps a-b"], "--profile='steps a-b' names no steps. Write --profile='steps 100-110'"),
        (["--profile=steps 1-2", "--mode=evaluate"], "--profile works with --mode=train, and this is --mode=evaluate."),
    ],
)
def test_a_wrong_flag_ends_the_command_before_tensorflow_is_imported(arguments: list[str], told: str) -> None:
    program = (
        "import sys; from tfdist.main import main; status = main(sys.argv[1:]); print('tensorflow' in sys.modules)"
    )
    ended = support.run_python(["-c", program + "; sys.exit(status)", *DIGITS, *arguments], cwd=support.REPOSITORY)
    assert (ended.status, ended.stdout) == (2, "False\n")
    assert told in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_command_profiles_the_steps_that_it_names(tmp_path: pathlib.Path) -> None:
    mirrored = ["--gin_file=configs/strategies/mirrored.gin", "--gin_param=mirrored.Mirrored.num_cpu_devices = 2"]
    arguments = [*DIGITS, *mirrored, "--profile=steps 20-30", f"--run_dir={tmp_path}"]  # in which an epoch ends
    done = support.run_python(["-m", "tfdist.main", *arguments], cwd=support.REPOSITORY).check()
    (event,) = Trained(tmp_path).events("profiled")
    assert (event["step"], event["details"]["first_step"]) == (30, 20)
    path = tmp_path / "tensorboard" / "plugins" / "profile" / "steps-20-30" / "worker-0.xplane.pb"
    assert event["details"]["path"] == str(path)
    assert f"Profile of the steps 20 to 30: {path}" in done.stdout
    assert profiled_steps(path) == 11  # none before or after


@pytest.mark.slow
def test_the_weights_are_the_same_bits_with_a_profile(tmp_path: pathlib.Path) -> None:
    plain = train(tmp_path / "plain", deterministic=True)
    profiled = train(tmp_path / "profiled", deterministic=True, profile=ProfiledSteps(6, 9))  # in which an epoch ends
    assert profiled.bits() == plain.bits()
    (event,) = profiled.events("profiled")
    assert (event["step"], profiled_steps(pathlib.Path(event["details"]["path"]))) == (9, 4)
    assert not plain.events("profiled")


@pytest.mark.slow
def test_another_profiler_in_the_process_costs_a_warning_and_no_training(tmp_path: pathlib.Path) -> None:
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        trained = train(tmp_path / "run", profile=ProfiledSteps(3, 5))
    finally:
        tf.profiler.experimental.stop(save=False)
    assert trained.result is not None
    (warning,) = trained.events("not_profiled")
    assert "There is no profile of the steps after 2: AlreadyExistsError: " in warning["details"]["message"]


@pytest.mark.slow
def test_steps_that_a_run_does_not_have_are_refused(tmp_path: pathlib.Path) -> None:
    trained = train(tmp_path, may_fail=True, profile=ProfiledSteps(3, 5000))
    assert isinstance(trained.error, UserError) and "this run has 14 steps" in str(trained.error)


def ask_for_profiles(launcher: Running) -> None:
    counts = [launcher.output.count(text) for text in OUTCOMES]
    launcher.until(lambda: "| eval" in launcher.output.rpartition(OUTCOMES[-1])[2])
    launcher.signal(signal.SIGUSR2)
    launcher.until(lambda: counts != [launcher.output.count(text) for text in OUTCOMES])


@pytest.mark.slow
def test_a_signal_to_the_launcher_profiles_every_worker_of_a_running_job(tmp_path: pathlib.Path) -> None:
    run_dir = tmp_path / "run"
    command = ["--workers=2", "--", *DIGITS, "--gin_param=train.epochs = 3000", f"--run_dir={run_dir}"]
    with running(command, tmp_path / "output", directory=support.REPOSITORY, module="tfdist.launch") as launcher:
        while len({path.name for path in run_dir.glob(PROFILES)}) < 2:
            ask_for_profiles(launcher)  # again if TensorFlow's profiler ended a worker in native code
        launcher.signal(signal.SIGTERM)
        status, said = launcher.end(), launcher.output
    assert status == 143, said  # it went on, and left when it was told to
    assert "[launch] Passing SIGUSR2 on to the workers" in said and "[worker 0] Profile of the steps" in said
    for path in run_dir.glob(PROFILES):
        first, last = map(int, path.parent.name.removeprefix("steps-").split("-"))
        assert profiled_steps(path) == last - first + 1 >= 10
