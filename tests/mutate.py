"""Change the product in small ways, and list the changes that no test notices:

    OMP_NUM_THREADS=1 python -m tests.mutate                             # SAMPLE mutants of each file
    OMP_NUM_THREADS=1 python -m tests.mutate --sample 0 heads/base.py    # all mutants of a file

A mutant is one changed expression or statement in a function's body. pytest collects the tests of GUARDS once. A first
process runs them and notes which lines each of them executes. Then each mutant gets a forked process, which replaces the code
of one function and runs the tests of its line, the fastest first, until one fails or its processor time is over. Mutants in
EQUIVALENT change nothing that a user could notice. The exit code is 1 if more than 5 % survive.
"""

import argparse
import ast
import copy
import functools
import importlib
import os
import pickle
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest

from tests.mutants import EQUIVALENT, GUARDS
from tests.support import ROOT

SAMPLE, MOST_SURVIVORS = 2, 0.05
SECONDS = 20  # of a mutant's processor time, next to three times that of its tests
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, BitAnd BitOr, min max, amin amax, any all"
PAIRS += ", minimum maximum, Mult FloorDiv"
SWAPS = {one: other for pair in PAIRS.split(", ") for one, other in (pair.split(), pair.split()[::-1])}
SKIPPED = ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments
Place = tuple[ast.AST, str, int | None, ast.AST]
realpath = functools.cache(os.path.realpath)


def changes(node: Any) -> Iterator[ast.AST]:
    """Yield what may stand in the place of a node."""
    operators = [node.op] if hasattr(node, "op") else getattr(node, "ops", [])
    for place, operator in enumerate(operators):
        if name := SWAPS.get(type(operator).__name__):
            other = getattr(ast, name)()
            ops = {"ops": [*operators[:place], other, *operators[place + 1 :]]}
            yield replaced(node, **(ops if hasattr(node, "ops") else {"op": other}))
    for field in ("id", "attr"):
        if name := SWAPS.get(getattr(node, field, "")):
            yield replaced(node, **{field: name})
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield replaced(node, value=not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    returned = node.value if isinstance(node, ast.Return) else None
    if returned is not None and getattr(returned, "value", True):  # False is as good as None
        yield replaced(node, value=ast.Constant(None))
    if isinstance(node, ast.Break | ast.Continue) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def replaced(node: ast.AST, **fields: Any) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and the methods of its classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield f"{prefix}{child.name}", child


def places(parent: ast.AST) -> Iterator[Place]:
    """Yield the parent, its field, the index there, and the node, of all nodes of a function but annotations and errors."""
    for field, value in ast.iter_fields(parent):
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(node, SKIPPED) or field in ("annotation", "returns") or getattr(node, "arg", "") == "strict":
                continue
            if isinstance(node, ast.AST):
                yield parent, field, index, node
                yield from places(node)


class Mutant:
    def __init__(self, file: str, tree: ast.Module, name: str, place: Place, node: ast.AST):
        parent, field, index, old = place
        self.file, self.name, self.line = file, name, old.lineno  # type: ignore[attr-defined]
        short = isinstance(parent, ast.expr) and len(ast.unparse(parent)) < 60
        before, whole = getattr(parent, field), parent if short else old
        shown = ast.unparse(whole)
        setattr(parent, field, node if index is None else [*before[:index], node, *before[index + 1 :]])
        ast.fix_missing_locations(ast.copy_location(node, old))
        self.key = f"{file} {name}: {shown} -> {ast.unparse(node if whole is old else whole)}"
        self.code: Any = compile(tree, str(ROOT / file), "exec")
        setattr(parent, field, before)
        for part in name.split("."):
            self.code = next(c for c in self.code.co_consts if isinstance(c, CodeType) and c.co_name == part)

    def apply(self) -> None:
        """Replace the code of the function in this process, for all that have imported it."""
        found: Any = importlib.import_module(f"foredraft.{self.file.removesuffix('.py').replace('/', '.')}")
        for part in self.name.split("."):
            found = found.__dict__[part]
        while not hasattr(found, "__code__") or hasattr(found, "__wrapped__"):
            found = getattr(found, "__wrapped__", None) or getattr(found, "fget", None) or found.__func__
        found.__code__ = self.code.replace(co_freevars=found.__code__.co_freevars)  # `super()` may be gone


def mutants(file: str) -> list[Mutant]:
    tree = ast.parse((ROOT / file).read_text())
    every = [(name, place) for name, function in functions(tree) for place in places(function)]
    made = [Mutant(file, tree, name, place, node) for name, place in every for node in changes(place[3])]
    return [mutant for mutant in made if mutant.key not in EQUIVALENT]


class Plugin:
    """Run the collected tests with each mutant, instead of once."""

    def __init__(self, chosen: list[Mutant], report: Callable[[str], object]):
        self.chosen, self.report, self.survivors = chosen, report, 0
        self.files = {str(ROOT / mutant.file) for mutant in chosen}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        reader, writer = os.pipe()
        if os.fork() == 0:
            with os.fdopen(writer, "wb") as file:
                pickle.dump(self.trace(session), file)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            seconds, lines = pickle.load(file)
        os.wait()
        for mutant in self.chosen:
            place = str(ROOT / mutant.file), mutant.line
            tests = sorted((test for test in lines if place in lines[test]), key=seconds.__getitem__)
            if not tests or not self.is_killed(session, mutant, tests, sum(seconds[test] for test in tests)):
                self.survivors += 1
                self.report(f"survives{'' if tests else ', never run'}: line {mutant.line}: {mutant.key}")
        return True

    def trace(self, session: pytest.Session) -> tuple[dict[int, float], dict[int, set[tuple[str, int]]]]:
        """Return the seconds of each test, and the lines that it executes."""
        seconds, lines = {}, {}

        def line(frame: Any, event: str, argument: Any) -> Any:
            lines[test].add((realpath(frame.f_code.co_filename), frame.f_lineno))
            return line

        def call(frame: Any, event: str, argument: Any) -> Any:
            return line if realpath(frame.f_code.co_filename) in self.files else None

        for test in range(len(session.items)):
            started, lines[test] = time.process_time(), set()
            sys.settrace(call)
            assert not fails(session, session.items[test : test + 2]), f"{session.items[test].nodeid} fails anyway"
            sys.settrace(None)
            seconds[test] = time.process_time() - started
        return seconds, lines

    def is_killed(self, session: pytest.Session, mutant: Mutant, tests: list[int], seconds: float) -> bool:
        child = os.fork()
        if child == 0:
            limit = int(SECONDS + 3 * seconds + time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            mutant.apply()
            items = [session.items[test] for test in tests]
            os._exit(any(fails(session, items[number : number + 2]) for number in range(len(items))))
        until = time.monotonic() + 10 * (SECONDS + seconds)  # for a mutant that waits
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            time.sleep(0.02)
            if time.monotonic() > until:
                os.kill(child, 9)
        return ended[1] != 0


def fails(session: pytest.Session, items: list[pytest.Item]) -> bool:
    """Run the first test. The fixtures that it shares with the second one stay."""
    session.config.hook.pytest_runtest_protocol(item=items[0], nextitem=items[1] if items[1:] else None)
    return session.testsfailed > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="by default all of GUARDS")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="mutants of each file; 0: all")
    given = parser.parse_args()
    screen, null = os.fdopen(os.dup(1), "w", buffering=1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # what tests print
    total = survived = 0
    for files, tests in GUARDS:
        chosen: list[Mutant] = []
        for file in [file for file in files if not given.files or file in given.files]:
            every = mutants(file)
            chosen += random.Random(0).sample(every, min(given.sample or len(every), len(every)))
            print(f"{file} has {len(every)} mutants", file=screen)
        if chosen:
            plugin = Plugin(chosen, lambda line: print(line, file=screen))
            code = pytest.main(["-s", "-q", "-p", "no:cacheprovider", *tests], plugins=[plugin])
            assert code == pytest.ExitCode.OK, f"the tests of {files} could not run"
            total, survived = total + len(chosen), survived + plugin.survivors
    print(f"{survived} of {total} mutants survive", file=screen)
    sys.exit(survived > MOST_SURVIVORS * total)


if __name__ == "__main__":
    main()
