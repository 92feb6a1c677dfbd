"""Signals and the metadata server's notices set a reason to leave, and nothing else happens."""

from __future__ import annotations

import pathlib
import queue
import signal
import subprocess
import sys
import threading

import pytest
from metadata_support import MetadataServer
from processes import Running

from tfdist.checkpoint import preemption
from tfdist.checkpoint.preemption import Preemption
from tfdist.strategies.cluster import environment


@pytest.fixture(autouse=True)
def _ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.02)


@pytest.fixture
def told() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


def next_of(told: queue.SimpleQueue[str]) -> str:
    return told.get(timeout=30)


# Signals


def test_a_signal_gives_the_reason_and_the_old_handler_comes_back() -> None:
    """What is told comes from another thread than the handler's; a second signal changes nothing."""
    told: list[tuple[str, threading.Thread]] = []

    def own_handler(*_: object) -> None:
        raise AssertionError("not while preemption is watched")

    before = signal.signal(signal.SIGUSR1, own_handler)
    try:
        with Preemption(tell=lambda text: told.append((text, threading.current_thread()))) as preemption:
            assert preemption.reason is None
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            assert preemption.reason == "SIGUSR1 was received"
        assert signal.getsignal(signal.SIGUSR1) is own_handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [text for text, _ in told] == [
        "SIGUSR1 was received: saving at the end of this step, then leaving.",
        "SIGTERM was received: this run is already about to save and leave, and continues doing so.",
    ]
    assert threading.main_thread() not in [thread for _, thread in told]


def test_outside_the_main_thread_the_handlers_stay_and_reasons_can_still_be_noted(told: queue.SimpleQueue[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def watch() -> None:
        with Preemption(tell=told.put) as preemption:
            seen.append(signal.getsignal(signal.SIGTERM))
            preemption.note("another worker leaves")
            seen.append(preemption.reason)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [before, "another worker leaves"]
    assert next_of(told).startswith("Another worker leaves: saving")


# The metadata server


@pytest.mark.parametrize(
    ("key", "harmless", "value", "reason"),
    [
        ("preempted", "FALSE", "TRUE", "this VM is being preempted"),
        (
            "maintenance-event",
            "MIGRATE_ON_HOST_MAINTENANCE",
            "TERMINATE_ON_HOST_MAINTENANCE",
            "this VM will be terminated for maintenance of its host",
        ),
    ],
)
def test_a_notice_that_this_vm_ends_is_the_reason_and_no_live_migration_is(
    key: str, harmless: str, value: str, reason: str, told: queue.SimpleQueue[str]
) -> None:
    """The server fails at first, which ends nothing."""
    with MetadataServer(**{key: harmless}) as server:
        server.broken = True
        with Preemption(tell=told.put, metadata_address=server.address) as preemption:
            server.wait_until(lambda: len(server.requests) > 3)
            server.broken = False
            server.wait_until(lambda: len(server.requests) > 8)  # it has seen that value, and asks on
            assert preemption.reason is None
            server.values[key] = value
            assert next_of(told) == f"{reason[0].upper()}{reason[1:]}: saving at the end of this step, then leaving."
            assert preemption.reason == reason
    assert told.empty()


def test_a_process_does_not_wait_for_the_server_when_it_ends(tmp_path: pathlib.Path) -> None:
    with MetadataServer() as server:
        server.hangs = True
        script = f"""
from tfdist.checkpoint.preemption import Preemption
with Preemption(tell=print, metadata_address={server.address!r}):
    input()
"""
        with Running([sys.executable, "-c", script], tmp_path / "log", stdin=subprocess.PIPE) as process:
            server.wait_until(lambda: server.requests)
            process.popen.communicate(b"end\n", timeout=30)
            assert process.status == 0, process.output


def test_only_a_machine_of_googles_has_the_usual_server(tmp_path: pathlib.Path) -> None:
    product = tmp_path / "product_name"
    assert preemption.find_address(product_name_file=product) is None
    product.write_text("Standard PC (Q35 + ICH9, 2009)\n")
    assert preemption.find_address(product_name_file=product) is None
    product.write_text("Google Compute Engine\n")
    assert preemption.find_address(product_name_file=product) == "metadata.google.internal"
    assert preemption.find_address("10.0.0.1:8080", product_name_file=product) == "10.0.0.1:8080"
    assert environment.metadata_address({}) is environment.metadata_address({"GCE_METADATA_HOST": ""}) is None
    assert environment.metadata_address({"GCE_METADATA_HOST": "127.0.0.1:99"}) == "127.0.0.1:99"
