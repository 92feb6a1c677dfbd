"""Prometheus itself, with the shipped rules, for tests; they are skipped where it is not installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import REPOSITORY, free_ports, wait_until

RULES = REPOSITORY / "docs" / "monitoring" / "alerts.yml"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian: apt-get install prometheus)",
)


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read().decode()


class Server:
    """One that answers."""

    def __init__(self, url: str) -> None:
        self._url = url

    def is_ready(self) -> bool:
        try:
            return bool(fetched(f"{self._url}/-/ready"))
        except OSError:
            return False

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = json.loads(fetched(f"{self._url}/api/v1/alerts"))["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def asked(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values; raises where Prometheus cannot read the query."""
        reply = fetched(f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        return [(each["metric"], float(each["value"][1])) for each in json.loads(reply)["data"]["result"]]


@contextlib.contextmanager
def scraping(folder: Path, *scraped: int) -> Iterator[Server]:
    """Scrapes these ports of this machine four times a second, and looks at the rules as often."""
    (port,) = free_ports(1)
    config: dict[str, Any] = {
        "global": {"scrape_interval": "250ms", "evaluation_interval": "250ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "tfdist", "static_configs": [{"targets": [f"127.0.0.1:{each}" for each in scraped]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    with (folder / "prometheus.log").open("w") as log:
        command = ["prometheus", *(f"--{name}={option}" for name, option in options.items())]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Server(f"http://127.0.0.1:{port}")
        wait_until(server.is_ready, seconds=20)
        yield server
    finally:
        process.kill()
        process.wait()
