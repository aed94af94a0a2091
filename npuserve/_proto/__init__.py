"""Protobuf messages of the protocol, apart from everybody else's.

`model_config_pb2`, `grpc_service_pb2` and `health_pb2` look like modules protoc wrote, but
their classes live in a descriptor pool of their own: tritonclient registers the same symbols
in protobuf's default pool, and one pool holds a symbol once.
"""
