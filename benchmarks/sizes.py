"""What the benchmarks train, in numbers that every framework's side reads.

Imports no framework: workloads.py builds these models in Keras, torch_models.py in PyTorch. All are trained with Adam
at 1e-3 on shuffled batches, and classify.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from measuring import choose_size

NUM_CLASSES = 10
HEADS = 4  # of a transformer's attention
NORM_EPSILON = 1e-3  # Keras's own


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its examples, with --smoke small ones.

    Attributes:
      kind: of the model, a key of the builders on each side.
      input_shape: of an example.
      batch: examples of a step, over all workers.
      num_examples: of an epoch.
      units: what the layers' widths are.
      vocabulary: the inputs are whole numbers below this; floats where it is 0.
    """

    kind: str
    input_shape: tuple[int, ...]
    batch: int
    num_examples: int
    units: tuple[int, ...] = ()
    vocabulary: int = 0

    def __post_init__(self) -> None:
        batch = choose_size(self.batch, 8)
        small = {"batch": batch, "num_examples": choose_size(self.num_examples, 4 * batch)}
        if self.kind == "mlp":
            small["units"] = choose_size(self.units, (16,) * 2)
        for name, value in small.items():
            object.__setattr__(self, name, value)


def examples(num_examples: int, shape: tuple[int, ...], vocabulary: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs float32, or int32 tokens, [num_examples, *shape], and classes int32 [num_examples].

    Speed does not depend on what the numbers are, so nothing has to be downloaded.
    """
    generator = np.random.default_rng(0)
    if vocabulary:
        x = generator.integers(0, vocabulary, (num_examples, *shape), dtype=np.int32)
    else:
        x = generator.standard_normal((num_examples, *shape), dtype=np.float32)
    return x, generator.integers(0, NUM_CLASSES, num_examples, dtype=np.int32)


ONE_DEVICE = {
    "small MLP": Size("mlp", (64,), 64, 65_536, units=(64, 64)),
    "medium MLP": Size("mlp", (256,), 128, 32_768, units=(512, 512)),
    "dense 19 MB": Size("mlp", (784,), 512, 8192, units=(1536, 1536, 768)),
    "convnet": Size("convnet", (32, 32, 3), 256, 2048),
    "transformer": Size("transformer", (64, 128), 32, 1024, units=(128,) * 4),
    "LSTM": Size("lstm", (64, 32), 64, 2048, units=(128,)),
    "embedding": Size("embedding", (32,), 256, 8192, units=(64, 64), vocabulary=100_000),
}
TWO_WORKERS = {
    "62 small variables": Size("mlp", (32,), 128, 8192, units=(32,) * 30),
    **{name: ONE_DEVICE[name] for name in ("dense 19 MB", "convnet", "transformer")},
}
HEAVY = Size("mlp", (2048,), 16, 2048, units=(2048,) * 4)  # 16.8 million weights: with Adam's two slots 202 MB of state
SIZES = ONE_DEVICE | TWO_WORKERS | {"heavy": HEAVY}
