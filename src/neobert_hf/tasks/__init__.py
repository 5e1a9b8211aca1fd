"""Fine-tuning on your own tasks: text classification, token classification, question answering."""
