"""What runs models: the plug-in surface (base), the registry, and a module for each run-time."""
