"""A model's files: converted, checked, exported, published."""
