"""The tokenizer of a GGUF file, as llama.cpp applies it.

transformers reads the vocabulary and the merges of such a file and splits every text as GPT-2 does. The file states how its
model was trained (`tokenizer.ggml.pre`): SmolLM2 splits off single digits, Llama 3 groups up to three, Qwen has its own
contractions. With another split, a text has sequences of ids that the model has never seen.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types of GGUF: two kinds of special tokens; words that stay one token
# Tokens that end a text or a turn, as in llama.cpp: a file names one, and a chat model may write another.
ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]", "[e~["),
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<EOT>", "[EOT]", "<end_of_utterance>"),
    *("<|return|>", "<|call|>", "<|end|>"),
)
NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's special tokens
MARKS = (UNKNOWN, CONTROL, USER_DEFINED)
TEMPLATE = "tokenizer.chat_template"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class Splitting(NamedTuple):
    """Describe how a text is split into words before merges apply."""

    patterns: tuple[str, ...]  # each splits the pieces of those before it
    ignore_merges: bool = False  # does a word that is a token stay one, whatever its merges would give?
    add_bos: bool = False  # the default if the file does not specify it


LLAMA3 = Splitting(("|".join([CONTRACTIONS, WORDS, r"\p{N}{1,3}", SIGNS, SPACES]),), True, True)
LLAMA3_MERGED = Splitting(LLAMA3.patterns)
QWEN2 = Splitting(("|".join([CONTRACTIONS, WORDS, r"\p{N}", SIGNS, SPACES]),))
DIGITS = Splitting((r"\p{N}", GPT2))
PLAIN = Splitting((GPT2,))
GPT4O = Splitting(("|".join([*(f"{word}{CONTRACTIONS}?" for word in CASED), r"\p{N}{1,3}", CASED_SIGNS, SPACES]),))
TEKKEN = Splitting(("|".join([*CASED, r"\p{N}", CASED_SIGNS, SPACES]),), True, True)
FALCON = Splitting((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"))
QWEN35 = Splitting(
    ("|".join([CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES]),)
)
DEEPSEEK3 = Splitting(
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
    )
)
DEFAULT = Splitting((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

SPLITTINGS: dict[str, Splitting] = {
    "default": DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "mellum"), PLAIN
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3_MERGED),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"), QWEN2),
    "qwen35": QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), GPT4O),
    "tekken": TEKKEN,
    "falcon": FALCON,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
}


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> PreTrainedTokenizerFast:
    """Build the tokenizer that a GGUF file's metadata describe. Raises ValueError for an unsupported kind, or way of
    splitting words. where: the file, for the error."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = byte_level(metadata, where)
    elif kind == "llama":
        backend, add_bos = sentencepiece(metadata), True
    else:
        raise ValueError(
            f"target {where}: its tokenizer has the kind {kind!r}, but only gpt2 (byte-level) and llama (SentencePiece) are "
            "supported: give the model as a directory or a Hub id"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    marks = [(token, type_) for token, type_ in zip(tokens, types, strict=False) if type_ in MARKS]
    # Phi-3 was trained without the line breaks that its template has after special tokens.
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    backend.add_tokens(
        [
            AddedToken(t, special=k != USER_DEFINED, normalized=False, rstrip=strips and t not in NOT_STRIPPING)
            for t, k in marks
        ]
    )
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL.items()}
    named = {name: tokens[number] for name, number in ids.items() if number is not None and number < len(tokens)}
    bos = named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos or eos:
        single = " ".join(part for part in (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0") if part)
        special = [(token, tokens.index(token)) for token in dict.fromkeys((bos, eos)) if token]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    settings: dict[str, Any] = {"chat_template": template} if (template := chat_template(metadata)) else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named, **settings)


def chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or all by name if there are several, such as one for tools (Hermes)."""
    default, prefix = metadata.get(TEMPLATE), f"{TEMPLATE}."
    named = {name.removeprefix(prefix): text for name, text in metadata.items() if name.startswith(prefix)}
    return {"default": default, **named} if default and named else default


def splitting(metadata: Mapping[str, Any], where: str) -> Splitting:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in SPLITTINGS:
        raise ValueError(
            f"target {where}: its tokenizer splits words in the way tokenizer.ggml.pre={name}, which is not supported "
            f"({', '.join(sorted(SPLITTINGS))} are): its ids would be wrong, so give the model as a directory or a Hub id"
        )
    return SPLITTINGS[name]


def byte_level(metadata: Mapping[str, Any], where: str) -> tuple[Tokenizer, bool]:
    """Build a tokenizer that merges bytes spelled as letters, as introduced by GPT-2. Also return the default of adding a
    bos token."""
    how = splitting(metadata, where)
    spaces = [(merge, merge.index(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    merges = [(merge[:space], merge[space + 1 :]) for merge, space in spaces]
    vocabulary = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=how.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in how.patterns]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spelled])
    backend.decoder = decoders.ByteLevel()
    return backend, how.add_bos


def sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer of words with ▁ for spaces. Neighbors that give the token with the highest score are merged
    first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        parts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(left, right) for left, right in parts if left in vocabulary and right in vocabulary]
        merges += [(score, pair) for pair in sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))]
    merges.sort(key=lambda merge: -merge[0])  # stable: equal scores keep the order of the vocabulary
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    pairs = [pair for _, pair in merges]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return backend


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text: those that the file names, and those with a known spelling."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    spelled = {token: n for n, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind in MARKS}
    ends = [token for token in ENDS if token in spelled]
    if "<|call|>" in ends and "<|end|>" in ends:  # gpt-oss, in which <|end|> ends one of several messages
        ends.remove("<|end|>")
    ids = [*named, *(spelled[token] for token in ends)]
    return list(dict.fromkeys(number for number in ids if number is not None))
