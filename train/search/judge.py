"""How head=auto judges: all candidates of a round decode the same held-out prompts, in turn on each, one at a time."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig

from foredraft.heads.target import Target
from foredraft.inference import load_drafter
from foredraft.inference.evaluation import figures
from foredraft.inference.evaluation.benchmark import BASELINE, Benchmark, Lines, System, Text
from foredraft.inference.evaluation.figures import Table
from foredraft.train.data.corpus import Corpus, prompts
from foredraft.train.search.plan import judged


class Measured(NamedTuple):
    found: dict[str, dict[str, Any]]  # `figures_of` the baseline and every candidate
    note: str  # on what
    failed: dict[str, str]  # why a candidate has no figures


class Judge:
    def __init__(self, settings: DictConfig, target: Target, data: Corpus):
        """Choose the prompts. settings: the section `judge`. Prompts come from the validation part: the measurement at the
        end has others, which nothing was chosen on."""
        self.settings, self.target = settings, target
        rows = prompts(target.text_tokenizer, data.validation, settings.num_prompts, settings.prompt_tokens)
        room = (target.context or 10**9) - settings.max_new_tokens
        if (longest := max(map(len, rows))) > room:
            raise ValueError(
                f"judge.max_new_tokens={settings.max_new_tokens} leaves no room for a prompt of {longest} tokens: the target "
                f"reads {target.context}"
            )
        self.texts = [Text("held_out", row, False) for row in rows]

    def decode_seconds(self) -> float:
        """Return the seconds of decoding one text without drafts."""
        plain = System(BASELINE, None).decoder(self.target, self.settings.max_new_tokens, 0.0)
        ids = torch.tensor([self.texts[0].tokens], device=self.target.device)
        plain(ids, 1)  # what is captured or compiled at a first use is not the cost of a text
        start = time.perf_counter()
        plain(ids, 1)
        return time.perf_counter() - start

    def decodes(self, candidates: int, prompts: int) -> int:
        """Return the number of texts that are decoded in a round, including the warm-up."""
        return prompts * self.settings.repeats * (candidates + 1) + 3 * candidates

    def measure(self, heads: dict[str, Path], prompts: int, file: Path) -> Measured:
        """Measure heads. prompts: their number. file: the lines of this round, from which a stopped measurement resumes."""
        lines, failed = Lines(file), {}
        systems = [System(BASELINE, None)]
        for name, head in heads.items():
            try:
                drafter = load_drafter(str(head), self.target)
            except Exception as error:  # the others' figures are worth more than the reason
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            systems.append(System(name, drafter))
        temperature = float(self.settings.temperature)
        measured = self.texts[:prompts]
        benchmark = Benchmark(self.target, systems, measured, self.settings.max_new_tokens, lines)
        benchmark.run([temperature], self.settings.repeats)
        failed |= {line["decoder"]: line["reason"] for line in lines.of("error") if line["decoder"] in heads}
        table = Table(lines.lines, measured, temperature)
        texts = table.chosen(figures.ALL)
        what = f"{len(texts)} held-out prompts, {self.settings.max_new_tokens} new tokens each"
        note = f"{what}; {len(table.loops)} more end in loops and are left out"
        if not texts:
            texts, note = table.loops, f"{len(table.loops)} held-out prompts, all of which end in loops"
        names = [BASELINE, *(name for name in heads if name not in failed)]
        return Measured({name: figures_of(table, name, texts) for name in names}, note, failed)


def figures_of(table: Table, name: str, texts: set[int]) -> dict[str, Any]:
    """Return what search.json says about a drafter in a round; `texts` is what `Judged` holds."""
    found = judged(table, name, texts)
    facts: dict[str, Any] = {
        "tokens_per_second": round(found.rate, 3),
        "standard_error": None if found.error is None else round(found.error, 3),
        "texts": found._asdict(),
    }
    if name == BASELINE:
        return facts
    lines = [line for (_, text), line in table.by_decoder[name].items() if text in texts]
    plain = judged(table, BASELINE, texts)
    facts |= {"acceptance_length": figures.acceptance(lines), "speedup": round(found.rate / plain.rate, 4)}
    return facts
