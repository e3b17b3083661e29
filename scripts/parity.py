"""Check that a head and its export draft alike:  python scripts/parity.py head=outputs/eagle3/head [exported=exports/eagle3]

Training forward, drafter and files must give the same draft logits, and trained head and export the same acceptance
length. Over a GGUF of the target (target_gguf=FILE, or the file that the head was trained on) llama.cpp's server must accept
its drafts where we do. Exit code 2 where they do not.
"""

from pathlib import Path

from omegaconf import DictConfig

from foredraft.heads import hub
from foredraft.heads.target.locating import gguf_of
from foredraft.inference.serve.llamacpp import is_installed
from foredraft.train import gguf_gate, publish
from foredraft.train.cli import CONF, entry


@entry("parity", CONF / "publish")
def main(cfg: DictConfig) -> None:
    target = publish.open_target(cfg.target, cfg.head)
    trained = hub.find(cfg.head)
    print(publish.gate(trained, target, hub.find(cfg.exported) if cfg.exported else trained))
    own = None if cfg.target_gguf else gguf_of(target.name, None, cfg.target.revision)
    if own is not None and not is_installed():
        print(f"not compared with llama.cpp over {own.name}, which is not installed (pip install xllamacpp)")
    elif own or cfg.target_gguf:
        prompts = [text[: publish.LENGTH // 2] for text in publish.own_texts(target)]
        print(gguf_gate.check(trained, target, own or Path(cfg.target_gguf), prompts, 2 * publish.LENGTH))


if __name__ == "__main__":
    main()
