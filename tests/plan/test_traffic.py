"""Collectives and copies of weights, counted from program text: written by hand for what compilers print, and from real small programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.plan.hlo import parse_program, shape_bytes
from jaxserve.plan.traffic import measure_traffic

MESH = {"data": 2, "model": 4}

LOOP = """HloModule jit_step, is_scheduled=true

FileNames
1 "x.py"

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[]{:T(256)} parameter(0)
  %b = bf16[]{:T(256)} parameter(1)
  ROOT %sum = bf16[]{:T(256)} add(%a, %b)
}

%slice_layer (p0: bf16[6,64,64], p1: s32[]) -> bf16[64,64] {
  %p0 = bf16[6,64,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %dynamic-slice.1 = bf16[1,64,64]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %bitcast.1 = bf16[64,64]{1,0} bitcast(%dynamic-slice.1)
}

%body (arg: (s32[], bf16[32,64], bf16[6,64,64])) -> (s32[], bf16[32,64], bf16[6,64,64]) {
  %arg = (s32[]{:T(128)}, bf16[32,64]{1,0}, /*index=2*/bf16[6,64,64]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = bf16[32,64]{1,0} get-tuple-element(%arg), index=1
  %w = bf16[6,64,64]{2,1,0} get-tuple-element(%arg), index=2
  %layer = bf16[64,64]{1,0} fusion(%w, %i), kind=kLoop, calls=%slice_layer
  %dot = bf16[32,64]{1,0} dot(%x, %layer), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-reduce-start.1 = (bf16[32,64]{1,0}, bf16[32,64]{1,0}) all-reduce-start(%dot), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  %all-reduce-done.1 = bf16[32,64]{1,0} all-reduce-done(%all-reduce-start.1)
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %out = (s32[]{:T(128)}, bf16[32,64]{1,0}, bf16[6,64,64]{2,1,0}) tuple(%next, %all-reduce-done.1, %w)
}

%condition (arg: (s32[], bf16[32,64], bf16[6,64,64])) -> pred[] {
  %arg.2 = (s32[]{:T(128)}, bf16[32,64]{1,0}, bf16[6,64,64]{2,1,0}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%arg.2), index=0
  %limit = s32[]{:T(128)} constant(6)
  ROOT %less = pred[]{:T(512)} compare(%i.2, %limit), direction=LT
}

%small (v: bf16[32,64]) -> bf16[32] {
  %v = bf16[32,64]{1,0} parameter(0)
  ROOT %all-reduce.5 = bf16[32,64]{1,0} all-reduce(%v), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
}

%large (v: bf16[32,64]) -> bf16[32] {
  %v.2 = bf16[32,64]{1,0} parameter(0)
  %all-gather.9 = bf16[256,64]{1,0} all-gather(%v.2), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %slice.9 = bf16[32,64]{1,0} slice(%all-gather.9), slice={[0:32], [0:64]}
}

ENTRY %main (p: bf16[6,64,64], q: bf16[32,64], k: s32[]) -> bf16[32,64] {
  %p = bf16[6,64,64]{2,1,0} parameter(0), metadata={op_name="params['layers']['down']"}
  %q = bf16[32,64]{1,0} parameter(1), metadata={op_name="x"}
  %k = s32[] parameter(2), metadata={op_name="k"}
  %start = s32[]{:T(128)} constant(0)
  %start.copy = s32[]{:T(128)} copy(%start)
  %init = (s32[]{:T(128)}, bf16[32,64]{1,0}, bf16[6,64,64]{2,1,0}) tuple(%start.copy, %q, %p)
  %while.1 = (s32[]{:T(128)}, bf16[32,64]{1,0}, bf16[6,64,64]{2,1,0}) while(%init), condition=%condition, body=%body
  %y = bf16[32,64]{1,0} get-tuple-element(%while.1), index=1
  %gathered = bf16[32,256]{1,0} all-gather(%y), replica_groups=mesh['data'=2,'model'=4] {'model'}, dimensions={1}
  %in-core = bf16[6,64,64]{2,1,0:T(8,128)S(1)} copy(%p)
  ROOT %result = bf16[32,64]{1,0} conditional(%k, %y, %y), branch_computations={%small, %large}
}
"""


def summary(collectives):
    return {(item.kind, item.axis): (item.count, item.bytes) for item in collectives}


def test_a_scanned_program_counts_its_loop_and_the_larger_branch_apart():
    traffic = measure_traffic(LOOP, MESH)
    row = 32 * 64 * 2
    assert summary(traffic.collectives) == {("all-reduce", "model"): (6, 6 * row), ("all-gather", "model"): (1, 4 * row)}
    assert summary(traffic.sometimes) == {("all-gather", "data+model"): (1, 8 * row)}
    # Each turn copies one layer out of the stack; a copy into a core's own memory is a read, not a copy.
    assert traffic.weight_copy_bytes == 6 * 64 * 64 * 2
    assert traffic.num_unknown_loops == 0


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    traffic = measure_traffic(LOOP.replace("constant(6)", "parameter(1)").replace("direction=LT", "direction=NE"), MESH)
    assert summary(traffic.collectives)["all-reduce", "model"][0] == 1
    assert traffic.num_unknown_loops == 1


def test_a_known_trip_count_is_taken():
    named = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"80"}}')
    assert summary(measure_traffic(named, MESH).collectives)["all-reduce", "model"][0] == 80


def test_calls_to_another_core_count_once_whenever_they_get_their_arguments():
    """As on tpu7x, whose sparse cores reduce and re-tile: an asynchronous call has its arguments at its start or at its update."""
    program = """
%reduce (x: bf16[32,64]) -> bf16[32,64] {
  %x = bf16[32,64]{1,0} parameter(0)
  ROOT %all-reduce.1 = bf16[32,64]{1,0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
}

%tile (w: bf16[64,64]) -> bf16[64,64] {
  %w = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %copy.1 = bf16[64,64]{1,0:T(16,128)(2,1)} copy(%w)
}

%format (v: bf16[64,64]) -> bf16[64,64] {
  %v = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(0)
  %inner-start = ((bf16[64,64]{1,0}), bf16[64,64]{1,0}, u32[]) call-start(%v), async_execution_thread="sparsecore", to_apply=%tile
  ROOT %inner-done = bf16[64,64]{1,0} call-done(%inner-start)
}

ENTRY %main (p: bf16[64,64], q: bf16[32,64]) -> bf16[32,64] {
  %p = bf16[64,64]{1,0} parameter(0), metadata={op_name="params['head']"}
  %q = bf16[32,64]{1,0} parameter(1), metadata={op_name="x"}
  %reduce-start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%reduce
  %format-start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%format
  %reduce-update = ((bf16[32,64]{1,0}), bf16[32,64]{1,0}) call-update(%reduce-start, %q)
  %format-update = ((bf16[64,64]{1,0}), bf16[64,64]{1,0}) call-update(%format-start, %p)
  %format-done = bf16[64,64]{1,0} call-done(%format-update)
  ROOT %reduce-done = bf16[32,64]{1,0} call-done(%reduce-update)
}
"""
    traffic = measure_traffic(program, MESH)
    assert summary(traffic.collectives) == {("all-reduce", "model"): (1, 32 * 64 * 2)}
    assert traffic.weight_copy_bytes == 64 * 64 * 2


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "model"),
        ("{{0,4},{1,5},{2,6},{3,7}}", "data"),
        ("{{0,1,2,3,4,5,6,7}}", "data+model"),
        ("{{0,1},{2,3},{4,5},{6,7}}", "other"),
        ("[2,4]<=[8]", "model"),
        ("[4,2]<=[2,4]T(1,0)", "data"),
        ("[1,8]<=[8]", "data+model"),
        ("[4,2]<=[8]", "other"),
        ("mesh['data'=2,'model'=4] {'data'}", "data"),
        ("mesh['data'=2,'model'=4] {'data','model'}", "data+model"),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", "model"),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_2'}", "data"),
    ],
)
def test_every_form_of_groups_names_its_axis(groups, axis):
    program = f"""
ENTRY %main (p: f32[16]) -> f32[16] {{
  %p = f32[16]{{0}} parameter(0), metadata={{op_name="x"}}
  ROOT %all-reduce.1 = f32[16]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add
}}
"""
    assert list(summary(measure_traffic(program, MESH).collectives)) == [("all-reduce", axis)]


def test_groups_of_one_device_are_no_collectives_and_permutes_have_an_axis():
    program = """
ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0), metadata={op_name="x"}
  %alone = f32[16]{0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add
  ROOT %moved = f32[16]{0} collective-permute(%alone), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}
"""
    traffic = measure_traffic(program, MESH)
    assert summary(traffic.collectives) == {("collective-permute", "model"): (1, 64)}
    assert traffic.collectives[0].group_size == 4


def test_shapes():
    assert shape_bytes("(bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=1*/f32[], f8e4m3fn[5]{0}, token[])") == 12 + 4 + 5
    with pytest.raises(ValueError, match="no entry"):
        parse_program("HloModule nothing\n")


def test_a_compiled_scan_agrees_with_a_hand_count():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def layers(params, x):
        def body(x, weights):
            up, down = weights
            y = jax.nn.relu(x @ up) @ down
            return jax.lax.with_sharding_constraint(x + y, NamedSharding(mesh, PartitionSpec("data"))), None

        return jax.lax.scan(body, x, params)[0]

    params = (array((5, 64, 256), None, None, "model"), array((5, 256, 64), None, "model"))
    compiled = jax.jit(layers).lower(params, array((16, 64), "data")).compile()
    traffic = measure_traffic(compiled.as_text(), MESH)
    assert summary(traffic.collectives) == {("all-reduce", "model"): (5, 5 * 8 * 64 * 4)}
    # XLA:CPU copies each layer out of the stack: two matrices of 64 x 64 a device.
    assert traffic.weight_copy_bytes in (0, 5 * 2 * 64 * 64 * 4)
