"""YAML with scripts as blocks of lines."""

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(documents: Sequence[Any]) -> str:
    """Return the documents as YAML text; keys stay in order."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10**6, explicit_start=len(documents) > 1)
