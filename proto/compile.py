"""Compiles the .proto files beside it into the descriptor set that flagos_backend ships.

Run after editing a .proto file: ``python proto/compile.py``. Needs grpcio-tools. A test compares the result with a
fresh compile.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

FOLDER = Path(__file__).resolve().parent
OUTPUT = FOLDER.parent / "flagos_backend" / "importer" / "schema.binpb"


def compile_schema() -> bytes:
    """The serialized FileDescriptorSet of xla.proto and flagos.proto, dependencies first."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "schema.binpb"
        status = protoc.main(["protoc", f"-I{FOLDER}", f"--descriptor_set_out={output}", "xla.proto", "flagos.proto"])
        if status:
            raise SystemExit(status)
        files = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    return files.SerializeToString(deterministic=True)


if __name__ == "__main__":
    OUTPUT.write_bytes(compile_schema())
    sys.stdout.write(f"{OUTPUT} written\n")
