"""Makes the Python files of the gRPC API from its .proto. The result is committed; a test compares it with the .proto.

Run it with the oldest grpcio-tools that pyproject.toml allows: generated code refuses a grpcio or protobuf older than the one that made it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

REPOSITORY = Path(__file__).resolve().parent.parent
PROTO = "jaxserve/serving/grpc_api/jaxserve_v1.proto"
"""Named from the repository's root, through the link: the generated modules import each other by the only names they have."""


def generate(out: Path) -> None:
    """Writes ``jaxserve_v1_pb2.py``, its type stub and ``jaxserve_v1_pb2_grpc.py`` below ``out``, at the path of ``PROTO``.

    Raises:
        RuntimeError: protoc found the .proto wrong; it has printed why.
    """
    arguments = ["protoc", f"-I{REPOSITORY}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}", PROTO]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed on {PROTO}")


if __name__ == "__main__":
    generate(REPOSITORY)
    print(f"generated from {PROTO}", file=sys.stderr)
