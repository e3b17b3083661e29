"""Write a head in an engine's layout:  python scripts/export.py checkpoint=DIRECTORY format=vllm output_dir=exported

`checkpoint` may be in any layout that `load_drafter` reads, so this also converts published heads.
"""

import shlex
import tempfile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from foredraft.cli import entry
from foredraft.heads import hub
from foredraft.heads.checkpoint import read_head, save_head, write_head
from foredraft.heads.formats.engines import LLAMACPP_TARGET, check_options, export_for
from foredraft.heads.formats.files import read_config
from foredraft.train import publish


@entry("export")
def main(cfg: DictConfig) -> None:
    if OmegaConf.is_missing(cfg, "checkpoint") and cfg.format == "gguf":
        convert = LLAMACPP_TARGET.format(target=shlex.quote(cfg.target.path or "TARGET"))
        raise ValueError(f"set checkpoint=...; export writes only heads. Convert the target with llama.cpp: {convert}")
    options, out = check_options(cfg.format, dtype=cfg.dtype, target_gguf=cfg.target_gguf), Path(cfg.output_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"output_dir={out} already exists and is not empty. Use another directory, or remove it.")
    target = publish.open_target(cfg.target, cfg.checkpoint)
    found = hub.find(cfg.checkpoint)
    head = read_head(found, target)
    export = export_for(cfg.format, head, target, **options)
    recorded = read_config(found).get("foredraft", {})
    measured = {name: recorded[name] for name in ("accuracies",) if name in recorded}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:  # output_dir gets only what passed the gate
        part = Path(scratch) / "head"
        write_head(head, part, target, export.layout, export.layout.weight_files, **measured)
        kept = export.layout.stored(head, target)
        if cfg.gate and kept is not head:
            found = Path(scratch) / "rounded"
            save_head(kept, found, target)
        if cfg.gate:
            publish.gate(found, target, part)
        if out.exists():
            out.rmdir()
        part.rename(out)
    print(f"{out}: {export.layout.title}")
    if export.note:
        print(export.note)
    print(f"use it: {export.command(head, target.checkpoint, str(out))}")


if __name__ == "__main__":
    main()
