"""Execution of Python models: worker processes, threads, and the helper module they import."""
