"""Fine-tuning on one's own tasks: classes of texts, tags of words, answers in texts."""
