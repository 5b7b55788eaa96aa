"""A row is added to the table of mesh axes before anything reads it, and an engine runs on a mesh of three axes. Run as a process of its own."""

from __future__ import annotations

import json

from jaxserve import mesh_axes


def main() -> None:
    mesh_axes.MESH_AXES = (*mesh_axes.MESH_AXES, mesh_axes.MeshAxis(name="expert", meaning="some of the experts"))
    import jax

    from jaxserve.config import ShardingConfig
    from jaxserve.mesh import EACH_DEVICE, EACH_RANK, make_layout
    from jaxserve.mesh_shape import MeshShape
    from tests.engine.test_mesh import SPECS, tokens_on

    layout = make_layout(MeshShape(2, 2, expert=2), ShardingConfig())
    array = jax.ShapeDtypeStruct((16, 3), "int32")
    print(json.dumps({
        "axes": list(layout.mesh.axis_names),
        "parts": [layout.sharding(spec).shard_shape(array.shape)[0] for spec in (EACH_RANK, EACH_DEVICE, layout.spec(("mlp", None)))],
        "model_axis": layout.model_axis("vocab"),
        "tokens": tokens_on(layout.shape, SPECS["8 KV heads"]),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
