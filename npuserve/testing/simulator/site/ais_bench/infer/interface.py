"""`InferSession` of ais_bench on the NPU simulator."""

from npuserve.testing.simulator.ais_bench import InferSession

__all__ = ["InferSession"]
