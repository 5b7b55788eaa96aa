"""Reads and writes a model's parameters as Orbax arrays: stacked over layers, in the assembled layout, one array a parameter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxserve.errors import CheckpointError
from jaxserve.models.loading.assemble import Placement, key_problems, num_values, refuse_problems
from jaxserve.models.loading.orbax_layout import WEIGHTS_FOLDER
from jaxserve.models.loading.progress import Progress
from jaxserve.models.params import Params, build_params, param_specs
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.models.model import Model


def write_orbax(params: Params, folder: Path) -> None:
    """Writes parameters in the ``scan`` form to ``folder/orbax``; the folder must exist and hold no such weights yet.

    Raises:
        CheckpointError: They cannot be written (no space, no permission).
    """
    assert isinstance(params["layers"], dict), "only stacked parameters are written"
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save((folder / WEIGHTS_FOLDER).absolute(), params)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: the weights cannot be written: {error}") from error


def read_orbax(folder: Path, model: Model, *, device: Placement = None, progress: Progress | None = None) -> Params:
    """Restores parameters, one after the other, straight to where they belong. For the ``unroll`` form each is cut on the host: one more of them in memory.

    Args:
        folder: Holds ``orbax/``.
        model: Says which parameters, in which dtype and form.
        device: A device, a sharding, or ``None`` for the default device.
        progress: Called with values done and values in all.

    Raises:
        CheckpointError: Parameters are missing, left over or misshapen (all are listed), or the data cannot be read.
    """
    path = (folder / WEIGHTS_FOLDER).absolute()
    declared = param_specs(model.spec)
    total = sum(num_values(param, model.spec) for param in declared.values())
    leaves: dict[str, Any] = {}
    done = 0
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            _check(path, checkpointer, model.spec)
            for name, param in declared.items():
                split = param.per_layer and model.layers == "unroll"
                leaves[name] = _restore(checkpointer, path, name, model.dtype, device, split=split)
                done += num_values(param, model.spec)
                if progress is not None:
                    progress("loading weights", done, total)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read as an Orbax checkpoint: {error}") from error
    return build_params(model.spec, model.layers, lambda name, _, layer: leaves[name] if layer is None else leaves[name][layer])


def _restore(checkpointer: ocp.PyTreeCheckpointer, path: Path, name: str, dtype: Any, device: Placement, *, split: bool) -> Any:
    """One parameter: an array in place, or a list of one array a layer."""
    if split:
        stacked = _restore_leaf(checkpointer, path, name, ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype))
        return [jax.device_put(layer.copy(), device).block_until_ready() for layer in stacked]
    sharding = device if isinstance(device, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
    return _restore_leaf(checkpointer, path, name, ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype))


def _restore_leaf(checkpointer: ocp.PyTreeCheckpointer, path: Path, name: str, how: ocp.RestoreArgs) -> Any:
    def nested(value: Any) -> dict[str, Any]:
        for part in reversed(name.split(".")):
            value = {part: value}
        return value

    tree = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=nested(0), restore_args=nested(how), partial_restore=True))
    for part in name.split("."):
        tree = tree[part]
    return tree


def _check(path: Path, checkpointer: ocp.PyTreeCheckpointer, spec: ModelSpec) -> None:
    metadata = checkpointer.metadata(path).item_metadata
    if metadata is None:
        raise CheckpointError(f"{path}: its metadata is missing; the checkpoint was not written to its end")
    found = {".".join(str(key.key) for key in keys): tuple(leaf.shape) for keys, leaf in jax.tree_util.tree_leaves_with_path(metadata.tree)}
    expected = {name: (spec.num_layers, *param.shape) if param.per_layer else param.shape for name, param in param_specs(spec).items()}
    refuse_problems(path, key_problems(expected, found))
