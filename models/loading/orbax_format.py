"""Writes a model's parameters as Orbax arrays: stacked over layers, in the assembled layout, one array a parameter, by the parameters' paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

from jaxserve.errors import CheckpointError
from jaxserve.models.loading.orbax_layout import CHUNK_BYTES, WEIGHTS_FOLDER
from jaxserve.models.params import Params, build_params, param_specs

if TYPE_CHECKING:
    from jaxserve.models.model import Model


def write_orbax(params: Params, model: Model, folder: Path) -> None:
    """Writes parameters in the ``scan`` form to ``folder/orbax``; the folder must exist and hold no such weights yet.

    Args:
        params: Each KV head once.
        model: Theirs.
        folder: Where to.

    Raises:
        CheckpointError: They cannot be written (no space, no permission).
    """
    assert model.layers == "scan" and model.spec.attention.kv_repeat == 1, "a checkpoint is stacked, with each KV head once"
    # Each layer has chunks of its own: both forms of the layers read one at a time.
    specs = param_specs(model.spec)
    chunks = {path: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if param.per_layer else ()) for path, param in specs.items()}
    paths = jax.tree.leaves(build_params(model.spec, model.layers, lambda path, _param, _layer: path))
    arrays = dict(zip(paths, jax.tree.leaves(params), strict=True))
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save((folder / WEIGHTS_FOLDER).absolute(), args=ocp.args.PyTreeSave(_nested(arrays), save_args=_nested(chunks)))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: the weights cannot be written: {error}") from error


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by dotted path as a tree of dicts, a level for each part of a path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split(".")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return tree
