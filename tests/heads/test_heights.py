"""Promise: a target whose embedding, lm_head and tokenizer have different numbers of tokens is trained for, drafted for and
exported for as any other (Llama-3.2-Vision takes 128,264 tokens and writes 128,256; Megatron pads lm_heads)."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.checkpoint import write_head
from foredraft.heads.dflash import check_mask_token
from foredraft.heads.draft_model import DraftModelHead
from foredraft.heads.formats.engines import export_for
from foredraft.inference import Grammars, drafter_for, generate, load_drafter
from foredraft.inference.drafters.ngram import NgramDrafter
from foredraft.train.data.corpus import count_tokens
from foredraft.train.data.packing import Document
from tests.support import names, nightly_but
from tests.support.decoding import check_drafts
from tests.support.head_factory import learn, make_head, new_head
from tests.support.tiny import VOCAB, tiny_config

MORE = 8
PROMPT = torch.arange(3, 23)[None]
KINDS = [name for name in names("head") if name != "draft_model"]  # which has its own test
BY_DAY = [(end, kind) for end in ("embedding", "lm_head") for kind in ("medusa", "eagle3", "dspark")]
ENDS = ("embedding", "lm_head")


def taller(target: Target, end: str) -> Target:
    """Give the target more rows in its embedding or in its lm_head, which would win if they were used."""
    model = target.model
    if end == "embedding":
        rows = torch.randn(MORE, target.hidden_size)
        model.set_input_embeddings(nn.Embedding.from_pretrained(torch.cat([target.embeddings, rows])))
    else:
        old, new = model.lm_head.weight, nn.Linear(target.hidden_size, VOCAB + MORE, bias=False)
        new.weight = nn.Parameter(torch.cat([old, 3 * old[:MORE]]))
        model.set_output_embeddings(new)
    return Target(model, target.tokenizer, target.name)


@pytest.mark.parametrize(("end", "kind"), nightly_but([(e, k) for e in ENDS for k in KINDS], *BY_DAY))
def test_heads_of_ends_that_differ_train_draft_and_are_saved(end: str, kind: str, fresh: Target, tmp_path) -> None:
    plain = generate(fresh, None, PROMPT, max_new_tokens=12, eos_token_id=-1).new_tokens
    target = taller(fresh, end)
    assert target.vocab_size == VOCAB
    assert generate(target, None, PROMPT, max_new_tokens=12, eos_token_id=-1).new_tokens == plain
    head = new_head(kind, target)
    tokens, prompt = torch.randint(3, VOCAB, (2, 48)), PROMPT.clone()
    if end == "embedding":
        tokens[0, 5::6] = prompt[0, 4] = VOCAB + 3  # which it takes and never writes
    learn(kind, head, target, tokens)
    save_head(head, tmp_path / "head", target)
    drafter = drafter_for(load_head(tmp_path / "head", target), target)
    for ids in (PROMPT, prompt):
        check_drafts(target, drafter, ids)


EXPORTS = [("vllm", "eagle"), ("vllm", "p_eagle"), ("vllm", "dflash"), ("sglang", "eagle")]
EXPORTS += [("speculators", "eagle3"), ("llamacpp", "eagle3"), ("llamacpp", "dflash")]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("engine", "kind"), EXPORTS)
def test_exports_have_a_row_for_each_token_of_the_vocabulary(engine: str, kind: str, end: str, fresh, tmp_path) -> None:
    fresh.tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})  # more than the vocabulary
    target = taller(fresh, end)
    head = make_head(kind, target, **{"bias": False} if (engine, kind) == ("vllm", "eagle") else {})
    layout = export_for("gguf" if engine == "llamacpp" else engine, head, target).layout
    write_head(head, tmp_path / "export", target, layout, layout.weight_files)
    for file in (tmp_path / "export").glob("*.safetensors"):
        assert len(load_file(file).get("embed_tokens.weight", range(VOCAB))) == VOCAB
    again = load_head(tmp_path / "export", target).state_dict()
    for name, tensor in layout.stored(head, target).state_dict().items():
        torch.testing.assert_close(again[name].float(), tensor.float(), msg=name)


@pytest.fixture
def longer(tiny_path, tmp_path) -> Target:
    """Make a target with one token, and some padding, more than the tiny one."""
    torch.manual_seed(1)
    LlamaForCausalLM(tiny_config(vocab_size=VOCAB + MORE)).save_pretrained(tmp_path / "longer")
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer.save_pretrained(tmp_path / "longer")
    return Target.from_pretrained(tmp_path / "longer", dtype="float32", device="cpu")


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
def test_a_draft_model_without_the_targets_last_tokens_drafts(longer: Target, tiny_path, settings: dict) -> None:
    drafter = load_drafter(f"draft:{tiny_path}", longer, tree="fixed")  # which a clock does not turn off
    prompt = PROMPT.clone()
    prompt[0, 3], prompt[0, -1] = VOCAB, VOCAB + MORE - 1  # of which the small model has no embeddings
    for ids in (PROMPT, prompt):
        check_drafts(longer, drafter, ids, **settings)


def test_a_draft_model_with_more_tokens_than_its_target_drafts_those_of_the_target(longer: Target, target) -> None:
    check_drafts(target, load_drafter(f"draft:{longer.name}", target, tree="fixed"), PROMPT)


@pytest.mark.parametrize("end", ENDS)
def test_the_first_layers_of_a_target_of_different_ends_are_a_draft_model(end: str, fresh: Target, tmp_path) -> None:
    target = taller(fresh, end)
    head = DraftModelHead.for_target(target, num_hidden_layers=1)
    assert head.logits(torch.zeros(1, 1, target.hidden_size), 0).shape[-1] == target.vocab_size
    save_head(head, tmp_path / "head", target)
    check_drafts(target, drafter_for(load_head(tmp_path / "head", target), target), PROMPT)


def test_a_shorter_draft_model_is_tuned_on_texts_with_all_tokens(longer: Target, tiny_path) -> None:
    tokens = torch.randint(3, VOCAB + MORE, (2, 48))
    tokens[0, 7] = VOCAB
    learn("draft_model", DraftModelHead.for_target(longer, path=str(tiny_path)), longer, tokens)


def test_a_grammar_is_followed_with_a_tokenizer_of_more_tokens_than_the_target_has(embedded: Target) -> None:
    tokenizer = copy.deepcopy(embedded.text_tokenizer)
    more = 64 + embedded.vocab_size - len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image {number}>" for number in range(more)]})
    target, answers = Target(embedded.model, tokenizer, embedded.name), []
    for one in (embedded, target):
        params = {"grammar": Grammars(one).json_schema({"enum": ["yes", "no"]}), "max_new_tokens": 12}
        answers.append(generate(one, None, torch.tensor([tokenizer.encode("def")]), **params).new_tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "temperature": 1.0}])
def test_a_copied_token_that_the_target_never_writes_is_not_accepted(more: dict, fresh: Target) -> None:
    prompt = torch.tensor([[5, VOCAB + 3, 6, 7, 5, VOCAB + 3, 6, 7, 5]])
    target, settings = taller(fresh, "embedding"), {"max_new_tokens": 12, "eos_token_id": -1, "seed": 2, **more}
    plain = generate(target, None, prompt, **settings).new_tokens
    assert generate(target, NgramDrafter(), prompt, **settings).new_tokens == plain


def test_the_mask_token_is_one_that_the_target_has_a_row_for(fresh: Target) -> None:
    tokenizer, rows = fresh.text_tokenizer, fresh.vocab_size
    tokenizer.add_tokens([f"<{number}>" for number in range(rows - len(tokenizer))])
    assert check_mask_token(fresh, None) == 0  # its only special token
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})  # which has none
    assert check_mask_token(fresh, None) == 0
    tokenizer.add_special_tokens({"mask_token": "<mask>"})  # nor has this
    assert check_mask_token(fresh, None) == 0
    with pytest.raises(ValueError, match=f"mask_token_id={rows} must lie between 0 and {rows - 1}"):
        check_mask_token(fresh, rows)


@pytest.mark.parametrize(
    "template", ["<|user|>{{ messages[0].content }}", None, "{{ '<|' + messages[0].role + '|>' }}"]
)
def test_the_mask_token_is_not_one_that_every_chat_has(template: str | None, fresh: Target) -> None:
    """Choose a reserved token as Llama 3 has them, whose last named one ends each turn (NVIDIA-NeMo/Automodel#2461)."""
    tokenizer, reserved = fresh.text_tokenizer, "<|reserved_special_token_0|>"
    words = [f"<{number}>" for number in range(fresh.vocab_size - len(tokenizer) - 3)]
    tokenizer.add_tokens([*words, *(AddedToken(name, special=True) for name in (reserved, "<|eot|>", "<|user|>"))])
    tokenizer.eos_token, tokenizer.chat_template = "<|eot|>", template
    assert len(tokenizer) == fresh.vocab_size
    assert tokenizer.convert_ids_to_tokens(check_mask_token(fresh, None)) == reserved


def test_a_token_beyond_the_embeddings_is_named_although_ids_have_holes(fresh: Target) -> None:
    vocabulary = {"a": 0, "b": 1, "far": VOCAB + 1}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")))
    assert len(tokenizer) < VOCAB
    target = Target(fresh.model, tokenizer, "holes")
    with pytest.raises(ValueError, match=f"contains 'far' .token {VOCAB + 1}."):
        target.forward(torch.tensor([[0, VOCAB + 1]]))
    assert check_mask_token(target, None) == VOCAB - 1


def test_tokens_that_the_target_never_writes_are_not_counted() -> None:
    text = Document([1, 2, VOCAB + 3, 2], [False, True, True, True])
    assert count_tokens([text], VOCAB).nonzero().flatten().tolist() == [2]
