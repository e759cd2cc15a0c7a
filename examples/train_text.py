"""Trains an embedding of texts: the names of a country in all languages.

Babel ships the names of 264 countries and regions in some 300 languages. The network
reads characters, learns from half of the countries which spellings mean the same one,
and finds the names of the other half.

    pip install babel scikit-learn && python examples/train_text.py
"""

import argparse
import unicodedata

import keras
import numpy as np
from babel import Locale, localedata
from keras import layers
from sklearn.feature_extraction.text import HashingVectorizer

from keras_ccp import (
    CCPCallback,
    CCPModel,
    balanced_batches,
    build_embedder,
    datasets,
    losses,
    retrieval,
)

LENGTH = 32


def country_names() -> datasets.Dataset:
    """Each name in Latin letters once, of the country it is a name of."""
    found = set()
    languages = {name.split("_")[0] for name in localedata.locale_identifiers()}
    for language in sorted(languages):
        for code, name in Locale.parse(language).territories.items():
            letters = [character for character in name if character.isalpha()]
            is_latin = all("LATIN" in unicodedata.name(c, "") for c in letters)
            if code.isalpha() and letters and is_latin:
                found.add((code, name.casefold()))
    codes, names = zip(*sorted(found), strict=True)
    return datasets.Dataset({"text": names}, codes)


def make_network(texts: np.ndarray) -> keras.Model:
    """Characters -> one vector for each of them and its neighbours."""
    vectorize = layers.TextVectorization(
        split="character", standardize=None, output_sequence_length=LENGTH
    )
    vectorize.adapt(texts.astype(str))
    text = keras.Input((), dtype="string", name="text")
    x = layers.Embedding(vectorize.vocabulary_size(), 32)(vectorize(text))
    for width in (3, 5):
        x = layers.Conv1D(128, width, padding="same", activation="relu")(x)
    return keras.Model({"text": text}, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    keras.utils.set_random_seed(0)
    seen, unseen = country_names().split_classes(0.5, seed=0)
    training, validation = seen.split_classes(0.8, seed=0)
    print(f"training: {training}\nunseen:   {unseen}")

    network = make_network(training.images["text"])
    embedder = build_embedder(network, embedding_dim=64, pooling="max")
    model = CCPModel(embedder, training.num_classes, proxies_per_class=4)
    model.compile(keras.optimizers.Adam(1e-3), losses.MultiSimilarityLoss())
    model.fit(
        balanced_batches(training, 8, 4, seed=0),
        steps_per_epoch=steps // 10,
        epochs=10,
        verbose=2,
        callbacks=[CCPCallback(training, validation, seed=0)],
    )

    names, labels = unseen.images["text"], unseen.labels
    hashing = HashingVectorizer(n_features=1024, analyzer="char_wb", ngram_range=(3, 3))
    trigrams = hashing.fit_transform(names).toarray().astype("float32")
    embeddings = model.embed(unseen)
    print("\ncountries it never saw, %")
    for name, vectors in (("equal trigrams", trigrams), ("trained", embeddings)):
        found = retrieval.evaluate(vectors, labels)
        scores = found["precision_at_1"], found["map_at_r"]
        print(
            "{:<16}P@1 {:5.1f}  MAP@R {:5.1f}".format(name, *np.multiply(scores, 100))
        )

    rows = np.random.default_rng(0).choice(len(names), 5, replace=False)
    _, nearest = retrieval.search(embeddings[rows], embeddings, k=5)
    for row, near in zip(rows, nearest, strict=True):
        print(f"{names[row]}: {', '.join(names[i] for i in near if i != row)}")


if __name__ == "__main__":
    main()
