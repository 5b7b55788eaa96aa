"""Writes a model's parameters as Orbax arrays: stacked over layers, in the assembled layout, one array a parameter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import orbax.checkpoint as ocp

from jaxserve.errors import CheckpointError
from jaxserve.models.loading.orbax_layout import CHUNK_BYTES, WEIGHTS_FOLDER
from jaxserve.models.params import Params, build_params

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
    assert model.layers == "scan" and model.spec.kv_repeat == 1, "a checkpoint is stacked, with each KV head once"
    # Each layer has chunks of its own: both forms of the layers read one at a time.
    chunks = build_params(
        model.spec, model.layers, lambda _path, param, _layer: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if param.per_layer else ())
    )
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save((folder / WEIGHTS_FOLDER).absolute(), args=ocp.args.PyTreeSave(params, save_args=chunks))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: the weights cannot be written: {error}") from error
