"""Message classes of model_config.proto; `model_config_pb2.pyi` declares them for type checkers."""

from npuserve._proto.pool import symbols

globals().update(symbols("model_config.proto"))
