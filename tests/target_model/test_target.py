"""How a target is loaded."""

import contextlib
import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.attention import masked
from foredraft.heads.checkpoint import fingerprint
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.target_model import files, loading, resolve_path
from foredraft.heads.target_model.capabilities import allclose
from foredraft.heads.target_model.files import INDEX, WEIGHTS, weight_map
from foredraft.heads.target_model.loading import read_config, read_tokenizer
from foredraft.heads.target_model.sharding import replicated_params
from foredraft.inference import drafter_for, generate
from foredraft.inference.drafters import NgramDrafter
from tests.support.architectures import FAMILIES
from tests.support.chats import byte_level, sentencepiece
from tests.support.head_factory import edit
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    "capability, bf16, amx, dtype",
    [
        ("AVX2", False, False, torch.float32),
        ("AVX512", False, False, torch.float32),  # Skylake, Cascade Lake
        ("AVX512", True, False, torch.bfloat16),
        ("AVX512", False, True, torch.bfloat16),
        ("AVX2", True, True, torch.float32),  # as ATEN_CPU_CAPABILITY asks for
    ],
)
def test_auto_is_float32_where_the_cpu_has_no_bfloat16_products(
    tmp_path, monkeypatch, capsys, capability, bf16, amx, dtype
):
    LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert Target.from_pretrained(tmp_path, device="cpu").dtype == dtype
    assert ("computed in float32, because" in capsys.readouterr().err) == (dtype == torch.float32)
    assert Target.from_pretrained(tmp_path, device="cpu", dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "device, reported, bf16",
    [
        ("cuda", (7, 0), False),  # V100
        ("cuda:1", (7, 5), False),  # T4, RTX 20xx
        ("cuda", (8, 0), True),
        ("cuda:1", (12, 0), True),
        ("cpu", {"bf16": False}, False),  # Graviton2, M1
        ("cpu", {"bf16": True}, True),
        ("cpu", {}, False),  # a version of torch that does not say
        ("mps", None, True),
    ],
)
def test_bfloat16_is_chosen_where_the_device_reports_it(monkeypatch, device, reported, bf16):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: reported if str(of) == device else (9, 9))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: reported, raising=False)
    assert loading.has_bfloat16_products(device) is bf16


def test_products_of_4_bit_weights_are_in_what_the_device_has(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(loading, "BitsAndBytesConfig", lambda **settings: settings["bnb_4bit_compute_dtype"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert loading.quantization_config("4bit", "auto", "cuda") == torch.float32
    assert loading.quantization_config("4bit", torch.float16, "cuda") == torch.float16


@pytest.mark.parametrize("named", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_mask_of_ours_is_refused(named):
    model = LlamaForCausalLM(tiny_config())
    model.config._attn_implementation = named
    with pytest.raises(ValueError, match=f"attn_implementation={named} .*attn_implementation=sdpa"):
        Target(model)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "kernels-community/flash-attn2"])
@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("embeddings_only", [False, True])
def test_the_attention_of_a_training_is_not_that_of_drafting(key, name, embeddings_only, tiny_path, tmp_path):
    """Load a fine-tune whose config.json says with which attention it was trained (QwenLM/Qwen3-VL#1682)."""
    path = odd_target(tiny_path, tmp_path, "{}", **{key: name})
    target = Target.from_pretrained(path, device="cpu", embeddings_only=embeddings_only)
    assert target.model.config._attn_implementation == masked.NAME
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    more = {"rope_parameters": rope, "attn_implementation": "sdpa", "num_hidden_layers": 1}
    if not embeddings_only:
        config = Target.from_pretrained(path, device="cpu", **more).model.config
        assert config.rope_parameters == rope and config.num_hidden_layers == 1
    if not embeddings_only:  # what somebody asks for is not replaced
        with pytest.raises(ValueError, match=r"cannot be loaded|does not support the mask"):
            Target.from_pretrained(path, device="cpu", attn_implementation=name)


@torch.no_grad()
def test_kimi_k2_is_read_as_the_deepseek_v3_that_it_is(tmp_path):
    """Load files that name a kind which transformers does not have, and their own code, of which nothing is run or asked."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["deepseek_v3"]), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    own = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoTokenizer": "tokenization_kimi.TikTokenTokenizer",
    }
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2", "auto_map": own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": own}))
    target, tokens = Target.from_pretrained(tmp_path, dtype="float32", device="cpu"), torch.arange(9)[None]
    assert type(target.model) is type(model) and target.tokenizer is None
    assert read_config(tmp_path / "config.json").kv_lora_rank == model.config.kv_lora_rank  # a file alone, for a plan
    torch.testing.assert_close(target.forward(tokens).logits, model(tokens).logits)
    assert set(replicated_params(str(tmp_path))) == {"model.embed_tokens", "lm_head"}


@pytest.mark.parametrize(
    "error", [ImportError("You need to install sacremoses"), TypeError("expected str, not NoneType")]
)
def test_a_tokenizer_that_cannot_be_loaded_is_missed_where_text_is_read(tmp_path, monkeypatch, error):
    """Try the errors of transformers: missing packages or files, different for each kind of tokenizer."""

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    monkeypatch.setattr("foredraft.heads.target_model.loading.AutoTokenizer.from_pretrained", fail)
    target = Target.from_pretrained(tmp_path, device="cpu")
    with pytest.raises(ValueError, match=rf"has no tokenizer \({error}\), which text needs"):
        target.text_tokenizer  # noqa: B018


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", None])
def test_a_tokenizer_does_what_its_own_file_says(kind, tiny_path, tmp_path):
    """transformers 5 applies the rules of the class, so that models of one family with other words got other ids."""
    shutil.copytree(tiny_path, tmp_path, dirs_exist_ok=True)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    digits = {"type": "Digits", "individual_digits": False}
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, rules["pre_tokenizer"]]}
    rules["normalizer"] = {"type": "Replace", "pattern": {"String": "\u201c"}, "content": '"'}
    word = rules["model"]["vocab"]["zebras"] = len(rules["model"]["vocab"])  # no merges make this word
    rules["model"]["ignore_merges"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    settings = {"eos_token": "<|endoftext|>"} | ({} if kind is None else {"tokenizer_class": kind})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    file, classes = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = read_tokenizer(str(tmp_path), None)
    for text in ("def add_1(self):\n    it's 3.14 cafe\u0301 ", "zebras", "\u201ca"):
        assert (classes(text).input_ids == file.encode(text).ids) == (kind is None)
        assert tokenizer(text).input_ids == file.encode(text).ids
        assert tokenizer.decode(file.encode(text).ids) == text.replace("\u201c", '"')
    assert tokenizer("zebras").input_ids == [word] and type(tokenizer).__name__ in (kind, "TokenizersBackend")


@pytest.mark.parametrize(
    ("kind", "in_file", "setting"),
    [
        ("LlamaTokenizer", True, None),
        ("LlamaTokenizer", True, True),
        ("LlamaTokenizer", True, False),
        ("GPT2Tokenizer", False, None),
        ("GPT2Tokenizer", False, False),
        ("GPT2Tokenizer", False, True),
        ("GPTNeoXTokenizer", True, None),
    ],
)
def test_a_space_before_the_first_word_is_as_the_settings_say(kind, in_file, setting, tmp_path):
    """The rest follows the file: there, a text behind a special token of Llama starts with a space, too."""
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    raw = copy.deepcopy((sentencepiece() if kind == "LlamaTokenizer" else byte_level()).backend_tokenizer)
    if kind != "LlamaTokenizer":
        raw.pre_tokenizer = ByteLevel(add_prefix_space=in_file)
    raw.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "eos_token": "</s>", "legacy": False}
    settings |= {} if setting is None else {"add_prefix_space": setting}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read_tokenizer(str(tmp_path), None)
    spaced = in_file if setting is None else setting
    assert tokenizer.convert_ids_to_tokens(tokenizer("sky", add_special_tokens=False).input_ids)[0][0] in (
        "\u0120\u2581" if spaced else "s"
    )
    if spaced == in_file:
        for text in ("sky", "</s>sky", "a</s> sky is"):
            assert tokenizer(text).input_ids == raw.encode(text).ids


def test_a_tokenizer_of_own_code_is_left_unchanged(tiny_path, tmp_path):
    shutil.copytree(tiny_path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "mine.py").write_text(
        "from tokenizers import normalizers\nfrom transformers import PreTrainedTokenizerFast\n\n\n"
        "class Mine(PreTrainedTokenizerFast):\n    def __init__(self, *args, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        "        self.backend_tokenizer.normalizer = normalizers.Lowercase()\n"
    )
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read_tokenizer(str(tmp_path), None, trust_remote_code=True)
    assert tokenizer("ABC").input_ids == tokenizer("abc").input_ids


def test_a_model_that_needs_another_package_is_refused_by_its_name(tmp_path, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise ImportError("TimmWrapperModel requires the timm library\nbut it was not found")

    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(ValueError, match=r"cannot be loaded: TimmWrapperModel requires the timm library$"):
        Target.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_hidden_layers": 7}, r"lacks 9 weights that its config.json announces \(model.layers.6.input_layernorm"),
        ({"vocab_size": 400}, "cannot be loaded: its weights have other sizes than its config.json"),
        ({"num_attention_heads": 5}, r"cannot be loaded: its config.json: The hidden size \(32\)"),
        (None, "cannot be loaded: Error while deserializing header"),
        ({"rope_parameters": {"rope_type": "bent"}}, r"transformers fails on its files \(KeyError: 'bent'\)"),
        ({"model_type": ["llama"]}, r"transformers fails on its files \(TypeError: unhashable"),
    ],
)
def test_a_damaged_target_is_refused_and_gets_no_random_weights(tmp_path, settings, complaint):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    if settings is None:
        weights.write_bytes(weights.read_bytes()[:-9])
    config.write_text(json.dumps(json.loads(config.read_text()) | (settings or {})))
    with pytest.raises(ValueError, match=complaint):
        Target.from_pretrained(tmp_path, device="cpu")


def test_an_unknown_argument_is_not_blamed_on_the_files(tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sharded'"):
        Target.from_pretrained(tmp_path, device="cpu", sharded=True)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", b"[]", r"transformers fails on its files \(TypeError"),
        ("model.safetensors.index.json", b"{}", r"transformers fails on its files \(KeyError: 'weight_map'"),
        ("generation_config.json", b"[]", "generation_config.json is not a JSON object: mend it, or remove the file"),
        ("pytorch_model.bin", b"", r"transformers fails on its files \(EOFError"),
        ("pytorch_model.bin", None, r"\.bin file of its weights is damaged or incomplete"),
        ("pytorch_model.bin", b"PK\x03\x04", r"\.bin file of its weights is damaged or incomplete"),
    ],
)
def test_a_file_of_another_form_is_refused_in_a_sentence(tmp_path, name, content, complaint):
    model = LlamaForCausalLM(tiny_config())
    model.save_pretrained(tmp_path)
    if "model" in name:
        (tmp_path / "model.safetensors").unlink()
    if content is None:  # half of the right file
        torch.save(model.state_dict(), tmp_path / name)
        content = (tmp_path / name).read_bytes()
        content = content[: len(content) // 2]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"target {tmp_path} cannot be loaded: .*{complaint}"):
        Target.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name, tiny_path, tmp_path):
    shutil.copytree(tiny_path, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS.*git lfs pull"):
        Target.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("keyword", ["token", "cache_dir", "local_files_only", "subfolder", "load_in_4bit"])
def test_keywords_that_transformers_lacks_or_would_use_for_a_part_of_the_files_are_refused(keyword, tiny_path):
    with pytest.raises(
        ValueError, match=f"^{keyword}= is not supported here: (it only reaches the model: )?(use|set|download)"
    ):
        Target.from_pretrained(tiny_path, device="cpu", **{keyword: "x"})
    Target.from_pretrained(tiny_path, device="cpu", **{keyword: "" if keyword == "subfolder" else None})


@pytest.mark.parametrize("device", ["auto", "gpu", "cuda:99", "hpu", 3.5])
def test_a_device_that_is_not_there_is_one_sentence(device, tiny_path):
    with pytest.raises(ValueError, match=f"^device={device} is not available .*set cpu, cuda or cuda:N"):
        Target.from_pretrained(tiny_path, device=device)


def test_a_device_is_not_tried_before_processes_share_devices(tiny_path, monkeypatch):
    """Each process would open a context on the first GPU, because `sharding.arguments` chooses the process's own."""
    monkeypatch.setattr(loading.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading.torch, "empty", lambda *args, **kwargs: pytest.fail("a device was tried"))
    with pytest.raises(ValueError, match="sharding=fsdp needs processes that torchrun starts"):
        Target.from_pretrained(tiny_path, dtype="float32", sharding="fsdp")


def test_a_checkpoint_for_mlx_is_named(tiny_path, tmp_path, monkeypatch):
    shutil.copytree(tiny_path, tmp_path, dirs_exist_ok=True)
    edit(tmp_path, lambda config: config.update(quantization_config={"group_size": 64, "bits": 4}))
    with pytest.raises(ValueError, match=r"^target .* lacks quant_method, as in checkpoints for MLX"):
        Target.from_pretrained(tmp_path, device="cpu")
    error = ValueError("Found `quant_method=bitsandbytes` but `quantization_config` is not a `BitsAndBytesConfig`.")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", mock.Mock(side_effect=error))
    with pytest.raises(ValueError, match=r"^Found `quant_method=bitsandbytes`"):
        Target.from_pretrained(tmp_path, device="cpu")


def test_an_adapter_is_not_left_out_silently(tmp_path):
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="contains a LoRA adapter, which would be left out: give a directory"):
        Target.from_pretrained(tmp_path, device="cpu")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="is a LoRA adapter without its model: give a directory of the merged model"):
        Target.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("embeddings_only", [False, True])
def test_the_index_of_an_earlier_checkpoint_is_not_read(tmp_path, embeddings_only: bool):
    """transformers saves one file next to it, and removes the parts that it names."""
    for seed, size in enumerate(("20KB", "1GB")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config())
        model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).is_file() and not [*tmp_path.glob("model-*")]
    target = Target.from_pretrained(tmp_path, dtype="float32", device="cpu", embeddings_only=embeddings_only)
    assert torch.equal(target.embeddings, model.get_input_embeddings().weight)
    assert {*weight_map(target).values()} == {tmp_path / WEIGHTS} and "weights_digest" in fingerprint(target)


@pytest.mark.parametrize(("part", "complaint"), [("vision", None), ("text", r"lacks \d+ weights .*model\.text_model")])
def test_a_target_without_its_image_model_is_complete(tmp_path, part, complaint):
    """Use SmolVLM, of which only the text model is used."""
    text = tiny_config().to_dict()
    sight = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    sight |= {"image_size": 16, "patch_size": 4}
    config = SmolVLMConfig(text_config=text, vision_config=sight, image_token_id=3, pad_token_id=0)
    SmolVLMForConditionalGeneration(config).save_pretrained(tmp_path)
    weights = {name: w for name, w in load_file(tmp_path / "model.safetensors").items() if f"{part}_model" not in name}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with contextlib.nullcontext() if complaint is None else pytest.raises(ValueError, match=complaint):
        Target.from_pretrained(tmp_path, device="cpu")


@torch.no_grad()
def test_a_target_may_read_tokens_that_it_never_writes(tmp_path):
    """Use Llama-3.2-Vision, whose embedding has rows for images beyond those of its lm_head."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.3)).eval()
    written = model.config.vocab_size
    model.model.embed_tokens = torch.nn.Embedding(written + 8, model.config.hidden_size)
    target = Target(copy.deepcopy(model))
    assert target.vocab_size == written
    prompt = torch.arange(3, 12)[None]
    theirs = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    head = Eagle3Head.for_target(target, ttt_steps=3, target_layer_ids=[0, 1])
    settings = {"max_new_tokens": 12, "eos_token_id": -1}
    assert (
        generate(target, drafter_for(head.eval(), target), prompt, **settings).new_tokens[0] == theirs[0, 9:].tolist()
    )
    save_head(head, tmp_path, target)
    assert load_head(tmp_path, target).config.vocab_size == written


def test_a_special_token_without_an_embedding_is_refused_where_it_occurs(tiny_path, tmp_path):
    """Use Gemma 3's text models, which come with the tokenizer of those that support images."""
    shutil.copytree(tiny_path, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image {n}>" for n in range(64)]})
    tokenizer.save_pretrained(tmp_path)
    target = Target.from_pretrained(tmp_path, dtype="float32", device="cpu")
    known, unknown = (torch.tensor([tokenizer.encode(text)]) for text in ("def add(self)", "def <image 63>(self)"))
    rows = target.vocab_size
    assert unknown.max() >= rows and target.forward(known).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"the text contains '<image 63>' \(token \d+\), .*leave the token out"):
        target.forward(unknown)
    with pytest.raises(ValueError, match=r"the prompt contains token \d+, .*check the tokenizer"):
        generate(target, None, unknown, max_new_tokens=2)


def quantised(model, together: bool):
    """Quantize activations to 8 bits, with a scale for each row or one for all of a forward."""

    def rounded(module, inputs):
        (x,) = inputs
        scale = (x.abs().amax() if together else x.abs().amax(-1, keepdim=True)) / 127
        return (x / scale).round() * scale

    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(rounded)
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    return model


@pytest.mark.parametrize("together", [True, False])
def test_a_target_whose_activations_are_quantised_together_is_decoded_plainly(tiny_path, monkeypatch, together):
    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *args, **kwargs: quantised(load(*args, **kwargs), together))
    target = Target.from_pretrained(tiny_path, dtype="float32", device="cpu", pack=False)
    assert target.capabilities.trees == (not together)
    if not together:
        return
    prompts = torch.tensor([[5, 9, 17, 5, 9, 17, 5, 9], [30, 2, 4, 6, 8, 10, 12, 14]])
    plain = [generate(target, None, row[None], max_new_tokens=12).new_tokens[0] for row in prompts]
    with pytest.warns(UserWarning, match="different logits in a batch with other texts"):
        assert generate(target, NgramDrafter(), prompts, max_new_tokens=12).new_tokens == plain


@pytest.mark.parametrize("dtype, small, large", [(torch.float32, 1e-5, 1e-3), (torch.bfloat16, 0.05, 0.2)])
def test_a_capability_is_measured_up_to_the_roundings_of_a_dtype(dtype, small, large):
    logits = torch.tensor([1.0, -2.0, 4.0], dtype=dtype)
    assert allclose(logits * (1 + small), logits) and not allclose(logits * (1 + large), logits)


def test_a_target_is_looked_for_at_its_revision(monkeypatch):
    """The main branch of some repositories has no model, and the cache may only have another revision."""

    def metadata(url: str, timeout: float) -> None:
        raise OSError(f"nothing at {url}")

    def cached(name: str, file: str, revision: str | None) -> str | None:
        return file if revision == "v2" else None

    monkeypatch.setattr(resolve_path, "try_to_load_from_cache", cached)
    monkeypatch.setattr(resolve_path, "get_hf_file_metadata", metadata)
    assert resolve_path.resolve_path("org/model", revision="v2") == "org/model"
    with pytest.raises(ValueError, match=r"nothing at .*/org/model/resolve/v3/config\.json"):
        resolve_path.resolve_path("org/model", revision="v3")


def test_a_model_of_the_hub_without_an_owner_has_its_commit(monkeypatch, tmp_path):
    def cached(name: str, file: str, revision: str | None) -> str | None:
        return str(tmp_path / "abc" / file) if name == "gpt2" else None

    monkeypatch.setattr(files, "try_to_load_from_cache", cached)
    target = Target(LlamaForCausalLM(tiny_config()))
    target.checkpoint = "gpt2"
    assert files.commit_of(target) == "abc"
    monkeypatch.undo()
    target.checkpoint = "my model"  # the name of one that was made in memory
    assert files.commit_of(target) is None


class PeftModel(nn.Module):
    """Wrap a model as peft does, in another module whose forward does not name its arguments."""

    __module__ = "peft.peft_model"

    def __init__(self, model: nn.Module):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.config = getattr(model, "config", None)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*inputs, **kwargs)


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), nn.DataParallel, PeftModel, lambda m: torch.compile(PeftModel(m))]
)
def test_a_model_in_a_wrapper_is_the_model(wrap, target):
    """Give what a notebook has at hand (huggingface/transformers#22248): drafts could not branch, or there was no config."""
    wrapped = Target(wrap(target.model), target.tokenizer, "wrapped")
    assert wrapped.model is target.model and wrapped.capabilities.trees


def test_a_wrapper_that_may_change_logits_stays(target):
    class Steered(nn.Module):
        def __init__(self, model: nn.Module):
            super().__init__()
            self.model, self.config = model, model.config

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name == "model" else getattr(self.model, name)

    steered = Steered(target.model)
    assert Target(steered, target.tokenizer).model is steered


def test_what_is_not_a_model_is_named(target):
    prompts = PeftModel(target.model)
    prompts.prompt_encoder = nn.ModuleDict()  # vectors that this module puts before the text
    for other in (prompts, nn.Linear(2, 2), "org/model", None):
        with pytest.raises(ValueError, match=f"^model is {type(other).__name__}, not a language model of transformers"):
            Target(other)


def test_a_model_made_in_memory_has_no_files(tiny_path, monkeypatch):
    """Start where a checkpoint lies, which is not its own."""
    monkeypatch.chdir(tiny_path)
    assert weight_map(Target(LlamaForCausalLM(tiny_config()))) == {}


def odd_target(tiny_path: Path, tmp_path: Path, text: str | None, **config: Any) -> Path:
    """Copy the tiny target with this generation_config.json (None: without), and other settings in its config.json."""
    path = tmp_path / "odd"
    shutil.copytree(tiny_path, path)
    settings = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").unlink() if text is None else (path / "generation_config.json").write_text(text)
    return path


@pytest.mark.parametrize(
    "text, config, ends",
    [
        (None, {"eos_token_id": 5}, [5, 0]),  # 0 is the tokenizer's
        (None, {"eos_token_id": None}, [0]),
        ('{"eos_token_id": []}', {}, [0]),
        ('{"eos_token_id": [7, 5, 7, 0]}', {}, [7, 5, 0]),
        ('{"eos_token_id": [100000, -1, 7]}', {}, [7, 0]),
    ],
)
def test_end_tokens_are_named_once_and_in_the_vocabulary(tiny_path, tmp_path, text, config, ends):
    target = Target.from_pretrained(odd_target(tiny_path, tmp_path, text, **config), device="cpu")
    assert target.eos_token_ids == ends
    generate(target, None, torch.tensor([[5, 6]]), max_new_tokens=3)


@pytest.mark.parametrize("ends", [{7, 5}, np.int64(7), [np.int64(7)], torch.tensor([7, 5])], ids=str)
def test_a_model_made_in_memory_may_have_other_kinds_of_numbers(ends):
    model = LlamaForCausalLM(tiny_config())
    model.generation_config.eos_token_id = ends
    target = Target(model, context=np.int64(16))
    assert {7} <= set(target.eos_token_ids) <= {7, 5} and target.context == 16
    assert all(type(token) is int for token in target.eos_token_ids)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id='</s>' of target .* is not a token id or a list of them: mend"),
        ('{"eos_token_id": [[0]]}', r"eos_token_id=\[\[0\]\] of target .* is not a token id"),
        ('{"eos_token_id": [null]}', r"eos_token_id=\[None\] of target .* is not a token id"),
        ('{"eos_token_id": 1.5}', "eos_token_id=1.5 of target .* is not a token id"),
        ("{", "generation_config.json is not a JSON object: mend it, or remove the file"),
    ],
)
def test_a_generation_config_without_usable_end_tokens_is_refused(tiny_path, tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        Target.from_pretrained(odd_target(tiny_path, tmp_path, text), device="cpu")


def test_what_transformers_asserts_of_a_config_is_one_sentence(tiny_path, tmp_path):
    path = odd_target(tiny_path, tmp_path, None, pad_token_id=100000)
    with pytest.raises(
        ValueError, match=r"cannot be loaded: transformers fails on its files \(AssertionError: Padding_idx"
    ):
        Target.from_pretrained(path, device="cpu")


def test_tensors_that_cannot_be_written_leave_no_file(tmp_path):
    """Check also that a link to a file that is missing is replaced, and others may read what replaces it."""
    with pytest.raises(ValueError, match="non contiguous"):
        files.save_tensors({"a": torch.zeros(3, 4).t()}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").symlink_to(tmp_path / "missing")
    files.save_tensors({"b": torch.zeros(3)}, tmp_path / "b.safetensors")
    (tmp_path / "new").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.safetensors", "new"]
    assert (tmp_path / "b.safetensors").lstat().st_mode == (tmp_path / "new").stat().st_mode
