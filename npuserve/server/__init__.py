"""Scheduling and the life of models. Knows no wire format."""
