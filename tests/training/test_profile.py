"""Profiles of a training: exactly the steps asked for, by every worker, and nothing of the training is changed."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import sys
import uuid

import forks
import pytest
import support
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace
from training.test_input_wait import Slow
from training.trainings import run as train

from tfdist.errors import UserError
from tfdist.training.watch import profile_summary
from tfdist.training.watch.profile_operations import CONVOLUTION, Operation, Profile, merged, overlap, read
from tfdist.training.watch.profiled_steps import ProfiledSteps

DIGITS = ["--gin_file=configs/experiments/digits.gin", "--gin_param=train.epochs = 2"]  # 23 steps each


@pytest.mark.parametrize("text", ["", "100", "steps", "steps 9-3", "steps 0-3", "steps 1-3,7", "epochs 1-2"])
def test_what_names_no_steps_is_told(text: str) -> None:
    with pytest.raises(UserError, match=r"Write --profile='steps 100-110'"):
        ProfiledSteps.parse(text)
    assert ProfiledSteps.parse("step 7") == ProfiledSteps(7, 7)


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
@pytest.mark.parametrize("strategy", ["one_device", "mirrored"])
def test_the_command_profiles_the_steps_that_it_names(strategy: str, tmp_path: pathlib.Path) -> None:
    mirrored = ["--gin_param=mirrored.Mirrored.num_cpu_devices = 2"] if strategy == "mirrored" else []
    arguments = [
        *DIGITS,
        f"--gin_file=configs/strategies/{strategy}.gin",
        *mirrored,
        "--profile=steps 20-30",
    ]  # in which an epoch ends
    done = support.run_python(
        ["-m", "tfdist.main", *arguments, f"--run_dir={tmp_path}"], cwd=support.REPOSITORY
    ).check()
    summary = (tmp_path / "profile" / "steps-20-30.txt").read_text()
    assert summary in done.stdout
    assert re.match(
        r"Profile of the steps 20 to 30 \(CPU, host \S+\): [\d.]+ ms in \d+ calls, [\d.]+ ms a step\n", summary
    )
    assert re.search(r"^ +[\d.]+% .* convolution$", summary, re.MULTILINE)
    expensive = summary.partition("the 10 most expensive operations:\n")[2].partition("what to change:\n")
    assert len(expensive[0].splitlines()) == 10 and expensive[2].startswith("  - ")
    assert re.search(r"Conv2D\S* +\(.*convnet\w*/\w+", expensive[0])
    (event,) = [each for each in map(json.loads, (tmp_path / "events.jsonl").open()) if each["event"] == "profiled"]
    assert (event["step"], event["details"]["first_step"]) == (30, 20)
    path = tmp_path / "tensorboard" / "plugins" / "profile" / "steps-20-30" / "worker-0.xplane.pb"
    assert event["details"]["path"] == str(path)
    profile = read(path.read_bytes())
    assert profile.steps == 11
    replicas = 2 if strategy == "mirrored" else 1
    backward = [each for each in profile.devices[0] if "Conv2DBackpropFilter" in each.type]
    assert len(backward) == 11 * 2 * replicas  # of two layers; none of steps before or after, none of the evaluation
    shares = profile_summary.shares_of(profile)
    assert 0 < shares.computing < 1 and min(shares.input, shares.communication, shares.between) >= 0


@pytest.mark.slow
def test_the_weights_are_the_same_bits_with_a_profile(tmp_path: pathlib.Path) -> None:
    plain = train(tmp_path / "plain", deterministic=True)
    profiled = train(tmp_path / "profiled", deterministic=True, profile=ProfiledSteps(3, 5))
    assert profiled.bits() == plain.bits()
    assert profiled.events("profiled") and not plain.events("profiled")


@pytest.mark.slow
def test_steps_that_wait_for_their_input_are_told_so(tmp_path: pathlib.Path) -> None:
    train(tmp_path, train_data=lambda: Slow(0.05), eval_data=None, profile=ProfiledSteps(3, 5))
    summary = (tmp_path / "profile" / "steps-3-5.txt").read_text()
    share = re.search(r"waiting for input (\d+)%", summary)
    assert share is not None and int(share[1]) > 50, summary
    assert "Steps wait for their input" in summary


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


@pytest.mark.slow
def test_a_signal_to_the_launcher_profiles_every_worker_of_a_running_job(tmp_path: pathlib.Path) -> None:
    mark, run_dir = uuid.uuid4().hex, tmp_path / "run"
    command = ["-m", "tfdist.launch", "--workers=2", "--", *DIGITS, "--gin_param=train.epochs = 3000"]
    with (tmp_path / "output").open("w") as output:
        process = forks.Popen(
            [sys.executable, *command, f"--run_dir={run_dir}"],
            env=support.clean_environment() | {support.MARK: mark},
            cwd=support.REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            support.wait_until(lambda: "1/3000" in (tmp_path / "output").read_text(), seconds=60)
            process.send_signal(signal.SIGUSR2)
            support.wait_until(lambda: len(list(run_dir.glob("profile/*.txt"))) == 2, seconds=30)
            process.send_signal(signal.SIGTERM)
            status = process.wait(120)
        finally:
            support.kill_marked(mark)
            process.wait()
    said = (tmp_path / "output").read_text()
    assert status == 143, said  # it went on, and left when it was told to
    assert "[launch] Passing SIGUSR2 on to the workers" in said and "[worker 0] Profile of the steps" in said
    for worker in (0, 1):
        (path,) = run_dir.glob(f"tensorboard/plugins/profile/*/worker-{worker}.xplane.pb")
        first, last = map(int, path.parent.name.removeprefix("steps-").split("-"))
        assert read(path.read_bytes()).steps == last - first + 1 >= 10
        assert XSpace.FromString(path.read_bytes()).hostnames


# What is made of a profile


def test_shares_add_up_and_waiting_counts_only_while_nothing_computes() -> None:
    convolution = Operation("while/body/_1/gradient_tape/while/net/conv/Conv2D", "Conv2D", (10, 60), 50)
    reduction = Operation("while/body/_1/CollectiveReduceV2", "CollectiveReduceV2", (50, 80), 30)
    late = Operation("Add", "AddV2", (190, 230), 40)
    profile = Profile("h", "CPU", [[convolution, reduction, late]], [(0, 100), (200, 300)], 2, [(0, 20), (80, 100)])
    shares = profile_summary.shares_of(profile)
    found = (shares.computing, shares.input, shares.communication, shares.between)
    assert found == pytest.approx((0.4, 0.15, 0.1, 0.35))
    assert convolution.kind == CONVOLUTION and Operation("n", "convert.3", (0, 1), 1).kind == "data movement"
    assert any("wait for their input" in hint for hint in profile_summary.hints(profile, shares))


def test_spans_are_merged_and_their_overlap_measured() -> None:
    assert merged([(5, 7), (0, 2), (1, 4), (7, 8)]) == [(0, 4), (5, 8)]
    assert overlap([(0, 4), (5, 8)], [(3, 6), (7, 20)]) == 3


def test_kernels_of_a_gpu_count_by_the_operation_that_they_are_part_of() -> None:
    """A profile as TensorFlow's sources say that a GPU's is; none was seen."""
    space = XSpace(hostnames=["h"])
    host, gpu = space.planes.add(name="/host:CPU"), space.planes.add(name="/device:GPU:0")
    names: dict[str, int] = {}

    def note(plane, line, name: str, span: tuple[int, int], **stats: object) -> None:
        number = names.setdefault(name, len(names) + 1)
        plane.event_metadata[number].name = name
        event = line.events.add(metadata_id=number, offset_ps=span[0], duration_ps=span[1] - span[0])
        for key, value in stats.items():
            key_number = names.setdefault(key, len(names) + 1)
            plane.stat_metadata[key_number].name = key
            stat = event.stats.add(metadata_id=key_number)
            setattr(stat, "int64_value" if isinstance(value, int) else "str_value", value)

    note(host, host.lines.add(name="python"), "train", (0, 100), step_num=1, steps=1)
    stream = gpu.lines.add(name="Stream #13(Compute)")
    note(gpu, stream, "sm90_xmma_fprop", (10, 40), tf_op="while/body/_1/while/net/conv/Conv2D:Conv2D")
    note(gpu, stream, "ncclDevKernel_AllReduce_Sum_f32", (40, 60))
    note(gpu, gpu.lines.add(name="Steps"), "1", (0, 100))
    profile = read(space.SerializeToString())
    assert profile.device_type == "GPU"
    assert [(each.type, each.kind) for each in profile.devices[0]] == [
        ("Conv2D", "convolution"),
        ("ncclDevKernel_AllReduce_Sum_f32", "communication"),
    ]
    assert profile_summary.shares_of(profile).idle == 0.7
    assert "Conv2D  (net/conv)" in profile_summary.summarize(space.SerializeToString(), title="T")
