"""The doctor finds what was planted, and nothing in what is sound."""

import io
import os
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import rich.console

from keras_ccp.app.config import check_config
from keras_ccp.app.doctor import Finding, diagnose, diagnosis, findings_text, has_errors
from keras_ccp.app.doctor.copies import (
    copy_findings,
    difference_hash,
    near_duplicates,
)
from keras_ccp.app.doctor.estimate import Speed, memory_bytes, time_note
from keras_ccp.app.doctor.images import Part
from keras_ccp.app.doctor.labels import label_findings
from keras_ccp.app.fold import make_model
from keras_ccp.app.images import find_images
from keras_ccp.app.splits import Splits, load_splits
from keras_ccp.datasets import Dataset, image_folder, list_images

NUM_CLASSES, NUM_IMAGES = 24, 4


def config(**sections):
    """Twelve training classes, of which each of two models trains on six."""
    values = {
        "method": "C2-CCP",
        "data": {
            "name": "folder",
            "folds": 2,
            "size": 16,
            "augmentation": "mlrc",
            "split_seed": None,  # the first twelve train
        },
        "embedder": {"backbone": "small_cnn", "embedding_dim": 4},
        "loss": {"name": "contrastive"},
        "model": {"proxies_per_class": 2},
        "callback": {"pool_size": 4, "max_projections": 0},
        "training": {"batch_size": 6, "samples_per_class": 2},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section}
    return check_config(values)


def pixels(seed, height=64, width=72):
    """A smooth picture, each seed another."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    picture = PIL.Image.fromarray(coarse).resize((width, height), PIL.Image.BICUBIC)
    return np.asarray(picture)


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(array).save(path, **options)


def file(root, label, number):
    return root / f"thing{label:02d}" / f"{number}.png"


@pytest.fixture(autouse=True)
def _fresh_keras_state():
    """In place of that of all tests, after which the graph that decodes is made again.

    That takes a second, and nothing here depends on a state or a seed.
    """


@pytest.fixture
def no_estimate(monkeypatch):
    """Without the training steps; the splits that they would be taken on."""
    seen = []
    monkeypatch.setattr(
        diagnosis, "estimate", lambda _, splits, __: seen.append(splits) or []
    )
    return seen


@pytest.fixture
def root(tmp_path):
    """24 classes of four images, of which the first twelve train."""
    for label in range(NUM_CLASSES):
        for number in range(NUM_IMAGES):
            save(file(tmp_path, label, number), pixels(100 * label + number))
    return tmp_path


def write_npz(root, labels):
    images = np.stack([pixels(seed) for seed in range(len(labels))])
    np.savez(root / "data.npz", images=images, labels=labels)
    return config(data={"name": "npz", "file": "data.npz", "augmentation": "small"})


def write_table(root, rename=lambda label: label):
    lines = [
        f"thing{label:02d}/{number}.png," + rename(f"thing{label:02d}")
        for label in range(NUM_CLASSES)
        for number in range(NUM_IMAGES)
    ]
    (root / "list.csv").write_text("\n".join(["path,label", *lines]))
    return config(data={"name": "table", "file": "list.csv"})


# ==== Faults: each is planted, and gives the configuration to look at ====

FAULTS = []


def fault(severity, check, fix, *where):
    """Says what is to be found: severity, check, part of the fix, and places."""

    def register(plant):
        case = pytest.param(plant, severity, check, fix, where, id=plant.__name__)
        FAULTS.append(case)
        return plant

    return register


@fault("error", "unreadable", "`data.unreadable: skip`", "thing02/1.png: ")
def truncated(root):
    path = file(root, 2, 1)
    path.write_bytes(path.read_bytes()[:200])


@fault("error", "unreadable", "replace them", "thing08/0.png: ")
def no_image(root):
    file(root, 8, 0).write_text("<html>404</html>")


@fault("error", "data", "thing03/3.png")
def missing_file(root):
    chosen = write_table(root)
    file(root, 3, 3).unlink()
    return chosen


@fault("error", "data", "Leave images without a class out")
def negative_label(root):
    labels = np.repeat(np.arange(12), 4)
    labels[5] = -1
    return write_npz(root, labels)


@fault("error", "data", "Leave images without a class out")
def nan_label(root):
    labels = np.repeat(np.arange(12.0), 4)
    labels[[5, 7]] = np.nan
    return write_npz(root, labels)


@fault("warning", "missing labels", "leave these images out", "'NaN': 4 images")
def nan_in_table(root):
    return write_table(root, lambda label: label.replace("thing07", "NaN"))


@fault("warning", "label gaps", "add the images", "label 7")
def label_gap(root):
    labels = np.repeat(np.arange(25), 4)
    return write_npz(root, labels[labels != 7])


@fault("error", "too few classes", "must be at most 12")
def large_batch(root):
    return config(training={"batch_size": 16})


@fault("warning", "class sizes", "`training.samples_per_class` to 2", "'thing01': 2 im")
def small_class(root):
    for number in (2, 3):
        file(root, 1, number).unlink()
    sections = {"batch_size": 12, "samples_per_class": 4}
    return config(training=sections, callback={"pool_size": 2})


@fault(
    "warning",
    "class sizes",
    "or lower `model.proxies_per_class` to 4",
    *(f"'thing{label:02d}': 4 images" for label in range(12)),
)
def many_proxies(root):
    return config(model={"proxies_per_class": 6}, callback={"pool_size": 12})


@fault("warning", "singletons", "add images to these classes", "'thing04': 1 image")
def training_singleton(root):
    for number in (1, 2, 3):
        file(root, 4, number).unlink()


@fault("warning", "singletons", "add images to these test classes", "'thing19'")
def query_singleton(root):
    for number in (1, 2, 3):
        file(root, 19, number).unlink()


@fault(
    "warning",
    "exact duplicates",
    "remove them from one side",
    "thing00/0.png (training)\n= thing20/copy.bmp (test)",
)
def exact_copy(root):
    # The same pixels in another file format.
    save(root / "thing20" / "copy.bmp", pixels(0))


@fault(
    "warning",
    "near duplicates",
    "remove copies from one side",
    "thing02/1.png (training)\n= thing21/copy.jpg (test)",
)
def near_copy(root):
    half = PIL.Image.fromarray(pixels(201)).resize((36, 32), PIL.Image.BILINEAR)
    half.save(root / "thing21" / "copy.jpg", quality=60)


@fault(
    "warning",
    "two labels",
    "keep the image under its right label",
    "thing01/0.png (training)\n= thing05/9.png (training)\n= thing08/9.png (training)",
)
def other_label(root):
    save(file(root, 5, 9), pixels(100))
    save(file(root, 8, 9), pixels(100))


@fault(
    "warning",
    "copies",
    "keep one of each",
    "\n= ".join(f"thing03/{number}.png (training)" for number in (1, 10, 11, 12)),
)
def copies_in_training(root):
    for number in range(10, 13):
        save(file(root, 3, number), pixels(301))


@fault(
    "warning",
    "copies",
    "keep one of each",
    "thing15/2.png (test)\n= thing15/copy.bmp (test)",
)
def copies_in_test(root):
    save(root / "thing15" / "copy.bmp", pixels(1502))


@fault("warning", "tiny images", "leave them out", "thing07/9.png: 3 x 40 pixels")
def tiny(root):
    # A quarter of the 16 pixels of the configuration is 4.
    save(file(root, 7, 8), pixels(9100, height=4, width=40))
    save(file(root, 7, 9), pixels(9101, height=40, width=3))


@fault("warning", "uniform images", "leave them out", "thing16/9.png")
def uniform(root):
    grey = np.full((30, 40, 3), 128, np.uint8)
    grey[:15] += 4  # noise of a codec
    save(file(root, 16, 9), grey)
    grey[:15] += 1  # one more is something to see
    save(file(root, 16, 8), grey)


@fault("warning", "few classes", "smaller `data.train_classes`", "4 in the test")
def few_test_classes(root):
    return config(data={"train_classes": 20})


@fault("warning", "few classes", "fewer `data.folds`", "4 where a model validates")
def few_validation_classes(root):
    return config(data={"folds": 3})


@fault(
    "warning",
    "class overlap",
    "give one class one name",
    "'thing 11' trains, 'thing_11' tests",
)
def class_overlap(root):
    # By its name the one is the first of all classes, the other the last.
    (root / "thing11").rename(root / "thing_11")
    for number in range(NUM_IMAGES):
        save(root / "thing 11" / f"{number}.png", pixels(5000 + number))


@fault("error", "weights", "put it there", "weights.pth")
def missing_weights(root):
    return config(embedder={"backbone": "bn_inception", "weights": "weights.pth"})


@pytest.mark.parametrize(("plant", "severity", "check", "fix", "where"), FAULTS)
def test_fault_is_found_alone_and_its_fix_named(
    plant, severity, check, fix, where, root, no_estimate
):
    findings = diagnose(plant(root) or config(), root, progress=False)
    (finding,) = [finding for finding in findings if finding.severity != "note"]
    assert (finding.severity, finding.check) == (severity, check)
    assert fix in finding.fix and len(finding.where) == len(where)
    for place, beginning in zip(finding.where, where, strict=True):
        assert place.startswith(beginning)


# ==== Sound data, and what is only noted ====


def test_nothing_is_found_in_sound_data(root):
    findings = diagnose(config(), root, progress=False)
    assert [(f.severity, f.check) for f in findings] == [
        ("note", "time"),
        ("note", "memory"),
    ]
    assert not has_errors(findings)


def test_a_step_that_fails_is_an_error(root):
    # Of arrays, though these images are encoded.
    chosen = config(data={"augmentation": "small"})
    (finding,) = diagnose(chosen, root, progress=False)
    assert (finding.severity, finding.check) == ("error", "first step")
    assert "take `mlrc_augmentation()`" in finding.fix


def test_unusual_formats_are_noted(root, no_estimate):
    rgb = PIL.Image.fromarray(pixels(9000))
    rgb.convert("CMYK").save(root / "thing00" / "cmyk.jpg")
    deep = PIL.Image.fromarray(pixels(9001)[..., 0].astype(np.uint16) * 257)
    deep.save(root / "thing01" / "deep.png")
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # orientation: a quarter turn
    PIL.Image.fromarray(pixels(9002)).save(root / "thing07" / "turned.jpg", exif=exif)
    findings = diagnose(config(), root, progress=False)
    assert [finding for finding in findings if finding.severity != "note"] == []
    assert {f.what.split(" images")[0]: f.where for f in findings} == {
        "CMYK": ("thing00/cmyk.jpg",),
        "16-bit": ("thing01/deep.png",),
        "EXIF orientation": ("thing07/turned.jpg",),
    }


def test_files_that_are_not_read_are_noted(root, no_estimate, monkeypatch):
    seen = ["list.csv", "thing00/a.tif", "thing00/b.TIF", "thing01/c.heic"]
    seen += ["thing02/deep/d.png"]
    for name in (*seen, ".hidden/e.tif", "thing03/.f.tif", "thing03/Thumbs.db"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"")
    monkeypatch.chdir(root.parent)
    for given in (root, root.name, f"./{root.name}/"):
        (note,) = diagnose(config(), given, progress=False)
        assert (note.severity, note.check) == ("note", "other files")
        assert note.what.endswith(": 2 .tif, 1 .csv, 1 .heic, 1 .png")
        assert list(note.where) == seen


def test_one_folder_is_listed_equally_everywhere(root, caplog, no_estimate):
    """By image_folder, doctor, index and search, with all that a real folder holds."""
    store = root.rename(root.parent / f"{root.name} store")
    root.mkdir()
    for folder in sorted(store.iterdir()):  # every other class folder is a link
        place = root / folder.name
        if int(folder.name[-2:]) % 2:
            place.symlink_to(folder)
        else:
            folder.rename(place)
    odd = ["thing00/@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg", "thing02/.1.jpg"]
    odd += ["thing04/a.heic", "thing04/b.avif", "thing04/c.tiff", "empty/notes.txt"]
    for name in odd:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(file(root, 0, 0).read_bytes())
    (root / "thing06" / "loop").symlink_to("..")
    (root / "thing06" / "self.png").symlink_to("self.png")
    os.mkfifo(root / "thing06" / "pipe.png")

    listing = list_images(root)
    expected = [str(file(root, i, j)) for i in range(24) for j in range(4)]
    assert listing.images == expected
    assert image_folder(root).images.tolist() == expected
    trained = [record.getMessage() for record in caplog.records]
    caplog.clear()
    assert list(map(str, find_images([root]))) == expected  # index, search, embed
    indexed = [record.getMessage() for record in caplog.records]
    assert trained == indexed == [f"{root}: {note}" for note in listing.notes(root)]
    assert len(indexed) == 8 and ".heic images, which cannot be read" in indexed[2]
    findings = diagnose(config(), root, progress=False)
    (splits,) = no_estimate
    seen = [path for part in vars(splits).values() if part for path in part.images]
    assert sorted(seen) == expected
    (note,) = [finding for finding in findings if finding.check == "other files"]
    assert list(note.where) == [
        *("empty/notes.txt", "thing04/a.heic", "thing04/b.avif", "thing04/c.tiff"),
        *("thing06/pipe.png", "thing06/self.png"),
    ]


def test_groups_of_the_same_image_are_whole_and_counted(root, no_estimate):
    # In two training classes and twice in a test class, beside one of another image.
    for label, number in ((4, 8), (18, 8), (18, 9)):
        save(file(root, label, number), pixels(200))
    save(file(root, 6, 9), pixels(701))
    findings = diagnose(config(), root, progress=False)
    warnings = {f.check: f for f in findings if f.severity == "warning"}
    assert list(warnings) == ["two labels", "exact duplicates", "copies"]
    training = ("thing02/0.png (training)", "thing04/8.png (training)")
    test = ("thing18/8.png (test)", "thing18/9.png (test)")
    assert warnings["two labels"].where == (
        "\n= ".join(training),
        "thing06/9.png (training)\n= thing07/1.png (training)",
    )
    assert "4 images in 2 group(s)" in warnings["two labels"].what
    assert warnings["exact duplicates"].where == ("\n= ".join((*training, *test)),)
    assert "4 images in 1 group(s)" in warnings["exact duplicates"].what
    assert warnings["copies"].where == ("\n= ".join(test),)


def test_copies_in_test_are_those_a_query_finds():
    images = np.stack([pixels(seed) for seed in (0, 1, 2, 2, 3, 3, 4)])

    def part(name, rows, labels):
        return Part(name, Dataset(images[rows], labels), Path())

    training = part("training", [0, 1], ["a", "b"])
    # Image 2 is twice among the queries alone, 3 in query and gallery of one class.
    query = part("query", [2, 3, 4], ["c", "c", "d"])
    gallery = part("gallery", [5, 6], ["d", "c"])
    (finding,) = copy_findings([training, query, gallery])
    assert finding.where == (
        "image 0 (from 0) of class 'd' (test)\n= image 0 (from 0) of class 'd' (test)",
    )
    (finding,) = copy_findings([training, query])
    assert finding.where == (
        "image 0 (from 0) of class 'c' (test)\n= image 1 (from 0) of class 'c' (test)",
    )


def test_unreadable_images_that_the_run_skips(root, no_estimate):
    truncated(root)
    chosen = config(data={"unreadable": "skip"})
    (finding, note) = diagnose(chosen, root, progress=False)
    assert (finding.severity, finding.check) == ("warning", "unreadable")
    # What is left of the class is fewer than the pool draws.
    assert note.where == ("'thing02': 3 images",)
    (splits,) = no_estimate
    assert len(splits.training) == 12 * 4 - 1 and splits.training.size == 16
    for number in range(NUM_IMAGES):
        file(root, 2, number).write_bytes(b"")
    findings = diagnose(chosen, root, progress=False)
    errors = [finding for finding in findings if finding.severity == "error"]
    assert [error.where for error in errors] == [("'thing02'",)]


def test_queries_without_an_image_in_the_gallery():
    images = np.zeros((4, 8, 8, 3), np.uint8)
    query = Dataset(images, ["a", "a", "b", "c"])
    chosen = config()

    def singletons(gallery):
        findings = label_findings(chosen, Splits(query, query, gallery))
        (finding,) = [f for f in findings if "test images" in f.what]
        return finding

    finding = singletons(Dataset(images[:2], ["b", "c"]))
    assert finding.severity == "warning" and finding.where == ("'a'",)
    assert finding.what.startswith("2 of 4 test images")
    assert singletons(Dataset(images[:1], ["d"])).severity == "error"


# ==== Near duplicates ====


def test_difference_hash_by_hand():
    thumbnails = np.random.default_rng(0).integers(0, 256, (3, 8, 9, 3), np.uint8)
    for thumbnail, found in zip(thumbnails, difference_hash(thumbnails), strict=True):
        luma = (thumbnail * (0.299, 0.587, 0.114)).sum(-1)
        bits = [luma[i, j + 1] > luma[i, j] for i in range(8) for j in range(8)]
        assert found == int.from_bytes(np.packbits(bits).tobytes(), "little")


def test_near_duplicates_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    others = rng.integers(0, 240, (90, 8, 9, 3), np.uint8)
    sources = rng.integers(0, 90, 130)
    noise = rng.integers(0, 21, (130, 8, 9, 3), np.uint8)
    thumbnails = (
        others[sources] + noise * (np.arange(130) % 3 == 0)[:, None, None, None]
    )
    thumbnails[::2] = rng.integers(0, 256, (65, 8, 9, 3), np.uint8)
    expected = []
    for row, thumbnail in enumerate(thumbnails):
        for other in others:
            bits = difference_hash(np.stack([thumbnail, other]))
            is_near = bin(int(bits[0]) ^ int(bits[1])).count("1") <= 6
            if is_near and np.abs(thumbnail.astype(int) - other).max() <= 20:
                expected.append((row, int(sources[row])))
    found = near_duplicates(thumbnails, others)
    assert found.tolist() == [list(pair) for pair in expected]
    assert 40 < len(expected) < 65  # noise takes some of them too far
    assert near_duplicates(thumbnails[:0], others).shape == (0, 2)


def test_what_a_near_duplicate_is():
    images = [pixels(seed, 96, 108) for seed in range(20)]
    originals = Part("training", Dataset(np.stack(images), range(20)), Path())

    def facts(change):
        encoded = []
        for image in images:
            buffer = io.BytesIO()
            change(PIL.Image.fromarray(image)).save(buffer, "JPEG", quality=50)
            encoded.append(buffer.getvalue())
        return Part("training", Dataset(encoded, range(20)), Path())

    for change in (
        lambda image: image,
        lambda image: image.resize((54, 48), PIL.Image.BILINEAR),
        lambda image: image.point(lambda value: value * 0.95),
    ):
        pairs = near_duplicates(facts(change).thumbnails, originals.thumbnails)
        assert pairs.tolist() == [[i, i] for i in range(20)]
    mirrored = facts(lambda image: image.transpose(PIL.Image.FLIP_LEFT_RIGHT))
    assert not len(near_duplicates(mirrored.thumbnails, originals.thumbnails))


@pytest.mark.parametrize("scale, offset", [(1 / 255, 0), (2 / 255, -1), (1, 0)])
def test_float_images_are_as_the_same_in_bytes(scale, offset):
    images = np.stack([pixels(seed) for seed in range(5)])
    images[0, 0, :2] = [[0] * 3, [255] * 3]  # so that the range is known
    images[4] = 128
    expected = Part("training", Dataset(images, range(5)), Path())
    floats = Dataset((images * scale + offset).astype(np.float32), range(5))
    found = Part("training", floats, Path())
    difference = found.thumbnails.astype(int) - expected.thumbnails
    assert np.abs(difference).max() <= 1 and len(set(found.digests)) == 5
    for part in (expected, found):
        assert part.is_uniform.tolist() == [False] * 4 + [True]
        assert part.sizes.tolist() == [[64, 72]] * 5


# ==== Estimates ====


def test_time_by_hand(root):
    # 2 models on 6 classes of 4, that validate on 24 images; a test of 48 images.
    steps = {"steps_per_evaluation": 10, "max_evaluations": 100}
    callback = {"stop_patience": 19, "max_projections": None, "patience": 5}
    chosen = config(training=steps, callback={**callback, "pool_size": 3})
    splits = load_splits(chosen.data, root)
    note = time_note(chosen, splits, Speed(step=2.0, image=0.1, pair=0.001))
    # At least 20 evaluations: 2 * 20 * (10 * 2 + 24 * .1 + 576 * .001) = 919.04; one
    # pool of 2 * 6 * 3 images: 3.6; test: 2 * 48 * .1 + 4 * 2304 * .001 = 18.816.
    # At most 100: 4595.2; 21 pools: 75.6; test as before. 941.456 s and 4689.616 s.
    assert note.what.startswith("about 16 min to 78 min on this machine, for 2 model")
    assert (
        "20 to 100 evaluations" in note.what
        and "2000 ms a step, 10 images" in note.what
    )


def test_memory_by_hand(root):
    chosen = config()
    splits = load_splits(chosen.data, root)
    model = make_model(chosen, splits.training, root)
    sizes = memory_bytes(chosen, splits, model)
    weights = sum(np.prod(weight.shape) for weight in model.embedder.get_weights())
    assert sizes["weights"] == 7 * 4 * weights
    # 12 classes of 2 proxies of 4 numbers, 7 times, and 24 x 6 distances twice.
    assert sizes["proxies"] == 4 * (7 * 24 * 4 + 2 * 24 * 6)
    assert sizes["embeddings"] == 4 * 4 * 2 * 48
    assert sizes["images"] == sum(
        len(path) for part in (splits.training, splits.query) for path in part.images
    )


# ==== As text ====


def test_text_of_findings():
    groups = ("a\n= b", "\n= ".join("cdefgh"))
    findings = [
        Finding("error", "unreadable", "images", "replace", tuple("abcdefg")),
        Finding("warning", "copies", "twice", "keep", groups),
        Finding("note", "time", "about [1 h]", "wait"),
    ]
    buffer = io.StringIO()
    rich.console.Console(file=buffer, width=60).print(findings_text(findings))
    expected = """\
error unreadable: images
  - a
  - b
  - c
  - d
  - e
  - ... 7 in all
  fix: replace

warning copies: twice
  - a
    = b
  - c
    = d
    = e
    = f
    = g
    ... 6 in all
  fix: keep

note time: about [1 h]
  fix: wait

errors: 1, warnings: 1, notes: 1
"""
    assert buffer.getvalue() == expected
    assert has_errors(findings) and not has_errors(findings[1:])
