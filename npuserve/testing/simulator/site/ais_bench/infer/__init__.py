"""Stand-in for ais_bench.infer on the NPU simulator."""
