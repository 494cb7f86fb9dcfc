"""YAML as written: no key is given twice, and PyYAML is needed only where a file is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

__all__ = ["YamlFileError", "read_yaml"]


_MERGE_TAG = "tag:yaml.org,2002:merge"


class YamlFileError(ValueError):
    """The file cannot be read, or is no YAML."""


def read_yaml(path: str | Path) -> object:
    """Return the document in a file.

    Raises:
        YamlFileError: With the reason.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    # ValueError: not UTF-8, or a date or a number that does not exist.
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise YamlFileError(str(error)) from error
    except RecursionError as error:
        raise YamlFileError("nested too deeply") from error


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would keep the last.

    And that merges (`<<: *defaults`) as YAML says, where PyYAML 6.0.4 compares keys by identity.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        given = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error("a key must be a word", key)
            if key.value in given:
                raise _error(f"{key.value}: given twice, keep one", key)
            given.add(key.value)
        node.value = _merged(node)
        return node


def _merged(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """Replace merge keys by what they stand for: own keys win, then those of earlier mappings."""
    own = [(key, value) for key, value in node.value if key.tag != _MERGE_TAG]
    given = {key.value for key, _ in own}
    inherited = []
    for source in _merge_sources(node):
        for key, value in source.value:
            if key.value not in given:
                given.add(key.value)
                inherited.append((key, value))
    return inherited + own


def _merge_sources(node: yaml.MappingNode) -> Iterator[yaml.MappingNode]:
    for key, value in node.value:
        if key.tag != _MERGE_TAG:
            continue
        for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(source, yaml.MappingNode) or source is node:
                raise _error("<<: expected another mapping, or a list of such", key)
            yield source


def _error(text: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, text, node.start_mark)
