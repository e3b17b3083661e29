"""A head in the layout of another engine, as scripts/export.py chooses and writes it."""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

from foredraft.heads import Target
from foredraft.heads.base import DraftHead
from foredraft.heads.checkpoint import write_head
from foredraft.heads.formats.engines import Export
from foredraft.train.cli import CONF


def export_of(name: str, head: DraftHead, target: Target) -> Export:
    """By conf/publish/format/<name>.yaml."""
    return instantiate(OmegaConf.load(CONF / "publish" / "format" / f"{name}.yaml"))(head, target)


def write_export(name: str, head: DraftHead, target: Target, directory: Path) -> Export:
    export = export_of(name, head, target)
    write_head(head, directory, target, export.layout, export.layout.weight_files)
    return export
