"""The HTTP front end: KServe v2 with Triton's extensions."""
