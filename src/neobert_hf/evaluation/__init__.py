"""How good a model is: GLUE, MTEB, pseudo-perplexity against length."""
