"""MTEB with the instructions of the paper (section 5.2), and tasks on your own data."""
