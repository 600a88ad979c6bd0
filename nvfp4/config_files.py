"""Recipe files as plain data: YAML text, the chain of `base:` files.

Every key remembers where it was written, so that any later complaint can say `file:line`. What a
key means is not known here; that is nvfp4.config.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from nvfp4.errors import UserError

Key = tuple[str | int, ...]

PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp")
}
INTERPOLATION = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
COMMAND_LINE = "command line"


class RecipeError(UserError):
    """One or several mistakes in a recipe, each on a line of its own, each with its place."""

    def __init__(self, *lines: str):
        self.lines = lines
        super().__init__("\n".join(lines))


@dataclass
class Draft:
    """A recipe before validation: merged data, and the place where each key was last written."""

    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)

    def place(self, key: Sequence[str | int]) -> str:
        """`file:line` of the key, of the nearest mapping around it, or just the recipe's name."""
        for length in range(len(key), 0, -1):
            if (found := self.places.get(tuple(key[:length]))) is not None:
                return found
        return shown(self.path)

    def age(self, key: Sequence[str | int]) -> int:
        """0 for the key that was written last, larger for those before it."""
        order = list(reversed(self.places))
        return order.index(tuple(key)) if tuple(key) in self.places else len(order)

    def layer(self, data: dict[str, Any], places: dict[Key, str]) -> None:
        """Puts a later layer on top: mappings merge, everything else (lists too) replaces."""
        replaced = [key for key in places if not isinstance(value_at(data, key), dict)]
        stale = [old for old in self.places if any(old[: len(key)] == key for key in replaced)]
        for key in [*stale, *(key for key in places if key in self.places)]:
            self.places.pop(key, None)
        self.places |= places  # in the order of writing
        self.data = merged(self.data, data)


def dotted(key: Sequence[str | int]) -> str:
    return ".".join(map(str, key))


def value_at(data: Any, key: Sequence[str | int]) -> Any:
    for part in key:
        data = data[part]
    return data


def merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """`high` over `low`: mappings merge key by key, everything else replaces."""
    both = dict(low)
    for key, value in high.items():
        old = both.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(old, value)
        both[key] = value
    return both


def shown(path: Path) -> str:
    """A path as a reader would write it: relative if it lies below the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?`, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""


# ------------------------------------------------------------------------------------ one file


def read(path: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    """The mapping in one YAML file and the place of each of its keys.

    Only plain YAML is read: no tags (nothing is ever executed), anchors, merge keys or environment.
    """
    name = shown(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{name}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name}: not a text file (byte {error.start} is not UTF-8)") from None
    return deepcopy(parsed(text, name))


@lru_cache(maxsize=16)  # most chains of files end in the same ones
def parsed(text: str, name: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """`read` for the text of a file that is shown as `name`."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise RecipeError(syntax_error(name, text, error)) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{name}: {' '.join(str(error).split())}") from None
    if node is None:
        raise RecipeError(f"{name}: the file is empty; start with a line such as base: base.yaml")
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{name}:1: a recipe is a mapping, such as train: {{steps: 50}}")
    places: dict[Key, str] = {}
    problems = list(walk(node, (), name, places, set()))
    if problems:
        raise RecipeError(*problems)
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False), places  # type: ignore


def syntax_error(name: str, text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}: column {mark.column + 1}: " if mark else f"{name}: "
    said = ": ".join(part for part in (error.context, error.problem) if part)
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    hint = ""
    if re.search(r"[:\[,-]\s*[*&!%@`]", line):
        hint = '; a value that starts with one of * & ! % @ ` needs quotes, such as "M-M*"'
    elif "\t" in line:
        hint = "; indent with spaces, not with tabs"
    return f"{where}not valid YAML: {said}{hint}"


def walk(
    node: yaml.Node, key: Key, name: str, places: dict[Key, str], seen: set[int]
) -> Iterator[str]:
    """Records the place of every key below `node`; yields what plain data must not contain."""
    here = f"{name}:{node.start_mark.line + 1}: {dotted(key)}: "
    if node.tag not in PLAIN_TAGS:
        yield f"{here}the tag {node.tag} is not allowed: recipes are plain data"
        return
    if id(node) in seen:
        yield f"{here}anchors and aliases are not read; use base: or ${{section.key}}"
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        if problem := bad_interpolation(node.value):
            yield here + problem
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            places[(*key, i)] = f"{name}:{item.start_mark.line + 1}"
            yield from walk(item, (*key, i), name, places, seen)
    elif isinstance(node, yaml.MappingNode):
        for word, value in node.value:
            line = word.start_mark.line + 1
            if word.tag != "tag:yaml.org,2002:str":
                text = getattr(word, "value", "?")
                yield f"{name}:{line}: {dotted((*key, str(text)))}: a key must be a plain word"
                continue
            child = (*key, word.value)
            if child in places:
                first = places[child].rsplit(":", 1)[1]
                yield f"{name}:{line}: {dotted(child)}: written twice, first on line {first}"
                continue
            places[child] = f"{name}:{line}"
            yield from walk(value, child, name, places, seen)


def bad_interpolation(text: str) -> str | None:
    if "${" in INTERPOLATION.sub("", text):
        return (
            f"{text}: only ${{section.key}} is understood; "
            "a recipe reads no environment variables and calls no functions"
        )
    return None


# --------------------------------------------------------------------- finding and chaining files


def shipped() -> dict[str, Path]:
    """Every recipe inside the package: name without suffix -> file; base first, then by name."""
    folder = Path(str(files("nvfp4") / "recipes"))
    found = {p.relative_to(folder).with_suffix("").as_posix(): p for p in folder.rglob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: (item[0] != "base", item[0])))


def find(name: str, beside: Path | None = None) -> Path:
    """The file that `name` means: a path (or a run folder), else the name of a shipped recipe.

    Args:
        name: as the user wrote it, with or without .yaml.
        beside: folder that a relative `base:` starts from; the current folder if None.
    """
    known = shipped()
    path = (beside or Path()) / Path(name).expanduser()
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if path.is_file() and (path.suffix in (".yaml", ".yml") or "/" in name):
        return path
    if stem in known:
        return known[stem]
    if path.with_name(f"{path.name}.yaml").is_file():
        return path.with_name(f"{path.name}.yaml")
    if path.is_dir():
        raise RecipeError(f"{name}: a folder without recipe.yaml, not a run folder")
    inside = [full for full in known if full.rpartition("/")[2] == stem.rpartition("/")[2]]
    hint = f'; did you mean "{inside[0]}"?' if inside else did_you_mean(stem, known)
    raise RecipeError(
        f"recipe {name!r} not found{hint or '; no such file.'} Shipped recipes: {overview(known)}"
    )


def overview(names: Iterable[str]) -> str:
    """Names of recipes in one line, those of a folder counted: `base, tiny, ablations/ (34)`."""
    folders = Counter(name.rpartition("/")[0] for name in names)
    top = [name for name in names if "/" not in name]
    return ", ".join([*top, *(f"{name}/ ({n})" for name, n in folders.items() if name)])


def load_chain(path: Path) -> Draft:
    """Reads a recipe and, through `base:`, everything below it; later files win."""
    layers: list[tuple[Path, dict[str, Any], dict[Key, str]]] = []
    place = ""
    while True:
        real = path.resolve()
        if real in [seen.resolve() for seen, _, _ in layers]:
            names = " -> ".join(p.name for p, _, _ in [*layers, (path, 0, 0)])
            raise RecipeError(f"{place}: base: the recipes form a circle: {names}")
        data, places = read(path)
        layers.append((path, data, places))
        base = data.pop("base", None)
        place = places.pop(("base",), "")
        if base is None:
            break
        if not isinstance(base, str) or "${" in base:
            raise RecipeError(f"{place}: base: must be one file or recipe name, got {base!r}")
        try:
            path = find(base, beside=path.parent)
        except RecipeError as error:
            raise RecipeError(f"{place}: base: {error}") from None
    draft = Draft(layers[0][0])
    for _, data, places in reversed(layers):
        draft.layer(data, places)
    return draft
