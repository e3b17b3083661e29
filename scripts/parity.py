"""Check that a head and its export draft the same:  python scripts/parity.py checkpoint=DIRECTORY [exported=DIRECTORY]

Training forward, drafter and files must give the same draft logits, and the trained head and its export the same acceptance
length. With a GGUF of the target (target_gguf=FILE, or the file that the head was trained on), llama.cpp's server must accept
the same drafts. Otherwise the exit code is 2.
"""

from pathlib import Path

from omegaconf import DictConfig

from foredraft.cli import entry
from foredraft.heads import hub
from foredraft.heads.target_model.resolve_path import gguf_of
from foredraft.inference.serve.other_engines import has_llamacpp
from foredraft.train import gguf_gate, publish


@entry("parity")
def main(cfg: DictConfig) -> None:
    target = publish.open_target(cfg.target, cfg.checkpoint)
    trained = hub.find(cfg.checkpoint)
    publish.gate(trained, target, hub.find(cfg.exported) if cfg.exported else trained)
    own = None if cfg.target_gguf else gguf_of(target.name, None, cfg.target.revision)
    if own is not None and not has_llamacpp():
        print(f"not compared with llama.cpp on {own.name}, because llama.cpp is not installed (pip install xllamacpp)")
    elif own or cfg.target_gguf:
        prompts = [text[: publish.LENGTH // 2] for text in publish.own_texts(target)]
        print(gguf_gate.check(trained, target, own or Path(cfg.target_gguf), prompts, 2 * publish.LENGTH))


if __name__ == "__main__":
    main()
