"""Compares what the cases left behind under each strategy, and says it as a table.

Invariant: every public class has a row, those without a case included.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import numpy as np

from zoo_cases import collection
from zoo_cases.training import OTHER_WAYS, STRATEGIES, result_path

TOLERANCE = 1e-5
REFERENCE, *OTHERS = STRATEGIES
MIXES = "mixes the rows of a replica's part of the batch (see “Random layers”)"
STRINGS, TRANSFORMS = "XLA compiles no strings", "XLA compiles no `ImageProjectiveTransformV3`"
ROUNDS = "Keras rounds the gradients of biases to bfloat16, those of each part of a batch by themselves"
# Why a class does not agree, or is refused, where nothing better can be had.
FUSED = "under MultiWorker TensorFlow’s remapper fuses a product with its bias: without it, the same bits"
REMARKS: dict[str, str] = {
    **dict.fromkeys(("losses/Dice", "losses/Tversky"), FUSED),
    "layers/AugMix": "chooses its augmentations with Python's `random` when it is traced, other ones in each process",
    "layers/BatchNormalization": "takes the statistics of a microbatch; XLA compiles no sum over replicas",
    "layers/CutMix": MIXES,
    "layers/MixUp": MIXES,
    "layers/RandAugment": "its second operation may round to few values what the first changed in a last bit",
    "layers/RandomCrop": "TensorFlow resizes what is cut at a drawn place otherwise under XLA, on one device too",
    "layers/RandomElasticTransform": "Keras distorts a batch of unknown size by one image’s field",
    "layers/SpectralNormalization": "moves its vector along with each microbatch, as with each batch",
    **{f"layers/{name}": STRINGS for name in ("HashedCrossing", "Hashing", "StringLookup", "TextVectorization")},
    "layers/IntegerLookup": "XLA compiles no table",
    **{f"layers/Random{name}": TRANSFORMS for name in ("Perspective", "Rotation", "Shear", "Translation", "Zoom")},
    "layers/STFTSpectrogram": "its kernels' entries are large, and a rounding of theirs is above 1e-05",
    **{f"quantized layers/{name} in float8": ROUNDS for name in ("Dense", "EinsumDense", "MultiHeadAttention")},
}
Result = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found of a class.

    Attributes:
      name: kind/class.
      alike: whether two replicas gave the same bits under every strategy; None where fewer than two were tried.
      difference: the largest from one device, in weights, losses and metrics; None where there is none to tell.
      remark: why it is not so.
      others: the difference, or the error, in each of `OTHER_WAYS` that was tried.
    """

    name: str
    alike: bool | None
    difference: float | None
    remark: str = ""
    is_explained: bool = True
    others: Mapping[str, float | str] = dataclasses.field(default_factory=dict)


def compare_cases(root: str | os.PathLike[str], keys: Sequence[str]) -> list[Row]:
    """A row for each class that the cases cover; with all cases also for those that have none.

    What was not trained under a strategy is compared under the others, and the row says so.
    """
    rows = [row for key in keys for row in _compare_case(root, key)]
    if set(keys) == set(collection.collect_cases()):
        for kind, (_, _, module) in collection.KINDS.items():
            rows += [Row(f"{kind}/{name}", None, None, why) for name, why in module.NO_CASE.items()]
    return sorted(rows, key=lambda row: row.name)


def _compare_case(root: str | os.PathLike[str], key: str) -> list[Row]:
    results: dict[str, Result] = {}
    for strategy in (*STRATEGIES, *OTHER_WAYS):
        path = result_path(os.path.join(root, strategy), key)
        if path.exists():
            with np.load(path) as held:
                results[strategy] = dict(held)
    case, kind = collection.collect_cases()[key], key.split("/")[0]
    return [_make_row(f"{kind}/{name}", results, name if kind == "metrics" else None) for name in case.covers]


def _make_row(name: str, results: Mapping[str, Result], metric: str | None) -> Row:
    """Compares everything, or a metric's values alone."""
    remark = REMARKS.get(name, "")
    tried = {way: results[way] for way in OTHER_WAYS if way in results}
    results = {way: result for way, result in results.items() if way not in tried}
    failed = {strategy: str(r["error"]).splitlines()[0] for strategy, r in results.items() if "error" in r}
    if failed:
        said = next(iter(failed.values()))
        where = "everywhere" if len(failed) == len(results) else "under " + ", ".join(failed)
        return Row(name, None, None, remark or f"fails {where}: {said}", is_explained=bool(remark))
    others = [results[strategy] for strategy in OTHERS if strategy in results]
    missing = ", ".join(strategy for strategy in STRATEGIES if strategy not in results)
    if not others or REFERENCE not in results:
        return Row(name, None, None, f"not run: {missing}", is_explained=False)
    reference = results[REFERENCE]
    names = [n for n in reference if metric is None or n.split(" ")[-1] == metric]
    alike = all(_is_same(others[0], other, names) for other in others[1:]) if len(others) > 1 else None
    difference = max(_measure_difference(reference, others[0], n) for n in names)
    distances: dict[str, float | str] = {}
    for way, result in tried.items():
        is_refused = "error" in result
        measured = () if is_refused else (_measure_difference(reference, result, n) for n in names)
        distances[way] = str(result["error"]) if is_refused else max(measured)
    agrees = all(not isinstance(each, str) and each <= TOLERANCE for each in (difference, *distances.values()))
    is_explained = bool(remark) or (alike is not False and agrees)
    said = "; ".join(filter(None, [remark, f"not run: {missing}" if missing else ""]))
    return Row(name, alike, difference, said, is_explained and not missing, distances)


def _is_same(ours: Result, theirs: Result, names: Sequence[str]) -> bool:
    return all(ours[name].tobytes() == theirs[name].tobytes() for name in names)


def _measure_difference(ours: Result, theirs: Result, name: str) -> float:
    """The largest difference, of numbers above one relative to them."""
    a, b = ours[name].astype(np.float64), theirs[name].astype(np.float64)
    if a.size == 0 or np.array_equal(a, b, equal_nan=True):
        return 0.0
    return float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(a))))


def format_tables(rows: Sequence[Row]) -> str:
    """The rows as tables of Markdown, one a kind, each with a sentence that counts."""
    kinds = dict.fromkeys(row.name.split("/")[0] for row in rows)
    return "\n".join(_format_table(kind, [row for row in rows if row.name.startswith(f"{kind}/")]) for kind in kinds)


def _format_table(kind: str, rows: Sequence[Row]) -> str:
    tried = [row for row in rows if row.difference is not None]
    alike = [row for row in tried if row.alike is not None]
    agree = sum(row.difference <= TOLERANCE for row in tried)
    lines = [
        f"## {kind.capitalize()}",
        "",
        f"{len(rows)} classes, {len(tried)} trained: {sum(bool(row.alike) for row in alike)} of {len(alike)} "
        f"bit-identical between the strategies, {agree} within {TOLERANCE:g} of one device.",
        "",
        "| class | between strategies | from one device | remark |",
        "|---|---|---|---|",
    ]
    ways = [way for way in OTHER_WAYS if any(way in row.others for row in rows)]
    if ways:
        lines[-2:] = [
            f"| class | between strategies | from one device | {' | '.join(ways).replace('_', ' ')} | remark |",
            f"|---|---|---|{'---|' * len(ways)}---|",
        ]
    others = collection.list_classes(kind)
    for row in rows:
        name = row.name.split("/")[1]
        names = ", ".join([name, *others.get(name, [])])
        cells = [_format_alike(row), *(_format_distance(each) for each in (row.difference, *map(row.others.get, ways)))]
        lines.append(f"| {names} | {' | '.join(cells)} | {row.remark} |")
    return "\n".join([*lines, ""])


def _format_alike(row: Row) -> str:
    return "–" if row.alike is None else "same bits" if row.alike else "**differ**"


def _format_distance(difference: float | str | None) -> str:
    if difference is None:
        return "–"
    if isinstance(difference, str):
        return "refused"
    return f"≤ {TOLERANCE:g}" if difference <= TOLERANCE else f"{difference:.1e}"
