"""data=self: what a chat model writes with itself, what of it is kept, and that a killed writer continues."""

import json
from itertools import pairwise
from pathlib import Path

import openai
import pytest
import torch
from omegaconf import OmegaConf
from openai.types import Completion
from transformers import GenerationConfig, LlamaForCausalLM

from foredraft.heads import Target
from foredraft.heads.checkpoint import fingerprint
from foredraft.inference.evaluation import progress
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.data_card import summary
from foredraft.train.writing import magpie
from foredraft.train.writing.magpie import MagpieSettings, TurnPrefixes, corpus
from foredraft.train.writing.question_filters import QuestionFilter, before_loop, loops
from foredraft.train.writing.written_rows import RowFile
from foredraft.words import CONF
from tests.support import typed
from tests.support.chats import CHATML, MODELS, form_of, tokenizer
from tests.support.processes import SMALL, served, succeeded
from tests.support.tiny import tiny_config

SETTINGS = MagpieSettings(max_question=120, max_answer=90, greedy=0.2)
WIDTH = 272
TALK = """<|im_start|>user
How do the bees of this valley find their way home when the evening is dark?<|im_end|>
<|im_start|>user
Which river would a traveller cross on foot, and where does the old road start again?<|im_end|>
<|im_start|>assistant
They remember the light of the morning, and the shape of every hill that stands between them and the hive.<|im_end|>
<|im_start|>assistant
A bridge was built there long ago. Few people cross it now, but the stones are still good and wide.<|im_end|>
"""


def save_bigram_chat(path: Path, text: str = TALK) -> Path:
    """Save a chat target of one layer that writes gibberish with the right shape: the next byte depends on the last one only.
    text: determines which token follows which, and how often."""
    words = tokenizer(CHATML, eos="<|im_end|>")
    ids = words(text, add_special_tokens=False)["input_ids"]
    logits = torch.full((WIDTH, WIDTH), -12.0)
    counts = torch.zeros(WIDTH, WIDTH)
    for first, second in pairwise(ids):
        counts[first, second] += 1
    logits = torch.where(counts > 0, counts.log(), logits)
    config = tiny_config(
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        max_position_embeddings=1024,
        eos_token_id=words.eos_token_id,
        bos_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(WIDTH))
        model.lm_head.weight.copy_(logits.T / WIDTH**0.5)  # a normed one-hot row is that large
    model.generation_config = GenerationConfig(eos_token_id=words.eos_token_id)
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chat_path(tmp_path_factory):
    return save_bigram_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def chat(chat_path):
    return Target.from_pretrained(chat_path, dtype="float32", device="cpu")


def written(target, file, tokens, batch=12, settings=SETTINGS):
    magpie.write(target, ChatFormat(target.text_tokenizer), settings, file, tokens, batch)
    return read(file)


@pytest.fixture(scope="module")
def own(chat, tmp_path_factory):
    """Return a file of rows with at least 1,200 tokens of answers."""
    written(chat, file := tmp_path_factory.mktemp("own") / "rows.jsonl", 1200)
    return file


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_are_conversations_as_the_template_has_them(chat, own):
    kept = [row for row in read(own) if "dropped" not in row]
    words, form = chat.text_tokenizer, ChatFormat(chat.text_tokenizer)
    assert sum(end - start for row in kept for start, end in row["written"]) >= 1200
    assert {len(row["written"]) for row in kept} == {1, 2}  # some go on
    for row in kept:
        assert len(row["asked"]) == len(row["written"])
        messages = []
        for (asked, asked_end), (start, end) in zip(row["asked"], row["written"], strict=True):
            messages.append({"role": "user", "content": words.decode(row["tokens"][asked:asked_end])})
            assert form.prompt(messages) == row["tokens"][:start]
            answer = words.decode(row["tokens"][start:end])
            messages.append({"role": "assistant", "content": answer.removesuffix("<|im_end|>")})
        assert end == len(row["tokens"])  # nothing of a turn without an answer


def test_a_row_depends_on_its_number_alone_and_a_killed_writer_continues(chat, tmp_path):
    whole = {row["number"]: row for row in written(chat, tmp_path / "whole.jsonl", 250, batch=12)}
    file = tmp_path / "killed.jsonl"
    written(chat, file, 100, batch=5)
    file.write_bytes(file.read_bytes()[:-20])  # within the last line
    again = {row["number"]: row for row in written(chat, file, 250, batch=7)}
    assert len(again) == len(file.read_text().splitlines())  # no number twice
    both = set(whole) & set(again)
    likes = {number for rows in (whole, again) for number, row in rows.items() if "earlier" in row.get("dropped", "")}
    assert len(both) > 2 and all(whole[number] == again[number] for number in both - likes)
    before = file.read_bytes()
    written(chat, file, 250)  # there is enough
    assert file.read_bytes() == before


def test_what_is_left_is_estimated_before_the_first_row_is_done(chat, tmp_path, monkeypatch, capsys):
    for name in ("FIRST", "EVERY"):
        monkeypatch.setattr(progress, name, -1)
    written(chat, tmp_path / "rows.jsonl", 60, batch=4)
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("self-written text: ")]
    assert lines[0].startswith("self-written text: 0 of 60 ") and " left; " not in lines[0]  # only questions
    assert " left; 0 % of 0 rows kept" in "".join(lines)  # answers, before the first row
    assert said.count("data.tokens=0 then takes what the file holds") == 1


def test_greedy_answers_are_the_targets_own_and_those_that_repeat_themselves_are_dropped(chat, tmp_path, monkeypatch):
    """Use a bigram model, whose greedy text does nothing else."""
    monkeypatch.setattr(magpie, "MAX_REJECTED", 12)
    with pytest.raises(ValueError, match="answer that repeats itself"):
        settings = MagpieSettings(max_question=120, max_answer=50, greedy=1)
        written(chat, tmp_path / "rows.jsonl", 500, batch=4, settings=settings)
    row = next(row for row in read(tmp_path / "rows.jsonl") if row["dropped"] == "answer that repeats itself")
    for place in range(len(row["tokens"]) - 40, len(row["tokens"])):  # the best successor of each token
        best = chat.model(torch.tensor([[row["tokens"][place - 1]]])).logits.argmax()
        assert row["tokens"][place] == best


def test_seeds_are_topics_or_first_words(chat, tmp_path):
    (tmp_path / "seeds.txt").write_text("How do bees ...\n\nbirds\n")
    seeds = magpie.read_lines("data.seeds", str(tmp_path / "seeds.txt"))
    assert seeds == ("How do bees ...", "birds")
    settings = MagpieSettings(max_question=120, max_answer=40, seeds=("How do bees ...",))
    rows = written(chat, tmp_path / "rows.jsonl", 200, settings=settings)
    kept = [row for row in rows if "dropped" not in row]
    assert all(chat.text_tokenizer.decode(row["tokens"]).startswith("<|im_start|>user\nHow do bees ") for row in kept)
    openings = TurnPrefixes(ChatFormat(chat.text_tokenizer))
    assert "The user asks about birds." in chat.text_tokenizer.decode(openings.opening("birds"))
    with pytest.raises(ValueError, match=r"data.seeds=.*no.txt is not a file"):
        magpie.read_lines("data.seeds", str(tmp_path / "no.txt"))


def test_a_task_is_a_second_conversation_about_the_answers_of_the_first(chat, tmp_path):
    (tmp_path / "tasks.txt").write_text("Repeat this.\\n{text}\n")
    tasks = magpie.read_lines("data.tasks", str(tmp_path / "tasks.txt"))
    assert tasks == ("Repeat this.\n{text}",)
    settings = MagpieSettings(max_question=120, max_answer=90, greedy=0.2, tasks=tasks, task_share=0.5)
    rows = written(chat, tmp_path / "rows.jsonl", 400, settings=settings)
    words, form = chat.text_tokenizer, ChatFormat(chat.text_tokenizer)
    kept = [row for row in rows if "dropped" not in row]
    both = [row for row in kept if "starts" in row]
    assert 0 < len(both) < len(kept)
    for row in both:
        (_, second), (start, end) = row["starts"], row["written"][-1]
        answers = [words.decode(row["tokens"][a:b], skip_special_tokens=True) for a, b in row["written"][:-1]]
        task = {"role": "user", "content": "Repeat this.\n" + "\n\n".join(answer.strip() for answer in answers)}
        assert row["tokens"][second:start] == form.prompt([task]) and end == len(row["tokens"])
    assert len(corpus(words, path=str(tmp_path / "rows.jsonl"), tokens=0).train) > len(kept) / 2
    with pytest.raises(ValueError, match=r"data.tasks: 'Sum up' has no \{text\}"):
        MagpieSettings(tasks=("Sum up",))


@pytest.mark.parametrize("model", MODELS)
def test_openings_of_real_templates(model):
    form = form_of(model)
    openings = TurnPrefixes(form)
    # The others change earlier answers, and give one turn.
    turns = model in typed("functionary gemma3 granite4 kimi_k2 llama3 llama4 mistral phi3 phi4 smollm2")
    assert (openings.between is not None) == turns
    assert openings.tokens(openings.before + "hi" + openings.after) == form.prompt([{"role": "user", "content": "hi"}])
    if turns:
        said = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "ho"), ("user", "he"))]
        text = f"{openings.before}hi{openings.after}ho{openings.between}he{openings.after}"
        assert text in form.write(said, prompt=True)[0]


def test_a_template_that_takes_no_system_prompt_takes_first_words_alone():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    openings = TurnPrefixes(ChatFormat(tokenizer(refuses + CHATML)))
    with pytest.raises(ValueError, match=r"data.seeds names topics, for which .* takes no system prompt"):
        openings.opening("birds")


def test_a_target_whose_questions_are_all_dropped_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(magpie, "MAX_REJECTED", 12)
    target = Target.from_pretrained(save_bigram_chat(tmp_path / "digits", text="user\n1234 5678 1234<|im_end|>\n" * 3))
    with pytest.raises(ValueError, match=r"none of \d+ questions .* is kept .*: is it one that was trained to chat"):
        written(target, tmp_path / "rows.jsonl", 100)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (MagpieSettings(max_question=8000), r"data.max_question=8000 does not fit behind .* to \d+ at most"),
        (MagpieSettings(max_answer=1024), r"data.max_answer=1024 does not fit behind .* to \d+ at most"),
        (MagpieSettings(max_question=900, seeds=("bees", "birds " * 90)), r"data.max_question=900 does not fit behind"),
    ],
)
def test_a_context_without_room_for_what_is_asked_is_refused_before_anything_is_written(
    chat, tmp_path, settings, sentence
):
    assert chat.context == 1024
    with pytest.raises(ValueError, match=sentence):
        written(chat, tmp_path / "rows.jsonl", 100, settings=settings)
    assert not (tmp_path / "rows.jsonl").read_text()


def test_rows_that_end_before_the_target_writes_do_not_run_on(chat, tmp_path, monkeypatch):
    """Let only few questions pass the filter, so that the file cannot grow."""
    monkeypatch.setattr(magpie, "EXHAUSTED", 30)
    monkeypatch.setattr(magpie, "MAX_REJECTED", 30)
    monkeypatch.setattr(magpie, "check_context", lambda *_: None)
    with pytest.raises(ValueError, match=r"none of 3. questions .*conversation longer than the context"):
        written(chat, tmp_path / "none.jsonl", 100, settings=MagpieSettings(max_question=8000))
    written(chat, tmp_path / "rows.jsonl", 100)
    with pytest.raises(
        ValueError, match=r"none of the last 3. questions .* Set data.tokens=0 to use the [\d,]+ tokens"
    ):
        written(chat, tmp_path / "rows.jsonl", 9000, settings=MagpieSettings(max_question=8000))


GOOD = "How do bees find their way home in the dark?"


@pytest.mark.parametrize(
    ("question", "facts", "reason"),
    [
        (GOOD, {}, None),
        (GOOD, {"ended": False}, "without an end"),
        (GOOD, {"special": True}, "marks of the template"),
        ("Why?", {}, "too short"),
        ("1 + 2 = 3, 4 + 5 = 9, 6?", {}, "few letters"),
        ("How do bees живут когда?", {}, "several scripts"),
        ("Как пчёлы находят дорогу домой?", {}, "not in LATIN"),
        ("Please answer the following:", {}, "ends badly"),
        (GOOD, {"tokens": [5, 6] * 40}, "repeats itself"),
        ("How do bees find their way home in the rain?", {"seen": GOOD}, "like an earlier one"),
        ("How do birds find their way home in the dark?", {"seen": "What is a whale?"}, None),
        # Nothing in it is new, but no earlier question is like it.
        (GOOD, {"seen": "How do bees find their way to me?\nCan owls find their way home in the dark?"}, None),
    ],
)
def test_what_is_dropped_and_why(question, facts, reason):
    rules = QuestionFilter("latin")
    for earlier in facts.get("seen", "").splitlines():
        rules.add(earlier)
    tokens, special, ended = facts.get("tokens", list(range(20))), facts.get("special", False), facts.get("ended", True)
    found = rules.reason(question, tokens, special, ended)
    assert found is None if reason is None else reason in str(found)


def test_an_answer_is_cut_where_it_repeats_itself():
    said = list(range(60))
    assert not loops(said) and before_loop(said) == 60
    looped = [*said, *[7, 8, 9] * 30]
    assert loops(looped) and 60 < before_loop(looped) < 80


def test_a_corpus_of_rows_learns_from_answers_and_tells_what_was_dropped(chat, own, tmp_path):
    found = corpus(chat.text_tokenizer, path=str(own), tokens=0, num_proc=1, cache_dir=str(tmp_path / "cache"))
    rows = read(own)
    kept = [row for row in rows if "dropped" not in row]
    assert found.card["rows"] == len(rows) and found.card["used"] == len(kept)
    assert found.card["dropped"] == dict(RowFile(own).dropped)
    assert "rows kept" in summary(found.card)
    by_text = {tuple(row["tokens"]): row for row in kept}
    for document in found.train:
        row = by_text[tuple(document.tokens)]
        spans = [n for start, end in row["written"] for n in range(start, end)]
        assert [n for n, flag in enumerate(document.loss_mask) if flag] == spans


def test_a_run_takes_as_many_tokens_as_it_asks_for(chat, own, tmp_path):
    settings = {"num_proc": 1, "cache_dir": str(tmp_path / "cache")}
    few = corpus(chat.text_tokenizer, path=str(own), tokens=400, **settings)
    lines = read(own)[: few.card["rows"]]
    counted = sum(end - start for row in lines for start, end in row.get("written", []))
    assert 400 <= counted < 400 + 2 * SETTINGS.max_answer
    with pytest.raises(ValueError, match=r"has .* tokens of answers, fewer than data.tokens=99999: give 0 for all"):
        corpus(chat.text_tokenizer, path=str(own), tokens=99999, **settings)
    with pytest.raises(ValueError, match=r"nothing here lets a target write: give data.path=FILE"):
        corpus(chat.text_tokenizer)


def test_rows_of_another_target_are_refused(own):
    for digest in ("embedding_digest", "weights_digest"):
        with pytest.raises(ValueError, match=r"was written by .*, not by"):
            RowFile(own, {"target": {digest: "another", "name": "other"}})


def test_a_file_of_other_conversations_is_refused_with_the_choice_that_reads_it(chat, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "Hi", "response": "Hello!"}\n')
    with pytest.raises(ValueError, match="line 1 is not a row that a target wrote: data=conversations reads others"):
        corpus(chat.text_tokenizer, path=str(tmp_path / "own.jsonl"), tokens=0, num_proc=1)


def test_a_fine_tune_with_the_same_embedding_writes_its_own_rows(chat_path, chat, tmp_path):
    model = LlamaForCausalLM.from_pretrained(chat_path)
    model.lm_head.weight.data += 0.1
    model.save_pretrained(tmp_path)
    tuned = Target.from_pretrained(tmp_path, dtype="float32", device="cpu")
    form = ChatFormat(chat.text_tokenizer)
    files = {magpie.row_file(target, form, SETTINGS).name.rpartition("-")[2] for target in (chat, tuned)}
    assert len(files) == 2


@pytest.mark.nightly
def test_a_server_writes_what_this_process_would(chat_path, chat, own, tmp_path):
    here = {row["number"]: row for row in read(own)}
    file, form = tmp_path / "rows.jsonl", ChatFormat(chat.text_tokenizer)
    facts = [f"target.path={chat_path}", "target.device=cpu", "target.dtype=float32"]
    with served(tmp_path, *facts) as server:
        for tokens in (200, 700):
            magpie.write(chat, form, SETTINGS, file, tokens, 4, endpoint=f"{server.url}/v1")
    with RowFile(file, {"target": fingerprint(chat)}) as rows:
        assert rows.tokens >= 700 and rows.about["endpoint"] == f"{server.url}/v1"
        found = {number: row for _, row in rows.read() if (number := row["number"]) in here}
    likes = {number for both in (here, found) for number, row in both.items() if "earlier" in row.get("dropped", "")}
    assert len(found) > 4 and all(here[number] == row for number, row in found.items() if number not in likes)


def test_a_server_without_token_ids_cannot_write_a_data_set(chat, tmp_path, monkeypatch):
    async def create(**request):
        return Completion.model_validate(
            {"id": "1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}
        )

    choice = {"index": 0, "finish_reason": "stop", "text": "How do bees see?"}
    monkeypatch.setattr(openai.resources.AsyncCompletions, "create", lambda self, **request: create(**request))
    with pytest.raises(ValueError, match=r"returns no token ids"):
        form, url = ChatFormat(chat.text_tokenizer), "http://127.0.0.1:9/v1"
        magpie.write(chat, form, SETTINGS, tmp_path / "rows.jsonl", 99, 4, url, "tiny")


def test_settings_that_cannot_be(chat):
    for wrong in ({"turns": 0}, {"greedy": 2.0}, {"max_answer": 0}):
        with pytest.raises(ValueError, match=r"data\."):
            corpus(chat.text_tokenizer, **wrong)
    names = set(OmegaConf.load(CONF / "data" / "self.yaml")) - {"_target_", "_convert_"}
    assert set(MagpieSettings.__dataclass_fields__) <= names


@pytest.mark.nightly
def test_a_head_learns_from_nothing_but_its_target(here, chat_path, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    arguments = [part for part in SMALL if not part.startswith("data=")]
    own = typed("data=self data.tokens=300 data.batch=8 data.max_question=120 data.max_answer=60 data.num_proc=1")
    more = typed(
        "head=medusa head.num_heads=2 max_length=256 trainer.max_steps=2 eval.check_float32=false eval.steps=0"
    )
    more.append(f"target.path={chat_path}")
    ended = succeeded(here(*arguments, *own, *more, "output_dir=out"))
    assert "the target writes 300 tokens" in ended.err and "rows kept" in ended.out
    again = here(*arguments, *own, *more, "output_dir=other")
    assert again.code == 0 and "the target writes" not in again.err  # shared by runs
