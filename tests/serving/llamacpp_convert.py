"""llama.cpp's own converter, with the arguments of convert_hf_to_gguf.py, from the sources that scripts/llamacpp_env.sh gets:

python llamacpp_convert.py DIRECTORY_OF_LLAMA_CPP HEAD --target-model-dir TARGET --outtype f32 --outfile head.gguf

It stops at a tokenizer that it does not know, which the test model's is: here that splits by the default rule, and no
package sentencepiece is looked for.
"""

import runpy
import sys


def no_pieces(model: object) -> None:
    raise FileNotFoundError


def main(sources: str, *arguments: str) -> None:
    sys.path.insert(0, sources)
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda model, tokenizer: "default"
    TextModel._create_vocab_sentencepiece = no_pieces
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
