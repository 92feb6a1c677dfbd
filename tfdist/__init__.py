"""Trains Keras 3 models on TensorFlow under any strategy; here are the names that a user's own script imports."""

from typing import Any

__all__ = ["BackupAndRestore", "TfdistFit", "fit"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, as it brings Keras and TensorFlow with it; see PEP 562."""
    if name == "BackupAndRestore":
        from tfdist.checkpoint.fit.keras_callback import BackupAndRestore

        return BackupAndRestore
    if name in ("TfdistFit", "fit"):
        from tfdist.keras_fit import fit

        return getattr(fit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
