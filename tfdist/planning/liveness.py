"""The most memory that the tensors of a traced function take at once, in the order in which TensorFlow runs it.

The function is followed as one thread of TensorFlow's executor would go through it: an operation starts when its inputs
are there, first come first served; a buffer goes when nobody reads it any more; elementwise operations write into an
input that nobody else needs. Invariant: nothing is run. Variables are no tensors here, and reading one copies nothing.
`traced_step.py` calls it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Their outputs are their first input.
SAME = {
    "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "EnsureShape",
    "ReadVariableOp", "Snapshot", "CheckNumerics", "XlaAllReduce", "Bitcast",
}  # fmt: skip
# They write into an input of the same size that nobody else needs.
IN_PLACE = {
    "Add", "AddV2", "AddN", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "Maximum", "Minimum", "SquaredDifference",
    "Neg", "Exp", "Log", "Log1p", "Expm1", "Sqrt", "Rsqrt", "Square", "Abs", "Pow", "Tanh", "Sigmoid", "Erf", "Erfc",
    "Relu", "Relu6", "Elu", "Selu", "Softplus", "LeakyRelu", "ReluGrad", "Relu6Grad", "EluGrad", "SoftplusGrad",
    "LeakyReluGrad", "TanhGrad", "SigmoidGrad", "RsqrtGrad", "SqrtGrad", "InvGrad", "Softmax", "LogSoftmax", "BiasAdd",
    "Sign", "Sin", "Cos", "Reciprocal", "Inv", "MulNoNan", "Xdivy", "Xlogy", "Floor", "Round", "SelectV2", "Select",
}  # fmt: skip
NOTABLE = 1 << 20  # bytes, from which on it is told that they depend on values
LISTS = {"EmptyTensorList", "TensorListReserve"}
GROWING = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # the index of the element among the inputs
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
GATHERS = {"ResourceGather", "GatherV2"}
LOOPS = {"While", "StatelessWhile"}
BRANCHES = {"If", "StatelessIf"}


class Buffer:
    """Memory that tensors share.

    Attributes:
      size: in bytes.
      readers: who may still read it.
      kept: never goes, and is not counted.
      list_length: elements of a list; 0 for any other tensor.
      element_bytes: bytes of a list's elements, those that it shares with others among them.
    """

    def __init__(self, size: int, *, kept: bool = False, list_length: int = 0) -> None:
        self.size, self.kept, self.list_length = size, kept, list_length
        self.readers = self.element_bytes = 0


class MemoryTracer:
    """Follows functions; `peak` is the most bytes at once so far, `live` those of now."""

    def __init__(self) -> None:
        self._turns = 1
        self.live = self.peak = 0
        self.flops = self.bytes_moved = 0.0
        self.num_loop_operations = 0  # operations
        self.unknown: set[str] = set()  # operations with outputs whose shapes depend on values

    def trace(self, graph: Any, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Goes through a function's graph; returns the buffers of what it returns, which count as read once more."""
        returned = collections.Counter(tensor.name for tensor in graph.outputs)
        buffer_of: dict[str, Buffer] = {}
        queue = Queue(graph)

        def assign_buffers(tensors: Sequence[Any], buffers: Sequence[Buffer]) -> None:
            for tensor, buffer in zip(tensors, buffers, strict=True):
                buffer_of[tensor.name] = buffer
                buffer.readers += queue.readers[tensor.name] + returned[tensor.name]

        assign_buffers(graph.inputs, arguments)
        while queue.ready:
            operation = queue.ready.popleft()
            inputs = [buffer_of[tensor.name] for tensor in operation.inputs]
            if not operation.outputs or operation.outputs[0].name not in buffer_of:
                assign_buffers(operation.outputs, self._run(operation, inputs))
            self._count_work(operation, buffer_of)
            for buffer in inputs:
                buffer.readers -= 1
            for buffer in [*inputs, *(buffer_of[tensor.name] for tensor in operation.outputs)]:
                if buffer.readers <= 0 and not buffer.kept:
                    self.live -= buffer.size
                    buffer.size = 0
            queue.finish(operation)
        return [buffer_of[tensor.name] for tensor in graph.outputs]

    def allocate(self, size: int) -> Buffer:
        """Returns a new buffer of `size` bytes, which counts as live."""
        self.live += size
        self.peak = max(self.peak, self.live)
        return Buffer(size)

    def _count_work(self, operation: Any, buffer_of: dict[str, Buffer]) -> None:
        tensors = {tensor.name for tensor in [*operation.inputs, *operation.outputs] if tensor.dtype != tf.variant}
        self.flops += count_flops(operation) * self._turns
        self.bytes_moved += sum(buffer_of[name].size for name in tensors) * self._turns

    def _run(self, operation: Any, inputs: list[Buffer]) -> list[Buffer]:
        kind = operation.type
        if kind in CALLS:
            return self._trace_call(_function(operation, "f"), inputs)
        if kind in LOOPS:
            return self._trace_loop(operation, inputs)
        if kind in BRANCHES:
            branches = [_function(operation, name) for name in ("then_branch", "else_branch")]
            return self._trace_call(max(branches, key=lambda graph: len(graph.get_operations())), inputs[1:])
        if kind in SAME and inputs:
            return inputs[:1] if len(operation.outputs) == 1 else inputs
        if kind == "TensorListFromTensor":
            shape = operation.inputs[0].shape
            inputs[0].list_length = shape[0] if shape.rank else 0
            return inputs[:1]
        if kind in LISTS:
            return [Buffer(0, list_length=int(tf.get_static_value(operation.inputs[1]) or 0))]
        if kind in GROWING:
            growing, element = inputs[0], inputs[GROWING[kind]]
            growing.size, element.size = growing.size + element.size, 0
            growing.element_bytes += self._size(operation.inputs[GROWING[kind]], inputs)
            return [growing]
        if kind == "TensorListPopBack":
            size = self._size(operation.outputs[1], [])
            taken = min(size, inputs[0].size)
            inputs[0].size -= taken
            inputs[0].element_bytes = max(0, inputs[0].element_bytes - size)
            return [inputs[0], Buffer(taken)]
        if kind == "ZerosLike" and operation.inputs[0].dtype == tf.variant:
            zeros = self.allocate(inputs[0].element_bytes)  # for each element of a list
            zeros.element_bytes, zeros.list_length = inputs[0].element_bytes, inputs[0].list_length
            return [zeros]
        return self._trace_operation(operation, inputs)

    def _trace_operation(self, operation: Any, inputs: list[Buffer]) -> list[Buffer]:
        sizes = [self._size(tensor, inputs) for tensor in operation.outputs]
        if operation.type in IN_PLACE and sizes:
            for tensor, buffer in zip(operation.inputs, inputs, strict=True):
                is_last = not buffer.kept and buffer.readers == sum(each is buffer for each in inputs)
                fits = buffer.size == sizes[0] and tensor.dtype.size == operation.outputs[0].dtype.size
                if is_last and fits:
                    return [buffer, *map(self.allocate, sizes[1:])]
        return [*map(self.allocate, sizes)]

    def _trace_call(self, graph: Any, inputs: Sequence[Buffer]) -> list[Buffer]:
        outputs = self.trace(graph, inputs)
        for buffer in outputs:
            buffer.readers -= 1
        return outputs

    def _trace_loop(self, operation: Any, inputs: list[Buffer]) -> list[Buffer]:
        """One turn, and what lists have grown by in it as often as there are turns."""
        body, condition = (_function(operation, name) for name in ("body", "cond"))
        self.num_loop_operations += len(body.get_operations()) + len(condition.get_operations())
        turns = max(1, *(buffer.list_length for buffer in inputs))
        before = [(buffer.size, buffer.element_bytes) for buffer in inputs]
        outer, self._turns = self._turns, self._turns * turns
        outputs = self.trace(body, inputs)
        self._turns = outer
        for buffer in outputs:
            buffer.readers -= 1
        for tensor, buffer, (size, elements) in zip(body.inputs, inputs, before, strict=True):
            if tensor.dtype == tf.variant:
                more = max((buffer.size - size) * (turns - 1), -buffer.size)
                buffer.size += more
                buffer.element_bytes = max(0, elements + (buffer.element_bytes - elements) * turns)
                self.live += more
                self.peak = max(self.peak, self.live)
        return outputs

    def _size(self, tensor: Any, inputs: Sequence[Buffer]) -> int:
        """Bytes. Where the shape depends on values: as many as of the largest input, or of its rows for all indices."""
        if tensor.dtype in (tf.resource, tf.variant, tf.string):
            return 0
        if tensor.shape.is_fully_defined():
            return tensor.shape.num_elements() * tensor.dtype.size
        if tensor.op.type in GATHERS:
            indices = tensor.op.inputs[1]
            row = math.prod(size for size in tensor.shape.as_list() if size is not None)
            size = row * tensor.dtype.size * inputs[1].size // indices.dtype.size
        else:
            size = max((buffer.size for buffer in inputs), default=0)
        if size >= NOTABLE:
            self.unknown.add(f"{tensor.op.type} {tensor.op.name}")
        return size


class Queue:
    """The operations of a graph that can start; those that nothing needs never do.

    Attributes:
      ready: in the order in which they became so.
      readers: of each tensor, by name; one that reads it twice counts twice.
    """

    def __init__(self, graph: Any) -> None:
        needed: dict[str, Any] = {}
        stack = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
        while stack:
            operation = stack.pop()
            if operation.name not in needed:
                needed[operation.name] = operation
                stack += _list_predecessors(operation)
        self.readers = collections.Counter(tensor.name for each in needed.values() for tensor in each.inputs)
        self._waiting: dict[str, int] = {}
        self._after: dict[str, list[Any]] = collections.defaultdict(list)
        operations = [each for each in graph.get_operations() if each.name in needed]
        for operation in operations:
            before = {each.name for each in _list_predecessors(operation)}
            self._waiting[operation.name] = len(before)
            for name in before:
                self._after[name].append(operation)
        self.ready = collections.deque(each for each in operations if not self._waiting[each.name])

    def finish(self, operation: Any) -> None:
        """Makes those operations ready that waited for this one alone."""
        for after in self._after[operation.name]:
            self._waiting[after.name] -= 1
            if not self._waiting[after.name]:
                self.ready.append(after)


def count_flops(operation: Any) -> float:
    """Multiplications and additions of a product or convolution; 0 of others."""
    kind = operation.type
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        transposed = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return 2 * _count(operation.outputs[0]) * (operation.inputs[0].shape[-2 if transposed else -1] or 1)
    if kind == "Einsum":
        labels, _ = operation.get_attr("equation").decode().split("->")
        sizes: dict[str, int] = {}
        for text, tensor in zip(labels.split(","), operation.inputs, strict=True):
            names = text.replace("...", "0123456789"[: tensor.shape.rank - len(text) + len("...")])
            sizes |= zip(names, tensor.shape, strict=True)
        return 2 * math.prod(size or 1 for size in sizes.values())
    if "Conv" in kind and operation.outputs and len(operation.inputs) > 1:
        is_backward = "Backprop" in kind
        image = operation.inputs[2] if is_backward else operation.outputs[0]
        kernel = operation.outputs[0] if kind.endswith(("Filter", "FilterV2")) else operation.inputs[1]
        if kernel.shape.rank is None or kernel.shape.rank < 3:
            return 0
        window = math.prod(kernel.shape[:-1]) if "Depthwise" not in kind else math.prod(kernel.shape[:-2])
        return 2 * _count(image) * window
    return 0


def _count(tensor: Any) -> int:
    return math.prod(size or 1 for size in tensor.shape)


def _list_predecessors(operation: Any) -> list[Any]:
    return [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)


def _function(operation: Any, attribute: str) -> Any:
    name = operation.get_attr(attribute).name
    return operation.graph._get_function(name).graph
