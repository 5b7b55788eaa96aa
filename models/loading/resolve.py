"""From what a user typed to a folder or a file on this machine."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path

from jaxserve.errors import ConfigError, ModelUnavailableError
from jaxserve.models.loading.aliases import ALIASES
from jaxserve.models.loading.hub import HUB_ID, fetch_from_hub
from jaxserve.models.loading.packages import fetch_alias
from jaxserve.models.loading.progress import Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """A model on this machine.

    Args:
        name: The alias, or the last part of what the user typed.
        path: A folder or a ``.gguf`` file.
        revision: The hub commit, for models from the hub.
    """

    name: str
    path: Path
    revision: str | None = None


def resolve(source: str, *, revision: str | None = None, progress: Progress | None = None) -> Resolved:
    """Finds a model, and fetches it where necessary.

    An alias comes first, then an existing folder or file, then a hub id; a folder of an alias's name is reached as ``./name``.

    Args:
        source: A folder, a ``.gguf`` file, a hub id ``organisation/name``, or an alias.
        revision: Hub revision.
        progress: Told about downloads.

    Raises:
        ModelUnavailableError: It names nothing that can be found, or fetching failed.
        ConfigError: A revision for something that is not on the hub.
    """
    alias, path = ALIASES.get(source), Path(source).expanduser()
    on_hub = alias is None and not path.exists() and HUB_ID.fullmatch(source) is not None and path.suffix != ".gguf"
    if revision is not None and not on_hub:
        raise ConfigError(f"model.revision is {revision!r}, but {source!r} is no hub id; revisions are for hub ids only")
    if alias is not None:
        return Resolved(name=alias.name, path=fetch_alias(alias, progress=progress))
    if on_hub:
        folder, commit = fetch_from_hub(source, revision)
        return Resolved(name=source.rpartition("/")[2], path=folder, revision=commit)
    if (source and path.is_dir()) or (path.is_file() and path.suffix == ".gguf"):
        absolute = Path(os.path.abspath(path))
        return Resolved(name=absolute.stem if path.suffix == ".gguf" else absolute.name, path=absolute)
    if path.is_file():
        raise ModelUnavailableError(f"{source} is a file but no .gguf; MODEL is a folder, a .gguf file, a hub id or an alias")
    raise ModelUnavailableError(_unknown(source))


def _unknown(source: str) -> str:
    nearest = difflib.get_close_matches(source.lower(), ALIASES, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"no model {source!r}: there is no such file or folder, and it is neither a hub id (organisation/name) nor an alias ({', '.join(ALIASES)}){hint}"
