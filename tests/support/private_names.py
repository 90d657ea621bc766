"""Which private names of torch the library uses, found in its sources; nothing is imported.

A name is private if one of its parts begins with an underscore, as in ``torch._C._autograd`` or
``torch.distributed.tensor._utils.compute_local_shape``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def library_files() -> list[Path]:
    """The library's files without ``testing/``, each once: ``passes`` is also a link inside the package."""
    package = [path for path in (ROOT / "fsdp_compiled").rglob("*.py") if not path.is_symlink()]
    inside = [path for path in package if path.relative_to(ROOT).parts[1] not in ("passes", "testing")]
    return sorted([*inside, *(ROOT / "passes").rglob("*.py")])


def names_used(path: Path) -> set[str]:
    """Full names of what a file imports from torch or reaches through such an import, if they are private."""
    tree = ast.parse(path.read_text())
    imported = dict(_imports(tree))
    names = {name for name in imported.values() if is_private(name)}
    for chain in _chains(tree):
        root, *rest = chain
        if root in imported and (is_private(full := ".".join([imported[root], *rest])) or is_private(imported[root])):
            names.add(full)
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def attributes_used(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Private attributes that the files read of objects and that the library itself never defines, and where."""
    trees = {path: ast.parse(path.read_text()) for path in paths}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    found: dict[str, list[Path]] = {}
    for path, tree in trees.items():
        imported = dict(_imports(tree))
        rooted = {chain[-1] for chain in _chains(tree) if chain[0] in imported}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours | rooted:
                found.setdefault(node.attr, []).append(path)
    return {name: sorted(set(where)) for name, where in sorted(found.items())}


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What each name that is imported from torch stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
                    if not alias.asname and "." in alias.name:
                        yield f"import {alias.name}", alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _chains(tree: ast.AST) -> Iterator[list[str]]:
    """``a.b.c`` as a list of its parts, where a is a plain name; also the shorter ones inside."""
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield [node.id, *reversed(parts)]


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names of functions and classes, of attributes that are set, and all short texts, which may be names."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
