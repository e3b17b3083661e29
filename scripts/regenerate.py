"""Replace a dataset's answers by the target's:  python scripts/regenerate.py data.path=FILE endpoint=URL

endpoint: the address, with /v1, of any server with OpenAI's protocol (vLLM, SGLang, a hosted one). Without it the target runs
in this process. Train on the output with data=conversations data.path=OUTPUT. The same command resumes an interrupted run.
"""

import asyncio
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.cli import entry
from foredraft.inference.evaluation.progress import report
from foredraft.train.data.chat_template import ChatFormat, switched
from foredraft.train.data.conversations import source_of
from foredraft.train.data.generation_clients import Server, in_process, through_server
from foredraft.train.data.regeneration import GenerationSettings, Output, questions
from foredraft.train.data.sources import Source


@entry("regenerate")
def main(cfg: DictConfig) -> None:
    source = source_of(cfg.data)
    for name in ("concurrency", "batch_size", "max_new_tokens"):
        if cfg[name] < 1:
            raise ValueError(f"{name}={cfg[name]} must be at least 1")
    sampling = GenerationSettings(cfg.temperature, cfg.top_p, cfg.max_new_tokens, cfg.seed)
    dropped: dict[str, int] = {}
    total = sum(1 for _ in questions(source, {}))
    if cfg.endpoint is not None:
        output = asyncio.run(serve(cfg, source, sampling, dropped, total))
    else:
        target = instantiate(cfg.target)
        form = ChatFormat(target.text_tokenizer, cfg.data.template, cfg.data.thinking)
        output = Output(Path(cfg.output), sampling._asdict() | {"model": target.name, "template": form.digest}, total)
        in_process(target, form, output.remaining(questions(source, dropped)), cfg.batch_size, sampling, output)
    output.progress.close()
    print(f"{len(output.done)} rows in {output.path}; filtered: {dropped or 'none'}", flush=True)


async def serve(
    cfg: DictConfig, source: Source, sampling: GenerationSettings, dropped: dict[str, int], total: int
) -> Output:
    thinking = cfg.data.thinking
    extra = {} if thinking is None else {"chat_template_kwargs": switched(thinking)}
    server = Server(cfg.endpoint, cfg.model, cfg.timeout, cfg.retries, sampling, extra)
    await server.start()
    output = Output(Path(cfg.output), sampling._asdict() | {"model": server.model, "thinking": thinking}, total)
    report(f"{server.model} at {cfg.endpoint} answers; {len(output.done)} of {total} rows exist already")
    await through_server(server, output.remaining(questions(source, dropped)), cfg.concurrency, output)
    return output


if __name__ == "__main__":
    main()
