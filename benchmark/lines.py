"""How long the scripts are, how much of each is algorithm, and how long each variant's diff is.

    python benchmark/lines.py

Algorithm: the functions of a script (collect, losses, update, train ...), the draw of an action
with its density, and the layer that a paper adds; not the docstring, imports, arguments and
networks. All in lines that are not blank. Changed lines of a variant: a diff of the two files
without their docstrings; where the sides of a change differ in length, the longer one counts.
"""

import ast
import difflib
from pathlib import Path

ALGOS = Path(__file__).resolve().parent.parent / "algos"
PROGRAMS = "play", "generations", "tournament"  # run other scripts: no algorithm of their own
PARENTS = {
    "ppo": "a2c", "ppo_hterm": "ppo", "td3": "ddpg", "sac": "td3", "mod_sac": "sac", "redq": "sac",
    "crossq": "sac", "xqc": "crossq", "ddpg_hterm": "ddpg", "td3_hterm": "td3", "sac_hterm": "sac",
    "d3qn": "dqn", "sac_discrete": "sac", "pqn": "dqn", "qmix": "vdn", "matd3": "maddpg",
    "mappo": "ppo",
}  # fmt: skip
ADDED = "sample", "policy", "BatchRenorm", "EnsembleLinear", "Mixer"  # part of the algorithm, too


def scripts() -> list[Path]:
    return [path for path in sorted(ALGOS.glob("[!_]*.py")) if path.stem not in PROGRAMS]


def filled(lines: list[str]) -> list[str]:
    return [line for line in lines if line.strip()]


def measure(path: Path) -> tuple[int, int, float]:
    """Lines of a script, lines of its docstring, and the part of the rest that is algorithm."""
    text = path.read_text()
    lines, tree = text.splitlines(), ast.parse(text)
    docstring = tree.body[0].end_lineno
    functions = [
        (min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno)
        for node in ast.walk(tree)
        if getattr(node, "name", "") in ADDED
        or (node in tree.body and isinstance(node, ast.FunctionDef) and node.name != "mlp")
    ]
    algorithm = sum(len(filled(lines[first - 1 : last])) for first, last in functions)
    return len(lines), docstring, algorithm / len(filled(lines[docstring:]))


def changed_lines(parent: Path, child: Path) -> int:
    """Lines of code that differ, docstrings of the two files apart: the longer side of each."""
    codes = []
    for path in (parent, child):
        text = path.read_text()
        codes.append(filled(text.splitlines()[ast.parse(text).body[0].end_lineno :]))
    matcher = difflib.SequenceMatcher(None, *codes, autojunk=False)
    return sum(max(b - a, d - c) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal")


def main() -> None:
    print(f"{'script':14}{'lines':>6}{'docstring':>11}{'algorithm':>11}   changed lines")
    for path in scripts():
        lines, docstring, share = measure(path)
        parent = PARENTS.get(path.stem)
        diff = f"{changed_lines(ALGOS / f'{parent}.py', path):4} of {parent}" if parent else ""
        print(f"{path.stem:14}{lines:6}{docstring:11}{share:11.0%}   {diff}")
    for folder in ("worker_learner", "populations"):
        lengths = [(p.name, len(p.read_text().splitlines())) for p in (ALGOS / folder).glob("*.py")]
        print(f"\n{folder}: {sum(length for _, length in lengths)}")
        for name, length in sorted(lengths):
            print(f"  {name:14}{length:6}")


if __name__ == "__main__":
    main()
