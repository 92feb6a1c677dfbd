"""Matches arrays of a file with a model's variables: by name, by the names of known layouts, by structure and shape.

Invariant: no array is taken on a guess. Names decide; without them arrays of one role and shape are taken in their
order, where the file or their numbers say it. What is done to an array is in the report.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from tfdist.checkpoint.restore import describe_array
from tfdist.errors import UserError, build_user_error, shorten_list

MOST_SHOWN = 20
Specs = Mapping[str, tuple[tuple[int, ...], str]]
Steps = list[tuple[str, Callable[[np.ndarray], np.ndarray]]]  # in words and in turn
# Names of well-known layouts, as paths in lower case, and what stands for them; in this order.
LAYOUTS = tuple(
    (re.compile(pattern), path)
    for pattern, path in (
        (r"(?<=_embeddings)$", "/weight"),  # of BERT's TF1 checkpoints
        (r"(^|/)(?:encoder/|transformer/)?(?:h|layers?|blocks?|transformer_layer)[/_](\d+)/", r"\1block_\2/"),
        (r"layer_?norm(alization)?", "norm"),
        (r"batch_?norm(alization)?", "batch_norm"),
        (r"conv(olution)?[123]d", "conv"),
        (r"(attention/output/norm|self_attention_norm|attention_norm|self_attention_layer_norm|ln_1)/", "first_norm/"),
        (r"(feedforward_norm|output_norm|(?<=\d/)output/norm|ln_2)/", "second_norm/"),
        (r"(?<![a-z_])(self_attention_layer|attention/self|self_attention|self_attn|attn)/", "attention/"),
        (r"(?<=attention/)(output/dense|attention_output|out_proj|o_proj|c_proj)/", "output/"),
        (r"(?<=attention/)(q|k|v)_proj/", r"\1/"),
        (r"(?<=attention/)(c_attn/|qkv_proj/|in_proj_)", "qkv/"),
        (r"(intermediate/dense|feedforward_intermediate_dense|mlp/c_fc)/", "intermediate/"),
        (r"(?<=\d/)(output/dense|feedforward_output_dense|mlp/c_proj)/", "output/"),
        (r"(embeddings/)?(word_embeddings|token_embedding|wte)/", "tokens/"),
        (r"(embeddings/)?(position_embeddings?|wpe)/", "positions/"),
        (r"(embeddings/)?(token_type_embeddings|segment_embedding|type_embeddings)/", "segments/"),
        (r"embeddings[/_]norm/", "embeddings_norm/"),
        (r"(pooler/dense|pooler_transform)/", "pooled_dense/"),
        (r"ln_f/", "norm/"),
    )
)
ROLES = {
    **dict.fromkeys(("kernel", "w", "gamma", "scale", "embeddings", "embedding"), "weight"),  # as PyTorch calls them
    **dict.fromkeys(("b", "beta", "offset"), "bias"),
    **dict.fromkeys(("running_mean", "mean"), "moving_mean"),
    **dict.fromkeys(("running_var", "running_std", "var"), "moving_variance"),
}
KERAS_1 = re.compile(r"_(W|b|gamma|beta|running_mean|running_std)$")
CONV_1D = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")  # GPT-2's kernels, which Hugging Face does not transpose
QKV = {"query": 0, "key": 1, "value": 2, "q": 0, "k": 1, "v": 2}
BOOKKEEPING = re.compile(  # of optimizers, of Keras's random layers and of PyTorch
    r"^(optimizer|opt_state|metrics)/|^step$|(^|[/.])(seed_generator.*|global_step|num_batches_tracked|position_ids|"
    r"beta[12]_power|(Adam|Momentum|RMSProp|Adagrad|Ftrl|ExponentialMovingAverage)(_\d+)?)$"
)
TORCH_WEIGHT = re.compile(r"([^/]*\.)?(in_proj_)?weight")


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """An array in a file.

    Attributes:
      read: its values.
      rank: its place in the file's order of layers; None where the file has no such order.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    rank: int | None = None

    @classmethod
    def of(cls, array: np.ndarray) -> SavedArray:
        """That of an array in memory."""
        return cls(array.shape, array.dtype.name, lambda: array)


@dataclasses.dataclass(frozen=True)
class ValueSource:
    """Where a variable's values come from: the array's name, and what is done to it; steps None: it does not fit."""

    name: str
    steps: Steps | None

    def describe(self) -> str:
        """Returns it for the report: "h.0.attn.c_attn.weight, part 1 of 3"."""
        return ", ".join([self.name, *(words for words, _ in self.steps or ())])


@dataclasses.dataclass(frozen=True)
class Match:
    """What of a file becomes what of a model.

    Attributes:
      sources: by the model's variable.
      problems: a line for each variable that nothing fits, and for each array that is left over.
    """

    sources: Mapping[str, ValueSource]
    problems: Sequence[str]

    def read(self, saved: Mapping[str, SavedArray], specs: Specs) -> dict[str, np.ndarray]:
        """The values of the variables."""
        arrays = {}
        for name, source in self.sources.items():
            array = saved[source.name].read()
            for _, change in source.steps or ():
                array = change(array)
            arrays[name] = np.asarray(array, specs[name][1], order="C")
        return arrays

    def report(self) -> list[str]:
        """A line for each variable: from where and how."""
        return [f"{name}: {source.describe()}" for name, source in self.sources.items()]

    def check(self, where: str, count: int) -> None:
        """Raises UserError where something does not fit; `where` names the file, of a model with `count` variables."""
        if not self.problems:
            return
        fitting = [line for line in self.report() if len(set(line.split(": "))) > 1]  # but what is called the same
        listed = "".join(f"\n  {line}" for line in shorten_list([*self.problems, *fitting], 2 * MOST_SHOWN))
        raise build_user_error(
            f"{where} does not fit this model: {len(self.sources):,} of its {count:,} variables are there.{listed}\n"
            "Write StartFrom(path, partial=True) to take what fits, or with names={'HERE/(.*)': 'THERE/\\\\1'} what "
            "variables are called there.",
            error_id="checkpoint-mismatch",
        )


def match_arrays(
    saved: Mapping[str, SavedArray], specs: Specs, names: Mapping[str, str] | None = None, *, exact: bool = False
) -> Match:
    """Finds for each variable the array with its values.

    Args:
      saved: the file's arrays by name.
      specs: shape and type of the model's variables by name, in their order.
      names: by a regular expression that names of the model's variables match, "encoder/(.*)", what they are called
        in the file, "backbone/\\1". The first that matches counts.
      exact: what `names` leaves is called the same there; else layouts and shapes count, too.

    Raises:
      UserError: an expression matches no variable of the model, or names none of the file's.
    """
    theirs = _apply_names(saved, specs, names or {})
    rest = [name for name in specs if name not in theirs]
    free = [name for name in saved if is_weight(name) and name not in theirs.values()]
    same = {name: name for name in rest if name in free}
    theirs |= same if exact or len(same) == len(rest) else _match_paths(free, rest)
    axes = _list_axes(saved)

    def find_sources(theirs: Mapping[str, str]) -> dict[str, ValueSource]:
        return {n: ValueSource(t, _fit(t, saved[t], axes.get(t), n, *specs[n])) for n, t in theirs.items()}

    found = find_sources(theirs)
    if not exact and not names:
        unfit = {_split_name(name)[0] for name, source in found.items() if source.steps is None}
        kept = {name: there for name, there in theirs.items() if _split_name(name)[0] not in unfit}
        left = {name: saved[name] for name in free if name not in kept.values()}
        moved = _match_layers(left, {name: specs[name] for name in rest if name not in kept}, axes)
        bad = {n: s for n, s in found.items() if s.steps is None and s.name not in moved.values()}
        found = bad | find_sources(kept | moved)
    problems = []
    for name, spec in specs.items():
        if name not in found and "lora_" not in name:  # an adapter begins as it is
            problems.append(f"{name} {describe_array(*spec)}: not in the checkpoint.")
        elif name in found and found[name].steps is None:
            there = saved[found[name].name]
            what = describe_array(there.shape, there.dtype)
            problems.append(f"{name}: {what} in the checkpoint, {describe_array(*spec)} here")
    taken = {source.name for source in found.values()}
    over = {name: saved[name] for name in free if name not in taken and saved[name].shape}
    problems += [f"{n} {describe_array(array.shape, array.dtype)}: only in the checkpoint" for n, array in over.items()]
    return Match({n: found[n] for n in specs if n in found and found[n].steps is not None}, problems)


def is_weight(name: str) -> bool:
    """Whether an array of this name is no optimizer's slot, counter or the like."""
    return BOOKKEEPING.search(name) is None


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts names with numbers: "layer_2" before "layer_10", and "layer" before both."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _apply_names(saved: Collection[str], own: Collection[str], names: Mapping[str, str]) -> dict[str, str]:
    theirs: dict[str, str] = {}
    for pattern, target in names.items():
        matches = [match for match in (re.fullmatch(pattern, name) for name in own) if match is not None]
        if not matches:
            raise UserError(
                f"train.start_from has {pattern!r}, which no variable of the model matches. There are "
                f"{', '.join(shorten_list(list(own), MOST_SHOWN))}."
            )
        for match in matches:
            there = theirs.setdefault(match.string, match.expand(target))
            if there not in saved:
                raise UserError(
                    f"train.start_from calls {match.string!r} {there!r}, which is not there. There are "
                    f"{', '.join(shorten_list(list(saved), MOST_SHOWN))}."
                )
    return theirs


def _match_paths(saved: Sequence[str], own: Sequence[str]) -> dict[str, str]:
    """The arrays whose paths mean the same as the variables', but for one prefix that most of either side have."""
    there, here = ({name: _simplify(name) for name in names} for names in (saved, own))
    numbers = _renumber(there.values(), here.values())
    parts = {name: [numbers.get(part, part) for part in path.split("/")] for name, path in there.items()}
    there = {name: "/".join(part for part in path if part) for name, path in parts.items() if None not in path}
    best: dict[str, str] = {}
    for arrays, variables in itertools.product(_strip_prefixes(there), _strip_prefixes(here)):
        found = {}
        for path, name in variables.items():
            fused = re.sub(r"attention/(query|key|value|[qkv])/", "attention/qkv/", path)
            if path in arrays or (fused in arrays and fused not in variables):
                found[name] = arrays.get(path) or arrays[fused]
        best = found if len(found) > len(best) else best
    return best


def _strip_prefixes(paths: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Names by path, of those without a like: as they are, and without each of the beginnings that most have."""
    beginnings = (
        "/".join(path.split("/")[:n]) + "/" for path in paths.values() for n in range(1, min(4, path.count("/")))
    )
    for prefix in ["", *(prefix for prefix, _ in Counter(beginnings).most_common(8))]:
        stripped = {name: path.removeprefix(prefix) for name, path in paths.items()}
        counts = Counter(stripped.values())
        yield {path: name for name, path in stripped.items() if counts[path] == 1}


def _simplify(name: str) -> str:
    """A name as a path in the words of LAYOUTS, its last part a role."""
    path = KERAS_1.sub(r"/\1", name).replace(".", "/").lower()
    for pattern, words in LAYOUTS:
        path = pattern.sub(words, path)
    return "/".join(_split_name(path))


def _renumber(there: Iterable[str], here: Iterable[str]) -> dict[str, str | None]:
    """By a part of their paths ours, where both have as many layers of one base name: they count in order.

    None for what Keras counts, "dense", "dense_1", where it has counted others: there a name means another layer.
    """
    bases: tuple[dict[str, set[str]], ...] = (defaultdict(set), defaultdict(set))
    for groups, paths in zip(bases, (there, here), strict=True):
        for part in {part for path in paths for part in path.split("/")[:-1]}:
            groups[re.sub(r"_?\d+$", "", part)].add(part)
    theirs, ours = bases
    found: dict[str, str | None] = {}
    for base, parts in theirs.items():
        if len(parts) == len(ours[base]):
            pairs = zip(sorted(parts, key=natural_key), sorted(ours[base], key=natural_key), strict=True)
            found.update(pairs)
        elif ours[base] and base in ours[base] | parts:
            found |= dict.fromkeys(parts)
    return found


def _match_layers(saved: Mapping[str, SavedArray], specs: Specs, axes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The arrays of layers with the same roles and shapes, in turn, where there are as many as here.

    Their order is the file's, or that of names which differ in numbers alone.
    """
    shapes = {n: [array.shape[i] for i in axes.get(n, range(len(array.shape)))] for n, array in saved.items()}
    there, here = _group_by_layer(shapes), _group_by_layer({name: shape for name, (shape, _) in specs.items()})
    found: dict[str, str] = {}
    for kind in {frozenset(members) for members in here.values()}:
        ours = [members for members in here.values() if members.keys() == kind]
        theirs = {layer: members for layer, members in there.items() if members.keys() == kind}
        ranks = {layer: saved[members[min(kind)]].rank for layer, members in theirs.items()}
        has_ranks = None not in ranks.values()
        if len(ours) != len(theirs) or not (has_ranks or len({re.sub(r"_?\d+", "", layer) for layer in theirs}) == 1):
            continue
        order = {layer: (ranks[layer] or 0, natural_key(layer)) for layer in theirs}
        for members, layer in zip(ours, sorted(theirs, key=order.__getitem__), strict=True):
            found |= {members[key]: theirs[layer][key] for key in kind}
    return found


def _group_by_layer(shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[tuple[str, tuple[int, ...]], str]]:
    """Names by layer, then by role and shape."""
    layers: dict[str, dict[tuple[str, tuple[int, ...]], str]] = defaultdict(dict)
    for name, shape in shapes.items():
        layer, role = _split_name(name)
        layers[layer][role, tuple(shape)] = name
    return layers


def _split_name(name: str) -> tuple[str, str]:
    """The layer of an array or a variable, and its role there."""
    *layer, leaf = re.split(r"[/.]", KERAS_1.sub(r"/\1", name))
    return "/".join(layer), ROLES.get(leaf.lower(), leaf.lower())


def _list_axes(saved: Mapping[str, SavedArray]) -> dict[str, tuple[int, ...]]:
    """The axes of PyTorch's kernels in Keras's order, by name."""
    found = {n: array.shape for n, array in saved.items() if len(array.shape) > 1 and TORCH_WEIGHT.fullmatch(n)}
    if any(CONV_1D.search(n) and shape[-1] > shape[0] for n, shape in found.items()):
        found = {n: shape for n, shape in found.items() if not CONV_1D.search(n)}
    return {name: (*range(2, len(shape)), 1, 0) for name, shape in found.items()}


def _fit(
    there: str, saved: SavedArray, axes: Sequence[int] | None, here: str, wanted: tuple[int, ...], dtype: str
) -> Steps | None:
    """The steps from an array to a variable; None where it does not fit."""
    steps: Steps = []
    shape = tuple(saved.shape)
    if axes is not None and not here.endswith("embeddings"):
        shape = tuple(shape[axis] for axis in axes)
        steps.append(("transposed", lambda array: np.transpose(array, axes)))
    parts = {part for part in here.lower().split("/") if part in QKV}
    if parts and math.prod(shape) == 3 * math.prod(wanted) and "query_key_value" not in there:  # whose heads are mixed
        index = QKV[parts.pop()]
        shape = (*shape[:-1], shape[-1] // 3)
        steps.append((f"part {index + 1} of 3", lambda array: np.split(array, 3, axis=-1)[index]))
    if shape != wanted:
        if not _regroups(shape, wanted):
            return None
        steps.append((f"reshaped to {list(wanted)}", lambda array: np.reshape(array, wanted)))
    if saved.dtype != dtype:
        if not {saved.dtype.strip("0123456789"), dtype.strip("0123456789")} <= {"float", "bfloat"}:
            return None
        steps.append((f"from {saved.dtype}", lambda array: array.astype(dtype)))
    return steps


def _regroups(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether one shape is the other with neighboring axes joined, as the heads of an attention are."""
    few, many = sorted((shape, wanted), key=len)
    joins = set(itertools.accumulate(few, operator.mul)) <= set(itertools.accumulate(many, operator.mul))
    return 0 < len(few) < len(many) and math.prod(few) == math.prod(many) and joins
