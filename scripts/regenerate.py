"""Replace a set's answers by the target's own:  python scripts/regenerate.py data.path=FILE endpoint=URL

endpoint: any server that speaks OpenAI's protocol (vLLM, SGLang, a hosted one), with its /v1; without one the target answers
in this process. The output is trained on with data=conversations data.path=OUTPUT. A stopped run is continued by the same
command.
"""

import asyncio
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.inference.evaluation.progress import report
from foredraft.train.cli import entry
from foredraft.train.data.chat_template import ChatFormat, switched
from foredraft.train.data.conversations import source_of
from foredraft.train.data.generation_clients import Server, in_process, through_server
from foredraft.train.data.regeneration import GenerationSettings, Output, questions
from foredraft.train.data.sources import Source


@entry("regenerate")
def main(cfg: DictConfig) -> None:
    source = source_of(cfg.data)
    for name in ("concurrency", "batch", "max_tokens"):
        if cfg[name] < 1:
            raise ValueError(f"{name}={cfg[name]} must be at least 1")
    sampling = GenerationSettings(cfg.temperature, cfg.top_p, cfg.max_tokens, cfg.seed)
    dropped: dict[str, int] = {}
    if cfg.endpoint is not None:
        output = asyncio.run(serve(cfg, source, sampling, dropped))
    else:
        target = instantiate(cfg.target)
        form = ChatFormat(target.text_tokenizer, cfg.data.template, cfg.data.thinking)
        output = Output(Path(cfg.output), sampling._asdict() | {"model": target.name, "template": form.digest})
        in_process(target, form, output.remaining(questions(source, dropped)), cfg.batch, sampling, output)
    print(f"{len(output.done)} rows in {output.path}; dropped: {dropped or 'none'}", flush=True)


async def serve(cfg: DictConfig, source: Source, sampling: GenerationSettings, dropped: dict[str, int]) -> Output:
    thinking = cfg.data.thinking
    extra = {} if thinking is None else {"chat_template_kwargs": switched(thinking)}
    server = Server(cfg.endpoint, cfg.model, cfg.timeout, cfg.retries, sampling, extra)
    await server.start()
    output = Output(Path(cfg.output), sampling._asdict() | {"model": server.model, "thinking": thinking})
    report(f"{server.model} at {cfg.endpoint} answers; {len(output.done)} rows are there already")
    await through_server(server, output.remaining(questions(source, dropped)), cfg.concurrency, output)
    return output


if __name__ == "__main__":
    main()
