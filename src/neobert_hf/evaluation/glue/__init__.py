"""The GLUE protocol (paper, section 5.1 and appendix C), for any encoder and any task of your own."""

from neobert_hf.evaluation.glue.recipe import run_glue


__all__ = ["run_glue"]
