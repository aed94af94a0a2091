"""The gRPC front end: codec, servicer and the transports under it."""
