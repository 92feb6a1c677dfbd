"""Random small Keras programs, as code: what `tools/fuzz_fit.py` has two engines run.

A program defines build(), which gives a compiled model, and arguments(), which gives those of its fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

Draw = Any
RATES = "keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)"
LINEAR = (  # the first two for embeddings, whose rows fit clips and averages one by one
    "'sgd'",
    "keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)",
    f"keras.optimizers.SGD({RATES}, clipnorm=0.5)",
    "keras.optimizers.SGD(0.1, global_clipnorm=0.5, weight_decay=0.01)",
    "keras.optimizers.SGD(0.1, clipvalue=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)",
)
# Their epsilon keeps what is only rounding in a gradient from becoming a whole step.
ADAPTIVE = (
    "keras.optimizers.Adam(0.05, epsilon=1e-2)",
    f"keras.optimizers.AdamW({RATES}, epsilon=1e-2, weight_decay=0.01, global_clipnorm=1.0)",
    "keras.optimizers.RMSprop(0.01, epsilon=1e-2, momentum=0.5)",
    "keras.optimizers.Adagrad(0.1, epsilon=1e-2, use_ema=True)",
    "keras.optimizers.Adam(0.05, epsilon=1e-2, amsgrad=True, loss_scale_factor=4.0)",
)
REDUCTIONS = ("", "reduction='sum'", "reduction='mean'", "reduction='mean_with_sample_weight'", "reduction='none'")
INPUTS = {  # by kind: the shape of an Input, its data, and what makes 4 features of it
    "numbers": ("(3,)", "numbers({seed}, {n}, 3)", ("keras.layers.Dense(4, activation='tanh')",)),
    "doubles": ("(3,)", "numbers({seed}, {n}, 3, dtype='float64')", ("keras.layers.Dense(4)",)),
    "integers": ("(3,)", "numbers({seed}, {n}, 3, dtype='int8')", ("keras.layers.Dense(4, activation='tanh')",)),
    "booleans": ("(3,)", "numbers({seed}, {n}, 3) > 0", ("keras.layers.Dense(4)",)),
    "a number": ("(1,)", "numbers({seed}, {n})", ("keras.layers.Dense(4, activation='tanh')",)),
    "image": (
        "(4, 4, 1)",
        "numbers({seed}, {n}, 4, 4, 1)",
        ("keras.layers.Conv2D(4, 3, activation='tanh')", "keras.layers.GlobalAveragePooling2D()"),
    ),
    "series": (
        "(4, 2)",
        "numbers({seed}, {n}, 4, 2)",
        ("keras.layers.Bidirectional(keras.layers.SimpleRNN(2, unroll=True))",),
    ),
    "tokens": (
        "(5,)",
        "tokens({seed}, {n})",
        ("keras.layers.Embedding(7, 4, mask_zero=True)", "keras.layers.GlobalAveragePooling1D()"),
    ),
    "words": ("(5,)", "tokens({seed}, {n})", ("keras.layers.Embedding(7, 3, mask_zero=True)", "keras.layers.LSTM(4)")),
}
HIDDEN = (
    "keras.layers.Dense(4, activation='tanh', kernel_regularizer='l2')",
    "keras.layers.BatchNormalization(momentum=0.5)",
    "keras.layers.LayerNormalization()",
    "keras.Sequential([keras.layers.Dense(4, activation='relu'), keras.layers.Dense(4)])",
    "keras.layers.ActivityRegularization(0.01)",
    "AddedLoss()",
    "keras.layers.Dense(4, trainable=False)",
    "keras.layers.Dense(4, dtype='float64')",
    "keras.layers.Dense(4, dtype='mixed_bfloat16')",
    "keras.layers.Dropout(0.3, seed=1)",
)
OUTPUTS = {  # by kind: layer, data, losses, metrics
    "value": (
        "keras.layers.Dense(1{name})",
        "numbers({seed}, {n}, 1)",
        ("'mse'", "'mean_absolute_error'", "keras.losses.Huber({reduction})", "gap", "whole_gap", "keras.losses.mse"),
        ("'mae'", "'mse'", "gap", "Sums()", "keras.metrics.RootMeanSquaredError()", "keras.metrics.R2Score()"),
    ),
    "flat value": (
        "keras.layers.Dense(1{name})",
        "numbers({seed}, {n})",
        ("'mse'", "keras.losses.LogCosh({reduction})"),
        ("'mae'", "keras.metrics.MeanSquaredError()"),
    ),
    "values": (
        "keras.layers.Dense(2{name})",
        "numbers({seed}, {n}, 2)",
        ("'mse'", "keras.losses.MeanSquaredError({reduction})", "keras.losses.CosineSimilarity()", "gap"),
        ("closeness", "keras.metrics.CosineSimilarity()", "keras.metrics.MeanMetricWrapper(gap)", "Sums()"),
    ),
    "flag": (
        "keras.layers.Dense(1, activation='sigmoid'{name})",
        "flags({seed}, {n})",
        ("'binary_crossentropy'", "keras.losses.BinaryFocalCrossentropy({reduction})", "keras.losses.Dice()"),
        ("'accuracy'", "keras.metrics.AUC(num_thresholds=5)", "keras.metrics.Precision()", "keras.metrics.Recall(0.4)"),
    ),
    "class": (
        "keras.layers.Dense(3, activation='softmax'{name})",
        "classes({seed}, {n})",
        ("'sparse_categorical_crossentropy'", "keras.losses.SparseCategoricalCrossentropy({reduction})"),
        ("'accuracy'", "keras.metrics.SparseTopKCategoricalAccuracy(2)", "'sparse_categorical_crossentropy'"),
    ),
    "one hot": (
        "keras.layers.Dense(3, activation='softmax'{name})",
        "one_hot({seed}, {n})",
        ("'categorical_crossentropy'", "keras.losses.CategoricalFocalCrossentropy()", "keras.losses.KLDivergence()"),
        ("'accuracy'", "keras.metrics.F1Score(average='macro')", "keras.metrics.F1Score()", "keras.metrics.AUC()"),
    ),
}
CALLBACKS = (
    "keras.callbacks.EarlyStopping('loss', patience=0, mode='max', restore_best_weights=True)",
    "keras.callbacks.ReduceLROnPlateau('loss', patience=0, min_delta=100.0, cooldown=1)",
    "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(mine=epoch * 2.0))",
    "keras.callbacks.TerminateOnNaN()",
    "keras.callbacks.SwapEMAWeights(swap_on_epoch=True)",
    "Stopping(2)",
)
FORMS = ("arrays", "tensors", "pandas", "dataset", "generator", "pydataset", "workers", "grows", "shrinks", "raises")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and what its two runs may differ in.

    Attributes:
      code: defines build() and arguments().
      calls: how often fit is called.
      stops_at: the batch at which a run with a run_dir is stopped, to be resumed; 0 only has a run_dir, None none.
      is_coarse: computes in 16 bits.
      parts_differ: the losses of its outputs are means over examples here, over batches in `fit`.
    """

    code: str
    calls: int
    stops_at: int | None
    is_coarse: bool
    parts_differ: bool


def nest(form: str, names: Sequence[str], values: Sequence[str], one: bool = True) -> str:
    """Code of values as a dict by name, a list or a tuple; of one of them alone."""
    if len(values) == 1 and one and form != "dict":
        return values[0]
    if form == "dict":
        return "{" + ", ".join(f"{name!r}: {value}" for name, value in zip(names, values, strict=True)) + "}"
    inner = ", ".join(values)
    return f"({inner},)" if form == "tuple" else f"[{inner}]"


@st.composite
def programs(draw: Draw) -> Program:
    """One program; the simplest choice comes first everywhere, so that what is shrunk is simple."""

    def choose(options: Sequence[Any]) -> Any:
        return draw(st.sampled_from(list(options)))

    def sometimes(times: int = 4) -> bool:
        return draw(st.integers(0, times - 1)) == times - 1

    n, size = draw(st.integers(4, 12)), draw(st.integers(2, 6))
    kinds = [choose(list(INPUTS)) for _ in range(draw(st.integers(1, 2)))]
    ins = [chr(ord("a") + index) for index in range(len(kinds))]
    x_form = choose(("list", "dict"))
    heads = [choose(list(OUTPUTS)) for _ in range(choose((1, 1, 2, 3)))]
    outs = [f"out{index}" for index in range(len(heads))]
    y_form = choose(("list", "dict"))
    lines = ["def build():", "    keras.utils.set_random_seed(1)"]
    lines += [f"    {i} = keras.Input({INPUTS[kind][0]}, name={i!r})" for i, kind in zip(ins, kinds, strict=True)]
    for i, kind in zip(ins, kinds, strict=True):
        lines += [f"    h_{i} = {i}", *(f"    h_{i} = {layer}(h_{i})" for layer in INPUTS[kind][2])]
    lines.append(
        "    h = " + (f"keras.layers.Add()([{', '.join(f'h_{i}' for i in ins)}])" if ins[1:] else f"h_{ins[0]}")
    )
    has_optional = x_form == "dict" and sometimes(8)
    if has_optional:
        lines += ["    more = keras.Input((4,), optional=True, name='more')", "    h = OrZeros()(h, more)"]
    hidden = draw(st.lists(st.sampled_from(HIDDEN), max_size=2))
    lines += [f"    h = {layer}(h)" for layer in hidden]
    if sometimes():
        lines += ["    shared = keras.layers.Dense(4, activation='tanh')", "    h = shared(shared(h))"]
    kept = [OUTPUTS[kind] for kind in heads]
    lines += [f"    {o} = {k[0].format(name=f', name={o!r}')}(h)" for o, k in zip(outs, kept, strict=True)]
    all_ins, all_values = ([*ins, "more"], [*ins, "more"]) if has_optional else (ins, ins)
    lines.append(f"    model = keras.Model({nest(x_form, all_ins, all_values)}, {nest(y_form, outs, outs)})")
    if sometimes():
        lines.append("    model = Wrapped(model)")

    losses = [choose(k[2]).format(reduction=choose(REDUCTIONS)) for k in kept]
    if len(outs) > 1 and sometimes(3):
        losses[0] = "None"
    named = choose(("list", "dict"))
    how = {"optimizer": choose(LINEAR[:2] if {"tokens", "words"} & {*kinds} else LINEAR + ADAPTIVE)}
    how["loss"] = nest(named, outs, losses)
    if "AddedLoss()" in hidden and sometimes():
        how["loss"] = "None"
    if sometimes():
        how["loss_weights"] = nest(named, outs, [str(index / 2 + 0.5) for index in range(len(outs))])
    for name in ("metrics", "weighted_metrics"):
        if sometimes(2):
            chosen = [f"[{', '.join(draw(st.lists(st.sampled_from(k[3]), unique=True, max_size=2)))}]" for k in kept]
            how[name] = nest(choose(("list", "dict")), outs, chosen)
    how["jit_compile"] = "False"
    lines += [f"    model.compile({', '.join(f'{name}={value}' for name, value in how.items())})", "    return model"]

    lines += ["", "", "def arguments():"]
    form = choose(FORMS)
    is_array = form in ("arrays", "tensors", "pandas")
    xs = [INPUTS[kind][1].format(seed=index, n=n) for index, kind in enumerate(kinds)]
    if has_optional:
        xs.append(choose((f"numbers(9, {n}, 4)", "None")) if form == "arrays" else f"numbers(9, {n}, 4)")
    ys = [k[1].format(seed=index + 5, n=n) for index, k in enumerate(kept)]
    listed = "list" if is_array else "tuple"
    lines.append(f"    x = {nest(listed if x_form == 'list' else 'dict', all_ins, xs)}")
    lines.append(f"    y = {nest(listed if y_form == 'list' else 'dict', outs, ys)}")
    weights = sometimes(3)
    if weights:
        weight = f"np.linspace(0.5, 2.0, {n}, dtype='float32')"
        lines.append(f"    w = {nest(listed if y_form == 'list' else 'dict', outs, [weight] * len(outs))}")
    parts = "x, y, w" if weights else "x, y"
    given = {"epochs": draw(st.integers(1, 2)), "shuffle": False}
    steps = -(-n // size)
    if is_array:
        if form != "arrays":
            change = (
                "pandas" if form == "pandas" else "lambda nest: keras.tree.map_structure(tf.convert_to_tensor, nest)"
            )
            lines.append(f"    {parts} = map({change}, ({parts}))")
        given |= {"x": "x", "y": "y", "batch_size": size} | ({"sample_weight": "w"} if weights else {})
    elif form == "dataset":
        given["x"] = f"tf.data.Dataset.from_tensor_slices(({parts})).batch({size})"
    elif form == "generator":
        given |= {"x": f"generate(({parts}), {size})", "steps_per_epoch": steps}
    else:
        extra = {"workers": "workers=2", "grows": "more=1", "shrinks": "more=-1"}.get(form, "")
        extra = f"fails_at={draw(st.integers(0, 2))}, workers={choose((1, 2))}" if form == "raises" else extra
        given["x"] = f"Batches(({parts}), {size}{', ' if extra else ''}{extra})"
        given |= {"steps_per_epoch": steps} if form == "grows" else {}
    if heads == ["class"] and sometimes(3):
        given["class_weight"] = "{0: 2.0, 1: 0.5, 2: 1.5}"
    validation = choose(("none", "none", "arrays", "dataset", "pydataset", "split"))
    if validation == "split" and is_array:
        given["validation_split"] = 0.3
    elif validation == "arrays" and is_array:
        given["validation_data"] = f"({parts})"
    elif validation in ("dataset", "pydataset") and form == "dataset":
        given["validation_data"] = (
            f"{'Batches' if validation == 'pydataset' else given['x'][: -len(f'.batch({size})')]}"
        )
        given["validation_data"] += f"(({parts}), 3)" if validation == "pydataset" else ".batch(3)"
    if "validation_data" in given and sometimes():
        given["validation_freq"] = 2
    callbacks = ["Counting()", *draw(st.lists(st.sampled_from(CALLBACKS), unique=True, max_size=1))]
    if RATES in how["optimizer"]:
        callbacks = [each for each in callbacks if "Rate" not in each and "LR" not in each]
    if "use_ema" not in how["optimizer"]:
        callbacks = [each for each in callbacks if "EMA" not in each]
    given["callbacks"] = f"[{', '.join(callbacks)}]"
    lines.append("    return {" + ", ".join(f"{name!r}: {value}" for name, value in given.items()) + "}")

    stops_at = choose((*[None] * 6, 0, 1, 2))
    return Program(
        code="\n".join(lines) + "\n",
        calls=1 if stops_at is not None else choose((1, 1, 2)),
        stops_at=stops_at,
        is_coarse="bfloat16" in " ".join(hidden),
        parts_differ=len(outs) > 1 and (n % size > 0 or "validation" in str(given)),
    )
