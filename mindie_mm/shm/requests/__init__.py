"""Directory of a request, with its spooled media and the path file that records its blocks."""
