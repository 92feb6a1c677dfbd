"""What an elastic worker and Horovod's elastic driver (in horovodrun) tell each other, over HTTP.

A *round* is the time between two assignments of ranks. The driver begins the next one when each slot of this one has
asked for its new place, or its process has ended; it then forgets what was put into its store. So what the workers
leave there for one another is about the round that it is read in.

Horovod itself asks the driver for a place only when it is set up again in a process; the first time it takes the place
that its environment says. So the worker asks, and gives a new process the answer as its environment.

Invariant: nothing here waits longer than it is told to, and no proxy is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import PeerLostError, UserError
from tfdist.telemetry.json_text import from_json

EXAMPLE = (
    "horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh "
    "python -m tfdist.launch.horovod.elastic_worker -- --gin_file=configs/experiments/digits.gin --run_dir=/shared/run"
)
_SCOPE = "tfdist"
_REPLY_SECONDS = 5.0
_MOST_BYTES = 1 << 16  # of a reply
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclasses.dataclass(frozen=True)
class Place:
    """A slot's place in a round, in the order in which the driver writes it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def variables(self) -> dict[str, str]:
        """The environment in which Horovod takes this place."""
        return {f"HOROVOD_{name.upper()}": str(number) for name, number in dataclasses.asdict(self).items()}

    def __str__(self) -> str:
        return f"worker {self.rank} of {self.size}"


class Driver:
    """The driver that started this process, as its environment names it.

    Args:
      environment: as horovodrun made it.

    Raises:
      UserError: it was not made by an elastic horovodrun.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        if environment.get("HOROVOD_ELASTIC") != "1":
            raise UserError(
                "tfdist.launch.horovod.elastic_worker is started by an elastic horovodrun, which sets "
                f"HOROVOD_ELASTIC=1; received {environment.get('HOROVOD_ELASTIC')!r}. Write, for example: {EXAMPLE}"
            )
        try:
            self.host = environment["HOROVOD_HOSTNAME"]
            self.first_place = Place(
                *(int(environment[f"HOROVOD_{f.name.upper()}"]) for f in dataclasses.fields(Place))
            )
            self._slot = f"{self.host}:{self.first_place.local_rank}"  # what the driver calls this process, for good
            self._interface = environment["HOROVOD_GLOO_IFACE"]
            address, port = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], environment["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        except (KeyError, ValueError) as error:
            raise UserError(f"The environment is not one that horovodrun makes: {error}. Run: {EXAMPLE}") from error
        self._url = f"http://{address}:{port}"

    def call_when_hosts_change(self, call: Callable[[], None]) -> None:
        """Has `call` called, on another thread, when the driver has other hosts while this slot has rank 0.

        Raises:
          UserError: Horovod is not installed.
          PeerLostError: the driver does not answer.
        """
        try:
            from horovod.runner.common.util import codec, secret
            from horovod.runner.elastic.worker import WorkerNotificationService
        except ImportError as error:
            raise UserError(f"An elastic worker needs Horovod: {error}. Run: python tools/build_horovod.py") from error

        class Manager:
            def handle_hosts_updated(self, timestamp: int, result: Any) -> None:
                call()

        key = secret.make_secret_key()
        service = WorkerNotificationService(key, self._interface, Manager())
        self._put(f"worker_addresses/{self._slot}", codec.dumps_base64((service.addresses(), key), to_ascii=False))

    def next_place(self, timeout_seconds: float) -> Place | None:
        """The place in the next round, as soon as there is one; None: this slot has none any more.

        Raises:
          PeerLostError: the others, or the driver, did not come in time.
        """
        try:
            reply = self._get(f"rank_and_size/{self._slot}", timeout_seconds)
        except OSError as error:
            raise PeerLostError(f"Horovod's driver gave no new place within {timeout_seconds:g} s: {error}.") from error
        try:
            place = Place(*map(int, reply.split(b",")))
        except (TypeError, ValueError) as error:
            raise PeerLostError(f"Horovod's driver at {self._url} gave no place: {reply[:80]!r}.") from error
        return place if place.rank >= 0 else None

    def tell(self, key: str, **value: Any) -> None:
        """Leaves word for the other workers of this round, if the driver can still be reached."""
        with contextlib.suppress(PeerLostError):
            self._put(f"{_SCOPE}/{key}", json.dumps(value).encode())

    def told(self, key: str, *names: str) -> dict[str, Any] | None:
        """What a worker left under `key` in this round, with these names in it; None where there is no such thing."""
        try:
            said = from_json(self._get(f"{_SCOPE}/{key}", _REPLY_SECONDS))
        except (OSError, ValueError):
            return None
        is_ours = isinstance(said, dict) and all(map(_is_word, said.values())) and said.keys() >= set(names)
        return said if is_ours and isinstance(said.get("status", 0), int) else None

    def _get(self, path: str, timeout_seconds: float) -> bytes:
        with _DIRECT.open(f"{self._url}/{path}", timeout=timeout_seconds) as reply:
            return reply.read(_MOST_BYTES)

    def _put(self, path: str, data: bytes) -> None:
        request = urllib.request.Request(f"{self._url}/{path}", data=data, method="PUT")
        try:
            with _DIRECT.open(request, timeout=_REPLY_SECONDS):
                pass
        except OSError as error:
            raise PeerLostError(f"Horovod's driver at {self._url} cannot be reached: {error}.") from error


def _is_word(value: object) -> bool:
    """Whether it can be a part of what a worker leaves: a number, a text that can be shown, or nothing."""
    return value is None or isinstance(value, int) or (isinstance(value, str) and value.isprintable())
