"""MTEB with the instructions of the paper (section 5.2), and tasks on your own data."""

from neobert_hf.evaluation.mteb.recipe import run_mteb


__all__ = ["run_mteb"]
