"""Draws MAP@R against the size of a batch, from what `keras-ccp compare` has written.

Takes `<dataset>_<classes>x<images>.json` beside this file, each the `compare.json` of
one comparison, and prints them as a Markdown table as well.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {
    "contrastive": "pairs",
    "contrastive+proxies": "proxies that stay",
    "contrastive_ccp": "CCP",
}
HERE = pathlib.Path(__file__).parent


def load() -> dict[str, dict[int, dict]]:
    """Comparisons by dataset and number of images in a batch."""
    found = {}
    for path in sorted(HERE.glob("*_*x*.json")):
        dataset, _, size = path.stem.rpartition("_")
        classes, images = map(int, size.split("x"))
        comparison = json.loads(path.read_text())
        found.setdefault(dataset, {})[classes * images] = comparison
    return found


def draw(found: dict[str, dict[int, dict]], out: pathlib.Path) -> None:
    figure, axes = plt.subplots(
        1, len(found), figsize=(4 * len(found), 3.6), squeeze=False, layout="tight"
    )
    for axis, (dataset, by_size) in zip(axes[0], found.items(), strict=True):
        for shift, (name, label) in zip((0.97, 1, 1.03), LABELS.items(), strict=True):
            points = [
                (size * shift, method["map_at_r"])
                for size, comparison in sorted(by_size.items())
                for method in comparison["methods"]
                if method["name"] == name
            ]
            axis.errorbar(
                [x for x, _ in points],
                [100 * y["mean"] for _, y in points],
                [100 * y["interval"] for _, y in points],
                marker="o",
                capsize=3,
                label=label,
            )
        untrained = next(iter(by_size.values()))["untrained"]["map_at_r"]
        axis.axhline(100 * untrained, color="grey", linestyle=":", label="no training")
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(by_size), [str(size) for size in sorted(by_size)])
        axis.set_xlim(6, 42)
        axis.minorticks_off()
        axis.set(title=dataset, xlabel="images in a batch", ylabel="MAP@R, %")
    axes[0][0].legend(frameon=False)
    figure.savefig(out, dpi=110)


def print_table(found: dict[str, dict[int, dict]]) -> None:
    print(f"| data | batch | no training | {' | '.join(LABELS.values())} | models |")
    print("|---|---|---|---|---|---|---|")
    for dataset, by_size in found.items():
        for size, comparison in sorted(by_size.items()):
            scores = {m["name"]: m["map_at_r"] for m in comparison["methods"]}
            cells = " | ".join(
                "{:.1f} ± {:.1f}".format(
                    100 * scores[name]["mean"], 100 * scores[name]["interval"]
                )
                for name in LABELS
            )
            untrained = 100 * comparison["untrained"]["map_at_r"]
            count = comparison["num_models"]
            print(f"| {dataset} | {size} | {untrained:.1f} | {cells} | {count} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default="batch_size.png")
    options = parser.parse_args()
    found = load()
    print_table(found)
    draw(found, options.out)


if __name__ == "__main__":
    main()
