"""Which trial is next, and what becomes of those that did not finish."""

import importlib
import logging
from typing import Any

import numpy as np

from keras_ccp.app.tuning.search_space import Parameter

logger = logging.getLogger(__name__)

# Attributes of a trial: the number of the first of its tries, if it is a later one; and
# the error by which it ended.
_RETRY = "retry_of"
_ERROR = "error"
_MAX_ERRORS = 2


def queue_trials(study: Any, space: dict[str, Parameter]) -> None:
    """Queues the own values, and again what was running when the study was ended.

    That is marked as failed. What was interrupted is tried again without limit; what
    ended in errors is not, but for the own values, by which the others are judged.

    Args:
        study: `optuna.Study` that no other process runs.
        space: the parameters of the search.
    """
    own = {key: parameter.own for key, parameter in space.items()}
    if not study.trials:
        study.enqueue_trial(own)
    for trial in states(study.trials, "RUNNING"):
        tried = tries(study, trial)
        errors = [t.user_attrs[_ERROR] for t in tried if _ERROR in t.user_attrs]
        values = _values(trial)
        if len(errors) >= _MAX_ERRORS and values != own:
            logger.warning(
                "left out after %d errors, of which the last is %s: %s",
                len(errors),
                errors[-1],
                values_text(values),
            )
        # Without all of its values it had not begun. It waits already if a kill came
        # between the two lines below.
        elif values.keys() == space.keys() and not states(tried, "WAITING"):
            study.enqueue_trial(values, user_attrs={_RETRY: first_try(trial)})
        study.tell(trial.number, state=trial_state("FAIL"))


def next_trial(study: Any, space: dict[str, Parameter], seed: int) -> Any:
    """The trial that is queued, or one with new values.

    Each is drawn by a seed of its own: a sampler that goes on after a kill would draw
    again what it drew at the start.

    Args:
        study: `optuna.Study`.
        space: the parameters of the search.
        seed: of the experiment.

    Returns:
        `optuna.Trial` that is running.
    """
    # Retries do not count: they have the values of what they try again. Nor does what
    # was killed before it had its values.
    index = sum(
        first_try(trial) == trial.number and _values(trial).keys() == space.keys()
        for trial in study.trials
    )
    (drawn,) = np.random.SeedSequence([seed, index]).generate_state(1)
    samplers = importlib.import_module("optuna.samplers")
    study.sampler = samplers.TPESampler(seed=int(drawn))
    return study.ask(_distributions(space))


def first_try(trial: Any) -> int:
    """Number of the trial that this one tries again, or its own.

    Args:
        trial: of Optuna.
    """
    return trial.user_attrs.get(_RETRY, trial.number)


def tries(study: Any, trial: Any) -> list[Any]:
    """All tries of a trial, itself among them.

    Args:
        study: `optuna.Study`.
        trial: one of its trials.
    """
    first = first_try(trial)
    return [other for other in study.trials if first_try(other) == first]


def note_error(trial: Any, error: Exception) -> None:
    """Notes that a trial ended by itself, and was not interrupted.

    Args:
        trial: `optuna.Trial` that is running.
        error: what it ended with.
    """
    trial.set_user_attr(_ERROR, f"{type(error).__name__}: {error}")


def states(trials: list[Any], *names: str) -> list[Any]:
    """The trials that have one of some states.

    Args:
        trials: of Optuna.
        *names: such as `"COMPLETE"`.
    """
    return [trial for trial in trials if trial.state.name in names]


def trial_state(name: str) -> Any:
    """Optuna's constant for a state.

    Args:
        name: such as `"PRUNED"`.
    """
    return importlib.import_module("optuna.trial").TrialState[name]


def values_text(values: dict[str, float]) -> str:
    """Values as one line for people.

    Args:
        values: by key.
    """
    return ", ".join(f"{key}={value:.4g}" for key, value in values.items())


def _values(trial: Any) -> dict[str, Any]:
    """Values of a trial, also where it was killed before it had taken them up."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def _distributions(space: dict[str, Parameter]) -> dict[str, Any]:
    kinds = importlib.import_module("optuna.distributions")
    distributions = {}
    for key, parameter in space.items():
        values = parameter.range
        kind = kinds.IntDistribution if parameter.is_int else kinds.FloatDistribution
        distributions[key] = kind(values.low, values.high, log=values.is_log)
    return distributions
