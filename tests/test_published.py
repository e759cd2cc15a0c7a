import re
from pathlib import Path

import pytest

from keras_ccp.app.config import load_config
from keras_ccp.app.published import published_row

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "reproducing.md"
DATASETS = ("cub200", "cars196", "in_shop", "sop")
LOSSES = ("C1", "C2", "MS", "Triplet")
METHODS = [
    *LOSSES,
    *(f"{loss}-CCP-L" for loss in LOSSES),
    *("C1-XBM-L", "C2-XBM-L", "ProxyAnchor", "ProxyNCA++"),
]


# Read off the tables of the paper again, apart from the package: from each dataset the
# row with the highest and that with the lowest MAP@R, and rows from the middle.
@pytest.mark.parametrize(
    ("dataset", "method", "joined", "single"),
    [
        ("cub200", "C1", (63.67, 33.77, 23.08), (56.21, 29.65, 19.06)),
        ("cub200", "C2-CCP-L", (69.73, 38.69, 28.02), (62.39, 33.49, 22.67)),
        ("cars196", "MS-CCP-L", (86.26, 38.97, 29.14), (74.97, 30.44, 19.85)),
        ("cars196", "SoftTriple-L", (84.90, 37.69, 27.80), (73.16, 29.60, 19.18)),
        ("in_shop", "Triplet-CCP-L", (89.44, 67.23, 64.28), (86.00, 62.24, 59.04)),
        ("in_shop", "C1", (80.12, 53.11, 50.15), (76.08, 49.61, 46.51)),
        ("sop", "C1-CCP-L", (79.53, 55.11, 52.73), (76.24, 50.07, 48.07)),
        ("sop", "ProxyNCA++", (76.07, 51.17, 48.20), (72.89, 47.47, 44.44)),
    ],
)
def test_rows(dataset, method, joined, single):
    assert published_row(dataset, method) == {"512D": joined, "128D": single}


def test_every_method_has_a_row_of_each_dataset():
    for dataset in DATASETS:
        size = "L" if dataset in ("cub200", "cars196") else "S"
        for method in (*METHODS, f"SoftTriple-{size}"):
            assert published_row(dataset, method), (dataset, method)


def test_figures_are_plausible():
    # MAP@R <= P@R <= P@1, and four models together are better than each alone: a figure
    # in the wrong place would break one of them.
    for dataset in DATASETS:
        for method in METHODS:
            row = published_row(dataset, method)
            for values in row.values():
                assert 100 > values[0] > values[1] > values[2] > 0
            assert all(a > b for a, b in zip(row["512D"], row["128D"], strict=True))


@pytest.mark.parametrize(
    ("dataset", "method"),
    [
        ("emoji", "C1"),
        ("cub200", "MS-XBM-L"),  # not in the paper's tables
        ("sop", "SoftTriple-L"),
        ("cub200", "c1"),
    ],
)
def test_no_row(dataset, method):
    assert published_row(dataset, method) is None


# ==== The guide ====


def guide_rows():
    """`{config: cells}` of the tables with a command in their first column."""
    rows = {}
    for line in GUIDE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if found := re.match(r"`configs/(\w+)\.yaml`$", cells[0]):
            rows[found[1]] = cells[1:]
    return rows


def test_guide_shows_the_published_figures():
    rows = guide_rows()
    for dataset in DATASETS:
        for path in sorted((ROOT / "configs").glob(f"{dataset}_*.yaml")):
            method = load_config(path).method
            published = published_row(dataset, method)
            cells = ["–", "–"]
            if published:
                cells = [
                    " / ".join(f"{value:.2f}" for value in published[size])
                    for size in ("512D", "128D")
                ]
            assert rows[path.stem][:3] == [method, *cells], path.stem


def test_guide_names_every_config_and_no_other():
    named = set(re.findall(r"configs/(\w+)\.yaml", GUIDE.read_text("utf-8")))
    assert named == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


def test_guide_overrides_are_valid():
    text = GUIDE.read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(r"keras-ccp train (configs/\S+\.yaml)([^\n`]*)", text)
    assert commands
    for path, options in commands:
        load_config(ROOT / path, re.findall(r"--set (\S+)", options))
    settings = re.findall(r"`--set ([\w.]+=\S+)`", text)
    for setting in settings:
        name = "cub200_proxy_nca" if "temperature" in setting else "cub200_c1_xbm"
        load_config(ROOT / "configs" / f"{name}.yaml", [setting])
