"""MTEB with the instructions of the paper (section 5.2), and retrieval tasks of one's own."""
