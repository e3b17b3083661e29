"""The ends of a target: embedding, final norm and lm_head, without the layers between them. They are all that training takes
of it where its hidden states come from a disk or an engine (train/hidden_states).

Everything else of the model has shapes and no numbers (the device `meta`), so that it says of itself what it always does, and
is read from no file: of the checkpoint's shards only those with the ends are opened, or fetched from the Hub.
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
from transformers.utils import logging

from foredraft.heads.target.files import INDEX, WEIGHTS
from foredraft.heads.target.loading import first_line, load_model, model_class, read_config

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target

WHOLE = "hidden_states.load_full_target=true loads all of it"


def load_ends(
    path: str,
    dtype: str | torch.dtype,
    device: str | torch.device,
    revision: str | None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """As heads.target.loading.load_model, with numbers for the ends alone. Raises ValueError where they cannot be told from
    the rest, or a file of theirs is missing."""
    config = read_config(path, revision, trust_remote_code)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            gather(path, revision, Path(scratch))
            without_layers(config).save_pretrained(scratch)
            before = logging.get_verbosity()
            logging.set_verbosity_error()  # it would list all that is left out
            try:
                ends = load_model(scratch, dtype, device, None, None, trust_remote_code=False, device_map=device)
            finally:
                logging.set_verbosity(before)
        except Exception as error:  # a kind of model that cannot be without layers fails in a way of its own
            raise ValueError(f"the ends of {path} cannot be loaded alone ({first_line(error)}): {WHOLE}") from error
    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=ends.dtype)
    for name, module in end_modules(ends):
        model.set_submodule(name, module)
    model.generation_config = ends.generation_config
    return model


def gather(path: str, revision: str | None, folder: Path) -> None:
    """Put into `folder` links to those files of the checkpoint at `path` that hold the ends, and an index of them."""

    def find(name: str) -> Path | None:
        if Path(path).is_dir():
            return Path(path, name).absolute() if Path(path, name).is_file() else None
        try:
            return Path(hf_hub_download(path, name, revision=revision))
        except EntryNotFoundError:
            return None

    index = find(INDEX)
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
    if (settings := find("generation_config.json")) is not None:  # its eos tokens
        (folder / settings.name).symlink_to(settings)


def in_layer(name: str) -> bool:
    """Is this a weight of one of many equal layers, whatever a model calls them, or of a part for images or sounds?"""
    return re.search(r"\.\d+\.|vision|visual|audio", name) is not None


def without_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy for a model of the same ends."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)  # of the layers; ends are stored as they are
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        count = getattr(part, "num_hidden_layers", None)
        for name, value in vars(part).items():
            if isinstance(value, list) and len(value) == count:  # a word for each layer, such as layer_types
                setattr(part, name, [])
        if count is not None:
            part.num_hidden_layers = 0
    return config


def end_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules with weights of a model without layers, by name."""
    for name, module in model.named_modules():
        if not in_layer(f"{name}.") and list(module.parameters(recurse=False)):
            yield name, module


def drop_layers(target: "Target") -> None:
    """Let go of all numbers but those of the ends, of a target that was loaded whole. It writes no more."""
    kept = {id(module) for _, module in end_modules(target.model)}
    for module in target.model.modules():
        if id(module) not in kept:
            module._apply(lambda tensor: tensor.to("meta"), recurse=False)
    target.ends_only = True


def refuse(*given: Any) -> Any:
    """In the place of a forward."""
    raise ValueError(f"only the ends of the target are loaded, and this needs its layers: {WHOLE}")
