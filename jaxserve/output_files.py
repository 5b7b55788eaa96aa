"""Files that reports are written to. What is in them is their callers' business."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import ConfigError


def require_folder(option: str, file: Path | None) -> None:
    """To be called before long work whose results go to a file.

    Args:
        option: That named the file, for messages.
        file: ``None`` where none was named.

    Raises:
        ConfigError: It cannot be a file: its folder does not exist, or it is a folder itself.
    """
    if file is not None and file.is_dir():
        raise ConfigError(f"{option} is {file}, which is a folder; must be a file")
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{option} is {file}, but there is no folder {file.parent}; make it first")


def write_text(file: Path, text: str) -> None:
    """Writes a whole file.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
