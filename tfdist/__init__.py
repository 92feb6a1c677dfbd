"""Trains Keras 3 models on TensorFlow under any strategy; here are the names that a user's own script imports."""

from typing import Any

__all__ = ["TfdistFit", "fit"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used, as it brings Keras and TensorFlow with it; see PEP 562."""
    if name in __all__:
        from tfdist.keras_fit import fit

        return getattr(fit, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
