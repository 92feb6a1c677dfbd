#!/usr/bin/env python3
"""Writes the tables of all metrics and events into docs/telemetry.md, from the registry.

python tools/telemetry_page.py
"""

from __future__ import annotations

import pathlib
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from marked_page import fill_page  # noqa: E402 (found only now)

from tfdist.telemetry.account.time_account import SHARES  # noqa: E402
from tfdist.telemetry.registry import EVENTS, METRICS  # noqa: E402

PAGE = REPOSITORY / "docs" / "telemetry.md"
BEGIN, END = "<!-- the registry begins -->", "<!-- the registry ends -->"


def render_page() -> str:
    """The page's text with the tables between its marks."""
    metrics = ["| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        metrics.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |")
    shares = ["| share of the wall clock | what the process did |", "|---|---|"]
    shares += [f"| `{share}` | {meaning} |" for share, meaning in SHARES.items()]
    events = ["| event | level | meaning |", "|---|---|---|"]
    events += [f"| `{name}` | {level} | {meaning} |" for name, (level, meaning) in EVENTS.items()]
    tables = ["### Metrics", *metrics, "", "### Shares of time", *shares, "", "### Events", *events]
    return fill_page(PAGE, BEGIN, END, "\n".join(_space_headings(tables)))


def _space_headings(lines: list[str]) -> list[str]:
    return [part for line in lines for part in ([line, ""] if line.startswith("#") else [line])]


if __name__ == "__main__":
    PAGE.write_text(render_page())
