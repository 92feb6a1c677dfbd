"""What a run tells stands in the registry, and the page of it is current."""

from __future__ import annotations

import ast
import re

import telemetry_page
from support import REPOSITORY

from tfdist.telemetry.registry import EVENTS

TELLS = {
    "info": "info",
    "warning": "warning",
    "error": "error",
    "_warn": "warning",
    "give": "warning",
    "note": "warning",
}
ELSEWHERE = {  # told by a name that is no literal argument
    "cuda_oom": "warning",
    "rolled_back": "warning",
    "restarts_used_up": "error",
    "breaker_opened": "error",
    "worker_failed": "warning",
    "worker_hung": "warning",
}


def told_in_source() -> dict[str, set[str]]:
    """The events that the source tells, with their levels."""
    found: dict[str, set[str]] = {name: {level} for name, level in ELSEWHERE.items()}
    for path in (REPOSITORY / "tfdist").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            texts = [each.value for each in call.args[:2] if isinstance(each, ast.Constant)]
            names = [text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z]+(_[a-z]+)*", text)]
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if function == "log" and len(names) == 2 and names[0] in ("info", "warning", "error"):
                found.setdefault(names[1], set()).add(names[0])  # a supervisor's
            elif function in ("tell", "_tell") and names[:1] == ["xla_chosen"]:
                found.setdefault(names[0], set()).add("info")
            elif function in TELLS and names and texts[0] == names[0] and names[0] not in TELLS:
                found.setdefault(names[0], set()).add(TELLS[function])
            elif function == "News" and names:
                warns = any(keyword.arg == "is_warning" for keyword in call.keywords)
                found.setdefault(names[0], set()).add("warning" if warns else "info")
    return found


def test_every_event_that_the_source_tells_is_registered_with_its_level_and_no_other_is() -> None:
    assert told_in_source() == {name: {level} for name, (level, _) in EVENTS.items()}


def test_the_page_has_the_tables_of_the_registry() -> None:
    assert telemetry_page.render_page() == telemetry_page.PAGE.read_text(), "run: python tools/telemetry_page.py"
