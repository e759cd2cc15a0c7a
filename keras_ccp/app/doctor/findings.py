"""What the doctor finds, as data and as text."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import rich.text

_SHOWN = 5
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, or good to know.

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


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether a finding is an error.

    Args:
        findings: what was found.
    """
    return any(finding.severity == "error" for finding in findings)


def by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes, each in the order they came.

    Args:
        findings: what was found.
    """
    order = list(_COLOURS)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def findings_text(findings: Sequence[Finding]) -> rich.text.Text:
    """A paragraph a finding; of places, and of images that are the same, the first five
    and their number.

    Args:
        findings: what was found.
    """
    text = rich.text.Text()
    for finding in findings:
        text.append(finding.severity, f"bold {_COLOURS[finding.severity]}")
        text.append(f" {finding.check}: {finding.what}\n")
        for place in _cut(finding.where):
            lines = "\n    ".join(_cut(place.split("\n")))
            text.append(f"  - {lines}\n", "dim")
        text.append("  fix: ", "bold").append(f"{finding.fix}\n\n")
    counts = Counter(finding.severity for finding in findings)
    return text.append(", ".join(f"{kind}s: {counts[kind]}" for kind in _COLOURS))


def _cut(items: Sequence[str]) -> list[str]:
    more = [f"... {len(items):,} in all"] if len(items) > _SHOWN else []
    return [*items[:_SHOWN], *more]
