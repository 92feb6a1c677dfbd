"""Workers that go apart end together, within a minute, with the cause on all of them and no checkpoint that mixes."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable

import pytest
import support

from tfdist.checkpoint import catalog

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 60  # on a quiet machine
CAUSE = r"the cause is here"
DIFFERS = r"has other values than worker 0 at step \d+: .*"


@dataclasses.dataclass(frozen=True)
class End:
    """How both workers end: what each says, as a pattern; the status; the last step that may have been saved."""

    says: str
    status: int = 2
    last_saved: int = 0


# TensorFlow's strategy sends variables while they are made, and its own error is the first there.
MODELS = {
    "other_units": End("The workers (?:do not run the same training|differ)"),
    "more_layers": End("The workers (?:do not run the same training|differ)"),
    "other_optimizer": End("type of the optimizer: SGD on worker 0; Adam on worker 1|do not run the same training"),
}
# What all workers raise in step leaves them in step: one pair of processes runs all of these.
IN_STEP = {
    "fewer_examples": End("examples of the training data: 64 on worker 0; 48 on worker 1"),
    "a_few_examples_fewer": End("examples of the training data: 64 on worker 0; 61 on worker 1"),
    "other_examples": End("first global batch of the training data on worker 1 is another than on worker 0"),
    "other_labels": End("first global batch of the training data on worker 1 is another than on worker 0"),
    "other_structure": End("structure of an example of the training data: .*float32.* on worker 0; .*int32"),
    "other_evaluation_data": End("examples of the evaluation data: 64 on worker 0; 48 on worker 1"),
    "other_dropout": End("digest of the model's configuration: .* on worker 0; .* on worker 1"),
    "other_momentum": End("momentum of the optimizer: 0.9 on worker 0; 0.5 on worker 1"),
    "other_epochs": End("train.epochs: 3 on worker 0; 5 on worker 1"),
    "other_setting": End("build.units: 8 on worker 0; 12 on worker 1"),
    "rate_changed_in_training": End(DIFFERS + "learning_rate", last_saved=2),
    "weights_changed_in_training": End(DIFFERS + "model/"),
    "data_fails": End(CAUSE),
    "chiefs_data_fails": End(CAUSE),
    "damaged_record": End("rollbacks.json"),
    "fit_with_unseeded_shuffle": End("first global batch of the training data on worker 1 is another"),
    "fit_with_split_at_random": End("first global batch of the training data on worker 1 is another"),
    "fit_with_an_unseeded_pydataset": End("first global batch of the training data on worker 1 is another"),
    "fit_with_its_own_arrays": End("first global batch of the training data on worker 1 is another"),
    **dict.fromkeys(
        ("start_from_of_one_disk", "start_from_hdf5_of_one_disk", "evaluate_apart", "directories_apart"),
        End("", status=0),
    ),
    "fit_with_callbacks_of_the_chief": End("", status=0),
}
# Each of these leaves the workers out of step.
OUT_OF_STEP = {
    "bad_id": End("is not in"),
    "bad_id_of_the_second": End("100000 is not in"),
    "late_bad_id_of_the_second": End("100000 is not in", last_saved=4),
    **MODELS,
    "model_fails": End(CAUSE),
    "optimizer_fails": End(CAUSE),
    "chiefs_hook_fails": End(CAUSE),
    "a_hook_exits": End(r"its code called sys.exit\(7\)", status=1),
    "fit_after_a_failure": End("earlier training of these processes failed on worker 1 .*" + CAUSE),
}
HOOKS = {  # chiefs_hook_fails and fit_after_a_failure are of on_epoch_begin
    "on_train_begin_fails": End(CAUSE),
    "on_train_batch_end_fails": End(CAUSE),
    "on_test_batch_end_fails": End(CAUSE, last_saved=4),
    "on_test_end_fails": End(CAUSE, last_saved=4),
    "on_epoch_end_fails": End(CAUSE, last_saved=4),
    "on_train_end_fails": End(CAUSE, last_saved=12),
}


def run_cases(directory: pathlib.Path, engine: str, *cases: str) -> support.Finished:
    launch = support.LAUNCH[engine]
    return support.run_module("workers.differing", directory, *cases, launch=launch, timeout=LIMIT_SECONDS)


def check_end(directory: pathlib.Path, end: End, finished: support.Finished) -> None:
    for path in (directory / "worker-0.json", directory / "worker-1.json"):
        worker = json.loads(path.read_text())
        assert worker["status"] == end.status, finished.outputs()
        assert re.search(end.says, worker["message"], re.DOTALL), finished.outputs()
        assert "lost the connection" not in worker["message"], finished.outputs()
    if end.status:
        saved = catalog.list_checkpoints(str(directory / "shared" / "checkpoints"))
        assert all(entry.step <= end.last_saved for entry in saved if catalog.verify(entry) is None), saved
        assert not (directory / "shared" / "result.json").exists()


@pytest.fixture(scope="module")
def in_step(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[pathlib.Path, support.Finished]]:
    """The directory of all cases that stay in step, and how their processes ended; run once for each engine."""

    @functools.cache
    def run(engine: str) -> tuple[pathlib.Path, support.Finished]:
        directory = tmp_path_factory.mktemp(engine)
        return directory, run_cases(directory, engine, *IN_STEP, *(MODELS if engine == "horovod" else ()))

    return run


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        *(("multi_worker", case) for case in IN_STEP),
        *(pytest.param("horovod", case, marks=pytest.mark.horovod) for case in (*IN_STEP, *MODELS)),
    ],
)
def test_all_raise_the_cause_in_step(
    in_step: Callable[[str], tuple[pathlib.Path, support.Finished]], engine: str, case: str
) -> None:
    directory, finished = in_step(engine)
    check_end(directory / case, (IN_STEP | MODELS)[case], finished)
    weights = [path.read_text() for path in sorted((directory / case).glob("weights-*"))]
    assert len(weights) == (2 if case.startswith("start_from") else 0) and len(set(weights)) <= 1


BY_HOROVOD = (
    *("bad_id_of_the_second", "late_bad_id_of_the_second", "model_fails", "chiefs_hook_fails", "fit_after_a_failure"),
    *("on_test_end_fails", "on_train_end_fails"),
)


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        *((case, "multi_worker") for case in (*OUT_OF_STEP, *HOOKS)),
        *(pytest.param(case, "horovod", marks=pytest.mark.horovod) for case in BY_HOROVOD),
    ],
)
def test_all_end_with_the_cause(tmp_path: pathlib.Path, engine: str, case: str) -> None:
    end = (OUT_OF_STEP | HOOKS)[case]
    finished = run_cases(tmp_path, engine, case)
    check_end(tmp_path / case, end, finished)
    assert finished.status == end.status, finished.outputs()
