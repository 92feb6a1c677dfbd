"""What GPUs make of tfdist: the same trainings as on the CPU, speed, and where a step's time goes; in one JSON file.

    tools/gpu_check.sh [--json=FILE] [--cpu]

With --cpu the CPU takes the place of GPUs, to try the check itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
CASES = ("sgd", "adam_clipped", "uneven", "accumulation", "sample_weights", "batch_norm", "batch_norm_convolution")
WORKERS = "two_workers"  # that share the GPUs
PROFILED_STEPS = 20
FLAGS = flags.FLAGS
flags.DEFINE_string("json", "gpu_check.json", "the file to write")
flags.DEFINE_bool("cpu", False, "let the CPU take the place of GPUs")


def main(arguments: list[str]) -> None:
    if arguments[1:]:
        raise app.UsageError(f"nothing takes {arguments[1]!r}")
    gpus = [] if FLAGS.cpu else list_gpus()
    if not gpus and not FLAGS.cpu:
        print("error: nvidia-smi lists no GPU on this machine. With --cpu the CPU takes its place.", file=sys.stderr)
        sys.exit(2)
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # this process and those that it starts share the GPUs
    print(f"{len(gpus)} GPUs: {', '.join(gpus)}" if gpus else "no GPU: the CPU in its place", flush=True)
    found = {
        "machine": describe_machine(gpus),
        "differences": measure_differences(len(gpus)),
        "speed": measure_speed(),
        "profile": profile_steps(),
    }
    Path(FLAGS.json).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    print(f"written: {FLAGS.json}")


def list_gpus() -> list[str]:
    try:
        told = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except OSError:
        return []
    return told.stdout.splitlines() if told.returncode == 0 else []


def describe_machine(gpus: list[str]) -> dict[str, Any]:
    from importlib.metadata import version

    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,compute_cap", "--format=csv"]
    return {
        "gpus": gpus,
        "details": subprocess.run(query, capture_output=True, text=True).stdout.splitlines() if gpus else [],
        "cpus": os.cpu_count(),
        "versions": {"python": sys.version.split()[0]} | {name: version(name) for name in ("keras", "numpy", "tfdist")},
    }


def measure_differences(num_gpus: int) -> dict[str, dict[str, float]]:
    """The largest difference of a weight from the CPU's, by strategy and case of the equivalence suite."""
    strategies = ["one_device", *(["mirrored_gpus"] if num_gpus > 1 else []), WORKERS]
    with tempfile.TemporaryDirectory(prefix="tfdist-gpu-") as directory:
        expected = train_cases(f"{directory}/cpu", "one_device", {"CUDA_VISIBLE_DEVICES": ""})
        # TensorFloat-32 keeps ten bits of a factor, which is not what the two are compared for.
        found = {each: train_cases(f"{directory}/{each}", each, {"NVIDIA_TF32_OVERRIDE": "0"}) for each in strategies}
    return {
        strategy: {
            case: max(float(abs(a - b).max()) for a, b in zip(ours[case], expected[case], strict=True))
            for case in CASES
        }
        for strategy, ours in found.items()
    }


def train_cases(directory: str, strategy: str, variables: dict[str, str]) -> dict[str, list[Any]]:
    print(f"training {len(CASES)} cases: {strategy} {variables}", flush=True)
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    module = ["equivalence.cases", strategy, directory, *CASES]
    if strategy == WORKERS:
        module = ["tfdist.launch", "--workers=2", f"--module={module[0]}", "--", "multi_worker", *module[2:]]
    subprocess.run(
        [sys.executable, "-m", *module], env={**os.environ, **paths, **variables}, check=True, stdout=subprocess.DEVNULL
    )
    import keras

    return {case: keras.models.load_model(f"{directory}/{case}/export/model.keras").get_weights() for case in CASES}


def measure_speed() -> dict[str, Any]:
    """The figures of benchmarks/step.py for one device."""
    from measuring import format_table, measure_part

    figures = measure_part("step", "one_device")
    print(format_table(figures), flush=True)
    return {figure.name: dataclasses.asdict(figure) for figure in figures}


def profile_steps() -> dict[str, Any]:
    """Where the time of some steps of a convolutional network went, by operation of the device or else of the host."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2
    from trainings import build_training
    from workloads import deep_convnet

    from tfdist.strategies.one_device import OneDevice

    strategy = OneDevice()
    strategy.connect()
    _, train = build_training(strategy, deep_convnet("convnet", batch=256, num_examples=2048))
    train(PROFILED_STEPS)
    with tempfile.TemporaryDirectory(prefix="tfdist-profile-") as directory:
        tf.profiler.experimental.start(directory)
        train(PROFILED_STEPS)
        tf.profiler.experimental.stop()
        (file,) = Path(directory).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    planes = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    is_gpu = bool(planes)
    planes = planes or [plane for plane in space.planes if plane.name == "/host:CPU"]
    picoseconds: Counter[str] = Counter()
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                picoseconds[plane.event_metadata[event.metadata_id].name] += event.duration_ps
    return {
        "steps": PROFILED_STEPS,
        "device": "GPU" if is_gpu else "CPU",
        "milliseconds": {name: round(each / 1e9, 3) for name, each in picoseconds.most_common(20)},
    }


if __name__ == "__main__":
    app.run(main)
