"""Cloud TPUs through `tf.distribute.TPUStrategy`.

Proven without a TPU up to the call that needs the hardware; docs/tpu.md says what that leaves open.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.errors import UserError
from tfdist.strategies.base import Notify, Strategy, Topology


class TPU(Strategy):
    """`tf.distribute.TPUStrategy`. Train with `train.precision = 'bfloat16'`, which TPUs compute natively.

    Args:
      address: the TPU's name, its gRPC address, or "local" on a TPU VM; None asks the environment (TPU_NAME) and the
        metadata server.
      zone: the Google Cloud zone of a TPU given by name; None takes this machine's.
      project: its Google Cloud project; None takes this machine's.
    """

    name = "tpu"
    needs_static_shapes = True

    def __init__(self, address: str | None = None, zone: str | None = None, project: str | None = None) -> None:
        super().__init__()
        self.address = address
        self.zone = zone
        self.project = project

    def expected_replicas(self) -> int | None:
        return None

    def _connect(self, notify: Notify) -> tuple[tf.distribute.Strategy, Topology]:
        resolver = self._resolve()
        try:
            if self.address != "local":
                tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        except (tf.errors.OpError, ValueError, RuntimeError) as error:
            raise UserError(
                f"The TPU {self._said_address()} was found but does not initialise: {first_line(error)} Check with "
                "`gcloud compute tpus tpu-vm describe` that it is READY and that no other process holds it."
            ) from error
        distribution = tf.distribute.TPUStrategy(resolver)
        notify(f"TPU {self._said_address()}: {distribution.num_replicas_in_sync} cores")
        return distribution, Topology(0, 1, num_local_replicas=distribution.num_replicas_in_sync)

    def _resolve(self) -> tf.distribute.cluster_resolver.TPUClusterResolver:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
                tpu=self.address, zone=self.zone, project=self.project
            )
            if self.address == "local" and not tf.config.list_physical_devices("TPU"):
                raise ValueError("TensorFlow lists no TPU device on this machine.")
        except Exception as error:  # the resolver lets through whatever the metadata server's client raises
            raise UserError(
                f"No TPU found for address = {self._said_address()}: {first_line(error)} On a TPU VM write "
                "tpu.TPU.address = 'local' and install libtpu (pip install 'tensorflow-tpu'); else give the TPU's name "
                "with its zone and project, or a grpc:// address."
            ) from error
        return resolver

    def _said_address(self) -> str:
        return repr(self.address) if self.address else "None (environment and metadata server)"


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".") + "."
