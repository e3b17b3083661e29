"""HTML pages from jinja2 templates.

A page has no scripts and loads nothing (its content policy forbids it), so it can be mailed, archived and opened years
later.
"""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from foredraft.inference.evaluation.plots import COLORS, DEPTHS


@cache
def environment() -> Environment:
    """Return the environment of the templates. Values are escaped."""
    loader = PackageLoader("foredraft.inference.evaluation")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters["verbatim"] = verbatim
    found.globals |= {"colors": COLORS, "last_depth": len(DEPTHS)}
    return found


def verbatim(text: str) -> Markup:
    """Escape `text` so that it is read back unchanged: a parser would turn a raw carriage return into a newline."""
    return Markup(str(escape(text)).replace("\r", "&#13;"))


def write_page(path: Path, template: str, **values: Any) -> None:
    # A byte-level token can end within a character. Characters that cannot be encoded are replaced.
    page = environment().get_template(template).render(values)
    path.write_text(page, encoding="utf-8", errors="replace", newline="\n")
