"""Low-rank adaptation (Hu et al., "LoRA", 2021) by Keras's own `enable_lora`: a trained model learns by few numbers.

The exported model has the adapted weights in the place of its own; the adapter alone is beside it, in
export/adapter.npz.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.errors import UserError
from tfdist.recipes.recompute import match_layers
from tfdist.settings.checks import COUNT
from tfdist.storage import files

LORA = "lora_"  # Keras calls an adapter's variables so


def adapted(
    model: Callable[[], keras.Model],
    *,
    rank: int = 4,
    layers: Sequence[str] = ("*",),
    alpha: float | None = None,
    also: Sequence[str] = (),
) -> keras.Model:
    """Builds a model whose chosen layers have an adapter; nothing else is trained. In a gin file:

        train.model = @lora.adapted
        lora.adapted.model = @convnet.build_convnet
        train.start_from = 'runs/digits/export/model.keras'

    Args:
      model: builds the model, built.
      rank: of the adapters.
      layers: patterns of layers' names, as file names have them; of those matched, the ones that Keras can adapt are
        (Dense, EinsumDense, Embedding, convolutions).
      alpha: an adapter's part is multiplied with alpha ÷ rank; None takes the rank.
      also: patterns of layers that are trained whole beside them, such as a new head.

    Raises:
      UserError: an argument is something else, or a pattern names nothing that can be adapted.
    """
    COUNT("lora.adapted.rank", rank)
    made = model()
    if not isinstance(made, keras.Model) or not made.built:
        raise UserError("lora.adapted.model must give a built Keras model; give it inputs, or call it once.")
    inside = [layer for layer in made._flatten_layers(include_self=False) if layer.variables]
    whole = match_layers(inside, also, "lora.adapted.also")
    chosen = match_layers(inside, layers, "lora.adapted.layers")
    trained = {id(each) for layer in whole for each in layer._flatten_layers()}
    fit = {id(layer): layer for layer in chosen if hasattr(layer, "enable_lora") and id(layer) not in trained}
    if not fit:
        raise UserError(
            f"lora.adapted.layers = {list(layers)} names no layer that Keras can adapt: Dense, EinsumDense, Embedding, "
            "or a convolution."
        )
    for layer in inside:
        if id(layer) not in trained and not any(id(each) in trained | set(fit) for each in layer._flatten_layers()):
            layer.trainable = False
    for layer in fit.values():
        layer.enable_lora(rank, **({} if alpha is None else {"lora_alpha": alpha}))
        for variable in layer.trainable_variables:
            variable.trainable = LORA in variable.name
    return made


def read_adapter(model: keras.Model) -> dict[str, np.ndarray]:
    """The adapters' values by their variables' paths; empty where nothing is adapted."""
    return {path: keras.ops.convert_to_numpy(v.value) for path, v in _list_adapter_variables(model).items()}


def _list_adapter_variables(model: keras.Model) -> dict[str, keras.Variable]:
    return {v.path: v for v in model.trainable_variables if LORA in v.path.rpartition("/")[2]}


@contextlib.contextmanager
def restore_adapters(model: keras.Model) -> Iterator[None]:
    """Keeps adapters that have learned nothing yet as they are, while weights are loaded from a file that has none.

    Keras sets both factors to zero then, and a product of two zeros has no gradient.
    """
    before = read_adapter(model)
    yield
    for path, variable in _list_adapter_variables(model).items():
        variable.assign(before[path])


def adapter_bytes(adapter: Mapping[str, Any]) -> bytes:
    """Returns an adapter as the content of an .npz file."""
    content = io.BytesIO()
    np.savez(content, **adapter)
    return content.getvalue()


def load_adapter(model: keras.Model, path: str) -> None:
    """Loads an adapter's file into a model that `adapted` has built, with the weights that it was trained on.

    Raises:
      UserError: it has other variables.
    """
    with np.load(io.BytesIO(files.read(path))) as held:
        arrays = {name: held[name] for name in held.files}
    own = _list_adapter_variables(model)
    if set(own) != set(arrays):
        raise UserError(f"The adapter has {sorted(arrays)}, and the model {sorted(own)}. Build it as in its training.")
    for name, variable in own.items():
        variable.assign(arrays[name])
