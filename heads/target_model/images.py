"""Images in a text: their tokens, their positions, and the model's inputs for them.

    text       look: <|image_pad|> what is it?          one placeholder per image, as a chat template writes it
    tokens     look: i i i i i i what is it?            the processor derives their number from the image's size
    M-RoPE     0     1 1 1 1 1 1 4    5  6              time;  height 1 1 1 2 2 2;  width 1 2 3 1 2 3

This uses the target's own processor, without its videos (for which transformers needs torchvision).
"""

import base64
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from foredraft.heads.target_model.logits import TargetOutput

# Model types with the inputs below; test_images.py tests each kind. Gemma 3's tokens of one image attend to each other
# in both directions.
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
BIDIRECTIONAL = ("gemma3",)
# The inputs of all images, concatenated: patches or whole images, and their grids.
INPUTS = ("pixel_values", "image_grid_thw")


class ImageReader:
    """Convert images for a target with this config. It does not need the model, so any process can have one."""

    def __init__(self, config: PreTrainedConfig, path: str, revision: str | None = None):
        """Remember where the target's processor is. path: its directory or Hub id."""
        self.config, self.path, self.revision = config, path, revision

    @functools.cached_property
    def processor(self) -> Any:
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING  # only needed for images

        try:
            return without_videos(PROCESSOR_MAPPING[type(self.config)]).from_pretrained(
                self.path, revision=self.revision
            )
        except (OSError, ImportError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"the data have images, and the processor of {self.path} cannot be loaded ({reason}): install "
                "foredraft[vision], and provide the target's preprocessor_config.json"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """Leave the processor out: each process loads its own."""
        return {name: value for name, value in self.__dict__.items() if name != "processor"}

    @property
    def digest(self) -> str:
        """Return a key of everything that determines the number of tokens of an image."""
        files = (Path(self.path, name) for name in ("preprocessor_config.json", "processor_config.json"))
        written = [file.read_text() for file in files if file.is_file()]
        return repr((self.path, self.revision, self.config.to_json_string(), written))

    @property
    def placeholder(self) -> str:
        """Return the placeholder of an image in a text."""
        return str(self.processor.image_token)

    def tokenize(self, text: str, places: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return token ids of a text with one placeholder per image, and the place in `text` where each token starts.
        places: of the images, as for `open_image`. Raises ValueError if their number differs, or a place is not an image."""
        out = self.processor(
            text=[text],
            images=[open_image(place) for place in places],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        starts, offset = [], 0
        images = iter(out["text_replacement_offsets"][0])
        image = next(images, None)
        for start, _ in out["offset_mapping"][0]:
            while image is not None and start >= image["new_span"][1]:
                offset = image["new_span"][1] - image["span"][1]
                image = next(images, None)
            inside = image is not None and start >= image["new_span"][0]
            starts.append(image["span"][0] if image is not None and inside else start - offset)
        return list(out["input_ids"][0]), starts

    def read(self, places: Sequence[str]) -> dict[str, Tensor]:
        """Return the model's inputs for these images, with the names in INPUTS."""
        images = [open_image(place) for place in places]
        inputs = self.processor(text=[self.placeholder * len(places)], images=images, return_tensors="pt")
        return {name: inputs[name] for name in INPUTS if name in inputs}

    def positions(self, tokens: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return positions (3, length) int64 of a text (length,) with images: M-RoPE's time, height and width, or three
        equal rows."""
        length = len(tokens)
        if self.config.model_type not in MROPE:
            return torch.arange(length).expand(3, -1)
        merge, parts, at, number = self.config.vision_config.spatial_merge_size, [], 0, 0
        for time, height, width in inputs["image_grid_thw"].tolist():
            sides = torch.arange(time), torch.arange(height // merge), torch.arange(width // merge)
            start = at + int((tokens[at:] == self.config.image_token_id).int().argmax())
            parts.append(torch.arange(number, number + start - at).expand(3, -1))
            number += start - at
            parts.append(number + torch.stack(torch.meshgrid(*sides, indexing="ij")).flatten(1))
            number, at = number + max(height, width) // merge, start + parts[-1].shape[1]
        return torch.cat([*parts, torch.arange(number, number + length - at).expand(3, -1)], dim=1)


def model_inputs(images: dict[str, Tensor], tokens: Tensor, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the arguments of a model's forward for images (heads.base.PackedBatch) of tokens (batch, length), without
    positions."""
    config, inputs = model.config, {name: images[name] for name in INPUTS if name in images}
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    if config.model_type in BIDIRECTIONAL:  # it makes a mask of them if it gets none
        inputs["token_type_ids"] = (tokens == config.image_token_id).long()
    return inputs


@contextmanager
def add_features(
    model: PreTrainedModel, layers: Sequence[int], images: dict[str, Tensor] | None
) -> Iterator[Callable[[TargetOutput], TargetOutput]]:
    """Yield what completes the aux hidden states of a forward. Qwen3-VL adds features of images after its first layers, and
    transformers returns their outputs before that, engines after it, as the next layer reads them."""
    count = 0 if images is None else len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    read: dict[int, Tensor] = {}
    hooks = [
        model.get_decoder().layers[k].register_forward_pre_hook(lambda _, args, k=k: read.update({k: args[0]}))
        for k in layers
        if 0 < k <= count
    ]

    def complete(output: TargetOutput) -> TargetOutput:
        states = output.aux_hidden_states.chunk(len(layers), dim=-1)
        parts = [read.get(k, state).to(state) for k, state in zip(layers, states, strict=True)]
        return output._replace(aux_hidden_states=torch.cat(parts, -1))

    try:
        yield complete if hooks else lambda output: output
    finally:
        for hook in hooks:
            hook.remove()


def reads_images(config: PreTrainedConfig) -> bool:
    return config.model_type in (*MROPE, *BIDIRECTIONAL)


@functools.cache
def without_videos(processor: Any) -> Any:
    names = [name for name in processor.get_attributes() if not name.startswith("video")]
    return type(processor.__name__, (processor,), {"get_attributes": classmethod(lambda cls: names)})


def open_image(place: str) -> Any:
    """Return the PIL image of a path, a file:// address, or a data: address with bytes in base64. Raises ValueError if it
    cannot be read."""
    from PIL import Image

    try:
        if place.startswith("data:"):
            file: Any = io.BytesIO(base64.b64decode(place.partition(",")[2]))
        else:
            file = place.removeprefix("file://")
        with Image.open(file) as image:
            return image.convert("RGB")
    except (OSError, ValueError) as error:
        raise ValueError(f"an image that cannot be read: {str(error)[:200]}") from error
