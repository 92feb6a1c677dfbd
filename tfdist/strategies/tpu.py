"""Cloud TPUs through `tf.distribute.TPUStrategy`.

Proven without a TPU up to the call that needs the hardware; docs/tpu.md says what that leaves open.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from tfdist.errors import UserError, format_first_line
from tfdist.strategies.cluster.tf_config import split_address
from tfdist.strategies.one_device import LoneReplica
from tfdist.strategies.strategy import MakeDataset, Notify, Strategy, Topology

ANSWER_SECONDS = 10.0


class TPU(Strategy):
    """`tf.distribute.TPUStrategy`. Train with `train.precision = 'bfloat16'`, which TPUs compute natively.

    Args:
      address: the TPU's name, its gRPC address, or "local" on a TPU VM. None takes "local" where TensorFlow lists TPU
        devices on this machine, else the name or the address in the environment (TPU_NAME and Kubernetes' variable).
      zone: the Google Cloud zone of a TPU given by name; None takes this machine's.
      project: its Google Cloud project; None takes this machine's.
    """

    name = "tpu"
    needs_static_shapes = True
    is_one_program = True

    def __init__(self, address: str | None = None, zone: str | None = None, project: str | None = None) -> None:
        super().__init__()
        for setting, value in (("address", address), ("zone", zone), ("project", project)):
            if value is not None and not isinstance(value, str):
                raise UserError(f"TPU.{setting} is {value!r}; write it as text in quotes, or None.")
        self.address = address
        self.zone = zone
        self.project = project

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        address = self.address or ("local" if tf.config.list_physical_devices("TPU") else None)
        resolver = self._resolve(address)
        try:
            if address != "local":
                tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise UserError(
                f"The TPU {_format_address(address)} does not initialize: {format_first_line(error)} Check with "
                "`gcloud compute tpus tpu-vm describe` that it is READY and that no other process holds it."
            ) from error
        distribution = tf.distribute.TPUStrategy(resolver)
        self.num_hosts = distribution.extended.num_hosts
        on_hosts = f" on {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        notify(f"TPU {_format_address(address)}: {distribution.num_replicas_in_sync} cores{on_hosts}")
        return distribution, Topology(0, 1, num_local_replicas=distribution.num_replicas_in_sync)

    def _resolve(self, address: str | None) -> tf.distribute.cluster_resolver.TPUClusterResolver:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
                tpu=address, zone=self.zone, project=self.project
            )
            if address == "local" and not tf.config.list_physical_devices("TPU"):
                raise ValueError("TensorFlow lists no TPU device on this machine.")
            if address != "local":
                check_answers(resolver.cluster_spec().as_dict())
        except Exception as error:  # the resolver lets through whatever the metadata server's client raises
            raise UserError(
                f"No TPU found for tpu.TPU.address = {_format_address(address)}: {format_first_line(error)} On a TPU "
                "VM install tfdist[tpu] (docs/tpu.md) and write tpu.TPU.address = 'local'. Elsewhere give the TPU's "
                "name with its zone and project, or a grpc:// address."
            ) from error
        return resolver


def check_answers(jobs: Mapping[str, Sequence[str]]) -> None:
    """Raises OSError where nothing listens at an address; TensorFlow would wait for it without end or word."""
    for host, port in (split_address(address) for addresses in jobs.values() for address in addresses):
        try:
            socket.create_connection((host, port), ANSWER_SECONDS).close()
        except OSError as error:
            raise OSError(f"{host}:{port} does not answer ({error.strerror or error}).") from error


def _format_address(address: str | None) -> str:
    return repr(address) if address else "None (whatever the environment names)"


class TpuProgram(Strategy):
    """The replicas of a TPU as one XLA program, for its compiler: what they compute is traced, and nothing is run.

    Invariant: a step traced under this strategy is the step of `TPU` with as many cores, its reductions lowered to the
    all-reduce that a TPU executes. `tfdist.tpu_compiler` uses it; no configuration names it.

    Args:
      num_replicas: cores of the slice.
    """

    name = TPU.name
    needs_static_shapes = TPU.needs_static_shapes
    trains_alone = True
    is_one_program = TPU.is_one_program

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self._num_replicas = num_replicas

    def check_alone(self) -> None:
        """Does nothing: one process may trace a step of several."""

    def distribute(self, make: MakeDataset) -> Iterator[Any]:
        return iter(make(self.topology))

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        distribution = LoneReplica(None, self._num_replicas, self._find_replica_id, self._add)
        return distribution, Topology(0, 1, num_local_replicas=self._num_replicas)

    def _find_replica_id(self) -> Any:
        return gen_xla_ops.xla_replica_id() if self._num_replicas > 1 and tf.inside_function() else 0

    def _add(self, values: Sequence[Any]) -> list[tf.Tensor]:
        all_replicas = [list(range(self._num_replicas))]
        return [
            gen_xla_ops.xla_all_reduce(
                tf.convert_to_tensor(each), group_assignment=all_replicas, reduce_op="Add", mode="CrossReplica"
            )
            for each in values
        ]
