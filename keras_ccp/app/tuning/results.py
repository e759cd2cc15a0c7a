"""What is left of a study: the best configuration, all trials and the picture."""

import csv
import io
from pathlib import Path
from typing import Any

from keras_ccp.app.config import Config, dump_config
from keras_ccp.app.search.results import write_file
from keras_ccp.app.tuning.search_space import (
    PER_CLASS,
    PROXIMAL_WEIGHT,
    Parameter,
    with_values,
)
from keras_ccp.monitor.figures import search_figure

BEST_FILE = "best.yaml"
TABLE_FILE = "trials.csv"
PICTURE_FILE = "lambda_proxies.png"


def has_picture(space: dict[str, Parameter]) -> bool:
    """Whether lambda and the number of proxies are both searched.

    Args:
        space: the parameters of the search.
    """
    return PROXIMAL_WEIGHT in space and PER_CLASS in space


def reached(trial: Any) -> float:
    """MAP@R of a trial: its result, or of one that was cut short its best evaluation.

    Args:
        trial: `optuna.trial.FrozenTrial` that has one of them.
    """
    return max([*trial.intermediate_values.values(), *(trial.values or ())])


def write_results(
    study: Any, config: Config, space: dict[str, Parameter], out: Path
) -> None:
    """Writes the files of a study over those of before.

    Args:
        study: `optuna.Study` with a trial that is complete.
        config: the experiment.
        space: the parameters of the search.
        out: folder of the study.
    """
    best = study.best_trial
    comment = (
        f"# Trial {best.number} of a study with {len(study.trials)}: MAP@R "
        f"{best.value:.4f} on the validation classes of fold 0.\n"
    )
    text = comment + dump_config(with_values(config, best.params))
    write_file(out / BEST_FILE, text.encode("utf-8"))
    write_file(out / TABLE_FILE, _table(study, space).encode("utf-8"))
    if has_picture(space):
        write_file(out / PICTURE_FILE, _picture(study, space))


def _table(study: Any, space: dict[str, Parameter]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "map_at_r", "evaluations", "seconds", *space])
    for trial in study.trials:
        evaluations = len(trial.intermediate_values)
        has_value = evaluations or trial.values
        duration = trial.duration
        writer.writerow(
            [
                trial.number,
                trial.state.name.lower(),
                f"{reached(trial):.6f}" if has_value else "",
                evaluations,
                "" if duration is None else round(duration.total_seconds(), 1),
                *(trial.params.get(key, "") for key in space),
            ]
        )
    return text.getvalue()


def _picture(study: Any, space: dict[str, Parameter]) -> bytes:
    drawn = [t for t in study.trials if t.state.name in ("COMPLETE", "PRUNED")]
    figure = search_figure(
        [trial.params[PROXIMAL_WEIGHT] for trial in drawn],
        [trial.params[PER_CLASS] for trial in drawn],
        [reached(trial) for trial in drawn],
        is_pruned=[trial.state.name == "PRUNED" for trial in drawn],
        own=(space[PROXIMAL_WEIGHT].own, space[PER_CLASS].own),
    )
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()
