"""Media files to pixels and samples, with limits on hostile files."""
