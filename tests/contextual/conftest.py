"""The encoder and the data of the tests of embeddings."""

from tests.embeddings.conftest import data, edit, encoder, helper, settings, tokenizer


__all__ = ["data", "edit", "encoder", "helper", "settings", "tokenizer"]
