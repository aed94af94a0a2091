"""For authors of models and backends, and for our own tests: servers, clock, simulator, kit."""
