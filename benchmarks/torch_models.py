"""The models of sizes.py in PyTorch, layer by layer as workloads.py has them in Keras."""

from __future__ import annotations

import itertools

import torch
from sizes import HEADS, NORM_EPSILON, NUM_CLASSES, Size
from torch import nn


class Block(nn.Module):
    """As tfdist.models.transformer.TransformerBlock."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = (nn.LayerNorm(width, eps=NORM_EPSILON) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        here = self.attention_norm(inputs)
        x = inputs + self.attention(here, here, here, need_weights=False)[0]
        return x + self.dense(self.norm(x))


class Mean(nn.Module):
    """Over the places of a sequence, [n, length, width]."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean(1)


class Recurrent(nn.Module):
    """The last output of an LSTM. PyTorch's has two bias vectors, of which Keras has the sum: the second stays 0."""

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, units, batch_first=True)
        nn.init.zeros_(self.lstm.bias_hh_l0.requires_grad_(False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.lstm(inputs)[0][:, -1]


def build_dense(size: Size) -> tuple[list[nn.Module], int]:
    widths = (size.input_shape[-1], *size.units)
    return [module for pair in itertools.pairwise(widths) for module in (nn.Linear(*pair), nn.ReLU())], widths[-1]


def build_convolutions(size: Size) -> tuple[list[nn.Module], int]:
    modules: list[nn.Module] = []
    channels = size.input_shape[-1]
    for width, stride in zip((16, 32, 64), (1, 2, 2), strict=True):
        for index in range(3):
            modules += [nn.Conv2d(channels, width, 3, stride=stride if index == 0 else 1, padding=1), nn.ReLU()]
            channels = width
    return [*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten()], channels


def build_blocks(size: Size) -> tuple[list[nn.Module], int]:
    return [*map(Block, size.units), Mean()], size.units[-1]


def build_recurrent(size: Size) -> tuple[list[nn.Module], int]:
    return [Recurrent(size.input_shape[-1], *size.units)], size.units[-1]


def build_embedded(size: Size) -> tuple[list[nn.Module], int]:
    width, units = size.units
    return [nn.Embedding(size.vocabulary, width), Mean(), nn.Linear(width, units), nn.ReLU()], units


BODIES = {
    "mlp": build_dense,
    "convnet": build_convolutions,
    "transformer": build_blocks,
    "lstm": build_recurrent,
    "embedding": build_embedded,
}


def build(size: Size) -> nn.Module:
    modules, width = BODIES[size.kind](size)
    return nn.Sequential(*modules, nn.Linear(width, NUM_CLASSES))
