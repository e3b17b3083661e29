"""Training on images: what the target makes of rows with images is what transformers makes of them, document by document."""

import base64
import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from PIL import Image

from foredraft.heads.base import PackedBatch
from foredraft.heads.formats import engines
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.images import open_image
from foredraft.train.data.conversations import corpus
from foredraft.train.data.corpus import Corpus
from foredraft.train.data.layouts import SkippedRow, turns
from foredraft.train.data.packing import Packed, collate
from foredraft.train.data.sources import Row, Source
from foredraft.train.hidden_states import online
from tests.support import nightly_but
from tests.support.architectures import SIZES
from tests.support.chats import tokenizer
from tests.support.head_factory import make_head
from tests.support.processes import SMALL_EAGLE3, Ended, complaint, losses, succeeded

TEXT: dict[str, Any] = SIZES | {"head_dim": 8, "vocab_size": 320}
TEXT |= {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 256}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
SIGHT = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
SIGHT |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.3}
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
IDS = {word: 256 + number for number, word in enumerate(SPECIAL)}
MARKED = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma": "<start_of_image>"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in "
    "m.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def configs() -> dict[str, hf.PreTrainedConfig]:
    ids = {"image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"]}
    ids |= {"vision_start_token_id": IDS["<|vision_start|>"], "vision_end_token_id": IDS["<|vision_end|>"]}
    positions = {"num_position_embeddings": 64}
    mrope = TEXT | {"rope_parameters": MROPE}
    mixed = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
    mixed |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    partial = {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}
    siglip = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    siglip |= {"image_size": 16, "patch_size": 4, "vision_use_head": False}
    return {
        "qwen2_5_vl": hf.Qwen2_5_VLConfig(
            text_config=mrope, vision_config=SIGHT | {"window_size": 16, "fullatt_block_indexes": [1]}, **ids
        ),
        "qwen3_vl": hf.Qwen3VLConfig(
            text_config=mrope, vision_config=SIGHT | positions | {"deepstack_visual_indexes": [0]}, **ids
        ),
        "qwen3_5": hf.Qwen3_5Config(
            text_config=TEXT | mixed | partial,
            vision_config=SIGHT | positions | {"deepstack_visual_indexes": []},
            **ids,
        ),
        "gemma3": hf.Gemma3Config(
            text_config=TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            vision_config=siglip,
            mm_tokens_per_image=4,
            image_token_index=IDS["<image_soft_token>"],
            boi_token_index=IDS["<start_of_image>"],
            eoi_token_index=IDS["<end_of_image>"],
        ),
    }


def save_target(kind: str, path: Path) -> Path:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    model = hf.AutoModelForImageTextToText.from_config(configs()[kind], dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim < 2:  # at their initial 0 or 1 one left out would not show
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    family = "gemma" if kind == "gemma3" else "qwen"
    words = tokenizer(TEMPLATE.replace("MARK", MARKED[family]), "<|endoftext|>", "<|im_end|>", SPECIAL)
    if family == "gemma":
        named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        words = hf.PreTrainedTokenizerFast(
            tokenizer_object=words.backend_tokenizer,
            bos_token="<|endoftext|>",
            eos_token="<|im_end|>",
            extra_special_tokens=named,
            chat_template=words.chat_template,
        )
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, image_seq_length=4).save_pretrained(path)
    else:
        size = {"shortest_edge": 64, "longest_edge": 1024}
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size).save_pretrained(path)
    words.save_pretrained(path)
    if family == "gemma":  # what its own says
        (path / "processor_config.json").write_text('{"processor_class": "Gemma3Processor", "image_seq_length": 4}')
    return path


def png(seed: int, width: int = 24, height: int = 16) -> bytes:
    from PIL import Image

    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def address(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def conversation(number: int, pictures: int = 0, every: bool = False) -> list[dict]:
    """Return a conversation with two images, one or none, of several sizes. pictures: which ones. every: none has none."""
    image = {"type": "image", "image": address(png(pictures + number, *[(24, 16), (16, 32)][number % 2]))}
    other = {"type": "image_url", "image_url": {"url": address(png(pictures + 100 + number))}}
    asked = [{"type": "text", "text": f"Look {number}: "}, image, {"type": "text", "text": "what?"}]
    more = [other, {"type": "text", "text": "and this?"}] if number % 3 == 0 else f"and {number}?"
    said = [f"A picture of {number}.", f"Another one, {number}."]
    return [
        {"role": "user", "content": asked if every or number % 4 != 3 else f"hello {number}"},
        {"role": "assistant", "content": said[0]},
        {"role": "user", "content": more},
        {"role": "assistant", "content": said[1]},
    ]


def write(file: Path, numbers: Sequence[int] = range(24), **which) -> Path:
    file.write_text("".join(json.dumps({"messages": conversation(number, **which)}) + "\n" for number in numbers))
    return file


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module", params=sorted(configs()))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = save_target(request.param, tmp_path_factory.mktemp(request.param))
    return Target.from_pretrained(path, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def read(target: Target, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    cache = str(tmp_path_factory.mktemp("cache"))
    return corpus(target.text_tokenizer, str(rows), images=target.images, cache_dir=cache, num_proc=1)


def as_transformers(target: Target, messages: list[dict]) -> dict[str, torch.Tensor]:
    """Return the inputs that the target's own processor makes of a conversation."""
    places: list[str] = []
    shown = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            places += [part.get("image") or part["image_url"]["url"] for part in content if part["type"] != "text"]
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
        shown.append(message | {"content": content})
    text = target.text_tokenizer.apply_chat_template(shown, tokenize=False)
    given = {"images": [open_image(place) for place in places]} if places else {}
    return target.images.processor(text=[text], return_tensors="pt", **given)


def states_of_layers(target: Target, inputs: dict[str, torch.Tensor], layers: list[int]) -> list[torch.Tensor]:
    """Return the hidden states (length, hidden) that the layers after `layers` read, as engines give them to heads."""
    read: dict[int, torch.Tensor] = {}
    decoder = target.model.get_decoder().layers
    hooks = [decoder[k].register_forward_pre_hook(lambda _, args, k=k: read.__setitem__(k, args[0][0])) for k in layers]
    target.model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [read[k] for k in layers]


@torch.no_grad()
def test_documents_of_a_packed_batch_are_what_transformers_makes_of_each(target: Target, read: Corpus):
    packed = Packed(read.train, 224, seed=0)
    assert read.card["with_images"] == 20 and packed.card["documents_left_out"] == 0
    batch = collate([packed[row] for row in range(len(packed))])
    assert (batch["documents"].amax(1) - batch["documents"].amin(1)).max() > 1  # several in a row
    first = collate([packed[0]])["images"]
    assert torch.equal(first["position_ids"], batch["images"]["position_ids"][:, :1])
    shortest, *_, longest = sorted(read.train.with_images().nonzero()[0], key=read.train.sizes.__getitem__)
    (alone,) = Packed(read.train.select([shortest]), 224, seed=0)
    assert alone["images"]["at"].unique(dim=0).tolist() == [[0, 0]]
    fits = Packed(read.train.select([shortest, longest]), int(read.train.sizes[shortest]), seed=0)
    assert (len(fits), fits.card["image_documents_longer_than_a_row"], fits.card["padding_share"]) == (1, 1, 0)
    layers = [1, 3]
    states, last = online.forward_target(target, PackedBatch.of(batch), layers)
    seen = 0
    for messages in map(conversation, range(24)):
        inputs = as_transformers(target, messages)
        out = target.model(**inputs, output_hidden_states=True, use_cache=False)
        (ids,) = inputs["input_ids"]
        for row, begin in (batch["tokens"] == ids[0]).nonzero().tolist():
            here = slice(begin, begin + len(ids))
            if batch["tokens"][row, here].tolist() != ids.tolist():
                continue
            seen += 1
            assert batch["positions"][row, here].tolist() == list(range(len(ids)))  # of heads, in all engines
            own = torch.cat(states_of_layers(target, inputs, layers), -1)
            torch.testing.assert_close(states[row, here], own, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(last[row, here], out.hidden_states[-1][0], atol=1e-3, rtol=1e-3)
            written = target.text_tokenizer.decode(ids[batch["loss_mask"][row, here]])
            assert written == "".join(f"{m['content']}<|im_end|>" for m in messages if m["role"] == "assistant")
    assert seen == len(read.train)


def test_exports_say_which_engines_embed_images_for_heads(target: Target, tiny_path: Path):
    """Check SGLang's EAGLE-3 and vLLM's MTP: both get the features of images, where vLLM's EAGLE-3 gets placeholders."""
    other = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    said = "after images, fewer drafts may be accepted"
    for served, sees in ((target, True), (other, False)):
        eagle, layer = make_head("eagle3", served), make_head("mtp", served)
        assert (said in engines.export_for("mtp", layer, served).note) == sees
        assert (said in engines.images_note("SGLang", eagle, served)) == sees
        assert said not in engines.export_for("vllm", eagle, served).note


@pytest.mark.parametrize(
    "content, column",
    [
        ([{"type": "image", "image": "a.png"}], []),
        ([{"type": "image", "path": "a.png"}], []),
        ([{"type": "image", "url": "file://a.png"}], []),
        ([{"type": "image_url", "image_url": {"url": address(png(1))}}], []),
        ([{"type": "image", "base64": base64.b64encode(png(1)).decode()}], []),
        ([{"type": "image", "image": {"bytes": png(1), "path": None}}], []),
        ([{"type": "image"}], ["a.png"]),
        ([{"type": "image"}], [{"bytes": png(1), "path": "elsewhere.png"}]),
        ("<image>", ["a.png"]),
        ("", ["a.png"]),  # TRL's data sets name no place
    ],
)
def test_images_are_given_in_many_ways(content, column: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(png(1))
    content = content + "what?" if isinstance(content, str) else [*content, {"type": "text", "text": "what?"}]
    (message,) = turns([{"role": "user", "content": content}], images=column)
    image, text = [part for part in message["content"] if part.get("text") != ""]
    assert text == {"type": "text", "text": "what?"} and not column
    assert open_image(image["image"]).tobytes() == open_image(address(png(1))).tobytes()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "c"}]},
        {"prompt": [{"role": "user", "content": "what?"}], "completion": [{"role": "assistant", "content": "c"}]},
        {"question": "what?", "answer": "c"},
        {"instruction": "<image><image>", "input": "what?", "output": "c"},
    ],
)
def test_images_next_to_any_layout_are_seen(row: dict):
    seen, answer = Source("x").conversation(Row("", row | {"images": ["a.png", "b.png"]}), images=True)
    assert [part["image"] for part in seen["content"] if part["type"] == "image"] == ["a.png", "b.png"]
    assert "".join(part.get("text", "") for part in seen["content"]).strip() == "what?" and answer["content"] == "c"
    for image in ("", [], None):
        seen, _ = Source("x").conversation(Row("", {"question": "what?", "answer": "c", "image": image}), images=True)
        assert seen["content"] == "what?"


def test_an_image_that_datasets_has_read_is_seen():
    image = Image.new("CMYK", (2, 3))
    seen, _ = turns([{"role": "user", "content": "what?"}, {"role": "assistant", "content": "c"}], images=[image])
    data = base64.b64decode(seen["content"][0]["image"].removeprefix("data:image;base64,"))
    assert Image.open(io.BytesIO(data)).size == (2, 3)


def test_an_image_without_a_place_next_to_one_with_a_place_is_a_reason():
    with pytest.raises(SkippedRow, match="more images than places for them"):
        turns([{"role": "user", "content": "<image>what?"}], images=["a.png", "b.png"])
    inside = [{"type": "image", "image": "a.png"}, {"type": "image"}, {"type": "text", "text": "what?"}]
    (seen,) = turns([{"role": "user", "content": inside}], images=["b.png", "a.png"])
    assert [part.get("image") for part in seen["content"]] == ["a.png", "b.png", None]


@pytest.mark.parametrize(
    "part, reason",
    [
        ({"type": "image", "url": "https://example.com/a.png"}, "not on this machine"),
        ({"type": "image"}, "nothing says where it is"),
        ({"type": "video", "video": "a.mp4"}, "neither text nor an image"),
    ],
)
def test_images_that_cannot_be_had_are_a_reason(part: dict, reason: str):
    with pytest.raises(SkippedRow, match=reason):
        turns([{"role": "user", "content": [part, {"type": "image", "image": "a.png"}]}], images=[])


def test_a_text_only_target_learns_from_the_text_of_rows_with_images_and_says_so(
    tiny_path: Path, rows: Path, tmp_path: Path
):
    target = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    assert target.images is None
    given = {"template": "plain", "cache_dir": str(tmp_path / "cache"), "num_proc": 1}
    assert corpus(target.text_tokenizer, str(rows), **given).card["images_left_out"].startswith("of 20 conversations")
    text = write(tmp_path / "text.jsonl", [3, 7, 11, 19, 23, 31])  # of which each third has one
    assert corpus(target.text_tokenizer, str(text), **given).card["images_left_out"].startswith("of 1 conversations")
    (message,) = turns([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}])
    assert message["content"] == "what?"


def test_a_line_that_is_no_row_is_dropped_for_a_target_that_sees_images_too(tmp_path):
    target = Target.from_pretrained(save_target("qwen3_vl", tmp_path / "target"), device="cpu")
    text = write(tmp_path / "rows.jsonl")
    text.write_text('{"broken\n["a list"]\n' + text.read_text())
    data = corpus(target.text_tokenizer, str(text), images=target.images, cache_dir=str(tmp_path), num_proc=1)
    assert data.card["dropped"] == {"not JSON": 1, "not an object with columns": 1}


def test_a_target_whose_config_names_no_end_token_has_the_tokenizers(tmp_path):
    """The text configs of Qwen3-VL and GLM-4.5V have no default for it."""
    path = save_target("qwen3_vl", tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["text_config"]["eos_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").unlink()
    assert Target.from_pretrained(path, device="cpu").eos_token_ids == [IDS["<|im_end|>"]]


# Runs

RUN = [
    *SMALL_EAGLE3,
    "max_length=224",
    "trainer.max_steps=4",
    "data=conversations",
    "+data.cache_dir=cache",
    "data.num_proc=1",
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def given(target: Path, rows: Path, *more: str) -> list[str]:
    return [*(one for one in RUN if one != "data=text"), f"target.path={target}", f"data.path={rows}", *more]


@pytest.mark.parametrize("head", nightly_but(["eagle3", "medusa", "dflash"]))
def test_a_run_learns_from_what_is_seen(head: str, qwen: Path, rows: Path, tmp_path: Path, here: Callable[..., Ended]):
    options = [one for one in given(qwen, rows) if head == "eagle3" or not one.startswith("head.")]
    options = [f"head={head}" if one == "head=eagle3" else one for one in options]
    texts = write(tmp_path / "texts.jsonl", numbers=(7, 11, 19, 23))
    options += ["+trainer.dataloader_num_workers=1", f"data.val_path={texts}"]
    ended = succeeded(here(*options, "output_dir=out"))
    assert re.search(r"with images +20", ended.out) and "nothing was decoded" not in ended.out
    options.remove(f"data.path={rows}")
    other = write(tmp_path / "other.jsonl", pictures=50)  # the same text
    assert here(*options, f"data.path={other}", "output_dir=other").code == 0
    assert losses(tmp_path / "out") != losses(tmp_path / "other")


def test_where_all_have_images_nothing_is_decoded(qwen: Path, tmp_path: Path, here: Callable[..., Ended]):
    rows = write(tmp_path / "rows.jsonl", every=True)
    ended = succeeded(here(*given(qwen, rows, "output_dir=out", "trainer.max_steps=2", "eval.steps=2")))
    assert "nothing was decoded, because every held-out conversation has an image" in ended.out
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["predicted_acceptance_length"] >= 1 and "acceptance_length" not in metrics


@pytest.mark.nightly
def test_stored_hidden_states_of_images_are_those_of_the_run(
    qwen: Path, rows: Path, tmp_path: Path, here: Callable[..., Ended]
):
    for name in ("online", "offline"):
        more = [] if name == "online" else ["hidden_states.path=features", "hidden_states.dtype=float32"]
        assert here(*given(qwen, rows, f"output_dir={name}", f"hidden_states={name}", *more)).code == 0
    assert losses(tmp_path / "offline") == pytest.approx(losses(tmp_path / "online"), abs=1e-4)


def test_what_images_cannot_be_trained_with(qwen: Path, rows: Path, here: Callable[..., Ended]):
    server = ["hidden_states=server", "hidden_states.url=http://localhost:9", "hidden_states.load_full_target=true"]
    assert "asks an engine with tokens alone, and the data have images" in complaint(here(*given(qwen, rows, *server)))
    assert "writes after text alone" in complaint(here(*given(qwen, rows, "self_generated_tokens=100")))
    (qwen / "preprocessor_config.json").rename(qwen / "gone.json")
    assert "the data have images, and the processor of" in complaint(here(*given(qwen, rows)))
    (qwen / "gone.json").rename(qwen / "preprocessor_config.json")
