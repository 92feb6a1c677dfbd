"""Checks of what a user gives `--print`: each takes a text and returns the value, or says what to write instead.

Invariant: what passes here can stand in a script or a manifest as it is. Each check raises a ValueError, which the
message puts behind the flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable

SECRET_WORDS = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "PRIVATE", "_KEY", "APIKEY")


def port(text: str) -> int:
    """Checks a port that needs no privileges."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1024 <= int(text) <= 65535:
        raise ValueError(f"must be a port from 1024 to 65535; received {text!r}")
    return int(text)


def pattern(regular_expression: str, what: str) -> Callable[[str], str]:
    """A check for texts that match as a whole; `what` ends "must be …"."""

    def check(text: str) -> str:
        if not re.fullmatch(regular_expression, text):
            raise ValueError(f"must be {what}; received {text!r}")
        return text

    return check


# A name that is also part of the workers' host names, which have 63 characters with "-worker-0-9999" behind it.
name = pattern(
    r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
    "at most 40 small letters, digits and '-', a letter first, no '-' last",
)
word = pattern(r"[A-Za-z0-9][A-Za-z0-9_.@,:/+-]*", "one word of letters, digits and any of _ . @ , : / + -")
path = pattern(r"[A-Za-z0-9_./][A-Za-z0-9_.@,:/+%-]*", "a path of letters, digits and any of _ . @ , : / + % -")
image = pattern(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9._-]+)*((:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})|(@sha256:[0-9a-f]{64}))",
    "an image with its tag or digest, such as europe-docker.pkg.dev/project/repository/tfdist:1 "
    "(without a tag each machine may run another image)",
)
slurm_time = pattern(
    r"([0-9]+-)?[0-9]{1,3}:[0-5]?[0-9]:[0-5]?[0-9]", "HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"
)
duration = pattern(r"[1-9][0-9]*[smhd]", "a number and s, m, h or d, such as 6h")
kubernetes_memory = pattern(r"[1-9][0-9]*(Ki|Mi|Gi|Ti|k|M|G|T)", "a number and Mi, Gi or Ti, such as 16Gi")
slurm_memory = pattern(r"[1-9][0-9]*[KMGT]", "a number and K, M, G or T, such as 16G")
zone = pattern(r"[a-z]+-[a-z]+[0-9]+-[a-z]", "a zone of Google Cloud, such as us-central2-b")
hosts = pattern(
    r"[A-Za-z0-9.-]+:[1-9][0-9]*(,[A-Za-z0-9.-]+:[1-9][0-9]*)*", "HOST:SLOTS,HOST:SLOTS, such as host1:4,host2:4"
)


def variable(text: str) -> tuple[str, str]:
    """NAME=VALUE of what may be read by everybody."""
    variable_name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable_name):
        raise ValueError(f"must be NAME=VALUE; received {text.partition('=')[0]!r}")
    if any(secret in variable_name.upper() for secret in SECRET_WORDS):
        raise ValueError(
            f"{variable_name} sounds like a secret, and its value would be printed for everybody to read. "
            f"Keep it in a secret and write --secret_env={variable_name}=SECRET/KEY"
        )
    return variable_name, value


def kubernetes_secret(text: str) -> tuple[str, str, str]:
    """VARIABLE=SECRET/KEY: the variable's name, the secret's name, the key in it."""
    found = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=([a-z0-9][a-z0-9.-]{0,252})/([A-Za-z0-9._-]{1,253})", text)
    if not found:
        raise ValueError(
            f"must be VARIABLE=SECRET/KEY, the name of a Kubernetes secret and of a key in it, never a value; the part "
            f"before '=' was {text.partition('=')[0]!r}"
        )
    return found[1], found[2], found[3]


def google_secret(text: str) -> tuple[str, str, str]:
    """VARIABLE=SECRET or VARIABLE=SECRET/VERSION of Google's Secret Manager; the version is the latest by default."""
    found = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=([A-Za-z0-9_-]{1,255})(?:/([0-9]+|latest))?", text)
    if not found:
        raise ValueError(
            f"must be VARIABLE=SECRET or VARIABLE=SECRET/VERSION of Google's Secret Manager, never a value; the part "
            f"before '=' was {text.partition('=')[0]!r}"
        )
    return found[1], found[2], found[3] or "latest"


def volume(text: str) -> tuple[str, str]:
    """CLAIM:/path: a persistent volume claim and where it is mounted."""
    found = re.fullmatch(r"([a-z0-9][a-z0-9.-]{0,252}):(/[A-Za-z0-9_./-]+)", text)
    if not found:
        raise ValueError(f"must be CLAIM:/PATH; received {text!r}")
    return found[1], found[2].rstrip("/")


def seconds(duration: str) -> int:
    """How long a duration that was checked is."""
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[duration[-1]]
