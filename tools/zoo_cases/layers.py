"""A case for each layer of Keras: something learned before it where gradients pass, and a dense layer behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from zoo_cases.case import NUM_CLASSES, Case, draw_normal, draw_uniform, draw_whole

layers = keras.layers
Body = Callable[[Any], Any]
VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (6, 4), (8, 8, 3), (4, 4, 4, 2)
IMAGES = (8, 8, 3)  # of bytes, for augmentation
BESIDE_THE_MODEL = "needs a model of another library, or a saved one"
NO_CASE = {
    "FlaxLayer": BESIDE_THE_MODEL,
    "InputLayer": "begins every other case",
    "JaxLayer": BESIDE_THE_MODEL,
    "Layer": "the base class",
    "MaxNumBoundingBoxes": "takes boxes, on which nothing can be trained",
    "TFSMLayer": BESIDE_THE_MODEL,
    "TorchModuleWrapper": BESIDE_THE_MODEL,
    "Wrapper": "a base class",
}

ON_VECTORS: dict[str, Body] = {
    "Activation": lambda x: layers.Activation("gelu")(x),
    "ActivityRegularization": lambda x: layers.ActivityRegularization(l1=0.01, l2=0.1)(x),
    "AlphaDropout": lambda x: layers.AlphaDropout(0.3)(x),
    "BatchNormalization": lambda x: layers.BatchNormalization(momentum=0.9)(x),
    "Dense": lambda x: layers.Dense(5, kernel_regularizer="l2")(x),
    "Dropout": lambda x: layers.Dropout(0.3)(x),
    "ELU": lambda x: layers.ELU()(x),
    "GaussianDropout": lambda x: layers.GaussianDropout(0.3)(x),
    "GaussianNoise": lambda x: layers.GaussianNoise(0.3)(x),
    "Identity": lambda x: layers.Identity()(x),
    "Lambda": lambda x: layers.Lambda(lambda t: t * 2.0)(x),
    "LayerNormalization": lambda x: layers.LayerNormalization()(x),
    "LeakyReLU": lambda x: layers.LeakyReLU()(x),
    "Normalization": lambda x: layers.Normalization(mean=0.1, variance=2.0)(x),
    "PReLU": lambda x: layers.PReLU()(x),
    "RMSNormalization": lambda x: layers.RMSNormalization()(x),
    "ReLU": lambda x: layers.ReLU()(x),
    "RepeatVector": lambda x: layers.RepeatVector(3)(x),
    "Rescaling": lambda x: layers.Rescaling(2.0, 0.1)(x),
    "Reshape": lambda x: layers.Reshape((2, 3))(x),
    "Softmax": lambda x: layers.Softmax()(x),
    "SpectralNormalization": lambda x: layers.SpectralNormalization(layers.Dense(5))(x),
    "UnitNormalization": lambda x: layers.UnitNormalization()(x),
    "Add": lambda x: layers.Add()([x, layers.Dense(6)(x)]),
    "Average": lambda x: layers.Average()([x, layers.Dense(6)(x)]),
    "Concatenate": lambda x: layers.Concatenate()([x, layers.Dense(6)(x)]),
    "Dot": lambda x: layers.Dot(-1)([x, layers.Dense(6)(x)]),
    "Maximum": lambda x: layers.Maximum()([x, layers.Dense(6)(x)]),
    "Minimum": lambda x: layers.Minimum()([x, layers.Dense(6)(x)]),
    "Multiply": lambda x: layers.Multiply()([x, layers.Dense(6)(x)]),
    "Subtract": lambda x: layers.Subtract()([x, layers.Dense(6)(x)]),
}
ON_SEQUENCES: dict[str, Body] = {
    "AdaptiveAveragePooling1D": lambda x: layers.AdaptiveAveragePooling1D(2)(x),
    "AdaptiveMaxPooling1D": lambda x: layers.AdaptiveMaxPooling1D(2)(x),
    "AdditiveAttention": lambda x: layers.AdditiveAttention()([x, x]),
    "Attention": lambda x: layers.Attention()([x, x]),
    "AveragePooling1D": lambda x: layers.AveragePooling1D(2)(x),
    "Bidirectional": lambda x: layers.Bidirectional(layers.GRU(3))(x),
    "Conv1D": lambda x: layers.Conv1D(5, 3)(x),
    "Conv1DTranspose": lambda x: layers.Conv1DTranspose(5, 3)(x),
    "Cropping1D": lambda x: layers.Cropping1D(1)(x),
    "DepthwiseConv1D": lambda x: layers.DepthwiseConv1D(3)(x),
    "EinsumDense": lambda x: layers.EinsumDense("abc,cd->abd", output_shape=(6, 5), bias_axes="d")(x),
    "Flatten": lambda x: layers.Flatten()(x),
    "GRU": lambda x: layers.GRU(5)(x),
    "GRUCell": lambda x: layers.RNN(layers.GRUCell(5))(x),
    "GlobalAveragePooling1D": lambda x: layers.GlobalAveragePooling1D()(x),
    "GlobalMaxPooling1D": lambda x: layers.GlobalMaxPooling1D()(x),
    "GroupNormalization": lambda x: layers.GroupNormalization(2)(x),
    "GroupQueryAttention": lambda x: layers.GroupQueryAttention(2, 4, 2)(x, x),
    "LSTM": lambda x: layers.LSTM(5)(x),
    "LSTMCell": lambda x: layers.RNN(layers.LSTMCell(5))(x),
    "Masking": lambda x: layers.GRU(5)(layers.Masking()(layers.ReLU()(x))),
    "MaxPooling1D": lambda x: layers.MaxPooling1D(2)(x),
    "MultiHeadAttention": lambda x: layers.MultiHeadAttention(2, 4)(x, x),
    "Permute": lambda x: layers.Permute((2, 1))(x),
    "RNN": lambda x: layers.RNN(layers.SimpleRNNCell(5), return_sequences=True)(x),
    "SeparableConv1D": lambda x: layers.SeparableConv1D(5, 3)(x),
    "SimpleRNN": lambda x: layers.SimpleRNN(5)(x),
    "SimpleRNNCell": lambda x: layers.RNN(layers.SimpleRNNCell(5))(x),
    "SpatialDropout1D": lambda x: layers.SpatialDropout1D(0.3)(x),
    "StackedRNNCells": lambda x: layers.RNN(layers.StackedRNNCells([layers.GRUCell(4), layers.LSTMCell(5)]))(x),
    "TimeDistributed": lambda x: layers.TimeDistributed(layers.Dense(5))(x),
    "UpSampling1D": lambda x: layers.UpSampling1D(2)(x),
    "ZeroPadding1D": lambda x: layers.ZeroPadding1D(1)(x),
}
ON_IMAGES: dict[str, Body] = {
    "AdaptiveAveragePooling2D": lambda x: layers.AdaptiveAveragePooling2D(2)(x),
    "AdaptiveMaxPooling2D": lambda x: layers.AdaptiveMaxPooling2D(2)(x),
    "AveragePooling2D": lambda x: layers.AveragePooling2D(2)(x),
    "CenterCrop": lambda x: layers.CenterCrop(4, 4)(x),
    "Conv2D": lambda x: layers.Conv2D(5, 3)(x),
    "Conv2DTranspose": lambda x: layers.Conv2DTranspose(5, 3)(x),
    "ConvLSTM1D": lambda x: layers.ConvLSTM1D(3, 3)(x),
    "Cropping2D": lambda x: layers.Cropping2D(1)(x),
    "DepthwiseConv2D": lambda x: layers.DepthwiseConv2D(3)(x),
    "GlobalAveragePooling2D": lambda x: layers.GlobalAveragePooling2D()(x),
    "GlobalMaxPooling2D": lambda x: layers.GlobalMaxPooling2D()(x),
    "MaxPooling2D": lambda x: layers.MaxPooling2D(2)(x),
    "Resizing": lambda x: layers.Resizing(6, 6)(x),
    "SeparableConv2D": lambda x: layers.SeparableConv2D(5, 3)(x),
    "SpatialDropout2D": lambda x: layers.SpatialDropout2D(0.3)(x),
    "UpSampling2D": lambda x: layers.UpSampling2D(2)(x),
    "ZeroPadding2D": lambda x: layers.ZeroPadding2D(1)(x),
}
ON_VOLUMES: dict[str, Body] = {
    "AdaptiveAveragePooling3D": lambda x: layers.AdaptiveAveragePooling3D(2)(x),
    "AdaptiveMaxPooling3D": lambda x: layers.AdaptiveMaxPooling3D(2)(x),
    "AveragePooling3D": lambda x: layers.AveragePooling3D(2)(x),
    "Conv3D": lambda x: layers.Conv3D(5, 3)(x),
    "Conv3DTranspose": lambda x: layers.Conv3DTranspose(5, 3)(x),
    "ConvLSTM2D": lambda x: layers.ConvLSTM2D(3, 3)(x),
    "ConvLSTM3D": lambda x: layers.ConvLSTM3D(2, 2)(layers.Reshape((2, 2, 4, 4, 2))(x)),
    "Cropping3D": lambda x: layers.Cropping3D(1)(x),
    "GlobalAveragePooling3D": lambda x: layers.GlobalAveragePooling3D()(x),
    "GlobalMaxPooling3D": lambda x: layers.GlobalMaxPooling3D()(x),
    "MaxPooling3D": lambda x: layers.MaxPooling3D(2)(x),
    "SpatialDropout3D": lambda x: layers.SpatialDropout3D(0.3)(x),
    "UpSampling3D": lambda x: layers.UpSampling3D(2)(x),
    "ZeroPadding3D": lambda x: layers.ZeroPadding3D(1)(x),
}
# On images of bytes, as given; no gradient has to pass.
ON_BYTES: dict[str, Body] = {
    "AugMix": lambda x: layers.AugMix()(x),
    "AutoContrast": lambda x: layers.AutoContrast()(x),
    "ContrastLimitedAdaptiveHistogramEqualization": lambda x: layers.ContrastLimitedAdaptiveHistogramEqualization(
        tile_grid_size=(2, 2)
    )(x),
    "CutMix": lambda x: layers.CutMix()(x),
    "Equalization": lambda x: layers.Equalization()(x),
    "MixUp": lambda x: layers.MixUp()(x),
    "Pipeline": lambda x: layers.Pipeline([layers.Rescaling(0.5), layers.CenterCrop(6, 6)])(x),
    "RandAugment": lambda x: layers.RandAugment()(x),
    "RandomBrightness": lambda x: layers.RandomBrightness(0.3)(x),
    "RandomColorDegeneration": lambda x: layers.RandomColorDegeneration(0.5)(x),
    "RandomColorJitter": lambda x: layers.RandomColorJitter(brightness_factor=0.3, saturation_factor=0.3)(x),
    "RandomContrast": lambda x: layers.RandomContrast(0.3)(x),
    "RandomCrop": lambda x: layers.GlobalAveragePooling2D()(layers.RandomCrop(6, 6)(x)),
    "RandomElasticTransform": lambda x: layers.RandomElasticTransform(1.0)(x),
    "RandomErasing": lambda x: layers.RandomErasing()(x),
    "RandomFlip": lambda x: layers.RandomFlip()(x),
    "RandomGaussianBlur": lambda x: layers.RandomGaussianBlur()(x),
    "RandomGrayscale": lambda x: layers.RandomGrayscale(0.5)(x),
    "RandomHue": lambda x: layers.RandomHue(0.3)(x),
    "RandomInvert": lambda x: layers.RandomInvert(0.5)(x),
    "RandomPerspective": lambda x: layers.RandomPerspective()(x),
    "RandomPosterization": lambda x: layers.RandomPosterization(4)(x),
    "RandomRotation": lambda x: layers.RandomRotation(0.2)(x),
    "RandomSaturation": lambda x: layers.RandomSaturation(0.3)(x),
    "RandomSharpness": lambda x: layers.RandomSharpness(0.5)(x),
    "RandomShear": lambda x: layers.RandomShear(0.2, 0.2)(x),
    "RandomTranslation": lambda x: layers.RandomTranslation(0.2, 0.2)(x),
    "RandomZoom": lambda x: layers.RandomZoom(0.2)(x),
    "Solarization": lambda x: layers.Solarization()(x),
}
ON_CLASSES: dict[str, Body] = {  # whole numbers below 9, [n, 4]
    "CategoryEncoding": lambda x: layers.CategoryEncoding(9, "multi_hot")(x),
    "Embedding": lambda x: layers.Embedding(9, 5, mask_zero=True)(x),
    "HashedCrossing": lambda x: layers.HashedCrossing(7, output_mode="one_hot")((x[:, :1], x[:, 1:2])),
    "Hashing": lambda x: layers.Hashing(7, output_mode="multi_hot")(x),
    "IntegerLookup": lambda x: layers.IntegerLookup(vocabulary=[1, 3, 5], output_mode="multi_hot")(x),
    "ReversibleEmbedding": lambda x: layers.ReversibleEmbedding(9, 5)(x),
}
ON_TEXTS: dict[str, Body] = {
    "StringLookup": lambda x: layers.StringLookup(vocabulary=["red", "green"], output_mode="one_hot")(x),
    "TextVectorization": lambda x: layers.TextVectorization(vocabulary=["red", "green"], output_mode="multi_hot")(x),
}
ON_NUMBERS: dict[str, Body] = {  # as given; no gradient has to pass
    "Discretization": lambda x: layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0], output_mode="multi_hot")(x),
}
ON_SOUNDS: dict[str, Body] = {
    "MelSpectrogram": lambda x: layers.MelSpectrogram(
        fft_length=32, sequence_stride=16, num_mel_bins=6, sampling_rate=100, min_freq=1
    )(x),
    "STFTSpectrogram": lambda x: layers.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16)(x[..., None]),
}


def cases() -> dict[str, Case]:
    """The cases by name."""
    return {
        **_kind(ON_VECTORS, VECTOR, lambda: draw_normal(*VECTOR), learned_before=True),
        **_kind(ON_SEQUENCES, SEQUENCE, lambda: draw_normal(*SEQUENCE), learned_before=True),
        **_kind(ON_IMAGES, IMAGE, lambda: draw_normal(*IMAGE), learned_before=True),
        **_kind(ON_VOLUMES, VOLUME, lambda: draw_normal(*VOLUME), learned_before=True),
        **_kind(ON_BYTES, IMAGES, lambda: np.round(255 * draw_uniform(*IMAGES)), scale=1 / 255),
        **_kind(ON_CLASSES, (4,), lambda: draw_whole(4, below=9), dtype="int32"),
        **_kind(ON_TEXTS, (1,), lambda: np.array(["red", "green", "blue"])[draw_whole(1)], dtype="string"),
        **_kind(ON_NUMBERS, VECTOR, lambda: draw_normal(*VECTOR)),
        **_kind(ON_SOUNDS, (64,), lambda: draw_normal(64)),
    }


def _kind(
    bodies: dict[str, Body],
    shape: tuple[int, ...],
    inputs: Callable[[], np.ndarray],
    *,
    learned_before: bool = False,
    dtype: str = "float32",
    scale: float = 1.0,
) -> dict[str, Case]:
    def model(body: Body) -> keras.Model:
        given = keras.Input(shape, dtype=dtype)
        x = layers.Dense(shape[-1], activation="tanh")(given) if learned_before else given
        x = body(x)
        x = layers.Flatten()(layers.Rescaling(scale)(x) if scale != 1.0 else x)
        return keras.Model(given, layers.Dense(NUM_CLASSES)(x))

    return {
        name: Case(covers=[name], model=lambda body=body: model(body), data=lambda: (inputs(), draw_whole()))
        for name, body in bodies.items()
    }
