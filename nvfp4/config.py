"""Loading recipes: `load_recipe("tiny_nvfp4", ["train.steps=50"])` is a valid Recipe.

A recipe is a YAML file; `base:` names the recipe it changes; `a.b=c` overrides win over all files.
Unknown keys, contradictions and precision rules that match nothing are errors with file and line.
The keys are in config_schema.py, the files are read by config_files.py, and config_errors.py finds
the words for what is wrong. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from nvfp4.config_errors import Schema, explain
from nvfp4.config_files import (
    COMMAND_LINE,
    Draft,
    Key,
    RecipeError,
    bad_interpolation,
    dotted,
    find,
    load_chain,
    merged,
    shipped,
    value_at,
)
from nvfp4.config_schema import Recipe

__all__ = ["Recipe", "RecipeError", "list_recipes", "load_recipe"]


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads, merges and validates a recipe.

    Args:
        name_or_path: a YAML file, a run folder, or the name of a shipped recipe.
        overrides: `section.key=value` strings, applied in order after all files; list entries by
            number (`data.train.0.path=corpus.txt`).

    Raises:
        RecipeError: all mistakes found, one line each: file:line, key, what would be right.
    """
    return finish(load_chain(find(str(name_or_path))), overrides)


def finish(draft: Draft, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a draft, with overrides on top; RecipeError as load_recipe."""
    schema = _schema()
    defaults = Recipe().model_dump(mode="json")
    problems = []
    for text in overrides:
        try:
            override(draft, text, schema, defaults)
        except RecipeError as error:
            problems += error.lines
    if problems:
        raise RecipeError(*problems)
    run = draft.data.get("run", {})
    if isinstance(run, dict):
        name, folder = run.get("name") or draft.path.stem, run.get("dir") or "runs/${run.name}"
        draft.data = {**draft.data, "run": {**run, "name": name, "dir": folder}}
    interpolate(draft, defaults)
    try:
        recipe = Recipe.model_validate(draft.data)
    except ValidationError as error:
        raise RecipeError(*explain(draft, schema, error)) from None
    if problems := explain(draft, schema):
        raise RecipeError(*problems)
    return recipe


@cache
def _schema() -> Schema:
    """The keys of a recipe; reading them off the classes takes as long as all the rest."""
    return Schema(Recipe)


def parse_override(text: str) -> tuple[Key, Any]:
    """`a.b.0.c=value` -> (("a", "b", 0, "c"), value); 3e-4 is a number."""
    path, equals, value = text.partition("=")
    bare = path.lstrip("-")
    if path.startswith("-"):
        right = f"{bare}={value or 'VALUE'}"
        raise RecipeError(f"{COMMAND_LINE}: {text}: write {right}")
    if not equals:
        right = f"{text}=VALUE" if "." in text else "section.key=VALUE"
        raise RecipeError(f"{COMMAND_LINE}: {text}: write {right}, without spaces")
    if set(value) == {"-"}:
        value = f'"{value}"'  # a pattern of MLP blocks; YAML would read --- as an empty document
    parts = path.split(".")
    if not all(parts) or path != path.strip():
        raise RecipeError(f"{COMMAND_LINE}: {text}: {path!r} is no key; write section.key=value")
    if problem := bad_interpolation(value):
        raise RecipeError(f"{COMMAND_LINE}: {path}: {problem}")
    try:
        loaded = OmegaConf.to_container(OmegaConf.from_dotlist([f"v={value}"]), resolve=False)["v"]  # type: ignore
    except (yaml.YAMLError, OmegaConfBaseException):
        raise RecipeError(
            f"{COMMAND_LINE}: {path}: {value} is not a YAML value; quote it: {path}='\"...\"'"
        ) from None
    return tuple(int(p) if p.isdigit() else p for p in parts), loaded


def interpolate(draft: Draft, defaults: dict[str, Any]) -> None:
    """Replaces every `${section.key}` by its value; keys not written take the schema's default."""
    config = OmegaConf.create(merged(defaults, draft.data))
    problems = []

    def resolved(value: Any, key: Key) -> Any:
        if isinstance(value, dict):
            return {k: resolved(v, (*key, k)) for k, v in value.items()}
        if isinstance(value, list):
            return [resolved(v, (*key, i)) for i, v in enumerate(value)]
        if not (isinstance(value, str) and "${" in value):
            return value
        try:
            got = OmegaConf.select(config, dotted(key), throw_on_missing=True)
            return OmegaConf.to_container(got, resolve=True) if OmegaConf.is_config(got) else got
        except OmegaConfBaseException as error:
            why = str(error).splitlines()[0]
            problems.append(f"{draft.place(key)}: {dotted(key)}: cannot resolve {value}: {why}")
            return value

    draft.data = resolved(draft.data, ())
    if problems:
        raise RecipeError(*problems)


def override(draft: Draft, text: str, schema: Schema, defaults: dict[str, Any]) -> None:
    """Puts one `a.b=c` on top of the draft; a path that does not exist is an error."""
    key, value = parse_override(text)
    known = schema.known(key)
    if known < len(key):
        unknown = key[: known + 1]
        raise RecipeError(f"{COMMAND_LINE}: {dotted(unknown)}: {schema.why_unknown(unknown)}")
    first = next((n for n, part in enumerate(key) if isinstance(part, int)), len(key))
    if first == len(key):
        draft.layer(nested(key, value), dict.fromkeys(keys_within(key, value), COMMAND_LINE))
        return
    # Files replace a list as a whole; an override changes one entry of a copy of it.
    name, entry = key[:first], key[first:]
    config = OmegaConf.create({"list": written(draft.data, defaults, name) or []})
    if entry[0] >= len(config["list"]):  # type: ignore[operator]
        has = f"{dotted(name)} has {len(config['list'])} entries, counted from 0"
        raise RecipeError(f"{COMMAND_LINE}: {dotted(key)}: {has}")
    OmegaConf.update(config, dotted(("list", *entry)), value, force_add=True)
    draft.data = merged(draft.data, nested(name, OmegaConf.to_container(config)["list"]))  # type: ignore
    for inner in keys_within(key, value):
        draft.places.pop(inner, None)
        draft.places[inner] = COMMAND_LINE


def nested(key: Key, value: Any) -> Any:
    """("a", "b"), 1 -> {"a": {"b": 1}}"""
    for part in reversed(key):
        value = {part: value}
    return value


def keys_within(key: Key, value: Any) -> Iterator[Key]:
    """The key of a value and the keys of everything inside it."""
    yield key
    if isinstance(value, dict):
        for part, inner in value.items():
            yield from keys_within((*key, part), inner)


def written(data: dict[str, Any], defaults: dict[str, Any], key: Sequence[str | int]) -> Any:
    """The value of a key in the files, else the schema's default."""
    for source in (data, defaults):
        try:
            return value_at(source, key)
        except (KeyError, TypeError):
            continue
    return None


def list_recipes() -> dict[str, str]:
    """Shipped recipes: name -> the purpose that its first comment line states."""
    return {
        name: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
        for name, path in shipped().items()
    }
