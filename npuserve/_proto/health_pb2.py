"""Message classes of health.proto; `health_pb2.pyi` declares them for type checkers."""

from npuserve._proto.pool import symbols

globals().update(symbols("health.proto"))
