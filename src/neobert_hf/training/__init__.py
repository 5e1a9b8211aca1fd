"""What every training recipe shares: the resumable trainer, checkpoints of a run, launching."""
