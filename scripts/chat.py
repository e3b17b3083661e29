"""Chat with a target in the terminal:  python scripts/chat.py target=ORG/NAME drafter=DIRECTORY colour=true

Ctrl-C stops an answer and not the chat. /new forgets the conversation, /quit or Ctrl-D ends the chat.
"""

import sys
import time
from collections.abc import Callable

from hydra.utils import instantiate
from jinja2 import TemplateError
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from foredraft.heads import Target
from foredraft.inference import Drafter, Engine, Request, SamplingParams
from foredraft.inference.batch import RequestOutput
from foredraft.inference.text import Detokenizer, answer_context
from foredraft.train.cli import entry


@entry("chat")
def main(cfg: DictConfig) -> None:
    target = instantiate(cfg.target)
    if target.text_tokenizer.chat_template is None:
        raise ValueError(
            f"target.path={cfg.target.path} has no chat template. Use foredraft generate, which continues text."
        )
    drafter = instantiate(cfg.drafter, target=target)
    params = SamplingParams(temperature=cfg.temperature, top_p=cfg.top_p)
    chat = Chat(target, drafter, params, cfg.max_new_tokens, cfg.seed, Console(highlight=False), cfg.colour)
    opening = [] if cfg.system is None else [{"role": "system", "content": cfg.system}]
    chat.messages += opening
    ask = reader(cfg.history)
    while True:
        try:
            question = ask().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if question == "/quit":
            return
        if question == "/new":
            chat.messages = [*opening]
        elif question:
            chat.answer(question)


def reader(history: str | None) -> Callable[[], str]:
    """Return a function that reads a line from the user, with editing and history in a terminal."""
    if not sys.stdin.isatty():
        return input
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    session: PromptSession[str] = PromptSession(history=InMemoryHistory() if history is None else FileHistory(history))
    return lambda: session.prompt("> ")


class Chat:
    """Hold a conversation and answer its questions."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        params: SamplingParams,
        max_new_tokens: int,
        seed: int,
        console: Console,
        colour: bool,
    ):
        """Start an empty conversation. colour: show drafted tokens in green. seed: of answer 0; answer n has seed + n."""
        self.target, self.drafter, self.params, self.max_new_tokens = target, drafter, params, max_new_tokens
        self.seed, self.console, self.drafted = seed, console, "green" if colour else ""
        self.messages: list[dict[str, str]] = []

    def answer(self, question: str) -> None:
        """Stream the answer and its cost. After Ctrl-C the tokens up to then stay in the conversation."""
        asked = [*self.messages, {"role": "user", "content": question}]
        engine = Engine(
            self.target, self.drafter
        )  # a new one, because an interrupted step leaves an inconsistent state
        try:
            request = self.request(asked)
            engine.add(request)
        except ValueError as error:
            self.console.print(f"{error}; /new starts over", style="red")
            return
        writer = AnswerWriter(self.target, request.prompt, self.console, self.drafted)
        try:
            while engine.has_work:
                for output in engine.step():
                    if output.finish_reason == "error":
                        raise ValueError("the target's logits are not finite: set another target.dtype")
                    writer.push(output)
            engine.close()
        except KeyboardInterrupt:
            self.console.print(" (stopped)", style="dim", end="")
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
    """Write an answer to the terminal."""

    def __init__(self, target: Target, prompt: list[int], console: Console, drafted: str):
        tokenizer = target.text_tokenizer
        self.detokenizer = Detokenizer(tokenizer, prompt=answer_context(tokenizer, prompt))
        self.console, self.drafted = console, drafted
        self.text, self.tokens, self.accepted, self.forwards = "", 0, 0, 0
        self.started = time.perf_counter()

    def push(self, output: RequestOutput) -> None:
        tokens, accepted = output.tokens, output.accepted
        if accepted is None:
            self.started = time.perf_counter()  # the prefill is done
        else:
            self.forwards, self.accepted = self.forwards + 1, self.accepted + len(tokens)
        self.tokens += len(tokens)
        for index, token in enumerate(tokens):
            self.show(self.detokenizer.push(token), self.drafted if index < (accepted or 0) else "")

    def show(self, text: str, style: str = "") -> None:
        self.text += text
        self.console.print(Text(text, style), end="", soft_wrap=True)

    def end(self) -> str:
        """Print a line about the cost. Returns the text."""
        self.show(self.detokenizer.end())
        seconds = max(time.perf_counter() - self.started, 1e-9)
        length = f", acceptance length {self.accepted / self.forwards:.2f}" if self.forwards else ""
        speed = f"{self.tokens} tokens, {self.accepted / seconds:.1f} tokens/s{length}"
        self.console.print(f"\n{speed}", style="dim")
        return self.text


if __name__ == "__main__":
    main()
