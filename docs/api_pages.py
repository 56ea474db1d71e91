"""Pages of the API reference from the sources, which are read and not imported: one page a package.

A module becomes its docstring, then its public classes (fields as they stand in the source, with their comments) and
functions.  Docstrings are in Google style; pictures and tables in them stay as they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("rlinf_embodied", "envs", "policies")
_FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises", "Returns": "returns", "Yields": "yields"}
_ITEM = re.compile(r"(?P<name>[\w.*, ]+): (?P<text>.*)", re.DOTALL)
_INDENT = "   "


def write_pages(root: Path, target: Path) -> list[str]:
    """Writes a page for each package below `root`, and an index; returns the names of the pages."""
    target.mkdir(parents=True, exist_ok=True)
    pages = {}
    for package, files in sorted(modules(root).items()):
        parts = [part for file in files for part in module_page(file, root)]
        pages[package] = [*heading(package, "="), *parts]
    contents = [
        *heading("API reference", "="),
        ".. toctree::",
        "   :maxdepth: 1",
        "",
        *(f"   {name}" for name in pages),
    ]
    for name, lines in (pages | {"index": contents}).items():
        page, text = target / f"{name}.rst", "\n".join(lines) + "\n"
        if not page.exists() or page.read_text(encoding="utf-8") != text:  # what stays the same is not read again
            page.write_text(text, encoding="utf-8")
    for page in target.glob("*.rst"):
        if page.stem not in {*pages, "index"}:
            page.unlink()
    return list(pages)


def modules(root: Path) -> dict[str, list[Path]]:
    """Returns the files of each package, those of packages inside its own second level included."""
    found: dict[str, list[Path]] = {}
    for top in PACKAGES:
        for file in sorted((root / top).rglob("*.py")):
            parts = file.relative_to(root).parts[:-1][:2]
            found.setdefault(".".join(parts), []).append(file)
    return found


def module_page(file: Path, root: Path) -> Iterator[str]:
    """Yields the lines on a module; none for one without a public name."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    members = {node.name: node for node in tree.body if _is_public(node)}  # the last one where a name is defined twice
    if not members and file.name != "__init__.py":
        return
    yield from heading(name, "-")
    yield from (f".. py:module:: {name}", "")
    yield from prose(ast.get_docstring(tree) or "")
    for node in members.values():
        yield from class_entry(node, source) if isinstance(node, ast.ClassDef) else function_entry(node)


def class_entry(node: ast.ClassDef, source: str) -> Iterator[str]:
    """Yields a class: its docstring, its fields, its public methods."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield from (f".. py:class:: {node.name}" + (f"({bases})" if bases else ""), "")
    inside = [*prose(ast.get_docstring(node) or "")]
    lines = source.splitlines()
    fields = [line[4:] for part in node.body if _is_field(part) for line in lines[part.lineno - 1 : part.end_lineno]]
    inside += ([".. code-block:: python", ""] + [_INDENT + line for line in fields] + [""]) if fields else []
    methods = {part.name: part for part in node.body if _is_public(part) and not isinstance(part, ast.ClassDef)}
    for method in methods.values():
        inside += function_entry(method, is_method=True)
    yield from (_INDENT + line if line else "" for line in inside)


def function_entry(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool = False) -> Iterator[str]:
    """Yields a function with its signature, or a method or property."""
    kinds = {ast.unparse(decorator) for decorator in node.decorator_list}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if "property" in kinds:
        yield from (f".. py:property:: {node.name}", *([f"   :type: {returns[4:]}"] if returns else []), "")
    else:
        if is_method and "staticmethod" not in kinds and node.args.args:
            node.args.args = node.args.args[1:]
        kind = "method" if is_method else "function"
        yield from (f".. py:{kind}:: {node.name}({ast.unparse(node.args)}){returns}", "")
    yield from (_INDENT + line if line else "" for line in prose(ast.get_docstring(node) or ""))


def prose(text: str) -> Iterator[str]:
    """Yields a docstring as reStructuredText: paragraphs, fields such as Args, and what is drawn as it is."""
    for block in filter(None, re.split(r"\n\s*\n", text)):
        head, _, rest = block.partition("\n")
        kind = _FIELDS.get(head.rstrip(":")) if head.endswith(":") and rest else None
        if kind is not None:
            yield from fields(kind, rest)
        elif any(map(is_drawn, block.split("\n"))):
            yield from (".. code-block:: text", "", *(_INDENT + line for line in block.split("\n")))
        else:
            yield escaped(" ".join(block.split()))
        yield ""


def is_drawn(line: str) -> bool:
    """Returns whether a line stands in a picture or a table: indented, with gaps that end no sentence, or a rule."""
    return re.search(r"^ |[^\s.] {2,}\S|^\W+$", line) is not None


def fields(kind: str, text: str) -> Iterator[str]:
    """Yields what a section of a docstring says: of Args, a field per argument."""
    items: list[str] = []
    indent = len(text) - len(text.lstrip())
    for line in text.split("\n"):
        if items and (len(line) - len(line.lstrip()) > indent or kind in ("returns", "yields")):
            items[-1] += " " + line.strip()
        else:
            items.append(line.strip())
    for item in items:
        named = _ITEM.fullmatch(item) if kind not in ("returns", "yields") else None
        yield f":{kind} {named['name']}: {escaped(named['text'])}" if named else f":{kind}: {escaped(item)}"


def escaped(text: str) -> str:
    """Returns a text in which nothing but code in backticks means anything."""
    plain = lambda part: re.sub(r"([\\*_|`]|(?<=:):)", r"\\\1", part)  # noqa: E731
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick that is one
        return plain(text)
    code = [f"\\ ``{part.strip()}``\\ " if part.strip() else "" for part in parts]
    return "".join(code[k] if k % 2 else plain(part) for k, part in enumerate(parts))


def heading(text: str, line: str) -> list[str]:
    """Returns a heading."""
    return [text, line * len(text), ""]


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
