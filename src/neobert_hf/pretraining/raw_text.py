"""Raw text that a recipe tokenises itself, with a part of the documents held out."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from neobert_hf.common.settings import Count, Range
from neobert_hf.pretraining.arguments import BatchArguments
from neobert_hf.pretraining.preparing import PrepareArguments, prepare


@dataclass(kw_only=True)
class RawTextSettings(BatchArguments):
    """How raw text is prepared, and how it becomes batches."""

    held_out_share: Annotated[float, Range(above=0, below=1)] = field(
        default=0.05, metadata={"help": "share of the documents of a text that is never trained on"}
    )
    held_out_documents: Annotated[int, Range(2)] = field(
        default=200, metadata={"help": "how many of them are evaluated at most"}
    )
    num_proc: Count = field(default=os.cpu_count() or 1, metadata={"help": "processes that tokenise"})

    def prepare_part(
        self,
        part: Literal["train", "held_out"],
        folder: Path,
        source: str,
        column: str,
        tokenizer: str,
        max_length: int,
        limit: int | None = None,
        subset: str | None = None,
    ) -> str:
        """Tokenise the `train` or the `held_out` part of a text into windows, unless the folder already holds them.

        Args:
            limit: most documents of the part `train`; all if None.
            subset: the configuration of a Hub dataset that has several.

        Returns:
            The folder.
        """
        prepare(
            PrepareArguments(
                source=source,
                column=column,
                subset=subset,
                tokenizer=tokenizer,
                output_dir=str(folder),
                max_length=max_length,
                long_documents="split",
                num_proc=self.num_proc,
                held_out_share=self.held_out_share,
                part=part,
                max_documents=self.held_out_documents if part == "held_out" else limit,
            )
        )
        return str(folder)
