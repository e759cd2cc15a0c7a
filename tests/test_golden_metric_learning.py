"""Values and gradients of pytorch-metric-learning 2.9.0.

Made by tools/build_metric_learning_golden.py, which says what a case is. Where its
conventions differ, the factor is here and in docs/losses.md.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import losses
from keras_ccp.layers import l2_normalize
from keras_ccp.losses import (
    CrossBatchMemory,
    ProxyAnchorLoss,
    ProxyNCALoss,
    SoftTripleLoss,
)

GOLDEN = Path(__file__).parent / "golden" / "metric_learning.npz"
SIMILARITY = {"unit": "cosine", "raw": "dot"}


@pytest.fixture(scope="module")
def recorded():
    with np.load(GOLDEN) as arrays:
        return {name: arrays[name] for name in arrays.files}


def make_loss(name, similarity):
    return {
        "contrastive": losses.ContrastiveLoss(0.1, 0.9),
        "cosine_contrastive": losses.CosineContrastiveLoss(0.5, similarity),
        "multi_similarity": losses.MultiSimilarityLoss(2, 40, 0.5, similarity),
        "triplet": losses.TripletLoss(0.1),
        # softmax_scale 10 on similarities: temperature 2 / 10.
        "proxy_nca": ProxyNCALoss(0.2, similarity),
        # softmax_scale 10 on squared distances: temperature 1 / 10.
        "proxy_nca_squared": ProxyNCALoss(0.1),
        "proxy_anchor": ProxyAnchorLoss(0.1, 32, similarity),
        # Without weight_regularizer: tau 0.
        "soft_triple_1": SoftTripleLoss(20, 0.1, 0, 0.01, similarity),
        "soft_triple_3": SoftTripleLoss(20, 0.1, 0, 0.01, similarity),
        # weight_reg_weight is tau.
        "soft_triple_regularized": SoftTripleLoss(20, 0.1, 0.2, 0.01),
        "nt_xent": losses.NTXentLoss(0.07, similarity),
        "n_pairs": losses.NPairsLoss(similarity),
        "sup_con": losses.SupConLoss(0.1, similarity),
        "circle": losses.CircleLoss(0.4, 80),
        "margin": losses.MarginLoss(0.2, 1.2),
        "lifted_structure": losses.LiftedStructureLoss(0, 1),
        # Their margins are degrees.
        "arc_face": losses.ArcFaceLoss(math.radians(28.6), 64),
        "arc_face_wide": losses.ArcFaceLoss(math.radians(90), 4),
        "cos_face": losses.CosFaceLoss(0.35, 64),
        "sub_center_arc_face_1": losses.SubCenterArcFaceLoss(math.radians(28.6), 64),
        "sub_center_arc_face_3": losses.SubCenterArcFaceLoss(math.radians(28.6), 64),
    }[name]


def rows_and_gradients(loss, vectors, inputs, **kwargs):
    """Of vectors normalised for the losses that take them as they come, if at all."""
    labels, x, references, r = inputs
    is_distance = not hasattr(loss, "similarity")
    normalize = l2_normalize if is_distance and vectors == "unit" else tf.identity
    with tf.GradientTape() as tape:
        tape.watch((x, r))
        rows = loss.pairs(labels, normalize(x), references, normalize(r), **kwargs)
        value = tf.reduce_mean(rows)
    gradients = tape.gradient(value, (x, r))
    return value, dict(zip(("embeddings", "references"), gradients, strict=True))


def check(recorded, case, value, gradients, factor=1.0):
    expected = factor * recorded[f"out/{case}/loss"]
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    for side, gradient in gradients.items():
        expected = factor * recorded[f"out/{case}/grad_{side}"]
        assert np.abs(expected).max() > 1e-3, "says nothing"
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


PAIR_LOSSES = [
    "contrastive",
    "cosine_contrastive",
    "multi_similarity",
    "triplet",
    "proxy_nca",
    "nt_xent",
    "sup_con",
    "margin",
]
PAIR_CASES = [*itertools.product(PAIR_LOSSES, SIMILARITY), ("circle", "unit")]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "name, vectors", [*PAIR_CASES, *(("lifted_structure", v) for v in SIMILARITY)]
)
def test_in_batch(recorded, name, vectors, dtype):
    loss = make_loss(name, SIMILARITY[vectors])
    batch = recorded["in/labels"], tf.constant(recorded["in/embeddings"], dtype)
    inputs = *batch, *batch
    value, gradients = rows_and_gradients(loss, vectors, inputs, exclude_self=True)
    del gradients["references"]  # the same tensor
    # Theirs is a mean over samples with a positive, ours over the batch: one of 15
    # samples is alone in its class.
    factor = 14 / 15 if name == "proxy_nca" else 1.0
    check(recorded, f"{name}_{vectors}_batch", value, gradients, factor)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name, vectors", PAIR_CASES)
def test_against_references(recorded, name, vectors, dtype):
    loss = make_loss(name, SIMILARITY[vectors])
    inputs = (
        recorded["in/labels"],
        tf.constant(recorded["in/embeddings"], dtype),
        recorded["in/reference_labels"],
        tf.constant(recorded["in/references"], dtype),
    )
    result = rows_and_gradients(loss, vectors, inputs)
    check(recorded, f"{name}_{vectors}_references", *result)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("vectors", SIMILARITY)
def test_n_pairs(recorded, vectors, dtype):
    inputs = []
    for side in ("anchors", "positives"):
        rows = recorded[f"in/n_pairs_{side}"]
        embeddings = tf.constant(recorded["in/embeddings"][rows], dtype)
        inputs += [recorded["in/labels"][rows], embeddings]
    loss = make_loss("n_pairs", SIMILARITY[vectors])
    result = rows_and_gradients(loss, vectors, inputs)
    check(recorded, f"n_pairs_{vectors}_references", *result)


def proxy_inputs(recorded, label_key, per_class, dtype, order):
    """Proxies in any order: theirs are sorted by class."""
    proxies = recorded[f"in/proxies_{per_class}"]
    proxy_labels = np.repeat(np.arange(len(proxies) // per_class), per_class)
    return (
        recorded[f"in/{label_key}"],
        tf.constant(recorded["in/embeddings"], dtype),
        proxy_labels[order],
        tf.constant(proxies[order], dtype),
    )


PROXY_CASES = [
    *(
        (f"{name}_{vectors}_proxies", name, vectors)
        for name in ("proxy_anchor", "proxy_nca", "soft_triple_1", "soft_triple_3")
        for vectors in SIMILARITY
    ),
    *(
        (f"{prefix}{name}_unit_proxies", name, "unit")
        for name in (
            "proxy_nca_squared",
            "soft_triple_regularized",
            "arc_face",
            "arc_face_wide",
            "cos_face",
            "sub_center_arc_face_1",
            "sub_center_arc_face_3",
        )
        for prefix in ("", "one_class_")
    ),
    *(
        (f"one_class_{name}_unit_proxies", name, "unit")
        for name in ("proxy_nca", "soft_triple_1", "soft_triple_3")
    ),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case, name, vectors", PROXY_CASES)
def test_against_proxies(recorded, case, name, vectors, dtype):
    loss = make_loss(name, SIMILARITY[vectors])
    per_class = 3 if name.endswith(("_3", "_regularized")) else 1
    label_key = "one_class_labels" if case.startswith("one_class") else "labels"
    order = np.random.default_rng(0).permutation(5 * per_class)
    inputs = proxy_inputs(recorded, label_key, per_class, dtype, order)
    value, gradients = rows_and_gradients(loss, vectors, inputs)
    gradients["references"] = gradients["references"].numpy()[np.argsort(order)]
    check(recorded, case, value, gradients)


def test_proxy_anchor_of_a_batch_of_one_class(recorded):
    # Their negative part is divided by all 5 proxies, ours by the 4 with a negative.
    loss = make_loss("proxy_anchor", "cosine")
    inputs = proxy_inputs(recorded, "one_class_labels", 1, "float32", np.arange(5))
    labels, embeddings, proxy_labels, proxies = inputs
    with tf.GradientTape() as tape:
        tape.watch((embeddings, proxies))
        rows = loss.pairs(labels, embeddings, proxy_labels, proxies)
        # Against its own proxy alone there is only the positive part.
        own = loss.pairs(labels, embeddings, proxy_labels[2:3], proxies[2:3])
        value = tf.reduce_mean(own + (rows - own) * 4 / 5)
    gradients = tape.gradient(value, (embeddings, proxies))
    gradients = dict(zip(("embeddings", "references"), gradients, strict=True))
    check(recorded, "one_class_proxy_anchor_unit_proxies", value, gradients)


@pytest.mark.parametrize(
    "name", ["contrastive", "cosine_contrastive", "multi_similarity"]
)
def test_cross_batch_memory(recorded, name):
    # Theirs is the term of the memory alone; ours adds that of the batch.
    loss = make_loss(name, "cosine")
    memory = CrossBatchMemory(loss, size=16)
    batches = zip(
        recorded["in/memory_labels"], recorded["in/memory_embeddings"], strict=True
    )
    for step, (labels, embeddings) in enumerate(batches):
        embeddings = tf.constant(embeddings)
        with tf.GradientTape() as tape:
            tape.watch(embeddings)
            near = l2_normalize(embeddings) if name == "contrastive" else embeddings
            value = memory(labels, near) - loss(labels, near)
        gradients = {"embeddings": tape.gradient(value, embeddings)}
        check(recorded, f"memory_{name}_{step}", value, gradients)
