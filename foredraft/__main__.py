"""Run the programs: `foredraft train head=medusa` is `python train/run.py head=medusa`, and so on for scripts/*.py.

A program is imported only when it is chosen, so that --help does not import torch.
"""

import importlib
import sys
from difflib import get_close_matches

from foredraft import __version__

PROGRAMS = {
    "train": ("foredraft.train.run", "train a draft head and measure it"),
    "demo": ("foredraft.train.run", "train for the small test model of this repository (target=test_model)"),
    "generate": ("foredraft.scripts.generate", "continue prompts with a drafter"),
    "chat": ("foredraft.scripts.chat", "chat with a target in the terminal"),
    "serve": ("foredraft.scripts.serve", "serve OpenAI's protocol and a chat page"),
    "learn": ("foredraft.train.learn", "train a server's head on its texts (serve learn=true starts it)"),
    "evaluate": ("foredraft.scripts.evaluate", "measure acceptance length and speed of drafters"),
    "lossless": ("foredraft.scripts.lossless", "check that drafting does not change the text of your model"),
    "preview": ("foredraft.scripts.preview", "show the training samples, with the learned tokens highlighted"),
    "regenerate": ("foredraft.scripts.regenerate", "replace the answers of a dataset by the target's"),
    "extract": ("foredraft.scripts.extract", "serve a target's hidden states to trainers (hidden_states=server)"),
    "plan": ("foredraft.scripts.plan", "estimate memory and time of a training before it starts"),
    "export": ("foredraft.scripts.export", "convert a head to the format of another engine"),
    "parity": ("foredraft.scripts.parity", "check that a head and its export draft the same tokens"),
    "env": ("foredraft.scripts.env", "report versions, devices and what works here, for bug reports"),
    "push": ("foredraft.scripts.push", "send a head to the Hugging Face Hub"),
}

# The extra of a program that needs more than `cli`.
EXTRAS = {
    "train": "train",
    "demo": "train",
    "learn": "train",
    "preview": "train",
    "extract": "train",
    "regenerate": "regenerate",
    "serve": "serve",
}

# Programs without a required target: the head's files name it, or none is needed.
KNOWN_TARGET = ("demo", "env", "export", "parity", "push")


def needs_target(command: str, arguments: list[str]) -> bool:
    """Return whether the command line lacks a target that the command requires. Arguments such as --cfg run nothing."""
    named = ("target=", "target.path=", "recipe=", "--cfg", "-c", "--config-name", "--hydra-help", "--info")
    return command not in KNOWN_TARGET and not any(argument.startswith(named) for argument in arguments)


def usage() -> str:
    width = max(map(len, PROGRAMS)) + 2
    lines = [f"  {name:{width}}{what}" for name, (_, what) in PROGRAMS.items()]
    return "\n".join(
        [
            "usage: foredraft COMMAND [key=value ...]",
            "",
            *lines,
            "",
            "foredraft COMMAND --help explains a command with its main keys and choices, --help all with every key.",
            "foredraft --version prints the version, also after a command.",
        ]
    )


def main() -> None:
    """Run the program that the first argument names with the other arguments. train/cli.py lists the exit codes."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(usage())
        return
    if "--version" in sys.argv[1:]:
        print(f"foredraft {__version__}")
        return
    if command not in PROGRAMS:
        near = get_close_matches(command, PROGRAMS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        print(f"error: {command} is not a command of foredraft{hint} Known: {', '.join(PROGRAMS)}.", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [f"{sys.argv[0]} {command}", *sys.argv[2:]]
    asks_help = bool({"-h", "--help"} & set(sys.argv[1:]))
    if command == "demo" and needs_target("train", sys.argv[1:]):
        sys.argv.insert(1, "target=test_model")
    try:
        if needs_target(command, sys.argv[1:]):
            if not asks_help:
                sentence = importlib.import_module("foredraft.train.cli").NEEDS_TARGET.format(command)
                print(f"error: {sentence}", file=sys.stderr)
                raise SystemExit(2)
            sys.argv.append("target=hf")  # the keys and choices that a target of the user's has
        if asks_help:
            importlib.import_module("foredraft.train.cli").show_help(command, PROGRAMS[command][0])
            return
        program = importlib.import_module(PROGRAMS[command][0])
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "foredraft":
            raise
        extra = EXTRAS.get(command, "cli")
        need = f"foredraft {command} needs {error.name}: pip install 'foredraft[{extra}]'"
        print(f"error: {need}", file=sys.stderr)
        raise SystemExit(2) from None
    program.main()


if __name__ == "__main__":
    main()
