"""How many functions and files one forward pass of a padded batch goes through, beside ModernBERT of Transformers.

    python benchmarks/walk.py

It counts the Python functions of the model's own files: calls, distinct functions, distinct files, and how often a call
enters another file than its caller's. A second pass is counted, since the first one also installs hooks.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import ModernBertConfig, ModernBertModel

from neobert_hf import NeoBERTConfig, NeoBERTModel


def walk(run: Callable[[], object], part_of_path: str) -> dict[str, int]:
    """Count the calls of functions in files whose path contains `part_of_path` while `run()` runs."""
    calls, entries, current = [], 0, []

    def profile(frame, event, argument):
        nonlocal entries
        file = frame.f_code.co_filename
        if part_of_path not in file:
            return
        if event == "call":
            calls.append((file, frame.f_code.co_qualname))
            entries += bool(current) and current[-1] != file
            current.append(file)
        elif event == "return" and current:
            current.pop()

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    files = {file for file, _ in calls}
    lines = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files)
    return {
        "calls": len(calls),
        "functions": len(set(calls)),
        "changes of file": entries,
        "files": len(files),
        "lines in them": lines,
    }


def main() -> None:
    sizes = dict(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96)
    ids, mask = torch.randint(5, 100, (4, 16)), (torch.arange(16) < torch.tensor([[16], [9], [4], [1]])).long()
    models = {
        ("NeoBERT", "neobert_hf"): NeoBERTModel(NeoBERTConfig(**sizes)).eval(),
        ("ModernBERT", "models/modernbert"): ModernBertModel(
            ModernBertConfig(**sizes, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
        ).eval(),
    }
    for (name, path), model in models.items():
        run = torch.no_grad()(partial(model, ids, attention_mask=mask))
        run()
        counts = walk(run, path)
        print(f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()))


if __name__ == "__main__":
    main()
