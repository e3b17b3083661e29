"""Medusa-2 changes the target, and says so; a tuned draft model is a model like any other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from foredraft.heads import Target, adapter, load_head, save_head
from foredraft.heads.draft_model import DraftModelHead
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.medusa2 import Medusa2Head
from foredraft.inference import generate, load_drafter
from foredraft.train import parity_gate
from foredraft.train.joint import JointDistillation
from foredraft.train.losses import kl_div
from foredraft.train.module import DistillationModel
from foredraft.train.optimizer import adamw, muon
from tests.support.batches import PROMPT, batch
from tests.support.processes import complaint

IDS = torch.tensor([PROMPT])


def disturb(target: Target) -> None:
    """Change the adapter as training would; a new one has no effect."""
    for parameter in adapter.lora_layers(target).parameters():
        torch.nn.init.normal_(parameter, std=0.05)


def saved_medusa2(tiny_path: Path, directory: Path) -> None:
    """Save a head of 2 depths with an adapter as after some training."""
    target = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    head = Medusa2Head.for_target(target, num_heads=2)
    disturb(target)
    save_head(head, directory, target)


def text_of(target: Target, drafter=None) -> list[list[int]]:
    return generate(target, drafter, IDS, max_new_tokens=16, eos_token_id=-1).new_tokens


def test_a_new_adapter_changes_nothing_and_a_trained_one_the_text(fresh):
    before = fresh.forward(IDS).logits
    Medusa2Head.for_target(fresh)
    torch.testing.assert_close(fresh.forward(IDS).logits, before)
    disturb(fresh)
    assert (fresh.forward(IDS).logits - before).abs().max() > 0.1
    with adapter.disabled(fresh):
        torch.testing.assert_close(fresh.forward(IDS).logits, before)
    assert all(parameter.requires_grad for parameter in adapter.lora_layers(fresh).parameters())


def test_heads_learn_alone_first_and_then_all_of_it(fresh):
    distillation = JointDistillation(Medusa2Head.for_target(fresh, num_heads=2), fresh, kl_div, heads_only=0.5)
    text = batch(20, 12)
    distillation.progress = 0.4
    distillation(*text).loss.backward()
    assert not any(parameter.grad.any() for parameter in distillation.adapter.parameters())
    assert all(parameter.grad.any() for parameter in distillation.head.parameters())
    disturb(fresh)  # else the second matrix of each pair is zero, and the first learns nothing yet
    distillation.progress = 0.5
    distillation.zero_grad()
    distillation(*text).loss.backward()
    assert all(parameter.grad.any() for parameter in distillation.parameters())
    frozen = {id(parameter) for parameter in distillation.parameters()}
    assert not any(p.requires_grad for p in fresh.model.parameters() if id(p) not in frozen)


def test_the_adapted_target_is_held_to_what_it_said(fresh):
    """Leave the heads' loss out: then the joint loss is the divergence, zero before anything is learned."""
    distillation = JointDistillation(
        Medusa2Head.for_target(fresh, num_heads=2), fresh, kl_div, heads_only=0.0, head_weight=0.0
    )
    text = batch(20, 12)
    assert distillation(*text).loss.item() == pytest.approx(0.0, abs=1e-6)
    disturb(fresh)
    loss = distillation(*text).loss.item()
    now = fresh.forward(text.tokens, text.positions, text.mask()).logits.log_softmax(-1)
    with adapter.disabled(fresh):
        before = fresh.forward(text.tokens, text.positions, text.mask()).logits.log_softmax(-1)
    # Of each document the target's words for tokens 2 and later, which is what a depth-1 draft is compared with.
    asked = [*range(1, 19), *range(21, 31)]
    divergence = (before.exp() * (before - now)).sum(-1)[0, asked].mean().item()
    assert loss == pytest.approx(divergence, rel=1e-4) and loss > 1e-3


def test_decoding_merges_the_adapter_and_another_head_finds_it_apart(fresh, tiny_path, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        saved_medusa2(tiny_path, directory)
    load_head(first, fresh)
    apart = fresh.forward(IDS).logits
    load_drafter(str(first), fresh)
    assert all(layer.merged for layer in adapter.tuned_layers(fresh)) and len(adapter.tuned_layers(fresh)) > 0
    torch.testing.assert_close(fresh.forward(IDS).logits, apart, atol=1e-3, rtol=1e-3)
    load_drafter(str(second), fresh)
    merged = fresh.forward(IDS).logits
    assert (merged - apart).abs().max() > 0.1
    load_head(second, fresh)
    assert not any(layer.merged for layer in adapter.tuned_layers(fresh))
    torch.testing.assert_close(fresh.forward(IDS).logits, merged, atol=1e-3, rtol=1e-3)


def test_heads_learn_faster_than_the_adapter(fresh):
    distillation = JointDistillation(Medusa2Head.for_target(fresh, num_heads=2), fresh, kl_div)
    ids = {id(parameter) for parameter in distillation.adapter.parameters()}
    for build in (adamw, muon):
        optimizer = build(distillation, {fresh.vocab_size}, 1e-3, (0.9, 0.95), head_lr_multiplier=4.0)
        rates = {id(p): (group["lr"], "nesterov" in group) for group in optimizer.param_groups for p in group["params"]}
        assert {rates[number] for number in ids} == {(2.5e-4, False)}
        assert len(rates) == len(list(distillation.parameters()))


def test_stored_features_of_a_frozen_target_are_refused_at_the_start(here):
    said = complaint(here("target=test_model", "head=medusa2", "hidden_states=offline"))
    assert "this head trains in its layers: set hidden_states=online" in said


def test_joint_training_needs_an_adapter(fresh):
    with pytest.raises(ValueError, match="head=medusa puts none on it: set head=medusa2"):
        JointDistillation(MedusaHead.for_target(fresh, num_heads=2), fresh, kl_div)


def test_adapter_and_heads_are_saved_and_come_back(fresh, tiny_path, tmp_path):
    original = text_of(fresh)
    head = Medusa2Head.for_target(fresh, num_heads=2).eval()
    disturb(fresh)
    adapted, logits = text_of(fresh), fresh.forward(IDS).logits
    assert adapted != original
    save_head(head, tmp_path, fresh)
    again = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    assert text_of(again) == original
    load_head(tmp_path, again)
    assert torch.equal(again.forward(IDS).logits, logits)
    drafter = load_drafter(str(tmp_path), again)
    assert text_of(again) == adapted == text_of(again, drafter)
    assert parity_gate.check(head, fresh, PROMPT, saved=tmp_path) < 1e-4
    # peft itself reads the same files.
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32), tmp_path)
    torch.testing.assert_close(model(IDS).logits, logits, atol=1e-4, rtol=1e-4)


def test_a_head_that_knows_no_adapter_is_refused_on_an_adapted_target(fresh, tiny_path, tmp_path):
    plain = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    save_head(MedusaHead.for_target(plain, num_heads=2), tmp_path, plain)
    Medusa2Head.for_target(fresh, num_heads=2)
    with pytest.raises(ValueError, match="has an adapter that does not belong"):
        load_head(tmp_path, fresh)


# -- the draft model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_tuned_draft_model_is_saved_as_a_model(fresh, tmp_path, lora_rank):
    head = DraftModelHead.for_target(fresh, num_hidden_layers=2, lora_r=lora_rank).train()
    learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
    assert (len(learning) < len(list(head.parameters()))) == (lora_rank is not None)
    stored = [tensor.data_ptr() for tensor in head.state_dict().values()]
    assert len(stored) == len(set(stored))  # a checkpoint would refuse weights under two names
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    distillation, losses = DistillationModel(head, fresh, kl_div), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = distillation(*batch(24)._replace(tokens=IDS[:, :24])).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    head.eval()
    states = head(torch.empty(0), torch.empty(0), batch(30)._replace(tokens=IDS))[0]
    drafted = head.logits(states, 1)[0, :-1]
    head.on_train_end()
    save_head(head, tmp_path, fresh)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(model(IDS).logits[0, 1:], drafted, atol=1e-4, rtol=1e-4)
    for spec in (str(tmp_path), f"draft:{tmp_path}"):
        assert text_of(fresh, load_drafter(spec, fresh)) == text_of(fresh)


def test_tied_embeddings_get_rows_of_their_own(tiny_path, fresh, tmp_path):
    small = AutoModelForCausalLM.from_pretrained(tiny_path)
    small.config.tie_word_embeddings = True
    small.lm_head.weight = small.model.embed_tokens.weight
    small.save_pretrained(tmp_path / "tied")
    fresh.tokenizer.save_pretrained(tmp_path / "tied")
    head = DraftModelHead.for_target(fresh, path=str(tmp_path / "tied"))
    assert head.model.lm_head.weight.data_ptr() != head.model.get_input_embeddings().weight.data_ptr()
    save_head(head, tmp_path / "head", fresh)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["tie_word_embeddings"] is False
    load_head(tmp_path / "head", fresh)


def test_casts_leave_rotary_frequencies_alone(fresh):
    head = DraftModelHead.for_target(fresh)
    before = head.model.model.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.dtype == torch.bfloat16 and torch.equal(head.model.model.rotary_emb.inv_freq, before)


def test_a_draft_model_has_fewer_layers(fresh):
    with pytest.raises(ValueError, match=r"head\.num_hidden_layers=6 must lie between 1 and 5"):
        DraftModelHead.for_target(fresh, num_hidden_layers=6)


def test_a_draft_model_of_another_vocabulary_is_refused(fresh, tiny_path, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_path).save_pretrained(tmp_path)
    fresh.tokenizer.save_pretrained(tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    names = list(tokens["model"]["vocab"])
    one, other = names[10], names[11]
    words = tokens["model"]["vocab"]
    words[one], words[other] = words[other], words[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match="has another vocabulary than"):
        DraftModelHead.for_target(fresh, path=str(tmp_path))


def test_an_adapter_is_loaded_with_a_medusa_2_head_that_fits_and_with_no_other(fresh, target, tiny_path, tmp_path):
    saved_medusa2(tiny_path, tmp_path / "medusa2")
    save_head(MedusaHead.for_target(target, num_heads=2), tmp_path / "medusa", target)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "medusa2" / name, tmp_path / "medusa")
    config = json.loads((tmp_path / "medusa2" / "config.json").read_text())
    config["foredraft"]["target"]["embedding_digest"] = "0" * 16
    (tmp_path / "medusa2" / "config.json").write_text(json.dumps(config))
    before = fresh.forward(IDS).logits
    for name, words in (("medusa", "next to a head of kind medusa"), ("medusa2", "does not fit")):
        with pytest.raises(ValueError, match=words):
            load_head(tmp_path / name, fresh)
        assert torch.equal(fresh.forward(IDS).logits, before)
