"""Layouts of heads on disk: one class per published layout, and their detection."""

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles, build
from foredraft.heads.formats.dflash import (
    DFlash2Format,
    DFlashFormat,
    DominoFormat,
    DSparkFormat,
    TransformersDFlash,
    XPressFormat,
)
from foredraft.heads.formats.eagle import EagleFormat
from foredraft.heads.formats.eagle3 import Eagle3Format
from foredraft.heads.formats.files import read
from foredraft.heads.formats.hydra import HydraFormat
from foredraft.heads.formats.medusa import MedusaFormat
from foredraft.heads.formats.mtp import MTPFormat
from foredraft.heads.formats.native import NativeFormat
from foredraft.heads.formats.p_eagle import PEagleFormat
from foredraft.heads.formats.speculators import (
    SpeculatorsDFlash,
    SpeculatorsDFlash2,
    SpeculatorsDSpark,
    SpeculatorsFormat,
    SpeculatorsPEagle,
    SpeculatorsXPress,
)

# The first match is used, so the more specific ones come first.
FORMATS: tuple[type[Format], ...] = (
    NativeFormat,
    MTPFormat,
    SpeculatorsDFlash,
    SpeculatorsDFlash2,
    SpeculatorsDSpark,
    SpeculatorsXPress,
    SpeculatorsPEagle,
    PEagleFormat,
    SpeculatorsFormat,
    TransformersDFlash,
    DFlashFormat,
    DFlash2Format,
    DSparkFormat,
    DominoFormat,
    XPressFormat,
    Eagle3Format,
    EagleFormat,
    MedusaFormat,
    HydraFormat,
)


def detect(files: HeadFiles) -> Format:
    """Return the layout of these files. Raises ValueError if it is not supported."""
    for layout in FORMATS:
        match = layout.match(files)
        if match is not None:
            return match
    keys = ", ".join(sorted(files.weights)[:3])
    raise ValueError(
        f"{files.directory} contains no head in a supported layout (architectures {files.config.get('architectures')}, "
        f"weights {keys} ...). Supported: {'; '.join(f.title for f in FORMATS)}"
    )


def default_format(head: DraftHead) -> Format:
    """Return the layout in which training saves this head."""
    default = next((layout for layout in FORMATS if layout.is_default and layout.kind is type(head)), None)
    return NativeFormat(type(head)) if default is None else default()


__all__ = ["FORMATS", "Format", "HeadFiles", "build", "default_format", "detect", "read"]
