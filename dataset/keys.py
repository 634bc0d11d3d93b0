"""The keys of records that the user names: --prompt_key, --answer_key, --chosen_key, --rejected_key.

A key is the name of a field, or a path to one in nested objects: ``reward_model.ground_truth``. What a named
key does to a record is in formats.py.
"""

import json
from dataclasses import dataclass

from errors import InputError

SHOWN = 200  # characters of the keys that an error message lists


@dataclass(frozen=True)
class Keys:
    """The keys that the user named, "" for those that the form of a record decides."""

    prompt: str = ""
    answer: str = ""
    chosen: str = ""
    rejected: str = ""


BY_FORM = Keys()  # nothing is named


def value_at(record, keys, which):
    """The value under the key that ``keys`` names for ``which`` ("prompt", "answer", …). A key that the
    record has as it is comes before a path. InputError that names flag and keys found if there is none."""
    key = getattr(keys, which)
    if record.get(key) is not None:
        return record[key]
    value = record
    for name in key.split("."):
        if not isinstance(value, dict) or value.get(name) is None:
            raise InputError(f'no "{key[:80]}" (--{which}_key); {keys_found(value)}')
        value = value[name]
    return value


def keys_found(record):
    """The keys of a record (or of an object in it), for an error message."""
    if not isinstance(record, dict):
        return "what is there has no keys"
    names = ", ".join(json.dumps(name, ensure_ascii=False) for name in record) or "none"
    return f"keys found: {names[:SHOWN]}{'…' if len(names) > SHOWN else ''}"
