"""What holds for every loss on any input: degenerate batches and random ones."""

import inspect

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from keras_ccp import losses

MINED = ("-hard", "-semi_hard", "-easy_positive", "-distance_weighted")


def variants():
    """Every loss by name: with its defaults, on dot products, with each miner."""
    for name, cls in losses._BY_NAME.items():
        arguments = inspect.signature(cls).parameters
        yield name, cls()
        if "similarity" in arguments:
            yield f"{name}-dot", cls(similarity="dot")
        if "mining" in arguments:
            for ending in MINED:
                yield name + ending, cls(mining=ending[1:])


ALL = dict(variants())


def rows_and_gradients(name, labels, x, references=None, r=None):
    """Rows and gradients, of the batch with itself if there are no references."""
    x = tf.constant(x, tf.float32)
    r = x if r is None else tf.constant(r, tf.float32)
    in_batch = references is None
    references = labels if in_batch else references
    with tf.GradientTape() as tape:
        tape.watch((x, r))
        rows = ALL[name].pairs(labels, x, references, r, exclude_self=in_batch)
        value = tf.reduce_mean(rows)
    # A side that the loss does not depend on has gradient 0.
    gradients = tape.gradient(value, (x, r), unconnected_gradients="zero")
    return rows.numpy(), [tf.convert_to_tensor(g).numpy() for g in gradients]


def assert_finite(rows, gradients):
    assert np.isfinite(rows).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()


# --- Degenerate batches ---

EAST, NORTH, WEST, ZERO = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]
CASES = {
    "identical": ([0, 0, 1, 1], [[0.3, 0.7]] * 4),
    "identical and long": ([0, 0, 1, 1], [[3e5, -7e5]] * 4),
    "zero": ([0, 0, 1, 1], [ZERO] * 4),
    "some zero": ([0, 0, 1, 1], [ZERO, EAST, ZERO, NORTH]),
    "one class": ([7, 7, 7], [EAST, NORTH, WEST]),
    "one class, collapsed": ([7, 7, 7], [EAST] * 3),
    "one class, all zero": ([7, 7, 7], [ZERO] * 3),
    "no positive": ([0, 1, 2], [EAST, [0.9, 0.1], NORTH]),
    "no positive, far apart": ([0, 1], [EAST, WEST]),
    "batch of one": ([3], [EAST]),
    "batch of one, zero": ([3], [ZERO]),
    "margins kept": ([0, 0, 1, 1], [EAST, EAST, WEST, WEST]),
    "own reference only": ([3], [EAST], [3], [NORTH]),
    "other references only": ([3, 3], [EAST, NORTH], [0, 1], [EAST, WEST]),
    "far references": ([3, 3], [EAST, EAST], [0, 1, 3], [WEST, WEST, EAST]),
    "tiny": ([0, 0, 1, 1], [[1e-30, 0.0], [0.0, 1e-30], [1e-30] * 2, ZERO]),
    "zero references": ([0, 1], [EAST, NORTH], [0, 1], [ZERO, ZERO]),
}
WITH_MARGINS = ("contrastive", "cosine_contrastive", "triplet")
# Where the definition of a loss gives exactly 0, mined or not.
ZEROS = {
    "one class": ("triplet",),
    "one class, collapsed": WITH_MARGINS,
    "one class, all zero": ("contrastive", "triplet"),
    "no positive": ("triplet",),
    "no positive, far apart": WITH_MARGINS,
    "batch of one": losses._BY_NAME,
    "batch of one, zero": losses._BY_NAME,
    "margins kept": WITH_MARGINS,
    "own reference only": ("triplet",),
    "other references only": ("triplet",),
    "far references": WITH_MARGINS,
}


@pytest.mark.parametrize("name", ALL)
def test_degenerate_batches(name):
    # One test for all cases: a fresh Keras state before each costs more than they do.
    for case, problem in CASES.items():
        rows, gradients = rows_and_gradients(name, *problem)
        assert rows.shape == (len(problem[0]),), case
        assert_finite(rows, gradients)
        if name.partition("-")[0] in ZEROS.get(case, ()):
            for values in (rows, *gradients):
                np.testing.assert_array_equal(values, 0.0, err_msg=case)


@pytest.mark.parametrize("name", ALL)
def test_not_a_number_is_not_hidden(name):
    labels, references = [0, 0, 1, 1, 2], [2, 1, 0, 1]
    for side in (0, 1):
        x, r = (np.random.default_rng(0).normal(size=(n, 3)) for n in (5, 4))
        (x, r)[side][2, 1] = np.nan
        rows, _ = rows_and_gradients(name, labels, x, references, r)
        assert np.isnan(np.mean(rows))


# --- Random batches ---


@st.composite
def problems(draw):
    """Batch, references (`None`: the batch itself), and whether distances may tie.

    Scales are from 1e-6 to 1e6. With ties some vectors are equal or zero, and one
    dimension is allowed, where all cosine similarities are 1 or -1.
    """
    ties = draw(st.booleans())
    batch, n = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    dim = draw(st.integers(1 if ties else 2, 5))
    num_classes = draw(st.integers(1, 4))
    scale = 10.0 ** draw(st.integers(-6, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vectors = scale * rng.normal(size=(batch + n, dim))
    if ties:
        num_different = draw(st.integers(1, batch + n))
        vectors = vectors[rng.integers(num_different, size=batch + n)]
        vectors[rng.random(batch + n) < draw(st.sampled_from([0.0, 0.3]))] = 0.0
    vectors = vectors.astype("float32")
    labels = rng.integers(num_classes, size=batch + n)
    problem = labels[:batch], vectors[:batch], labels[batch:], vectors[batch:]
    if draw(st.booleans()):
        problem = *problem[:2], None, None
    return problem, ties


def check_properties(name, problem, compare_order):
    labels, x, references, r = problem
    rows, gradients = rows_and_gradients(name, *problem)
    assert rows.shape == labels.shape and rows.dtype == np.float32
    assert_finite(rows, gradients)
    if not compare_order:
        return
    # Rows follow the batch; the order of the references changes nothing.
    rng = np.random.default_rng(0)
    order = rng.permutation(len(labels))
    if references is not None:
        other = rng.permutation(len(references))
        references, r = references[other], r[other]
    permuted, _ = rows_and_gradients(name, labels[order], x[order], references, r)
    atol = 1e-5 * max(1.0, np.abs(rows).max())
    np.testing.assert_allclose(permuted, rows[order], rtol=1e-4, atol=atol)


def settings(max_examples):
    """The same inputs in every run, and no files."""
    return hypothesis.settings(
        derandomize=True, database=None, deadline=None, max_examples=max_examples
    )


@pytest.mark.parametrize("name", [name for name in ALL if not name.endswith(MINED)])
@settings(max_examples=30)
@hypothesis.given(problems())
def test_random_batches(name, problem_and_ties):
    check_properties(name, problem_and_ties[0], compare_order=True)


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith(MINED)])
@settings(max_examples=10)
@hypothesis.given(problems())
def test_mined_random_batches(name, problem_and_ties):
    problem, ties = problem_and_ties
    # Of equal distances the first one is chosen, and draws are new every time.
    compare_order = not ties and not name.endswith("distance_weighted")
    check_properties(name, problem, compare_order)
