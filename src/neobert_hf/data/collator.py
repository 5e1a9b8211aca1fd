"""Masked language modelling batches in three layouts, with masks that depend only on seed and document."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    PreTrainedTokenizerBase,
)

from neobert_hf.data.documents import DocumentKey


BatchLayout = Literal["packed", "padded", "naive"]


@dataclass
class MLMCollator:
    """Masks documents and lays them out as a batch.

    The masking itself is that of Transformers' `DataCollatorForLanguageModeling`. Its `seed` gives each loader worker
    one generator, which is not checkpointed. Here every document starts its own generator from (seed, subset, epoch,
    row), so that masks are the same with any number of workers and processes, and after a resume.

    Args:
        tokenizer: gives the ids of [MASK], padding and the special tokens, which are never masked.
        mlm_probability: share of the ordinary tokens to predict: 0.2 (paper, section 3.3).
        mask_replace_prob, random_replace_prob: of those, the shares replaced by [MASK] (paper: all) and by a random
            token; the rest stays as it is. BERT: 0.8 and 0.1.
        layout: `packed`: documents end to end in one row without padding, kept apart by `cu_seq_lens`. `padded`: a
            row for each, padded to a multiple of 8. `naive`: rows of `max_length` tokens cut across documents that
            attend to each other, incomplete rows dropped: ablation M6 only, it costs 2.8% on GLUE (section 4).
        max_length: tokens in a row of the `naive` layout.
        seed: seed of the masks.
        row_multiple: rows of the `packed` layout are filled up to a multiple of this many tokens, with extra documents
            of padding.

    Returns:
        `input_ids` and `labels`, int64 (batch, length), labels -100 where nothing is to be predicted; with
        `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` (packed) or `attention_mask` (padded).
    """

    tokenizer: PreTrainedTokenizerBase
    mlm_probability: float = 0.2
    mask_replace_prob: float = 1.0
    random_replace_prob: float = 0.0
    layout: BatchLayout = "packed"
    max_length: int | None = None
    seed: int = 0
    row_multiple: int = 1

    def __post_init__(self):
        self.masking = DataCollatorForLanguageModeling(
            self.tokenizer,
            mlm_probability=self.mlm_probability,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
        )
        self.special_ids = torch.tensor(sorted(self.tokenizer.all_special_ids))
        self.pad_rows = DataCollatorForTokenClassification(self.tokenizer, pad_to_multiple_of=8)
        self.join_rows = DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True)

    def __call__(self, documents: list[dict]) -> dict[str, torch.Tensor]:
        """Make a batch of documents as `PreparedDocuments` gives them: `input_ids` (length,), int64, and `key`."""
        rows = [self.mask(document["input_ids"], document["key"]) for document in documents]
        if self.layout == "naive":
            rows = self._cut_anew(rows)
        # Without any mask, a batch would have no loss.
        if all((row["labels"] == -100).all() for row in rows):
            any(map(self._mask_one, rows))
        if self.layout == "padded":
            return dict(self.pad_rows(rows))
        if self.layout == "naive":
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        missing = -sum(len(row["input_ids"]) for row in rows) % self.row_multiple
        while missing:  # Add documents of padding, none longer than `max_length`.
            padding = torch.full((min(missing, self.max_length or missing),), self.tokenizer.pad_token_id)
            rows.append({"input_ids": padding, "labels": torch.full_like(padding, -100)})
            missing -= len(padding)
        return dict(self.join_rows(rows, return_tensors="pt"))

    def mask(self, ids: np.ndarray, key: DocumentKey) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels` (length,) of one document."""
        ids, (row, epoch, subset, share) = torch.from_numpy(ids), key
        special = torch.isin(ids, self.special_ids)
        seed = int(np.random.SeedSequence([self.seed, row, epoch, subset]).generate_state(1, np.uint64)[0] >> 1)
        self.masking.mlm_probability = self.mlm_probability if share is None else share
        self.masking.generator = torch.Generator().manual_seed(seed)
        masked, labels = self.masking.torch_mask_tokens(ids[None].clone(), special_tokens_mask=special[None])
        return {"input_ids": masked[0], "labels": labels[0]}

    def _mask_one(self, row: dict[str, torch.Tensor]) -> bool:
        """Mask the ordinary token in the middle, if there is one."""
        ids, labels = row["input_ids"], row["labels"]
        ordinary = (~torch.isin(ids, self.special_ids)).nonzero().flatten()
        if len(ordinary):
            place = ordinary[len(ordinary) // 2]
            labels[place] = ids[place]
            ids[place] = self.tokenizer.mask_token_id
        return len(ordinary) > 0

    def _cut_anew(self, documents: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """All documents end to end, cut into complete rows of `max_length` tokens; one row if there are fewer."""
        joined = {name: torch.cat([document[name] for document in documents]) for name in documents[0]}
        complete = max(1, len(joined["labels"]) // self.max_length)
        rows = {name: ids[: complete * self.max_length].view(complete, -1) for name, ids in joined.items()}
        return [{name: ids[number] for name, ids in rows.items()} for number in range(complete)]
