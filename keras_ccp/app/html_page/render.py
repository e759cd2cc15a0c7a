"""Jinja templates of this package, with everything escaped."""

from typing import Any

import jinja2


def render(template: str, **values: Any) -> bytes:
    """Fills in a template.

    Text is escaped, so that names of files and classes cannot become markup. Bytes that
    are no text, which names of files may hold, become question marks.

    Args:
        template: path below the package, such as `"report/report.html.j2"`.
        **values: for the names in the template, each of which is needed.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("keras_ccp", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(values)
    return page.encode("utf-8", "replace")
