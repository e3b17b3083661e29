"""Run the programs: `foredraft train head=medusa` is `python train/run.py head=medusa`, and so on for scripts/*.py.

A program is imported only when it is chosen, so that --help does not import torch.
"""

import importlib
import sys
from difflib import get_close_matches
from pathlib import Path

from foredraft import __version__

PROGRAMS = {
    "train": ("foredraft.train.run", "train a draft head and measure it"),
    "demo": ("foredraft.train.run", "train for the small test model of this repository (target=test_model)"),
    "generate": ("foredraft.scripts.generate", "continue prompts with a drafter"),
    "chat": ("foredraft.scripts.chat", "chat with a target in the terminal"),
    "serve": ("foredraft.scripts.serve", "serve OpenAI's protocol and a chat page"),
    "learn": ("foredraft.train.learn", "train a server's head on its texts (serve learn=true starts it)"),
    "evaluate": ("foredraft.scripts.evaluate", "measure acceptance length and speed of drafters"),
    "tune": ("foredraft.scripts.tune", "choose the number of drafts for your traffic, for vLLM, SGLang and llama.cpp"),
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
    named = ("target=", "target.path=", "recipe=", "--cfg", "-c", "--config-name")
    # A misspelled one is reported with all keys that are not known.
    typed = [
        argument for argument in arguments if get_close_matches(argument.partition("=")[0], ["target"], cutoff=0.8)
    ]
    return command not in KNOWN_TARGET and not typed and not any(argument.startswith(named) for argument in arguments)


def usage() -> str:
    width = max(map(len, PROGRAMS)) + 2
    lines = "\n".join(f"  {name:{width}}{what}" for name, (_, what) in PROGRAMS.items())
    return f"""usage: foredraft COMMAND [key=value ...]

{lines}

foredraft COMMAND --help explains a command with its main keys and choices, --help all with every key.
foredraft --version prints the version, also after a command."""


def failed(sentence: str) -> SystemExit:
    print(f"error: {sentence}", file=sys.stderr)
    return SystemExit(2)


def main() -> None:
    """Run the program that the first argument names with the other arguments. foredraft/cli.py lists the exit codes."""
    command, arguments = [*sys.argv, "--help"][1], sys.argv[2:]
    if command in ("-h", "--help"):
        print(usage())
        return
    if "--version" in sys.argv[1:]:
        print(f"foredraft {__version__}")
        return
    if command not in PROGRAMS:
        near = get_close_matches(command, PROGRAMS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise failed(f"{command} is not a command of foredraft{hint} Known: {', '.join(PROGRAMS)}.")
    if command == "demo" and needs_target("train", arguments):
        arguments.insert(0, "target=test_model")
    sys.argv = [f"{sys.argv[0]} {command}", *arguments]
    try:
        asks_help = bool({"-h", "--help"} & {*arguments})
        if needs_target(command, arguments) and not asks_help:
            raise failed(importlib.import_module("foredraft.cli").NEEDS_TARGET.format(command))
        if asks_help:
            file = Path(__file__).parent / f"{PROGRAMS[command][0].partition('.')[2].replace('.', '/')}.py"
            importlib.import_module("foredraft.cli").show_help(command, file)
            return
        program = importlib.import_module(PROGRAMS[command][0])
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "foredraft":
            raise
        need = f"foredraft {command} needs {error.name}: pip install 'foredraft[{EXTRAS.get(command, 'cli')}]'"
        raise failed(need) from None
    program.main()


if __name__ == "__main__":
    main()
