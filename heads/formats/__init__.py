"""Layouts of heads on disk: one class per published layout, and how they are distinguished."""

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles, build
from foredraft.heads.formats.dflash import (
    DFlash2Format,
    DFlashFormat,
    DominoFormat,
    DSparkFormat,
    LiLiCorrFormat,
    XPressFormat,
)
from foredraft.heads.formats.eagle import EagleFormat
from foredraft.heads.formats.eagle3 import Eagle3Format
from foredraft.heads.formats.files import read
from foredraft.heads.formats.hydra import HydraFormat
from foredraft.heads.formats.medusa import MedusaFormat
from foredraft.heads.formats.mtp import MTPFormat
from foredraft.heads.formats.native import NativeFormat
from foredraft.heads.formats.p_eagle import PEagleFormat, SpeculatorsPEagle
from foredraft.heads.formats.speculators import SpeculatorsFormat
from foredraft.heads.formats.speculators_blocks import SpeculatorsDFlash, SpeculatorsDSpark, SpeculatorsXPress

# The first that matches is taken, so the more specific ones come first.
FORMATS: tuple[type[Format], ...] = (
    NativeFormat,
    MTPFormat,
    SpeculatorsDFlash,
    SpeculatorsDSpark,
    SpeculatorsXPress,
    SpeculatorsPEagle,
    PEagleFormat,
    SpeculatorsFormat,
    DFlashFormat,
    DFlash2Format,
    DSparkFormat,
    DominoFormat,
    LiLiCorrFormat,
    XPressFormat,
    Eagle3Format,
    EagleFormat,
    MedusaFormat,
    HydraFormat,
)


def detect(files: HeadFiles) -> Format:
    """The layout of these files; ValueError where it is none that is known here."""
    for layout in FORMATS:
        match = layout.match(files)
        if match is not None:
            return match
    keys = ", ".join(sorted(files.weights)[:3])
    raise ValueError(
        f"{files.directory} holds no head in a layout that is known here (architectures "
        f"{files.config.get('architectures')}, weights {keys} ...). Known: {'; '.join(f.title for f in FORMATS)}"
    )


def default_format(head: DraftHead) -> Format:
    """The layout that training saves this head in."""
    found = next((layout for layout in FORMATS if layout.is_default and layout.kind is type(head)), None)
    return NativeFormat(type(head)) if found is None else found()


__all__ = ["FORMATS", "Format", "HeadFiles", "build", "default_format", "detect", "read"]
