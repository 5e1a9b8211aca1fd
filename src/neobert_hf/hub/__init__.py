"""Tools for a model's files: convert, check, compile, export and publish them."""
