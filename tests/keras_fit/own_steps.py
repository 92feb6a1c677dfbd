"""Models with training steps of their own, as people write them from papers; each in small, with its data.

A kind is built and compiled inside the strategy's scope. The autoencoder and the diffusion draw; noise of others comes
as data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

RNG = np.random.default_rng(11)
ROWS = 45
X = RNG.normal(size=(ROWS, 6)).astype(np.float32)
LABELS = RNG.integers(0, 3, ROWS)
TARGETS = np.stack([X[:, 0] * X[:, 1], X[:, 2]], axis=1).astype(np.float32)
NOISE = RNG.normal(size=(ROWS, 4)).astype(np.float32)
TOKENS = RNG.integers(1, 9, (ROWS, 5))
Data = tuple[Any, ...]


def dense(*sizes: int, activation: str = "tanh") -> keras.Sequential:
    hidden = [layers.Dense(size, activation=activation) for size in sizes[:-1]]
    return keras.Sequential([*hidden, layers.Dense(sizes[-1])])


class Stepped(keras.Model):
    """Has a tracker of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def find_loss(self, data: Any) -> Any:
        """The mean loss of a batch, where one gradient of it is all that a step needs."""
        raise NotImplementedError

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.find_loss(data)
        self.learn(loss, tape)
        return self.track(loss)

    def learn(self, loss: Any, tape: tf.GradientTape, weights: Any = None, optimizer: Any = None) -> None:
        weights = self.trainable_weights if weights is None else weights
        (optimizer or self.optimizer).apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    def track(self, loss: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(loss)
        return {each.name: each.result() for each in self.metrics}


class Netted(Stepped):
    """Gives what a net gives, by default with one hidden layer."""

    units = 3

    def __init__(self) -> None:
        super().__init__()
        self.net = self.build_net()

    def build_net(self) -> keras.Model:
        return dense(8, self.units)

    def call(self, x: Any) -> Any:
        return self.net(x)


class Clipped(Netted):
    """Regression; the test step reports another metric than the training step."""

    units = 2

    def __init__(self) -> None:
        super().__init__()
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.overlap = keras.metrics.BinaryIoU([1], threshold=0.0, name="overlap")  # which takes no weights of rows

    def find_loss(self, data: Any) -> Any:
        x, y = data
        return ops.mean(ops.square(self(x, training=True) - y))

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predicted = self(x, training=False)
        self.error.update_state(y, predicted)
        self.overlap.update_state(ops.cast(y > 0.0, "float32"), predicted)
        return {"error": self.error.result(), "overlap": self.overlap.result()}


class Gan(keras.Model):
    """Two optimizers, given to a compile of its own; it returns numbers of the batch (Goodfellow et al. 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = dense(8, 6), dense(8, 1)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data: Any) -> dict[str, Any]:
        real, noise = data
        rows = tf.shape(real)[0]
        ones, zeros = tf.ones((rows, 1)), tf.zeros((rows, 1))
        with tf.GradientTape() as tape:
            both = self.discriminator(tf.concat([real, self.generator(noise)], 0))
            d_loss = self.loss_fn(tf.concat([ones, zeros], 0), both)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ones, self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


class Penalized(Stepped):
    """A critic that takes two steps to the generator's one, with a penalty of its gradients (Gulrajani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = dense(8, 6), dense(8, 1)
        self.critic_tracker = keras.metrics.Mean(name="critic")

    def compile(self) -> None:
        super().compile(optimizer=None)
        self.optimizers = {"critic": keras.optimizers.Adam(1e-2), "generator": keras.optimizers.RMSprop(1e-2)}

    def train_step(self, data: Any) -> dict[str, Any]:
        real, noise = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(noise)
                mixed = 0.3 * real + 0.7 * fake
                with tf.GradientTape() as inner:
                    inner.watch(mixed)
                    score = self.critic(mixed)
                norm = ops.sqrt(ops.sum(ops.square(inner.gradient(score, mixed)), axis=1) + 1e-6)
                critic = ops.mean(self.critic(fake)) - ops.mean(self.critic(real)) + ops.mean(ops.square(norm - 1))
            self.learn(critic, tape, self.critic.trainable_weights, self.optimizers["critic"])
        with tf.GradientTape() as tape:
            loss = -ops.mean(self.critic(self.generator(noise)))
        self.learn(loss, tape, self.generator.trainable_weights, self.optimizers["generator"])
        self.critic_tracker.update_state(critic)
        return self.track(loss)


class Autoencoder(Stepped):
    """A variational autoencoder (Kingma and Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)
        self.encoder, self.decoder = dense(8, 8), dense(8, 6)
        self.divergence = keras.metrics.Mean(name="divergence")

    def find_loss(self, x: Any) -> Any:
        mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        rebuilt = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        divergence = -0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        self.divergence.update_state(divergence, sample_weight=tf.shape(x)[0])
        return ops.mean(ops.square(rebuilt - x)) + divergence


class Diffusion(Stepped):
    """Learns the noise that was added (Ho et al. 2020), and keeps a moving average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(2)
        self.net, self.average = dense(8, 6), dense(8, 6)
        for net in (self.net, self.average):
            net.build((None, 7))
        self.average.set_weights(self.net.get_weights())
        self.average.trainable = False

    def find_loss(self, x: Any) -> Any:
        time = keras.random.uniform((ops.shape(x)[0], 1), seed=self.seeds)
        noise = keras.random.normal(ops.shape(x), seed=self.seeds)
        given = ops.sqrt(time) * x + ops.sqrt(1 - time) * noise
        return ops.mean(ops.square(self.net(ops.concatenate([given, time], axis=1)) - noise))

    def train_step(self, data: Any) -> dict[str, Any]:
        results = super().train_step(data)
        for average, weight in zip(self.average.weights, self.net.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return results


class Distilled(keras.Model):
    """A student of a frozen teacher, whose own loss is that of compile (Hinton et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = dense(8, 3), dense(4, 3)
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        soft = ops.softmax(self.teacher(x, training=False) / 2.0)
        with tf.GradientTape() as tape:
            outputs = self.student(x, training=True)
            hard = self.compute_loss(x, y, outputs)
            distilled = ops.mean(keras.losses.kl_divergence(soft, ops.softmax(outputs / 2.0)))
            loss = 0.3 * hard + 4.0 * distilled
        weights = self.student.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, outputs) | {"distilled": distilled}


class Adversarial(Netted):
    """Trains on examples moved along the sign of their gradient (Goodfellow et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.distance = keras.metrics.RootMeanSquaredError(name="distance")

    def find_loss(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as inner:
            inner.watch(x)
            clean = keras.losses.sparse_categorical_crossentropy(y, self.net(x), from_logits=True)
        moved = x + 0.1 * ops.sign(inner.gradient(clean, x))
        outputs = self.net(moved)
        attacked = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
        self.accuracy.update_state(y, outputs)
        self.distance.update_state(x, moved)
        return ops.mean(clean) + ops.mean(attacked)


class MetaLearner(Stepped):
    """Differentiates through a step of gradient descent, one for each example (Finn et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(6, 2), name="kernel")

    def find_loss(self, data: Any) -> Any:
        x, y = data
        kernel = ops.broadcast_to(ops.convert_to_tensor(self.kernel), (tf.shape(x)[0], 6, 2))
        with tf.GradientTape() as inner:
            inner.watch(kernel)
            support = ops.sum(ops.square(ops.einsum("ni,nio->no", x, kernel) - y))
        adapted = kernel - 0.05 * inner.gradient(support, kernel)
        return ops.mean(ops.square(ops.einsum("ni,nio->no", x[:, ::-1], adapted) - y))


class MixtureDensity(Netted):
    """A mixture of two normal distributions (Bishop 1994)."""

    units = 6

    def find_loss(self, data: Any) -> Any:
        x, y = data
        logits, means, scales = ops.split(self(x, training=True), 3, axis=1)
        log_scales = ops.softplus(scales)
        distances = ops.square((y[:, :1] - means) / ops.exp(log_scales))
        return -ops.mean(ops.logsumexp(ops.log_softmax(logits) - 0.5 * distances - log_scales, axis=1))


class Policy(Netted):
    """Policy gradients from a buffer of states, actions and rewards, less a running mean reward (Williams 1992)."""

    def __init__(self) -> None:
        super().__init__()
        self.baseline = self.add_weight(shape=(), initializer="zeros", trainable=False, name="baseline")

    def find_loss(self, data: Any) -> Any:
        states, (actions, rewards) = data
        advantage = rewards - self.baseline
        chosen = ops.sum(ops.one_hot(actions, 3) * ops.log_softmax(self(states, training=True)), axis=1)
        return -ops.mean(chosen * advantage)

    def train_step(self, data: Any) -> dict[str, Any]:
        results = super().train_step(data)
        self.baseline.assign(0.9 * self.baseline + 0.1 * ops.mean(data[1][1]))
        return results


class MaskedTokens(Stepped):
    """Predicts the token in the middle from the others; Keras's Adam on rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = layers.Embedding(9, 4), layers.Dense(9)

    def call(self, tokens: Any) -> Any:
        return self.head(layers.Flatten()(self.embedding(tokens)))

    def find_loss(self, tokens: Any) -> Any:
        hidden = tokens * (1 - ops.one_hot(2, 5, dtype=tokens.dtype))
        logits = self(hidden, training=True)
        return ops.mean(keras.losses.sparse_categorical_crossentropy(tokens[:, 2], logits, from_logits=True))


class Speech(Stepped):
    """Connectionist temporal classification of sequences (Graves et al. 2006)."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = layers.GRU(6, return_sequences=True), layers.Dense(5)

    def call(self, x: Any) -> Any:
        return self.head(self.recurrent(x))

    def find_loss(self, data: Any) -> Any:
        x, labels = data
        rows = tf.shape(x)[0]
        logits = self(x, training=True)
        return ops.mean(ops.ctc_loss(labels, logits, tf.fill([rows], 2), tf.fill([rows], 6), mask_index=0))


class Graph(Stepped):
    """Two rounds of messages along the edges of small graphs (Kipf and Welling 2017), with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = layers.Dense(6), layers.Dense(6), layers.Dense(3)
        self.normalization = layers.BatchNormalization()

    def call(self, inputs: Any, training: bool = False) -> Any:
        nodes, edges = inputs
        hidden = ops.relu(self.first(ops.matmul(edges, nodes)))
        hidden = self.normalization(ops.matmul(edges, self.second(hidden)), training=training)
        return self.head(ops.mean(hidden, axis=1))

    def find_loss(self, data: Any) -> Any:
        x, y = data
        logits = self(x, training=True)
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))


class MeanTeacher(Stepped):
    """Agrees with a moving average of itself (Tarvainen and Valpola 2017), with losses of layers and regularizers."""

    def __init__(self) -> None:
        super().__init__()
        regularized = layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
        self.student, self.teacher = keras.Sequential([regularized, layers.Dense(3)]), dense(8, 3)
        for net in (self.student, self.teacher):
            net.build((None, 6))
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def find_loss(self, data: Any) -> Any:
        x, y = data
        outputs = self.student(x, training=True)
        loss = self.compute_loss(x, y, outputs)
        return loss + ops.mean(ops.square(ops.softmax(outputs) - ops.softmax(self.teacher(x))))

    def train_step(self, data: Any) -> dict[str, Any]:
        results = super().train_step(data)
        for mine, other in zip(self.teacher.weights, self.student.weights, strict=True):
            mine.assign(0.8 * mine + 0.2 * other)
        return results


class Accumulating(Netted):
    """Adds up the gradients of two batches by hand, and updates with them at once."""

    units = 2

    def __init__(self) -> None:
        super().__init__()
        self.net.build((None, 6))
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False, name=f"sum_{i}")
            for i, v in enumerate(self.net.trainable_weights)
        ]
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.net.trainable_weights
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        for total, gradient in zip(self.sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(gradient)
        self.count.assign_add(1.0)
        is_due = ops.cast(ops.equal(self.count % 2, 0), "float32")
        self.optimizer.apply_gradients([(0.5 * is_due * s, w) for s, w in zip(self.sums, weights, strict=True)])
        for total in self.sums:
            total.assign((1 - is_due) * total)
        return self.track(loss)


class Added(keras.Model):
    """Keras's own step without a loss in compile: a layer adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([layers.Dense(4), layers.ActivityRegularization(l2=0.1)])

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step(data)


class Scaled(Netted):
    """Regression in float16, whose loss it scales as Keras's guide to mixed precision does."""

    def build_net(self) -> keras.Model:
        return keras.Sequential([layers.Dense(size, dtype="mixed_float16") for size in (8, 2)])

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(ops.cast(self(x, training=True), "float32") - y))
            scaled = self.optimizer.scale_loss(loss)
        self.learn(scaled, tape)
        return self.track(loss)


class Tracked(layers.Dense):
    """Measures what it gives."""

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x: Any) -> Any:
        outputs = super().call(x)
        self.norm.update_state(ops.sqrt(ops.sum(ops.square(outputs), axis=1)))
        return outputs


class Measured(keras.Model):
    """Keras's own steps, with metrics and a loss of the model's own, which it and a layer of it measure as well."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([layers.Dense(8, activation="tanh"), Tracked(3)])
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        size = keras.losses.MeanSquaredError()(ops.zeros_like(y_pred), y_pred)  # which Keras divides by replicas
        self.size.update_state(size)
        own = 0.01 * size + 0.01 * ops.mean(ops.abs(y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight) + own

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"square": ops.mean(ops.square(y_pred))}


def of_optimizers(kind: Callable[[], Any], *optimizers: Callable[[], Any], **how: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        keras.utils.set_random_seed(5)
        model: keras.Model = kind()
        model.compile(*(make() for make in optimizers), **how)
        return model

    return build


def compiled(kind: Callable[[], Any], optimizer: Any = None, **how: Any) -> Callable[[], keras.Model]:
    return of_optimizers(kind, optimizer or ADAM, **how)


def scaling() -> keras.optimizers.Optimizer:
    """Doubles its scale during the training."""
    return keras.optimizers.LossScaleOptimizer(ADAM(clipnorm=1.0), initial_scale=256.0, dynamic_growth_steps=6)


ADAM = functools.partial(keras.optimizers.Adam, 1e-2)
RMSPROP = functools.partial(keras.optimizers.RMSprop, 1e-2)
SGD = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)  # tfdist adds up an embedding's repeated rows first
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
EDGES = (RNG.random((ROWS, 4, 4)) < 0.5).astype(np.float32)
DATASET = "a step with clipping, on a tf.data.Dataset"
KINDS: dict[str, tuple[Callable[[], keras.Model], Data]] = {
    "a step with clipping": (
        compiled(Clipped, lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1)),
        (X, TARGETS),
    ),
    DATASET: (compiled(Clipped), (X, TARGETS)),
    "GAN": (of_optimizers(Gan, ADAM, RMSPROP), (X, NOISE)),
    "WGAN-GP": (of_optimizers(Penalized), (X, NOISE)),
    "variational autoencoder": (compiled(Autoencoder), (X,)),
    "diffusion": (compiled(Diffusion), (X,)),
    "distillation": (compiled(Distilled, loss=LOSS, metrics=["accuracy"]), (X, LABELS)),
    "adversarial": (compiled(Adversarial), (X, LABELS)),
    "MAML": (compiled(MetaLearner), (X, TARGETS)),
    "mixture density": (compiled(MixtureDensity), (X, TARGETS)),
    "policy gradient": (compiled(Policy), (X, (LABELS, TARGETS[:, 0]))),
    "masked language model": (compiled(MaskedTokens, SGD), (TOKENS,)),
    "CTC speech": (compiled(Speech), (RNG.normal(size=(ROWS, 6, 3)).astype(np.float32), TOKENS[:, :2] % 4 + 1)),
    "graph network": (compiled(Graph), ((RNG.normal(size=(ROWS, 4, 3)).astype(np.float32), EDGES), LABELS)),
    "mean teacher": (compiled(MeanTeacher, loss=LOSS), (X, LABELS)),
    "gradient accumulation": (compiled(Accumulating), (X, TARGETS)),
    "a loss of a layer alone": (compiled(Added), (X, LABELS)),
    "float16": (compiled(Scaled, scaling), (X, TARGETS)),
    "compute_metrics and compute_loss": (compiled(Measured, loss=LOSS, metrics=["accuracy"]), (X, LABELS)),
}
