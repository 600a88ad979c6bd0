"""Turns what pydantic says about a recipe into lines a person can act on.

One mistake, one line: `file:line: section.key: what is wrong; allowed values; did you mean`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nvfp4.config_files import COMMAND_LINE, Draft, Key, did_you_mean, dotted

# pydantic's error types, in our words
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
DUE = {
    "model_type": "a mapping (key: value) is due here",
    "dataclass_type": "a mapping (key: value) is due here",
    "dict_type": "a mapping (key: value) is due here",
    "tuple_type": "a list is due here",
    "list_type": "a list is due here",
    "string_type": "a text is due here",
    "int_type": "a whole number is due here",
    "int_from_float": "a whole number is due here",
    "int_parsing_size": "a whole number below 2**63 is due here",
    "float_type": "a number is due here",
    "bool_type": "true or false is due here",
    "finite_number": "a finite number is due here",
}


class Schema:
    """The tree of known keys, read from a model's JSON schema."""

    def __init__(self, model: type[BaseModel]):
        self.root = model.model_json_schema()

    def _open(self, node: dict[str, Any]) -> dict[str, Any]:
        """Follows a reference, and the one non-null choice of `X | None`."""
        while True:
            choices = [c for c in node.get("anyOf", ()) if c.get("type") != "null"]
            if "$ref" in node:
                node = self.root["$defs"][node["$ref"].rsplit("/", 1)[1]]
            elif len(choices) == 1:
                node = choices[0]
            else:
                return node

    def node(self, key: Sequence[str | int]) -> dict[str, Any] | None:
        """The schema of one key, None where there is no such key."""
        node = self._open(self.root)
        for part in key:
            if "properties" in node:
                found = node["properties"].get(part)
            elif node.get("type") == "array" and isinstance(part, int):
                fixed = node.get("prefixItems", ())
                found = fixed[part] if part < len(fixed) else node.get("items")
            else:
                found = node.get("additionalProperties")
                found = {} if found is True else found  # a mapping with free keys
            if not isinstance(found, dict):
                return None
            node = self._open(found)
            if not node.keys() - {"title"}:
                return {}  # anything goes
        return node

    def keys(self, key: Sequence[str | int]) -> list[str]:
        """Known keys below a key."""
        return list((self.node(key) or {}).get("properties", ()))

    def walk(self, key: Key = ()) -> Iterator[Key]:
        """Every key of the schema, except what lies inside lists."""
        for name in self.keys(key):
            yield (*key, name)
            yield from self.walk((*key, name))

    def known(self, key: Sequence[str | int]) -> int:
        """How many leading parts of `key` exist."""
        return next((n for n in range(len(key)) if self.node(key[: n + 1]) is None), len(key))

    def why_unknown(self, key: Sequence[str | int]) -> str:
        """What is wrong with a key that does not exist, and which one would be right."""
        parent, word = key[:-1], str(key[-1])
        siblings = self.keys(parent)
        if not siblings:
            kind = (self.node(parent) or {}).get("type")
            index = "; its entries have numbers, such as .0" if kind == "array" else ""
            return f"unknown key; {dotted(parent)} has no keys of its own{index}"
        plain = word.replace("-", "_").lower()
        if plain in siblings:
            return f'unknown key; write "{plain}"'
        elsewhere = [dotted(k) for k in self.walk() if k[-1] == plain]
        if elsewhere:
            return f"unknown key here; it belongs to {' or '.join(elsewhere)}"
        if close := did_you_mean(plain, siblings):
            return f"unknown key{close}"
        near = difflib.get_close_matches(plain, {str(k[-1]) for k in self.walk()}, n=1, cutoff=0.75)
        if near:
            places = [dotted(k) for k in self.walk() if k[-1] == near[0]]
            return f"unknown key; did you mean {' or '.join(places)}?"
        where = f"in {dotted(parent)}" if parent else "at the top level"
        return f"unknown key; known {where}: {', '.join(siblings)}"


def quoted(value: Any) -> str:
    """A value as it stands in the recipe, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def reason(error: ErrorDetails, schema: Schema) -> str:
    """One pydantic error as a sentence without its place."""
    kind, key, value = error["type"], error["loc"], error["input"]
    context = error.get("ctx", {})
    got = f", got {quoted(value)}"
    if kind in UNKNOWN:
        return schema.why_unknown(key)
    if kind in MISSING:
        return "missing; write it here, or start from a recipe that has it with base:"
    if kind == "literal_error":
        allowed = re.findall(r"'([^']*)'", context.get("expected", ""))
        close = did_you_mean(value, allowed) if isinstance(value, str) else ""
        return f"{quoted(value)} is not allowed; allowed: {', '.join(allowed)}{close}"
    if kind == "string_type" and isinstance(value, int | float | bool):
        return f"{DUE[kind]}{got}; put it in quotes"
    if kind in DUE:
        keys = schema.keys(key)
        known = f"; its keys: {', '.join(keys)}" if keys else ""
        return f"{DUE[kind]}{got}{known}"
    if kind in ("too_long", "too_short"):
        due = context.get("max_length", context.get("min_length"))
        return f"{due} values are due here{got}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "recipe":
        return error["msg"]
    return f"{error['msg'].replace('Input should be', 'must be')}{got}"


def loose(data: Any, schema: Schema, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """What pydantic would convert in silence: yes for a number, "50" in quotes, 1 for true."""
    if isinstance(data, dict | list):
        for part, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from loose(value, schema, (*key, part))
        return
    kind = (schema.node(key) or {}).get("type", "")
    due = {"integer": "int_type", "number": "float_type", "boolean": "bool_type"}.get(kind)
    fits = isinstance(data, bool) if kind == "boolean" else not isinstance(data, bool | str)
    if due and not fits and data is not None:
        quotes = isinstance(data, str) and re.fullmatch(r"[-+.\deE]+|true|false", data)
        yield key, f"{DUE[due]}, got {quoted(data)}{'; remove the quotes' if quotes else ''}"


def keys_named(message: str) -> Iterator[tuple[Key, str]]:
    """Every word of a message that looks like a key, as a key and as it stands."""
    for word in re.findall(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])+(?![\w.\[=])", message):
        yield tuple(int(p) if p.isdigit() else p for p in re.split(r"[.\[\]]+", word) if p), word


def blamed(key: Key, message: str, draft: Draft) -> str:
    """The place of a mistake: where its key was written, or the override that upset that key."""
    named = [parts for parts, _ in keys_named(message)]
    inside = [place for written, place in draft.places.items() if written[: len(key)] == key]
    places = [*inside, *(draft.places.get(parts) for parts in named)]
    return COMMAND_LINE if COMMAND_LINE in places else draft.place(key)


def locate(key: Key, message: str, schema: Schema, draft: Draft) -> tuple[Key, str]:
    """Moves an error of a whole section to the key that its message names.

    `model: model.hidden_size is 0; it must ...` becomes `model.hidden_size: is 0; it must ...`.
    Of several keys the one that was written last is to blame. A word before = is advice.
    """
    message = message.removeprefix(f"{dotted(key)}: ")
    named: list[tuple[int, Key, str]] = []
    for parts, word in keys_named(message):
        for whole in (parts, (*key, *parts)):
            found = whole[: schema.known(whole)]
            if len(found) > len(key) and found[: len(key)] == key:
                named.append((draft.age(found), found, word))
    if named:
        _, found, word = min(named, key=lambda item: item[0])
        return found, re.sub(rf"^{re.escape(word)}:? ", "", message)
    bare = re.search(r"(\w+) is ", message)
    return ((*key, bare[1]) if bare and bare[1] in schema.keys(key) else key), message


def explain(draft: Draft, schema: Schema, error: ValidationError | None = None) -> list[str]:
    """Every mistake of a recipe, one line each: what pydantic found, and what it let pass."""
    found = list(loose(draft.data, schema))
    loose_keys = {key for key, _ in found}
    for item in error.errors(include_url=False) if error else ():
        key, message = tuple(item["loc"]), reason(item, schema)
        if item["type"] == "recipe" and loose_keys:
            continue  # it was found with values that were not meant
        if item["type"] in ("value_error", "recipe"):
            key, message = locate(key, message, schema, draft)
        if key not in loose_keys:
            found.append((key, message))
    places = [blamed(key, message, draft) for key, message in found]
    return [
        f"{place}: {dotted(key)}: {message}" if key else f"{place}: {message}"
        for place, (key, message) in zip(places, found, strict=True)
    ]
