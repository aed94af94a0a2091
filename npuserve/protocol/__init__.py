"""Wire formats: HTTP, gRPC and metrics text on one side, the core's values on the other."""
