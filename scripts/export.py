"""Write a head in an engine's layout:  python scripts/export.py head=outputs/eagle3/head format=vllm output_dir=exported

`head` may be in any layout that `load_drafter` knows, so this also converts published heads.
"""

import tempfile
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from foredraft.heads import hub
from foredraft.heads.checkpoint import read_config, read_head, save_head, write_head
from foredraft.heads.formats.engines import LLAMACPP_TARGET
from foredraft.train import publish
from foredraft.train.cli import CONF, entry


@entry("export", CONF / "publish")
def main(cfg: DictConfig) -> None:
    if OmegaConf.is_missing(cfg, "head") and cfg.format._target_.endswith(".llamacpp"):
        convert = LLAMACPP_TARGET.format(target=cfg.target.path or "TARGET")
        raise ValueError(f"head=... is missing: export writes heads, and llama.cpp converts a target itself: {convert}")
    out = Path(cfg.output_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"output_dir={out} is there already: give another, or remove it")
    target = publish.open_target(cfg.target, cfg.head)
    found = hub.find(cfg.head)
    head = read_head(found, target)
    export = instantiate(cfg.format)(head, target)
    recorded = read_config(found).get("foredraft", {})
    measured = {name: recorded[name] for name in ("accuracies",) if name in recorded}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:  # what is at output_dir has passed the gate
        part = Path(scratch) / "head"
        write_head(head, part, target, export.layout, export.layout.weight_files, **measured)
        kept = export.layout.stored(head, target)
        if cfg.gate and kept is not head:
            found = Path(scratch) / "rounded"
            save_head(kept, found, target)
        if cfg.gate:
            print(publish.gate(found, target, part))
        if out.exists():
            out.rmdir()
        part.rename(out)
    print(f"{out}: {export.layout.title}")
    if export.note:
        print(export.note)
    print(f"use it: {export.command(head, target.checkpoint, str(out))}")


if __name__ == "__main__":
    main()
