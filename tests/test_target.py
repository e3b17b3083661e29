"""How a target is loaded."""

import pytest
import torch
from transformers import LlamaForCausalLM

from heads import Target
from tests.support.tiny import tiny_config


@pytest.mark.parametrize("capability, dtype", [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_auto_is_float32_where_the_processor_has_no_bfloat16_products(tmp_path, monkeypatch, capability, dtype):
    LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert Target.from_pretrained(tmp_path, device="cpu").dtype == dtype
    assert Target.from_pretrained(tmp_path, device="cpu", dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("named", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_mask_of_ours_is_refused(named):
    model = LlamaForCausalLM(tiny_config())
    model.config._attn_implementation = named
    with pytest.raises(ValueError, match=f"attn_implementation={named} .*attn_implementation=sdpa"):
        Target(model)
