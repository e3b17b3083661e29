"""`foredraft serve` whose engine meets a bug with texts that start with token 1, and ends its thread with those of 2."""

from foredraft.inference.engine import Engine
from foredraft.scripts.serve import main

step = Engine.step


def faulty(engine: Engine):
    first = {sequence.text[0] for sequence in (*engine.waiting, *engine.running())}  # before a text may have ended
    if 1 in first:
        raise RuntimeError("a bug")
    if 2 in first:
        raise SystemExit
    return step(engine)


Engine.step = faulty  # type: ignore[method-assign]
main()
