"""Every residual design on one small backbone, trained alike and compared."""
