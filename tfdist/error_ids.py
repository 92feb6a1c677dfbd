"""The kinds of error by their ids, which messages end with and docs/errors.md explains.

Invariant: an id stays as it is once released, as programs and searches know errors by it. A kind stands here if its
reader gets more than a message says; every other error of the user's is a "user-error".
"""

from __future__ import annotations

import errno

from tfdist.errors import EXIT_STORE_UNAVAILABLE, UserError, exit_status_of_error, list_causes

USER_ERROR, BUG = "user-error", "bug"
# By what a user notices, and by id: the cause, and what to do.
SYMPTOMS = {
    "The run hangs, or a worker is lost": {
        "lost-worker": "A worker did not start or is gone. Read its last lines, then start all workers again.",
        "workers-differ": "Workers have other settings, data or weights. Give all the same, and seed what draws.",
        "cluster-mismatch": "Launcher, TF_CONFIG and strategy disagree. Use `tfdist launch`, or unset TF_CONFIG.",
    },
    "The port is taken": {
        "port-taken": "Another process listens there. End it, or write another port in every TF_CONFIG.",
    },
    "The loss is NaN": {
        "not-a-number": "The loss or a gradient is not finite. Lower the learning rate, or clip gradients.",
        "not-finite-data": "The first batch gives such a loss. Remove NaN from the data, or logarithms of 0.",
    },
    "Out of memory": {
        "device-memory": "A step does not fit. Raise `train.num_microbatches`, or use a larger device.",
    },
    "The GPU is not found": {
        "missing-gpu": "TensorFlow sees too few GPUs. Run `tfdist doctor`, and [install](install.md).",
        "missing-package": "This Python lacks a package or has another release. Run the message's `pip install`.",
    },
    "Another experiment": {
        "another-experiment": "Settings or data differ. Write another `--run_dir`, or `train.accept_changes = True`.",
        "run-in-use": "A live process uses the directory. Wait for its end, or write another `--run_dir`.",
        "missing-run": "The directory holds no run. Write the `--run_dir` of a training, or mount its disk.",
        "damaged-file": "A file is damaged. Do what [this table](run_directory.md#damaged-and-newer-files) says.",
    },
    "The run does not resume": {
        "damaged-checkpoint": "No checkpoint is whole. Restore a copy, or move `checkpoints/` away to begin again.",
        "checkpoint-mismatch": "The model has other variables. Build it as it was, or start with `train.start_from`.",
        "not-saved": "The process had to leave, and its save failed. Repair the storage, then start again.",
    },
    "The disk is full, or a file is missing": {
        "full-disk": "The disk or quota is full. Free space, or write `policy.CheckpointPolicy.keep_last = 1`.",
        "no-permission": "This user or account may not write or read there. Change the owner or the role.",
        "missing-file": "The file is not here. Relative paths begin at the working directory: write whole ones.",
        "store-unreachable": "A bucket does not answer. Check network and proxy, then start again: the run resumes.",
    },
    "A setting is refused": {
        "unknown-setting": "Nothing takes this name. Correct it, or remove the line; `tfdist settings` lists all.",
        "unknown-name": "The gin file does not import this name. Add the line `import my_module`.",
        "wrong-value": "The setting takes other values. Write one from [All settings](configuration.md#all-settings).",
    },
    "The data or the model is refused": {
        "no-examples": "The files or arrays are empty. Check paths and filters on every machine.",
        "data-structure": "The data function returns something else than (x, y). Return what [Data](data.md) shows.",
        "unreadable-example": "A record or image is corrupt. Copy the file again, or remove it.",
        "no-loss": "Nothing says what to minimize. Write `supervised.Supervised.loss`, or give compile() a loss.",
        "labels-out-of-range": "A label is no class of the output. Count from 0, or widen the last layer.",
        "shape-mismatch": "Inputs, model, loss or metrics have unlike shapes. Compare the shapes in the message.",
        "code-failure": "Your own code failed. Fix the line in the message; `--verbose` shows the traceback.",
    },
    "Another error": {
        USER_ERROR: "The message says all. It ends without an id.",
        BUG: "tfdist has a bug. Report it with its traceback.",
    },
}
_BY_ERRNO = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "full-disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "no-permission"),
    errno.ENOENT: "missing-file",
    errno.EADDRINUSE: "port-taken",
}


def find_error_id(error: BaseException) -> str:
    """The id of an error: its own, or that of the nearest cause that has one."""
    if exit_status_of_error(error) == EXIT_STORE_UNAVAILABLE:
        return "store-unreachable"
    for cause in list_causes(error):
        if isinstance(cause, ModuleNotFoundError):
            return "missing-package"
        error_id = getattr(cause, "error_id", None) or _BY_ERRNO.get(getattr(cause, "errno", None) or 0)
        if error_id is not None:
            return error_id
    return USER_ERROR if isinstance(error, UserError) else BUG


def format_error(error: BaseException) -> str:
    """An error's message with its id at the end, on a line of its own below several lines."""
    text, error_id = str(error), find_error_id(error)
    between = "\n    " if "\n" in text else " "
    return text if error_id in (USER_ERROR, BUG) else f"{text}{between}[{error_id}]"
