"""Figures of a trained model: held-out loss, its baseline, what each mechanism contributes, drafts that are kept."""
