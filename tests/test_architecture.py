"""The plan of the package and of `algos/`: who imports whom, what siblings share."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import ROOT, SLOW, run_python, slow_imports

# Other files in algos/ are somebody's own
OUR_ALGORITHMS = "ppo_pmap", "pqn_pmap", "dqn_pmap", "sac_pmap", "ppo_rnn_pmap", "appo_pmap"
ALGORITHMS = [ROOT / "algos" / f"{name}.py" for name in OUR_ALGORITHMS]
PACKAGE = ROOT / "common" / "pmaprl"
COMMANDS = [path for path in sorted(PACKAGE.glob("*.py")) if "if __name__ ==" in path.read_text()]

# What each room imports of the others. The top is what lies in the package itself.
MAY_IMPORT = {
    "cli": set(),
    "envs": {"cli"},
    "machine": {"cli"},
    "device": {"cli", "envs", "machine"},  # spaces say what goes in and out
    "nets": {"cli", "envs", "device"},
    "actors": {"cli", "envs", "machine", "device"},
    "runs": {"cli", "envs", "nets", "machine", "device"},
    "policies": {"cli", "envs", "device", "runs"},
    "comparison": {"cli", "runs"},
    "drawing": {"cli", "envs", "device", "runs", "comparison"},
}
ROOMS = set(MAY_IMPORT)
MAY_IMPORT |= {
    "pmaprl": {"cli"},
    "top": ROOMS,
    "algos": ROOMS | {"top"},
    "suites": {"cli", "envs"},
}  # which `envs` loads by name

OURS = {"pmaprl", "benchmarks", "tests", "notebooks"}
FOLDERS = ("common", "algos", "tests", "benchmarks")
DENSITY = 9.5  # tokens on a line of code, over a whole folder
NESTING = 3  # blocks inside of a function
BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try)
CODE = ("NAME", "OP", "NUMBER", "STRING")
NO_BEGINNING = {
    "What",
    "Whether",
    "Of",
    "Those",
    "As",
    "Whose",
    "Who",
    "Where",
    "Likewise",
    "Which",
}
# Names of the kit that an algorithm's file uses, with those behind `nets.` and `optim.`
NAMES = {
    "ppo_pmap": 30,
    "pqn_pmap": 30,
    "dqn_pmap": 30,
    "ppo_rnn_pmap": 35,
    "appo_pmap": 32,
    "sac_pmap": 42,
}
NAMESPACES = {"nets", "optim"}
SOURCES = 2  # modules that they are imported from

# Pieces of algorithms that have one name and differ all the same.
THEIR_OWN = {
    "Args",
    "Actor",
    "Critic",
    "QNetwork",
    "Params",
    "Memory",
    "initial_memory",
    "training_memory",
    "__post_init__",
    "actor",
    "network",
    "cautions",
    "Learner",
    "Extras",
    "Batch",
}
THEIR_OWN |= {
    "init",
    "explore",
    "update",
    "act",
    "estimate",
    "learn",
    "loss",
    "loss_of",
    "outputs",
    "policy_of",
}
THEIR_OWN |= {"value_of", "observe", "train"}

# What the driver does for all algorithms, which know nothing of it.
OF_THE_DRIVER = {
    "hyper_of",
    "opponent",
    "matchmaking",
    "population",
    "AXIS",
    "varying_like",
    "MetricSums",
    "tracker",
}
OF_THE_DRIVER |= {"recent", "processes"}


def name_of(path: Path) -> str:
    """A file as a module, such as pmaprl.cli.run_flags."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    names = ("pmaprl", *parts) if parts[0] == "algos" else parts[1:]
    return ".".join(names).removesuffix(".__init__")


PATHS = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "algos")
MODULES = {name_of(path): path for path in [*PATHS, *ALGORITHMS]}


def room_of(module: str) -> str:
    package, *rest = module.split(".")
    if package != "pmaprl" or not rest:
        return package
    return rest[0] if rest and rest[0] in ROOMS | {"algos", "suites"} else "top"


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Find what a file imports of this repository, in functions too: (module, name), without a name
    for a whole module.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, (
                f"{name_of(path)} imports relative to itself: write the whole name."
            )
            names = [(node.module, alias.name) for alias in node.names]
            found = [(".".join(name), "") if ".".join(name) in MODULES else name for name in names]
        else:
            continue
        yield from ((module, name) for module, name in found if module.split(".")[0] in OURS)


def test_imports_go_one_way():
    """Nothing imports an algorithm either, not even another one."""
    assert {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))} == ROOMS | {
        "algos",
        "suites",
    }
    imports = [(module, target) for module, path in MODULES.items() for target, _ in imported(path)]
    allowed = {
        module: (MAY_IMPORT[room_of(module)] | {room_of(module), "pmaprl"}) - {"algos"}
        for module in MODULES
    }
    wrong = [
        f"{module} imports {target}."
        for module, target in imports
        if room_of(target) not in allowed[module]
    ]
    assert not wrong, "\n".join(wrong)


def test_private_names_stay_in_their_module():
    """No name with an underscore is taken from another module, by import or as an attribute."""
    for path in MODULES.values():
        modules = [module.rpartition(".")[2] for module, name in imported(path) if not name]
        taken = [
            name for _, name in imported(path) if name.startswith("_") and name != "__version__"
        ]
        taken += (
            re.findall(rf"\b(?:{'|'.join(modules)})\._[a-z]\w*", path.read_text())
            if modules
            else []
        )
        assert not taken, f"{name_of(path)} uses {taken}"


def names_of_the_kit(path: Path) -> set[str]:
    """Find the names that somebody has to know who reads a file."""
    names = {name for _, name in imported(path)} - NAMESPACES
    for node in ast.walk(ast.parse(path.read_text())):
        is_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_name and node.value.id in NAMESPACES:
            names.add(f"{node.value.id}.{node.attr}")
    return names


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_an_algorithm_is_a_page(path):
    """It has few names to know, the losses early, and below the flags nothing of what the driver
    does.
    """
    text = path.read_text()
    names = list(imported(path))
    lines = text.splitlines()
    assert len(names_of_the_kit(path)) <= NAMES[path.stem]
    assert len({module for module, _ in names}) <= SOURCES
    loss = next(
        number
        for number, line in enumerate(lines)
        if line.startswith(("def loss(", "def td_target("))
    )
    assert loss < 2 / 3 * len(lines)
    _, below = text.split("ARGS = parse(Args)")
    assert not {word for word in OF_THE_DRIVER if re.search(word, below)}


def test_the_command_line_imports_nothing_slow():
    modules = ", ".join(module for module in MODULES if room_of(module) == "cli")
    code = f"import sys, {modules}; print(*({SLOW | {'numpy'}} & sys.modules.keys()))"
    done = run_python("-c", code)
    assert done.stdout == "\n", f"pmaprl.cli imports {done.stdout}{done.stderr}"


def test_the_trainers_of_peers_write_their_rows_without_the_packages_of_the_kit():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks/peers/trainers')!r})\nimport rows"
    )
    done = run_python("-c", f"{code}\nprint(*({SLOW | {'tyro'}} & sys.modules.keys()))")
    assert done.stdout == "\n", f"rows.py imports {done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "ppo_pmap"))
        for path in (*COMMANDS, *ALGORITHMS)
    ],
    ids=name_of,
)
def test_help_imports_nothing_slow(path):
    process, slow = slow_imports("-m", name_of(path), "--help")
    assert f"python -m {name_of(path)}" in process.stdout
    assert not slow, f"{name_of(path)} imports {slow} before it has read its command line."


def pieces(path: Path) -> Iterator[tuple[str, str]]:
    """Functions and classes of a file, and the methods of its algorithm: (name, text), with
    decorators.
    """
    lines = path.read_text().splitlines()
    definitions = [node for node in ast.parse("\n".join(lines)).body if hasattr(node, "name")]
    classes = [node for node in definitions if isinstance(node, ast.ClassDef)]
    kinds = (
        "OnPolicy[",
        "RecurrentOnPolicy[",
        "OffPolicy[",
    )
    (algorithm,) = (
        node for node in classes if any(ast.unparse(x).startswith(kinds) for x in node.bases)
    )
    inside = [node for node in algorithm.body if isinstance(node, ast.FunctionDef)]
    for node in [*definitions, *inside]:
        if node is not algorithm:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, "\n".join(lines[first - 1 : node.end_lineno])


def test_pieces_that_algorithms_share_are_the_same():
    """Each file has them for its reader, so nothing but this keeps siblings from drifting apart."""
    texts = defaultdict(set)
    for name, text in (piece for path in ALGORITHMS for piece in pieces(path)):
        texts[name].add(text)
    assert {name for name, found in texts.items() if len(found) > 1} == THEIR_OWN


def files_of(folder: str) -> list[Path]:
    return ALGORITHMS if folder == "algos" else sorted((ROOT / folder).rglob("*.py"))


def tokens_by_line(text: str) -> Counter:
    """Count names, operators, numbers and strings by line; docstrings and comments do not count,
    and an f-string is one string under every version of Python.
    """
    expressions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    alone = [node for node in expressions if isinstance(node.value, ast.Constant)]
    docs = [node for node in alone if isinstance(node.value.value, str)]
    left_out = {line for node in docs for line in range(node.lineno, node.end_lineno + 1)}
    counts = Counter()
    inside = 0  # of so many f-strings
    for found in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[found.type]
        begins = kind == "FSTRING_START"
        if not inside and (begins or kind in CODE) and found.start[0] not in left_out:
            counts[found.start[0]] += 1
        inside += begins - (kind == "FSTRING_END")
    return counts


def density(texts: list[str]) -> float:
    counts = [tokens_by_line(text) for text in texts]
    return sum(count.total() for count in counts) / sum(len(count) for count in counts)


def bad_beginnings(text: str) -> list[str]:
    """Find the docstrings that begin with neither a noun nor a verb."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    beginnings = [(ast.get_docstring(node) or "").partition("\n")[0] for node in nodes]
    return [line for line in beginnings if re.split(r"\W", line)[0] in NO_BEGINNING]


def nesting(node: ast.AST) -> int:
    """Blocks that are inside of each other; an `elif` is as deep as its `if`, and a function inside
    begins anew.
    """
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        is_block = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, is_block + nesting(child))
    return deepest


@pytest.mark.parametrize("folder", FOLDERS)
def test_lines_of_code_are_short(folder):
    found = density([path.read_text() for path in files_of(folder)])
    assert found <= DENSITY, f"{folder}/ has {found:.2f} tokens on a line, {DENSITY} at most."


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_noun_or_a_verb(folder):
    found = [
        (path.name, line) for path in files_of(folder) for line in bad_beginnings(path.read_text())
    ]
    assert not found


@pytest.mark.parametrize("folder", FOLDERS)
def test_blocks_are_not_nested_deeply(folder):
    nodes = [
        (path, node) for path in files_of(folder) for node in ast.walk(ast.parse(path.read_text()))
    ]
    functions = [(path, node) for path, node in nodes if isinstance(node, ast.FunctionDef)]
    found = [f"{path.name}: {node.name}" for path, node in functions if nesting(node) > NESTING]
    assert not found, f"At most {NESTING} blocks inside of each other."


def test_form_is_measured_by_tokens_beginnings_and_blocks():
    """Examples that break the form are found, such that are in order are not."""
    long = '"""A page."""\nx = f"{a}" + b  # more\n\ny = f(1)\n'
    assert density([long]) == (5 + 6) / 2
    assert bad_beginnings('def f():\n    """What it is."""\n') == ["What it is."]
    assert bad_beginnings('def f():\n    """Whatever it is."""\n') == []
    deep = "for a in b:\n if a:\n  with a:\n   while a:\n    f(a)"
    assert nesting(ast.parse(deep)) == 4
    flat = "if a:\n f()\nelif b:\n f()\nelif c:\n f()\nelif d:\n f()\nelse:\n f()"
    assert nesting(ast.parse(flat)) == 1
