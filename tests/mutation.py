"""Mutants of ``spectrain/exact``: one small fault at a time, each of which the tests have to find.

    python tests/mutation.py [sampler verify.tree ...] [--share 0.2 --seed 0]

Every mutant runs in a fork of this process, which has torch loaded, with the tests of its module (`TESTS`), the quick
ones first and stopping at the first that fails. What survives is either a gap in the tests or changes nothing that
anyone could see; the second kind is listed with its reason in ``exact/equivalent.txt``. Exits 1 on any other survivor.

Left alone: messages (whatever stands in a ``raise`` or an f-string), annotations, decorators and docstrings.
(Libraries for this keep their mutants inside functions and start from ``a = None``; what decides a law here are bounds,
minima and clamps, and tables at the head of a module.)
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch  # noqa: F401  (so that no mutant has to)

PACKAGE, HERE = "spectrain.exact", Path(__file__).parent
KNOWN = HERE / "exact" / "equivalent.txt"
LAWS = "whole_sequences or never_shorter or ninths or vocabularies or biased or shortcuts"
CHECKED = "refused or not_checked or laws_pass or looked_up or any_whole_type"
TESTS = {  # module: its test files and, where they hold more than its own, which tests of them (-k)
    "sampler": ("test_sampler", ""),
    "penalties": ("test_penalties", ""),
    "verify.chain": ("test_chain", ""),
    "verify.block": ("test_block", "not whole_sequences and not never_shorter"),
    "verify.tree": ("test_tree", "not whole_sequences and not without_branches and not point_masses"),
    "verify.check": ("test_chain test_tree", f"no_proposals or no_nodes or {CHECKED}"),
    "verify.typical": ("test_typical", ""),
    "law": ("test_law", ""),
    "block_law": ("test_block", f"({LAWS}) and not repairs_as"),
    "tree_law": ("test_tree", f"{LAWS} or point_masses or without_branches or published or goes_on"),
    "biased": ("test_tree", "shortcuts or published"),
    "cost": ("test_cost", ""),
    "proof": ("test_proof", ""),
}
CPU_SECONDS = 60  # no module's tests take half of it
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
PAIRS = ("min max", "any all", "minimum maximum", "amax amin", "argmax argmin", "zeros_like ones_like", "zeros ones")
RENAMED = {one: other for pair in PAIRS for one, other in (pair.split(), reversed(pair.split()))}
DROPPED = {"clamp", "clamp_", "double", "float", "long", "int", "to", "masked_fill_", "masked_fill", "abs", "clone"}
SKIPPED = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    text: str  # its function and what is put for what; numbered where that has several like it
    old: ast.AST
    new: ast.AST


def mutants(module: str, tree: ast.Module) -> Iterator[Mutant]:
    seen: Counter[str] = Counter()

    def mutant(place: str, around: ast.AST, old: ast.AST, new: ast.AST) -> Mutant:
        text = f"{module}:{place}: {first_line(old)} -> {first_line(new)}"
        if isinstance(old, ast.Constant):
            text += f" in {first_line(around)}"
        seen[text] += 1
        return Mutant(module, old.lineno, text + (f" ({seen[text]})" if seen[text] > 1 else ""), old, new)

    def walk(node: ast.AST, place: str, around: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, SKIPPED):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = f"{place}.{node.name}".lstrip(".")
        for new in variants(node):
            yield mutant(place, around, node, ast.copy_location(new, node))
        if not isinstance(node, ast.UnaryOp | ast.Slice | ast.Tuple | ast.keyword):
            around = node
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                documents = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if isinstance(child, ast.AST) and not documents and not is_dimension(node, child):
                    yield from walk(child, place, around)

    yield from walk(tree, "", tree)


def first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


def variants(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=operators):
            for i, operator in enumerate(operators):
                if type(operator) in OTHER:  # not `is`: what it decides is forced both ways
                    yield changed(node, ops=[*operators[:i], OTHER[type(operator)](), *operators[i + 1 :]])
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator):
            if type(operator) in OTHER:
                yield changed(node, op=OTHER[type(operator)]())
        case ast.AugAssign(op=operator):
            yield from (changed(node, op=OTHER[type(operator)]()), ast.Pass())
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.If():
            yield from (changed(node, test=ast.Constant(value)) for value in (True, False))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Call():
            yield from calls(node)


def is_dimension(node: ast.AST, child: ast.AST) -> bool:
    """The -1 of ``sum(-1)``: with another the shapes no longer fit."""
    if isinstance(node, ast.keyword):
        return node.arg in ("dim", "keepdim")
    return isinstance(node, ast.Call) and isinstance(child, ast.UnaryOp) and isinstance(child.operand, ast.Constant)


def calls(node: ast.Call) -> Iterator[ast.AST]:
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    if name in RENAMED:
        field = "id" if isinstance(node.func, ast.Name) else "attr"
        yield changed(node, func=changed(node.func, **{field: RENAMED[name]}))
    if name in DROPPED and isinstance(node.func, ast.Attribute):
        yield node.func.value
    if name == "where" and len(node.args) == 3:
        yield from node.args[1:]
    for i in range(len(node.keywords)):
        yield changed(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])


def changed(node: ast.AST, **fields: object) -> ast.AST:
    return ast.copy_location(type(node)(**{**dict(ast.iter_fields(node)), **fields}), node)


class Swap(ast.NodeTransformer):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def visit(self, node: ast.AST) -> ast.AST:
        return self.mutant.new if node is self.mutant.old else self.generic_visit(node)


class QuickFirst:
    """Orders tests by the seconds that they took before."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def run_tests(module: str, order: QuickFirst) -> int:
    files, chosen = TESTS[module]
    # Without shrinking a failing example, and with the same examples every time.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases, database=None, derandomize=True, print_blob=False)
    hypothesis.settings.load_profile("mutants")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # hypothesis does without its own; the rest is only slow
    options = ["-x", "-qq", "--noconftest", "--no-header", "--tb=no", "-W", "ignore", "-p", "no:cacheprovider"]
    return int(
        pytest.main(
            [*(str(HERE / "exact" / f"{name}.py") for name in files.split()), *options, "-k", chosen], plugins=[order]
        )
    )


def verdict(mutant: Mutant, tree: ast.Module, order: QuickFirst) -> str:
    """What became of a mutant: "killed", "survived" or "timeout". It is tested in a process of its own."""
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        code = 1  # of a mutant that cannot even be imported
        try:
            install(mutant.module, ast.fix_missing_locations(Swap(mutant).visit(tree)))
            code = run_tests(mutant.module, order)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "timeout"
    code = os.WEXITSTATUS(status)
    if code > 2:
        raise SystemExit(f"{mutant.text}: pytest ended with {code}, so nothing was tested")
    return "killed" if code else "survived"


def install(module: str, tree: ast.Module) -> None:
    spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    exec(compile(tree, spec.origin, "exec"), loaded.__dict__)
    setattr(sys.modules[spec.parent], spec.name.rpartition(".")[2], loaded)


def baseline(module: str) -> QuickFirst:
    """The seconds of each test on the module as it is. What the tests import of others stays loaded for the mutants."""
    order = QuickFirst({})
    if run_tests(module, order):
        raise SystemExit(f"{module}: its tests fail, or there are none, without any mutant")
    for name in [name for name in sys.modules if name.startswith(("spectrain.", "test_", "integrated"))]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # a fork that looks for garbage would copy every page
    return order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS), help=" ".join(TESTS))
    parser.add_argument("--share", type=float, default=1.0, help="of each module's mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    known = {line.split("  # ")[0] for line in KNOWN.read_text().splitlines()}
    unknown = 0
    for module in options.modules:
        start, order = time.monotonic(), baseline(module)
        path = HERE.parent / PACKAGE.replace(".", "/") / f"{module.replace('.', '/')}.py"
        tree = ast.parse(path.read_text())
        every = list(mutants(module, tree))
        if gone := {text for text in known if text.startswith(f"{module}:")} - {mutant.text for mutant in every}:
            sys.exit(f"{KNOWN}: {min(gone)}: there is no such mutant any more; take the line out")
        drawn = random.Random(options.seed).sample(every, round(options.share * len(every)))
        counts: Counter[str] = Counter()
        for mutant in sorted(drawn, key=lambda mutant: mutant.line):
            found = "equivalent" if mutant.text in known else verdict(mutant, tree, order)
            counts[found] += 1
            if found == "survived":
                unknown += 1
                print(f"line {mutant.line}: {mutant.text}", flush=True)
        told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        seconds = time.monotonic() - start
        print(f"== {module}: {len(drawn)} of {len(every)} mutants, {told}, {seconds:.0f} s", flush=True)
    sys.exit(unknown > 0)


if __name__ == "__main__":
    main()
