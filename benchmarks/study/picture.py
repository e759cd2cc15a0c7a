"""Draws what `keras-ccp compare` has found, and prints it as a Markdown table.

Takes `<dataset>[_<loss>]_<classes>x<images>.json` beside this file, each the
`compare.json` of one comparison of a loss alone, with proxies that stay, and with CCP;
without the name of a loss it is the contrastive one.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

KINDS = {"": "pairs", "+proxies": "proxies that stay", "_ccp": "CCP"}
DATASETS = {
    "grocery": "groceries, fine-tuned",
    "omniglot": "Omniglot, from scratch",
    "emoji": "emoji, from scratch",
}
HERE = pathlib.Path(__file__).parent


def load() -> dict[tuple[str, str, int], dict]:
    """Comparisons by dataset, loss and number of images in a batch."""
    found = {}
    for path in HERE.glob("*x*.json"):
        name, _, size = path.stem.rpartition("_")
        dataset, _, loss = name.partition("_")
        classes, images = map(int, size.split("x"))
        key = dataset, loss or "contrastive", classes * images
        found[key] = json.loads(path.read_text())
    order = list(DATASETS)
    return dict(sorted(found.items(), key=lambda i: (order.index(i[0][0]), i[0][1:])))


def scores(comparison: dict, loss: str) -> dict[str, dict]:
    """MAP@R by kind of method, of those that were compared."""
    methods = {method["name"]: method for method in comparison["methods"]}
    return {
        kind: methods[loss + suffix]["map_at_r"]
        for suffix, kind in KINDS.items()
        if loss + suffix in methods
    }


def gain(comparison: dict, loss: str) -> dict:
    """CCP less pairs."""
    (found,) = (d for d in comparison["differences"] if d["first"] == f"{loss}_ccp")
    return found


def draw(found: dict[tuple[str, str, int], dict], out: pathlib.Path) -> None:
    """The gain of each cell, with its interval over models and over classes."""
    figure, axis = plt.subplots(
        figsize=(8, 1 + 0.32 * len(found)), layout="constrained"
    )
    colors = dict(zip(DATASETS, ("tab:green", "tab:blue", "tab:orange"), strict=True))
    names = []
    for y, ((dataset, loss, size), comparison) in enumerate(found.items()):
        difference = gain(comparison, loss)
        for name, width, alpha in (("models", 1.5, 1), ("classes", 7, 0.3)):
            bounds = [100 * bound for bound in difference[name]]
            axis.plot(bounds, [y, y], color=colors[dataset], lw=width, alpha=alpha)
        axis.plot(100 * difference["mean"], y, "o", color=colors[dataset])
        names.append(f"{DATASETS[dataset]}: {loss.replace('_', ' ')}, {size} images")
    axis.axvline(0, color="grey", lw=1)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel(
        "MAP@R of CCP less that of pairs of the same batch, points\n"
        "(line: 95 % interval over models; band: over test classes)"
    )
    figure.savefig(out, dpi=110)


def print_table(found: dict[tuple[str, str, int], dict]) -> None:
    kinds = " | ".join(KINDS.values())
    print(f"| data | loss | batch | no training | {kinds} | CCP less pairs | models |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (dataset, loss, size), comparison in found.items():
        values = scores(comparison, loss)
        cells = [
            "{:.1f} ± {:.1f}".format(
                *(100 * values[kind][key] for key in ("mean", "interval"))
            )
            if kind in values
            else "–"
            for kind in KINDS.values()
        ]
        difference = gain(comparison, loss)
        cells.append(
            "{:+.1f} ({:+.1f} to {:+.1f}; {:+.1f} to {:+.1f})".format(
                *(
                    100 * value
                    for value in (
                        difference["mean"],
                        *difference["models"],
                        *difference["classes"],
                    )
                )
            )
        )
        untrained = f"{100 * comparison['untrained']['map_at_r']:.1f}"
        row = [DATASETS[dataset], loss.replace("_", " "), str(size), untrained, *cells]
        print(f"| {' | '.join(row)} | {comparison['num_models']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default="gain.png")
    options = parser.parse_args()
    found = load()
    print_table(found)
    draw(found, options.out)


if __name__ == "__main__":
    main()
