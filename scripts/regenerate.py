"""Replace a dataset's answers by the target's:  python scripts/regenerate.py data.path=FILE endpoint=URL

endpoint: the address, with /v1, of any server with OpenAI's protocol (vLLM, SGLang, a hosted one). Without it the target runs
in this process. Train on the output with data=conversations data.path=OUTPUT. The same command resumes an interrupted run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.cli import check_at_least, entry
from foredraft.heads.checkpoint import fingerprint
from foredraft.inference.evaluation.progress import Progress, report
from foredraft.train.data.chat_template import ChatFormat, switched
from foredraft.train.data.conversations import source_of
from foredraft.train.writing.magpie import read_lines
from foredraft.train.writing.regeneration import TEXT, GenerationSettings, Regeneration, questions
from foredraft.train.writing.writers import Server, in_process, through_server
from foredraft.train.writing.written_rows import RowFile


@entry("regenerate")
def main(cfg: DictConfig) -> None:
    source, thinking = source_of(cfg.data), cfg.data.thinking
    check_at_least(cfg, 1, "concurrency", "batch_size", "max_new_tokens")
    tasks = read_lines("tasks", cfg.tasks, "conf/regenerate.yaml")
    if tasks and not any(TEXT in task for task in tasks):
        raise ValueError(f"tasks={cfg.tasks} has no line with {TEXT}, the place of a text")
    settings = GenerationSettings(cfg.temperature, cfg.top_p, cfg.max_new_tokens, cfg.seed)
    write: Callable[..., None]
    if cfg.endpoint is not None:
        chat = {} if thinking is None else {"chat_template_kwargs": switched(thinking)}
        by: Any = Server(cfg.endpoint, cfg.model, cfg.timeout, cfg.retries, **chat)
        write, batch, facts = through_server, cfg.concurrency, {"model": by.model, "thinking": thinking}
        target = None
        answers = Regeneration(settings)
    else:
        by = instantiate(cfg.target)
        form = ChatFormat(by.text_tokenizer, cfg.data.template, thinking)
        write, batch, facts = in_process, cfg.batch_size, {"model": by.name, "template": form.digest}
        answers, target = Regeneration(settings, by, form), fingerprint(by)
    dropped = dict[str, int]()
    total = sum(1 for _ in questions(source, dropped, tasks))
    if not total:
        raise ValueError(f"data.path={cfg.data.path} contains no question to answer: {dropped}")
    about = {"settings": settings._asdict() | facts, "target": target}
    with RowFile(Path(cfg.output), about, "output") as rows:
        report(f"{facts['model']} answers; {len(rows.done)} of {total} rows exist already")
        left = answers.remaining(questions(source, {}, tasks), rows)
        with Progress("answering", total, "rows", done=len(rows.done)) as progress:
            write(by, left, rows, batch, lambda texts: progress.add(len(rows.done) - progress.done))
    failed = f", {rows.errors} of them lack an answer (`error` in the row says why)" if rows.errors else ""
    print(f"{len(rows.done)} rows in {rows.path}{failed}; filtered: {dropped or 'none'}", flush=True)


if __name__ == "__main__":
    main()
