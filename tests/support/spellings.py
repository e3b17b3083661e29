"""Tokenizers of each kind by which tokens become text, of a few words and all bytes."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.chats import tokenizer

WORDS = ["▁The", "▁sky", "▁is", "▁blue", "▁def", "▁▁▁▁", "é", "日"]
MARKS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
STRIP = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


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
