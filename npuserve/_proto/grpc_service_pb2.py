"""Message classes of grpc_service.proto; `grpc_service_pb2.pyi` declares them for type checkers."""

from npuserve._proto.pool import symbols

globals().update(symbols("grpc_service.proto"))
