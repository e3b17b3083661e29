"""Layouts of heads on disk: one class per published layout, and how one is told from another."""

from heads.base import DraftHead
from heads.formats.base import Format, HeadFiles, build
from heads.formats.eagle import EagleFormat
from heads.formats.eagle3 import Eagle3Format
from heads.formats.files import read
from heads.formats.hydra import HydraFormat
from heads.formats.medusa import MedusaFormat, VllmMedusaFormat
from heads.formats.own import NativeFormat
from heads.formats.speculators import SpeculatorsFormat

# The first that matches is taken: the more particular ones come first.
FORMATS: tuple[type[Format], ...] = (
    NativeFormat,
    SpeculatorsFormat,
    Eagle3Format,
    EagleFormat,
    VllmMedusaFormat,
    MedusaFormat,
    HydraFormat,
)


def detect(found: HeadFiles) -> Format:
    """The layout of these files; ValueError where it is none that is known here."""
    for layout in FORMATS:
        form = layout.match(found)
        if form is not None:
            return form
    keys = ", ".join(sorted(found.weights)[:3])
    raise ValueError(
        f"{found.where} holds no head in a layout that is known here (architectures {found.config.get('architectures')}, "
        f"weights {keys} ...). Known: {'; '.join(layout.title for layout in FORMATS)}"
    )


def own(head: DraftHead) -> Format:
    """The layout that training saves this head in."""
    found = next((layout for layout in FORMATS if layout.own and layout.kind is type(head)), None)
    return NativeFormat(type(head)) if found is None else found()


__all__ = ["FORMATS", "Format", "Found", "build", "own", "read", "recognise"]
