"""scripts/plan.py: its memory is that of a real step, its arithmetic adds up, and what will not fit is said."""

import json
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from foredraft.heads.base import PackedBatch
from foredraft.scripts import plan
from foredraft.train.losses import kl_div
from foredraft.train.module import rows_at_a_time
from foredraft.train.optimizer import build
from foredraft.train.runtime import memory_plan
from foredraft.train.start import new_head
from foredraft.train.trainer import HeadTrainingArguments
from tests.support import ROOT, nightly_but
from tests.support.configs import composed
from tests.support.modes import LiveBytes
from tests.support.tiny import tiny_config

ROWS, LENGTH = 2, 128
# Quantization methods of checkpoints: their settings, and the bits of a weight.
STORED = {
    "fp8": ({"weight_block_size": [128, 128]}, 8),
    "awq": ({"bits": 4}, 4.5),
    "compressed-tensors": ({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
    "bitsandbytes": ({"load_in_4bit": True}, 4.5),
    "unknown": ({}, 16),
}
SIZE = ["trainer.bf16=false", f"trainer.per_device_train_batch_size={ROWS}", f"max_length={LENGTH}"]


@pytest.fixture(scope="module")
def small(tiny_path: Path) -> DictConfig:
    given = ["target.dtype=float32", *SIZE, "head.draft_vocab_size=128"]
    return composed("plan", f"target.path={tiny_path}", *given)


@pytest.fixture(scope="module")
def planned(small: DictConfig) -> dict:
    return plan.plan(small)


KINDS = [("eagle3", False), ("eagle3", True), ("medusa", False), ("dflash", False)]


@pytest.mark.parametrize(("kind", "bf16"), nightly_but(KINDS, ("eagle3", False)))
def test_planned_bytes_and_flop_are_those_of_a_real_step(kind: str, bf16: bool, tmp_path: Path):
    """Compare with real tensors of a target with 63M parameters: weights, gradients and state exactly, the sum to 15 %, and
    the FLOP that torch counts to 6 %."""
    file = str(ROOT / "scripts/targets/llama-63m.json")
    given = [
        f"target={file}",
        "target.dtype=float32",
        f"max_length={LENGTH}",
        f"trainer.bf16={str(bf16).lower()}",
        "trainer.optim=adamw",
    ]
    cfg = composed("plan", f"head={kind}", *given)
    target = instantiate(cfg.target, device="cpu")
    head = new_head(cfg.head, target)
    head.on_train_begin(target)
    distillation = instantiate(cfg.objective, head=head, target=target, loss=kl_div)
    distillation.bf16, distillation.chunk = bf16, rows_at_a_time(target.vocab_size, "cuda")
    learned = [p for p in distillation.parameters() if p.requires_grad]
    for parameter in learned:
        parameter.grad = torch.zeros_like(parameter)
    text = PackedBatch(
        torch.randint(target.vocab_size, (1, LENGTH)),
        torch.ones(1, LENGTH).bool(),
        torch.zeros(1, LENGTH).long(),
        torch.arange(LENGTH)[None],
    )
    prepared = distillation.prepare(text, 0)
    before = [*distillation.parameters(), *distillation.buffers(), *target.model.parameters(), *text[:4]]
    grads = [parameter.grad for parameter in learned]
    with FlopCounterMode(display=False) as counter, LiveBytes(before + grads) as live:
        distillation(*text[:4], **prepared).loss.backward()
    optimizer = build(distillation, [], HeadTrainingArguments(str(tmp_path), use_cpu=True))
    optimizer.step()
    state = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor))
    planned = plan.plan(cfg)
    if not bf16:  # which has the same, and many CPUs only emulate its products
        assert LENGTH * sum(planned["flops_per_token"]) == pytest.approx(counter.get_total_flops(), rel=0.06)
    lines = {name: size * memory_plan.GIB for name, (size, _) in planned["gib"].items()}
    held = [*head.parameters(), *head.buffers()]
    exact = {
        "target weights": sum(p.nbytes for p in target.model.parameters()),
        "head weights": sum(t.nbytes for t in held),
        "gradients": sum(p.nbytes for p in learned),
        "optimizer state": state,
    }
    assert {name: lines[name] for name in exact} == pytest.approx(exact, rel=1e-4)  # AdamW also counts its steps
    total = sum(size for name, size in lines.items() if name != "reserve")
    assert total == pytest.approx(sum(exact.values()) + live.peak, rel=0.15)


def test_tied_weights_are_counted_once(small: DictConfig, tmp_path: Path):
    model = LlamaForCausalLM(tiny_config(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    lines = plan.plan(OmegaConf.merge(small, {"target": {"path": str(tmp_path)}}))["gib"]
    assert lines["target weights"][0] * memory_plan.GIB == sum(parameter.nbytes for parameter in model.parameters())


def test_the_sum_is_the_sum_and_pieces_take_less(small: DictConfig, planned: dict):
    assert planned["total"] == pytest.approx(sum(size for size, _ in planned["gib"].values()))
    body, head = planned["flops_per_token"]
    assert planned["tokens_per_second"] == pytest.approx(989e12 * 0.35 / (body + head))
    assert planned["hours"] == pytest.approx(500_000_000 / planned["tokens_per_second"] / 3600)
    assert planned["disk"] == 500_000_000 * 4 * 32 * 2  # three layers and the last one, hidden 32, bfloat16
    for sharding in ("fsdp", "tensor"):
        pieces = plan.plan(OmegaConf.merge(small, {"target": {"sharding": sharding}, "gpus": 4}))["gib"]
        assert pieces["target weights"][0] < 0.6 * planned["gib"]["target weights"][0]


@pytest.mark.parametrize("shape, gib", [("qwen3-8b", (15.26, 2.32)), ("llama-3.3-70b", (131.42, 3.91))])
def test_of_a_target_that_runs_elsewhere_its_ends_are_counted(shape: str, gib: tuple[float, float]):
    """Count in bfloat16: 2 x 151,936 x 4,096 and 2 x 128,256 x 8,192 weights."""
    given = [f"target.path={ROOT}/scripts/targets/{shape}.json", "head=medusa", "max_length=128"]
    for features, size in zip(("online", "server"), gib, strict=True):
        found = plan.plan(composed("plan", *given, f"hidden_states={features}"))
        assert found["gib"]["target weights"][0] == pytest.approx(size, abs=0.01)
        assert ("target at work" in found["gib"]) == (found["flops_per_token"][0] > 0) == (features == "online")


@pytest.mark.parametrize("strategy", memory_plan.SHARDS)
def test_shards_are_shares(strategy: str, small: DictConfig, planned: dict):
    one, eight = planned["gib"], plan.plan(OmegaConf.merge(small, {"strategy": strategy, "gpus": 8}))["gib"]
    for name, cut in zip(("head weights", "gradients", "optimizer state"), memory_plan.SHARDS[strategy], strict=True):
        assert eight[name][0] == pytest.approx(one[name][0] / (8 if cut else 1))


def test_processes_that_share_rows_hold_parts_of_them(small: DictConfig):
    one, four = (plan.plan(OmegaConf.merge(small, {"gpus": 4, "context_parallel": count}))["gib"] for count in (1, 4))
    for name in ("aux hidden states", "target at work"):
        assert four[name][0] == pytest.approx(one[name][0] / 4)
    assert one["activations"][0] / 4 < four["activations"][0] < one["activations"][0]  # a chunk of logits stays whole
    assert four["head weights"] == one["head weights"]


def test_what_does_not_fit_has_a_remedy(small: DictConfig, planned: dict):
    tight = OmegaConf.merge(small, {"gpu_gib": planned["total"] - 1e-6})
    found = plan.fitting(tight)
    assert found is not None and found[1] <= tight.gpu_gib
    assert plan.fitting(OmegaConf.merge(small, {"gpu_gib": 0.1})) is None
    assert plan.fitting(OmegaConf.merge(small, {"gpu_gib": 0.1, "max_length": 3})) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"path": "no.json"}, "target=no.json does not exist"),
        ({"path": str(ROOT / "docs")}, "docs has no config.json: give a directory saved by transformers"),
        ({"path": "x/y", "quantization": "2bit"}, "target.quantization=2bit is not one of"),
        ({"path": "x/y", "sharding": "layers"}, "target.sharding=layers: a plan knows fsdp, tensor"),
        (None, "head=auto is a search, which only train/run.py does: name a head"),
    ],
)
def test_bad_input_to_a_plan(change: dict | None, message: str, small: DictConfig):
    given = OmegaConf.merge(small, {"target": change}) if change else composed("plan", "head=auto", "target=x.json")
    with pytest.raises(ValueError, match=message):
        plan.plan(given)


def test_a_plan_as_it_is_typed(tiny_path: Path, call):
    given = [f"target.path={tiny_path}", "target.sharding=fsdp", "strategy=fsdp", "gpus=2"]
    said = call(plan.main, *given).out
    assert said.startswith("eagle3 (")
    assert "strategy=fsdp" in said and "one of 2 pieces on every GPU" in said and "gathered target" in said


@pytest.mark.parametrize(
    "given, message",
    [
        ("strategy=single", "strategy=single trains on one GPU, and gpus=8: set gpus=1"),
        ("strategy=zero2", "strategy=zero2 trains with AdamW: set trainer.optim=adamw, or strategy=fsdp"),
        ("context_parallel=3", "context_parallel=3 must divide the 8 processes"),
        ("head=medusa head.blocks=-1", "^head.blocks=-1 must be a whole number from 0 to 65,536"),
        ("head=hydra loss=regression", "^loss=regression compares hidden states"),
        ("hidden_states=offline target.sharding=fsdp", "and target.sharding=fsdp splits it: set hidden_states=server"),
    ],
)
def test_a_run_that_would_be_refused_is_not_planned(given: str, message: str, tiny_path: Path):
    with pytest.raises(ValueError, match=message):
        plan.check_run(composed("plan", f"target.path={tiny_path}", "gpus=8", *given.split()))


def test_a_plan_of_hidden_states_on_disk_counts_the_run_that_writes_them(call):
    given = [f"target.path={ROOT}/scripts/targets/qwen3-8b.json", "hidden_states=offline", "tokens=500000000"]
    said = call(plan.main, *given).out
    assert "the first run writes them with the whole target: 15.26 GiB of weights on every GPU, and " in said


@pytest.mark.parametrize("kind", ["dflash", "dspark", "domino", "p_eagle", "xpress"])
def test_a_head_that_drafts_in_blocks_is_planned(tiny_path: Path, kind: str):
    """Count the blocks that start in a step, not all that could."""
    given = [f"head={kind}", f"target.path={tiny_path}", "target.dtype=float32", *SIZE]
    found = plan.plan(composed("plan", *given))
    assert found["gib"]["activations"][0] > 0 and found["head_parameters"] > 0


@pytest.mark.parametrize("method", nightly_but(STORED, "fp8"))
def test_a_quantized_checkpoint_is_planned_as_it_is_stored(method: str, tiny_path: Path, tmp_path: Path):
    """Without this, FP8 checkpoints would need twice their memory. Another quantization on top is not a remedy."""
    settings = json.loads((tiny_path / "config.json").read_text())
    stored, bits = STORED[method]
    found = []
    for name, more in (("whole", {}), ("stored", {"quantization_config": {"quant_method": method} | stored})):
        (file := tmp_path / f"{name}.json").write_text(json.dumps(settings | more))
        cfg = composed("plan", f"target.path={file}", *SIZE, "head.draft_vocab_size=128")
        found.append(memory_plan.study(cfg, plan.read_config(str(file)), torch.bfloat16)[1].ends)
        found.append(plan.plan(cfg)["gib"]["target weights"][0] * memory_plan.GIB)
        change = plan.fitting(OmegaConf.merge(cfg, {"gpu_gib": plan.plan(cfg)["total"] - 1e-9}))
        assert change is None or name == "whole" or "quantization" not in change[0]
        assert plan.fitting(OmegaConf.merge(cfg, {"gpu_gib": 1e-6})) is None
    with pytest.raises(ValueError, match=r"quantization=4bit: \S+/stored\.json is quantized already"):
        plan.plan(composed("plan", f"target.path={file}", "target.quantization=4bit", *SIZE))
    ends, whole, _, held = found
    assert (held - ends) / (whole - ends) == pytest.approx(bits / 16)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma4_text"])
def test_a_token_uses_few_of_many_experts(small: DictConfig, tmp_path: Path, kind: str):
    """Check every name in configs: a token's work does not grow with the number of experts."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "first_k_dense_replace": 0}
    sizes |= {"n_group": 1, "topk_group": 1}
    sizes |= {"enable_moe_block": True, "vocab_size_per_layer_input": 256, "top_k_experts": 2, "num_experts_per_tok": 2}
    found = []
    for count in (4, 8):
        path = tmp_path / f"{count}.json"
        counts = {"n_routed_experts": count} if kind == "deepseek_v3" else {"num_experts": count}
        path.write_text(json.dumps({"model_type": kind} | sizes | counts))
        cfg = OmegaConf.merge(small, {"target": {"path": str(path)}})
        found.append(plan.plan(cfg)["flops_per_token"][0])
    router = 2 * 2 * 4 * 32  # FLOP of four experts' rows in it, in both layers
    assert found[1] - found[0] == pytest.approx(router, rel=0.1)
