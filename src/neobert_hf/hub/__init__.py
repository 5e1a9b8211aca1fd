"""Tools for a model's files: convert, check, export and publish them."""
