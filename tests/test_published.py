"""The published rows, and the guide that shows them."""

import re
from pathlib import Path

import pytest
import yaml

from keras_ccp.app import config as config_module
from keras_ccp.app.config import load_config, published_row

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "reproducing.md"
TABLE = Path(config_module.__file__).with_name("published.yaml")
ROWS = [
    (dataset, method, values)
    for dataset, rows in yaml.safe_load(TABLE.read_text("utf-8")).items()
    for method, values in rows.items()
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
    expected = {"512D": list(joined), "128D": list(single)}
    assert published_row(dataset, method) == expected


def test_figures_are_plausible():
    # MAP@R <= P@R <= P@1, and four models together are better than each alone: a figure
    # in the wrong place would break one of them.
    assert len(ROWS) == 4 * 13
    for _, _, values in ROWS:
        for part in (values[:3], values[3:]):
            assert 100 > part[0] > part[1] > part[2] > 0
        assert all(a > b for a, b in zip(values[:3], values[3:], strict=True))


def test_no_row():
    # MS-XBM-L is not in the paper's tables.
    for dataset, method in (("emoji", "C1"), ("cub200", "MS-XBM-L"), ("cub200", "c1")):
        assert published_row(dataset, method) is None


# ==== The guide ====


def guide_rows():
    """`{names: cells}` of the tables with names in their first column."""
    rows = {}
    for line in GUIDE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if found := re.match(r"`((?:cub200|cars196|in_shop|sop) [\w ]+)`$", cells[0]):
            rows[found[1]] = cells[1:]
    return rows


def test_guide_shows_the_published_figures():
    rows = guide_rows()
    assert len(rows) == 76
    shown = set()
    for names, cells in rows.items():
        config = load_config(names.split())
        published = published_row(config.data.name, config.method)
        expected = ["–", "–"]
        if published:
            shown.add((config.data.name, config.method))
            expected = [
                " / ".join(f"{value:.2f}" for value in published[size])
                for size in ("512D", "128D")
            ]
        assert cells[:3] == [config.method, *expected], names
    assert shown == {(dataset, method) for dataset, method, _ in ROWS}


def test_guide_overrides_are_valid():
    text = GUIDE.read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(r"keras-ccp train ([a-z]\w+ \w+)([^\n`]*)", text)
    assert commands
    for names, options in commands:
        load_config(names.split(), re.findall(r"--set (\S+)", options))
    for setting in re.findall(r"`--set ([\w.]+=\S+)`", text):
        method = "proxy_nca" if "temperature" in setting else "c1_xbm"
        load_config(["cub200", method], [setting])
