"""A target's own files with its multi-token-prediction layer (`mtp.*`): read, and merged back into them.

Files without tensors of the layer are copied, because changes of an export must not reach the target's own files.
Everything else that an engine reads comes along: config.json, the tokenizer, the index.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Self

from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles
from foredraft.heads.formats.llama_layer import layer_settings
from foredraft.heads.mtp import PREFIX, MTPHead, attention_settings, has_weights, shift_norms, shipped_window
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.files import INDEX, WEIGHTS, checkpoint_file, weight_map

COPIED = (".json", ".jinja", ".model", ".txt")


class MTPFormat(Format):
    title = "the target's own files, with its MTP layer (mtp.*)"
    kind = MTPHead
    weight_files = ("mtp.safetensors",)  # not a file: the target's own get its tensors

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if f"{PREFIX}fc.weight" in files.weights else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        theirs = files.config.get("text_config") or files.config  # the target's, whose layers may be of several kinds
        settings = layer_settings(files, theirs | {"layer_types": ["full_attention"]}, target, count=1)
        heads, layer = settings["num_attention_heads"], {k.removeprefix(PREFIX): t for k, t in files.weights.items()}
        shown = attention_settings(layer, heads * (settings.get("head_dim") or settings["hidden_size"] // heads))
        record = {"depth": 3} | files.config.get("foredraft", {})
        return settings | shown | {"mtp_window": shipped_window(target), "foredraft": record}

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = {name: tensor for name, tensor in files.weights.items() if name.startswith(PREFIX)}
        return shift_norms(weights, target)

    def export_weights(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        for other in ("model.mtp_layers.", f"model.layers.{target.num_layers}."):
            if has_weights(target, other):
                sentence = f"but this writes {self.title}, which no engine would read"
                raise ValueError(f"{target.name} names its MTP layer {other}*, {sentence}")
        return shift_norms(super().export_weights(head, target), target, sign=-1)

    def write_weights(self, weights: dict[str, Tensor], path: Path, head: DraftHead, target: Target) -> None:
        """Write the target's files, with the layer in those of its weights and the record of the head in its config.json."""
        directory, source = path.parent, checkpoint_file(target, "config.json")
        assert source is not None
        merge_into_target(weights, directory, target)
        config = directory / "config.json"
        record = json.loads(config.read_text())["foredraft"]
        config.write_text(json.dumps(json.loads(source.read_text()) | {"foredraft": record}, indent=2) + "\n")
        for file in source.parent.iterdir():
            if file.suffix in COPIED and file.name not in (config.name, INDEX):
                shutil.copy(file, directory)


def merge_into_target(layer: dict[str, Tensor], directory: Path, target: Target) -> None:
    """Write the target's weights with `layer` as its MTP layer, in the file that contained one, otherwise in the last."""
    places = weight_map(target)
    place = places.get(f"{PREFIX}fc.weight") or sorted(places.values())[-1]
    for file in sorted(set(places.values())):
        stale = any(name.startswith(PREFIX) for name, other in places.items() if other == file)
        if not stale and file != place:
            shutil.copy(file, directory)
            continue
        weights = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(PREFIX)}
        weights |= layer if file == place else {}
        save_file(weights, directory / file.name, metadata={"format": "pt"})
    index = checkpoint_file(target, INDEX)
    if index is not None and place.name != WEIGHTS:
        contents = json.loads(index.read_text())
        names = {name: part for name, part in contents["weight_map"].items() if not name.startswith(PREFIX)}
        contents["weight_map"] = names | dict.fromkeys(layer, place.name)
        (directory / INDEX).write_text(json.dumps(contents, indent=2) + "\n")
