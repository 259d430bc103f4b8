"""FP8 residual calibration and diagnostics of the residual stream."""
