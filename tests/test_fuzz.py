"""Ten thousand random mutations of arguments, configurations and files.

Each is refused, by this package or by NumPy, TensorFlow or pydantic below it, or gives
a right result: never a hang, a crash, another kind of error or NaN. Seeds are fixed: a
failure names the mutation, and comes again.
"""

import contextlib
import copy
import io
import signal
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import yaml

from keras_ccp import k_center_greedy, losses, retrieval
from keras_ccp.app.config import check_config, load_config
from keras_ccp.backbones import read_torch_weights
from keras_ccp.backup import load_latest, save_checkpoint
from keras_ccp.datasets import Dataset, npz, table
from keras_ccp.index import RetrievalIndex
from keras_ccp.pipeline import EvaluationData, decode_center_crop

SECONDS_PER_CASE = 20
REFUSALS = ValueError, TypeError, OSError, tf.errors.InvalidArgumentError
REFUSALS += (tf.errors.UnimplementedError,)  # its answer to labels that are text


class Hang(BaseException):
    """Not an `Exception`, so that nothing on the way takes it for an answer."""


@contextlib.contextmanager
def time_limit(seconds):
    def stop(signum, frame):
        raise Hang(f"{seconds} s have passed")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(target, cases, mutate, call, check):
    """Runs so many cases of a target.

    `mutate(rng)` gives the arguments of `call`, which makes the result or raises one of
    `REFUSALS`; `check(result, *arguments)` asserts that the result is right.

    Both an error and a result must have come more than a few times: otherwise it is
    something else that is tested.
    """
    refused = 0
    for case in range(cases):
        arguments = mutate(np.random.default_rng([case, *target.encode()]))
        try:
            try:
                with time_limit(SECONDS_PER_CASE):
                    result = call(*arguments)
            except REFUSALS as error:
                refused += 1
                assert str(error)
            else:
                check(result, *arguments)
        except BaseException as error:
            raise AssertionError(f"case {case} of {target}: {arguments}") from error
    share = refused / cases
    assert 0.05 < share < 0.995, f"{share:.0%} were refused"


# ==== Mutations ====


DTYPES = "? i1 u1 u8 i8 f2 f4 f8 g c8 >f4 >i8 O U S3 M8[s]".split()
DTYPES.append(ml_dtypes.bfloat16)
NUMBERS = [np.nan, np.inf, -np.inf, 1e38, -1e300, 1e-320, -1, 0, 2**31, 2**63, 0.5]
OTHERS = [None, "text", b"bytes", {}, {"a": 1}, set(), 3, 1.5, object()]
OTHERS += [[], [[]], [None]]
SHAPES = [
    lambda x, rng: x[:0],
    lambda x, rng: x[:1],
    lambda x, rng: x[:-1],
    lambda x, rng: x[..., :-1],
    lambda x, rng: x[..., :0],
    lambda x, rng: x[None],
    lambda x, rng: x[..., None],
    lambda x, rng: x.T,
    lambda x, rng: x.ravel(),
    lambda x, rng: x.ravel()[0],
    lambda x, rng: np.concatenate([x, x]),
    lambda x, rng: x[rng.integers(0, len(x), len(x))],
    lambda x, rng: x[::-1],
]
KINDS = [
    lambda x: x.tolist(),
    lambda x: tuple(x.tolist()),
    lambda x: [*x.tolist(), []],
    lambda x: iter(x.tolist()),
    lambda x: tf.constant(x),
    lambda x: tf.constant(x.astype(str)),
    lambda x: tf.RaggedTensor.from_tensor(tf.constant(x)) if x.ndim > 1 else x,
    lambda x: tf.sparse.from_dense(x),
    lambda x: np.ma.masked_array(x, x == x.ravel()[0]),
    lambda x: np.asfortranarray(x),
    lambda x: np.broadcast_to(x.ravel()[:1], x.shape),
]


def pick(options, rng):
    return options[rng.integers(len(options))]


def mutated(value, rng, numbers=NUMBERS):
    """The array after one or two changes that someone could make by mistake."""
    for _ in range(rng.integers(1, 3)):
        if not isinstance(value, np.ndarray) or not value.size:
            break
        kind = rng.integers(6)
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(Exception):
            if kind == 0:
                value = value.astype(pick(DTYPES, rng))
            elif kind == 1:
                value = np.asarray(pick(SHAPES, rng)(value, rng))
            elif kind == 2:
                value = pick(KINDS, rng)(value)
            elif kind == 3:
                value = pick(OTHERS, rng)
            else:
                value = value.copy()
                value.flat[rng.integers(value.size)] = pick(numbers, rng)
    return value


def some_mutated(arguments, rng, numbers=NUMBERS):
    """The arguments, one of them or rarely two mutated."""
    others = [*numbers, *OTHERS, True, np.int64(2), 2, -5]
    arguments = list(arguments)
    for place in rng.permutation(len(arguments))[: 1 + (rng.random() < 0.2)]:
        value = arguments[place]
        is_array = isinstance(value, np.ndarray)
        arguments[place] = (
            mutated(value, rng, numbers) if is_array else pick(others, rng)
        )
    return arguments


def mutated_bytes(content, rng):
    """The content after one to three changes."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        start = int(rng.integers(len(content) + 1))
        length = int(rng.integers(1, 9))
        kind = rng.integers(5)
        if kind == 0:
            del content[start:]
        elif kind == 1:
            del content[start : start + length]
        elif kind == 2:
            content[start:start] = content[:length]
        elif kind == 3:
            content[start : start + length] = rng.bytes(length)
        elif content:
            content[start % len(content)] ^= 1 << int(rng.integers(8))
    return bytes(content)


def fuzz_file(target, cases, path, read, check, change=mutated_bytes):
    """The same with changes of a file: `change(content, rng)`."""
    content = path.read_bytes()

    def call(changed):
        path.write_bytes(changed)
        return read()

    def mutate(rng):
        return [change(content, rng)]

    fuzz(target, cases, mutate, call, check)


def points(rng, *shape):
    return np.round(rng.standard_normal(shape), 1).astype(np.float32)


# ==== Retrieval and proxies ====


def test_search():
    def check(result, query, gallery, k, exclude_self):
        # As a user of the function would: what NumPy makes of it.
        query, gallery = (np.asarray(x).astype(np.float64) for x in (query, gallery))
        distances, indices = result
        assert not np.isnan(distances).any()
        assert indices.shape == (len(query), k)
        with np.errstate(over="ignore", invalid="ignore"):
            largest = max(abs(query).max(), abs(gallery).max())
            scale = 2.0 ** -max(0, np.frexp(largest)[1])
            difference = scale * query[:, None] - scale * gallery[None]
            squared = np.square(difference).sum(axis=2)
        if exclude_self:
            np.fill_diagonal(squared, np.inf)
        found = np.take_along_axis(squared, indices, axis=1)
        np.testing.assert_array_equal(found, np.sort(squared, axis=1)[:, :k])

    def arguments(rng):
        given = [points(rng, 6, 4), points(rng, 6, 4), 3, bool(rng.integers(2))]
        return some_mutated(given, rng)

    fuzz("search", 1000, arguments, retrieval.search, check)


def test_evaluate():
    def check(result, *arguments):
        assert 0 <= result["precision_at_1"] <= 1
        assert 0 <= result["map_at_r"] <= result["precision_at_r"] <= 1
        assert result["num_queries"] > 0

    def arguments(rng):
        given = [points(rng, 9, 4), rng.integers(0, 4, 9)]
        if rng.integers(2):
            given += [points(rng, 8, 4), rng.integers(0, 4, 8)]
        return some_mutated(given, rng)

    fuzz("evaluate", 1000, arguments, retrieval.evaluate, check)


def test_covering_radius():
    def check(result, *arguments):
        assert result >= 0  # infinite only beyond float64

    def arguments(rng):
        given = [points(rng, 9, 4), rng.integers(0, 3, 9)]
        if rng.integers(2):
            given.append(points(rng, 3, 2, 4))
        return some_mutated(given, rng)

    fuzz("covering_radius", 500, arguments, retrieval.covering_radius, check)


def test_k_center_greedy():
    def check(picks, candidates, covered, num_centers, mask):
        shape = np.shape(candidates)[:2]
        mask = np.ones(shape, bool) if mask is None else np.asarray(mask)
        assert picks.shape == (len(mask), num_centers)
        for row, real in zip(picks, mask, strict=True):
            assert (0 <= row).all() and (row < shape[1]).all()
            assert real[row].all()
            # None twice before all are used.
            assert len(set(row.tolist())) == min(num_centers, real.sum())

    # The result is as large as it is asked for.
    numbers = [number for number in NUMBERS if number not in (2**31, 2**63)]

    def arguments(rng):
        given = [points(rng, 4, 5, 3), points(rng, 4, 2, 3), int(rng.integers(1, 8))]
        return some_mutated([*given, rng.random((4, 5)) < 0.8], rng, numbers)

    fuzz("k_center_greedy", 1250, arguments, k_center_greedy, check)


# ==== Data ====


def test_dataset():
    def check(data, images, labels, names):
        assert len(data) == len(images)
        assert data.labels.dtype == np.int32
        originals = np.asarray(labels).ravel()
        for label in range(data.num_classes):
            same = originals[data.labels == label]
            assert len(same) and (same == same[0]).all()
        assert len(np.unique(data.labels)) == data.num_classes == len(data.class_names)

    def arguments(rng):
        images = rng.integers(0, 256, (6, 2, 2, 3), np.uint8)
        labels = rng.permutation([0, 0, 1, 1, 2, 2])
        return some_mutated([images, labels, np.array(["a", "b", "c"])], rng)

    fuzz("dataset", 1000, arguments, Dataset, check)


def test_evaluation_data():
    def check(data, pair):
        batches = np.concatenate(list(data.batches().as_numpy_iterator()))
        np.testing.assert_array_equal(batches, np.asarray(pair[0]))
        np.testing.assert_array_equal(data.labels, np.asarray(pair[1]).ravel())

    def arguments(rng):
        images = rng.random((6, 2, 2, 3), np.float32)
        pair = some_mutated([images, rng.integers(0, 3, 6)], rng)
        return [tuple(pair) if rng.random() < 0.95 else mutated(images, rng)]

    fuzz("evaluation_data", 250, arguments, EvaluationData, check)


def test_index():
    def call(embeddings, ids, labels, added, more_ids, queries, k):
        index = RetrievalIndex.build(embeddings, ids, labels)
        index.add(added, more_ids, None if labels is None else index.labels[:1])
        return (index, *index.search(queries, k))

    def check(result, embeddings, ids, labels, added, more_ids, queries, k):
        index, distances, found = result
        assert len(index) == len(np.asarray(embeddings)) + len(np.asarray(added))
        assert distances.shape == found.shape == (len(np.asarray(queries)), k)
        assert not np.isnan(distances).any() and (np.diff(distances) >= 0).all()
        assert set(found.ravel().tolist()) <= set(index.ids.tolist())

    def arguments(rng):
        labels = None if rng.integers(2) else rng.integers(0, 3, 5)
        given = [points(rng, 5, 4), rng.permutation(5), labels, points(rng, 1, 4)]
        return some_mutated([*given, np.array([7]), points(rng, 2, 4), 3], rng)

    fuzz("index", 700, arguments, call, check)


PAIR_LOSSES = [
    losses.ContrastiveLoss(),
    losses.CosineContrastiveLoss(),
    losses.MultiSimilarityLoss(),
    losses.TripletLoss(),
]


def test_pairs():
    def check(rows, loss, labels, *arguments):
        assert rows.shape == (len(np.ravel(labels)),)
        assert np.isfinite(rows.numpy()).all()

    def arguments(rng):
        given = [rng.integers(0, 3, 6), points(rng, 6, 4)]
        given += [rng.integers(0, 3, 5), points(rng, 5, 4)]
        # Inside a graph values cannot be looked at.
        finite = [0, -1, 0.5, 1e-30, 1e4, 100]
        return [pick(PAIR_LOSSES, rng), *some_mutated(given, rng, finite)]

    fuzz("pairs", 600, arguments, lambda loss, *given: loss.pairs(*given), check)


# ==== Configurations ====


CONFIG = {
    "method": "C2-CCP",
    "data": {"name": "emoji", "split": "ablation", "augmentation": "small"},
    "embedder": {"backbone": "small_cnn", "embedding_dim": 64},
    "loss": {"name": "contrastive", "arguments": {"negative_margin": 0.5}},
    "model": {"proxies_per_class": 4},
    "callback": {"pool_size": 12},
    "training": {"batch_size": 32, "samples_per_class": 4, "learning_rate": 1e-3},
    "distribution": {"strategy": "none"},
    "seed": 0,
}
VALUES = [
    *NUMBERS,
    *[None, "text", "", [], {}, [1], {"a": {}}, True, False, 1, 3, 10**30, b"x"],
    *["contrastive", "resnet20_v2", "mirrored", "sop", "none", {"name": "emoji"}],
]


def mutated_config(rng):
    config = copy.deepcopy(CONFIG)
    for _ in range(rng.integers(1, 3)):
        inner = [
            value for value in config.values() if isinstance(value, dict) and value
        ]
        section = pick(inner, rng) if inner and rng.random() < 0.8 else config
        key = pick(list(section), rng)
        kind = rng.integers(4)
        if kind == 0:
            del section[key]
        elif kind == 1:
            section[key[:-1]] = section.pop(key)
        elif kind == 2:
            section[key] = pick(VALUES, rng)
        else:
            section[pick(["folds", "memory", "policy", 3], rng)] = pick(VALUES, rng)
    return [config]


def test_config():
    def check(config, values):
        assert check_config(config.model_dump()) == config
        assert "nan" not in repr(config.model_dump()).lower()

    fuzz("config", 1200, mutated_config, check_config, check)


# ==== Files ====


def test_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))

    def check(config, changed):
        check_config(config.model_dump())

    fuzz_file("yaml", 500, path, lambda: load_config(path), check)


def test_checkpoint(tmp_path):
    arrays = {"a": np.arange(3.0), "b": np.array([[1]], "int8"), "text": np.array("é1")}
    path = save_checkpoint(tmp_path, 1, arrays)

    def check(result, changed):
        step, loaded = result
        assert step == 1
        for array in loaded.values():
            assert array.dtype.kind in "biufcSUV" and array.nbytes < 1000

    fuzz_file("checkpoint", 600, path, lambda: load_latest(tmp_path), check)


def test_npz(tmp_path):
    path = tmp_path / "images.npz"
    np.savez(path, images=np.zeros((4, 2, 2, 3), "uint8"), labels=[0, 0, 1, 1])
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def change(content, rng):
        # Inside of the archive, where its checksums do not see it.
        name = pick(list(members), rng)
        changed = {**members, name: mutated_bytes(members[name], rng)}
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for member, content in changed.items():
                archive.writestr(member, content)
        content = buffer.getvalue()
        return content if rng.random() < 0.8 else mutated_bytes(content, rng)

    fuzz_file("npz", 300, path, lambda: npz(path), has_a_class, change)


def has_a_class(data, changed):
    data.select_classes([0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of \\x in a name
def test_torch(tmp_path):
    path = tmp_path / "weights.pth"
    tensors = {f"layer{i}.weight": np.arange(4, dtype="<f4") for i in range(3)}
    path.write_bytes(torch_file(tensors))
    np.testing.assert_equal(dict(read_torch_weights(path)), tensors)

    def check(loaded, changed):
        for name, array in loaded.items():
            assert isinstance(name, str) and array.dtype.kind in "biuf"
            assert array.nbytes <= len(changed)

    fuzz_file("torch", 400, path, lambda: read_torch_weights(path), check)


def torch_file(tensors):
    """A file of torch.save before version 1.6, of float32 vectors."""

    def text(value):
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def integer(value):
        return b"J" + value.to_bytes(4, "little")

    head = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
    head += b"\x80\x02}(" + text("little_endian") + b"\x88u."
    state, keys, storages = b"\x80\x02}(", b"\x80\x02](", b""
    for key, (name, values) in enumerate(tensors.items()):
        state += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(("
        state += text("storage") + b"ctorch\nFloatStorage\n" + text(str(key))
        state += text("cpu") + integer(len(values)) + b"NtQ" + integer(0)
        state += integer(len(values)) + b"\x85" + integer(1) + b"\x85\x89}tR"
        keys += text(str(key))
        storages += len(values).to_bytes(8, "little") + values.tobytes()
    return head + state + b"u." + keys + b"e." + storages


def test_table(tmp_path):
    (tmp_path / "1.png").write_bytes(b"")
    path = tmp_path / "images.csv"
    rows = [f"1.png,{i % 3}\r\n" for i in range(6)]
    path.write_bytes("".join(["path,label\r\n", *rows]).encode())
    fuzz_file("table", 300, path, lambda: table(path), has_a_class)


def test_image():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    images = [tf.io.encode_jpeg(pixels), tf.io.encode_png(pixels)]
    files = [image.numpy() for image in (*images, tf.io.encode_png(pixels[:, :, :1]))]
    decode = tf.function(
        lambda encoded: decode_center_crop(encoded, 4, 4),
        input_signature=[tf.TensorSpec((), tf.string)],
    )

    def check(image, encoded):
        assert image.shape == (4, 4, 3) and image.dtype == tf.uint8

    def arguments(rng):
        return [mutated_bytes(pick(files, rng), rng)]

    fuzz("image", 300, arguments, decode, check)
