"""Models in KerasTuner's style, for test_hypermodel.py; copied beside a gin file."""

from __future__ import annotations

import keras
import keras_tuner

import tfdist


def build(hp):
    model = keras.Sequential([keras.Input((64,))])
    kind = hp.Choice("kind", ["linear", "deep"])
    with hp.conditional_scope("kind", ["deep"]):
        if kind == "deep":
            for index in range(hp.Int("layers", 1, 3)):
                model.add(keras.layers.Dense(hp.Int(f"units_{index}", 8, 64, step=8), activation="relu"))
    model.add(keras.layers.Dense(10, activation="softmax"))
    model.compile(
        optimizer=keras.optimizers.Adam(hp.Float("learning_rate", 1e-3, 1e-1, sampling="log")),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


class Classifier(keras_tuner.HyperModel):
    def build(self, hp):
        return build(hp)


class Shuffled(Classifier):
    def fit(self, hp, model, *args, **kwargs):
        return model.fit(*args, shuffle=hp.Boolean("shuffle"), **kwargs)


class Digits(tfdist.TfdistFit, keras_tuner.HyperModel):
    def build(self, hp):
        return build(hp)
