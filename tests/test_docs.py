"""The pages build as a site; every link, setting, flag and import that they name is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import errors_page
import pytest
from settings_page import PARTS
from support import REPOSITORY, parse_package, read_code_blocks, read_texts, run_python

from tfdist.commands import launch, verbs

pytestmark = pytest.mark.slow


def test_the_pages_build_as_a_site_without_a_warning(tmp_path: Path) -> None:
    command = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    run_python(command, cwd=REPOSITORY, env={"NO_MKDOCS_2_WARNING": "1"}).check()
    assert 'id="tfdist.keras_fit.fit.fit"' in (tmp_path / "reference" / "index.html").read_text()
    assert "global_batch_size" in (tmp_path / "configuration" / "index.html").read_text()


def test_the_tests_that_a_page_names_are_there() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", (REPOSITORY / "docs" / "security.md").read_text())
    assert len(named) > 20
    missing = [(file, name) for file, name in named if f"def {name}(" not in (REPOSITORY / "tests" / file).read_text()]
    assert not missing


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SETTING = re.compile(r"(?<![\w.])(train|evaluate|predict|export|find_rate|tune|policy\.CheckpointPolicy)\.([a-z]\w*)")
LANGUAGES = {"bash", "diff", "python", "text", "yaml"}
FILES = {"py", "gin", "json", "jsonl", "npz", "csv", "tsv"}
GONE = REPOSITORY / "tfdist" / "config" / "files_and_modules.py"  # names what was renamed, with what to write now


def blocks_of_pages(language: str) -> Iterator[tuple[str, str]]:
    """Of all pages: the page's name and the text of each block of code."""
    return ((page.name, block) for page in PAGES for block in read_code_blocks(page, language))


def list_commands() -> Iterator[tuple[str, str, str]]:
    """The page or file, a verb of `tfdist` and what follows it, for each command of a text and each that it starts."""
    words = re.compile(r"(?:^|\s)tfdist(?:-launch| (\S+))(?=\s|$)")
    for page, block in [*blocks_of_pages("bash"), *read_texts()]:
        for line in block.replace("\\\n", " ").splitlines():
            if (typed := words.search(line)) is None:
                continue
            verb, rest = typed[1] or "launch", line[typed.end() :].partition("#")[0]
            if verb == "launch":
                started = re.search(rf" ({'|'.join(launch.VERBS)}|\S+\.py|--)( .*|$)", rest)
                own = rest[: started.start()] if started else rest
                yield page, verb, own
                if started and started[1] in launch.VERBS:
                    yield page, started[1], started[2]
            else:
                yield page, verb, rest


def test_blocks_of_code_have_a_language_and_what_is_typed_has_no_prompt() -> None:
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= LANGUAGES and set(fences[1::2]) <= {""}, page
    assert not [(page, block) for page, block in blocks_of_pages("bash") if re.search(r"^[$>] ", block, re.MULTILINE)]


def test_pages_and_messages_name_settings_that_exist() -> None:
    known = {part.NAME: set(part.declarations()) | FILES for part in PARTS}
    texts = {page.name: page.read_text() for page in PAGES}
    for file, tree in parse_package().items():
        strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        if file != GONE:
            texts[str(file)] = "\n".join(value for value in strings if isinstance(value, str))
    named = [(where, *match) for where, text in texts.items() for match in SETTING.findall(text)]
    assert len(named) > 300
    assert not [each for each in named if each[2] not in known[each[1]]]


def test_commands_of_pages_have_flags_that_exist() -> None:
    typed = list(list_commands())
    assert len(typed) > 30
    general = {"version", "help", "--help"}
    of_pages = [each for each in typed if each[0].endswith(".md")]  # elsewhere "tfdist trains" is prose
    assert not [each for each in of_pages if each[1] not in verbs.VERBS and each[1].lstrip("-") not in general]
    wrong = [
        (page, verb, flag)
        for page, verb, text in typed
        if verb in verbs.VERBS
        for flag in re.findall(r" --(\w+)", text)
        if not {flag, flag.removeprefix("no")} & {*verbs.list_flags(verb), "help"}
    ]
    assert not wrong


def test_the_page_of_errors_is_what_their_table_gives_and_is_short() -> None:
    page = errors_page.PAGE.read_text()
    assert errors_page.render_page() == page, "run: python tools/errors_page.py"
    assert len(page.split()) <= 900
    flags = set(re.findall(r"--([a-z_]+)", page))
    assert flags and not flags - {flag for verb in verbs.VERBS for flag in verbs.list_flags(verb)} - {"mode"}
