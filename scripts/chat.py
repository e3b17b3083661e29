"""Chat with a target in the terminal:  python scripts/chat.py target=ORG/NAME drafter=DIRECTORY color=true

Ctrl-C stops an answer and not the chat. /new forgets the conversation, /quit or Ctrl-D ends the chat.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from hydra.utils import instantiate
from jinja2 import TemplateError
from omegaconf import DictConfig

from foredraft.cli import check_at_least, entry
from foredraft.heads import Target
from foredraft.inference import Drafter, Engine, Request, SamplingParams
from foredraft.inference.slots import RequestOutput
from foredraft.inference.text import Detokenizer, answer_context


@entry("chat")
def main(cfg: DictConfig) -> None:
    check_at_least(cfg, 1, "max_new_tokens")
    target = instantiate(cfg.target)
    if target.text_tokenizer.chat_template is None:
        raise ValueError(
            f"target.path={cfg.target.path} has no chat template. Use foredraft generate, which continues text."
        )
    drafter = instantiate(cfg.drafter, target=target)
    params = SamplingParams(temperature=cfg.temperature, top_p=cfg.top_p)
    marks = Marks(cfg.color)
    system = None if cfg.system is None else cfg.system.encode(errors="replace").decode()  # as for questions
    opening = [] if system is None else [{"role": "system", "content": system}]
    chat = Chat(target, drafter, params, cfg.max_new_tokens, cfg.seed, marks, [*opening])
    marks.explain()
    ask = reader(cfg.history)
    while True:
        try:
            question = ask().strip().encode(errors="replace").decode()  # a terminal may send half of a character
            if question == "/quit":
                return
            if question == "/new":
                chat.messages = [*opening]
            elif question:
                chat.answer(question)
        except KeyboardInterrupt:  # also before the first token, and a second one while the first is handled
            continue
        except EOFError:
            return


def reader(history: str | None) -> Callable[[], str]:
    """Return a function that reads a line from the user, with editing and history in a terminal."""
    if not sys.stdin.isatty():
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    session: PromptSession[str] = PromptSession(history=InMemoryHistory() if history is None else FileHistory(history))
    return lambda: session.prompt("> ")


class Marks:
    """Print a text with accepted drafts between two marks: codes for green and underlined letters, or brackets."""

    def __init__(self, wanted: bool, file: TextIO | None = None):
        """Choose the marks. wanted: False shows no difference. file: None is stdout. NO_COLOR leaves the underline; what is
        not a terminal, or has no styles, gets brackets."""
        self.wanted, self.file = wanted, file
        self.has_styles = (file or sys.stdout).isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.color = "" if os.environ.get("NO_COLOR") else "green and "
        styles = "4;32" if self.color else "4"
        self.opening, self.closing = (f"\x1b[{styles}m", "\x1b[0m") if self.has_styles else ("[", "]")
        self.is_open = False  # is the last text an accepted draft's?

    def explain(self) -> None:
        """Print the legend, if there are marks."""
        if not self.wanted:
            return
        self.write(f"{self.color}underlined" if self.has_styles else "in brackets", True)
        rest = "Everything else the target wrote itself, one token per forward."
        self.write(f": a draft that the target accepted. {rest}\n")

    def write(self, text: str, drafted: bool = False) -> None:
        marked, edge = self.wanted and drafted, ""
        if text and marked != self.is_open:
            edge, self.is_open = self.opening if marked else self.closing, marked
        print(edge + text, end="", file=self.file, flush=True)


@dataclass
class Chat:
    target: Target
    drafter: Drafter
    params: SamplingParams
    max_new_tokens: int
    seed: int  # of the next answer
    marks: Marks
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, question: str) -> None:
        """Stream the answer and its cost. After Ctrl-C the tokens up to then stay in the conversation."""
        asked = [*self.messages, {"role": "user", "content": question}]
        # A new engine, because an interrupted step leaves an inconsistent state.
        engine = Engine(self.target, self.drafter)
        try:
            request = self.request(asked)
            engine.add(request)
        except ValueError as error:
            self.marks.write(f"{error}; /new starts over\n")
            return
        writer = AnswerWriter(self.target, request.prompt, self.marks)
        try:
            while engine.has_work:
                for output in engine.step():
                    if output.finish_reason == "error":
                        raise ValueError("the target's logits are not finite: set another target.dtype")
                    writer.push(output)
            engine.close()
        except KeyboardInterrupt:
            self.marks.write(" (stopped)")
        self.messages = [*asked, {"role": "assistant", "content": writer.end()}]
        self.seed += 1

    def request(self, messages: list[dict[str, str]]) -> Request:
        words = self.target.text_tokenizer
        try:
            tokens = words.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:  # Gemma 2's does not support system messages
            raise ValueError(f"the chat template does not support this conversation: {error}") from None
        ends = frozenset(self.target.eos_token_ids)
        return Request(list(tokens["input_ids"]), self.params, self.max_new_tokens, self.seed, ends)


class AnswerWriter:
    def __init__(self, target: Target, prompt: list[int], marks: Marks):
        tokenizer = target.text_tokenizer
        self.detokenizer = Detokenizer(tokenizer, prompt=answer_context(tokenizer, prompt))
        self.marks = marks
        self.text, self.tokens, self.gained, self.forwards, self.accepted = "", 0, 0, 0, 0
        self.started = time.perf_counter()

    def push(self, output: RequestOutput) -> None:
        tokens, accepted = output.tokens, output.accepted
        if accepted is None:
            self.started = time.perf_counter()  # the prefill is done
        else:
            self.forwards, self.gained = self.forwards + 1, self.gained + len(tokens)
            self.accepted += min(accepted, len(tokens))
        self.tokens += len(tokens)
        for index, token in enumerate(tokens):
            self.show(self.detokenizer.push(token), index < (accepted or 0))

    def show(self, text: str, drafted: bool = False) -> None:
        self.text += text
        self.marks.write(text, drafted)

    def end(self) -> str:
        """Return the whole text, after a line about its cost."""
        self.show(self.detokenizer.end())
        self.marks.write("\n")
        seconds = max(time.perf_counter() - self.started, 1e-9)
        speed = f"{self.tokens} tokens, {self.gained / seconds:.1f} tokens/s"
        if self.forwards:
            length = self.gained / self.forwards
            speed += f", acceptance length {length:.2f} ({self.accepted} tokens were accepted drafts)"
        self.marks.write(f"{speed}\n")
        return self.text


if __name__ == "__main__":
    main()
