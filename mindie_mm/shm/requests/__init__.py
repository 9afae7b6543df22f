"""The directory of a request, which contains media files and the path file that records the request's blocks."""
