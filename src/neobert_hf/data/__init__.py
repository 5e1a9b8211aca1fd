"""Data as a user has them: the one reader of tables."""
