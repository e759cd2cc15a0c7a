"""Training and evaluation batches of image files and of encoded bytes."""

import io
import math
import os

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

from keras_ccp import CCPModel
from keras_ccp.datasets import Dataset, verify
from keras_ccp.images import random_box
from keras_ccp.pipeline import (
    EvaluationData,
    balanced_batches,
    balanced_indices,
    conventional_augmentation,
    decode_center_crop,
    mlrc_augmentation,
)

LABELS = np.repeat([0, 1, 2], [4, 3, 5])
BROKEN = 7


def flat_image(value, kind="PNG", height=20, width=30):
    """An image of one grey level, which no crop or resize changes."""
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (value,) * 3).save(buffer, kind)
    return buffer.getvalue()


def detailed_jpeg(seed, height=45, width=60):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def numbered_bytes():
    """Image i holds the number 10 i only; JPEG and PNG of several sizes."""
    return [
        flat_image(10 * i, ("PNG", "JPEG")[i % 2], 20 + i, 30 - 2 * i)
        for i in range(len(LABELS))
    ]


def as_dataset(images, form, folder):
    if form == "paths":
        paths = [folder / f"ïmage {i}.img" for i in range(len(images))]
        for path, content in zip(paths, images, strict=True):
            path.write_bytes(content)
        images = [str(path) for path in paths]
    return Dataset(images, LABELS).with_size(16)


def rows_of(images):
    assert (images.numpy() == images.numpy()[:, :1, :1, :1]).all()
    return (images.numpy()[:, 0, 0, 0] // 10).tolist()


FORMS = ["paths", "bytes"]


# ==== balanced_batches ====


@pytest.mark.parametrize(
    ("form", "augment"), [("paths", mlrc_augmentation(16, 16)), ("bytes", None)]
)
def test_batches_match_the_indices(form, augment, tmp_path):
    dataset = as_dataset(numbered_bytes(), form, tmp_path)
    batches = balanced_batches(dataset, 2, 3, seed=5, augment=augment)
    assert batches.element_spec == (
        tf.TensorSpec((6, 16, 16, 3), tf.uint8),
        tf.TensorSpec((6,), tf.int32),
    )
    assert batches.cardinality() == tf.data.INFINITE_CARDINALITY
    expected = balanced_indices(LABELS, 2, 3, 5)
    for images, labels in batches.take(9):
        rows = next(expected)
        assert rows_of(images) == rows.tolist()
        assert labels.numpy().tolist() == LABELS[rows].tolist()


def test_the_same_seed_gives_the_same_batches():
    augment = conventional_augmentation(24, 32)
    dataset = Dataset([detailed_jpeg(i) for i in range(len(LABELS))], LABELS)

    def first(seed):
        batches = balanced_batches(dataset, 2, 3, seed=seed, augment=augment)
        return np.stack([images for images, _ in batches.take(3)])

    assert (first(3) == first(3)).all()
    assert (first(3) != first(4)).any()


def test_every_visit_of_an_image_has_its_own_seed():
    dataset = Dataset([flat_image(i) for i in range(12)], LABELS)

    def seed_as_image(encoded, seed):
        return tf.reshape(seed, (1, 1, 2))

    batches = balanced_batches(dataset, 2, 2, seed=7, augment=seed_as_image)
    seen = np.concatenate([images[:, 0, 0] for images, _ in batches.take(3)])
    assert seen.tolist() == [[7, visit] for visit in range(12)]


def test_an_augmentation_may_branch_in_python():
    # What is ours is traced as it is; a user's `if` and `while` are still converted.
    dataset = Dataset([flat_image(i) for i in range(12)], LABELS)

    def bright_if_odd(encoded, seed):
        image = tf.ensure_shape(tf.io.decode_image(encoded)[:1, :1, :1], (1, 1, 1))
        if seed[1] % 2 == 1:
            image = tf.fill((1, 1, 1), tf.constant(255, tf.uint8))
        while image[0, 0, 0] < 200:
            image += 100
        return image

    batches = balanced_batches(dataset, 2, 2, seed=7, augment=bright_if_odd)
    seen = np.concatenate([images[:, 0, 0, 0] for images, _ in batches.take(3)])
    assert (seen[1::2] == 255).all()
    assert ((seen[::2] >= 200) & (seen[::2] < 255)).all()


def test_first_batch_goes_on_where_another_stopped(tmp_path):
    dataset = as_dataset(numbered_bytes(), "paths", tmp_path)

    def seed_in_image(encoded, seed):
        image = tf.cast(tf.io.decode_image(encoded)[:1, :1, :1], tf.int64)
        return tf.concat([tf.ensure_shape(image, (1, 1, 1)), seed[None, None]], -1)

    arguments = {"seed": 3, "augment": seed_in_image}
    batches = balanced_batches(dataset, 2, 3, **arguments)
    later = balanced_batches(dataset, 2, 3, **arguments, first_batch=4)
    assert later.element_spec == batches.element_spec
    for got, wanted in zip(later, batches.skip(4).take(5), strict=False):
        for tensor, other in zip(got, wanted, strict=True):
            assert np.array_equal(tensor, other)


def test_batches_left_out_are_not_read(tmp_path):
    labels = np.arange(12)
    dataset = as_dataset(numbered_bytes(), "paths", tmp_path)
    dataset = Dataset(dataset.images, labels).with_size(16)
    rows = balanced_indices(labels, 4, 1, 0)
    for row in next(rows):  # four of twelve, which come again after two more batches
        os.remove(dataset.images[row])
    batches = balanced_batches(dataset, 4, 1, seed=0, first_batch=1)
    for images, _ in batches.take(2):
        assert rows_of(images) == next(rows).tolist()


def test_without_augment_images_are_those_of_evaluation():
    images = [detailed_jpeg(i) for i in range(len(LABELS))]
    dataset = Dataset(images, LABELS).with_size(16)
    ((batch, _),) = balanced_batches(dataset, 2, 3, seed=0).take(1)
    rows = next(balanced_indices(LABELS, 2, 3, 0))
    for image, row in zip(batch, rows, strict=True):
        expected = decode_center_crop(images[row], 16, dataset.short_side)
        assert (image.numpy() == expected.numpy()).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("augment", [None, mlrc_augmentation(16)])
def test_a_broken_image_says_how_to_find_it(kind, augment):
    images = [flat_image(i, kind) for i in range(12)]
    images[BROKEN] = images[BROKEN][:-100] if kind == "JPEG" else images[BROKEN][:50]
    batches = balanced_batches(Dataset(images, LABELS), 3, 5, seed=0, augment=augment)
    message = "keras_ccp.datasets.verify" if kind == "JPEG" else "BrokenImage"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(batches.take(2))
    with pytest.raises(ValueError, match=f"fail: image {BROKEN}"):
        verify(Dataset(images, LABELS))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_fit_and_evaluate_say_what_to_do_about_a_broken_image(kind):
    images = [flat_image(i, kind) for i in range(12)]
    images[BROKEN] = images[BROKEN][:50]
    dataset = Dataset(images, LABELS).with_size(8)
    pixels = keras.Input((8, 8, 3), dtype="uint8")
    outputs = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(pixels))
    model = CCPModel(keras.Model(pixels, outputs), 3, 1)
    model.compile("sgd", "contrastive")
    batches = balanced_batches(dataset, 3, 5, seed=0)
    with pytest.raises(ValueError, match="\nReplace the file; keras_ccp.datasets.veri"):
        model.fit(batches, steps_per_epoch=2, verbose=0)
    model.fit(balanced_batches(dataset.select_classes([0, 1]), 2, 2), steps_per_epoch=1)
    for use in (model.evaluate, model.embed):
        with pytest.raises(ValueError, match=r"verify|fail: image \d+ \("):
            use(dataset)


def test_a_missing_file_is_named(tmp_path):
    dataset = as_dataset(numbered_bytes(), "paths", tmp_path)
    os.remove(dataset.images[BROKEN])
    # TensorFlow escapes what is not ASCII.
    with pytest.raises(tf.errors.NotFoundError, match=rf"mage {BROKEN}\.img;"):
        list(balanced_batches(dataset, 3, 5, seed=0).take(2))


# ==== Augmentation ====


def draw_boxes(height, width, min_area, n):
    noise = np.random.default_rng(0).random((n, 22), np.float32)

    @tf.function
    def draw():
        return tf.map_fn(
            lambda row: random_box(row, tf.constant([height, width]), min_area),
            noise,
            fn_output_signature=tf.int32,
        )

    boxes = draw().numpy()
    top, left, box_height, box_width = boxes.T
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] >= 1).all()
    assert (top + box_height <= height).all() and (left + box_width <= width).all()
    return boxes.T


def oracle_boxes(height, width, min_area, n):
    """Sides by the rules of torchvision 0.20's RandomResizedCrop, one by one."""
    rng = np.random.default_rng(1)
    for _ in range(n):
        for _ in range(10):
            area = height * width * rng.uniform(min_area, 1)
            ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        yield h, w


@pytest.mark.parametrize(
    ("height", "width", "min_area"), [(400, 500, 0.16), (900, 500, 0.08)]
)
def test_boxes_have_the_distribution_of_the_protocol(height, width, min_area):
    n = 2000
    top, left, h, w = draw_boxes(height, width, min_area, n)
    area, ratio = h * w / (height * width), w / h
    # Sides are rounded to whole pixels.
    assert min_area * 0.98 < area.min() < min_area * 1.1 and area.max() <= 1
    assert 0.74 < ratio.min() < 0.78 and 1.29 < ratio.max() < 1.35
    oracle = np.array(list(oracle_boxes(height, width, min_area, n)))
    oracle_area = oracle.prod(1) / (height * width)
    oracle_ratio = oracle[:, 1] / oracle[:, 0]
    for found, expected in ((area, oracle_area), (np.log(ratio), np.log(oracle_ratio))):
        # Kolmogorov-Smirnov: 1.95 sqrt(2 / n) is passed with a chance of 0.001.
        grid = np.sort(np.concatenate([found, expected]))
        cdfs = [
            np.searchsorted(np.sort(v), grid, "right") / n for v in (found, expected)
        ]
        assert np.abs(cdfs[0] - cdfs[1]).max() < 1.95 * math.sqrt(2 / n)
    for start, side, whole in ((top, h, height), (left, w, width)):
        place = start[side < whole - 20] / (whole - side[side < whole - 20])
        # Uniform on 0..1: mean 1/2, give or take 4 / sqrt(12 n).
        assert abs(place.mean() - 0.5) < 4 / math.sqrt(12 * len(place))
        assert place.min() < 0.02 and place.max() > 0.98


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        # No box of 16 % of the area fits: height 10 needs 160 / 10 > 4/3 * 10 pixels.
        (10, 1000, [0, (1000 - 13) // 2, 10, 13]),
        (1000, 10, [(1000 - 13) // 2, 0, 13, 10]),
        (1, 1, [0, 0, 1, 1]),
    ],
)
def test_the_box_of_a_long_image_is_central(height, width, expected):
    boxes = draw_boxes(height, width, 0.16, n=8)
    assert boxes.T.tolist() == [expected] * 8


def test_augmented_image_is_the_box_resized_and_mirrored():
    # A ramp from left to right and from top to bottom shows its own box.
    rows, columns = np.meshgrid(range(90), range(120), indexing="ij")
    ramp = np.stack([2 * columns, 2 * rows, 0 * rows], -1).astype(np.uint8)
    encoded = tf.io.encode_png(ramp)
    augment = tf.function(mlrc_augmentation(32))
    mirrored = 0
    for i in range(40):
        image = augment(encoded, tf.constant([0, i])).numpy().astype(int)
        assert image.shape == (32, 32, 3)
        across, down = image[..., 0], image[..., 1]
        mirrored += across[0, 0] > across[0, -1]
        assert np.ptp(down, axis=1).max() == 0 and np.ptp(across, axis=0).max() == 0
        # From the middle of the first output pixel to that of the last: 31/32 of it.
        width = abs(across[0, -1] - across[0, 0]) / 2 / (31 / 32)
        height = (down[-1, 0] - down[0, 0]) / 2 / (31 / 32)
        assert 0.14 < width * height / (90 * 120) <= 1.02
        assert 0.7 < width / height < 1.4
    # Binomial(40, 1/2): outside 8..32 with a chance of 1e-4; the seeds are fixed.
    assert 8 <= mirrored <= 32


def test_images_smaller_than_the_result_are_enlarged():
    augment = mlrc_augmentation(64)
    for shape in ((5, 40), (3, 3), (1, 1), (40, 9)):
        image = augment(flat_image(50, "JPEG", *shape), [0, 0])
        assert image.shape == (64, 64, 3)
        assert (image.numpy() == 50).all()


# ==== EvaluationData ====


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_data(form, tmp_path):
    data = EvaluationData(as_dataset(numbered_bytes(), form, tmp_path), "pool")
    assert len(data) == 12
    assert data.labels.tolist() == LABELS.tolist()
    assert data.image_shape == (16, 16, 3)
    everything = data.batches(batch_size=5)
    assert everything.element_spec == tf.TensorSpec((None, 16, 16, 3), tf.uint8)
    assert everything.cardinality() == 3
    for _ in range(2):
        parts = [rows_of(images) for images in everything]
        assert parts == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    parts = [rows_of(images) for images in data.batches([9, 3, 3, 11], batch_size=3)]
    assert parts == [[9, 3, 3], [11]]


def test_only_the_rows_asked_for_are_read(tmp_path):
    dataset = as_dataset(numbered_bytes(), "paths", tmp_path)
    for path in dataset.images[3:]:
        os.remove(path)
    (images,) = EvaluationData(dataset).batches([2, 0])
    assert rows_of(images) == [2, 0]
