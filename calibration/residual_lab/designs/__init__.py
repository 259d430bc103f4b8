"""The residual designs: one file each."""
