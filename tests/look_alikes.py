"""Small archives in the file formats of the published ones.

`sizes` maps a class id, as the archive counts it, to its number of images; `image`
makes the bytes of image i of a class, and None writes the lists without any image.
"""

import functools
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

Sizes = dict[int, int]
MakeImage = Callable[[int, int], bytes] | None


@functools.cache
def _plain_jpeg(red: int, green: int) -> bytes:
    return tf.io.encode_jpeg(np.full((10, 12, 3), (red, green, 9), np.uint8)).numpy()


def jpeg(class_id: int, i: int) -> bytes:
    """A JPEG of 12 x 10 pixels, in a colour that tells the class and little else."""
    return _plain_jpeg(class_id * 37 % 256, class_id // 256 * 5 % 256)


def one_bit_png(pixels: np.ndarray) -> bytes:
    """A PNG with one bit for each pixel of a (height, width) array of 0 and 1."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    height, width = pixels.shape
    rows = np.packbits(pixels.astype(bool), axis=1)
    data = b"".join(b"\0" + row.tobytes() for row in rows)  # filter 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def _write(path: Path, contents: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)


def _write_lines(path: Path, lines: list[str]) -> None:
    _write(path, "".join(f"{line}\n" for line in lines).encode())


def write_cub(root: Path, sizes: Sizes, image: MakeImage = jpeg) -> Path:
    """Classes 1-100 train, so a look-alike also needs some above."""
    folder = Path(root) / "CUB_200_2011"
    names = {c: f"{c:03d}.Bird_{c}" for c in sizes}
    images = [
        (c, i, f"{names[c]}/Bird_{i:04d}_{c}.jpg")
        for c in sizes
        for i in range(sizes[c])
    ]
    for c, i, path in images if image else ():
        _write(folder / "images" / path, image(c, i))
    numbered = list(enumerate(images, 1))
    lists = {
        "images": [f"{k} {path}" for k, (_, _, path) in numbered],
        "image_class_labels": [f"{k} {c}" for k, (c, _, _) in numbered],
        "classes": [f"{c} {name}" for c, name in names.items()],
        "bounding_boxes": [f"{k} 1.0 1.0 8.0 8.0" for k, _ in numbered],
        "train_test_split": [f"{k} {k % 2}" for k, _ in numbered],
    }
    for name, lines in lists.items():
        _write_lines(folder / f"{name}.txt", lines)
    return folder


CARS_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def matlab_structs(fields: dict[str, list]) -> np.ndarray:
    """A (1, n) struct array as MATLAB keeps it: numbers in the smallest type, [[n]]."""
    count = len(next(iter(fields.values())))
    structs = np.zeros((1, count), [(name, object) for name in fields])
    for name, values in fields.items():
        for k, value in enumerate(values):
            if isinstance(value, int):
                value = np.array([[value]], np.uint8 if value < 256 else np.uint16)
            structs[name][0, k] = value
    return structs


def matlab_names(count: int) -> np.ndarray:
    names = np.empty((1, count), object)
    names[0] = [f"Maker Model {c} Coupé 2012" for c in range(1, count + 1)]
    return names


def _save_mat(path: Path, **contents: np.ndarray) -> None:
    import scipy.io

    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, contents)


def write_cars_a(root: Path, sizes: Sizes, image: MakeImage = jpeg) -> Path:
    """Classes 1-98 train, 99-196 test. Needs SciPy."""
    root = Path(root)
    classes = [c for c in sizes for _ in range(sizes[c])]
    paths = [f"car_ims/{k:06d}.jpg" for k in range(1, len(classes) + 1)]
    for k, (c, path) in enumerate(zip(classes, paths, strict=True)) if image else ():
        _write(root / path, image(c, k))
    boxes = CARS_BOX if image else ()  # most of the time it takes to write
    fields = {"relative_im_path": paths, **dict.fromkeys(boxes, [300] * len(paths))}
    fields |= {"class": classes, "test": [k % 2 for k in range(len(paths))]}
    _save_mat(
        root / "cars_annos.mat",
        annotations=matlab_structs(fields),
        class_names=matlab_names(196),
    )
    return root


def write_cars_b(
    root: Path, sizes: Sizes, image: MakeImage = jpeg, labels_in: str = "devkit"
) -> Path:
    """As form A; every other image lies in `cars_test`, under a name used twice."""
    root = Path(root)
    classes = [c for c in sizes for _ in range(sizes[c])]
    for part, own in (("train", classes[::2]), ("test", classes[1::2])):
        names = [f"{k:05d}.jpg" for k in range(1, len(own) + 1)]
        for k, (c, name) in enumerate(zip(own, names, strict=True)) if image else ():
            _write(root / f"cars_{part}" / name, image(c, k))
        fields = dict.fromkeys(CARS_BOX, [300] * len(own))
        labelled = matlab_structs({**fields, "class": own, "fname": names})
        if part == "train":
            _save_mat(root / "devkit" / "cars_train_annos.mat", annotations=labelled)
        else:
            unlabelled = matlab_structs({**fields, "fname": names})
            _save_mat(root / "devkit" / "cars_test_annos.mat", annotations=unlabelled)
            folder = root if labels_in == "root" else root / labels_in
            path = folder / "cars_test_annos_withlabels.mat"
            _save_mat(path, annotations=labelled)
    _save_mat(root / "devkit" / "cars_meta.mat", class_names=matlab_names(196))
    return root


def write_sop(root: Path, train: Sizes, test: Sizes, image: MakeImage = jpeg) -> Path:
    folder = Path(root) / "Stanford_Online_Products"
    image_id = 0
    for part, sizes in (("train", train), ("test", test)):
        lines = ["image_id class_id super_class_id path"]
        for c, count in sizes.items():
            kind = ("bicycle", "cabinet", "chair")[c % 3]
            for i in range(count):
                image_id += 1
                path = f"{kind}_final/{110000000000 + c}_{i}.JPG"
                lines.append(f"{image_id} {c} {c % 3 + 1} {path}")
                if image:
                    _write(folder / path, image(c, i))
        _write_lines(folder / f"Ebay_{part}.txt", lines)
    return folder


def write_in_shop(
    root: Path, train: Sizes, query: Sizes, gallery: Sizes, image: MakeImage = jpeg
) -> Path:
    root = Path(root)
    lines = []
    number = dict.fromkeys([*train, *query, *gallery], 0)
    for part, sizes in (("train", train), ("query", query), ("gallery", gallery)):
        for c, count in sizes.items():
            for _ in range(count):
                number[c] += 1
                kind = ("WOMEN/Dresses", "MEN/Denim")[c % 2]
                path = f"img/{kind}/id_{c:08d}/{number[c]:02d}_1_front.jpg"
                lines.append(f"{path:<72}{f'id_{c:08d}':<14}{part}")
                if image:
                    _write(root / path, image(c, number[c]))
    header = [str(len(lines)), "image_name item_id evaluation_status"]
    _write_lines(root / "Eval" / "list_eval_partition.txt", header + lines)
    return root


def write_omniglot(
    root: Path, folders: dict[str, dict[str, int]], drawers: int = 20
) -> Path:
    """`folders` maps a folder to its alphabets, and these to numbers of characters."""
    ink = np.ones((105, 105), np.uint8)
    ink[40:60, 50:55] = 0
    drawing = one_bit_png(ink)
    for folder, alphabets in folders.items():
        for alphabet, count in alphabets.items():
            for c in range(1, count + 1):
                path = Path(root, folder, alphabet, f"character{c:02d}")
                for d in range(1, drawers + 1):
                    _write(path / f"{c:04d}_{d:02d}.png", drawing)
    return Path(root)


def write_class_folders(root: Path, sizes: dict[str, int]) -> Path:
    for c, (name, count) in enumerate(sizes.items()):
        os.makedirs(Path(root, name))
        for i in range(count):
            _write(Path(root, name, f"{i}.jpg"), jpeg(c, i))
    return Path(root)
