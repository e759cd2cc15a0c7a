"""Balanced batches, augmentation and evaluation data."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPModel, losses
from keras_ccp.datasets import Dataset
from keras_ccp.pipeline import (
    EvaluationData,
    balanced_batches,
    balanced_indices,
    embed,
    small_image_augmentation,
)

SIZES = (6, 5, 4, 3, 7, 2, 1)
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(7), SIZES))


def numbered(labels, size=2):
    """Image i holds the number i only, so a test sees where it went."""
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    return Dataset(np.tile(pixels, (1, size, size, 3)), labels)


def take(iterator, count):
    return list(itertools.islice(iterator, count))


# balanced_indices


@pytest.mark.parametrize("p", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_classes_are_distinct_and_visits_even(p, seed):
    visits = np.zeros(7, int)
    for rows in take(balanced_indices(LABELS, p, 2, seed), 50):
        classes = LABELS[rows].reshape(p, 2)
        assert (classes[:, 0] == classes[:, 1]).all()
        assert len(set(classes[:, 0])) == p
        for c in classes[:, 0]:  # within a batch too
            visits[c] += 1
            assert visits.max() - visits.min() <= 1


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_no_image_again_before_its_class_is_used_up(k):
    uses = np.zeros(len(LABELS), int)
    for rows in take(balanced_indices(LABELS, 3, k, seed=0), 60):
        for visit in rows.reshape(3, k):
            size = SIZES[LABELS[visit[0]]]
            assert len(set(visit)) == min(k, size)
            for row in visit:
                uses[row] += 1
                of_class = uses[LABELS == LABELS[row]]
                assert of_class.max() - of_class.min() <= 1


def test_small_classes_are_dropped_on_request():
    rows = np.concatenate(
        take(balanced_indices(LABELS, 3, 4, 0, drop_small_classes=True), 20)
    )
    # Classes with 4 images or more in SIZES.
    assert set(LABELS[rows].tolist()) == {0, 1, 2, 4}


def test_indices_follow_the_seed():
    def first(seed):
        return np.stack(take(balanced_indices(LABELS, 3, 2, seed), 20))

    assert (first(0) == first(0)).all()
    assert (first(0) != first(1)).any()


def test_indices_accept_gaps_in_the_labels():
    labels = np.array([5, 9, 5, 9])
    (rows,) = take(balanced_indices(labels, 2, 2, 0), 1)
    assert sorted(rows.tolist()) == [0, 1, 2, 3]


# balanced_batches


def test_batches_match_the_indices():
    dataset = numbered(LABELS)
    batches = balanced_batches(dataset, 3, 2, seed=5)
    image_spec, label_spec = batches.element_spec
    assert image_spec == tf.TensorSpec((6, 2, 2, 3), tf.uint8)
    assert label_spec == tf.TensorSpec((6,), tf.int32)
    assert batches.cardinality() == tf.data.INFINITE_CARDINALITY
    expected = take(balanced_indices(LABELS, 3, 2, 5), 12)
    for _ in range(2):  # a fresh iterator starts again
        for (images, labels), rows in zip(batches, expected, strict=False):
            assert images.numpy()[:, 0, 0, 0].tolist() == rows.tolist()
            assert labels.numpy().tolist() == LABELS[rows].tolist()


def test_augmented_batches_are_bit_equal():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (28, 8, 8, 3), dtype=np.uint8)
    dataset = Dataset(pixels, LABELS)

    def first(seed):
        batches = balanced_batches(
            dataset, 3, 2, seed=seed, augment=small_image_augmentation()
        )
        return np.stack([images.numpy() for images, _ in batches.take(8)])

    assert (first(3) == first(3)).all()
    assert (first(3) != first(4)).any()


def test_augment_gets_another_seed_each_step():
    def seed_as_image(images, seed):
        return tf.zeros_like(images, tf.int64) + tf.reduce_sum(seed * [100, 1])

    batches = balanced_batches(numbered(LABELS), 2, 2, seed=7, augment=seed_as_image)
    seen = [int(images[0, 0, 0, 0]) for images, _ in batches.take(3)]
    assert seen == [700, 701, 702]  # 100 * seed + step


@pytest.mark.parametrize("first_batch", [1, np.uint8(9), 40])
def test_first_batch_goes_on_where_another_stopped(first_batch):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (28, 8, 8, 3), dtype=np.uint8)
    arguments = {"seed": 2**64 + 1, "augment": small_image_augmentation()}
    batches = balanced_batches(Dataset(pixels, LABELS), 3, 2, **arguments)
    later = balanced_batches(
        Dataset(pixels, LABELS), 3, 2, **arguments, first_batch=first_batch
    )
    assert later.element_spec == batches.element_spec
    assert later.cardinality() == tf.data.INFINITE_CARDINALITY
    for _ in range(2):  # a fresh iterator starts there again
        expected = batches.skip(int(first_batch)).take(12)
        for got, wanted in zip(later, expected, strict=False):
            for tensor, other in zip(got, wanted, strict=True):
                assert np.array_equal(tensor, other)


def test_batches_left_out_are_not_augmented():
    steps = []

    def noting(images, seed):
        tf.py_function(lambda step: steps.append(int(step)), [seed[1]], [])
        return images

    batches = balanced_batches(
        numbered(LABELS), 2, 2, seed=0, augment=noting, first_batch=1000
    )
    next(iter(batches))
    assert 1000 in steps and min(steps) == 1000


def test_augment_may_change_size_and_type():
    def resize(images, seed):
        return tf.image.resize(images, (5, 4))

    batches = balanced_batches(numbered(LABELS), 2, 2, seed=0, augment=resize)
    assert batches.element_spec[0] == tf.TensorSpec((4, 5, 4, 3), tf.float32)


def test_small_integer_types_do_not_overflow():
    batches = balanced_batches(numbered(LABELS), np.uint8(2), np.uint8(200), seed=0)
    assert batches.element_spec[1] == tf.TensorSpec((400,), tf.int32)
    (labels,) = [labels for _, labels in batches.take(1)]
    assert len(labels) == 400


def test_no_seed_draws_one_once():
    batches = balanced_batches(numbered(LABELS), 3, 2)
    once, twice = ([x.numpy() for x, _ in batches.take(9)] for _ in range(2))
    assert np.array_equal(once, twice)
    other = balanced_batches(numbered(LABELS), 3, 2)
    assert not np.array_equal(once, [x.numpy() for x, _ in other.take(9)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes_per_batch": 8}, "must be at most the 7 classes"),
        ({"drop_small_classes": True, "samples_per_class": 5}, "the 3 classes"),
        ({"classes_per_batch": 0}, "must be at least 1. Received: classes"),
        ({"samples_per_class": -1}, "Received: samples_per_class=-1"),
    ],
)
def test_balanced_batches_refuses(change, message):
    arguments = {"classes_per_batch": 4, "samples_per_class": 2, "seed": 0, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        balanced_batches(numbered(LABELS), **arguments)


# small_image_augmentation

OFF = {
    "min_area": 1,
    "aspect_ratio": 1,
    "flip": False,
    "brightness": 0,
    "contrast": 0,
    "saturation": 0,
    "tint": 0,
}


def random_images(n=64, channels=3):
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (n, 6, 8, channels), dtype=np.uint8)


def test_augmentation_that_is_off_changes_nothing():
    images = random_images()
    assert (small_image_augmentation(**OFF)(images, [1, 2]).numpy() == images).all()


def test_flip_mirrors_about_half_of_the_images():
    images = random_images()
    out = small_image_augmentation(**{**OFF, "flip": True})(images, [1, 2]).numpy()
    mirrored = (out == images[:, :, ::-1]).all((1, 2, 3))
    kept = (out == images).all((1, 2, 3))
    assert (mirrored ^ kept).all()
    # Binomial(64, 1/2): outside 16..48 with a chance of 2e-5; the seed is fixed.
    assert 16 <= mirrored.sum() <= 48


def test_crop_of_a_ramp_stays_a_ramp():
    # Bilinear resizing is exact on linear images: the crop shows its own box.
    y, x = np.meshgrid(np.linspace(0, 1, 6), np.linspace(0, 1, 8), indexing="ij")
    ramp = np.tile(np.stack([y, x], -1), (256, 1, 1, 1)).astype(np.float32)
    augment = small_image_augmentation(**{**OFF, "min_area": 0.25, "aspect_ratio": 2})
    out = augment(ramp, [0, 0]).numpy()
    assert out.dtype == np.float32
    assert (out >= 0).all() and (out <= 1).all()
    np.testing.assert_allclose(np.diff(out[..., 0], 2, axis=1), 0, atol=1e-6)
    height = out[:, -1, 0, 0] - out[:, 0, 0, 0]
    width = out[:, 0, -1, 1] - out[:, 0, 0, 1]
    assert (height > 0).all() and (width > 0).all()
    # Only a side cut to 1 changes area or ratio of the box.
    whole = (height < 1) & (width < 1)
    assert whole.sum() > 100
    area, ratio = (height * width)[whole], (height / width)[whole]
    assert area.min() >= 0.25 - 1e-5 and area.max() <= 1
    assert ratio.min() >= 0.5 - 1e-5 and ratio.max() <= 2 + 1e-5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # One pixel (30, 60, 90), one black; grey .299*30 + .587*60 + .114*90 = 54.45,
        # mean grey 27.225. Each factor f is found from the first channel and must
        # explain all values.
        ("brightness", lambda x, f: x * f),
        ("contrast", lambda x, f: 27.225 + f * (x - 27.225)),
        ("saturation", lambda x, f: np.array([[54.45], [0]]) * (1 - f) + f * x),
    ],
)
def test_colour_jitter(name, expected):
    pixels = np.array([[30, 60, 90], [0, 0, 0]], np.float32)
    images = np.tile(pixels[None, None], (32, 1, 1, 1))
    out = small_image_augmentation(**{**OFF, name: 0.5})(images, [0, 1]).numpy()
    factors = []
    for image in out[:, 0]:
        low, high = expected(pixels, 0.5)[0, 0], expected(pixels, 1.5)[0, 0]
        factor = 0.5 + (image[0, 0] - low) / (high - low)
        np.testing.assert_allclose(image, expected(pixels, factor), atol=1e-4)
        factors.append(factor)
    assert 0.5 <= min(factors) < 0.7 and 1.3 < max(factors) <= 1.5


def test_tint_scales_each_channel_on_its_own():
    images = np.full((64, 2, 2, 3), 100, np.float32)
    out = small_image_augmentation(**{**OFF, "tint": 0.5})(images, [0, 1]).numpy()
    factors = out[:, 0, 0] / 100
    np.testing.assert_allclose(out, factors[:, None, None] * images, rtol=1e-6)
    assert 0.5 <= factors.min() < 0.6 and 1.4 < factors.max() <= 1.5
    assert abs(np.corrcoef(factors.T)[0, 1]) < 0.5


def test_shares_of_grey_images_and_negatives():
    images = np.tile(np.array([30, 60, 90], np.uint8), (256, 2, 2, 1))
    out = small_image_augmentation(**{**OFF, "grayscale": 0.25, "invert": 0.5})(
        images, [0, 1]
    ).numpy()[:, 0, 0]
    kinds, counts = np.unique(out, axis=0, return_counts=True)
    # Grey is round(54.45) = 54 and its negative round(255 - 54.45) = 201.
    assert kinds.tolist() == [
        [30, 60, 90],
        [54, 54, 54],
        [201, 201, 201],
        [225, 195, 165],
    ]
    # 256 * (3/8, 1/8, 1/8, 3/8) = 96, 32, 32, 96, give or take 4 deviations of 8.
    np.testing.assert_allclose(counts, [96, 32, 32, 96], atol=32)


def test_augmentation_keeps_grey_images_and_clips_uint8():
    images = np.where(random_images(channels=1) < 128, 0, 255).astype(np.uint8)
    out = small_image_augmentation(brightness=1)(images, [0, 0])
    assert out.dtype == tf.uint8
    assert out.shape == images.shape
    assert (out.numpy() == 255).any()


def test_augmentation_refuses_percentages():
    with pytest.raises(ValueError, match="from 0 to 1. Received: invert=20"):
        small_image_augmentation(invert=20)


@pytest.mark.parametrize("images", [random_images().astype(np.int32), ["a.png"]])
def test_augmentation_refuses_what_has_no_range(images):
    with pytest.raises(TypeError, match="take `mlrc_augmentation"):
        small_image_augmentation()(images, [0, 0])


# EvaluationData


def stream(labels=LABELS, batch=5):
    pairs = (numbered(LABELS).images, labels)
    return tf.data.Dataset.from_tensor_slices(pairs).batch(batch)


def rows_of(batches):
    parts = [batch.numpy()[:, 0, 0, 0] for batch in batches]
    return [len(part) for part in parts], np.concatenate(parts).tolist()


SOURCES = {
    "dataset": lambda: numbered(LABELS),
    "arrays": lambda: (numbered(LABELS).images, LABELS.astype(np.int64)[:, None]),
    "stream": stream,
    "column": lambda: stream(LABELS[:, None]),
}


@pytest.mark.parametrize("source", SOURCES)
def test_evaluation_data(source):
    data = EvaluationData(SOURCES[source](), "pool")
    assert len(data) == 28
    assert data.labels.dtype == np.int32
    assert data.labels.tolist() == LABELS.tolist()
    everything = data.batches(batch_size=12)
    assert everything.element_spec == tf.TensorSpec((None, 2, 2, 3), tf.uint8)
    for _ in range(2):
        assert rows_of(everything) == ([12, 12, 4], list(range(28)))
    some = [0, 1, 7, 13, 21, 27]
    assert rows_of(data.batches(some, batch_size=4)) == ([4, 2], some)
    assert data.batches(some).element_spec.shape.as_list() == [None, 2, 2, 3]


def test_arrays_give_rows_in_any_order_and_are_not_copied():
    images = numbered(LABELS).images
    data = EvaluationData((images, LABELS))
    assert rows_of(data.batches([9, 3, 3])) == ([3], [9, 3, 3])
    images[3] = 200
    assert rows_of(data.batches([9, 3])) == ([2], [9, 200])


def test_vectors_are_images_too():
    data = EvaluationData((np.eye(4, dtype=np.float32), [0, 0, 1, 1]))
    (batch,) = data.batches([2])
    assert batch.numpy().tolist() == [[0, 0, 1, 0]]


def generated(image_spec):
    return tf.data.Dataset.from_generator(
        lambda: [(np.zeros((2, 4, 5, 3)), [0, 1])],
        output_signature=(image_spec, tf.TensorSpec((None,), tf.int32)),
    )


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: numbered(LABELS), (2, 2, 3)),
        (lambda: (np.eye(4, dtype=np.float32), [0, 0, 1, 1]), (4,)),
        (stream, (2, 2, 3)),
        (lambda: generated(tf.TensorSpec((None, None, 5, 3))), (None, 5, 3)),
        (lambda: generated(tf.TensorSpec(None)), None),
    ],
)
def test_image_shape(make, shape):
    assert EvaluationData(make()).image_shape == shape


def test_streamed_rows_must_ascend():
    data = EvaluationData(stream(), "pool")
    for rows in ([3, 2], [2, 2]):
        with pytest.raises(ValueError, match="must ascend where `pool` is a tf.data"):
            data.batches(rows)


def test_a_fixed_shuffle_is_accepted():
    fixed = stream().shuffle(9, seed=0, reshuffle_each_iteration=False)
    data = EvaluationData(fixed)
    read = np.concatenate([labels.numpy() for _, labels in fixed])
    assert data.labels.tolist() == read.tolist()


IMAGES = np.zeros((2, 4, 4, 3), np.uint8)
BROKEN = np.ones((6, 3), np.float32)
BROKEN[2::3, 1] = np.nan


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: (IMAGES, [0, -1]), ValueError, "`pool labels` must be 0 or more"),
        (lambda: (IMAGES, [0.0, 1.0]), TypeError, "`pool labels` must be integers"),
        (lambda: (IMAGES, np.eye(2, dtype=int)), ValueError, "`pool labels` must hold"),
        (lambda: (IMAGES, [0]), ValueError, "Received: 1 labels for 2 rows"),
        (lambda: (IMAGES[:0], []), ValueError, "`pool labels` must hold one label"),
        (lambda: (np.array([None]), [0]), TypeError, "Received: x of dtype object"),
        (lambda: IMAGES, TypeError, "`pool` must be a `keras_ccp.datasets.Dataset`"),
        (lambda: (IMAGES, [0, 1], 1), TypeError, "a pair (x, y) of arrays"),
        (
            lambda: (BROKEN, np.arange(6)),
            ValueError,
            "infinity in 2 of 6 images, the first at 2",
        ),
        (
            lambda: tf.data.Dataset.from_tensor_slices((BROKEN, LABELS[:6])).batch(3),
            ValueError,
            "infinity in 1 of 3 images of a batch, the first at 2",
        ),
        (lambda: stream().repeat(), ValueError, "`pool` must be finite"),
        (
            lambda: balanced_batches(numbered(LABELS), 2, 2),
            ValueError,
            "`pool` must be finite",
        ),
        (lambda: stream().take(0), ValueError, "`pool labels` must hold one label"),
        (lambda: stream().map(lambda x, y: x), TypeError, "pairs (x, y) of tensors"),
        (lambda: stream().map(lambda x, y: (x, y, y)), TypeError, "pairs (x, y)"),
        (lambda: stream(LABELS - 1), ValueError, "`pool labels` must be 0 or more"),
        (
            lambda: stream(batch=1).shuffle(28, seed=0),
            ValueError,
            "`pool` must give its images in the same order each time",
        ),
    ],
)
def test_evaluation_data_refuses(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        EvaluationData(make(), "pool")


# embed


class Mean(keras.layers.Layer):
    """Mean of each channel; 1000 when it is told to train."""

    def call(self, images, training=None):
        if training:
            return keras.ops.mean(images, (1, 2)) + 1000
        return keras.ops.mean(images, (1, 2))


@pytest.fixture
def mean_model():
    images = keras.Input((2, 2, 3), dtype="uint8")
    pixels = keras.layers.Rescaling(1.0)(images)
    return keras.Model(images, Mean()(pixels))


UNLABELLED = {
    "array": lambda: numbered(LABELS).images,
    "batches": lambda: EvaluationData(stream()).batches(),
    "evaluation data": lambda: EvaluationData(stream()),
    "encoded": lambda: [
        tf.io.encode_png(image).numpy() for image in numbered(LABELS, 5).images
    ],
}


@pytest.mark.parametrize("source", SOURCES | UNLABELLED)
def test_embed(source, mean_model, capsys):
    data = (SOURCES | UNLABELLED)[source]()
    embeddings = embed(mean_model, data, progress=True)
    assert embeddings.dtype == np.float32
    np.testing.assert_array_equal(
        embeddings, np.repeat(np.arange(28), 3).reshape(28, 3)
    )
    out, err = capsys.readouterr()
    assert not out and "step" in err


def test_embed_names_what_is_broken(mean_model, tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path in paths:
        path.write_bytes(tf.io.encode_png(np.zeros((9, 9, 3), np.uint8)).numpy())
    assert embed(mean_model, paths).shape == (3, 3)
    paths[1].write_bytes(paths[1].read_bytes()[:40])
    with pytest.raises(ValueError, match=re.escape(f"fail: {paths[1]}")):
        embed(mean_model, paths)
    paths[1].unlink()
    with pytest.raises(tf.errors.NotFoundError, match=re.escape(str(paths[1]))):
        embed(mean_model, paths)


# ==== Labels, from the images to the metrics ====

TYPES = [(t, 0) for t in ("uint8", "int16", "uint16", "uint32", "int64", "uint64")]
TYPES += [("int64", 2**24), ("int32", 2**31 - 300), ("int64", 2**40), ("uint64", 2**63)]


@pytest.mark.parametrize(("dtype", "first"), TYPES)
def test_labels_mean_the_same_in_every_type(dtype, first):
    """256 of them, all that uint8 has, and neighbours where float32 has none."""
    rng, expected = np.random.default_rng(0), np.arange(512) // 2
    images = rng.integers(0, 200, (256, 2, 2, 3))[expected]
    images = (images + rng.integers(0, 56, (512, 2, 2, 3))).astype(np.uint8)
    labels = expected.astype(dtype) + np.array(first, dtype)
    dataset = Dataset(images, labels)
    assert dataset.labels.tolist() == expected.tolist()
    assert dataset.class_names[-1] == str(first + 255)
    pixels = keras.Input((2, 2, 3), dtype="uint8")
    head = keras.layers.Dense(12, use_bias=False, kernel_initializer="identity")
    outputs = head(keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(pixels)))
    model = CCPModel(keras.Model(pixels, outputs), 256, 0, normalization=None)
    metrics = model.evaluate(images, expected)
    assert 0.5 < metrics["map_at_r"] < 1 and metrics["num_queries"] == 512
    assert model.evaluate(dataset) == metrics
    vectors = model.embed(images)
    loss = losses.get("triplet")(expected, vectors)
    assert losses.get("triplet")(labels, vectors) == loss
    (batch,) = balanced_batches(dataset, 256, 2, seed=0).take(1)
    assert sorted(batch[1].numpy()) == expected.tolist()
    if first + 255 < 2**31:
        rows = next(balanced_indices(labels, 4, 2, 0))
        assert rows.tolist() == next(balanced_indices(expected, 4, 2, 0)).tolist()
        assert model.evaluate(images, labels) == metrics
        model.compile(keras.optimizers.SGD(0.0), "triplet")
        given = [model.train_on_batch(images, y) for y in (expected, labels)]
        assert given[0] == given[1]
    else:
        with pytest.raises(ValueError, match="fit int32"):
            model.evaluate(images, labels)
