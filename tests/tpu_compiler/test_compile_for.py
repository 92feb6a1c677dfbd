"""The TPU's own compiler compiles the steps of experiments, and refuses what a TPU cannot run, in one message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import support
from mistakes import each_is_refused
from tpu_compiler import models

from tfdist.strategies.one_device import OneDevice
from tfdist.tasks.supervised import Supervised
from tfdist.tpu_compiler.compile_program import find_collectives
from tfdist.tpu_compiler.compile_report import CompiledStep
from tfdist.tpu_compiler.compiling import compile_programs
from tfdist.tpu_compiler.devices import parse_slice
from tfdist.tpu_compiler.toolchain import Compiler, open_compiler
from tfdist.training.run.train_settings import TrainSettings

SHIPPED = sorted(file.stem for file in (support.REPOSITORY / "configs" / "experiments").glob("*.gin"))
# Their steps differ from others in the loss or in what reads the examples alone; all compiled when they were added.
ALIKE = (
    *("digits_distilled", "digits_mixup", "digits_two_tasks", "text_masked_token"),
    *("digits_dataset", "digits_images", "digits_mixture", "digits_npz", "digits_sweep", "digits_tfds"),
    *("digits_tfrecord", "iris_csv"),
)
OF_WHOLE_BATCHES = "digits_contrastive"  # whose rows no TPU can gather
ON_FOUR_KINDS = "digits"
WIDE = (  # parameters of a model of 67 million weights
    *("import models", "train.model = @models.dense", "models.dense.units = 8192"),
    *("train.train_data = @models.digits", "train.eval_data = None", "train.epochs = 1"),
)
LANES = 128  # a TPU's tiles are of 8 × 128 numbers


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the data of the experiments that are compiled."""
    directory = tmp_path_factory.mktemp("prepared")
    for kind in ("tables", "text"):
        support.run_python(
            [support.REPOSITORY / "examples/files" / f"prepare_{kind}.py"], cwd=directory, timeout=300
        ).check()
    return directory


def compile_for(
    slices: str, experiment: str, *parameters: str, more: tuple[str, ...] = (), cwd: Path = support.REPOSITORY
) -> support.Finished:
    given = [f"--gin_file=tfdist:experiments/{experiment}.gin", *(f"--gin_param={each}" for each in parameters)]
    environment = {"PYTHONPATH": f"{support.REPOSITORY}:{support.REPOSITORY / 'tests' / 'tpu_compiler'}"}
    command = ["-m", "tfdist.doctor", *given, f"--compile_for={slices}", *more]
    return support.run_python(command, env=environment, cwd=cwd, timeout=600)


def found(done: support.Finished) -> list[dict[str, Any]]:
    return json.loads(done.check().stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in SHIPPED if each not in (OF_WHOLE_BATCHES, *ALIKE)])
def test_each_shipped_experiment_compiles_with_one_reduction_of_its_gradients(name: str, prepared: Path) -> None:
    slices = "v5e:2x2,v6e:2x4,v4:2x2x1,v5p:2x2x1,v5e:1x2" if name == ON_FOUR_KINDS else "v5e:2x2"
    fixed = ["text.TextLines.pad_to_max = True"] if name == "sentences_text" else []  # a TPU's shapes are fixed
    steps = found(compile_for(slices, name, *fixed, more=("--json",), cwd=prepared))
    done = [each for each in steps if each["step"] == "train"]
    evaluations = [each for each in steps if each["step"] == "evaluate"]
    assert [each["num_cores"] for each in done] == [each["num_cores"] for each in evaluations]
    assert [each["num_cores"] for each in done] == [4, 8, 4, 4, 2][: len(done)]
    for each in evaluations:
        assert each["collectives"] == [] and 0 < each["memory_bytes"] < each["chip_bytes"]
    for each in done:
        assert [collective["kind"] for collective in each["collectives"]] == ["all-reduce"], each
        assert 0 < sum(summed["bytes"] for summed in each["collectives"]) <= each["parameter_bytes"] + 1024
        assert 0 < each["memory_bytes"] < each["chip_bytes"] and each["least_seconds"] > 0


@pytest.mark.slow
def test_a_plan_takes_a_tpus_figures_from_its_compiler(prepared: Path, tmp_path: Path) -> None:
    bfloat16 = "train.precision = 'bfloat16'"
    steps = found(compile_for("v5e:2x2", "digits", bfloat16, more=("--json",), cwd=prepared))
    (trained,) = [each for each in steps if each["step"] == "train"]
    planning = ["--mode=plan", "--gin_file=tfdist:experiments/digits.gin", f"--gin_param={bfloat16}", "--devices=v5e:4"]
    path = {"PYTHONPATH": str(support.REPOSITORY)}
    told = support.run_python(["-m", "tfdist.main", *planning, f"--run_dir={tmp_path}"], env=path, cwd=prepared).check()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["basis"]["memory_bytes"] == "the TPU's compiler" and "compiler" in told.stdout
    assert (
        plan["distributedConfig"]["strategy"] == "tpu"
        and plan["resourceAllocation"]["memory_bytes"] == trained["memory_bytes"]
    )


@pytest.mark.slow
def test_a_loss_of_the_whole_batch_is_refused_and_a_slice_that_there_is_not(prepared: Path) -> None:
    refused = compile_for("v5e:2x2", OF_WHOLE_BATCHES, cwd=prepared)
    assert refused.status == 2 and "'nt_xent' is computed from the whole batch" in refused.stderr
    refused = compile_for("v5e:3x3", "digits", "train.global_batch_size = 63", cwd=prepared)
    assert refused.status == 2 and "There is no slice v5e:3x3." in refused.stderr


@pytest.mark.slow
def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    wide = (*WIDE, f"train.global_batch_size = {2**20}")
    (each,) = found(compile_for("v5e:2x2", "digits", *wide, more=("--json", "--largest_batch")))
    assert each["local_batch_size"] == 2**18 <= each["largest_local_batch_size"] < 2**19
    per_example = each["temporary_bytes"] / each["local_batch_size"]  # outputs that are kept for the way back
    free = each["chip_bytes"] - each["argument_bytes"]
    assert 0.75 < each["largest_local_batch_size"] * per_example / free <= 1.0
    refused = compile_for("v5e:2x2", "digits", *WIDE, f"train.global_batch_size = {2**21}")
    assert refused.status == 2 and "does not fit into the memory of a core" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with open_compiler(print) as compiler:
        yield compiler


def compile_model(compiler: Compiler, build: Callable[[], keras.Model], **changes: Any) -> CompiledStep:
    """Compiles a training of the digits for a slice of four cores."""
    settings: dict[str, Any] = {"train_data": models.digits, "global_batch_size": 1024} | changes
    training = TrainSettings(
        model=build,
        optimizer=keras.optimizers.Adam,
        task=Supervised(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        strategy=OneDevice(),
        epochs=1,
        **settings,
    )
    (compiled,) = compile_programs(training, parse_slice("v5e:2x2"), compiler)
    return compiled


@pytest.mark.slow
def test_the_compilers_flops_are_those_counted_by_hand(compiler: Compiler) -> None:
    step = compile_model(compiler, models.dense)
    forward, of_examples = 2 * (64 * 256 + 256 * 256 + 256 * 10), 2 * 64 * 256  # whose gradient nobody asks for
    assert step.flops == pytest.approx(step.local_batch_size * (3 * forward - of_examples), rel=0.05)


@pytest.mark.slow
def test_memory_of_parameters_and_slots_is_that_of_their_tiles(compiler: Compiler) -> None:
    step = compile_model(compiler, lambda: models.dense(4096))
    parameters = 64 * 4096 + 4096 * 4096 + 4096 * 10
    assert step.num_parameters == parameters and step.parameter_bytes == 4 * parameters
    assert step.slot_bytes == pytest.approx(8 * parameters, abs=64)  # and the counts of steps, the learning rate
    tiled = 4 * (64 * 4096 + 4096 * 4096 + 4096 * 16)  # ten columns lie transposed, in two tiles' rows of eight
    batch = 4 * step.local_batch_size * LANES  # 64 columns in tiles of 128
    assert step.argument_bytes == pytest.approx(3 * tiled + batch, rel=0.001)


@pytest.mark.slow
def test_statistics_over_padded_batches_cost_reductions_of_their_own(compiler: Compiler) -> None:
    step = compile_model(compiler, models.normalized, num_microbatches=2)
    sums = [collective["bytes"] for collective in step.collectives]
    assert {collective["kind"] for collective in step.collectives} == {"all-reduce"}
    assert sum(size > step.parameter_bytes / 2 for size in sums) == 1  # all gradients at once
    # Of two microbatches at once: squared distances, sums and counts; on the way back both, of 256 channels.
    assert sorted(sums)[:-1] == [2 * 4 * 256, 2 * 4 * 257, 2 * 4 * (256 + 257)]


test_what_a_tpu_cannot_run_is_one_message = pytest.mark.slow(
    each_is_refused(
        lambda build, changes, compiler: compile_model(compiler, build, **changes),
        (models.of_words, {"train_data": models.words}, "it holds text"),
        (lambda: models.of(models.Python()), {}, "EagerPyFunc of the layer 'python' (models.py:"),
        (lambda: models.of(models.Ragged()), {}, "RaggedTensorToTensor of the layer 'ragged' (models.py:"),
        (lambda: models.of(models.Growing()), {}, "a loop of the layer 'growing' (models.py:"),
        (models.of, {"global_batch_size": 30}, "30 cannot be split evenly among 4 replicas"),
    )
)

test_a_slice_that_is_none_is_refused = each_is_refused(
    parse_slice,
    ("v9:2x2", "names no TPU that the compiler knows: v4, v5e, v5p, v6e"),
    ("v5e:2", "a slice of v5e has 2 sizes"),
    ("v4:2x2", "--compile_for=v4:2x2x1"),
)


def test_collectives_are_read_from_a_program() -> None:
    program = """
      %a = (f32[3,4]{1,0:T(8,128)}, bf16[5]{0}) all-reduce(%x, %y), replica_groups={{0,1}}
      %b = f32[2]{0} all-gather-start(%z)
      %c = f32[2]{0} get-tuple-element(%a), index=0, metadata={op_name="all-reduce"}
    """
    assert find_collectives(program) == [{"kind": "all-reduce", "bytes": 58}, {"kind": "all-gather", "bytes": 8}]
