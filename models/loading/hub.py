"""Fetches a model from the Hugging Face hub, weights only as safetensors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelUnavailableError

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
ALLOWED_FILES = ("*.safetensors", "*.json", "tokenizer.model", "merges.txt", "*.jinja")
"""No pickles, no code."""
CONFIG_FILES = ("config.json", "generation_config.json")
"""What says what a model is."""
IGNORED_FILES = ("consolidated*",)
"""The same weights once more under their authors' own names, as in Mistral's repositories."""


def fetch_from_hub(repo_id: str, revision: str | None, *, files: Sequence[str] = ALLOWED_FILES) -> tuple[Path, str]:
    """Downloads what is not in the hub's cache yet, with the hub's own progress bars on stderr.

    Args:
        repo_id: ``organisation/name``.
        revision: Branch, tag or commit; ``None`` is the main branch.
        files: Patterns of the files that are wanted.

    Returns:
        The folder, and the commit that it holds.

    Raises:
        ModelUnavailableError: No such model or revision, no access, no network, no space.
    """
    from huggingface_hub import snapshot_download  # half a second, and only hub ids need it
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    patterns = {"allow_patterns": list(files), "ignore_patterns": list(IGNORED_FILES)}
    options: dict[str, Any] = {"revision": revision, **patterns, "endpoint": os.environ.get("HF_ENDPOINT") or None}
    what = f"{repo_id} (revision {revision})" if revision else repo_id
    try:
        folder = Path(snapshot_download(repo_id, **options))
    except GatedRepoError as error:
        raise ModelUnavailableError(f"{what} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelUnavailableError(f"{repo_id} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailableError(f"{repo_id} is not on the hub, or is private and HF_TOKEN is not set") from error
    except LocalEntryNotFoundError as error:
        raise ModelUnavailableError(f"{what} is not in the hub's cache and the hub cannot be reached: {error}") from error
    except HfHubHTTPError as error:
        raise ModelUnavailableError(f"the hub refused {what}: {error}") from error
    except OSError as error:
        raise ModelUnavailableError(f"{what} could not be fetched: {error}") from error
    except Exception as error:
        # The hub's client lets its HTTP library's own errors through, of whichever library it uses.
        raise ModelUnavailableError(f"{what} could not be fetched: {type(error).__name__}: {error}") from error
    return folder, folder.name
