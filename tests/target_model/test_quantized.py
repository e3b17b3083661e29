"""A 4-bit and an 8-bit target: loaded, drafted for and decoded as any other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from foredraft.heads import Target, load_head
from foredraft.heads.checkpoint import save_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target_model import loading
from foredraft.heads.target_model.logits import check_logits
from foredraft.inference import drafter_for, generate, load_drafter
from foredraft.inference.drafters import NgramDrafter
from foredraft.inference.evaluation.measure import float32_target
from tests.support.tiny import tiny_config

OUTLIER = 300  # a token with one large feature, which LLM.int8 would take out of all rows of a forward


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Save a wider target than other tests': 4-bit weights are packed in blocks of 64 of a row."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("wider")
    model = LlamaForCausalLM(tiny_config(hidden_size=64, intermediate_size=128, num_hidden_layers=3))
    model.model.embed_tokens.weight.data[OUTLIER] = 5.0 * torch.nn.functional.one_hot(torch.tensor(3), 64)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def whole(path) -> Target:
    return Target.from_pretrained(path, dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=["4bit", "8bit"])
def packed(request, path) -> Target:
    return Target.from_pretrained(path, dtype="float32", device="cpu", quantization=request.param)


def prompt() -> torch.Tensor:
    return torch.tensor([[5, 9, 17, 5, 9, 17, 5, 9]])


def test_its_weights_are_packed_and_its_logits_are_near_the_whole_models(packed, whole):
    weight = packed.model.model.layers[0].mlp.down_proj.weight
    assert weight.dtype == (torch.uint8 if packed.quantization == "4bit" else torch.int8)
    ours, theirs = packed.forward(prompt()).logits, whole.forward(prompt()).logits
    assert 0 < (ours - theirs).abs().mean() < 0.5 * theirs.std()
    check_logits(packed)


def test_a_warning_of_every_product_is_printed_once(path, caplog, monkeypatch):
    monkeypatch.setattr(loading, "SHOWN", set())
    target = Target.from_pretrained(path, dtype="bfloat16", device="cpu", quantization="8bit")
    for _ in range(2):
        target.forward(prompt())
    assert sum("MatMul8bitLt" in record.getMessage() for record in caplog.records) == 1


def test_a_checkpoint_that_was_saved_in_8_bit_takes_no_outliers_out(path, tmp_path):
    saved = LlamaForCausalLM.from_pretrained(path, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    saved.save_pretrained(tmp_path)
    target = Target.from_pretrained(tmp_path, dtype="float32", device="cpu")
    assert target.model.config.quantization_config.llm_int8_threshold == 6 and target.capabilities.trees
    assert reads_texts_apart(target)


def test_what_it_makes_of_a_text_does_not_depend_on_what_is_read_beside_it(packed):
    assert reads_texts_apart(packed)


def reads_texts_apart(target: Target) -> bool:
    both = torch.cat([prompt(), torch.full((1, 8), OUTLIER)])
    return torch.allclose(target.forward(both).logits[:1], target.forward(prompt()).logits, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_changes_nothing(packed, temperature):
    settings = {"max_new_tokens": 24, "eos_token_id": -1, "temperature": temperature, "seed": 0}
    plain = generate(packed, None, prompt(), **settings).new_tokens
    medusa, eagle = MedusaHead.for_target(packed, num_heads=3).eval(), Eagle3Head.for_target(packed, ttt_steps=3).eval()
    for drafter in (
        NgramDrafter(),
        drafter_for(medusa, packed, nodes=6),
        drafter_for(eagle, packed, nodes=6, min_probability=0),
    ):
        assert generate(packed, drafter, prompt(), **settings).new_tokens == plain


def test_a_head_of_it_is_saved_and_loaded(packed, tmp_path):
    head = Eagle3Head.for_target(packed, ttt_steps=2)
    save_head(head, tmp_path, packed)
    again = load_head(tmp_path, packed)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert generate(packed, load_drafter(str(tmp_path), packed), prompt(), max_new_tokens=4).new_tokens


def test_its_float32_copy_is_packed_too(packed, path):
    half = Target.from_pretrained(path, dtype="bfloat16", device="cpu", quantization=packed.quantization)
    exact = float32_target(half)
    assert exact is not None
    assert exact.quantization == packed.quantization and exact.dtype == torch.float32
    assert torch.equal(exact.forward(prompt()).logits, packed.forward(prompt()).logits)


def test_another_width_is_refused(path):
    with pytest.raises(ValueError, match="quantization=3bit is not one of 4bit, 8bit"):
        Target.from_pretrained(path, quantization="3bit")


def quantized(path: Path, saved: Path, scales: str) -> Path:
    """Save the model in bfloat16 with its MLPs in FP8, in blocks of 64 x 64, with the scales under this name."""
    shutil.copytree(path, saved)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    for name in [name for name in tensors if "mlp" in name]:
        blocks = tensors[name].float().unflatten(0, (-1, 64)).unflatten(2, (-1, 64))
        scale = blocks.abs().amax((1, 3)) / 448
        stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors |= {name: stored.flatten(2).flatten(0, 1), name + scales: scale}
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    return saved


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "auto"])
def test_fp8_weights_are_dequantized_in_the_chosen_dtype(dtype, path, tmp_path, whole):
    """Use the layout of DeepSeek's and Qwen's FP8 checkpoints, of which transformers dequantizes the weights on a CPU."""
    saved = quantized(path, tmp_path / "fp8", "_scale_inv")
    config = json.loads((saved / "config.json").read_text()) | {"dtype": "bfloat16"}
    method = {"quant_method": "fp8", "weight_block_size": [64, 64], "modules_to_not_convert": ["lm_head"]}
    (saved / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    target = Target.from_pretrained(saved, dtype=dtype, device="cpu")
    assert dtype == "auto" or {each.dtype for each in target.model.parameters()} == {getattr(torch, dtype)}
    ours, theirs = target.forward(prompt()).logits, whole.forward(prompt()).logits
    assert (ours - theirs).abs().mean() < 0.2 * theirs.std()


@pytest.mark.parametrize("method", [{"quant_method": "modelopt", "quant_algo": "FP8"}, {"quant_method": "fp8"}, None])
def test_scales_that_transformers_does_not_apply_are_refused(method, path, tmp_path):
    saved = quantized(path, tmp_path / "fp8", "_scale")
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | ({"quantization_config": method} if method else {})))
    with pytest.raises(ValueError, match=r"does not apply the scales of its quantized weights \(model.*weight_scale\)"):
        Target.from_pretrained(saved, device="cpu")
