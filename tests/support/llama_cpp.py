"""llama.cpp's own tokenizer, by the server inside the wheel `xllamacpp`: run as a program, since it logs and never unloads.

python -m tests.support.llama_cpp FILE.gguf < strings.json > ids.json
"""

import json
import sys
import urllib.request


def main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx, params.cpuparams.n_threads, params.warmup, params.port = 256, 1, False, 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    found = []
    for text in json.load(sys.stdin):
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(json.load(answer)["tokens"])
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
