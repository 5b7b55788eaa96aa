"""The committed gRPC code is what the .proto gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc

REPOSITORY = Path(__file__).parents[2]


def test_the_generated_files_are_up_to_date(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    spec = importlib.util.spec_from_file_location("gen_proto", REPOSITORY / "scripts" / "gen_proto.py")
    assert spec is not None
    assert spec.loader is not None
    gen_proto = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_proto)
    # Compilers of other versions word the files differently; what must be equal is what they describe.
    described = tmp_path / "set"
    assert protoc.main(["protoc", f"-I{REPOSITORY}", f"--descriptor_set_out={described}", gen_proto.PROTO]) == 0
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file
    for message in fresh.message_type:
        for field in (*message.field, *(field for nested in message.nested_type for field in nested.field)):
            field.ClearField("json_name")
    assert descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb) == fresh
    methods = [method.name for method in fresh.service[0].method]
    assert [name for name in vars(pb_grpc.InferenceServicer) if not name.startswith("_")] == methods
    gen_proto.generate(tmp_path)
    for name in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
        assert (tmp_path / gen_proto.PROTO.replace(".proto", name)).exists()
