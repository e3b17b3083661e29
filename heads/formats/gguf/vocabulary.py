"""The tokenizer in a head's GGUF file, from which llama.cpp reads the number of tokens and the mask token. It never splits
text with it, so the target's rule of splitting (`tokenizer.ggml.pre`) is written as "default", unless a GGUF of the target
states it."""

import json
import tempfile
from pathlib import Path
from typing import Any

from foredraft.heads.formats.gguf.tensors import open_gguf, package
from foredraft.heads.target_model import Target

PREFIX = "tokenizer."


def add_vocabulary(writer: Any, target: Target, target_gguf: str | None) -> None:
    """Write the tokenizer of the file `target_gguf`, or the target's own. Raises ValueError if it cannot be written."""
    if target_gguf is not None:
        return copy_vocabulary(writer, Path(target_gguf), target.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target.text_tokenizer.save_pretrained(folder)
        target.config.save_pretrained(folder)
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        if model["type"] != "BPE":
            raise ValueError(
                f"the tokenizer of {target.name} is of type {model['type']}, and only BPE can be written: set "
                "target_gguf=FILE to a GGUF of the target, whose tokenizer is copied"
            )
        if model.get("byte_fallback"):
            add_pieces(writer, folder, target.vocab_size)
        else:
            add_bytes(writer, folder, target)


def copy_vocabulary(writer: Any, path: Path, vocab_size: int) -> None:
    if not path.is_file():
        raise ValueError(f"target_gguf={path} is not a file: give the GGUF of the target, or null")
    fields = {name: field for name, field in open_gguf(path).fields.items() if name.startswith(PREFIX)}
    tokens = fields.get("tokenizer.ggml.tokens")
    count = 0 if tokens is None else len(tokens.data)
    if count != vocab_size:
        raise ValueError(f"target_gguf={path} has {count} tokens, and the target {vocab_size}: another model")
    for name, field in fields.items():
        writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:2])


def add_bytes(writer: Any, folder: Path, target: Target) -> None:
    """Write byte-level BPE, as in GPT-2."""
    gguf, tokenizer = package(), target.text_tokenizer
    added = tokenizer.added_tokens_decoder
    tokens, kinds = unused(target.vocab_size)
    for token, number in tokenizer.get_vocab().items():
        if number >= target.vocab_size:  # a token that the target only reads (for images), or has no row for
            continue
        special = number in added and added[number].special
        kind = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        tokens[number], kinds[number] = token, kind if number in added else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer, quiet=True)


def add_pieces(writer: Any, folder: Path, vocab_size: int) -> None:
    """Write BPE over characters that falls back to bytes, as in Llama 2."""
    gguf = package()
    tokens, kinds = unused(vocab_size)
    scores = [-1000.0] * vocab_size
    for number, entry in zip(range(vocab_size), gguf.LlamaHfVocab(folder).all_tokens()):
        tokens[number], scores[number], kinds[number] = entry
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)


def unused(count: int) -> tuple[list[Any], list[int]]:
    """Return this many unused tokens: a target's embedding often has more rows than its tokenizer has tokens."""
    return [f"[PAD{number}]" for number in range(count)], [package().TokenType.UNUSED] * count
