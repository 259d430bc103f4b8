"""A package, so that its modules can share `portable_model`."""
