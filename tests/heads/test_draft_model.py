"""A tuned draft model is a model like any other."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.heads import load_head, save_head
from foredraft.heads.draft_model import DraftModelHead
from foredraft.inference import load_drafter
from foredraft.train.losses import kl_div
from foredraft.train.module import DistillationModel
from tests.support.batches import PROMPT, batch
from tests.support.decoding import check_drafts

IDS = torch.tensor([PROMPT])


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
        check_drafts(fresh, load_drafter(spec, fresh, tree="fixed"), IDS)


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


def test_a_draft_model_has_fewer_layers_and_casts_leave_rotary_frequencies_alone(fresh):
    head = DraftModelHead.for_target(fresh)
    before = head.model.model.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.dtype == torch.bfloat16 and torch.equal(head.model.model.rotary_emb.inv_freq, before)
    with pytest.raises(ValueError, match=r"head\.num_hidden_layers=6 must lie between 1 and 5"):
        DraftModelHead.for_target(fresh, num_hidden_layers=6)


def test_a_draft_model_of_another_vocabulary_is_refused(fresh, tiny_path, tmp_path):
    AutoModelForCausalLM.from_pretrained(tiny_path).save_pretrained(tmp_path)
    fresh.tokenizer.save_pretrained(tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    words = tokens["model"]["vocab"]
    one, other, *_ = words
    words[one], words[other] = words[other], words[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match="has another vocabulary than"):
        DraftModelHead.for_target(fresh, path=str(tmp_path))
