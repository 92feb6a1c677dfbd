"""Run directories that cannot be written end with one message."""

from __future__ import annotations

from support import run_python

_CHECK_WITHOUT_PERMISSION = """
import os, tempfile
from tfdist.errors import UserError
from tfdist.storage.troubles import check_writable
with tempfile.TemporaryDirectory() as directory:
    os.chmod(directory, 0o555)
    if os.geteuid() == 0:  # who may write everywhere
        os.seteuid(65534)
    try:
        check_writable(directory + "/run")
    except UserError as error:
        print(error)
    os.seteuid(os.getuid())
"""


def test_a_directory_without_permission_is_named() -> None:
    message = run_python(["-c", _CHECK_WITHOUT_PERMISSION]).check().stdout
    assert "cannot be written: Permission denied (in " in message
    assert "Give this user write permission there" in message
