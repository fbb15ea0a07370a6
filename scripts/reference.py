"""Writes the API reference, HTML of the public names from their docstrings (`make docs`).

    python scripts/reference.py [-o build/reference]

Public are the names in the table of docs/python-api.md. Faults are what pdoc warns of, a public
name without a docstring, a name in one that leads nowhere, and a dead link in the pages. They are
printed together, with exit code 1.
"""

from __future__ import annotations

import argparse
import builtins
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pdoc
import torch
from pdoc.doc import Class, Doc, Module, Namespace
from pdoc.doc_ast import walk_tree
from pdoc.render_helpers import relative_link

import specctl.lazy

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python-api.md"
ROW = re.compile(r"^\| `(specctl[\w.]*)` \| ([^|]+) \|", re.MULTILINE)
QUOTED = re.compile(r"(?<!`)`(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?P<call>\(\))?`(?!`)")
COMMENTED = re.compile(r"^    (\w+): [^#\n]*  # (?!type:|noqa)(.+)$", re.MULTILINE)
"""A field with a comment beside it."""
CLASS_NAME = re.compile(r"_?(?:[A-Z]+[a-z]+)\w*")
FILE_SUFFIXES = {"json", "md", "onnx", "parquet", "png", "safetensors", "toml"}
TAG = "kind"
"""Field that tells records of a union apart; its value is the class's word."""


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("-o", "--out", type=Path, default=ROOT / "build" / "reference")
    out: Path = options.parse_args().out
    # Words, where specctl runs: both are types of torch, which may not be loaded there.
    vars(specctl.lazy).update(Tensor=torch.Tensor, Device=torch.device | str)
    public = public_names(PAGE.read_text("utf-8"))
    faults = write_reference(public, out)
    for fault in faults:
        print(fault)
    total = sum(len(names) for names in public.values())
    print(f"{len(faults)} faults; {total} names of {len(public)} modules: {out / 'index.html'}")
    return 1 if faults else 0


def public_names(page: str) -> dict[str, list[str]]:
    """Public names by module, from the page's table.

    A cell may hold patterns: `*` stands for a module's `__all__`, `*Error` for classes named so.
    """
    public: dict[str, list[str]] = {}
    for module, cell in ROW.findall(page):
        patterns = re.findall(r"`([^`]+)`", cell)
        known = offered(import_module(module))
        names = [name for name in known if any(fnmatchcase(name, one) for one in patterns)]
        unmet = [one for one in patterns if not any(fnmatchcase(name, one) for name in known)]
        if unmet:
            raise SystemExit(f"{PAGE.name}: {module} has no {', '.join(unmet)}")
        public[module] = names
    return public


def offered(module: ModuleType) -> list[str]:
    """Names that a module may publish: its `__all__`, or else all without underscore."""
    ours = [
        name
        for name, one in vars(module).items()
        if not inspect.isclass(one) or one.__module__.startswith(module.__name__.split(".")[0])
    ]
    names: list[str] = list(getattr(module, "__all__", ours))
    return [name for name in names if not name.startswith("_")]


def write_reference(public: Mapping[str, Sequence[str]], out: Path) -> list[str]:
    """Writes one page a module and an index; returns the faults, a line each.

    Args:
        public: names by module.
        out: a folder; it is made, and pages in it are replaced.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pages = {name: page_of(name, names) for name, names in public.items()}
        for page in pages.values():
            bring_down(page, public)
            for field in members_of(page):
                if field.kind == "variable" and "." in field.qualname and not field.docstring:
                    field.docstring = comments_of(class_of(field)).get(field.name, "")
        contents = table_of_contents(pages)
        faults = [fault for page in pages.values() for fault in check_page(page, pages)]
        next(iter(pages.values())).docstring += contents  # where the index leads
        pdoc.render.configure(
            docformat="google", show_source=False, footer_text=f"specctl {specctl.__version__}"
        )
        for name, page in pages.items():
            file = out / f"{name.replace('.', '/')}.html"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(pdoc.render.html_module(page, pages), "utf-8")
        (out / "index.html").write_text(pdoc.render.html_index(pages), "utf-8")
        (out / "search.js").write_text(pdoc.render.search_index(pages), "utf-8")
    faults += [" ".join(str(one.message).split()) for one in caught]
    return faults + [f"{page}: dead link {link}" for page, link in dead_links(out)]


def page_of(name: str, names: Sequence[str]) -> Module:
    """pdoc's view of a module with these names and no others."""
    module = import_module(name)
    for one in names:
        setattr(module, one, getattr(module, one))  # some are imported on first use
    module.__all__ = list(names)  # type: ignore[attr-defined]
    page = Module(module)
    for doc in page.members.values():
        doc.docstring = doc.docstring or text_below(name, doc.name)
        if isinstance(doc, Class) and hasattr(doc.obj, "_fields"):  # else hints lack a module
            doc.obj.__new__.__annotations__ = get_type_hints(doc.obj)
    return page


def comments_of(cls: type) -> dict[str, str]:
    """Comments that stand beside a class's fields, by field."""
    found = (COMMENTED.findall(source) for source in reversed(sources_of(cls)))
    return {name: comment for pairs in found for name, comment in pairs}


def sources_of(cls: type) -> list[str]:
    """The texts of a class and of its bases in the same package."""
    package = cls.__module__.split(".")[0]
    return [inspect.getsource(b) for b in cls.__mro__ if b.__module__.split(".")[0] == package]


def text_below(package: str, name: str) -> str:
    """The docstring of an alias in the module that a package has it from; a union of records has
    that of their base, a class of the same name."""
    for module in [
        sys.modules[one] for one in sorted(sys.modules) if one.startswith(f"{package}.")
    ]:
        found = vars(module).get(name)
        text = inspect.getdoc(found) if inspect.isclass(found) and found.__name__ == name else None
        if text := text or walk_tree(module).var_docstrings.get(name):
            return text
    return ""


def bring_down(page: Module, public: Mapping[str, Sequence[str]]) -> None:
    """Counts what a class has from a base of ours that is not public among its own members."""
    for cls in (one for one in page.members.values() if isinstance(one, Class)):
        for (module, base), members in list(cls.inherited_members.items()):
            if module.startswith("specctl.") and base not in public.get(module, ()):
                cls.own_members.extend(members)
                del cls.inherited_members[module, base]


def table_of_contents(pages: Mapping[str, Module]) -> str:
    """A line for each page but the first."""
    firsts = {name: page.docstring.partition("\n")[0] for name, page in pages.items()}
    return "".join(f"\n- `{name}`: {firsts[name]}" for name in list(firsts)[1:]).join(("\n", "\n"))


def dead_links(out: Path) -> Iterator[tuple[str, str]]:
    """Links between the pages, of a page to itself too, that lead to no place: (page, link)."""
    texts = {
        page.resolve(): re.sub(r"<script.*?</script>", "", page.read_text("utf-8"), flags=re.DOTALL)
        for page in out.rglob("*.html")
    }
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        for found in sorted(set(re.findall(r'<a[^>]* href="(?!\w+:)([^"]*)"', text))):
            file, _, anchor = found.partition("#")
            target = (page.parent / file).resolve() if file else page
            if target not in texts or (anchor and anchor not in anchors[target]):
                yield str(page.relative_to(out.resolve())), found


# --------------------------------------------------------------------------- what must hold


def check_page(page: Module, pages: Mapping[str, Module]) -> Iterator[str]:
    """Faults of a page's docstrings. Names in them that lead to another page become links."""
    for doc in (page, *members_of(page)):
        if not doc.docstring and not is_told_by_class(doc):
            yield f"{doc.fullname}: no docstring"
        for found in QUOTED.finditer(doc.docstring):
            if is_reference(found, doc) and resolve(found["name"], doc, pages) is None:
                yield f"{doc.fullname}: {found[0]} leads nowhere"
        doc.docstring = QUOTED.sub(lambda found: link(found, doc, page, pages), doc.docstring)  # noqa: B023


def members_of(parent: Namespace[Any]) -> Iterator[Doc[Any]]:
    """What a reader sees of a module or class, nested classes' members too."""
    own = parent.members.values() if isinstance(parent, Module) else parent.own_members
    for doc in own:
        if not doc.name.startswith("_"):
            yield doc
            if isinstance(doc, Class):
                yield from members_of(doc)


def is_told_by_class(doc: Doc[Any]) -> bool:
    """Whether a field needs no docstring: its class, or a base of it, speaks of it by name."""
    if doc.kind != "variable" or "." not in doc.qualname:
        return False
    if doc.name == TAG:
        return True
    cls = class_of(doc)
    texts = (inspect.getdoc(base) or "" for base in cls.__mro__)
    if any(re.search(rf"\b{doc.name}\b", text) for text in texts):
        return True  # or the comment of a field behind it speaks of several
    several = re.compile(rf'(?:# |""")[`\w, ]*`{doc.name}`[`\w, ]*: ')
    return any(several.search(text) for text in sources_of(cls))


def is_reference(found: re.Match[str], doc: Doc[Any]) -> bool:
    """Whether quoted words mean a name of Python's, not a value, a setting or a file."""
    head, _, rest = found["name"].partition(".")
    if found["call"] or CLASS_NAME.fullmatch(head):
        return True
    if rest.rpartition(".")[2] in FILE_SUFFIXES or not rest:
        return False
    return head == "specctl" or any(head in names for names in scopes(doc))


def resolve(name: str, doc: Doc[Any], pages: Mapping[str, Module]) -> Doc[Any] | bool | None:
    """The entry that a name leads to; True where there is such a thing on no page, else None."""
    for module, qualname in (splits := list(qualified(name, doc))):
        if module in pages and (
            entry := pages[module].get(qualname) if qualname else pages[module]
        ):
            return entry
    head, *rest = name.split(".")
    for page in pages.values():  # by its short name, from another page
        if (entry := page.get(name)) is not None:
            return entry
    for names in scopes(doc):
        if head in names and has(names[head], rest):
            return True
    return True if any(exists(module, qualname) for module, qualname in splits) else None


def qualified(name: str, doc: Doc[Any]) -> Iterator[tuple[str, str]]:
    """Readings of a name as (module, name in it), the nearest first."""
    outer = doc.qualname.split(".") if doc.qualname else []
    for depth in range(len(outer), -1, -1):
        yield doc.modulename, ".".join([*outer[:depth], name])
    for full in (name, f"specctl.{name}"):
        parts = full.split(".")
        for cut in range(len(parts), 0, -1):
            yield ".".join(parts[:cut]), ".".join(parts[cut:])


def scopes(doc: Doc[Any]) -> Iterator[Mapping[str, Any]]:
    """Names that the author of a docstring could have meant without a module."""
    if isinstance(doc, Class) or "." in doc.qualname:
        owner = doc.obj if isinstance(doc, Class) else class_of(doc)
        yield {name: value for base in owner.__mro__ for name, value in vars(base).items()}
    yield vars(sys.modules[doc.taken_from[0]]) if doc.taken_from[0] in sys.modules else {}
    yield vars(builtins)
    yield {name: import_module(f"specctl.{name}") for name in subpackages()}


def subpackages() -> list[str]:
    return sorted(
        path.name for path in (ROOT / "specctl").iterdir() if (path / "__init__.py").exists()
    )


def has(value: Any, names: Sequence[str]) -> bool:
    for name in names:
        if not hasattr(value, name):
            return name in getattr(value, "__annotations__", {})
        value = getattr(value, name)
    return True


def exists(module: str, qualname: str) -> bool:
    try:
        return find_spec(module) is not None and (
            not qualname or has(import_module(module), qualname.split("."))
        )
    except ModuleNotFoundError:
        return False


def class_of(doc: Doc[Any]) -> type:
    owner: Any = sys.modules[doc.modulename]
    for name in doc.qualname.split(".")[:-1]:
        owner = getattr(owner, name)
    return owner


def link(found: re.Match[str], doc: Doc[Any], page: Module, pages: Mapping[str, Module]) -> str:
    """A quoted name as a link, where it means a name and leads to another page."""
    is_name = is_reference(found, doc) or "_" in found["name"]
    entry = resolve(found["name"], doc, pages) if is_name else None
    if not isinstance(entry, Doc) or entry.modulename == page.modulename:
        return found[0]  # pdoc links names of the page itself
    anchor = f"#{entry.qualname}" if entry.qualname else ""
    return f"[{found[0]}]({relative_link(page.modulename, entry.modulename)}{anchor})"


if __name__ == "__main__":
    raise SystemExit(main())
