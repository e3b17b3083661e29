"""A target spread over devices says what the whole one says; in several processes: tests/train/test_strategies.py."""

import copy
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM, GptOssForCausalLM, LlamaForCausalLM

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.caches.kv_cache import KEY_BLOCK, KVCache
from foredraft.heads.target_model import sharding
from foredraft.heads.target_model.capabilities import Capabilities
from foredraft.heads.target_model.packing import num_weights
from foredraft.heads.target_model.sharding import COLLECTIVE, arguments
from foredraft.inference import drafter_for, generate
from foredraft.inference.serve.worker import Worker
from foredraft.train.hidden_states import online
from tests.support.architectures import FAMILIES
from tests.support.batches import batch, states_of
from tests.support.head_factory import new_head
from tests.support.processes import end, succeeded, torchrun
from tests.support.tiny import tiny_config


def test_layers_may_lie_on_several_devices(target: Target, tiny_path: Path, tmp_path: Path):
    """Use the host and its disk as devices."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i > 2 else "cpu" for i in range(target.num_layers)}
    tokens = torch.arange(12)[None]
    for how in ({"device_map": places, "offload_folder": str(tmp_path)}, {"sharding": "layers"}):
        apart = Target.from_pretrained(tiny_path, dtype="float32", **how)
        ours, theirs = (t.forward(tokens, layers=[1, 5]) for t in (apart, target))
        torch.testing.assert_close(ours.logits, theirs.logits)
        torch.testing.assert_close(ours.aux_hidden_states, theirs.aux_hidden_states)
    assert arguments(str(tiny_path), "layers", None) == {"device_map": "auto"}


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp"])
def test_a_head_for_a_target_with_its_ends_on_the_host(kind: str, target: Target, tiny_path: Path, tmp_path: Path):
    """Use layers that accelerate loads when they run, and whose weights are empty before (huggingface/transformers#48409)."""
    model = cpu_offload(AutoModelForCausalLM.from_pretrained(tiny_path), torch.device("cpu"))
    apart = Target(model, target.tokenizer, "apart")
    assert model.lm_head.weight.is_meta and apart.device.type == "cpu" and not apart.capabilities.one_device
    torch.testing.assert_close((apart.embeddings, apart.lm_head_rows), (target.embeddings, target.lm_head_rows))
    save_head(new_head(kind, target), tmp_path, target)
    expected = generate(target, None, torch.tensor([[5, 6, 7]]), max_new_tokens=8, eos_token_id=-1).new_tokens
    for head in (load_head(tmp_path, apart), new_head(kind, apart)):
        drafter = drafter_for(head.eval(), apart)
        assert (
            generate(apart, drafter, torch.tensor([[5, 6, 7]]), max_new_tokens=8, eos_token_id=-1).new_tokens
            == expected
        )


@pytest.mark.parametrize(
    ("sharding", "quantization", "message"),
    [
        ("layer", None, "sharding=layer is not one of layers, fsdp, tensor"),
        *((name, None, f"sharding={name} needs processes that torchrun starts") for name in COLLECTIVE),
        ("fsdp", "8bit", "sharding=fsdp splits weights, which quantization=8bit packs"),
    ],
)
def test_what_cannot_be_spread_says_why(sharding, quantization, message, tiny_path: Path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=message):
        Target.from_pretrained(tiny_path, sharding=sharding, quantization=quantization)


def test_heads_that_processes_cannot_share_equally_are_named_at_the_start(tiny_path: Path):
    sharding.check_divides(str(tiny_path), 2)
    with pytest.raises(
        ValueError, match=r"splits the num_key_value_heads=2 of .*, and 4 processes do not divide it: .*sharding=fsdp"
    ):
        sharding.check_divides(str(tiny_path), 4)


def test_experts_that_processes_cannot_share_equally_are_named_too(experts: str):
    sharding.check_divides(experts, 2)
    config = json.loads((Path(experts) / "config.json").read_text())
    (Path(experts) / "config.json").write_text(json.dumps(config | {"num_local_experts": 5}))
    with pytest.raises(ValueError, match=r"splits the num_local_experts=5 of .*, and 2 processes do not divide it"):
        sharding.check_divides(experts, 2)


def test_each_device_holds_the_cache_of_its_own_layers_alone(target: Target):
    """Use two devices, one of which has no numbers: together they reserve what one would."""
    cache = KVCache(2, 1, KEY_BLOCK, "cpu")
    for layer, device in enumerate(("cpu", "meta")):
        cache.update(torch.zeros(1, 2, 3, 8, device=device), torch.zeros(1, 2, 3, 8, device=device), layer)
    sizes = [(states.device.type, states.numel()) for states in states_of(cache)]
    assert sizes == [(device, 2 * KEY_BLOCK * 8) for device in ("cpu", "cpu", "meta", "meta")]


def test_processes_that_share_a_target_must_be_given_the_same(target: Target, monkeypatch):
    """Give the second of two another prompt, or the same: otherwise one would wait for ever for another that has ended."""
    shared, others = Target(target.model, target.tokenizer, "shared"), [[6]]
    shared.sharding = "fsdp"

    def gather(values: list, value: list) -> None:
        values[:] = [value, [others, *value[1:]]]

    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sharding.dist, "all_gather_object", gather)
    with pytest.raises(ValueError, match=r"^sharding=fsdp: the processes got different prompts"):
        generate(shared, None, torch.tensor([[5]]), max_new_tokens=3, seed=1)
    others[0][0] = 5
    assert (
        len(generate(shared, None, torch.tensor([[5]]), max_new_tokens=3, seed=1, eos_token_id=-1).new_tokens[0]) == 3
    )
    with pytest.raises(ValueError, match=r"^target.sharding=fsdp: requests reach one process"):
        Worker(shared, None)


def test_logits_of_a_last_device_come_back_to_the_first():
    """Use shapes without numbers, but on the devices that they would be on, where mixing two is an error."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        target = Target(LlamaForCausalLM(tiny_config()))
        head = target.model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty(head.weight.shape, device="cuda:1"), requires_grad=False)
        add_hook_to_module(head, AlignDevicesHook(execution_device="cuda:1"))  # as accelerate's dispatch does
        assert target.logits(torch.empty(2, 3, target.hidden_size)).device.type == "cpu"


@pytest.fixture
def experts(tmp_path: Path) -> str:
    """Make a target of experts, for which transformers has no plan for slices."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(copy.deepcopy(FAMILIES["gpt_oss"]))
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "experts")
    return str(tmp_path / "experts")


@pytest.mark.nightly
def test_a_target_is_spread_over_the_processes_of_a_node(tiny_path: Path, experts: str, tmp_path: Path):
    succeeded(end(torchrun(__file__, str(tiny_path), experts, cwd=tmp_path, processes=4)))


def compare(path: str) -> None:
    whole = Target.from_pretrained(path, dtype="float32", device="cpu")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)  # each process has its own text
    texts = [batch(40, 25), batch(*((9, 30, 12, 14) if rank else (65,)))]
    total = num_weights(whole.model)
    for kind in COLLECTIVE:
        target = Target.from_pretrained(path, dtype="float32", device="cpu", sharding=kind)
        for text, packed in zip(texts, (True, False), strict=True):  # unchanged, and document by document
            with torch.no_grad(), patch.object(Capabilities, "packed_rows", packed):
                found, wanted = (online.forward_target(each, text, [1, 3]) for each in (target, whole))
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
        here = sum(getattr(p, "_local_tensor", p).numel() for p in target.model.parameters())
        assert 0.4 < here / total < 0.7, f"{kind}: {here} of {total} weights here, not those of half a node"


if __name__ == "__main__":  # one of four processes that are two nodes
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        compare(path)
    dist.barrier()
    dist.destroy_process_group()
