"""Says which layer or operation of a model a TPU cannot run, and what to write instead.

Invariant: what is not recognized is told in the compiler's own words. The texts are those of TensorFlow's lowering to
XLA; tests/tpu_compiler has a model for each.
"""

from __future__ import annotations

import re

import keras

from tfdist.errors import UserError, format_first_line

IN_THE_DATA = "Compute it in the data function, which the host runs."
ADVICE = {  # by what the operation's name holds; the first that fits
    r"PyFunc": "It calls Python. Write it with Keras's or TensorFlow's operations, or compute it in the data function.",
    r"StringFormat|Print|Assert": "Remove the printing or checking.",
    r"String|Regex|Lookup|HashTable|Vocab|DT_STRING": f"A TPU has no text. {IN_THE_DATA}",
    r"Ragged|Sparse": "A TPU has no ragged or sparse tensors. Pad to a fixed length, and give a mask or weights.",
    r"Decode|Image|File|Parse": f"A TPU reads no files. {IN_THE_DATA}",
}
NO_ROOM = "RESOURCE_EXHAUSTED"
ELSE = "A TPU has no such operation. Use another, or compute it in the data function."
_UNSUPPORTED = re.compile(r"(\w+) \(No registered '\w+' OpKernel [^{]*\{\{node ([^}]+)\}\}\s*(.*)")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_LINE = re.compile(r'File "([^"]+)", line (\d+), in \w+')


class NoRoomError(UserError):
    """The step does not fit into a core's memory."""


def explain(text: str, model: keras.Model, topology: str) -> UserError:
    """The error for what TensorFlow or the compiler says of a step that it does not compile."""
    node = _NODE.search(text)
    where = f"{_find_layer(node[1], model) if node else ''}{_find_line(text)}"
    if unsupported := _UNSUPPORTED.search(text):
        operation, name, more = unsupported.groups()
        if name == "batch":
            return UserError(f"A TPU ({topology}) cannot take the data: it holds text. {IN_THE_DATA}")
        advice = next((text for words, text in ADVICE.items() if re.search(words, f"{operation} {more}")), ELSE)
        return UserError(f"A TPU ({topology}) cannot run {operation}{where}. {advice}")
    if "shapes of loop body do not match" in text:
        return UserError(
            f"A TPU ({topology}) cannot run a loop{where} whose values change their shapes. Give what grows its final "
            "shape before the loop, and fill it, as tf.TensorArray(size=…) with a fixed element_shape does."
        )
    if "chips_per_host_bounds" in text:
        return UserError(
            f"There is no slice {topology}. From 4 chips on, both first sizes are even, as in 2x2 and 2x4."
        )
    if "compile-time constant" in text or "must be a constant" in text:
        return UserError(
            f"A TPU ({topology}) needs shapes that are known before it computes, and one{where} depends on values. "
            "Use a fixed shape and a mask."
        )
    reason = format_first_line(text.strip() or "it gives no reason")
    if NO_ROOM in text:
        return NoRoomError(
            f"The step does not fit into the memory of a core of {topology}: {reason} Use a smaller "
            "train.global_batch_size, more train.num_microbatches, train.precision = 'bfloat16', or a larger slice."
        )
    return UserError(f"A TPU ({topology}) cannot run the step{where}: {reason}")


def _find_layer(node: str, model: keras.Model) -> str:
    """The innermost layer whose name is in the name of a graph's node, as " of the layer 'NAME'"."""
    names = {layer.name for layer in model._flatten_layers(include_self=False)}
    for part in reversed(node.split("/")):
        plain = part if part in names else re.sub(r"_\d+$", "", part)  # Keras numbers the calls of a layer
        if plain in names:
            return f" of the layer {plain!r}"
    return ""


def _find_line(text: str) -> str:
    """The last line of the user's own code on the way there, as " (FILE:LINE)"."""
    own = [found for found in _LINE.findall(text) if "site-packages" not in found[0] and "/tfdist/" not in found[0]]
    return f" ({own[-1][0].rpartition('/')[2]}:{own[-1][1]})" if own else ""
