"""Which replica keeps what belongs to a variable, so that the optimizer's state is held once and not by all of them.

Each variable has an owner: the replica whose optimizer has its slots and updates it. The others get the new weights
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020). An owner has whole
variables, no slices, so that every optimizer computes what it would compute alone. Invariant: owners follow from the
variables and the number of replicas, the same on every worker.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tfdist.checkpoint.restore import slice_name
from tfdist.errors import UserError
from tfdist.strategies.strategy import Strategy, static_replica_index
from tfdist.strategies.sums import pack_indices
from tfdist.training.step.precision import as_tf_function

_PENDING = "uninitialized_variables"
OPTIMIZER, HOST, WEIGHTS = "optimizer", "host", "weights"
SHARDINGS = (OPTIMIZER, HOST, WEIGHTS)
ALIGNED = 64  # numbers; a tensor begins at a multiple of 64 bytes
PACKS_PER_REPLICA, MOST_SENT = 2, 1.25  # of new weights: a message in packs of gradients, and what all may send more
Tensors = Sequence[tf.Tensor | tf.IndexedSlices]
T = TypeVar("T")


class Shards:
    """The owners of a model's variables.

    Args:
      strategy: connected.
      variables: that are trained.
      sharding: "optimizer"; "host": its slots are in the memory of the owner's host; "weights": gradients go to their
        owners alone, too, and so do the weights of blocks; a list of patterns where `split` says what is shared.
      blocks: layers whose variables lie at their owners alone; for "weights".
      split: axes by the ids of variables that have no owner: each replica has a slice, cut along that axis.

    Attributes:
      blocks: as given.
      scatters: whether gradients go to their owners alone.
      splits: whether any variable is split.
      host: the device that has the slots and computes the update; None: the owners' own.
    """

    def __init__(
        self,
        strategy: Strategy,
        variables: Sequence[keras.Variable],
        sharding: str | Sequence[str],
        blocks: Sequence[keras.layers.Layer] = (),
        split: Mapping[int, int] = types.MappingProxyType({}),
    ) -> None:
        setting = f"train.sharding = {sharding!r}"
        if strategy.is_one_program:
            raise UserError(
                f"{setting} is for mirrored, multi_worker and horovod, and the strategy is "
                f"{strategy.name}. Leave it out."
            )
        self.scatters = sharding not in (OPTIMIZER, HOST)
        if self.scatters and len(variables) < strategy.topology.num_replicas:
            raise UserError(
                f"{setting} gives every replica variables of its own, and the model has {len(variables)} for "
                f"{strategy.topology.num_replicas} replicas. Leave it out, or write train.sharding = 'optimizer'."
            )
        if self.scatters and (overwritten := [v.path for v in variables if v.overwrite_with_gradient]):
            raise UserError(
                f"{setting} sends gradients to their owners alone, and {overwritten[0]!r} takes its gradient as its "
                "next value, as float8's scales do. Write train.sharding = 'optimizer', or train without float8."
            )
        self._strategy = strategy
        self._variables = list(variables)
        self.blocks = list(blocks)
        self._dtypes = {id(v): v.dtype for v in variables}  # within a layer's call Keras tells those it casts them to
        self.host: str | None = None
        if sharding == HOST:
            first = tf.DeviceSpec.from_string(self._replica_variable(variables[0], 0).device)
            self.host = first.replace(device_type="CPU", device_index=0).to_string()
        self._apart: set[int] = set()
        self._owners: dict[int, int] = {}
        self._split, self.splits = dict(split), bool(split)
        self._here: dict[int, dict[int, keras.Variable]] = {}  # what lies here of a variable, by the replica
        loads = [0] * strategy.topology.num_replicas
        for block in blocks:
            self._share(block, loads)
        whole = [v for v in variables if id(v) not in self._owners and id(v) not in self._split]
        for variable in sorted(whole, key=lambda v: -num_bytes(v)):  # the largest first: so they come out even
            owner = loads.index(min(loads))
            loads[owner] += num_bytes(variable)
            self._owners[id(variable)] = owner

    def _share(self, block: keras.layers.Layer, loads: list[int]) -> None:
        """Owners of a block's variables: every replica has some, and the largest share goes where least is so far."""
        count = len(loads)
        variables = list(block.trainable_variables)
        taken = [v.path for v in variables if id(v) in self._owners]
        regularized = [v.path for v in variables if v.regularizer is not None]
        if taken or regularized or len(variables) < count:
            why = f"has {len(variables)} variables for {count} replicas"
            if taken:
                why = f"shares {taken[0]!r} with another"
            elif regularized:
                why = f"adds a penalty of {regularized[0]!r} to the loss, which has to be whole for that"
            raise UserError(
                f"train.sharding = 'weights' cannot spread the layer {block.name!r}: it {why}. Write 'optimizer'."
            )
        shares: list[list[keras.Variable]] = [[] for _ in range(count)]
        for variable in sorted(variables, key=lambda v: -num_bytes(v)):
            min(shares, key=lambda share: (sum(map(num_bytes, share)), len(share))).append(variable)
        shares.sort(key=lambda share: -sum(map(num_bytes, share)))
        for replica, share in zip(sorted(range(count), key=lambda r: (loads[r], r)), shares, strict=True):
            loads[replica] += sum(map(num_bytes, share))
            for variable in share:
                self._owners[id(variable)] = replica
                self._apart.add(id(variable))

    def shard_variables(self) -> None:
        """Gives each replica the variables and slices that it owns, with their values."""
        topology = self._strategy.topology
        for variable in self._variables:
            owners = range(topology.num_replicas) if self.is_split(variable) else [self.owner(variable)]
            here = [r for r in owners if 0 <= r - topology.first_replica < topology.num_local_replicas]
            value = tf.convert_to_tensor(variable.value) if here and self.is_sharded(variable) else None
            self._here[id(variable)] = {replica: self._build_shard(variable, replica, value) for replica in here}
            if self.is_sharded(variable):
                nothing = tf.zeros([0], variable.dtype)
                variable._value = tf.Variable(nothing, shape=tf.TensorShape(None), trainable=False)

    def _build_shard(self, variable: keras.Variable, replica: int, value: tf.Tensor | None) -> keras.Variable:
        """The Keras variable of a local replica: a view if `value` is None, else a new one with its part of `value`."""
        local = replica - self._strategy.topology.first_replica
        found = copy.copy(variable)
        if value is None:
            found._value = self._replica_variable(variable, local)
            return found
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(tf.device(self._strategy.distribution.extended.worker_devices[local]))
            if not self.is_split(variable):
                found._value = tf.Variable(value, trainable=True, name=variable.name)
                return found
            axis, count = self._split[id(variable)], self._strategy.topology.num_replicas
            *scope_names, name = slice_name(variable.path, replica, count=count, axis=axis).split("/")
            for scope_name in scope_names:
                scopes.enter_context(keras.name_scope(scope_name))
            return keras.Variable(tf.split(value, count, axis)[replica], dtype=variable.dtype, name=name)

    def is_split(self, variable: keras.Variable) -> bool:
        """Whether each replica has a slice of the variable."""
        return id(variable) in self._split

    def is_sharded(self, variable: keras.Variable) -> bool:
        """Whether the variable lies nowhere as a whole but at its owner."""
        return id(variable) in self._apart or id(variable) in self._split

    def own_value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns this replica's part of a variable; an empty tensor where it is not the owner. In replica context."""
        here = self._here[id(variable)].get(static_replica_index())
        return tf.zeros([0], self._dtypes[id(variable)]) if here is None else tf.identity(here._value)

    def list_stored(self, named: Mapping[str, keras.Variable]) -> dict[str, keras.Variable]:
        """Lists this process's parts of sharded variables by name, slices by the names of slices."""
        found = {}
        for name, variable in named.items():
            for replica, here in self._here[id(variable)].items():
                if self.is_split(variable):
                    count = self._strategy.topology.num_replicas
                    found[slice_name(name, replica, count=count, axis=self._split[id(variable)])] = here
                else:
                    found[name] = here
        return found

    def gather_to_chief(self, *, keep: bool) -> None:
        """Brings together what is apart for the last time, where `keep` is set. A collective."""
        for variable in [v for v in self._variables if self.is_sharded(v)]:

            def on_replica(variable: keras.Variable = variable) -> tf.Tensor:
                if self.is_split(variable):
                    return self._join_parts(variable)
                return self.gather_variables([self.own_value(variable)], [variable])[0]

            whole = self._strategy.first_local(as_tf_function(functools.partial(self._strategy.run, on_replica))())
            if keep:
                variable._value = tf.Variable(whole, trainable=True, name=variable.name)

    def _join_parts(self, variable: keras.Variable) -> tf.Tensor:
        """All slices of a variable, in replica context."""
        own = self.own_value(variable)
        rows = self._strategy.all_gather(tf.reshape(own, [-1]), name=f"slices.{own.dtype.name}")
        slices = [tf.reshape(row, own.shape) for row in tf.unstack(rows, self._strategy.topology.num_replicas)]
        return tf.concat(slices, self._split[id(variable)])

    def gather_variables(self, own: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The values of variables, of which each replica gives those that it owns. In replica context.

        Args:
          own: this replica's, and something empty for each of the others'.
          variables: as many.
        """
        replica = static_replica_index()
        found: dict[int, tf.Tensor] = {}
        for dtype, some in _group([self._dtypes[id(v)] for v in variables]).items():
            alike = [variables[i] for i in some]
            owned = [i for i in some if self.owner(variables[i]) == replica]
            mine = [tf.reshape(own[i], [math.prod(variables[i].shape)]) for i in owned]
            row = tf.concat(_pad_row(mine, max(self._sizes(alike)), dtype), axis=0)
            rows = self._strategy.all_gather(row, name=f"block.{dtype}")
            found |= zip(some, self._values(rows, alike), strict=True)
        return [found[i] for i in range(len(variables))]

    def owner(self, variable: keras.Variable) -> int:
        """The index of the replica in the run that has the variable, of one that is not split."""
        return self._owners[id(variable)]

    def list_own(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        """Lists this process's variables at their owners, which the optimizer is built for and updates."""
        return [here for v in variables for here in self._here[id(v)].values()]

    def gradients_of_owned(self, gradients: Sequence[object], variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The gradients of `owned(variables)`, of gradients by replica; outside of any replica context."""
        first = self._strategy.topology.first_replica
        return [
            self._strategy.distribution.experimental_local_results(gradient)[replica - first]
            for gradient, variable in zip(gradients, variables, strict=True)
            for replica in self._here[id(variable)]
        ]

    def spread(self, variables: Sequence[keras.Variable]) -> None:
        """Gives the owners' values to the other replicas. A collective, outside of any replica context."""
        variables = [v for v in variables if not self.is_sharded(v)]
        if variables and self._strategy.topology.num_replicas > 1:
            run = functools.partial(self._strategy.run, lambda: self._spread(variables))
            (as_tf_function(run) if tf.executing_eagerly() else run)()

    def _spread(self, variables: Sequence[keras.Variable]) -> None:
        replica = static_replica_index()
        local = replica - self._strategy.topology.first_replica
        for number, some in enumerate(self._pack_variables(variables)):
            mine = [tf.reshape(self._here[id(v)][replica].value, [-1]) for v in some if self.owner(v) == replica]
            length = max(self._sizes(some))
            # Where nothing is owned anything may stand but a constant: TensorFlow takes what is constant out of a loop,
            # and Horovod's other workers would wait for this one.
            anything = tf.reshape(self._replica_variable(some[0], local), [-1])[:1]
            row = _pad_row(mine, length, some[0].dtype) if mine else [tf.broadcast_to(anything, [length])]
            rows = self._strategy.all_gather(tf.concat(row, axis=0), name=f"weights.{number}")
            # A replica that owns all puts its own value of one in place: of a gathering that nobody uses TensorFlow
            # makes nothing, and Horovod's other workers would wait.
            owns_all = all(self.owner(v) == replica for v in some)
            for index, (variable, value) in enumerate(zip(some, self._values(rows, some), strict=True)):
                if self.owner(variable) != replica or (owns_all and index == 0):
                    self._replica_variable(variable, local).assign(value)

    def _pack_variables(self, variables: Sequence[keras.Variable]) -> Iterator[list[keras.Variable]]:
        """Yields variables of one type that travel together, those that are updated first before the others.

        A row has the size of the owner's that has most, so packs that would send much more than all at once are joined.
        """
        most = PACKS_PER_REPLICA * self._strategy.topology.num_replicas * self._strategy.bytes_per_pack
        for indices in _group([v.dtype for v in variables]).values():
            whole = [variables[i] for i in indices]
            packs = [[whole[i] for i in pack] for pack in pack_indices([num_bytes(v) for v in whole], most)]
            sent = sum(max(self._sizes(pack)) for pack in packs)
            yield from packs if sent <= MOST_SENT * max(self._sizes(whole)) else [whole]

    def _values(self, rows: tf.Tensor, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The variables' values out of a row for each replica, where those that it owns follow each other."""
        found, ends = [], [0] * self._strategy.topology.num_replicas
        for variable in variables:
            owner, size = self.owner(variable), math.prod(variable.shape)
            found.append(tf.reshape(rows[owner, ends[owner] : ends[owner] + size], variable.shape))
            ends[owner] += size
        return found

    def reduce_to_owners(
        self, gradients: Tensors, variables: Sequence[keras.Variable], *, name: str
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The sums over the replicas, each at its variable's owner alone; elsewhere they are empty. In replica context.

        What this computes has to be needed on every replica, or TensorFlow leaves it out and Horovod's other workers
        wait: hence it gives what was received, too.

        Args:
          gradients: of each variable, on this replica.
          variables: as many; one may come several times.
          name: of the collective.
        """
        replica, received = static_replica_index(), []
        found = [tf.zeros([0], gradient.dtype) for gradient in gradients]
        owners = [self.owner(variable) for variable in variables]
        for dtype, some in _group([g.dtype for g in gradients]).items():
            dense = {i: tf.reshape(tf.convert_to_tensor(gradients[i]), [math.prod(variables[i].shape)]) for i in some}
            longest = max(self._sizes([variables[i] for i in some]))
            length = -(-longest // ALIGNED) * ALIGNED  # TensorFlow then takes the rows apart without copying them
            parts: list[tf.Tensor] = []
            for owner in range(self._strategy.topology.num_replicas):
                parts += _pad_row([dense[i] for i in some if owners[i] == owner], length, dtype)
            rows = tf.reshape(tf.concat(parts, axis=0), [-1, length])
            received.append(self._strategy.reduce_scatter(rows, name=f"gradients.{name}.{dtype.name}"))
            end = 0
            for i in [i for i in some if owners[i] == replica]:
                begin, end = end, end + math.prod(variables[i].shape)
                found[i] = tf.reshape(received[-1][begin:end], variables[i].shape)
        return found, received

    def _sizes(self, variables: Sequence[keras.Variable]) -> list[int]:
        """How many numbers each replica owns of these."""
        sizes = [0] * self._strategy.topology.num_replicas
        for variable in variables:
            sizes[self.owner(variable)] += math.prod(variable.shape)
        return sizes

    def _replica_variable(self, variable: keras.Variable, local: int) -> tf.Variable:
        """Returns the tf.Variable that a local replica holds of a distributed variable."""
        return self._strategy.distribution.experimental_local_results(variable.value)[local]


def num_bytes(variable: keras.Variable) -> int:
    """Returns the size of the whole variable, wherever its parts lie."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _group(kinds: Sequence[T]) -> dict[T, list[int]]:
    """The indices of each kind."""
    found: dict[T, list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    return found


def _pad_row(parts: Sequence[tf.Tensor], length: int, dtype: tf.DType | str) -> list[tf.Tensor]:
    """The parts of a row, then its zeros."""
    return [*parts, tf.zeros([length - sum(part.shape[0] for part in parts)], dtype)]


class LateValues:
    """A context: the Keras variables that are made within it get their values by `assign`.

    So a model that does not fit is never whole in one place. A variable gets the value that it would have had at once,
    as an initializer's seed is drawn when it is made.
    """

    def __init__(self) -> None:
        self._scope = keras.StatelessScope(initialize_variables=False)
        self._made: list[keras.Variable] = []

    def __enter__(self) -> LateValues:
        self._scope.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._scope.__exit__(kind, error, trace)
        self._made = global_state.get_global_attribute(_PENDING) or []
        global_state.set_global_attribute(_PENDING, [])
        if isinstance(error, ValueError) and "in a stateless scope" in str(error):
            raise UserError(
                "train.sharding = 'weights' or by layers, and stages, make the model's variables before their values, "
                "and the model's builder makes one of an array. Use layer.add_weight(shape=..., initializer=...), or "
                "leave these out."
            ) from error

    def assign(
        self,
        *,
        but: Callable[[keras.Variable], bool] = lambda variable: False,
        device: Callable[[keras.Variable], str | None] = lambda variable: None,
    ) -> None:
        """Assigns variables their values, within the strategy's scope.

        Args:
          but: for which it does not, unless they were assigned to.
          device: where each is to lie; None leaves that to TensorFlow.
        """
        for variable in self._made:
            assigned = self._scope.get_current_value(variable)
            if assigned is None and but(variable):
                continue
            with contextlib.nullcontext() if (where := device(variable)) is None else tf.device(where):
                variable._deferred_initialize()
            if assigned is not None:
                variable.assign(assigned)
