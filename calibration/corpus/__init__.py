"""The text that the small model is trained on: sources, tidying, parts, and the held-out split."""
