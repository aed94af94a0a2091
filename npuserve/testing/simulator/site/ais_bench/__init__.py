"""Stand-in for ais_bench on the NPU simulator."""
