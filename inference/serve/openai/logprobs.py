"""Log-probabilities of tokens, in the format of both endpoints."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from foredraft.inference.text import TokenTexts


class TokenLogprob(NamedTuple):
    token: int
    logprob: float | None  # None for the first token of a prompt
    best: Sequence[tuple[int, float]]  # the likeliest tokens at this position
    offset: int  # of the token's text, in characters
    first: bool  # whether the text starts with it


def token_names(token_texts: TokenTexts, place: TokenLogprob, as_ids: bool) -> dict[int, str]:
    """Return a unique text for the token and each of the likeliest ones, because clients use them as keys. A part of a
    character is named by its bytes, as in OpenAI's API, and duplicates by their id, as in vLLM (all of them with as_ids)."""
    names: dict[int, str] = {}
    for token, _ in (*place.best, (place.token, None)):
        text, spelled = token_texts.token_text(token, place.first)
        if spelled != text.encode() and spelled:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
        if as_ids or spelled is None or text in (names[other] for other in names if other != token):
            text = f"token_id:{token}"
        names[token] = text
    return names


def chat_logprobs(token_texts: TokenTexts, places: Sequence[TokenLogprob], as_ids: bool) -> dict[str, Any]:
    content = []
    for place in places:
        names, entries = token_names(token_texts, place, as_ids), list[dict[str, Any]]()
        for token, logprob in ((place.token, place.logprob), *place.best):
            spelled = token_texts.token_text(token, place.first)[1]
            whole = None if spelled is None else list(spelled)
            entries.append({"token": names[token], "logprob": finite(logprob), "bytes": whole})
        content.append(entries[0] | {"top_logprobs": entries[1:]})
    return {"content": content}


def completion_logprobs(token_texts: TokenTexts, places: Sequence[TokenLogprob], as_ids: bool) -> dict[str, Any]:
    names = [token_names(token_texts, place, as_ids) for place in places]
    pairs = list(zip(places, names, strict=True))
    return {
        "tokens": [named[place.token] for place, named in pairs],
        "token_logprobs": [finite(place.logprob) for place in places],
        "top_logprobs": [
            None if place.logprob is None else {named[token]: finite(logprob) for token, logprob in place.best}
            for place, named in pairs
        ],
        "text_offset": [place.offset for place in places],
    }


def finite(logprob: float | None) -> float | None:
    """Replace minus infinity by a finite number, which JSON can represent."""
    return None if logprob is None else max(logprob, -9999.0)
