"""A request for a plan, in JSON, as programs that order trainings write it: in either of two sets of names.

Invariant: every name stands in NAMES, and both sets become the same `PlanRequest`. Without an experiment the model is a
shipped one, of the kind and size that are asked for, on zeros of the shape of its data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist.errors import UserError, is_whole_number, suggest
from tfdist.tpu_compiler.devices import Device

COMPUTE, TRAINING = "training_context.compute_requirements", "training_context.training_config"
NAMES = {
    "modelConfig.path": "path",
    "modelConfig.size": "size",
    "modelConfig.framework": "framework",
    "dataConfig.path": "data_path",
    "dataConfig.size": "data_size",
    "dataConfig.sharding": "data_sharding",
    "clusterConfig.numNodes": "num_nodes",
    "clusterConfig.gpusPerNode": "gpus_per_node",
    "clusterConfig.networkBandwidth": "bandwidth",
    "trainingConfig.batchSize": "batch_size",
    "trainingConfig.epochs": "epochs",
    "trainingConfig.parallelismStrategy": "approach",
    "task_type": "task_type",
    "training_context.model_type": "model_type",
    "training_context.framework": "framework",
    "training_context.data_size_gb": "data_size",
    f"{COMPUTE}.gpu_type": "gpu_type",
    f"{COMPUTE}.gpu_count": "gpu_count",
    f"{COMPUTE}.memory_gb": "memory_gb",
    f"{COMPUTE}.storage_gb": "storage_gb",
    f"{TRAINING}.epochs": "epochs",
    f"{TRAINING}.batch_size": "batch_size",
    f"{TRAINING}.distributed_strategy": "approach",
}
REQUIRED = ("modelConfig", "dataConfig", "clusterConfig")  # or task_type
COUNTS = ("num_nodes", "gpus_per_node", "batch_size", "epochs", "gpu_count")
CHOICES = {
    "framework": ("tensorflow", "keras"),
    "task_type": ("design_pipeline", "configure_distributed", "tune_hyperparameters", "setup_automl", "manage_compute"),
    "model_type": ("tabular", "cv", "nlp", "timeseries", "multimodal"),
    "approach": ("none", "data_parallel", "model_parallel", "pipeline_parallel", "fsdp", "zero"),
}
NEAREST = {
    "deepspeed": "'zero' shares the optimizer's state and 'fsdp' the weights, too",
    "pytorch": "a Keras model of the same layers, in a file that `tfdist new DIR` writes, trains by 'tensorflow'",
}
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
BYTES = {"tabular": 128, "cv": 64 * 64 * 3, "nlp": 512}  # of an example of configs/reference
SHIPPED = "tfdist:reference/"
MAX_GPUS = 128
STEPS = 1000  # of an epoch, where nobody says how much data there is


def load_zeros(*, count: int, inputs: tuple[int, ...] = ()) -> Any:
    """Rows of zeros with the class 0, or a row of tokens without `inputs`: what a plan traces a step with."""
    import numpy as np

    if not inputs:
        return np.zeros(count, np.int32)
    return np.zeros((count, *inputs), np.float32), np.zeros(count, np.int32)


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What a request asks for; `values` are by the words of NAMES, `files` the experiment's, if there is one."""

    values: Mapping[str, Any]
    files: Sequence[str]

    @property
    def approach(self) -> str | None:
        return self.values.get("approach")

    @property
    def kind(self) -> str:
        """The shipped configuration that stands for the model."""
        model_type = self.values.get("model_type", "nlp")
        return model_type if model_type in BYTES else "nlp"

    @property
    def depth(self) -> int | None:
        """The number of the shipped transformer's blocks; None for other models."""
        return None if self.files or self.kind != "nlp" else self._size_transformer()[1]

    def _size_transformer(self) -> tuple[int, int]:
        """The width and number of blocks; wider by 128 for each block, as GPT-3's are about."""
        parameters = parse_amount(self.values.get("size", "85M"))
        width = 64 * max(1, round((parameters * 128 / 12) ** (1 / 3) / 64))
        return width, max(2, round(parameters / 12 / width**2))

    def statements(self) -> Iterator[str]:
        """Yields the gin statements with which an experiment, or the shipped one, becomes what is asked for."""
        rows, parameters = self.values.get("batch_size", 256), parse_amount(self.values.get("size", "11M"))
        if "batch_size" in self.values:
            yield f"train.global_batch_size = {rows}"
        if "epochs" in self.values:
            yield f"train.epochs = {self.values['epochs']}"
        if self.files:
            return
        yield f"EXAMPLES = {rows * BYTES['nlp'] + 1 if self.kind == 'nlp' else rows}"
        yield f"train.steps_per_epoch = {self.count_steps(rows)}"
        if self.kind == "nlp":
            width, _ = self._size_transformer()
            yield f"transformer.build_transformer.width = {width}"
            yield f"transformer.build_transformer.num_heads = {width // 64}"
        elif self.kind == "cv":
            width = max(8, 8 * round(math.sqrt(parameters / 2750) / 8))
            yield f"resnet.build_resnet.filters = {tuple(width << stage for stage in range(4))}"
        else:
            yield f"mlp.build_mlp.hidden_units = {2 * (max(1, round(math.sqrt(parameters))),)}"

    def count_steps(self, batch_size: int) -> int:
        """Returns the steps of an epoch, by the bytes of the data, or by its examples where the size is a number."""
        size = self.values.get("data_size")
        if size is None:
            return STEPS
        examples = size if is_whole_number(size) and size > MAX_GPUS else parse_amount(size) / BYTES[self.kind]
        return max(1, math.ceil(examples / batch_size))

    def choose_devices(self, known: Mapping[str, Device]) -> tuple[dict[str, Device], list[str]]:
        """The devices with the request's network, and what `--devices` would say.

        Raises:
          UserError: no device is such a one.
        """
        wanted, memory = self.values.get("gpu_type"), self.values.get("memory_gb", 0)
        gpus = [kind for kind, device in known.items() if not device.is_tpu]
        kinds = [kind for kind in (gpus if wanted is None else known) if wanted in (None, kind, kind.partition("_")[0])]
        if not kinds:
            raise UserError(f"gpu_type is {wanted!r}. Write one of {', '.join(known)}.{suggest(str(wanted), known)}")
        nodes, here = self.values.get("num_nodes", 1), self.values.get("gpus_per_node")
        count = self.values.get("gpu_count") or (here and nodes * here)
        changes: dict[str, Any] = {} if here is None else {"per_machine": here}
        if (bandwidth := self.values.get("bandwidth")) is not None:
            per_node = parse_amount(bandwidth) * (1e9 if isinstance(bandwidth, int | float) else 1) / 8  # Gbit/s
            changes["network_bytes_per_second"] = per_node / (here or 1)
        changed = {kind: dataclasses.replace(known[kind], **changes) for kind in kinds}
        large = [kind for kind in kinds if known[kind].memory_gib >= memory] or kinds
        suffix = ":1" if self.approach == "none" else f":{count}" if count else ""
        return {**known, **changed}, [f"{kind}{suffix}" for kind in large]

    def list_notes(self, checkpoint_bytes: float) -> list[str]:
        """Lists what of the request the plan does not follow, or stands for something else."""
        notes, values = [], self.values
        if checkpoint_bytes > (storage := values.get("storage_gb", math.inf) * 1e9):
            notes.append(f"Checkpoints need {checkpoint_bytes / 1e9:.3g} GB, and storage_gb is {storage / 1e9:g}.")
        if not self.files:
            kind = values.get("model_type", "a model")
            notes.append(f"No experiment: {SHIPPED}{self.kind}.gin of that size stands for {kind}.")
        if values.get("data_size") is None and not self.files:
            notes.append(f"No size of the data: an epoch is taken to have {STEPS:,} steps.")
        for name in ("data_path", "data_sharding", "path"):
            if values.get(name) is not None and values[name] not in self.files:
                notes.append(
                    f"{name} {values[name]!r} changes nothing: workers read disjoint parts of what a source has."
                )
        return notes


def read_request(path: str, gin_files: Sequence[str] = ()) -> PlanRequest:
    """Reads a request, for an experiment in these files, or in the one that it names as its model.

    Raises:
      UserError: it is no JSON, or a name or value in it is none that is known.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--request={path} cannot be read as JSON: {error}. docs/plan.md shows one.") from error
    if not isinstance(content, dict):
        raise UserError(f"--request={path} is no JSON object. docs/plan.md shows one.")
    missing = [name for name in REQUIRED if not isinstance(content.get(name), dict)]
    if missing and "task_type" not in content:
        raise UserError(f"--request={path} lacks {', '.join(missing)}. Write {', '.join(REQUIRED)}, or task_type.")
    values: dict[str, Any] = {}
    for name, value in _flatten(content):
        if name not in NAMES:
            raise UserError(f"--request={path} has {name!r}, which no request has.{suggest(name, NAMES)}")
        if value is not None:
            _check_value(name, NAMES[name], value)
            values[NAMES[name]] = f"{value}GB" if name.endswith("data_size_gb") else value
    named = [values["path"]] if str(values.get("path")).endswith(".gin") else []
    return PlanRequest(values, [name for name in gin_files if not name.startswith(SHIPPED)] or named)


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_value(name: str, word: str, value: Any) -> None:
    choices = CHOICES.get(word, ())
    if choices and value not in choices:
        near = f" The nearest: {NEAREST[str(value)]}." if str(value) in NEAREST else suggest(str(value), choices)
        raise UserError(f"{name} is {value!r}, which tfdist does not have. Write one of {', '.join(choices)}.{near}")
    if word in COUNTS and not is_whole_number(value, least=1):
        raise UserError(f"{name} is {value!r}. Write an integer from 1 on.")
    if word in ("memory_gb", "storage_gb") and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise UserError(f"{name} is {value!r}. Write a number of gigabytes, such as 40.")
    if word == "gpu_count" and value > MAX_GPUS:
        raise UserError(f"{name} is {value}. Write at most {MAX_GPUS}.")
    if word in ("size", "data_size", "bandwidth"):
        parse_amount(value)


def parse_amount(value: Any) -> float:
    """Parses a number, or a text with a unit: '7B', '350M', '500GB', '100Gbps'."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGBT]?)i?(?:B|bps|bit/s|b/s)?\s*", str(value), re.IGNORECASE)
    if match is None:
        raise UserError(f"{value!r} is no amount. Write a number, or such as '7B', '500GB' or '100Gbps'.")
    return float(match[1]) * UNITS[match[2].upper()]
