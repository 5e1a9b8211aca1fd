"""Code that all other subpackages use: settings, text, files, fingerprints, results, reports."""
