"""Chat templates: those of real models (chat_templates/), a short one, and tokenizers of each kind by which tokens become
text."""

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from foredraft.train.data.chat_template import ChatFormat

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["▁The", "▁sky", "▁is", "▁blue", "▁def", "▁▁▁▁", "é", "日"]
MARKS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
STRIP = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def tokenizer(
    template: str | None, bos: str = "<s>", eos: str = "</s>", special: list[str] = SPECIAL, *merges: tuple[str, str]
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and per merge, and the special tokens."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    raw = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [*merges]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, eos_token=eos)
    fast.chat_template = template
    return fast


def sentencepiece(decoder: decoders.Decoder | None = None) -> PreTrainedTokenizerFast:
    """Make a tokenizer like Llama 2's: a space before the first word, which decoding removes, and bytes for what has no
    token."""
    signs = sorted({sign for word in WORDS for sign in word})
    merges = [(word[:end], word[end]) for word in WORDS for end in range(1, len(word))]
    tokens = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), *signs, *(a + b for a, b in merges)]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    raw = Tokenizer(
        models.BPE(vocab, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoder or decoders.Sequence(STRIP)
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level() -> PreTrainedTokenizerFast:
    """Make a tokenizer like GPT-2's, with a token that ends within a character."""
    return tokenizer(None, "<s>", "</s>", MARKS, ("Ġ", "ð"), ("Ġð", "Ł"), ("b", "l"), ("Ġ", "bl"))


class Model(NamedTuple):
    bos: str
    end: str  # of a turn
    special: str  # tokens, with a space between them
    prompt: str  # of the first turn, whole
    wrote: dict[str, list[str]]  # the answers of each conversation, without the ends of turns
    eos: str = ""  # where it is another than `end`


# Conversations, and what each family of models writes in them: found by hand, from its documentation.
WRITTEN = json.loads((TEMPLATES / "written.json").read_text())
CONVERSATIONS: dict[str, list[dict]] = WRITTEN["conversations"]
TOOL: dict = WRITTEN["tool"]
MODELS = {name: Model(**facts) for name, facts in WRITTEN["models"].items()}
# Ends of an answer that is a call.
ENDS = ("<|call|>", "<|observation|>", "<|tool_response>", "<|eom_id|>", "<|tools_suffix|>")


def wrote(model: str, name: str) -> list[str]:
    """Return all that the model emits, answer by answer."""
    return [text if text.endswith(ENDS) else text + MODELS[model].end for text in MODELS[model].wrote[name]]


def form_of(model: str, **settings) -> ChatFormat:
    bos, end, special, _, _, eos = MODELS[model]
    template = (TEMPLATES / f"{model}.jinja").read_text()
    return ChatFormat(tokenizer(template, bos, eos or end, [bos, end, *special.split(), *eos.split()]), **settings)
