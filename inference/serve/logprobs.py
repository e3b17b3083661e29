"""Log-probabilities of tokens, as both endpoints have them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from foredraft.inference.text import Spelling


class TokenLogprob(NamedTuple):
    """A token at its place in a text."""

    token: int
    logprob: float | None  # None of a prompt's first token
    best: Sequence[tuple[int, float]]  # the likeliest tokens there
    offset: int  # in characters, where its text starts
    first: bool  # does the text start with it?


def token_names(spelling: Spelling, place: TokenLogprob, as_ids: bool) -> dict[int, str]:
    """The texts of the token and of the likeliest ones, no two of them alike: clients use them as keys. A part of a character
    goes by its bytes, as OpenAI has it, and what would be alike by its id, as vLLM has it (as_ids: so do all)."""
    names: dict[int, str] = {}
    for token, _ in (*place.best, (place.token, None)):
        text, spelled = spelling.spelled(token, place.first)
        if spelled != text.encode() and spelled:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
        if as_ids or spelled is None or text in (names[other] for other in names if other != token):
            text = f"token_id:{token}"
        names[token] = text
    return names


def chat_logprobs(spelling: Spelling, places: Sequence[TokenLogprob], as_ids: bool) -> dict[str, Any]:
    content = []
    for place in places:
        names = token_names(spelling, place, as_ids)

        def entry(token: int, logprob: float | None, names: dict[int, str] = names, first: bool = place.first) -> Any:
            spelled = spelling.spelled(token, first)[1]
            whole = None if spelled is None else list(spelled)
            return {"token": names[token], "logprob": finite(logprob), "bytes": whole}

        content.append(entry(place.token, place.logprob) | {"top_logprobs": [entry(*one) for one in place.best]})
    return {"content": content}


def completion_logprobs(spelling: Spelling, places: Sequence[TokenLogprob], as_ids: bool) -> dict[str, Any]:
    names = [token_names(spelling, place, as_ids) for place in places]
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
    """JSON has no infinity."""
    return None if logprob is None else max(logprob, -9999.0)
