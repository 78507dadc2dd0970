"""Rules for all packages: import order, no cycles between modules or folders, no torch in the launcher, parsing
only in `ezpz_llm.core.base.untrusted_input`, private names of other libraries, and files that ruff checks."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from slowness import scaled

import ezpz_llm
from ezpz_llm.launcher.jobs.schedulers import SCHEDULERS
from ezpz_llm.training.dist.deepspeed_names import NAMES

PACKAGE = Path(ezpz_llm.__file__).parent
PACKAGES = {
    "core": ("base", "rundir"),
    "launcher": ("basics", "jobs", "planning", "on_nodes", "diagnosis", "running", "submit"),
    "training": ("dist", "data", "observe", "report", "model", "layout", "engine", "checkpoint", "hf", "evaluate",
                 "library", "trainer"),
    "verify": ("check", "certify", "explain", "scaling"),
}
"""The four packages and their folders. Each folder imports only itself and folders before it."""
FOLDERS = [f"{package}/{folder}" for package, folders in PACKAGES.items() for folder in folders]
WITHOUT_TORCH = ("core", "launcher")
LAUNCHER_FOR_TRAINING = ("launcher/basics", "launcher/jobs")
"""Folders of the launcher that training imports: what a rank is, and what a reservation gives."""
PARSING_MODULE = PACKAGE / "core" / "base" / "untrusted_input.py"
PARSERS = {"json": {"load", "loads", "JSONDecoder"}, "yaml": None, "tomllib": None, "tomli": None, "marshal": None}
"""Names of each module that parse; None means all of them."""


def folders_imported(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, folder) of each import from ezpz_llm, including imports in functions; "" for a command."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "use absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, *rest = name.split(".")
            if root == "ezpz_llm" and rest and not rest[0].startswith("__"):
                yield node.lineno, "/".join(rest[:2]) if rest[0] in PACKAGES else ""


def test_the_folders_are_those_of_the_list_and_of_the_documentation():
    page = PACKAGE.parent / "docs" / "reference" / "architecture.md"
    section = page.read_text().split("\n## Packages\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+/\w+)/`", section, re.MULTILINE) == FOLDERS
    assert sorted(FOLDERS) == sorted(path.parent.relative_to(PACKAGE).as_posix()
                                     for path in PACKAGE.glob("*/*/__init__.py"))
    assert sorted(PACKAGES) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert not [path for package in PACKAGES for path in (PACKAGE / package).glob("*.py")
                if path.name != "__init__.py"], "move it into a folder of the package"


def allowed_imports(folder: str) -> list[str]:
    """Return the folders that a folder may import."""
    before = FOLDERS[:FOLDERS.index(folder) + 1]
    if not folder.startswith("training/"):
        return before
    return [other for other in before if not other.startswith("launcher/") or other in LAUNCHER_FOR_TRAINING]


def test_a_folder_imports_only_folders_before_it():
    violations = {f"{path.relative_to(PACKAGE)}:{line}": imported for folder in FOLDERS
                  for path in (PACKAGE / folder).rglob("*.py")
                  for line, imported in folders_imported(path.read_text())
                  if imported not in allowed_imports(folder)}
    assert not violations, "import of a command, or of a folder that is later in PACKAGES"
    assert [*folders_imported("from ezpz_llm.training.dist.mesh import Mesh")] == [(1, "training/dist")]
    assert [*folders_imported("def f():\n    import ezpz_llm.train")] == [(2, "")]


def torch_users(text: str) -> list[int]:
    """Return the lines that import torch, DeepSpeed, or numpy, also in functions and for annotations."""
    return [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
            if name.partition(".")[0] in {"torch", "deepspeed", "numpy"}]


def test_core_and_the_launcher_do_not_import_torch():
    violations = {f"{path.relative_to(PACKAGE)}:{line}" for package in WITHOUT_TORCH
                  for path in (PACKAGE / package).rglob("*.py") for line in torch_users(path.read_text())}
    assert not violations
    assert torch_users("def f():\n    from torch.distributed import init_process_group") == [2]


def module_name(path: Path) -> str:
    """Return the name of the module, or of the package if the file is its __init__.py."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(name: str, text: str, modules: Mapping[str, str]) -> set[str]:
    """Return the modules that a module imports, in functions and under TYPE_CHECKING too.

    `from package import name` imports the package, and the submodule if `name` is one. In a package's __init__.py,
    the name of a submodule in a string is an import too, since `lazy_names` takes tables of them.
    """
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and any(other.startswith(f"{name}.") for other in modules):
            imported.add(f"{name}.{node.value}")
    return (imported & modules.keys()) - {name}


def find_cycle(modules: Mapping[str, str]) -> list[str]:
    """Return the modules of an import cycle, given the text of each module; empty if there is none."""
    try:
        TopologicalSorter({name: modules_imported(name, text, modules) for name, text in modules.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_do_not_import_each_other():
    assert not find_cycle({module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize("text", ["import p.a", "from p import a", "from p.a import x",
                                  "def f():\n    from p import a", "if TYPE_CHECKING:\n    from p.a import X"])
def test_cycles_are_found(text):
    modules = {"p": "", "p.a": "from p.b import y", "p.b": text}
    assert sorted(set(find_cycle(modules))) == ["p.a", "p.b"]
    assert not find_cycle(modules | {"p.b": "import sys"})


def test_cycles_through_a_package_are_found():
    assert find_cycle({"p": "from p.a import x", "p.a": "from p import x"})
    assert find_cycle({"p": "__getattr__ = lazy_names(__name__, {'x': 'a'})", "p.a": "from p import x"})


def find_folder_cycle(modules: Mapping[str, str]) -> list[str]:
    """Return a cycle between folders or modules that are next to each other; empty if there is none.

    An import counts for the two neighbors in the innermost folder that has both of its ends.
    """
    neighbors: dict[str, dict[str, set[str]]] = {}
    for name, text in modules.items():
        for other in modules_imported(name, text, modules):
            ours, theirs = name.split("."), other.split(".")
            depth = next((depth for depth, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if depth is not None:
                neighbors.setdefault(".".join(ours[:depth]), {}).setdefault(ours[depth], set()).add(theirs[depth])
    for graph in neighbors.values():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return list(error.args[1])
    return []


def test_folders_do_not_import_each_other():
    modules = {module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")}
    # The commands and the public names import everything.
    assert not find_folder_cycle({name: text for name, text in modules.items() if name.count(".") > 1})
    assert sorted(set(find_folder_cycle({"p.a.x": "import p.b.y", "p.b.y": "", "p.b.z": "import p.a.w",
                                         "p.a.w": ""}))) == ["a", "b"]
    assert not find_folder_cycle({"p.a.x": "import p.b.y", "p.b.y": "import p.c", "p.c": ""})


SCHEDULER_CODE = ("launcher/jobs/schedulers/", "launcher/planning/dialects/", "launcher/basics/ranks.py")
"""Modules that may use names of schedulers, of their launchers, and of their variables."""
OTHER_SCHEDULER_CODE = {
    "launcher/jobs/nested_launcher.py",  # recognizes any program that starts ranks in the user's command
}


def scheduler_names_in(text: str) -> list[tuple[int, str]]:
    """Return the lines with a string that names a scheduler, its launcher or its variables; without docstrings."""
    names = {name for scheduler in SCHEDULERS for name in (scheduler.NAME, *scheduler.COMMANDS)}
    names |= {"pals", *(launcher.program for scheduler in SCHEDULERS if (launcher := scheduler.step_launcher()))}
    prefixes = tuple(prefix for scheduler in SCHEDULERS for prefix in scheduler.JOB_PREFIXES)
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [(node.lineno, node.value) for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
            and (node.value in names or node.value.startswith(prefixes))]


def test_only_schedulers_know_schedulers():
    """Code elsewhere asks `Scheduler` and `Dialect`, so that a plug-in can answer too."""
    violations = {f"{name}:{line}": word for path in PACKAGE.rglob("*.py")
                  if not (name := str(path.relative_to(PACKAGE))).startswith(SCHEDULER_CODE)
                  and name not in OTHER_SCHEDULER_CODE
                  for line, word in scheduler_names_in(path.read_text())}
    assert not violations, "add a member to Scheduler (jobs/schedulers/scheduler.py), or a field to Dialect"
    assert scheduler_names_in("scheduler == 'slurm'")
    assert scheduler_names_in("env['PBS_JOBID']")
    assert scheduler_names_in("launcher in ('mpiexec', 'srun')")
    assert not scheduler_names_in('"""Return SLURM_TMPDIR."""')


def parsers_in(text: str) -> list[tuple[int, str]]:
    """Return the lines that use a parser of another library, and its name."""
    uses = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = PARSERS.get(node.value.id, set())
            if names is None or node.attr in names:
                uses.append((node.lineno, f"{node.value.id}.{node.attr}"))
        elif isinstance(node, ast.Import):
            uses += [(node.lineno, alias.name) for alias in node.names if PARSERS.get(alias.name, set()) is None]
        elif isinstance(node, ast.ImportFrom) and node.module in PARSERS:
            names = PARSERS[node.module]
            uses += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names
                      if names is None or alias.name in names]
    return uses


def test_no_other_module_parses():
    violations = {f"{path.relative_to(PACKAGE)}:{line}": name
                  for path in PACKAGE.rglob("*.py") if path != PARSING_MODULE
                  for line, name in parsers_in(path.read_text())}
    assert not violations, "use ezpz_llm.core.base.untrusted_input"


@pytest.mark.parametrize("text", ["import json\njson.loads('1')", "from json import load", "import tomllib",
                                  "import yaml", "import json\njson.JSONDecoder()"])
def test_parsers_are_found(text):
    assert parsers_in(text)
    assert not parsers_in("import json\njson.dumps(1)")


INTERNALS = {
    "argparse": ("core/base/command_parser.py",),
    "torch": ("training/dist/torch_internals.py",),
    "deepspeed": ("training/dist/deepspeed_names.py", "training/dist/deepspeed_internals.py",
                  "training/dist/deepspeed_patches.py"),
}
"""The only modules that may use private names of a library, or change it."""
OTHERS = {"_exit", "_replace", "_asdict", "_fields", "_field_defaults", "_run_exitfuncs", "_hf_peft_config_loaded"}
"""Private names of the standard library and of transformers that may be used."""
DEEPSPEED_NAMES = {name for modules in NAMES.values() for names in modules.values() for name in names
                   if "_" in name}
"""Names that no other library has: the others are words such as `partition`, or names in an imported module."""
LIBRARY = re.compile(r"(torch|deepspeed|argparse)(\.|$)")


def names_made_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def is_private(name: str, ours: set[str]) -> bool:
    """Return True if a name is private in another library, or in DeepSpeed's table."""
    if name in DEEPSPEED_NAMES:
        return True
    return name.startswith("_") and not name.startswith("__") and name not in ours


def internals_in(text: str, ours: set[str]) -> list[tuple[int, str]]:
    """Return the lines that use a private name of a library, or assign an attribute of DeepSpeed.

    Attributes of objects have no module name. They are recognized by their underscore, or by DeepSpeed's table.
    """
    tree = ast.parse(text)
    uses, modules = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or "deepspeed" for alias in node.names if alias.name.startswith("deepspeed")}
            parts = [part for alias in node.names if LIBRARY.match(alias.name) for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and LIBRARY.match(node.module or ""):
            modules |= {alias.asname or alias.name for alias in node.names if "deepspeed" in str(node.module)}
            parts = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            parts = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            parts = [str(name.value) for name in node.args[1:2] if isinstance(name, ast.Constant)]
        else:
            continue
        uses += [(node.lineno, part) for part in parts if is_private(part, ours)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            path = ast.unparse(node)
            if path.partition(".")[0] in modules:
                uses.append((node.lineno, path))
    return uses


def test_private_names_of_libraries_are_in_one_place():
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    allowed = {name for names in INTERNALS.values() for name in names}
    assert allowed <= files.keys()
    ours = OTHERS.union(*(names_made_in(ast.parse(text)) for name, text in files.items() if name not in allowed))
    violations = {f"{name}:{line}": part for name, text in files.items() if name not in allowed
                  for line, part in internals_in(text, ours)}
    assert not violations, f"add a function to {INTERNALS}"


@pytest.mark.parametrize("text", [
    "import torch\ntorch.cpu._is_amx_tile_supported()", "from torch.utils._pytree import tree_leaves",
    "from deepspeed.utils.groups import _WORLD_GROUP", "import torch._dynamo", "table.weight._hp_grad",
    "getattr(table.weight, '_hp_grad')", "zero.averaged_gradients[0]", "hasattr(parameter, 'ds_tensor')",
    "parser._actions", "import deepspeed\ndeepspeed.runtime.pipe.p2p.dist = None",
    "from deepspeed.utils import groups\ngroups.mesh = None"])
def test_private_names_of_libraries_are_found(text):
    assert internals_in(text, set())
    assert not internals_in("self._mine = parameter.data\nparameter.grad = None\nx.__class__", {"_mine"})


def foreign_privates_in(text: str, own: set[str], others: set[str]) -> list[tuple[int, str]]:
    """Return the lines that import or access a private name which only another of our packages makes."""
    uses = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ezpz_llm"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [node.attr]
        else:
            continue
        uses += [(node.lineno, name) for name in names
                 if name.startswith("_") and not name.startswith("__") and name in others - own]
    return uses


def test_a_package_uses_no_private_names_of_another():
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    made: dict[str, set[str]] = {package: set() for package in (*PACKAGES, "commands")}
    package_of = {name: name.split("/")[0] if "/" in name else "commands" for name in files}
    for name, text in files.items():
        made[package_of[name]].update(names_made_in(ast.parse(text)))
    everything = set().union(*made.values()) - OTHERS
    internals = {name for names in INTERNALS.values() for name in names}
    violations = {f"{name}:{line}": private for name, text in files.items() if name not in internals
                  for line, private in foreign_privates_in(text, made[package_of[name]], everything)}
    assert not violations, "make it public where it is defined, or move the code that needs it"
    assert foreign_privates_in("engine._clip", {"_mine"}, {"_clip"}) == [(1, "_clip")]
    assert foreign_privates_in("from ezpz_llm.training.engine import _clip", set(), {"_clip"}) == [(1, "_clip")]
    assert not foreign_privates_in("self._clip, engine._mine", {"_mine"}, {"_clip", "_mine"})


@pytest.mark.parametrize("package", [
    "", ".core.base", ".training.dist", ".training.observe", ".training.checkpoint"])
def test_names_that_are_loaded_on_first_use_exist(package):
    module = importlib.import_module(f"ezpz_llm{package}")
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_ruff_checks_every_module():
    """Ruff's default skips folders named dist, such as ezpz_llm/training/dist."""
    root = PACKAGE.parent
    listed = subprocess.run([sys.executable, "-m", "ruff", "check", "--show-files", "."], cwd=root, check=True,
                            capture_output=True, text=True, timeout=scaled(60)).stdout.splitlines()
    assert set(map(str, PACKAGE.rglob("*.py"))) <= set(listed)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module uses, also in strings, such as those of monkeypatch.setattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value)


def interface_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names in annotations and base classes, which callers see without naming them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            parts = [node.returns, *(argument.annotation for argument in arguments)]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        else:
            parts = [*node.bases] if isinstance(node, ast.ClassDef) else []
        for part in filter(None, parts):
            yield from names_in(part)


def top_level_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the functions, classes and variables of a module."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def test_public_names_are_used_elsewhere_or_documented():
    root = PACKAGE.parent
    trees = {path: ast.parse(path.read_text()) for folder in ("ezpz_llm", "tests", "benchmarks", "examples")
             for path in (root / folder).rglob("*.py")}
    users: dict[str, set[Path]] = {}
    for path, tree in trees.items():
        for name in names_in(tree):
            users.setdefault(name, set()).add(path)
    documented = {word for page in (*(root / "docs").rglob("*.md"), root / "README.md")
                  for word in re.findall(r"\w+", page.read_text())}
    private = {f"{path.relative_to(PACKAGE)}: {name}" for path in PACKAGE.rglob("*.py")
               for name in {*top_level_names(trees[path])} - documented - {*interface_names(trees[path])}
               if not name.startswith("_") and not users[name] - {path}}
    assert not private, "begin the name with an underscore, or delete it"


def test_no_module_imports_a_private_name_of_another():
    violations = {f"{path.relative_to(PACKAGE)}:{node.lineno}": alias.name for path in PACKAGE.rglob("*.py")
                  for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
                  if (node.module or "").startswith("ezpz_llm") for alias in node.names
                  if alias.name.startswith("_") and not alias.name.startswith("__")}
    assert not violations, "make the name public"


def headings_in(text: str) -> list[int]:
    """Return the lines of comments that head a part of a module: above a definition, or above a blank line."""
    lines = text.splitlines()
    return [number for number, (line, following) in enumerate(zip(lines, [*lines[1:], ""], strict=True), 1)
            if number > 1 and line.startswith("#") and re.match(r"$|def |class |@|async def ", following)]


def test_no_module_has_headings():
    violations = [f"{path.relative_to(PACKAGE)}:{line}" for path in PACKAGE.rglob("*.py")
                  for line in headings_in(path.read_text())]
    assert not violations, "a module that needs a heading is two modules"
    assert headings_in("x = 1\n\n# Reading\n\ndef read(): pass") == [3]
    assert headings_in("x = 1\n\n# Reading of files.\ndef read(): pass") == [3]
    assert not headings_in("x = 1\n# Why.\ny = 2")


def test_pytest_looks_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """Includes folders named `dist` and `build`, which pytest skips by default."""
    tests = Path(__file__).parents[1]
    folders = {name for path in tests.rglob("test_*.py") for name in path.relative_to(tests).parent.parts}
    assert "dist" in folders
    assert not [name for name in folders for pattern in pytestconfig.getini("norecursedirs")
                if fnmatch.fnmatch(name, pattern)]
