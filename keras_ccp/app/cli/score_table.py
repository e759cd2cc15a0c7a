"""The row of a run beside the published one."""

import rich.table

from keras_ccp.app.published import published_row


def score_table(metrics: dict) -> rich.table.Table:
    """Makes the table that ends a run.

    Args:
        metrics: what `experiment.train_run` returns.
    """
    table = rich.table.Table(
        title=f"{metrics['dataset']}, {metrics['method']}: unseen classes, %"
    )
    for column in ("", "P@1", "P@R", "MAP@R"):
        table.add_column(column, justify="right" if column else "left")
    published = published_row(metrics["dataset"], metrics["method"]) or {}
    for name, key, reference in (
        ("each model alone", "separated", "128D"),
        ("all side by side", "concatenated", "512D"),
    ):
        cells = [_cell(metrics[key][metric]) for metric in metrics[key]]
        table.add_row(name, *cells)
        if reference in published:
            values = [f"{value:.2f}" for value in published[reference]]
            table.add_row(f"  published, {reference}", *values, style="dim")
    return table


def _cell(score: dict) -> str:
    mean, interval = score["mean"], score["interval"]
    return f"{100 * mean:.2f}" + (
        "" if interval is None else f" ± {100 * interval:.2f}"
    )
