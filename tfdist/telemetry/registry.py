"""Every metric and event that a run tells: its name, unit, kind and meaning.

Invariant: nothing is told that does not stand here. `docs/telemetry.md` has the tables of this page; a test reads the
source for what is told.
"""

from __future__ import annotations

import dataclasses

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that changes with time.

    Attributes:
      name: what monitoring systems know it by.
      kind: COUNTER (only grows while a process lasts), GAUGE, or HISTOGRAM (of single observations).
      unit: "" for a number or a share.
      meaning: a line.
      labels: what tells several series of it apart.
      buckets: upper bounds of a histogram's.
    """

    name: str
    kind: str
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        """The name as scraped: that which other trainers have too, else with tfdist's prefix."""
        return self.name if self.name in COMMON else f"tfdist_{self.name}"


# Metrics that monitoring systems know from other trainers.
COMMON = (
    *("training_duration_seconds", "gpu_utilization", "training_loss", "learning_rate", "checkpoint_size_mb"),
    "cost_usd",
)

_METRICS = (
    # What is learned.
    Metric("training_loss", GAUGE, "", "the training's loss"),
    Metric("learning_rate", GAUGE, "", "of the last step"),
    Metric("metric_value", GAUGE, "", "each metric that is a number", labels=("split", "name")),
    Metric("loss_is_finite", GAUGE, "", "0 if the last loss was NaN or infinite, else 1"),
    Metric("training_steps", GAUGE, "steps", "that the run has done"),
    Metric("last_step_timestamp_seconds", GAUGE, "seconds", "of the last step, since 1970"),
    # Where the time goes.
    Metric("training_duration_seconds", HISTOGRAM, "seconds", "of a start", buckets=(600, 3600, 14_400, 86_400)),
    Metric("time_seconds_total", COUNTER, "seconds", "of the process, by what it did", labels=("share",)),
    Metric("compute_share", GAUGE, "", "the share of the wall clock that went into steps"),
    Metric("cost_usd", COUNTER, "US dollars", "devices times hours times train.price_per_device_hour"),
    # Checkpoints.
    Metric(
        "checkpoint_size_mb",
        HISTOGRAM,
        "megabytes",
        "of a stored checkpoint",
        buckets=(1, 10, 100, 1000, 10_000, 100_000),
    ),
    Metric(
        "checkpoint_write_seconds",
        HISTOGRAM,
        "seconds",
        "to store one",
        buckets=(0.1, 1, 10, 60, 600),
    ),
    Metric("last_checkpoint_timestamp_seconds", GAUGE, "seconds", "of the last stored checkpoint, since 1970"),
    Metric("checkpoint_interval_seconds", GAUGE, "seconds", "between the last two stored checkpoints"),
    # What a process uses.
    Metric("host_memory_bytes", GAUGE, "bytes", "resident memory of the process"),
    Metric("cpu_utilization", GAUGE, "", "the process's share of its processors"),
    Metric("device_memory_bytes", GAUGE, "bytes", "in use on its accelerators"),
    Metric("device_memory_peak_bytes", GAUGE, "bytes", "the most that was in use on them"),
    Metric("gpu_utilization", GAUGE, "", "the mean share of time in which its GPUs computed (NVML)"),
    Metric("network_sent_bytes", GAUGE, "bytes", "sent by the machine since the process began"),
    Metric("network_received_bytes", GAUGE, "bytes", "received by the machine since the process began"),
    Metric("storage_read_bytes", GAUGE, "bytes", "from local disks, by the process"),
    Metric("storage_written_bytes", GAUGE, "bytes", "to local disks, by the process"),
    # What happened.
    Metric("events_total", COUNTER, "", "events, by name", labels=("event", "level")),
)
METRICS = {metric.name: metric for metric in _METRICS}

# Events by their names in events.jsonl: level and meaning.
EVENTS = {
    # The run.
    "training_started": ("info", "a process joined the run"),
    "already_finished": ("info", "the run has finished before"),
    "data_opened": ("info", "a data set can be read"),
    "fewer_workers": ("info", "the run resumes with fewer workers"),
    "calls_of_one_step": ("info", "a callback acts on batches"),
    "xla_chosen": ("info", "tfdist has chosen what XLA compiles"),
    "stopped_early": ("info", "a callback ended the training"),
    "run_paused": ("info", "saved and exited by train.stop_after_epochs"),
    "run_finished": ("info", "the training is done"),
    "run_failed": ("error", "an error ends the run"),
    "evaluated": ("info", "--mode=evaluate has its figures"),
    "predicted": ("info", "--mode=predict has written its files"),
    "prediction_goes_on": ("info", "--mode=predict continues"),
    "exported": ("info", "--mode=export has written and compared a format"),
    # Training.
    "training_diverged": ("error", "the loss or a gradient is not finite"),
    "rolled_back": ("warning", "a step failed; the newest checkpoint is restored"),
    "cuda_oom": ("warning", "a step ran out of memory; batches are split"),
    "gradient_overflow": ("warning", "float16 gradients overflowed; the loss scale fell"),
    "weightless_step": ("warning", "a batch's weights are all 0"),
    "weightless_steps": ("warning", "how many such batches there were"),
    "variables_unused": ("warning", "the loss does not depend on some variables"),
    "workers_round_differently": ("warning", "workers' weights differ in their last digits"),
    "model_not_saved": ("warning", "Keras cannot save the model; its weights are exported"),
    "microbatch_statistics": ("warning", "batch normalization sees microbatches"),
    "replica_state_differs": ("warning", "a layer's variable differs by replica"),
    "shuffled_parts": ("warning", "a layer mixes a part's rows"),
    "single_steps": ("warning", "train.xla = 'loop' acts as 'on'"),
    # Speed.
    "input_wait": ("info", "waiting for input in an epoch"),
    "input_bound": ("warning", "training waits for its input"),
    "straggler": ("warning", "a worker holds up the others"),
    "workers": ("info", "each worker's time per step, at the end"),
    "profiled": ("info", "a profile is written"),
    "not_profiled": ("warning", "a profile failed"),
    "gpu_util_low": ("warning", "GPUs computed below 80 % for five minutes"),
    # Checkpoints.
    "resumed": ("info", "a start continues from a checkpoint"),
    "extended": ("info", "a finished run continues to more epochs"),
    "begun_anew": ("info", "the run begins again, though it had begun"),
    "weights_loaded": ("info", "train.start_from is loaded"),
    "partially_restored": ("warning", "variables that do not fit were left out"),
    "checkpoint_saved": ("info", "a checkpoint is stored"),
    "checkpoint_waited": ("warning", "training waited for earlier checkpoints"),
    "checkpoint_failed": ("warning", "a checkpoint could not be written"),
    "checkpoint_not_removed": ("warning", "an old checkpoint could not be removed"),
    "checkpoint_passed_over": ("warning", "a checkpoint is damaged; an older one is used"),
    "checkpoint_leftovers_found": ("info", "an incomplete checkpoint is removed"),
    "checkpoints_superseded": ("info", "checkpoints after the resumed step are removed"),
    "nothing_trained": ("warning", "tfdist.fit found the run finished"),
    "file_damaged": ("warning", "a file is damaged; the run continues without it"),
    # Processes.
    "preemption_noticed": ("warning", "a signal or the cloud asks the process to exit"),
    "preempted": ("warning", "a process has saved and exited"),
    "left_unsaved": ("error", "a process had to exit and could not save"),
    "worker_failed": ("warning", "a worker has ended with an error"),
    "worker_hung": ("warning", "a worker hangs"),
    "nccl_timeout": ("error", "the connection to another worker is gone"),
    "restart_backoff": ("info", "the launcher waits before a restart"),
    "restarted": ("info", "the launcher has restarted the workers"),
    "restarts_used_up": ("error", "the launcher has restarted `--max_restarts` times"),
    "breaker_opened": ("error", "restarts brought no new step; the launcher gives up"),
    "hosts_changed": ("info", "the run continues on other hosts"),
    # Logs and sinks.
    "sink_dropped": ("warning", "a sink of train.sinks failed or hung"),
    "log_not_written": ("warning", "a full disk or an outage cost lines of a log"),
}

_GROWING = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "bleu", "map", "similarity", "reward")
_SHRINKING = ("loss", "error", "mse", "mae", "mape", "msle", "rmse", "perplexity", "entropy", "divergence", "hinge")


def larger_is_better(metric: str) -> bool | None:
    """Whether a metric of this name is better when larger; None when the name does not tell."""
    name = metric.lower()
    if any(part in name for part in _SHRINKING):
        return False
    return True if any(part in name for part in _GROWING) else None
