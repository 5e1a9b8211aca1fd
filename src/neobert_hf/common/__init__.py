"""What every room uses: settings, text, files, fingerprints, results, reports."""
