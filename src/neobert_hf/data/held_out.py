"""Held-out data: which documents are held out, and whether held-out rows are also trained on."""

from collections.abc import Hashable, Sequence, Set

from neobert_hf.common.fingerprints import texts_checksum


def is_held_out(text: str, share: float) -> bool:
    """Whether a document is among the held-out `share` of all documents.

    This depends on the text alone: equal documents are always on the same side, and adding or removing other documents
    changes nothing.
    """
    return int(texts_checksum(["0", text])[:15], 16) / 16**15 < share


def report_repeated(trained: Set[Hashable], held_out: Sequence[Hashable], what: str, advice: str = "") -> None:
    """Print how many held-out rows are also trained on: their scores are too good. Many published datasets have some.

    Args:
        trained: the rows to train on.
        held_out: the rows to score, in a form in which equal rows are equal.
        what: a name for the held-out rows, for the message.
        advice: what the user can do other than remove rows, for the message.

    Raises:
        ValueError: if all held-out rows are trained on.
    """
    repeated = sum(row in trained for row in held_out)
    found = f"{repeated:,} of {len(held_out):,} rows of {what} are also trained on"
    if repeated and repeated == len(held_out):
        raise ValueError(f"{found}: every model would look good. Remove them from one of the two{advice}.")
    if repeated:
        print(f"{found}: their scores say little.", flush=True)
