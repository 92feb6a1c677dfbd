"""Positions of an epoch's order that make up a batch, and their replicas: a pure function of the step.

Invariant: global batch k is the places k · size, k · size + 1, … of the epoch's order. It, and how it is cut into
microbatches, do not depend on the number of workers or replicas. Each replica takes its contiguous part of every
microbatch; the parts differ by one example at most, and their shares add up to one an example. In a plan of
`num_parts` it takes some of these instead, whose rows do not depend on the number of replicas either.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import UserError, build_user_error
from tfdist.settings.checks import COUNT, SWITCH, Check
from tfdist.settings.declaration import Settings, setting

Range = tuple[tf.Tensor, tf.Tensor]


MICROBATCHES = Check(
    COUNT.wanted,
    COUNT.accepts,
    hint=lambda value: " Leave it out: train.recovery splits batches." if value == "auto" else COUNT.hint(value),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings(Settings):
    """Settings of the batches of training examples."""

    global_batch_size: int = setting("of one step over all replicas", COUNT, unit="examples")
    num_microbatches: int = setting("parts of a batch, computed in turn to save memory", MICROBATCHES, 1)
    shuffle: bool = setting("another order each epoch", SWITCH, True)
    drop_remainder: bool = setting("leaves out an epoch's last batch if it is smaller", SWITCH, False)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """A plan of batches of `num_examples` examples.

    Args:
      num_examples: examples in an epoch.
      global_batch_size: examples of one step over all replicas.
      num_replicas: replicas of the whole run.
      num_microbatches: into how many slices, computed one after the other, a step's batch is cut.
      shuffle_seed: of the order of the examples, another one each epoch; None keeps theirs.
      drop_remainder: leaves out the last batch of an epoch if it is smaller than the others.
      pad: gives every replica the same number of examples in every step, the missing ones with a share of zero.
      num_parts: into how many parts a step's batch is cut, in place of microbatches; None: into microbatches.

    Raises:
      UserError: the batch cannot be split so, or is larger than the data when the remainder is dropped.
    """

    num_examples: int
    global_batch_size: int
    num_replicas: int
    num_microbatches: int = 1
    shuffle_seed: int | None = None
    drop_remainder: bool = False
    pad: bool = False
    num_parts: int | None = None

    def __post_init__(self) -> None:
        if self.num_parts is None:
            check_split(self.global_batch_size, self.num_replicas, self.num_microbatches, even=self.pad)
        if self.num_examples < 1:
            raise build_user_error("The data holds no examples.", error_id="no-examples")
        if self.steps_per_epoch < 1:
            raise UserError(
                f"The data holds {self.num_examples} examples, fewer than one batch of {self.global_batch_size}, and "
                "drop_remainder leaves a partial batch out. Use a smaller global_batch_size."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the last of which may be smaller."""
        whole, rest = divmod(self.num_examples, self.global_batch_size)
        return whole + (1 if rest and not self.drop_remainder else 0)

    def num_examples_until(self, step: int) -> int:
        """Examples in the steps before `step`, counted from the start of the run."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        an_epoch = min(self.num_examples, self.steps_per_epoch * self.global_batch_size)
        return epochs * an_epoch + min(steps * self.global_batch_size, an_epoch)

    @property
    def total_parts(self) -> int:
        """Parts of a batch over all replicas."""
        return self.num_parts or self.num_replicas * self.num_microbatches

    @property
    def spans(self) -> list[range]:
        """The parts of each replica, by number; the first replicas have one more where there is a rest."""
        return [range(part[0], part[-1] + 1) for part in np.array_split(range(self.total_parts), self.num_replicas)]

    @property
    def num_turns(self) -> int:
        """Parts that a replica computes one after the other, at most."""
        return -(-self.total_parts // self.num_replicas)

    @property
    def width(self) -> int | None:
        """Examples of a replica in every step, in parts of one size; None where the sizes differ."""
        is_full = self.pad or self.drop_remainder or self.num_examples % self.global_batch_size == 0
        is_even = self.global_batch_size % self.total_parts == 0 and self.total_parts % self.num_replicas == 0
        return self.global_batch_size // self.num_replicas if is_full and is_even else None

    def fix_shapes(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A replica's rows, with their number as the static size of the first axis where it is `width`.

        What is traced with it may need less: TensorFlow keeps for the way back through a loop whatever it needs the
        shape of.
        """
        width = self.width
        if width is None:
            return batch

        def with_width(rows: Any) -> Any:
            is_dense = isinstance(rows, tf.Tensor) and rows.shape.rank is not None
            return tf.ensure_shape(rows, [width, *rows.shape[1:]]) if is_dense else rows

        return {**batch, **tf.nest.map_structure(with_width, select_rows(batch))}

    def replica_slice(self, step: tf.Tensor, replica: tf.Tensor) -> dict[str, tf.Tensor]:
        """The examples of `replica` in the run's step number `step`, both int64 scalars.

        Returns:
          positions: int64 [n], places in the epoch's order, part after part; never empty.
          epoch: int64 scalar.
          splits: int64 [num_turns + 1], where each part begins; only with several whose sizes differ.
          shares: float32 [n], how much of each example is this replica's; only where it is not 1 for all.
          first_rows: int64 [num_turns], the place of each part's first example in the global batch; only where it
            depends on the step.
        """
        steps_per_epoch = tf.constant(self.steps_per_epoch, tf.int64)
        epoch, step_in_epoch = step // steps_per_epoch, step % steps_per_epoch
        first = step_in_epoch * self.global_batch_size
        size = tf.minimum(tf.constant(self.global_batch_size, tf.int64), self.num_examples - first)
        if self.pad:
            return {"epoch": epoch, **self._slice_padded(first, size, replica)}
        of_size = {"may_be_short": self._has_short_part, "are_even": self.width is not None}
        return {"epoch": epoch, **self._slice_exactly(first, size, replica, **of_size)}

    def replica_slice_of_batch(self, size: tf.Tensor, replica: tf.Tensor) -> dict[str, tf.Tensor]:
        """The rows of `replica` in a batch of `size` examples, both int64 scalars; for batches of any size.

        Returns:
          what `replica_slice` gives, but an epoch; positions are counted from the batch's first row.
        """
        of_size = {"may_be_short": self.total_parts > 1, "are_even": False}
        return self._slice_exactly(tf.constant(0, tf.int64), size, replica, **of_size)

    def find_first_row(self, batch: Mapping[str, Any], turn: int, replica: tf.Tensor) -> Any:
        """The place in the global batch of the first row of one of a replica's parts: int64 scalar, or 0."""
        if self.total_parts == 1:
            return 0
        if "first_rows" in batch:
            return batch["first_rows"][turn]
        replica = tf.cast(replica, tf.int64)
        number = turn * self.num_replicas + replica if self.num_parts is None else replica * self.num_turns + turn
        return number * (self.global_batch_size // self.total_parts)

    def _split_microbatches(self, first: tf.Tensor, size: tf.Tensor) -> list[Range]:
        edges = [first + size * i // self.num_microbatches for i in range(self.num_microbatches + 1)]
        return list(itertools.pairwise(edges))

    @property
    def _has_short_part(self) -> bool:
        """True where an epoch's last batch has parts without an example of their own."""
        rest = self.num_examples % self.global_batch_size
        return bool(rest) and not self.drop_remainder and rest < self.total_parts

    def _find_part(self, begin: tf.Tensor, end: tf.Tensor, replica: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The bounds of a replica's part of the microbatch [begin, end)."""
        size = end - begin
        return begin + size * replica // self.num_replicas, begin + size * (replica + 1) // self.num_replicas

    def _slice_exactly(
        self, first: tf.Tensor, size: tf.Tensor, replica: tf.Tensor, *, may_be_short: bool, are_even: bool
    ) -> dict[str, tf.Tensor]:
        piece: dict[str, tf.Tensor] = {}
        parts: Sequence[Range]
        if self.num_parts is not None:
            parts, shares = zip(*self._deal_parts(first, size, replica, self.num_parts), strict=True)
        elif may_be_short:
            microbatches = self._split_microbatches(first, size)
            parts, shares = zip(*(self._share_part(begin, end, replica) for begin, end in microbatches), strict=True)
        else:
            parts = [self._find_part(begin, end, replica) for begin, end in self._split_microbatches(first, size)]
        if may_be_short:
            sizes = [end - begin for begin, end in parts]
            piece["shares"] = tf.concat([tf.fill([n], share) for n, share in zip(sizes, shares, strict=True)], axis=0)
        if self.total_parts > 1 and not are_even:
            piece["first_rows"] = tf.stack([begin - first for begin, _ in parts])
        if len(parts) > 1 and not are_even:
            sizes = tf.stack([end - begin for begin, end in parts])
            piece["splits"] = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(sizes)], axis=0)
        positions = [tf.range(begin, end) for begin, end in parts]
        piece["positions"] = tf.concat(positions, axis=0) if len(parts) > 1 else positions[0]
        return piece

    def _share_part(self, begin: tf.Tensor, end: tf.Tensor, replica: tf.Tensor) -> tuple[Range, tf.Tensor]:
        """A replica's part of a microbatch that may be short, and its share in those examples.

        No replica may be left without an example: some kernels and batch statistics fail on an empty batch. Of fewer
        examples than replicas every replica therefore computes all, each counting 1 ÷ replicas, which gives the same
        sums and the same batch statistics. Of none it computes one that does not count.
        """
        size = end - begin
        is_short = size < self.num_replicas
        part_begin, part_end = self._find_part(begin, end, replica)
        share = tf.where(size > 0, 1.0 / self.num_replicas, 0.0)
        last = tf.maximum(end, begin + 1)
        part = tf.where(is_short, begin, part_begin), tf.where(is_short, last, part_end)
        return part, tf.where(is_short, share, 1.0)

    def _deal_parts(
        self, first: tf.Tensor, size: tf.Tensor, replica: tf.Tensor, num_parts: int
    ) -> list[tuple[Range, tf.Tensor]]:
        """A replica's parts of a batch, and their shares in the examples; of none, a part has one that does not count.

        Replicas with one part less than others have an empty one behind theirs.
        """
        edges = tf.constant([(span.start, span.stop) for span in self.spans], tf.int64)[replica]
        parts = []
        for turn in range(self.num_turns):
            number, stop = edges[0] + turn, edges[1]
            begin, end = (first + size * tf.minimum(n, stop) // num_parts for n in (number, number + 1))
            share = tf.where(end > begin, 1.0, 0.0)
            parts.append(((begin, tf.where(number < stop, tf.maximum(end, begin + 1), end)), share))
        return parts

    def _slice_padded(self, first: tf.Tensor, size: tf.Tensor, replica: tf.Tensor) -> dict[str, tf.Tensor]:
        parts = [self._find_part(begin, end, replica) for begin, end in self._split_microbatches(first, size)]
        width = self.global_batch_size // (self.num_microbatches * self.num_replicas)
        offsets = tf.range(width, dtype=tf.int64)
        positions = tf.concat([begin + offsets for begin, _ in parts], axis=0)
        real = tf.concat([begin + offsets < end for begin, end in parts], axis=0)
        positions = tf.where(real, positions, tf.fill(tf.shape(positions), parts[0][0]))
        piece = {"positions": positions, "shares": tf.cast(real, tf.float32)}
        if self.num_examples % self.global_batch_size and not self.drop_remainder:
            piece["first_rows"] = tf.stack([begin - first for begin, _ in parts])
        return piece


def select_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Selects what of a replica's batch has a row for each example."""
    return {name: each for name, each in batch.items() if name in ("examples", "shares")}


def check_split(global_batch_size: int, num_replicas: int, num_microbatches: int, *, even: bool) -> None:
    """Checks that every replica gets an example of every microbatch of a full batch.

    Raises:
      UserError: it does not, or the parts are not `even` where they have to be.
    """
    parts = num_replicas * num_microbatches
    among = f"{num_replicas} replicas" + (f" × {num_microbatches} microbatches" if num_microbatches > 1 else "")
    if global_batch_size < parts:
        raise UserError(
            f"global_batch_size = {global_batch_size} cannot be split among {among}: every one needs an example. "
            f"Write a multiple of {parts}, or use fewer of them."
        )
    if even and global_batch_size % parts:
        near = max(1, round(global_batch_size / parts)) * parts
        raise UserError(
            f"global_batch_size = {global_batch_size} cannot be split evenly among {among}, as a TPU needs it. "
            f"Write a multiple of {parts}, such as {near}."
        )
