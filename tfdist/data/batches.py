"""Which examples make up a batch: a pure function of (seed, epoch, step).

Invariant: global batch k of epoch e, and how it is cut into microbatches, do not depend on the number of workers or
replicas. Each replica takes its contiguous part of every microbatch; the parts differ by one example at most. Called
by the pipelines, inside tf.data.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.errors import UserError


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How `num_examples` examples become batches.

    Args:
      num_examples: examples in an epoch.
      global_batch_size: examples of one step over all replicas.
      num_replicas: replicas of the whole run.
      num_microbatches: into how many slices, computed one after the other, a step's batch is cut.
      shuffle_seed: seed of the permutation, another one each epoch; None keeps the order.
      drop_remainder: leaves out the last batch of an epoch if it is smaller than the others.
      pad: gives every replica the same number of examples in every step, the missing ones with weight zero.

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

    def __post_init__(self) -> None:
        check_split(self.global_batch_size, self.num_replicas, self.num_microbatches, even=self.pad)
        if self.num_examples < 1:
            raise UserError("The data holds no examples.")
        if self.steps_per_epoch < 1:
            raise UserError(
                f"The data holds {self.num_examples} examples, fewer than one batch of {self.global_batch_size}, and "
                "drop_remainder leaves a partial batch out. Use a smaller global_batch_size."
            )

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_examples, self.global_batch_size)
        return whole + (1 if rest and not self.drop_remainder else 0)

    def num_examples_until(self, step: int) -> int:
        """Examples in the steps before `step`, counted from the start of the run."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        an_epoch = min(self.num_examples, self.steps_per_epoch * self.global_batch_size)
        return epochs * an_epoch + min(steps * self.global_batch_size, an_epoch)

    def replica_slice(self, step: tf.Tensor, replica: tf.Tensor) -> dict[str, tf.Tensor]:
        """The examples of `replica` in the run's step number `step`, both int64 scalars.

        Returns:
          indices: int64 [n], which examples, microbatch after microbatch.
          splits: int64 [num_microbatches + 1], where each microbatch begins; only with several microbatches.
          valid: bool [n], False for padding; only with `pad`.
        """
        steps_per_epoch = tf.constant(self.steps_per_epoch, tf.int64)
        epoch, step_in_epoch = step // steps_per_epoch, step % steps_per_epoch
        first = step_in_epoch * self.global_batch_size
        size = tf.minimum(tf.constant(self.global_batch_size, tf.int64), self.num_examples - first)
        begins, ends = [], []
        for i in range(self.num_microbatches):
            begin, end = size * i // self.num_microbatches, size * (i + 1) // self.num_microbatches
            begins.append(first + begin + (end - begin) * replica // self.num_replicas)
            ends.append(first + begin + (end - begin) * (replica + 1) // self.num_replicas)
        return self._padded(begins, ends, epoch) if self.pad else self._exact(begins, ends, epoch)

    def _exact(self, begins: list[tf.Tensor], ends: list[tf.Tensor], epoch: tf.Tensor) -> dict[str, tf.Tensor]:
        positions = [tf.range(begin, end) for begin, end in zip(begins, ends, strict=True)]
        if len(positions) == 1:
            return {"indices": self._permute(positions[0], epoch)}
        sizes = tf.stack([end - begin for begin, end in zip(begins, ends, strict=True)])
        splits = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(sizes)], axis=0)
        return {"indices": self._permute(tf.concat(positions, axis=0), epoch), "splits": splits}

    def _padded(self, begins: list[tf.Tensor], ends: list[tf.Tensor], epoch: tf.Tensor) -> dict[str, tf.Tensor]:
        width = self.global_batch_size // (self.num_microbatches * self.num_replicas)
        offsets = tf.range(width, dtype=tf.int64)
        positions = tf.concat([begin + offsets for begin in begins], axis=0)
        valid = tf.concat([begin + offsets < end for begin, end in zip(begins, ends, strict=True)], axis=0)
        piece = {"indices": self._permute(tf.where(valid, positions, tf.zeros_like(positions)), epoch), "valid": valid}
        if self.num_microbatches > 1:
            piece["splits"] = tf.range(self.num_microbatches + 1, dtype=tf.int64) * width
        return piece

    def _permute(self, positions: tf.Tensor, epoch: tf.Tensor) -> tf.Tensor:
        if self.shuffle_seed is None or self.num_examples == 1:
            return positions
        seed = tf.stack([tf.constant(self.shuffle_seed, tf.int64), epoch])
        return tf.random.experimental.index_shuffle(
            positions, seed=seed, max_index=tf.constant(self.num_examples - 1, tf.int64)
        )


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
