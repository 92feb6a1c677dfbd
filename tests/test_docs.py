"""The pages build as a site: every link leads somewhere, and the reference finds what it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import REPOSITORY, run_python

pytestmark = pytest.mark.slow


def test_the_pages_build_as_a_site_without_a_warning(tmp_path: Path) -> None:
    command = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    run_python(command, cwd=REPOSITORY, env={"NO_MKDOCS_2_WARNING": "1"}).check()
    assert 'id="tfdist.keras_fit.fit.fit"' in (tmp_path / "reference" / "index.html").read_text()
    assert "global_batch_size" in (tmp_path / "configuration" / "index.html").read_text()
