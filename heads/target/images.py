"""Images in a text, for targets that take them: their tokens, their positions, and what the model takes in their place.

    text       look: <|image_pad|> what is it?          one placeholder per image, as a chat template writes it
    tokens     look: i i i i i i what is it?            as many as the processor says for the image's size
    M-RoPE     0     1 1 1 1 1 1 4    5  6              time;  height 1 1 1 2 2 2;  width 1 2 3 1 2 3

Everything is the target's own processor's, without its videos (for which transformers wants torchvision).
"""

import base64
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

# Model types whose inputs are those below, with tests/test_images.py for each kind of them; Gemma 3's tokens of one image see
# each other.
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
BLOCKS = ("gemma3",)
# Of all images, one after the other: patches or whole images, and their grids.
INPUTS = ("pixel_values", "image_grid_thw")


class ImageReader:
    """What a target of this config makes of images. It knows no model, so that any process can have one."""

    def __init__(self, config: PreTrainedConfig, path: str, revision: str | None = None):
        """path: where the target's processor lies. Raises ValueError where it cannot be loaded."""
        self.config, self.path, self.revision = config, path, revision

    @functools.cached_property
    def processor(self) -> Any:
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING  # not for those who read no image

        try:
            return without_videos(PROCESSOR_MAPPING[type(self.config)]).from_pretrained(
                self.path, revision=self.revision
            )
        except (OSError, ImportError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"the data have images, and the processor of {self.path} cannot be loaded ({reason}): images need "
                "foredraft[vision], and the target's preprocessor_config.json"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """Each process loads its own processor."""
        return {name: value for name, value in self.__dict__.items() if name != "processor"}

    @property
    def digest(self) -> str:
        """Of what decides how many tokens an image has."""
        files = (Path(self.path, name) for name in ("preprocessor_config.json", "processor_config.json"))
        written = [file.read_text() for file in files if file.is_file()]
        return repr((self.path, self.revision, self.config.to_json_string(), written))

    @property
    def placeholder(self) -> str:
        """Of an image, in a text."""
        return str(self.processor.image_token)

    def tokenize(self, text: str, places: Sequence[str]) -> tuple[list[int], list[int]]:
        """Token ids, and where in `text` each one begins, of a text with a placeholder per image; places: of the images, as
        for `open_image`. Raises ValueError where they are not as many, or no images."""
        out = self.processor(
            text=[text],
            images=[open_image(place) for place in places],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        starts, gained = [], 0
        images = iter(out["text_replacement_offsets"][0])
        image = next(images, None)
        for start, _ in out["offset_mapping"][0]:
            while image is not None and start >= image["new_span"][1]:
                gained = image["new_span"][1] - image["span"][1]
                image = next(images, None)
            inside = image is not None and start >= image["new_span"][0]
            starts.append(image["span"][0] if image is not None and inside else start - gained)
        return list(out["input_ids"][0]), starts

    def read(self, places: Sequence[str]) -> dict[str, Tensor]:
        """What the model takes of these images, by the names in INPUTS."""
        images = [open_image(place) for place in places]
        found = self.processor(text=[self.placeholder * len(places)], images=images, return_tensors="pt")
        return {name: found[name] for name in INPUTS if name in found}

    def positions(self, tokens: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """(3, length) int64 of a text (length,) with images: M-RoPE's time, height, width; elsewhere three times the same."""
        length = len(tokens)
        if self.config.model_type not in MROPE:
            return torch.arange(length).expand(3, -1)
        merge, parts, at, number = self.config.vision_config.spatial_merge_size, [], 0, 0
        for time, height, width in inputs["image_grid_thw"].tolist():
            sides = torch.arange(time), torch.arange(height // merge), torch.arange(width // merge)
            begin = at + int((tokens[at:] == self.config.image_token_id).int().argmax())
            parts.append(torch.arange(number, number + begin - at).expand(3, -1))
            number += begin - at
            parts.append(number + torch.stack(torch.meshgrid(*sides, indexing="ij")).flatten(1))
            number, at = number + max(height, width) // merge, begin + parts[-1].shape[1]
        return torch.cat([*parts, torch.arange(number, number + length - at).expand(3, -1)], dim=1)

    def see_each_other(self, tokens: Tensor) -> Tensor:
        """(length,) int64: which image a token is of, if tokens of an image see each other; -1 for the others."""
        of_image = tokens == self.config.image_token_id
        if self.config.model_type not in BLOCKS:
            of_image = torch.zeros_like(of_image)
        begins = of_image & ~of_image.roll(1)
        return torch.where(of_image, begins.cumsum(0), -1)


def reads_images(config: PreTrainedConfig) -> bool:
    return config.model_type in (*MROPE, *BLOCKS)


@functools.cache
def without_videos(processor: Any) -> Any:
    names = [name for name in processor.get_attributes() if not name.startswith("video")]
    return type(processor.__name__, (processor,), {"get_attributes": classmethod(lambda cls: names)})


def open_image(place: str) -> Any:
    """A PIL image of a path, a file:// address, or a data: address with the bytes in base64. Raises ValueError where there
    is none."""
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
