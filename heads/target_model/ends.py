"""The ends of a target: embedding, final norm and lm_head, without the layers between them. Training needs only these if
hidden states come from disk or from an engine (train/hidden_states).

All other modules have shapes and no numbers (the device `meta`), so that the model describes itself as usual, and are not
read from files: only shards of the checkpoint that contain the ends are opened, or downloaded from the Hub.
"""

import copy
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from foredraft.heads.target_model.files import INDEX, WEIGHTS
from foredraft.heads.target_model.gguf import suppress_logging
from foredraft.heads.target_model.loading import first_line, load_model, model_class, read_config

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target

HINT_FULL_TARGET = "hidden_states.load_full_target=true loads all of it"


def load_ends(
    path: str,
    dtype: str | torch.dtype,
    device: str | torch.device,
    revision: str | None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a model as heads.target_model.loading.load_model does, with numbers only for the ends. Raises ValueError if they
    cannot be separated from the rest, or one of their files is missing."""
    config = read_config(path, revision, trust_remote_code)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            copy_end_weights(path, revision, Path(scratch))
            without_layers(config).save_pretrained(scratch)
            with suppress_logging():  # of a list of everything that is omitted
                ends = load_model(scratch, dtype, device, None, None, trust_remote_code=False, device_map=device)
        except Exception as error:  # each kind of model that needs layers fails in another way
            message = (
                f"the ends of {path} cannot be loaded without its layers ({first_line(error)}): {HINT_FULL_TARGET}"
            )
            raise ValueError(message) from error
    with torch.device("meta"):
        settings = {"dtype": ends.dtype, "attn_implementation": ends.config._attn_implementation}
        model = model_class(config).from_config(config, **settings)
    for name, module in end_modules(ends):
        model.set_submodule(name, module)
    model.generation_config = ends.generation_config
    return model


def copy_end_weights(path: str, revision: str | None, folder: Path) -> None:
    """Link the files of the checkpoint at `path` that contain the ends into `folder`, and write an index of them."""

    def find(name: str) -> Path | None:
        if Path(path).is_dir():
            return Path(path, name).absolute() if Path(path, name).is_file() else None
        try:
            return Path(hf_hub_download(path, name, revision=revision))
        except EntryNotFoundError:
            return None

    index = None if Path(path, WEIGHTS).is_file() else find(INDEX)  # of an earlier checkpoint
    names = {WEIGHTS}
    if index is not None:
        contents = json.loads(index.read_text())
        parts = {name: part for name, part in contents["weight_map"].items() if not in_layer(name)}
        (folder / INDEX).write_text(json.dumps(contents | {"weight_map": parts}))
        names = set(parts.values())
    for name in names:
        if (file := find(name)) is None:
            raise ValueError(f"{name} is missing there")
        (folder / name).symlink_to(file)
    if (settings := find("generation_config.json")) is not None:  # for its eos tokens
        (folder / settings.name).symlink_to(settings)


def in_layer(name: str) -> bool:
    """Return whether this is a weight of one of many equal layers, or of a module for images or sounds."""
    return re.search(r"\.\d+\.|vision|visual|audio", name) is not None


def without_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy a config for a model with the same ends and without layers."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)  # of the layers; ends are not quantized
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        count = getattr(part, "num_hidden_layers", None)
        for name, value in vars(part).items():
            if isinstance(value, list) and len(value) == count:  # one value for each layer, such as layer_types
                setattr(part, name, [])
        if count is not None:
            part.num_hidden_layers = 0
    return config


def end_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with weights of a model without layers, by name."""
    for name, module in model.named_modules():
        if not in_layer(f"{name}.") and list(module.parameters(recurse=False)):
            yield name, module


def drop_layers(target: "Target") -> None:
    """Free all weights but those of the ends of a target that was fully loaded. It cannot write text any more."""
    for name, module in target.model.named_modules():
        if in_layer(f"{name}."):
            vars(module).pop("packed", None)  # the weight of a PackedLinear, which is not a parameter
            # compressed-tensors puts others in their place, which copy what is assigned.
            module._parameters, module._buffers = dict(module._parameters), dict(module._buffers)
            module._apply(lambda tensor: tensor.to("meta"), recurse=False)
    target.embeddings_only = True


def refuse(*args: Any) -> Any:
    """Raise ValueError in the place of a forward."""
    raise ValueError(f"only the ends of the target are loaded, and this needs its layers: {HINT_FULL_TARGET}")
