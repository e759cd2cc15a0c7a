"""What the doctor finds, as data and as text."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import rich.text

_SHOWN = 5
COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, or good to know.

    ```python
    for finding in diagnose(config, root):
        print(finding.severity, finding.check, *finding.where)
    ```

    Args:
        severity: `"error"` where the run would stop or could not be scored,
            `"warning"` where it would be worse than it could be, or `"note"`.
        check: name of the check, as in the documentation.
        what: what was found.
        fix: what to do about it.
        where: files, images or classes, all of them. Images that are the same are one
            entry, each of them on a line.
    """

    severity: Literal["error", "warning", "note"]
    check: str
    what: str
    fix: str
    where: tuple[str, ...] = ()


def _found(
    severity: str, check: str, where: Sequence[str], what: str, fix: str
) -> list[Finding]:
    """A finding in these places; none where there are none."""
    return [Finding(severity, check, what, fix, tuple(where))] if where else []


error = functools.partial(_found, "error")
warning = functools.partial(_found, "warning")
note = functools.partial(_found, "note")


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether a finding is an error.

    Args:
        findings: what was found.
    """
    return any(finding.severity == "error" for finding in findings)


def findings_text(findings: Sequence[Finding]) -> rich.text.Text:
    """A paragraph a finding; of places, and of images that are the same, the first five
    and their number.

    Args:
        findings: what was found.
    """
    text = rich.text.Text()
    for finding in findings:
        text.append(finding.severity, f"bold {COLOURS[finding.severity]}")
        text.append(f" {finding.check}: {finding.what}\n")
        for place in _cut(finding.where):
            lines = "\n    ".join(_cut(place.split("\n")))
            text.append(f"  - {lines}\n", "dim")
        text.append("  fix: ", "bold").append(f"{finding.fix}\n\n")
    counts = Counter(finding.severity for finding in findings)
    return text.append(", ".join(f"{kind}s: {counts[kind]}" for kind in COLOURS))


def _cut(items: Sequence[str]) -> list[str]:
    more = [f"... {len(items):,} in all"] if len(items) > _SHOWN else []
    return [*items[:_SHOWN], *more]
