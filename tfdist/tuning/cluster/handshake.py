"""How the chief of a sweep and a worker show each other that they have the same secret, without sending it.

Each gives a random number, and answers the other's with an HMAC of both (RFC 2104, SHA-256) under the secret. The two
answers are of different text, so that neither can be had from the other side.

Invariant: nobody who lacks the secret passes, and answers are compared in constant time. It says who opened a
connection; what follows on it is neither encrypted nor signed (docs/security.md). `chief_server.py` and `chief_link.py`
begin each connection with it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

CHIEF, WORKER = "chief", "worker"
_NONCE_BYTES = 32


def new_nonce() -> str:
    """A random number, for one connection."""
    return secrets.token_hex(_NONCE_BYTES)


def prove(secret: bytes, side: str, *, worker_nonce: str, chief_nonce: str) -> str:
    """What only the holder of the secret can say as this side of a connection."""
    text = f"tfdist-sweep\n{side}\n{worker_nonce}\n{chief_nonce}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_proven(proof: str, secret: bytes, side: str, *, worker_nonce: str, chief_nonce: str) -> bool:
    """Whether a proof is that side's."""
    expected = prove(secret, side, worker_nonce=worker_nonce, chief_nonce=chief_nonce)
    return hmac.compare_digest(proof.encode(), expected.encode())
