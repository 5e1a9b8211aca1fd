"""Code that all training recipes share: the resumable trainer, checkpoints of a run, launching."""
