"""Engines, decoding and the command line."""
