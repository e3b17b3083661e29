"""HTML pages from jinja2 templates: of the run's report, the data card and the preview.

A page has no script and loads nothing (its own content policy forbids it), so it can be mailed, archived and opened years
later.
"""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from foredraft.inference.evaluation.plots import COLORS, DEPTHS


@cache
def environment(package: str) -> Environment:
    """The templates of `package`, which may extend those of this one. What they are given is escaped."""
    loader = ChoiceLoader([PackageLoader(package), PackageLoader("foredraft.inference.evaluation")])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters["verbatim"] = verbatim
    found.globals |= {"colors": COLORS, "last_depth": len(DEPTHS)}
    return found


def verbatim(text: str) -> Markup:
    """`text`, unchanged when it is read back: a parser would turn a raw carriage return into a newline."""
    return Markup(str(escape(text)).replace("\r", "&#13;"))


def write_page(path: Path, template: str, package: str = "foredraft.inference.evaluation", **values: Any) -> None:
    # A byte-level token can end inside a character: what cannot be encoded is replaced, no reason to lose the page.
    page = environment(package).get_template(template).render(values)
    path.write_text(page, encoding="utf-8", errors="replace", newline="\n")
