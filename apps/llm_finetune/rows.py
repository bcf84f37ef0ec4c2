"""Read conversations from a JSON Lines file, and check each row.

The launch script imports this module with the system's Python, so the module imports no third-party package.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from samestep import ConfigError, untrusted

Messages = list[dict[str, str]]  # a message has the keys "role" (one of ROLES) and "content"

ROLES = ("system", "user", "assistant")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character; JSON can represent it, but UTF-8 cannot


def read_rows(path: Path) -> dict[int, Messages]:
    """Return the conversation of each row, by line number.

    A row is ``{"prompt": ..., "completion": ...}`` or ``{"messages": [{"role": ..., "content": ...}, ...]}``.

    Raises:
        ConfigError: the file cannot be read, has fewer than two rows, or has an invalid row.
    """
    try:
        content = untrusted.read_bytes(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}: name another --data-file") from None
    rows = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows[number] = conversation(json.loads(line.decode("utf-8-sig")))
        except UnicodeDecodeError:
            raise ConfigError(f"{path}:{number} is not UTF-8: save the file as UTF-8") from None
        except (json.JSONDecodeError, RecursionError):
            raise ConfigError(f"{path}:{number} is not JSON: write one object a line") from None
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
    if len(rows) < 2:
        raise ConfigError(f"{path} has {len(rows)} rows, and training needs two: name another --data-file")
    return rows


def conversation(row: Any) -> Messages:
    """Return the messages of one row.

    Raises:
        ValueError: the row is not an object, or lacks a prompt, a completion or valid messages.
    """
    if not isinstance(row, dict):
        raise ValueError("the row is not an object: write {...}")
    if "messages" in row:
        return checked_messages(row["messages"])
    for name in ("prompt", "completion"):
        if name not in row:
            raise ValueError(f"the row lacks {name}: give prompt and completion, or messages")
        if not isinstance(row[name], str):
            raise ValueError(f"{name} is not a text: put it in quotes")
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    return checked_messages(turns)


def checked_messages(messages: Any) -> Messages:
    """Return the role and the content of each message.

    Raises:
        ValueError: a message or the order of messages is invalid.
    """
    if not isinstance(messages, list):
        raise ValueError("messages is not a list: write [...]")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"a message has no known role: choose from {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError("a message has no content: give a text")
        if LONE_SURROGATE.search(message["content"]):
            raise ValueError("a text has half of a character: write the whole character")
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError("a completion is empty: leave the row out")
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError("the row does not end with the assistant's text: add it, or leave the row out")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
