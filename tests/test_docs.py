"""The pages build as a site: every link leads somewhere, and the reference finds what it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import REPOSITORY, run_python

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
