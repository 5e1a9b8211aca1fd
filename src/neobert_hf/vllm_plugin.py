"""Tells the server vLLM which class serves which of our architectures; the entry point `vllm.general_plugins`."""

# The last two are the original's names.
ENCODERS = ("NeoBERTModel", "NeoBERTForMaskedLM", "NeoBERT", "NeoBERTLMHead")


def register() -> None:
    """Called in each of vLLM's processes, which have then imported this package: its config is known."""
    from vllm import ModelRegistry

    # By name: vLLM imports the classes when it needs them, which is after it has set up the GPU.
    for architecture in ENCODERS:
        ModelRegistry.register_model(architecture, "neobert_hf.vllm_neobert:NeoBERTEmbeddings")
    ModelRegistry.register_model("NeoBERTForSequenceClassification", "neobert_hf.vllm_neobert:NeoBERTClassifier")
