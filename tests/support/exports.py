"""A head in the layout of another engine, as scripts/export.py chooses and writes it."""

from pathlib import Path

from foredraft.heads import Target
from foredraft.heads.base import DraftHead
from foredraft.heads.checkpoint import write_head
from foredraft.heads.formats.engines import Export, export_for


def write_export(name: str, head: DraftHead, target: Target, directory: Path) -> Export:
    export = export_for(name, head, target)
    write_head(head, directory, target, export.layout, export.layout.weight_files)
    return export
