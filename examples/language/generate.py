"""Writes on from a text, by the trained model or its export.

tfdist train language.gin --run_dir=runs/language
python generate.py runs/language/export/model.keras "The for statement"
tfdist export runs/language
    python generate.py runs/language/export/saved_model "A class" --temperature=0.8 --top_k=20
"""

import argparse
import os

import language
import numpy as np
import tensorflow as tf


def load_logits(path):
    """A function from tokens [n, length] to logits [n, length, vocabulary], and the length."""
    if not os.path.isdir(path):
        model = language.build_model()  # with the arguments that it was trained with
        model.load_weights(path)
        return lambda tokens: model(tokens).numpy(), model.inputs[0].shape[1]
    loaded = tf.saved_model.load(path)
    signature = loaded.signatures["serving_default"]
    ((name, spec),) = signature.structured_input_signature[1].items()
    return lambda tokens, _=loaded: next(iter(signature(**{name: tf.constant(tokens)}).values())).numpy(), spec.shape[1]


def choose_token(logits, *, temperature, top_k, random):
    """The likeliest token, or with a temperature one of the top_k by their probabilities."""
    if not temperature:
        return int(np.argmax(logits))
    if top_k:
        logits = np.where(logits < np.sort(logits)[-top_k], -np.inf, logits)
    weights = np.exp((logits - np.max(logits)) / temperature)
    return int(random.choice(len(logits), p=weights / weights.sum()))


def generate(logits_of, length, tokens, *, count, temperature=0.0, top_k=None, seed=0):
    """The tokens and so many more; each is predicted from the last `length` before it."""
    tokens, random = [int(token) for token in tokens], np.random.default_rng(seed)
    for _ in range(count):
        last = tokens[-length:]
        window = np.zeros((1, length), np.int32)
        window[0, : len(last)] = last  # what comes after has no influence on those before it
        logits = logits_of(window)[0, len(last) - 1].astype(np.float64)
        tokens.append(choose_token(logits, temperature=temperature, top_k=top_k, random=random))
    return tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--count", type=int, default=40, help="tokens to write")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token always")
    parser.add_argument("--top_k", type=int, help="of so many likeliest tokens")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    tokenizer = language.train_tokenizer()
    logits_of, length = load_logits(given.pop("model"))
    print(tokenizer.detokenize(generate(logits_of, length, np.asarray(tokenizer(given.pop("text"))), **given)))
